"""Troubles of a remote object store, and their effect on each request. Pure.

-> ``object_store/process.py`` applies the troubles to requests. ``checkpoint/remote/``: the client
that retries.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

import msgspec


class _Selective(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of troubles that affect a selection of requests.

    Args:
        methods: such as ``("PUT",)``; empty for all.
        path: text that the path of the request must contain; "" for any.
        spared: number of matching requests that pass before the first one is affected.
        share: probability that a later one is affected, from 0 to 1.
        most: largest number of affected requests; 0 for no limit.
    """

    methods: tuple[str, ...] = ()
    path: str = ""
    spared: int = 0
    share: float = 1.0
    most: int = 0


class StoreOutage(msgspec.Struct, frozen=True, tag=True):
    """Every connection is reset: open ones, and each new one as soon as it is made."""


class ResetConnection(_Selective, frozen=True):
    """Reset of the connection after ``after_bytes`` of the request's body.

    The answer's body counts if the request has none.
    """

    after_bytes: int = 0


class ErrorReply(_Selective, frozen=True):
    """Refusal by the store, with a status such as 503 (slow down), 500, 429 or 403."""

    status: int = 503


class Lag(_Selective, frozen=True):
    """Slow store.

    Attributes:
        delay_ms: delay before a request is passed on.
        bytes_per_s: limit of both directions together; 0 for none.
    """

    delay_ms: float = 0.0
    bytes_per_s: float = 0.0


class Truncate(_Selective, frozen=True):
    """Answer that ends, with its connection, after ``after_bytes`` of its body."""

    after_bytes: int = 0


class Stall(_Selective, frozen=True):
    """Request that is accepted and not answered.

    Its connection is reset when a trouble is lifted.
    """


class Garble(_Selective, frozen=True):
    """Answer with a flipped bit in its body. An empty body is not affected."""


Trouble = StoreOutage | ResetConnection | ErrorReply | Lag | Truncate | Stall | Garble


class RequestRuling(NamedTuple):
    """Troubles that affect a request, with their numbers.

    Of two troubles of a kind the older one counts.
    """

    reset: tuple[int, ResetConnection] | None = None
    reply: tuple[int, ErrorReply] | None = None
    truncate: tuple[int, Truncate] | None = None
    stall: tuple[int, Stall] | None = None
    garble: tuple[int, Garble] | None = None
    lags: tuple[tuple[int, Lag], ...] = ()


_FIELDS: dict[type[Trouble], str] = {
    ResetConnection: "reset",
    ErrorReply: "reply",
    Truncate: "truncate",
    Stall: "stall",
    Garble: "garble",
}


class StoreTroubles:
    """The troubles of one store, and the counts of their effects.

    Args:
        seed: seed of the draws for troubles that affect a share of the requests.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)
        self._troubles: dict[int, Trouble] = {}
        self._matched: dict[int, int] = {}
        self._selected: dict[int, int] = {}
        self._affected: dict[int, int] = {}
        self._last_id = 0

    @property
    def is_out(self) -> bool:
        """True if every connection is reset."""
        return any(isinstance(trouble, StoreOutage) for trouble in self._troubles.values())

    def impose(self, trouble: Trouble) -> int:
        """Start a trouble and return its identifier."""
        self._last_id += 1
        self._troubles[self._last_id] = trouble
        self._matched[self._last_id] = self._selected[self._last_id] = self._affected[
            self._last_id
        ] = 0
        return self._last_id

    def lift(self, trouble_id: int) -> int:
        """End a trouble and return how many requests it affected; of an outage, the connections."""
        self._troubles.pop(trouble_id, None)
        return self._affected[trouble_id]

    def affected_count(self, trouble_id: int) -> int:
        """Return how many requests a trouble has affected so far; of an outage, the connections."""
        return self._affected[trouble_id]

    def strike(self, trouble_id: int) -> None:
        """Count a request that a trouble has affected.

        Effects count as evidence, and decisions do not.
        """
        self._affected[trouble_id] += 1

    def strike_outage(self) -> None:
        """Count a connection that was reset by an outage."""
        for trouble_id, trouble in self._troubles.items():
            self._affected[trouble_id] += isinstance(trouble, StoreOutage)

    def rule(self, method: str, path: str) -> RequestRuling:
        """Return the troubles that are to affect a request.

        The request counts towards their ``spared`` and ``most``, but not as affected yet. Outages
        are not among them: see :attr:`is_out`.
        """
        by_kind: dict[str, tuple[int, Trouble]] = {}
        lags = []
        for trouble_id, trouble in self._troubles.items():
            if isinstance(trouble, StoreOutage) or not self._strikes(
                trouble_id, trouble, method, path
            ):
                continue
            if isinstance(trouble, Lag):
                lags.append((trouble_id, trouble))
            else:
                by_kind.setdefault(_FIELDS[type(trouble)], (trouble_id, trouble))
        return RequestRuling(lags=tuple(lags), **by_kind)  # type: ignore[arg-type]

    def _strikes(self, trouble_id: int, trouble: _Selective, method: str, path: str) -> bool:
        """Return whether a trouble is to affect a request, which is counted if it matches."""
        if (trouble.methods and method not in trouble.methods) or trouble.path not in path:
            return False
        self._matched[trouble_id] += 1
        if self._matched[trouble_id] <= trouble.spared or self._random.random() >= trouble.share:
            return False
        self._selected[trouble_id] += 1
        return not trouble.most or self._selected[trouble_id] <= trouble.most
