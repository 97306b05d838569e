"""How the harness reaches into workers and nodes."""

from __future__ import annotations

from typing import Any

import msgspec

from chaoskit.messages.base import Message


class Trigger(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The moment at which a rank stops and waits for its fault.

    ``rank`` and ``step`` -1 match any. ``phase``: of a step or a recovery, or ``load``. ``generation``: the least one.
    ``role`` "most_shards" matches the rank that has most of them; "healer" stops the rank that is about to pull.
    """

    fault: str
    rank: int
    step: int
    phase: str
    generation: int = 0
    role: str = ""


class Lever(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An act that a worker or a node does to itself on order, by its name.

    For workers see :mod:`chaoskit.runtime.levers`, for nodes :mod:`chaoskit.control.levers`.
    """

    act: str
    options: dict[str, Any] = {}


class HookReached(Message, frozen=True):
    """A worker waits at a trigger; said again until it is released. ``peer``: whom it is about to pull from."""

    worker: str
    fault: str
    rank: int
    step: int
    phase: str
    pid: int
    tid: int
    peer: str = ""


class Arm(Message, frozen=True):
    """Stop ``worker`` at a trigger that was not planned before the start.

    ``worker`` "": stop those that ``node`` starts from now on.
    """

    node: str
    worker: str
    trigger: Trigger


class Release(Message, frozen=True):
    """Let the worker that waits for ``fault`` go on, after pulling ``lever``."""

    worker: str
    fault: str
    lever: Lever


class PullNode(Message, frozen=True):
    """Let ``node`` do ``lever`` to the copies that it keeps, once however often it is told."""

    node: str
    fault: str
    lever: Lever


class LeverPulled(Message, frozen=True):
    """A worker reports what its lever did, with values read back from the target; with ``worker`` "", ``node`` does."""

    worker: str
    fault: str
    observed: str
    effective: bool
    node: str = ""


class Ping(Message, frozen=True):
    """Asks the control thread of a worker for a :class:`Pong`: silence means that the GIL is held."""

    worker: str
    number: int


class Pong(Message, frozen=True):
    worker: str
    number: int


class Store(Message, frozen=True):
    """The state after ``step`` steps is to be stored, whatever multiple that is."""

    step: int


#: What only the harness of an experiment says.
INJECTION_ORDERS = (Arm, Release, PullNode, Ping)
