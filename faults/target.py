"""Target of a fault: the actions that a fault may take on it, and the events it waits for.

-> runtime/injection/acts.py carries out what :meth:`Target.act` orders, in the worker;
daemon/injection.py what :meth:`Target.order` orders, in the checkpoint daemon of a node.
-> experiment/injection/job_follower.py: which process becomes the target, and when;
command_follower.py for a command.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar, overload

from chaoskit.config import RunConfig
from chaoskit.errors import HarnessError, NodeUnreachable
from chaoskit.faults.evidence import Counted, Evidence, RankProcess, ReadBack, Subject, WholeNode
from chaoskit.substrate.core.actions import Action, Applied
from chaoskit.substrate.core.base import Cluster
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.object_store.proxy import ObjectProxy
from chaoskit.substrate.undo import UndoLog
from chaoskit.wire.messages import (
    ActReport,
    AskThread,
    AtHook,
    Beat,
    DaemonAct,
    EndJob,
    Heartbeat,
    InjectionAct,
    InjectionOrder,
    Message,
    Resume,
    ThreadAnswered,
    Trigger,
    WorkerLost,
)

Found = TypeVar("Found")

_LOOK_S = 0.004  # shortest interval between two polls of a target
_LOOK_SHARE = 0.02  # interval between polls, as a share of the time since the act


class ProcessExit(NamedTuple):
    """End of a process: ("killed", "SIGKILL"), ("exited", "status 1"), ("gone", "") if unknown."""

    how: str
    status: str


@contextlib.contextmanager
def after_act() -> Iterator[None]:
    """Mark each NodeUnreachable that leaves the ``with``: the fault has acted before.

    Such a fault is never planned again.
    """
    try:
        yield
    except NodeUnreachable as error:
        error.may_have_acted = True
        raise


class Channel(Protocol):
    """Channel that carries the orders of faults to workers and checkpoint daemons.

    ``experiment/injection/channel.py`` implements it.
    """

    def tell(self, node: str, order: InjectionOrder, worker: str = "") -> bool:
        """Send an order to ``worker``, or to the checkpoint daemon of ``node`` if it is "".

        Return False if the receiver is not connected: the order is lost then.
        """

    def arm_node(self, node: str, trigger: Trigger) -> None:
        """Stop every worker that ``node`` starts from now on at ``trigger``.

        Workers that are connected already receive nothing.
        """


@dataclass(eq=False)
class Target:
    """The process or node that a fault strikes, and the state of its injection.

    Attributes:
        cluster: the nodes of the run.
        undo: log to which the undo of an act is written before the act.
        fault_id: name of the fault in messages and journals, such as ``fault0``.
        worker: name of the worker that had the rank; with its ``node``, ``rank`` and ``process``.
            For a command, the worker is the name of the process. If the fault names a node, the
            process is the first one there, and the rank is -1.
        tid: the thread that stands at the fault's trigger; otherwise the main thread.
        step, phase: position of the rank at the moment of the act, as far as it is known.
        waiting: the worker that stands at the fault's trigger until it is released; "" if none
            does.
        places: rank -> node, as the ranks were held at the moment of the act.
        rack: the nodes of its rack; see :meth:`chaoskit.config.RunConfig.rack`.
        struck_nodes: the nodes that a fault of whole nodes struck.
        claims: each worker that the fault struck -> the time of the act on it.
        injected_ns: time of the first act, by CLOCK_MONOTONIC as all times here; 0 before it.
        acted_ns: time of the last act, or of the end of the last applied action.
        lifted_ns: time at which the fault ended during the run, such as a healed cut; 0 while it
            lasts.
        lost: the report of the agent or the coordinator that ``worker`` is lost.
        losses: such reports of all workers that the fault struck, by worker.
        reports: reports of workers and nodes on acts of this fault, with or without an effect.
        beat: the newest reading of its progress board; None before the first heartbeat.
        logged_step: the highest step in the logs of a command; -1 before the first.
        pongs: numbers of the questions that its listening thread has answered.
        released: workers that stood at its trigger and were released.
        exit: end of the process as its parent saw it. It is known after the run for a rank of a
            job, and at once for the process of a command; None before.
        exited_ns: time at which ``exit`` was observed; 0 before.
        gone_ns: when the process was seen to be gone before another fault struck; 0 if it was not.
        job_ended: the job is over.
        ended_well: the job, or the command of the node, ended by itself: a process that is gone
            then is no evidence.
        left_behind: descriptions of effects that could not be undone.
        config: settings of the run; None for a command.
        channel: connection to workers and checkpoint daemons; None for a command.
        store: the proxy through which the run reaches its remote tier; None if no fault needs it.
        last_word: returns newer evidence than the last, for effects that are counted on and on.
    """

    cluster: Cluster
    undo: UndoLog
    fault_id: str
    worker: str
    node: str
    rank: int
    step: int
    phase: str
    process: Process
    tid: int
    waiting: str = ""
    places: Mapping[int, str] = field(default_factory=dict)
    rack: tuple[str, ...] = ()
    struck_nodes: set[str] = field(default_factory=set)
    config: RunConfig | None = None
    store: ObjectProxy | None = None
    channel: Channel | None = None
    claims: dict[str, int] = field(default_factory=dict)
    injected_ns: int = 0
    acted_ns: int = 0
    lifted_ns: int = 0
    lost: WorkerLost | None = None
    losses: dict[str, WorkerLost] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)
    reports: list[ActReport] = field(default_factory=list)
    beat: Beat | None = None
    logged_step: int = -1
    pongs: set[int] = field(default_factory=set)
    exit: ProcessExit | None = None
    exited_ns: int = 0
    gone_ns: int = 0
    job_ended: bool = False
    ended_well: bool = False
    left_behind: list[str] = field(default_factory=list)
    last_word: Callable[[], Evidence | None] | None = None
    #: The fault waits for the end of the run, and for nothing before it.
    awaits_end: bool = False
    #: Called when a worker was claimed, or the fault was lifted.
    on_note: Callable[[], None] = lambda: None
    _waiters: set[asyncio.Future[None]] = field(default_factory=set)
    _inboxes: list[Inbox] = field(default_factory=list)
    _applied_count: int = 0  # actions that are still in force
    _over: bool = False

    # -- actions -----------------------------------------------------------------------------------

    def signal(self, signum: int) -> None:
        """Send a signal to the worker process.

        Raises:
            ProcessLookupError: if it is gone.
            HarnessError: if its node cannot be reached.
        """
        self.process.signal(signum)

    def act(self, act: str, **options: Any) -> None:
        """Release the waiting worker, which first does ``act`` to itself.

        Nothing is done if no worker waits, as after a strike from outside at a time.

        Args:
            act: name of an act in ``runtime/injection/acts.py``.
            options: options of that act.
        """
        if self.waiting:
            self.release_worker(self.waiting, act, **options)

    def release(self) -> None:
        """Release the waiting worker, if there is one, without any act."""
        self.act("none")

    def release_worker(self, worker: str, act: str, **options: Any) -> None:
        """Release ``worker``, which waits at the trigger and first does ``act`` to itself.

        The worker is noted in ``released``, even if it is not connected any more. The act and its
        options are those of :meth:`act`; ``none`` does nothing.
        """
        self.released.add(worker)
        if self.channel is not None:
            self.channel.tell(
                worker.rpartition(".")[0], Resume(self.fault_id, InjectionAct(act, options)), worker
            )

    def order(self, node: str, act: str, **options: Any) -> None:
        """Order the checkpoint daemon of a node to do ``act`` to the copies that it keeps.

        A repeated order is carried out once, and its outcome reported again. Nothing is reported
        while the copies are on their way, or if the daemon is not connected: order again then.

        Args:
            act: name of an act in ``daemon/injection.py``.
            options: options of that act.
        """
        if self.channel is not None:
            self.channel.tell(node, DaemonAct(self.fault_id, InjectionAct(act, options)))

    def ask_thread(self, number: int) -> bool:
        """Ask the worker's listening thread for a sign of life.

        Return True if the question was sent. The answer adds ``number`` to ``pongs``.
        """
        return self.channel is not None and self.channel.tell(
            self.node, AskThread(number), self.worker
        )

    def arm(self, phase: str) -> None:
        """Stop every worker that the node starts from now on when it enters ``phase``.

        An :class:`AtHook` then reports each of them; the fault that listens must release it.
        """
        if self.channel is not None:
            self.channel.arm_node(self.node, Trigger(self.fault_id, -1, -1, phase))

    def send(self, message: Message) -> bool:
        """Send a message to the coordinator.

        Return False if no coordinator is reachable. True is no proof of its arrival: a caller that
        waits for an answer sends again.
        """
        with contextlib.suppress(OSError):
            self.cluster.send(message)
            return True
        return False

    def claim(self, worker: str = "") -> None:
        """Note, before the act, that a worker is struck now, so that its loss is no false alarm.

        This is the time of the last act, and it is recorded in the journal. The worker is the
        target's unless another one is named.
        """
        self.acted_ns = self.claims[worker or self.worker] = time.monotonic_ns()
        self.on_note()

    def unclaim(self, worker: str = "") -> None:
        """Withdraw a claim: the worker is not struck, or ended by itself before the act."""
        self.claims.pop(worker or self.worker, None)

    def lifted(self) -> None:
        """Note, and record in the journal, that the fault has ended while the run goes on.

        It is the time of the last act, too.
        """
        self.acted_ns = self.lifted_ns = time.monotonic_ns()
        self.on_note()

    def acts(self) -> None:
        """Note that the fault acts again: this is the time of its last act."""
        self.acted_ns = time.monotonic_ns()

    def applied(self, action: Action) -> contextlib.AbstractContextManager[Applied]:
        """Apply an action to the node until the ``with`` is left; see :meth:`Cluster.apply`.

        The action is in force when this returns, before the ``with`` is entered.

        Raises:
            ProcessLookupError: if the node is gone.
            HarnessError: if the action cannot be carried out.
        """
        return self.holding(self.cluster.apply(self.node, action))

    @contextlib.contextmanager
    def holding(self, applied: Applied) -> Iterator[Applied]:
        """Lift an applied action when the ``with`` is left, and note effects that remain.

        Until then the fault counts as acting: it may strike processes that start meanwhile, too.
        The end is the time of the last act. A HarnessError of the undo is raised, unless the run
        is over or the node is not reached.
        """
        self._applied_count += 1
        try:
            with after_act():
                yield applied
        finally:
            self._applied_count -= 1
            self.acts()
            try:
                if not applied.lift():
                    self.left_behind.append(f"what lay on {self.node}")
            except NodeUnreachable as error:
                self.left_behind.append(f"what lay on {self.node}: {error}")
            except HarnessError:
                if not self._over:  # otherwise its process has ended with the run
                    raise

    # -- waits -------------------------------------------------------------------------------------

    @property
    def seconds_since(self) -> float:
        """The seconds since the first act."""
        return (time.monotonic_ns() - self.injected_ns) / 1e9

    @property
    def pid(self) -> int:
        """The process id of the worker, on its node."""
        return self.process.pid

    @property
    def rank_process(self) -> RankProcess:
        """The worker's process, as a subject of evidence."""
        return RankProcess(self.worker, self.rank, self.pid)

    @property
    def whole_node(self) -> WholeNode:
        """The worker's node, as a subject of evidence."""
        return WholeNode(self.node)

    def listen(self, *kinds: type) -> Inbox:
        """Return an inbox of the messages of these kinds that arrive from now on.

        Of :class:`AtHook` it gets only the messages of this fault.
        """
        self._inboxes.append(Inbox(self, kinds))
        return self._inboxes[-1]

    async def sleep(self, seconds: float) -> None:
        """Wait for some seconds. Does not return if the run ends meanwhile."""
        await asyncio.sleep(seconds)
        await self._while_over()

    async def until_end(self) -> NoReturn:
        """Wait until the injector closes the fault, after the end of the run.

        It never returns: the undo must stand in ``finally`` or a ``with``. From this call on the
        fault counts as one that only waits for the end.
        """
        self.awaits_end = True
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nothing sets it")

    @overload
    async def heard(
        self, look: Callable[[], Found | None], *, within_s: None = None, after_end: bool = False
    ) -> Found: ...
    @overload
    async def heard(
        self, look: Callable[[], Found], *, within_s: float, after_end: bool = False
    ) -> Found | None: ...
    async def heard(
        self, look: Callable[[], Any], *, within_s: float | None = None, after_end: bool = False
    ) -> Any:
        """Call ``look`` now and after each message of the run, and return its first true result.

        It does not return if the run ends first, not even after ``within_s``, unless ``after_end``
        is set: the fault is closed where it waits.

        Args:
            within_s: time limit in seconds from now, after which the last result of ``look`` is
                returned, such as None; None for no limit.
            after_end: wait beyond the end of the run, where the ends of processes become known.
        """
        until_s = math.inf if within_s is None else time.monotonic() + within_s
        while True:
            if not after_end:
                await self._while_over()
            if (result := look()) or (left_s := until_s - time.monotonic()) <= 0:
                return result
            await self._change(left_s)

    @overload
    async def seen(self, look: Callable[[], Found | None], *, limit_s: None = None) -> Found: ...
    @overload
    async def seen(self, look: Callable[[], Found], *, limit_s: float | None) -> Found | None: ...
    async def seen(self, look: Callable[[], Any], *, limit_s: float | None = None) -> Any:
        """Call ``look`` again and again, and return its first true result.

        It serves for changes that send no message. The interval grows with the time since the act.
        It does not return if the run ends first, not even after ``limit_s``.

        Args:
            limit_s: limit of the time since the first act, in seconds, after which the last result
                of ``look`` is returned. If it is over already, ``look`` is called once. None for
                no limit.
        """
        limit_s = math.inf if limit_s is None else limit_s
        while True:
            await self._while_over()
            result = None
            with contextlib.suppress(NodeUnreachable):  # until it answers, or its end is proved
                result = look()
            if result or (left_s := limit_s - self.seconds_since) <= 0:
                return result
            await self._change(min(left_s, max(_LOOK_S, _LOOK_SHARE * self.seconds_since)))

    async def ended(self) -> ProcessExit:
        """Wait until the end of the worker's process is known, and return it.

        This may be after the end of the run. Until then the fault counts as one that only waits
        for that.
        """
        self.awaits_end = True
        ended = await self.heard(lambda: self.exit, after_end=True)
        self.awaits_end = False
        return ended

    async def read_back(self) -> ReadBack:
        """Wait until the worker has read back that the ordered act took effect, and return that.

        It does not return if the run ends first, or if the worker reports no effect.
        """
        report = await self.heard(
            lambda: next(
                (ack for ack in self.reports if ack.effective and ack.worker == self.worker), None
            )
        )
        return ReadBack(subject=self.rank_process, source=report.worker, value=report.observed)

    async def counted(
        self, applied: Applied, subject: Subject, source: str, in_words: Callable[[int], str]
    ) -> Counted:
        """Wait until the applied action has met something, and return the count as evidence.

        Counting goes on: the newest count becomes the fault's last evidence. It does not return if
        the run ends while the count is 0.

        Args:
            source: the process, or part of the kernel, that counts.
            in_words: returns the count in words.
        """

        def look() -> Counted | None:
            count = applied.shown()
            return (
                Counted(subject=subject, source=source, count=count, seen=in_words(count))
                if count
                else None
            )

        self.last_word = look
        return await self.seen(look)

    async def _change(self, limit_s: float) -> None:
        """Wait for the next message or :meth:`wake`, at most ``limit_s`` seconds."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        timer = None if limit_s == math.inf else loop.call_later(limit_s, _resolve, waiter)
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)
            if timer is not None:
                timer.cancel()

    async def _while_over(self) -> None:
        """Wait for ever once the run is over: later events are no evidence.

        The generator of the fault is closed where it waits.
        """
        if self._over:
            await asyncio.get_running_loop().create_future()

    # -- calls of the injector ---------------------------------------------------------------------

    def deliver(self, message: Any) -> None:
        """Update the target from a message of the run."""
        match message:
            case WorkerLost(worker):
                if worker in self.claims:
                    self.losses[worker] = message
                if worker == self.worker:
                    self.lost = message
            case ActReport(fault=fault) if fault == self.fault_id:  # of any worker
                self.reports.append(message)
            case ThreadAnswered(worker, number) if worker == self.worker:
                self.pongs.add(number)
            case Heartbeat(node, beats) if node == self.node:
                self.beat = next((beat for beat in beats if beat.worker == self.worker), self.beat)
            case EndJob(ok):
                self.job_ended, self.ended_well = True, ok
        if not isinstance(message, AtHook):
            for inbox in self._inboxes:
                inbox.take(message)
        self.wake()

    def offer_hook(self, hook: AtHook) -> bool:
        """Give the fault a worker that stands at its trigger.

        Return True if the fault listens to such reports: it then releases the worker itself.
        """
        taken = any(inbox.take(hook) for inbox in self._inboxes)
        self.wake()
        return taken

    def tell_exit(self, ended: ProcessExit, seen_ns: int) -> None:
        """Set the end of the worker's process, and the time at which it was observed."""
        self.exit, self.exited_ns = ended, seen_ns
        self.wake()

    def end(self) -> None:
        """Note that the run is over: from now on only the ends of processes are evidence."""
        self._over = True

    def wake(self) -> None:
        """Let all waits of the fault evaluate their conditions again."""
        for waiter in self._waiters:
            _resolve(waiter)

    @property
    def acts_until_ns(self) -> int:
        """The time of the last act; now, while an action is still applied."""
        return time.monotonic_ns() if self._applied_count else self.acted_ns


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Inbox:
    """Messages of some kinds, in the order of their arrival.

    ``async for`` waits for each of them and removes it. It does not end by itself: at the end of
    the run the fault is closed where it waits.
    """

    def __init__(self, target: Target, kinds: tuple[type, ...]) -> None:
        self._target, self._kinds = target, kinds
        self._messages: list[Any] = []

    def take(self, message: Any) -> bool:
        """Keep ``message`` if it is of one of the kinds. Return True if it is."""
        if is_kept := isinstance(message, self._kinds):
            self._messages.append(message)
        return is_kept

    def drain(self) -> list[Any]:
        """Remove and return the messages that have arrived so far, without a wait."""
        drained, self._messages = self._messages, []
        return drained

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            await self._target.heard(lambda: self._messages)
            yield self._messages.pop(0)
