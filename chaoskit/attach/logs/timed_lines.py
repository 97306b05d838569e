"""Lines of a log stream with the node's timestamps, from bytes.

-> attach/logs/follower.py feeds the splitter; attach/logs/container_log.py reads the lines.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

import msgspec

_STAMP = re.compile(
    rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d) (.*)", re.DOTALL
)
_NS = 10**9


class TimedLine(msgspec.Struct, frozen=True):
    """A line of a log stream.

    Attributes:
        stamp: time of the line as the node wrote it; "" for text of the server itself.
        node_ns: the same time in nanoseconds since the epoch.
        content: the line without timestamp and line break.
    """

    stamp: str
    node_ns: int
    content: bytes


class TimedLineSplitter:
    """Splitter of the bytes of one stream into lines.

    An incomplete last line is kept until its rest arrives, and is dropped with the splitter: the
    next stream has the whole line.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._second: tuple[bytes, bytes] = (b"", b"")
        self._second_ns = 0

    def feed(self, data: bytes) -> list[TimedLine]:
        """Return the lines that ``data`` completes."""
        head, line_break, tail = data.rpartition(b"\n")
        if not line_break:
            self._rest += data
            return []
        complete, self._rest = bytes(self._rest) + head, bytearray(tail)
        return [self._parse(line) for line in complete.split(b"\n")]

    def rest(self) -> list[TimedLine]:
        """Return the last line of a stream that has ended in order without a line break."""
        rest, self._rest = bytes(self._rest), bytearray()
        return [self._parse(rest)] if rest else []

    def _parse(self, line: bytes) -> TimedLine:
        """Return a line with its time; the time of the last second is cached."""
        match = _STAMP.fullmatch(line)
        if match is None:
            return TimedLine("", 0, line)
        second, fraction, zone, content = match.groups(b"")
        if (second, zone) != self._second:
            try:
                moment = datetime.fromisoformat((second + zone).decode())
            except ValueError:
                return TimedLine("", 0, line)
            self._second, self._second_ns = (second, zone), int(moment.timestamp()) * _NS
        node_ns = self._second_ns + int(fraction.ljust(9, b"0"))
        return TimedLine(line[: match.end(3)].decode(), node_ns, content)


def to_since(node_ns: int) -> str:
    """Return a time as ``sinceTime`` takes it, rounded down to a whole second."""
    return f"{datetime.fromtimestamp(node_ns // _NS, UTC):%Y-%m-%dT%H:%M:%SZ}"
