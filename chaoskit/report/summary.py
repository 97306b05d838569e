"""Summary of outcomes for terminals, and the wording that all reports share.

-> report/statistics.py: the estimates. report/times.py: the time account. report/tables.py: tables.
-> report/html.py and report/junit.py use the wording.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from chaoskit.plaintext import plural, printable, shorten_command
from chaoskit.report.statistics import Estimate, Estimates, estimate_recovery
from chaoskit.report.tables import Column, DataTable
from chaoskit.runlog.account.time_account import Recently, TimeAccount
from chaoskit.runlog.outcome import CopyInterval, Outcome, PhaseSpan, Recovery, StepPoint
from chaoskit.vocabulary import Verdict

_SCALE = 1.25  # the width of the bars, relative to the time to the first good step

_RULES_SHOWN = 8
_BAR_WIDTH_MIN = 4

VERDICT_STYLES = {
    Verdict.PASSED: "bold green",
    Verdict.FAILED: "bold red",
    Verdict.UNKNOWN: "bold yellow",
    Verdict.ERROR: "bold magenta",
}


def number(amount: float) -> str:
    """Format a number with three significant digits, at most six decimals and no exponent.

    All digits before the point are kept. Numbers that are not finite become ``nan`` or ``inf``.
    """
    if not math.isfinite(amount):
        return str(amount)
    digits = 2 - math.floor(math.log10(abs(amount))) if amount else 0
    text = f"{amount:.{min(max(digits, 0), 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def duration(seconds: float | None, absent: str = "–") -> str:
    """Format a duration in ms below one second and in s above; ``absent`` if it is None."""
    if seconds is None:
        return absent
    return f"{number(seconds * 1e3)} ms" if abs(seconds) < 0.9995 else f"{number(seconds)} s"


def long_duration(seconds: float) -> str:
    """Format a duration such as ``45 s``, ``3 minutes`` or ``1 hour 5 minutes``."""
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    parts = [(hours, "hour"), (minutes, "minute")]
    return " ".join(plural(count, unit) for count, unit in parts if count)


def with_reference(span: PhaseSpan) -> str:
    """Return the durations of a phase and of its reference, such as ``3.1 ms (reference 0.3)``.

    The unit of the reference is left out if it is that of the phase.
    """
    phase_duration, reference_duration = duration(span.seconds), duration(span.reference_s)
    amount, _, unit = reference_duration.partition(" ")
    has_one_unit = phase_duration.endswith(f" {unit}")
    return f"{phase_duration} (reference {amount if has_one_unit else reference_duration})"


#: The explanation of references beside the bars of a recovery.
REFERENCE = "reference: the plain operation alone, for scale; a phase may take less"


def spans_to_first_step(recovery: Recovery) -> list[PhaseSpan]:
    """Return the phases of a recovery that end no later than the first good step."""
    limit = recovery.injected_s + recovery.seconds + 1e-9
    return [span for span in recovery.spans if span.end_s <= limit]


def slowest_recovery(outcome: Outcome) -> Recovery | None:
    """Return the slowest recovery, which headlines and properties quote; None if there is none."""
    return max(outcome.recoveries, key=lambda recovery: recovery.seconds, default=None)


def slowest_full_strength(outcome: Outcome) -> float | None:
    """Return the longest time to the full world, in seconds.

    It is None if a recovery did not reach the full world, or if there was no recovery.
    """
    times = [recovery.full_strength_seconds for recovery in outcome.recoveries]
    reached = [seconds for seconds in times if seconds is not None]
    return max(reached) if reached and len(reached) == len(times) else None


def absent_strength(outcome: Outcome) -> str:
    """Return the text for a missing time to full strength.

    It is "never", or "–" without a recovery or if the world size is unknown.
    """
    return "never" if any(recovery.world for recovery in outcome.recoveries) else "–"


def confirmed_share(outcome: Outcome) -> str:
    """Return the share of planned faults that are proved to have taken effect, such as ``2/3``.

    It is "–" if no fault was planned.
    """
    if not outcome.faults:
        return "–"
    return f"{sum(fault.state == 'confirmed' for fault in outcome.faults)}/{len(outcome.faults)}"


class LossMatch(NamedTuple):
    """A comparison of the losses of a run and its twin, the same training without a fault.

    Attributes:
        equal: the number of steps with equal losses.
        compared: the number of compared steps.
        first: the first step that differs; None if there is none.
        first_twin: the twin's loss of that step.
    """

    equal: int
    compared: int
    first: StepPoint | None
    first_twin: float | None

    @property
    def exact(self) -> bool:
        """True if all compared losses are equal, and there are some."""
        return 0 < self.compared == self.equal


def twin_loss(outcome: Outcome, step: int) -> float | None:
    """Return the twin's loss of ``step``; None if it skipped that step or never reached it."""
    losses = outcome.twin_losses or []
    return losses[step] if 0 <= step < len(losses) else None


def match_losses(outcome: Outcome) -> LossMatch | None:
    """Compare the loss of every committed step that the twin has too, bit for bit.

    Return None if there is no twin. Two NaN count as equal, and so do two skipped batches.
    """
    if outcome.twin_losses is None:
        return None
    shared = [point for point in outcome.steps if 0 <= point.step < len(outcome.twin_losses)]
    # repr distinguishes all bit patterns of a double but those of NaN; -0.0 differs from 0.0
    differing = [
        point for point in shared if repr(point.loss) != repr(twin_loss(outcome, point.step))
    ]
    first = differing[0] if differing else None
    first_twin = twin_loss(outcome, first.step) if first else None
    return LossMatch(len(shared) - len(differing), len(shared), first, first_twin)


def loss_sentence(outcome: Outcome) -> str:
    """Return a text about the losses and those of the twin, with the first difference.

    An example: ``60 of 60 losses bit-equal to the twin``.
    """
    match = match_losses(outcome)
    if match is None:
        return "no twin to compare with" if outcome.ledger else "no losses to compare"
    if match.compared == 0:
        return "no step in common with the twin"
    equal_losses = f"{match.equal} of {match.compared} losses bit-equal to the twin"
    if match.first is None:
        return equal_losses
    loss, twin = match.first.loss, match.first_twin
    if loss is None or twin is None:
        here, there = (
            "skipped" if step_loss is None else repr(step_loss) for step_loss in (loss, twin)
        )
        return f"{equal_losses}; first difference at step {match.first.step}: {here} here, {there} in the twin"
    return f"{equal_losses}; first difference at step {match.first.step}: {loss!r} − {twin!r} = {loss - twin:.3g}"


def short_match(outcome: Outcome) -> str:
    """Return the number of equal and of compared losses for a table cell, such as ``60/60``.

    It is "no twin" without a twin, and "–" if no step is in both runs.
    """
    match = match_losses(outcome)
    if match is None:
        return "no twin"
    return f"{match.equal}/{match.compared}" if match.compared else "–"


def percentage(probability: float) -> str:
    """Format a probability with four digits, so that 9999 of 10,000 do not look like certainty."""
    return f"{probability * 100:.4g} %"


def recovery_sentence(estimate: Estimate) -> str:
    """Return a text about an estimate of recovery.

    An example: ``recovered in 19 of 20 runs: 95 %, 95 % interval 76.39 % to 99.11 %; first good
    step p50 …; 1 unknown``.
    """
    sentence = f"recovered in {estimate.recovered} of {plural(estimate.tried, 'run')}"
    if estimate.probability is not None:
        sentence += (
            f": {percentage(estimate.probability)}, 95 % interval {interval_words(estimate)}"
        )
    if estimate.recoveries:
        sentence += f"; first good step p50 {duration(estimate.p50_s)}"
        sentence += f", p95 {duration(estimate.p95_s)}" if estimate.p95_s is not None else ""
        sentence += f", worst of {estimate.recoveries} {duration(estimate.max_s)}"
    return "; ".join(
        [
            sentence,
            *([f"{estimate.failed} failed"] if estimate.failed else []),
            *uncounted_texts(estimate),
        ]
    )


def interval_words(estimate: Estimate) -> str:
    """Format an interval such as ``76.39 % to 99.11 %``."""
    return f"{percentage(estimate.low)} to {percentage(estimate.high)}"


def uncounted_texts(estimate: Estimate) -> list[str]:
    """Return the numbers of runs that do not count, by reason, such as ``2 unknown``."""
    counts = {
        "unknown": estimate.unknown,
        "error": estimate.errors,
        "judged by their tests alone": estimate.unclaimed,
    }
    return [f"{count} {reason}" for reason, count in counts.items() if count]


def share(ratio: float) -> str:
    """Format a share with three digits, such as ``57.1 %``."""
    return f"{number(100 * ratio)} %"


def account_sentence(account: TimeAccount | Recently) -> str:
    """Return a text about goodput and ETTR, each with its convention."""
    return (
        f"goodput {share(account.goodput)}, ETTR {share(account.ettr_wall)} per wall-clock hour, "
        f"{share(account.ettr_productive)} per productive hour"
    )


def copies_sentence(copies: CopyInterval) -> str:
    """Return a text about the work at risk between copies in memory.

    An example: ``at most 17 steps (2.55 s) are computed again if ...``.
    """
    seconds = f" ({duration(copies.seconds)})" if copies.seconds else ""
    verb = "is" if copies.steps == 1 else "are"
    return f"at most {plural(copies.steps, 'step')}{seconds} {verb} computed again if all ranks end during one update"


def limits_sentence(limits_ms: Mapping[str, int], suspects: int) -> str:
    """Return a text about the hang limits of phases and the number of ranks that exceeded one.

    An example: ``forward 620 ms; 1 rank ended on suspicion``.
    """
    limits = ", ".join(
        f"{phase} {duration(limit_ms / 1000)}" for phase, limit_ms in limits_ms.items()
    )
    return f"{limits}; {plural(suspects, 'rank')} ended on suspicion" if suspects else limits


def count_verdicts(outcomes: Iterable[Outcome]) -> dict[Verdict, int]:
    """Return the number of outcomes with each verdict as their result, zeros included."""
    verdicts = [outcome.result for outcome in outcomes]
    return {verdict: verdicts.count(verdict) for verdict in Verdict}


def render_summary(outcomes: Sequence[Outcome]) -> RenderableType:
    """Return a table of experiments, the details of each, and estimates for repeated ones.

    Details are reasons, notes and recoveries as bars. The last line has the worst verdict.
    """
    if not outcomes:
        return Text("No experiment was run.")
    parts: list[RenderableType] = [_overview(outcomes)]
    for outcome in outcomes:
        parts += _details(outcome)
    return Group(*parts, *_probabilities(estimate_recovery(outcomes)), Text(), _totals(outcomes))


def _overview(outcomes: Sequence[Outcome]) -> DataTable:
    """Return the table of experiments, grouped by session."""
    numbers = [
        Column(name, is_number=True) for name in ("evidence", "recovery", "full", "lost", "losses")
    ]
    experiment = Column("experiment and faults", is_text=True, is_heading=True)
    table = DataTable(Column("verdict", is_heading=True), experiment, *numbers)
    sessions = by_session(outcomes)
    for session, group in sessions.items():
        if len(sessions) > 1:
            table.add_row("", Text(session_line(session, group), "bold"), *[""] * len(numbers))
        _add_rows(table, group)
    return table


def by_session(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Return the outcomes of each pytest session, in the order of their first outcomes.

    Outcomes that were made outside of pytest are those of the session "".
    """
    sessions: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        sessions.setdefault(outcome.session, []).append(outcome)
    return sessions


def session_line(session: str, outcomes: Sequence[Outcome]) -> str:
    """Return a line such as ``session 20261125-210211-4127: 3 experiments: 2 passed, 1 failed``."""
    name = f"session {printable(session)}" if session else "outside of pytest"
    return f"{name}: {verdict_counts_text(outcomes)}"


def verdict_counts_text(outcomes: Sequence[Outcome]) -> str:
    """Return a text such as ``3 experiments: 2 passed, 1 failed``."""
    counts = ", ".join(
        f"{count} {verdict}" for verdict, count in count_verdicts(outcomes).items() if count
    )
    return f"{plural(len(outcomes), 'experiment')}: {counts}"


def _add_rows(table: DataTable, outcomes: Sequence[Outcome]) -> None:
    """Add a row for each outcome."""
    for outcome in outcomes:
        recovery = slowest_recovery(outcome)
        table.add_row(
            Text(outcome.result.upper(), VERDICT_STYLES[outcome.result]),
            Text.assemble(printable(outcome.name), *_subject_lines(outcome)),
            confirmed_share(outcome),
            duration(recovery.seconds if recovery else None),
            duration(slowest_full_strength(outcome), absent_strength(outcome)),
            str(outcome.lost_steps),
            short_match(outcome),
        )


def _subject_lines(outcome: Outcome) -> list[tuple[str, str]]:
    """Return the job and the faults as dimmed lines below the name, each with its style."""
    lines = [f"{shorten_command(outcome.job)} on {nodes_text(outcome)}", *fault_lines(outcome)]
    return [(f"\n{printable(line)}", "dim") for line in lines]


def fault_lines(outcome: Outcome, limit: int = 4) -> list[str]:
    """Return the planned faults; beyond ``limit``, the last line counts the rest."""
    lines = [fault.fault for fault in outcome.faults]
    return (
        lines
        if len(lines) <= limit
        else [*lines[: limit - 1], f"and {len(lines) - limit + 1} more"]
    )


def nodes_text(outcome: Outcome) -> str:
    """Return a text such as ``4 nodes`` or ``4 nodes + 1 spare``."""
    text = plural(outcome.nodes, "node")
    return f"{text} + {plural(outcome.spares, 'spare')}" if outcome.spares else text


def _details(outcome: Outcome) -> list[RenderableType]:
    """Return the block about an outcome: reasons, notes and recoveries; empty if there are none."""
    blocks: list[RenderableType] = []
    if outcome.result is not Verdict.PASSED:
        reasons = outcome.result_reasons or ["no reason was given"]
        blocks += [_indented(Text(printable(f"- {reason}")), 2) for reason in reasons]
    not_applied = [f"not checked: {name}: {reason}" for name, reason in outcome.not_applied.items()]
    blocks += [_indented(Text(printable(line), "dim"), 2) for line in not_applied]
    blocks += [
        _indented(Text(printable(f"log rule {fired}")), 2)
        for fired in outcome.rules_fired[:_RULES_SHOWN]
    ]
    if len(outcome.rules_fired) > _RULES_SHOWN:
        blocks.append(_indented(Text(f"and {len(outcome.rules_fired) - _RULES_SHOWN} more"), 2))
    blocks += [_indented(Text(printable(str(end))), 2) for end in outcome.log_ends]
    for recovery in outcome.recoveries:
        blocks += [_indented(_recovery_title(recovery), 2), _indented(_Bars(recovery), 4)]
    if outcome.recoveries:
        blocks.append(_indented(Text(REFERENCE, "dim"), 4))
    if not blocks:
        return []
    if outcome.account is not None:
        blocks.append(_indented(Text(account_sentence(outcome.account), "dim"), 2))
    if outcome.copies is not None:
        blocks.append(
            _indented(Text(f"copies in memory: {copies_sentence(outcome.copies)}", "dim"), 2)
        )
    if outcome.hang_limits_ms:
        limits = limits_sentence(outcome.hang_limits_ms, outcome.suspects)
        blocks.append(_indented(Text(f"hang limits: {limits}", "dim"), 2))
    if outcome.refused_connections:
        blocks.append(
            _indented(Text(f"refused connections: {outcome.refused_connections}", "dim"), 2)
        )
    name = printable(outcome.name)
    heading = Text.assemble(
        (outcome.result.upper(), VERDICT_STYLES[outcome.result]), " ", (name, "bold")
    )
    return [Text(), heading, *blocks]


def _indented(block: RenderableType, columns: int) -> Padding:
    """Return a block that is indented by some columns."""
    return Padding(block, (0, 0, 0, columns), expand=False)


def _recovery_title(recovery: Recovery) -> Text:
    """Return the heading of a recovery: its cause and its durations."""
    full_strength = (
        f", full strength {duration(recovery.full_strength_seconds, 'never')}"
        if recovery.world
        else ""
    )
    new_world = (
        f"generation {recovery.generation}, {plural(recovery.world, 'rank')}"
        if recovery.world
        else ""
    )
    return Text.assemble(
        printable(recovery.cause),
        "" if recovery.fault else ", nothing was injected: a false alarm",
        (f" ({new_world})" if new_world else "", "dim"),
        f"\nfirst good step {duration(recovery.seconds)}{full_strength}",
        (f" (a step before the fault: {duration(recovery.step_seconds)})", "dim"),
    )


class _Bars:
    """The phases of a recovery as lines, each with a bar at its place in time.

    The scale covers the time to the first good step. Much longer bars are cut off and end in an
    arrow.
    """

    def __init__(self, recovery: Recovery) -> None:
        self.recovery = recovery

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        spans = self.recovery.spans
        names = max((len(span.name) for span in spans), default=0)
        texts = max((len(with_reference(span)) for span in spans), default=0)
        width = options.max_width - names - texts - 4
        if width < _BAR_WIDTH_MIN:
            table = DataTable(
                Column("", is_heading=True), Column("", is_number=True, is_heading=True)
            )
            for span in spans:
                table.add_row(span.name, with_reference(span))
            yield table
            return
        end_s = max((span.end_s for span in spans), default=0.0) - self.recovery.injected_s
        total = min(end_s, _SCALE * self.recovery.seconds)
        for span in spans:
            first = (
                int(width * (span.start_s - self.recovery.injected_s) / total) if total > 0 else 0
            )
            first = min(max(first, 0), width - 1)
            length = max(round(width * span.seconds / total), 1) if span.seconds > 0 else 0
            bar = ("#" if options.ascii_only else "█") * min(length, width - first)
            if length > width - first:
                bar = bar[:-1] + (">" if options.ascii_only else "→")
            line = f"{span.name:<{names}}  {' ' * first}{bar}"
            yield Text(f"{line:<{names + width + 2}}  {with_reference(span):>{texts}}")


def _probabilities(estimates: Estimates) -> list[RenderableType]:
    """Return a line for each repeated experiment and one for all; empty for a single run."""
    if estimates.total.runs < 2:
        return []
    several = len(estimates.experiments) > 1
    lines: list[RenderableType] = [Text(), Text("recovery probability", "bold")]
    for estimate in [*estimates.repeated, *([estimates.total] if several else [])]:
        names = [estimate.name, *([", ".join(estimate.faults)] if estimate.faults else [])]
        lines.append(_indented(Text(printable("\n".join(names))), 2))
        lines.append(_indented(Text(recovery_sentence(estimate), "dim"), 4))
    return lines


def _totals(outcomes: Sequence[Outcome]) -> Text:
    """Return the worst verdict and the number of outcomes of each."""
    worst = Verdict.worst([outcome.result for outcome in outcomes])
    return Text.assemble(
        (worst.upper(), VERDICT_STYLES[worst]), f"  {verdict_counts_text(outcomes)}"
    )
