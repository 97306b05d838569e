"""Moments and targets of faults: steps, times, rates, phases of a recovery, and roles; each fault
strikes once.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.goals import Flag, workers_lost

from chaoskit.errors import BadInput
from chaoskit.experiment.injection.roster import Roster
from chaoskit.experiment.plan.plan import plan_experiment
from chaoskit.journal import Journal, Record, read_journals
from chaoskit.process.linux import await_readable, undisturbed
from chaoskit.process.progress_board import Board
from chaoskit.pytest_plugin import Chaos
from chaoskit.runlog.outcome import Outcome
from chaoskit.runtime.step.hooks import Hooks
from chaoskit.vocabulary import STRIKE_PHASES, Event, Phase, Verdict
from chaoskit.wire.injection_line import InjectionLine
from chaoskit.wire.messages import (
    ActReport,
    ArmTriggers,
    AskThread,
    AtHook,
    Beat,
    Endpoint,
    Heartbeat,
    InjectionAct,
    InjectionOrder,
    InjectionReport,
    Member,
    Plan,
    Resume,
    ThreadAnswered,
    Trigger,
    WorkerLost,
    WorkerReady,
)
from faults import (
    CATALOGUE,
    BitFlip,
    ClockJump,
    CorruptReplica,
    CrashLoop,
    DataStall,
    FailLoad,
    Fault,
    FreezeNode,
    Hang,
    Kill,
    LosePeerCopy,
    NaN,
    OutOfMemory,
    PoisonSnapshot,
    Preempt,
    Rack,
    Raise,
    Scale,
    at_rate,
)
from faults.base import DRAWN_ROLES

PLAIN = "../../jobs/failing/troubled.py:plain"
PLAIN_PATH = str(Path(__file__).parents[2] / "jobs" / "failing" / "troubled.py") + ":plain"
WAIT_S = 60.0


def run(chaos: Chaos, *faults: Fault, **plan: Any) -> Outcome:
    """Run an experiment that must pass, with ready spares before the first fault.

    The run goes on until the world is full again, and ``until`` holds.
    """
    settings = {
        "nodes": 3,
        "spares": 1,
        "steps": 20,
        "deadline_s": 120.0,
        "options": {"step_s": 0.02},
    } | plan
    settings["until"] = {"world": settings["nodes"], "spares": settings["spares"]} | plan.get(
        "until", {}
    )
    return chaos.run(PLAIN, faults=faults, **settings)


def journal(outcome: Outcome, *events: Event) -> list[Record]:
    """Return the records of ``events`` from all journals of a run, by time."""
    return [
        record
        for record in read_journals(Path(outcome.directory) / "journal")
        if record.event in events
    ]


def victim(outcome: Outcome, number: int) -> str:
    """Return the worker that a fault struck, by the fault's number in the plan."""
    records = [
        record for record in journal(outcome, Event.INJECTED) if record["fault"] == f"fault{number}"
    ]
    assert len(records) == 1, records  # once only
    return str(records[0]["worker"])


# -- in a recovery ---------------------------------------------------------------------------------

FIRST = Kill(rank=1, at_step=6)


def test_a_kill_at_the_detection_of_another(chaos: Chaos, tmp_path: Path) -> None:
    """The second rank dies after the first loss is detected, and not before."""
    flag = workers_lost(tmp_path / "lost", 2)
    outcome = run(
        chaos, FIRST, Kill(rank=2, during="detection"), spares=2, until=flag.until, watch=flag
    )
    detected = journal(outcome, Event.DETECTED)
    injected = [
        record for record in journal(outcome, Event.INJECTED) if record["fault"] == "fault1"
    ]
    assert [record["rank"] for record in detected[:2]] == [1, 2]
    assert detected[0].t_ns < injected[0].t_ns < detected[1].t_ns


def test_a_kill_in_the_regroup(chaos: Chaos) -> None:
    """The rank has sent its step to the new generation, and never gets the group of that
    generation.
    """
    outcome = run(chaos, FIRST, Kill(rank=2, during="regroup"))
    dead = victim(outcome, 1)
    assert 2 not in {
        record["generation"]
        for record in journal(outcome, Event.REGROUPED)
        if record.source == dead
    }
    assert outcome.faults[1].evidence[0].observed.endswith("waited in regroup of step 6")


def test_a_kill_of_the_joiner_in_the_restore(chaos: Chaos) -> None:
    """A replacement that dies before it has a state is replaced in turn."""
    outcome = run(chaos, FIRST, Kill(rank=1, during="restore"))
    dead = victim(outcome, 1)
    assert dead != victim(outcome, 0)
    assert not [
        record for record in journal(outcome, Event.RESTORED, Event.COMMIT) if record.source == dead
    ]


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_kill_of_the_healer(chaos: Chaos, transport: str) -> None:
    """The joiner takes the state from another rank if the rank that it is about to read dies.

    On the same host it may still read the memory of the ending process, if that is whole. It may do
    so only in the membership of that process.
    """
    outcome = run(
        chaos, FIRST, Kill(rank="healer", during="restore"), spares=2, transport=transport
    )
    dead = victim(outcome, 1)
    first = {member["worker"] for member in journal(outcome, Event.PLAN)[0]["members"]}
    assert dead in first - {victim(outcome, 0)}  # a survivor, not the joiner
    restored = [
        (record["source"], record["generation"]) for record in journal(outcome, Event.RESTORED)
    ]
    assert {generation for source, generation in restored if source == dead} <= (
        {2} if transport == "auto" else set()
    )
    assert {source for source, _ in restored} - {dead}  # another source took its place
    assert "was about to be read by" in outcome.faults[1].evidence[0].observed


@pytest.mark.parametrize(
    "fault", [Kill(rank=0, during="recommit"), Raise(rank=0, during="recommit")]
)
def test_a_fault_before_the_first_commit(chaos: Chaos, fault: Fault) -> None:
    """A rank dies after the first reduction of a new generation, and before it commits."""
    outcome = run(chaos, FIRST, fault)
    dead = victim(outcome, 1)
    assert 2 not in {
        record["generation"] for record in journal(outcome, Event.COMMIT) if record.source == dead
    }
    assert 2 in {
        record["generation"] for record in journal(outcome, Event.REDUCE) if record.source == dead
    }


def test_a_hang_in_the_second_recovery(chaos: Chaos) -> None:
    """Each fault of a sequence waits for the recovery from the fault before."""
    faults = [FIRST, Kill(rank=2, during="regroup"), Hang(rank=0, during="recommit", recovery=2)]
    outcome = run(chaos, *faults, spares=2)
    assert len({victim(outcome, number) for number in range(3)}) == 3
    stopped = next(
        record
        for record in journal(outcome, Event.DETECTED)
        if record["worker"] == victim(outcome, 2)
    )
    assert stopped["cause"] == "stopped"


# -- at a time -------------------------------------------------------------------------------------


@pytest.mark.promise("so many seconds after the first committed step")
def test_faults_at_a_time(chaos: Chaos, tmp_path: Path) -> None:
    """A fault at a time strikes a rank at any place in its code, or at the next entry of a phase."""
    faults = [Kill(rank=1, after_s=0.2), Raise(rank=2, after_s=0.4, phase="backward")]
    flag = workers_lost(tmp_path / "lost", 2)
    outcome = run(chaos, *faults, until=flag.until, watch=flag)
    begun_ns = min(record.t_ns for record in journal(outcome, Event.COMMIT))
    injected = {record["fault"]: record for record in journal(outcome, Event.INJECTED)}
    assert (injected["fault0"].t_ns - begun_ns) / 1e9 >= 0.2
    assert (injected["fault1"].t_ns - begun_ns) / 1e9 >= 0.4
    assert injected["fault1"]["phase"] == "backward"


def test_two_faults_of_one_rank_at_a_time_have_two_victims(chaos: Chaos, tmp_path: Path) -> None:
    """The second fault waits for the next holder of the rank: the first death is no evidence of it."""
    flag = workers_lost(tmp_path / "lost", 2)
    faults = [Kill(rank=1, after_s=0.1), Kill(rank=1, after_s=0.1001)]
    outcome = run(chaos, *faults, spares=2, until=flag.until, watch=flag)
    assert victim(outcome, 0) != victim(outcome, 1)


def test_a_hang_at_a_time(chaos: Chaos, tmp_path: Path) -> None:
    """The moment of the fault is described in words."""
    flag = workers_lost(tmp_path / "lost")
    outcome = run(chaos, Hang(rank=0, after_s=0.1), until=flag.until, watch=flag)
    assert outcome.faults[0].moment == "0.1 s after the first committed step"


def test_a_poisoned_gradient_at_a_time(chaos: Chaos, tmp_path: Path) -> None:
    """The gradient of a later step is not finite, and the runtime notices it."""
    flag = Flag(tmp_path / "poisoned", lambda message: isinstance(message, ActReport))
    fault = NaN(rank=1, after_s=0.1, parameter="3.weight")
    outcome = run(chaos, fault, until=flag.until, watch=flag)
    assert journal(outcome, Event.NONFINITE)


# -- at a rate -------------------------------------------------------------------------------------


def test_a_run_with_a_failure_rate(chaos: Chaos) -> None:
    """Each fault that was drawn finds a victim: as many spares are ready as ranks are killed."""
    faults = at_rate(Kill(rank="any"), mtbf_steps=15, steps=60, seed=3)
    assert len(faults) >= 3
    outcome = run(chaos, *faults, steps=64, spares=len(faults))
    assert len(journal(outcome, Event.INJECTED)) == len(faults)


@settings(deadline=None, database=None)
@given(mean=st.floats(0.5, 1e3), end=st.integers(1, 100), seed=st.integers(-(2**63), 2**64 - 1))
def test_a_rate_in_steps(mean: float, end: int, seed: int) -> None:
    """A seed always draws the same moments, in order and within the run; no other field changes."""
    fault = Kill(rank=1, phase="reduce", signum=15)
    faults = at_rate(fault, mtbf_steps=mean, steps=end, seed=seed)
    assert faults == at_rate(fault, mtbf_steps=mean, steps=end, seed=seed)
    steps = [drawn.at_step for drawn in faults]
    assert steps == sorted(steps)  # type: ignore[type-var]
    for drawn in faults:
        drawn.validate(nodes=2, steps=end)
        assert (drawn.rank, drawn.phase, drawn.signum, drawn.after_s) == (1, "reduce", 15, None)


def test_a_rate_has_the_mean_and_spread_of_a_poisson_process() -> None:
    times = [fault.after_s for fault in at_rate(Kill(rank=0), mtbf_s=2.0, seconds=40_000, seed=1)]
    distances = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]  # type: ignore[operator]
    mean = sum(distances) / len(distances)
    assert mean == pytest.approx(2.0, rel=0.03)
    assert sum(distance > 2.0 for distance in distances) / len(distances) == pytest.approx(
        0.368, abs=0.02
    )


@pytest.mark.parametrize(
    ("given_", "field"),
    [
        ({}, "mtbf_steps"),
        ({"mtbf_steps": 3, "mtbf_s": 3, "steps": 5}, "mtbf_steps"),
        ({"mtbf_steps": 3}, "steps"),
        ({"mtbf_s": 3}, "seconds"),
        ({"mtbf_s": 3, "seconds": 5, "steps": 5}, "steps"),
        ({"mtbf_steps": 0, "steps": 5}, "mtbf_steps"),
        ({"mtbf_s": float("nan"), "seconds": 5}, "mtbf_s"),
        ({"mtbf_s": 1.0, "seconds": -1.0}, "seconds"),
    ],
)
def test_a_rate_that_cannot_be(given_: dict[str, Any], field: str) -> None:
    with pytest.raises(BadInput) as refused:
        at_rate(Kill(rank=0), **given_)
    assert refused.value.field == field


# -- roles -----------------------------------------------------------------------------------------


@pytest.mark.promise("those that are due at the same moment strike together")
def test_all_but_one_are_struck_together(chaos: Chaos) -> None:
    """No rank learns of the death of another before it dies itself."""
    if not may_be_undisturbed():
        pytest.skip(
            "this process may not use real-time priority: another process may run between two kills"
        )
    outcome = run(chaos, Kill(rank="all_but_one", at_step=6, phase="reduce"), nodes=4, spares=2)
    injected = [record.t_ns for record in journal(outcome, Event.INJECTED)]
    assert len(injected) == 3
    assert max(injected) < min(
        record.t_ns for record in journal(outcome, Event.PLAN) if record["generation"] == 2
    )


def may_be_undisturbed() -> bool:
    """Return True if this process may take a CPU from ordinary processes."""
    with undisturbed():
        return os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK == os.SCHED_FIFO


def test_the_rank_with_most_shards(chaos: Chaos) -> None:
    """The role selects the rank with the largest share."""
    outcome = run(chaos, Kill(rank="most_shards", at_step=6), nodes=3, shards=8)
    plan = journal(outcome, Event.PLAN)[0]
    loads = {member["rank"]: len(member["shards"]) for member in plan["members"]}
    struck = journal(outcome, Event.INJECTED)[0]["rank"]
    assert loads[struck] == max(loads.values()) > min(loads.values())


@settings(deadline=None, database=None)
@given(nodes=st.integers(1, 16), role=st.sampled_from(sorted(DRAWN_ROLES)), seed=st.integers())
def test_roles_are_drawn(nodes: int, role: str, seed: int) -> None:
    """A role draws its number of different ranks, the same for the same seed; an empty role is
    refused.
    """
    fault = Kill(rank=role, at_step=1)
    sizes = {
        "any": 1,
        "minority": (nodes - 1) // 2,
        "majority": nodes // 2 + 1,
        "all_but_one": nodes - 1,
        "all": nodes,
    }
    if sizes[role] == 0:
        with pytest.raises(BadInput, match="selects none"):
            fault.validate(nodes=nodes, steps=None)
        return
    fault.validate(nodes=nodes, steps=None)
    drawn = fault.expand(nodes, Random(seed))
    assert len({single.rank for single in drawn}) == len(drawn) == sizes[role]
    assert all(isinstance(single.rank, int) and 0 <= single.rank < nodes for single in drawn)
    assert drawn == fault.expand(nodes, Random(seed))


def test_drawing_depends_on_seed_and_place() -> None:
    def ranks(seed: int) -> list[int | str]:
        faults = [Kill(rank="any", at_step=step) for step in range(12)]
        return [
            fault.rank
            for fault in plan_experiment(
                PLAIN_PATH, steps=20, nodes=8, seed=seed, faults=faults
            ).faults
        ]

    assert ranks(0) == ranks(0)
    assert ranks(0) != ranks(1)
    assert len(set(ranks(0))) > 2


@settings(deadline=None, database=None)
@given(loads=st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_the_heaviest_rank(loads: list[int]) -> None:
    assert _plan(1, loads).heaviest == loads.index(max(loads))


# -- once only -------------------------------------------------------------------------------------


@pytest.mark.promise(
    "the rank stops there and says so, on a line of its own to the harness, until it is answered"
)
def test_a_rank_waits_for_a_harness_that_is_slow_to_hear(chaos: Chaos) -> None:
    """A rank reports its hook once; the wait for the answer is no hang, and the fault strikes once."""
    reports: Counter[str] = Counter()

    def watch(message: Any) -> None:
        if isinstance(message, AtHook):
            reports[message.worker] += 1
            if len(reports) == 1:
                time.sleep(1.5)  # longer than the limit of a hang

    fault = NaN(rank=1, at_step=6, parameter="3.weight")
    outcome = run(chaos, fault, watch=watch)
    assert reports[victim(outcome, 0)] == 1
    assert len(journal(outcome, Event.INJECTED)) == len(journal(outcome, Event.LEVER)) == 1


def test_the_worker_that_takes_over_the_rank_is_spared(chaos: Chaos) -> None:
    """The replacement passes the same trigger in the same step unharmed."""
    outcome = run(chaos, Kill(rank=1, at_step=6, phase="backward"))
    assert [record["worker"] for record in journal(outcome, Event.DETECTED)] == [victim(outcome, 0)]
    again = [
        record
        for record in journal(outcome, Event.REDUCE)
        if record["rank"] == 1 and record["step"] == 6
    ]
    first, second = journal(outcome, Event.PLAN)[:2]
    (replacement,) = {member["worker"] for member in second["members"]} - {
        member["worker"] for member in first["members"]
    }
    assert {record.source for record in again} == {replacement}


# -- no evidence, no verdict -----------------------------------------------------------------------


@pytest.mark.promise(
    "A moment that never comes leaves the fault without evidence and the run `unknown`",
    fault=Kill(rank=0, after_s=3600),
)
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (
            Kill(rank=1, during="detection"),
            "rank 1 was held by no process after detection of loss 1",
        ),  # rank 1 is the lost rank
        (
            Kill(rank=1, during="detection", recovery=5),
            "rank 1 was held by no process after detection of loss 5",
        ),
        (
            Kill(rank=0, during="restore", recovery=5),
            "rank 0 was held by no process in restore of recovery 5",
        ),
        (
            Kill(rank="healer", during="restore", recovery=5),
            "rank healer was held by no process in restore of recovery 5",
        ),
        (
            Kill(rank=0, after_s=3600),
            "rank 0 was held by no process 3600 s after the first committed step",
        ),
    ],
)
def test_a_moment_that_never_comes_is_unknown(chaos: Chaos, fault: Fault, why: str) -> None:
    """A fault with a moment that never comes leaves the verdict unknown, and the reason names the
    moment.
    """
    outcome = run(chaos, FIRST, fault, check=False)
    assert outcome.verdict == Verdict.UNKNOWN
    assert (outcome.faults[0].state, outcome.faults[1].state) == ("confirmed", "not fired")
    assert why in outcome.reasons[0]


# -- refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "field", "remedy"),
    [
        (Kill(rank=0), "at_step", "exactly one"),
        (Kill(rank=0, at_step=1, after_s=1.0), "at_step", "exactly one"),
        (Kill(rank=0, at_step=1, during="regroup"), "at_step", "exactly one"),
        (Kill(rank=0, after_s=-1.0), "after_s", "0 or more"),
        (Kill(rank=0, after_s=float("nan")), "after_s", "use a finite number"),
        (Kill(rank=0, during="lunch"), "during", "use one of detection, regroup"),
        (Kill(rank=0, during="regroup", recovery=0), "recovery", "1 or more"),
        (Kill(rank=0, during="regroup", phase="reduce"), "phase", "leave it out"),
        (Kill(rank=0, at_step=1, recovery=2), "recovery", "during"),
        (Kill(rank="somebody", at_step=1), "rank", "any, minority"),
        (Kill(rank="minority", at_step=1), "rank", "selects none"),
        (Kill(rank="healer", at_step=1), "rank", "during='restore'"),
        (Kill(rank="healer", during="regroup"), "rank", "during='restore'"),
        (Raise(rank="healer", during="restore"), "rank", "from outside"),
        (Raise(rank=0, during="regroup"), "during", "main thread"),
        (Hang(rank=0, during="detection", how="gil"), "during", "main thread"),
        (NaN(rank=0, during="restore", parameter="0.weight"), "during", "at_step"),
        (Kill(rank=0, during="regroup"), "during", "plan a fault that causes a recovery"),
        (Preempt(rank=0, at_step=1, grace_s=-1), "grace_s", "0 or more"),
        (FreezeNode(rank=0, at_step=1, thaw_after_s=0), "thaw_after_s", "above 0"),
        (CrashLoop(rank=0, at_step=1, times=0), "times", "1 or more"),
        (FailLoad(rank=0, at_step=1, times=0), "times", "1 or more"),
        (FailLoad(rank=0, at_step=1, message=""), "message", "some text"),
        (Raise(rank=0, at_step=1, message=" "), "message", "some text"),
    ],
)
def test_what_cannot_strike_is_refused(fault: Fault, field: str, remedy: str) -> None:
    with pytest.raises(BadInput, match=remedy) as refused:
        plan_experiment(PLAIN_PATH, steps=20, nodes=2, faults=[fault])
    assert refused.value.field == field


#: Fields that kinds need beside a rank and a moment.
#: Any machine can run out of memory with an error.
NEEDED: dict[type[Fault], dict[str, Any]] = {
    BitFlip: {"parameter": "3.weight", "bit": 0},
    ClockJump: {"seconds": 60.0},
    DataStall: {"stall_ms": 5.0},
    OutOfMemory: {"how": "error"},
    PoisonSnapshot: {"parameter": "3.weight"},
    Scale: {"to": 3},
}
#: Fields that kinds may refuse beyond the common rules.
OWN_RULES: dict[type[Fault], tuple[str, ...]] = {
    Rack: ("rank",),
    CorruptReplica: ("during", "at_step"),
    LosePeerCopy: ("during", "at_step"),
    PoisonSnapshot: ("during",),
}


@settings(deadline=None, database=None)
@given(
    kind=st.sampled_from([kind for kind in CATALOGUE if kind is not NaN]),
    rank=st.integers(0, 3) | st.sampled_from([*DRAWN_ROLES, "most_shards", "healer"]),
    moment=st.fixed_dictionaries({"at_step": st.integers(0, 7)})
    | st.fixed_dictionaries({"after_s": st.floats(0, 9)})
    | st.fixed_dictionaries(
        {"during": st.sampled_from(STRIKE_PHASES), "recovery": st.integers(1, 3)}
    ),
)
def test_whatever_is_accepted_has_a_moment(
    kind: type[Fault], rank: int | str, moment: dict[str, Any]
) -> None:
    """An accepted fault strikes at a hook that is known before the run, or at a moment of the
    harness, and describes it.
    """
    fault = kind(rank=rank, **moment, **NEEDED.get(kind, {}))
    needs_restore = rank == "healer" and (fault.during != "restore" or not fault.from_outside)
    needs_thread = not fault.from_outside and fault.during in ("detection", "regroup")
    refused = ""
    try:
        fault.validate(nodes=4, steps=8)
    except BadInput as error:
        refused = error.field
    assert refused if needs_restore or needs_thread else refused in ("", *OWN_RULES.get(kind, ()))
    if refused:
        return
    at_step, after_s, during, recovery = fault.at_step, fault.after_s, fault.during, fault.recovery
    for single in fault.expand(4, Random(0)):
        trigger = single.trigger("fault0")
        assert (trigger is None) == (after_s is not None or during == "detection")
        assert single.from_outside or trigger is not None or after_s is not None
        assert single.moment in (
            f"in forward of step {at_step}",
            f"{after_s or 0:g} s after the first committed step"
            + ("" if single.from_outside else ", in forward"),
            f"in {during} of recovery {recovery}",
            f"after detection of loss {recovery}",
        )
        if trigger is not None:
            assert trigger.generation == (0 if at_step is not None else recovery + 1)


# -- inside a worker -------------------------------------------------------------------------------


def _plan(generation: int, loads: list[int]) -> Plan:
    ends = [sum(loads[: rank + 1]) for rank in range(len(loads))]
    members = [
        Member(
            rank,
            f"node{rank}.0",
            f"node{rank}",
            Endpoint("host", "", 0, 100 + rank, -1),
            tuple(range(end - load, end)),
        )
        for rank, (load, end) in enumerate(zip(loads, ends, strict=True))
    ]
    return Plan(generation, tuple(members), True)


class Stand:
    """The hooks of a worker, on a real line to a harness that answers on order of the test."""

    def __init__(self, directory: Path, *triggers: Trigger) -> None:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.harness = InjectionLine(near, InjectionReport)
        self.harness.send(ArmTriggers(triggers))
        line = InjectionLine(far, InjectionOrder)
        self.board = Board.create()
        self.hooks = Hooks("node1.0", line, self.board, Journal(directory, "node1.0"))

    def enter(self, phase: str, step: int, plan: Plan, rank: int, peer: str = "") -> Thread:
        """Start a thread of the worker that enters a phase."""
        thread = Thread(
            target=self.hooks.reach,
            args=(phase, step, plan, plan.members[rank], None, peer),
            daemon=True,
        )
        thread.start()
        return thread

    def passes(self, phase: str, step: int, plan: Plan, rank: int) -> bool:
        """Return True if no trigger stops the worker at the phase."""
        self.enter(phase, step, plan, rank).join(WAIT_S)
        return not await_readable([self.harness.fileno()], 0.0)

    def hook(self) -> AtHook:
        assert await_readable([self.harness.fileno()], WAIT_S)
        hook = self.harness.receive()
        assert isinstance(hook, AtHook)
        return hook

    def release(self, fault: str) -> None:
        self.harness.send(Resume(fault, InjectionAct("none")))


TWO, FOUR = _plan(1, [1, 1]), _plan(3, [1, 2, 2, 1])


def test_a_worker_stops_only_where_it_is_wanted(tmp_path: Path) -> None:
    stand = Stand(
        tmp_path,
        Trigger("fault0", 1, 5, "reduce"),
        Trigger("fault1", 2, -1, "regroup", generation=3),
    )
    assert stand.passes("reduce", 4, TWO, 1)
    assert stand.passes("reduce", 5, TWO, 0)
    assert stand.passes("backward", 5, TWO, 1)
    assert stand.passes("regroup", 5, _plan(2, [1, 1, 1]), 2)
    assert stand.passes("regroup", 5, FOUR, 1)
    for phase, rank, fault in (("reduce", 1, "fault0"), ("regroup", 2, "fault1")):
        waiting = stand.enter(phase, 5, FOUR, rank, peer="node0.0")
        hook = stand.hook()
        assert (hook.fault, hook.rank, hook.step, hook.phase, hook.peer) == (
            fault,
            rank,
            5,
            phase,
            "node0.0",
        )
        stand.release(fault)
        waiting.join(WAIT_S)
        assert not waiting.is_alive()
        assert stand.passes(phase, 5, FOUR, rank)  # once


def test_a_rank_that_stands_at_a_hook_shows_a_phase_without_a_limit(tmp_path: Path) -> None:
    """The harness may take its time, even if ``long_limit_s`` limits declared phases."""
    stand = Stand(tmp_path, Trigger("fault0", 1, 5, "forward"))
    stand.board.enter(Phase.FORWARD)
    shown: list[Phase] = []

    def answer() -> None:
        hook = stand.hook()
        shown.append(stand.board.phase)
        stand.release(hook.fault)

    harness = Thread(target=answer, daemon=True)
    harness.start()
    stand.hooks.reach("forward", 5, TWO, TWO.members[1])
    harness.join(WAIT_S)
    assert shown == [Phase.UNTIMED]
    assert stand.board.phase == Phase.FORWARD


def test_roles_in_a_worker(tmp_path: Path) -> None:
    triggers = (
        Trigger("fault0", -1, 5, "forward", role="most_shards"),
        Trigger("fault1", -1, -1, "restore", role="healer"),
    )
    stand = Stand(tmp_path, *triggers)
    assert stand.passes("forward", 5, FOUR, 0)
    assert stand.passes("forward", 5, FOUR, 2)  # has as many shards as rank 1, and rank 1 is lower
    stand.enter("forward", 5, FOUR, 1)
    assert stand.hook().fault == "fault0"
    stand.enter("restore", 5, FOUR, 3, peer="node1.0")
    assert stand.hook().peer == "node1.0"


def test_two_threads_that_wait_get_their_own_answers(tmp_path: Path) -> None:
    """The main thread in a step and a thread that forms a group wait for different answers."""
    stand = Stand(
        tmp_path, Trigger("fault0", 1, -1, "regroup"), Trigger("fault1", 1, -1, "restore")
    )
    forming, restoring = stand.enter("regroup", 5, FOUR, 1), stand.enter("restore", 5, FOUR, 1)
    assert {stand.hook().fault, stand.hook().fault} == {"fault0", "fault1"}
    stand.release("fault1")
    restoring.join(WAIT_S)
    assert not restoring.is_alive()
    assert forming.is_alive()
    stand.release("fault0")
    forming.join(WAIT_S)
    assert not forming.is_alive()


def test_a_trigger_that_is_armed_late_and_twice(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    assert stand.passes("backward", 5, TWO, 1)
    for _ in range(2):
        stand.harness.send(ArmTriggers((Trigger("fault0", -1, -1, "backward"),)))
    stand.harness.send(AskThread(1))  # its answer shows that both orders were received
    assert await_readable([stand.harness.fileno()], WAIT_S)
    assert stand.harness.receive() == ThreadAnswered("node1.0", 1)
    waiting = stand.enter("backward", 6, TWO, 1)
    assert stand.hook().step == 6
    for _ in range(2):
        stand.release("fault0")
    waiting.join(WAIT_S)
    assert stand.passes("backward", 7, TWO, 1)


def test_a_rank_goes_on_when_its_harness_is_gone(tmp_path: Path) -> None:
    """A waiting rank goes on when its harness is gone, and later triggers do not stop it."""
    stand = Stand(tmp_path, Trigger("fault0", 1, 5, "reduce"), Trigger("fault1", 1, 6, "reduce"))
    waiting = stand.enter("reduce", 5, TWO, 1)
    assert stand.hook().fault == "fault0"
    stand.harness.close()
    waiting.join(1.0)
    assert not waiting.is_alive()
    later = stand.enter("reduce", 6, TWO, 1)
    later.join(1.0)
    assert not later.is_alive()


# -- the roster ------------------------------------------------------------------------------------


def _beat(worker: str, step: int, commits: int) -> Beat:
    return Beat(worker, 1, 0, step, Phase.FORWARD, 0.0, 0.0, commits, 0.0)


def test_the_roster_knows_the_holder_of_a_rank() -> None:
    roster = Roster()
    assert roster.holder(0) is None
    roster.hear(WorkerReady("node1.0", "node1", Endpoint("host", "", 0, 101, -1)))
    roster.hear(FOUR)
    holder = roster.holder(1)
    assert holder is not None
    assert (holder.worker, holder.node, holder.rank, holder.pid) == ("node1.0", "node1", 1, 101)
    assert roster.holder("most_shards") == holder == roster.member("node1.0")
    roster.hear(WorkerLost("node1.0", "node1", "killed", "", 0))
    assert roster.holder(1) is None is roster.holder("most_shards")
    assert roster.holder(7) is None


def test_time_begins_with_the_first_commit() -> None:
    roster = Roster()
    roster.hear(Heartbeat("node0", (_beat("node0.0", 0, 0),)))
    assert roster.first_commit_s is None
    before_s = time.monotonic()
    roster.hear(Heartbeat("node0", (_beat("node0.0", 1, 1),)))
    first_s = roster.first_commit_s
    assert first_s is not None
    assert first_s >= before_s
    roster.hear(Heartbeat("node0", (_beat("node0.0", 2, 2),)))
    assert (roster.first_commit_s, roster.step) == (first_s, 2)
