"""The lines of one stream: which are repeated, which are new, and which must wait for a proof.

A stream that continues an earlier one repeats its last lines, as ``sinceTime`` counts whole seconds.
The last delivered line must be among them. Once it has come again, each further line is new. If it
does not come, the file was rotated, or the stream is of another life of the container.

Lines with the same time and text must be in one file, among ``RECENT_LINES`` neighbouring lines. The
file need not be sorted by time, as standard output and error are written by two threads: a line may
be up to ``DISORDER_S`` late.

-> attach/logs/container_log.py: which streams are opened, and the proof by the status of the pod.
"""

from __future__ import annotations

from collections import Counter, deque

from chaoskit.attach.logs.timed_lines import TimedLine, to_since

RECENT_LINES = 64
DISORDER_S = 1
#: A kubelet that sends slower than the container writes skips a whole file after two rotations, or
#: repeats one. It looks for files to rotate every 10 s by default, and every 3 s at least.
ROTATIONS_S = 3.0
#: Least time of the lines of a skipped file.
SKIP_S = 2.0
_NS = 10**9

Arrival = tuple[TimedLine, int]  # a line, and its time of arrival in monotonic nanoseconds


class LineMemory:
    """The last delivered lines of one life of a container."""

    def __init__(self) -> None:
        self._recent: deque[TimedLine] = deque(maxlen=RECENT_LINES)

    @property
    def last(self) -> TimedLine | None:
        """The last delivered line; None before the first."""
        return self._recent[-1] if self._recent else None

    @property
    def since(self) -> str:
        """The time from which a stream must be read to continue this one; "" for its start."""
        return to_since(self._recent[-1].node_ns - DISORDER_S * _NS) if self._recent else ""

    def add(self, line: TimedLine) -> None:
        """Note a line that is delivered."""
        self._recent.append(line)

    def counts(self) -> Counter[TimedLine]:
        """Return how often each of the last lines was delivered."""
        return Counter(self._recent)


class StreamLines:
    """The lines of a stream.

    Args:
        memory: the lines of the same life that earlier streams have delivered. It is updated.
        opened_s: time of the opening, on the monotonic clock.

    Attributes:
        opened_s: as above.
        is_proven: True once the last delivered line of ``memory`` has come again.
        is_settled: True once :meth:`settle` was called.
        held: new lines, or repeated ones, that wait for a proof.
        is_broken: True if the stream seems to have skipped or repeated a file: the last line that
            it was given was not delivered, and another stream must follow.
        is_repeating: True if it seems to have repeated one.
    """

    def __init__(self, memory: LineMemory, opened_s: float) -> None:
        self.opened_s = opened_s
        self.is_proven = self.is_settled = self.is_broken = self.is_repeating = False
        self.held: list[Arrival] = []
        self._memory = memory
        self._anchor = memory.last
        self._repeatable = memory.counts()
        self._anchors_missing = self._repeatable[self._anchor] if self._anchor is not None else 0
        self._last: Arrival | None = None  # the last new line

    @property
    def continues(self) -> bool:
        """True if the stream continues an earlier one, so that its last line must come again."""
        return self._anchor is not None

    @property
    def is_unproven(self) -> bool:
        """True if the last line of the earlier stream has not come again so far."""
        return self.continues and not self.is_proven and not self.is_settled

    def read(self, line: TimedLine, t_ns: int) -> list[Arrival]:
        """Take the next line of the stream, and return the lines to deliver."""
        if self.is_proven or self.is_settled:
            if not self.is_proven and self._drops(line):
                return []
            if self._is_jump(line, t_ns):
                self.is_broken = True
                return []
            self._memory.add(line)
            self._last = (line, t_ns)
            return [(line, t_ns)]
        self.held.append((line, t_ns))
        if line == self._anchor:
            self._anchors_missing -= 1
            if not self._anchors_missing:
                self.is_proven = True
                self.held = []
        return []

    def is_past_anchor(self) -> bool:
        """Return whether the held lines show that the last delivered line will not come again.

        Return True for held lines of a stream that continues none.
        """
        if not self.held or self._anchor is None:
            return bool(self.held)
        return self.held[-1][0].node_ns > self._anchor.node_ns + DISORDER_S * _NS

    def is_past_anchor_at_end(self) -> bool:
        """Return the same for a stream of which no more lines come."""
        anchor = self._anchor
        if not self.held or anchor is None or self.is_past_anchor():
            return bool(self.held)
        return all(
            line.node_ns > anchor.node_ns and line not in self._repeatable for line, _ in self.held
        )

    def settle(self) -> list[Arrival]:
        """Return the held lines without repeated ones; further lines are not held."""
        held, self.held, self.is_settled = self.held, [], True
        lines = [arrival for arrival in held if not self._drops(arrival[0])]
        for line, _ in lines:
            self._memory.add(line)
        return lines

    def _drops(self, line: TimedLine) -> bool:
        """Count a line that is one of the last delivered ones, and return whether it is."""
        if not self._repeatable[line]:
            return False
        self._repeatable[line] -= 1
        return True

    def _is_jump(self, line: TimedLine, t_ns: int) -> bool:
        """Return whether the time of a line shows that a file was skipped or repeated before it.

        The first new line of a stream is in the same file as the line before it.
        """
        if self._last is None:
            return False
        last, last_ns = self._last
        gap_ns = line.node_ns - last.node_ns
        self.is_repeating = gap_ns < -DISORDER_S * _NS
        is_skipping = (
            gap_ns > SKIP_S * _NS
            and gap_ns - (t_ns - last_ns) > SKIP_S * _NS / 2
            and t_ns > (self.opened_s + ROTATIONS_S) * _NS
        )
        return self.is_repeating or is_skipping
