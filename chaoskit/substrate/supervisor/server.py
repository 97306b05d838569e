"""The supervisor process. It forks programs from itself after it has imported what they need.

It serves one runner and ends with it, however the runner ends. All that it has started then ends,
too.

-> ``supervisor/programs.py``: how programs are forked, restarted and ended.
``supervisor/actions.py``: faults on its node. ``undo/guard.py``: what undoes its changes if the
supervisor itself is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import os
import selectors
import shutil
import signal
import socket
import sys
import time
import traceback
from collections import deque
from pathlib import Path
from typing import Any

from chaoskit.errors import ChaoskitError
from chaoskit.journal.writer import own_version
from chaoskit.process.linux import adopt_orphans, restore_signals, set_name, socket_name
from chaoskit.process.run_clock import clock_id
from chaoskit.substrate.supervisor import resumable_stream
from chaoskit.substrate.supervisor.actions import NodeActions
from chaoskit.substrate.supervisor.files import CHUNK_BYTES, IN_FLIGHT_BYTES, RunFiles, replace_file
from chaoskit.substrate.supervisor.log_echo import LogEcho
from chaoskit.substrate.supervisor.messages import (
    ActionShown,
    ApplyAction,
    AskAlive,
    AskClock,
    AskEchoes,
    AskKernel,
    AskWhyNot,
    CloseListener,
    CrashContainer,
    EndPrograms,
    FilesTaken,
    FindFile,
    FindSource,
    LiftAction,
    LineClosed,
    LineData,
    OpenDoor,
    OpenListener,
    ProgramExited,
    ProgramStarted,
    ReleaseNode,
    RemoveDirectory,
    Report,
    Request,
    RequestDone,
    RequestFailed,
    SendSignal,
    SettleFiles,
    ShipFiles,
    StartProgram,
    StoreSource,
    SupervisorAlive,
    SupervisorHello,
    SupervisorLeaves,
    SupervisorLeft,
    SupervisorReady,
    WriteFile,
)
from chaoskit.substrate.supervisor.programs import Programs
from chaoskit.substrate.supervisor.socket_relay import LineDoor
from chaoskit.substrate.supervisor.sources import SourceStore
from chaoskit.substrate.supervisor.stream import watch
from chaoskit.wire import frames

_KILLED = 128 + signal.SIGKILL  # exit status of a container whose first process was killed
_COUNT_S = 0.05  # interval at which the counts of actions in force are read
_RECEIVE_BYTES = 2**16
_GRACE_S = 30.0
_DESCRIPTORS_MAX = 8  # in one message
_FAREWELL_S = 2.0  # end of the grace period, for stubborn programs and the last files
_RESERVE_S = 0.2  # kept free before the grace period ends
_GRACE_SHARE = 0.5  # least share of the grace period that programs have
_decode = frames.decoder(Request)


class Supervisor:
    """Server that carries out requests of its runner one after the other, and reports events.

    It never waits for the runner to read. The messages are in :mod:`.messages`.

    Args:
        connection: stream to the runner.
        is_first: True if the supervisor is the first process of a container.
        grace_s: time from SIGTERM to its end, if it is the first process.
        carrier: pid of the process that carries the connection; None if there is none.
        echo: True to print the content of log files as it is sent.
        network: True to support actions on the packets that the node receives, too.

    Attributes:
        status: exit status of the process: 0, or 137 after a :class:`CrashContainer`.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        is_first: bool,
        grace_s: float,
        carrier: int | None = None,
        network: bool = False,
        echo: bool = False,
    ) -> None:
        self._connection, self._is_first, self._grace_s = connection, is_first, grace_s
        self.status = 0
        self._leaves_by_s = self._ends_by_s = math.inf  # monotonic; set once it ends
        self._splitter, self._descriptors = frames.FrameSplitter(_decode), deque[int]()
        self._outgoing = bytearray()
        self._listeners: dict[int, socket.socket] = {}  # for later programs
        self._actions = NodeActions(network=network)
        spared = set() if carrier is None else {carrier}
        self._programs = Programs(
            self._close_in_child, lambda: self._actions.guards() | spared, is_first=is_first
        )
        self._door: LineDoor | None = None
        self._sources = SourceStore()
        self._files: dict[str, RunFiles] = {}  # by the directory of a run
        self._echo = LogEcho(sys.stdout.fileno()) if echo else None
        self._in_flight_bytes = 0  # of files, not acknowledged by the runner
        self._selector = selectors.DefaultSelector()
        self._wakes, self._woken = socket.socketpair()  # wakes the selector on signals
        for end in (self._wakes, self._woken, connection):
            end.setblocking(False)

    def serve(self) -> None:
        """Serve until the runner goes away; in a container also until SIGTERM comes.

        Everything is then undone and ended. After SIGTERM, programs first have part of the grace
        period to end by themselves.
        """
        signal.signal(signal.SIGCHLD, lambda *_: None)
        if self._is_first:
            signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._wakes, selectors.EVENT_READ, self._reap)
        self._selector.register(self._connection, selectors.EVENT_READ, self._handle_requests)
        self.send(SupervisorReady(own_version(), clock_id()))
        with contextlib.ExitStack() as over:
            over.callback(self._programs.end_all)
            over.callback(self._actions.close)
            over.callback(self._close_door)
            with contextlib.suppress(OSError):  # the runner, or the connection to it, is gone
                while not self._is_leaving_now():
                    self._serve_once(self._patience_s())
                self._leave()

    def _serve_once(self, limit_s: float | None) -> None:
        """Wait for events for at most ``limit_s``, handle them, and report changed counts."""
        for key, events in self._selector.select(limit_s):
            if events & selectors.EVENT_WRITE:
                self._flush()
            if events & selectors.EVENT_READ:
                key.data()
        for number, count in self._actions.changed_counts():
            self.send(ActionShown(number, count))

    def _patience_s(self) -> float | None:
        """Return how long the selector may wait, or None for no limit."""
        waits = [_COUNT_S] if self._actions.has_actions_in_force else []
        if self._leaves_by_s < math.inf:
            waits.append(max(0.0, self._leaves_by_s - time.monotonic()))
        return min(waits, default=None)

    # -- its own end -------------------------------------------------------------------------------

    def _begin_leaving(self) -> None:
        """Handle SIGTERM: let the programs end by themselves in part of the time that is left."""
        if self._leaves_by_s == math.inf:
            self._ends_by_s = time.monotonic() + self._grace_s - _RESERVE_S
            self._leaves_by_s = time.monotonic() + max(
                self._grace_s * _GRACE_SHARE, self._grace_s - _FAREWELL_S
            )
            self.send(SupervisorLeaves(self._grace_s))
            self._programs.signal_all(signal.SIGTERM)

    def _crash(self) -> None:
        """Imitate a killed container: the programs end first, and their output is still sent."""
        self.status, self._leaves_by_s = _KILLED, time.monotonic()
        self._ends_by_s = self._leaves_by_s + _FAREWELL_S

    def _is_leaving_now(self) -> bool:
        """Return whether the supervisor ends now: no program is left, or their time is over."""
        if self._leaves_by_s == math.inf:
            return False
        return not self._programs.are_running() or time.monotonic() >= self._leaves_by_s

    def _leave(self) -> None:
        """End all programs, send their last output, and wait until the runner has received it.

        The network namespace of a pod vanishes with it, and with that all data that its kernel has
        not sent yet.
        """
        self._actions.release_all()
        self._report_exits(self._programs.end_all())
        for files in self._files.values():
            files.look_at_all()
        self._ship()
        while self._outgoing or any(files.has_unsent for files in self._files.values()):
            if (left_s := self._ends_by_s - time.monotonic()) <= 0:
                return
            self._serve_once(left_s)
        self._connection.settimeout(max(0.0, self._ends_by_s - time.monotonic()))
        self._connection.sendall(frames.encode(SupervisorLeft()))
        self._connection.shutdown(socket.SHUT_WR)
        while self._connection.recv(_RECEIVE_BYTES):  # wait until the runner closes its side
            pass

    # -- the stream --------------------------------------------------------------------------------

    def send(self, report: Report) -> None:
        """Send a report, buffered until the runner reads.

        A lost connection is detected by the next read.
        """
        was_idle = not self._outgoing
        self._outgoing += frames.encode(report)
        if was_idle:
            self._flush()

    def _flush(self) -> None:
        """Write as much of the buffer as the stream accepts; the selector calls for the rest."""
        try:
            while self._outgoing:
                del self._outgoing[: self._connection.send(self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self._outgoing.clear()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
        self._selector.modify(self._connection, events, self._handle_requests)

    def _ship(self) -> None:
        """Send new parts of files up to the limit of bytes in flight.

        The rest follows once the runner has acknowledged.
        """
        for directory, files in list(self._files.items()):
            files.look()
            if self._in_flight_bytes > IN_FLIGHT_BYTES - CHUNK_BYTES:
                continue
            for chunk in files.unsent_chunks():
                self._in_flight_bytes += len(chunk.data)
                self.send(chunk)
                if self._echo is not None and chunk.name.startswith("log/"):
                    self._echo.take(chunk.name, chunk.data)
                if self._in_flight_bytes > IN_FLIGHT_BYTES - CHUNK_BYTES:
                    break
            else:
                self._settle(directory, files)

    def _settle(self, directory: str, files: RunFiles) -> None:
        """Remove the files of a run, and report their sizes, if the runner has asked for that.

        It is called when all files of the run have been sent.
        """
        if files.settle_request is not None:
            del self._files[directory]
            self._selector.unregister(files)
            files.close()
            files.remove()
            if self._echo is not None:
                self._echo.finish()
            self.send(RequestDone(files.settle_request, self._actions.encode(files.sizes())))

    def _handle_requests(self) -> None:
        """Carry out the requests that have arrived. Raises OSError if the runner is gone."""
        try:
            for request in self._splitter.feed(self._receive()):
                if isinstance(request, LineData | LineClosed):
                    if self._door is not None:
                        self._door.take(request)
                elif isinstance(request, CrashContainer):
                    self._crash()
                elif isinstance(request, AskAlive):
                    self.send(SupervisorAlive())
                elif isinstance(request, FilesTaken):
                    self._in_flight_bytes -= request.size_bytes
                    self._ship()
                elif (answer := self._answer(request)) is not None:
                    self.send(answer)
        except BlockingIOError:
            pass

    def _receive(self) -> bytes:
        """Return bytes of the stream, and keep the descriptors that came with them.

        Raises BlockingIOError if there are none, and ConnectionResetError at the end.
        """
        if self._connection.family == socket.AF_UNIX:
            data, descriptors, _, _ = socket.recv_fds(
                self._connection, _RECEIVE_BYTES, _DESCRIPTORS_MAX
            )
            self._descriptors.extend(descriptors)
        else:
            data = self._connection.recv(_RECEIVE_BYTES)
        if not data:
            raise ConnectionResetError("the runner is gone")
        return data

    def _answer(self, request: Any) -> Report | None:
        """Carry out a request and return its answer. None if the answer follows later.

        An exception becomes a :class:`RequestFailed`: no request may end the supervisor.
        """
        try:
            return self._carry_out(request)
        except ProcessLookupError as error:
            return RequestFailed(request.number, str(error), is_gone=True)
        except Exception as error:  # noqa: BLE001 - reported to the runner
            reason = (
                str(error)
                if isinstance(error, OSError | ChaoskitError)
                else f"{type(error).__name__}: {error}"
            )
            return RequestFailed(request.number, reason)

    def _carry_out(self, request: Any) -> Report | None:
        """Carry out a request and return its answer; None for an answer that follows later."""
        match request:
            case StartProgram():
                return self._start(request)
            case AskClock(number):
                return RequestDone(number, self._actions.encode(time.monotonic_ns()))
            case EndPrograms(number, programs, patience_s):
                self._actions.release_programs(programs)
                self._report_exits(self._programs.end(programs, patience_s))
                return RequestDone(number)
            case OpenListener(number, host, port):
                return RequestDone(number, self._listen(host, port))
            case CloseListener(number, listener):
                if listener in self._listeners:
                    self._listeners.pop(listener).close()
                return RequestDone(number)
            case OpenDoor(number, path):
                self._close_door()
                self._door = LineDoor(Path(path), self.send, self._selector)
                return RequestDone(number)
            case FindSource(number, directory, digest):
                return RequestDone(
                    number, self._actions.encode(self._sources.holds(Path(directory), digest))
                )
            case StoreSource(number, directory, digest, at, data, is_last):
                self._sources.take(Path(directory), digest, at, data, is_last=is_last)
                return RequestDone(number)
            case WriteFile(number, path, data):
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                replace_file(Path(path), data)
                return RequestDone(number)
            case FindFile(number, path):
                return RequestDone(number, self._actions.encode(Path(path).is_file()))
            case RemoveDirectory(number, path):
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(path)
                return RequestDone(number)
            case ShipFiles(number, directory, with_log):
                self._begin_shipping(directory, with_log=with_log)
                self._ship()
                return RequestDone(number)
            case SettleFiles(number, directory, log_bytes):
                self._files[directory].settle(number, log_bytes)
                self._ship()
                return None
            case (
                AskKernel()
                | SendSignal()
                | AskWhyNot()
                | ApplyAction()
                | LiftAction()
                | AskEchoes()
                | ReleaseNode()
            ):
                return RequestDone(request.number, self._actions.carry_out(request))
        raise AssertionError(request)

    # -- requests ----------------------------------------------------------------------------------

    def _start(self, request: StartProgram) -> ProgramStarted:
        """Start a program with its sockets and its namespace, and return its pid and start time.

        Raises OSError if no process can be created.
        """
        received = [self._descriptors.popleft() for _ in range(request.listeners + request.enters)]
        kept = [self._listeners.pop(number).detach() for number in request.kept]
        pid, ticks = self._programs.start(
            request.program, (*kept, *received), len(kept) + request.listeners
        )
        return ProgramStarted(request.number, pid, ticks)

    def _listen(self, host: str, port: int) -> bytes:
        """Open a listening socket, and return its number and address as JSON.

        Raises OSError if the port is in use.
        """
        listener = socket.create_server((host, port), backlog=128)
        self._listeners[listener.fileno()] = listener
        return self._actions.encode((listener.fileno(), *listener.getsockname()[:2]))

    def _begin_shipping(self, directory: str, *, with_log: bool) -> None:
        """Watch the files of a run from now on, unless they are watched already."""
        if directory not in self._files:
            self._files[directory] = RunFiles(Path(directory), with_log=with_log)
            self._selector.register(self._files[directory], selectors.EVENT_READ, self._ship)

    def _close_door(self) -> None:
        """Close the door and its lines, if there is one."""
        door, self._door = self._door, None
        if door is not None:
            door.close()

    def _reap(self) -> None:
        """Handle signals: begin to leave after SIGTERM, and report the programs that ended."""
        signals = b""
        with contextlib.suppress(BlockingIOError):
            while data := self._wakes.recv(_RECEIVE_BYTES):
                signals += data
        if signal.SIGTERM in signals:
            self._begin_leaving()
        self._report_exits(self._programs.reap())

    def _report_exits(self, ended: dict[int, int]) -> None:
        for pid, status in ended.items():
            self.send(ProgramExited(pid, status))

    def _close_in_child(self) -> None:
        """Close the descriptors of the supervisor and reset its signals, in a forked child."""
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(signum, signal.SIG_DFL)
        self._selector.close()
        for open_socket in (self._connection, self._wakes, self._woken, *self._listeners.values()):
            open_socket.close()
        for files in self._files.values():
            files.close()
        if self._door is not None:
            self._door.forget()
        self._actions.forget()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m chaoskit.substrate.supervisor", description=__doc__
    )
    connection_options = parser.add_mutually_exclusive_group()
    connection_options.add_argument(
        "--connect",
        metavar="PATH",
        help="connect to the runner's Unix socket, as the first process of a container",
    )
    connection_options.add_argument(
        "--dial",
        metavar="HOST:PORT",
        help="connect to the runner by TCP, with the token of --token-file",
    )
    connection_options.add_argument(
        "--listen",
        metavar="PORT",
        type=int,
        help="accept the runner on the loopback, with the token of --token-file",
    )
    parser.add_argument(
        "--patience-s",
        metavar="S",
        type=float,
        default=resumable_stream.PATIENCE_S,
        help="with --listen: time without a connection after which the supervisor ends",
    )
    parser.add_argument(
        "--token-file",
        metavar="PATH",
        type=Path,
        help="file with the secret that both sides must know; it is read once",
    )
    parser.add_argument(
        "--place",
        metavar="NAME",
        default="",
        help="with --dial: name of this supervisor for the runner",
    )
    parser.add_argument(
        "--address", metavar="HOST", default="", help="address at which processes here are reached"
    )
    parser.add_argument(
        "--machine", metavar="NAME", default="", help="name of the machine of this supervisor"
    )
    parser.add_argument(
        "--grace-s",
        metavar="S",
        type=float,
        default=_GRACE_S,
        help="time from SIGTERM to SIGKILL, in which the supervisor ends",
    )
    parser.add_argument(
        "--network", action="store_true", help="change the network of the node, and run nothing"
    )
    parser.add_argument(
        "--echo-logs", action="store_true", help="print what processes write to their logs"
    )
    parser.add_argument(
        "--cold", action="store_true", help="import nothing before the first program starts"
    )
    arguments = parser.parse_args()
    if bool(arguments.dial or arguments.listen) != bool(arguments.token_file):
        parser.error("--token-file is required with --dial or --listen, and only allowed with them")
    return arguments


def _connect_runner(arguments: argparse.Namespace) -> tuple[socket.socket, int | None]:
    """Return the connection to the runner, and the pid of a process that carries it, if any.

    The connection is standard input, unless an option names another.

    Raises:
        OSError, Refused: if it cannot be made.
    """
    if arguments.dial:
        host, _, port = arguments.dial.rpartition(":")
        connection = frames.connect((host, int(port)), arguments.token_file.read_text().strip())
        watch(connection)
        frames.send(
            connection, SupervisorHello(arguments.place, arguments.address, arguments.machine)
        )
        return connection, None
    if arguments.listen:
        token = arguments.token_file.read_text().strip()
        pid, connection = resumable_stream.start_accepting_side(
            arguments.listen, token, arguments.patience_s
        )
        return connection, pid
    if arguments.connect:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with socket_name(Path(arguments.connect)) as name:
            connection.connect(name)
        return connection, None
    connection = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    return connection, None


def main() -> None:
    """Run a supervisor by its command line, and end the process when its runner is gone.

    The exit status is 1 if the runner cannot be reached, or after an error.
    """
    arguments = _arguments()
    set_name("ck-supervisor")
    restore_signals()
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        connection, carrier = _connect_runner(arguments)
    except (OSError, ChaoskitError) as error:
        sys.exit(f"chaoskit: the runner cannot be reached: {error}")
    status = 1
    try:
        if not arguments.cold:
            from chaoskit.agent import agent  # noqa: F401 - forked programs need it
            from chaoskit.coordinator import server  # noqa: F401
            from chaoskit.runtime.worker import zygote

            zygote.preload()
        gc.freeze()  # a collection in a child would copy every page of these objects
        is_first = bool(arguments.connect or arguments.dial or arguments.listen)
        settings = {
            "grace_s": arguments.grace_s,
            "network": arguments.network,
            "echo": arguments.echo_logs,
        }
        supervisor = Supervisor(connection, is_first=is_first, carrier=carrier, **settings)
        supervisor.serve()
        status = supervisor.status
    except BaseException:  # noqa: BLE001 - the process must end
        traceback.print_exc()
    finally:
        os._exit(status)
