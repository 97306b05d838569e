"""Descriptions of faults and checks in an outcome. Pure: records and faults are written by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.whole_run import FAULT, STARTED_NS, files_of, record, run_of, whole_records, without

from chaoskit.journal import FileCoverage
from chaoskit.runlog.checks import (
    compared_with_itself,
    conclude,
    environment,
    harness_lost,
    rules_fired,
    started_at,
)
from chaoskit.runlog.fault_verdict import fault_check, fault_record
from chaoskit.runlog.injected import InjectionRecord, Struck
from chaoskit.runlog.outcome import Check, EvidenceRecord, FaultRecord, RuleRecord
from chaoskit.vocabulary import Event, Verdict
from faults import Kill

WHOLE = whole_records()
(STRIKE,) = run_of(WHOLE).injections


def strike(**changes: Any) -> InjectionRecord:
    """Return the record of the run's fault, with changes."""
    values = {name: getattr(STRIKE, name) for name in InjectionRecord.__dataclass_fields__}
    return InjectionRecord(**values | changes)


# -- checks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problems", "looked_at", "verdict", "detail"),
    [
        ([], 2, Verdict.PASSED, "fine"),
        ([], 0, Verdict.UNKNOWN, "there was no data to check"),
        (["a"], 2, Verdict.FAILED, "a"),
        (["a"], 0, Verdict.FAILED, "a"),
        (["a", "b", "c"], 2, Verdict.FAILED, "a; b; c"),
        (["a", "b", "c", "d", "e"], 2, Verdict.FAILED, "a; b; c (and 2 more)"),
    ],
)
def test_a_check_fails_with_its_first_problems(
    problems: list[str], looked_at: int, verdict: Verdict, detail: str
) -> None:
    check = conclude("name", problems, "fine", looked_at=looked_at)
    assert check == Check(name="name", verdict=verdict, detail=detail)


def test_a_harness_that_ended_early_is_an_error() -> None:
    """The check gives the last reason in its journal, if there is any."""
    ended = [
        record(at_ms, "harness", Event.RUN_ENDED, detail=reason)
        for at_ms, reason in ((1, "first"), (2, "last"))
    ]
    name = "the harness ended in order"
    last = Check(name=name, verdict=Verdict.ERROR, detail="the harness ended early: last")
    assert harness_lost([*ended, record(3, "harness", Event.UNDONE, detail="undone")]) == last
    silent = Check(name=name, verdict=Verdict.ERROR, detail="the harness ended early")
    assert harness_lost([record(1, "harness", Event.RUN_ENDED, detail="")]) == silent
    assert harness_lost([]) == silent


def test_a_comparison_with_itself_is_an_error() -> None:
    detail = "both have the run id abc"
    assert compared_with_itself("twin", "abc") == Check(
        name="the twin is another run", verdict=Verdict.ERROR, detail=detail
    )


# -- rules -----------------------------------------------------------------------------------------


def test_rules_that_fired_are_told_with_their_excuse() -> None:
    """An excuse belongs to the last time that the rule gave this verdict on the worker."""
    firing: dict[str, Any] = {"rank": 1, "step": 3, "reason": "no line", "action": "restart"}
    place = {"rule": "quiet", "worker": "node1.0", "verdict": "hanging"}
    excuse = {**place, "detail": "a save is under way"}
    lines = [
        record(10, "node1", Event.RULE_FIRED, **place, **firing),
        record(20, "node1", Event.RULE_FIRED, **place, **firing),
        record(30, "node1", Event.RULE_FIRED, **place | {"worker": "node0.0"}, **firing),
        record(31, "node1", Event.RULE_FIRED, **place | {"verdict": "slow"}, **firing),
        record(32, "node1", Event.RULE_FIRED, **place | {"rule": "other"}, **firing),
        record(40, "coordinator", Event.RULE_EXCUSED, **excuse),
        record(41, "coordinator", Event.RULE_EXCUSED, **excuse | {"worker": "node7.0"}),
        record(42, "coordinator", Event.DETECTED, **excuse | {"detail": "no excuse"}),
    ]
    fired = rules_fired(lines, STARTED_NS)
    first = RuleRecord(rule="quiet", verdict="hanging", where="node1.0", at_s=0.01, **firing)
    assert fired[0] == first
    assert fired[1] == msgspec.structs.replace(first, at_s=0.02, excused="a save is under way")
    assert [(rule.where, rule.verdict, rule.rule, rule.excused) for rule in fired[2:]] == [
        ("node0.0", "hanging", "quiet", ""),
        ("node1.0", "slow", "quiet", ""),
        ("node1.0", "hanging", "other", ""),
    ]


# -- processes -------------------------------------------------------------------------------------


def opened(**processes: dict[str, Any]) -> dict[str, FileCoverage]:
    return files_of(
        [
            record(at_ms, source, Event.OPENED, **fields)
            for at_ms, (source, fields) in enumerate(processes.items())
        ]
    )


def test_the_environment_is_that_of_one_role() -> None:
    files = opened(
        a={"role": "worker", "torch": "2.13", "kernel": "6.2", "machine": ""},
        b={"role": "worker", "torch": "2.13", "kernel": "6.1", "machine": ""},
        c={"role": "agent", "torch": "1.0", "kernel": "5", "machine": "another"},
    )
    assert environment(files, "worker", "torch", "kernel", "machine") == {
        "torch": "2.13",
        "kernel": "6.1, 6.2",
    }
    assert environment(files, "keeper", "torch") == {}


def test_a_process_that_says_nothing_of_itself_has_no_environment() -> None:
    assert environment(files_of(without(WHOLE, Event.OPENED)), "", "torch") == {}


def test_the_start_is_told_by_the_wall_clock_of_the_harness() -> None:
    files = opened(harness={"role": "harness", "unix_ns": 1_700_000_000 * 10**9})
    assert started_at(files, STARTED_NS) == "2023-11-14T22:13:20.000+00:00"
    assert started_at(files, STARTED_NS + 1_500_000_000) == "2023-11-14T22:13:21.500+00:00"
    assert started_at(opened(node0={"role": "agent"}), STARTED_NS) == ""


# -- faults ----------------------------------------------------------------------------------------

FELT = EvidenceRecord(level="impactful", at_s=0.035, observed="rank 1 was given up")


def stood(target: Struck) -> str:
    return f"{target.worker} stood there"


def test_a_fault_is_told_with_its_evidence() -> None:
    assert fault_record(STRIKE, STARTED_NS, stood, [FELT]) == FaultRecord(
        fault="Kill(rank=1, at_step=2)",
        kind="Kill",
        rank=1,
        step=2,
        phase="forward",
        moment="in forward of step 2",
        injected_s=0.031,
        state="confirmed",
        evidence=[
            EvidenceRecord(level="armed", at_s=0.031, observed="node1.0 stood there"),
            EvidenceRecord(level="effective", at_s=0.033, observed="pid 101 was killed by SIGKILL"),
            FELT,
        ],
        undone=True,
    )


def test_a_fault_without_evidence_was_armed_only() -> None:
    summary = fault_record(strike(effective_ns=None), STARTED_NS, stood, [])
    assert [evidence.level for evidence in summary.evidence] == ["armed"]
    assert summary.state == "not observed"


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"target": None}, "not fired"),
        ({"missed": "late"}, "missed"),
        ({"undone": False}, "undo failed"),
    ],
)
def test_a_fault_that_did_not_act_in_time_has_no_evidence(
    changes: dict[str, Any], state: str
) -> None:
    summary = fault_record(strike(**changes), STARTED_NS, stood, [FELT])
    assert summary.state == state
    assert summary.undone == changes.get("undone", True)
    acted = "undone" in changes
    assert (summary.injected_s, len(summary.evidence)) == ((0.031, 3) if acted else (None, 0))


def test_a_fault_is_told_as_it_was_planned() -> None:
    """A role has no rank before it is resolved.

    A phase of a recovery replaces the phase of a step.
    """
    role = strike(fault=Kill(rank="healer", during="restore"), target=None)
    summary = fault_record(role, STARTED_NS, stood, [])
    assert (summary.rank, summary.step, summary.phase) == (None, None, "restore")
    assert summary.moment == "in restore of recovery 1"
    assert fault_record(role, STARTED_NS, stood, [], moment="at noon").moment == "at noon"
    assert fault_record(strike(fault=Kill(rank="any", at_step=2)), STARTED_NS, stood, []).rank == 1


#: Case -> (the injection record, verdict, detail).
CHECKS: dict[str, tuple[InjectionRecord, Verdict, str]] = {
    "confirmed": (STRIKE, Verdict.PASSED, "pid 101 was killed by SIGKILL"),
    "not undone": (
        strike(undone=False, missed="late"),
        Verdict.ERROR,
        "its effect could not be undone; run `chaoskit cleanup`",
    ),
    "missed": (
        strike(missed="the job had ended"),
        Verdict.UNKNOWN,
        "injected, and missed: the job had ended",
    ),
    "not fired, for a reason": (
        strike(target=None, missed="no rank"),
        Verdict.UNKNOWN,
        "not fired: no rank",
    ),
    "not fired": (
        strike(target=None, effective_ns=None),
        Verdict.UNKNOWN,
        "not fired: rank 1 was held by no process in forward of step 2",
    ),
    "not observed": (
        strike(effective_ns=None),
        Verdict.UNKNOWN,
        "injected, but no effect was observed on its target: Kill.inject yielded no Evidence",
    ),
}


#: Long after the strike: there was enough time for evidence.
ENDED_NS = 10**15


@pytest.mark.parametrize("name", CHECKS)
def test_a_fault_passes_with_evidence_only(name: str) -> None:
    came, verdict, detail = CHECKS[name]
    assert fault_check(came, ENDED_NS) == Check(
        name=f"evidence of {FAULT}", verdict=verdict, detail=detail
    )


def test_a_fault_that_the_job_did_not_show_is_unknown() -> None:
    causes = ", ".join(sorted(FAULT.must_show))
    detail = f"but no loss and no bad numbers followed, as they must ({causes})"
    shown = fault_check(STRIKE, ENDED_NS, effect_shown=False)
    assert (shown.verdict, shown.detail) == (
        Verdict.UNKNOWN,
        f"pid 101 was killed by SIGKILL; {detail}",
    )
    assert shown.name == f"evidence of {FAULT}"
    assert fault_check(strike(effective_ns=None), ENDED_NS, effect_shown=False) == fault_check(
        strike(effective_ns=None), ENDED_NS
    )
