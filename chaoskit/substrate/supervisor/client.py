"""The runner's end of the stream to a supervisor.

-> ``supervisor/server.py``: how a supervisor carries out the requests. ``supervisor/messages.py``:
the messages. ``supervisor/remote_node.py``: signals and actions on a node, by these requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from chaoskit.errors import HarnessError, NodeUnreachable
from chaoskit.journal.writer import own_version
from chaoskit.process.linux import await_readable, socket_name
from chaoskit.process.run_clock import clock_id
from chaoskit.substrate.core.processes import HOST, Kernel, Process
from chaoskit.substrate.supervisor.files import TAKEN_BYTES, FileMirror
from chaoskit.substrate.supervisor.messages import (
    ActionShown,
    AskAlive,
    AskClock,
    CloseListener,
    CrashContainer,
    EndPrograms,
    FileChunk,
    FilesTaken,
    FindFile,
    FindSource,
    LineClosed,
    LineData,
    LineOpened,
    OpenDoor,
    OpenListener,
    Program,
    ProgramExited,
    ProgramStarted,
    RemoveDirectory,
    Report,
    Request,
    RequestDone,
    RequestFailed,
    SettleFiles,
    ShipFiles,
    StartProgram,
    StoreSource,
    SupervisorAlive,
    SupervisorLeaves,
    SupervisorLeft,
    SupervisorReady,
    WriteFile,
)
from chaoskit.substrate.supervisor.socket_relay import receive
from chaoskit.substrate.supervisor.sources import Source
from chaoskit.substrate.supervisor.stream import watch
from chaoskit.wire import frames

_WARM_S = 120.0
#: Seconds without data after which a request is given up, unless its link has another limit.
ANSWER_S = 60.0
_RECEIVE_BYTES = 2**16
_UNANSWERED = 0  # request number that marks an answer as not needed
_CLOCK_TRIES = 5
_LOOK_S = 0.05  # interval of checks for a sign of life
_decode = frames.decoder(Report)


class LineHandler(Protocol):
    """Handler of the numbered lines of a door.

    A door is a Unix socket on a node. Each connection to it is a line to the runner.
    """

    def opened(self, line: int) -> None:
        """Handle a new line: a process on the node has connected to the door."""

    def received(self, line: int, data: bytes) -> None:
        """Handle a message on a line."""

    def closed(self, line: int) -> None:
        """Handle the end of a line."""


class Listener:
    """A listening socket that a supervisor keeps open until a program is started with it.

    Attributes:
        number: number of the socket at the supervisor.
        address: host and port.
    """

    def __init__(self, link: SupervisorLink, number: int, address: tuple[str, int]) -> None:
        self._link, self.number, self.address = link, number, address

    def getsockname(self) -> tuple[str, int]:
        """Return the address, as a socket does."""
        return self.address

    def close(self) -> None:
        """Close the socket at the supervisor, unless a program was started with it.

        Nothing is raised if the supervisor is gone.
        """
        with contextlib.suppress(NodeUnreachable):  # the socket is gone with it
            self._link.request(CloseListener, self.number, answer_type=None)


class SupervisorLink:
    """Client of a supervisor: sends requests, and receives its reports.

    Several threads may send requests, unless an event loop reads the stream.

    Args:
        connection: a stream; the token has been proven on it if it is TCP.
        name: name of the supervisor, for messages.
        kernel: kernel of the processes that it starts; None for this host's.

    Attributes:
        leaves: True if the supervisor has received SIGTERM, and will end soon.
        has_left: True if the supervisor has reported that nothing runs there any more.
        exits: wait status of each program that has ended, by pid.
        shown: last reported count of each action, by its number.
        answer_s: seconds without data after which a request is given up.
    """

    def __init__(self, connection: socket.socket, name: str, kernel: Kernel | None = None) -> None:
        watch(connection)
        self._connection, self.name = connection, name
        self.kernel: Kernel = kernel or HOST
        self._splitter = frames.FrameSplitter(_decode)
        self.answer_s = ANSWER_S
        self._last_number = 0
        self._stream_lock = threading.RLock()  # a pod may be examined while a thread reassigns it
        self._answers: dict[int, ProgramStarted | RequestDone | RequestFailed] = {}
        self._signs_of_life = 0
        self._version: str | None = None  # its version of chaoskit, once it can start programs
        self._clock = ""
        self._is_over = self.leaves = self.has_left = False
        self.exits: dict[int, int] = {}  # pid -> wait status
        self.shown: dict[int, int] = {}  # number of an action -> count
        self._unacknowledged_bytes = 0  # of chunks received since the last FilesTaken
        self._mirrors: dict[str, FileMirror] = {}  # by the run's directory on the node
        self._door: Path | LineHandler = Path()  # target of lines through the supervisor's door
        self._lines: dict[int, socket.socket] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- requests ----------------------------------------------------------------------------------

    def await_ready(self, limit_s: float = _WARM_S) -> bool:
        """Wait until the supervisor can start programs, and return whether it can.

        Return False if it is gone, or sends nothing for ``limit_s``.

        Raises:
            HarnessError: if its version of chaoskit differs.
        """
        self._read_until(lambda: self._version is not None, limit_s)
        if self._version not in (None, own_version()):
            raise HarnessError(
                f"{self.name} has chaoskit {self._version}, and this process has {own_version()}: "
                "install the same version for both"
            )
        return self._version is not None

    def start(
        self,
        program: Program,
        listeners: Sequence[socket.socket | Listener] = (),
        namespace: Sequence[int] = (),
    ) -> Process:
        """Start a program and return its process.

        Args:
            listeners: listening sockets that are passed to the program.
            namespace: descriptor of the network namespace that it enters; empty for the
                supervisor's own.

        Raises:
            HarnessError: if the supervisor is gone, or cannot start it.
        """
        sockets = [
            listener.fileno() for listener in listeners if isinstance(listener, socket.socket)
        ]
        numbers = tuple(listener.number for listener in listeners if isinstance(listener, Listener))
        request = StartProgram(self._number(), program, len(sockets), numbers, bool(namespace))
        self._send(request, *sockets, *namespace)
        started = self._answer(request.number)
        assert isinstance(started, ProgramStarted)
        return Process(started.pid, started.ticks, program.name, self.kernel)

    def clock_ahead_ns(self) -> int:
        """Return by how many ns CLOCK_MONOTONIC of this machine is ahead of the supervisor's.

        It is 0 on the same clock. The estimate uses the shortest of several round trips, and so its
        error is at most half of that (Cristian, 1989). Clocks of machines drift apart afterwards,
        by some 20 ppm where nothing disciplines them.
        """
        if self._clock == clock_id():
            return 0
        estimates = list[tuple[int, int]]()
        for _ in range(_CLOCK_TRIES):
            asked_ns = time.monotonic_ns()
            remote_ns = self.request(AskClock, answer_type=int)
            received_ns = time.monotonic_ns()
            estimates.append((received_ns - asked_ns, (asked_ns + received_ns) // 2 - remote_ns))
        return min(estimates)[1]

    def begin_end(self, programs: Sequence[Process], patience_s: float) -> int:
        """Request the end of programs and of everything that they have started.

        Return the number of the request for :meth:`finish`. Raises NodeUnreachable if the stream has
        ended.

        Args:
            patience_s: time that the programs get to end by themselves.
        """
        request = EndPrograms(
            self._number(), tuple((program.pid, program.ticks) for program in programs), patience_s
        )
        self._send(request)
        return request.number

    def finish(self, number: int) -> None:
        """Wait until the request with this number is done.

        Raises HarnessError if it failed or no data come for a minute, and NodeUnreachable if the
        stream ends first.
        """
        self._answer(number)

    def listen(self, host: str, port: int) -> Listener:
        """Open a listening socket on the node, and return it.

        Raises HarnessError if the port is in use, or the supervisor is gone. Port 0 stands for a
        free one.
        """
        number, *address = self.request(OpenListener, host, port, answer_type=tuple[int, str, int])
        return Listener(self, number, (address[0], address[1]))

    def open_door(self, door: Path | LineHandler, path: Path) -> None:
        """Create a Unix socket at a path of the node, whose lines are forwarded to ``door``.

        Lines of an earlier door end. Raises HarnessError if the socket cannot be created.

        Args:
            door: path of a Unix socket of this host, or an object that handles the messages itself.
            path: path of the new socket on the node.
        """
        self._door = door
        self.request(OpenDoor, str(path), answer_type=None)

    def store(self, source: Source, directory: Path) -> None:
        """Copy a source to a directory on the node, below its digest, unless it is there.

        Raises HarnessError if the node cannot store it.
        """
        place = str(directory), source.digest
        if not self.request(FindSource, *place, answer_type=bool):
            for offset, data, is_last in source.pieces():
                self.request(StoreSource, *place, offset, data, is_last, answer_type=None)

    def write(self, path: Path, data: bytes) -> None:
        """Write a small file on the node, replacing the old one.

        Raises HarnessError if it cannot be written, or the supervisor is gone.
        """
        self.request(WriteFile, str(path), data, answer_type=None)

    def has_file(self, path: Path) -> bool:
        """Return whether a file is on the node. Raises NodeUnreachable if the supervisor is gone."""
        is_there: bool = self.request(FindFile, str(path), answer_type=bool)
        return is_there

    def remove_directory(self, path: Path) -> None:
        """Remove a directory on the node with all that is below it, if it is there.

        Raises HarnessError if it cannot be removed, or the supervisor is gone.
        """
        self.request(RemoveDirectory, str(path), answer_type=None)

    def write_unanswered(self, path: Path, data: bytes) -> None:
        """Write a small file like :meth:`write`, without waiting for the answer.

        A silent supervisor blocks nothing.
        """
        self.notify(WriteFile(_UNANSWERED, str(path), data))

    def ship(
        self, remote_directory: Path, local_directory: Path, station: str, *, with_log: bool = False
    ) -> None:
        """Copy journals and logs of a run to a directory here, as they are written on the node.

        Nothing changes for a run that is copied already. Raises HarnessError if the node cannot
        watch the files, or the supervisor is gone.

        Args:
            remote_directory: directory of the run on the node.
            local_directory: directory of the copies.
            station: the node or coordinator that the files must belong to; "" for a whole run.
            with_log: copy the coordinator's log, too.
        """
        if str(remote_directory) not in self._mirrors:
            self._mirrors[str(remote_directory)] = FileMirror(local_directory, station)
            self.request(ShipFiles, str(remote_directory), with_log, answer_type=None)

    def settle(self, remote_directory: Path, log_bytes: int | None = None) -> None:
        """Wait until everything that was written in a run has been copied.

        Its directory on the node is then removed. Nothing is done for a run that is not copied
        (:meth:`ship`), or from a supervisor that has sent everything and left.

        Args:
            log_bytes: most bytes of logs that are copied from now on; None for all.

        Raises:
            HarnessError: if not all has arrived.
            NodeUnreachable: if the supervisor is gone; what it had not sent is lost.
        """
        mirror = self._mirrors.get(str(remote_directory))
        if mirror is None:
            return
        sizes: dict[str, int] = {}
        try:
            self._read_until(lambda: False, 0.0)  # all that a lost supervisor has sent
            if not self.has_left:
                sizes = self.request(
                    SettleFiles, str(remote_directory), log_bytes, answer_type=dict[str, int]
                )
        finally:
            del self._mirrors[str(remote_directory)]
            if mirror.failure:
                raise HarnessError(f"files of {self.name} could not be copied: {mirror.failure}")
        if incomplete := mirror.incomplete(sizes):
            raise HarnessError(
                f"the copies of {', '.join(incomplete)} are incomplete: {self.name} has sent "
                "more bytes than were received"
            )

    def request(
        self, request_type: Callable[..., Request], *arguments: Any, answer_type: Any
    ) -> Any:
        """Send a request of this type, and return the answer, decoded as ``answer_type``.

        Args:
            arguments: fields of the request after its number.

        Raises:
            ProcessLookupError: if the process that it concerns is gone.
            NodeUnreachable: if the stream has ended, or ends first.
            HarnessError: if the request failed, or no data come for a minute.
        """
        number = self._number()
        self._send(request_type(number, *arguments))
        answer = self._answer(number)
        assert isinstance(answer, RequestDone)
        return msgspec.json.decode(answer.value, type=answer_type)

    def _number(self) -> int:
        """Return a number for the next request."""
        with self._stream_lock:
            self._last_number += 1
            return self._last_number

    def _send(self, request: Request, *descriptors: int) -> None:
        """Send a request with descriptors. Raises NodeUnreachable if the stream has ended.

        Any other exception ends the stream, as half a message may have been sent.
        """
        data = frames.encode(request)
        try:
            with self._stream_lock:
                if descriptors:
                    sent = socket.send_fds(self._connection, [data], list(descriptors))
                    data = data[sent:]
                self._connection.sendall(data)
        except OSError as error:
            raise NodeUnreachable(f"{self.name} is gone: {error}") from error
        except BaseException:  # a later message would be read as the rest of this one
            self._disconnect()
            raise

    def _answer(self, number: int) -> ProgramStarted | RequestDone:
        """Wait for the answer to a request, and return it.

        Raises:
            ProcessLookupError: if the process of the request is gone.
            NodeUnreachable: if the stream ends first, or no data come for a shorter ``answer_s``.
            HarnessError: if the request failed, or no data come for a minute.
        """
        self._read_until(lambda: number in self._answers, self.answer_s)
        answer = self._answers.pop(number, None)
        if answer is None and self._is_over:
            raise NodeUnreachable(f"{self.name} is gone")
        if answer is None:
            silence = f"{self.name} did not answer for {self.answer_s:g} s"
            raise HarnessError(silence) if self.answer_s == ANSWER_S else NodeUnreachable(silence)
        if isinstance(answer, RequestFailed):
            raise ProcessLookupError(answer.error) if answer.is_gone else HarnessError(answer.error)
        return answer

    # -- reports -----------------------------------------------------------------------------------

    def is_open(self) -> bool:
        """Return whether the stream is still open. Reports that have arrived are handled first."""
        self._read_until(lambda: False, 0.0)
        return not self._is_over

    def ask_alive(self) -> int:
        """Ask for a sign of life. Return the number of signs received before.

        The call does not wait, and raises nothing if the stream has ended.
        """
        self.notify(AskAlive())
        return self._signs_of_life

    def await_sign(self, before: int, limit_s: float) -> bool:
        """Wait for a sign of life beyond the first ``before``, and return whether it arrives.

        Return False after ``limit_s``, or if the stream ends first.
        """
        return self.hear_until(lambda: self._signs_of_life > before, limit_s)

    async def answers(self, limit_s: float) -> bool:
        """Ask for a sign of life, and return whether it arrives within ``limit_s``.

        Return False at once if the stream ends. The event loop keeps running.
        """
        until_s, before = time.monotonic() + limit_s, self.ask_alive()
        while self.is_open():
            if self._signs_of_life > before:
                return True
            if time.monotonic() > until_s:
                return False
            await asyncio.sleep(_LOOK_S)
        return False

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Let the running event loop read the stream, too, for the duration of a ``with``.

        All lines of the door end with it. Raises NodeUnreachable if the stream has ended before.
        """
        if self._is_over:
            raise NodeUnreachable(f"{self.name} is gone")
        assert self._loop is None, "another event loop already reads the stream"
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._connection, self._read)
        for number, line in self._lines.items():
            self._loop.add_reader(line, self._forward, number)
        try:
            yield
        finally:
            if not self._is_over:
                self._loop.remove_reader(self._connection)
            for number in list(self._lines):
                self._close_line(number)
                self.notify(LineClosed(number))
            self._loop = None

    def hear_until(self, condition: Callable[[], bool], limit_s: float = math.inf) -> bool:
        """Read reports until a condition is met, and return whether it is.

        It is not if the supervisor is gone or the time is over first.
        """
        until_s = time.monotonic() + limit_s
        self._read_until(condition, 0.0)  # data that has arrived already counts
        while not condition() and not self._is_over and (left_s := until_s - time.monotonic()) > 0:
            self._read_until(condition, min(left_s, ANSWER_S))
        return condition()

    def _read_until(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Read reports until a condition is met, the stream ends, or none comes in ``limit_s``."""
        until_s = time.monotonic() + limit_s
        while not condition() and not self._is_over:
            if not await_readable(
                [self._connection.fileno()], max(0.0, until_s - time.monotonic())
            ):
                return
            self._read()
            until_s = time.monotonic() + limit_s  # data shows that it lives

    def _read(self) -> None:
        """Handle the reports that have arrived, and note the end of the stream."""
        with self._stream_lock:
            try:
                data = self._connection.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:  # a wait for an answer has read the data meanwhile
                return
            except OSError:
                data = b""
            if not data:
                self._disconnect()
            for report in self._splitter.feed(data):
                self._handle_report(report)

    def _handle_report(self, report: Report) -> None:
        """Note the content of a report, or pass it on to its door, line or file."""
        match report:
            case SupervisorReady(version, clock):
                self._version, self._clock = version, clock
            case SupervisorAlive():
                self._signs_of_life += 1
            case SupervisorLeaves():
                self.leaves = True
            case SupervisorLeft():
                self.has_left = True
            case ProgramStarted() | RequestDone() | RequestFailed():
                if report.number != _UNANSWERED:
                    self._answers[report.number] = report
            case ProgramExited(pid, status):
                self.exits[pid] = status
            case ActionShown(applied, count):
                self.shown[applied] = count
            case FileChunk():
                self._handle_chunk(report)
            case LineOpened() | LineData() | LineClosed() if not isinstance(self._door, Path):
                _dispatch(report, self._door)
            case LineOpened(line):
                self._open_line(line)
            case LineData(line, data) if line in self._lines:
                try:
                    self._lines[line].send(data)
                except OSError:  # the harness is gone, or does not read
                    self._close_line(line)
                    self.notify(LineClosed(line))
            case LineClosed(line):
                self._close_line(line)

    def _handle_chunk(self, chunk: FileChunk) -> None:
        """Append a chunk to its copy, and acknowledge the chunks of the last few KiB.

        A chunk of a run that is not copied any more is dropped.
        """
        mirror = self._mirrors.get(chunk.run_directory)
        self._unacknowledged_bytes += len(chunk.data)
        if mirror is not None:
            mirror.take(chunk)
        if self._unacknowledged_bytes >= TAKEN_BYTES:
            self.notify(FilesTaken(self._unacknowledged_bytes))
            self._unacknowledged_bytes = 0

    def close(self) -> None:
        """Close the stream. The supervisor ends with everything that it has started."""
        if not self._is_over:
            self._disconnect()
        self._connection.close()

    def _disconnect(self) -> None:
        """Note the end of the stream, close its sending half, and close all lines of the door."""
        self._is_over = True
        if self._loop is not None:
            self._loop.remove_reader(self._connection)
        with contextlib.suppress(OSError):  # a leaving supervisor waits for this
            self._connection.shutdown(socket.SHUT_WR)
        for number in list(self._lines):
            self._close_line(number)

    # -- lines through its door --------------------------------------------------------------------

    def _open_line(self, number: int) -> None:
        """Connect a new line to the Unix socket of the door; end the line if that fails."""
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            assert isinstance(self._door, Path)
            with socket_name(self._door) as name:
                line.connect(name)
        except OSError:  # the run is over
            line.close()
            self.notify(LineClosed(number))
            return
        self._lines[number] = line
        if self._loop is not None:
            self._loop.add_reader(line, self._forward, number)

    def _forward(self, number: int) -> None:
        """Forward the next message of a line to the supervisor, or the end of the line."""
        if number not in self._lines:  # closed earlier in the same turn of the event loop
            return
        with contextlib.suppress(BlockingIOError):
            if data := receive(self._lines[number]):
                self.notify(LineData(number, data))
            else:
                self._close_line(number)
                self.notify(LineClosed(number))

    def _close_line(self, number: int) -> None:
        line = self._lines.pop(number, None)
        if line is not None:
            if self._loop is not None:
                self._loop.remove_reader(line)
            line.close()

    def notify(
        self, message: LineData | LineClosed | FilesTaken | CrashContainer | AskAlive | WriteFile
    ) -> None:
        """Send a message that has no answer. Nothing is raised if the stream has ended."""
        with contextlib.suppress(NodeUnreachable):  # the reader detects its end
            self._send(message)


def _dispatch(report: LineOpened | LineData | LineClosed, lines: LineHandler) -> None:
    """Call the method of ``lines`` for a report."""
    match report:
        case LineOpened(line):
            lines.opened(line)
        case LineData(line, data):
            lines.received(line, data)
        case LineClosed(line):
            lines.closed(line)
