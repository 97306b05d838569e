"""The states of a planned fault during a run: their order, the time of the act, and the records."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.injecting import target_of

from chaoskit.errors import FaultBroken, HarnessError, NodeUnreachable
from chaoskit.experiment.injection.injection import Injection
from chaoskit.experiment.injection.injector import Injector
from chaoskit.experiment.judge.fault_audit import audit
from chaoskit.journal import Journal, Record
from chaoskit.journal.lines import unseal
from chaoskit.runlog.injected import injections
from chaoskit.substrate.core.actions import CountedAction
from chaoskit.substrate.core.processes import HOST
from chaoskit.substrate.undo import UndoLog
from chaoskit.vocabulary import Event, Phase, Verdict
from chaoskit.wire.messages import AtHook, Beat, Heartbeat, InjectionOrder, Resume, Trigger
from faults import Kill
from faults.base import Fault
from faults.evidence import (
    CoordinatorProcess,
    Evidence,
    NetworkPath,
    RankProcess,
    ReadBack,
    SizeRequest,
    Subject,
    WholeNode,
)
from faults.target import Target

# -- states ----------------------------------------------------------------------------------------

KILL = Kill(rank=1, at_step=8)
HOOK = AtHook("node1.w0", "fault0", rank=1, step=8, phase="forward", pid=1, tid=1, generation=1)
TARGET: Any = object()
PROOF = ReadBack(subject=RankProcess("node1.w0", 1, 1), source="a test", value="seen")

#: The events of an injection -> the states in which they may happen.
ALLOWED = {
    "wait_at_hook": {"planned"},
    "return_to_planned": {"waiting", "in force"},
    "strike": {"planned", "waiting"},
    "confirm": {"in force", "confirmed"},
    "miss": {"planned", "waiting", "in force", "confirmed"},
}
LEADS_TO = {
    "wait_at_hook": "waiting",
    "return_to_planned": "planned",
    "strike": "in force",
    "confirm": "confirmed",
    "miss": "missed",
}


def happen(injection: Injection, event: str) -> None:
    match event:
        case "wait_at_hook":
            injection.wait_at_hook(HOOK, 1.0)
        case "return_to_planned":
            injection.return_to_planned()
        case "strike":
            injection.strike(TARGET)
        case "confirm":
            injection.confirm(PROOF)
        case "miss":
            injection.miss("a test")


def state_of(injection: Injection) -> dict[str, Any]:
    """Return the present value of each field of an injection."""
    values = {field.name: getattr(injection, field.name) for field in fields(injection)}
    return values | {
        "evidence": [*injection.evidence],
        "recorded_acts_ns": dict(injection.recorded_acts_ns),
    }


@given(st.lists(st.sampled_from([*ALLOWED]), max_size=12))
@settings(max_examples=examples(1000), deadline=None, database=None)
def test_an_injection_strikes_once_and_never_goes_back(events: list[str]) -> None:
    """The order of events is arbitrary.

    An event that may not happen is an error of the harness, and changes nothing.
    """
    injection, strikes, shown = Injection("fault0", KILL), 0, 0
    for event in events:
        before = state_of(injection)
        if before["state"] not in ALLOWED[event]:
            with pytest.raises(HarnessError, match=str(before["state"])):
                happen(injection, event)
            assert state_of(injection) == before
            continue
        happen(injection, event)
        assert injection.state == LEADS_TO[event]
        strikes, shown = strikes + (event == "strike"), shown + (event == "confirm")
        strikes = 0 if event == "return_to_planned" else strikes
        assert strikes <= 1
        assert injection.is_struck == (strikes > 0 or injection.state == "missed")
        assert injection.target is (TARGET if strikes else None)
        assert injection.struck is (None if injection.state == "missed" else injection.target)
        assert (injection.hook is not None) == (injection.state == "waiting")
        assert len(injection.evidence) == shown
        assert injection.observed == ("seen" if shown else "")
        assert injection.missed == ("a test" if injection.state == "missed" else "")


# -- acts and evidence -----------------------------------------------------------------------------

#: The story of a fault: the body of its ``inject``.
Story = Callable[[Target], AsyncIterator[Evidence]]


@dataclass(frozen=True, kw_only=True)
class Scripted(Fault):
    """A fault that follows a script of the test."""

    rank: int | str = 1
    story: Story

    def __str__(self) -> str:
        return "Scripted()"

    def inject(self, target: Target) -> AsyncIterator[Evidence]:
        return self.story(target)


class Lines:
    """Connections to workers that carry only releases."""

    def __init__(self) -> None:
        self.released: list[str] = []

    def tell(self, node: str, order: InjectionOrder, worker: str = "") -> bool:
        assert isinstance(order, Resume)
        self.released.append(worker)
        return True

    def arm_node(self, node: str, trigger: Trigger) -> None:
        raise AssertionError("no story arms a node")


class Run:
    """Faults that are due at the same moment, each on its own rank.

    ``log`` collects notes of their stories.
    """

    def __init__(self, directory: Path, undo: UndoLog) -> None:
        self._undo, self._path = undo, directory / "harness.jsonl"
        self._journal, self._runner = Journal(directory, "harness"), asyncio.Runner()
        self.log: list[str] = []
        self.lines = Lines()
        self.failures = 0
        self.injector: Injector
        self.targets: list[Target]

    def strike(self, *stories: Story, is_patient: bool = False) -> None:
        faults = [Scripted(at_step=8, story=story) for story in stories]
        self.injector = Injector(
            faults, self._journal, self._place_of, self._has_failed, is_patient=is_patient
        )
        self.targets = [
            target_of(
                self._undo,
                channel=self.lines,
                fault_id=injection.fault_id,
                worker=f"node{rank}.w0",
                node=f"node{rank}",
                rank=rank,
                process=HOST.find(os.getpid()),
                waiting=f"node{rank}.w0",
            )
            for rank, injection in enumerate(self.injector.injections)
        ]
        self._runner.run(self._strike())

    async def _strike(self) -> None:
        self.injector.strike(zip(self.injector.injections, self.targets, strict=True))
        self.log.append("told to strike")
        for _ in range(8):
            await asyncio.sleep(0)

    def _place_of(self, worker: str) -> dict[str, Any]:
        return {"rank": int(worker[4]), "node": worker[:5], "pid": os.getpid(), "generation": 1}

    def _has_failed(self) -> None:
        self.failures += 1

    def settle(self) -> None:
        self._runner.run(self.injector.settle())

    def end(self) -> None:
        """Mark the run as over."""
        self._runner.run(self.injector.end())

    def undo(self) -> None:
        """End all processes, and put back all changes."""
        self._runner.run(self.injector.close())
        self.injector.record_missed()

    def records(self, *events: Event) -> list[Record]:
        """Return the records of these events, in the order of writing."""
        lines = [unseal(line, "harness") for line in self._path.read_bytes().splitlines()]
        return [line.record for line in lines if line is not None and line.record.event in events]

    def written(self) -> list[tuple[str, str]]:
        """Return event and fault of each record of an injection, in the order of writing."""
        events = (
            Event.INJECTED,
            Event.ACTED,
            Event.EVIDENCE,
            Event.LIFTED,
            Event.FAULT_MISSED,
            Event.UNDONE,
        )
        return [(record.event, record["fault"]) for record in self.records(*events)]

    def close(self) -> None:
        self._runner.close()
        self._journal.close()


@pytest.fixture
def run(tmp_path: Path, undo: UndoLog) -> Iterator[Run]:
    with closing(Run(tmp_path, undo)) as faulted_run:
        yield faulted_run


def proof(target: Target, value: str = "seen") -> Evidence:
    return ReadBack(subject=target.rank_process, source="a test", value=value)


async def lasting(target: Target) -> AsyncIterator[Evidence]:
    """Act, yield evidence, and last."""
    yield proof(target)
    await target.until_end()


@pytest.mark.parametrize("is_seen_at_once", [False, True])
def test_faults_that_are_due_together_act_before_any_evidence_is_awaited(
    run: Run, is_seen_at_once: bool
) -> None:
    """A rank that is struck has not observed the loss of another; no record is written between the
    acts.
    """

    async def story(target: Target) -> AsyncIterator[Evidence]:
        run.log.append(f"act {len(run.records(Event.INJECTED, Event.EVIDENCE))}")
        if not is_seen_at_once:
            await target.sleep(0.0)
        run.log.append("seen")
        yield proof(target)

    run.strike(story, story, story)
    assert run.log[:1] == ["told to strike"]
    assert run.log.count("seen") == 3
    assert [line for line in run.log if line.startswith("act")] == ["act 0"] * 3


def test_the_act_is_written_before_its_evidence(run: Run) -> None:
    """Early evidence must not precede the act: it would be evidence of an unknown act."""

    async def late(target: Target) -> AsyncIterator[Evidence]:
        await target.sleep(0.0)
        yield proof(target, "first")
        yield proof(target, "second")

    run.strike(lasting, late)
    for number, evidence in enumerate((1, 2)):
        events = [event for event, fault in run.written() if fault == f"fault{number}"]
        assert events == [Event.INJECTED, *[Event.EVIDENCE] * evidence]
    first, second = run.records(Event.INJECTED)
    assert [first.t_ns, second.t_ns] == [target.injected_ns for target in run.targets]
    assert all(record.t_ns >= first.t_ns for record in run.records(Event.EVIDENCE))
    assert [record["observed"] for record in run.records(Event.EVIDENCE)] == [
        "seen",
        "first",
        "second",
    ]
    assert [injection.observed for injection in run.injector.injections] == ["seen", "second"]


def test_what_is_struck_is_claimed_before_the_act(run: Run) -> None:
    """Each due fault claims its target before the act: no other fault may strike it, and its loss
    is no false alarm.
    """

    async def story(target: Target) -> AsyncIterator[Evidence]:
        claimed = [
            struck_target.worker
            for struck_target in run.targets
            if run.injector.is_doomed(struck_target.worker, struck_target.process)
        ]
        run.log.append(f"{sorted(target.claims)} of {claimed}")
        await target.until_end()
        yield proof(target)

    run.strike(story, story)
    struck = ["node0.w0", "node1.w0"]
    assert run.log[1:] == [f"['{worker}'] of {struck}" for worker in struck]
    assert not run.injector.is_doomed("node2.w0", HOST.find(os.getpid()))
    assert [record["worker"] for record in run.records(Event.INJECTED)] == struck
    assert run.records(Event.ACTED) == []


def test_an_act_that_harms_no_rank_takes_its_claim_back(run: Run) -> None:
    """The act may claim other ranks, each when it strikes that rank."""

    async def story(target: Target) -> AsyncIterator[Evidence]:
        target.unclaim()
        await target.heard(lambda: run.log.count("go on"))
        target.claim("node7.w0")
        yield proof(target)

    run.strike(story)
    assert run.targets[0].claims == {}
    assert not run.injector.is_doomed("node0.w0", HOST.find(os.getpid()))
    assert run.written() == [(Event.INJECTED, "fault0")]
    run.log.append("go on")
    run.settle()
    assert {*run.targets[0].claims} == {"node7.w0"}
    (acted,) = run.records(Event.ACTED)
    assert (acted["worker"], acted["rank"], acted.t_ns) == (
        "node7.w0",
        7,
        run.targets[0].claims["node7.w0"],
    )


# -- what is missed, and what fails ----------------------------------------------------------------


def test_a_target_that_is_gone_before_the_act_is_missed(run: Run) -> None:
    """The target was gone, so nothing was done or undone; the rank that waits goes on."""

    async def story(target: Target) -> AsyncIterator[Evidence]:
        raise ProcessLookupError("no such process")
        yield

    run.strike(story, lasting)
    run.undo()
    assert [injection.missed for injection in run.injector.injections] == [
        "the target was gone already: no such process",
        "",
    ]
    assert run.lines.released == ["node0.w0"]
    assert [event for event, fault in run.written() if fault == "fault0"] == [Event.FAULT_MISSED]
    assert run.failures == 0


def test_a_target_that_is_gone_after_its_evidence_was_struck(run: Run) -> None:
    async def story(target: Target) -> AsyncIterator[Evidence]:
        yield proof(target)
        raise ProcessLookupError("no such process")

    run.strike(story)
    run.undo()
    (injection,) = run.injector.injections
    assert (injection.observed, injection.missed) == ("seen", "")
    assert [event for event, _ in run.written()] == [Event.INJECTED, Event.EVIDENCE, Event.UNDONE]


async def not_reached(target: Target) -> AsyncIterator[Evidence]:
    raise NodeUnreachable("node0 has no hand")
    yield


def test_a_fault_whose_node_is_not_reached_is_planned_again(run: Run) -> None:
    """The strike leaves no record, and the fault can strike again."""
    run.strike(not_reached, is_patient=True)
    (injection,) = run.injector.injections
    assert (injection.state, injection.unreached) == ("planned", "node0 has no hand")
    assert (injection.struck, run.failures, run.written()) == (None, 0, [])
    assert not run.injector.awaits_end
    assert not run.injector.is_doomed("node0.w0", HOST.find(os.getpid()))


@pytest.mark.parametrize("acts_first", ["", "recorded", "applied"])
def test_a_fault_that_may_have_acted_never_strikes_again(run: Run, acts_first: str) -> None:
    async def story(target: Target) -> AsyncIterator[Evidence]:
        if acts_first == "recorded":
            await target.sleep(0.0)
            raise NodeUnreachable("it has ended")
        if acts_first == "applied":
            with target.holding(CountedAction(lambda: 0, lambda: True)):
                raise NodeUnreachable("it has ended")
        raise NodeUnreachable("it did not answer kill", may_have_acted=True)
        yield

    run.strike(story, is_patient=True)
    run.undo()
    (injection,) = run.injector.injections
    assert injection.missed.startswith("its effect is not known: it ")
    assert run.failures == 0
    assert [event for event, _ in run.written()] == [
        Event.INJECTED,
        Event.UNDONE,
        Event.FAULT_MISSED,
    ]


def test_a_node_that_is_not_reached_ends_the_run_of_a_job(run: Run) -> None:
    """The rank that waits at the hook would wait for ever."""
    run.strike(not_reached)
    with pytest.raises(NodeUnreachable, match="node0 has no hand"):
        run.injector.check()


@pytest.mark.parametrize(
    ("raised", "text"),
    [
        (KeyError("niceness"), "KeyError: 'niceness'"),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
        (AssertionError(), "AssertionError: "),
    ],
)
def test_an_error_in_the_code_of_a_fault_has_its_place(
    run: Run, raised: Exception, text: str
) -> None:
    async def story(target: Target) -> AsyncIterator[Evidence]:
        raise raised
        yield

    run.strike(story)
    with pytest.raises(
        FaultBroken,
        match=rf"^Scripted\(\) could not act: {re.escape(text)} \(.*test_injection.py:\d+\)$",
    ):
        run.injector.check()
    assert run.injector.injections[0].missed == f"it could not act: {text}"


@pytest.mark.parametrize("yielded", [None, "it was slow", 3])
def test_what_is_no_evidence_is_named(run: Run, yielded: Any) -> None:
    async def story(target: Target) -> AsyncIterator[Evidence]:
        yield yielded

    run.strike(story)
    with pytest.raises(
        FaultBroken, match=rf"inject yielded {yielded!r}, which is not a faults.evidence.Evidence"
    ):
        run.injector.check()
    run.undo()
    assert Event.EVIDENCE not in [event for event, _ in run.written()]


def test_a_story_that_is_no_generator_is_named(run: Run) -> None:
    async def story(target: Target) -> None:
        """Return a coroutine that is never awaited."""

    run.strike(story)
    with pytest.raises(FaultBroken, match="inject is not an async generator: it must yield"):
        run.injector.check()


def test_a_target_that_is_gone_without_a_word_is_said(run: Run) -> None:
    async def story(target: Target) -> AsyncIterator[Evidence]:
        raise ProcessLookupError
        yield

    run.strike(story)
    assert [injection.missed for injection in run.injector.injections] == [
        "the target was gone already"
    ]


@pytest.mark.parametrize("is_shown", [False, True])
def test_a_fault_that_fails_ends_the_run(run: Run, is_shown: bool) -> None:
    """The run ends whether there was evidence before or not.

    A rank that waits at its hook goes on.
    """

    async def story(target: Target) -> AsyncIterator[Evidence]:
        if is_shown:
            yield proof(target)
        raise PermissionError("not allowed")

    run.strike(story)
    assert run.failures == 1
    with pytest.raises(HarnessError, match=r"Scripted\(\) could not act: not allowed"):
        run.injector.check()
    assert run.injector.injections[0].missed == (
        "" if is_shown else "it could not act: not allowed"
    )
    assert run.lines.released == ["node0.w0"]


def test_a_rank_that_a_fault_forgets_goes_on(run: Run) -> None:
    """The fault is over and has not released its rank: the rank would stand until the deadline."""

    async def forgetful(target: Target) -> AsyncIterator[Evidence]:
        yield proof(target)

    async def careful(target: Target) -> AsyncIterator[Evidence]:
        target.release()
        yield proof(target)

    run.strike(forgetful, careful)
    assert sorted(run.lines.released) == ["node0.w0", "node1.w0"]


def test_others_are_put_back_when_a_fault_fails(run: Run) -> None:
    """The other faults are put back even if the run is ended because of the failure."""

    async def failing(target: Target) -> AsyncIterator[Evidence]:
        yield proof(target)
        raise PermissionError("not allowed")

    run.strike(failing, lasting)
    run.end()
    run.undo()
    assert [(record["fault"], record["ok"]) for record in run.records(Event.UNDONE)] == [
        ("fault0", True),
        ("fault1", True),
    ]


@pytest.mark.parametrize(
    ("subject", "is_about_it"),
    [
        (RankProcess("node1.w0", 1, 7), True),
        (RankProcess("node1.w0", 1, 8), False),
        (RankProcess("node2.w0", 2, 7), False),
        (WholeNode("node1"), True),
        (WholeNode("node2"), False),
        (NetworkPath(("coordinator", "node1")), True),
        (NetworkPath(("node2", "node3")), False),
        (CoordinatorProcess(7), False),
        (SizeRequest("fault0"), True),
        (SizeRequest("fault1"), False),
    ],
    ids=str,
)
def test_evidence_about_something_else_is_an_error_of_the_harness(
    subject: Subject, is_about_it: bool
) -> None:
    place = {
        "worker": "node1.w0",
        "rank": 1,
        "node": "node1",
        "pid": 7,
        "step": 8,
        "phase": "forward",
        "waiting": "",
    }
    injected = {"fault": "fault0", "nodes": [], "done_ns": 11, **place}
    evidence = {"subject": msgspec.to_builtins(subject)}
    observation = {"fault": "fault0", "observed": "pid 7 is gone", "evidence": evidence}
    records = [
        Record(10, "harness", Event.INJECTED, injected),
        Record(12, "harness", Event.EVIDENCE, observation),
    ]
    checks = audit(injections([KILL], records), records)
    problems = [
        check for check in checks if "its evidence is not about what it struck" in check.detail
    ]
    assert [check.verdict for check in problems] == ([] if is_about_it else [Verdict.ERROR])


# -- the end ---------------------------------------------------------------------------------------


def test_a_fault_that_is_ended_at_the_close_puts_back(run: Run) -> None:
    """A fault that waits for evidence, for a time or for the end is ended at the close, and puts
    back its change.
    """

    def waits(wait: Callable[[Target], Any]) -> Story:
        async def story(target: Target) -> AsyncIterator[Evidence]:
            try:
                yield proof(target)
                await wait(target)
            finally:
                run.log.append(f"{target.worker} is put back")

        return story

    waiting: list[Callable[[Target], Any]] = [
        lambda target: target.until_end(),
        lambda target: target.sleep(60.0),
        lambda target: target.seen(lambda: False),
        lambda target: target.ended(),
    ]
    run.strike(*map(waits, waiting))
    run.end()
    assert run.log == ["told to strike"]
    run.undo()
    assert sorted(run.log[1:]) == [f"node{rank}.w0 is put back" for rank in range(4)]
    assert [(record["fault"], record["ok"]) for record in run.records(Event.UNDONE)] == [
        (f"fault{number}", True) for number in range(4)
    ]


@pytest.mark.parametrize("is_shown", [False, True])
@pytest.mark.parametrize(
    "error",
    [RuntimeError("it is stuck"), OSError("it is busy"), ConnectionResetError("it is deaf")],
    ids=repr,
)
def test_an_error_in_putting_back_is_told(run: Run, error: Exception, is_shown: bool) -> None:
    """The other faults are put back nevertheless, and the fault has acted."""

    async def story(target: Target) -> AsyncIterator[Evidence]:
        try:
            if is_shown:
                yield proof(target)
            await target.until_end()
        finally:
            raise error

    async def other(target: Target) -> AsyncIterator[Evidence]:
        try:
            yield proof(target)
            await target.until_end()
        finally:
            run.log.append("the other one is put back")

    run.strike(story, other)
    run.end()
    run.undo()
    assert run.log[1:] == ["the other one is put back"]
    assert [record["ok"] for record in run.records(Event.UNDONE)] == [False, True]
    assert run.targets[0].left_behind == [str(error)]
    assert run.records(Event.FAULT_MISSED) == []


def test_what_is_left_behind_is_told(run: Run) -> None:
    async def story(target: Target) -> AsyncIterator[Evidence]:
        target.left_behind.append("a process is stopped")
        yield proof(target)

    run.strike(story, lasting)
    run.undo()
    assert [record["ok"] for record in run.records(Event.UNDONE)] == [False, True]


def test_a_fault_that_lasts_acts_until_it_is_lifted(run: Run) -> None:
    """The fault acts until the end if it is not lifted: a process that is started meanwhile may be
    struck by it.
    """

    async def story(target: Target) -> AsyncIterator[Evidence]:
        with target.holding(CountedAction(lambda: 1, lambda: 1)):
            yield proof(target)
            await target.heard(lambda: target.rank == 0 and run.log.count("lift"))
        target.lifted()

    run.strike(story, story)
    run.log.append("lift")
    run.settle()
    (lifted,) = run.records(Event.LIFTED)
    assert lifted.t_ns == run.targets[0].lifted_ns > run.targets[0].injected_ns
    run.undo()
    first, second = run.records(Event.UNDONE)
    assert first["acted_ns"] == lifted.t_ns < second["acted_ns"]


def test_the_last_word_of_a_fault_that_is_felt_again_and_again_counts(run: Run) -> None:
    """The fault is observed since its first evidence.

    A fault that was never observed is not proven by its last word.
    """
    counts = iter(range(1, 9))

    async def story(target: Target) -> AsyncIterator[Evidence]:
        target.last_word = lambda: proof(target, f"{next(counts)} times")
        if target.rank == 0:
            yield target.last_word()
        await target.until_end()

    run.strike(story, story)
    run.end()
    first, second = run.injector.injections
    assert (first.observed, second.observed) == ("2 times", "")
    evidence = run.records(Event.EVIDENCE)
    assert [record["observed"] for record in evidence] == ["1 times", "2 times"]
    assert {record.t_ns for record in evidence} == {first.evidence[0].observed_ns}


def test_time_without_a_cpu_is_told_when_all_is_over(run: Run) -> None:
    beat = Beat("node0.w0", 1, 0, 8, Phase.FORWARD, 9_600, 9_000, 8, 1.0)
    run.strike(lasting, lasting)
    run.injector.deliver(Heartbeat("node0", (beat,)))
    run.undo()
    assert [record["starved_s"] for record in run.records(Event.UNDONE)] == [9.0, 0.0]
