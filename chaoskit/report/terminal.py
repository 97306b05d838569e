"""Terminal of all commands. It prints text of a job literally, without markup and escape codes.

-> plaintext.py: ``printable``, which escapes. cli/output.py opens it for commands.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from chaoskit.plaintext import printable


class Terminal(Console):
    """A console that prints text as it is, without markup and emoji codes.

    Control characters are printed as escapes. Styles are given as ``rich.text.Text`` only.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, highlight=False, markup=False, emoji=False)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the segments of a renderable with printable text.

        Live views are rendered here, too.
        """
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
