"""The records that a reader delivers, in their order: lines, and the holes between them.

Lines may be doubtful: the node may have sent the log of the next life in the place of an ended one.
They are kept until the first line of the next life is known.

-> attach/logs/container_log.py: which lines are doubtful, and when there is a hole.
"""

from __future__ import annotations

from collections.abc import Sequence

from chaoskit.attach.logs.records import (
    ContainerLife,
    ContainerLine,
    HoleReason,
    LogHole,
    LogPlace,
)
from chaoskit.attach.logs.stream_lines import Arrival
from chaoskit.attach.logs.timed_lines import TimedLine

_NS = 10**9


class Delivery:
    """The lines and holes of a place that were not yet taken."""

    def __init__(self, place: LogPlace) -> None:
        self._place = place
        self._records: list[ContainerLine | LogHole] = []
        self._after = ""  # node's time of the last line
        self._taken_after = self._received_after = ""  # the same at the last take, and before it
        self._doubt: tuple[ContainerLife, list[Arrival]] | None = None  # a life and its lines

    def take(self) -> list[ContainerLine | LogHole]:
        """Return the records since the last call, of which the records were received."""
        self._received_after, self._taken_after = self._taken_after, self._after
        records, self._records = self._records, []
        return records

    def forget_taken(self) -> None:
        """Let the next hole begin before the records of the last :meth:`take`, which are lost."""
        self._after = self._taken_after = self._received_after

    def add_lines(self, life: ContainerLife, arrivals: Sequence[Arrival]) -> None:
        """Deliver lines of a life, or keep them if the life is doubtful."""
        if self._doubt is not None and self._doubt[0] == life:
            self._doubt[1].extend(arrivals)
            return
        for line, t_ns in arrivals:
            self._records.append(
                ContainerLine(self._place, life, line.stamp, line.node_ns, t_ns, line.content)
            )
            self._after = line.stamp

    def add_hole(
        self,
        lives: tuple[int, int],
        reason: HoleReason,
        detail: str,
        now_s: float,
        before: str = "",
    ) -> None:
        """Deliver a hole after the last line.

        Args:
            lives: numbers of the first and the last life of the hole.
            detail: the error before the hole; "" for none.
            before: node's time of the first line after the hole; "" if it is not known.
        """
        t_ns = round(now_s * _NS)
        self._records.append(
            LogHole(self._place, *lives, reason, detail, self._after, before, t_ns)
        )

    def doubt(self, life: ContainerLife, now_s: float) -> None:
        """Keep all further lines of a life until :meth:`resolve_doubt`.

        Doubtful lines of an earlier life are dropped, with a hole: nothing can prove them any more.
        """
        if self._doubt is not None and self._doubt[0] != life:
            number = self._doubt[0].number
            self._doubt = None
            self.add_hole((number, number), HoleReason.LIVES_UNREAD, "", now_s)
        self._doubt = self._doubt or (life, [])

    def doubtful_life(self) -> ContainerLife | None:
        """Return the life with doubtful lines, or None."""
        return self._doubt[0] if self._doubt is not None else None

    def resolve_doubt(self, first_line: TimedLine | None, now_s: float) -> None:
        """Deliver the doubtful lines, or a hole if they are of the next life, or if there are none.

        Args:
            first_line: the first line of the next life; None if it has none, or is not read.
        """
        if self._doubt is None:
            return
        (life, arrivals), self._doubt = self._doubt, None
        if not arrivals or arrivals[0][0] == first_line:
            lives = (life.number, life.number)
            before = arrivals[0][0].stamp if arrivals else ""
            self.add_hole(lives, HoleReason.LIVES_UNREAD, "", now_s, before)
        else:
            self.add_lines(life, arrivals)
