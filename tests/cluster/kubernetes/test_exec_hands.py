"""Hands by exec in the container of their target, without an image, on a real cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.hand.in_pods import pod, status
from support.jobs.training import PodSecurity, TrainingJob, training
from support.jobs.users import user_with
from support.nodes import pods
from support.waiting import stays, wait_until

from chaoskit import LogPatterns
from chaoskit.attach.fault_preview import FaultPreview
from chaoskit.attach.hands.hand_container import EXEC, PROCESSES, ContainerExec
from chaoskit.attach.hands.hand_kernel import HandKernel
from chaoskit.attach.hands.start import HandPod, start_hand, why_no_hand
from chaoskit.attach.run.attach import AttachLimits, attach
from chaoskit.errors import BadInput, HarnessError
from chaoskit.faults import Cut, Kill, KillContainer, LimitCpu, Straggle
from chaoskit.faults.base import Fault
from chaoskit.hand import PROGRAM_NAME
from chaoskit.journal import read_events
from chaoskit.runlog.outcome import Outcome
from chaoskit.substrate.core.launched_ranks import LaunchedRank
from chaoskit.substrate.kubernetes.api import rights
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi
from chaoskit.vocabulary import Event, Verdict

pytestmark = pytest.mark.skipif(
    bool(pods.unavailable()), reason=f"Kubernetes: {pods.unavailable()}"
)
RANKED = """
import os, subprocess, sys
environment = {**os.environ, "RANK": "3"}
subprocess.run([sys.executable, "-c", "import time; time.sleep(600)"], env=environment)
"""
#: A process that writes the time of this machine's clock every 10 ms.
TICKING = "import time\nwhile True: print('%.3f' % time.monotonic()); time.sleep(0.01)"
#: A program that stops pid 1 of a pod by exec, and waits to be killed.
STOPS = """
import sys
from chaoskit.attach.hands.hand_container import EXEC, PROCESSES, ContainerExec
from chaoskit.attach.hands.start import HandPod, start_hand
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi
namespace, kubeconfig, *pod = sys.argv[1:]
api = KubernetesApi(namespace=namespace, kubeconfig=kubeconfig)
hand = start_hand(api, HandPod(*pod), "main", PROCESSES, ContainerExec())
ticks = hand.ask("find", pid=1)["ticks"]
assert hand.ask("stop", pid=1, ticks=ticks, lasts_s=600)["held"]
print("stopped", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def api() -> Iterator[KubernetesApi]:
    kubeconfig = os.environ[pods.VARIABLE_OF_TESTS]
    with closing(KubernetesApi(namespace=pods.namespace(), kubeconfig=kubeconfig)) as client:
        yield client


def target(name: str) -> HandPod:
    return HandPod(name, pods.pods()[name]["metadata"]["uid"])


def last_tick_s(name: str) -> float:
    """Return the time that a pod has written last; 0 before the first."""
    lines = pods.log(name).splitlines()
    return float(lines[-1]) if lines else 0.0


def wait_for_tick(name: str) -> None:
    now_s = time.monotonic()
    wait_until(lambda: last_tick_s(name) > now_s, "a tick")


def test_ranks_are_read_and_processes_stopped_and_killed(api: KubernetesApi) -> None:
    """The hand is no process of the tree of pid 1, and the pod has no further container."""
    with pod("exec-kernel", RANKED, restarts=False) as name:
        began_s = time.monotonic()
        with closing(start_hand(api, target(name), "main", PROCESSES, ContainerExec())) as hand:
            print(f"started in {1000 * (time.monotonic() - began_s):.0f} ms")
            kernel = HandKernel(lambda: hand, lambda: status(name)["phase"] == "Failed")
            root = kernel.find(1)
            ((rank, launched),) = wait_until(
                lambda: kernel.launched_ranks(root).items(), "the rank"
            )
            assert launched == LaunchedRank(3, "RANK")
            assert kernel.tree(root) == [root, rank]
            listed = {process["pid"]: process for process in hand.ask("list")["processes"]}
            own = listed[hand.ask("hello")["pid"]]
            assert (own["name"], own["parent"]) == (PROGRAM_NAME, 0)
            for process in (root, rank):
                process.signal(signal.SIGSTOP)
                assert process.is_stopped()
                process.signal(signal.SIGCONT)
                assert not process.is_stopped()
            root.signal(signal.SIGKILL)
            wait_until(lambda: status(name)["phase"] == "Failed", "the end of the pod")
            wait_until(lambda: not hand.is_open, "the end of the hand")
        (container,) = status(name)["containerStatuses"]
        assert container["state"]["terminated"]["exitCode"] == 128 + signal.SIGKILL
        assert not pods.pods()[name]["spec"].get("ephemeralContainers")


@pytest.mark.parametrize(
    ("signum", "limit_s"),
    [
        (signal.SIGKILL, 5.0),  # the hand reads the end of its input
        pytest.param(signal.SIGSTOP, 15.0, marks=pytest.mark.slow),  # it hears nothing for 10 s
    ],
)
def test_a_stop_ends_without_its_client(
    api: KubernetesApi, signum: signal.Signals, limit_s: float
) -> None:
    with pod("exec-killed", TICKING) as name:
        wait_for_tick(name)
        arguments = [pods.namespace(), os.environ[pods.VARIABLE_OF_TESTS], *target(name)]
        pipe = subprocess.PIPE
        client = subprocess.Popen(
            [sys.executable, "-c", STOPS, *arguments], stdin=pipe, stdout=pipe
        )
        try:
            assert client.stdout is not None
            assert client.stdout.readline() == b"stopped\n"
            stopped_s = time.monotonic()
            stays(lambda: last_tick_s(name) <= stopped_s, "no tick", for_s=0.5)
            client.send_signal(signum)
            ended_s = time.monotonic()
            wait_for_tick(name)
        finally:
            client.kill()
            client.wait()
        ticks_s = [float(line) for line in pods.log(name).splitlines()]
        after_s = min(tick_s for tick_s in ticks_s if tick_s > ended_s) - ended_s
        print(f"goes on {1000 * after_s:.0f} ms after the client's {signum.name}")
        assert after_s < limit_s
        with closing(start_hand(api, target(name), "main", PROCESSES, ContainerExec())) as hand:
            wait_until(lambda: len(hands(hand.ask("list"))) == 1, "the end of the first hand")


def hands(listed: dict[str, list[dict[str, object]]]) -> list[object]:
    """Return the pids of hands in the answer to a request for all processes."""
    return [entry["pid"] for entry in listed["processes"] if entry["name"] == PROGRAM_NAME]


def test_a_container_without_python_is_refused(api: KubernetesApi) -> None:
    with pod("exec-python", TICKING) as name:
        no_python = ContainerExec("python-that-is-not-there")
        reason = why_no_hand(api, target(name), "main", PROCESSES, no_python)
        print(reason)
        assert "let its image have python3" in reason
        assert "\n" not in reason
        assert why_no_hand(api, target(name), "main", PROCESSES, ContainerExec()) == ""
        former = HandPod(name, "the UID of an earlier pod")
        with pytest.raises(HarnessError, match="another one has its name"):
            start_hand(api, former, "main", PROCESSES, ContainerExec())


# -- runs ------------------------------------------------------------------------------------------

WATCH = LogPatterns(step=r"step (\d+)", loss=r"loss ([\d.eE+-]+)")
LIMIT = "500m"


@pytest.fixture(scope="module")
def stateful() -> Iterator[TrainingJob]:
    """A StatefulSet of three pods with torchrun and a CPU limit, which trains without pauses."""
    with training("statefulset", step_s=0.0, cpu_limit=LIMIT) as job:
        yield job


@pytest.fixture(autouse=True)
def no_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no image of hands, and the cluster of the tests."""
    monkeypatch.setenv("KUBECONFIG", os.environ[pods.VARIABLE_OF_TESTS])
    monkeypatch.delenv("CHAOSKIT_HAND_IMAGE", raising=False)


def broken(job: TrainingJob, directory: Path, fault: Fault, **settings: Any) -> Outcome:
    """Inject a fault by exec, and return the outcome."""
    outcome = attach(
        job.reference,
        namespace=job.namespace,
        watch=WATCH,
        faults=[fault],
        exec_hands=True,
        directory=directory,
        **{"max_lost_steps": 10, "deadline_s": 240.0, "stalled_s": 200.0, **settings},
    )
    for name in pods.pods(f"app={job.name}"):
        assert not pods.pods()[name]["spec"].get("ephemeralContainers")
    return outcome


@pytest.mark.slow
def test_a_second_run_by_exec_is_refused(tmp_path: Path) -> None:
    """No container of the pods shows the hands of the first one."""
    watch = tmp_path / "watch.yaml"
    watch.write_text(r"step: 'step (\d+)'")
    with training("statefulset") as job:
        command = [sys.executable, "-m", "chaoskit", "attach", job.reference, "--yes"]
        command += ["--namespace", job.namespace, "--watch", str(watch), "--exec-hands"]
        command += ["--fault", "Straggle(rank=1, after_s=1.0, how='quota', cpu_fraction=0.3)"]
        command += ["--observe-s", "60", "--report", str(tmp_path / "report")]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as first:
            journals = tmp_path / "report" / "001-statefulset-llama" / "journal"
            wait_until(lambda: journals.is_dir() and read_events(journals, Event.LOGGED), "a step")
            with pytest.raises(BadInput, match=r"process \d+ in the pod .* is a hand that runs"):
                broken(job, tmp_path / "second", Kill(rank=1, after_s=0.5))
            assert first.poll() is None
            assert not read_events(journals, Event.RANK_GONE)
            first.kill()


@pytest.mark.slow
@pytest.mark.parametrize("pod_security", ["baseline", "restricted"])
def test_levels_of_pod_security_allow_it(pod_security: PodSecurity, tmp_path: Path) -> None:
    """Under ``restricted`` the container has no capability; under ``baseline`` it is one of root."""
    is_root = pod_security == "baseline"
    with training("statefulset", pod_security=pod_security, as_root=is_root) as job:
        outcome = broken(job, tmp_path, KillContainer(rank=1, after_s=0.5))
        assert outcome.verdict is Verdict.PASSED, outcome.reasons


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        Kill(rank=1, after_s=0.5),
        KillContainer(rank=1, after_s=0.5),
        Straggle(rank=1, after_s=0.5, how="quota", cpu_fraction=0.3, steps=3),
    ],
    ids=lambda fault: fault.kind,
)
def test_faults_in_processes_need_no_image(
    stateful: TrainingJob, tmp_path: Path, fault: Fault
) -> None:
    previews: list[FaultPreview] = []

    def confirm(rows: Sequence[FaultPreview]) -> bool:
        previews.extend(rows)
        return True

    outcome = broken(stateful, tmp_path, fault, limits=AttachLimits(confirm=confirm))
    assert outcome.verdict is Verdict.PASSED, outcome.reasons
    assert [row.hands for row in previews] == [(EXEC,)]
    lives = read_events(Path(outcome.directory) / "journal", Event.LIFE_OBSERVED)
    assert {life["hand"] for life in lives} == {EXEC}


def test_load_limits_the_cpu_time_of_a_node(stateful: TrainingJob, tmp_path: Path) -> None:
    fault = LimitCpu(rank=1, after_s=0.5, cores=0.1, lift_after_s=4.0)
    outcome = broken(stateful, tmp_path, fault, observe_s=4.0)
    assert outcome.verdict is Verdict.PASSED, outcome.reasons
    (lifted,) = read_events(Path(outcome.directory) / "journal", Event.LIFTED)
    (injected,) = read_events(Path(outcome.directory) / "journal", Event.EVIDENCE)[:1]
    times_ns = [step.at_ns for step in stateful.recorded_steps() if step.rank == 0]

    def steps_per_s(begin_ns: float, end_ns: float) -> float:
        """Return the rate of steps by the clock beside the cluster."""
        count = sum(begin_ns <= at_ns < end_ns for at_ns in times_ns)
        return count / (end_ns - begin_ns) * 1e9

    under_load = steps_per_s(injected.t_ns, lifted.t_ns)
    afterwards = steps_per_s(lifted.t_ns + 1e9, lifted.t_ns + 4e9)
    print(f"{under_load:.1f} steps/s under load, {afterwards:.1f} afterwards; {outcome.checks}")
    assert under_load < 0.8 * afterwards


@pytest.mark.parametrize(
    ("fault", "part"),
    [
        (LimitCpu(rank=1, after_s=1.0, cores=0.5), "use cores below 0.5"),
        (Cut(rank=1, after_s=1.0), "name an image of hands"),
    ],
)
def test_what_a_hand_by_exec_cannot_do_is_refused(
    stateful: TrainingJob, tmp_path: Path, fault: Fault, part: str
) -> None:
    with pytest.raises(BadInput, match=part):
        broken(stateful, tmp_path, fault)


@pytest.mark.slow
def test_the_right_is_checked_before(
    stateful: TrainingJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The role of attach lacks the right. With it, no right to ephemeral containers is needed."""
    fault = Straggle(rank=1, after_s=0.5, how="quota", cpu_fraction=0.3, steps=3)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    of_attach = rights.of_attach_role()
    refused = pytest.raises(BadInput, match=r"create pods/exec \(hands by exec")
    with user_with(tmp_path, of_attach), refused:
        broken(stateful, tmp_path, fault)
    granted = tuple(right for right in of_attach if right not in rights.HAND_RIGHTS)
    with user_with(tmp_path, (*granted, *rights.EXEC_RIGHTS)):
        outcome = broken(stateful, tmp_path, fault, observe_s=1.0)
    assert outcome.verdict is Verdict.PASSED, outcome.reasons


@pytest.mark.slow
def test_the_command_and_a_suite_ask_for_it(stateful: TrainingJob, tmp_path: Path) -> None:
    watch = tmp_path / "watch.yaml"
    watch.write_text(r"step: 'step (\d+)'")
    slow = "Straggle(rank=1, after_s=0.5, how='quota', cpu_fraction=0.3, steps=3)"
    where = ["--namespace", stateful.namespace, "--watch", str(watch)]
    command = [sys.executable, "-m", "chaoskit", "attach", stateful.reference, "--fault", slow]
    command += [*where, "--exec-hands", "--yes", "--observe-s", "1"]
    ended = subprocess.run(
        [*command, "--report", str(tmp_path / "report")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "exec in the container" in ended.stdout
    (tmp_path / "test_llama.py").write_text(
        "from faults import *\n\n"
        f"def test_slow_rank(chaos):\n    chaos.attach(faults=[{slow}], observe_s=1.0)\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_llama.py"]
    command += ["--chaos-attach", stateful.reference, "--chaos-namespace", stateful.namespace]
    command += ["--chaos-watch", str(watch), "--chaos-exec-hands"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
