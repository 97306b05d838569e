"""How the harness of an experiment reaches into workers and checkpoint daemons; see
:mod:`chaoskit.wire.injection_line`.
"""

from __future__ import annotations

from typing import Any

import msgspec


class InjectionMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of what is said on the line of a worker or a checkpoint daemon. No coordinator hears any of it."""


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


class InjectionAct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An act that a worker or a node does to itself on order, by its name.

    For workers see :mod:`chaoskit.runtime.injection`, for nodes :mod:`chaoskit.daemon.injection`.
    """

    name: str
    options: dict[str, Any] = {}


class InjectionHello(InjectionMessage, frozen=True):
    """The first word of a worker, or with ``worker`` "" of the checkpoint daemon of ``node``."""

    token: str
    node: str
    worker: str


class AtHook(InjectionMessage, frozen=True):
    """A worker waits at a trigger until it is released. ``peer``: the worker that it is about to pull from.

    ``generation``: of the membership in which it stands; 0 before its first.
    """

    worker: str
    fault: str
    rank: int
    step: int
    phase: str
    pid: int
    tid: int
    generation: int
    peer: str = ""


class ArmTriggers(InjectionMessage, frozen=True):
    """Stop at these triggers, each once. The first answers to a worker that says hello have those of the plan.

    ``more``: another part follows at once.
    """

    triggers: tuple[Trigger, ...]
    more: bool = False


class Resume(InjectionMessage, frozen=True):
    """Let the worker that waits for ``fault`` go on, after doing ``act`` to itself."""

    fault: str
    act: InjectionAct


class DaemonAct(InjectionMessage, frozen=True):
    """Let the checkpoint daemon do ``act`` to the copies that it keeps, once however often it is told."""

    fault: str
    act: InjectionAct


class ActReport(InjectionMessage, frozen=True):
    """A worker reports what its act did, with values read back from the target; with ``worker`` "", ``node`` does."""

    worker: str
    fault: str
    observed: str
    effective: bool
    node: str = ""


class AskThread(InjectionMessage, frozen=True):
    """Asks the thread that listens to the harness for a :class:`ThreadAnswered`: silence means that the GIL is held."""

    number: int


class ThreadAnswered(InjectionMessage, frozen=True):
    """Answers a :class:`AskThread`."""

    worker: str
    number: int


InjectionOrder = ArmTriggers | Resume | DaemonAct | AskThread
InjectionReport = InjectionHello | AtHook | ActReport | ThreadAnswered
