"""Tests of the control plane alone, and of the state of its successor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation.processes.coordinator import Coordinator
from simulation.troubles.faults import Faults
from simulation.world import World
from support.examples import examples

from chaoskit.config import RunConfig
from chaoskit.coordinator.handlers.on_generation import BROKEN_GRACE_S
from chaoskit.coordinator.handlers.on_node import REATTACH_S
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.membership.limits import LIMITS
from chaoskit.coordinator.outputs import Disconnect, End, LogEntry, Send, Show, WriteRecord
from chaoskit.coordinator.plane import ControlPlane
from chaoskit.coordinator.schedules.start_order import PATIENCE_S
from chaoskit.elastic.settings import ElasticPolicy
from chaoskit.errors import Refused
from chaoskit.job import JobSpec
from chaoskit.vocabulary import Event, Phase
from chaoskit.wire import messages
from chaoskit.wire.messages import (
    STANDING,
    AgentHello,
    EndJob,
    Endpoint,
    Exchange,
    Formed,
    GroupBroken,
    Halt,
    Healed,
    Heard,
    Heartbeat,
    NodeLost,
    OfferedSnapshot,
    Plan,
    Probe,
    RankLoss,
    Recall,
    RuleFired,
    Sealed,
    StartWorker,
    StopWorker,
    StoreStep,
    WorkerDone,
    WorkerFailed,
    WorkerLost,
    WorkerReady,
)

NODES = ("a", "b")
WORKERS = ("a.0", "b.0")


def hello(node: str, pid: int = 1, **changes: Any) -> AgentHello:
    return AgentHello(node, "host", pid, **changes)


def ready(worker: str) -> WorkerReady:
    return WorkerReady(worker, worker[0], Endpoint("host", worker, 1, 2, 3))


def lost(worker: str) -> WorkerLost:
    return WorkerLost(worker, worker[0], "killed", "", 1)


class Bench:
    """A plane with its log and all of its outputs."""

    def __init__(
        self, config: RunConfig | None = None, entries: Sequence[LogEntry] = (), now_s: float = 0.0
    ) -> None:
        self.config = config or RunConfig(job=JobSpec("job.py"), nodes=2, spares=0)
        self.plane = ControlPlane(self.config, entries, now_s)
        self.log = list(entries)
        self.outputs: list[Any] = []
        self.now_s = now_s

    def do(self, outputs: list[Any]) -> list[messages.Message]:
        """Take in the plane's outputs.

        Return the messages that it sends, each with its receiver.
        """
        self.outputs += outputs
        self.log += [output for output in outputs if isinstance(output, LogEntry)]
        sent = [(send.node, send.message) for send in outputs if isinstance(send, Send)]
        return [(node, message) for node, message in sent if not isinstance(message, Heard | Probe)]

    def attach(self, *hellos: AgentHello) -> list[Any]:
        return [sent for hello in hellos for sent in self.do(self.plane.attach(hello, self.now_s))]

    def hear(self, *said: Any) -> list[Any]:
        return [sent for message in said for sent in self.do(self.plane.hear(message, self.now_s))]

    def wait(self, seconds: float) -> list[Any]:
        self.now_s += seconds
        return self.do(self.plane.tick(self.now_s, {}))

    def go_on(self, seconds: float, *nodes: str) -> list[Any]:
        """Let time pass in which ``nodes`` send heartbeats."""
        sent = []
        for _ in range(round(seconds / 0.05)):
            sent += self.hear(*(messages.Heartbeat(node, ()) for node in nodes)) + self.wait(0.05)
        return sent

    def successor(self) -> Bench:
        """Return the bench of the next coordinator, which reads the log."""
        return Bench(self.config, self.log, self.now_s + 50.0)

    def begin(self) -> Bench:
        """Let both nodes train generation 1."""
        self.attach(hello("a"), hello("b"))
        self.hear(*map(ready, WORKERS), *(Formed(worker, 1) for worker in WORKERS))
        assert self.plane.membership.settled
        return self


def plans(sent: list[Any]) -> list[int]:
    return sorted({message.generation for _, message in sent if isinstance(message, Plan)})


def back(node: str, **changes: Any) -> AgentHello:
    """Return the greeting of the same agent to the next coordinator, with nothing new."""
    return hello(node, **({"generation": 1, "workers": (f"{node}.0",)} | changes))


# -- what the next coordinator says ----------------------------------------------------------------


def detected(outputs: Sequence[Any]) -> list[tuple[str, Any, str, int | None]]:
    """Return the losses in the journal: worker, rank, cause and time."""
    notes = [
        (note.fields, note.t_ns)
        for note in outputs
        if isinstance(note, WriteRecord) and note.event == Event.DETECTED
    ]
    return [(fields["worker"], fields["rank"], fields["cause"], t_ns) for fields, t_ns in notes]


@pytest.mark.parametrize("said_by", ["a", "b"])
def test_a_lost_rank_tells_that_its_generation_had_trained(said_by: str) -> None:
    """The state is asked for, and not begun anew, if all ranks end without a coordinator.

    The agents drop the messages of a lost worker. Its board shows that a step was committed.
    """
    bench = Bench()
    bench.attach(hello("a"), hello("b"))
    bench.hear(*map(ready, WORKERS))
    bench = bench.successor()
    bench.attach(*(back(node, workers=(), ended=(f"{node}.0",)) for node in NODES))
    assert not bench.plane.membership.settled
    losses = [
        msgspec.structs.replace(lost(f"{node}.0"), trained_in=int(node == said_by))
        for node in NODES
    ]
    sent = bench.hear(*losses)
    assert sorted(node for node, message in sent if isinstance(message, Recall)) == ["a", "b"]
    assert plans(bench.hear(ready("a.1"), ready("b.1"))) == []


def trained(worker: str, generation: int) -> Heartbeat:
    """A node shows that its rank has committed a step in a generation."""
    beat = messages.Beat(
        worker=worker,
        generation=generation,
        rank=0,
        step=1,
        phase=Phase.FORWARD,
        age_ms=1.0,
        starved_ms=0.0,
        commits=1,
        loss=0.0,
        trained_in=generation,
    )
    return Heartbeat(worker[0], (beat,))


def test_a_rank_that_trains_shows_that_its_generation_has_formed() -> None:
    """The agent of another member may be slow, and its report yet to come."""
    bench = Bench()
    bench.attach(hello("a"), hello("b"))
    bench.hear(*map(ready, WORKERS), Formed("a.0", 1))
    assert not bench.plane.membership.settled
    bench.hear(trained("a.0", 1))
    assert bench.plane.membership.settled
    bench.hear(trained("a.0", 1), Formed("b.0", 1))
    assert [note.event for note in bench.outputs if isinstance(note, WriteRecord)].count(
        Event.SETTLED
    ) == 1


def test_a_rank_shows_that_a_generation_had_formed_after_the_next_one_was_planned() -> None:
    """A rank that was to leave, and is a member again, then lacks at least one step."""
    policy = ElasticPolicy(min_replicas=1, max_replicas=2, scaling_timeout_s=0)
    bench = Bench(RunConfig(job=JobSpec("job.py"), nodes=2, spares=0, elastic=policy)).begin()
    bench.hear(messages.ScaleTo("r", 1, ""))
    bench.hear(messages.GroupBroken("a.0", 2, "a connection ended"))
    bench.go_on(0.3, *NODES)
    membership = bench.plane.membership
    assert (membership.generation, membership.members) == (3, WORKERS)
    bench.hear(trained("a.0", 2), trained("a.0", 2))
    settled = [
        note.fields
        for note in bench.outputs
        if isinstance(note, WriteRecord) and note.event == Event.SETTLED
    ]
    assert settled == [{"generation": 1}, {"generation": 2}]
    sent = bench.do(bench.plane.detach("a", "its agent has ended", bench.now_s, dead=True))
    assert [node for node, message in sent if isinstance(message, Recall)] == ["b"]


def rule_fired(worker: str, **changes: Any) -> RuleFired:
    values: dict[str, Any] = {
        "rank": 0,
        "generation": 1,
        "since_step": 3,
        "step": 3,
        "rule": "loss",
    }
    values |= {
        "verdict": "hanging",
        "action": "restart-process",
        "reason": "no match for 9 s",
        "matched": True,
    }
    return RuleFired(worker=worker, node=worker[0], **(values | changes))


def test_a_log_rule_gives_a_rank_up_once() -> None:
    bench = Bench().begin()
    sent = bench.hear(rule_fired("b.0"), rule_fired("b.0"), rule_fired("a.0"))
    assert (detected(bench.outputs), plans(sent)) == ([("b.0", 1, "log rule", 0)], [2])
    assert ("b", StopWorker("b.0", "log rule")) in sent
    notes = [
        out.fields["worker"]
        for out in bench.outputs
        if isinstance(out, WriteRecord) and out.event == Event.RULE_EXCUSED
    ]
    assert notes == ["b.0", "a.0"]


def test_an_alert_is_shown_to_who_watches_also_to_who_comes_later() -> None:
    bench = Bench().begin()
    alert = rule_fired("b.0", action="alert")
    assert bench.hear(alert) == []
    assert [output.message for output in bench.outputs if isinstance(output, Show)][-1] == alert
    assert alert in bench.plane.messages_for_observer()


def test_a_node_that_a_rule_replaces_gets_no_more_workers() -> None:
    """The successor does not use the node either; its spare must not take the rank."""
    bench = Bench(RunConfig(job=JobSpec("job.py"), nodes=2, spares=1)).begin()
    bench.hear(ready("a.1"))
    sent = bench.hear(rule_fired("a.0", action="replace-node"))
    assert [worker for worker, *_ in detected(bench.outputs)] == ["a.1", "a.0"]
    for tested in (bench, bench.successor()):
        started = {message.worker for _, message in sent if isinstance(message, StartWorker)}
        assert all(worker.startswith("b.") for worker in started)
        assert tested.plane.membership.workers_on("a") == frozenset()
        assert tested.plane.membership.workers_on("b") == {"b.0", "b.1", "b.2"}


def test_what_a_rule_has_done_is_known_to_the_next_coordinator() -> None:
    """A failure that a step brings back is no rank's fault, for the successor, too."""
    bench, bad = Bench().begin(), {"verdict": "not-a-number", "reason": "the metric is 'nan'"}
    bench.hear(rule_fired("b.0", **bad))
    heir = bench.successor()
    heir.do(heir.plane.retell())
    heir.attach(back("a", generation=2), back("b", generation=2, workers=("b.1",)))
    heir.hear(*map(ready, ("b.1",)))
    generation = heir.plane.membership.generation
    heir.hear(rule_fired("a.0", generation=generation, **bad))
    assert detected(heir.outputs) == [("b.0", 1, "log rule", 0)], (
        "the loss is told again, and there is no other"
    )
    assert [note.event for note in heir.outputs if isinstance(note, WriteRecord)][
        -1
    ] == Event.RULE_EXCUSED


def test_restarts_in_a_row_are_counted_over_coordinators() -> None:
    bench = Bench(RunConfig(job=JobSpec("job.py"), nodes=2, spares=0, max_failures=99)).begin()
    for number in range(1, 4):
        generation = bench.plane.membership.generation
        last = max(bench.plane.membership.members)
        bench.hear(rule_fired(last, generation=generation, step=9 * number, since_step=9 * number))
        if number == 3:
            break
        bench = bench.successor()
        node = last[0]
        fresh = f"{node}.{number}"
        others = tuple(bench.plane.membership.workers_on("a"))
        bench.attach(
            back("a", generation=generation, workers=others),
            back("b", generation=generation, workers=()),
        )
        bench.wait(0.1)
        plan = bench.plane.membership.generation
        bench.hear(Formed("a.0", plan), ready(fresh))
        bench.wait(2.0)
        plan = bench.plane.membership.generation
        bench.hear(*(Formed(worker, plan) for worker in bench.plane.membership.members))
        bench.hear(*(Healed(worker, plan) for worker in bench.plane.membership.members))
    (end,) = [
        note.fields
        for note in bench.outputs
        if isinstance(note, WriteRecord) and note.event == Event.JOB_ENDED
    ]
    assert end["reason"].endswith("again after 2 restarts in a row")


@pytest.mark.parametrize("written", [1, 2])
def test_a_rule_that_was_carried_out_in_part_is_carried_out(written: int) -> None:
    """The coordinator ended while it wrote: its decision, or that and the loss of the spare, are in the record."""
    bench = Bench(RunConfig(job=JobSpec("job.py"), nodes=2, spares=1)).begin()
    bench.hear(ready("a.1"))
    before = len(bench.log)
    bench.hear(rule_fired("a.0", action="replace-node"))
    assert len(bench.log) == before + 3
    del bench.log[before + written :]
    heir = bench.successor()
    heir.do(heir.plane.retell())
    assert [
        out.fields["node"]
        for out in heir.outputs
        if isinstance(out, WriteRecord) and out.event == Event.SET_ASIDE
    ] == ["a"]
    heir.attach(back("a", workers=("a.0", "a.1")), back("b"))
    heir.hear(rule_fired("a.0", action="replace-node"))  # the agent does not know that it was heard
    heir.wait(0.05)
    assert [worker for worker, *_ in detected(heir.outputs)] == ["a.1", "a.0"]
    assert heir.plane.membership.workers_on("a") == frozenset()
    heir.wait(0.05)
    assert len(detected(heir.outputs)) == 2, "once"


def test_the_last_node_is_not_set_aside() -> None:
    bench = Bench(RunConfig(job=JobSpec("job.py"), nodes=1, spares=1))
    bench.attach(hello("a"))
    bench.hear(ready("a.0"), ready("a.1"), Formed("a.0", 1), Healed("a.0", 1))
    bench.hear(rule_fired("a.0", action="replace-node"))
    assert detected(bench.outputs) == [("a.0", 0, "log rule", 0)]


def test_a_loss_that_was_written_down_and_not_told_is_told_by_the_next() -> None:
    bench = Bench().begin()
    bench.hear(lost("a.0"))
    assert detected(bench.outputs) == [("a.0", 0, "killed", 1)]
    heir = bench.successor()
    outputs = heir.plane.retell()
    assert detected(outputs) == [("a.0", 0, "killed", 1)], "rank and time are those of the loss"
    assert [output.message for output in outputs if isinstance(output, Show)] == [lost("a.0")]
    assert lost("a.0") in heir.plane.messages_for_observer(), (
        "an observer that comes later hears of it, too"
    )
    heir.attach(back("a", workers=(), ended=("a.0",)), back("b"))
    heir.hear(lost("a.0"))
    assert heir.plane.retell() == []
    assert detected(heir.outputs) == []


def test_a_plan_that_was_written_down_and_not_told_is_told_by_the_next() -> None:
    """The successor repeats the notes, each with the time of its decision, for the journal."""
    bench = Bench(RunConfig(job=JobSpec("job.py"), nodes=2, spares=1)).begin()
    bench.hear(ready("a.1"))
    bench.now_s = 3.0
    before = len(bench.outputs)
    bench.hear(lost("a.0"))
    notes = [note for note in bench.outputs[before:] if isinstance(note, WriteRecord)]
    assert [output.event for output in notes] == [Event.DETECTED, Event.PLAN]
    assert [
        note for note in bench.successor().plane.retell() if isinstance(note, WriteRecord)
    ] == notes
    assert notes[1].t_ns == 3_000_000_000


def test_an_end_that_was_written_down_and_not_told_is_told_by_the_next() -> None:
    bench = Bench().begin()
    bench.now_s = 3.0
    before = len(bench.outputs)
    bench.hear(EndJob(False, "enough"))
    notes = [note for note in bench.outputs[before:] if isinstance(note, WriteRecord)]
    assert [output.event for output in notes] == [Event.JOB_ENDED]
    assert [
        note for note in bench.successor().plane.retell() if isinstance(note, WriteRecord)
    ] == notes


def test_losses_that_the_coordinator_found_by_itself_are_told_by_the_next() -> None:
    """No agent reports an accused rank or a silent node, so the successor must."""
    bench = Bench(RunConfig(job=JobSpec("job.py"), nodes=3, spares=0))
    bench.attach(hello("a"), hello("b"), hello("c"))
    workers = ("a.0", "b.0", "c.0")
    bench.hear(*map(ready, workers), *(Formed(worker, 1) for worker in workers))
    bench.now_s = 1.0
    bench.hear(messages.Accuse("a.0", ("b.0",), 1, 5, "corrupt", "its weights"))
    assert (
        detected(bench.successor().plane.retell())
        == detected(bench.outputs)
        == [("b.0", 1, "corrupt", 1_000_000_000)]
    )
    bench.outputs.clear()
    bench.now_s = 2.0
    bench.hear(Heartbeat("a", ()))
    bench.do(bench.plane.detach("c", "gone", 2.0, dead=True))
    outputs = bench.successor().plane.retell()
    assert detected(outputs) == detected(bench.outputs) == [("c.0", 1, "node lost", 2_000_000_000)]
    assert [
        note.fields
        for note in outputs
        if isinstance(note, WriteRecord) and note.event == Event.NODE_LOST
    ] == [{"node": "c", "detail": "gone"}]


def test_an_accused_worker_is_convicted_once_though_it_is_lost_already() -> None:
    """All ranks report it, and agents repeat it to the next coordinator."""
    bench = Bench(RunConfig(job=JobSpec("job.py"), nodes=3, spares=0))
    bench.attach(hello("a"), hello("b"), hello("c"))
    workers = ("a.0", "b.0", "c.0")
    bench.hear(*map(ready, workers), *(Formed(worker, 1) for worker in workers))
    bench.hear(lost("b.0"))
    for accuser in ("a.0", "c.0"):
        bench.hear(messages.Accuse(accuser, ("b.0",), 1, 5, "corrupt", "its weights"))
    bench.hear(messages.Accuse("a.0", ("c.0",), 1, 5, "nonfinite", "its weights"))
    convicted = [output.event for output in bench.outputs if isinstance(output, LogEntry)]
    assert [event for event in convicted if isinstance(event, events.Convicted)] == [
        events.Convicted(("b.0",))
    ]
    assert [bench.successor().plane.membership.is_convicted(worker) for worker in workers] == [
        False,
        True,
        False,
    ]


def test_what_was_carried_out_is_not_told_again() -> None:
    bench = Bench().begin()
    bench.hear(lost("a.0"))
    bench.wait(1.0)
    bench.hear(ready("a.1"))
    assert detected(bench.successor().plane.retell()) == []


# -- why the world changes -------------------------------------------------------------------------


def test_a_plan_tells_of_all_losses_since_ranks_last_trained() -> None:
    bench = Bench(RunConfig(job=JobSpec("job.py"), nodes=3, spares=0))
    workers = ("a.0", "b.0", "c.0")
    bench.attach(hello("a"), hello("b"), hello("c"))
    bench.hear(*map(ready, workers))
    assert newest(bench) == (1, "", (), 0)
    bench.hear(*(Formed(worker, 1) for worker in workers))
    bench.hear(WorkerLost("b.0", "b", "killed", "by SIGKILL", 1))
    first = RankLoss("b.0", 1, "killed", "by SIGKILL")
    assert newest(bench) == (2, "rank 1: killed: by SIGKILL", (first,), 3)
    bench.hear(WorkerLost("c.0", "c", "hung", "in forward", 1))  # before generation 2 is formed
    both = (
        3,
        "rank 1: killed: by SIGKILL; rank 1: hung: in forward",
        (first, RankLoss("c.0", 1, "hung", "in forward")),
        3,
    )
    assert newest(bench) == both
    heir = bench.successor()
    missed = [
        message
        for _, message in heir.attach(hello("a", generation=1, workers=("a.0",)))
        if isinstance(message, Plan)
    ]
    assert [(plan.generation, plan.reason, plan.losses, plan.former_world) for plan in missed] == [
        both
    ]
    bench.hear(Formed("a.0", 3), Heartbeat("b", ()))
    bench.hear(ready("b.1"))
    assert newest(bench) == (4, "a worker is ready", (), 1)


def test_who_leaves_is_told_how_long_it_has_and_why() -> None:
    policy = ElasticPolicy(
        min_replicas=2, max_replicas=3, scaling_timeout_s=0, graceful_shutdown_timeout_s=20
    )
    bench = Bench(RunConfig(job=JobSpec("job.py"), nodes=3, spares=0, elastic=policy))
    workers = ("a.0", "b.0", "c.0")
    bench.attach(hello("a"), hello("b"), hello("c"))
    bench.hear(*map(ready, workers), *(Formed(worker, 1) for worker in workers))
    bench.hear(messages.SpotNotice("b", 10.0))
    _, reason, losses, former_world = newest(bench)
    assert (reason, losses, former_world) == (
        "b will be taken away, so the world changes from 3 nodes to 2",
        (),
        3,
    )
    bench.now_s += 0.1
    sent = bench.hear(Formed("a.0", 2), Formed("c.0", 2))
    ((node, order),) = [pair for pair in sent if isinstance(pair[1], StopWorker)]
    assert (node, order.worker, order.cause, order.reason) == (
        "b",
        "b.0",
        "left",
        "b will be taken away, so the world changes from 3 nodes to 2",
    )
    assert order.grace_s == pytest.approx(7.9)  # 0.8 of the notice, less what is over


def test_who_watches_sees_a_world_form_before_the_plan_that_waited_for_it() -> None:
    """The harness would take the last member for a straggler otherwise."""
    policy = ElasticPolicy(min_replicas=1, max_replicas=3, scaling_timeout_s=0)
    bench = Bench(RunConfig(job=JobSpec("job.py"), nodes=1, spares=0, shards=3, elastic=policy))
    bench.attach(hello("a"))
    bench.hear(ready("a.0"), Formed("a.0", 1))
    bench.attach(hello("b"), hello("c"))
    bench.hear(ready("b.0"), ready("c.0"), Formed("a.0", 2))
    before = len(bench.outputs)
    bench.hear(Formed("b.0", 2))
    shown = [output.message for output in bench.outputs[before:] if isinstance(output, Show)]
    assert shown[0] == Formed("b.0", 2)
    assert [message.generation for message in shown if isinstance(message, Plan)] == [3]


def at_the_end() -> tuple[Bench, str, list[str]]:
    """A run whose world shrinks after its last step, the rank that leaves, and the ranks that are done."""
    policy = ElasticPolicy(min_replicas=2, max_replicas=3, scaling_timeout_s=0)
    bench = Bench(RunConfig(job=JobSpec("job.py"), nodes=3, spares=0, elastic=policy))
    workers = ("a.0", "b.0", "c.0")
    bench.attach(hello("a"), hello("b"), hello("c"))
    bench.hear(*map(ready, workers), *(Formed(worker, 1) for worker in workers))
    bench.hear(messages.ScaleTo("r", 2))
    (leaver,) = next(
        output.message.leavers for output in reversed(bench.outputs) if isinstance(output, Show)
    )
    members = sorted({*workers} - {leaver})
    bench.hear(
        *(WorkerDone(worker, 20, "w") for worker in members),
        *(Formed(worker, 2) for worker in members),
    )
    return bench, leaver, members


@pytest.mark.parametrize("phase", [Phase.OUTSIDE, Phase.REGROUP])
def test_a_rank_that_leaves_at_the_end_of_the_job_is_waited_for_unless_it_is_behind(
    phase: Phase,
) -> None:
    """A leaver may save its state in its script.

    A rank that waits for a new group has lost the last step and is no suspect: no group is built
    any more.
    """
    bench, leaver, members = at_the_end()
    assert bench.plane.membership.settled
    for _ in range(20):
        beat = messages.Beat(leaver, 1, 2, 20, phase, 9_000.0, 0.0, 20, 0.0)
        bench.hear(*(Heartbeat(worker[0], ()) for worker in members), Heartbeat(leaver[0], (beat,)))
        bench.wait(0.05)
    assert detected(bench.outputs) == [], "no rank is a loss"
    assert bench.plane.ended == (phase == Phase.REGROUP)
    bench.hear(WorkerDone(leaver, 20, "w"))
    ends = [
        note.fields
        for note in bench.outputs
        if isinstance(note, WriteRecord) and note.event == Event.JOB_ENDED
    ]
    assert [end["ok"] for end in ends] == [True]


def test_a_rank_that_is_behind_stays_if_all_that_were_done_are_lost() -> None:
    """The leaver is the last rank with a state of the job."""
    bench, leaver, members = at_the_end()
    sent = bench.hear(*map(lost, members))
    for _ in range(20):
        beat = messages.Beat(leaver, 1, 2, 19, Phase.REGROUP, 9_000.0, 0.0, 19, 0.0)
        sent += bench.hear(
            *(Heartbeat(worker[0], ()) for worker in members), Heartbeat(leaver[0], (beat,))
        )
        sent += bench.wait(0.05)
    assert [
        message
        for _, message in sent
        if isinstance(message, StopWorker) and message.worker == leaver
    ] == []


def shrinking() -> Bench:
    """A world of two ranks that are to become one: generation 2 has ``a.0`` alone, and ``b.0`` leaves."""
    policy = ElasticPolicy(
        min_replicas=1, max_replicas=2, scaling_timeout_s=0, graceful_shutdown_timeout_s=20
    )
    bench = Bench(RunConfig(job=JobSpec("job.py"), nodes=2, spares=0, elastic=policy)).begin()
    sent = bench.hear(messages.ScaleTo("request", 1)) + bench.wait(0.05)
    (plan,) = {
        message.generation: message for _, message in sent if isinstance(message, Plan)
    }.values()
    assert ([member.worker for member in plan.members], plan.leavers) == (["a.0"], ("b.0",))
    return bench


@pytest.mark.parametrize(
    "first", [Formed("a.0", 2), WorkerLost("a.0", "a", "exited", "", 1, trained_in=2)]
)
def test_a_coordinator_that_hears_last_of_a_lost_world_keeps_the_leaver(
    first: messages.Message,
) -> None:
    """The node says with its return that its rank has ended, and only then that the rank had built its group."""
    heir = shrinking().successor()
    heir.attach(back("a", generation=2, workers=(), ended=("a.0",)), back("b"))
    sent = heir.hear(first, WorkerLost("a.0", "a", "exited", "", 1, trained_in=2))
    stopped = [message.worker for _, message in sent if isinstance(message, StopWorker)]
    assert "b.0" not in stopped
    worlds = [
        [member.worker for member in message.members]
        for _, message in sent
        if isinstance(message, Plan)
    ]
    assert worlds[-1:] == [["b.0"]]


def test_a_lost_member_that_had_trained_alone_brings_the_leaver_back() -> None:
    """The report of the loss is the first sign that the group of that member was built."""
    bench = shrinking()
    sent = bench.hear(WorkerLost("a.0", "a", "exited", "", 1, trained_in=2))
    assert "b.0" not in [message.worker for _, message in sent if isinstance(message, StopWorker)]
    worlds = [
        [member.worker for member in message.members]
        for _, message in sent
        if isinstance(message, Plan)
    ]
    assert worlds[-1:] == [["b.0"]]


def noticed(size: int, grace_s: float = 10.0) -> Bench:
    """A run of so many nodes, and no fewer, one of which will be taken away."""
    policy = ElasticPolicy(
        min_replicas=size, max_replicas=3, scaling_timeout_s=0, graceful_shutdown_timeout_s=20
    )
    bench = Bench(RunConfig(job=JobSpec("job.py"), nodes=3, spares=0, elastic=policy))
    bench.attach(hello("a"), hello("b"), hello("c"))
    workers = ("a.0", "b.0", "c.0")
    bench.hear(*map(ready, workers), *(Formed(worker, 1) for worker in workers))
    bench.hear(messages.SpotNotice("b", grace_s))
    return bench


def test_who_is_evicted_may_say_goodbye_until_shortly_before_its_machine_is_gone() -> None:
    """The rank was to leave, and the others never met without it."""
    bench = noticed(2)
    assert newest(bench)[0] == 2
    sent = bench.wait(8.05)
    orders = [
        message
        for _, message in sent
        if isinstance(message, StopWorker) and message.worker == "b.0"
    ]
    assert [(order.cause, order.reason) for order in orders] == [
        ("evicted", "it has not left in time")
    ]
    assert 0.9 <= orders[0].grace_s <= 1.0  # 0.9 of the notice


def test_a_notice_that_is_taken_back_is_passed_on_and_the_node_is_used_again() -> None:
    bench = noticed(2)
    bench.hear(Formed("a.0", 2), Formed("c.0", 2))
    sent = bench.hear(messages.NoticeCancelled("b"))
    assert ("b", messages.NoticeCancelled("b")) in sent
    assert bench.plane.membership.workers_on("b") == {"b.1"}
    heir = bench.successor()
    assert heir.plane.membership.size == 3
    assert heir.plane.membership.idle == frozenset()


def newest(bench: Bench) -> tuple[int, str, tuple[RankLoss, ...], int]:
    """Return generation, reason, losses and former world of the last plan that was sent."""
    plan = [
        send.message
        for send in bench.outputs
        if isinstance(send, Send) and isinstance(send.message, Plan)
    ][-1]
    return plan.generation, plan.reason, plan.losses, plan.former_world


# -- nodes come and go -----------------------------------------------------------------------------


def test_a_name_is_taken_only_once() -> None:
    bench = Bench()
    bench.attach(hello("a"))
    with pytest.raises(Refused, match="connected already"):
        bench.attach(hello("a", 2))


def test_a_node_that_comes_twice_before_the_start_counts_once() -> None:
    bench = Bench()
    bench.attach(hello("b"))
    bench.do(bench.plane.detach("b", "gone", 0.0))
    assert bench.attach(hello("b")) == [], "one node is not two"
    assert bench.attach(hello("a")) == [("a", StartWorker("a.0")), ("b", StartWorker("b.0"))]


def test_the_loss_of_a_node_is_written_down_whether_it_had_a_rank_or_not() -> None:
    bench = Bench()
    bench.attach(hello("a"), hello("b"))
    bench.do(bench.plane.detach("b", "its connection ended", bench.now_s, dead=True))
    notes = [
        note
        for note in bench.outputs
        if isinstance(note, WriteRecord) and note.event == Event.NODE_LOST
    ]
    assert [note.fields for note in notes] == [{"node": "b", "detail": "its connection ended"}]


def test_an_observer_that_comes_later_is_shown_no_worker_that_was_lost_with_its_node() -> None:
    bench = Bench().begin()
    bench.do(bench.plane.detach("b", "gone", bench.now_s, dead=True))
    facts = bench.plane.messages_for_observer()
    assert {fact.worker for fact in facts if isinstance(fact, WorkerReady)} == {"a.0"}
    assert {fact.worker for fact in facts if isinstance(fact, WorkerLost)} == {"b.0"}


def lost_nodes(bench: Bench) -> list[str]:
    """Return the lost nodes that a new observer is told of."""
    return [fact.node for fact in bench.plane.messages_for_observer() if isinstance(fact, NodeLost)]


def test_an_observer_that_comes_later_hears_of_lost_nodes_until_they_are_back() -> None:
    """The replacer of nodes may be away just then; the next coordinator knows the loss, too."""
    bench = Bench().begin()
    bench.do(bench.plane.detach("b", "gone", bench.now_s, dead=True))
    assert lost_nodes(bench) == lost_nodes(bench.successor()) == ["b"]
    bench.attach(hello("b", pid=2))
    assert lost_nodes(bench) == lost_nodes(bench.successor()) == []


def test_a_node_whose_connection_ends_is_lost_and_its_workers_are_fenced_when_it_comes_back() -> (
    None
):
    bench = Bench().begin()
    bench.now_s = 1.0
    bench.hear(Heartbeat("a", ()))
    outputs = bench.plane.detach("b", "gone", 1.0, dead=True)
    assert outputs[0] == Disconnect("b")
    bench.do(outputs)
    assert bench.plane.membership.members == ("a.0",)
    sent = bench.attach(hello("b", workers=("b.0",), generation=1))
    assert ("b", StopWorker("b.0", "fenced")) in sent


# -- the next coordinator --------------------------------------------------------------------------


def test_when_nothing_has_happened_nothing_is_done() -> None:
    heir = Bench().begin().successor()
    sent = heir.attach(back("a"), back("b"))
    sent += heir.hear(*map(ready, WORKERS), *(Formed(worker, 1) for worker in WORKERS))
    assert sent + heir.go_on(1.0, "a", "b") == []
    assert heir.plane.membership.settled


def test_a_worker_that_was_never_started_is_and_one_that_ended_is_not() -> None:
    bench = Bench().begin()
    bench.hear(lost("b.0"))  # remembered: b.1 is to be started
    heir = bench.successor()
    assert ("b", StartWorker("b.1")) in heir.attach(back("b", workers=(), ended=("b.0",)))
    heir = bench.successor()
    assert not [
        output
        for output in heir.attach(back("b", workers=(), ended=("b.0", "b.1")))
        if "Start" in str(output)
    ]


def test_a_start_that_a_node_is_told_again_has_its_whole_time_from_then_on() -> None:
    """The first order was lost with the coordinator that gave it."""
    bench = Bench(RunConfig(job=JobSpec("job.py"), nodes=2, spares=0, startup_s=20.0)).begin()
    bench.hear(lost("b.0"))
    bench.go_on(10.0, "a", "b")
    bench.hear(Healed("a.0", 2))  # the record tells that time has passed
    heir = bench.successor()
    sent = heir.attach(back("a"), back("b", workers=(), ended=("b.0",)))
    assert ("b", StartWorker("b.1")) in sent
    sent = heir.go_on(18.0, "a", "b")
    assert not [message for _, message in sent if isinstance(message, StopWorker)]
    sent = heir.go_on(3.0, "a", "b")
    assert ("b", StopWorker("b.1", "hung")) in sent


def test_a_worker_that_is_to_wait_for_the_repeated_step_is_started_once() -> None:
    """Its node connects again meanwhile.

    A second order may come when the worker has ended already.
    """
    bench = Bench().begin()
    bench.hear(lost("b.0"))
    sent = bench.attach(back("b", workers=(), ended=("b.0",)))
    assert ("b", StartWorker("b.1")) not in sent, "the others are about to repeat the step"
    sent += bench.go_on(PATIENCE_S + 0.2, "a", "b")
    assert sent.count(("b", StartWorker("b.1"))) == 1


def test_a_replacement_without_which_no_step_can_be_repeated_is_started_at_once() -> None:
    """A rank with a state that it cannot bring up to date waits for a plan, and not for long."""
    bench = Bench(RunConfig(job=JobSpec("job.py"), nodes=2, spares=1, min_world=2)).begin()
    bench.hear(ready("a.1"))
    sent = bench.hear(lost("b.0"))
    assert plans(sent) == [2]
    assert ("b", StartWorker("b.1")) not in sent
    assert ("b", StartWorker("b.1")) in bench.hear(lost("a.1"))


def test_another_agent_under_the_name_of_a_node_has_none_of_its_workers() -> None:
    """A node that was started again without a coordinator has lost its workers and their state."""
    heir = Bench().begin().successor()
    heir.attach(back("a"))
    sent = heir.attach(hello("b", pid=2))
    sent += heir.go_on(3.0, "a", "b")
    assert ("b", StartWorker("b.0")) not in sent, "a name means one process"
    assert ("a", StartWorker("a.1")) in sent, "what was lost is replaced"
    assert heir.plane.membership.members == ("a.0",)


def test_a_regroup_that_was_left_half_way_is_repeated() -> None:
    bench = Bench()
    bench.attach(hello("a"), hello("b"))
    bench.hear(*map(ready, WORKERS))
    heir = bench.successor()
    sent = heir.attach(back("a"), back("b", generation=0))
    assert plans(sent) == [1], "who has missed the plan is told"
    assert plans(heir.wait(0.01) + heir.wait(LIMITS.forming_s)) == [2]


def test_a_regroup_that_was_over_before_its_coordinator_is_not_repeated() -> None:
    """All have formed the group, and report it to the next coordinator."""
    bench = Bench()
    bench.attach(hello("a"), hello("b"))
    bench.hear(*map(ready, WORKERS))
    heir = bench.successor()
    heir.attach(back("a"), back("b"))
    heir.wait(0.01)
    heir.hear(*(Formed(worker, 1) for worker in WORKERS))
    assert plans(heir.wait(LIMITS.forming_s)) == []


def test_a_group_that_a_busy_machine_is_slow_to_build_is_not_planned_again() -> None:
    """No member needs a coordinator any more; members report the end of a rendezvous at once."""
    bench = Bench()
    bench.attach(hello("a"), hello("b"))
    bench.hear(*map(ready, WORKERS))
    heir = bench.successor()
    heir.attach(back("a"), back("b"))
    heir.wait(0.01)
    heir.hear(Formed(WORKERS[0], 1))
    assert plans(heir.wait(0.6)) == []
    heir.hear(*(Formed(worker, 1) for worker in WORKERS))
    assert plans(heir.wait(LIMITS.forming_s)) == []


def test_a_plan_of_the_new_coordinator_is_not_its_inheritance() -> None:
    """A coordinator publishes the first plan before its first tick, and inherits none."""
    bench = Bench()
    bench.attach(hello("a"), hello("b"))
    heir = bench.successor()
    heir.attach(back("a", generation=0), back("b", generation=0))
    assert plans(heir.hear(*map(ready, WORKERS))) == [1]
    heir.hear(*(Formed(worker, 1) for worker in WORKERS))
    assert plans(heir.wait(0.01) + heir.wait(LIMITS.forming_s)) == []


def test_a_node_that_does_not_come_back_is_lost() -> None:
    heir = Bench().begin().successor()
    heir.attach(back("a"))
    heir.go_on(REATTACH_S + 0.5, "a")
    assert heir.plane.membership.members == ("a.0",)


def test_a_node_that_is_known_to_be_lost_is_waited_for_no_longer_than_a_lease() -> None:
    """The launcher reports the nodes that were lost with the machine of the coordinator before."""
    heir = Bench().begin().successor()
    heir.plane.expect_no_longer(["b", "no member"], heir.now_s)
    heir.attach(back("a"))
    heir.go_on(REATTACH_S / 4, "a")
    assert heir.plane.membership.members == ("a.0",)


def test_the_startup_deadline_counts_from_the_same_moment_in_the_replay() -> None:
    """The first tick comes before the first node.

    A smaller world that began at the deadline began for the next too.
    """
    bench = Bench(RunConfig(job=JobSpec("job.py"), nodes=2, spares=0, startup_s=5.0))
    bench.wait(0.02)
    bench.now_s = 3.0
    bench.attach(hello("a"), hello("b"))
    bench.hear(ready("a.0"))
    bench.wait(2.5)
    assert bench.plane.membership.members == ("a.0",)
    assert bench.successor().plane.membership.members == ("a.0",)


# -- what is said once -----------------------------------------------------------------------------


def test_a_loss_that_is_in_the_record_need_not_be_told_again() -> None:
    """The answer to it may have been lost with the coordinator that wrote it down."""
    bench = Bench().begin()
    assert ("b", StopWorker("b.0", "lost")) in bench.hear(lost("b.0"))
    heir = bench.successor()
    heir.attach(back("b", workers=(), ended=("b.0",)))
    assert heir.hear(lost("b.0")) == [("b", StopWorker("b.0", "killed"))]


def test_a_failure_that_is_told_again_does_not_count_again() -> None:
    """The same exception on every rank ends the job; the same report of it does not."""
    bench = Bench()
    bench.attach(hello("a"), hello("b"))
    error = WorkerFailed("b.0", "ZeroDivisionError", fatal=False)
    bench.hear(*[error] * 9)
    assert not bench.plane.ended
    bench.hear(
        *(WorkerFailed(worker, "ZeroDivisionError", fatal=False) for worker in ("a.0", "b.1"))
    )
    assert bench.plane.ended


def test_only_a_failure_that_ends_the_job_is_told_to_observers() -> None:
    bench = Bench()
    bench.attach(hello("a"), hello("b"))
    bench.hear(WorkerFailed("b.0", "ZeroDivisionError", fatal=False))
    assert [
        output for output in bench.plane.messages_for_observer() if isinstance(output, WorkerFailed)
    ] == []
    fatal = WorkerFailed("a.0", "no such module", fatal=True)
    bench.hear(fatal)
    assert [
        output for output in bench.plane.messages_for_observer() if isinstance(output, WorkerFailed)
    ] == [fatal]


@pytest.mark.parametrize("first", ["failure", "loss"])
def test_a_fatal_failure_ends_the_job_whether_it_is_heard_before_its_loss_or_after_it(
    first: str,
) -> None:
    """The end of a process may be noticed before what it said last is read."""
    bench = Bench().begin()
    failure = WorkerFailed("b.0", "BadInput: x='1': use 2", fatal=True)
    loss = WorkerLost("b.0", "b", "exited", "the kernel reports its end", 1)
    bench.hear(*([failure, loss] if first == "failure" else [loss, failure]))
    (end,) = [
        output.message
        for output in bench.outputs
        if isinstance(output, Show) and type(output.message) is EndJob
    ]
    assert (end.ok, end.reason) == (False, failure.error)
    detected = [
        note
        for note in bench.outputs
        if isinstance(note, WriteRecord) and note.event == Event.DETECTED
    ]
    assert len(detected) == (0 if first == "failure" else 1), (
        "a loss that follows from the failure is no news"
    )


def test_the_last_words_of_a_rank_that_was_given_up_end_no_job() -> None:
    """Training goes on without the rank, and it may report that the others do."""
    bench = Bench().begin()
    bench.hear(lost("b.0"), WorkerFailed("b.0", "JobFailed: no connection", fatal=True))
    assert not bench.plane.ended


def test_the_end_of_a_run_that_lost_too_much_names_the_last_loss() -> None:
    config = RunConfig(job=JobSpec("job.py"), nodes=2, spares=0, max_failures=0)
    bench = Bench(config).begin()
    bench.hear(WorkerLost("b.0", "b", "raised", "could not be started: OSError: no room", 1))
    reason = "the failure budget is spent: 1 workers were lost, max_failures=0"
    last = "; the last one that was lost is b.0: could not be started: OSError: no room"
    assert Show(EndJob(False, reason + last, ("a", "b"))) in bench.outputs


# -- the end ---------------------------------------------------------------------------------------


def test_the_end_is_remembered_whoever_decides_it() -> None:
    bench = Bench().begin()
    bench.hear(EndJob(False, "enough"))
    heir = bench.successor()
    assert heir.plane.ended
    assert heir.attach(back("a")) == [("a", EndJob(False, "enough"))]
    assert heir.hear(lost("a.0"), lost("b.0")) == [], "a finished plane stays finished"
    heir.wait(REATTACH_S + 1)
    assert isinstance(heir.outputs[-1], End)


# -- whatever is said may be said twice ------------------------------------------------------------

SAID = st.one_of(
    st.sampled_from(WORKERS).map(ready),
    st.sampled_from((*WORKERS, "a.1", "b.1")).map(ready),
    st.sampled_from(WORKERS).map(lost),
    st.builds(Formed, st.sampled_from((*WORKERS, "a.1", "b.1")), st.integers(1, 4)),
    st.builds(Healed, st.sampled_from((*WORKERS, "a.1", "b.1")), st.integers(1, 4)),
    st.builds(GroupBroken, st.sampled_from(WORKERS), st.integers(1, 4), st.just("broke")),
    st.builds(WorkerDone, st.sampled_from(WORKERS), st.just(9), st.just("digest")),
)


def state(plane: ControlPlane) -> tuple[Any, ...]:
    membership = plane.membership
    return (
        membership.plan,
        membership.members,
        membership.spares,
        membership.settled,
        membership.finished,
        plane.ended,
        {node: membership.workers_on(node) for node in NODES},
    )


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(SAID, max_size=25), st.data())
def test_what_is_heard_twice_changes_nothing(said: list[Any], data: st.DataObject) -> None:
    """An agent repeats all its messages at once, always after it has sent them first."""
    once, twice = Bench(), Bench()
    for bench in (once, twice):
        bench.attach(hello("a"), hello("b"))
    for index, message in enumerate(said):
        once.hear(message)
        twice.hear(message)
        if data.draw(st.booleans()):
            twice.hear(message)
        if index % 5 == 4:
            for bench in (once, twice):
                bench.wait(BROKEN_GRACE_S + 0.01)
    assert state(once.plane) == state(twice.plane)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(SAID, max_size=25))
def test_a_log_gives_the_membership_that_wrote_it(said: list[Any]) -> None:
    """The log gives its reader the membership of its writer after every message."""
    bench = Bench()
    bench.attach(hello("a"), hello("b"))
    for message in said:
        bench.hear(message)
        bench.wait(0.2)
        assert state(bench.successor().plane) == state(bench.plane)


@pytest.mark.parametrize("seed", range(40))
def test_any_part_of_a_log_is_a_log(seed: int) -> None:
    """A coordinator may end in the middle of writing.

    Generations of longer parts are never lower.
    """
    world = World(seed)
    Faults(world).schedule()
    world.engine.run(world.over, 20.0)
    entries = world.log.entries
    generations = []
    for length in range(len(entries) + 1):
        plane = ControlPlane(world.config, entries[:length], 1e6)
        generations.append(plane.membership.generation)
        for node in world.agents:
            plane.attach(AgentHello(node, "host", 1), 1e6)
        plane.tick(1e6 + 1, {})
    assert generations == sorted(generations)
    last: Coordinator = world.coordinator
    assert plane.membership.generation >= generations[-1]
    assert ControlPlane(world.config, entries, 0.0).membership.plan == last.plane.membership.plan


def test_an_event_is_logged_before_what_follows_from_it() -> None:
    outputs = Bench().begin().plane.hear(lost("b.0"), 1.0)
    kinds = [type(output) for output in outputs]
    assert kinds.index(LogEntry) < kinds.index(Send)
    assert outputs[kinds.index(LogEntry)] == LogEntry(WorkerLost("b.0", "b", "killed", "", 1), 1.0)


def test_time_without_a_coordinator_is_the_same_time_in_every_replay() -> None:
    """A coordinator must not begin without nodes for which its predecessor still waited."""
    nodes = ("a", "b", "c")
    first = Bench(RunConfig(job=JobSpec("job.py"), nodes=3, spares=0, startup_s=10.0))
    first.attach(*map(hello, nodes))
    first.now_s = 2.0
    first.hear(ready("a.0"))
    second = first.successor()
    second.attach(*(hello(node, workers=(f"{node}.0",)) for node in nodes))
    second.now_s += 7.0
    second.hear(ready("b.0"))
    assert second.plane.membership.plan is None
    assert second.successor().plane.membership.plan is None


@pytest.mark.parametrize("grace_s", [float("inf"), float("nan")])
def test_a_notice_without_an_end_is_refused(grace_s: float) -> None:
    policy = ElasticPolicy(min_replicas=1, max_replicas=2, scaling_timeout_s=0)
    bench = Bench(RunConfig(job=JobSpec("job.py"), nodes=2, spares=0, elastic=policy)).begin()
    remembered = len(bench.log)
    bench.hear(messages.SpotNotice("b", grace_s), messages.LendNodes("r", "job", 1, grace_s))
    answers = [
        output.message
        for output in bench.outputs
        if isinstance(output, Show) and isinstance(output.message, messages.Answered)
    ]
    assert [answer.accepted for answer in answers] == [False, False]
    assert len(bench.log) == remembered


@pytest.mark.parametrize("rank", [-1, 2, 7])
def test_a_rank_that_the_world_does_not_have_meets_nobody(rank: int) -> None:
    """A barrier must not open for a member that has not come."""
    bench = Bench().begin()
    bench.plane.ask("a", Exchange(1, STANDING, 0, b""))
    with pytest.raises(Refused, match="rank"):
        bench.plane.ask("stranger", Exchange(1, STANDING, rank, b""))
    outputs = bench.plane.ask("b", Exchange(1, STANDING, 1, b""))
    assert len(outputs) == 2, "both are told"


# -- when it must be called ------------------------------------------------------------------------


def test_a_plane_whose_nodes_train_is_next_called_when_a_report_is_missing() -> None:
    """A coordinator that woke up without a reason would take the CPU from the training."""
    bench = Bench().begin()
    bench.go_on(1.0, "a", "b")
    bench.hear(*(messages.Heartbeat(node, ()) for node in NODES))
    assert bench.plane.next_tick_s(bench.now_s) == pytest.approx(
        bench.now_s + bench.config.heartbeat_ms / 1000
    )


def test_a_plane_is_called_when_a_broken_generation_is_planned_again() -> None:
    bench = Bench().begin()
    bench.hear(GroupBroken("a.0", 1, "reset"))
    assert bench.plane.next_tick_s(bench.now_s) == bench.now_s + BROKEN_GRACE_S
    assert plans(bench.wait(BROKEN_GRACE_S)) == [2]


def test_a_plan_names_the_worker_that_reported_a_broken_generation_first() -> None:
    """The others have errors because of it."""
    bench = Bench().begin()
    bench.hear(GroupBroken("b.0", 1, "reset"), GroupBroken("a.0", 1, "closed by peer"))
    sent = bench.wait(BROKEN_GRACE_S)
    assert {message.broken_by for _, message in sent if isinstance(message, Plan)} == {"b.0"}


def test_a_plane_that_forms_a_generation_is_called_every_few_milliseconds() -> None:
    bench = Bench().begin()
    bench.hear(GroupBroken("a.0", 1, "reset"))
    bench.wait(BROKEN_GRACE_S)
    assert bench.plane.next_tick_s(bench.now_s) < bench.now_s + 0.05
    bench.hear(*(Formed(worker, 2) for worker in WORKERS))
    bench.go_on(0.2, "a", "b")
    bench.hear(*(messages.Heartbeat(node, ()) for node in NODES))
    assert bench.plane.next_tick_s(bench.now_s) >= bench.now_s + 0.05


# -- answers to heartbeats -------------------------------------------------------------------------


def answered(gaps_s: Sequence[float], **settings: Any) -> list[int]:
    """Return the numbers of the heartbeats that are answered, with this interval between them."""
    bench = Bench(RunConfig(job=JobSpec("job.py"), nodes=2, spares=0, **settings)).begin()
    for number, gap_s in enumerate(gaps_s):
        bench.now_s += gap_s
        bench.hear(Heartbeat("a", (), number))
    return [
        send.message.sent_ns
        for send in bench.outputs
        if isinstance(send, Send) and isinstance(send.message, Heard)
    ]


def test_each_second_heartbeat_is_answered_and_each_that_was_waited_for() -> None:
    """An answer wakes an agent up.

    A late heartbeat is answered, as its agent has waited long enough.
    """
    assert answered([0.04] * 6) == [0, 2, 4]
    assert answered([0.04, 0.2, 0.04, 0.04, 0.2]) == [0, 1, 3, 4]


def test_a_short_lease_is_prolonged_by_every_heartbeat() -> None:
    assert answered([0.04] * 6, coordinator_outage_s=0.5) == [0, 1, 2, 3, 4, 5]


# -- when the network is parted --------------------------------------------------------------------


def test_a_node_that_waits_for_the_others_is_heard() -> None:
    """The agent would connect again and again otherwise."""
    bench = Bench()
    bench.attach(hello("a"))
    assert bench.plane.hear(messages.Heartbeat("a", (), 7), 0.1)[-1] == Send("a", Heard(7))


def test_who_may_have_taken_over_a_copy_is_not_given_up_because_it_is_silent() -> None:
    """The report that it has the state may be lost with its connection, although it trains."""
    bench = Bench().begin()
    bench.hear(lost("a.0"), lost("b.0"))
    copy = OfferedSnapshot("a", "a.0", 5, 1, 8, "sum", Endpoint("host", "", 1, 2, 3), "memory")
    bench.hear(Sealed("a", (copy,)), Sealed("b", ()), ready("a.1"), ready("b.1"))
    plan = bench.plane.membership.plan
    assert plan is not None
    assert plan.restore == (copy,)
    bench.hear(Formed("a.1", plan.generation), Formed("b.1", plan.generation))
    bench.go_on(3.0)
    assert bench.plane.membership.nodes == NODES
    bench.go_on(0.2, "b")
    bench.go_on(1.5, "b")
    assert bench.plane.membership.nodes == ("b",), "whoever leaves the generation ends it"


def test_a_silent_node_is_not_called_hung() -> None:
    """The worker may follow the plan, or be ready, and be unable to report it."""
    bench = Bench(RunConfig(job=JobSpec("job.py"), nodes=2, spares=0, startup_s=1.0)).begin()
    bench.hear(lost("b.0"))
    bench.go_on(0.2, "a", "b")
    heir = bench.successor()
    heir.attach(back("a", generation=2))
    heir.go_on(1.9, "a")  # b may still come
    assert [cause for _, _, cause, _ in detected(heir.outputs)] == []


def hang(bench: Bench, step: int, age_ms: float) -> tuple[list[Any], str]:
    """Let rank 1 stand still in ``step`` while rank 0 waits.

    Return the messages sent and its worker.
    """
    form(bench)
    bench.go_on(1.2, *NODES)
    plan = bench.plane.membership.plan
    assert plan is not None
    waits, hangs = (member.worker for member in plan.members)
    place = {
        "generation": plan.generation,
        "trained_in": plan.generation,
        "step": step,
        "commits": 100,
    }
    common = {"starved_ms": 0.0, "loss": 0.0, **place}
    sent: list[Any] = []
    boards = [
        (hangs, 1, Phase.FORWARD, age_ms),
        (waits, 0, Phase.REDUCE, age_ms),
        (waits, 0, Phase.FORWARD, 1.0),
    ]
    for worker, rank, phase, since_ms in boards:  # at last rank 0 has regrouped, and computes again
        beat = messages.Beat(worker=worker, rank=rank, phase=phase, age_ms=since_ms, **common)  # type: ignore[arg-type]
        sent += [*bench.hear(Heartbeat(worker.partition(".")[0], (beat,))), *bench.wait(0.0)]
    return sent, hangs


def form(bench: Bench) -> None:
    """All members of the newest plan have built their group."""
    plan = bench.plane.membership.plan
    assert plan is not None
    bench.hear(*(Formed(member.worker, plan.generation) for member in plan.members))


def test_rank_after_rank_that_hangs_in_the_same_step_ends_the_job() -> None:
    """No replacement helps there, and suspects spend no budget."""
    bench = Bench(RunConfig(job=JobSpec("job.py"), nodes=2, spares=0, max_failures=0)).begin()
    for age_ms in (1e4, 1e5, 1e6):  # what was long once is allowed
        sent, worker = hang(bench, 7, age_ms)
        assert (worker, "hung") in [
            (order.worker, order.cause) for _, order in sent if isinstance(order, StopWorker)
        ]
        form(bench)
        started = [
            order.worker
            for _, order in sent + bench.go_on(2.5, *NODES)
            if isinstance(order, StartWorker)
        ]
        bench.hear(*map(ready, started))
        bench.go_on(0.3, *NODES)
    sent, _ = hang(bench, 7, 1e7)
    (reason,) = {order.reason for _, order in sent if isinstance(order, EndJob)}
    assert reason.startswith(
        "rank after rank hangs in the forward phase of step 7: forward for 10000000 ms, limit"
    )


def test_the_next_coordinator_knows_the_suspects_of_the_one_before() -> None:
    """A rank that may have been healthy is not ended again for a phase as long: its limit stays raised."""
    bench = Bench().begin()
    hang(bench, 7, 1e4)
    heir = bench.successor()
    heir.attach(back("a", generation=2), back("b", generation=2, workers=()))
    heir.hear(ready("b.1"))
    heir.go_on(0.3, *NODES)
    sent, _ = hang(heir, 8, 1e4)
    assert [order.worker for _, order in sent if isinstance(order, StopWorker)] == []
    last = [
        out.fields["suspects"]
        for out in heir.outputs
        if isinstance(out, WriteRecord) and out.event == Event.HANG_LIMITS
    ]
    assert last == [1]
    sent, worker = hang(heir, 9, 1e6)
    assert worker in [order.worker for _, order in sent if isinstance(order, StopWorker)]


@pytest.mark.parametrize("acknowledges", [True, False])
def test_a_node_that_misses_a_report_is_sent_something_to_acknowledge(acknowledges: bool) -> None:
    """A node is lost after a second while its kernel acknowledges, else after three missed reports."""
    bench = Bench().begin()
    bench.go_on(0.5, "a", "b")
    bench.outputs, began_s = [], bench.now_s - 0.05  # of the last report
    limit_s = 1.0 if acknowledges else 0.14
    while "b" in bench.plane.membership.nodes:
        assert bench.now_s < began_s + limit_s + 0.04
        bench.hear(messages.Heartbeat("a", ()))
        bench.now_s += 0.02
        bench.do(bench.plane.tick(bench.now_s, {}, {"b"} if acknowledges else ()))
    assert bench.now_s >= began_s + limit_s
    (lost_node,) = [
        note.fields
        for note in bench.outputs
        if isinstance(note, WriteRecord) and note.event == Event.NODE_LOST
    ]
    assert ("kernel" in lost_node["detail"]) == acknowledges
    probed = [
        send.node
        for send in bench.outputs
        if isinstance(send, Send) and isinstance(send.message, Probe)
    ]
    assert set(probed) == {"b"}
    assert len(probed) <= limit_s / 0.05


def wait_in_reduce(bench: Bench) -> list[tuple[str, messages.TestLinks]]:
    """Let the ranks wait for each other for an interval. Returns the tests of links that follow."""
    plan = bench.plane.membership.plan
    assert plan is not None
    for member in plan.members:
        beat = messages.Beat(
            member.worker, plan.generation, member.rank, 3, Phase.REDUCE, 900.0, 0.0, 3, 0.0
        )
        bench.hear(messages.Heartbeat(member.node, (beat,)))
    return [(to, order) for to, order in bench.wait(0.05) if isinstance(order, messages.TestLinks)]


def left_out(bench: Bench, node: str) -> None:
    """All ranks wait, and ``node`` reaches no other node."""
    for _ in range(40):
        for to, order in wait_in_reduce(bench):
            away = tuple(target for target, _, _ in order.targets if node in (target, to))
            bench.hear(messages.LinksTested(to, order.number, away))
        if bench.plane.membership.left_out:
            return
    raise AssertionError("nobody was left out")


def test_who_was_left_out_returns_when_it_reaches_the_others_also_to_the_next_coordinator() -> None:
    bench = Bench().begin()
    left_out(bench, "b")
    assert bench.plane.membership.left_out == ("b",)
    heir = bench.successor()
    assert heir.plane.membership.left_out == ("b",)
    heir.attach(back("a", generation=2), back("b", generation=1, workers=()))
    orders = [
        (to, order)
        for to, order in heir.go_on(0.6, *NODES)
        if isinstance(order, messages.TestLinks)
    ]
    assert sorted(to for to, _ in orders) == ["a", "b"]
    heir.hear(*(messages.LinksTested(to, order.number, ()) for to, order in orders))
    assert heir.plane.membership.left_out == ()


def late_test(bench: Bench, seconds: float = 2.0) -> list[tuple[str, messages.TestLinks]]:
    """Let the ranks wait for so long while all links are well, and until they are tested once more."""
    asked: list[tuple[str, messages.TestLinks]] = []
    until_s = bench.now_s + seconds
    while bench.now_s < until_s or not asked:
        bench.hear(*(messages.LinksTested(to, order.number, ()) for to, order in asked))
        asked = wait_in_reduce(bench)
    return asked


def test_a_test_of_links_for_the_coordinator_before_counts_no_more() -> None:
    """A node answers the next coordinator what the one before it has asked."""
    bench = Bench().begin()
    asked = late_test(bench)
    heir = bench.successor()
    heir.attach(back("a"), back("b"))
    assert late_test(heir)
    sent = heir.hear(
        *(
            messages.LinksTested(to, order.number, ("b",) if to == "a" else ())
            for to, order in asked
        )
    )
    for to, order in sent:
        heir.hear(messages.LinksTested(to, order.number, ()))
    wait_in_reduce(heir)
    assert not [entry for entry in heir.log if isinstance(entry.event, events.LeftOut)]


def test_after_the_end_no_links_are_tried() -> None:
    """A node that was left out when the job ended answers the next coordinator, which has only the end to tell."""
    bench = Bench().begin()
    left_out(bench, "b")
    bench.hear(messages.EndJob(False, "enough"))
    heir = bench.successor()
    end = EndJob(False, "enough")
    assert heir.attach(back("a"), back("b", workers=())) == [("a", end), ("b", end)]
    assert heir.plane.hear(messages.LinksTested("a", 1, ()), heir.now_s) == []


def test_who_was_left_out_returns_when_nobody_is_left_whom_it_could_not_reach() -> None:
    """A single node has no other node to test a link to."""
    bench = Bench().begin()
    left_out(bench, "b")
    bench.now_s += 0.01
    bench.do(bench.plane.detach("a", "its agent ended", bench.now_s, dead=True))
    bench.go_on(0.1, "b")
    assert bench.plane.membership.left_out == ()
    assert bench.plane.membership.workers_on("b")


# -- fit nodes
# ----------------------------------------------------------------------------------------------------


def report(node: str, *severities: Literal["ok", "warn", "bad"]) -> messages.HealthReport:
    findings = (
        messages.Finding(f"gpu{number}.xid", severity, 79.0, node=node)
        for number, severity in enumerate(severities)
    )
    return messages.HealthReport(node, tuple(findings), 5.0)


def noted(bench: Bench, event: Event) -> list[dict[str, Any]]:
    return [
        note.fields
        for note in bench.outputs
        if isinstance(note, WriteRecord) and note.event == event
    ]


def test_a_report_is_written_down_once_and_a_good_one_changes_nothing() -> None:
    bench = Bench().begin()
    assert bench.hear(report("a", "ok", "warn"), report("a", "ok", "warn"), report("b", "ok")) == []
    assert [
        (fields["node"], fields["standing"], len(fields["reasons"]))
        for fields in noted(bench, Event.HEALTH)
    ] == [
        ("a", "admitted with warnings", 1),
        ("b", "admitted", 0),
    ]
    assert bench.plane.membership.unfit == frozenset()


def test_a_node_that_is_refused_loses_its_ranks_with_the_reason_also_for_the_next_coordinator() -> (
    None
):
    bench = Bench().begin()
    sent = bench.hear(report("b", "bad", "bad", "bad", "bad", "ok"))
    assert ("b", StopWorker("b.0", "unfit")) in sent
    assert plans(sent) == [2]
    (lost_rank,) = noted(bench, Event.DETECTED)
    assert (lost_rank["worker"], lost_rank["cause"]) == ("b.0", "unfit")
    assert lost_rank["detail"] == "gpu0.xid=79; gpu1.xid=79; gpu2.xid=79; and 1 more"
    heir = bench.successor()
    assert heir.plane.membership.unfit == {"b"}
    assert [cause for *_, cause, _ in detected(heir.plane.retell())] == ["unfit"]
    heir.attach(back("a", generation=2), back("b", generation=1, workers=()))
    assert heir.hear(report("b", "bad", "bad", "bad", "bad", "ok")) == [], (
        "it says it again, and that is known"
    )
    assert not heir.plane.membership.workers_on("b")


def test_what_was_refused_stays_out_until_another_agent_comes() -> None:
    bench = Bench().begin()
    bench.hear(report("b", "bad"), report("b", "ok"))
    assert bench.plane.membership.unfit == {"b"}
    bench.do(bench.plane.detach("b", "its agent ended", bench.now_s, dead=True))
    bench.attach(hello("b", pid=2))
    assert bench.plane.membership.unfit == frozenset()
    bench.hear(report("b", "ok"))
    assert [fields["standing"] for fields in noted(bench, Event.HEALTH)] == [
        "refused",
        "admitted",
        "admitted",
    ]


def test_a_node_that_alone_has_the_state_is_left_in_peace_until_another_one_has_it() -> None:
    bench = Bench(
        RunConfig(job=JobSpec("job.py"), nodes=2, spares=0, coordinator_outage_s=0.1)
    ).begin()
    bench.do(bench.plane.detach("a", "its agent ended", bench.now_s, dead=True))
    assert bench.plane.membership.keepers == {"b"}
    bench.hear(report("b", "bad"))
    assert bench.plane.membership.unfit == frozenset()
    bench.hear(Formed("b.0", bench.plane.membership.generation))
    bench.attach(hello("a", pid=2, started=1))
    (worker,) = [worker for worker in bench.plane.membership.workers_on("b") if worker != "b.0"]
    bench.hear(WorkerReady(worker, "b", Endpoint("host", worker, 1, 2, 3)))
    generation = bench.plane.membership.generation
    bench.hear(Formed("b.0", generation), Formed(worker, generation), Healed(worker, generation))
    bench.wait(0.05)
    assert bench.plane.membership.unfit == frozenset(), "both are on the same node"
    assert not bench.plane.ended


def test_a_run_that_is_not_to_enforce_it_only_writes_it_down() -> None:
    bench = Bench(RunConfig(job=JobSpec("job.py"), nodes=2, spares=0, health="report")).begin()
    bench.hear(report("b", "bad"))
    assert [fields["standing"] for fields in noted(bench, Event.HEALTH)] == ["refused"]
    assert bench.plane.membership.unfit == frozenset()


def test_a_node_on_probation_is_used_once_it_has_proved_itself() -> None:
    bench = Bench(RunConfig(job=JobSpec("job.py"), nodes=2, spares=0, on_probation=("b",)))
    assert bench.attach(hello("a"), hello("b")) == []
    sent = bench.hear(report("b", "ok"))
    assert sent == [("a", StartWorker("a.0")), ("b", StartWorker("b.0"))]
    assert bench.hear(report("b", "ok")) == []


def test_observers_are_told_of_the_last_report_of_each_node() -> None:
    bench = Bench().begin()
    bench.hear(report("a", "ok"), report("b", "ok"), report("a", "warn"))
    assert [
        output
        for output in bench.plane.messages_for_observer()
        if isinstance(output, messages.HealthReport)
    ] == [
        report("a", "warn"),
        report("b", "ok"),
    ]


def hello_with_door(node: str, **changes: Any) -> AgentHello:
    return hello(node, **({"host": node, "port": 7} | changes))


def trains(health: Literal["enforce", "report"] = "enforce", **settings: Any) -> Bench:
    """Two nodes that train, and could be connected to."""
    bench = Bench(RunConfig(job=JobSpec("job.py"), nodes=2, spares=0, health=health, **settings))
    bench.attach(hello_with_door("a"), hello_with_door("b"))
    bench.hear(*map(ready, WORKERS), *(Formed(worker, 1) for worker in WORKERS))
    bench.go_on(1.2, *NODES)
    return bench


def measured(sent: list[Any], **reading: Any) -> list[messages.LinksMeasured]:
    """Return the answers of the nodes that are asked."""
    good = {
        "connect_ms": 1.0,
        "rtt_ms": (0.1,),
        "sent_mb_s": 900.0,
        "received_mb_s": 900.0,
    } | reading
    return [
        messages.LinksMeasured(
            node,
            message.number,
            tuple(
                messages.PairReading(address="h:7", node=target[0], **good)
                for target in message.targets
            ),
            joins=True,
        )
        for node, message in sent
        if isinstance(message, messages.MeasureLinks)
    ]


def test_a_newcomer_that_nobody_needs_gets_workers_once_its_node_and_its_link_have_passed() -> None:
    bench = trains(
        elastic=ElasticPolicy(min_replicas=1, max_replicas=3, scaling_timeout_s=0.0), shards=3
    )
    assert bench.attach(hello_with_door("c")) == []
    asked = bench.wait(0.02)
    assert [node for node, _ in asked] == ["c"]
    assert bench.hear(report("c", "ok")) == []
    heir = bench.successor()
    assert heir.plane.membership.on_probation == {"c"}, (
        "the next coordinator does not use it either"
    )
    bench.hear(*measured(asked))
    assert bench.plane.membership.unfit == frozenset()
    bench.wait(0.02)
    assert bench.plane.membership.workers_on("c") == {"c.0"}
    (fact,) = [
        fact
        for fact in bench.plane.messages_for_observer()
        if isinstance(fact, messages.HealthReport)
    ]
    assert {"gpu0.xid", "pair.reached"} <= {finding.what for finding in fact.findings}


def test_a_newcomer_is_tested_anew_by_the_next_coordinator() -> None:
    """An answer to the coordinator before may be about another link."""
    bench = trains(
        elastic=ElasticPolicy(min_replicas=1, max_replicas=3, scaling_timeout_s=0.0), shards=3
    )
    bench.attach(hello_with_door("c"))
    asked = bench.wait(0.02)
    heir = bench.successor()
    heir.attach(
        *(back(node, host=node, port=7) for node in NODES), hello_with_door("c", generation=1)
    )
    asked_again = heir.go_on(0.1, *NODES, "c")
    heir.hear(report("c", "ok"), *measured(asked))
    assert measured(asked)
    assert heir.plane.membership.on_probation == {"c"}
    heir.hear(*measured(asked_again))
    heir.wait(0.02)
    assert heir.plane.membership.workers_on("c") == {"c.0"}


def test_a_newcomer_that_is_badly_connected_is_refused_after_some_tries() -> None:
    bench = trains()
    bench.attach(hello_with_door("c"))
    bench.hear(report("c", "ok"))
    for _ in range(3):
        bench.hear(*measured(bench.go_on(0.5, *NODES, "c"), sent_mb_s=0.5))
    assert (bench.plane.membership.unfit, bench.plane.membership.on_probation) == (
        {"c"},
        frozenset(),
    )
    assert [fields["standing"] for fields in noted(bench, Event.HEALTH)] == ["admitted", "refused"]
    assert [
        send
        for send in bench.outputs
        if isinstance(send, Send) and isinstance(send.message, StartWorker)
    ][2:] == []


def test_a_newcomer_that_is_needed_is_used_before_anything_is_known_of_it() -> None:
    bench = trains()
    bench.do(bench.plane.detach("b", "its agent ended", bench.now_s, dead=True))
    bench.hear(Formed("a.0", 2))
    assert bench.plane.membership.settled
    bench.attach(hello_with_door("b", pid=2, started=1))
    assert bench.plane.membership.unfit == frozenset()


def test_a_newcomer_that_is_needed_before_it_has_proved_itself_is_used_then() -> None:
    bench = trains()
    bench.attach(hello_with_door("c"))
    asked = bench.wait(0.02)
    assert bench.plane.membership.on_probation == {"c"}
    bench.do(bench.plane.detach("b", "its agent ended", bench.now_s, dead=True))
    bench.wait(0.02)
    assert bench.plane.membership.unfit == frozenset()
    for _ in range(3):
        bench.hear(*measured(asked, sent_mb_s=0.5))
        asked = bench.go_on(0.5, "a", "c")
    assert bench.plane.membership.unfit == {"c"}, "and given up when it is found unfit after all"


def test_in_a_run_that_only_reports_a_newcomer_is_used_at_once_and_its_link_is_told() -> None:
    bench = trains("report")
    bench.attach(hello_with_door("c"))
    assert bench.plane.membership.unfit == frozenset()
    for _ in range(3):
        bench.hear(*measured(bench.go_on(0.5, *NODES, "c"), error="silent for 2 s"))
    assert [fields["standing"] for fields in noted(bench, Event.HEALTH)] == ["refused"]
    assert bench.plane.membership.unfit == frozenset()


def test_when_all_nodes_are_lost_before_anybody_trained_the_run_ends() -> None:
    bench = Bench(RunConfig(job=JobSpec("job.py"), nodes=2, spares=0, startup_s=5.0))
    bench.attach(hello("a"), hello("b"))
    bench.hear(*map(ready, WORKERS))
    for node in NODES:
        bench.do(bench.plane.detach(node, "its agent ended", bench.now_s, dead=True))
    bench.wait(4.0)
    assert not bench.plane.ended, "others may come"
    bench.wait(2.0)
    assert bench.plane.ended


def test_when_all_nodes_are_lost_whose_ranks_have_met_nobody_begins_anew() -> None:
    """The ranks may have trained, although no report of their group came."""
    bench = Bench(RunConfig(job=JobSpec("job.py"), nodes=2, spares=0, startup_s=5.0))
    bench.attach(hello("a"), hello("b"))
    bench.hear(*map(ready, WORKERS))
    for rank in range(2):
        bench.do(bench.plane.ask(object(), Exchange(1, STANDING, rank, b"")))
    for node in NODES:
        bench.do(bench.plane.detach(node, "its agent ended", bench.now_s, dead=True))
    assert bench.plane.ended
    (end,) = [
        message for message in bench.plane.messages_for_observer() if isinstance(message, EndJob)
    ]
    assert end.reason.startswith("every replica was lost")


# -- uneven work -----------------------------------------------------------------------------------


class Uneven:
    """Three nodes that train, and a spare on the first; how long a shard takes each rank is up to the test."""

    def __init__(self, **settings: Any) -> None:
        config = RunConfig(
            job=JobSpec("job.py"), **({"nodes": 3, "spares": 1, "shards": 12} | settings)
        )
        self.bench = Bench(config)
        self.bench.attach(*map(hello, "abc"))
        self.bench.hear(*map(ready, ["a.0", "b.0", "c.0", "a.1"]))
        self.settle()
        self.spent: dict[str, messages.Effort] = {}

    def settle(self) -> None:
        plan = self.bench.plane.membership.plan
        assert plan is not None
        self.bench.hear(*(Formed(member.worker, plan.generation) for member in plan.members))
        self.bench.hear(*(Healed(member.worker, plan.generation) for member in plan.members))

    def train(self, steps: int, **shard_ms: float) -> list[Any]:
        """Let all ranks take ``steps`` steps, with a beat after each.

        ``shard_ms`` is the time of a shard by node, 20 for the others.
        """
        sent: list[Any] = []
        for _ in range(steps):
            plan = self.bench.plane.membership.plan
            assert plan is not None
            for member in plan.members:
                before, shards = (
                    self.spent.get(member.worker, messages.Effort()),
                    len(member.shards),
                )
                took_ms = shards * shard_ms.get(member.node, 20.0)
                effort = messages.Effort(
                    before.steps + 1, before.shards + shards, before.compute_ms + took_ms
                )
                self.spent[member.worker] = effort
                beat = messages.Beat(
                    member.worker,
                    plan.generation,
                    member.rank,
                    3,
                    Phase.FORWARD,
                    1.0,
                    0.0,
                    3,
                    0.0,
                    effort=effort,
                )
                sent += self.bench.hear(Heartbeat(member.node, (beat,)))
            sent += self.bench.wait(0.0)
        return sent

    @property
    def loads(self) -> list[int]:
        plan = self.bench.plane.membership.plan
        assert plan is not None
        return [len(member.shards) for member in plan.members]

    def notes(self, event: Event) -> list[dict[str, Any]]:
        return [
            note.fields
            for note in self.bench.outputs
            if isinstance(note, WriteRecord) and note.event == event
        ]


def test_a_slow_rank_gets_fewer_shards_and_as_many_as_before_when_it_recovers() -> None:
    uneven = Uneven()
    assert plans(uneven.train(20)) == []
    assert plans(uneven.train(10, b=40.0)) == [2]
    assert uneven.loads == [5, 2, 5]
    (note,) = uneven.notes(Event.REBALANCED)
    assert note["shares"] == {"a.0": 5, "b.0": 2, "c.0": 5}
    assert note["gain"] > 0.3
    assert note["paces"]["b.0"]["compute_ms"] == pytest.approx(40.0)
    (straggler,) = uneven.notes(Event.STRAGGLER)
    assert (straggler["worker"], straggler["rank"], straggler["kind"]) == ("b.0", 1, "compute")
    assert uneven.train(20, b=40.0) == [], "not before all stand in the new generation"
    uneven.settle()
    assert plans(uneven.train(60)) == [3]
    assert uneven.loads == [4, 4, 4]


def test_the_next_coordinator_knows_the_shares() -> None:
    uneven = Uneven()
    uneven.train(10, b=40.0)
    plan = uneven.bench.plane.membership.plan
    assert plan is not None
    heir = uneven.bench.successor()
    assert heir.plane.membership.plan == plan
    assert not heir.plane.membership.settled


@pytest.mark.parametrize("settings", [{"balance": False}, {"shards": 3}], ids=str)
def test_shards_stay_where_that_is_wanted_or_none_can_be_moved(settings: dict[str, Any]) -> None:
    uneven = Uneven(**settings)
    assert plans(uneven.train(50, b=80.0)) == []
    assert uneven.notes(Event.REBALANCED) == []
    (straggler,) = uneven.notes(Event.STRAGGLER)
    assert ("no shard can be moved: shards=3 for 3 ranks" in straggler["detail"]) == (
        "shards" in settings
    )


def test_a_rank_over_the_limit_is_given_up_for_a_spare_on_another_node() -> None:
    uneven = Uneven(slow_limit=4.0, slow_steps=10, shards=3)
    assert uneven.train(30, b=70.0) == [], "not over the limit"
    sent = uneven.train(20, b=90.0)
    orders = [message for node, message in sent if node == "b" and isinstance(message, StopWorker)]
    assert {order.cause for order in orders} == {"slow", "lost"}
    assert all(29 < order.grace_s <= 30 and order.reason for order in orders), (
        "it is well, and has hooks to call"
    )
    plan = uneven.bench.plane.membership.plan
    assert plan is not None
    assert [member.worker for member in plan.members] == ["a.0", "a.1", "c.0"]
    assert [(worker, cause) for worker, _, cause, _ in detected(uneven.bench.outputs)] == [
        ("b.0", "slow")
    ]


@pytest.mark.parametrize(
    "settings", [{}, {"slow_limit": 4.0, "slow_steps": 10, "spares": 0}], ids=str
)
def test_without_a_limit_or_a_spare_nobody_is_given_up(settings: dict[str, Any]) -> None:
    uneven = Uneven(**settings, balance=False)
    assert uneven.train(100, b=900.0) == []


def test_a_rank_on_the_node_of_the_only_spare_is_kept() -> None:
    uneven = Uneven(slow_limit=4.0, slow_steps=10, balance=False)
    assert uneven.train(50, a=900.0) == []


# -- a launch that is told to end ------------------------------------------------------------------


def test_all_ranks_are_told_to_end_after_the_same_step() -> None:
    bench = Bench().begin()
    bench.hear(trained("a.0", 1))
    assert bench.hear(Halt("SIGTERM")) == [("a", Halt("SIGTERM", 2)), ("b", Halt("SIGTERM", 2))]


def test_the_step_after_which_ranks_end_stays_the_same() -> None:
    bench = Bench().begin()
    bench.hear(Halt("SIGTERM"), trained("a.0", 1))
    assert bench.hear(Halt("SIGTERM")) == [("a", Halt("SIGTERM", 1)), ("b", Halt("SIGTERM", 1))]


def test_ranks_of_a_later_generation_are_told_to_end_too() -> None:
    """A rank that joins while the others end would train on."""
    bench = Bench().begin()
    bench.hear(Halt("SIGTERM"))
    sent = bench.hear(lost("b.0"))
    assert plans(sent) == [2]
    assert [node for node, message in sent if isinstance(message, Halt)] == ["a"]


def test_the_newest_state_is_stored_while_the_last_step_lasts() -> None:
    """The step may not end within the grace. The order is given once for each step."""
    bench = Bench().begin()
    bench.hear(trained("a.0", 1))
    assert bench.go_on(2.0, *NODES) == []
    bench.hear(Halt("SIGTERM"))
    assert bench.go_on(2.0, *NODES) == [("a", StoreStep(1)), ("b", StoreStep(1))]


def test_nothing_is_stored_before_the_first_step() -> None:
    bench = Bench().begin()
    bench.hear(Halt("SIGTERM"))
    assert bench.go_on(2.0, *NODES) == []


def test_a_job_without_ranks_ends_at_once() -> None:
    bench = Bench()
    bench.attach(hello("a"))
    bench.hear(Halt("SIGTERM"))
    assert bench.plane.ended
