"""What the control plane decides, for its shell to carry out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from chaoskit.coordinator.membership.events import AnyEvent
from chaoskit.coordinator.membership.rendezvous import Reply
from chaoskit.vocabulary import Event
from chaoskit.wire import messages


@dataclass(frozen=True, slots=True)
class Remember:
    """Must survive this process before any later output is carried out.

    ``lag_s``: so much later was it by the clock than for the membership, for which no time passes between coordinators.
    """

    event: AnyEvent
    now_s: float
    lag_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Send:
    """To the agent of a node, if it is attached."""

    node: str
    message: messages.Message


@dataclass(frozen=True, slots=True)
class Show:
    """To every observer."""

    message: messages.Message


@dataclass(frozen=True, slots=True)
class Note:
    """Into the journal. ``t_ns``: when it happened, if that was not now."""

    event: Event
    fields: dict[str, Any] = field(default_factory=dict)
    t_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Whoever speaks for this node from now on is not heard."""

    node: str


@dataclass(frozen=True, slots=True)
class End:
    """The job is over; everybody was told."""


Output = Remember | Send | Show | Note | Disconnect | End | Reply
