"""The conversation with a driver: one request, what is told meanwhile, and one answer end it."""

from __future__ import annotations

import msgspec

from chaoskit.messages import Message


class DriverSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of the program.

    Attributes:
        substrate: from which it takes nodes, by name. door: path of the socket at which it asks what to do.
    """

    substrate: str
    door: str


class AskAble(Message, frozen=True):
    """Ask why an action cannot be done to its nodes. ``action``: ``module:Class``. Answered by :class:`Done`."""

    action: str


class ExecutePlan(Message, frozen=True):
    """Run a plan. Answered by :class:`Done` once all of it is written down.

    ``saved``: the plan as it lies in the run's directory. ``plan``: the same, where the files that it names are there
    under other paths. ``modules``: directories in which modules of its faults are found.
    """

    run_directory: str
    plan: bytes
    saved: bytes
    modules: tuple[str, ...] = ()
    port: int = 0
    twin_id: str = ""
    watched: bool = False


class Told(Message, frozen=True):
    """A line for people, such as what is waited for."""

    line: str


class Watched(Message, frozen=True):
    """A message of the run's coordinator, in its frame; of a command what its watch is shown, as JSON."""

    data: bytes


class Done(Message, frozen=True):
    """It is done. ``reason``: what was asked for."""

    reason: str = ""


class NotDone(Message, frozen=True):
    """It could not be done. ``field``: what is wrong with the plan; "" where the plan is not to blame."""

    reason: str
    field: str = ""
    value: str = ""


Order = AskAble | ExecutePlan
Answer = Told | Watched | Done | NotDone
