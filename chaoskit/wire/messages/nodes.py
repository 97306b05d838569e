"""Messages by which nodes register, report that they are alive, and learn of the end of the job.

-> agent/agent.py and agent/coordinator_link.py send them; coordinator/handlers/on_node.py,
on_heartbeat.py and on_end.py act on them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from chaoskit.config import RunConfig
from chaoskit.wire.messages.base import Message


class AgentHello(Message, frozen=True):
    """Registration of a node, or its report to a coordinator that has missed some events.

    ``host_id``, ``pid``: machine and process of the agent, which together identify it.
    ``generation``: the newest plan that this node has received; ``term``: the newest coordinator.
    ``workers``: the live workers of the node; ``ended``: lost ones that no coordinator has
    confirmed. ``started``: the number of the next worker here, so that no name comes twice.
    ``host``, ``port``: address at which other nodes may connect to this one and test the link.
    Further facts follow as the messages that report them, and may have been received before.
    """

    node: str
    host_id: str
    pid: int
    generation: int = 0
    workers: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()
    term: int = 0
    started: int = 0
    host: str = ""
    port: int = 0


class ObserverHello(Message, frozen=True):
    """Registration of the harness or a live view, which receives everything and may stop the run.

    A later hello on the same connection changes its pace. ``heartbeat_s``: least time between two
    heartbeats of a node that it receives while nothing else happens; 0 for all heartbeats.
    """

    heartbeat_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class Welcome(Message, frozen=True):
    """Answer to a registration.

    ``term``: number of this coordinator, higher than that of all before it; ``pid``: its process.
    """

    config: RunConfig
    term: int
    pid: int


class Effort(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time that a worker has spent in all steps that it has committed itself: sums, never reset.

    ``compute_ms`` and ``input_ms`` (the fetch of batches) were spent on ``shards`` shards,
    ``wait_ms`` in reductions, ``other_ms`` on the rest: optimizers, and the user's code between the
    steps. ``starved_ms``: time for which its main thread has waited for a CPU since its start, in a
    step or not.
    """

    steps: int = 0
    shards: int = 0
    compute_ms: float = 0.0
    input_ms: float = 0.0
    wait_ms: float = 0.0
    other_ms: float = 0.0
    starved_ms: float = 0.0


class Beat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Reading of the progress board of one worker.

    ``phase``: a :class:`chaoskit.vocabulary.Phase`; ``age_ms``: time since it was entered.
    ``step``: steps that the job has committed; ``commits``: those that this worker has committed
    itself; ``loss``: that of its last step. ``rank``: -1 for none.

    ``starved_ms``: part of ``age_ms`` that was spent waiting for a CPU. ``rehearsal_ms``: time of
    one shard in the rehearsal, with compilation; 0 if it is unknown. ``effort``: None if it cannot
    be read, or is not measured. ``clock_ms``: how far its wall clock is ahead of its agent's.
    ``longest_ms``: longest phase that ended by itself, of each kind of ``TIMED_PHASES``.
    ``trained_in``: the generation in which it last committed a step.
    """

    worker: str
    generation: int
    rank: int
    step: int
    phase: int
    age_ms: float
    starved_ms: float
    commits: int
    loss: float
    rehearsal_ms: float = 0.0
    effort: Effort | None = None
    clock_ms: float = 0.0
    longest_ms: tuple[float, ...] = ()
    trained_in: int = 0


class ClockOffset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Offset of a wall clock against the coordinator's, give or take ``error_ms``.

    ``ahead_ms`` is below 0 for a clock that is behind.
    """

    ahead_ms: float
    error_ms: float


class Heartbeat(Message, frozen=True):
    """Report that a node is alive.

    ``sent_ns``: time of the report, by the run's clock. ``clock``: None before an answer.
    """

    node: str
    beats: tuple[Beat, ...]
    sent_ns: int = 0
    clock: ClockOffset | None = None


class NodeLost(Message, frozen=True):
    """A node and all its workers are lost. A later node of that name has joined anew.

    Attributes:
        detail: the reason, for people.
        met: the members of a plan have met each other, or may have, so they may have trained
            unseen.
        silent: the node is not known to have ended, and may reconnect with the copies that it
            keeps.
    """

    node: str
    detail: str = ""
    met: bool = True
    silent: bool = False


class Heard(Message, frozen=True):
    """Answer to a :class:`Heartbeat`: the lease of the node runs from the time of sending it.

    ``wall_ns``: the coordinator's wall clock as it answered; no decision depends on it.
    """

    sent_ns: int
    wall_ns: int = 0


class Probe(Message, frozen=True):
    """Message to a node that misses a report: its kernel acknowledges it, its agent ignores it."""


class EndJob(Message, frozen=True):
    """Notice that the job has ended, or request to end it.

    ``ok``: the job has succeeded. ``attached``: the nodes that have ever connected, for observers
    of the coordinator that decided the end; no other node has started a worker. None if unknown.
    """

    ok: bool
    reason: str
    attached: tuple[str, ...] | None = None


class StoreStep(Message, frozen=True):
    """Request to store the state after ``step`` steps, soon, or now if it is the newest.

    The step need not be a multiple of the usual interval.
    """

    step: int
