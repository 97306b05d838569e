"""The line on which all time lies, and what each piece of it was spent on.

Time is spent once, up to a cursor that only moves forward. What it was spent on may turn out to be something else: a
step is thrown away, or lives on after all. So whoever spends may hold what was spent, and move it to another purpose.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import takewhile

#: Part and cause: see :mod:`chaoskit.runlog.account.time_account`.
Purpose = tuple[str, str]

_SLOT_NS = 1_000_000_000
#: So long it is known when time was spent on what, to the second.
KEPT_S = 3600.0
_SLOTS = int(KEPT_S) + 1


@dataclass(slots=True)
class _Piece:
    """``slot``: the second of the run in which it was spent."""

    slot: int
    purpose: Purpose
    amount_ns: int


@dataclass(slots=True)
class Holding:
    """Time that may still be moved to another purpose."""

    pieces: list[_Piece] = field(default_factory=list)

    def add(self, slot: int, purpose: Purpose, amount_ns: int) -> None:
        """The newest piece."""
        last = self.pieces[-1] if self.pieces else None
        if last is not None and (last.slot, last.purpose) == (slot, purpose):
            last.amount_ns += amount_ns
        elif amount_ns:
            self.pieces.append(_Piece(slot, purpose, amount_ns))


class Spending:
    """What the time of a run was spent on, in all and by second.

    Args:
        started_ns: of the run, on CLOCK_MONOTONIC.

    Attributes:
        cursor_ns: all time before it is spent.
        total: purpose -> nanoseconds.
    """

    def __init__(self, started_ns: int) -> None:
        self.started_ns = self.cursor_ns = started_ns
        self.total: Counter[Purpose] = Counter()
        self._slots: deque[tuple[int, Counter[Purpose]]] = deque(maxlen=_SLOTS)

    def spend(self, purpose: Purpose, until_ns: int, holding: Holding | None = None) -> int:
        """What is left up to ``until_ns``; ``holding`` takes note of it. Returns the amount."""
        amount_ns = max(0, until_ns - self.cursor_ns)
        self.total[purpose] += amount_ns
        end_ns = self.cursor_ns + amount_ns
        untold_ns = (_SLOTS + 1) * _SLOT_NS
        if amount_ns > untold_ns:  # nobody will ask when the rest of it was spent
            early_ns = amount_ns - untold_ns
            if holding is not None:
                holding.add(-1, purpose, early_ns)
            self.cursor_ns += early_ns
        while self.cursor_ns < end_ns:
            slot = (self.cursor_ns - self.started_ns) // _SLOT_NS
            piece_ns = min(end_ns, self.started_ns + (slot + 1) * _SLOT_NS) - self.cursor_ns
            self._slot(slot)[purpose] += piece_ns
            if holding is not None:
                holding.add(slot, purpose, piece_ns)
            self.cursor_ns += piece_ns
        return amount_ns

    def _slot(self, slot: int) -> Counter[Purpose]:
        if not self._slots or self._slots[-1][0] != slot:
            self._slots.append((slot, Counter()))
        return self._slots[-1][1]

    def move(self, holding: Holding, purpose: Purpose, amount_ns: int | None = None) -> None:
        """Of what is held the newest ``amount_ns``, or all, was spent on ``purpose``."""
        left_ns = (
            sum(piece.amount_ns for piece in holding.pieces) if amount_ns is None else amount_ns
        )
        kept: list[_Piece] = []
        for piece in reversed(holding.pieces):
            moved_ns = min(left_ns, piece.amount_ns)
            left_ns -= moved_ns
            self._move(piece, purpose, moved_ns)
            kept += [_Piece(piece.slot, purpose, moved_ns)] if moved_ns else []
            piece.amount_ns -= moved_ns
            kept += [piece] if piece.amount_ns else []
        holding.pieces = kept[::-1]

    def _move(self, piece: _Piece, purpose: Purpose, amount_ns: int) -> None:
        self.total[piece.purpose] -= amount_ns
        self.total[purpose] += amount_ns
        first = self._slots[0][0] if self._slots else 0
        if piece.slot >= first:  # there is one for every second since the first
            spent = self._slots[piece.slot - first][1]
            spent[piece.purpose] -= amount_ns
            spent[purpose] += amount_ns

    def since(self, begin_ns: int) -> Counter[Purpose]:
        """What was spent from ``begin_ns`` on, to the second."""
        first = (begin_ns - self.started_ns) // _SLOT_NS
        found: Counter[Purpose] = Counter()
        for _, spent in takewhile(lambda one: one[0] >= first, reversed(self._slots)):
            found.update(spent)
        return found
