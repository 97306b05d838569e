"""Whether each fault struck what was planned: by the journals of all others, never by what its injector says alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from chaoskit.experiment.injected import Injection, Struck
from chaoskit.experiment.outcome import Check
from chaoskit.journal import Record
from chaoskit.vocabulary import Event, Verdict

NAME = "{fault} struck what was planned"
#: The harness hears of the first commit by a heartbeat, so it counts from a moment that is later, never earlier.
_CLOCK_S = 0.001


def audit(injections: Sequence[Injection], records: Sequence[Record]) -> list[Check]:
    """Return an error for each fault that struck something else, and unknown for each of which that is not told."""
    checks = []
    for one in injections:
        if one.target is None or one.missed:
            continue
        name = NAME.format(fault=one.fault)
        if wrong := [*_mismatches(one, one.target, records)]:
            checks.append(Check(name=name, verdict=Verdict.ERROR, detail="; ".join(wrong)))
        elif untold := [*_untold(one, one.target, records)]:
            checks.append(Check(name=name, verdict=Verdict.UNKNOWN, detail="; ".join(untold)))
    return checks


def _mismatches(one: Injection, struck: Struck, records: Sequence[Record]) -> Iterator[str]:
    fault = one.fault
    if _names_a_rank(one) and struck.rank != fault.rank:
        yield f"it struck rank {struck.rank}, not rank {fault.rank}"
    plans = _plans(one, struck, records)
    if plans and struck.rank not in {_rank_in(plan, struck.worker) for plan in plans}:
        yield f"{struck.worker} did not have rank {struck.rank} then"
    for hook in _hooks(one, struck, records):
        if fault.at_step is not None and (hook["step"], hook["phase"]) != (fault.at_step, fault.phase):
            yield f"{struck.waiting} stood in {hook['phase']} of step {hook['step']}, not {fault.moment}"
        if hook["step"] != struck.step:
            yield f"{struck.waiting} stood in step {hook['step']}, and the harness says {struck.step}"
        if fault.during is not None and hook["generation"] <= fault.recovery:
            yield f"{struck.waiting} stood in generation {hook['generation']}, not {fault.moment}"
        if hook.t_ns > struck.injected_ns:
            yield "it struck before its rank stood where it was due"
    for record in _starts(struck, records):
        if (record.source, record["pid"]) != (struck.node, struck.pid):
            yield f"{struck.worker} was process {record['pid']} of {record.source}, not {struck.pid} of {struck.node}"
    if fault.after_s is not None and (first_ns := _first_commit_ns(records)) is not None:
        after_s = (struck.injected_ns - first_ns) / 1e9
        if after_s < fault.after_s - _CLOCK_S:
            yield f"it struck {after_s:.3f} s after the first committed step, not {fault.after_s:g} s"
    if one.effective_ns is not None and one.effective_ns < struck.injected_ns:
        yield "its effect was seen before it acted"
    for record in records:
        is_end = record.event in (Event.WORKER_EXITED, Event.DETECTED) and record["worker"] == struck.worker
        if is_end and record.t_ns < struck.injected_ns:
            yield f"{struck.worker} was lost before it acted"
            break


def _names_a_rank(one: Injection) -> bool:
    """Whether the fault was planned for one rank, and not for a role or for whatever rank comes first."""
    trigger = one.fault.trigger(one.fault_id)
    return isinstance(one.fault.rank, int) and (trigger is None or trigger.rank == one.fault.rank)


def _untold(one: Injection, struck: Struck, records: Sequence[Record]) -> Iterator[str]:
    if one.fault.at_step is not None and not _hooks(one, struck, records):
        yield f"{struck.waiting or struck.worker} does not tell that it stood {one.fault.moment}"
    if not _starts(struck, records):
        yield f"no node tells that it started {struck.worker}"
    if not _plans(one, struck, records):
        yield f"no membership tells which rank {struck.worker} had"


def _plans(one: Injection, struck: Struck, records: Sequence[Record]) -> list[Record]:
    """The memberships that may have been in force: the newest one, and that of the rank that stood at the hook."""
    plans = [record for record in records if record.event == Event.PLAN and record.t_ns <= struck.injected_ns]
    stood = {hook["generation"] for hook in _hooks(one, struck, records)}
    return [*plans[-1:], *(plan for plan in plans[:-1] if plan["generation"] in stood)]


def _rank_in(plan: Record, worker: str) -> int | None:
    return next((member["rank"] for member in plan["members"] if member["worker"] == worker), None)


def _hooks(one: Injection, struck: Struck, records: Sequence[Record]) -> list[Record]:
    """The word of the worker that waited, that it stood where the fault was due, before the act."""
    found = [
        record
        for record in records
        if record.event == Event.HOOK_STOPPED and record.source == struck.waiting and record["fault"] == one.fault_id
    ]
    return found[:1]


def _starts(struck: Struck, records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.event == Event.WORKER_STARTED and record["worker"] == struck.worker]


def _first_commit_ns(records: Sequence[Record]) -> int | None:
    return next((record.t_ns for record in records if record.event == Event.COMMIT), None)
