"""Faults in trainings that run already on a real cluster, from the reference of a job to the verdict.

-> support/jobs/training.py: the trainings, and a clock beside the cluster.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.attach.runs import (
    FAULTS,
    assert_recovered,
    broken,
    client_command,
    records,
    user_files,
)
from support.jobs.training import TrainingJob, training
from support.nodes import pods
from support.waiting import wait_until

from chaoskit.attach.fault_preview import FaultPreview
from chaoskit.attach.run.attach import AttachLimits
from chaoskit.attach.run.lives import LINGER_S
from chaoskit.errors import BadInput
from chaoskit.experiment.directory import judge_directory
from chaoskit.faults import DeletePod, Hang, Kill, LoseNode, Straggle
from chaoskit.faults.base import Fault
from chaoskit.journal import read_events
from chaoskit.vocabulary import Event, Verdict

pytestmark = pytest.mark.skipif(
    bool(pods.unavailable()), reason=f"Kubernetes: {pods.unavailable()}"
)


@pytest.fixture(autouse=True)
def kubeconfig(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", os.environ[pods.VARIABLE_OF_TESTS])


@pytest.fixture(scope="module")
def stateful() -> Iterator[TrainingJob]:
    """A StatefulSet of three pods with torchrun, for all faults that it survives."""
    with training("statefulset") as job:
        yield job


def test_a_killed_rank_comes_back(stateful: TrainingJob, tmp_path: Path) -> None:
    """The verdict is the same when it is judged again from the directory of the run alone."""
    previews: list[FaultPreview] = []

    def confirm(rows: Sequence[FaultPreview]) -> bool:
        previews.extend(rows)
        return True

    outcome = broken(
        stateful, tmp_path, Kill(rank=1, after_s=1.0), limits=AttachLimits(confirm=confirm)
    )
    assert_recovered(outcome, stateful)
    (row,) = previews
    assert (row.pod, row.ranks, row.hands) == ("llama-1", (1,), ("processes",))
    lives = records(outcome, Event.LIFE_OBSERVED)
    assert {life["uid"] for life in lives if life["pod"] == row.pod} == {row.uid}
    again = judge_directory(outcome.directory)
    assert (again.verdict, again.checks) == (outcome.verdict, outcome.checks)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS[1:], ids=lambda fault: fault.kind)
def test_faults_from_which_it_comes_back(
    stateful: TrainingJob, tmp_path: Path, fault: Fault
) -> None:
    assert_recovered(broken(stateful, tmp_path, fault), stateful)


@pytest.mark.slow
def test_a_deleted_pod_has_a_successor_in_its_place(stateful: TrainingJob, tmp_path: Path) -> None:
    outcome = broken(stateful, tmp_path, DeletePod(rank=2, after_s=1.0))
    assert_recovered(outcome, stateful)
    (ended,) = records(outcome, Event.LIFE_ENDED)
    lives = [life for life in records(outcome, Event.LIFE_OBSERVED) if life.source == ended.source]
    assert [life["uid"] == ended["uid"] for life in lives] == [True, False]
    assert ended["cause"] == f"the pod {lives[0]['pod']} was deleted"


@pytest.mark.slow
def test_a_node_is_lost_in_silence(stateful: TrainingJob, tmp_path: Path) -> None:
    outcome = broken(stateful, tmp_path, LoseNode(rank=2, after_s=1.0))
    assert_recovered(outcome, stateful)
    (ended,) = records(outcome, Event.LIFE_ENDED)
    assert ended["cause"].startswith("the pod llama-")
    (evidence,) = records(outcome, Event.EVIDENCE)
    assert "packets from and to it were dropped" in str(evidence)


@pytest.mark.slow
@pytest.mark.skipif(bool(pods.no_tool()), reason=f"machines: {pods.no_tool()}")
def test_a_pod_that_lives_on_after_its_deletion_is_not_gone(
    stateful: TrainingJob, tmp_path: Path
) -> None:
    """The kubelet is stopped: the API server removes the pod, and its processes run."""
    machine = pods.pods()["llama-2"]["spec"]["nodeName"].removeprefix("node")
    kubelet = [os.environ[pods.VARIABLE_OF_TOOL], "node"]
    launcher = stateful.rank_process(2).parent()  # it starts the ranks again
    assert launcher is not None

    def view(message: Any) -> None:
        if type(message).__name__ == "FaultStruck":
            subprocess.run([*kubelet, "kubelet-stop", machine], check=True)
            pods.delete("llama-2")

    fault = Hang(rank=1, after_s=1.0)
    try:
        outcome = broken(
            stateful, tmp_path, fault, live_view=view, deadline_s=LINGER_S + 10.0, stalled_s=200.0
        )
        assert launcher.is_running()
    finally:
        subprocess.run([*kubelet, "kubelet-start", machine], check=True)
    assert outcome.verdict is not Verdict.PASSED
    (ended,) = records(outcome, Event.LIFE_ENDED)
    assert ended["cause"] == "the pod llama-2 was deleted"
    gone = [record for record in records(outcome, Event.RANK_GONE) if record.source == "llama-2"]
    assert not gone, "no end is proved in a pod whose hand does not answer"


@pytest.mark.slow
def test_a_slow_rank_is_no_loss(stateful: TrainingJob, tmp_path: Path) -> None:
    fault = Straggle(rank=1, after_s=1.0, how="quota", cpu_fraction=0.3, steps=5)
    outcome = broken(stateful, tmp_path, fault, observe_s=2.0)
    assert outcome.verdict is Verdict.PASSED, outcome.reasons
    assert not records(outcome, Event.LIFE_ENDED)


def test_a_job_that_stands_still_fails_with_the_reason(
    stateful: TrainingJob, tmp_path: Path
) -> None:
    """A rank that is held until the end of the run: the job waits for it, or its launcher."""
    outcome = broken(stateful, tmp_path, Hang(rank=1, after_s=1.0), stalled_s=3.0, max_lost_steps=0)
    assert outcome.verdict is Verdict.FAILED
    assert "no step was shown for 3 s (stalled_s)" in "; ".join(outcome.reasons)
    stateful.wait_for_step(stateful.newest_step() + 3)  # what a hand has stopped goes on


@pytest.mark.slow
def test_conditions_of_the_user_end_all_faults(stateful: TrainingJob, tmp_path: Path) -> None:
    """The file appears once the fault acts."""
    stop = tmp_path / "stop"

    def view(message: Any) -> None:
        if type(message).__name__ == "FaultStruck":
            stop.touch()

    outcome = broken(
        stateful,
        tmp_path / "runs",
        Hang(rank=1, after_s=1.0),
        limits=AttachLimits(abort=(f"file:{stop}",)),
        live_view=view,
    )
    assert outcome.verdict is Verdict.UNKNOWN
    assert f"file:{stop}" in "; ".join(outcome.reasons)
    stateful.wait_for_step(stateful.newest_step() + 3)


@pytest.mark.parametrize(
    ("faults", "limits", "field", "part"),
    [
        ([Kill(rank=7, after_s=1.0)], AttachLimits(), "faults", "it has 0, 1, 2"),
        (
            [Kill(rank=rank, after_s=1.0) for rank in range(3)],
            AttachLimits(),
            "max_nodes",
            "3 of 3",
        ),
        ([Kill(rank=1, after_s=1.0)], AttachLimits(nodes=4), "nodes", "3 nodes"),
        (
            [Kill(rank=1, after_s=1.0)],
            AttachLimits(confirm=lambda rows: False),
            "yes",
            "answer yes",
        ),
    ],
)
def test_what_may_not_happen_is_refused_before(
    stateful: TrainingJob,
    tmp_path: Path,
    faults: list[Fault],
    limits: AttachLimits,
    field: str,
    part: str,
) -> None:
    step = stateful.newest_step()
    with pytest.raises(BadInput, match=part) as refused:
        broken(stateful, tmp_path, *faults, limits=limits)
    assert refused.value.field == field
    stateful.wait_for_step(step + 1)


def test_a_second_run_in_the_job_is_refused(
    stateful: TrainingJob, tmp_path: Path, files: tuple[Path, Path]
) -> None:
    """The first one is killed then, and the job can be attached to at once."""
    watch, image = files
    command = [sys.executable, "-m", "chaoskit", "attach", stateful.reference, "--yes"]
    command += ["--namespace", stateful.namespace, "--watch", str(watch), "--fault", SLOW_RANK]
    command += ["--hand-image", str(image), "--observe-s", "60"]
    command += ["--report", str(tmp_path / "report")]
    fault = Straggle(rank=1, after_s=1.0, how="quota", cpu_fraction=0.3, steps=3)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        journals = tmp_path / "report" / "001-statefulset-llama" / "journal"
        wait_until(lambda: journals.is_dir() and read_events(journals, Event.LOGGED), "a step")
        with pytest.raises(BadInput, match="is a hand that runs") as refused:
            broken(stateful, tmp_path / "second", fault)
        assert first.poll() is None
        first.kill()
    assert (refused.value.field, refused.value.value) == ("job", stateful.reference)
    assert any(name in refused.value.remedy for name in ("llama-0", "llama-1", "llama-2"))
    outcome = broken(stateful, tmp_path / "third", fault, observe_s=1.0)
    assert outcome.verdict is Verdict.PASSED, outcome.reasons


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """The files of a user: the patterns of the log, and the image of hands."""
    return user_files(tmp_path)


SLOW_RANK = "Straggle(rank=1, after_s=1.0, how='quota', cpu_fraction=0.3, steps=3)"


def test_the_command_shows_the_pods_and_writes_an_outcome(
    stateful: TrainingJob, tmp_path: Path, files: tuple[Path, Path]
) -> None:
    watch, image = files
    command = client_command(stateful, SLOW_RANK, watch, image)
    command += ["--json", "--observe-s", "1", "--report", str(tmp_path / "report")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "llama-1" in ended.stderr  # the preview
    outcome = msgspec.json.decode(ended.stdout)
    assert (outcome["verdict"], outcome["job"]) == ("passed", stateful.reference)


#: Time for which an effect may go on without its client: that of rules in the kernel, and a little.
TIME_TO_LIVE_S = 12.0


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["Hang(rank=1, after_s=0.5)", "Cut(rank=1, after_s=0.5)"])
def test_a_killed_client_leaves_no_fault(
    stateful: TrainingJob, tmp_path: Path, files: tuple[Path, Path], fault: str
) -> None:
    watch, image = files
    command = client_command(stateful, fault, watch, image)
    command += ["--report", str(tmp_path / "report")]
    stateful.wait_for_step(stateful.newest_step() + 2)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as client:
        journals = tmp_path / "report" / "001-statefulset-llama" / "journal"
        wait_until(lambda: journals.is_dir() and read_events(journals, Event.EVIDENCE), fault)
        client.kill()
    killed_ns, step = time.monotonic_ns(), stateful.newest_step()
    stateful.wait_for_step(step + 3, limit_s=TIME_TO_LIVE_S + 60)
    first_ns = next(entry.at_ns for entry in stateful.recorded_steps() if entry.step > step + 1)
    print(f"{fault}: a new step {(first_ns - killed_ns) / 1e9:.2f} s after the kill")


@pytest.mark.slow
def test_a_suite_runs_on_the_job_of_the_command_line(
    stateful: TrainingJob, tmp_path: Path, files: tuple[Path, Path]
) -> None:
    watch, image = files
    (tmp_path / "test_llama.py").write_text(
        "from faults import *\n\n"
        f"def test_slow_rank(chaos):\n    chaos.attach(faults=[{SLOW_RANK}], observe_s=1.0)\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_llama.py"]
    command += ["--chaos-attach", stateful.reference, "--chaos-namespace", stateful.namespace]
    command += ["--chaos-watch", str(watch), "--chaos-hand-image", str(image)]
    command += ["--chaos-report", "report"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
    assert (tmp_path / "report" / "report.html").is_file()
