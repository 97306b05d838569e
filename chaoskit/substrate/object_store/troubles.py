"""What may be wrong with a remote store of objects, and what that means for each request to it. Pure."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

import msgspec


class _Some(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Which requests are struck.

    Args:
        methods: such as ``("PUT",)``; empty: all.
        path: what the path of the request must contain; "": anything.
        spared: so many requests that would be struck pass before the first one is.
        share: of those after them that are struck.
        most: so many are struck; 0: no limit.
    """

    methods: tuple[str, ...] = ()
    path: str = ""
    spared: int = 0
    share: float = 1.0
    most: int = 0


class Outage(msgspec.Struct, frozen=True, tag=True):
    """Every connection is reset: those that are open, and each new one as soon as it is made."""


class Reset(_Some, frozen=True):
    """The connection is reset after ``after_bytes`` of the request's body; of the answer's, if the request has none."""

    after_bytes: int = 0


class Reply(_Some, frozen=True):
    """The store says no: such as 503 (slow down), 500, 429, 403."""

    status: int = 503


class Lag(_Some, frozen=True):
    """Answers come ``delay_ms`` later, and no more than ``bytes_per_s`` pass in both directions together (0: any)."""

    delay_ms: float = 0.0
    bytes_per_s: float = 0.0


class Truncate(_Some, frozen=True):
    """The answer ends, with its connection, after ``after_bytes`` of its body."""

    after_bytes: int = 0


class Stall(_Some, frozen=True):
    """The request is taken, and never answered."""


class Garble(_Some, frozen=True):
    """A bit of the answer's body is not what the store sent. An empty body cannot be struck."""


Trouble = Outage | Reset | Reply | Lag | Truncate | Stall | Garble


class Ruling(NamedTuple):
    """What becomes of a request: its troubles, by their number. Of two of a kind the older one counts."""

    reset: tuple[int, Reset] | None = None
    reply: tuple[int, Reply] | None = None
    truncate: tuple[int, Truncate] | None = None
    stall: tuple[int, Stall] | None = None
    garble: tuple[int, Garble] | None = None
    lags: tuple[tuple[int, Lag], ...] = ()


class Ailments:
    """Everything that is wrong with one store."""

    def __init__(self, seed: int = 0) -> None:
        self._chance = Random(seed)
        self._troubles: dict[int, Trouble] = {}
        self._seen: dict[int, int] = {}
        self._chosen: dict[int, int] = {}
        self._met: dict[int, int] = {}
        self._number = 0

    @property
    def out(self) -> bool:
        """Whether every connection is reset."""
        return any(isinstance(trouble, Outage) for trouble in self._troubles.values())

    def impose(self, trouble: Trouble) -> int:
        """From now on. Gives the number of the trouble."""
        self._number += 1
        self._troubles[self._number] = trouble
        self._seen[self._number] = self._chosen[self._number] = self._met[self._number] = 0
        return self._number

    def lift(self, number: int) -> int:
        """Not any more. Gives how many requests have met it."""
        self._troubles.pop(number, None)
        return self._met[number]

    def met(self, number: int) -> int:
        """How many requests it has struck so far."""
        return self._met[number]

    def strike(self, number: int) -> None:
        """A trouble has taken effect: evidence is what happened to a request, not what was decided about it."""
        self._met[number] += 1

    def strike_outage(self) -> None:
        """A connection was reset for an outage."""
        for number, trouble in self._troubles.items():
            self._met[number] += isinstance(trouble, Outage)

    def rule(self, method: str, path: str) -> Ruling:
        """What becomes of a request."""
        found: dict[str, tuple[int, Trouble]] = {}
        lags = []
        for number, trouble in self._troubles.items():
            if isinstance(trouble, Outage) or not self._strikes(number, trouble, method, path):
                continue
            if isinstance(trouble, Lag):
                lags.append((number, trouble))
            else:
                found.setdefault(type(trouble).__name__.lower(), (number, trouble))
        return Ruling(lags=tuple(lags), **found)  # type: ignore[arg-type]  # the names are those of the kinds

    def _strikes(self, number: int, trouble: _Some, method: str, path: str) -> bool:
        if (trouble.methods and method not in trouble.methods) or trouble.path not in path:
            return False
        self._seen[number] += 1
        if self._seen[number] <= trouble.spared or self._chance.random() >= trouble.share:
            return False
        self._chosen[number] += 1
        return not trouble.most or self._chosen[number] <= trouble.most
