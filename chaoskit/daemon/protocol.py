"""Messages between an agent and its keeper process, on a socket that only these two have.

Frames are those of :mod:`chaoskit.wire.frames`. Descriptors come with the first byte of their
order.

-> ``daemon/client.py``: the agent's end. ``daemon/process.py``: the keeper's end.
-> ``wire/messages/``: the orders and answers that the coordinator sends or gets itself.
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
    StoreStep,
)


class Adopt(Message, frozen=True):
    """The order to keep the state of a worker that is ready.

    Carries the descriptors of its board's page and event, and of its arena if ``endpoint`` names
    one.
    """

    worker: str
    endpoint: Endpoint


class Ended(Message, frozen=True):
    """The note that no code of the worker runs any more."""

    worker: str


class WentOn(Message, frozen=True):
    """The note that a live worker of this node has committed ``step`` steps."""

    step: int


class Finish(Message, frozen=True):
    """The order to finish saves and uploads, because the job is over.

    Answered by :class:`Finished`. ``timeout_s`` is the time limit. If ``last`` is set there is no
    limit, and the state with which the job ended is stored, too. ``workers`` are those of this node
    at the end of the job; a plan without any of them is outdated.
    """

    timeout_s: float
    last: bool
    workers: tuple[str, ...]


class Finished(Message, frozen=True):
    """The answer to :class:`Finish`: nothing is being stored any more, or the time is up."""


Order = Adopt | Holding | Plan | Ended | Recall | WentOn | StoreStep | MeasureLinks | Finish
Answer = Sealed | HealthReport | LinksMeasured | Finished

decode_order = frames.decoder(Order)
decode_answer = frames.decoder(Answer)
