"""The conversation with a driver: an order, what is told and asked for meanwhile, and one answer that ends it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from chaoskit.wire import frames
from chaoskit.wire.messages import Message


class DriverSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of the program.

    Attributes:
        substrate: from which it takes nodes, by name. door: path of the socket at which it asks what to do.
    """

    substrate: str
    door: str


class AskAble(Message, frozen=True):
    """Ask why an action cannot be done to its nodes. ``action``: ``module:Class``. Answered by :class:`DriverDone`."""

    action: str


class ExecutePlan(Message, frozen=True):
    """Run a plan. Answered by :class:`DriverDone` once all of it is written down.

    ``saved``: the plan as it lies in the run's directory. ``plan``: the same, where the files that it names are there
    under other paths. ``modules``: directories in which modules of its faults are found. ``test``: the test of the run,
    as pytest names it; "" outside of a test.
    """

    run_directory: str
    plan: bytes
    saved: bytes
    modules: tuple[str, ...] = ()
    port: int = 0
    twin_id: str = ""
    watched: bool = False
    test: str = ""


class ErrandDone(Message, frozen=True):
    """The client has done an errand. ``failure``: why not; "" where it has."""

    number: int
    failure: str = ""


class DoErrand(Message, frozen=True):
    """Have the client do something to a machine. It is put back after ``lasts_s``; None: at the end of the order."""

    number: int
    name: str
    machine: str
    lasts_s: float | None = None


class EndErrand(Message, frozen=True):
    """Have the client put that back."""

    number: int


class DriverTold(Message, frozen=True):
    """A line for people, such as what is waited for."""

    line: str


class DriverWatched(Message, frozen=True):
    """A message of the run's coordinator, in its frame."""

    data: bytes


class DriverDone(Message, frozen=True):
    """The order was carried out. ``value``: what was asked for."""

    value: str = ""


class DriverFailed(Message, frozen=True):
    """It could not be done. ``field``: what is wrong with the plan; "" where the plan is not to blame."""

    reason: str
    field: str = ""
    value: str = ""


_PIECE_BYTES = 2**15


def pieces(message: Message) -> Iterator[bytes]:
    """A message in pieces that a line takes; they are joined by :class:`chaoskit.wire.frames.Splitter`."""
    data = frames.encode(message)
    for at in range(0, len(data), _PIECE_BYTES):
        yield data[at : at + _PIECE_BYTES]


Order = AskAble | ExecutePlan
ToDriver = Order | ErrandDone
FromDriver = DriverTold | DriverWatched | DoErrand | EndErrand | DriverDone | DriverFailed
