"""The coordinator: a thin shell around the control plane.

It accepts agents, workers (for rendezvous only) and observers on authenticated ports, passes their
messages to the control plane and carries out the outputs. It may end at any moment: its decisions
are in the coordinator's log, which the next coordinator replays.

-> coordinator/plane.py decides; coordinator/handlers/ has a file for each kind of message.
coordinator/log.py: how one coordinator replaces another; substrate/cluster/supervised.py starts the
process again when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from chaoskit.config import RunConfig
from chaoskit.coordinator.acknowledgement import Acknowledgements
from chaoskit.coordinator.handlers.on_node import REATTACH_S
from chaoskit.coordinator.log import CoordinatorLog, Fenced, Gone
from chaoskit.coordinator.observers import Observers
from chaoskit.coordinator.outputs import Disconnect, End, LogEntry, Output, Send, Show, WriteRecord
from chaoskit.coordinator.plane import ControlPlane
from chaoskit.coordinator.refused_connections import Refusals, RefusedConnections
from chaoskit.coordinator.rendezvous import RendezvousReply
from chaoskit.errors import ChaoskitError, JournalFull, Refused
from chaoskit.journal import Journal
from chaoskit.plaintext import plural
from chaoskit.process.linux import (
    Starvation,
    die_with_parent,
    is_ending,
    kernel_id,
    print_error,
    print_line,
    raise_priority,
    set_name,
)
from chaoskit.process.run_clock import heard_ns, to_run
from chaoskit.vocabulary import Event
from chaoskit.wire import frames, messages
from chaoskit.wire.coordinator_files import COORDINATOR_LOG
from chaoskit.wire.messages import (
    AgentHello,
    EndJob,
    Heard,
    Heartbeat,
    ObserverHello,
    Probe,
    RendezvousHello,
    Welcome,
    WorkerLost,
)

#: A coordinator that ends with this status must not be started again.
EXIT_OVER = 0
_EXIT_GONE = 1

#: Longest and shortest time between two ticks, also when no message arrives.
_TICK_S = 0.1
_TICK_MIN_S = 0.001
#: Heartbeats that arrive within this time of the first one are judged by one tick.
_GATHER_S = 0.005
#: At the end of the job, each observer has this long to close its connection; so have all agents.
_FAREWELL_S = 1.0
#: Most connections without a proof of the token at a time: one more closes the oldest.
_UNPROVEN_MAX = 256


class CoordinatorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a new coordinator.

    Attributes:
        config: settings of the run.
        token: the run's token, which each client must prove to know.
        run_directory: directory of the run on this machine, with the log and the journals.
        lost: nodes that the substrate knows to be gone. A coordinator that has moved to this
            machine gives them no time to reconnect.
    """

    config: RunConfig
    token: str
    run_directory: str
    lost: tuple[str, ...] = ()


def _in_run_time(message: messages.Message) -> messages.Message:
    """Return ``message`` with times on the run's clock, as observers may be on other machines."""
    if isinstance(message, WorkerLost):
        return msgspec.structs.replace(message, detected_ns=to_run(message.detected_ns))
    return message


class Coordinator:
    """Server of one run.

    Creating it takes the coordinator's log over from the previous coordinator, with the next term,
    and replays the log.
    """

    def __init__(self, spec: CoordinatorSpec) -> None:
        self._spec = spec
        journals = Path(spec.run_directory) / "journal"
        # an earlier coordinator on this machine would have left its journal here
        has_moved = not (journals / "coordinator.jsonl").exists()
        self._journal = Journal(journals, "coordinator", role="coordinator")
        self._log = CoordinatorLog(Path(spec.run_directory) / COORDINATOR_LOG)
        self._plane = ControlPlane(spec.config, self._log.entries, time.monotonic())
        self._plane.expect_no_longer(spec.lost if has_moved else (), time.monotonic())
        self._agents: dict[str, asyncio.StreamWriter] = {}
        # agents on this host, with the last reading in ns
        self._starved: dict[str, tuple[Starvation, int]] = {}
        self._acknowledgements = Acknowledgements()
        self._observers = Observers()
        self._clients: dict[int, asyncio.StreamWriter] = {}
        # clients that have yet to prove that they know the token, oldest first
        self._unproven: dict[asyncio.StreamWriter, None] = {}
        self._refusals = Refusals()
        self._client_numbers = itertools.count()  # of rendezvous clients
        self._ended, self._observer_connected = asyncio.Event(), asyncio.Event()
        self._has_predecessor = self._owes_takeover_report = self._log.term > 1
        self._reattach_until_s = time.monotonic() + REATTACH_S
        self._is_tick_scheduled = False
        self._reporting_nodes: set[str] = set()  # nodes that sent a heartbeat since the last tick
        self._timer: asyncio.TimerHandle | None = None

    async def serve(self, listeners: Sequence[socket.socket]) -> None:
        """Serve agents, observers and workers until the job ends and its end was sent.

        The outputs that the previous coordinator may not have carried out come first. At the end
        the connections are closed, and the journal is signed off.

        Args:
            listeners: listening sockets; each accepts clients of every kind.
        """
        if self._log.damage:
            print_line(f"{self._log.damage}: starting with an empty log")
            self._journal.write(
                Event.RECORD_LOST, node="", generation=0, known=0, detail=self._log.damage
            )
        self._carry_out([output for output in self._plane.retell() if not self._is_written(output)])
        if self._spec.config.resume and not self._log.entries:
            self._resume_from_snapshots()
        servers = [await asyncio.start_server(self._greet, sock=listener) for listener in listeners]
        self._tick_soon()
        try:
            await self._ended.wait()
            await self._await_observer()
            await self._drain()
            self._tell_refusals(self._refusals.take_summary(time.monotonic()))
            self._journal.sign_off("the job ended")
        finally:
            for server in servers:
                server.close()

    def _is_written(self, output: Output) -> bool:
        """Return whether the journal has the line of ``output``, from the previous coordinator."""
        return isinstance(output, WriteRecord) and self._journal.has(
            output.event, t_ns=output.t_ns, **output.fields
        )

    def _resume_from_snapshots(self) -> None:
        """Begin with the newest snapshots of an earlier run, if there are any.

        The job fails if the snapshots cannot be listed. The log keeps their generation, because the
        next coordinator may find other snapshots.
        """
        from chaoskit.checkpoint.newest import newest_generation

        try:
            if generation := newest_generation(self._spec.config):
                self._carry_out(self._plane.resume(generation, time.monotonic()))
        except ChaoskitError as error:  # a job that is to be resumed must not begin anew
            self._carry_out(
                self._plane.hear(EndJob(False, f"cannot be resumed: {error}"), time.monotonic())
            )

    def _report_takeover(self) -> None:
        """Report in the journal and on stderr, once, that this coordinator took the run over.

        The process ends instead if another coordinator holds the log by now, or the log was
        deleted.
        """
        if not self._owes_takeover_report:
            return
        self._owes_takeover_report, now_ns = False, time.monotonic_ns()
        # a later coordinator reports its own takeover, with a later time
        self._use_log(self._log.check)
        generation, events = self._plane.membership.newest_known, len(self._log.entries)
        self._journal.write(
            Event.RESUMED, t_ns=now_ns, term=self._log.term, generation=generation, events=events
        )
        summary = f"term {self._log.term}, generation {generation}, {plural(events, 'event')}"
        print_line(f"this coordinator took over from the previous one: {summary} in the log")

    async def _await_observer(self) -> None:
        """Wait until an observer has connected, at most until the time to reconnect is over.

        An observer of the previous coordinator must receive the end of the job. The first
        coordinator of a run does not wait.
        """
        if self._has_predecessor:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    self._observer_connected.wait(), self._reattach_until_s - time.monotonic()
                )

    async def _drain(self) -> None:
        """Close the connections once all that was sent is read, or the time for it is over."""
        for writer in self._observers.writers:
            with contextlib.suppress(TimeoutError, OSError):
                writer.close()
                await asyncio.wait_for(writer.wait_closed(), _FAREWELL_S)
        # closing a connection with unread data would discard what an agent has yet to read: EndJob
        agents = [
            asyncio.ensure_future(self._await_close(writer)) for writer in self._agents.values()
        ]
        if agents:
            await asyncio.wait(agents, timeout=_FAREWELL_S)

    async def _await_close(self, writer: asyncio.StreamWriter) -> None:
        """Send nothing more to an agent, and wait until it closes its end of the connection."""
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()
            await writer.wait_closed()

    # -- connections -------------------------------------------------------------------------------

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a new connection until it ends, according to its first message.

        A client with another first message than a hello is disconnected. A refused client is
        counted and reported. An error other than the end of the connection ends the job.
        """
        try:
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._await_proof(reader, writer)
            hello = await frames.read_message(reader)
            if isinstance(hello, AgentHello):
                await self._serve_agent(hello, reader, writer)
            elif isinstance(hello, ObserverHello):
                await self._serve_observer(hello, reader, writer)
            elif isinstance(hello, RendezvousHello):
                await self._serve_client(reader, writer)
        except (ConnectionError, Refused) as error:
            if isinstance(error, Refused):
                self._refusals.add(str(error))
                self._tell_refusals(self._refusals.take_due_summary(time.monotonic()))
        except Exception as error:  # noqa: BLE001 - a bug must end the run, not one connection
            self._fail(error)
        finally:
            writer.close()

    async def _await_proof(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Authenticate a client. If too many clients have yet to do so, the oldest is disconnected.

        Raises:
            ConnectionError: if the connection ends.
            Refused: if the client does not prove that it knows the token.
        """
        self._unproven[writer] = None
        if len(self._unproven) > _UNPROVEN_MAX:
            next(iter(self._unproven)).transport.abort()
            self._refusals.add(
                f"more than {_UNPROVEN_MAX} connections without a proof of the token"
            )
        try:
            await frames.accept_async(reader, writer, self._spec.token)
        finally:
            del self._unproven[writer]

    async def _serve_agent(
        self, hello: AgentHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Attach a node and handle its messages until its connection ends, or it is given up.

        Raises:
            Refused: if another agent of that name is connected, or a message is invalid.
            ConnectionError: at the end of the connection, after the plane has taken it in.
        """
        self._use_log(self._log.check)  # the hello may be old: this process was stopped meanwhile
        term = self._log.term
        self._use_log(self._log.outbid, hello.term)  # terms begin at 1 again in a lost log
        self._owes_takeover_report &= self._log.term == term
        self._report_takeover()
        outputs = self._plane.attach(hello, time.monotonic(), term=term)
        self._disconnect(hello.node)  # an earlier connection may have ended unnoticed
        self._agents[hello.node] = writer
        if hello.host_id.startswith(kernel_id()):
            self._starved[hello.node] = (Starvation(hello.pid, hello.pid), 0)
        writer.write(frames.encode(self._welcome()))
        self._carry_out(outputs)
        self._tick_soon()
        try:
            while True:
                message = await frames.read_message(reader)
                if self._agents.get(hello.node) is not writer:
                    return  # this node was given up meanwhile
                if self._ended.is_set():
                    continue  # nothing is decided any more
                self._hear_agent(hello.node, message)
        except (ConnectionError, Refused):
            if self._agents.get(hello.node) is writer:
                dead = hello.host_id.startswith(kernel_id()) and is_ending(hello.pid)
                detail = "the agent's connection ended"
                self._carry_out(self._plane.detach(hello.node, detail, time.monotonic(), dead=dead))
                self._tick_soon()
            raise

    def _welcome(self) -> Welcome:
        return Welcome(self._spec.config, self._log.term, os.getpid())

    async def _serve_observer(
        self, hello: ObserverHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Send an observer the present state, then each message, and handle its requests.

        Raises:
            ConnectionError: at the end of the connection.
            Refused: if a message is invalid, or no request to a coordinator.
        """
        self._observers.add(writer, hello)
        self._observer_connected.set()
        for message in (self._welcome(), *self._plane.messages_for_observer()):
            writer.write(frames.encode(_in_run_time(message)))
        try:
            while True:
                message = await frames.read_message(reader)
                if isinstance(message, ObserverHello):  # at another pace from now on
                    self._observers.add(writer, message)
                    continue
                self._carry_out(self._plane.hear(message, time.monotonic()))
                self._tick_soon()
        finally:
            self._observers.discard(writer)

    async def _serve_client(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Pass the requests of a worker to the rendezvous, until its connection ends.

        Raises:
            ConnectionError: at the end of the connection.
            Refused: if a message is no valid request to the rendezvous.
        """
        client = next(self._client_numbers)
        self._clients[client] = writer
        try:
            while True:
                self._carry_out(self._plane.ask(client, await frames.read_message(reader)))
        finally:
            del self._clients[client]
            self._plane.hang_up(client)

    # -- decisions ---------------------------------------------------------------------------------

    def _hear_agent(self, node: str, message: Any) -> None:
        """Handle a message of a node.

        All nodes of a host send their heartbeats together, so one tick follows them all. Any other
        message is followed by a tick at once.
        """
        self._use_log(self._log.check)  # a fenced coordinator must not extend the lease of a node
        if isinstance(message, WorkerLost):  # convert the run's clock to the one of the decisions
            message = msgspec.structs.replace(message, detected_ns=heard_ns(message.detected_ns))
        self._carry_out(self._plane.hear(message, time.monotonic()))
        if not isinstance(message, Heartbeat):
            self._tick_soon()
            return
        self._reporting_nodes.add(node)
        if len(self._reporting_nodes) == len(self._agents):
            self._tick_soon()
        elif len(self._reporting_nodes) == 1:
            self._tick_within(_GATHER_S)

    def _tick_soon(self) -> None:
        """Schedule a tick for the moment when all input that has arrived is handled."""
        if not self._is_tick_scheduled:
            self._is_tick_scheduled = True
            asyncio.get_running_loop().call_soon(self._tick)

    def _tick_within(self, seconds: float) -> None:
        """Schedule a tick in ``seconds``, unless one is due earlier."""
        loop = asyncio.get_running_loop()
        if self._timer is not None and not self._timer.cancelled():
            if self._timer.when() <= loop.time() + seconds:
                return
            self._timer.cancel()
        self._timer = loop.call_later(seconds, self._tick_soon)

    def _tick(self) -> None:
        """Have the plane decide by time, and schedule the next tick. An error ends the job."""
        self._is_tick_scheduled = False
        self._reporting_nodes.clear()
        if self._timer is not None:
            self._timer.cancel()
        try:
            self._use_log(self._log.check)
            now_s = time.monotonic()
            if now_s > self._reattach_until_s:
                self._report_takeover()  # no node has come that knows of a later coordinator
            self._carry_out(
                self._plane.tick(now_s, self._starvation(), self._acknowledgements.take())
            )
            self._tell_refusals(self._refusals.take_due_summary(now_s))
        except Exception as error:  # noqa: BLE001 - as in _greet
            self._fail(error)
        now_s = time.monotonic()
        until_due_s = self._plane.next_tick_s(now_s) - now_s
        self._tick_within(min(_TICK_S, max(_TICK_MIN_S, until_due_s)))

    def _tell_refusals(self, refused: RefusedConnections | None) -> None:
        """Print a summary of refused connections and write it to the journal; None is ignored.

        A full disk is ignored, too.
        """
        if refused is not None:
            print_line(str(refused))
            with contextlib.suppress(JournalFull, OSError):  # no verdict depends on it
                self._journal.write(
                    Event.CONNECTIONS_REFUSED, count=refused.count, reason=refused.reason
                )

    def _starvation(self) -> dict[str, float]:
        """Return node -> seconds that its agent has waited for a CPU since the last call.

        Only agents on this host are measured.
        """
        waited_s = {}
        for node, (starvation, before_ns) in self._starved.items():
            after_ns = starvation.read_ns()
            waited_s[node] = max(0, after_ns - before_ns) / 1e9
            self._starved[node] = (starvation, after_ns)
        return waited_s

    def _carry_out(self, outputs: list[Output]) -> None:
        """Write the events among ``outputs`` to the log, then carry out the outputs in order.

        An event that is not in the log was not decided. A :class:`Send` to a node that is not
        connected is dropped.
        """
        if entries := [output for output in outputs if isinstance(output, LogEntry)]:
            self._use_log(self._log.append, entries)
        for output in outputs:
            match output:
                case Send(node, message):
                    if isinstance(message, Heard):  # the plane reads no clock
                        message = msgspec.structs.replace(message, wall_ns=time.time_ns())
                    writer = self._agents.get(node)
                    if isinstance(message, Probe) and writer is not None:
                        self._acknowledgements.ask(node, writer.get_extra_info("socket"))
                    self._write(writer, message)
                case Show(message):
                    self._observers.show(_in_run_time(message), time.monotonic())
                case RendezvousReply(client, message):
                    assert isinstance(client, int)
                    self._write(self._clients.get(client), message)
                case WriteRecord(event, fields, t_ns):
                    self._journal.write(event, t_ns=t_ns, **fields)
                case Disconnect(node):
                    self._disconnect(node)
                case End():
                    self._ended.set()

    def _use_log(self, method: Callable[..., None], *arguments: Any) -> None:
        """Call a method of the log, which only the current coordinator may.

        This process ends if another coordinator holds the log, or if the log was deleted. In the
        second case its status allows another start.
        """
        try:
            method(*arguments)
        except (Fenced, Gone) as error:
            print_line(str(error))
            self._journal.sign_off(str(error))
            os._exit(EXIT_OVER if isinstance(error, Fenced) else _EXIT_GONE)

    def _write(self, writer: asyncio.StreamWriter | None, message: messages.Message) -> None:
        if writer is not None:
            writer.write(frames.encode(message))

    def _disconnect(self, node: str) -> None:
        """Close the connection of a node, if it has one, and forget its measurements."""
        writer = self._agents.pop(node, None)
        if writer is not None:
            writer.close()
        self._acknowledgements.forget(node)
        if node in self._starved:
            self._starved.pop(node)[0].close()

    def _fail(self, error: Exception) -> None:
        """Print ``error`` and end the job with it.

        If that fails, too, this process ends, and the next coordinator decides.
        """
        print_error(error)
        reason = (
            str(error) if isinstance(error, JournalFull) else "the coordinator failed; see its log"
        )
        try:
            self._carry_out(self._plane.hear(EndJob(False, reason), time.monotonic()))
        except Exception:  # noqa: BLE001 - the next coordinator may be able to
            os._exit(1)


def run_coordinator(arguments: bytes, listeners: Sequence[socket.socket], parent_pid: int) -> None:
    """Run a coordinator process until the job ends. Does not return.

    The exit status is :data:`EXIT_OVER` if no other coordinator must be started.

    Args:
        arguments: JSON of a :class:`CoordinatorSpec`.
        listeners: listening sockets, inherited from the parent.
        parent_pid: the parent; this process is killed when it ends.
    """
    spec = msgspec.json.decode(arguments, type=CoordinatorSpec)
    die_with_parent(parent_pid)
    set_name("ck-coordinator")
    raise_priority()
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def main() -> None:
        await Coordinator(spec).serve(listeners)
        os._exit(EXIT_OVER)  # asyncio would cancel the open connections one by one, and complain

    code = 1
    try:
        asyncio.run(main())
    except BaseException:  # noqa: BLE001 - a forked child must end here, whatever happened
        traceback.print_exc()
    finally:
        os._exit(code)
