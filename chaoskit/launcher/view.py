"""View of a running job: a small live picture on a terminal, plain lines otherwise.

-> ``launcher/progress.py``: what is shown. ``observe/live.py``: the view of ``chaoskit top``, from
another process.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from chaoskit.launcher.progress import Progress, ViewLine
from chaoskit.plaintext import plural, printable
from chaoskit.report.summary import number
from chaoskit.vocabulary import Phase
from chaoskit.wire.messages import Beat, Member

_FRAMES_PER_S = 5
_LINE_EVERY_S = 5.0
_OTHER_LINES = 7  # lines of the picture besides one for each rank
_SLOW_PHASE_S = 1.0  # longer phases are shown with their age

_NOTE_STYLES = {"info": "", "bad": "red", "good": "green"}
_PHASE_STYLES = {
    Phase.FORWARD: "cyan",
    Phase.BACKWARD: "blue",
    Phase.REDUCE: "magenta",
    Phase.OPTIMIZER: "green",
    Phase.REGROUP: "yellow",
    Phase.RESTORE: "yellow",
    Phase.DONE: "green",
}


def clock(seconds: float) -> str:
    """Return a duration such as ``0:07``, ``12:34`` or ``1:02:03``."""
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole:02d}" if hours else f"{minutes}:{whole:02d}"


class View:
    """The view of one run. :meth:`watch` must receive every message of the harness.

    Args:
        title: the first words of the picture.
        console: a terminal gets a picture that is redrawn; any other output gets lines.
    """

    def __init__(self, title: str, progress: Progress, console: Console) -> None:
        self._title, self._progress, self._console = title, progress, console
        self._lock = (
            threading.RLock()
        )  # a thread draws the picture, and rich does not keep prints and frames apart
        self._line_printed_s = time.monotonic()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the run while the block lasts."""
        if not self._console.is_terminal:
            self._console.print(Text(f"{self._title}: starting"))
            yield
            return
        with Live(
            get_renderable=self._draw, console=self._console, auto_refresh=False, transient=True
        ) as live:
            over = threading.Event()
            thread = threading.Thread(target=self._refresh, args=(live, over), daemon=True)
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join()

    def _refresh(self, live: Live, over: threading.Event) -> None:
        """Redraw the picture until ``over`` is set."""
        while not over.wait(1 / _FRAMES_PER_S):
            with self._lock:
                live.refresh()

    def watch(self, message: Any) -> None:
        """Process a message of the coordinator, and print its lines.

        An output that is no terminal also gets the state of the run every few seconds.
        """
        now_s = time.monotonic()
        with self._lock:
            for note in self._progress.handle(message, now_s):
                self._console.print(_note_line(note), soft_wrap=not self._console.is_terminal)
        if not self._console.is_terminal and now_s - self._line_printed_s >= _LINE_EVERY_S:
            self._line_printed_s = now_s
            self._console.print(self._line(now_s), soft_wrap=True)

    # -- lines -------------------------------------------------------------------------------------

    def _line(self, now_s: float) -> Text:
        """Return the state of the run as a line."""
        facts = "  ".join(text.plain for text in _facts(self._progress, now_s))
        return Text(f"{clock(self._progress.elapsed_s(now_s)):>8}  {facts}")

    # -- the picture -------------------------------------------------------------------------------

    def _draw(self) -> RenderableType:
        """Return the picture. It is called with the lock held."""
        now_s = time.monotonic()
        progress = self._progress
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        head.add_column(justify="right", no_wrap=True)
        head.add_row(Text(self._title, "bold"), Text(clock(progress.elapsed_s(now_s)), "dim"))
        parts: list[RenderableType] = [Text(), head]
        if progress.steps:
            parts.append(_bar(progress, progress.steps, now_s))
        parts.append(_PackedView(_facts(progress, now_s)))
        parts.append(self._ranks())
        return Group(*parts)

    def _ranks(self) -> RenderableType:
        """Return a row for each rank or, for a large world, the number of ranks in each phase."""
        progress = self._progress
        members = progress.plan.members if progress.plan else ()
        if len(members) > self._console.height - _OTHER_LINES:
            phases = Counter(_phase(progress, member)[0] for member in members)
            return _PackedView([Text(f"{count} {name}") for name, count in phases.most_common()])
        table = Table.grid(padding=(0, 2, 0, 0))
        for _ in range(4):
            table.add_column(no_wrap=True, overflow="ellipsis")
        for member in members:
            label, style = _phase(progress, member)
            table.add_row(
                Text(f"rank {member.rank}"),
                Text("●", style),
                Text(f"{label:<9}", style),
                Text(member.worker, "dim"),
            )
        return table


def _note_line(note: ViewLine) -> Text:
    """Return a line with its time."""
    return Text.assemble(
        (f"{clock(note.at_s):>8}  ", "dim"), (printable(note.text), _NOTE_STYLES[note.kind])
    )


def _facts(progress: Progress, now_s: float) -> list[Text]:
    """Return the state of the run as short texts, the most important first."""
    if progress.running is not None:
        facts = [Text(f"step {progress.step}" if progress.training_since_s else "no step yet")]
        facts += [Text(f"loss {progress.loss:.4g}")] if math.isfinite(progress.loss) else []
        rate = progress.steps_per_s(now_s)
        facts += [Text(f"{number(rate)} steps/s")] if rate is not None else []
        return [*facts, Text(f"running on {progress.running} of {plural(progress.nodes, 'node')}")]
    if progress.plan is None:
        expected = progress.nodes + progress.spares_wanted
        ready = (
            f"{len(progress.ready)} of {plural(expected, 'worker')} ready"
            if expected
            else "starting processes"
        )
        return [Text(ready, "dim")]
    total = f"/{progress.steps}" if progress.steps else ""
    facts = [Text(f"step {progress.step}{total}")]
    if math.isfinite(progress.loss):
        facts.append(Text(f"loss {progress.loss:.4f}"))
    rate = progress.steps_per_s(now_s)
    if rate is not None:
        facts.append(Text(f"{number(rate)} steps/s"))
    facts.append(
        Text(
            f"world {progress.world}/{progress.nodes}",
            "" if progress.world == progress.nodes else "yellow",
        )
    )
    facts.append(Text(f"generation {progress.generation}"))
    if progress.spares_wanted:
        facts.append(
            Text(plural(progress.spares, "spare") + " ready", "" if progress.spares else "dim")
        )
    if progress.recoveries:
        facts.append(Text(f"recovered {len(progress.recoveries)}×", "green"))
    if progress.incident:
        facts.append(
            Text(f"recovering for {now_s - progress.incident.since_s:.1f} s", "bold yellow")
        )
    return facts


def _bar(progress: Progress, steps: int, now_s: float) -> RenderableType:
    """Return the progress bar of a job with ``steps`` steps, and the expected time that is left."""
    time_left = ""
    rate = progress.steps_per_s(now_s)
    if rate and progress.step < steps:
        time_left = f"{clock((steps - progress.step) / rate)} left"
    row = Table.grid(expand=True, padding=(0, 1))
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True, width=len("100%"))
    row.add_column(justify="right", no_wrap=True, width=len("00:00:00 left"))
    percent = f"{100 * progress.step // steps}%"
    row.add_row(ProgressBar(total=steps, completed=progress.step), percent, Text(time_left, "dim"))
    return row


def _phase(progress: Progress, member: Member) -> tuple[str, str]:
    """Return the label and the style of the current phase of a rank."""
    if member.worker not in progress.ready:
        return "lost", "bold red"
    beat: Beat | None = progress.beats.get(member.worker)
    if beat is None:
        return "–", "dim"
    phase = Phase(beat.phase)
    age_s = beat.age_ms / 1000
    label = (
        f"{phase.label} for {number(age_s)} s"
        if age_s > _SLOW_PHASE_S and phase != Phase.DONE
        else phase.label
    )
    return label, _PHASE_STYLES.get(phase, "dim")


class _PackedView:
    """Short texts side by side, on as many lines as needed. No text is broken."""

    def __init__(self, texts: Sequence[Text]) -> None:
        self._texts = texts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = Text(no_wrap=True, overflow="ellipsis")
        for text in self._texts:
            if line and cell_len(line.plain) + 3 + cell_len(text.plain) > options.max_width:
                yield line
                line = Text(no_wrap=True, overflow="ellipsis")
            line.append("   " if line else "").append_text(text)
        yield line
