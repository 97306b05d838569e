"""The agent of a node: starts workers through a zygote, watches them, and passes messages on.

A worker's end is noticed three ways, the fastest first: its life latch (0.2 ms after the kernel begins to end it), its
pidfd, and the zygote, which as the parent also hears how it ended and at once when it is stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from chaoskit.agent.coordinator_link import Uplink, attach_first
from chaoskit.agent.reconnect import can_connect
from chaoskit.agent.standstill import Standstill
from chaoskit.agent.worker_handle import Charge
from chaoskit.config import disk_directory
from chaoskit.daemon.client import KeeperLine
from chaoskit.daemon.process import Quarters, start_keeper
from chaoskit.errors import ChaoskitError, Refused
from chaoskit.journal import Journal
from chaoskit.logs.process import LogLine, start_log_process
from chaoskit.process.heartbeat_page import Board
from chaoskit.process.linux import (
    adopt_orphans,
    describe_status,
    die_of,
    die_with_parent,
    host_id,
    raise_priority,
    set_name,
    signal_name,
)
from chaoskit.process.run_clock import to_run
from chaoskit.runtime.worker import zygote
from chaoskit.vocabulary import EXITED, Event
from chaoskit.wire import frames, messages
from chaoskit.wire.coordinator_files import Address, CoordinatorAddress
from chaoskit.wire.injection_line import InjectionDoor
from chaoskit.wire.lease import REPORT_SHARE
from chaoskit.wire.messages import (
    AgentHello,
    EndJob,
    Halt,
    Heartbeat,
    Holding,
    LinksTested,
    MeasureLinks,
    NoticeCancelled,
    Plan,
    Recall,
    RuleFired,
    SpotNotice,
    StartWorker,
    StopWorker,
    Store,
    TestLinks,
    Welcome,
    WorkerFailed,
    WorkerLost,
    WorkerReady,
)

_FAREWELL_S = 2.0
_STORING_S = (
    0.5  # of a job that failed: the launcher's patience is not much longer than both together
)
_RETIRE_LOOK_S = 0.02
_ASK_AGAIN_S = 1.0
_BURIAL_S = 1.0  # a killed worker is gone much sooner, unless the kernel holds it
_REPORT_BYTES_MAX = 65536
#: Signals that a process gets for what its own code does.
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})


class AgentSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a substrate tells a new agent."""

    node: str
    host: str  # address under which other nodes reach this one
    coordinator: CoordinatorAddress  # when it was started
    token: str
    run_directory: str
    injection: InjectionDoor | None = None  # of a run with faults
    started: int = 0  # workers that agents before this one have started under the name of the node

    def where(self) -> Address:
        """Where the coordinator is now."""
        return self.coordinator.latest(self.run_directory).control


class Agent:
    """Runs one node until the job ends, or there is no coordinator for too long.

    An error in any part of it ends the agent, and with it the node.
    """

    def __init__(
        self,
        spec: AgentSpec,
        coordinator: socket.socket,
        welcome: Welcome,
        reports: socket.socket,
        port: int,
        keeper: KeeperLine,
        log_process: socket.socket | None,
        zygote_pid: int = 0,
    ) -> None:
        self._spec, self._config = spec, welcome.config
        self._zygote, self._port, self._keeper, self._log_process = (
            reports,
            port,
            keeper,
            log_process,
        )
        self._uplink = Uplink(coordinator, spec.where, spec.token, welcome, self._hello)
        self._generation = 0  # of the newest plan
        self._started_count = spec.started
        self._journal = Journal(
            Path(spec.run_directory) / "journal", spec.node, role="agent", node=spec.node
        )
        self._charges: dict[str, Charge] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._zygote_pid = zygote_pid
        self._is_job_imported = not (
            welcome.config.fork and zygote_pid
        )  # by the fork server, if it is to
        self._retirement: asyncio.Task[None] | None = None  # while the node asks for leave

    async def run(self) -> None:
        """Until the job ends."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(lambda loop, context: self._suffer(context))
        self._zygote.setblocking(False)
        self._loop.add_reader(self._zygote, self._hear_zygote)
        self._keeper.open(self._tell, die_of)
        beating = self._spawn(self._beat())
        if self._config.elastic is not None:
            self._loop.add_signal_handler(signal.SIGTERM, self._take_notice)
        if self._log_process is not None:
            line = LogLine(
                self._spec.node,
                self._config.rules,
                self._log_process,
                self._watched,
                self._tell_of_log,
            )
            self._spawn(line.run())
        ended = "there was no coordinator for too long"
        try:
            async for message in self._uplink.follow():
                if isinstance(message, EndJob):
                    ended = "the job ended"
                    beating.cancel()  # no coordinator hears it any more, perhaps for minutes
                    await self._say_goodbye(message)
                else:
                    self._obey(message)
        finally:
            self._end_all()
        self._journal.sign_off(ended)

    def _hello(self) -> AgentHello:
        living = tuple(charge.name for charge in self._charges.values() if not charge.lost)
        return AgentHello(
            node=self._spec.node,
            host_id=host_id(),
            pid=os.getpid(),
            generation=self._generation,
            workers=living,
            ended=self._uplink.facts.ended,
            term=self._uplink.term,
            started=self._started_count,
            host=self._spec.host,
            port=self._port,
        )

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            die_of(error)

    def _suffer(self, context: dict[str, Any]) -> None:
        """What asyncio would only write down. A connection may break; anything else is a bug of ours."""
        error = context.get("exception")
        if error is None or isinstance(error, ConnectionError):
            self._loop.default_exception_handler(context)
        else:
            die_of(error)

    def _tell(self, message: messages.Message) -> None:
        self._uplink.tell(message)

    # -- orders of the coordinator --------------------------------------------------------------------------------

    def _obey(self, message: Any) -> None:
        match message:
            case Plan(generation):
                self._generation = max(self._generation, generation)
                for worker in (*(member.worker for member in message.members), *message.leavers):
                    self._pass_on(worker, message)
                self._keeper.follow(message)
            case Recall(number):
                self._spawn(self._recall(number))
            case Store():
                self._keeper.store(message)
            case TestLinks():
                self._spawn(self._test_links(message))
            case MeasureLinks():
                self._keeper.measure(message)
            case StartWorker(worker):
                if worker not in self._charges:
                    self._start(worker)
            case Halt():
                for charge in self._charges.values():
                    charge.tell(message)
            case NoticeCancelled():
                self._stay()
            case StopWorker(worker):
                if worker in self._charges:
                    self._stop(self._charges[worker], message)

    def _take_notice(self) -> None:
        """SIGTERM, as a cloud or a scheduler sends it: the node is to go. The second one ends it at once."""
        self._loop.remove_signal_handler(signal.SIGTERM)
        self._retirement = self._spawn(self._retire())

    def _stay(self) -> None:
        """The notice is taken back."""
        if self._retirement is not None:
            self._retirement.cancel()
            self._retirement = None
            self._loop.add_signal_handler(signal.SIGTERM, self._take_notice)

    async def _retire(self) -> None:
        """Ask for leave, and end once no worker is left."""
        assert self._config.elastic is not None
        until_s = time.monotonic() + self._config.elastic.graceful_shutdown_timeout_s
        asked_s = -math.inf
        while self._charges:
            if (
                now_s := time.monotonic()
            ) > asked_s + _ASK_AGAIN_S:  # a coordinator may have ended with it
                asked_s = now_s
                self._tell(SpotNotice(self._spec.node, max(0.0, until_s - now_s)))
            await asyncio.sleep(_RETIRE_LOOK_S)
        self._end_all()
        self._journal.sign_off("its node left")
        os._exit(0)

    async def _test_links(self, order: TestLinks) -> None:
        doors = {node: (host, port) for node, host, port in order.targets}
        reached = await asyncio.gather(*(can_connect(door) for door in doors.values()))
        unreachable = tuple(node for node, well in zip(doors, reached, strict=True) if not well)
        self._tell(LinksTested(self._spec.node, order.number, unreachable))

    def _pass_on(self, worker: str, message: messages.Message) -> None:
        if (charge := self._charges.get(worker)) is not None:
            charge.tell(message)

    def _start(self, worker: str) -> None:
        mine, theirs = socket.socketpair()
        charge = Charge(worker, Board.create(), mine, Standstill(self._config.heartbeat_ms))
        self._charges[worker] = charge
        self._started_count = max(self._started_count, int(worker.rpartition(".")[2]) + 1)
        spec = {
            "worker": worker,
            "node": self._spec.node,
            "host": self._spec.host,
            "coordinator": self._spec.coordinator,
            "token": self._spec.token,
            "config": self._config,
            "run_directory": self._spec.run_directory,
            "journal": worker,
            "injection": self._spec.injection,
        }
        self._spawn(self._listen(charge))
        with theirs:
            try:
                descriptors = [theirs.fileno(), charge.board.fd, charge.board.bell]
                zygote.order_worker(self._zygote, worker, msgspec.json.encode(spec), descriptors)
            except OSError as error:
                self._not_started(charge, f"{type(error).__name__}: {error}")

    async def _recall(self, number: int) -> None:
        """Offer what is left of the state, once those who may still write to it are gone."""
        deadline_s = time.monotonic() + _BURIAL_S
        while any(charge.lingers for charge in self._charges.values()):
            if time.monotonic() > deadline_s:
                break
            await asyncio.sleep(0.001)
        self._keeper.recall(number)

    def _stop(self, charge: Charge, order: StopWorker) -> None:
        """End a worker: at once, or when its grace is over. Meanwhile it counts as lost."""
        if charge.goes and order.grace_s:
            return  # said again, by another coordinator
        if not order.grace_s or charge.lost or charge.writer is None:
            charge.kill()
            return
        charge.tell(order)
        charge.lost = charge.goes = True
        self._loop.call_later(order.grace_s, charge.kill)

    # -- what workers say and show --------------------------------------------------------------------------------

    async def _listen(self, charge: Charge) -> None:
        reader, charge.writer = await asyncio.open_connection(sock=charge.connection)
        with contextlib.suppress(ConnectionError):
            while True:
                message = await self._read(reader, charge)
                if isinstance(message, Holding):
                    self._keeper.hold(message)
                    continue
                if isinstance(message, WorkerReady):
                    endpoint = self._keeper.adopt(charge.name, message.endpoint, charge.board)
                    message = msgspec.structs.replace(message, endpoint=endpoint)
                    threading.Thread(target=self._await_death, args=(charge,), daemon=True).start()
                self._tell(message)
                if isinstance(message, WorkerFailed):
                    self._lose(charge, "raised", message.error, time.monotonic_ns())
                    charge.kill()
        charge.writer.close()
        self._uplink.facts.close(charge.name)

    async def _read(self, reader: asyncio.StreamReader, charge: Charge) -> Any:
        try:
            return await frames.read_message(reader)
        except Refused as error:  # its memory is damaged, or the user's code wrote to a descriptor that is not its own
            self._lose(
                charge, "raised", f"it said what is no message: {error}", time.monotonic_ns()
            )
            charge.kill()
            raise ConnectionError from error

    def _await_death(self, charge: Charge) -> None:
        charge.board.await_death()
        self._loop.call_soon_threadsafe(self._latch_broke, charge, time.monotonic_ns())

    def _latch_broke(self, charge: Charge, detected_ns: int) -> None:
        self._lose(charge, EXITED, "the kernel reports its end", detected_ns)
        charge.latched = True
        self._keeper.ended(charge.name)

    def _hear_zygote(self) -> None:
        try:
            data = self._zygote.recv(_REPORT_BYTES_MAX)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._zygote)
            self._spawn(self._zygote_ended())
            return
        report = zygote.report_decoder.decode(data)
        if isinstance(report, zygote.Started):
            self._started(self._charges[report.worker], report.pid)
        elif isinstance(report, zygote.NotStarted):
            self._not_started(self._charges[report.worker], report.error)
        elif isinstance(report, zygote.ChildChanged):
            self._child_changed(report)
        elif isinstance(report, zygote.Loaded):
            self._is_job_imported = True
        else:
            self._tell_broken(report.error, report.refused)

    def _tell_broken(self, error: str, refused: tuple[str, str, str] | None = None) -> None:
        """Report that the job cannot be imported: no node could do it."""
        self._tell(WorkerFailed(f"{self._spec.node}.zygote", error, fatal=True, refused=refused))

    async def _zygote_ended(self) -> None:
        """End the node, as no worker can be started any more; the whole job, if its import has ended the zygote."""
        if self._is_job_imported:
            die_of(ChaoskitError("the fork server of this node has ended"))
        _, status = await asyncio.to_thread(os.waitpid, self._zygote_pid, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) not in _CRASHES:
            die_of(
                ChaoskitError("the fork server of this node was ended while it imported the job")
            )
        how = f"with {describe_status(status)[1]}"
        self._tell_broken(
            f"importing {self._config.job.path} ended the process, {how}; see {self._spec.node}.log"
        )

    def _started(self, charge: Charge, pid: int) -> None:
        charge.pid = pid
        self._journal.write(Event.WORKER_STARTED, worker=charge.name, pid=pid)
        try:
            charge.pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return  # the zygote will report its end
        if charge.lost:
            charge.kill()
        self._loop.add_reader(charge.pidfd, self._pidfd_ready, charge)

    def _not_started(self, charge: Charge, error: str) -> None:
        """The coordinator decides when to try again, and where."""
        self._lose(charge, "raised", f"could not be started: {error}", time.monotonic_ns())
        charge.ended.set()
        self._release(charge)

    def _pidfd_ready(self, charge: Charge) -> None:
        if charge.pidfd < 0:
            return
        self._loop.remove_reader(charge.pidfd)
        self._lose(charge, EXITED, "its pidfd reported the end", time.monotonic_ns())

    def _child_changed(self, report: zygote.ChildChanged) -> None:
        charge = next(
            (charge for charge in self._charges.values() if charge.pid == report.pid), None
        )
        if charge is None:
            return
        name = signal_name(report.status) if report.code != "exited" else f"status {report.status}"
        detail = f"{report.code} by {name}" if report.code != "exited" else f"exited with {name}"
        if report.code == "stopped":
            self._lose(charge, "stopped", detail, time.monotonic_ns())
            charge.kill()
            return
        self._journal.write(
            Event.WORKER_EXITED, worker=charge.name, pid=report.pid, how=report.code, status=name
        )
        self._lose(charge, EXITED, detail, time.monotonic_ns())
        charge.ended.set()
        self._release(charge)

    def _release(self, charge: Charge) -> None:
        """Free what belonged to a worker that has ended."""
        del self._charges[charge.name]
        self._keeper.ended(charge.name)
        if charge.pidfd >= 0:
            self._loop.remove_reader(charge.pidfd)
        charge.close()

    def _lose(self, charge: Charge, cause: str, detail: str, detected_ns: int) -> None:
        if charge.lost:
            return
        charge.lost = True
        trained_in = charge.board.trained_in
        self._tell(
            WorkerLost(charge.name, self._spec.node, cause, detail, to_run(detected_ns), trained_in)
        )

    async def _beat(self) -> None:
        interval_s = self._config.heartbeat_ms / 1000 * REPORT_SHARE
        while True:
            beats = tuple(charge.read() for charge in self._charges.values() if not charge.lost)
            self._tell(
                Heartbeat(
                    self._spec.node, beats, to_run(time.monotonic_ns()), self._uplink.clock.offset
                )
            )
            self._uplink.look(time.monotonic())
            for charge in self._charges.values():
                charge.board.lease(self._uplink.lease_until_ns)
            self._keeper.went_on(max((beat.step for beat in beats), default=0))
            # at common moments: whatever hears the nodes of a host wakes up once for all of them
            await asyncio.sleep(interval_s - time.monotonic() % interval_s)

    def _watched(self) -> list[tuple[str, Board]]:
        return [
            (charge.name, charge.board)
            for charge in self._charges.values()
            if charge.pid and not charge.lost
        ]

    def _tell_of_log(self, message: messages.Message) -> None:
        if isinstance(message, RuleFired):
            fields = msgspec.structs.asdict(message)
            del fields["node"], fields["matched"]
            self._journal.write(Event.RULE_FIRED, **fields)
        self._tell(message)

    # -- the end --------------------------------------------------------------------------------------------------

    async def _say_goodbye(self, message: EndJob) -> None:
        """Let workers end by themselves, and what is being stored get there."""
        ending = tuple(name for name, charge in self._charges.items() if not charge.lost)
        for charge in self._charges.values():
            charge.tell(message)
            charge.lost = True
        waits = [charge.ended.wait() for charge in self._charges.values() if charge.pid]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*waits), _FAREWELL_S)
        await self._keeper.finish(_STORING_S, last=message.ok, workers=ending)

    def _end_all(self) -> None:
        for charge in self._charges.values():
            charge.kill()
        self._zygote.close()
        self._keeper.close()


def run_agent(arguments: bytes, sockets: Sequence[socket.socket], parent_pid: int) -> None:
    """The life of an agent process, by the arguments of an :class:`AgentSpec`. Does not return.

    Must be called before the process has any other thread: it forks the zygote, the keeper and who matches log rules.
    """
    spec = msgspec.json.decode(arguments, type=AgentSpec)
    die_with_parent(parent_pid)
    adopt_orphans()
    set_name(f"ck-{spec.node}")
    disk_directory(spec.run_directory, spec.node).mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    door = socket.create_server((spec.host, 0))
    port = door.getsockname()[1]
    hello = AgentHello(
        spec.node, host_id(), os.getpid(), started=spec.started, host=spec.host, port=port
    )
    connection, welcome = attach_first(spec.where, spec.token, hello)
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    me = os.getpid()
    zygote_pid = os.fork()
    if zygote_pid == 0:
        for one in (mine, connection, door):
            one.close()
        zygote.run_zygote(theirs, me, welcome.config.job, welcome.config.fork)
    theirs.close()
    quarters = Quarters(
        spec.node, spec.host, spec.token, spec.run_directory, welcome.config, spec.injection
    )
    keeper, copies_port = start_keeper(quarters, door, (mine, connection))
    log_process = None
    if rules := welcome.config.rules:
        logs = Path(spec.run_directory) / "log"
        log_process, _ = start_log_process(spec.node, rules, logs, (mine, connection, keeper))
    raise_priority()
    try:
        line = KeeperLine(keeper, copies_port)
        agent = Agent(spec, connection, welcome, mine, port, line, log_process, zygote_pid)
        asyncio.run(agent.run())
    except BaseException as error:  # noqa: BLE001 - a forked child must end here, whatever happened
        die_of(error)
    os._exit(0)
