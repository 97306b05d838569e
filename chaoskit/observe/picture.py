"""A frame as a picture for a terminal, or as text for a pipe."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from chaoskit.observe.frame import Frame, NodeRow
from chaoskit.observe.notes import Note
from chaoskit.plaintext import plural
from chaoskit.report.summary import (
    account_sentence,
    copies_sentence,
    duration,
    limits_sentence,
    number,
)

_BLOCKS = "▁▂▃▄▅▆▇█"
_SLOW_PHASE_S = 1.0
_STYLES = {
    "training": "green", "completed": "bold green", "recovering": "bold yellow", "resizing": "cyan",
    "failed": "bold red", "gone": "red", "lost": "bold red", "silent": "bold red", "up": "green",
}  # fmt: skip
_PHASE_STYLES = {
    "forward": "cyan", "backward": "blue", "reduce": "magenta", "optimizer": "green", "regroup": "yellow",
    "restore": "yellow", "lost": "bold red", "training": "green",
}  # fmt: skip
_NOTE_STYLES = {"info": "", "bad": "red", "good": "green"}
_OTHER_LINES = 15  # beside nodes and events
_NOTES_LEAST, _NODES_LEAST = 5, 4


def clock(seconds: float) -> str:
    """``0:07``, ``12:34``, ``1:02:03``."""
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole:02d}" if hours else f"{minutes}:{whole:02d}"


def sparkline(values: Sequence[float | None]) -> str:
    """One character a value, from the lowest to the highest; a point where there is none."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        "·" if value is None or not math.isfinite(value) else _BLOCKS[round((value - low) * scale)]
        for value in values
    )


def draw(frame: Frame, height: int | None = None) -> RenderableType:
    """The picture.

    Args:
        height: lines that there are, each of which is cut to the width. None for as many as are needed: then lines
            are wrapped, apart from the curve of losses.
    """
    rooms = (
        None
        if height is None
        else max(height - _OTHER_LINES - len(_tail(frame)), _NOTES_LEAST + _NODES_LEAST)
    )
    nodes = _nodes(frame.nodes, None if rooms is None else rooms - _NOTES_LEAST)
    shown = 10 if rooms is None else max(_NOTES_LEAST, rooms - len(nodes))
    training, losses = _training(frame)
    lines = [
        _head(frame),
        training,
        losses,
        Text(),
        *nodes,
        Text(),
        *_tail(frame),
        *_time(frame),
        Text(),
        *(_note(note, frame.started_ns) for note in frame.notes[-shown:]),
    ]
    if height is None:  # a live view keeps its height: there a line that is too long is cut
        for line in lines:
            if line is not losses:
                line.no_wrap, line.overflow = False, "fold"
    return Group(*lines)


def _head(frame: Frame) -> Text:
    return Text.assemble(
        (frame.name, "bold"), "  ", (frame.state, _STYLES.get(frame.state, "")), (f"  {clock(frame.elapsed_s)}", "dim"),
        no_wrap=True, overflow="ellipsis",
    )  # fmt: skip


def _training(frame: Frame) -> list[Text]:
    of = f"/{frame.steps}" if frame.steps else ""
    rate = f"   {number(frame.steps_per_s)} steps/s" if frame.steps_per_s else ""
    whole = frame.world >= frame.full_world
    world = (f"   world {frame.world}/{frame.full_world}", "" if whole else "yellow")
    line = Text.assemble(f"step {frame.step}{of}{rate}", world, f"   generation {frame.generation}")
    line.append(
        f"   spares {frame.spares_ready}/{frame.spares}",
        "" if frame.spares_ready >= frame.spares else "yellow",
    )
    if frame.recoveries:
        line.append(f"   recovered {frame.recoveries}×", "green")
    if frame.recovering_s is not None:
        line.append(f"   recovering for {frame.recovering_s:.1f} s", "bold yellow")
    loss = "–" if frame.loss is None else f"{frame.loss:.4f}"
    lines = [line, Text.assemble(f"loss {loss}  ", (sparkline(frame.losses), "cyan"))]
    for one in lines:
        one.no_wrap, one.overflow = True, "ellipsis"
    return lines


def _nodes(nodes: Sequence[NodeRow], limit: int | None) -> list[Text]:
    """A line a worker; where there are too many for that, a line a node; then as many as there is room for."""
    lines = []
    several = limit is None or sum(max(1, len(node.workers)) for node in nodes) <= limit
    width = max((len(node.node) for node in nodes), default=0)
    digits = max((len(str(worker.step)) for node in nodes for worker in node.workers), default=0)
    for node in nodes:
        head = Text.assemble(
            ("● ", _STYLES.get(node.state, "dim")), f"{node.node:<{width}}  ", f"{node.state:<9}"
        )
        if several:
            for place, worker in enumerate(node.workers):
                who = "spare " if worker.rank is None else f"rank {worker.rank}"
                age = (
                    f" {number(worker.age_s)} s"
                    if worker.age_s and worker.age_s > _SLOW_PHASE_S
                    else ""
                )
                phase = (f"{worker.phase + age:<15} ", _PHASE_STYLES.get(worker.phase, "dim"))
                before = head if not place else Text(" " * head.cell_len)
                step = f"step {worker.step}" if worker.rank is not None else ""
                lines.append(
                    Text.assemble(
                        before, f"{who:<8} ", phase, f"{step:<{digits + 7}}", (worker.worker, "dim")
                    )
                )
        if not several or not node.workers:
            ranks = ", ".join(
                str(worker.rank) for worker in node.workers if worker.rank is not None
            )
            lines.append(head.append(f"ranks {ranks}" if ranks else ""))
    if limit is not None and len(lines) > limit:
        lines = [
            *lines[: limit - 1],
            Text(f"and {plural(len(lines) - limit + 1, 'node')} more", "dim"),
        ]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return lines


def _tiers(frame: Frame) -> list[Text]:
    width = max((len(tier.tier) for tier in frame.tiers), default=0)
    lines = [
        Text.assemble(
            (f"{tier.tier:<{width}}  ", "dim"),
            f"step {tier.step}",
            (f", {clock(tier.age_s)} ago", "dim"),
        )
        for tier in frame.tiers
    ]
    copies = (
        []
        if frame.copies is None
        else [Text.assemble(("copies  ", "dim"), copies_sentence(frame.copies))]
    )
    for line in copies:
        line.no_wrap, line.overflow = True, "ellipsis"
    return [*lines, *copies]


def _tail(frame: Frame) -> list[Text]:
    """What is below the nodes, apart from the account of the time and the notes."""
    return [*_tiers(frame), *_hang_limits(frame)]


def _hang_limits(frame: Frame) -> list[Text]:
    if not frame.hang_limits_ms:
        return []
    told = limits_sentence(frame.hang_limits_ms, frame.suspects)
    style = "yellow" if frame.suspects else ""
    return [
        Text.assemble(("hang limits  ", "dim"), (told, style), no_wrap=True, overflow="ellipsis")
    ]


def _time(frame: Frame) -> list[Text]:
    account = frame.account
    causes = sorted(account.lost_s.items(), key=lambda item: -item[1])[:6]
    lost = "   ".join(f"{cause} {duration(seconds)}" for cause, seconds in causes)
    late = frame.recently
    lines = [
        Text(account_sentence(account)),
        *(
            [Text(f"last {clock(late.wall_s)}: {account_sentence(late)}")]
            if late.wall_s < account.wall_s
            else []
        ),
        Text(f"lost: {lost}" if lost else "nothing lost", "dim"),
    ]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return lines


def _note(note: Note, started_ns: int) -> Text:
    text = Text.assemble(
        (f"{clock((note.t_ns - started_ns) / 1e9):>8}  ", "dim"),
        (note.text, _NOTE_STYLES[note.kind]),
    )
    text.no_wrap, text.overflow = True, "ellipsis"
    return text
