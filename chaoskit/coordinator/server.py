"""The coordinator: a thin shell around the control plane.

It accepts agents, workers (for rendezvous only) and observers on one authenticated port, feeds what they say into the
control plane and carries out what that decides. It may end at any moment: what was decided is in the run's record,
from which the next coordinator goes on.
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
from chaoskit.coordinator.log import Fenced, Gone, Record
from chaoskit.coordinator.membership.rendezvous import Reply
from chaoskit.coordinator.nodes import REATTACH_S
from chaoskit.coordinator.observers import Observers
from chaoskit.coordinator.outputs import Disconnect, End, Note, Output, Remember, Send, Show
from chaoskit.coordinator.plane import ControlPlane
from chaoskit.coordinator.refusals import Refusals, RefusedConnections
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
from chaoskit.wire.coordinator_files import RECORD
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

#: What has no due time of its own is looked at so often, also when nothing is heard.
_TICK_S = 0.1
_TICK_MIN_S = 0.001
#: Heartbeats that follow the first one within this time are looked at together.
_GATHER_S = 0.005
_FAREWELL_S = 1.0
#: So many connections may be without a proof at a time: when another one comes, the oldest is closed.
_UNPROVEN_MAX = 256


class CoordinatorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a substrate tells a new coordinator. ``lost``: nodes of which it knows that they will not be heard."""

    config: RunConfig
    token: str
    run_directory: str
    lost: tuple[str, ...] = ()


def _in_run_time(message: messages.Message) -> messages.Message:
    """As observers are told it, which may have another clock."""
    if isinstance(message, WorkerLost):
        return msgspec.structs.replace(message, detected_ns=to_run(message.detected_ns))
    return message


class Coordinator:
    """Serves one run, or the rest of one."""

    def __init__(self, spec: CoordinatorSpec) -> None:
        self._spec = spec
        has_moved = not (
            Path(spec.run_directory) / "journal" / "coordinator.jsonl"
        ).exists()  # else it came back here
        self._journal = Journal(
            Path(spec.run_directory) / "journal", "coordinator", role="coordinator"
        )
        self._record = Record(Path(spec.run_directory) / RECORD)
        self._plane = ControlPlane(spec.config, self._record.memory, time.monotonic())
        self._plane.expect_no_longer(spec.lost if has_moved else (), time.monotonic())
        self._agents: dict[str, asyncio.StreamWriter] = {}
        self._starved: dict[
            str, tuple[Starvation, int]
        ] = {}  # agents on this host, with the last reading in ns
        self._acknowledgements = Acknowledgements()
        self._observers = Observers()
        self._clients: dict[int, asyncio.StreamWriter] = {}
        self._unproven: dict[
            asyncio.StreamWriter, None
        ] = {}  # clients that have yet to show the token, oldest first
        self._refusals = Refusals()
        self._numbers = itertools.count()
        self._ended, self._watched = asyncio.Event(), asyncio.Event()
        self._succeeds = self._resumes = self._record.term > 1
        self._alone_until_s = time.monotonic() + REATTACH_S
        self._ticks_soon = False
        self._beaten: set[str] = set()  # nodes that were heard since the last tick
        self._timer: asyncio.TimerHandle | None = None

    async def serve(self, listeners: Sequence[socket.socket]) -> None:
        """Until the job ends. One listener is for agents and observers, one for the store."""
        if self._record.damage:
            print_line(f"{self._record.damage}: it counts as lost")
            self._journal.write(
                Event.RECORD_LOST, node="", generation=0, known=0, detail=self._record.damage
            )
        self._carry_out([output for output in self._plane.retell() if not self._is_written(output)])
        if self._spec.config.resume and not self._record.memory:
            self._look_for_snapshots()
        servers = [await asyncio.start_server(self._greet, sock=listener) for listener in listeners]
        self._tick_soon()
        try:
            await self._ended.wait()
            await self._await_observer()
            await self._drain()
            self._tell_refusals(self._refusals.rest(time.monotonic()))
            self._journal.sign_off("the job ended")
        finally:
            for server in servers:
                server.close()

    def _is_written(self, output: Output) -> bool:
        """Whether the coordinator before this one has written it to the journal."""
        return isinstance(output, Note) and self._journal.has(
            output.event, t_ns=output.t_ns, **output.fields
        )

    def _look_for_snapshots(self) -> None:
        """Whether an earlier run has stored something; remembered, as the next coordinator may find other things."""
        from chaoskit.daemon.archive import newest_generation

        try:
            if generation := newest_generation(self._spec.config):
                self._carry_out(self._plane.resume(generation, time.monotonic()))
        except ChaoskitError as error:  # better not at all than anew from the beginning
            self._carry_out(
                self._plane.hear(EndJob(False, f"cannot be resumed: {error}"), time.monotonic())
            )

    def _say_resumed(self) -> None:
        """Write to journal and log that this coordinator goes on where another one was.

        It does not go on if a node, or the record, knows of a later coordinator.
        """
        if not self._resumes:
            return
        self._resumes, now_ns = False, time.monotonic_ns()
        self._hold(self._record.check)  # whoever has taken over says so with a later time
        generation, events = self._plane.membership.newest_known, len(self._record.memory)
        self._journal.write(
            Event.RESUMED, t_ns=now_ns, term=self._record.term, generation=generation, events=events
        )
        what = f"term {self._record.term}, generation {generation}, {plural(events, 'event')} remembered"
        print_line(f"this coordinator took over from the one before it: {what}")

    async def _await_observer(self) -> None:
        """Who watched the coordinator before this one may not have found this one yet, and must hear of the end."""
        if self._succeeds:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._watched.wait(), self._alone_until_s - time.monotonic())

    async def _drain(self) -> None:
        for writer in self._observers.writers:
            with contextlib.suppress(TimeoutError, OSError):
                writer.close()
                await asyncio.wait_for(writer.wait_closed(), _FAREWELL_S)
        # the end of a connection with unread data would take back what an agent has not read yet, such as EndJob
        agents = [
            asyncio.ensure_future(self._await_close(writer)) for writer in self._agents.values()
        ]
        if agents:
            await asyncio.wait(agents, timeout=_FAREWELL_S)

    async def _await_close(self, writer: asyncio.StreamWriter) -> None:
        """Send nothing more to an agent, and read from it until it hangs up."""
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()
            await writer.wait_closed()

    # -- connections ----------------------------------------------------------------------------------------------

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
                self._tell_refusals(self._refusals.due(time.monotonic()))
        except Exception as error:  # noqa: BLE001 - a bug of ours must end the run, not one connection
            self._fail(error)
        finally:
            writer.close()

    async def _await_proof(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._unproven[writer] = None
        if len(self._unproven) > _UNPROVEN_MAX:
            next(iter(self._unproven)).transport.abort()
            self._refusals.add(f"more than {_UNPROVEN_MAX} have not shown that they know the token")
        try:
            await frames.accept_async(reader, writer, self._spec.token)
        finally:
            del self._unproven[writer]

    async def _serve_agent(
        self, hello: AgentHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._hold(self._record.check)  # it may have waited for long, while this process was asleep
        term = self._record.term
        self._hold(self._record.outbid, hello.term)  # where the record was lost, terms begin anew
        self._resumes &= self._record.term == term
        self._say_resumed()
        outputs = self._plane.attach(hello, time.monotonic(), term=term)
        self._disconnect(
            hello.node
        )  # from its last connection, which it may have given up before we noticed
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
        return Welcome(self._spec.config, self._record.term, os.getpid())

    async def _serve_observer(
        self, hello: ObserverHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._observers.add(writer, hello)
        self._watched.set()
        for message in (self._welcome(), *self._plane.picture()):
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
        client = next(self._numbers)
        self._clients[client] = writer
        try:
            while True:
                self._carry_out(self._plane.ask(client, await frames.read_message(reader)))
        finally:
            del self._clients[client]
            self._plane.hang_up(client)

    # -- decisions ------------------------------------------------------------------------------------------------

    def _hear_agent(self, node: str, message: Any) -> None:
        """Nodes of one host beat together: one look does for them all."""
        self._hold(self._record.check)  # one that is over must not prolong the lease of a node
        if isinstance(
            message, WorkerLost
        ):  # nodes tell the run's time, and decisions are by our clock
            message = msgspec.structs.replace(message, detected_ns=heard_ns(message.detected_ns))
        self._carry_out(self._plane.hear(message, time.monotonic()))
        if not isinstance(message, Heartbeat):
            self._tick_soon()
            return
        self._beaten.add(node)
        if len(self._beaten) == len(self._agents):
            self._tick_soon()
        elif len(self._beaten) == 1:
            self._tick_within(_GATHER_S)

    def _tick_soon(self) -> None:
        """Tick when all that has arrived is heard."""
        if not self._ticks_soon:
            self._ticks_soon = True
            asyncio.get_running_loop().call_soon(self._tick)

    def _tick_within(self, seconds: float) -> None:
        """Tick then, if no tick is due earlier."""
        loop = asyncio.get_running_loop()
        if self._timer is not None and not self._timer.cancelled():
            if self._timer.when() <= loop.time() + seconds:
                return
            self._timer.cancel()
        self._timer = loop.call_later(seconds, self._tick_soon)

    def _tick(self) -> None:
        self._ticks_soon = False
        self._beaten.clear()
        if self._timer is not None:
            self._timer.cancel()
        try:
            self._hold(self._record.check)
            now_s = time.monotonic()
            if now_s > self._alone_until_s:
                self._say_resumed()  # no node has come that could know better
            self._carry_out(
                self._plane.tick(now_s, self._starvation(), self._acknowledgements.take())
            )
            self._tell_refusals(self._refusals.due(now_s))
        except Exception as error:  # noqa: BLE001 - as in _greet
            self._fail(error)
        now_s = time.monotonic()
        until_due_s = self._plane.next_tick_s(now_s) - now_s
        self._tick_within(min(_TICK_S, max(_TICK_MIN_S, until_due_s)))

    def _tell_refusals(self, refused: RefusedConnections | None) -> None:
        """Write to the log and the journal how many connections were refused, as far as they take it."""
        if refused is not None:
            print_line(str(refused))
            with contextlib.suppress(JournalFull, OSError):  # no verdict depends on it
                self._journal.write(
                    Event.CONNECTIONS_REFUSED, count=refused.count, reason=refused.reason
                )

    def _starvation(self) -> dict[str, float]:
        """How long each agent on this host has waited for a CPU since this was last asked."""
        waited = {}
        for node, (starvation, before_ns) in self._starved.items():
            after_ns = starvation.read_ns()
            waited[node] = max(0, after_ns - before_ns) / 1e9
            self._starved[node] = (starvation, after_ns)
        return waited

    def _carry_out(self, outputs: list[Output]) -> None:
        """Remember first, then act: what is not in the record has not been decided."""
        if remembered := [output for output in outputs if isinstance(output, Remember)]:
            self._hold(self._record.append, remembered)
        for output in outputs:
            match output:
                case Send(node, message):
                    if isinstance(message, Heard):  # here, where there are clocks
                        message = msgspec.structs.replace(message, wall_ns=time.time_ns())
                    writer = self._agents.get(node)
                    if isinstance(message, Probe) and writer is not None:
                        self._acknowledgements.ask(node, writer.get_extra_info("socket"))
                    self._write(writer, message)
                case Show(message):
                    self._observers.show(_in_run_time(message), time.monotonic())
                case Reply(client, message):
                    assert isinstance(client, int)
                    self._write(self._clients.get(client), message)
                case Note(event, fields, t_ns):
                    self._journal.write(event, t_ns=t_ns, **fields)
                case Disconnect(node):
                    self._disconnect(node)
                case End():
                    self._ended.set()

    def _hold(self, act: Callable[..., None], *arguments: Any) -> None:
        """Do something with the record, which only the coordinator of the moment may."""
        try:
            act(*arguments)
        except (Fenced, Gone) as error:
            print_line(str(error))
            self._journal.sign_off(str(error))
            os._exit(EXIT_OVER if isinstance(error, Fenced) else _EXIT_GONE)

    def _write(self, writer: asyncio.StreamWriter | None, message: messages.Message) -> None:
        if writer is not None:
            writer.write(frames.encode(message))

    def _disconnect(self, node: str) -> None:
        writer = self._agents.pop(node, None)
        if writer is not None:
            writer.close()
        self._acknowledgements.forget(node)
        if node in self._starved:
            self._starved.pop(node)[0].close()

    def _fail(self, error: Exception) -> None:
        print_error(error)
        reason = (
            str(error) if isinstance(error, JournalFull) else "the coordinator failed; see its log"
        )
        try:
            self._carry_out(self._plane.hear(EndJob(False, reason), time.monotonic()))
        except Exception:  # noqa: BLE001 - it cannot even say so: the next coordinator may
            os._exit(1)


def run_coordinator(arguments: bytes, listeners: Sequence[socket.socket], parent_pid: int) -> None:
    """The life of a coordinator process, by the arguments of a :class:`CoordinatorSpec`. Does not return."""
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
