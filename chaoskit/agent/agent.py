"""The agent of a node: starts workers through a zygote, watches them, and relays messages.

The end of a worker is detected in three ways, the fastest first. Its life latch breaks 0.2 ms after
the kernel begins to end it. Its pidfd becomes readable. The zygote, as its parent, reports its wait
status, and also a stop.

-> runtime/worker/zygote.py forks the workers; process/progress_board.py: the life latch.
coordinator/handlers/on_worker_lost.py: what follows from a reported end. agent/coordinator_link.py:
the next coordinator. daemon/process.py: the copies of states.
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
from chaoskit.agent.dial import can_connect
from chaoskit.agent.standstill import Standstill
from chaoskit.agent.worker_handle import WorkerHandle
from chaoskit.config import disk_directory
from chaoskit.daemon.client import KeeperLine
from chaoskit.daemon.process import KeeperSpec, start_keeper
from chaoskit.errors import ChaoskitError, Refused
from chaoskit.journal import Journal
from chaoskit.logs.process import LogLine, start_log_process
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
from chaoskit.process.progress_board import Board
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
    StoreStep,
    TestLinks,
    Welcome,
    WorkerFailed,
    WorkerLost,
    WorkerReady,
)

_FAREWELL_S = 2.0  # time for workers to end by themselves at the end of the job
_STORING_S = 0.5  # time to store snapshots of a failed job; the launcher waits little longer
_RETIRE_LOOK_S = 0.02
_ASK_AGAIN_S = 1.0
_KILLED_S = 1.0  # time for killed workers to end; most need much less
_REPORT_BYTES_MAX = 65536
#: Signals that are caused by a process's own code.
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})


class AgentSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings that a substrate passes to a new agent.

    Attributes:
        host: address at which other nodes reach this one.
        coordinator: address of the coordinator at the start of the agent.
        token: the run's token.
        injection: address of the harness, for a run with faults.
        started: number of workers that earlier agents of this node have started.
    """

    node: str
    host: str
    coordinator: CoordinatorAddress
    token: str
    run_directory: str
    injection: InjectionDoor | None = None
    started: int = 0

    def find_coordinator(self) -> Address:
        """Return the current address of the coordinator, which may have moved.

        Raises:
            msgspec.MsgspecError, OSError: as :meth:`CoordinatorAddress.latest` does.
        """
        return self.coordinator.latest(self.run_directory).control


class Agent:
    """Agent of a node: it runs until the job ends, or no coordinator is found for too long.

    After a SIGTERM, in a run with an elastic policy, it runs until no worker is left. An error in
    any part of it ends the agent, and with it the node.

    Args:
        coordinator: authenticated connection to the coordinator.
        welcome: the coordinator's answer, with the settings of the run.
        reports: connection to the zygote: orders out, reports in.
        port: port at which other nodes can test the link.
        keeper: connection to the checkpoint daemon.
        log_process: connection to the log process; None without log rules.
        zygote_pid: pid of the zygote; 0 if it is no child of this process.
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
        self._uplink = Uplink(coordinator, spec.find_coordinator, spec.token, welcome, self._hello)
        self._generation = 0  # generation of the newest plan
        self._started_count = spec.started
        self._journal = Journal(
            Path(spec.run_directory) / "journal", spec.node, role="agent", node=spec.node
        )
        self._workers: dict[str, WorkerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._zygote_pid = zygote_pid
        self._is_job_imported = not (welcome.config.fork and zygote_pid)  # by the fork server
        self._retirement: asyncio.Task[None] | None = None  # after a SIGTERM
        elastic = welcome.config.elastic
        self._retirement_s = elastic.graceful_shutdown_timeout_s if elastic is not None else 0.0

    async def run(self) -> None:
        """Run until the job ends, or no coordinator is found for too long.

        All workers are killed at the end, also after an error. The journal is signed off, but not
        after an error.
        """
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(lambda loop, context: self._handle_loop_error(context))
        self._zygote.setblocking(False)
        self._loop.add_reader(self._zygote, self._read_zygote)
        self._keeper.open(self._send, die_of)
        heartbeats = self._spawn(self._send_heartbeats())
        if self._config.elastic is not None:
            self._loop.add_signal_handler(signal.SIGTERM, self._begin_retirement)
        if self._log_process is not None:
            line = LogLine(
                self._spec.node,
                self._config.rules,
                self._log_process,
                self._watched_boards,
                self._report_log_rule,
            )
            self._spawn(line.run())
        reason = "there was no coordinator for too long"
        try:
            async for message in self._uplink.follow():
                if isinstance(message, EndJob):
                    reason = "the job ended"
                    heartbeats.cancel()  # no coordinator may listen for minutes
                    await self._finish_job(message)
                else:
                    self._carry_out(message)
        finally:
            self._end_all()
        self._journal.sign_off(reason)

    def _hello(self) -> AgentHello:
        """Return the registration with the current state of the node."""
        live_workers = tuple(handle.name for handle in self._workers.values() if not handle.lost)
        return AgentHello(
            node=self._spec.node,
            host_id=host_id(),
            pid=os.getpid(),
            generation=self._generation,
            workers=live_workers,
            ended=self._uplink.facts.ended,
            term=self._uplink.term,
            started=self._started_count,
            host=self._spec.host,
            port=self._port,
        )

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        """Start a coroutine as a task; an error in it ends the agent."""
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            die_of(error)

    def _handle_loop_error(self, context: dict[str, Any]) -> None:
        """Handle an error that asyncio would only log: end the agent, unless a connection broke."""
        error = context.get("exception")
        if error is None or isinstance(error, ConnectionError):
            self._loop.default_exception_handler(context)
        else:
            die_of(error)

    def _send(self, message: messages.Message) -> None:
        self._uplink.send(message)

    # -- orders of the coordinator -----------------------------------------------------------------

    def _carry_out(self, message: Any) -> None:
        """Carry out an order of the coordinator. Other messages are ignored."""
        match message:
            case Plan(generation):
                self._generation = max(self._generation, generation)
                for worker in (*(member.worker for member in message.members), *message.leavers):
                    self._forward(worker, message)
                self._keeper.follow(message)
            case Recall(number):
                self._spawn(self._recall(number))
            case StoreStep():
                self._keeper.store(message)
            case TestLinks():
                self._spawn(self._test_links(message))
            case MeasureLinks():
                self._keeper.measure(message)
            case StartWorker(worker):
                if worker not in self._workers:
                    self._start(worker)
            case Halt():
                for handle in self._workers.values():
                    handle.send(message)
            case NoticeCancelled():
                self._cancel_retirement()
            case StopWorker(worker):
                if worker in self._workers:
                    self._stop(self._workers[worker], message)

    def _begin_retirement(self) -> None:
        """Handle the first SIGTERM, sent by a cloud or a scheduler: the node is to leave the run.

        A second SIGTERM ends the agent.
        """
        self._loop.remove_signal_handler(signal.SIGTERM)
        self._retirement = self._spawn(self._retire())

    def _cancel_retirement(self) -> None:
        """Cancel the retirement, as the notice was withdrawn."""
        if self._retirement is not None:
            self._retirement.cancel()
            self._retirement = None
            self._loop.add_signal_handler(signal.SIGTERM, self._begin_retirement)

    async def _retire(self) -> None:
        """Ask the coordinator to release this node, and end this process once no worker is left.

        It asks again every second. The process ends with status 0.
        """
        until_s = time.monotonic() + self._retirement_s
        asked_s = -math.inf
        while self._workers:
            # repeated, as the notice may be lost with a coordinator
            if (now_s := time.monotonic()) > asked_s + _ASK_AGAIN_S:
                asked_s = now_s
                self._send(SpotNotice(self._spec.node, max(0.0, until_s - now_s)))
            await asyncio.sleep(_RETIRE_LOOK_S)
        self._end_all()
        self._journal.sign_off("its node left")
        os._exit(0)

    async def _test_links(self, order: TestLinks) -> None:
        """Try to connect to the given nodes, and report those that cannot be reached.

        The report may be empty: a second question of the coordinator names no nodes.
        """
        addresses = {node: (host, port) for node, host, port in order.targets}
        reached = await asyncio.gather(*(can_connect(address) for address in addresses.values()))
        unreachable = tuple(
            node for node, is_reached in zip(addresses, reached, strict=True) if not is_reached
        )
        self._send(LinksTested(self._spec.node, order.number, unreachable))

    def _forward(self, worker: str, message: messages.Message) -> None:
        """Send a message to a worker, if it is on this node."""
        if (handle := self._workers.get(worker)) is not None:
            handle.send(message)

    def _start(self, worker: str) -> None:
        """Have the zygote fork a worker, and handle its messages.

        A worker that cannot be ordered is reported as lost.
        """
        agent_end, worker_end = socket.socketpair()
        handle = WorkerHandle(
            worker, Board.create(), agent_end, Standstill(self._config.heartbeat_ms)
        )
        self._workers[worker] = handle
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
        self._spawn(self._listen(handle))
        with worker_end:
            try:
                descriptors = [worker_end.fileno(), handle.board.fd, handle.board.bell]
                zygote.order_worker(self._zygote, worker, msgspec.json.encode(spec), descriptors)
            except OSError as error:
                self._on_not_started(handle, f"{type(error).__name__}: {error}")

    async def _recall(self, number: int) -> None:
        """Have the checkpoint daemon offer its copies for question ``number``; it answers later.

        Lost workers that may still write to their state are waited for, for :data:`_KILLED_S`.
        """
        deadline_s = time.monotonic() + _KILLED_S
        while any(handle.lingers for handle in self._workers.values()):
            if time.monotonic() > deadline_s:
                break
            await asyncio.sleep(0.001)
        self._keeper.recall(number)

    def _stop(self, handle: WorkerHandle, order: StopWorker) -> None:
        """Kill a worker, or order it to end and kill it after its grace period.

        It counts as lost from now on.
        """
        if handle.is_leaving and order.grace_s:
            return  # repeated by another coordinator
        if not order.grace_s or handle.lost or handle.writer is None:
            handle.kill()
            return
        handle.send(order)
        handle.lost = handle.is_leaving = True
        self._loop.call_later(order.grace_s, handle.kill)

    # -- messages and ends of workers --------------------------------------------------------------

    async def _listen(self, handle: WorkerHandle) -> None:
        """Relay the messages of a worker to the coordinator until the worker disconnects.

        A ready worker is adopted by the checkpoint daemon, and its life latch is watched. A worker
        that has failed is reported as lost and killed.
        """
        reader, handle.writer = await asyncio.open_connection(sock=handle.connection)
        with contextlib.suppress(ConnectionError):
            while True:
                message = await self._read(reader, handle)
                if isinstance(message, Holding):
                    self._keeper.hold(message)
                    continue
                if isinstance(message, WorkerReady):
                    endpoint = self._keeper.adopt(handle.name, message.endpoint, handle.board)
                    message = msgspec.structs.replace(message, endpoint=endpoint)
                    threading.Thread(target=self._await_death, args=(handle,), daemon=True).start()
                self._send(message)
                if isinstance(message, WorkerFailed):
                    self._report_lost(handle, "raised", message.error, time.monotonic_ns())
                    handle.kill()
        handle.writer.close()
        self._uplink.facts.close(handle.name)

    async def _read(self, reader: asyncio.StreamReader, handle: WorkerHandle) -> Any:
        """Return the next message of a worker.

        A worker that sends anything else is reported as lost and killed.

        Raises:
            ConnectionError: at the end of the connection, or for anything else than a message.
        """
        try:
            return await frames.read_message(reader)
        except Refused as error:  # damaged memory, or the job wrote to a foreign descriptor
            self._report_lost(
                handle, "raised", f"it sent an invalid message: {error}", time.monotonic_ns()
            )
            handle.kill()
            raise ConnectionError from error

    def _await_death(self, handle: WorkerHandle) -> None:
        """Wait on this thread until the life latch of a worker breaks; the loop reports it."""
        handle.board.await_death()
        self._loop.call_soon_threadsafe(self._on_latch_broken, handle, time.monotonic_ns())

    def _on_latch_broken(self, handle: WorkerHandle, detected_ns: int) -> None:
        """Report a worker that the kernel has begun to end."""
        self._report_lost(handle, EXITED, "the kernel reports its end", detected_ns)
        handle.latched = True
        self._keeper.ended(handle.name)

    def _read_zygote(self) -> None:
        """Handle the next report of the zygote, or its end."""
        try:
            data = self._zygote.recv(_REPORT_BYTES_MAX)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._zygote)
            self._spawn(self._on_zygote_ended())
            return
        report = zygote.report_decoder.decode(data)
        if isinstance(report, zygote.Started):
            self._on_started(self._workers[report.worker], report.pid)
        elif isinstance(report, zygote.NotStarted):
            self._on_not_started(self._workers[report.worker], report.error)
        elif isinstance(report, zygote.ChildChanged):
            self._on_child_changed(report)
        elif isinstance(report, zygote.Loaded):
            self._is_job_imported = True
        else:
            self._report_broken_job(report.error, report.refused)

    def _report_broken_job(self, error: str, refused: tuple[str, str, str] | None = None) -> None:
        """Report that the job cannot be imported.

        The error is fatal, as no other node could import it.
        """
        self._send(WorkerFailed(f"{self._spec.node}.zygote", error, fatal=True, refused=refused))

    async def _on_zygote_ended(self) -> None:
        """End the node, as it can start no more workers.

        If the import of the job has ended the zygote, report that the job fails, instead.
        """
        if self._is_job_imported:
            die_of(ChaoskitError("the fork server of this node has ended"))
        _, status = await asyncio.to_thread(os.waitpid, self._zygote_pid, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) not in _CRASHES:
            die_of(
                ChaoskitError("the fork server of this node was ended while it imported the job")
            )
        ending = f"with {describe_status(status)[1]}"
        self._report_broken_job(
            f"importing {self._config.job.path} ended the process, {ending}; "
            f"see {self._spec.node}.log"
        )

    def _on_started(self, handle: WorkerHandle, pid: int) -> None:
        """Watch the process of a worker that the zygote has forked. A lost worker is killed."""
        handle.pid = pid
        self._journal.write(Event.WORKER_STARTED, worker=handle.name, pid=pid)
        try:
            handle.pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return  # the zygote will report its end
        if handle.lost:
            handle.kill()
        self._loop.add_reader(handle.pidfd, self._on_pidfd_ready, handle)

    def _on_not_started(self, handle: WorkerHandle, error: str) -> None:
        """Report a worker that could not be started.

        The coordinator decides when to retry, and where.
        """
        self._report_lost(handle, "raised", f"could not be started: {error}", time.monotonic_ns())
        handle.ended.set()
        self._release(handle)

    def _on_pidfd_ready(self, handle: WorkerHandle) -> None:
        """Report a worker with a process that has ended. The zygote's report releases it."""
        if handle.pidfd < 0:
            return
        self._loop.remove_reader(handle.pidfd)
        self._report_lost(handle, EXITED, "its pidfd reported the end", time.monotonic_ns())

    def _on_child_changed(self, report: zygote.ChildChanged) -> None:
        """Handle the zygote's report that a worker has stopped or ended: the worker is lost.

        A stopped worker is killed. The end of a worker is written to the journal.
        """
        handle = next(
            (handle for handle in self._workers.values() if handle.pid == report.pid), None
        )
        if handle is None:
            return
        name = signal_name(report.status) if report.code != "exited" else f"status {report.status}"
        detail = f"{report.code} by {name}" if report.code != "exited" else f"exited with {name}"
        if report.code == "stopped":
            self._report_lost(handle, "stopped", detail, time.monotonic_ns())
            handle.kill()
            return
        self._journal.write(
            Event.WORKER_EXITED, worker=handle.name, pid=report.pid, how=report.code, status=name
        )
        self._report_lost(handle, EXITED, detail, time.monotonic_ns())
        handle.ended.set()
        self._release(handle)

    def _release(self, handle: WorkerHandle) -> None:
        """Forget a worker that has ended, and free its resources."""
        del self._workers[handle.name]
        self._keeper.ended(handle.name)
        if handle.pidfd >= 0:
            self._loop.remove_reader(handle.pidfd)
        handle.close()

    def _report_lost(self, handle: WorkerHandle, cause: str, detail: str, detected_ns: int) -> None:
        """Report that a worker is lost, unless it counts as lost already."""
        if handle.lost:
            return
        handle.lost = True
        trained_in = handle.board.trained_in
        self._send(
            WorkerLost(handle.name, self._spec.node, cause, detail, to_run(detected_ns), trained_in)
        )

    async def _send_heartbeats(self) -> None:
        """Send heartbeats, and renew the leases on the boards of the workers, until cancelled."""
        interval_s = self._config.heartbeat_ms / 1000 * REPORT_SHARE
        while True:
            beats = tuple(handle.read() for handle in self._workers.values() if not handle.lost)
            self._send(
                Heartbeat(
                    self._spec.node, beats, to_run(time.monotonic_ns()), self._uplink.clock.offset
                )
            )
            self._uplink.look(time.monotonic())
            for handle in self._workers.values():
                handle.board.lease(self._uplink.lease_until_ns)
            self._keeper.went_on(max((beat.step for beat in beats), default=0))
            # all nodes of a host beat at the same moments, so that a receiver wakes up once
            await asyncio.sleep(interval_s - time.monotonic() % interval_s)

    def _watched_boards(self) -> list[tuple[str, Board]]:
        """Return name and board of each worker that has a process and is not lost."""
        return [
            (handle.name, handle.board)
            for handle in self._workers.values()
            if handle.pid and not handle.lost
        ]

    def _report_log_rule(self, message: messages.Message) -> None:
        """Send a report of the log rules, and write fired rules to the journal."""
        if isinstance(message, RuleFired):
            fields = msgspec.structs.asdict(message)
            del fields["node"], fields["matched"]
            self._journal.write(Event.RULE_FIRED, **fields)
        self._send(message)

    # -- the end -----------------------------------------------------------------------------------

    async def _finish_job(self, message: EndJob) -> None:
        """Order all workers to end, and wait until they have ended and snapshots are stored.

        The first wait has a limit of 2 s. The second has a limit only if the job has failed.
        """
        ending = tuple(name for name, handle in self._workers.items() if not handle.lost)
        for handle in self._workers.values():
            handle.send(message)
            handle.lost = True
        waits = [handle.ended.wait() for handle in self._workers.values() if handle.pid]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*waits), _FAREWELL_S)
        await self._keeper.finish(_STORING_S, last=message.ok, workers=ending)

    def _end_all(self) -> None:
        """Kill all workers, and close the connections to the zygote and the checkpoint daemon."""
        for handle in self._workers.values():
            handle.kill()
        self._zygote.close()
        self._keeper.close()


def run_agent(arguments: bytes, sockets: Sequence[socket.socket], parent_pid: int) -> None:
    """Run an agent process until the job ends. Does not return; an error is printed.

    Must be called before the process has any other thread: it forks the zygote, the checkpoint
    daemon and the log process. The exit status is 0, or 1 after an error.

    Args:
        arguments: JSON of an :class:`AgentSpec`.
        sockets: not used.
        parent_pid: the parent; this process is killed when it ends.

    Raises:
        OSError, Refused: if the agent cannot begin, for example as :func:`attach_first` does.
    """
    spec = msgspec.json.decode(arguments, type=AgentSpec)
    die_with_parent(parent_pid)
    adopt_orphans()
    set_name(f"ck-{spec.node}")
    disk_directory(spec.run_directory, spec.node).mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = socket.create_server((spec.host, 0))
    port = listener.getsockname()[1]
    hello = AgentHello(
        spec.node, host_id(), os.getpid(), started=spec.started, host=spec.host, port=port
    )
    connection, welcome = attach_first(spec.find_coordinator, spec.token, hello)
    agent_end, zygote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent_pid = os.getpid()
    zygote_pid = os.fork()
    if zygote_pid == 0:
        for inherited in (agent_end, connection, listener):
            inherited.close()
        zygote.run_zygote(zygote_end, agent_pid, welcome.config.job, welcome.config.fork)
    zygote_end.close()
    keeper_spec = KeeperSpec(
        spec.node, spec.host, spec.token, spec.run_directory, welcome.config, spec.injection
    )
    keeper, copies_port = start_keeper(keeper_spec, listener, (agent_end, connection))
    log_process = None
    if rules := welcome.config.rules:
        logs = Path(spec.run_directory) / "log"
        log_process, _ = start_log_process(spec.node, rules, logs, (agent_end, connection, keeper))
    raise_priority()
    try:
        line = KeeperLine(keeper, copies_port)
        agent = Agent(spec, connection, welcome, agent_end, port, line, log_process, zygote_pid)
        asyncio.run(agent.run())
    except BaseException as error:  # noqa: BLE001 - a forked child must end here, whatever happened
        die_of(error)
    os._exit(0)
