"""Messages by which the harness of an experiment acts on workers and checkpoint daemons.

:mod:`chaoskit.wire.injection_line` carries them.
"""

from __future__ import annotations

from typing import Any

import msgspec


class InjectionMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of the messages on the line of a worker or a checkpoint daemon.

    No coordinator receives them.
    """


class Trigger(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Moment at which a rank stops and waits for its fault.

    ``rank`` and ``step`` -1 match any. ``phase``: phase of a step or a recovery, or ``load``.
    ``generation``: the lowest generation. ``role`` "most_shards" matches the rank with most shards;
    "healer" stops the rank that is about to pull.
    """

    fault: str
    rank: int
    step: int
    phase: str
    generation: int = 0
    role: str = ""


class InjectionAct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Act that a worker or a node does to itself on order, by its name, with its options.

    :mod:`chaoskit.runtime.injection` has those of workers, :mod:`chaoskit.daemon.injection` those
    of nodes.
    """

    name: str
    options: dict[str, Any] = {}


class InjectionHello(InjectionMessage, frozen=True):
    """First message of a worker, or with ``worker`` "" of the checkpoint daemon of ``node``."""

    token: str
    node: str
    worker: str


class AtHook(InjectionMessage, frozen=True):
    """Report of a worker that waits at a trigger until it is released.

    ``peer``: the worker that it is about to pull from. ``generation``: number of its membership; 0
    before its first.
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
    """Order to stop at these triggers, each once.

    The first answers to a worker that says hello have the triggers of the plan. ``more``: another
    part follows at once.
    """

    triggers: tuple[Trigger, ...]
    more: bool = False


class Resume(InjectionMessage, frozen=True):
    """Order to the worker that waits for ``fault`` to continue, after doing ``act`` to itself."""

    fault: str
    act: InjectionAct


class DaemonAct(InjectionMessage, frozen=True):
    """Order to the checkpoint daemon to do ``act`` to the copies that it keeps.

    A repeated order is carried out once.
    """

    fault: str
    act: InjectionAct


class ActReport(InjectionMessage, frozen=True):
    """Report of a worker on the effect of its act, with values read back from the target.

    ``observed``: these values, in words. ``effective``: the act had its effect. With ``worker`` "",
    it comes from ``node``.
    """

    worker: str
    fault: str
    observed: str
    effective: bool
    node: str = ""


class AskThread(InjectionMessage, frozen=True):
    """Question to the thread that listens to the harness; silence means that the GIL is held."""

    number: int


class ThreadAnswered(InjectionMessage, frozen=True):
    """Answer to an :class:`AskThread`."""

    worker: str
    number: int


InjectionOrder = ArmTriggers | Resume | DaemonAct | AskThread
InjectionReport = InjectionHello | AtHook | ActReport | ThreadAnswered
