"""How large the world shall be; from whoever may observe."""

from __future__ import annotations

from chaoskit.wire.messages.base import Message


class ScaleTo(Message, frozen=True):
    """Train on ``size`` nodes from now on, as far as there are as many. Answered by :class:`Answered`.

    ``request``: a name that nobody used before; what comes twice under it is done once.
    """

    request: str
    size: int
    asked_by: str = ""


class SpotNotice(Message, frozen=True):
    """``node`` will be taken away in ``grace_s``."""

    node: str
    grace_s: float


class NoticeCancelled(Message, frozen=True):
    """``node`` stays after all. The coordinator passes it on to the node, which may still be asking to leave."""

    node: str


class LendNodes(Message, frozen=True):
    """A job of higher priority wants so many nodes within ``grace_s``. Answered by :class:`Answered`."""

    request: str
    job: str
    nodes: int
    grace_s: float


class ReturnNodes(Message, frozen=True):
    """A job of higher priority needs its nodes no more."""

    job: str


class Answered(Message, frozen=True):
    """To who asked. ``nodes``: which a job of higher priority may have, once they have left."""

    request: str
    accepted: bool
    reason: str
    nodes: tuple[str, ...] = ()


class WorldSize(Message, frozen=True):
    """The size at which the run aims, and the nodes that it will be of; said when either changes.

    ``wanted``: the size that was asked for last, 0 for none. Whoever can start nodes should, if there are fewer.
    """

    size: int
    wanted: int
    nodes: tuple[str, ...]
    reason: str
