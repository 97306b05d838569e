"""Drawing of SVG pictures: axes, bars, lines, and the timeline of a recovery.

Horizontal positions are percentages of the plot, so that a picture fits any page while its text
keeps its size. Vertical positions are pixels, downwards.

-> report/html.py and nightly/rendering.py: the pages with these pictures.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from textwrap import shorten
from typing import NamedTuple

from markupsafe import Markup, escape

from chaoskit.report.statistics import Estimate
from chaoskit.report.summary import (
    duration,
    interval_words,
    number,
    percentage,
    spans_to_first_step,
    with_reference,
)
from chaoskit.runlog.outcome import PhaseSpan, Recovery
from chaoskit.vocabulary import RECOVERY_PHASES

#: Colours by role, on a light and on a dark page.
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


#: Widths of a plot in pixels that labels are chosen for. Paper and pages from 640 pixels are wide.
WIDE, NARROW = 480, 260

_CHARACTER = 7.0  # pixels of a character of a label, in a wide font
_BOLD_CHARACTER = 7.7
_FRAME = 960  # pixels across a picture that stands alone
_GAP = 8.0  # pixels between two labels
_NAME_INSET = 7  # pixels from the edge of a bar to the name inside it


class AxisScale(NamedTuple):
    """A map from values to positions, linear between knots of (value, position).

    A value outside of the knots has the position of the nearest knot.
    """

    knots: tuple[tuple[float, float], ...]

    @classmethod
    def linear(cls, low: float, high: float, start: float = 0.0, stop: float = 100.0) -> AxisScale:
        """Return a linear scale.

        An empty range is widened, so that a single value lies in the middle.
        """
        if high <= low:
            low, high = low - 0.5, low + 0.5
        return cls(((low, start), (high, stop)))

    def __call__(self, value: float) -> float:
        index = min(max(bisect_left(self.knots, (value, -math.inf)), 1), len(self.knots) - 1)
        (low, start), (high, stop) = self.knots[index - 1], self.knots[index]
        return start + (stop - start) * min(max((value - low) / (high - low), 0.0), 1.0)


def colour(name: str) -> str:
    """Return the CSS colour of a role, with its light value as the fallback."""
    return f"var(--{name},{PALETTE[name][0]})"


def phase_colour(phase: str) -> str:
    """Return the CSS colour of a phase of :data:`chaoskit.vocabulary.RECOVERY_PHASES`.

    Other phases have the colour ``muted``.
    """
    return (
        colour(f"phase-{RECOVERY_PHASES.index(phase)}")
        if phase in RECOVERY_PHASES
        else colour("muted")
    )


def tag(name: str, *content: str, **attributes: object) -> Markup:
    """Return an SVG element.

    Plain text is escaped, markup is kept. The attribute ``font_size`` becomes ``font-size``, and
    ``class_`` becomes ``class``. Attributes that are None are left out.
    """
    fields = {
        key.rstrip("_").replace("_", "-"): setting
        for key, setting in attributes.items()
        if setting is not None
    }
    texts = (
        f"{setting:.2f}".rstrip("0").rstrip(".") if isinstance(setting, float) else setting
        for setting in fields.values()
    )
    start = "".join(f' {key}="{escape(text)}"' for key, text in zip(fields, texts, strict=True))
    return Markup(f"<{name}{start}>{''.join(map(escape, content))}</{name}>")


def percent(position: float) -> str:
    """Return a horizontal position as an SVG length, such as ``12.5%``."""
    return f"{position:.3f}".rstrip("0").rstrip(".") + "%"


def label(
    text: str, x: float, y: float, *content: str, shade: str = "muted", **attributes: object
) -> Markup:
    """Return a text element at ``x`` percent and ``y`` pixels.

    Args:
        content: further children of the element, such as its title.
        shade: the role of its colour in :data:`PALETTE`.
    """
    return tag(
        "text", text, *content, x=percent(x), y=y, fill=colour(shade), font_size=11, **attributes
    )


def bar(
    start: float,
    stop: float,
    y: float,
    height: float,
    fill: str,
    *content: str,
    **attributes: object,
) -> Markup:
    """Return a filled bar between two percentages."""
    width = percent(max(stop - start, 0.0))
    return tag(
        "rect", *content, x=percent(start), width=width, y=y, height=height, fill=fill, **attributes
    )


def vertical(
    x: float, top: float, bottom: float, shade: str = "grid", *content: str, **attributes: object
) -> Markup:
    """Return a thin vertical line at ``x`` percent."""
    at = percent(x)
    return tag(
        "line", *content, x1=at, x2=at, y1=top, y2=bottom, stroke=colour(shade), **attributes
    )


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about ``count`` evenly spaced round numbers in [low, high]; [low] if it is empty."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step for factor in (1, 2, 5, 10) if (step := factor * power) >= rough * 0.999)
    return [
        index * step
        for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]


class Caption(NamedTuple):
    """A text below or above a plot at ``x`` percent, which extends from its ``anchor``."""

    text: str
    x: float
    anchor: str = "middle"

    def extent(self, width: float) -> tuple[float, float]:
        """Return the first and the last pixel of the text on a plot of ``width`` pixels."""
        length, at = len(self.text) * _CHARACTER, self.x / 100 * width
        start = at - {"start": 0.0, "middle": length / 2, "end": length}[self.anchor]
        return start, start + length

    def is_clear_of(self, other: Caption, width: float) -> bool:
        """Return True if there is a gap between both texts on a plot of ``width`` pixels."""
        (start, stop), (other_start, other_stop) = self.extent(width), other.extent(width)
        return stop + _GAP <= other_start or other_stop + _GAP <= start


def clear_captions(
    captions: Sequence[Caption], width: float, taken: Sequence[Caption] = ()
) -> list[Caption]:
    """Return the captions that overlap neither ``taken`` nor an earlier caption.

    Args:
        width: the width of the plot, in pixels.
    """
    kept: list[Caption] = []
    for caption in captions:
        if all(caption.is_clear_of(other, width) for other in (*taken, *kept)):
            kept.append(caption)
    return kept


def tick_captions(
    low: float,
    high: float,
    make_caption: Callable[[float], Caption],
    width: float,
    taken: Sequence[Caption] = (),
) -> list[tuple[float, Caption]]:
    """Return evenly spaced round values in [low, high], as many as fit, each with its caption.

    A value is left out if its caption overlaps ``taken``.

    Args:
        make_caption: returns the caption of a value.
        width: the width of the plot, in pixels.
    """
    for count in range(10, 0, -1):
        captions = [(tick, make_caption(tick)) for tick in nice_ticks(low, high, count)]
        if all(
            caption.is_clear_of(following, width)
            for (_, caption), (_, following) in pairwise(captions)
        ):
            break
    else:
        captions = captions[:1]
    return [
        (tick, caption)
        for tick, caption in captions
        if all(caption.is_clear_of(other, width) for other in taken)
    ]


def for_both_widths(draw: Callable[[float], Markup]) -> Markup:
    """Return a drawing for a wide plot and one for a narrow plot.

    The page shows the one that fits.

    Args:
        draw: returns the drawing for a plot of a width in pixels.
    """
    parts = (("wide", WIDE), ("narrow", NARROW))
    return Markup("").join(tag("g", draw(width), class_=name) for name, width in parts)


def value_room(ticks: Sequence[float]) -> int:
    """Return the pixels that the values of a horizontal grid need beside the plot."""
    longest = max((len(f"{tick:g}") for tick in ticks), default=0)
    return math.ceil(longest * _CHARACTER + 2 * _GAP)


def horizontal_grid(ticks: Sequence[float], scale: AxisScale) -> Markup:
    """Return grid lines across the plot, with their values to the left of it."""
    parts: list[Markup] = []
    for tick in ticks:
        y = scale(tick)
        parts.append(tag("line", x1=0, x2="100%", y1=y, y2=y, stroke=colour("grid")))
        parts.append(label(f"{tick:g}", 0, y + 4, dx=-8, text_anchor="end"))
    return Markup("").join(parts)


def downsample(
    points: Sequence[tuple[float, float]], limit: int = 1500
) -> list[tuple[float, float]]:
    """Return about ``limit`` of ``points``, with both ends and the extremes of each stretch.

    Fewer points than that are returned unchanged.
    """
    if len(points) <= limit:
        return list(points)
    size = math.ceil(2 * len(points) / limit)
    kept = {0, len(points) - 1}
    for start in range(0, len(points), size):
        stretch = range(start, min(start + size, len(points)))
        kept |= {
            min(stretch, key=lambda index: points[index][1]),
            max(stretch, key=lambda index: points[index][1]),
        }
    return [points[index] for index in sorted(kept)]


def polyline(
    segments: Sequence[Sequence[tuple[float, float]]], height: float, shade: str, width: float
) -> Markup:
    """Return lines through (percent, pixel) points. A segment of one point is a dot.

    Args:
        height: the height of the plot, in pixels.
        shade: the role of its colour in :data:`PALETTE`.
        width: the width of the lines, in pixels.
    """
    paths = [
        "M"
        + "L".join(
            f"{x * 10:.1f},{y:.2f}"
            for x, y in (segment if len(segment) > 1 else [*segment, *segment])
        )
        for segment in segments
    ]
    style = {
        "fill": "none",
        "stroke": colour(shade),
        "stroke_width": width,
        "vector_effect": "non-scaling-stroke",
    }
    path = tag("path", d="".join(paths), stroke_linecap="round", stroke_linejoin="round", **style)
    # the inner picture is stretched to the plot's width; the width of its lines is not
    view = f"0 0 1000 {height:g}"
    return tag(
        "svg",
        path,
        viewBox=view,
        width="100%",
        height=height,
        preserveAspectRatio="none",
        overflow="visible",
    )


def recovery_scale(recoveries: Sequence[Recovery]) -> AxisScale:
    """Return the scale of the time since injection, in seconds, for all recoveries of a run.

    If redundancy or full strength come much later than the first good step, the scale changes
    between them.
    """
    knee = max(
        (span.end_s - r.injected_s for r in recoveries for span in spans_to_first_step(r)),
        default=0.0,
    )
    end = max((span.end_s - r.injected_s for r in recoveries for span in r.spans), default=0.0)
    if 0 < knee * 2.5 < end:
        return AxisScale(((0.0, 0.0), (knee, 60.0), (end, 100.0)))
    return AxisScale.linear(0.0, end or 1e-3)


def time_axis(scale: AxisScale, top: float, bottom: float, width: float) -> Markup:
    """Return grid and labels of the time since injection for a plot of ``width`` pixels.

    A dashed line and a label mark a change of the scale.
    """
    parts: list[Markup] = []
    taken = [Caption(_scale_change_text(scale), at) for _, at in scale.knots[1:-1]]
    for caption in taken:
        parts.append(vertical(caption.x, top, bottom + 4, "muted", stroke_dasharray="2 3"))
        parts.append(_axis_label(caption, bottom + 14))
    for (low, _), (high, _) in pairwise(scale.knots):
        ticks = tick_captions(
            low * 1e3, high * 1e3, lambda tick: _time_caption(tick, scale), width, taken
        )
        for _, caption in ticks:
            parts += [vertical(caption.x, top, bottom), _axis_label(caption, bottom + 14)]
        taken = [*taken, *(caption for _, caption in ticks)]
    return Markup("").join(parts)


def _scale_change_text(scale: AxisScale) -> str:
    """Return the label at a change of the scale."""
    (first, start), (knee, middle), (end, stop) = scale.knots
    change = ((end - knee) / (stop - middle)) / ((knee - first) / (middle - start))
    return f"{number(change)}× coarser →"


def _time_caption(tick_ms: float, scale: AxisScale) -> Caption:
    """Return the caption of a time, which stays within the plot."""
    left = scale(tick_ms / 1e3)
    return Caption(
        duration(tick_ms / 1e3), left, "start" if left < 1 else "end" if left > 97 else "middle"
    )


def _axis_label(caption: Caption, y: float) -> Markup:
    """Return a caption as text below an axis."""
    return label(caption.text, caption.x, y, text_anchor=caption.anchor)


def _step_caption(step: float, scale: AxisScale) -> Caption:
    """Return the caption of a step, which stays within the plot."""
    left = scale(step)
    return Caption(f"{step:,.0f}", left, "end" if left > 97 else "middle")


def step_axis(low: float, high: float, scale: AxisScale, y: float, width: float) -> Markup:
    """Return ticks and labels of training steps below a plot, at whole steps only.

    Args:
        y: the lower end of the plot, in pixels.
        width: the width of the plot, in pixels.
    """
    parts: list[Markup] = []
    for tick, caption in tick_captions(low, high, lambda step: _step_caption(step, scale), width):
        if tick == int(tick):
            parts += [vertical(caption.x, y, y + 4, "axis"), _axis_label(caption, y + 15)]
    return Markup("").join(parts)


def phase_bar(
    span: PhaseSpan, injected_s: float, scale: AxisScale, y: float, height: float
) -> Markup:
    """Return the bar of a phase, with a tooltip.

    It has full colour up to its reference, is pale beyond, and has a tick at the reference.

    Args:
        scale: the scale of the time since the injection, in seconds.
        y: the upper end of the bar, in pixels.
    """
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
    """Return a picture of a probability on a line from 0 to 1; empty if it is unknown.

    The interval is pale, and a tick marks the measured value.
    """
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


def timeline(recovery: Recovery, scale: AxisScale) -> Markup:
    """Return a recovery as a row of phase bars over its time axis.

    Wide bars bear the name of the phase.
    """
    bars = [phase_bar(span, recovery.injected_s, scale, 5, 20) for span in recovery.spans]
    names = [_name_inside(span, recovery.injected_s, scale) for span in recovery.spans]
    text = (
        ", ".join(f"{span.name} {with_reference(span)}" for span in recovery.spans)
        or "no phase was recorded"
    )
    attributes = {"width": "100%", "height": 48, "overflow": "visible", "role": "img"}
    axis = for_both_widths(lambda width: time_axis(scale, 0, 30, width))
    return tag("svg", axis, *bars, *names, aria_label=f"Recovery timeline: {text}", **attributes)


def _name_inside(span: PhaseSpan, injected_s: float, scale: AxisScale) -> Markup:
    """Return the name of a phase inside its bar; empty if the bar is too narrow."""
    begin = span.start_s - injected_s
    start = scale(begin)
    room = (scale(begin + min(span.reference_s, span.seconds)) - start) / 100
    needed = len(span.name) * _BOLD_CHARACTER + 2 * _NAME_INSET
    if room * WIDE < needed:
        return Markup("")
    style: dict[str, object] = {
        "dx": _NAME_INSET,
        "font_weight": 600,
        "pointer_events": "none",
        "aria_hidden": "true",
    }
    style["class_"] = None if room * NARROW >= needed else "wide"
    return label(span.name, start, 19, shade="inside", **style)


def render_timeline_svg(recovery: Recovery) -> str:
    """Return a recovery as the text of a separate SVG file, with a row for each phase."""
    scale = recovery_scale([recovery])
    rows = 26 * len(recovery.spans)
    full_strength = duration(recovery.full_strength_seconds, "never")
    durations = f"first good step {duration(recovery.seconds)}, full strength {full_strength}"
    cause_length = int((_FRAME - 56 - 7.2 * len(durations)) / 8.7)  # characters left of the words
    bars = (
        phase_bar(span, recovery.injected_s, scale, 7 + 26 * row, 12)
        for row, span in enumerate(recovery.spans)
    )
    plot = {"x": 156, "y": 52, "width": 410, "height": rows + 20, "overflow": "visible"}
    return picture(
        _FRAME,
        rows + 88,
        f"{recovery.cause}: {durations}",
        tag(
            "text",
            shorten(recovery.cause, cause_length, placeholder=" …"),
            x=20,
            y=32,
            font_size=15,
            font_weight=600,
            fill=colour("ink"),
        ),
        tag("text", durations, x=940, y=32, font_size=13, text_anchor="end", fill=colour("muted")),
        tag("svg", time_axis(scale, 0, rows + 4, 410), *bars, **plot),
        *_timeline_texts(recovery.spans),
    )


def picture(width: int, height: int, title: str, *content: str) -> str:
    """Return the text of a separate SVG file, for a light background.

    It is a frame of the given size in pixels, which contains ``content``.
    """
    size = {
        "viewBox": f"0 0 {width} {height}",
        "width": width,
        "height": height,
        "font_family": _FONT,
    }
    frame = {
        "width": width - 1,
        "height": height - 1,
        "fill": colour("surface"),
        "stroke": colour("axis"),
    }
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


def _timeline_texts(spans: Sequence[PhaseSpan]) -> Iterator[Markup]:
    """Yield the names, durations and references of phases beside their bars."""
    for row, span in enumerate(spans):
        y = 52 + 17 + 26 * row
        seconds, reference = with_reference(span).rstrip(")").split(" (")
        reason = shorten(f"{reference}: {span.reference}", 48, placeholder=" …")
        yield tag(
            "text", span.name, x=144, y=y, font_size=12, text_anchor="end", fill=colour("ink")
        )
        yield tag(
            "text",
            seconds,
            x=642,
            y=y,
            font_size=13,
            font_weight=600,
            text_anchor="end",
            fill=colour("ink"),
        )
        yield tag("text", reason, x=654, y=y, font_size=11, fill=colour("muted"))
