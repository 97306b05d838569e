"""The supervisor itself. It is warm: it forks programs from a process that has imported what they need.

It serves one runner and ends with it, however the runner ends: then all that it started ends, too.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import os
import selectors
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
from chaoskit.substrate.supervisor.actions import Acts
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
    FindSource,
    LiftAction,
    LineClosed,
    LineData,
    OpenDoor,
    OpenListener,
    ProgramExited,
    ProgramStarted,
    ReleaseNode,
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

_KILLED = 128 + signal.SIGKILL  # the status of a container whose first process was killed
_COUNT_S = 0.05  # between two looks at what actions in force have met
_RECEIVE_BYTES = 2**16
_GRACE_S = 30.0
_DESCRIPTORS_MAX = 8  # with one message
_FAREWELL_S = (
    2.0  # at the end of the grace period, for what does not end by itself, and for the last files
)
_RESERVE_S = 0.2  # before the very end
_GRACE_SHARE = 0.5  # of a grace period that is shorter: what programs have of it
_decode = frames.decoder(Request)


class Supervisor:
    """Does what its runner asks, one thing after the other, and tells what happens meanwhile. It never waits for the
    runner to read.

    Args:
        connection: to the runner. is_first: whether this is the first process of a container.
        grace_s: it has so long from SIGTERM to its end, where it is the first process.
        carrier: pid of the process that carries the connection, if one does.
        echo: whether log files are printed, too, as they are shipped.
        network: whether it changes the network of its node, instead of what runs there.

    Attributes:
        status: with which its process is to end.
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
        self._leaves_by_s = self._ends_by_s = (
            math.inf
        )  # on the monotonic clock, once it was told to end
        self._splitter, self._descriptors = frames.Splitter(_decode), deque[int]()
        self._untold = bytearray()
        self._listeners: dict[int, socket.socket] = {}  # for programs that are to be started
        self._acts = Acts(network=network)
        spared = set() if carrier is None else {carrier}
        self._programs = Programs(
            self._forget, lambda: self._acts.guards() | spared, is_first=is_first
        )
        self._door: LineDoor | None = None
        self._sources = SourceStore()
        self._files: dict[str, RunFiles] = {}  # by the directory of a run
        self._echo = LogEcho(sys.stdout.fileno()) if echo else None
        self._in_flight_bytes = 0  # of files, that the runner has not said to have taken
        self._selector = selectors.DefaultSelector()
        self._wakes, self._woken = socket.socketpair()  # by SIGCHLD
        for one in (self._wakes, self._woken, connection):
            one.setblocking(False)

    def serve(self) -> None:
        """Until the runner goes away, or SIGTERM comes; then everything is put back and ended."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        if self._is_first:
            signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._wakes, selectors.EVENT_READ, self._reap)
        self._selector.register(self._connection, selectors.EVENT_READ, self._obey)
        self.tell(SupervisorReady(own_version(), clock_id()))
        with contextlib.ExitStack() as over:
            over.callback(self._programs.end_all)
            over.callback(self._acts.close)
            over.callback(self._close_door)
            with contextlib.suppress(
                OSError
            ):  # of the stream: the runner, or the way to it, is gone
                while not self._is_leaving_now():
                    self._serve_once(self._patience_s())
                self._leave()

    def _serve_once(self, limit_s: float | None) -> None:
        for key, events in self._selector.select(limit_s):
            if events & selectors.EVENT_WRITE:
                self._go_on_telling()
            if events & selectors.EVENT_READ:
                key.data()
        for number, count in self._acts.counted():
            self.tell(ActionShown(number, count))

    def _patience_s(self) -> float | None:
        """How long nothing has to be done, if nothing comes."""
        waits = [_COUNT_S] if self._acts.in_force else []
        if self._leaves_by_s < math.inf:
            waits.append(max(0.0, self._leaves_by_s - time.monotonic()))
        return min(waits, default=None)

    # -- its own end ----------------------------------------------------------------------------------------------

    def _take_notice(self) -> None:
        """SIGTERM: have the programs end by themselves, which may take part of the time that is left."""
        if self._leaves_by_s == math.inf:
            self._ends_by_s = time.monotonic() + self._grace_s - _RESERVE_S
            self._leaves_by_s = time.monotonic() + max(
                self._grace_s * _GRACE_SHARE, self._grace_s - _FAREWELL_S
            )
            self.tell(SupervisorLeaves(self._grace_s))
            self._programs.signal_all(signal.SIGTERM)

    def _crash(self) -> None:
        """End as a container does that is killed. The others go first, and what they have written is shipped."""
        self.status, self._leaves_by_s = _KILLED, time.monotonic()
        self._ends_by_s = self._leaves_by_s + _FAREWELL_S

    def _is_leaving_now(self) -> bool:
        if self._leaves_by_s == math.inf:
            return False
        return not self._programs.are_running() or time.monotonic() >= self._leaves_by_s

    def _leave(self) -> None:
        """End what is left, then ship what it has written, and wait until the runner has it: what goes with the pod is
        also what its kernel has not sent yet.
        """
        self._acts.release_all()
        self._tell_exits(self._programs.end_all())
        for files in self._files.values():
            files.look_at_all()
        self._ship()
        while self._untold or any(files.is_behind for files in self._files.values()):
            if (left_s := self._ends_by_s - time.monotonic()) <= 0:
                return
            self._serve_once(left_s)
        self._connection.settimeout(max(0.0, self._ends_by_s - time.monotonic()))
        self._connection.sendall(frames.encode(SupervisorLeft()))
        self._connection.shutdown(socket.SHUT_WR)
        while self._connection.recv(_RECEIVE_BYTES):  # until the runner has closed its side
            pass

    # -- the stream -----------------------------------------------------------------------------------------------

    def tell(self, report: Report) -> None:
        """Say something as soon as the runner reads. Where it is gone, its end is heard next."""
        was_idle = not self._untold
        self._untold += frames.encode(report)
        if was_idle:
            self._go_on_telling()

    def _go_on_telling(self) -> None:
        try:
            while self._untold:
                del self._untold[: self._connection.send(self._untold)]
        except BlockingIOError:
            pass
        except OSError:
            self._untold.clear()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._untold else 0)
        self._selector.modify(self._connection, events, self._obey)

    def _ship(self) -> None:
        """Tell what files have been given, as long as the runner takes it; what is left follows when it has."""
        for directory, files in list(self._files.items()):
            files.look()
            if self._in_flight_bytes > IN_FLIGHT_BYTES - CHUNK_BYTES:
                continue
            for chunk in files.unshipped():
                self._in_flight_bytes += len(chunk.data)
                self.tell(chunk)
                if self._echo is not None and chunk.name.startswith("log/"):
                    self._echo.take(chunk.name, chunk.data)
                if self._in_flight_bytes > IN_FLIGHT_BYTES - CHUNK_BYTES:
                    break
            else:
                self._settle(directory, files)

    def _settle(self, directory: str, files: RunFiles) -> None:
        """End the shipping of a run in which nothing is written any more."""
        if files.settles is not None:
            del self._files[directory]
            self._selector.unregister(files)
            files.close()
            files.remove()
            if self._echo is not None:
                self._echo.finish()
            self.tell(RequestDone(files.settles, self._acts.encode(files.sizes())))

    def _obey(self) -> None:
        try:
            for request in self._splitter.feed(self._heard()):
                if isinstance(request, LineData | LineClosed):
                    if self._door is not None:
                        self._door.take(request)
                elif isinstance(request, CrashContainer):
                    self._crash()
                elif isinstance(request, AskAlive):
                    self.tell(SupervisorAlive())
                elif isinstance(request, FilesTaken):
                    self._in_flight_bytes -= request.size_bytes
                    self._ship()
                elif (answer := self._answer(request)) is not None:
                    self.tell(answer)
        except BlockingIOError:
            pass

    def _heard(self) -> bytes:
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
        """What was done, or why it could not be: nothing that is asked ends what runs here. None: it takes its time."""
        try:
            return self._carry_out(request)
        except ProcessLookupError as error:
            return RequestFailed(request.number, str(error), is_gone=True)
        except Exception as error:  # noqa: BLE001 - the runner is told
            told = (
                str(error)
                if isinstance(error, OSError | ChaoskitError)
                else f"{type(error).__name__}: {error}"
            )
            return RequestFailed(request.number, told)

    def _carry_out(self, request: Any) -> Report | None:
        match request:
            case StartProgram():
                return self._start(request)
            case AskClock(number):
                return RequestDone(number, self._acts.encode(time.monotonic_ns()))
            case EndPrograms(number, programs, patience_s):
                self._acts.release_programs(programs)
                self._tell_exits(self._programs.end(programs, patience_s))
                return RequestDone(number)
            case OpenListener(number, host, port):
                return RequestDone(number, self._listen(host, port))
            case CloseListener(number, listener):
                if listener in self._listeners:
                    self._listeners.pop(listener).close()
                return RequestDone(number)
            case OpenDoor(number, path):
                self._close_door()
                self._door = LineDoor(Path(path), self.tell, self._selector)
                return RequestDone(number)
            case FindSource(number, directory, digest):
                return RequestDone(
                    number, self._acts.encode(self._sources.holds(Path(directory), digest))
                )
            case StoreSource(number, directory, digest, at, data, is_last):
                self._sources.take(Path(directory), digest, at, data, is_last=is_last)
                return RequestDone(number)
            case WriteFile(number, path, data):
                replace_file(Path(path), data)
                return RequestDone(number)
            case ShipFiles(number, directory, with_record):
                self._begin_shipping(directory, with_record=with_record)
                self._ship()
                return RequestDone(number)
            case SettleFiles(number, directory):
                self._files[directory].settle(number)
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
                return RequestDone(request.number, self._acts.carry_out(request))
        raise AssertionError(request)

    # -- what is asked --------------------------------------------------------------------------------------------

    def _start(self, request: StartProgram) -> ProgramStarted:
        came = [self._descriptors.popleft() for _ in range(request.listeners + request.enters)]
        kept = [self._listeners.pop(number).detach() for number in request.kept]
        pid, ticks = self._programs.start(
            request.program, (*kept, *came), len(kept) + request.listeners
        )
        return ProgramStarted(request.number, pid, ticks)

    def _listen(self, host: str, port: int) -> bytes:
        listener = socket.create_server((host, port), backlog=128)
        self._listeners[listener.fileno()] = listener
        return self._acts.encode((listener.fileno(), *listener.getsockname()[:2]))

    def _begin_shipping(self, directory: str, *, with_record: bool) -> None:
        if directory not in self._files:
            self._files[directory] = RunFiles(Path(directory), with_record=with_record)
            self._selector.register(self._files[directory], selectors.EVENT_READ, self._ship)

    def _close_door(self) -> None:
        door, self._door = self._door, None
        if door is not None:
            door.close()

    def _reap(self) -> None:
        signals = b""
        with contextlib.suppress(BlockingIOError):
            while came := self._wakes.recv(_RECEIVE_BYTES):
                signals += came
        if signal.SIGTERM in signals:
            self._take_notice()
        self._tell_exits(self._programs.reap())

    def _tell_exits(self, ended: dict[int, int]) -> None:
        for pid, status in ended.items():
            self.tell(ProgramExited(pid, status))

    def _forget(self) -> None:
        """In a child: let go of what is the supervisor's."""
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(signum, signal.SIG_DFL)
        self._selector.close()
        for one in (self._connection, self._wakes, self._woken, *self._listeners.values()):
            one.close()
        for files in self._files.values():
            files.close()
        if self._door is not None:
            self._door.forget()
        self._acts.forget()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m chaoskit.substrate.supervisor", description=__doc__
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--connect",
        metavar="PATH",
        help="to the runner's Unix socket, as first process of a container",
    )
    where.add_argument(
        "--dial", metavar="HOST:PORT", help="the runner, with a token from --token-file"
    )
    where.add_argument(
        "--listen", metavar="PORT", type=int, help="for the runner on loopback, with the same token"
    )
    parser.add_argument(
        "--patience-s",
        metavar="S",
        type=float,
        default=resumable_stream.PATIENCE_S,
        help="without a runner",
    )
    parser.add_argument(
        "--token-file", metavar="PATH", type=Path, help="what both sides must know; it is read once"
    )
    parser.add_argument(
        "--place",
        metavar="NAME",
        default="",
        help="which supervisor this is, for the runner it dials",
    )
    parser.add_argument(
        "--address", metavar="HOST", default="", help="under which processes here are reached"
    )
    parser.add_argument("--machine", metavar="NAME", default="", help="on which this is")
    parser.add_argument(
        "--grace-s", metavar="S", type=float, default=_GRACE_S, help="from SIGTERM to SIGKILL"
    )
    parser.add_argument(
        "--network", action="store_true", help="change the network of the node, and run nothing"
    )
    parser.add_argument(
        "--echo-logs", action="store_true", help="print what processes write to their logs"
    )
    parser.add_argument("--cold", action="store_true", help="import nothing beforehand")
    arguments = parser.parse_args()
    if bool(arguments.dial or arguments.listen) != bool(arguments.token_file):
        parser.error("--dial and --listen need --token-file, and nothing else does")
    return arguments


def _runner(arguments: argparse.Namespace) -> tuple[socket.socket, int | None]:
    """The connection to the runner: standard input, unless an option names another one; and the pid of what carries it.

    Raises:
        OSError, Refused: if there is none.
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
        pid, connection = resumable_stream.land(arguments.listen, token, arguments.patience_s)
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
    """Entry point."""
    arguments = _arguments()
    set_name("ck-supervisor")
    restore_signals()
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        connection, carrier = _runner(arguments)
    except (OSError, ChaoskitError) as error:
        sys.exit(f"chaoskit: the runner cannot be reached: {error}")
    status = 1
    try:
        if not arguments.cold:
            from chaoskit.agent import agent  # noqa: F401 - programs find it imported
            from chaoskit.coordinator import server  # noqa: F401
            from chaoskit.runtime.worker import zygote

            zygote.preload()
        gc.freeze()  # a collection in a child would touch, and so copy, every page of these objects
        is_first = bool(arguments.connect or arguments.dial or arguments.listen)
        how = {
            "grace_s": arguments.grace_s,
            "network": arguments.network,
            "echo": arguments.echo_logs,
        }
        supervisor = Supervisor(connection, is_first=is_first, carrier=carrier, **how)
        supervisor.serve()
        status = supervisor.status
    except BaseException:  # noqa: BLE001 - nothing of it may go on
        traceback.print_exc()
    finally:
        os._exit(status)
