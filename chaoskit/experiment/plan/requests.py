"""What people and schedulers want of a run while it lasts: collected from any thread, sent by whoever conducts it."""

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
_SILENT = RequestReply(False, "the coordinator has not answered; it may still do what was asked")


class Requests:
    """Requests that wait to be sent, and callers that wait for an answer.

    Attributes:
        on_new: called, from any thread, when there is one more to be sent.
        stores_until_s: monotonic time until which the state with which the job ends may be stored; infinity for any.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.on_new: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._answers: dict[str, queue.SimpleQueue[RequestReply]] = {}
        self._state, self._over = WorldState(), False
        self._sizes: tuple[int, ...] = ()  # that the policy allows, smallest first
        self._nodes: set[str] = set()  # that have been heard of
        self._borrowers: set[str] = set()  # jobs that may have nodes of this run
        self._halt: Halt | None = None
        self._repeats_halt = False
        self.stores_until_s = math.inf

    @property
    def state(self) -> WorldState:
        """The world, as the coordinator tells of it."""
        return self._state

    # -- who wants something ------------------------------------------------------------------------------------

    def scale(self, size: int, asked_by: str = "", timeout_s: float = 20.0) -> RequestReply:
        """Ask for another size, and wait for the answer."""
        return self._ask(ScaleTo(uuid.uuid4().hex, size, asked_by), timeout_s)

    def lend(self, job: str, nodes: int, grace_s: float, timeout_s: float = 20.0) -> RequestReply:
        """Ask for nodes for a job of higher priority, and wait for the answer.

        Raises:
            BadInput: if the job has no name, or wants no node, or no time can be so long.
        """
        if not job:
            raise BadInput("job", job, "name the job: it gives the nodes back under this name")
        if nodes < 1:
            raise BadInput("nodes", nodes, "ask for 1 or more")
        require_grace(grace_s)
        reply = self._ask(LendNodes(uuid.uuid4().hex, job, nodes, grace_s), timeout_s)
        if reply.accepted or reply is _SILENT:  # what is not answered may be done
            self._borrowers.add(job)
        return reply

    def tell(self, message: SpotNotice | NoticeCancelled | ReturnNodes) -> RequestReply:
        """Say what the coordinator does not answer. Refused where it would mean nothing, as with a mistyped name.

        Raises:
            BadInput: if no node can have that name, or no time can be so long.
        """
        if isinstance(message, SpotNotice | NoticeCancelled):
            require_node_name("node", message.node)
        if isinstance(message, SpotNotice):
            require_grace(message.grace_s)
        if not self._sizes:
            return RequestReply(False, _NO_POLICY)
        match message:
            case SpotNotice(node) | NoticeCancelled(node) if node not in self._nodes:
                return RequestReply(
                    False, f"there is no {node!r}: the nodes are {', '.join(sorted(self._nodes))}"
                )
            case ReturnNodes(job) if job not in self._borrowers:
                return RequestReply(False, f"{job!r} has no nodes of this run")
        self._put(message)
        return RequestReply(True, "the coordinator is told")

    def halt(self, reason: str, stores_until_s: float) -> None:
        """Have the job end after the step that it is in. May be called by a signal handler.

        Args:
            reason: for people.
            stores_until_s: monotonic time until which the state of that step may be stored.
        """
        self.stores_until_s = stores_until_s
        self._halt = Halt(reason)
        self._put(self._halt)

    def _put(self, message: Message) -> None:
        self._waiting.put(message)
        self.on_new()

    def _ask(self, message: ScaleTo | LendNodes, timeout_s: float) -> RequestReply:
        answers: queue.SimpleQueue[RequestReply] = queue.SimpleQueue()
        with self._lock:
            if self._over:
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

    # -- who conducts the run -----------------------------------------------------------------------------------

    def take(self) -> list[Message]:
        """What is to be sent now."""
        found: list[Message] = []
        while not self._waiting.empty():
            found.append(self._waiting.get())
        return found

    def hear(self, message: Any) -> None:
        """A message of the coordinator."""
        state = self._state
        match message:
            case Welcome(config):
                self._sizes = config.elastic.sizes if config.elastic is not None else ()
                self._state = msgspec.structs.replace(state, size=state.size or config.nodes)
                self._repeats_halt = (
                    self._halt is not None
                )  # which the coordinator before this one had
            case Plan(generation, members):
                self._state = msgspec.structs.replace(
                    state, generation=generation, world=len(members)
                )
            case Heartbeat(node, beats):
                self._nodes.add(node)
                step = max((beat.step for beat in beats), default=0)
                if step > state.step:
                    self._state = msgspec.structs.replace(state, step=step)
                if (
                    beats and self._repeats_halt and self._halt is not None
                ):  # now the new coordinator knows a step
                    self._repeats_halt = False
                    self._put(self._halt)
            case WorldSize(size, wanted, nodes):
                self._state = msgspec.structs.replace(state, size=size, wanted=wanted, nodes=nodes)
            case Answered(request, accepted, reason, nodes):
                self._resolve(request, RequestReply(accepted, reason, nodes))
            case EndJob():
                self.end()

    def _resolve(self, request: str, reply: RequestReply) -> None:
        with self._lock:
            waiting = self._answers.get(request)
        if waiting is not None:
            waiting.put(reply)

    def end(self) -> None:
        """Nobody is answered any more."""
        with self._lock:
            self._over = True
            waiting = list(self._answers.values())
        for one in waiting:
            one.put(_OVER)
