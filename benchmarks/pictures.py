"""Pictures of results, for a light background."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from bars import quantile
from markupsafe import Markup

from chaoskit.report import svg
from chaoskit.report.svg import Scale

_BINS, _ROW, _LEFT, _WIDTH = 48, 128, 96, 820


def histogram(title: str, seconds: Mapping[str, Sequence[float]], ratio: float) -> str:
    """A row a name: how many values fell into each bin of equal width, with median, p95 and ``ratio`` times the median.

    Raises:
        ValueError: if there are no values.
    """
    top_s = max(max(*values, ratio * median(values)) for values in seconds.values()) * 1.04
    scale = Scale.linear(0.0, top_s)
    height = 56 + _ROW * len(seconds) + 28
    rows = [_row(name, values, scale, ratio, 56 + _ROW * row) for row, (name, values) in enumerate(seconds.items())]
    content = svg.tag("text", title, x=20, y=30, font_size=15, font_weight=600, fill=svg.colour("ink"))
    return svg.picture(960, height, title, content, *rows, _axis(scale, 56 + _ROW * len(seconds)))


def bins(values: Sequence[float], top: float, count: int = _BINS) -> list[int]:
    """How many of ``values`` lie in each of ``count`` equal parts of [0, top]; the last includes its end."""
    counts = [0] * count
    for value in values:
        counts[min(int(value / top * count), count - 1)] += 1
    return counts


def _row(name: str, values: Sequence[float], scale: Scale, ratio: float, y: int) -> Markup:
    counts, plot = bins(values, scale.knots[-1][0]), _ROW - 36
    tallest = max(counts)
    bars = [
        svg.bar(
            index * 100 / _BINS + 0.15,
            (index + 1) * 100 / _BINS - 0.15,
            24 + plot * (1 - count / tallest),
            plot * count / tallest,
            svg.colour("run"),
            svg.tag("title", str(count)),
        )
        for index, count in enumerate(counts)
        if count
    ]
    middle = median(values)
    marks = {"median": middle, "p95": quantile(values, 0.95), f"{ratio:g} × median": ratio * middle}
    lines = [
        svg.vertical(scale(at), 14, 24 + plot, "alert" if "×" in words else "muted", stroke_dasharray="3 2")
        + svg.label(f"{words} {at * 1e3:.0f} ms", scale(at), 10 if words != "p95" else 22, dx=4)
        for words, at in marks.items()
    ]
    label = svg.tag("text", name, x=_LEFT - 12, y=y + 70, font_size=12, text_anchor="end", fill=svg.colour("ink"))
    return label + svg.tag("svg", *bars, *lines, x=_LEFT, y=y, width=_WIDTH, height=_ROW, overflow="visible")


def _axis(scale: Scale, y: int) -> Markup:
    top_ms = scale.knots[-1][0] * 1e3
    ticks = [
        svg.vertical(scale(tick / 1e3), 0, 4, "axis")
        + svg.label(f"{tick:g} ms", scale(tick / 1e3), 18, text_anchor="middle")
        for tick in svg.nice_ticks(0, top_ms, 8)
    ]
    return svg.tag("svg", *ticks, x=_LEFT, y=y - 12, width=_WIDTH, height=24, overflow="visible")
