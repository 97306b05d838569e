"""Losses of a training that runs already on a real cluster, against those of a second job.

-> support/jobs/training.py: both jobs. test_attach.py: runs without a second job.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from support.hand.client import directory
from support.hand.in_pods import PYTHON, mounts
from support.jobs.training import TrainingJob, second_training, training
from support.nodes import pods
from support.waiting import wait_until

from chaoskit import LogPatterns
from chaoskit.attach.hands.hand_container import HandImage
from chaoskit.attach.run.attach import attach
from chaoskit.errors import BadInput
from chaoskit.experiment.directory import TWIN, judge_directory
from chaoskit.experiment.judge.command_judge import LOSSES
from chaoskit.experiment.twin.command_twin import CommandTwin
from chaoskit.faults import Kill
from chaoskit.journal import read_events
from chaoskit.runlog.outcome import Outcome
from chaoskit.vocabulary import Event, Verdict

pytestmark = [
    pytest.mark.skipif(bool(pods.unavailable()), reason=f"Kubernetes: {pods.unavailable()}"),
]
NODES = 2
WATCH = LogPatterns(step=r"step (\d+)", loss=r"loss ([\d.eE+-]+)")
KILL = Kill(rank=1, after_s=1.0)
#: Length of a step of the second job, which has to catch up.
FAST_STEP_S = 0.005
#: Checkpoints are stored every fifth step, and the step under way is lost, too.
LOST_STEPS = 10
IMAGE = HandImage(pods.IMAGE, (PYTHON, "-S", "-m", "hand"), str(directory()), tuple(mounts()))


@pytest.fixture(autouse=True)
def kubeconfig(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", os.environ[pods.VARIABLE_OF_TESTS])


@pytest.fixture(scope="module")
def stateful() -> Iterator[TrainingJob]:
    with training("statefulset", nodes=NODES, step_s=0.2) as job:
        yield job


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Files of a user: the patterns of the log, and the image of hands."""
    watch, image = tmp_path / "watch.yaml", tmp_path / "hand.json"
    watch.write_text("step: 'step (\\d+)'\nloss: 'loss ([\\d.eE+-]+)'\n")
    settings = {"name": IMAGE.name, "command": IMAGE.command, "mounts": IMAGE.mounts}
    settings["working_directory"] = IMAGE.working_directory
    image.write_bytes(msgspec.json.encode(settings))
    return [str(watch), str(image)]


def written(directory: Path, manifests: list[dict[str, Any]]) -> Path:
    """Write manifests to a file, and return its path."""
    file = directory / "twin.yaml"
    file.write_text(yaml.safe_dump_all(manifests))
    return file


def compared(job: TrainingJob, twin: Path, directory: Path, **settings: Any) -> Outcome:
    """Kill a rank of a training, and return the outcome with the check of losses."""
    settings = {"observe_s": 1.0, "deadline_s": 200.0, "twin_deadline_s": 150.0} | settings
    return attach(
        job.reference,
        namespace=job.namespace,
        watch=WATCH,
        faults=[KILL],
        image=IMAGE,
        directory=directory,
        max_lost_steps=LOST_STEPS,
        twin=twin,
        **settings,
    )


def losses_of(outcome: Outcome) -> tuple[Verdict, str]:
    """Return verdict and detail of the check of losses."""
    (check,) = [check for check in outcome.checks if check.name == LOSSES]
    return check.verdict, check.detail


def left(second: TrainingJob) -> list[str]:
    """Return the objects of the namespace that belong to a second job."""
    return [name for name in pods.everything() if second.name in name]


def test_losses_equal_those_of_a_second_job(stateful: TrainingJob, tmp_path: Path) -> None:
    """The second job runs after the run, and is deleted then."""
    with second_training(stateful, nodes=NODES, step_s=FAST_STEP_S) as (second, manifests):
        outcome = compared(stateful, written(tmp_path, manifests), tmp_path / "runs")
        assert outcome.verdict is Verdict.PASSED, outcome.reasons
        verdict, detail = losses_of(outcome)
        assert verdict is Verdict.PASSED
        print(f"losses: {detail}; second job: {second.newest_step()} steps")
        assert left(second) == []
        (ended,) = read_events(Path(outcome.directory) / "journal", Event.RUN_ENDED)
        assert second.recorded_steps()[0].at_ns > ended.t_ns
        again = judge_directory(outcome.directory)
        assert (again.verdict, again.checks) == (outcome.verdict, outcome.checks)


@pytest.mark.slow
def test_tests_of_a_session_use_a_second_job_again(
    stateful: TrainingJob, tmp_path: Path, files: list[str]
) -> None:
    steps = stateful.newest_step() + 1500
    arguments = f"faults=[{KILL}], max_lost_steps={LOST_STEPS}, observe_s=1.0, twin_steps={steps}"
    tests = [f"def test_{name}(chaos):\n    chaos.attach({arguments})\n" for name in ("a", "b")]
    (tmp_path / "test_llama.py").write_text("\n\n".join(["from faults import *", *tests]))
    with second_training(stateful, nodes=NODES, step_s=FAST_STEP_S) as (_, manifests):
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_llama.py"]
        command += ["--chaos-attach", stateful.reference, "--chaos-namespace", stateful.namespace]
        command += ["--chaos-watch", files[0], "--chaos-hand-image", files[1]]
        command += ["--chaos-twin", str(written(tmp_path, manifests)), "--chaos-report", "report"]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
    results = [
        msgspec.json.decode(file.read_bytes(), type=CommandTwin)
        for file in (tmp_path / "report" / "runs").glob(f"*/{TWIN}")
    ]
    assert len(results) == 2
    assert results[0].run_id == results[1].run_id


@pytest.mark.slow
def test_a_second_job_with_another_seed_has_other_losses(
    stateful: TrainingJob, tmp_path: Path
) -> None:
    with second_training(stateful, nodes=NODES, step_s=FAST_STEP_S, seed=1) as (second, manifests):
        outcome = compared(stateful, written(tmp_path, manifests), tmp_path / "runs")
        assert outcome.verdict is Verdict.FAILED
        verdict, detail = losses_of(outcome)
        assert verdict is Verdict.FAILED
        assert detail.startswith("step ")
        assert " instead of " in detail
        assert left(second) == []


@pytest.mark.slow
def test_a_second_job_that_crashes_proves_nothing(stateful: TrainingJob, tmp_path: Path) -> None:
    with second_training(stateful, nodes=NODES, step_s=FAST_STEP_S) as (second, manifests):
        (container,) = manifests[-1]["spec"]["template"]["spec"]["containers"]
        container["command"] = ["/bin/sh", "-c", "echo no data; exit 7"]
        outcome = compared(stateful, written(tmp_path, manifests), tmp_path / "runs")
        assert outcome.verdict is Verdict.UNKNOWN, outcome.reasons
        verdict, detail = losses_of(outcome)
        assert verdict is Verdict.UNKNOWN
        assert "the last time with exit code 7" in detail
        assert {check.verdict for check in outcome.checks if check.name != LOSSES} == {
            Verdict.PASSED
        }
        logs = (Path(outcome.directory) / "twin" / "log").glob("*.log")
        assert "no data" in "".join(log.read_text() for log in logs)
        assert left(second) == []


@pytest.mark.slow
def test_a_second_job_that_does_not_come_so_far_in_time(
    stateful: TrainingJob, tmp_path: Path
) -> None:
    with second_training(stateful, nodes=NODES, step_s=FAST_STEP_S) as (second, manifests):
        file = written(tmp_path, manifests)
        outcome = compared(stateful, file, tmp_path / "runs", twin_deadline_s=1.0)
        verdict, detail = losses_of(outcome)
        assert verdict is Verdict.UNKNOWN
        assert "it was ended after 1 s (twin_deadline_s); its log shows no step" in detail
        assert left(second) == []


@pytest.mark.slow
def test_a_killed_client_leaves_no_second_job(
    stateful: TrainingJob, tmp_path: Path, files: list[str]
) -> None:
    with second_training(stateful, nodes=NODES, step_s=FAST_STEP_S) as (second, manifests):
        file = written(tmp_path, manifests)
        command = [sys.executable, "-m", "chaoskit", "attach", stateful.reference, "--yes"]
        command += ["--namespace", stateful.namespace, "--watch", files[0], "--fault", str(KILL)]
        command += ["--hand-image", files[1], "--report", str(tmp_path / "report")]
        command += ["--twin", str(file), "--observe-s", "1"]
        quiet = subprocess.DEVNULL
        with subprocess.Popen(command, stdout=quiet, stderr=quiet) as client:
            wait_until(lambda: left(second), "the second job", limit_s=120, poll_s=0.1)
            client.kill()
        wait_until(lambda: not left(second), "the end of the second job", poll_s=0.1)


def test_what_cannot_be_made_is_refused_before(stateful: TrainingJob, tmp_path: Path) -> None:
    """The server answers: an object has the name already, and a field does not exist."""
    with second_training(stateful, nodes=NODES, step_s=FAST_STEP_S) as (second, manifests):
        service, stateful_set = manifests
        taken = {**service, "metadata": {"name": stateful.name}}
        misspelt = {**stateful_set, "spec": {**stateful_set["spec"], "replikas": 2}}
        hands = [pod["spec"].get("ephemeralContainers") for pod in pods.pods().values()]
        for twin, part in (
            ([taken, stateful_set], f"delete Service {stateful.name}, or write another name"),
            ([service, misspelt], f'mend StatefulSet {second.name}: .*"spec.replikas"'),
        ):
            with pytest.raises(BadInput, match=part) as refused:
                compared(stateful, written(tmp_path, twin), tmp_path / "runs")
            assert refused.value.field == "twin"
        assert left(second) == []
        after = [pod["spec"].get("ephemeralContainers") for pod in pods.pods().values()]
        assert after == hands
