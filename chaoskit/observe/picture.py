"""Drawing of a frame for a terminal, or as text for a pipe.

-> observe/frame.py: the values. observe/notes.py: the texts of events.
"""

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
_OTHER_LINES = 15  # lines besides nodes and notes
_NOTES_LEAST, _NODES_LEAST = 5, 4


def clock(seconds: float) -> str:
    """Return a duration such as ``0:07``, ``12:34`` or ``1:02:03``."""
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole:02d}" if hours else f"{minutes}:{whole:02d}"


def sparkline(values: Sequence[float | None]) -> str:
    """Return a block character for each value; the lowest and the highest span the scale.

    A point stands for a missing or infinite value.
    """
    finite = [level for level in values if level is not None and math.isfinite(level)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        "·" if level is None or not math.isfinite(level) else _BLOCKS[round((level - low) * scale)]
        for level in values
    )


def draw(frame: Frame, height: int | None = None) -> RenderableType:
    """Return the picture of a frame.

    Args:
        height: the number of available lines, each of which is cut to the width. None takes as many
            lines as needed, and wraps all but the curve of losses.
    """
    free_lines = (
        None
        if height is None
        else max(
            height - _OTHER_LINES - len(_lines_below_nodes(frame)), _NOTES_LEAST + _NODES_LEAST
        )
    )
    nodes = _node_lines(frame.nodes, None if free_lines is None else free_lines - _NOTES_LEAST)
    note_count = 10 if free_lines is None else max(_NOTES_LEAST, free_lines - len(nodes))
    training, losses = _training_lines(frame)
    lines = [
        _heading(frame),
        training,
        losses,
        Text(),
        *nodes,
        Text(),
        *_lines_below_nodes(frame),
        *_time_lines(frame),
        Text(),
        *(_note_line(note, frame.started_ns) for note in frame.notes[-note_count:]),
    ]
    if height is None:  # a live view keeps its height: there, long lines are cut
        for line in lines:
            if line is not losses:
                line.no_wrap, line.overflow = False, "fold"
    return Group(*lines)


def _heading(frame: Frame) -> Text:
    """Return the line with the run's name, state and duration."""
    return Text.assemble(
        (frame.name, "bold"), "  ", (frame.state, _STYLES.get(frame.state, "")), (f"  {clock(frame.elapsed_s)}", "dim"),
        no_wrap=True, overflow="ellipsis",
    )  # fmt: skip


def _training_lines(frame: Frame) -> list[Text]:
    """Return the lines about progress and loss."""
    total = f"/{frame.steps}" if frame.steps else ""
    rate = f"   {number(frame.steps_per_s)} steps/s" if frame.steps_per_s else ""
    is_full = frame.world >= frame.full_world
    world = (f"   world {frame.world}/{frame.full_world}", "" if is_full else "yellow")
    line = Text.assemble(
        f"step {frame.step}{total}{rate}", world, f"   generation {frame.generation}"
    )
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
    for styled in lines:
        styled.no_wrap, styled.overflow = True, "ellipsis"
    return lines


def _node_lines(nodes: Sequence[NodeRow], limit: int | None) -> list[Text]:
    """Return a line for each worker or, if there are too many, for each node.

    Args:
        limit: the number of lines; further nodes are only counted. None is no limit.
    """
    lines = []
    has_worker_lines = limit is None or sum(max(1, len(node.workers)) for node in nodes) <= limit
    width = max((len(node.node) for node in nodes), default=0)
    digits = max((len(str(worker.step)) for node in nodes for worker in node.workers), default=0)
    for node in nodes:
        head = Text.assemble(
            ("● ", _STYLES.get(node.state, "dim")), f"{node.node:<{width}}  ", f"{node.state:<9}"
        )
        if has_worker_lines:
            for index, worker in enumerate(node.workers):
                rank = "spare " if worker.rank is None else f"rank {worker.rank}"
                age = (
                    f" {number(worker.age_s)} s"
                    if worker.age_s and worker.age_s > _SLOW_PHASE_S
                    else ""
                )
                phase = (f"{worker.phase + age:<15} ", _PHASE_STYLES.get(worker.phase, "dim"))
                before = head if not index else Text(" " * head.cell_len)
                step = f"step {worker.step}" if worker.rank is not None else ""
                lines.append(
                    Text.assemble(
                        before,
                        f"{rank:<8} ",
                        phase,
                        f"{step:<{digits + 7}}",
                        (worker.worker, "dim"),
                    )
                )
        if not has_worker_lines or not node.workers:
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


def _tier_lines(frame: Frame) -> list[Text]:
    """Return a line for each tier of copies, and one for the interval of copies."""
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


def _lines_below_nodes(frame: Frame) -> list[Text]:
    """Return the lines below the nodes, without the time account and the notes."""
    return [*_tier_lines(frame), *_hang_limit_lines(frame)]


def _hang_limit_lines(frame: Frame) -> list[Text]:
    """Return the line about hang limits; nothing while they are unknown."""
    if not frame.hang_limits_ms:
        return []
    limits = limits_sentence(frame.hang_limits_ms, frame.suspects)
    style = "yellow" if frame.suspects else ""
    return [
        Text.assemble(("hang limits  ", "dim"), (limits, style), no_wrap=True, overflow="ellipsis")
    ]


def _time_lines(frame: Frame) -> list[Text]:
    """Return the lines of the time account, with the six largest causes of lost time."""
    account = frame.account
    causes = sorted(account.lost_s.items(), key=lambda cause_seconds: -cause_seconds[1])[:6]
    lost = "   ".join(f"{cause} {duration(seconds)}" for cause, seconds in causes)
    recent = frame.recently
    lines = [
        Text(account_sentence(account)),
        *(
            [Text(f"last {clock(recent.wall_s)}: {account_sentence(recent)}")]
            if recent.wall_s < account.wall_s
            else []
        ),
        Text(f"lost: {lost}" if lost else "nothing lost", "dim"),
    ]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return lines


def _note_line(note: Note, started_ns: int) -> Text:
    """Return a note as a line with its time."""
    text = Text.assemble(
        (f"{clock((note.t_ns - started_ns) / 1e9):>8}  ", "dim"),
        (note.text, _NOTE_STYLES[note.kind]),
    )
    text.no_wrap, text.overflow = True, "ellipsis"
    return text
