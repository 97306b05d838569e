"""The runner's end of the stream to a supervisor."""

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

from chaoskit.errors import HarnessError
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
    FindSource,
    LineClosed,
    LineData,
    LineOpened,
    OpenDoor,
    OpenListener,
    Program,
    ProgramExited,
    ProgramStarted,
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
_ANSWER_S = 60.0
_RECEIVE_BYTES = 2**16
_UNANSWERED = 0  # the number of a request whose answer is of no interest
_CLOCK_TRIES = 5
_LOOK_S = 0.05  # for a sign of life
_decode = frames.decoder(Report)


class SupervisorGone(HarnessError):
    """The stream to a supervisor has ended."""


class Lines(Protocol):
    """Takes the lines of a door. They are numbered."""

    def opened(self, line: int) -> None:
        """A process there has come to the door."""

    def said(self, line: int, data: bytes) -> None:
        """It says something."""

    def closed(self, line: int) -> None:
        """It has gone."""


class Listener:
    """A socket that a supervisor has opened for a program, and keeps until that is started.

    Attributes:
        number: its name there. address: host and port.
    """

    def __init__(self, link: SupervisorLink, number: int, address: tuple[str, int]) -> None:
        self._link, self.number, self.address = link, number, address

    def getsockname(self) -> tuple[str, int]:
        return self.address

    def close(self) -> None:
        """Close it there, unless a program was started with it."""
        with contextlib.suppress(SupervisorGone):  # and with it the socket
            self._link.request(CloseListener, self.number, value=None)


class SupervisorLink:
    """Asks a supervisor, one thing after the other, and hears what it tells unasked. Several threads may ask one whose
    stream no event loop hears.

    Args:
        connection: a stream, proven by now where it is TCP.
        name: of the supervisor, for messages.
        kernel: of the processes that it starts; None for this host's.

    Attributes:
        leaves: whether it was told to end, and will soon. has_left: whether nothing runs there any more, by its word.
    """

    def __init__(self, connection: socket.socket, name: str, kernel: Kernel | None = None) -> None:
        watch(connection)
        self._connection, self.name = connection, name
        self.kernel: Kernel = kernel or HOST
        self._splitter = frames.Splitter(_decode)
        self._count = 0
        self._one_at_a_time = (
            threading.RLock()
        )  # a pod may be looked at while a thread makes it another node's
        self._answers: dict[int, ProgramStarted | RequestDone | RequestFailed] = {}
        self._signs_of_life = 0
        self._version: str | None = None  # of its chaoskit, once it can start programs
        self._clock = ""
        self._is_over = self.leaves = self.has_left = False
        self.exits: dict[int, int] = {}  # pid -> wait status
        self.shown: dict[int, int] = {}  # applied -> count
        self._untold_bytes = 0  # of chunks that have come since it was told so
        self._mirrors: dict[str, FileMirror] = {}  # by the directory of a run, there
        self._door: Path | Lines = Path()  # to which lines through the supervisor's door go on
        self._lines: dict[int, socket.socket] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- requests -------------------------------------------------------------------------------------------------

    def await_ready(self, limit_s: float = _WARM_S) -> bool:
        """Whether it says in time that it can start programs. Raises HarnessError if it is of another version."""
        self._hear_until(lambda: self._version is not None, limit_s)
        if self._version not in (None, own_version()):
            raise HarnessError(
                f"{self.name} has chaoskit {self._version}, and this is {own_version()}: install one"
            )
        return self._version is not None

    def start(
        self,
        program: Program,
        listeners: Sequence[socket.socket | Listener] = (),
        namespace: Sequence[int] = (),
    ) -> Process:
        """Start a program. Raises HarnessError if the supervisor is gone.

        Args:
            namespace: the network namespace that it enters, as a descriptor; none for the supervisor's own.
        """
        sockets = [one.fileno() for one in listeners if isinstance(one, socket.socket)]
        kept = tuple(one.number for one in listeners if isinstance(one, Listener))
        request = StartProgram(self._number(), program, len(sockets), kept, bool(namespace))
        self._send(request, *sockets, *namespace)
        started = self._answer(request.number)
        assert isinstance(started, ProgramStarted)
        return Process(started.pid, started.ticks, program.name, self.kernel)

    def clock_ahead_ns(self) -> int:
        """How far our CLOCK_MONOTONIC is ahead of that of its machine; 0 where that is the same one.

        By the shortest of some round trips, and so right within half of it (Cristian, 1989). Clocks of machines drift
        apart afterwards, by some 20 ppm where nothing disciplines them.
        """
        if self._clock == clock_id():
            return 0
        tries = list[tuple[int, int]]()
        for _ in range(_CLOCK_TRIES):
            asked_ns = time.monotonic_ns()
            theirs_ns = self.request(AskClock, value=int)
            heard_ns = time.monotonic_ns()
            tries.append((heard_ns - asked_ns, (asked_ns + heard_ns) // 2 - theirs_ns))
        return min(tries)[1]

    def begin_end(self, programs: Sequence[Process], patience_s: float) -> int:
        """Have programs end, and everything that they have started. Gives what :meth:`finish` wants."""
        request = EndPrograms(
            self._number(), tuple((one.pid, one.ticks) for one in programs), patience_s
        )
        self._send(request)
        return request.number

    def finish(self, number: int) -> None:
        """Wait until that is done. Raises HarnessError."""
        self._answer(number)

    def listen(self, host: str, port: int) -> Listener:
        """Open a listening socket where the programs run."""
        number, *address = self.request(OpenListener, host, port, value=tuple[int, str, int])
        return Listener(self, number, (address[0], address[1]))

    def open_door(self, door: Path | Lines, at: Path) -> None:
        """Have a Unix socket ``at`` a path there; its lines go on to the one at ``door`` here. Earlier lines end.

        ``door``: or what takes their messages itself.
        """
        self._door = door
        self.request(OpenDoor, str(at), value=None)

    def store(self, source: Source, directory: Path) -> None:
        """Have a source unpacked in a directory there, below its digest, unless it is there."""
        where = str(directory), source.digest
        if not self.request(FindSource, *where, value=bool):
            for at, data, is_last in source.pieces():
                self.request(StoreSource, *where, at, data, is_last, value=None)

    def write(self, path: Path, data: bytes) -> None:
        """Have a small file written there, in place of what was there."""
        self.request(WriteFile, str(path), data, value=None)

    def write_unanswered(self, path: Path, data: bytes) -> None:
        """The same, without waiting until it was done: a supervisor that is silent holds nothing up."""
        self.tell(WriteFile(_UNANSWERED, str(path), data))

    def ship(self, there: Path, here: Path, station: str, *, with_record: bool = False) -> None:
        """Have the journals and logs of a run copied from its directory there to the one here, as they are written.

        Args:
            station: the node, or the coordinator, whose files they are, and no others are taken; "" for a whole run.
            with_record: copy the record of the coordinator, too.
        """
        if str(there) not in self._mirrors:
            self._mirrors[str(there)] = FileMirror(here, station)
            self.request(ShipFiles, str(there), with_record, value=None)

    def settle(self, there: Path) -> None:
        """Wait until all that was written there is here; then the directory there is removed.

        Raises:
            HarnessError: if not all has come. SupervisorGone: if it is gone without having shipped everything; what it
                had not shipped is lost.
        """
        mirror = self._mirrors.get(str(there))
        if mirror is None:
            return
        sizes: dict[str, int] = {}
        try:
            self._hear_until(lambda: False, 0.0)  # of one that is gone all that has come
            if not self.has_left:
                sizes = self.request(SettleFiles, str(there), value=dict[str, int])
        finally:
            del self._mirrors[str(there)]
            if mirror.failure:
                raise HarnessError(f"files of {self.name} could not be copied: {mirror.failure}")
        if short := mirror.short(sizes):
            raise HarnessError(f"{self.name} shipped more of {', '.join(short)} than has come")

    def request(self, kind: Callable[..., Request], *arguments: Any, value: Any) -> Any:
        """Ask something of this kind. Gives the answer, as a ``value``.

        Raises:
            ProcessLookupError: if what it is about is gone. HarnessError: if it could not be done.
        """
        number = self._number()
        self._send(kind(number, *arguments))
        answer = self._answer(number)
        assert isinstance(answer, RequestDone)
        return msgspec.json.decode(answer.value, type=value)

    def _number(self) -> int:
        with self._one_at_a_time:
            self._count += 1
            return self._count

    def _send(self, request: Request, *descriptors: int) -> None:
        data = frames.encode(request)
        try:
            with self._one_at_a_time:
                if descriptors:
                    sent = socket.send_fds(self._connection, [data], list(descriptors))
                    data = data[sent:]
                self._connection.sendall(data)
        except OSError as error:
            raise SupervisorGone(f"{self.name} is gone: {error}") from error
        except (
            BaseException
        ):  # a part of it was sent, and whatever follows would be taken for the rest
            self._let_go()
            raise

    def _answer(self, number: int) -> ProgramStarted | RequestDone:
        self._hear_until(lambda: number in self._answers, _ANSWER_S)
        answer = self._answers.pop(number, None)
        if answer is None and self._is_over:
            raise SupervisorGone(f"{self.name} is gone")
        if answer is None:
            raise HarnessError(f"{self.name} said nothing for {_ANSWER_S:g} s")
        if isinstance(answer, RequestFailed):
            raise ProcessLookupError(answer.error) if answer.is_gone else HarnessError(answer.error)
        return answer

    # -- what it tells --------------------------------------------------------------------------------------------

    def is_open(self) -> bool:
        """Whether it is there still."""
        self._hear_until(lambda: False, 0.0)
        return not self._is_over

    def ask_alive(self) -> int:
        """Have it give a sign of life. Gives how many it has given before."""
        self.tell(AskAlive())
        return self._signs_of_life

    def await_sign(self, before: int, limit_s: float) -> bool:
        """Whether it gives a further one within this time."""
        return self.hear_until(lambda: self._signs_of_life > before, limit_s)

    async def answers(self, limit_s: float) -> bool:
        """Whether it gives a sign of life within this time, while the event loop goes on."""
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
        """Let the event loop that runs hear it, too, as long as a ``with`` lasts."""
        if self._is_over:
            raise SupervisorGone(f"{self.name} is gone")
        assert self._loop is None, "one event loop hears it"
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._connection, self._hear)
        for number, line in self._lines.items():
            self._loop.add_reader(line, self._pass_on, number)
        try:
            yield
        finally:
            if not self._is_over:
                self._loop.remove_reader(self._connection)
            for number in list(self._lines):
                self._hang_up(number)
                self.tell(LineClosed(number))
            self._loop = None

    def hear_until(self, condition: Callable[[], bool], limit_s: float = math.inf) -> bool:
        """Hear it until a condition is met. False if the supervisor is gone before, or the time is over."""
        until_s = time.monotonic() + limit_s
        self._hear_until(condition, 0.0)  # what has come already counts
        while not condition() and not self._is_over and (left_s := until_s - time.monotonic()) > 0:
            self._hear_until(condition, min(left_s, _ANSWER_S))
        return condition()

    def _hear_until(self, condition: Callable[[], bool], limit_s: float) -> None:
        until_s = time.monotonic() + limit_s
        while not condition() and not self._is_over:
            if not await_readable(
                [self._connection.fileno()], max(0.0, until_s - time.monotonic())
            ):
                return
            self._hear()
            until_s = time.monotonic() + limit_s  # it lives

    def _hear(self) -> None:
        with self._one_at_a_time:
            try:
                data = self._connection.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:  # it was heard meanwhile, while an answer was waited for
                return
            except OSError:
                data = b""
            if not data:
                self._let_go()
            for report in self._splitter.feed(data):
                self._take(report)

    def _take(self, report: Report) -> None:
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
                self._take_chunk(report)
            case LineOpened() | LineData() | LineClosed() if not isinstance(self._door, Path):
                _pass(report, self._door)
            case LineOpened(line):
                self._open_line(line)
            case LineData(line, data) if line in self._lines:
                try:
                    self._lines[line].send(data)
                except OSError:  # the harness is gone, or does not read
                    self._hang_up(line)
                    self.tell(LineClosed(line))
            case LineClosed(line):
                self._hang_up(line)

    def _take_chunk(self, chunk: FileChunk) -> None:
        mirror = self._mirrors.get(chunk.run_directory)
        self._untold_bytes += len(chunk.data)
        if mirror is not None:
            mirror.take(chunk)
        if self._untold_bytes >= TAKEN_BYTES:
            self.tell(FilesTaken(self._untold_bytes))
            self._untold_bytes = 0

    def close(self) -> None:
        """Let go of it: it ends with everything that it has started."""
        if not self._is_over:
            self._let_go()
        self._connection.close()

    def _let_go(self) -> None:
        self._is_over = True
        if self._loop is not None:
            self._loop.remove_reader(self._connection)
        with contextlib.suppress(OSError):  # one that leaves waits for it
            self._connection.shutdown(socket.SHUT_WR)
        for number in list(self._lines):
            self._hang_up(number)

    # -- lines through its door -----------------------------------------------------------------------------------

    def _open_line(self, number: int) -> None:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            assert isinstance(self._door, Path)
            with socket_name(self._door) as name:
                line.connect(name)
        except OSError:  # the run is over
            line.close()
            self.tell(LineClosed(number))
            return
        self._lines[number] = line
        if self._loop is not None:
            self._loop.add_reader(line, self._pass_on, number)

    def _pass_on(self, number: int) -> None:
        if number not in self._lines:  # it was hung up on in the same turn
            return
        with contextlib.suppress(BlockingIOError):
            if data := receive(self._lines[number]):
                self.tell(LineData(number, data))
            else:
                self._hang_up(number)
                self.tell(LineClosed(number))

    def _hang_up(self, number: int) -> None:
        line = self._lines.pop(number, None)
        if line is not None:
            if self._loop is not None:
                self._loop.remove_reader(line)
            line.close()

    def tell(
        self, message: LineData | LineClosed | FilesTaken | CrashContainer | AskAlive | WriteFile
    ) -> None:
        """Say something that is not answered."""
        with contextlib.suppress(SupervisorGone):  # its end is found elsewhere
            self._send(message)


def _pass(report: LineOpened | LineData | LineClosed, lines: Lines) -> None:
    match report:
        case LineOpened(line):
            lines.opened(line)
        case LineData(line, data):
            lines.said(line, data)
        case LineClosed(line):
            lines.closed(line)
