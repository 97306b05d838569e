"""Reasons why the log of a command cannot be counted, although it shows steps.

Verdicts count how often a step is shown. That says nothing where lines follow the clock, as those of progress bars do,
where steps begin anew in each epoch, or where numbers of steps cannot be read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

from chaoskit.experiment.injection.ranks_found import ranks_found
from chaoskit.experiment.run.command_run import LOGS, CommandRun
from chaoskit.stacks.course import Usual

_DRAWN_SHARE = 10  # of so many lines with a step, one that is drawn over makes a progress bar
_UNREAD_SHARE = 10  # the same of lines whose number cannot be read
_UNEVEN_SHARE = 10  # the same of steps that are shown less often than most
_SKIPPED_SHARE = 10  # the same of pairs of steps that lie further apart, or nearer, than most
_NO_TWIN: Mapping[int, int] = MappingProxyType({})
_REMEDY = "have each step print a line of its own (with tqdm: tqdm.write), and let LogPatterns match that line"
_REDIRECTS = {
    "--redirects": "torchrun --redirects writes what ranks print into files of its own: use --tee=3, or leave it out",
    "-r": "torchrun -r writes what ranks print into files of its own: use --tee=3, or leave it out",
    "--enable_each_rank_log": "deepspeed --enable_each_rank_log writes it into files of its own: leave it out",
    "--output-filename": "mpirun --output-filename writes it into files of its own: add :tee, or leave it out",
}


def uncountable(
    run: CommandRun, usual: Callable[[int], int], unbroken: Mapping[int, int] = _NO_TWIN
) -> str:
    """Return why nothing can be concluded from how often ``run`` shows its steps; "" if something can.

    Args:
        usual: how often an unbroken run shows a step.
        unbroken: how often the twin shows each step; empty where there is none, or ``run`` is it.
    """
    return (
        _unread(run, usual)
        or _drawn_over(run, unbroken)
        or _begins_anew(run)
        or _repeats_by_itself(run, usual, unbroken)
    )


def why_silent(run: CommandRun) -> str:
    """Return why the log of a command shows no line at all, as far as that is known; "" if it has lines."""
    hint = next(
        (_REDIRECTS[name] for name in map(_option, run.experiment.command) if name in _REDIRECTS),
        "",
    )
    if run.lines_read and hint:
        return f"none of {run.lines_read} lines shows a step; {hint}"
    if run.lines_read:
        return ""
    written = sum(path.stat().st_size for path in (run.directory / LOGS).glob("*.log"))
    if written:
        return f"the command printed {written} bytes without the end of a line: have it end each line with a line feed"
    return f"the command printed nothing; {hint or 'have it print its steps, on stdout or stderr'}"


def _option(argument: str) -> str:
    """The name of an option: of ``--redirects=3``, ``-r3`` and ``-r``."""
    return (
        argument[:2]
        if argument[:1] == "-" != argument[1:2]
        else argument.partition("=")[0].replace("_", "-")
    )


def _unread(run: CommandRun, usual: Callable[[int], int]) -> str:
    """Numbers that cannot be read are many, or the end of the log. A few odd lines among the steps hide no step."""
    is_end = run.unread_last > 2 * usual(-1)  # the lines of two steps
    if not is_end and run.unread * _UNREAD_SHARE <= sum(
        line.step is not None for line in run.lines
    ):
        return ""
    told = f"LogPatterns(step={run.experiment.watch.step!r}) meets {run.odd!r} in {run.unread} of its lines"
    return rf"{told}, and no whole number: let its group match the whole number, such as ([\d,]+) for 1,000"


def _drawn_over(run: CommandRun, unbroken: Mapping[int, int]) -> str:
    """A progress bar shows some steps and not others, or one several times, unless it is drawn once a step.

    The twin shows that it is: what is uneven in the broken run is then the doing of a fault.
    """
    if unbroken and is_even(unbroken):
        return ""
    steps = [line.step for line in run.lines if line.step is not None]
    if run.drawn * _DRAWN_SHARE <= len(steps) or is_even(Counter(steps)):
        return ""
    told = f"{run.drawn} of {len(steps)} lines with a step are drawn over by the next one, as by a progress bar"
    return f"{told}, which is drawn by the clock: {_REMEDY}"


def is_even(counts: Mapping[int, int]) -> bool:
    """Return whether each step is shown equally often, and none is left out."""
    strides = {after - before for before, after in pairwise(sorted(counts))}
    return len(strides) <= 1 and len(set(counts.values())) <= 1


def _begins_anew(run: CommandRun) -> str:
    """Steps that are counted within an epoch. A training that a fault sets back is told by the fault, or the process.

    A log of several ranks goes back once for each rank, at most, where they print one after the other.
    """
    for node, lines in _by_node(run).items():
        first, highest = min(step for _, step in lines), max(step for _, step in lines)
        ranks = {record["rank"] for record in ranks_found(run.records) if record.source == node}
        backs = _backs(lines, first, highest)
        causes = [
            *_struck_ns(run),
            *(record.t_ns for record in ranks_found(run.records) if record.source == node),
        ]
        natural = [end for end in backs if not any(end[0] <= t_ns <= end[1] for t_ns in causes)]
        if len(natural) >= max(1, len(ranks)):
            told = (
                f"steps begin anew: the log on {node} goes back from step {highest} to step {first}"
            )
            remedy = "let LogPatterns match a number that grows over the whole training, not one of an epoch"
            return f"{told}, and no process began again: {remedy}"
    return ""


def _backs(lines: Sequence[tuple[int, int]], first: int, highest: int) -> list[tuple[int, int]]:
    """Return each time that a log goes back from its highest step to its first one: times of these two lines."""
    backs: list[tuple[int, int]] = []
    reached_ns = 0
    for t_ns, step in lines:
        if step == highest > first:
            reached_ns = reached_ns or t_ns
        elif step == first and reached_ns:
            backs.append((reached_ns, t_ns))
            reached_ns = 0
    return backs


def _repeats_by_itself(
    run: CommandRun, usual: Callable[[int], int], unbroken: Mapping[int, int]
) -> str:
    """Lines that are printed by the clock show one step in a row, also where nothing was struck or started again.

    A step that is repeated after a fault may have been computed again in the same process. It is not counted only where
    the log is printed by the clock without a fault, too. Each fault, and each process that is started after it, may
    show the step once more that was under way.
    """
    struck_ns = sorted(_struck_ns(run))
    is_by_clock = _is_by_clock(run, unbroken)
    restarts_ns = [
        record.t_ns
        for record in ranks_found(run.records)
        if struck_ns and record.t_ns > struck_ns[0]
    ]
    causes_ns, repeats = [*struck_ns, *restarts_ns], 0
    for node, lines in _by_node(run).items():
        latest, in_a_row = -1, 0
        for t_ns, step in lines:
            in_a_row = in_a_row + 1 if step == latest else 1
            latest = step
            if in_a_row <= usual(step) or (struck_ns and t_ns >= struck_ns[0] and not is_by_clock):
                continue
            repeats += 1
            if repeats > usual(step) * sum(cause_ns <= t_ns for cause_ns in causes_ns):
                told = f"the log on {node} repeats steps that were not computed again, such as step {step}"
                return f"{told}: lines that are printed by the clock cannot be counted; {_REMEDY}"
    return ""


def _is_by_clock(run: CommandRun, unbroken: Mapping[int, int]) -> bool:
    """Return whether the twin shows some steps more often than most, or steps are left out at uneven distances.

    A twin that shows some steps less often than most does so for more of them than its first and last one.
    """
    usual = Usual(unbroken)
    uneven = sum(count != usual(-1) for count in unbroken.values())
    if any(count > usual(-1) for count in unbroken.values()) or uneven * _UNEVEN_SHARE > len(
        unbroken
    ):
        return True
    steps = unbroken or {line.step for line in run.lines if line.step is not None}
    strides = Counter(after - before for before, after in pairwise(sorted(steps)))
    odd = strides.total() - max(strides.values(), default=0)
    # each fault may hide the line of one step
    return odd > max(len(_struck_ns(run)), strides.total() // _SKIPPED_SHARE)


def _by_node(run: CommandRun) -> dict[str, list[tuple[int, int]]]:
    """Time and step of each line that shows a step, by node."""
    lines: dict[str, list[tuple[int, int]]] = {}
    for line in run.lines:
        if line.step is not None:
            lines.setdefault(line.node, []).append((line.t_ns, line.step))
    return lines


def _struck_ns(run: CommandRun) -> list[int]:
    return [one.target.injected_ns for one in run.injections if one.target is not None]
