"""Pictures of results, for a light background."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from markupsafe import Markup

from chaoskit.report import svg
from chaoskit.report.statistics import quantile
from chaoskit.report.svg import AxisScale

_BINS, _ROW, _LEFT, _WIDTH = 48, 152, 96, 820


def histogram(title: str, seconds: Mapping[str, Sequence[float]], ratio: float) -> str:
    """Return a histogram with a row for each name: its median, p95 and ``ratio`` times its median
    are marked. All bins have the same width.

    Raises:
        ValueError: if there are no values.
    """
    rows = [
        _row(name, values, ratio, 56 + _ROW * row)
        for row, (name, values) in enumerate(seconds.items())
    ]
    content = svg.tag(
        "text", title, x=20, y=30, font_size=15, font_weight=600, fill=svg.colour("ink")
    )
    return svg.picture(960, 60 + _ROW * len(seconds), title, content, *rows)


def bins(values: Sequence[float], top: float, count: int = _BINS) -> list[int]:
    """Return the number of ``values`` in each of ``count`` equal parts of [0, top]; the last part
    includes its end.
    """
    counts = [0] * count
    for seconds in values:
        counts[min(int(seconds / top * count), count - 1)] += 1
    return counts


def _row(name: str, values: Sequence[float], ratio: float, y: int) -> Markup:
    middle = median(values)
    top_s = max(*values, ratio * middle) * 1.04
    scale = AxisScale.linear(0.0, top_s)
    counts, plot = bins(values, top_s), _ROW - 60
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
    marks = {"median": middle, "p95": quantile(values, 0.95), f"{ratio:g} × median": ratio * middle}
    lines = [
        svg.vertical(
            scale(at), 14, 24 + plot, "alert" if "×" in words else "muted", stroke_dasharray="3 2"
        )
        + svg.label(
            f"{words} {at * 1e3:.0f} ms",
            scale(at),
            22 if words == "p95" else 10,
            **_side(words, scale(at)),
        )
        for words, at in marks.items()
    ]
    label = svg.tag(
        "text",
        name,
        x=_LEFT - 12,
        y=y + 62,
        font_size=12,
        text_anchor="end",
        fill=svg.colour("ink"),
    )
    plotted = [*bars, *lines, _axis(scale, 24 + plot)]
    return label + svg.tag(
        "svg", *plotted, x=_LEFT, y=y, width=_WIDTH, height=_ROW, overflow="visible"
    )


def _side(words: str, at: float) -> dict[str, object]:
    """Return the attributes that put a label beside its line.

    The median's label stands before its line and the other labels stand behind theirs, since the
    lines may be close.
    """
    return {"text_anchor": "end", "dx": -4} if words == "median" or at > 85 else {"dx": 4}


def _axis(scale: AxisScale, y: int) -> Markup:
    ticks = [
        svg.vertical(scale(tick / 1e3), y, y + 4, "axis")
        + svg.label(f"{tick:g} ms", scale(tick / 1e3), y + 18, text_anchor="middle")
        for tick in svg.nice_ticks(0, scale.knots[-1][0] * 1e3, 8)
    ]
    return Markup("").join(ticks)
