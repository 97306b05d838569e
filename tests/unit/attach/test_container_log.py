"""Tests of the reader of a container's log: against a model of a kubelet, and case by case."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nodes.kubelet_model import IDLE_S, PLACE, KubeletModel, timed_line

from chaoskit.attach.logs.container_log import GONE_S, SETTLE_S, START_S, ContainerLog
from chaoskit.attach.logs.container_status import ContainerStatus
from chaoskit.attach.logs.reader_requests import EndReading, OpenStream, ReadStatus, ReadStream
from chaoskit.attach.logs.records import ContainerLife, ContainerLine, HoleReason, LogHole
from chaoskit.attach.logs.timed_lines import TimedLine

_END = (HoleReason.POD_GONE, HoleReason.STOPPED)

ACTS = st.one_of(
    st.tuples(st.just("write"), st.integers(1, 6), st.sampled_from([0.0, 0.0, 0.002, 0.4])),
    st.tuples(st.just("twin")),
    st.tuples(st.just("shell"), st.integers(1, 12), st.sampled_from([1, 2, 100])),
    st.tuples(st.just("shell"), st.integers(1, 12), st.sampled_from([1, 2, 100])),
    st.tuples(st.just("advance"), st.sampled_from([0.01, 0.2, 0.6, 1.5, 10.0])),
    st.tuples(st.just("rotate")),
    st.tuples(st.just("cut")),
    st.tuples(st.just("silence")),
    st.tuples(st.just("restart"), st.sampled_from([0.01, 0.3, 1.5]), st.booleans()),
    st.tuples(st.just("reach"), st.booleans()),
)
HISTORIES = st.lists(ACTS, max_size=60)
ENDS = st.sampled_from(["final", "force", "grace"])
LAGS_S = st.sampled_from([0.0, 0.05, 0.3, SETTLE_S - 0.01])


class History:
    """A history of a container, of its log and of the reader, from a list of acts."""

    def __init__(self, lag_s: float) -> None:
        self.model = KubeletModel(lag_s)

    def play(self, acts: list[tuple[Any, ...]], end: str) -> None:
        self.run(40, 100)  # the reader is attached before the first line
        assert self.model.reader.openings
        for act in acts:
            self._play(*act)
        self._finish(end)

    def _play(self, name: str, *arguments: Any) -> None:
        model = self.model
        if name == "write":
            model.write(arguments[0], arguments[1])
        elif name == "twin":
            model.write(1, twin=True)
        elif name == "shell":
            self.run(arguments[0], arguments[1])
        elif name == "advance":
            self.advance(arguments[0])
        elif name == "rotate":
            model.rotate()
        elif name == "cut":
            model.cut()
        elif name == "silence":
            if model.stream is not None:
                model.stream.silence()
            self.advance(IDLE_S + 1.0)
        elif name == "restart":
            self.restart(*arguments)
        elif name == "read restart":
            self.restart(*arguments, is_read=True)
            model.write(1)
            self.advance(4.0)
        elif name == "reach":
            model.is_reachable = arguments[0]

    def advance(self, seconds: float) -> None:
        """Let time pass. The shell is never late by a second."""
        until_s = self.model.now_s + seconds
        while self.model.now_s < until_s:
            self.model.advance(min(0.5, until_s - self.model.now_s))
            if seconds > 0.1:
                self.run(3, 100)

    def restart(self, pause_s: float, waits: bool, *, is_read: bool = False) -> None:
        """End the life, and begin the next after a pause; a life lasts longer than the lag.

        Args:
            is_read: True to run the shell meanwhile.
        """
        model = self.model
        advance = self.advance if is_read else model.advance
        advance(max(0.0, model.lives[-1].began_s + model.lag_s + 0.05 - model.now_s))
        model.end()
        advance(pause_s / 2)
        if waits:
            model.wait()
        advance(pause_s / 2)
        model.begin()

    def run(self, requests: int, lines: int) -> None:
        for _ in range(requests):
            if not self.model.run_shell(lines):
                self.model.advance(0.02)

    def _finish(self, end: str) -> None:
        """End the pod in a way, and run the reader until it ends."""
        model = self.model
        # a pod is not deleted in the moment of a restart, and the shell is not late by seconds
        self.advance(2 * GONE_S + model.lag_s)
        if end == "force":
            model.delete(force=True)
            model.write(3)
        elif end == "grace":
            model.delete(force=False)
            model.write(3)
        model.end()
        self.run(2, 2)
        if end == "grace":
            model.vanish()
        elif end == "final":
            model.finish()
        model.is_reachable = True
        for _ in range(5000):
            if isinstance(model.reader.request, EndReading):
                return
            if not model.run_shell():
                model.advance(0.05)
        pytest.fail(f"the reader does not end: {model.reader.request}")

    # -- judging -----------------------------------------------------------------------------------

    def delivered(self) -> list[tuple[int, TimedLine]]:
        """Return the delivered lines, each with the number of its life."""
        return [
            (record.life.number, TimedLine(record.node_time, record.node_ns, record.content))
            for record in self.model.delivered
            if isinstance(record, ContainerLine)
        ]

    def holes(self) -> list[LogHole]:
        return [record for record in self.model.delivered if isinstance(record, LogHole)]

    def lost(self) -> list[int]:
        """Return the indices of written lines that were not delivered."""
        left = Counter(line for _, line in self.delivered())
        lost = []
        for index, (_, line) in enumerate(self.model.written):
            if left[line]:
                left[line] -= 1
            else:
                lost.append(index)
        return lost

    def covers(self, hole: LogHole, index: int) -> bool:
        """Return whether a hole is the place of a written line."""
        life, _ = self.model.written[index]
        last_life = 10**9 if hole.reason in _END else hole.last_life
        if not hole.first_life <= life <= last_life:
            return False
        stamps = [line.stamp for _, line in self.model.written]
        after = stamps.index(hole.after) if hole.after else -1
        before = len(stamps) - stamps[::-1].index(hole.before) if hole.before else len(stamps)
        return after < index < before


@settings(max_examples=1500, deadline=None)
@given(LAGS_S, HISTORIES, ENDS)
def test_no_line_is_doubled_and_no_loss_is_silent(
    lag_s: float, acts: list[tuple[Any, ...]], end: str
) -> None:
    """Delivered lines and told holes are all that was written since the attachment."""
    history = History(lag_s)
    history.play(acts, end)
    written = Counter(line for _, line in history.model.written)
    assert not Counter(line for _, line in history.delivered()) - written
    if end == "final":  # else the last lines may be taken for those of the life before
        misplaced = set(history.delivered()) - set(history.model.written)
        lost_lives = {life for hole in history.holes() for life in hole.lives}
        assert {life for life, _ in misplaced} <= lost_lives
    for index in history.lost():
        assert any(history.covers(hole, index) for hole in history.holes()), history.model.written[
            index
        ]


CALM_ACTS = st.one_of(
    st.tuples(st.just("write"), st.integers(1, 6), st.sampled_from([0.0, 0.002, 0.4])),
    st.tuples(st.just("twin")),
    st.tuples(st.just("shell"), st.integers(1, 12), st.sampled_from([1, 2, 100])),
    st.tuples(st.just("advance"), st.sampled_from([0.01, 0.2, 0.6, 1.5])),
    st.tuples(st.just("cut")),
    st.tuples(st.just("silence")),
    st.tuples(st.just("read restart"), st.sampled_from([0.01, 0.3, 1.5]), st.booleans()),
)


@settings(max_examples=300, deadline=None)
@given(LAGS_S, st.lists(CALM_ACTS, max_size=40))
def test_a_log_that_is_away_for_short_times_is_delivered_whole(
    lag_s: float, acts: list[tuple[Any, ...]]
) -> None:
    """Cuts, silences and restarts cost nothing while each life can be read before the next ends.

    A log that stays empty may have a hole, as nothing shows that it was not rotated.
    """
    history = History(lag_s)
    history.play([("write", 1, 0.0), ("advance", 1.5), *acts], "final")
    assert not history.lost()
    assert not history.holes()


@settings(max_examples=500, deadline=None)
@given(LAGS_S, HISTORIES, ENDS)
def test_a_hole_is_told_only_for_a_cause(
    lag_s: float, acts: list[tuple[Any, ...]], end: str
) -> None:
    """A hole has a rotation, a restart, an absence of the server or a deletion before it."""
    history = History(lag_s)
    history.play(acts, end)
    names = {act[0] for act in acts}
    was_away = ("reach", False) in acts
    for hole in history.holes():
        if hole.reason is HoleReason.ROTATED:
            assert history.model.has_rotated or "restart" in names
        elif hole.reason is HoleReason.LIVES_UNREAD:
            assert "restart" in names
        elif hole.reason is HoleReason.START_UNREAD:
            assert was_away or names & {"advance", "restart"}
        else:
            assert hole.reason is HoleReason.POD_GONE
            assert end != "final"


# -- case by case ----------------------------------------------------------------------------------

LIVES = [ContainerLife(number, f"containerd://{number}") for number in range(4)]


class Reader:
    """A reader with the life 0 running, as the shell sees it."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.log = ContainerLog(PLACE)
        self.running(0)
        self.open()
        self.running(0)
        self.running(0)
        assert isinstance(self.log.request, ReadStream)

    def running(self, number: int) -> None:
        """Report the status with this life running."""
        self.now_s += SETTLE_S
        ended = LIVES[number - 1] if number else None
        self.log.on_status(ContainerStatus(LIVES[number], ended, is_running=True), self.now_s)

    def open(self) -> OpenStream:
        """Report an opened stream, and return the request."""
        request = self.log.request
        assert isinstance(request, OpenStream), request
        self.log.on_open(self.now_s)
        return request

    def send(self, *lines: TimedLine, after_s: float = 0.0) -> None:
        """Report lines of the stream."""
        self.now_s += after_s
        self.log.on_lines(lines, round(self.now_s * 10**9))

    def reopen(self, number: int = 0) -> OpenStream:
        """Cut the stream, and open it again with the same status before and after."""
        self.log.on_cut("reset", self.now_s)
        self.running(number)
        request = self.open()
        self.running(number)
        return request

    def texts(self) -> list[str]:
        """Return the new lines, and "hole" with its reason for each hole."""
        return [
            record.text if isinstance(record, ContainerLine) else f"hole {record.reason.name}"
            for record in self.log.take()
        ]


def line(node_s: float, text: str) -> TimedLine:
    return timed_line(node_s, text)


def test_a_stream_after_a_cut_begins_a_second_before_its_last_line() -> None:
    reader = Reader()
    reader.send(line(10.5, "a"), line(11.7, "b"))
    assert reader.reopen().since == "2027-01-15T08:00:10Z"


def test_lines_after_the_last_delivered_line_are_new() -> None:
    reader = Reader()
    reader.send(line(10.5, "a"), line(10.5, "a"), line(10.6, "b"))
    assert reader.texts() == ["a", "a", "b"]
    reader.reopen()
    reader.send(line(10.5, "a"), line(10.5, "a"), line(10.6, "b"), line(10.55, "c"))
    assert reader.texts() == ["c"]


def test_equal_lines_are_counted() -> None:
    """Two equal lines were delivered, and the stream shows three: the third is new."""
    reader = Reader()
    reader.send(line(10.5, "a"), line(10.5, "a"))
    reader.reopen()
    reader.texts()
    reader.send(line(10.5, "a"), line(10.5, "a"), line(10.5, "a"))
    assert reader.texts() == ["a"]


def test_a_stream_without_the_last_delivered_line_has_a_hole() -> None:
    reader = Reader()
    reader.send(line(10.5, "a"))
    reader.reopen()
    reader.texts()
    reader.send(line(12.0, "c"))
    assert reader.texts() == [], "the stream may be of the next life"
    reader.running(0)
    assert reader.texts() == ["hole ROTATED", "c"]


def test_a_stream_of_the_next_life_is_dropped() -> None:
    """The API server's status is late: it shows the old life before and after the opening."""
    reader = Reader()
    reader.send(line(10.5, "a"))
    reader.reopen()
    reader.send(line(12.0, "first line of the next life"))
    reader.texts()
    reader.running(1)
    assert reader.texts() == []
    request = reader.open()
    assert request.previous
    assert reader.log.dropped_streams == 1


def test_a_stream_whose_status_shows_another_life_is_dropped() -> None:
    reader = Reader()
    reader.log.on_cut("reset", reader.now_s)
    reader.running(0)
    reader.open()
    reader.running(1)
    assert reader.log.dropped_streams == 1
    assert reader.open().previous


def test_a_count_of_restarts_that_rose_by_two_is_a_hole() -> None:
    reader = Reader()
    reader.send(line(10.5, "a"))
    reader.log.on_cut("reset", reader.now_s)
    reader.running(3)
    (delivered, hole) = reader.log.take()
    assert isinstance(delivered, ContainerLine)
    assert isinstance(hole, LogHole)
    assert (hole.reason, hole.lives) == (HoleReason.LIVES_UNREAD, range(2))
    assert hole.after == delivered.node_time


def test_an_ended_life_is_read_once_more_before_the_next() -> None:
    reader = Reader()
    reader.send(line(10.5, "a"))
    reader.log.on_end([], round(reader.now_s * 10**9))
    reader.running(1)
    assert reader.open().previous
    reader.running(1)
    reader.send(line(10.5, "a"), line(10.6, "b"))
    reader.log.on_end([], round(reader.now_s * 10**9))
    reader.running(1)
    assert reader.texts() == ["a", "b"]
    assert not reader.open().previous


def test_a_skipped_file_in_a_stream_is_a_hole() -> None:
    """Lines of ten seconds are missing in a stream that is late: another stream must prove them."""
    reader = Reader()
    reader.send(line(10.0, "a"), after_s=20.0)
    reader.send(line(10.1, "b"), line(20.1, "after the skipped file"))
    assert reader.texts() == ["a", "b"]
    reader.running(0)
    reader.open()
    reader.running(0)
    reader.send(line(20.1, "after the skipped file"))
    reader.running(0)
    assert reader.texts() == ["hole ROTATED", "after the skipped file"]


def test_a_late_stream_of_a_quiet_log_has_no_hole() -> None:
    """Such a jump is no loss if another stream shows both lines next to each other."""
    reader = Reader()
    reader.send(line(10.0, "a"), after_s=20.0)
    reader.send(line(10.1, "b"), line(20.1, "c"))
    reader.running(0)
    reader.open()
    reader.running(0)
    reader.send(line(10.0, "a"), line(10.1, "b"), line(20.1, "c"), line(20.2, "d"))
    assert reader.texts() == ["a", "b", "c", "d"]


def test_a_repeated_file_in_a_stream_is_not_delivered_again() -> None:
    reader = Reader()
    reader.send(line(10.0, "a"), line(12.0, "b"), line(10.0, "a"), line(12.0, "b"))
    assert reader.texts() == ["a", "b"]
    reader.running(0)
    assert reader.open().since == "", "a clock that was set back may be the cause"
    reader.running(0)
    reader.send(line(10.0, "a"), line(12.0, "b"), line(10.0, "c"))
    assert reader.texts() == ["c"]


def test_an_error_of_the_kubelet_is_no_line() -> None:
    reader = Reader()
    reader.send(line(10.5, "a"), TimedLine("", 0, b"rpc error: code = NotFound"))
    reader.log.on_end([], round(reader.now_s * 10**9))
    assert reader.texts() == ["a"]
    assert reader.log.trouble == "rpc error: code = NotFound"


def test_the_rest_of_a_line_at_the_start_of_a_stream_is_no_line() -> None:
    """A long line is several records of a file, of which ``sinceTime`` may cut the first."""
    reader = Reader()
    reader.send(line(10.5, "a"))
    reader.reopen()
    reader.send(TimedLine("", 0, b"rest of a long line"), line(10.5, "a"), line(10.6, "b"))
    assert reader.texts() == ["a", "b"]
    assert reader.log.trouble == ""


def test_a_pod_that_is_gone_after_the_end_of_its_log_has_no_hole() -> None:
    reader = Reader()
    reader.send(line(10.5, "a"))
    reader.log.on_end([], round(reader.now_s * 10**9))
    reader.log.on_status(None, reader.now_s + 0.1)
    assert reader.texts() == ["a"]
    assert isinstance(reader.log.request, EndReading)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_pod_that_is_gone_after_a_cut_has_a_hole(is_replaced: bool) -> None:
    reader = Reader()
    reader.send(line(10.5, "a"))
    reader.log.on_cut("reset", reader.now_s)
    reader.log.on_status(None, reader.now_s + 0.1, is_replaced=is_replaced)
    assert reader.texts() == ["a", "hole POD_GONE"]


def test_a_stream_of_a_successor_with_the_same_name_is_not_read() -> None:
    reader = Reader()
    reader.send(line(10.5, "a"))
    reader.log.on_cut("reset", reader.now_s)
    reader.running(0)
    reader.open()
    reader.log.on_status(None, reader.now_s, is_replaced=True)
    assert not reader.log.has_stream
    assert reader.texts() == ["a", "hole POD_GONE"]


def test_the_log_of_an_ended_life_that_is_refused_is_a_hole() -> None:
    reader = Reader()
    reader.send(line(10.5, "a"))
    reader.log.on_cut("reset", reader.now_s)
    for _ in range(3):
        reader.running(1)
        assert isinstance(reader.log.request, OpenStream)
        reader.log.on_not_open("not found", reader.now_s, is_refusal=True)
    assert reader.texts() == ["a", "hole LIFE_REMOVED"]
    reader.running(1)
    request = reader.log.request
    assert isinstance(request, OpenStream)
    assert not request.previous


def test_a_reader_that_is_stopped_while_it_reads_has_no_hole() -> None:
    reader = Reader()
    reader.send(line(10.5, "a"))
    reader.log.stop(reader.now_s)
    assert reader.texts() == ["a"]


def test_a_reader_that_is_stopped_after_a_cut_has_a_hole() -> None:
    reader = Reader()
    reader.send(line(10.5, "a"))
    reader.log.on_cut("reset", reader.now_s)
    reader.log.stop(reader.now_s)
    assert reader.texts() == ["a", "hole STOPPED"]


def test_a_reader_that_is_stopped_before_it_knows_the_life_has_a_hole() -> None:
    """The stream of a life is open, and nothing of it was read."""
    model = KubeletModel(0.0)
    reader = model.reader
    while not reader.is_checking:
        model.run_shell(100)
    reader.stop(model.now_s)
    assert [str(record.reason) for record in reader.take() if isinstance(record, LogHole)] == [
        HoleReason.STOPPED
    ]


def test_a_reader_that_is_stopped_with_unread_data_has_a_hole() -> None:
    reader = Reader()
    reader.send(line(10.5, "a"))
    reader.log.stop(reader.now_s, has_unread=True)
    assert reader.texts() == ["a", "hole STOPPED"]


@pytest.mark.parametrize("ends_before", [False, True])
def test_a_hole_of_a_failure_begins_before_the_records_that_were_lost(ends_before: bool) -> None:
    reader = Reader()
    for text in ("a", "b"):
        reader.send(line(10.5 if text == "a" else 11.5, text))
        lost = reader.log.take()
    if ends_before:
        reader.log.stop(reader.now_s)
    reader.log.fail("OSError: full", reader.now_s, lost)
    (hole,) = reader.log.take()
    assert isinstance(hole, LogHole)
    assert (hole.reason, hole.detail, hole.lives) == (HoleReason.FAILED, "OSError: full", range(1))
    assert hole.after == line(10.5, "a").stamp
    reader.log.fail("OSError: full", reader.now_s, [hole])
    (again,) = reader.log.take()
    assert isinstance(again, LogHole)
    assert again.after == hole.after


def test_the_pause_between_attempts_grows_to_a_second() -> None:
    reader = Reader()
    reader.log.on_cut("reset", reader.now_s)
    pauses = []
    for _ in range(6):
        reader.log.on_no_status("no answer", reader.now_s)
        request = reader.log.request
        assert isinstance(request, ReadStatus)
        pauses.append(round(request.at_s - reader.now_s, 3))
    assert pauses == [0.2, 0.4, 0.8, 1.0, 1.0, 1.0]


def test_a_pod_that_is_gone_before_its_newest_life_was_read_has_a_hole() -> None:
    """No further life can follow, but the last one that the status has shown was not read."""
    reader = Reader()
    reader.send(line(10.5, "a"))
    reader.log.on_cut("reset", reader.now_s)
    ending = ContainerStatus(LIVES[1], LIVES[0], is_running=True, may_restart=False)
    reader.log.on_status(ending, reader.now_s)
    assert reader.open().previous
    reader.log.on_status(ending, reader.now_s)
    reader.send(line(10.5, "a"))
    reader.log.on_end([], round(reader.now_s * 10**9))
    reader.log.on_status(None, reader.now_s)
    assert reader.texts() == ["a", "hole POD_GONE"]


def test_a_log_that_is_first_read_late_has_a_hole_at_its_start() -> None:
    reader = Reader()
    reader.log.on_cut("reset", reader.now_s)
    reader.now_s += START_S
    reader.running(0)
    reader.open()
    reader.running(0)
    reader.running(0)
    reader.send(line(20.0, "a"), line(20.1, "b"))
    assert reader.texts() == ["hole START_UNREAD", "a", "b"]


@pytest.mark.parametrize(
    ("first_line", "expected"),
    [("x", ["hole LIVES_UNREAD", "x"]), ("y", ["x", "y"])],
    ids=["of the next life", "of its own life"],
)
def test_a_doubtful_log_is_judged_by_the_next_life(first_line: str, expected: list[str]) -> None:
    """The container restarts while the status of an ended life's log is awaited."""
    reader = Reader()
    reader.log.on_cut("reset", reader.now_s)
    reader.running(1)
    assert reader.open().previous
    reader.running(1)
    reader.running(2)
    reader.send(line(10.5, "x"))
    reader.log.on_end([], round(reader.now_s * 10**9))
    assert reader.texts() == []
    reader.running(2)
    assert reader.open().previous
    reader.running(2)
    reader.running(2)
    reader.send(line(10.5, first_line))
    assert reader.texts() == expected


def test_the_end_of_an_unproven_stream_is_no_end_of_its_life() -> None:
    """The stream may have been that of the next life, which has printed nothing."""
    reader = Reader()
    reader.send(line(10.5, "a"))
    reader.reopen()
    reader.log.on_end([], round(reader.now_s * 10**9))
    reader.running(2)
    assert reader.texts() == ["a", "hole LIVES_UNREAD"]


def test_an_end_that_was_read_late_does_not_prove_the_end_of_a_pod() -> None:
    """The stream was not read for ten seconds, in which the container may have been restarted."""
    reader = Reader()
    reader.send(line(10.5, "a"))
    reader.log.on_cut("reset", reader.now_s)
    reader.running(0)
    reader.open()
    reader.now_s += 10.0
    reader.log.on_status(None, reader.now_s)
    reader.send(line(10.5, "a"))
    reader.log.on_end([], round(reader.now_s * 10**9))
    assert reader.texts() == ["a", "hole POD_GONE"]


def test_a_removed_log_after_the_end_of_its_stream_is_no_hole() -> None:
    """A pod is deleted with grace: its log is gone before it can be read once more."""
    reader = Reader()
    reader.send(line(10.5, "a"))
    reader.log.on_end([], round(reader.now_s * 10**9))
    ended = ContainerStatus(LIVES[0], may_restart=False)
    reader.log.on_status(ended, reader.now_s)
    reader.open()
    reader.log.on_status(None, reader.now_s)
    reader.log.on_end([], round(reader.now_s * 10**9))
    assert reader.texts() == ["a"]
    assert isinstance(reader.log.request, EndReading)
