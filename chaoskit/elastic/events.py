"""What happens to a world's nodes, and what is decided about them."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

# -- what happens -------------------------------------------------------------------------------------------------


class _Happening(msgspec.Struct, frozen=True, tag=True):
    """Can be written down: a world is what the replay of its events gives."""


class Scale(_Happening, frozen=True):
    """Somebody wants a world of so many nodes, from now on as far as there are as many."""

    request: str
    size: int
    asked_by: str = ""


class Arrived(_Happening, frozen=True):
    """A node can be used. ``cost``: what its leaving would cost; the least costly leave first."""

    node: str
    cost: float = 0.0


class Lost(_Happening, frozen=True):
    """A node is gone, whether it was asked to leave or not."""

    node: str


class Left(_Happening, frozen=True):
    """A node's workers have left the world, as they were asked to. The node is still there."""

    node: str


class Notice(_Happening, frozen=True):
    """A node will be taken away at ``deadline_s``."""

    node: str
    deadline_s: float


class NoticeCancelled(_Happening, frozen=True):
    """A node stays, though there was a notice."""

    node: str


class Demand(_Happening, frozen=True):
    """A job of higher priority wants so many nodes within ``grace_s``."""

    request: str
    job: str
    nodes: int
    grace_s: float


class Returned(_Happening, frozen=True):
    """A job of higher priority needs its nodes no more."""

    job: str


class Tick(_Happening, frozen=True):
    """Time has passed."""


Event = Scale | Arrived | Lost | Left | Notice | NoticeCancelled | Demand | Returned | Tick


# -- what is decided ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leave:
    """A node shall leave, and be out at ``by_s``."""

    node: str
    by_s: float


@dataclass(frozen=True, slots=True)
class Resize:
    """The world shall be another: of ``size`` nodes, or 0: it waits until there are enough.

    ``members`` may be fewer than ``size`` while a lost node's replacement is waited for. ``swap_by_s``: until then who
    leaves may stay for who joins in its place, so that the world moves once; None where nobody does.
    """

    size: int
    members: tuple[str, ...]
    joins: tuple[str, ...]
    leaves: tuple[Leave, ...]
    reason: str
    swap_by_s: float | None = None


@dataclass(frozen=True, slots=True)
class Evict:
    """A node has not left in time: end its workers, which may take until ``by_s`` for what they want to do before."""

    node: str
    reason: str
    by_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """To a :class:`Scale` or :class:`Demand`: each gets one, at once.

    ``nodes``: which the job of higher priority may have, once they have left.
    """

    request: str
    accepted: bool
    reason: str
    nodes: tuple[str, ...] = ()


Decision = Resize | Evict | Answer
