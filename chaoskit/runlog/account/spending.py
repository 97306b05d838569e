"""The time of a run on one line, and the purpose of each piece.

Time is spent once, up to a cursor that only moves forward. Its purpose may change later: a step is
thrown away, or kept after all. So the caller may hold spent time and move it to another purpose.

-> runlog/account/accountant.py and runlog/account/steps.py: which time is spent on what.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import takewhile

#: The purpose of time, as part and cause: see :mod:`chaoskit.runlog.account.time_account`.
Purpose = tuple[str, str]

_SLOT_NS = 1_000_000_000
#: Seconds for which the purposes are kept to the second.
KEPT_S = 3600.0
_SLOTS = int(KEPT_S) + 1


@dataclass(slots=True)
class _Piece:
    """A piece of spent time. ``slot`` is the second of the run in which it was spent."""

    slot: int
    purpose: Purpose
    amount_ns: int


@dataclass(slots=True)
class HeldTime:
    """Spent time that may still be moved to another purpose."""

    pieces: list[_Piece] = field(default_factory=list)

    def add(self, slot: int, purpose: Purpose, amount_ns: int) -> None:
        """Append a piece, or extend the newest one if it has the same slot and purpose."""
        last_piece = self.pieces[-1] if self.pieces else None
        if last_piece is not None and (last_piece.slot, last_piece.purpose) == (slot, purpose):
            last_piece.amount_ns += amount_ns
        elif amount_ns:
            self.pieces.append(_Piece(slot, purpose, amount_ns))


class Spending:
    """The purposes of the time of a run, in all and by second.

    Args:
        started_ns: the start of the run, on CLOCK_MONOTONIC.

    Attributes:
        started_ns: the start of the run.
        cursor_ns: all time before it is spent.
        total: purpose -> nanoseconds.
    """

    def __init__(self, started_ns: int) -> None:
        self.started_ns = self.cursor_ns = started_ns
        self.total: Counter[Purpose] = Counter()
        self._slots: deque[tuple[int, Counter[Purpose]]] = deque(maxlen=_SLOTS)

    def spend(self, purpose: Purpose, until_ns: int, holding: HeldTime | None = None) -> int:
        """Spend the time from the cursor up to ``until_ns`` on a purpose; return its amount in ns.

        Args:
            purpose: part and cause.
            until_ns: the new cursor; an earlier time spends nothing.
            holding: receives the pieces, if given.
        """
        amount_ns = max(0, until_ns - self.cursor_ns)
        self.total[purpose] += amount_ns
        end_ns = self.cursor_ns + amount_ns
        known_ns = (_SLOTS + 1) * _SLOT_NS
        if amount_ns > known_ns:  # the rest is older than :data:`KEPT_S`
            forgotten_ns = amount_ns - known_ns
            if holding is not None:
                holding.add(-1, purpose, forgotten_ns)
            self.cursor_ns += forgotten_ns
        while self.cursor_ns < end_ns:
            slot = (self.cursor_ns - self.started_ns) // _SLOT_NS
            piece_ns = min(end_ns, self.started_ns + (slot + 1) * _SLOT_NS) - self.cursor_ns
            self._slot(slot)[purpose] += piece_ns
            if holding is not None:
                holding.add(slot, purpose, piece_ns)
            self.cursor_ns += piece_ns
        return amount_ns

    def _slot(self, slot: int) -> Counter[Purpose]:
        """Return the counter of a second, which is the newest one or follows it."""
        if not self._slots or self._slots[-1][0] != slot:
            self._slots.append((slot, Counter()))
        return self._slots[-1][1]

    def move(self, holding: HeldTime, purpose: Purpose, amount_ns: int | None = None) -> None:
        """Move the newest ``amount_ns`` of held time to ``purpose``; None moves all of it.

        The moved time stays held. If less is held, all of it is moved.
        """
        left_ns = (
            sum(piece.amount_ns for piece in holding.pieces) if amount_ns is None else amount_ns
        )
        pieces: list[_Piece] = []
        for piece in reversed(holding.pieces):
            moved_ns = min(left_ns, piece.amount_ns)
            left_ns -= moved_ns
            self._move(piece, purpose, moved_ns)
            pieces += [_Piece(piece.slot, purpose, moved_ns)] if moved_ns else []
            piece.amount_ns -= moved_ns
            pieces += [piece] if piece.amount_ns else []
        holding.pieces = pieces[::-1]

    def _move(self, piece: _Piece, purpose: Purpose, amount_ns: int) -> None:
        """Move an amount of a piece to ``purpose``, in the total and in its second."""
        self.total[piece.purpose] -= amount_ns
        self.total[purpose] += amount_ns
        first_slot = self._slots[0][0] if self._slots else 0
        if piece.slot >= first_slot:  # there is a slot for every second since the first
            purposes = self._slots[piece.slot - first_slot][1]
            purposes[piece.purpose] -= amount_ns
            purposes[purpose] += amount_ns

    def since(self, begin_ns: int) -> Counter[Purpose]:
        """Return purpose -> nanoseconds for the time from ``begin_ns`` on.

        The second that contains ``begin_ns`` counts as a whole. Only the last :data:`KEPT_S`
        seconds are known.
        """
        first_slot = (begin_ns - self.started_ns) // _SLOT_NS
        purposes: Counter[Purpose] = Counter()
        for _, spent in takewhile(lambda slot: slot[0] >= first_slot, reversed(self._slots)):
            purposes.update(spent)
        return purposes
