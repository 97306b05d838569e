"""What an agent and its keeper's process say to each other, on a socket that only these two have.

Frames are those of :mod:`chaoskit.wire.frames`. Descriptors come with the first byte of the order that they belong to.
"""

from __future__ import annotations

from chaoskit.wire import frames
from chaoskit.wire.messages import (
    Endpoint,
    HealthReport,
    Holding,
    LinksMeasured,
    MeasureLinks,
    Message,
    Plan,
    Recall,
    Sealed,
    Store,
)


class Adopt(Message, frozen=True):
    """A worker is ready. Carries its board's page and bell, and its arena if ``endpoint`` names one."""

    worker: str
    endpoint: Endpoint


class Ended(Message, frozen=True):
    """No code of the worker runs any more."""

    worker: str


class WentOn(Message, frozen=True):
    """A live worker of this node has committed ``step`` steps."""

    step: int


class Finish(Message, frozen=True):
    """The job is over: what is being stored has so long to get there. Answered by :class:`Finished`.

    ``last``: it has as long as it takes instead, and the state with which the job ended is stored, too.
    ``workers``: those of this node that were there at the end; a plan with none of them is over.
    """

    timeout_s: float
    last: bool
    workers: tuple[str, ...]


class Finished(Message, frozen=True):
    """Nothing is being stored any more, or its time is up."""


Order = Adopt | Holding | Plan | Ended | Recall | WentOn | Store | MeasureLinks | Finish
Answer = Sealed | HealthReport | LinksMeasured | Finished

decode_order = frames.decoder(Order)
decode_answer = frames.decoder(Answer)
