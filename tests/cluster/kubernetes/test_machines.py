"""Tests of machines of a real cluster that lose power, and of an API server that stops; both by
external commands.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.nodes import pods
from support.waiting import wait_until

from chaoskit.elastic.settings import ElasticPolicy
from chaoskit.errors import BadInput, HarnessError
from chaoskit.experiment.harness import Harness
from chaoskit.experiment.remote.host import ExperimentHost, make_host
from chaoskit.runlog.outcome import Outcome
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi
from chaoskit.substrate.kubernetes.machines.machines import (
    BROKEN,
    PROTECTED,
    Machines,
    put_back_left,
)
from chaoskit.substrate.kubernetes.options import VARIABLE, KubernetesOptions
from chaoskit.substrate.kubernetes.pods.manifests import SESSION, STATION
from chaoskit.substrate.undo import UndoLog
from chaoskit.suites.recovery.expect import AT, STEADY
from chaoskit.vocabulary import Event
from faults import DrainMachine, Fault, Kill, LoseMachine, StopApiServer, TaintMachine

WHY_NOT = pods.unavailable() or pods.no_tool()
pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=f"machines: {WHY_NOT}"),
    pytest.mark.costly,
    pytest.mark.slow,
]
BREAKABLE = ("node1", "node2")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    """Place pods of nodes on two breakable machines; the driver and the coordinator prefer the
    third.
    """
    directory = tmp_path_factory.mktemp("options")
    with pytest.MonkeyPatch.context() as patch:
        for name, setting in pods.environment(directory).items():
            if name.startswith(VARIABLE) or name == "KUBECONFIG":
                patch.setenv(name, setting)
        patch.setenv(f"{VARIABLE}MACHINES", ",".join(BREAKABLE))
        patch.setenv(f"{VARIABLE}LEVERS", pods.levers(directory))
        patch.setenv(f"{VARIABLE}STRANGERS", "allow")
        yield patch


@pytest.fixture(scope="module")
def reached(options: pytest.MonkeyPatch) -> Iterator[tuple[ExperimentHost, str]]:
    """Provide a driver, and the name of its session."""
    host, before = make_host("kubernetes"), sessions()
    host.reach()
    (made,) = sessions() - before
    yield host, made
    host.close()


@pytest.fixture(scope="module")
def harness(
    reached: tuple[ExperimentHost, str], tmp_path_factory: pytest.TempPathFactory
) -> Harness:
    return Harness(reached[0], tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def session(reached: tuple[ExperimentHost, str]) -> str:
    return reached[1]


@pytest.fixture(autouse=True)
def whole() -> Iterator[None]:
    """Delete the annotations of faults after a test, and wait until all machines are ready."""
    yield
    for machine in pods.machines():
        pods.ask("PATCH", f"/api/v1/nodes/{machine}", {"metadata": {"annotations": {BROKEN: None}}})
        wait_until(
            lambda machine=machine: pods.is_ready(machine),
            f"{machine} to be ready again",
            limit_s=60.0,
        )


def run(harness: Harness, *faults: Fault, **plan: Any) -> Outcome:
    settings: dict[str, Any] = {"nodes": 3, "spares": 0, "steps": 200, "deadline_s": 90.0} | plan
    return harness.run(STEADY, faults=faults, **settings)


def machine_of(station: str, session: str) -> str:
    (pod,) = pods.pods(f"{STATION}={station},{SESSION}={session}").values()
    return str(pod["spec"]["nodeName"])


def sessions() -> set[str]:
    """Return the sessions that have pods."""
    return {str(pod["metadata"]["labels"][SESSION]) for pod in pods.pods().values()}


@pytest.mark.promise("**A machine that loses its power costs no step**")
def test_a_machine_loses_its_power(harness: Harness) -> None:
    """No connection is closed: they fall silent. The losses are bit-equal to the twin's."""
    outcome = run(harness, LoseMachine(rank=1, at_step=AT))
    assert outcome.verdict.value == "passed", outcome.reasons
    assert outcome.lost_steps == outcome.false_alarms == 0
    outcome.assert_same_losses_as_twin()
    lost = outcome.records(Event.NODE_LOST)
    assert {record["detail"] for record in lost} == {"silent for 3 beats"}
    (record,) = outcome.faults
    assert "does not answer" in record.evidence[1].observed


@pytest.mark.promise("**No pod is made on a machine that has fallen silent**")
def test_a_node_of_a_dead_machine_is_replaced_on_another_one(
    harness: Harness, session: str
) -> None:
    """The API server still reports the machine as ready, so the scheduler may bind a pod to it.

    One of two nodes gets the pod that stands by, the other one a new pod.
    """
    run(harness, nodes=4, steps=20, twin=False)
    dead = machine_of("node1", session)
    outcome = run(
        harness,
        LoseMachine(rank=1, at_step=AT),
        nodes=4,
        node_replacements=3,
        steps=700,
        twin=False,
    )
    assert outcome.verdict.value == "passed", outcome.reasons
    lost = {str(record["node"]) for record in outcome.records(Event.NODE_LOST)}
    assert len(lost) == 2
    assert {record["node"] for record in outcome.records(Event.NODE_REPLACED)} == lost
    assert dead not in {machine_of(node, session) for node in lost}
    # by the next run the machine is back, and the pod is placed as before
    after = run(harness, steps=20)
    assert after.verdict.value == "passed", after.reasons
    assert machine_of("node1", session) in BREAKABLE


def test_a_machine_comes_back_while_the_run_goes_on(harness: Harness) -> None:
    outcome = run(harness, LoseMachine(rank=1, at_step=AT, back_after_s=3.0), steps=300)
    assert outcome.verdict.value == "passed", outcome.reasons
    assert len(outcome.records(Event.LIFTED)) == 1


@pytest.mark.parametrize(
    "fault",
    [
        LoseMachine(rank=1, at_step=AT, lever="nothing"),
        StopApiServer(at_step=AT, lasts_s=1.0, lever="no-stop"),
    ],
    ids=str,
)
def test_a_command_that_does_nothing_is_no_evidence(harness: Harness, fault: Fault) -> None:
    """The command succeeds, but the evidence does not appear."""
    outcome = run(harness, fault, steps=100, twin=False)
    assert outcome.verdict.value == "unknown", outcome.reasons


def test_a_command_that_fails_is_an_error_of_the_run(harness: Harness) -> None:
    with pytest.raises(HarnessError, match=r"lever broken ended with status 3: no way to node[12]"):
        run(harness, LoseMachine(rank=1, at_step=AT, lever="broken"), twin=False)


def test_the_api_server_stops_and_a_rank_dies_meanwhile(harness: Harness) -> None:
    """No decision waits for the API server."""
    faults = StopApiServer(at_step=AT, lasts_s=4.0), Kill(rank=1, at_step=AT + 30)
    outcome = run(harness, *faults, steps=300)
    assert outcome.verdict.value == "passed", outcome.reasons
    assert [record.state for record in outcome.faults] == ["confirmed", "confirmed"]
    outcome.assert_same_losses_as_twin()


def test_the_machine_of_the_coordinator_loses_its_power(
    options: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No connection to the coordinator is closed, and the rank on its machine is lost, too.

    Another pod takes over from the coordinator's log.
    """
    with options.context() as patch:
        patch.setenv(f"{VARIABLE}MACHINES", ",".join(pods.machines()))
        host, before = make_host("kubernetes"), sessions()
        try:
            host.reach()
            (own,) = sessions() - before
            harness = Harness(host, tmp_path)
            with pods.cordoned(machine_of("driver", own)):
                run(harness, steps=20, twin=False)
            machine = machine_of("coordinator", own)
            beside = [rank for rank in range(3) if machine_of(f"node{rank}", own) == machine]
            outcome = run(harness, LoseMachine(rank=beside[0], at_step=AT), steps=200)
        finally:
            host.close()
    assert outcome.verdict.value == "passed", outcome.reasons
    assert outcome.lost_steps == 0
    assert len(outcome.records(Event.RESUMED)) == 1
    outcome.assert_same_losses_as_twin()


# -- machines that the cluster empties -------------------------------------------------------------


def marks_of(machine: str) -> dict[str, Any]:
    """Return the fields of the machine's spec that keep pods off it."""
    spec = pods.ask("GET", f"/api/v1/nodes/{machine}")["spec"]
    return {name: spec[name] for name in ("unschedulable", "taints") if name in spec}


@pytest.mark.promise("**A drain loses no step**")
def test_a_drained_machine_is_left_in_order(harness: Harness) -> None:
    """No rank is given up if there is time to end and an elastic policy."""
    policy = ElasticPolicy(min_replicas=1, max_replicas=3)
    outcome = run(harness, DrainMachine(rank=1, at_step=AT, grace_s=20), steps=300, elastic=policy)
    assert outcome.verdict.value == "passed", outcome.reasons
    assert outcome.records(Event.DETECTED) == []
    assert outcome.steps[-1].world < 3
    outcome.assert_same_losses_as_twin()
    assert [marks_of(machine) for machine in pods.machines()] == [{}, {}, {}]


def test_a_tainted_machine_is_emptied_by_the_cluster(harness: Harness) -> None:
    outcome = run(harness, TaintMachine(rank=1, at_step=AT), steps=300)
    assert outcome.verdict.value == "passed", outcome.reasons
    assert outcome.lost_steps == 0
    outcome.assert_same_losses_as_twin()
    assert [marks_of(machine) for machine in pods.machines()] == [{}, {}, {}]


def test_a_cordon_of_others_is_left_alone(options: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pods.cordoned("node1"):
        with pytest.raises(HarnessError, match="node1 has a cordon already"):
            breaker(tmp_path).do("cordon", "node1")
        assert marks_of("node1")


_MARKS = """
import sys, time
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi
from chaoskit.substrate.kubernetes.machines.marks import MARKS, mark
from chaoskit.substrate.undo import UndoLog
undo = UndoLog()
for name in MARKS:
    mark(KubernetesApi(), name, "node1", undo)
print("marked", flush=True)
time.sleep(60)
"""


def test_marks_are_taken_off_when_their_process_is_killed(options: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", _MARKS], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"marked\n"
        assert set(marks_of("node1")) == {"unschedulable", "taints"}
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not marks_of("node1"), "the undo of both marks")


# -- what is left alone ----------------------------------------------------------------------------


def breaker(tmp_path: Path, session: str = "a-session", **more: Any) -> Machines:
    """Return machines with a command, ``flag``, that creates a file."""
    return Machines(make_api(), session, make_options(tmp_path, **more), UndoLog())


def make_api() -> KubernetesApi:
    return KubernetesApi(namespace=pods.namespace())


def make_options(tmp_path: Path, **more: Any) -> KubernetesOptions:
    path = tmp_path / "levers.json"
    path.write_text(
        json.dumps(
            {
                "flag": {
                    "do": ["touch", f"{tmp_path}/{{machine}}"],
                    "undo": ["rm", "-f", f"{tmp_path}/{{machine}}"],
                }
            }
        )
    )
    return KubernetesOptions(
        **{"machines": "node0,node1,node2", "levers": str(path), "strangers": "allow"} | more
    )


@pytest.fixture
def shared() -> Iterator[str]:
    """Provide a machine with a pod of another namespace."""
    path, name = "/api/v1/namespaces/default/pods", "stranger"
    container = {"name": "one", "image": pods.IMAGE, "command": ["sleep", "1000"]}
    spec = {"nodeName": "node1", "containers": [container], "terminationGracePeriodSeconds": 0}
    pods.ask(
        "POST", path, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    )
    yield "node1"
    pods.ask("DELETE", f"{path}/{name}")


def test_a_machine_that_was_not_named_is_left_alone(
    options: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(
        HarnessError, match="node2 may not be broken: name it in the option machines"
    ):
        breaker(tmp_path, machines="node0, node1").do("flag", "node2")
    assert not (tmp_path / "node2").exists()


def test_a_protected_machine_is_left_alone(options: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pods.labelled("node1", PROTECTED):
        with pytest.raises(
            HarnessError, match=f"node1 may not be broken: it has the label {PROTECTED}"
        ):
            breaker(tmp_path).do("flag", "node1")
        breaker(tmp_path).do("flag", "node2")
    assert [path.name for path in tmp_path.glob("node*")] == ["node2"]


def test_a_machine_with_pods_of_others_is_left_alone(
    options: pytest.MonkeyPatch, tmp_path: Path, shared: str
) -> None:
    with pytest.raises(
        HarnessError, match=rf"{shared} may not be broken: others' pods .*default/stranger"
    ):
        breaker(tmp_path, strangers="refuse").do("flag", shared)
    breaker(tmp_path).do("flag", shared)
    assert (tmp_path / shared).exists()


def test_a_lever_for_machines_is_pulled_for_none_without_a_name(
    options: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The allowed names are the only guard of such a command."""
    with pytest.raises(HarnessError, match="lever flag is for machines"):
        breaker(tmp_path).do("flag", "")


def test_two_that_come_together_are_one_after_the_other(
    options: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machines = breaker(tmp_path)
    with ThreadPoolExecutor(2) as threads:
        attempts = [threads.submit(machines.do, "flag", machine) for machine in ("node1", "node2")]
    assert [attempt.exception() is None for attempt in attempts].count(True) == 1


def test_one_machine_is_broken_at_a_time(options: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machines = breaker(tmp_path)
    put_back = machines.do("flag", "node1")
    with pytest.raises(HarnessError, match="node2 is not broken: node1 is still broken"):
        machines.do("flag", "node2")
    put_back()
    machines.do("flag", "node2")


def test_a_lever_that_is_not_there_is_refused_before_anything_starts(
    options: pytest.MonkeyPatch, harness: Harness
) -> None:
    with pytest.raises(
        BadInput, match=r"lever='off': use one of .* with {machine} in its words: power-cut, n"
    ):
        run(harness, LoseMachine(rank=1, at_step=AT, lever="off"))
    with pytest.raises(
        BadInput, match=r"lever='power-cut': use one of .* without {machine}: api-stop"
    ):
        run(harness, StopApiServer(at_step=AT, lever="power-cut"))


def test_without_levers_or_machines_the_fault_says_what_to_do(options: pytest.MonkeyPatch) -> None:
    assert LoseMachine.unavailable() == StopApiServer.unavailable() == ""
    with options.context() as patch:
        patch.delenv(f"{VARIABLE}LEVERS")
        assert "LEVERS=FILE" in LoseMachine.unavailable()
        patch.delenv(f"{VARIABLE}MACHINES")
        assert "MACHINES=" in LoseMachine.unavailable()


@pytest.mark.promise("**A machine may be lost between two runs**")
def test_a_machine_is_lost_between_two_runs(harness: Harness, session: str) -> None:
    """Streams to the pods of the lost machine stay open, and the API server reports it as ready:
    the next run gets other pods.
    """
    warm = run(harness, steps=20)
    assert warm.verdict.value == "passed", warm.reasons
    machine = machine_of("node1", session)
    tool = [os.environ[pods.VARIABLE_OF_TOOL], "node"]
    subprocess.run([*tool, "power-cut", machine.removeprefix("node")], check=True)
    try:
        outcome = run(harness, steps=20)
        assert outcome.verdict.value == "passed", outcome.reasons
        assert machine not in {machine_of(f"node{number}", session) for number in range(3)}
    finally:
        subprocess.run([*tool, "start", machine.removeprefix("node")], check=True)


def test_a_machine_is_put_back_when_pytest_is_killed(
    options: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The guard undoes the command on the machine where it ran; it needs neither driver nor run."""
    (tmp_path / "test_it.py").write_text(
        f"from faults import LoseMachine\n\n\ndef test_it(chaos):\n"
        f"    chaos.run({STEADY!r}, nodes=2, spares=0, steps=100000, twin=False, deadline_s=300,\n"
        f"              faults=[LoseMachine(rank=1, at_step={AT})])\n"
    )
    command = [
        "python",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--chaos-substrate",
        "kubernetes",
        ".",
    ]
    before = sessions()
    with subprocess.Popen(
        command, cwd=tmp_path, env=dict(os.environ), start_new_session=True
    ) as process:
        is_off = wait_until(
            lambda: any(not is_on(machine) for machine in BREAKABLE), "the power cut", limit_s=120.0
        )
        assert is_off is not False
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: all(is_on(machine) for machine in BREAKABLE), "the power", limit_s=60.0)
    wait_until(lambda: not sessions() - before, "the end of its session", limit_s=120.0)


# -- what is left of sessions that are gone --------------------------------------------------------


@pytest.mark.parametrize("how", ["cordon", "taint", "flag"])
def test_what_a_session_that_is_gone_has_broken_is_put_back(
    options: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    """Any session can put the machine back: its annotation records what was done to it."""
    breaker(tmp_path).do(how, "node1")
    assert marks_of("node1") or (tmp_path / "node1").exists()
    (left,) = put_back_left(make_api(), make_options(tmp_path))
    assert (
        str(left)
        == f"put back: node1, which session {pods.namespace()}/a-session has broken: {how}"
    )
    wait_until(
        lambda: not marks_of("node1"), "the end of its marks"
    )  # some marks are set by the cluster itself
    assert not (tmp_path / "node1").exists()
    assert [*put_back_left(make_api(), make_options(tmp_path))] == []


def test_what_a_living_session_has_broken_is_left_alone(
    options: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = f"/apis/batch/v1/namespaces/{pods.namespace()}/jobs"
    inside = {"restartPolicy": "Never", "containers": [{"name": "one", "image": pods.IMAGE}]}
    job = {
        "metadata": {"name": "a-session"},
        "spec": {"parallelism": 0, "template": {"spec": inside}},
    }
    pods.ask("POST", path, job)
    try:
        put_back = breaker(tmp_path).do("cordon", "node1")
        assert [*put_back_left(make_api(), make_options(tmp_path))] == []
        with pytest.raises(
            HarnessError,
            match=f"node1 is not broken: session {pods.namespace()}/a-session has broken",
        ):
            breaker(tmp_path, "another").do("flag", "node1")
        put_back()
        breaker(tmp_path, "another").do("flag", "node1")()
    finally:
        pods.ask("DELETE", f"{path}/a-session")


def test_a_lever_that_is_not_there_any_more_is_told(
    options: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    breaker(tmp_path).do("flag", "node1")
    (left,) = put_back_left(make_api(), make_options(tmp_path, levers=""))
    assert (
        "left broken: node1 (or it is unknown whether a session has broken it): name a file"
        in str(left)
    )


def test_a_guard_leaves_no_note_on_a_machine(options: pytest.MonkeyPatch) -> None:
    """A later session would otherwise undo changes that people have made to that machine
    meanwhile.
    """
    with subprocess.Popen([sys.executable, "-c", _BROKEN], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"broken\n"
        assert BROKEN in pods.ask("GET", "/api/v1/nodes/node1")["metadata"]["annotations"]
        process.send_signal(signal.SIGKILL)
    path = "/api/v1/nodes/node1"
    wait_until(
        lambda: BROKEN not in pods.ask("GET", path)["metadata"]["annotations"],
        "the end of the note",
    )
    wait_until(lambda: not marks_of("node1"), "the undo of its mark")


_BROKEN = """
import time
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi
from chaoskit.substrate.kubernetes.machines.machines import Machines
from chaoskit.substrate.kubernetes.options import KubernetesOptions
from chaoskit.substrate.undo import UndoLog
options = KubernetesOptions(machines="node1", strangers="allow")
Machines(KubernetesApi(), "a-session", options, UndoLog()).do("taint", "node1")
print("broken", flush=True)
time.sleep(60)
"""


def test_the_machine_of_this_process_is_left_alone(
    options: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(
        HarnessError, match="node1 is not broken: the process that would have to repair it"
    ):
        breaker(tmp_path, own_machine="node1").do("flag", "node1")
    breaker(tmp_path, own_machine="node1").do("flag", "node2")


@pytest.mark.promise("the next session puts the machine back")
def test_a_machine_is_put_back_when_pytest_and_its_guard_are_killed(
    options: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """None of pytest's processes is left, as when the pod in which pytest ran ends."""
    (tmp_path / "test_it.py").write_text(
        f"from faults import TaintMachine\n\n\ndef test_it(chaos):\n"
        f"    chaos.run({STEADY!r}, nodes=2, spares=0, steps=100000, twin=False, deadline_s=300,\n"
        f"              faults=[TaintMachine(rank=1, at_step={AT})])\n"
    )
    alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command = [*alone, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    before = sessions()
    with subprocess.Popen(
        [*command, "--chaos-substrate", "kubernetes", "."], cwd=tmp_path
    ) as process:
        wait_until(lambda: any(map(marks_of, BREAKABLE)), "the taint", limit_s=120.0)
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not sessions() - before, "the end of its session", limit_s=180.0, poll_s=0.5)
    assert any(map(marks_of, BREAKABLE))
    host = make_host("kubernetes")
    host.reach()
    host.close()
    assert not any(map(marks_of, BREAKABLE))


def is_on(machine: str) -> bool:
    """Return whether the machine's kubelet runs: a process of this host, in a network namespace of
    its own.
    """
    sockets = subprocess.run(
        [os.environ[pods.VARIABLE_OF_TOOL], "in", machine.removeprefix("node"), "ss", "-ltn"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return ":10250" in sockets.stdout
