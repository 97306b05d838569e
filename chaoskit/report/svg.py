"""Pictures in SVG: axes, bars, lines, and the timeline of a recovery.

Horizontal positions are percentages of the plot, so that a picture fits any page while its text keeps its size;
vertical positions are pixels, downwards.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from textwrap import shorten
from typing import NamedTuple

from markupsafe import Markup, escape

from chaoskit.experiment.outcome import PhaseSpan, Recovery
from chaoskit.report.statistics import Estimate
from chaoskit.report.summary import duration, interval_words, number, percentage, spans_to_first_step, with_reference
from chaoskit.vocabulary import RECOVERY_PHASES

#: Colours by role: on a light and on a dark page.
PALETTE = {
    "ink": ("#1c2128", "#e3e7ec"),
    "muted": ("#5d6773", "#939daa"),
    "grid": ("#e6e9ed", "#262c34"),
    "axis": ("#b9c0c8", "#4a525d"),
    "surface": ("#ffffff", "#161a20"),
    "run": ("#1f5fbf", "#6ea8ff"),
    "twin": ("#c3d3ea", "#31486b"),
    "window": ("#f3d9d6", "#43262a"),
    "inside": ("#ffffff", "#0e1116"),
    "alert": ("#c0362c", "#f07f76"),
    **dict(
        zip(
            (f"phase-{index}" for index in range(len(RECOVERY_PHASES))),
            (
                ("#d2504b", "#e0635e"),
                ("#e08a3c", "#e39a55"),
                ("#c9a227", "#d4b44a"),
                ("#2f9e8f", "#3fb3a3"),
                ("#3578d4", "#5893e6"),
                ("#7463c6", "#9184de"),
                ("#8993a1", "#7b8594"),
            ),
            strict=True,
        )
    ),
}

_FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"
_VARIABLE = re.compile(r"var\(--[\w-]+,(#\w+)\)")


class Scale(NamedTuple):
    """Maps values to positions, linearly between knots of (value, position)."""

    knots: tuple[tuple[float, float], ...]

    @classmethod
    def linear(cls, low: float, high: float, start: float = 0.0, stop: float = 100.0) -> Scale:
        """One straight scale; an empty range is widened, so that a single value lies in the middle."""
        if high <= low:
            low, high = low - 0.5, low + 0.5
        return cls(((low, start), (high, stop)))

    def __call__(self, value: float) -> float:
        index = min(max(bisect_left(self.knots, (value, -math.inf)), 1), len(self.knots) - 1)
        (low, start), (high, stop) = self.knots[index - 1], self.knots[index]
        return start + (stop - start) * min(max((value - low) / (high - low), 0.0), 1.0)


def colour(name: str) -> str:
    """The page's colour of that role, with its light value where no page defines it."""
    return f"var(--{name},{PALETTE[name][0]})"


def phase_colour(phase: str) -> str:
    """The colour of one phase of :data:`chaoskit.vocabulary.RECOVERY_PHASES`."""
    return colour(f"phase-{RECOVERY_PHASES.index(phase)}") if phase in RECOVERY_PHASES else colour("muted")


def tag(name: str, *content: str, **attributes: object) -> Markup:
    """An SVG element. Plain text is escaped, markup is kept, an attribute that is None is left out."""
    fields = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    texts = (f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value for value in fields.values())
    start = "".join(f' {key}="{escape(text)}"' for key, text in zip(fields, texts, strict=True))
    return Markup(f"<{name}{start}>{''.join(map(escape, content))}</{name}>")


def percent(position: float) -> str:
    """A horizontal position as an SVG length."""
    return f"{position:.3f}".rstrip("0").rstrip(".") + "%"


def label(text: str, x: float, y: float, *content: str, shade: str = "muted", **attributes: object) -> Markup:
    """Text at ``x`` percent and ``y`` pixels."""
    return tag("text", text, *content, x=percent(x), y=y, fill=colour(shade), font_size=11, **attributes)


def bar(start: float, stop: float, y: float, height: float, fill: str, *content: str, **attributes: object) -> Markup:
    """A filled span between two percentages."""
    width = percent(max(stop - start, 0.0))
    return tag("rect", *content, x=percent(start), width=width, y=y, height=height, fill=fill, **attributes)


def vertical(x: float, top: float, bottom: float, shade: str = "grid", *content: str, **attributes: object) -> Markup:
    """A thin vertical line at ``x`` percent."""
    at = percent(x)
    return tag("line", *content, x1=at, x2=at, y1=top, y2=bottom, stroke=colour(shade), **attributes)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers in [low, high]."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step for factor in (1, 2, 5, 10) if (step := factor * power) >= rough * 0.999)
    return [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def horizontal_grid(ticks: Sequence[float], scale: Scale) -> Markup:
    """Grid lines across the plot, with their values to the left of it."""
    parts: list[Markup] = []
    for tick in ticks:
        y = scale(tick)
        parts.append(tag("line", x1=0, x2="100%", y1=y, y2=y, stroke=colour("grid")))
        parts.append(label(f"{tick:g}", 0, y + 4, dx=-8, text_anchor="end"))
    return Markup("").join(parts)


def downsample(points: Sequence[tuple[float, float]], limit: int = 1500) -> list[tuple[float, float]]:
    """At most about ``limit`` of ``points``, keeping the ends and each stretch's lowest and highest."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(2 * len(points) / limit)
    kept = {0, len(points) - 1}
    for start in range(0, len(points), size):
        stretch = range(start, min(start + size, len(points)))
        kept |= {min(stretch, key=lambda index: points[index][1]), max(stretch, key=lambda index: points[index][1])}
    return [points[index] for index in sorted(kept)]


def polyline(segments: Sequence[Sequence[tuple[float, float]]], height: float, shade: str, width: float) -> Markup:
    """Lines through (percent, pixel) points; a segment of one point is a dot."""
    paths = [
        "M" + "L".join(f"{x * 10:.1f},{y:.2f}" for x, y in (segment if len(segment) > 1 else [*segment, *segment]))
        for segment in segments
    ]
    style = {"fill": "none", "stroke": colour(shade), "stroke_width": width, "vector_effect": "non-scaling-stroke"}
    path = tag("path", d="".join(paths), stroke_linecap="round", stroke_linejoin="round", **style)
    # the inner picture is stretched to the plot's width; its lines keep their own
    view = f"0 0 1000 {height:g}"
    return tag("svg", path, viewBox=view, width="100%", height=height, preserveAspectRatio="none", overflow="visible")


def recovery_scale(recoveries: Sequence[Recovery]) -> Scale:
    """Time since injection, in seconds, for all recoveries of a run.

    Where redundancy or full strength come much later than the first good step, the axis changes scale between them.
    """
    knee = max((span.end_s - r.injected_s for r in recoveries for span in spans_to_first_step(r)), default=0.0)
    end = max((span.end_s - r.injected_s for r in recoveries for span in r.spans), default=0.0)
    if 0 < knee * 2.5 < end:
        return Scale(((0.0, 0.0), (knee, 60.0), (end, 100.0)))
    return Scale.linear(0.0, end or 1e-3)


def time_axis(scale: Scale, top: float, bottom: float, width: float) -> Markup:
    """Grid and labels in ms since injection for a plot of ``width`` pixels, marked where the axis changes scale."""
    room = 60 / width * 100
    parts: list[Markup] = []
    for index, ((low, start), (high, stop)) in enumerate(pairwise(scale.knots)):
        for tick in nice_ticks(low * 1e3, high * 1e3, max(int((stop - start) / room / 1.2), 1)):
            x = scale(tick / 1e3)
            if (index and x - start < room * 1.3) or (stop < 100 and stop - x < room * 1.3):
                continue  # would run into the mark of the change
            parts += [vertical(x, top, bottom), label(f"{tick:,g} ms", x, bottom + 14, text_anchor=_anchor(x))]
        if index:
            change = (high - low) / (stop - start) / (scale.knots[1][0] / scale.knots[1][1])
            parts.append(vertical(start, top, bottom + 4, "muted", stroke_dasharray="2 3"))
            parts.append(label(f"{number(change)}× coarser →", start, bottom + 14, text_anchor="middle"))
    return Markup("").join(parts)


def _anchor(x: float) -> str:
    return "start" if x < 1 else "end" if x > 97 else "middle"


def phase_bar(span: PhaseSpan, injected_s: float, scale: Scale, y: float, height: float) -> Markup:
    """A phase: full colour up to its reference, pale beyond, a tick at the reference itself."""
    begin = span.start_s - injected_s
    start, stop = scale(begin), scale(begin + span.seconds)
    reference = min(scale(begin + span.reference_s), stop)
    fill = phase_colour(span.name)
    title = tag("title", f"{span.name}: {with_reference(span)}. Reference: {span.reference}")
    parts = [
        bar(start, max(stop, start + 0.15), y, height, fill, title, fill_opacity=0.38),
        bar(start, reference, y, height, fill, title),
        vertical(reference, y - 3, y + height + 3, "ink", stroke_width=1.5),
    ]
    return tag("g", *parts)


def interval(estimate: Estimate) -> Markup:
    """A probability on a line from 0 to 1: pale where it may lie, a tick where it was measured."""
    if estimate.probability is None:
        return Markup("")
    words = f"{percentage(estimate.probability)}, 95 % interval {interval_words(estimate)}"
    low, high, at = (100 * share for share in (estimate.low, estimate.high, estimate.probability))
    return tag(
        "svg",
        tag("title", words),
        bar(0, 100, 6, 2, colour("grid")),
        bar(low, high, 3, 8, colour("run"), rx=2, fill_opacity=0.35),
        vertical(at, 0, 14, "run", stroke_width=2.5),
        width="100%",
        height=14,
        overflow="visible",
        role="img",
        aria_label=words,
    )


def timeline(recovery: Recovery, scale: Scale) -> Markup:
    """One recovery as one row of phase bars over its time axis; a bar that is wide enough bears its name."""
    bars = [phase_bar(span, recovery.injected_s, scale, 5, 20) for span in recovery.spans]
    names = [_name_inside(span, recovery.injected_s, scale) for span in recovery.spans]
    text = ", ".join(f"{span.name} {with_reference(span)}" for span in recovery.spans) or "no phase was recorded"
    attributes = {"width": "100%", "height": 48, "overflow": "visible", "role": "img"}
    return tag(
        "svg", time_axis(scale, 0, 30, 800), *bars, *names, aria_label=f"Recovery timeline: {text}", **attributes
    )


def _name_inside(span: PhaseSpan, injected_s: float, scale: Scale) -> Markup:
    begin = span.start_s - injected_s
    start = scale(begin)
    if scale(begin + min(span.reference_s, span.seconds)) - start < 1.2 * len(span.name):
        return Markup("")
    style = {"dx": 7, "font_weight": 600, "pointer_events": "none", "aria_hidden": "true"}
    return label(span.name, start, 19, shade="inside", **style)


def render_timeline_svg(recovery: Recovery) -> str:
    """One recovery as a picture of its own, for a light background: a row a phase, with durations and references."""
    scale = recovery_scale([recovery])
    rows = 26 * len(recovery.spans)
    full = duration(recovery.full_strength_seconds, "never")
    words = f"first good step {duration(recovery.seconds)}, full strength {full}"
    bars = (phase_bar(span, recovery.injected_s, scale, 7 + 26 * row, 12) for row, span in enumerate(recovery.spans))
    place = {"x": 156, "y": 52, "width": 410, "height": rows + 20, "overflow": "visible"}
    return picture(
        960,
        rows + 88,
        f"{recovery.cause}: {words}",
        tag("text", recovery.cause, x=20, y=32, font_size=15, font_weight=600, fill=colour("ink")),
        tag("text", words, x=940, y=32, font_size=13, text_anchor="end", fill=colour("muted")),
        tag("svg", time_axis(scale, 0, rows + 4, 410), *bars, **place),
        *_timeline_words(recovery.spans),
    )


def picture(width: int, height: int, title: str, *content: str) -> str:
    """A picture that stands alone, for a light background: a frame with ``content``, in pixels."""
    size = {"viewBox": f"0 0 {width} {height}", "width": width, "height": height, "font_family": _FONT}
    frame = {"width": width - 1, "height": height - 1, "fill": colour("surface"), "stroke": colour("axis")}
    drawn = tag(
        "svg",
        tag("title", title),
        tag("rect", x=0.5, y=0.5, rx=8, **frame),
        *content,
        xmlns="http://www.w3.org/2000/svg",
        role="img",
        **size,
    )
    return _VARIABLE.sub(r"\1", drawn)


def _timeline_words(spans: Sequence[PhaseSpan]) -> Iterator[Markup]:
    for row, span in enumerate(spans):
        y = 52 + 17 + 26 * row
        took, reference = with_reference(span).rstrip(")").split(" (")
        reason = shorten(f"{reference}: {span.reference}", 48, placeholder=" …")
        yield tag("text", span.name, x=144, y=y, font_size=12, text_anchor="end", fill=colour("ink"))
        yield tag("text", took, x=642, y=y, font_size=13, font_weight=600, text_anchor="end", fill=colour("ink"))
        yield tag("text", reason, x=654, y=y, font_size=11, fill=colour("muted"))
