"""Commands in pods, on a real cluster: the suite of commands, and what differs from one machine."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.nodes import pods

from chaoskit.errors import BadInput
from chaoskit.experiment.harness import Harness
from chaoskit.experiment.injection.command_follower import LogRead
from chaoskit.experiment.remote.client import RemoteHost
from chaoskit.plaintext import tell_on_stderr
from chaoskit.runlog.outcome import Check, Outcome
from chaoskit.stacks import LogPatterns
from chaoskit.substrate.kubernetes.command_cluster import SILENT_S
from chaoskit.substrate.kubernetes.driver_pod import DriverPod
from chaoskit.substrate.kubernetes.options import VARIABLE, KubernetesOptions
from chaoskit.substrate.kubernetes.pods.manifests import STATION
from chaoskit.substrate.kubernetes.substrate import KubernetesSubstrate
from chaoskit.vocabulary import Event, Verdict
from faults import Fault, Kill

pytestmark = [
    pytest.mark.skipif(bool(pods.unavailable()), reason=f"Kubernetes: {pods.unavailable()}"),
]
SUITE = pods.ROOT / "tests" / "cluster" / "commands"
WATCH = LogPatterns(step=r"step (\d+)", loss=r"loss ([\d.eE+-]+)")
ENDED_S = 15.0  # limit for the end of a pod that is deleted, and the next check
FILES = sorted(path.name for path in SUITE.glob("test_*.py"))
OFTEN = (
    "test_blackbox.py::test_an_unbroken_command_passes",
    "test_blackbox.py::test_steps_that_are_shown_again_are_lost",
    "test_blackbox.py::test_every_node_is_told_its_place",
    "test_blackbox.py::test_a_node_that_is_taken_away_need_not_end_well",
    "test_blackbox.py::test_what_a_command_leaves_behind_ends_with_it",
    "test_blackbox.py::test_torchrun_without_restarts_fails",
)


@pytest.fixture(scope="module")
def kubeconfig() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", os.environ[pods.VARIABLE_OF_TESTS])
        yield


def template(directory: Path, *volumes: tuple[Path, dict[str, Any]]) -> str:
    """Write a template for pods with root's rights and further volumes, and return its path.

    Args:
        volumes: where each volume is mounted, and its source.
    """
    path = Path(pods.template(directory))
    document = json.loads(path.read_text())
    spec, container = document["spec"], document["spec"]["containers"][0]
    spec["securityContext"] = {"runAsUser": 0, "runAsGroup": 0, "runAsNonRoot": False}
    programs = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    container["env"] = [{"name": "PATH", "value": programs}]
    for number, (mount, source) in enumerate(volumes):
        spec["volumes"].append({"name": f"test{number}", **source})
        container["volumeMounts"].append({"name": f"test{number}", "mountPath": str(mount)})
    path.write_text(json.dumps(document))
    return str(path)


def of_this_host(directory: Path) -> tuple[Path, dict[str, Any]]:
    """Return a volume that is a directory of this host, at the same path: all pods share it."""
    directory.mkdir(exist_ok=True)
    return directory, {"hostPath": {"path": str(directory)}}


def options(
    directory: Path, *volumes: tuple[Path, dict[str, Any]], **more: Any
) -> KubernetesOptions:
    return pods.options(directory, template=template(directory, *volumes), **more)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of this host that pods of :func:`harness` share."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def harness(
    kubeconfig: None, shared: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Harness]:
    """Return a harness with a driver, whose pods share a directory."""
    directory = tmp_path_factory.mktemp("driven")
    chosen = options(directory, of_this_host(shared), shared=str(shared))
    host = RemoteHost(DriverPod(chosen, tell_on_stderr), tell_on_stderr)
    yield Harness(host, directory / "runs")
    host.close()


def run(harness: Harness, command: list[str], *faults: Fault, **plan: Any) -> Outcome:
    settings: dict[str, Any] = {"watch": WATCH, "twin": False, "deadline_s": 120.0}
    return harness.run(command=command, faults=faults, **settings | plan)


def check(outcome: Outcome, name: str) -> Check:
    return next(check for check in outcome.checks if check.name.startswith(name))


def log(outcome: Outcome, node: str = "node0") -> str:
    return (Path(outcome.directory) / "log" / f"{node}.log").read_text()


# -- the suite of commands -------------------------------------------------------------------------


def suite(directory: Path, *arguments: str) -> None:
    """Run tests of the suite of commands on pods, which must pass."""
    environment = pods.environment(directory) | {
        f"{VARIABLE}TEMPLATE": template(directory, of_this_host(directory)),
        f"{VARIABLE}SHARED": str(directory),
        f"{VARIABLE}NETWORK_FAULTS": "allow",
    }
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q"),
            *("--chaos-substrate", "kubernetes", "--basetemp", str(directory / "base")),
            *arguments,
        ],
        env=environment,
        cwd=SUITE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_the_suite_of_commands_passes_on_pods(tmp_path: Path) -> None:
    suite(tmp_path, *OFTEN)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", FILES)
def test_the_whole_suite_of_commands_passes_on_pods(tmp_path: Path, file: str) -> None:
    """Cases that cannot exist on pods have the marker ``not_in_pods`` with the reason."""
    suite(tmp_path, file)


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.costly
def test_files_of_a_command_are_copied_for_each_run(harness: Harness, tmp_path: Path) -> None:
    """A run finds none of the files that its twin has written into the working directory."""
    work, beside = tmp_path / "work", tmp_path / "beside"
    for directory in (work, beside):
        directory.mkdir()
    (work / "train.py").write_text(
        "import pathlib, sys\n"
        "state = pathlib.Path('state')\n"
        "print('state', state.exists(), pathlib.Path(sys.argv[1]).read_text(), flush=True)\n"
        "state.touch()\n"
        "for step in range(3): print(f'step {step} loss {step}.5', flush=True)\n"
    )
    (beside / "config").write_text("lr 0.1")
    command = ["python", "train.py", str(beside / "config")]
    outcome = run(harness, command, twin=True, working_directory=work)
    assert outcome.verdict is Verdict.PASSED, outcome.reasons
    assert "state False lr 0.1" in log(outcome)
    assert not (work / "state").exists()


@pytest.mark.costly
def test_nodes_that_share_nothing_have_no_directory_for_checkpoints(
    kubeconfig: None, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match="SHARED") as refused:
        run_here(options(tmp_path), ["echo", "{run_dir}"], nodes=2)
    assert refused.value.field == "command"
    outcome = run_here(
        options(tmp_path), ["sh", "-c", "echo step 0 ${CHAOSKIT_RUN_DIR-none}"], nodes=2
    )
    assert outcome.verdict is Verdict.PASSED, outcome.reasons
    assert log(outcome, "node1") == "step 0 none\n"


def run_here(chosen: KubernetesOptions, command: list[str], **plan: Any) -> Outcome:
    """Run a command in pods that are driven by this process."""
    substrate = KubernetesSubstrate(chosen)
    try:
        return run(Harness(substrate, Path(chosen.template).parent / "runs"), command, **plan)
    finally:
        substrate.close()


@pytest.mark.costly
@pytest.mark.parametrize("is_mounted", [True, False])
def test_a_directory_that_pods_do_not_share_is_refused(
    kubeconfig: None, tmp_path: Path, is_mounted: bool
) -> None:
    own: dict[str, Any] = {"emptyDir": {}}
    volumes = [(tmp_path / "shared", own)] if is_mounted else []
    chosen = options(tmp_path, *volumes, shared=str(tmp_path / "shared"))
    remedy = "node1 does not see what node0 has written" if is_mounted else "mounts a volume"
    with pytest.raises(BadInput, match=remedy) as refused:
        run_here(chosen, ["true"], nodes=2)
    assert refused.value.field == "shared"


# -- faults ----------------------------------------------------------------------------------------


def test_torchrun_on_two_pods_comes_back(harness: Harness) -> None:
    """torchrun starts its ranks again from the checkpoint that the pods share."""
    training = str(pods.ROOT / "tests" / "jobs" / "logs" / "logged.py")
    command = [
        *("torchrun", "--nnodes=2", "--nproc-per-node=1", "--node-rank={node_rank}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint={master_addr}:{master_port}", "--rdzv-id=x"),
        *("--max-restarts=2", training, "100", "0.05", "10"),
    ]
    outcome = run(
        harness,
        command,
        Kill(rank=1, at_step=24),
        nodes=2,
        ranks=2,
        max_lost_steps=60,
        deadline_s=240,
    )
    assert outcome.verdict is Verdict.PASSED, outcome.reasons
    assert check(outcome, "evidence of Kill").verdict is Verdict.PASSED
    assert "went back from step" in outcome.recovery.cause


@pytest.mark.costly
def test_a_pod_that_something_else_deletes_makes_a_run_unknown(
    harness: Harness, tmp_path: Path
) -> None:
    deleted = tmp_path / "deleted"

    def delete_pod(message: Any) -> None:
        if getattr(message, "step", None) and not deleted.exists():
            deleted.touch()
            (name,) = pods.pods(f"{STATION}=node1")
            pods.delete(name)

    training = "n=0; while [ $n -lt 400 ]; do echo step $n; n=$((n+1)); sleep 0.05; done"
    outcome = harness.run_planned(
        plan_of(["sh", "-c", training], nodes=2), twin=False, watch=delete_pod
    )
    assert deleted.exists()
    assert outcome.verdict is Verdict.UNKNOWN, outcome.reasons
    assert "node1" in check(outcome, "no pod was taken away").detail
    assert outcome.records(Event.POD_TAKEN)


def test_a_pod_that_is_evicted_from_the_only_node_makes_a_run_unknown(
    harness: Harness, tmp_path: Path
) -> None:
    """Its command ends at once, and the run with it."""
    evicted = tmp_path / "evicted"

    def evict_pod(message: Any) -> None:
        if getattr(message, "step", None) and not evicted.exists():
            evicted.touch()
            (name,) = pods.pods(f"{STATION}=node0")
            pods.evict(name)

    training = "n=0; while [ $n -lt 400 ]; do echo step $n; n=$((n+1)); sleep 0.05; done"
    plan = plan_of(["sh", "-c", training])
    outcome = harness.run_planned(plan, twin=False, watch=evict_pod)
    assert outcome.verdict is Verdict.UNKNOWN, outcome.reasons
    assert "node0" in check(outcome, "no pod was taken away").detail


class Silence:
    """Stops all processes of a pod at the first step of a run, and lets them go on later.

    Args:
        node: the node of the pod.
        lasts_s: seconds until they go on; infinite for never.
        over: file that is created when they go on, or the run has lost a node.

    Attributes:
        noticed_s: seconds from the stop until the run has lost a node; infinite if it has not.
    """

    def __init__(self, node: str, lasts_s: float, over: Path) -> None:
        self._node, self._lasts_s, self._over = node, lasts_s, over
        self._stopped: list[psutil.Process] = []
        self._since_s = 0.0
        self.noticed_s = math.inf

    def watch(self, message: Any) -> None:
        """Act on a message of the run."""
        now_s = time.monotonic()
        if not isinstance(message, LogRead) or message.step is None or self._over.exists():
            return
        if not self._stopped:
            (pod,) = pods.pods(f"{STATION}={self._node}").values()
            self._stopped, self._since_s = pods.processes(pod), now_s
            for process in self._stopped:
                with contextlib.suppress(psutil.NoSuchProcess):  # such as a short sleep
                    process.suspend()
        elif message.running < message.nodes:
            self.noticed_s = now_s - self._since_s
            self._over.touch()
        elif now_s - self._since_s >= self._lasts_s:
            for process in self._stopped:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()
            self._over.touch()


@pytest.mark.costly
@pytest.mark.parametrize("lasts_s", [SILENT_S / 2, math.inf])
def test_a_pod_is_lost_once_it_was_silent_for_10_s(
    harness: Harness, shared: Path, tmp_path: Path, lasts_s: float
) -> None:
    """A command outlasts a shorter silence of its node."""
    over = shared / f"over-{lasts_s}"
    silence = Silence("node1", lasts_s, over)
    show = "[ $NODE_RANK = 1 ] || echo step $n"
    training = f"n=0; until test -e {over}; do {show}; n=$((n+1)); sleep 0.05; done"
    plan = plan_of(["sh", "-c", training], nodes=2, working_directory=tmp_path)
    outcome = harness.run_planned(plan, twin=False, watch=silence.watch)
    assert over.exists()
    if lasts_s < SILENT_S:
        assert outcome.verdict is Verdict.PASSED, outcome.reasons
        assert silence.noticed_s == math.inf
    else:
        assert outcome.verdict is Verdict.UNKNOWN, outcome.reasons
        assert SILENT_S <= silence.noticed_s <= SILENT_S + ENDED_S


def plan_of(command: list[str], **plan: Any) -> Any:
    from chaoskit.experiment.plan.command_plan import plan_command

    return plan_command(command, watch=LogPatterns(step=r"step (\d+)"), deadline_s=120.0, **plan)
