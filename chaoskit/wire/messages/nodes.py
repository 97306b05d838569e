"""How nodes report for duty, and show that they live."""

from __future__ import annotations

from typing import Annotated

import msgspec

from chaoskit.config import RunConfig
from chaoskit.wire.messages.base import Message


class AgentHello(Message, frozen=True):
    """A node reports for duty: for the first time, or to a coordinator that must be told what it has missed.

    ``generation``: the newest plan that this node has seen; ``term``: the newest coordinator. ``workers``: those that
    live here; ``ended``: those that did, as far as no coordinator has said that it knows. ``started``: the number of
    the next worker here, so that no name comes twice. ``host``, ``port``: where other nodes may connect to
    this one and test the link. What else must be known follows as the messages that say it, and may have been heard
    before.
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
    """The harness, or a live view: sees everything, and may stop the run. A later one changes its pace.

    ``heartbeat_s``: how far apart the heartbeats of a node may be that it is shown while nothing else happens; 0 for
    all of them.
    """

    heartbeat_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class Welcome(Message, frozen=True):
    """``term``: number of this coordinator, higher than that of all before it; ``pid``: its process."""

    config: RunConfig
    term: int
    pid: int


class Effort(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the time of a worker went in all the steps that it has committed itself: sums, never reset.

    ``compute_ms`` and ``input_ms`` (the fetch of batches) were spent on ``shards`` shards, ``wait_ms`` in reductions,
    ``other_ms`` on the rest: optimizers, and the user's code between the steps. ``starved_ms``: for how long its main
    thread has waited for a CPU since it was started, in a step or not.
    """

    steps: int = 0
    shards: int = 0
    compute_ms: float = 0.0
    input_ms: float = 0.0
    wait_ms: float = 0.0
    other_ms: float = 0.0
    starved_ms: float = 0.0


class Beat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the progress board of one worker said. ``starved_ms``: of ``age_ms``, time spent waiting for a CPU.

    ``rehearsal_ms``: what one shard took in the rehearsal, compilation and all; 0 if that is not known. ``effort``:
    None where it cannot be read, or is not measured. ``clock_ms``: how far its wall clock is ahead of its agent's.
    ``longest_ms``: of the phases that ended by themselves, by the kinds of ``TIMED_PHASES``. ``trained_in``: the
    generation in which it last committed a step.
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
    """How far a wall clock is ahead of the coordinator's, give or take ``error_ms``."""

    ahead_ms: float
    error_ms: float


class Heartbeat(Message, frozen=True):
    """A node lives. ``sent_ns``: when it said so, by the run's clock. ``clock``: None before an answer."""

    node: str
    beats: tuple[Beat, ...]
    sent_ns: int = 0
    clock: ClockOffset | None = None


class NodeLost(Message, frozen=True):
    """A node is lost, with all its workers: observers are told. What is heard of it later is of one that came back."""

    node: str
    detail: str


class Heard(Message, frozen=True):
    """Answers a :class:`Heartbeat`: the lease of the node runs from when it sent that, not from when this arrives.

    ``wall_ns``: the coordinator's wall clock as it answered; nothing is decided by it.
    """

    sent_ns: int
    wall_ns: int = 0


class Probe(Message, frozen=True):
    """Something to acknowledge for the kernel of a node that misses a report. Its agent has nothing to do."""


class EndJob(Message, frozen=True):
    """The job has ended, or is to end.

    ``attached`` is for observers of the coordinator that decided the end: the nodes that have ever connected. No other
    node has started a worker. None where that is not known.
    """

    ok: bool
    reason: str
    attached: tuple[str, ...] | None = None


class Store(Message, frozen=True):
    """The state after ``step`` steps is to be stored, whatever multiple that is: soon, or now if it is the newest."""

    step: int
