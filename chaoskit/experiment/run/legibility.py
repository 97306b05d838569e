"""Reasons why the steps in the log of a command cannot be counted.

Verdicts count how often a step is shown. The count has no meaning if the clock decides when a line
is printed, as in progress bars. Nor has it one if steps begin anew in each epoch, or if numbers
cannot be read.

-> experiment/judge/command_judge.py makes checks of such a log unknown. stacks/course.py counts the
steps. experiment/judge/command_coverage.py: logs that are missing or cut short.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

from chaoskit.experiment.injection.ranks_found import ranks_found
from chaoskit.experiment.run.command_run import LOGS, CommandRun
from chaoskit.journal import Record
from chaoskit.stacks.course import Usual

_DRAWN_SHARE = 10  # one overwritten line among so many with a step makes a progress bar
_UNREAD_SHARE = 10  # one unreadable number among so many lines with a step is too much
_UNEVEN_SHARE = 10  # one step among so many may be shown less often than most
_SKIPPED_SHARE = 10  # one gap among so many between steps may be longer or shorter than most
_NO_TWIN: Mapping[int, int] = MappingProxyType({})
_REMEDY = "have each step print a line of its own (with tqdm: tqdm.write), and let LogPatterns match that line"
_REDIRECTS = {
    "--redirects": "torchrun --redirects writes what ranks print into files of its own: use --tee=3, or leave it out",
    "-r": "torchrun -r writes what ranks print into files of its own: use --tee=3, or leave it out",
    "--enable_each_rank_log": "deepspeed --enable_each_rank_log writes it into files of its own: leave it out",
    "--output-filename": "mpirun --output-filename writes it into files of its own: add :tee, or leave it out",
}


def why_uncountable(
    run: CommandRun, usual_count: Callable[[int], int], twin_counts: Mapping[int, int] = _NO_TWIN
) -> str:
    """Return why the steps in the log of ``run`` cannot be counted; "" if they can.

    Args:
        run: the run of a command.
        usual_count: returns how often an unbroken run shows a step.
        twin_counts: step -> how often the twin shows it; empty if there is no twin, or ``run`` is
            the twin.
    """
    return (
        _unread(run, usual_count)
        or _drawn_over(run, twin_counts)
        or _restarts_numbering(run)
        or _repeats_without_cause(run, usual_count, twin_counts)
    )


def why_silent(run: CommandRun) -> str:
    """Return why the log of a command shows no step, with a remedy, as far as that is known.

    It is empty if the log has whole lines and no option of the command explains the lack.
    """
    hint = next(
        (_REDIRECTS[name] for name in map(_option, run.experiment.command) if name in _REDIRECTS),
        "",
    )
    if run.lines_read and hint:
        return f"none of {run.lines_read} lines shows a step; {hint}"
    if run.lines_read:
        return ""
    written_bytes = sum(path.stat().st_size for path in (run.directory / LOGS).glob("*.log"))
    if written_bytes:
        return f"the command printed {written_bytes} bytes without the end of a line: have it end each line with a line feed"
    return f"the command printed nothing; {hint or 'have it print its steps, on stdout or stderr'}"


def _option(argument: str) -> str:
    """Return the name of an option in an argument such as ``--redirects=3`` or ``-r3``."""
    return (
        argument[:2]
        if argument[:1] == "-" != argument[1:2]
        else argument.partition("=")[0].replace("_", "-")
    )


def _unread(run: CommandRun, usual_count: Callable[[int], int]) -> str:
    """Return a reason if many step numbers cannot be read, or those at the end of the log.

    A few odd lines among the steps hide no step.
    """
    is_at_end = run.unread_last > 2 * usual_count(-1)  # the lines of two steps
    if not is_at_end and run.unread * _UNREAD_SHARE <= sum(
        line.step is not None for line in run.lines
    ):
        return ""
    problem = f"LogPatterns(step={run.experiment.watch.step!r}) matches {run.odd!r} or the like in {run.unread} lines"
    return rf"{problem}, which is not a whole number: let its group match the whole number, such as ([\d,]+) for 1,000"


def _drawn_over(run: CommandRun, twin_counts: Mapping[int, int]) -> str:
    """Return a reason if steps are shown by a progress bar that is not drawn once a step.

    If the twin shows every step equally often, the bar is drawn once a step, and faults caused any
    unevenness in the run.
    """
    if twin_counts and is_even(twin_counts):
        return ""
    steps = [line.step for line in run.lines if line.step is not None]
    if run.drawn * _DRAWN_SHARE <= len(steps) or is_even(Counter(steps)):
        return ""
    problem = f"{run.drawn} of {len(steps)} lines with a step are drawn over by the next one, as by a progress bar"
    return f"{problem}, which is drawn by the clock: {_REMEDY}"


def is_even(counts: Mapping[int, int]) -> bool:
    """Return whether each step is shown equally often, and equally many are left out between two.

    Args:
        counts: step -> how often it is shown.
    """
    strides = {after - before for before, after in pairwise(sorted(counts))}
    return len(strides) <= 1 and len(set(counts.values())) <= 1


def _restarts_numbering(run: CommandRun) -> str:
    """Return a reason if the log counts steps within an epoch.

    A log also goes back to its first step after a fault or a new start of a process. If several
    ranks print one after the other, it goes back once for each rank. These cases are allowed for.
    """
    for node, lines in _by_node(run).items():
        first_step, highest_step = min(step for _, step in lines), max(step for _, step in lines)
        ranks = {record["rank"] for record in ranks_found(run.records) if record.source == node}
        returns = _returns_to_first(lines, first_step, highest_step)
        causes = [
            *_struck_ns(run),
            *(record.t_ns for record in _starts(run) if record.source == node),
        ]
        unexplained = [
            return_times
            for return_times in returns
            if not any(return_times[0] <= t_ns <= return_times[1] for t_ns in causes)
        ]
        if len(unexplained) >= max(1, len(ranks)):
            problem = f"steps begin anew: the log on {node} goes back from step {highest_step} to step {first_step}"
            remedy = "let LogPatterns match a number that grows over the whole training, not one of an epoch"
            return f"{problem}, and no process began again: {remedy}"
    return ""


def _returns_to_first(
    lines: Sequence[tuple[int, int]], first_step: int, highest_step: int
) -> list[tuple[int, int]]:
    """Return the times of both lines for each return from the highest step to the first one."""
    returns: list[tuple[int, int]] = []
    reached_ns = 0
    for t_ns, step in lines:
        if step == highest_step > first_step:
            reached_ns = reached_ns or t_ns
        elif step == first_step and reached_ns:
            returns.append((reached_ns, t_ns))
            reached_ns = 0
    return returns


def _repeats_without_cause(
    run: CommandRun, usual_count: Callable[[int], int], twin_counts: Mapping[int, int]
) -> str:
    """Return a reason if the clock, not the step, decides when a line is printed.

    Such a log repeats a step without a fault or a new start of a process. A step that is repeated
    after a fault may have been computed again. It counts only if the clock decides about lines
    without a fault, too. Each fault, and each process that starts after it, may repeat the step
    that was under way once.
    """
    struck_ns = sorted(_struck_ns(run))
    is_by_clock = _is_by_clock(run, twin_counts)
    restarts_ns = [
        record.t_ns for record in _starts(run) if struck_ns and record.t_ns > struck_ns[0]
    ]
    causes_ns, repeats = [*struck_ns, *restarts_ns], 0
    for node, lines in _by_node(run).items():
        previous_step, in_a_row = -1, 0
        for t_ns, step in lines:
            in_a_row = in_a_row + 1 if step == previous_step else 1
            previous_step = step
            if in_a_row <= usual_count(step) or (
                struck_ns and t_ns >= struck_ns[0] and not is_by_clock
            ):
                continue
            repeats += 1
            if repeats > usual_count(step) * sum(cause_ns <= t_ns for cause_ns in causes_ns):
                problem = f"the log on {node} repeats steps that were not computed again, such as step {step}"
                return (
                    f"{problem}: lines that are printed by the clock cannot be counted; {_REMEDY}"
                )
    return ""


def _is_by_clock(run: CommandRun, twin_counts: Mapping[int, int]) -> bool:
    """Return whether the twin shows some steps more often than most, or leaves steps out unevenly.

    Steps that are shown less often than most count only if they are more than a tenth.
    """
    usual_count = Usual(twin_counts)
    uneven_count = sum(count != usual_count(-1) for count in twin_counts.values())
    if any(
        count > usual_count(-1) for count in twin_counts.values()
    ) or uneven_count * _UNEVEN_SHARE > len(twin_counts):
        return True
    steps = twin_counts or {line.step for line in run.lines if line.step is not None}
    strides = Counter(after - before for before, after in pairwise(sorted(steps)))
    odd_strides = strides.total() - max(strides.values(), default=0)
    # each fault may hide the line of one step
    return odd_strides > max(len(_struck_ns(run)), strides.total() // _SKIPPED_SHARE)


def _by_node(run: CommandRun) -> dict[str, list[tuple[int, int]]]:
    """Return, for each node, the time in ns and the step of each log line with a step."""
    lines: dict[str, list[tuple[int, int]]] = {}
    for line in run.lines:
        if line.step is not None:
            lines.setdefault(line.node, []).append((line.t_ns, line.step))
    return lines


def _starts(run: CommandRun) -> list[Record]:
    """Return the records of processes with a rank; without any, those of a job's containers."""
    return ranks_found(run.records) or run.lives


def _struck_ns(run: CommandRun) -> list[int]:
    """Return the time in ns of each fault that struck."""
    return [
        injection.target.injected_ns for injection in run.injections if injection.target is not None
    ]
