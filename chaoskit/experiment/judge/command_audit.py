"""Audit of the faults of a command: each must have struck its planned target, by the records of
nodes and by logs.

What the injector reports about itself proves nothing.

-> runlog/fault_verdict.py (fault_check): a fault that did not act, or has no evidence; faults that
were missed are not audited here. substrate/cluster/command_runner.py: the records of nodes.
experiment/judge/fault_audit.py: the same for a job.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from chaoskit.experiment.injection.ranks_found import ranks_found
from chaoskit.experiment.judge.fault_audit import NAME
from chaoskit.experiment.run.command_run import CommandRun
from chaoskit.experiment.twin.command_twin import unfinished
from chaoskit.faults import Fault, Kill
from chaoskit.journal import Record
from chaoskit.runlog.injected import InjectionRecord, Struck
from chaoskit.runlog.outcome import Check
from chaoskit.stacks.command import PLACEHOLDERS, path_on_node
from chaoskit.stacks.log import CommandLogLine
from chaoskit.vocabulary import Event, RunEnd, Verdict

_COMMAND = "each node ran the command"
_CLOCK_S = 0.001
#: Nodes look for new ranks every half second, and a log may show a few more steps while a rank is
#: started again.
_COMES_BACK_S = 1.0
_FILLED = re.compile("|".join(rf"\{{{name}\}}" for name in PLACEHOLDERS))


class _Holder:
    """A process that had a rank, as recorded by its node.

    Attributes:
        rank: the rank.
        node: the node of the process.
        pid: the process id.
        ticks: the start time of the process; None if it was not recorded. A later process with the
            same pid has another one.
        found_ns: the time at which the node first recorded the rank.
        gone_ns: the recorded end of the process, or None if there is no such record.
        is_command: the process is the command itself, which no launcher starts again.
    """

    def __init__(self, rank: int, record: Record, ends: Iterable[Record]) -> None:
        self.rank, self.node, self.pid, self.found_ns = (
            rank,
            record.source,
            record["pid"],
            record.t_ns,
        )
        self.ticks: int | None = record.get("ticks")
        ends_ns = [
            end.t_ns
            for end in ends
            if (end.source, end["pid"]) == (self.node, self.pid)
            and end.get("ticks") in (None, self.ticks)
        ]
        self.is_command = record.event == Event.COMMAND_STARTED
        self.gone_ns = min((t_ns for t_ns in ends_ns if t_ns >= self.found_ns), default=None)

    def is_process(self, target: Struck) -> bool:
        """Return whether this is the process that a fault has struck."""
        is_same_life = None in (self.ticks, target.ticks) or self.ticks == target.ticks
        return (self.node, self.pid) == (target.node, target.pid) and is_same_life

    def is_there(self, t_ns: int) -> bool:
        """Return whether the process had the rank at a time."""
        return self.found_ns <= t_ns and (self.gone_ns is None or t_ns < self.gone_ns)


class _Life(NamedTuple):
    """A container of a running job, as recorded by its node.

    Attributes:
        found_ns: the time at which it was first recorded.
        gone_ns: the recorded end, or None if there is no such record.
    """

    found_ns: int
    gone_ns: int | None

    def is_there(self, t_ns: int) -> bool:
        """Return whether the container ran at a time."""
        return self.found_ns <= t_ns and (self.gone_ns is None or t_ns < self.gone_ns)


def audit(run: CommandRun, *, is_whole: bool) -> list[Check]:
    """Return a check for each fault or command that differs from the plan; none if all agree.

    A difference gives the verdict error, and missing records of a fault give unknown. A fault that
    struck late since its node was not reached is unknown, too. Faults that did not act, or acted
    too late, are left out.

    Args:
        run: the records of the run.
        is_whole: nothing is missing in journals and logs. Otherwise the difference of a fault may
            be due to that, and is unknown; that of a command remains an error.
    """
    difference_verdict = Verdict.ERROR if is_whole else Verdict.UNKNOWN
    checks, holders = _commands(run), _holders(run)
    for injection in run.injections:
        if injection.target is None or injection.missed:
            continue
        name = NAME.format(fault=injection.fault)
        if mismatches := [*_mismatches(run, injection, injection.target, holders)]:
            checks.append(
                Check(name=name, verdict=difference_verdict, detail="; ".join(mismatches))
            )
        elif missing_records := [*_missing(run, injection, injection.target, holders)]:
            checks.append(
                Check(name=name, verdict=Verdict.UNKNOWN, detail="; ".join(missing_records))
            )
    return checks


def _holders(run: CommandRun) -> list[_Holder]:
    """Return all processes that had a rank.

    If no variable shows a rank, the command's process on node n has rank n.
    """
    ranks = ranks_found(run.records)
    ends = [
        record for record in run.records if record.event in (Event.RANK_GONE, Event.COMMAND_EXITED)
    ]
    if ranks:
        return [_Holder(record["rank"], record, ends) for record in ranks]
    return [
        _Holder(rank, run.commands[node], ends)
        for rank, node in enumerate(run.nodes)
        if node in run.commands
    ]


def _lives(run: CommandRun, node: str) -> list[_Life]:
    """Return the containers of a node of a running job, by time."""
    records = [record for record in run.records if record.source == node]
    ends_ns = {
        (record["uid"], record["container_id"]): record.t_ns
        for record in records
        if record.event == Event.LIFE_ENDED
    }
    return [
        _Life(record.t_ns, ends_ns.get((record["uid"], record["container_id"])))
        for record in records
        if record.event == Event.LIFE_OBSERVED
    ]


def _commands(run: CommandRun) -> list[Check]:
    """Return one check with the verdict error if a node started another command than the plan's.

    The placeholders of the plan's command stand for any text, and a path of the plan for that of
    its copy on the node. The list is empty without a difference, and for a running job.
    """
    problems = [
        f"{node} ran {' '.join(record['command'])[:80]!r}"
        for node, record in run.commands.items()
        if not _is_planned(record, run.experiment.command)
    ]
    return (
        [Check(name=_COMMAND, verdict=Verdict.ERROR, detail="; ".join(problems))]
        if problems
        else []
    )


def _is_planned(record: Record, command: Sequence[str]) -> bool:
    """Return whether a node's record of its command agrees with the command of the plan."""
    planned_arguments = [path_on_node(argument, record.get("paths", {})) for argument in command]
    return len(record["command"]) == len(command) and all(
        re.fullmatch(".*".join(map(re.escape, _FILLED.split(planned))), argument, re.DOTALL)
        for planned, argument in zip(planned_arguments, record["command"], strict=True)
    )


def _mismatches(
    run: CommandRun, injection: InjectionRecord, target: Struck, holders: Sequence[_Holder]
) -> Iterator[str]:
    """Yield, in words, each contradiction between a fault's plan and the records of its strike."""
    fault = injection.fault
    if target.worker != f"{target.node}.{target.pid}":
        process_in_words = f"process {target.pid} of {target.node}"
        yield f"the harness recorded {target.worker} as the target, but also {process_in_words}"
    if not fault.node:
        yield from _rank_mismatches(fault, target, holders)
    elif target.node != fault.node:
        yield f"it struck {target.node}, not {fault.node}"
    if injection.effective_ns is not None and injection.effective_ns < target.injected_ns:
        yield "its effect was seen before it acted"
    if not injection.is_about_its_target:
        yield f"its evidence is not about what it struck: {injection.subject or injection.observed}"
    if any(line.step is not None for line in run.lines):
        yield from _moment_mismatches(run, injection, target, holders)


def _rank_mismatches(fault: Fault, target: Struck, holders: Sequence[_Holder]) -> Iterator[str]:
    """Yield, in words, each contradiction between the rank of a fault and the records of nodes."""
    process_in_words = f"process {target.pid} of {target.node}"
    if isinstance(fault.rank, int) and target.rank != fault.rank:
        yield f"it struck rank {target.rank}, not rank {fault.rank}"
    for owner in (holder for holder in holders if holder.is_process(target)):
        if owner.rank != target.rank:
            yield f"{process_in_words} had rank {owner.rank}, not rank {target.rank}"
        elif owner.gone_ns is not None and owner.gone_ns < target.injected_ns:
            yield f"{process_in_words} had ended before it acted"
    rank_holders = [holder for holder in holders if holder.rank == target.rank]
    if rank_holders and not any(holder.is_process(target) for holder in holders):
        holders_in_words = " or ".join(
            f"{holder.pid} of {holder.node}" for holder in rank_holders[-2:]
        )
        yield f"rank {target.rank} was process {holders_in_words}, not {target.pid} of {target.node}"


def _moment_mismatches(
    run: CommandRun, injection: InjectionRecord, target: Struck, holders: Sequence[_Holder]
) -> Iterator[str]:
    """Yield, in words, each difference between the planned moment and the log at the strike."""
    fault, lines = injection.fault, [line for line in run.lines if line.step is not None]
    log_step = _highest(_lines_before(run, target))
    if log_step != target.step:
        yield f"the log had shown {_step_text(log_step)} when it struck, but the harness recorded {_step_text(target.step)}"
    if fault.at_step is not None and log_step < fault.at_step:
        yield f"it struck when the log had shown {_step_text(log_step)}, not step {fault.at_step}"
    elif not target.waited_for and (lateness := _lateness(run, injection, target, holders)):
        yield lateness
    if fault.after_s is not None:
        after_s = (target.injected_ns - lines[0].t_ns) / 1e9
        if after_s < fault.after_s - _CLOCK_S:
            yield f"it struck {after_s:.3f} s after the log showed a first step, not {fault.after_s:g} s"


def _lateness(
    run: CommandRun, injection: InjectionRecord, target: Struck, holders: Sequence[_Holder]
) -> str:
    """Return in words how late a fault at a step struck; "" if it was in time."""
    at_step, lines_before = injection.fault.at_step, _lines_before(run, target)
    if at_step is None:
        return ""
    log_step = _highest(lines_before)
    shown = f"it struck when the log had shown {_step_text(log_step)}"
    if _is_late(run, injection, at_step, target, holders, lines_before):
        return f"{shown}, long after step {at_step}"
    if at_step < log_step == _last(run):
        return f"{shown}, the last one, not step {at_step}"
    return ""


def _lines_before(run: CommandRun, target: Struck) -> list[CommandLogLine]:
    """Return the log lines with a step that were read before a strike."""
    return [
        line for line in run.lines if line.step is not None and line.read_ns <= target.injected_ns
    ]


def _highest(lines: Iterable[CommandLogLine]) -> int:
    """Return the highest step of log lines; -1 without one."""
    return max((line.step for line in lines if line.step is not None), default=-1)


def _last(run: CommandRun) -> int | None:
    """Return the last step in the log of a run that ended well, or None.

    The last step of another run says nothing, since faults may have ended the run.
    """
    if run.reason != RunEnd.ENDED or unfinished(run):
        return None
    return max((line.step for line in run.lines if line.step is not None), default=None)


def _is_late(
    run: CommandRun,
    injection: InjectionRecord,
    at_step: int,
    target: Struck,
    holders: Sequence[_Holder],
    lines_before: Sequence[CommandLogLine],
) -> bool:
    """Return whether a fault at a step struck too late, although its target was there in time.

    It is late if the log of the node was read again between the step and the act. It is not late
    if another fault, which may have delayed it, struck the same process. Nor is it late if another
    process had the rank.

    Args:
        run: the records of the run.
        injection: the fault and its result.
        at_step: the step at which the fault was due.
        target: its target.
        holders: all processes that had a rank.
        lines_before: the log lines that were read before the act.
    """
    due_line = next(
        (line for line in lines_before if line.step is not None and line.step >= at_step), None
    )
    other_claims = [
        other.target.claims
        for other in run.injections
        if other is not injection and other.target is not None
    ]
    if due_line is None or any(target.worker in claims for claims in other_claims):
        return False
    if injection.fault.node:
        times_ns = (due_line.t_ns, target.injected_ns)
        lives = _lives(run, target.node)
        was_there = any(all(map(life.is_there, times_ns)) for life in lives)
    else:
        processes_there = [
            holder
            for holder in holders
            if holder.rank == target.rank and holder.is_there(due_line.t_ns)
        ]
        was_there = len(processes_there) == 1 and processes_there[0].is_process(target)
    return was_there and any(
        line.node == due_line.node and line.read_ns > due_line.read_ns for line in lines_before
    )


def _step_text(step: int) -> str:
    """Return a step in words; -1 means that the log has shown no step."""
    return "no step" if step < 0 else f"step {step}"


def _missing(
    run: CommandRun, injection: InjectionRecord, target: Struck, holders: Sequence[_Holder]
) -> Iterator[str]:
    """Yield, in words, each record that is missing to confirm the target of a fault."""
    if not injection.fault.node:
        yield from _missing_of_rank(injection, target, holders, run.lines)
    elif not any(life.is_there(target.injected_ns) for life in _lives(run, target.node)):
        yield f"{target.node} recorded no container that ran when it struck"
    if not any(line.step is not None for line in run.lines):
        yield "no log line shows a step, so the step of the strike is not known"
    if target.waited_for and (lateness := _lateness(run, injection, target, holders)):
        yield f"{lateness}: it waited for its node ({target.waited_for})"


def _missing_of_rank(
    injection: InjectionRecord,
    target: Struck,
    holders: Sequence[_Holder],
    lines: Sequence[CommandLogLine],
) -> Iterator[str]:
    """Yield, in words, each record that is missing to confirm that a process had its rank.

    Several processes with the rank are reported, too: which of them trained is not known.
    """
    own_holders = [holder for holder in holders if holder.is_process(target)]
    ends_ns = [holder.gone_ns for holder in own_holders if holder.gone_ns is not None]
    if not own_holders:
        yield f"no node recorded that process {target.pid} of {target.node} had rank {target.rank}"
    elif _ends_a_process(injection) and not ends_ns:
        yield f"{target.node} did not record the end of process {target.pid}"
    elif ends_ns and not injection.fault.whole_node and not own_holders[0].is_command:
        yield from _missing_restart(target, max(ends_ns), holders, lines)
    rivals = [
        holder
        for holder in holders
        if holder.rank == target.rank and holder.is_there(target.injected_ns)
    ]
    if len(rivals) > 1:
        pids = ", ".join(str(holder.pid) for holder in rivals)
        yield f"processes {pids} had rank {target.rank} when it struck {target.pid}: which of them trained is not known"


def _missing_restart(
    target: Struck, ended_ns: int, holders: Sequence[_Holder], lines: Sequence[CommandLogLine]
) -> Iterator[str]:
    """Yield a problem if the training went on and the rank that ended was never started again.

    A job that trains on without the rank is not the planned job, but its log shows steps of the
    other ranks. A fault that does not kill, such as a stop, may lead its launcher to end the rank.

    Args:
        target: the process that was struck.
        ended_ns: its end, or when its node noticed that.
        holders: all processes that had a rank.
        lines: the log lines.
    """
    shown_ns = max((line.t_ns for line in lines if line.step is not None), default=0)
    if shown_ns < max(target.injected_ns, ended_ns) + _COMES_BACK_S * 1e9:
        return
    if not any(
        holder.rank == target.rank and holder.found_ns > target.injected_ns for holder in holders
    ):
        trained_s = (shown_ns - target.injected_ns) / 1e9
        yield f"rank {target.rank} was never started again, but the log shows steps until {trained_s:.1f} s after the strike"


def _ends_a_process(injection: InjectionRecord) -> bool:
    """Return whether the fault always ends its process, but not the node."""
    return isinstance(injection.fault, Kill) and injection.fault.signum == Kill.signum
