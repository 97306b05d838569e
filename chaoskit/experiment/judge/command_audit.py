"""Whether each fault struck what was planned: by the word of nodes and logs, never by what its injector says alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from chaoskit.experiment.injection.ranks_found import ranks_found
from chaoskit.experiment.judge.fault_audit import NAME
from chaoskit.experiment.run.command_run import CommandRun
from chaoskit.experiment.twin.command_twin import unfinished
from chaoskit.faults import Kill
from chaoskit.journal import Record
from chaoskit.runlog.injected import InjectionRecord, Struck
from chaoskit.runlog.outcome import Check
from chaoskit.stacks.command import PLACEHOLDERS
from chaoskit.stacks.log import Line
from chaoskit.vocabulary import Event, RunEnd, Verdict

_COMMAND = "each node ran the command"
_CLOCK_S = 0.001
#: Nodes look for new ranks every half second, and a log may show some steps more while a rank is started again.
_COMES_BACK_S = 1.0
_FILLED = re.compile("|".join(rf"\{{{name}\}}" for name in PLACEHOLDERS))


class _Holder:
    """A process that had a rank, by the word of its node.

    Attributes:
        found_ns: when the node told of it first; gone_ns: of its end, None where it did not.
        is_command: it is the command itself, which no launcher starts again.
    """

    def __init__(self, rank: int, record: Record, ends: Iterable[Record]) -> None:
        self.rank, self.node, self.pid, self.found_ns = (
            rank,
            record.source,
            record["pid"],
            record.t_ns,
        )
        mine = [one.t_ns for one in ends if (one.source, one["pid"]) == (self.node, self.pid)]
        self.is_command = record.event == Event.COMMAND_STARTED
        self.gone_ns = min((t_ns for t_ns in mine if t_ns >= self.found_ns), default=None)

    def is_there(self, t_ns: int) -> bool:
        """Whether it had the rank at this time."""
        return self.found_ns <= t_ns and (self.gone_ns is None or t_ns < self.gone_ns)


def audit(run: CommandRun, *, is_whole: bool) -> list[Check]:
    """Return an error for all that was something else than asked for, and unknown for what is not told.

    Args:
        is_whole: nothing is missing in journals and logs; else what differs may differ for that, and is unknown.
    """
    differs = Verdict.ERROR if is_whole else Verdict.UNKNOWN
    checks, holders = _commands(run), _holders(run)
    for one in run.injections:
        if one.target is None or one.missed:
            continue
        name = NAME.format(fault=one.fault)
        if wrong := [*_mismatches(run, one, one.target, holders)]:
            checks.append(Check(name=name, verdict=differs, detail="; ".join(wrong)))
        elif untold := [*_untold(one, one.target, holders, run.lines)]:
            checks.append(Check(name=name, verdict=Verdict.UNKNOWN, detail="; ".join(untold)))
    return checks


def _holders(run: CommandRun) -> list[_Holder]:
    """Return every process that had a rank. Where no variable tells one, the first process of node n is rank n."""
    found = ranks_found(run.records)
    ends = [
        record for record in run.records if record.event in (Event.RANK_GONE, Event.COMMAND_EXITED)
    ]
    if found:
        return [_Holder(record["rank"], record, ends) for record in found]
    return [
        _Holder(rank, run.commands[node], ends)
        for rank, node in enumerate(run.nodes)
        if node in run.commands
    ]


def _commands(run: CommandRun) -> list[Check]:
    """Each node says what it started: the plan's command, with its own place filled in."""
    wanted = [
        ".*".join(map(re.escape, _FILLED.split(argument))) for argument in run.experiment.command
    ]
    problems = [
        f"{node} ran {' '.join(record['command'])[:80]!r}"
        for node, record in run.commands.items()
        if len(record["command"]) != len(wanted)
        or not all(
            re.fullmatch(one, told, re.DOTALL)
            for one, told in zip(wanted, record["command"], strict=True)
        )
    ]
    return (
        [Check(name=_COMMAND, verdict=Verdict.ERROR, detail="; ".join(problems))]
        if problems
        else []
    )


def _mismatches(
    run: CommandRun, one: InjectionRecord, struck: Struck, holders: Sequence[_Holder]
) -> Iterator[str]:
    fault, place = one.fault, f"process {struck.pid} of {struck.node}"
    if isinstance(fault.rank, int) and struck.rank != fault.rank:
        yield f"it struck rank {struck.rank}, not rank {fault.rank}"
    if struck.worker != f"{struck.node}.{struck.pid}":
        yield f"the harness names {struck.worker}, and {place}"
    for other in (holder for holder in holders if holder.pid == struck.pid):
        if (other.rank, other.node) != (struck.rank, struck.node):
            yield f"process {other.pid} of {other.node} had rank {other.rank}, not rank {struck.rank} of {struck.node}"
        elif other.gone_ns is not None and other.gone_ns < struck.injected_ns:
            yield f"{place} had ended before it acted"
    held = [holder for holder in holders if holder.rank == struck.rank]
    if held and struck.pid not in {holder.pid for holder in holders}:
        known = " or ".join(f"{holder.pid} of {holder.node}" for holder in held[-2:])
        yield f"rank {struck.rank} was process {known}, not {struck.pid} of {struck.node}"
    if one.effective_ns is not None and one.effective_ns < struck.injected_ns:
        yield "its effect was seen before it acted"
    if not one.is_about_its_target:
        yield f"its evidence is not about what it struck: {one.subject or one.observed}"
    if any(line.step is not None for line in run.lines):
        yield from _another_moment(run, one, struck, holders)


def _another_moment(
    run: CommandRun, one: InjectionRecord, struck: Struck, holders: Sequence[_Holder]
) -> Iterator[str]:
    """By what the log had shown when it struck."""
    fault, lines = one.fault, [line for line in run.lines if line.step is not None]
    before = [line for line in lines if line.t_ns <= struck.injected_ns]
    shown = max((line.step for line in before if line.step is not None), default=-1)
    if shown != struck.step:
        yield f"the log had shown {_step(shown)} when it struck, and the harness says {_step(struck.step)}"
    if fault.at_step is not None and shown < fault.at_step:
        yield f"it struck when the log had shown {_step(shown)}, not step {fault.at_step}"
    elif fault.at_step is not None and _is_late(run, one, struck, holders, before):
        yield f"it struck when the log had shown {_step(shown)}, long after step {fault.at_step}"
    elif fault.at_step is not None and fault.at_step < shown == _last(run):
        yield f"it struck when the log had shown {_step(shown)}, the last one, not step {fault.at_step}"
    if fault.after_s is not None:
        after_s = (struck.injected_ns - lines[0].t_ns) / 1e9
        if after_s < fault.after_s - _CLOCK_S:
            yield f"it struck {after_s:.3f} s after the log showed a first step, not {fault.after_s:g} s"


def _last(run: CommandRun) -> int | None:
    """The last step of a run that ended well; None of another one, which may have ended for its faults."""
    if run.reason != RunEnd.ENDED or unfinished(run):
        return None
    return max((line.step for line in run.lines if line.step is not None), default=None)


def _is_late(
    run: CommandRun,
    one: InjectionRecord,
    struck: Struck,
    holders: Sequence[_Holder],
    before: Sequence[Line],
) -> bool:
    """Whether the log was read again between the moment and the act, although the process was there all the time.

    Another fault that struck the same process may have held it up, and so may another process with its rank.
    """
    at_step = one.fault.at_step
    assert at_step is not None
    due = next((line for line in before if line.step is not None and line.step >= at_step), None)
    others = [
        other.target.claims
        for other in run.injections
        if other is not one and other.target is not None
    ]
    if due is None or any(struck.worker in claims for claims in others):
        return False
    there = [
        holder.pid for holder in holders if holder.rank == struck.rank and holder.is_there(due.t_ns)
    ]
    return there == [struck.pid] and any(
        line.node == due.node and line.t_ns > due.t_ns for line in before
    )


def _step(step: int) -> str:
    return "no step" if step < 0 else f"step {step}"


def _untold(
    one: InjectionRecord, struck: Struck, holders: Sequence[_Holder], lines: Sequence[Line]
) -> Iterator[str]:
    mine = [holder for holder in holders if (holder.node, holder.pid) == (struck.node, struck.pid)]
    if not mine:
        yield f"no node tells that process {struck.pid} of {struck.node} had rank {struck.rank}"
    elif _ends_a_process(one) and all(holder.gone_ns is None for holder in mine):
        yield f"{struck.node} does not tell that process {struck.pid} ended"
    elif _ends_a_process(one) and not mine[0].is_command:
        yield from _never_back(struck, holders, lines)
    rivals = [
        holder
        for holder in holders
        if holder.rank == struck.rank and holder.is_there(struck.injected_ns)
    ]
    if len(rivals) > 1:
        pids = ", ".join(str(holder.pid) for holder in rivals)
        yield f"processes {pids} had rank {struck.rank} when it struck {struck.pid}: which of them trained is not known"
    if not any(line.step is not None for line in lines):
        yield "nothing tells which step the log had shown"


def _never_back(struck: Struck, holders: Sequence[_Holder], lines: Sequence[Line]) -> Iterator[str]:
    """What trains on without the rank is not the job that was asked for, and a step counts whichever rank shows it."""
    shown_ns = max((line.t_ns for line in lines if line.step is not None), default=0)
    if shown_ns < struck.injected_ns + _COMES_BACK_S * 1e9:
        return
    if not any(
        holder.rank == struck.rank and holder.found_ns > struck.injected_ns for holder in holders
    ):
        late_s = (shown_ns - struck.injected_ns) / 1e9
        yield f"rank {struck.rank} never came back, and the log shows steps until {late_s:.1f} s after it was struck"


def _ends_a_process(one: InjectionRecord) -> bool:
    """Whether the process cannot outlive the fault, and its node does."""
    return isinstance(one.fault, Kill) and one.fault.signum == Kill.signum
