"""What the terminal says about outcomes, and the wording that every report shares."""

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

_SCALE = 1.25  # of the time to the first good step

_RULES_SHOWN = 8
_BAR_WIDTH_MIN = 4

VERDICT_STYLES = {
    Verdict.PASSED: "bold green",
    Verdict.FAILED: "bold red",
    Verdict.UNKNOWN: "bold yellow",
    Verdict.ERROR: "bold magenta",
}


def number(value: float) -> str:
    """Three significant digits, never an exponent."""
    if not math.isfinite(value):
        return str(value)
    digits = 2 - math.floor(math.log10(abs(value))) if value else 0
    text = f"{value:.{min(max(digits, 0), 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def duration(seconds: float | None, absent: str = "–") -> str:
    """A duration in ms below one second and in s above; ``absent`` where there is none."""
    if seconds is None:
        return absent
    return f"{number(seconds * 1e3)} ms" if abs(seconds) < 0.9995 else f"{number(seconds)} s"


def long_duration(seconds: float) -> str:
    """A duration of seconds, minutes or hours: ``45 s``, ``3 minutes``, ``1 hour 5 minutes``."""
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    parts = [(hours, "hour"), (minutes, "minute")]
    return " ".join(plural(count, unit) for count, unit in parts if count)


def with_reference(span: PhaseSpan) -> str:
    """Return the durations of a phase and of its reference: ``3.1 ms (reference 0.3)``.

    The reference has a unit where it differs from that of the phase.
    """
    shown, reference = duration(span.seconds), duration(span.reference_s)
    value, _, unit = reference.partition(" ")
    return f"{shown} (reference {value if shown.endswith(f' {unit}') else reference})"


#: What a reference is, beside the bars of a recovery.
REFERENCE = "reference: the plain operation alone, for scale; a phase may take less"


def spans_to_first_step(recovery: Recovery) -> list[PhaseSpan]:
    """The phases that end no later than the first good step, which is where ``recovery.seconds`` ends."""
    limit = recovery.injected_s + recovery.seconds + 1e-9
    return [span for span in recovery.spans if span.end_s <= limit]


def slowest(outcome: Outcome) -> Recovery | None:
    """The recovery that headlines and properties quote, where a run has several."""
    return max(outcome.recoveries, key=lambda recovery: recovery.seconds, default=None)


def slowest_full_strength(outcome: Outcome) -> float | None:
    """The longest way back to the full world; None where one never got there or nothing broke."""
    times = [recovery.full_strength_seconds for recovery in outcome.recoveries]
    known = [seconds for seconds in times if seconds is not None]
    return max(known) if known and len(known) == len(times) else None


def absent_strength(outcome: Outcome) -> str:
    """What stands in place of that time: nothing where nobody knows how large the world was."""
    return "never" if any(recovery.world for recovery in outcome.recoveries) else "–"


def confirmed(outcome: Outcome) -> str:
    """How many of the planned faults are proved to have taken effect: ``2/3``."""
    if not outcome.faults:
        return "–"
    return f"{sum(fault.state == 'confirmed' for fault in outcome.faults)}/{len(outcome.faults)}"


class LossMatch(NamedTuple):
    """The losses of a run beside those of its twin, step by step. ``first`` is the first step that differs."""

    equal: int
    compared: int
    first: StepPoint | None
    first_twin: float | None

    @property
    def exact(self) -> bool:
        return 0 < self.compared == self.equal


def twin_loss(outcome: Outcome, step: int) -> float | None:
    """The twin's loss of ``step``; None where it skipped that step or never came to it."""
    losses = outcome.twin_losses or []
    return losses[step] if 0 <= step < len(losses) else None


def match_losses(outcome: Outcome) -> LossMatch | None:
    """Compare every committed step that the twin has too, bit for bit; None without a twin."""
    if outcome.twin_losses is None:
        return None
    shared = [point for point in outcome.steps if 0 <= point.step < len(outcome.twin_losses)]
    # repr tells every bit pattern of a double apart but those of NaN, and -0.0 from 0.0
    differing = [
        point for point in shared if repr(point.loss) != repr(twin_loss(outcome, point.step))
    ]
    first = differing[0] if differing else None
    first_twin = twin_loss(outcome, first.step) if first else None
    return LossMatch(len(shared) - len(differing), len(shared), first, first_twin)


def loss_sentence(outcome: Outcome) -> str:
    """In words, how the losses compare with the twin's."""
    match = match_losses(outcome)
    if match is None:
        return "no twin to compare with" if outcome.ledger else "no losses to compare"
    if match.compared == 0:
        return "no step in common with the twin"
    counted = f"{match.equal} of {match.compared} losses bit-equal to the twin"
    if match.first is None:
        return counted
    loss, twin = match.first.loss, match.first_twin
    if loss is None or twin is None:
        here, there = ("skipped" if value is None else repr(value) for value in (loss, twin))
        return f"{counted}; first difference at step {match.first.step}: {here} here, {there} in the twin"
    return f"{counted}; first difference at step {match.first.step}: {loss!r} − {twin!r} = {loss - twin:.3g}"


def short_match(outcome: Outcome) -> str:
    """The loss comparison for a table cell: ``60/60``."""
    match = match_losses(outcome)
    if match is None:
        return "no twin"
    return f"{match.equal}/{match.compared}" if match.compared else "–"


def percentage(probability: float) -> str:
    """Four digits, so that 9999 recoveries out of 10,000 do not read as certainty: ``99.99 %``."""
    return f"{probability * 100:.4g} %"


def recovery_sentence(estimate: Estimate) -> str:
    """``recovered in 19 of 20 runs: 95 %, 95 % interval 76.39 % to 99.11 %; first good step p50 …; 1 unknown``."""
    told = f"recovered in {estimate.recovered} of {plural(estimate.tried, 'run')}"
    if estimate.probability is not None:
        told += f": {percentage(estimate.probability)}, 95 % interval {interval_words(estimate)}"
    if estimate.recoveries:
        told += f"; first good step p50 {duration(estimate.p50_s)}"
        told += f", p95 {duration(estimate.p95_s)}" if estimate.p95_s is not None else ""
        told += f", worst of {estimate.recoveries} {duration(estimate.max_s)}"
    return "; ".join(
        [told, *([f"{estimate.failed} failed"] if estimate.failed else []), *beside(estimate)]
    )


def interval_words(estimate: Estimate) -> str:
    """``76.39 % to 99.11 %``."""
    return f"{percentage(estimate.low)} to {percentage(estimate.high)}"


def beside(estimate: Estimate) -> list[str]:
    """The runs that count neither for nor against, by reason: ``2 unknown``."""
    counts = {
        "unknown": estimate.unknown,
        "error": estimate.errors,
        "judged by their tests alone": estimate.unclaimed,
    }
    return [f"{count} {reason}" for reason, count in counts.items() if count]


def share(value: float) -> str:
    """Three digits: ``57.1 %``."""
    return f"{number(100 * value)} %"


def account_sentence(account: TimeAccount | Recently) -> str:
    """The ratios, each with its convention."""
    return (
        f"goodput {share(account.goodput)}, ETTR {share(account.ettr_wall)} per wall-clock hour, "
        f"{share(account.ettr_productive)} per productive hour"
    )


def copies_sentence(copies: CopyInterval) -> str:
    """Say what copies in memory leave at risk: ``at most 17 steps (2.55 s) are computed again if ...``."""
    seconds = f" ({duration(copies.seconds)})" if copies.seconds else ""
    again = "is" if copies.steps == 1 else "are"
    return f"at most {plural(copies.steps, 'step')}{seconds} {again} computed again if all ranks end during one update"


def limits_sentence(limits_ms: Mapping[str, int], suspects: int) -> str:
    """How long phases may last, and on how many ranks one did longer: ``forward 620 ms; 1 rank ended on suspicion``."""
    limits = ", ".join(
        f"{phase} {duration(limit_ms / 1000)}" for phase, limit_ms in limits_ms.items()
    )
    return f"{limits}; {plural(suspects, 'rank')} ended on suspicion" if suspects else limits


def count_verdicts(outcomes: Iterable[Outcome]) -> dict[Verdict, int]:
    """How many outcomes have each verdict, zeros included."""
    verdicts = [outcome.result for outcome in outcomes]
    return {verdict: verdicts.count(verdict) for verdict in Verdict}


def render_summary(outcomes: Sequence[Outcome]) -> RenderableType:
    """A table of experiments, the reasons of those that did not pass, and every recovery as text bars."""
    if not outcomes:
        return Text("No experiment was run.")
    parts: list[RenderableType] = [_overview(outcomes)]
    for outcome in outcomes:
        parts += _details(outcome)
    return Group(*parts, *_probabilities(estimate_recovery(outcomes)), Text(), _totals(outcomes))


def _overview(outcomes: Sequence[Outcome]) -> DataTable:
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
    """The outcomes of each pytest session, in the order in which the sessions began."""
    sessions: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        sessions.setdefault(outcome.session, []).append(outcome)
    return sessions


def session_line(session: str, outcomes: Sequence[Outcome]) -> str:
    """``session 20261125-210211-4127: 3 experiments: 2 passed, 1 failed``."""
    name = f"session {printable(session)}" if session else "outside of pytest"
    return f"{name}: {counted(outcomes)}"


def counted(outcomes: Sequence[Outcome]) -> str:
    """``3 experiments: 2 passed, 1 failed``."""
    counts = ", ".join(
        f"{count} {verdict}" for verdict, count in count_verdicts(outcomes).items() if count
    )
    return f"{plural(len(outcomes), 'experiment')}: {counts}"


def _add_rows(table: DataTable, outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        recovery = slowest(outcome)
        table.add_row(
            Text(outcome.result.upper(), VERDICT_STYLES[outcome.result]),
            Text.assemble(printable(outcome.name), *_secondary(outcome)),
            confirmed(outcome),
            duration(recovery.seconds if recovery else None),
            duration(slowest_full_strength(outcome), absent_strength(outcome)),
            str(outcome.lost_steps),
            short_match(outcome),
        )


def _secondary(outcome: Outcome) -> list[tuple[str, str]]:
    lines = [f"{shorten_command(outcome.job)} on {nodes(outcome)}", *fault_lines(outcome)]
    return [(f"\n{printable(line)}", "dim") for line in lines]


def fault_lines(outcome: Outcome, limit: int = 4) -> list[str]:
    """The planned faults, the last line counting those beyond ``limit``."""
    lines = [fault.fault for fault in outcome.faults]
    return (
        lines
        if len(lines) <= limit
        else [*lines[: limit - 1], f"and {len(lines) - limit + 1} more"]
    )


def nodes(outcome: Outcome) -> str:
    """``4 nodes`` or ``4 nodes + 1 spare``."""
    text = plural(outcome.nodes, "node")
    return f"{text} + {plural(outcome.spares, 'spare')}" if outcome.spares else text


def _details(outcome: Outcome) -> list[RenderableType]:
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
        told = limits_sentence(outcome.hang_limits_ms, outcome.suspects)
        blocks.append(_indented(Text(f"hang limits: {told}", "dim"), 2))
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
    return Padding(block, (0, 0, 0, columns), expand=False)


def _recovery_title(recovery: Recovery) -> Text:
    full = (
        f", full strength {duration(recovery.full_strength_seconds, 'never')}"
        if recovery.world
        else ""
    )
    after = (
        f"generation {recovery.generation}, {plural(recovery.world, 'rank')}"
        if recovery.world
        else ""
    )
    return Text.assemble(
        printable(recovery.cause),
        "" if recovery.fault else ", nothing was injected: a false alarm",
        (f" ({after})" if after else "", "dim"),
        f"\nfirst good step {duration(recovery.seconds)}{full}",
        (f" (a step before the fault: {duration(recovery.step_seconds)})", "dim"),
    )


class _Bars:
    """The phases of one recovery, one a line, each bar where the phase lies in time.

    The scale is that of the way to the first good step: what takes much longer is cut off and ends in an arrow.
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
    """A line an experiment that was repeated, and one for all; nothing where a single run can say little."""
    if estimates.total.runs < 2:
        return []
    several = len(estimates.experiments) > 1
    lines: list[RenderableType] = [Text(), Text("recovery probability", "bold")]
    for one in [*estimates.repeated, *([estimates.total] if several else [])]:
        what = [one.name, *([", ".join(one.faults)] if one.faults else [])]
        lines.append(_indented(Text(printable("\n".join(what))), 2))
        lines.append(_indented(Text(recovery_sentence(one), "dim"), 4))
    return lines


def _totals(outcomes: Sequence[Outcome]) -> Text:
    worst = Verdict.worst([outcome.result for outcome in outcomes])
    return Text.assemble((worst.upper(), VERDICT_STYLES[worst]), f"  {counted(outcomes)}")
