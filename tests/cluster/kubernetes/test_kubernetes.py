"""Tests of the Kubernetes substrate on a real cluster: nodes are hardened pods, and nothing of a
session is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.nodes import pods
from support.waiting import wait_until

from chaoskit.config import DETECTION
from chaoskit.elastic.settings import ElasticPolicy
from chaoskit.errors import BadInput, HarnessError
from chaoskit.experiment.harness import Harness
from chaoskit.experiment.remote.client import RemoteHost
from chaoskit.journal import read_journals
from chaoskit.plaintext import tell_on_stderr
from chaoskit.substrate.kubernetes.driver_pod import DriverPod
from chaoskit.substrate.kubernetes.installation import ACCOUNT, installation
from chaoskit.substrate.kubernetes.options import VARIABLE, KubernetesOptions
from chaoskit.substrate.kubernetes.pods.manifests import (
    GENERATION,
    RANKS,
    RUN,
    SESSION,
    STATION,
    TEST,
    TTL_S,
)
from chaoskit.substrate.kubernetes.substrate import KubernetesSubstrate
from chaoskit.substrate.supervisor.client import SupervisorLink
from chaoskit.substrate.supervisor.messages import CrashContainer
from chaoskit.substrate.supervisor.resumable_stream import PATIENCE_S
from chaoskit.substrate.undo import UndoLog
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import NodeLost
from faults import (
    Cut,
    DeleteCoordinatorPod,
    DeletePod,
    EvictPod,
    Fault,
    Hang,
    Kill,
    KillContainer,
    KillCoordinator,
    KillNode,
    LimitCpu,
    NaN,
    PreemptPod,
    ReplaceNode,
)

pytestmark = [
    pytest.mark.skipif(bool(pods.unavailable()), reason=f"Kubernetes: {pods.unavailable()}"),
    pytest.mark.usefixtures("kubeconfig"),
]
GONE_S = 30.0
CLUSTER = pods.ROOT / "suites" / "cluster"


class Namespace:
    """The objects that a test has made in the namespace, compared with those that were there
    before.
    """

    def __init__(self) -> None:
        self._before = set(pods.everything())

    def new_objects(self) -> set[str]:
        """Return the names of all new objects of every kind."""
        return set(pods.everything()) - self._before

    def await_nothing_left(self, limit_s: float = GONE_S) -> None:
        wait_until(
            lambda: not self.new_objects(),
            f"the end of {self.new_objects()}",
            limit_s=limit_s,
            poll_s=0.5,
        )


@pytest.fixture
def namespace() -> Namespace:
    return Namespace()


@pytest.fixture(scope="module")
def kubeconfig() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", os.environ[pods.VARIABLE_OF_TESTS])
        yield


@pytest.fixture(scope="module")
def substrate(
    kubeconfig: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KubernetesSubstrate]:
    made, namespace = (
        KubernetesSubstrate(pods.options(tmp_path_factory.mktemp("pods"))),
        Namespace(),
    )
    yield made
    made.close()
    namespace.await_nothing_left()


@pytest.fixture(scope="module")
def harness(substrate: KubernetesSubstrate, tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(substrate, tmp_path_factory.mktemp("runs"))


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Write a job of two files into a directory that no pod can see, and return its path."""
    source = (pods.ROOT / "tests" / "jobs" / "failing" / "troubled.py").read_text()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "__init__.py").write_text(f"PLACE = {str(tmp_path)!r}\n")
    own = "import lib\n\nassert lib.PLACE\nprint('the job was imported', flush=True)\n"
    (tmp_path / "train.py").write_text(f"{source}\n{own}")
    (tmp_path / "large.bin").write_bytes(bytes(2**20))
    return tmp_path / "train.py"


def run(harness: Harness, fault: Fault, job: Path) -> Any:
    options = {"step_s": 0.02}
    target = f"{job}:plain"
    return harness.run(
        target,
        nodes=2,
        steps=40,
        options=options,
        faults=[fault],
        twin=False,
        **DETECTION["relaxed"],
    )


def assert_annotated(outcome: Any, test: str) -> str:
    """Check that the annotations of a run's pods give their labels in full; return the session."""
    last = max(outcome.records(Event.PLAN), key=lambda plan: plan["generation"])["generation"]

    def annotated() -> list[Any]:
        annotated_pods = pods.pods(f"{GENERATION}={last}").values()
        return [
            pod
            for pod in annotated_pods
            if pod["metadata"].get("annotations", {}).get(TEST) == test
        ]

    nodes = wait_until(
        lambda: annotated_pods if len(annotated_pods := annotated()) == 2 else [],
        "the annotations of both pods",
    )
    for pod in nodes:
        annotations, labels = pod["metadata"]["annotations"], pod["metadata"]["labels"]
        assert annotations[RUN] == Path(outcome.directory).name
        assert annotations.get(RANKS, "").replace(",", "_") == labels.get(RANKS, "")
        assert annotations[GENERATION] == labels[GENERATION]
    (session,) = {pod["metadata"]["labels"][SESSION] for pod in nodes}
    return str(session)


def assert_told_of_kill(outcome: Any, session: str, test: str) -> None:
    """Check that the Events of a session's Job report the fault, the loss and the recovery of a
    run.
    """
    run = Path(outcome.directory).name
    reasons = {"FaultInjected", "FaultLanded", "WorkerLost", "Recovered"}

    def test_events() -> dict[str, Any]:
        events = pods.events(session)
        return {
            event["reason"]: event
            for event in events
            if run in event["message"] and test in event["message"]
        }

    events = wait_until(
        lambda: matching if (matching := test_events()).keys() >= reasons else {},
        f"the Events {reasons}",
    )
    assert events.keys() == reasons
    assert {event["reason"] for event in events.values() if event["type"] == "Warning"} == {
        "FaultInjected",
        "WorkerLost",
    }
    assert {event["involvedObject"]["kind"] for event in events.values()} == {"Job"}
    last = max(outcome.records(Event.PLAN), key=lambda plan: plan["generation"])
    assert (
        f"{len(last['members'])} ranks, generation {last['generation']}"
        in events["Recovered"]["message"]
    )
    times = [events[reason]["eventTime"] for reason in ("FaultInjected", "WorkerLost", "Recovered")]
    assert times == sorted(times)


# -- runs ------------------------------------------------------------------------------------------


@pytest.mark.costly
@pytest.mark.promise("**A rank that dies is replaced inside its pod**")
def test_a_killed_rank_is_replaced_in_its_pod(
    harness: Harness, job: Path, request: pytest.FixtureRequest
) -> None:
    """No pod or container is replaced, and the journals of all pods are copied to this machine."""
    warm = run(harness, NaN(rank=1, at_step=8), job)
    assert warm.verdict.value == "passed", warm.reasons
    before = pods.pods()
    outcome = run(harness, Kill(rank=1, at_step=8), job)
    assert outcome.verdict.value == "passed", outcome.reasons
    assert {name: pod["metadata"]["uid"] for name, pod in pods.pods().items()} == {
        name: pod["metadata"]["uid"] for name, pod in before.items()
    }
    assert sum(map(pods.restarts, pods.pods().values())) == 0
    (name,) = [name for name, pod in pods.pods(f"{STATION}=node1").items() if name in before]
    assert "the job was imported" in pods.log(name), "what a rank prints, kubectl logs shows"
    last = max(outcome.records(Event.PLAN), key=lambda plan: plan["generation"])
    ranks = "_".join(str(member["rank"]) for member in last["members"] if member["node"] == "node1")
    world = {RUN: Path(outcome.directory).name, RANKS: ranks, GENERATION: str(last["generation"])}

    def labels() -> dict[str, str]:
        pod_labels = pods.pods()[name]["metadata"]["labels"]
        return {label: pod_labels.get(label, "") for label in world}

    wait_until(lambda: labels() == world, f"the labels {world}")
    assert_told_of_kill(
        outcome, assert_annotated(outcome, request.node.nodeid), request.node.nodeid
    )
    assert not [
        record
        for record in read_journals(Path(outcome.directory) / "journal")
        if record.event == Event.NODE_LOST
    ]
    journals = {path.stem for path in (Path(outcome.directory) / "journal").iterdir()}
    assert {"harness", "coordinator", "node0", "node1", "node0.0", "node1.0", "node1.1"} <= journals


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        Hang(rank=1, at_step=8, how="stop"),
        Hang(rank=1, at_step=8, how="gil"),
        KillCoordinator(at_step=8),
    ],
    ids=str,
)
def test_faults_inside_a_pod_are_proven(harness: Harness, fault: Fault, job: Path) -> None:
    outcome = run(harness, fault, job)
    assert outcome.verdict.value == "passed", outcome.reasons
    assert [record.state for record in outcome.faults] == ["confirmed"]


@pytest.mark.costly
@pytest.mark.slow
def test_a_lost_pod_is_replaced_by_another_one(harness: Harness, job: Path) -> None:
    outcome = run(harness, ReplaceNode(rank=1, at_step=8), job)
    assert outcome.verdict.value == "passed", outcome.reasons
    assert {pod["metadata"]["labels"][STATION] for pod in pods.pods().values()} >= {
        "node0",
        "node1",
        "coordinator",
    }


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [DeletePod(rank=1, at_step=8), EvictPod(rank=1, at_step=8, grace_s=5)],
    ids=str,
)
def test_a_pod_is_taken_away(harness: Harness, fault: Fault, job: Path) -> None:
    """Evidence is the answer of the API server, and the end of the pod's processes."""
    outcome = run(harness, fault, job)
    assert outcome.verdict.value == "passed", outcome.reasons
    (record,) = outcome.faults
    assert record.state == "confirmed"
    assert "the API server has no such pod any more, or says" in record.evidence[1].observed
    assert not pods.pods(f"{STATION}=node1")


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "reason"), [(-1, "its priority would be -1"), (None, "no PriorityClass with name")]
)
def test_a_pod_that_would_preempt_none_is_not_made(
    harness: Harness, job: Path, value: int | None, reason: str
) -> None:
    with pods.priority_class(value) as name, pytest.raises(HarnessError, match=reason):
        run(harness, PreemptPod(rank=1, at_step=8, priority_class=name), job)
    assert not pods.pods(f"{STATION}=preemptor")


@pytest.mark.costly
@pytest.mark.slow
def test_a_pod_that_is_gone_before_it_is_preempted_proves_nothing(
    harness: Harness, job: Path
) -> None:
    """No machine has room for the preempting pod, so the scheduler does not preempt; then the pod
    is deleted.
    """

    def delete(message: Any) -> None:
        for name in pods.pods(f"{STATION}=preemptor"):
            pods.delete(name)
            (victim,) = pods.pods(f"{STATION}=node1")
            pods.delete(victim)

    run(harness, NaN(rank=1, at_step=8), job)  # pods are warm
    with contextlib.ExitStack() as cordons:
        for machine in pods.machines():
            cordons.enter_context(pods.cordoned(machine))
        fault = PreemptPod(rank=1, at_step=8)
        outcome = harness.run(
            f"{job}:plain", nodes=2, steps=400, options={"step_s": 0.02}, faults=[fault], twin=False, watch=delete,
            **DETECTION["relaxed"],
        )  # fmt: skip
    assert outcome.verdict.value == "unknown", outcome.reasons
    assert [record["node"] for record in outcome.records(Event.NODE_LOST)] == ["node1"]


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.promise("**A pod that is lost is replaced by another one**")
@pytest.mark.parametrize(
    ("fault", "stays"),
    [(DeletePod(rank=1, at_step=8), False), (KillNode(rank=1, at_step=8), True)],
    ids=str,
)
def test_a_lost_node_is_replaced_without_a_fault(
    harness: Harness, fault: Fault, stays: bool, job: Path
) -> None:
    """A pod that still exists gets a new agent; no other pod is taken."""
    run(harness, NaN(rank=1, at_step=8), job)  # pods are warm
    (before,) = pods.pods(f"{STATION}=node1")
    outcome = harness.run(
        f"{job}:plain", nodes=2, spares=0, steps=600, options={"step_s": 0.02}, faults=[fault], twin=False,
        node_replacements=1, **DETECTION["relaxed"],
    )  # fmt: skip
    assert outcome.verdict.value == "passed", outcome.reasons
    assert [record["node"] for record in outcome.records(Event.NODE_REPLACED)] == ["node1"]
    (after,) = pods.pods(f"{STATION}=node1")
    assert (after == before) is stays


@pytest.mark.costly
@pytest.mark.slow
def test_a_run_that_ends_before_its_node_is_replaced_leaves_no_pod(
    harness: Harness, job: Path
) -> None:
    outcome = harness.run(
        f"{job}:plain", nodes=2, spares=0, steps=60, options={"step_s": 0.02}, faults=[DeletePod(rank=1, at_step=40)],
        twin=False, node_replacements=1, **DETECTION["relaxed"],
    )  # fmt: skip
    assert outcome.verdict.value == "passed", outcome.reasons
    assert outcome.records(Event.NODE_REPLACED) == []
    wait_until(
        lambda: not pods.pods(f"{STATION}=node1"), "the end of the pod that was not needed any more"
    )


@pytest.mark.costly
@pytest.mark.slow
def test_why_a_node_is_not_replaced_is_told(harness: Harness, job: Path) -> None:
    """If there is no room for another pod, training continues and the run reports the cluster's
    reason.

    The world is full again once there is room.
    """
    run(harness, NaN(rank=1, at_step=8), job)
    room = contextlib.ExitStack()

    def make_room(message: Any) -> None:
        if isinstance(message, NodeLost):
            threading.Timer(2.5, room.close).start()

    room.enter_context(pods.quota(len(pods.pods()) - 1))
    with room:
        outcome = harness.run(
            f"{job}:plain", nodes=2, spares=0, steps=600, options={"step_s": 0.02},
            faults=[DeletePod(rank=1, at_step=8)], twin=False, watch=make_room, node_replacements=1,
            **DETECTION["relaxed"],
        )  # fmt: skip
    assert outcome.verdict.value == "passed", outcome.reasons
    failed = outcome.records(Event.REPLACEMENT_FAILED)
    assert failed
    assert all("exceeded quota" in record["reason"] for record in failed)
    assert len(outcome.records(Event.NODE_REPLACED)) == 1


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("take", "cause"),
    [
        (pods.delete, "deleted, and not by this run: "),
        (pods.evict, "evicted, and not by"),
    ],
    ids=["deleted by force", "evicted"],
)
def test_a_pod_that_something_else_takes_makes_a_run_unknown(
    harness: Harness, job: Path, take: Callable[[str], None], cause: str
) -> None:
    """The pod's end costs no step and the planned fault happens, but the run's verdict would not be
    about that fault alone.
    """
    run(harness, NaN(rank=1, at_step=8), job)  # pods are warm

    def take_once(message: Any) -> None:
        if type(message).__name__ == "Formed" and not taken:
            (pod,) = pods.pods(f"{STATION}=node1")
            taken.append(pod)
            take(pod)

    taken: list[str] = []
    outcome = harness.run(
        f"{job}:plain", nodes=2, spares=0, steps=600, options={"step_s": 0.02}, faults=[Kill(rank=0, at_step=500)],
        twin=False, watch=take_once, node_replacements=1, **DETECTION["relaxed"],
    )  # fmt: skip
    assert outcome.verdict.value == "unknown", outcome.reasons
    assert [
        reason
        for reason in outcome.reasons
        if f"the pod of node1 ({taken[0]}) was {cause}" in reason
    ]
    assert outcome.false_alarms == 0
    assert [record.state for record in outcome.faults] == ["confirmed"]
    assert len(outcome.records(Event.NODE_REPLACED)) == 1


@pytest.mark.costly
@pytest.mark.slow
def test_a_container_ends_at_once(harness: Harness, job: Path) -> None:
    """The API server confirms the end some time later, and no record of the container is lost."""
    faults, options = [KillContainer(rank=1, at_step=8)], {"step_s": 0.02}
    outcome = harness.run(
        f"{job}:plain",
        nodes=2,
        steps=300,
        options=options,
        faults=faults,
        twin=False,
        **DETECTION["relaxed"],
    )
    assert outcome.verdict.value == "passed", outcome.reasons
    assert [record.state for record in outcome.faults] == ["confirmed"]
    (pod,) = pods.pods(f"{STATION}=node1").values()
    (container,) = pod["status"]["containerStatuses"]
    assert container["state"]["terminated"]["exitCode"] == 137


@pytest.mark.costly
@pytest.mark.slow
def test_a_pod_that_is_told_to_go_leaves_without_a_loss(harness: Harness, job: Path) -> None:
    """The world shrinks by a plan, with grace and an elastic policy, and no step is computed
    again.
    """
    fault = DeletePod(rank=1, at_step=8, grace_s=20)
    policy = ElasticPolicy(min_replicas=2, max_replicas=3)
    options = {"step_s": 0.02}
    outcome = harness.run(
        f"{job}:plain", nodes=3, steps=100, options=options, faults=[fault], twin=False, elastic=policy,
        **DETECTION["relaxed"],
    )  # fmt: skip
    assert outcome.verdict.value == "passed", outcome.reasons
    assert outcome.lost_steps == 0
    assert not [
        record
        for record in read_journals(Path(outcome.directory) / "journal")
        if record.event == Event.DETECTED
    ]


@pytest.mark.costly
@pytest.mark.slow
def test_an_eviction_that_a_budget_forbids_is_unknown(harness: Harness, job: Path) -> None:
    """The pod has not ended, so the fault was not tried."""
    with pods.budget():
        outcome = run(harness, EvictPod(rank=1, at_step=8), job)
    assert outcome.verdict.value == "unknown", outcome.reasons
    assert [record.state for record in outcome.faults] != ["confirmed"]


@pytest.mark.costly
@pytest.mark.slow
def test_a_container_that_does_not_end_is_unknown(
    harness: Harness, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process of the container gets the signal and does not end."""
    notify = SupervisorLink.notify
    monkeypatch.setattr(
        SupervisorLink,
        "notify",
        lambda link, message: (
            None if isinstance(message, CrashContainer) else notify(link, message)
        ),
    )
    outcome = run(harness, KillContainer(rank=1, at_step=8), job)
    assert outcome.verdict.value == "unknown", outcome.reasons


@pytest.mark.costly
@pytest.mark.slow
def test_pods_of_the_session_are_hardened_and_belong_to_its_job(
    harness: Harness, job: Path
) -> None:
    """The pods are checked as the cluster stores them, after its own defaults and those of a
    template.
    """
    run(harness, NaN(rank=1, at_step=8), job)
    session_pods = pods.pods()
    assert session_pods
    for pod in session_pods.values():
        assert pod["metadata"]["ownerReferences"][0]["kind"] == "Job"
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        (container,) = pod["spec"]["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert not any(
            "serviceaccount" in mount["mountPath"] for mount in container["volumeMounts"]
        )
    assert len({pod["metadata"]["labels"][SESSION] for pod in session_pods.values()}) == 1


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (LimitCpu(rank=1, at_step=8), "not writable"),
        (Cut(rank=1, at_step=8), "NETWORK_FAULTS=allow"),
    ],
    ids=["a limit", "a cut"],
)
def test_what_cannot_be_done_in_a_pod_is_refused(
    harness: Harness, job: Path, fault: Fault, reason: str
) -> None:
    with pytest.raises(BadInput, match=reason):
        run(harness, fault, job)


@pytest.mark.costly
@pytest.mark.slow
def test_the_first_test_of_the_page_passes(tmp_path: Path) -> None:
    """The example runs exactly as the page shows it."""
    page = (pods.ROOT / "docs" / "kubernetes.md").read_text()
    (example,) = re.findall(r"^   ```python\n(.*?)^   ```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "test_it.py").write_text(textwrap.dedent(example))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--chaos-substrate",
        "kubernetes",
        ".",
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=pods.environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.parametrize(
    "suite", ["smoke", *sorted(path.stem for path in CLUSTER.glob("test_*.py"))]
)
def test_a_suite_is_green_in_pods(suite: str, tmp_path: Path) -> None:
    """The suites run as a user would run them, with the limits of a shared machine and all
    permissions that users can give.
    """
    if suite == "test_machines" and pods.no_tool():
        pytest.skip(f"machines: {pods.no_tool()}")
    path = pods.ROOT / "suites" / "smoke" if suite == "smoke" else CLUSTER / f"{suite}.py"
    command = [sys.executable, "-m", "pytest", str(path), "-q", "-p", "no:cacheprovider"]
    allowed = {"MACHINES": "node1,node2", "STRANGERS": "allow", "NETWORK_FAULTS": "allow"}
    if not pods.no_tool():
        allowed["LEVERS"] = pods.levers(tmp_path)
    done = subprocess.run(
        [*command, "--chaos-substrate", "kubernetes"],
        env=pods.environment(tmp_path)
        | {f"{VARIABLE}{name}": setting for name, setting in allowed.items()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


# -- the driver's pod ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def driver(kubeconfig: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteHost]:
    place = DriverPod(pods.options(tmp_path_factory.mktemp("driver")), tell_on_stderr)
    made = RemoteHost(place, tell_on_stderr)
    yield made
    made.close()
    wait_until(lambda: not pods.pods(f"{STATION}=driver"), "the end of its pod", limit_s=GONE_S)


@pytest.fixture(scope="module")
def driven(driver: RemoteHost, tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(driver, tmp_path_factory.mktemp("driven"))


@pytest.mark.costly
@pytest.mark.promise("**What drives a run is a pod of its own, the *driver***")
def test_a_run_is_driven_by_a_pod_of_its_own(
    driven: Harness, job: Path, request: pytest.FixtureRequest
) -> None:
    """The driver alone may use the API server, and only for pods. Records of all pods are copied to
    this machine.
    """
    outcome = run(driven, Kill(rank=1, at_step=8), job)
    assert outcome.verdict.value == "passed", outcome.reasons
    journals = {path.stem for path in (Path(outcome.directory) / "journal").iterdir()}
    assert {"harness", "coordinator", "node0", "node1", "node0.0", "node1.0", "node1.1"} <= journals
    (session,) = {
        pod["metadata"]["labels"][SESSION] for pod in pods.pods(f"{STATION}=driver").values()
    }
    session_pods = pods.pods(f"{SESSION}={session}").values()
    asks = {
        pod["metadata"]["labels"][STATION]: pod["spec"]["automountServiceAccountToken"]
        for pod in session_pods
    }
    assert asks == {"driver": True, "coordinator": False, "node0": False, "node1": False}
    assert {pod["metadata"]["ownerReferences"][0]["name"] for pod in session_pods} == {session}
    assert assert_annotated(outcome, request.node.nodeid) == session
    assert_told_of_kill(outcome, session, request.node.nodeid)
    (driver,) = pods.pods(f"{STATION}=driver")
    name = Path(outcome.directory).name
    wait_until(
        lambda: f"chaoskit driver: run {name} ends after" in pods.log(driver),
        "the driver's log of the run",
    )
    assert f"chaoskit driver: run {name} begins" in pods.log(driver)


@pytest.mark.costly
@pytest.mark.slow
def test_every_gpu_of_a_cluster_is_for_nodes(
    namespace: Namespace, job: Path, tmp_path: Path
) -> None:
    """Two machines have a GPU each, and the template asks for one: driver and coordinator leave
    both to the nodes.
    """
    template = pods.template(tmp_path, resources={"limits": {"nvidia.com/gpu": "1", "cpu": "1"}})
    with pods.gpus(dict.fromkeys(pods.machines()[:2], 1)):
        place = DriverPod(pods.options(tmp_path, template=template), tell_on_stderr)
        drivers_of_others = pods.pods(f"{STATION}=driver").keys()
        with contextlib.closing(RemoteHost(place, tell_on_stderr)) as host:
            outcome = run(Harness(host, tmp_path / "runs"), NaN(rank=1, at_step=8), job)
            assert outcome.verdict.value == "passed", outcome.reasons
            drivers = pods.pods(f"{STATION}=driver")
            (driver,) = drivers.keys() - drivers_of_others
            session = drivers[driver]["metadata"]["labels"][SESSION]
            session_pods = pods.pods(f"{SESSION}={session}").values()
    asked = {
        pod["metadata"]["labels"][STATION]: pod["spec"]["containers"][0]["resources"]
        for pod in session_pods
    }
    assert {
        station for station, resources in asked.items() if "nvidia.com/gpu" in resources["limits"]
    } == {
        "node0",
        "node1",
    }
    assert asked["driver"] == asked["coordinator"]
    namespace.await_nothing_left()


@pytest.mark.costly
@pytest.mark.slow
def test_two_deletions_of_the_coordinators_pod_in_one_step_are_one(
    driven: Harness, job: Path
) -> None:
    """The second deletion finds a pod that is already being deleted, and has no effect."""
    faults = [DeleteCoordinatorPod(at_step=8), DeleteCoordinatorPod(at_step=8)]
    options = {"step_s": 0.02}
    outcome = driven.run(
        f"{job}:plain", nodes=2, steps=200, options=options, faults=faults, twin=False
    )
    assert sorted(record.state for record in outcome.faults) == ["confirmed", "not fired"]
    assert outcome.verdict.value == "unknown", outcome.reasons


def coordinators_pod() -> str:
    """Return the name of the coordinator's pod of the session that has a driver."""
    (session,) = {
        pod["metadata"]["labels"][SESSION] for pod in pods.pods(f"{STATION}=driver").values()
    }
    (name,) = pods.pods(f"{SESSION}={session},{STATION}=coordinator")
    return name


@pytest.mark.costly
@pytest.mark.slow
def test_a_lost_coordinators_pod_is_replaced_by_its_driver(driven: Harness, job: Path) -> None:
    """The session continues with the same pods of nodes."""
    run(driven, NaN(rank=1, at_step=8), job)
    before = pods.pods(f"{STATION}=node0")
    coordinator = coordinators_pod()
    pods.delete(coordinator)
    wait_until(lambda: coordinator not in pods.pods(), "the end of that pod")
    outcome = run(driven, NaN(rank=1, at_step=8), job)
    assert outcome.verdict.value == "passed", outcome.reasons
    assert pods.pods(f"{STATION}=node0").keys() == before.keys()


@pytest.mark.slow
@pytest.mark.costly
@pytest.mark.promise("**A lost coordinator comes back in another pod**")
def test_a_run_goes_on_with_a_coordinator_in_another_pod(driven: Harness, job: Path) -> None:
    """The coordinator's log is lost with its pod. The new coordinator replaces a rank that dies
    afterwards.
    """
    lost = DeleteCoordinatorPod(at_step=8)
    options = {"step_s": 0.02}
    faults = [lost, Kill(rank=1, at_step=150)]
    outcome = driven.run(
        f"{job}:plain", nodes=2, steps=200, options=options, faults=faults, twin=False
    )
    assert outcome.verdict.value == "passed", outcome.reasons
    resumed = [
        record
        for record in read_journals(Path(outcome.directory) / "journal")
        if record.event == Event.RESUMED
    ]
    assert len(resumed) == 1
    assert len(outcome.steps) == 200
    log = pods.log(coordinators_pod())
    assert "[coordinator] this coordinator took over from the previous one: term 2" in log, (
        "the pod that stood by"
    )


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.parametrize("grace_s", [0, 10])
def test_a_coordinators_pod_that_others_delete_is_replaced(
    driven: Harness, job: Path, grace_s: int
) -> None:
    """No pod stands by, and the processes of the pod may or may not get a signal before."""
    run(driven, NaN(rank=1, at_step=8), job)
    lost = coordinators_pod()
    deleter = threading.Timer(2.0, pods.delete, [lost, grace_s])
    deleter.start()
    faults, options = [Kill(rank=1, at_step=500)], {"step_s": 0.02}
    outcome = driven.run(
        f"{job}:plain", nodes=2, steps=600, options=options, faults=faults, twin=False
    )
    deleter.join()
    assert outcome.verdict.value == "unknown", outcome.reasons
    assert [
        reason
        for reason in outcome.reasons
        if f"the pod of the coordinator ({lost}) was deleted" in reason
    ]
    assert {check.name for check in outcome.checks if check.verdict.value != "passed"} == {
        "no pod was taken away"
    }
    (resumed,) = [
        record
        for record in read_journals(Path(outcome.directory) / "journal")
        if record.event == Event.RESUMED
    ]
    assert resumed["term"] == 2
    assert lost not in pods.pods()


@pytest.mark.costly
@pytest.mark.slow
def test_a_run_goes_on_while_the_api_server_stands_still(driven: Harness, job: Path) -> None:
    """A rank that is killed meanwhile is replaced, and all records arrive when the server
    continues.
    """
    if (server := pods.api_server()) is None:
        pytest.skip("the API server is no process of this machine")
    run(driven, NaN(rank=1, at_step=8), job)
    stopped: list[float] = []

    def stop() -> None:
        server.suspend()
        stopped.append(time.monotonic_ns())
        time.sleep(12.0)
        stopped.append(time.monotonic_ns())
        server.resume()

    stopper = threading.Timer(2.0, stop)
    stopper.start()
    faults, options = [Kill(rank=1, at_step=150)], {"step_s": 0.02}
    outcome = driven.run(
        f"{job}:plain",
        nodes=2,
        steps=600,
        options=options,
        faults=faults,
        twin=False,
        **DETECTION["relaxed"],
    )
    stopper.join()
    assert outcome.verdict.value == "passed", outcome.reasons
    (killed,) = [
        record
        for record in read_journals(Path(outcome.directory) / "journal")
        if record.event == Event.DETECTED
    ]
    assert stopped[0] < killed.t_ns < stopped[1]
    assert outcome.lost_steps == 0


@pytest.mark.costly
@pytest.mark.slow
def test_a_driver_that_is_killed_is_an_error_of_its_run_only(tmp_path: Path, job: Path) -> None:
    """Pod and session of the driver remain; the next driver replaces the pods of nodes."""
    place = DriverPod(pods.options(tmp_path), tell_on_stderr)
    with (
        contextlib.closing(RemoteHost(place, tell_on_stderr)) as host,
        Harness(host, tmp_path / "runs") as harness,
    ):

        def kill(message: Any) -> None:
            if type(message).__name__ == "Formed" and host.driver is not None:
                with contextlib.suppress(
                    ProcessLookupError
                ):  # another such message was already sent
                    host.driver.signal(signal.SIGKILL)

        with pytest.raises(HarnessError, match="the driver of the run ended"):
            harness.run(
                f"{job}:plain",
                nodes=2,
                steps=10**6,
                options={"step_s": 0.02},
                twin=False,
                watch=kill,
            )
        outcome = run(harness, NaN(rank=1, at_step=8), job)
        assert outcome.verdict.value == "passed", outcome.reasons


def end_session(session: str) -> None:
    """End a session as another user does."""
    environment = os.environ | {f"{VARIABLE}NAMESPACE": pods.namespace()}
    command = [sys.executable, "-m", "chaoskit", "cluster", "end", session]
    subprocess.run(command, env=environment, check=True, timeout=60)


def evict_driver(session: str) -> None:
    """Evict the driver's pod, as a drain of its machine does."""
    (pod,) = pods.pods(f"{SESSION}={session},{STATION}=driver")
    pods.evict(pod)


def delete_driver(session: str) -> None:
    """Delete the driver's pod by force."""
    (pod,) = pods.pods(f"{SESSION}={session},{STATION}=driver")
    pods.delete(pod)


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "why"),
    [
        (
            delete_driver,
            "pod of the session's Job was deleted .(the API server has no such pod|deletionTimestamp)",
        ),
        (
            evict_driver,
            "pod of the session's Job was evicted .DisruptionTarget: EvictionByEvictionAPI",
        ),
        (pods.delete_job, "the Job chaoskit-[0-9a-f]+ of the session was deleted"),
        (end_session, "has ended the session with chaoskit cluster end"),
    ],
)
def test_a_session_that_something_ends_is_followed_by_another_one(
    driven: Harness, job: Path, end: Callable[[str], None], why: str
) -> None:
    """The run that the session drove is an error that names the cause, and has no verdict."""
    ending: list[threading.Thread] = []

    def end_once(message: Any) -> None:
        if type(message).__name__ == "Formed" and not ending:
            (session,) = {
                pod["metadata"]["labels"][SESSION]
                for pod in pods.pods(f"{STATION}=driver").values()
            }
            ending.append(threading.Thread(target=end, args=[session]))
            ending[0].start()

    with pytest.raises(HarnessError, match=why):
        driven.run(
            f"{job}:plain",
            nodes=2,
            steps=10**6,
            options={"step_s": 0.02},
            twin=False,
            watch=end_once,
        )
    ending[0].join()
    outcome = run(driven, NaN(rank=1, at_step=8), job)
    assert outcome.verdict.value == "passed", outcome.reasons


@pytest.mark.costly
@pytest.mark.slow
def test_a_pod_that_is_deleted_before_it_runs_is_told_as_that(tmp_path: Path, job: Path) -> None:
    """The error comes at once, not when the time to start is over."""
    template = pods.template(
        tmp_path, resources={"requests": {"cpu": "1000"}}
    )  # the pod stays pending
    deleted: list[str] = []

    def delete(line: str) -> None:
        for name in pods.pods(f"{STATION}=node0"):
            pods.delete(name)
            deleted.append(name)

    substrate = KubernetesSubstrate(pods.options(tmp_path, template=template, startup_s=600.0))
    substrate.tell = delete
    with contextlib.closing(substrate), pytest.raises(HarnessError, match=r"node0: deleted \("):
        Harness(substrate, tmp_path / "runs").run(f"{job}:plain", nodes=1, steps=10, twin=False)
    assert deleted


# -- what an administrator installs, and what people see -------------------------------------------


@pytest.fixture
def person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespace: Namespace) -> Iterator[None]:
    with pods.person() as kubeconfig:
        (tmp_path / "person.json").write_text(kubeconfig)
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "person.json"))
        yield
    namespace.await_nothing_left()


def cluster(*words: str, directory: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run ``chaoskit cluster`` as the user of $KUBECONFIG, and return the finished process."""
    environment = pods.environment(directory) | {"KUBECONFIG": os.environ["KUBECONFIG"], **more}
    command = [sys.executable, "-m", "chaoskit", "cluster", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.costly
@pytest.mark.promise("The role of people is all that they need")
def test_the_role_of_people_is_all_that_they_need(person: None, tmp_path: Path, job: Path) -> None:
    """People can run with the installed account of drivers: no role is created, and the doctor
    finds no missing right.
    """
    result = cluster(
        "doctor", "--no-trial", directory=tmp_path, CHAOSKIT_KUBERNETES_SERVICE_ACCOUNT=ACCOUNT
    )
    assert result.returncode == 0, result.stdout + result.stderr
    options = pods.options(tmp_path, service_account=ACCOUNT)
    with (
        contextlib.closing(RemoteHost(DriverPod(options, tell_on_stderr), tell_on_stderr)) as host,
        Harness(host, tmp_path / "runs") as harness,
    ):
        outcome = run(harness, Kill(rank=1, at_step=8), job)
    assert outcome.verdict.value == "passed", outcome.reasons


@pytest.mark.costly
def test_the_doctor_names_each_right_that_is_missing(person: None, tmp_path: Path) -> None:
    """A session without an installed account needs more rights than people have."""
    result = cluster("doctor", "--no-trial", "--json", directory=tmp_path)
    assert result.returncode == 1
    missing = {
        finding["name"]
        for finding in json.loads(result.stdout)["findings"]
        if not finding["is_there"]
    }
    assert missing == {
        "create serviceaccounts",
        "create roles",
        "create rolebindings",
        "create pods/eviction",
        "list events",
        "patch pods",
    }


@pytest.mark.costly
@pytest.mark.slow
def test_the_doctor_asks_for_rights_over_machines(
    person: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rights are for the whole cluster, and are needed once breakable machines are named."""
    monkeypatch.setenv("CHAOSKIT_KUBERNETES_MACHINES", "node1")
    monkeypatch.setenv("CHAOSKIT_KUBERNETES_SERVICE_ACCOUNT", ACCOUNT)
    result = cluster("doctor", "--no-trial", "--json", directory=tmp_path)
    assert result.returncode == 1
    missing = {
        finding["name"]
        for finding in json.loads(result.stdout)["findings"]
        if not finding["is_there"]
    }
    rights = {"get nodes", "patch nodes", "list pods", "get leases"}
    assert missing == {f"{right} in the whole cluster" for right in rights}


@pytest.mark.costly
@pytest.mark.slow
def test_the_doctor_runs_a_job(tmp_path: Path, namespace: Namespace) -> None:
    result = cluster("doctor", directory=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "3 steps on one node" in result.stdout
    namespace.await_nothing_left()


@pytest.mark.costly
@pytest.mark.slow
def test_sessions_are_listed_and_ended(driven: Harness, job: Path, tmp_path: Path) -> None:
    """The next run begins another session."""
    run(driven, NaN(rank=1, at_step=8), job)
    (driver,) = pods.pods(f"{STATION}=driver").values()
    name = driver["metadata"]["labels"][SESSION]
    listed = json.loads(cluster("list", "--json", directory=tmp_path).stdout)["sessions"]
    assert {"session": name, "pods": 4} in [
        {key: listing[key] for key in ("session", "pods")} for listing in listed
    ]
    assert cluster("end", "other", directory=tmp_path).returncode == 2
    assert cluster("end", name, directory=tmp_path).returncode == 0
    wait_until(lambda: not pods.pods(f"{SESSION}={name}"), "the end of its pods")
    outcome = run(driven, NaN(rank=1, at_step=8), job)
    assert outcome.verdict.value == "passed", outcome.reasons


def test_a_list_of_sessions_names_a_namespace_that_is_not_there(tmp_path: Path) -> None:
    listed = cluster("list", directory=tmp_path, **{f"{VARIABLE}NAMESPACE": "not-there"})
    assert listed.returncode == 2
    assert "kubectl create namespace not-there" in listed.stderr


def test_what_is_installed_is_what_the_server_knows() -> None:
    """The server accepts each installed object in strict mode, without an unknown field."""
    for made in installation(pods.namespace(), "restricted"):
        if made["kind"] != "Namespace":  # the namespace exists already
            group = pods.GROUPS[made["kind"]]
            place = f"{group}/namespaces/{pods.namespace()}/{made['kind'].lower()}s"
            pods.ask("POST", f"{place}?dryRun=All&fieldValidation=Strict", made)


# -- bad input -------------------------------------------------------------------------------------


def begin(options: KubernetesOptions, harness: str) -> None:
    """Start the first pod of a session, and end the session."""
    if harness == "pod":
        with (
            contextlib.closing(UndoLog()) as undo,
            contextlib.closing(DriverPod(options, tell_on_stderr)) as place,
        ):
            place.open(undo).close()
    else:
        with contextlib.closing(KubernetesSubstrate(options)) as substrate:
            substrate.warm_up()


@pytest.mark.parametrize("harness", ["here", "pod"])
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"context": "elsewhere"}, "context='elsewhere'"),
        ({"namespace": "not-there"}, "kubectl create namespace not-there"),
        ({"namespace": "default"}, "kubectl label namespace default chaoskit.dev/chaos=allowed"),
        ({"namespace": "kube-system"}, "this one belongs to the cluster"),
        ({"template": {"spec": {"hostNetwork": True}}}, "remove spec.hostNetwork"),
        ({"template": {"spec": {"nodeSelectr": {}}}}, 'unknown field "spec.nodeSelectr"'),
        (
            {"template": {"spec": {"containers": [{"name": "node", "image": ""}]}}},
            "image: Required value",
        ),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:20],
)
def test_bad_input_is_told_in_a_line_and_makes_nothing(
    harness: str, given: dict[str, Any], told: str, tmp_path: Path, namespace: Namespace
) -> None:
    if isinstance(given.get("template"), dict):
        path = tmp_path / "given.json"
        path.write_text(json.dumps(given["template"]))
        given = {"template": str(path)}
    with pytest.raises(BadInput) as refused:
        begin(pods.options(tmp_path, **given), harness)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not namespace.new_objects()


TWO_TESTS = """
def test_a(chaos):
    chaos.run("gpt", nodes=2, steps=3, twin=False)

def test_b(chaos):
    chaos.run("gpt", nodes=2, steps=3, twin=False)
"""


def bad_inputs(directory: Path, tests: str, **more: str) -> list[str]:
    """Run tests in a session of their own, which must end with 2; return the line of each test's
    failure.
    """
    (directory / "test_session.py").write_text(TWO_TESTS)
    command = [
        "pytest",
        "-p",
        "no:cacheprovider",
        "--chaos-substrate",
        "kubernetes",
        "-k",
        tests,
        "--rootdir",
        ".",
    ]
    environment = pods.environment(directory) | {"KUBECONFIG": os.environ["KUBECONFIG"], **more}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env=environment,
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith("bad input: ")]
    return [
        line.rpartition(" (test_session.py:")[0] for line in lines
    ]  # drop the place, which differs between the tests


def test_a_quota_without_room_is_told_before_a_pod_is_made(
    tmp_path: Path, namespace: Namespace
) -> None:
    """The quota has room for the driver and the coordinator, but not for the pods of both nodes."""
    with pods.quota(pods=len(pods.pods()) + 3):
        first, second = bad_inputs(tmp_path, "test_a or test_b")
    assert first == second
    assert "quota='" in first
    assert "4 pods need 4" in first
    assert not namespace.new_objects()


def test_a_missing_right_is_told_before_anything_is_made(person: None, tmp_path: Path) -> None:
    """A run is refused with the rights that the doctor names."""
    namespace = Namespace()
    first, second = bad_inputs(tmp_path, "test_a or test_b")
    assert first == second
    assert first.startswith(
        "bad input: rights='create serviceaccounts, create roles, create rolebindings, patch pods"
    )
    assert not namespace.new_objects()


def test_a_cordon_is_told_before_a_pod_is_made(tmp_path: Path, namespace: Namespace) -> None:
    machine = pods.machines()[-1]
    with pods.cordoned(machine):
        (line,) = bad_inputs(tmp_path, "test_a", CHAOSKIT_KUBERNETES_MACHINES=machine)
    assert f"{machine} is cordoned" in line
    assert not namespace.new_objects()


def test_a_server_that_does_not_answer_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config"
    cluster = {"name": "c", "cluster": {"server": "https://127.0.0.1:9"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    user = {"name": "u", "user": {"token": "t"}}
    content = {
        "clusters": [cluster],
        "contexts": [context],
        "users": [user],
        "current-context": "c",
    }
    config.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **content}))
    options = pods.options(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(config))
    substrate = KubernetesSubstrate(options)
    with pytest.raises(HarnessError, match="does not answer") as refused:
        substrate.warm_up()
    substrate.close()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["3", "a: [", "{}", "contexts: 3"])
def test_a_kubeconfig_that_is_none_is_told(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is one line, whatever exception the client raises."""
    (tmp_path / "config").write_text(text)
    options = pods.options(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    substrate = KubernetesSubstrate(options)
    with pytest.raises(BadInput, match="give a kubeconfig") as refused:
        substrate.warm_up()
    substrate.close()
    assert "\n" not in str(refused.value)


@pytest.mark.costly
@pytest.mark.slow
def test_a_pod_that_could_not_be_made_is_made_for_the_next_run(
    substrate: KubernetesSubstrate, harness: Harness, job: Path
) -> None:
    """The run that needs the pod fails with the server's message; later runs pass."""
    run(harness, NaN(rank=1, at_step=8), job)
    with (
        pods.quota(pods=len(pods.pods())),
        pytest.raises(BadInput, match=r"quota='.*exceeded quota"),
    ):
        harness.run(f"{job}:plain", nodes=4, steps=20, twin=False)
    outcome = harness.run(f"{job}:plain", nodes=4, steps=20, twin=False, **DETECTION["relaxed"])
    assert outcome.verdict.value == "passed", outcome.reasons


@pytest.mark.costly
@pytest.mark.slow
def test_a_session_whose_coordinator_is_gone_is_followed_by_another_one(
    harness: Harness, job: Path
) -> None:
    run(harness, NaN(rank=1, at_step=8), job)
    driven = {pod["metadata"]["labels"][SESSION] for pod in pods.pods(f"{STATION}=driver").values()}
    coordinators = pods.pods(f"{STATION}=coordinator").values()
    (coordinator,) = [
        pod for pod in coordinators if pod["metadata"]["labels"][SESSION] not in driven
    ]
    pods.delete(coordinator["metadata"]["name"])
    wait_until(lambda: coordinator["metadata"]["name"] not in pods.pods(), "the end of that pod")
    outcome = run(harness, NaN(rank=1, at_step=8), job)
    assert outcome.verdict.value == "passed", outcome.reasons
    sessions = {pod["metadata"]["labels"][SESSION] for pod in pods.pods().values()}
    assert coordinator["metadata"]["labels"][SESSION] not in sessions


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.parametrize("harness", ["here", "pod"])
@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"image": "local.test/none:1"}, BadInput, "name an image that machines can pull"),
        ({"python": "/no/python"}, BadInput, "name the Python of the image"),
        ({"python": "/usr/bin/python3"}, BadInput, "its /usr/bin/python3 has no chaoskit"),
        ({"cpu": "1000"}, HarnessError, "(coordinator|driver): .*Insufficient cpu.*request less"),
    ],
    ids=["no image", "no python", "no chaoskit", "no room"],
)
def test_a_pod_that_cannot_run_is_told_with_the_reason_and_removed(
    harness: str,
    given: dict[str, str],
    error: type[Exception],
    told: str,
    tmp_path: Path,
    namespace: Namespace,
) -> None:
    cpu = given.get("cpu", "")
    more: dict[str, Any] = {
        **{name: setting for name, setting in given.items() if name != "cpu"},
        "startup_s": 15.0,
    }
    if cpu:
        more["template"] = pods.template(tmp_path, roles={"requests": {"cpu": cpu}})
    with pytest.raises(error, match=told):
        begin(pods.options(tmp_path, **more), harness)
    namespace.await_nothing_left()


@pytest.mark.costly
@pytest.mark.slow
def test_a_node_without_room_names_the_scarce_resource(
    tmp_path: Path, job: Path, namespace: Namespace
) -> None:
    template = pods.template(tmp_path, resources={"requests": {"cpu": "1000"}})
    substrate = KubernetesSubstrate(pods.options(tmp_path, template=template, startup_s=15.0))
    with (
        contextlib.closing(substrate),
        pytest.raises(HarnessError, match=r"node0: .*Insufficient cpu.*request less"),
    ):
        Harness(substrate, tmp_path / "runs").run(f"{job}:plain", nodes=1, steps=10, twin=False)
    namespace.await_nothing_left()


# -- nothing stays ---------------------------------------------------------------------------------

RUNNER = """
import sys
from chaoskit.experiment.harness import Harness
with Harness("kubernetes", sys.argv[1]) as harness:
    print("begins", flush=True)
    harness.run(sys.argv[2], nodes=2, steps=10**6, options={"step_s": 0.02}, twin=False)
"""


@pytest.fixture
def runner(tmp_path: Path, job: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that runs an experiment and begins to make pods."""
    started = pods.run_python(RUNNER, str(tmp_path / "runs"), f"{job}:plain", directory=tmp_path)
    assert started.stdout is not None
    started.stdout.readline()
    yield started
    started.kill()
    started.wait()
    started.stdout.close()


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.parametrize("moment", range(int(os.environ.get("CHAOSKIT_MOMENTS", "2"))))
def test_nothing_is_left_of_a_runner_that_is_killed(
    moment: int, namespace: Namespace, runner: subprocess.Popen[bytes]
) -> None:
    """The runner is killed at a random moment of its start or its run; its guard deletes the
    objects.
    """
    wait_until(namespace.new_objects, "the first object")
    with pytest.raises(subprocess.TimeoutExpired):
        runner.wait(random.uniform(0.0, 20.0))
    runner.kill()
    runner.wait()
    namespace.await_nothing_left()


@pytest.mark.costly
@pytest.mark.slow
def test_nothing_is_left_of_a_runner_and_its_guard_that_are_killed(
    namespace: Namespace, runner: subprocess.Popen[bytes]
) -> None:
    """The process that carries the stream is killed, too, so that no process is left to clean up.

    Supervisors end when their stream is closed and not made again, the job ends with its pod, and
    all objects with the Job.
    """
    wait_until(
        lambda: sum(name.startswith("pods/") for name in namespace.new_objects()) == 4,
        "the pods",
        limit_s=180.0,
    )
    processes = [psutil.Process(runner.pid), *psutil.Process(runner.pid).children(recursive=True)]
    for process in processes:
        process.kill()
    runner.wait()
    namespace.await_nothing_left(PATIENCE_S + TTL_S + 60.0)
    subprocess.run([sys.executable, "-m", "chaoskit", "cleanup"], check=True, capture_output=True)
