"""A model of a kubelet's log of one container, and of the API server in front of it.

Time is a number that only :meth:`KubeletModel.advance` changes. The node's clock is the same number.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from chaoskit.attach.logs.container_log import ContainerLog
from chaoskit.attach.logs.container_status import ContainerStatus
from chaoskit.attach.logs.reader_requests import EndReading, OpenStream, ReadStatus
from chaoskit.attach.logs.records import ContainerLife, ContainerLine, LogHole, LogPlace
from chaoskit.attach.logs.timed_lines import TimedLine, TimedLineSplitter

_NS = 10**9
EPOCH_S = 1_800_000_000
PLACE = LogPlace("train-0", "0f1e2d3c-aaaa", "main")
IDLE_S = 5.0
#: Seconds from the first line of a file to its rotation, at least.
FILE_S = 9.6


def timed_line(node_s: float, text: str) -> TimedLine:
    """Return a line of the time ``node_s`` as the kubelet sends it."""
    node_ns = round((EPOCH_S + node_s) * _NS)
    seconds, fraction = divmod(node_ns, _NS)
    stamp = f"{_DAY}T{(seconds % 86400) // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{fraction:09}Z"
    (line,) = TimedLineSplitter().feed(f"{stamp} {text}\n".encode())
    return line


_DAY = "2027-01-15"  # of EPOCH_S


@dataclass
class LifeModel:
    """A life of the container, with the files of its log; the last file is the current one."""

    life: ContainerLife
    began_s: float
    files: list[list[int]] = field(default_factory=lambda: [[]])
    file_began_s: float = 0.0
    is_over: bool = False


@dataclass
class StreamModel:
    """An open stream of the log of one life, with the lines that are under way."""

    life: LifeModel
    buffer: list[TimedLine] = field(default_factory=list)
    is_silent: bool = False
    heard_s: float = 0.0
    has_sent: bool = False
    is_cut: bool = False

    def silence(self) -> None:
        """Send no further line; the first lines of a stream arrive with its headers."""
        self.is_silent = True
        if self.has_sent:
            self.buffer.clear()


class KubeletModel:
    """The container, its log, and the state that the API server shows ``lag_s`` later.

    Attributes:
        written: all lines in the order of the files, with the number of their life.
    """

    def __init__(self, lag_s: float, reader: ContainerLog | None = None) -> None:
        self.now_s = 1.0
        self.lag_s = lag_s
        self.reader = reader if reader is not None else ContainerLog(PLACE)
        self.delivered: list[ContainerLine | LogHole] = []
        self.written: list[tuple[int, TimedLine]] = []
        self.lives: list[LifeModel] = []
        self.gone_s: float | None = None
        self.is_deleting = self.is_final = False
        self.stream: StreamModel | None = None
        self.is_reachable = True
        self.has_rotated = False
        self.is_waiting = False
        self._states: list[tuple[float, ContainerStatus]] = [(0.0, ContainerStatus())]
        self.begin()

    # -- the container -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the next life."""
        number = len(self.lives)
        life = ContainerLife(number, f"containerd://{number}", int(EPOCH_S + self.now_s))
        self.lives.append(LifeModel(life, self.now_s))
        self.is_waiting = False
        self._show()

    def end(self) -> None:
        """End the present life."""
        self.lives[-1].is_over = True
        self._show()

    def wait(self) -> None:
        """Let the ended container wait for its restart, as the kubelet shows it later."""
        self.is_waiting = True
        self._show()

    def write(self, count: int, late_s: float = 0.0, twin: bool = False) -> None:
        """Write lines, of which the last is ``late_s`` older than its place in the file."""
        life = self.lives[-1]
        for number in range(count):
            self.now_s += 0.001
            age_s = late_s if number == count - 1 else 0.0
            text = "same" if twin else f"line {len(self.written)}"
            line = timed_line(max(life.began_s, self.now_s - age_s), text)
            if not life.files[-1]:
                life.file_began_s = self.now_s
            for _ in range(1 + twin):
                life.files[-1].append(len(self.written))
                self.written.append((life.life.number, line))
                stream = self.stream
                if stream is not None and stream.life is life and not stream.is_silent:
                    stream.buffer.append(line)

    def rotate(self) -> bool:
        """Begin another file, unless the present one is too new."""
        life = self.lives[-1]
        if not life.files[-1] or self.now_s - life.file_began_s < FILE_S:
            return False
        life.files.append([])
        self.has_rotated = True
        return True

    def delete(self, *, force: bool) -> None:
        """Delete the pod: with force, its object is gone before its container ends."""
        self.is_deleting = True
        if force:
            self.gone_s = self.now_s
        self._show()

    def vanish(self) -> None:
        """Remove the object of the pod."""
        if self.gone_s is None:
            self.gone_s = self.now_s

    def finish(self) -> None:
        """Give the pod its final phase."""
        self.is_final = True
        self._show()

    def advance(self, seconds: float) -> None:
        self.now_s += seconds

    def _show(self) -> None:
        """Note the status that the API server shows later."""
        life = self.lives[-1]
        previous = self.lives[-2].life if len(self.lives) > 1 else None
        waits = life.is_over and self.is_waiting
        status = ContainerStatus(
            None if waits else life.life,
            life.life if waits else previous,
            not life.is_over,
            self.is_final,
            not self.is_final and not self.is_deleting,
        )
        self._states.append((self.now_s, status))

    # -- the API server ----------------------------------------------------------------------------

    def status(self) -> ContainerStatus | None:
        """Return the status that the API server shows."""
        if self.gone_s is not None:
            return None
        times = [time_s for time_s, _ in self._states]
        return self._states[bisect.bisect(times, self.now_s - self.lag_s) - 1][1]

    def _open(self, request: OpenStream) -> bool:
        """Open a stream as the kubelet does, by its own state."""
        newest = self.lives[-1]
        life: LifeModel | None = newest
        if request.previous and not (newest.is_over and self.is_waiting):
            life = self.lives[-2] if len(self.lives) > 1 else None
        if life is None or self.gone_s is not None:
            return False
        self.stream = StreamModel(life, heard_s=self.now_s)
        lines = [self.written[index][1] for index in life.files[-1]]
        for line in lines[-request.tail_lines :] if request.tail_lines else lines:
            if not request.since or _since_ns(request.since) <= line.node_ns:
                self.stream.buffer.append(line)
        return True

    # -- the shell ---------------------------------------------------------------------------------

    def run_shell(self, lines: int = 10**9) -> bool:
        """Carry out the next request if it is due; return whether it was."""
        request, reader = self.reader.request, self.reader
        if isinstance(request, EndReading):
            return False
        if isinstance(request, ReadStatus | OpenStream) and request.at_s > self.now_s:
            return False
        self.now_s += 0.002
        if isinstance(request, ReadStatus):
            if self.is_reachable:
                reader.on_status(self.status(), self.now_s)
            else:
                reader.on_no_status("no answer", self.now_s)
        elif isinstance(request, OpenStream):
            self.stream = None
            if self.is_reachable and self._open(request):
                reader.on_open(self.now_s)
            else:
                reader.on_not_open("refused", self.now_s, is_refusal=self.is_reachable)
        else:
            return self._read(lines)
        self._take()
        return True

    def _read(self, count: int) -> bool:
        """Pass on lines of the stream, or its end; return whether there was anything."""
        stream, t_ns = self.stream, round(self.now_s * _NS)
        assert stream is not None, "the reader reads a stream that is not open"
        if stream.is_cut:
            self.cut()
            return True
        lines, stream.buffer = stream.buffer[:count], stream.buffer[count:]
        if lines:
            stream.heard_s, stream.has_sent = self.now_s, True
            self.reader.on_lines(lines, t_ns)
        elif self.now_s - stream.heard_s > IDLE_S:
            self.reader.on_silence(self.now_s)
        elif stream.life.is_over and not stream.is_silent:
            self.reader.on_end([], t_ns)
        self._take()
        return bool(lines) or (stream.life.is_over and not stream.is_silent)

    def cut(self) -> None:
        """Break the stream; lines that are under way are lost."""
        if not isinstance(self.reader.request, ReadStatus | OpenStream | EndReading):
            self.reader.on_cut("reset", self.now_s)
            self._take()
        elif self.stream is not None:  # a stream that is read only after the next status
            self.stream.is_cut = True

    def _take(self) -> None:
        self.delivered += self.reader.take()


def _since_ns(since: str) -> int:
    (line,) = TimedLineSplitter().feed(f"{since} x\n".encode())
    return line.node_ns
