"""What a fault strikes: what it may do to that, and what it may wait for."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

from chaoskit.config import RunConfig
from chaoskit.errors import HarnessError
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

_LOOK_S = 0.004  # between two looks at what has just been struck
_LOOK_SHARE = 0.02  # of the time since the act: the longer its evidence takes, the less often it is looked for


class Exit(NamedTuple):
    """How a process ended: ("killed", "SIGKILL"), ("exited", "status 1"); ("gone", "") where nothing tells."""

    how: str
    status: str


class Channel(Protocol):
    """What a fault may say to workers and checkpoint daemons."""

    def tell(self, node: str, order: InjectionOrder, worker: str = "") -> bool:
        """Give an order to a worker, or to the checkpoint daemon of ``node``. False where that is not there."""

    def arm_node(self, node: str, trigger: Trigger) -> None:
        """Stop every worker that ``node`` starts from now on at ``trigger``."""


@dataclass(eq=False)
class Target:
    """What a fault strikes, what it may do to it, and what was heard of it since.

    Attributes:
        worker: name of the process that had the rank; with its ``node``, ``rank`` and ``process``.
        tid: the thread that stands at the fault's trigger; the main one else.
        step, phase: where the rank was at the moment of the act.
        waiting: the worker that stands at the fault's trigger until it is released; "" if none does.
        places: rank -> node, as the ranks were held at the moment of the act.
        rack: the nodes that are lost with this one when its rack is; see :meth:`chaoskit.config.RunConfig.rack`.
        struck_nodes: for faults that strike whole nodes, those that it struck.
        claims: every worker that the fault struck, with the time of the act on it.
        injected_ns: time of the first act. acted_ns: of the last one.
        lifted_ns: when the fault ended while the run went on, as a cut that is healed; 0 while it lasts.
        lost: the agent's or coordinator's word that ``worker`` is gone, once there is one.
        losses: the same for every worker that the fault struck.
        reports: what a worker or a node itself read back after it acted on order.
        beat: the newest reading of its progress board.
        pongs: answers of its thread that listens, by number.
        released: workers that stood at its trigger, and were let go on.
        exit: how its parent saw it end; of a job's rank known after the run, of a command's process at once.
        gone_ns: when it was seen to be gone before another fault struck; 0: it was not.
        job_ended: whether the job is over.
        ended_well: whether it, or the command of the node, ended by itself: then what is gone is no evidence.
        left_behind: what could not be put back.
        config: of the run; None of a command.
        channel: to workers and checkpoint daemons; None of a command.
        store: the proxy through which the run reaches its remote tier; None where no fault asks for one.
        last_word: gives newer evidence than the last, for faults that are felt again and again.
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
    pongs: set[int] = field(default_factory=set)
    exit: Exit | None = None
    exited_ns: int = 0
    gone_ns: int = 0
    job_ended: bool = False
    ended_well: bool = False
    left_behind: list[str] = field(default_factory=list)
    last_word: Callable[[], Evidence | None] | None = None
    #: Only the end of the run can tell the fault more.
    awaits_end: bool = False
    #: Called when a worker was claimed, or the fault has ended.
    on_note: Callable[[], None] = lambda: None
    _waiters: set[asyncio.Future[None]] = field(default_factory=set)
    _inboxes: list[Inbox] = field(default_factory=list)
    _lasts: int = 0
    _over: bool = False

    # -- what it may do -------------------------------------------------------------------------------------------

    def signal(self, signum: int) -> None:
        """Send a signal to the worker process. Raises ProcessLookupError where it is gone."""
        self.process.signal(signum)

    def act(self, act: str, **options: Any) -> None:
        """Let the worker that waits go on, after doing ``act`` to itself. Nothing, where none waits."""
        if self.waiting:
            self.release_worker(self.waiting, act, **options)

    def release(self) -> None:
        """Let the worker that waits go on as if nothing had been. Nothing, where none waits."""
        self.act("none")

    def release_worker(self, worker: str, act: str, **options: Any) -> None:
        """Let ``worker``, which stands at the fault's trigger, go on after doing ``act`` to itself."""
        self.released.add(worker)
        if self.channel is not None:
            self.channel.tell(
                worker.rpartition(".")[0], Resume(self.fault_id, InjectionAct(act, options)), worker
            )

    def order(self, node: str, act: str, **options: Any) -> None:
        """Have a node do ``act`` to the copies that it keeps. May be said again: it is done once."""
        if self.channel is not None:
            self.channel.tell(node, DaemonAct(self.fault_id, InjectionAct(act, options)))

    def ask_thread(self, number: int) -> bool:
        """Ask the worker's thread that listens for a sign of life. Whether the question is on its way."""
        return self.channel is not None and self.channel.tell(
            self.node, AskThread(number), self.worker
        )

    def arm(self, phase: str) -> None:
        """Stop every worker that the node starts from now on when it enters ``phase``."""
        if self.channel is not None:
            self.channel.arm_node(self.node, Trigger(self.fault_id, -1, -1, phase))

    def say(self, message: Message) -> bool:
        """Speak to the coordinator. False where there is none: what waits for an answer asks again."""
        with contextlib.suppress(OSError):
            self.cluster.send(message)
            return True
        return False

    def claim(self, worker: str = "") -> None:
        """Say, before the act, that a worker is struck now: its loss is no false alarm. The target's, unless named."""
        self.acted_ns = self.claims[worker or self.worker] = time.monotonic_ns()
        self.on_note()

    def unclaim(self, worker: str = "") -> None:
        """Take that back: the worker comes to no harm, or ended by itself before the act."""
        self.claims.pop(worker or self.worker, None)

    def lifted(self) -> None:
        """Say that the fault has ended while the run goes on."""
        self.acted_ns = self.lifted_ns = time.monotonic_ns()
        self.on_note()

    def acts(self) -> None:
        """Say that it acts again."""
        self.acted_ns = time.monotonic_ns()

    def applied(self, action: Action) -> contextlib.AbstractContextManager[Applied]:
        """Break something of the target's node as long as a ``with`` lasts; see :meth:`Cluster.apply`."""
        return self.holding(self.cluster.apply(self.node, action))

    @contextlib.contextmanager
    def holding(self, applied: Applied) -> Iterator[Applied]:
        """Lift what was applied when a ``with`` is left, and note it where something of it is left.

        Until then the fault acts: it may strike whatever is started meanwhile, too.
        """
        self._lasts += 1
        try:
            yield applied
        finally:
            self._lasts -= 1
            self.acts()
            try:
                if not applied.lift():
                    self.left_behind.append(f"what lay on {self.node}")
            except HarnessError:
                if not self._over:  # else what carries it out has ended with the run
                    raise

    # -- what it may wait for ---------------------------------------------------------------------------------------

    @property
    def seconds_since(self) -> float:
        """Time since the act."""
        return (time.monotonic_ns() - self.injected_ns) / 1e9

    @property
    def pid(self) -> int:
        """Of the worker's process, on its node."""
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
        """The messages of these kinds that are heard from now on. Of :class:`AtHook`, those of this fault."""
        self._inboxes.append(Inbox(self, kinds))
        return self._inboxes[-1]

    async def sleep(self, seconds: float) -> None:
        """Wait so long."""
        await asyncio.sleep(seconds)
        await self._while_over()

    async def until_end(self) -> NoReturn:
        """Wait until the run is over; what is left to put back follows in ``finally``."""
        self.awaits_end = True
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nothing sets it")

    async def heard(
        self, look: Callable[[], Found], *, within_s: float | None = None, after_end: bool = False
    ) -> Found | None:
        """Wait until ``look`` finds something, which is asked after each message of the run.

        Args:
            within_s: so long at most; what ``look`` gave last is returned then.
            after_end: go on when the run is over: then it becomes known how its processes ended.
        """
        until_s = math.inf if within_s is None else time.monotonic() + within_s
        while True:
            if not after_end:
                await self._while_over()
            if (found := look()) or (left_s := until_s - time.monotonic()) <= 0:
                return found
            await self._change(left_s)

    async def seen(
        self, look: Callable[[], Found], *, limit_s: float | None = None
    ) -> Found | None:
        """Wait until ``look`` finds something, for what sends no message. The longer it takes the less often it looks.

        Args:
            limit_s: of the time since the act; what ``look`` gave last is returned then.
        """
        limit_s = math.inf if limit_s is None else limit_s
        while True:
            await self._while_over()
            if (found := look()) or (left_s := limit_s - self.seconds_since) <= 0:
                return found
            await self._change(min(left_s, max(_LOOK_S, _LOOK_SHARE * self.seconds_since)))

    async def ended(self) -> Exit:
        """Wait until it is known how the worker's process ended."""
        self.awaits_end = True
        await self.heard(lambda: self.exit, after_end=True)
        self.awaits_end = False
        assert self.exit is not None
        return self.exit

    async def read_back(self) -> ReadBack:
        """Wait until the worker has read back that what it was ordered to do took effect."""
        report = await self.heard(
            lambda: next(
                (one for one in self.reports if one.effective and one.worker == self.worker), None
            )
        )
        assert report is not None
        return ReadBack(subject=self.rank_process, source=report.worker, value=report.observed)

    async def counted(
        self, applied: Applied, subject: Subject, source: str, told: Callable[[int], str]
    ) -> Counted:
        """Wait until what was applied has met something. It counts on: the newest count is the fault's last word.

        Args:
            told: the count in words.
        """

        def look() -> Counted | None:
            count = applied.shown()
            return (
                Counted(subject=subject, source=source, count=count, seen=told(count))
                if count
                else None
            )

        self.last_word = look
        evidence = await self.seen(look)
        assert evidence is not None
        return evidence

    async def _change(self, limit_s: float) -> None:
        """Wait for the next message, or so long."""
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
        """Nothing that happens when the run is over is evidence: what waits for it is ended at its place."""
        if self._over:
            await asyncio.get_running_loop().create_future()

    # -- what the injector says ---------------------------------------------------------------------------------------

    def deliver(self, message: Any) -> None:
        """Take in what a message of the run says of the target."""
        match message:
            case WorkerLost(worker):
                if worker in self.claims:
                    self.losses[worker] = message
                if worker == self.worker:
                    self.lost = message
            case ActReport(fault=fault) if (
                fault == self.fault_id
            ):  # of whatever worker: some strike several
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
        """Tell the fault of another worker that stands at its trigger. Whether the fault itself answers it."""
        taken = any(inbox.take(hook) for inbox in self._inboxes)
        self.wake()
        return taken

    def tell_exit(self, ended: Exit, seen_ns: int) -> None:
        """How the worker's process ended, and when that was seen."""
        self.exit, self.exited_ns = ended, seen_ns
        self.wake()

    def end(self) -> None:
        """The run is over: from now on only what tells how processes ended is evidence."""
        self._over = True

    def wake(self) -> None:
        """Have everything that waits look again."""
        for waiter in self._waiters:
            _resolve(waiter)

    @property
    def acts_until_ns(self) -> int:
        """When it acted last: now, where it lasts and was not lifted."""
        return time.monotonic_ns() if self._lasts else self.acted_ns


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Inbox:
    """Messages of some kinds, in the order in which they were heard."""

    def __init__(self, target: Target, kinds: tuple[type, ...]) -> None:
        self._target, self._kinds = target, kinds
        self._messages: list[Any] = []

    def take(self, message: Any) -> bool:
        """Keep ``message``, if it is of one of the kinds. Whether it is."""
        if wanted := isinstance(message, self._kinds):
            self._messages.append(message)
        return wanted

    def drain(self) -> list[Any]:
        """Take out what was heard so far."""
        found, self._messages = self._messages, []
        return found

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            await self._target.heard(lambda: self._messages)
            yield self._messages.pop(0)
