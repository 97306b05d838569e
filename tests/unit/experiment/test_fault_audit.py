"""A fault that struck something other than its planned target, found in the records of other
processes.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest
from support.whole_run import (
    FAULT,
    by_time,
    changed,
    fields,
    hook,
    moved,
    plan,
    record,
    step_of,
    whole_records,
    without,
)

from chaoskit.experiment.judge.fault_audit import audit
from chaoskit.journal import Record
from chaoskit.runlog.injected import injections
from chaoskit.vocabulary import Event, Verdict
from faults import BitFlip, Exit, Hang, Kill, KillNode, NaN, Rack, Straggle
from faults.base import Fault

Lines = list[Record]
WHOLE = whole_records()
LATER = Kill(rank=1, after_s=0.019)
IN_RESTORE = Kill(rank=1, during="restore")
NAN = NaN(rank=1, at_step=2, parameter="head.weight")


def audited(lines: Lines, fault: Fault = FAULT) -> list[tuple[Verdict, str]]:
    lines = by_time(lines)
    return [(check.verdict, check.detail) for check in audit(injections([fault], lines), lines)]


def struck(lines: Lines = WHOLE, **values: Any) -> Lines:
    """Return the records, with another record of the act."""
    return changed(lines, Event.INJECTED, "harness", fields(**values))


def stood(lines: Lines = WHOLE, **values: Any) -> Lines:
    """Return the records, with another place at which the rank stood."""
    return changed(lines, Event.HOOK_STOPPED, "node1.0", fields(**values))


def shown(observed: str, lines: Lines = WHOLE) -> Lines:
    """Return the records, with another observation."""
    return changed(lines, Event.EVIDENCE, "harness", fields(observed=observed))


UNSHOWN = without(WHOLE, Event.EVIDENCE)
#: The records of a fault that needs no hook.
UNHOOKED = without(struck(waiting=""), Event.HOOK_STOPPED)


def subject(**values: Any) -> Lines:
    """Return the records, with evidence about something else."""
    rank = {"type": "rank", "worker": "node1.0", "rank": 1, "pid": 101}
    return changed(WHOLE, Event.EVIDENCE, "harness", fields(evidence={"subject": rank | values}))


def members(generation: int, *workers: str) -> Lines:
    """Return the records, with another membership."""
    values = plan(0, generation, *workers).fields
    lines = without(WHOLE, Event.PLAN, "", generation=generation)
    at_ms = {1: 4.0, 2: 36.0}[generation]
    return by_time([*lines, record(at_ms, "coordinator", Event.PLAN, **values)])


def bad_numbers(step: int, at_ms: float = 32) -> Lines:
    nonfinite = record(
        at_ms, "node0.0", Event.NONFINITE, worker="node1.0", step=step, shards=[1], owner=1
    )
    return shown("head.weight[3] is nan", [*WHOLE, nonfinite])


def contributed(at_ms: float, step: int) -> Lines:
    place = {"step": step, "generation": 1, "rank": 1, "shards": [1], "samples": []}
    return [*WHOLE, record(at_ms, "node1.0", Event.REDUCE, **place)]


ALSO_STRUCK = [
    *WHOLE,
    record(32, "harness", Event.ACTED, fault="fault0", worker="node0.0", node="node0"),
]
ENDED = record(33, "node1.0", Event.FINISHED, step=4)
SECOND_PLAN = plan(30.5, 2, "node0.0", "node0.1")

NOT_ABOUT = (
    "its evidence is not about what it struck: RankProcess(worker='node1.0', rank=1, pid=101)"
)

#: Case -> (the records, the fault, the expected problem).
WRONG: dict[str, tuple[Lines, Fault, str]] = {
    "another rank in the membership": (
        members(1, "node1.0", "node0.0"),
        FAULT,
        "node1.0 did not have rank 1 then",
    ),
    "no rank in the newest membership": (
        [*UNHOOKED, SECOND_PLAN],
        LATER,
        "node1.0 did not have rank 1 then",
    ),
    "another process": (
        struck(pid=9),
        Kill(rank=1, at_step=2),
        f"node1.0 was process 101 of node1, not 9 of node1; {NOT_ABOUT}",
    ),
    "another node": (
        struck(node="node7"),
        FAULT,
        "node1.0 was process 101 of node1, not 101 of node7",
    ),
    "too early": (
        UNHOOKED,
        Kill(rank=1, after_s=0.5),
        "it struck 0.019 s after the first committed step, not 0.5 s",
    ),
    "a little too early": (
        UNHOOKED,
        Kill(rank=1, after_s=0.021),
        "it struck 0.019 s after the first committed step, not 0.021 s",
    ),
    "an effect before the act": (
        changed(WHOLE, Event.EVIDENCE, "harness", moved(-2.5)),
        FAULT,
        "its effect was seen before it acted",
    ),
    "evidence about another process": (
        subject(pid=7),
        FAULT,
        NOT_ABOUT.replace("101", "7"),
    ),
    "evidence about nothing": (
        subject(type="unheard of"),
        FAULT,
        "its evidence is not about what it struck: pid 101 was killed by SIGKILL",
    ),
    "lost before": (
        changed(WHOLE, Event.DETECTED, "coordinator", moved(-5)),
        FAULT,
        "node1.0 was lost before it acted",
    ),
    "ended before": (
        changed(WHOLE, Event.WORKER_EXITED, "node1", moved(-3)),
        FAULT,
        "node1.0 was lost before it acted",
    ),
    "it came to the end": ([*WHOLE, ENDED], FAULT, "node1.0 reached the end of the job"),
    "it came to the end, of no step": (
        [*UNHOOKED, ENDED],
        LATER,
        "node1.0 reached the end of the job",
    ),
    "it went on": (contributed(33, 3), FAULT, "node1.0 went on to step 3"),
    "it contributed": (contributed(33, 2), FAULT, "node1.0 went on, and contributed to step 2"),
    "another one, too": (ALSO_STRUCK, FAULT, "it struck node0.0, too"),
    "other nodes": (
        struck(nodes=["node1", "node0"]),
        KillNode(rank=1, at_step=2),
        "it struck node0, node1, and rank 1 was on node1",
    ),
    "another tensor": (
        shown("lm_head.weight[3] is nan"),
        NAN,
        "its evidence is of another tensor: lm_head.weight[3] is nan",
    ),
    "a part of another tensor": (
        shown("head.weights is nan"),
        NAN,
        "its evidence is of another tensor: head.weights is nan",
    ),
    "another tensor of a fault that flips a bit": (
        shown("other.weight"),
        BitFlip(rank=1, at_step=2, parameter="head.weight", bit=3),
        "its evidence is of another tensor: other.weight",
    ),
    "bad numbers in another step": (
        bad_numbers(3),
        NAN,
        "numbers were bad in step 3, not in step 2",
    ),
    "a hook in another phase": (
        stood(phase="reduce"),
        FAULT,
        "node1.0 waited in reduce of step 2, not in forward of step 2",
    ),
    "a hook in another step": (
        struck(stood(step=3), step=3),
        FAULT,
        "node1.0 waited in forward of step 3, not in forward of step 2",
    ),
    "a hook in another step than the harness tells": (
        stood(step=3),
        LATER,
        "node1.0 waited in step 3, but the harness recorded 2",
    ),
    "a hook in another phase than was planned after seconds": (
        stood(phase="reduce"),
        LATER,
        "node1.0 waited in reduce, not 0.019 s after the first committed step",
    ),
    "a hook in another phase of a recovery": (
        stood(phase="recommit", generation=2),
        IN_RESTORE,
        "node1.0 waited in recommit, not in restore of recovery 1",
    ),
    "a hook in the first membership": (
        stood(phase="restore"),
        IN_RESTORE,
        "node1.0 waited in generation 1, not in restore of recovery 1",
    ),
    "a hook after the act": (
        changed(WHOLE, Event.HOOK_STOPPED, "node1.0", moved(1.5)),
        FAULT,
        "it struck before its rank had reached the planned hook",
    ),
    "another rank than that of the most shards": (
        UNHOOKED,
        Kill(rank="most_shards", after_s=0.019),
        "it struck rank 1, and rank 0 had most shards",
    ),
    "most shards, and the newest membership has no rank": (
        [*without(UNHOOKED, Event.PLAN), plan(4, 1, "node0.0", "node1.0"), plan(5, 2)],
        Kill(rank="most_shards", after_s=0.019),
        "it struck rank 1, and rank 0 had most shards; node1.0 did not have rank 1 then",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_target_is_an_error(name: str) -> None:
    lines, fault, detail = WRONG[name]
    assert audited(lines, fault) == [(Verdict.ERROR, detail)]


def heaviest(*counts: int, at_ms: float, generation: int) -> Record:
    """Return a membership in which each rank has the given number of shards."""
    workers = ("node0.0", "node1.0")[: len(counts)]
    shares = plan(at_ms, generation, *workers)
    members_with_shares = [
        member | {"shards": [*range(count)]}
        for member, count in zip(shares["members"], counts, strict=True)
    ]
    return fields(members=members_with_shares)(shares)


HEAVY = without(UNHOOKED, Event.PLAN)

#: Case -> (the records, the fault); all are correct.
RIGHT: dict[str, tuple[Lines, Fault]] = {
    "as planned": (WHOLE, FAULT),
    "the newest membership is younger than the hook": ([*WHOLE, SECOND_PLAN], FAULT),
    "as late as planned": (UNHOOKED, LATER),
    "as late as planned, within the clock": (UNHOOKED, Kill(rank=1, after_s=0.0195)),
    "an effect at once": (changed(WHOLE, Event.EVIDENCE, "harness", moved(-2)), FAULT),
    "lost at once": (changed(WHOLE, Event.DETECTED, "coordinator", moved(-4)), FAULT),
    "another worker was lost before": (
        [
            *WHOLE,
            record(
                30,
                "coordinator",
                Event.DETECTED,
                worker="node0.1",
                rank=None,
                cause="exited",
                detail="",
            ),
        ],
        FAULT,
    ),
    "the rank contributed before the act was over": (contributed(31.5, 2), FAULT),
    "the rank contributed when the act was over": (contributed(32, 2), FAULT),
    "a hook at the moment of the act": (
        changed(WHOLE, Event.HOOK_STOPPED, "node1.0", moved(1)),
        FAULT,
    ),
    "no first commit, after seconds": (without(UNHOOKED, Event.COMMIT), LATER),
    "no hook, in a recovery": (UNHOOKED, Kill(rank="healer", during="restore")),
    "a kill in the optimizer": (
        stood(contributed(33, 2), phase="optimizer"),
        Kill(rank=1, at_step=2, phase="optimizer"),
    ),
    "a signal that can be caught": (
        contributed(33, 2),
        Kill(rank=1, at_step=2, signum=signal.SIGTERM),
    ),
    "an exit": (contributed(33, 2), Exit(rank=1, at_step=2)),
    "a kill of a rank that did not wait": ([*UNHOOKED, *contributed(33, 2)[-1:]], LATER),
    "a kill after seconds": ([*UNHOOKED, *contributed(33, 3)[-1:]], LATER),
    "the rank lives on": ([*WHOLE, ENDED], Straggle(rank=1, at_step=2, delay_ms=5)),
    "no evidence": ([*UNSHOWN, ENDED], FAULT),
    "bad numbers": ([*bad_numbers(2), ENDED], NAN),
    "no numbers were bad": ([*shown("head.weight[3] is nan"), ENDED], NAN),
    "bad numbers, after seconds": (
        bad_numbers(3),
        NaN(rank=1, after_s=0.019, parameter="head.weight"),
    ),
    "bad numbers at the moment of the act": (bad_numbers(1, at_ms=31), NAN),
    "bad numbers before": (bad_numbers(1, at_ms=30), NAN),
    "a weight stays bad": (
        bad_numbers(3),
        NaN(rank=1, at_step=2, parameter="head.weight", where="weight"),
    ),
    "the whole tensor": (shown("nan in head.weight, 3 of it"), NAN),
    "any tensor": (shown("other.weight"), NaN(rank=1, at_step=2)),
    "no tensor was read": (UNSHOWN, NAN),
    "one node": (struck(nodes=["node1"]), KillNode(rank=1, at_step=2)),
    "a rack": (struck(ALSO_STRUCK, nodes=["node1", "node0"]), Rack(rank=1, at_step=2)),
    "a worker of a node that was lost finishes": ([*WHOLE, ENDED], KillNode(rank=1, at_step=2)),
    "a rank that hangs is given up": (WHOLE, Hang(rank=1, at_step=2)),
    "in a recovery": (stood(phase="restore", generation=2), IN_RESTORE),
    "the second place of the same fault": (
        [*WHOLE, hook(30.5, "node1.0", generation=1, phase="reduce")],
        FAULT,
    ),
    "most shards before the newest membership": (
        [*HEAVY, heaviest(1, 2, at_ms=4, generation=1), heaviest(2, 1, at_ms=5, generation=2)],
        Kill(rank="most_shards", after_s=0.019),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_was_planned_is_no_error(name: str) -> None:
    lines, fault = RIGHT[name]
    assert not [detail for verdict, detail in audited(lines, fault) if verdict == Verdict.ERROR]


def test_most_shards_of_an_old_membership_are_no_excuse() -> None:
    """Ranks may have known the two newest memberships only."""
    shares = [(1, 2), (2, 1), (2, 1)]
    plans = [
        heaviest(*counts, at_ms=4 + number, generation=number + 1)
        for number, counts in enumerate(shares)
    ]
    detail = "it struck rank 1, and rank 0 had most shards"
    assert audited([*HEAVY, *plans], Kill(rank="most_shards", after_s=0.019)) == [
        (Verdict.ERROR, detail)
    ]


NO_HOOK = "node1.0 did not record that it waited in forward of step 2"
NO_START = "no node recorded the start of node1.0"
NO_PLAN = "no plan shows the rank of node1.0"


@pytest.mark.parametrize(
    ("lines", "detail"),
    [
        (without(WHOLE, Event.HOOK_STOPPED), NO_HOOK),
        (UNHOOKED, NO_HOOK),
        (struck(UNHOOKED, waiting="node0.0"), NO_HOOK.replace("node1.0", "node0.0")),
        (without(WHOLE, Event.WORKER_STARTED), NO_START),
        (without(WHOLE, Event.PLAN), NO_PLAN),
        (
            without(without(UNHOOKED, Event.PLAN), Event.WORKER_STARTED),
            f"{NO_HOOK}; {NO_START}; {NO_PLAN}",
        ),
    ],
)
def test_what_no_record_tells_is_unknown(lines: Lines, detail: str) -> None:
    assert audited(lines) == [(Verdict.UNKNOWN, detail)]


def test_without_a_membership_no_rank_has_most_shards() -> None:
    fault = Kill(rank="most_shards", after_s=0.019)
    assert audited(without(UNHOOKED, Event.PLAN), fault) == [(Verdict.UNKNOWN, NO_PLAN)]


def test_a_fault_after_seconds_needs_no_hook() -> None:
    assert audited(UNHOOKED, LATER) == []


def test_the_check_is_named_after_the_fault() -> None:
    (check,) = audit(injections([FAULT], without(WHOLE, Event.PLAN)), without(WHOLE, Event.PLAN))
    assert check.name == "Kill(rank=1, at_step=2) struck what was planned"
    (wrong,) = audit(injections([FAULT], [*WHOLE, ENDED]), [*WHOLE, ENDED])
    assert wrong.name == check.name


def test_faults_that_did_not_act_are_not_audited() -> None:
    assert audited(without(without(WHOLE, Event.INJECTED), Event.PLAN)) == []
    missed = record(32, "harness", Event.FAULT_MISSED, fault="fault0", reason="late")
    assert audited([*without(WHOLE, Event.PLAN), missed]) == []


def test_every_fault_is_audited() -> None:
    """A fault without any record must not prevent the audit of other faults."""
    faults = [Kill(rank=0, at_step=9), FAULT]
    lines = [
        fields(fault="fault1")(line) if line.get("fault") == "fault0" else line
        for line in [*WHOLE, *step_of(40, 3, 1, "node0.9", "node1.0")]
    ]
    details = [check.detail for check in audit(injections(faults, lines), lines)]
    assert details == ["node1.0 went on to step 3"]
