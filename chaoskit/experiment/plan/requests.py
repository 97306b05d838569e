"""Requests of users and schedulers to a running job: collected from any thread, sent by the
follower of the run.

-> coordinator/handlers/on_size_request.py: which requests are refused, and why.
experiment/injection/job_follower.py sends the requests and passes on the replies.
launcher/control_api.py and launcher/notice.py: where requests come from.
"""

from __future__ import annotations

import math
import queue
import threading
import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from chaoskit.elastic.client import RequestReply, WorldState, require_grace
from chaoskit.errors import BadInput
from chaoskit.nodename import require_node_name
from chaoskit.wire.messages import (
    Answered,
    EndJob,
    Halt,
    Heartbeat,
    LendNodes,
    Message,
    NoticeCancelled,
    Plan,
    ReturnNodes,
    ScaleTo,
    SpotNotice,
    Welcome,
    WorldSize,
)

_NO_POLICY = "the run has no elastic policy: start it with one"
_OVER = RequestReply(False, "the run is over")
_SILENT = RequestReply(
    False, "the coordinator has not answered; it may still carry out the request"
)


class Requests:
    """Requests that wait to be sent, and the callers that wait for a reply.

    Attributes:
        on_new: called, from any thread, when another request waits to be sent.
        stores_until_s: monotonic time until which the last state of the job may be stored; infinity
            for no limit.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.on_new: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._answers: dict[str, queue.SimpleQueue[RequestReply]] = {}
        self._state, self._is_over = WorldState(), False
        # world sizes that the policy allows, smallest first
        self._allowed_sizes: tuple[int, ...] = ()
        self._known_nodes: set[str] = set()  # names of all nodes that have sent a heartbeat
        self._borrowers: set[str] = set()  # jobs that may have borrowed nodes of this run
        self._halt_request: Halt | None = None
        self._repeats_halt = False
        self.stores_until_s = math.inf

    @property
    def state(self) -> WorldState:
        """The state of the world, as far as the coordinator has reported it."""
        return self._state

    # -- called by users and schedulers ------------------------------------------------------------

    def scale(self, size: int, asked_by: str = "", timeout_s: float = 20.0) -> RequestReply:
        """Ask for another world size, wait for the reply and return it.

        Args:
            size: the new world size.
            asked_by: the name of the user or scheduler, which the cause of the change contains.
            timeout_s: the time in seconds after which a refusal is returned. The coordinator may
                still carry out the request then.
        """
        return self._ask(ScaleTo(uuid.uuid4().hex, size, asked_by), timeout_s)

    def lend(self, job: str, nodes: int, grace_s: float, timeout_s: float = 20.0) -> RequestReply:
        """Ask for nodes for a job of higher priority, wait for the reply and return it.

        Args:
            job: the name under which the job gives the nodes back.
            nodes: the number of nodes.
            grace_s: the time in seconds in which the nodes must be free.
            timeout_s: the time in seconds after which a refusal is returned. The coordinator may
                still carry out the request then.

        Raises:
            BadInput: if the job has no name, wants no node, or names an impossible grace period.
        """
        if not job:
            raise BadInput("job", job, "name the job: it gives the nodes back under this name")
        if nodes < 1:
            raise BadInput("nodes", nodes, "ask for 1 or more")
        require_grace(grace_s)
        reply = self._ask(LendNodes(uuid.uuid4().hex, job, nodes, grace_s), timeout_s)
        # a request without an answer may still be carried out
        if reply.accepted or reply is _SILENT:
            self._borrowers.add(job)
        return reply

    def tell(self, message: SpotNotice | NoticeCancelled | ReturnNodes) -> RequestReply:
        """Queue a message that the coordinator does not answer, and return the reply at once.

        The follower of the run sends it later. The reply is a refusal if the message would have no
        effect, for example with a mistyped name. Nothing is queued then.

        Raises:
            BadInput: if no node can have that name, or the grace period is impossible.
        """
        if isinstance(message, SpotNotice | NoticeCancelled):
            require_node_name("node", message.node)
        if isinstance(message, SpotNotice):
            require_grace(message.grace_s)
        if not self._allowed_sizes:
            return RequestReply(False, _NO_POLICY)
        match message:
            case SpotNotice(node) | NoticeCancelled(node) if node not in self._known_nodes:
                return RequestReply(
                    False,
                    f"there is no {node!r}: the nodes are {', '.join(sorted(self._known_nodes))}",
                )
            case ReturnNodes(job) if job not in self._borrowers:
                return RequestReply(False, f"{job!r} has no nodes of this run")
        self._put(message)
        return RequestReply(True, "the message was sent to the coordinator")

    def halt(self, reason: str, stores_until_s: float) -> None:
        """Queue the request to end the job after the step that it is in, and return at once.

        A signal handler may call this method. The request is sent again to a new coordinator.

        Args:
            reason: the reason, which reports show.
            stores_until_s: monotonic time until which the state of that step may be stored.
        """
        self.stores_until_s = stores_until_s
        self._halt_request = Halt(reason)
        self._put(self._halt_request)

    def _put(self, message: Message) -> None:
        """Queue a message and wake the follower."""
        self._waiting.put(message)
        self.on_new()

    def _ask(self, message: ScaleTo | LendNodes, timeout_s: float) -> RequestReply:
        """Queue a request, wait for its reply and return it.

        The reply is a refusal if the run is over, or the coordinator is silent for ``timeout_s``.
        """
        answers: queue.SimpleQueue[RequestReply] = queue.SimpleQueue()
        with self._lock:
            if self._is_over:
                return _OVER
            self._answers[message.request] = answers
        self._put(message)
        try:
            return answers.get(timeout=timeout_s)
        except queue.Empty:
            return _SILENT
        finally:
            with self._lock:
                self._answers.pop(message.request, None)

    # -- called by the follower of the run ---------------------------------------------------------

    def take(self) -> list[Message]:
        """Remove and return all requests that wait to be sent."""
        messages: list[Message] = []
        while not self._waiting.empty():
            messages.append(self._waiting.get())
        return messages

    def hear(self, message: Any) -> None:
        """Update the state from a message of the coordinator, and pass on the reply in it.

        A new coordinator is sent a halt again that may have been lost with the one before it. The
        end of the job refuses all requests that wait for a reply.
        """
        state = self._state
        match message:
            case Welcome(config):
                self._allowed_sizes = config.elastic.sizes if config.elastic is not None else ()
                self._state = msgspec.structs.replace(state, size=state.size or config.nodes)
                # the halt went to the coordinator before this one
                self._repeats_halt = self._halt_request is not None
            case Plan(generation, members):
                self._state = msgspec.structs.replace(
                    state, generation=generation, world=len(members)
                )
            case Heartbeat(node, beats):
                self._known_nodes.add(node)
                step = max((beat.step for beat in beats), default=0)
                if step > state.step:
                    self._state = msgspec.structs.replace(state, step=step)
                # the new coordinator knows a step by now
                if beats and self._repeats_halt and self._halt_request is not None:
                    self._repeats_halt = False
                    self._put(self._halt_request)
            case WorldSize(size, wanted_size, nodes):
                self._state = msgspec.structs.replace(
                    state, size=size, wanted=wanted_size, nodes=nodes
                )
            case Answered(request, accepted, reason, nodes):
                self._resolve(request, RequestReply(accepted, reason, nodes))
            case EndJob():
                self.end()

    def _resolve(self, request: str, reply: RequestReply) -> None:
        """Give a reply to the caller that waits for it, if any does."""
        with self._lock:
            answers = self._answers.get(request)
        if answers is not None:
            answers.put(reply)

    def end(self) -> None:
        """Refuse the requests that wait for a reply, and later calls of scale and lend.

        Messages without a reply are still queued, but no longer sent.
        """
        with self._lock:
            self._is_over = True
            waiting_queues = list(self._answers.values())
        for answers in waiting_queues:
            answers.put(_OVER)
