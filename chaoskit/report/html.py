"""Report as one self-contained HTML page: faults, their cost, and comparisons with unbroken twins.

-> report/svg.py: the drawing. report/summary.py: the wording. report/words.py: the explanations.
-> nightly/rendering.py: the page about a night.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from chaoskit.plaintext import plural, shorten_command
from chaoskit.report import summary, svg, times, words
from chaoskit.report.statistics import Estimates, estimate_recovery
from chaoskit.report.store import encode_outcome
from chaoskit.report.svg import AxisScale
from chaoskit.runlog.account.time_account import TimeAccount
from chaoskit.runlog.outcome import FaultRecord, Outcome, Recovery, StepPoint
from chaoskit.vocabulary import Verdict

EVIDENCE_LEVELS = ("armed", "effective", "impactful")
VERDICT_MARKS = {Verdict.PASSED: "✓", Verdict.FAILED: "✕", Verdict.UNKNOWN: "?", Verdict.ERROR: "!"}

_LOSS_HEIGHT, _TIME_HEIGHT, _WORLD_HEIGHT, _AXIS = 200, 48, 48, 30
_AXIS_PX = 44  # the room for values beside the curves; wider values take more


def write_html(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write a page about ``outcomes`` to a file, whose directory is created if necessary.

    The page contains its styles, pictures and data, and loads nothing.

    Raises:
        OSError: if the file cannot be written.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(duration=summary.duration, number=summary.number, plural=plural)
    environment.filters.update(share=summary.share, shorten_command=shorten_command)
    environment.filters.update(
        percentage=summary.percentage,
        interval_words=summary.interval_words,
        uncounted_texts=summary.uncounted_texts,
    )
    shared = _shared_environment(outcomes)
    page = environment.get_template("page.html.j2").render(
        verdict=Verdict.worst([outcome.result for outcome in outcomes]),
        counts=summary.count_verdicts(outcomes),
        environment=shared,
        estimates=_estimates(estimate_recovery(outcomes)),
        sections=[
            _section(outcome, shared, path.parent, alone=len(outcomes) == 1) for outcome in outcomes
        ],
        marks=VERDICT_MARKS,
        palette=svg.PALETTE,
        levels=EVIDENCE_LEVELS,
        words=words,
        phase_colour=svg.phase_colour,
        with_reference=summary.with_reference,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def _shared_environment(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the facts about the environment that are equal in all outcomes that have any.

    The result is empty if no outcome has facts.
    """
    first, *others = [outcome.environment for outcome in outcomes if outcome.environment] or [{}]
    return {
        key: setting
        for key, setting in first.items()
        if all(other.get(key) == setting for other in others)
    }


def _estimates(estimates: Estimates) -> list[dict[str, Any]]:
    """Return the rows about recovery probability: all runs, then each repeated experiment.

    A row has the estimate and its picture. A single repeated experiment has no row for all runs.
    """
    rows = [estimates.total, *estimates.repeated] if estimates.total.runs else []
    if len(estimates.experiments) == 1 and estimates.repeated:
        rows = estimates.repeated
    return [{"estimate": estimate, "picture": svg.interval(estimate)} for estimate in rows]


def _section(
    outcome: Outcome, shared: dict[str, Any], page_directory: Path, *, alone: bool
) -> dict[str, Any]:
    """Return the variables of the page's template for one experiment.

    Args:
        shared: the facts about the environment that all experiments have.
        page_directory: the directory of the page, for relative links.
        alone: True if the page has no other experiment, so that this one is unfolded.
    """
    recovery = summary.slowest_recovery(outcome)
    scale = svg.recovery_scale(outcome.recoveries)
    return {
        "outcome": outcome,
        "open": alone or outcome.result is not Verdict.PASSED,
        "recovery_s": recovery.seconds if recovery else None,
        "full_strength_s": summary.slowest_full_strength(outcome),
        "fault_lines": summary.fault_lines(outcome),
        "confirmed": summary.confirmed_share(outcome),
        "losses": summary.short_match(outcome),
        "loss_sentence": summary.loss_sentence(outcome),
        "exact": (match := summary.match_losses(outcome)) is not None and match.exact,
        "facts": _facts(outcome, shared),
        "recoveries": [
            (recovery, svg.timeline(recovery, scale), _reference_ratio(recovery))
            for recovery in outcome.recoveries
        ],
        "curves": _curves(outcome) if outcome.steps else [],
        "axis_px": _axis_px(outcome),
        "shown": _legend_marks(outcome),
        "faults": [(fault, _trigger(fault), _evidence_by_level(fault)) for fault in outcome.faults],
        "accounts": [
            (name, getattr(outcome.ledger, name)) for name in ("missing", "repeated", "skipped")
        ]
        if outcome.ledger
        else [],
        "times": _time_section(outcome.account) if outcome.account else None,
        "absent_strength": summary.absent_strength(outcome),
        "journals": _journal_link(outcome.directory, page_directory),
        "island": _embedded_json(outcome),
    }


def _time_section(account: TimeAccount) -> dict[str, Any]:
    """Return the parts of the time with their shares, and the lost time by cause."""
    return {
        "parts": [
            (name, seconds, seconds / account.wall_s)
            for name, seconds in account.parts()
            if seconds
        ],
        "ratios": times.ratios(account),
        "lost": sorted(account.lost_s.items(), key=lambda cause_seconds: -cause_seconds[1]),
        "sentences": [
            sentence
            for sentence in (times.failures_sentence(account), times.degraded_sentence(account))
            if sentence
        ],
    }


def _facts(outcome: Outcome, shared: dict[str, Any]) -> dict[str, Any]:
    """Return the facts that are listed about a run. Facts that all runs share are left out."""
    digest, twin = outcome.weights_digest, outcome.twin_weights_digest
    facts = {
        "job": outcome.job,
        "stack": outcome.stack,
        "substrate": outcome.substrate,
        "size": summary.nodes_text(outcome),
        "reduction": outcome.reduction,
        "seed": outcome.seed,
        "started": outcome.started,
        "session": outcome.session,
        "took": summary.duration(outcome.wall_s),
        "false alarms": outcome.false_alarms,
        "copies in memory": summary.copies_sentence(outcome.copies)
        if outcome.copies is not None
        else "",
        "hang limits": summary.limits_sentence(outcome.hang_limits_ms, outcome.suspects),
        "refused connections": outcome.refused_connections or None,
    }
    facts |= {f"not checked: {name}": reason for name, reason in outcome.not_applied.items()}
    facts = {name: fact for name, fact in facts.items() if fact not in ("", None)}
    if digest:
        relation = "" if not twin else " = twin" if digest == twin else f" ≠ twin {twin[:12]}"
        facts["weights"] = f"{digest[:12]}{relation}"
    facts |= {field: setting for field, setting in outcome.settings.items() if field not in facts}
    return facts | {
        key: setting for key, setting in outcome.environment.items() if key not in shared
    }


def _reference_ratio(recovery: Recovery) -> str:
    """Return a text such as ``2.1 × the reference of 30 ms`` about the time to the first good step.

    The reference is the sum of the references of the phases up to that step.
    """
    reference = sum(span.reference_s for span in summary.spans_to_first_step(recovery))
    if reference <= 0:
        return "no reference known"
    return f"{summary.number(recovery.seconds / reference)} × the reference of {summary.duration(reference)}"


def _trigger(fault: FaultRecord) -> str:
    """Return the rank and the moment of a fault in words; "–" if neither is known."""
    if fault.moment:
        return fault.moment if fault.rank is None else f"rank {fault.rank}, {fault.moment}"
    parts = [
        None if fault.rank is None else f"rank {fault.rank}",
        None if fault.step is None else f"step {fault.step}",
        None if fault.phase is None else f"in {fault.phase}",
    ]
    return ", ".join(part for part in parts if part) or "–"


def _evidence_by_level(fault: FaultRecord) -> dict[str, list[tuple[str, str]]]:
    """Return the observations by level, each with its time after the injection if that is known."""
    observed: dict[str, list[tuple[str, str]]] = {level: [] for level in EVIDENCE_LEVELS}
    for evidence in fault.evidence:
        time_text = "" if fault.injected_s is None else _offset(evidence.at_s - fault.injected_s)
        observed.setdefault(evidence.level, []).append((time_text, evidence.observed))
    return observed


def _offset(seconds: float) -> str:
    """Return a time relative to the injection, with its sign."""
    return f"{'−' if seconds < 0 else '+'}{summary.duration(abs(seconds))}"


def _journal_link(directory: str, page_directory: Path) -> str | None:
    """Return a relative link from the page to the directory of a run; None if it has none.

    The directory need not exist any more.
    """
    if not directory:
        return None
    return "./" + quote(os.path.relpath(directory, page_directory)) + "/"


def _embedded_json(outcome: Outcome) -> Markup:
    """Return the outcome as JSON that can be embedded in a script element."""
    text = encode_outcome(outcome).decode()
    return Markup(text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e"))


def _legend_marks(outcome: Outcome) -> dict[str, bool]:
    """Return for each mark of the curves True if it is drawn and the legend must explain it."""
    losses = [point.loss for point in outcome.steps]
    return {
        "generations": len({point.generation for point in outcome.steps}) > 1,
        "skipped": outcome.ledger is not None and None in losses,
        "difference": (match := summary.match_losses(outcome)) is not None
        and match.first is not None,
        "nonfinite": any(loss is not None and not math.isfinite(loss) for loss in losses),
    }


class _Curve(NamedTuple):
    """A picture over the training steps, with its name."""

    name: str
    picture: Markup


def _curves(outcome: Outcome) -> list[_Curve]:
    """Return the curves of loss, step time and world size, over a common axis of steps."""
    last = max(outcome.steps[-1].step, len(outcome.twin_losses or ()) - 1)
    steps = AxisScale.linear(outcome.steps[0].step, last)
    worlds = " → ".join(str(world) for world, _ in groupby(point.world for point in outcome.steps))
    loss_words = f"Loss by step over the unbroken twin: {summary.loss_sentence(outcome)}"
    world_words = f"World size by step: {shorten(worlds, 200, placeholder=' …')}"
    curves = []
    if outcome.ledger is not None or any(point.loss is not None for point in outcome.steps):
        curves.append(_curve("loss", _LOSS_HEIGHT, loss_words, _loss_plot(outcome, steps)))
    times, time_words = _step_time_plot(outcome, steps), "Seconds between commits, by step"
    if not any(point.world for point in outcome.steps):
        return [
            *curves,
            _curve(
                "seconds", _TIME_HEIGHT, time_words, times + _step_axis(steps, _TIME_HEIGHT), _AXIS
            ),
        ]
    return [
        *curves,
        _curve("seconds between commits", _TIME_HEIGHT, time_words, times),
        _curve("world size", _WORLD_HEIGHT, world_words, _world_plot(outcome, steps), _AXIS),
    ]


def _curve(name: str, height: int, words: str, content: Markup, axis: int = 0) -> _Curve:
    """Return a curve as an SVG element with its name.

    Args:
        words: the description of the curve for screen readers.
        axis: the room below the curve for its axis, in pixels.
    """
    attributes = {
        "width": "100%",
        "height": height + axis,
        "overflow": "visible",
        "role": "img",
        "aria_label": words,
    }
    return _Curve(name, svg.tag("svg", content, **attributes))


def _recovery_windows(
    outcome: Outcome, steps: AxisScale, height: float, *, numbered: bool = False
) -> Markup:
    """Return a shaded window for each recovery.

    It reaches from the last step committed before the injection to the first good step.

    Args:
        numbered: add the numbers of the windows above the plot.
    """
    parts: list[Markup] = []
    captions: list[svg.Caption] = []
    for index, recovery in enumerate(outcome.recoveries, 1):
        good_s = recovery.injected_s + recovery.seconds
        before = [point.step for point in outcome.steps if point.at_s <= recovery.injected_s]
        after = next(
            (point.step for point in outcome.steps if point.at_s >= good_s - 1e-9),
            outcome.steps[-1].step,
        )
        start, stop = steps(before[-1] if before else outcome.steps[0].step), steps(after)
        middle, half = (start + stop) / 2, max((stop - start) / 2, 0.2)
        title = svg.tag("title", f"{index}. {recovery.cause}: {summary.duration(recovery.seconds)}")
        parts.append(
            svg.bar(
                middle - half,
                middle + half,
                0,
                height,
                svg.colour("window"),
                title,
                class_="window",
            )
        )
        captions.append(svg.Caption(str(index), middle))
    return Markup("").join([*parts, *(_window_numbers(captions) if numbered else [])])


def _window_numbers(captions: Sequence[svg.Caption]) -> list[Markup]:
    """Return the numbers of the windows that do not overlap, for a wide and for a narrow plot."""
    wide = svg.clear_captions(captions, svg.WIDE)
    narrow = set(svg.clear_captions(wide, svg.NARROW))
    style: dict[str, object] = {"text_anchor": "middle", "font_weight": 600}
    return [
        svg.label(
            number.text,
            number.x,
            -5,
            shade="alert",
            class_=None if number in narrow else "wide",
            **style,
        )
        for number in wide
    ]


def _loss_plot(outcome: Outcome, steps: AxisScale) -> Markup:
    """Return the plot of the losses of the run and its twin."""
    run = [(point.step, point.loss) for point in outcome.steps]
    # a step that both lack is left out of the log, and is no gap
    twin = [
        step_and_loss
        for step_and_loss in enumerate(outcome.twin_losses or ())
        if step_and_loss[1] is not None or outcome.ledger is not None
    ]
    low, high = _loss_limits(outcome)
    losses = AxisScale.linear(low, high, _LOSS_HEIGHT, 0)
    return Markup("").join(
        [
            _recovery_windows(outcome, steps, _LOSS_HEIGHT, numbered=True),
            svg.horizontal_grid(svg.nice_ticks(low, high), losses),
            svg.polyline(_segments(twin, steps, losses), _LOSS_HEIGHT, "twin", 6),
            svg.polyline(_segments(run, steps, losses), _LOSS_HEIGHT, "run", 1.5),
            _generation_rings(outcome, steps, losses),
            _undrawable_losses(outcome.steps, steps) if outcome.ledger is not None else Markup(""),
            _first_difference(outcome, steps),
        ]
    )


def _loss_limits(outcome: Outcome) -> tuple[float, float]:
    """Return the lowest and the highest finite loss of the run and its twin, with a margin."""
    losses = [point.loss for point in outcome.steps] + list(outcome.twin_losses or ())
    finite = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 0.5
    return low - margin, high + margin


def _time_limit(outcome: Outcome) -> float:
    """Return the upper end of the axis of seconds between commits, 5 % above the longest."""
    return (
        max((point.seconds for point in outcome.steps if math.isfinite(point.seconds)), default=0.0)
        or 1.0
    ) * 1.05


def _axis_px(outcome: Outcome) -> int:
    """Return the room for the widest value beside the curves, in pixels."""
    ticks = [*svg.nice_ticks(*_loss_limits(outcome)), *svg.nice_ticks(0, _time_limit(outcome), 3)]
    return max(_AXIS_PX, svg.value_room(ticks))


def _segments(
    points: Sequence[tuple[int, float | None]], across: AxisScale, down: AxisScale
) -> list[Sequence[tuple[float, float]]]:
    """Return stretches of finite values as positions, thinned to the resolution of a screen."""
    segments: list[Sequence[tuple[float, float]]] = []
    for drawn, stretch in groupby(
        points, lambda point: point[1] is not None and math.isfinite(point[1])
    ):
        if drawn:
            positions = [
                (across(step), down(height)) for step, height in stretch if height is not None
            ]
            segments.append(svg.downsample(positions, max(1500 * len(positions) // len(points), 4)))
    return segments


def _generation_rings(outcome: Outcome, steps: AxisScale, losses: AxisScale) -> Markup:
    """Return a ring at the first step of every generation but the first."""
    parts: list[Markup] = []
    for before, point in pairwise(outcome.steps):
        if (
            point.generation != before.generation
            and point.loss is not None
            and math.isfinite(point.loss)
        ):
            title = svg.tag(
                "title", f"step {point.step}: generation {point.generation}, world {point.world}"
            )
            ring = {
                "fill": svg.colour("surface"),
                "stroke": svg.colour("run"),
                "stroke_width": 1.5,
                "class_": "generation",
            }
            parts.append(
                svg.tag(
                    "circle",
                    title,
                    cx=svg.percent(steps(point.step)),
                    cy=losses(point.loss),
                    r=3.5,
                    **ring,
                )
            )
    return Markup("").join(parts)


def _undrawable_losses(points: Sequence[StepPoint], steps: AxisScale) -> Markup:
    """Return marks for losses that cannot be drawn.

    Skipped batches are marked at the foot of the plot, non-finite losses at its head. Marks at the
    same visible place are drawn once.
    """
    marks: dict[tuple[str, float], Markup] = {}
    for point in points:
        if point.loss is not None and math.isfinite(point.loss):
            continue
        words = "batch skipped" if point.loss is None else f"loss {point.loss}"
        sign, y = ("◆", _LOSS_HEIGHT - 2) if point.loss is None else ("▲", 10)
        left = steps(point.step)
        title = svg.tag("title", f"step {point.step}: {words}")
        kind = "skipped" if point.loss is None else "nonfinite"
        marks[kind, round(left, 1)] = svg.label(
            sign, left, y, title, shade="alert", text_anchor="middle", class_=kind
        )
    return Markup("").join(marks.values())


def _first_difference(outcome: Outcome, steps: AxisScale) -> Markup:
    """Return a line at the first step whose loss differs from the twin's, if there is any."""
    match = summary.match_losses(outcome)
    if match is None or match.first is None:
        return Markup("")
    title = svg.tag(
        "title", f"step {match.first.step}: the first loss that differs from the twin's"
    )
    line = {"stroke_dasharray": "4 3", "stroke_width": 1.5, "class_": "difference"}
    return svg.vertical(steps(match.first.step), 0, _LOSS_HEIGHT, "alert", title, **line)


def _step_time_plot(outcome: Outcome, steps: AxisScale) -> Markup:
    """Return the plot of the seconds between commits."""
    points = [(point.step, point.seconds) for point in outcome.steps]
    high = _time_limit(outcome)
    times = AxisScale.linear(0, high, _TIME_HEIGHT, 0)
    line = svg.polyline(_segments(points, steps, times), _TIME_HEIGHT, "muted", 1.25)
    return (
        _recovery_windows(outcome, steps, _TIME_HEIGHT)
        + svg.horizontal_grid(svg.nice_ticks(0, high, 3), times)
        + line
    )


def _world_plot(outcome: Outcome, steps: AxisScale) -> Markup:
    """Return the plot of the world size as a step function."""
    top = max(point.world for point in outcome.steps)
    worlds = AxisScale.linear(0, top * 1.15, _WORLD_HEIGHT, 0)
    corners: list[tuple[float, float]] = []
    for world, stretch in groupby(outcome.steps, lambda point: point.world):
        first = next(stretch).step
        corners += [(steps(first), corners[-1][1])] if corners else []
        corners.append((steps(first), worlds(world)))
    corners.append((steps(outcome.steps[-1].step), corners[-1][1]))
    ticks = [tick for tick in svg.nice_ticks(0, top, 2) if tick == int(tick)]
    line = svg.polyline([corners], _WORLD_HEIGHT, "run", 1.5)
    windows = _recovery_windows(outcome, steps, _WORLD_HEIGHT)
    return Markup("").join(
        [windows, svg.horizontal_grid(ticks, worlds), line, _step_axis(steps, _WORLD_HEIGHT)]
    )


def _step_axis(steps: AxisScale, height: float) -> Markup:
    """Return the axis of training steps below the last curve."""
    low, high = steps.knots[0][0], steps.knots[-1][0]
    axis = svg.for_both_widths(lambda width: svg.step_axis(low, high, steps, height, width))
    return axis + svg.label("training step", 50, height + 29, text_anchor="middle")
