"""Outputs of the control plane, which its shell carries out.

-> coordinator/server.py carries them out (``_carry_out``); coordinator/effects.py makes most of
them. The actions of the membership are in coordinator/membership/events.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from chaoskit.coordinator.membership.events import MembershipEvent
from chaoskit.coordinator.rendezvous import RendezvousReply
from chaoskit.vocabulary import Event
from chaoskit.wire import messages


@dataclass(frozen=True, slots=True)
class LogEntry:
    """An event for the log. It is stored durably before any later output is carried out.

    Attributes:
        now_s: time of the event, on CLOCK_MONOTONIC of this machine.
        lag_s: how far that clock is ahead of the time of the membership, for which no time passes
            between coordinators.
    """

    event: MembershipEvent
    now_s: float
    lag_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the agent of a node. It is dropped if the node is not attached."""

    node: str
    message: messages.Message


@dataclass(frozen=True, slots=True)
class Show:
    """Send a message to every observer, unless the observer's pace leaves it out."""

    message: messages.Message


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """Write a record to the coordinator's journal.

    ``t_ns``: time of the record on CLOCK_MONOTONIC; None for the moment of writing.
    """

    event: Event
    fields: dict[str, Any] = field(default_factory=dict)
    t_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the connection of a node: nothing more is read from it."""

    node: str


@dataclass(frozen=True, slots=True)
class End:
    """End the coordinator: the job is over, and its end was sent to all nodes and observers."""


Output = LogEntry | Send | Show | WriteRecord | Disconnect | End | RendezvousReply
