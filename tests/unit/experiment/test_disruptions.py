"""Pods that are taken away from outside the session: how this is shown, and how a run is judged by
it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chaoskit.experiment.judge.judge import judge, reasons_of
from chaoskit.experiment.plan.plan import plan_experiment
from chaoskit.experiment.run.disruptions import NAME
from chaoskit.experiment.run.run import RawRun
from chaoskit.journal import Journal
from chaoskit.runlog.outcome import COMMITTED_STEPS, COMPLETED, RECOVERED, Outcome
from chaoskit.substrate.kubernetes.pods.disruption import (
    ENDED_BY,
    disruption_of,
    end_of_session,
    loss_of_machine,
)
from chaoskit.vocabulary import HUNG, Event, Verdict
from chaoskit.wire.messages import EndJob
from faults import (
    ClockJump,
    DeleteCoordinatorPod,
    Fault,
    FreezeNode,
    Kill,
    LoseMachine,
    ReplaceNode,
    Straggle,
)

DELETED: dict[str, Any] = {
    "deletionTimestamp": "2026-08-01T12:00:30Z",
    "deletionGracePeriodSeconds": 30,
}


NOT_READY = [("NodeNotReady", "Node is not ready")]


def pod(
    *,
    reason: str = "",
    message: str = "",
    deleted: bool = False,
    status: str = "",
    ready: str = "True",
    **more: Any,
) -> dict[str, Any]:
    """Return a pod object.

    Args:
        reason: the reason of its condition DisruptionTarget.
        status: the reason in its status.
    """
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
    conditions = [{"type": "Ready", "status": ready}, *([condition] if reason else [])]
    words = {"reason": status, "message": "unresponsive"} if status else {}
    return {
        "metadata": {"name": "p", **(DELETED if deleted else {})},
        "status": {"phase": "Running", **words, **more, "conditions": conditions},
    }


@pytest.mark.parametrize(
    ("found", "events", "cause", "proof"),
    [
        (None, [], "deleted", "the API server has no such pod any more"),
        (None, [("Killing", "Stopping container node")], "deleted", "no such pod"),
        (None, [("Preempted", "by 7a")], "preempted", "event Preempted, by 7a; the API server has"),
        (pod(deleted=True), [], "deleted", "deletionTimestamp 2026-08-01T12:00:30Z, grace 30 s"),
        (
            pod(deleted=True),
            [("ScaleDown", "deleting\npod")],
            "deleted for the autoscaler",
            "deleting pod",
        ),
        (
            pod(reason="EvictionByEvictionAPI", deleted=True),
            [],
            "evicted",
            "DisruptionTarget: EvictionByEvictionAPI",
        ),
        (
            pod(reason="PreemptionByScheduler", message="for b"),
            [],
            "preempted",
            "PreemptionByScheduler, for b",
        ),
        (
            pod(reason="DeletionByTaintManager", deleted=True),
            [],
            "deleted for a taint of its machine",
            "grace 30 s",
        ),
        (pod(reason="DeletionByPodGC"), [], "deleted with its machine", "DeletionByPodGC"),
        (
            pod(reason="TerminationByKubelet", phase="Failed"),
            [],
            "ended by its machine",
            "TerminationByKubelet",
        ),
        (pod(reason="OfAnotherRelease"), [], "disrupted", "OfAnotherRelease"),
        (
            pod(deleted=True, status="NodeLost"),
            [],
            "lost with its machine",
            "NodeLost, unresponsive; deletion",
        ),
        (
            pod(ready="False"),
            NOT_READY,
            "lost with its machine",
            "event NodeNotReady, Node is not ready",
        ),
    ],
)
def test_what_the_api_server_shows_of_a_pod_that_is_taken(
    found: dict[str, Any] | None, events: list[tuple[str, str]], cause: str, proof: str
) -> None:
    disruption = disruption_of(
        found, [{"reason": reason, "message": message} for reason, message in events]
    )
    assert (disruption.cause if disruption else "") == cause
    assert proof in (disruption.detail if disruption else "")
    assert "\n" not in str(disruption)


@pytest.mark.parametrize(
    "status",
    [
        {"phase": "Running"},
        {"phase": "Succeeded"},
        {
            "phase": "Failed",
            "containerStatuses": [
                {"state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}
            ],
        },
        {"phase": "Failed", "reason": "DeadlineExceeded"},
    ],
)
def test_a_pod_that_fails_by_itself_is_not_taken(status: dict[str, Any]) -> None:
    """The pod's processes have ended by themselves; no client asked for that."""
    assert disruption_of({"metadata": {"name": "p"}, "status": status}, []) is None


RUNS: dict[str, Any] = {"name": "node", "state": {"running": {}}}
ENDED: dict[str, Any] = {"name": "node", "state": {"terminated": {"exitCode": 1}}}


@pytest.mark.parametrize(
    ("found", "events"),
    [
        (pod(), NOT_READY),  # the pod was not ready some time ago
        (pod(ready="False", containerStatuses=[RUNS]), []),
        (
            pod(ready="False", containerStatuses=[RUNS, ENDED]),
            NOT_READY,
        ),  # a container of the pod has ended by itself
        (pod(ready="False", phase="Failed"), NOT_READY),
    ],
)
def test_a_machine_that_was_not_ready_once_explains_no_later_end(
    found: dict[str, Any], events: list[tuple[str, str]]
) -> None:
    assert (
        disruption_of(found, [{"reason": reason, "message": message} for reason, message in events])
        is None
    )


def node(status: str = "Unknown", *, deleted: bool = False, **spec: Any) -> dict[str, Any]:
    ready = {
        "type": "Ready",
        "status": status,
        "reason": "NodeStatusUnknown",
        "message": "Kubelet stopped\nposting",
    }
    return {"metadata": DELETED if deleted else {}, "spec": spec, "status": {"conditions": [ready]}}


@pytest.mark.parametrize(
    ("found", "proof"),
    [
        (None, "the API server has no node m1 any more"),
        (node(), "node m1: Ready is Unknown, NodeStatusUnknown, Kubelet stopped posting"),
        (node("False"), "node m1: Ready is False"),
        (node("True", deleted=True), "node m1: deletionTimestamp 2026-08-01T12:00:30Z"),
        (
            node(
                "True",
                taints=[
                    {"key": "node.cloudprovider.kubernetes.io/shutdown", "effect": "NoSchedule"}
                ],
            ),
            "node m1: taint node.cloudprovider.kubernetes.io/shutdown",
        ),
        (
            node("True", taints=[{"key": "dedicated", "effect": "NoSchedule"}], unschedulable=True),
            "",
        ),
        ({"metadata": {}, "status": {}}, ""),  # the machine has never reported
    ],
)
def test_what_the_api_server_shows_of_a_machine_that_is_lost(
    found: dict[str, Any] | None, proof: str
) -> None:
    loss = loss_of_machine("m1", found)
    assert (loss.cause if loss else "") == ("lost with its machine" if proof else "")
    assert (loss.detail if loss else "").startswith(proof)


def test_a_pod_that_its_kubelet_has_ended_says_so_in_its_status() -> None:
    disruption = disruption_of(
        {
            "metadata": {},
            "status": {"phase": "Failed", "reason": "Evicted", "message": "low on disk"},
        }
    )
    assert str(disruption) == "ended by its machine (Evicted, low on disk)"


def job(
    *, annotations: dict[str, str] | None = None, deleted: bool = False, reason: str = ""
) -> dict[str, Any]:
    conditions = [{"type": "Failed", "status": "True", "reason": reason}] if reason else []
    return {
        "metadata": {"name": "s", "annotations": annotations or {}, **(DELETED if deleted else {})},
        "spec": {"activeDeadlineSeconds": 86400},
        "status": {"conditions": conditions},
    }


NAMESPACE: dict[str, Any] = {"metadata": {"name": "chaos"}, "status": {"phase": "Active"}}
TAKEN = disruption_of(pod(reason="EvictionByEvictionAPI"))


@pytest.mark.parametrize(
    ("namespace", "found", "told"),
    [
        (None, None, "the namespace of the session was deleted"),
        (
            {**NAMESPACE, "status": {"phase": "Terminating"}},
            job(deleted=True),
            "the namespace of the session was deleted",
        ),
        (NAMESPACE, None, "the Job s of the session was deleted"),
        (NAMESPACE, job(deleted=True), "the Job s of the session was deleted"),
        (
            NAMESPACE,
            job(annotations={ENDED_BY: "ann@laptop"}),
            "ann@laptop has ended the session with",
        ),
        (
            NAMESPACE,
            job(annotations={ENDED_BY: "ann@laptop"}, deleted=True),
            "ann@laptop has ended the session with",
        ),
        (
            NAMESPACE,
            job(reason="BackoffLimitExceeded"),
            "the pod of the session's Job was evicted (DisruptionTarget: Evict",
        ),
    ],
)
def test_what_ends_a_session_is_told_as_that(
    namespace: dict[str, Any] | None, found: dict[str, Any] | None, told: str
) -> None:
    """The end is not reported as the loss of the session's pods, which follows from it."""
    assert end_of_session("s", namespace, found, TAKEN).startswith(told)


def test_a_session_ends_by_its_deadline_or_by_itself() -> None:
    late = job(reason="DeadlineExceeded")
    assert (
        end_of_session("s", NAMESPACE, late)
        == "the Job of the session has reached its deadline of 86400 s"
    )
    assert (
        end_of_session("s", NAMESPACE, late, TAKEN)
        == "the Job of the session has reached its deadline of 86400 s"
    )
    assert end_of_session("s", NAMESPACE, job()) == ""
    assert end_of_session("s", NAMESPACE, job(reason="BackoffLimitExceeded")) == ""


# -- how a run is judged ---------------------------------------------------------------------------

S = 10**9


class JournalScript:
    """A script of journals of a run with two ranks, and its verdict."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        names = (
            "coordinator",
            "substrate",
            "harness",
            "node0",
            "node1",
            "node0.0",
            "node1.0",
            "node1.1",
        )
        self.journals = {
            name: Journal(directory / "journal", name, role=name.partition(".")[0])
            for name in names
        }
        self.plan(1, "node0.0", "node1.0", at_s=1)
        for worker in ("node0.0", "node1.0"):
            self.journals[worker[:5]].write(Event.WORKER_STARTED, t_ns=S, worker=worker, pid=1)

    def plan(self, generation: int, *workers: str, at_s: float) -> None:
        members = [
            {"worker": worker, "node": worker[:5], "rank": rank}
            for rank, worker in enumerate(workers)
        ]
        fields = {"generation": generation, "members": members, "abort": generation > 1}
        self.journals["coordinator"].write(Event.PLAN, t_ns=int(at_s * S), **fields)

    def lost(self, worker: str, at_s: float, cause: str = "exited", rank: int | None = 1) -> None:
        fields = {"worker": worker, "rank": rank, "cause": cause, "detail": "pidfd"}
        self.journals["coordinator"].write(Event.DETECTED, t_ns=int(at_s * S), **fields)

    def taken(self, node: str, at_s: float, role: str = "node") -> None:
        fields = {
            "node": node,
            "role": role,
            "pod": f"s-{node}-a",
            "cause": "evicted",
            "detail": "DisruptionTarget",
        }
        self.journals["substrate"].write(Event.POD_TAKEN, t_ns=int(at_s * S), **fields)

    def write(self, source: str, event: Event, at_s: float, **fields: Any) -> None:
        self.journals[source].write(event, t_ns=int(at_s * S), **fields)

    def judged(self, end: EndJob | None = None, *, ended_s: int = 100, **plan: Any) -> Outcome:
        self.write("coordinator", Event.JOB_ENDED, ended_s, ok=end is None or end.ok, reason="")
        experiment = plan_experiment("gpt", nodes=2, **plan)
        run = RawRun(
            experiment,
            self._directory,
            0,
            (ended_s + 1) * S,
            end or EndJob(True, ""),
            deadline_passed=False,
        )
        return judge(run, None, "kubernetes")


def verdict_of(outcome: Outcome, name: str) -> Verdict | None:
    return next((check.verdict for check in outcome.checks if check.name == name), None)


@pytest.fixture
def script(tmp_path: Path) -> JournalScript:
    return JournalScript(tmp_path)


@pytest.mark.parametrize("first_sign_s", [49.0, 50.5], ids=["before the loss", "just after it"])
def test_a_loss_with_a_pod_that_was_taken_is_no_false_alarm(
    script: JournalScript, first_sign_s: float
) -> None:
    """The loss is an incident with a known cause, and the run gives no verdict on the planned
    fault.
    """
    script.lost("node1.0", 50)
    script.taken("node1", first_sign_s)
    outcome = script.judged()
    assert verdict_of(outcome, "no false alarm") == Verdict.PASSED
    assert verdict_of(outcome, NAME) == Verdict.UNKNOWN
    assert outcome.false_alarms == 0
    (detail,) = [check.detail for check in outcome.checks if check.name == NAME]
    assert (
        detail == "the pod of node1 (s-node1-a) was evicted, and not by this run: DisruptionTarget"
    )


@pytest.mark.parametrize(
    ("worker", "at_s", "why"),
    [
        ("node0.0", 50, "it was in another pod"),
        ("node1.0", 20, "its pod was there still"),
        ("node1.1", 70, "it was started in the pod that replaced it"),
    ],
)
def test_other_losses_are_false_alarms_still(
    script: JournalScript, worker: str, at_s: float, why: str
) -> None:
    script.taken("node1", 50)
    script.write("harness", Event.NODE_REPLACED, 60, node="node1")
    script.write("node1", Event.WORKER_STARTED, 61, worker="node1.1", pid=2)
    script.lost(worker, at_s)
    outcome = script.judged()
    assert verdict_of(outcome, "no false alarm") == Verdict.FAILED, why


def test_a_worker_is_found_by_its_plan_where_its_start_went_with_the_node(
    script: JournalScript,
) -> None:
    script.plan(2, "node0.0", "node1.1", at_s=10)
    script.lost("node1.1", 50)
    script.taken("node1", 50)
    assert verdict_of(script.judged(), "no false alarm") == Verdict.PASSED


def test_a_record_that_went_with_the_coordinators_pod_is_no_false_alarm(
    script: JournalScript,
) -> None:
    script.taken("coordinator", 50, role="coordinator")
    script.write(
        "coordinator",
        Event.RECORD_LOST,
        51,
        node="node0",
        generation=2,
        known=1,
        detail="it has seen more",
    )
    outcome = script.judged()
    assert verdict_of(outcome, "no false alarm") == Verdict.PASSED
    assert any(
        "the pod of the coordinator" in check.detail
        for check in outcome.checks
        if check.name == NAME
    )


@pytest.mark.parametrize(
    ("role", "at_s"), [("standby", 50), ("node", 100.5)], ids=["stood by", "after the end"]
)
def test_a_pod_that_the_job_did_not_need_is_told_and_changes_nothing(
    script: JournalScript, role: str, at_s: float
) -> None:
    script.taken("node1", at_s, role=role)
    assert verdict_of(script.judged(), NAME) == Verdict.PASSED


ACT = {
    "worker": "node1.0",
    "rank": 1,
    "node": "node1",
    "pid": 1,
    "step": 5,
    "phase": "forward",
    "waiting": "",
}


def struck(
    script: JournalScript, at_s: float, seen_s: float = 0.0, *, nodes: tuple[str, ...] = ()
) -> None:
    """Have the only fault of the plan strike; ``seen_s``, if given, is the time of its evidence."""
    script.write(
        "harness",
        Event.INJECTED,
        at_s,
        fault="fault0",
        what="",
        **ACT,
        nodes=nodes,
        done_ns=int(at_s * S),
    )
    if seen_s:
        script.write(
            "harness", Event.EVIDENCE, seen_s, fault="fault0", observed="heard", evidence={}
        )


@pytest.mark.parametrize(
    ("fault", "struck_s", "back", "verdict"),
    [
        (
            ReplaceNode(rank=1, at_step=5),
            60,
            None,
            Verdict.UNKNOWN,
        ),  # another pod was created, and waited for
        (ReplaceNode(rank=1, at_step=5), 40, None, Verdict.PASSED),  # the node was back by then
        (ReplaceNode(rank=1, at_step=5), 0, None, Verdict.UNKNOWN),  # the fault could not strike
        (LoseMachine(rank=1, at_step=5), 40, None, Verdict.UNKNOWN),
        (LoseMachine(rank=1, at_step=5), 40, (Event.NODE_REPLACED, 45), Verdict.PASSED),
        (LoseMachine(rank=1, at_step=5), 40, (Event.NODE_REPLACED, 55), Verdict.UNKNOWN),
        (DeleteCoordinatorPod(rank=1, at_step=5), 40, (Event.RESUMED, 45), Verdict.PASSED),
        (DeleteCoordinatorPod(rank=1, at_step=5), 40, (Event.RESUMED, 55), Verdict.UNKNOWN),
        (Kill(rank=1, at_step=5), 60, None, Verdict.PASSED),  # the fault needs no pod
    ],
    ids=str,
)
def test_a_pod_that_stands_by_for_a_fault_is_needed_until_what_it_replaces_is_back(
    script: JournalScript,
    fault: Fault,
    struck_s: float,
    back: tuple[Event, float] | None,
    verdict: Verdict,
) -> None:
    script.taken("standby0", 50, role="standby")
    if struck_s:
        struck(script, struck_s, struck_s + 5)
    if back is not None:
        script.write("harness", back[0], back[1], node="node1", term=2, generation=1, events=1)
    (check,) = [check for check in script.judged(faults=[fault]).checks if check.name == NAME]
    assert check.verdict == verdict
    assert check.detail.endswith(
        "a fault needs it" if verdict == Verdict.UNKNOWN else "the job did not need it"
    )


@pytest.mark.parametrize(
    ("returns", "verdict"),
    [
        ([(Event.NODE_REPLACED, "node1", 45)], Verdict.UNKNOWN),
        ([(Event.NODE_REPLACED, "node1", 45), (Event.NODE_REPLACED, "node2", 46)], Verdict.PASSED),
        ([(Event.NODE_REPLACED, "node1", 45), (Event.NODE_REPLACED, "node3", 46)], Verdict.UNKNOWN),
        ([(Event.NODE_REPLACED, "node1", 45), (Event.RESUMED, "", 46)], Verdict.UNKNOWN),
    ],
)
def test_a_machine_is_back_with_all_of_its_nodes(
    script: JournalScript, returns: list[tuple[Event, str, float]], verdict: Verdict
) -> None:
    script.taken("standby0", 50, role="standby")
    struck(script, 40, 41, nodes=("node1", "node2"))
    for event, node, at_s in returns:
        script.write("harness", event, at_s, node=node, term=2, generation=1, events=1)
    assert verdict_of(script.judged(faults=[LoseMachine(rank=1, at_step=5)]), NAME) == verdict


def test_a_pod_that_leaves_without_a_loss_is_not_hidden(script: JournalScript) -> None:
    """The rank of the pod leaves at a step boundary with an elastic policy, and no loss is
    detected.
    """
    script.taken("node1", 50)
    assert verdict_of(script.judged(), NAME) == Verdict.UNKNOWN


def test_a_run_that_fails_names_the_pod_that_was_taken_meanwhile(script: JournalScript) -> None:
    """The reader of a false alarm would otherwise look for its cause in the runtime only."""
    script.taken("coordinator", 50, role="coordinator")
    script.lost("node0.0", 60)
    checks = [check for check in script.judged().checks if check.name in (NAME, "no false alarm")]
    alarm, pod = reasons_of(checks, Verdict.FAILED)
    assert alarm.startswith("no false alarm: node0.0")
    assert pod.startswith("the pod of the coordinator (s-coordinator-a) was evicted")
    assert reasons_of(checks, Verdict.UNKNOWN) == [f"{NAME}: {pod}"]
    assert reasons_of(checks, Verdict.PASSED) == []


def test_a_run_that_more_was_taken_from_than_planned_has_not_failed(script: JournalScript) -> None:
    """Checks that depend on the extent of the loss are unknown; checks that hold for any loss fail
    as usual.
    """
    script.lost("node1.0", 50)
    script.taken("node1", 50)
    fields = {"generation": 1, "rank": 0, "world": 2, "grad_sum": 0}
    for worker, loss in (("node0.0", 1.0), ("node1.0", 2.0)):
        script.write(worker, Event.COMMIT, 40, step=0, loss=loss, **fields)
    outcome = script.judged(EndJob(False, "no node is left"), steps=10)
    assert verdict_of(outcome, COMPLETED) == Verdict.UNKNOWN
    assert verdict_of(outcome, RECOVERED) == Verdict.UNKNOWN
    assert verdict_of(outcome, COMMITTED_STEPS) == Verdict.PASSED
    assert verdict_of(outcome, "one committed history") == Verdict.FAILED


COSTS = "property 16L: k faults cost k bounds"
COMMITTED = {"world": 2, "grad_sum": 0, "loss": 1.0, "step": 0}


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_recovery_that_takes_long_has_not_failed_where_more_was_taken(
    script: JournalScript, is_taken: bool
) -> None:
    """Each loss is allowed a bound; the number of losses is not given by the plan alone."""
    script.lost("node1.0", 50)
    if is_taken:
        script.taken("node1", 50)
    else:
        struck(script, 50, 50)
    script.plan(2, "node0.0", "node1.1", at_s=900)
    for rank, worker in enumerate(("node0.0", "node1.1")):
        script.write(worker, Event.COMMIT, 950, generation=2, rank=rank, **COMMITTED)
    outcome = script.judged(ended_s=1000, faults=[] if is_taken else [Kill(rank=1, at_step=5)])
    assert verdict_of(outcome, COSTS) == (Verdict.UNKNOWN if is_taken else Verdict.FAILED)


@pytest.mark.parametrize(
    ("taken", "term", "verdict"),
    [
        (None, 2, Verdict.FAILED),
        ("node", 2, Verdict.FAILED),  # the record was in another pod
        ("coordinator", 2, None),  # the check is among those that passed
        (
            "coordinator",
            1,
            Verdict.FAILED,
        ),  # the loss of a record explains no second term of this number
    ],
)
def test_only_a_coordinators_pod_takes_the_record_along(
    script: JournalScript, taken: str | None, term: int, verdict: Verdict | None
) -> None:
    if taken is not None:
        script.taken("node1" if taken == "node" else taken, 50, role=taken)
    script.write(
        "coordinator",
        Event.RECORD_LOST,
        51,
        node="node0",
        generation=2,
        known=1,
        detail="it has seen more",
    )
    script.write("coordinator", Event.RESUMED, 52, term=term, generation=1, events=1)
    assert verdict_of(script.judged(), "property 11S: terms increase") == verdict


@pytest.mark.parametrize(
    ("fault", "title"),
    [
        (Straggle(rank=1, at_step=5, delay_ms=10), "property 4S: slow ranks are kept"),
        (
            ClockJump(rank=1, at_step=5, seconds=3600.0),
            "property 28S: the wall clock decides nothing",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("taken", "verdict"), [(None, Verdict.FAILED), ("node0", Verdict.FAILED), ("node1", None)]
)
def test_a_rank_that_is_lost_with_its_pod_was_not_given_up_for_what_a_fault_did(
    script: JournalScript, fault: Fault, title: str, taken: str | None, verdict: Verdict | None
) -> None:
    struck(script, 40, 41)
    script.lost("node1.0", 50, cause=HUNG)
    if taken is not None:
        script.taken(taken, 50)
    assert verdict_of(script.judged(faults=[fault]), title) == verdict


@pytest.mark.parametrize(
    ("fault", "struck_s", "taken_s", "explained"),
    [
        (Kill(rank=1, at_step=5), 49.9, 50.5, True),  # the rank was dead before its pod went
        (FreezeNode(rank=1, at_step=5), 30, 49.0, False),  # the rank had survived the fault
    ],
    ids=str,
)
def test_the_last_act_before_a_loss_explains_it(
    script: JournalScript, fault: Fault, struck_s: float, taken_s: float, explained: bool
) -> None:
    struck(script, struck_s, nodes=("node1",) if fault.whole_node else ())
    script.lost("node1.0", 50)
    script.taken("node1", taken_s)
    outcome = script.judged(faults=[fault])
    assert verdict_of(outcome, "no false alarm") == Verdict.PASSED
    assert (
        any(evidence.level == "impactful" for evidence in outcome.faults[0].evidence) is explained
    )
    assert verdict_of(outcome, NAME) == Verdict.UNKNOWN


def test_without_a_word_of_the_api_server_nothing_is_excused(script: JournalScript) -> None:
    script.lost("node1.0", 50)
    outcome = script.judged(EndJob(False, "no node is left"), steps=10)
    assert verdict_of(outcome, "no false alarm") == Verdict.FAILED
    assert verdict_of(outcome, COMPLETED) == Verdict.FAILED
    assert verdict_of(outcome, NAME) is None
