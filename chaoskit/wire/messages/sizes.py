"""Messages about the size of the world; any observer may send the requests.

-> elastic/client.py and launcher/control_api.py: the way of a request;
coordinator/handlers/on_size_request.py acts on it.
"""

from __future__ import annotations

from chaoskit.wire.messages.base import Message


class ScaleTo(Message, frozen=True):
    """Request to train on ``size`` nodes from now on, or on as many as there are.

    The answer is :class:`Answered`. ``request`` is a unique name; a repeated request is carried out
    once. ``asked_by``: the source of the request, for people.
    """

    request: str
    size: int
    asked_by: str = ""


class SpotNotice(Message, frozen=True):
    """Notice that ``node`` will be taken away in ``grace_s`` seconds."""

    node: str
    grace_s: float


class NoticeCancelled(Message, frozen=True):
    """Notice that ``node`` stays after all.

    The coordinator forwards it to the node, which may still be asking to leave.
    """

    node: str


class LendNodes(Message, frozen=True):
    """Request of ``job``, which has a higher priority, for a number of nodes.

    They should leave within ``grace_s`` seconds. The answer is :class:`Answered`. ``request`` is a
    unique name, as in :class:`ScaleTo`.
    """

    request: str
    job: str
    nodes: int
    grace_s: float


class ReturnNodes(Message, frozen=True):
    """Notice that a job of higher priority needs its nodes no more."""

    job: str


class Answered(Message, frozen=True):
    """Answer to the request with the same name.

    ``reason``: in words, also of an accepted request. ``nodes``: the nodes that a job of higher
    priority gets, once they have left.
    """

    request: str
    accepted: bool
    reason: str
    nodes: tuple[str, ...] = ()


class WorldSize(Message, frozen=True):
    """Target size of the world, and the nodes that it will have; sent when either changes.

    ``wanted``: the size of the last request, 0 for none. A receiver that can start nodes should do
    so if there are fewer.
    """

    size: int
    wanted: int
    nodes: tuple[str, ...]
    reason: str
