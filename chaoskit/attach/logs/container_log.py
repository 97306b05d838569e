"""The log of one container across all its lives: which part is read next, and which part is lost.

This is a pure state machine. Its shell carries out :attr:`ContainerLog.request` and reports the
result, until the request is :class:`EndReading`.

The kubelet serves the current file of the newest life, and that of the life before. A stream names
neither its life nor its file, and the API server's status lags behind the kubelet. So:

* The status is read after each opening. A stream is dropped if its life is not the expected one.
* The stream must be proven to be of that life. The last delivered line proves it, and so does a
  status that is read ``SETTLE_S`` after the opening. New lines are held until then.
* A stream after an earlier one must show the last delivered line again. Else there is a hole.
* An ended life is read once more. Then the next life is read.

-> attach/logs/follower.py: the shell. attach/logs/stream_lines.py: repeated, new and held lines.
attach/logs/delivery.py: lines and holes in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from chaoskit.attach.logs.container_status import ContainerStatus
from chaoskit.attach.logs.delivery import Delivery
from chaoskit.attach.logs.reader_requests import (
    EndReading,
    OpenStream,
    ReaderRequest,
    ReadStatus,
    ReadStream,
)
from chaoskit.attach.logs.records import (
    ContainerLife,
    ContainerLine,
    HoleReason,
    LogHole,
    LogPlace,
)
from chaoskit.attach.logs.stream_lines import LineMemory, StreamLines
from chaoskit.attach.logs.timed_lines import TimedLine

#: Seconds by which the API server's status may lag behind the kubelet.
SETTLE_S = 0.5
#: Seconds after the end of a log in which the container is not started again and deleted.
GONE_S = 1.0
#: Seconds in which a new log is assumed to fill less than one file, which has 10 MiB by default. A
#: silent stream is noticed within that time.
START_S = 8.0
#: Seconds after its opening within which a stream shows the first line of a log that has one.
_FIRST_LINE_S = 2.0
_RETRY_S = 0.1
_RETRY_MAX_S = 1.0
#: Failed last readings of an ended life after which its log counts as removed.
_FAILURES_MAX = 3
_NS = 10**9


class _Phase(Enum):
    """The present activity of a reader."""

    LOOKING = auto()  # no stream: the status decides what is read next
    OPENING = auto()
    CHECKING = auto()  # the status must show the life of the open stream
    READING = auto()
    SETTLING = auto()  # lines are held until the status proves their life; the stream may be over
    ENDED = auto()


class ContainerLog:
    """Reader of the log of one container.

    Args:
        place: the container.
        tail_lines: number of earlier lines of the present life to begin with; None for all that
            its node still has. There may be more if the first stream breaks before its first line.

    Attributes:
        place: as above.
        request: the next request to carry out.
        trouble: the reason for which the log is not read at present; "" while it is read.
        openings: number of streams that were opened.
        dropped_streams: number of streams that were dropped because they were of another life.
    """

    def __init__(self, place: LogPlace, tail_lines: int | None = None) -> None:
        self.place = place
        self.request: ReaderRequest = ReadStatus(0.0)
        self.trouble = ""
        self.openings = self.dropped_streams = 0
        self._tail_lines = tail_lines
        self._phase = _Phase.LOOKING
        self._delivery = Delivery(place)
        self._now_s = 0.0
        self._retry_s = 0.0
        # the pod
        self._is_gone = False
        self._may_restart = True
        self._newest_number = -1  # of the lives that the status shows
        self._alone_s = 0.0  # time at which no life after the present one had begun
        # the life that is read or awaited
        self._next_number: int | None = None
        self._life: ContainerLife | None = None  # of this number, once the status has shown it
        self._memory = LineMemory()
        self._may_lack_start = False
        self._empty_s = 0.0  # time at which its log had no line yet, as far as is known
        self._failures = 0  # of last readings
        self._ended_well_s: float | None = None  # time of the orderly end of its last stream
        # the present stream, or the last one
        self._stream: StreamLines | None = None
        self._is_open = self._is_previous = self._is_last_reading = False
        self._has_ended = False  # in order
        self._ended_before_s: float | None = None  # time of the orderly end of an earlier stream
        self._reads_whole_file = False  # the next stream
        self._note = ""  # text of the server at the end of the stream
        self._unread_since_s: float | None = None  # the stream waits for a status since then

    @property
    def has_stream(self) -> bool:
        """True while the shell must keep its stream open."""
        return self._is_open

    @property
    def is_checking(self) -> bool:
        """True while the life of the open stream is not known, so that it is not read."""
        return self._phase is _Phase.CHECKING

    # -- reports of the shell ----------------------------------------------------------------------

    def take(self) -> list[ContainerLine | LogHole]:
        """Return the lines and holes since the last call, in their order."""
        return self._delivery.take()

    def on_status(
        self, status: ContainerStatus | None, now_s: float, *, is_replaced: bool = False
    ) -> None:
        """Continue with the status of the container.

        Args:
            status: the status; None if the pod is gone.
            is_replaced: True if another pod has the name of the pod that is gone.
        """
        self._now_s, self._is_gone = now_s, status is None
        if status is not None:
            self._may_restart, self._unread_since_s = status.may_restart, None
            self._newest_number = status.newest.number if status.newest is not None else -1
            if self._next_number is None or self._newest_number < self._next_number + (
                self._life is not None
            ):
                self._alone_s = now_s
        if self._phase is _Phase.CHECKING:
            self._check(status, is_replaced=is_replaced)
        elif self._phase is _Phase.SETTLING:
            self._settle(status)
        elif self._phase is _Phase.LOOKING:
            self._decide(status)

    def on_no_status(self, reason: str, now_s: float) -> None:
        """Repeat the request for the status later, as it was not answered."""
        self.trouble = reason
        self.request = ReadStatus(now_s + self._pause_s())

    def on_open(self, now_s: float) -> None:
        """Ask for the status, as the headers of a stream have arrived."""
        self.openings += 1
        self._tail_lines, self._reads_whole_file, self._has_ended = None, False, False
        self._stream, self._is_open, self._note = StreamLines(self._memory, now_s), True, ""
        self._phase, self.request = _Phase.CHECKING, ReadStatus(now_s)
        self._unread_since_s = now_s

    def on_not_open(self, reason: str, now_s: float, *, is_refusal: bool) -> None:
        """Try again later, as no stream could be opened.

        Args:
            is_refusal: True if the server has answered, and refuses this log.
        """
        self._now_s, self.trouble = now_s, reason
        self._look(now_s + self._pause_s())
        if is_refusal:
            self._count_failure()

    def on_lines(self, lines: Sequence[TimedLine], t_ns: int) -> None:
        """Deliver, hold or drop lines of the open stream.

        Args:
            t_ns: time of their arrival, in monotonic nanoseconds.
        """
        stream, life = self._stream, self._life
        if stream is None or life is None or not self._is_open:
            return
        self._now_s = t_ns / _NS
        if not self._is_previous:
            self._alone_s = self._now_s
        for line in lines:
            # text without a time is an error at the end, or the rest of a line at the start
            self._note = "" if line.stamp else line.content.decode(errors="replace")
            if not line.stamp:
                continue
            if self._delivery.doubtful_life() != life:
                self._delivery.resolve_doubt(line, self._now_s)
            if new := stream.read(line, t_ns):
                self._ended_well_s, self._retry_s = None, 0.0
                self._judge_start(new[0][0])
                self._delivery.add_lines(life, new)
            if stream.is_broken:
                self._reads_whole_file = stream.is_repeating
                self._end_stream("")
                return
        if stream.is_past_anchor():
            self._prove()

    def on_end(self, rest: Sequence[TimedLine], t_ns: int) -> None:
        """Continue after the orderly end of the stream.

        Args:
            rest: a last line without a line break. It counts if the life has ended.
            t_ns: time of the end, in monotonic nanoseconds.
        """
        if self._is_last_reading or (rest and not rest[0].stamp):
            self.on_lines(rest, t_ns)
        if not self._is_open:
            return
        if self._note:
            self.on_cut(self._note, t_ns / _NS)
            return
        self._now_s = t_ns / _NS
        if not self._is_previous:
            self._alone_s = self._now_s
        # a stream that was not read for a while may have ended then
        self._has_ended, self._ended_before_s = True, self._ended_well_s
        self._ended_well_s = self._now_s if self._unread_since_s is None else self._unread_since_s
        self._note_empty()
        self._end_stream("")

    def on_cut(self, reason: str, now_s: float) -> None:
        """Continue after an end of the stream in the middle."""
        if self._is_open:
            self._now_s = now_s
            self._note_empty()
            self._end_stream(reason)
            if self._phase is _Phase.LOOKING:
                self._count_failure()

    def on_silence(self, now_s: float) -> None:
        """Open another stream, as this one has been silent for long: its node may be dead."""
        if self._is_open:
            self._now_s, self._retry_s = now_s, 0.0
            self._note_empty()
            self._end_stream("", is_silent=True)

    def stop(self, now_s: float, *, has_unread: bool = False) -> None:
        """End without further requests. The log has a hole here if it is not read at present.

        Args:
            has_unread: True if the open stream may have data that was not reported.
        """
        if self._phase is _Phase.ENDED:
            return
        self._now_s, stream = now_s, self._stream
        if stream is not None and stream.is_past_anchor():
            self._deliver_held(stream)
        is_read = (
            self._is_open
            and not self.is_checking
            and stream is not None
            and (stream.is_proven or stream.is_settled or not stream.continues)
        )
        has_end = is_read or self._ended_well_s is not None
        if self._life is not None and (not has_end or (self._is_open and has_unread)):
            self._tell_hole(HoleReason.STOPPED)
        self._end()

    def fail(self, reason: str, now_s: float, lost: Sequence[ContainerLine | LogHole] = ()) -> None:
        """End with a hole, as the shell has failed. A log that has ended lacks only ``lost``.

        Args:
            reason: the error.
            lost: the records of the last :meth:`take`, if they were not received.
        """
        self._now_s, self.trouble = now_s, reason
        number = self._life.number if self._life is not None else self._next_number or 0
        if lost:
            self._delivery.forget_taken()
        if lost or self._phase is not _Phase.ENDED:
            self._end()
            numbers = [number, *map(_first_life, lost)]
            self._tell_hole(HoleReason.FAILED, lives=(min(numbers), max(numbers)))

    # -- decisions by the status -------------------------------------------------------------------

    def _decide(self, status: ContainerStatus | None) -> None:
        """Choose the log that is read next."""
        if status is None:
            self._end_place()
            return
        self._judge_end(status)
        life, is_previous = self._oldest_unread(status)
        if life is None and status.is_final:
            if self._life is not None and self._ended_well_s is None:
                self._tell_hole(HoleReason.LIFE_REMOVED)
            self._end()
        elif life is None:
            self._look(self._now_s + self._pause_s())
        else:
            if self._life != life:
                self._begin_life(life)
            self._is_previous = is_previous
            self._is_last_reading = is_previous or not status.is_running
            # times before the last line are not in order if the node's clock was set back
            since = "" if self._reads_whole_file else self._memory.since
            tail_lines = self._tail_lines
            self._phase = _Phase.OPENING
            self.request = OpenStream(self._now_s, is_previous, since, tail_lines)

    def _judge_end(self, status: ContainerStatus) -> None:
        """Use the status to interpret the orderly end of the last stream.

        A life that still runs after some time had a stream that ended for another reason. A life
        that is not shown any more has been read to its end.
        """
        if self._ended_well_s is None or self._life is None:
            return
        if status.is_running and status.current == self._life:
            if self._now_s >= self._ended_well_s + SETTLE_S:
                self._ended_well_s = None
        elif self._life not in (status.current, status.ended):
            self._end_life()

    def _oldest_unread(self, status: ContainerStatus) -> tuple[ContainerLife | None, bool]:
        """Return the oldest life that can be read and has not been, and whether it is the previous.

        The first call begins with the newest life, and so does a count of restarts that falls.
        """
        newest = status.newest
        if newest is None:
            return None, False
        if self._next_number is None or newest.number < self._next_number - 1:
            self._next_number = newest.number
        for life, is_previous in ((status.ended, True), (status.current, False)):
            if life is not None and life.number >= self._next_number:
                return life, is_previous
        return None, False

    def _begin_life(self, life: ContainerLife) -> None:
        """Start with another life. The rest of the last one and the lives between are a hole."""
        first_lost = life.number if self._next_number is None else self._next_number
        if self._life is not None or first_lost < life.number:
            self._tell_lives(first_lost, max(first_lost, life.number - 1))
        self._may_lack_start = False
        self._empty_s = self._alone_s if self.openings else self._now_s
        self._life, self._next_number, self._memory = life, life.number, LineMemory()
        self._ended_well_s, self._failures, self._stream = None, 0, None

    def _tell_lives(self, first_lost: int, last_lost: int) -> None:
        """Deliver a hole over lives. Doubtful lines before it may be of a life that is lost."""
        doubtful_life = self._delivery.doubtful_life()
        if doubtful_life is not None:
            lost = (doubtful_life.number, last_lost)
            self._tell_hole(HoleReason.LIVES_UNREAD, lives=lost)
            if last_lost > doubtful_life.number:  # the life after it is lost, too
                self._delivery.resolve_doubt(None, self._now_s)
        self._tell_hole(HoleReason.LIVES_UNREAD, lives=(first_lost, last_lost))

    def _check(self, status: ContainerStatus | None, *, is_replaced: bool) -> None:
        """Read the stream if the status after its opening shows its life; else drop it.

        A stream of a pod that is gone is read: the pod was there when the stream was opened.
        """
        if status is None:
            is_expected = not is_replaced
        else:
            shown = status.ended if self._is_previous else status.current
            is_expected = shown == self._life
        stream = self._stream
        if not is_expected or stream is None:
            self._drop_stream()
            self._decide(status)
            return
        self._phase, self.request, self.trouble = _Phase.READING, ReadStream(), ""
        if not stream.continues:
            self._may_lack_start |= stream.opened_s > self._empty_s + START_S
            self._prove()

    def _prove(self) -> None:
        """Ask for the status that proves the life of the stream."""
        stream = self._stream
        assert stream is not None, "a stream is proven"
        if self._is_gone:
            self._settle(None)
        else:
            self._phase, self.request = _Phase.SETTLING, ReadStatus(stream.opened_s + SETTLE_S)
            self._unread_since_s = self._now_s

    def _settle(self, status: ContainerStatus | None) -> None:
        """Deliver the lines of the stream if they are of the expected life; else drop it.

        If the status shows that another life is the previous one now, the lines cannot be read
        again. They are kept as doubtful.
        """
        stream = self._stream
        assert stream is not None, "a stream is settled"
        assert self._life is not None, "a stream is of a life"
        is_proven = status is None or self._life == (
            status.ended if self._is_previous else status.newest
        )
        if not is_proven and not self._is_previous:
            self._drop_stream()
            self._decide(status)
            return
        if status is None and not stream.continues and not stream.is_settled:
            self._tell_hole(HoleReason.POD_GONE)  # nothing shows of which life the stream is
        if not is_proven:
            self._delivery.doubt(self._life, self._now_s)
        self._deliver_held(stream)
        if self._is_open:
            self._phase, self.request = _Phase.READING, ReadStream()
        else:
            self._end_reading()
            self._decide(status)

    def _end_place(self) -> None:
        """End, as the pod is gone, with a hole unless its log was read to the end."""
        ended_s = self._ended_well_s
        if self._life is None:
            last_read = -1 if self._next_number is None else self._next_number - 1
            is_ended = not self._may_restart
        else:
            last_read = self._life.number
            is_recent = ended_s is not None and self._now_s < ended_s + GONE_S
            is_ended = is_recent or (ended_s is not None and not self._may_restart)
        if not is_ended or last_read < self._newest_number:
            self._tell_hole(HoleReason.POD_GONE)
        self._end()

    # -- lines and ends of streams -----------------------------------------------------------------

    def _note_empty(self) -> None:
        """Note that the log had no line when a stream was opened that has shown none for a while."""
        stream = self._stream
        if stream is None or not stream.is_settled or self._memory.since:
            return
        if self._ended_well_s is not None or self._now_s > stream.opened_s + _FIRST_LINE_S:
            self._empty_s = stream.opened_s

    def _judge_start(self, line: TimedLine) -> None:
        """Deliver a hole before the first line of a log that was read late.

        There is none if the line is of the first seconds of its life.
        """
        may_lack_start, self._may_lack_start = self._may_lack_start, False
        started_s = self._life.started_s if self._life is not None else 0
        if may_lack_start and line.node_ns > (started_s + START_S) * _NS:
            self._tell_hole(HoleReason.START_UNREAD, before=line.stamp)

    def _deliver_held(self, stream: StreamLines) -> None:
        """Deliver the held lines, after a hole if the last line before them has not come again."""
        assert self._life is not None, "a stream is opened for a life"
        has_hole = stream.is_unproven
        lines = stream.settle()
        if lines:
            self._judge_start(lines[0][0])
        if has_hole:
            self._tell_hole(HoleReason.ROTATED, before=lines[0][0].stamp if lines else "")
        self._delivery.add_lines(self._life, lines)
        if lines:
            self._retry_s = 0.0
            if self._is_open:
                self._ended_well_s = None

    def _end_stream(self, reason: str, *, is_silent: bool = False) -> None:
        """Continue after the end of a stream: prove its lines, end its life, or look again."""
        stream = self._stream
        assert stream is not None, "a stream was open"
        self.trouble, self._is_open = reason, False
        is_last = (self._is_last_reading or self._is_gone) and self._has_ended
        has_earlier_end = self._is_gone and not stream.held and self._ended_before_s is not None
        if self._has_ended and stream.is_unproven and (not is_last or has_earlier_end):
            # it may have been the stream of the next life, or the log of a pod that was removed
            self._ended_well_s, is_last = self._ended_before_s, False
        if is_last or is_silent:
            has_new_lines = stream.is_past_anchor_at_end()
        else:
            has_new_lines = stream.is_past_anchor()
        if stream.held and not has_new_lines:
            stream.held.clear()  # the next stream repeats them
            if is_last:  # the server has ended the stream too early
                self._has_ended, self._ended_well_s = False, self._ended_before_s
                self._count_failure()
        elif has_new_lines or (is_last and not stream.is_proven and not stream.is_settled):
            self._prove()
            return
        if self._is_gone:
            self._end_place()
        else:
            self._end_reading()
            self._look(self._now_s + self._retry_s)
            self._pause_s()

    def _end_reading(self) -> None:
        """End the present life if its last reading has ended well."""
        if self._is_last_reading and self._has_ended:
            self._end_life()

    def _end_life(self) -> None:
        """Await the life after the present one."""
        if self._life is None:
            return
        if self._may_lack_start:
            self._tell_hole(HoleReason.START_UNREAD)
        if self._delivery.doubtful_life() != self._life:  # a doubt of the life before
            self._delivery.resolve_doubt(None, self._now_s)
        self._next_number, self._life = self._life.number + 1, None
        self._retry_s = 0.0

    def _count_failure(self) -> None:
        """Count a failed last reading, and give the life up after some."""
        if not self._is_last_reading or self._life is None:
            return
        self._failures += 1
        if self._failures >= _FAILURES_MAX:
            self._tell_hole(HoleReason.LIFE_REMOVED)
            self._end_life()

    def _drop_stream(self) -> None:
        """Close a stream of another life, with its held lines."""
        self.dropped_streams += 1
        self._is_open, self._stream = False, None
        if self._has_ended:
            self._has_ended, self._ended_well_s = False, self._ended_before_s
        self._phase = _Phase.LOOKING

    def _tell_hole(
        self, reason: HoleReason, *, lives: tuple[int, int] | None = None, before: str = ""
    ) -> None:
        """Deliver a hole in the present life, or in the given ones."""
        if lives is None:
            number = self._life.number if self._life is not None else self._next_number or 0
            lives = (number, number)
        self._delivery.add_hole(lives, reason, self.trouble, self._now_s, before)

    def _look(self, at_s: float) -> None:
        """Ask for the status, without a stream."""
        self._phase, self.request = _Phase.LOOKING, ReadStatus(at_s)

    def _end(self) -> None:
        """End for good."""
        self._delivery.resolve_doubt(None, self._now_s)
        self._is_open, self._phase, self.request = False, _Phase.ENDED, EndReading()

    def _pause_s(self) -> float:
        """Return the pause before the next attempt, which grows until a line is delivered."""
        self._retry_s = min(_RETRY_MAX_S, max(_RETRY_S, 2 * self._retry_s))
        return self._retry_s


def _first_life(record: ContainerLine | LogHole) -> int:
    """Return the number of the first life that a record is about."""
    return record.first_life if isinstance(record, LogHole) else record.life.number
