"""The terminal of every command: it prints text of a job literally, without markup and escape codes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from chaoskit.plaintext import printable


class Terminal(Console):
    """A console that takes text as it is: no markup, no emoji codes, and control characters as escapes.

    Styles are given as ``rich.text.Text`` only.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, highlight=False, markup=False, emoji=False)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Every piece of a renderable passes here, those of a live view, too."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
