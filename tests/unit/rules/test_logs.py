"""Steps and losses from logs, for any cut into pieces and any number of printing ranks."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaoskit.errors import BadInput
from chaoskit.rules.log_file import LineSplitter
from chaoskit.stacks import LogPatterns
from chaoskit.stacks.course import Course, Usual, differs
from chaoskit.stacks.felt import Felt, look, usual_step_s
from chaoskit.stacks.log import CommandLogLine, LogReader

PATTERNS = LogPatterns(step=r"step (\d+)", loss=r"loss ([\d.eE+-]+|nan)")

# -- patterns --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "field", "remedy"),
    [
        ({"step": r"step \d+"}, "step", "one group"),
        ({"step": r"(step) (\d+)"}, "step", "this has 2"),
        ({"step": r"step (\d+"}, "step", "correct the regular expression"),
        ({"step": None}, "step", "regular expression"),
        ({"step": r"(\d+)", "loss": "loss"}, "loss", "one group"),
        ({"step": r"(\d+)", "tolerance": -1.0}, "tolerance", "0 or more"),
        ({"step": r"(\d+)", "tolerance": math.nan}, "tolerance", "use a finite number"),
        ({"step": r"(\d+)", "tolerance": True}, "tolerance", "use a value of type float"),
    ],
)
def test_patterns_that_cannot_work_are_refused(
    wrong: dict[str, object], field: str, remedy: str
) -> None:
    with pytest.raises(BadInput, match=re.escape(remedy)) as caught:
        LogPatterns(**wrong)  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("line", "step", "loss"),
    [
        ("[rank0] step 12 loss 0.25", 12, "0.25"),
        ("step 7", 7, None),
        ("loss 1e-3", None, "1e-3"),
        ("step 3 loss nan", 3, "nan"),
        ("step 3 loss ...", 3, None),  # no number
        (f"step {'9' * 40}", None, None),  # too large for the number of a step
        ("the first epoch", None, None),
    ],
)
def test_a_line_may_hold_both_or_one(line: str, step: int | None, loss: str | None) -> None:
    line_read = PATTERNS.read(line)
    assert (line_read and line_read.step, line_read and line_read.loss) == (step, loss)


def test_what_is_no_whole_number_is_remembered() -> None:
    reader = LogReader(LogPatterns(step=r"step (\S+)"))
    assert reader.feed("node0", b"step 1.5\n", 1) == []
    assert (reader.odd, reader.highest) == ("1.5", None)


@pytest.mark.parametrize(
    ("pattern", "line", "step"),
    [
        (r"step (\d+)", "\x1b[32m10:00:00\x1b[0m step \x1b[1;36m12\x1b[0m loss 0.5", 12),
        (r"step\D*(\d+)", "step \x1b[1;36m12\x1b[0m", 12),  # not the 1 of the colour
        (r"step (\d+)", "\x1b]8;;http://host/5\x1b\\step 12\x1b]8;;\x1b\\", 12),  # a link
        (r"step (\d+)", "\x1b[2K\x1b[1Astep 12", 12),  # rich overwrites a line
        (
            r"step \x1b\[1;36m(\d+)",
            "step \x1b[1;36m12\x1b[0m",
            12,
        ),  # a pattern that includes the colour
        (r"step ([\d,]+)", "step 1,000 loss 0.5", 1000),
        (r"step ([\d,]+)", "step 12,345,678", 12_345_678),
        (r"step ([\d_]+)", "step 1_000", 1000),
        (r"step ([\d']+)", "step 1'000", 1000),
        (r"step ([\d\u202f]+)", "step 1\u202f000", 1000),
        (r"step (\S+)", "step 1,000,", 1000),
        (r"step ([\d,]+)", "step 3, loss 0.5", 3),  # the comma ends the clause
        (r"step ([\d,]+)", "step 1,000, loss 0.2", 1000),
        (r"step ([\d']+)", "'step 3'", 3),
        (r"step ([\d_]+)", "step 12__", 12),
        (r"step ([\d,]+)", "step ,", None),
        (r"step (\d+,)", "step 1,000", None),  # 1 would be another step
        (r"step ([\d,]+)", "step 1,00,000", None),
        (r"step ([\d,_]+)", "step 1,000_000", None),
        (r"step ([\d,]+)", "step 0,001", None),
        (r"step (\S+)", "step 1.2k", None),
        (r"step (\d+)", "step 1,000 loss 0.5", None),  # 1 would be another step
        (r"step (\d+)", "step 1_000", None),
        (r"step (\d+)", "step 999, loss 0.5", 999),
        (r"step (\d+)", "step 17,5", 17),
        (r"^(\d+)", "17,250,0.33", 17),  # columns
        (r"^(\d+),", "17,250", 17),
    ],
)
def test_numbers_are_read_as_they_are_printed(pattern: str, line: str, step: int | None) -> None:
    read = LogPatterns(step=pattern).read(line)
    assert (read and read.step) == step


@pytest.mark.parametrize("line", ["step 1,000 loss 0.5", "step 1_000"])
def test_a_pattern_that_cuts_a_number_is_named(line: str) -> None:
    reader = LogReader(LogPatterns(step=r"step (\d+)"))
    reader.feed("node0", f"step 999 loss 0.5\n{line}\n".encode(), 1)
    assert (reader.odd, reader.unread, reader.highest) == (line.split()[1], 1, 999)


@pytest.mark.parametrize(
    ("text", "unread"), [("1.2k", 1), ("1e3", 1), ("1,00,000", 1), ("size", 0), ("20.", 0)]
)
def test_numbers_of_steps_that_cannot_be_read_are_counted(text: str, unread: int) -> None:
    reader = LogReader(LogPatterns(step=r"step (\S+)"))
    reader.feed("node0", f"step 1\nstep {text}\n".encode(), 1)
    assert (reader.steps, reader.unread) == (1, unread)


def test_unread_numbers_after_the_last_step_are_counted() -> None:
    reader = LogReader(LogPatterns(step=r"step (\d+)"))
    reader.feed("node0", b"step 1,000\nstep 999\nno step\nstep 1,000\nstep 1,001\n", 1)
    assert (reader.unread, reader.unread_last) == (3, 2)


def test_losses_may_be_coloured() -> None:
    read = LogPatterns(step=r"step (\d+)", loss=r"loss.*?([\d.]+)").read(
        "step 1 loss \x1b[33m0.25\x1b[0m"
    )
    assert read is not None
    assert read.loss == "0.25"


# -- bytes to lines --------------------------------------------------------------------------------


@given(
    texts=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1, max_size=9)
    ),
    ends=st.lists(st.sampled_from(["\n", "\r", "\r\n"]), min_size=1),
    torn=st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=5),
    cuts=st.lists(st.integers(0, 200)),
)
@settings(deadline=None)
def test_lines_do_not_depend_on_how_they_are_cut(
    texts: list[str], ends: list[str], torn: str, cuts: list[int]
) -> None:
    data = "".join(text + ends[place % len(ends)] for place, text in enumerate(texts)) + torn
    raw, splitter = data.encode(), LineSplitter()
    places = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    lines = [line for start, stop in pairwise(places) for line in splitter.feed(raw[start:stop])]
    assert lines == texts


def test_a_torn_number_waits_for_its_end() -> None:
    reader = LogReader(PATTERNS)
    assert reader.feed("node0", b"step 1 loss 0.5\nstep 1", 1) == [
        CommandLogLine(1, "node0", 1, "0.5")
    ]
    assert reader.feed("node1", b"7 loss 3\n", 2) == [
        CommandLogLine(2, "node1", None, "3")
    ]  # each node has its own log
    assert reader.feed("node0", b"2 loss 0.25\n", 3) == [CommandLogLine(3, "node0", 12, "0.25")]


def test_an_endless_line_takes_no_more_memory_than_a_long_one() -> None:
    splitter = LineSplitter()
    for _ in range(64):
        assert splitter.feed(b"x" * 65_536) == []
    assert len(splitter.feed(b"\nstep 1\n")) == 2


@pytest.mark.parametrize(
    ("data", "drawn"),
    [
        (b"step 1\nstep 2\n", 0),
        (b"step 1\r\nstep 2\r\n", 0),
        (b"\rstep 1\rstep 2\rstep 3\n", 2),
        (b"step 1\rstep 2\rstep 3\r", 3),
        (b"\r  1%|\rwritten beside a bar: step 1\n\r  2%|\rstep 2\n", 0),
        (b"step 1\r\n\rother\rstep 2\r\n", 0),
    ],
)
@pytest.mark.parametrize("piece", [1, 2, 3, 100])
def test_steps_that_are_drawn_over_are_counted(data: bytes, drawn: int, piece: int) -> None:
    reader = LogReader(PATTERNS)
    for start in range(0, len(data), piece):
        reader.feed("node0", data[start : start + piece], 1)
    assert reader.drawn == drawn


# -- the course ------------------------------------------------------------------------------------


@st.composite
def attempts(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """Draw the number of printing ranks, and the first and last step of each attempt.

    An attempt begins at a step that was kept.
    """
    ranks, spans, first, reached = draw(st.integers(1, 4)), [], 0, -1
    for _ in range(draw(st.integers(1, 4))):
        last = draw(st.integers(max(first, reached + 1), reached + 6))
        spans.append((first, last))
        reached, first = last, draw(st.integers(0, last + 1))
    return ranks, spans


def shown(ranks: int, spans: list[tuple[int, int]]) -> list[CommandLogLine]:
    """Return the lines of such a training: each rank prints each step, with a loss that depends on
    the step alone.
    """
    steps = [step for first, last in spans for step in range(first, last + 1)]
    prints = [(step, rank) for step in steps for rank in range(ranks)]
    return [
        CommandLogLine(t_ns, f"node{rank % 2}", step, f"{1 / (1 + step)!r}")
        for t_ns, (step, rank) in enumerate(prints)
    ]


@given(attempts())
@settings(deadline=None)
def test_steps_that_are_shown_again_were_lost(training: tuple[int, list[tuple[int, int]]]) -> None:
    ranks, spans = training
    whole = shown(ranks, [(0, spans[-1][1])])
    course = Course(shown(ranks, spans), Usual(Course(whole).counts()))
    assert course.lost_steps() == sum(last + 1 - first for first, last in spans) - (
        spans[-1][1] + 1
    )
    assert course.losses() == Course(whole, Usual(Course(whole).counts())).losses()
    assert course.highest == spans[-1][1]


@given(ranks=st.integers(1, 4), last=st.integers(3, 20), kept=st.integers(0, 3))
@settings(deadline=None)
def test_without_a_twin_the_steps_before_the_first_fault_tell_how_many_ranks_print(
    ranks: int, last: int, kept: int
) -> None:
    before = len(shown(ranks, [(0, last)])) - 1
    lines = shown(ranks, [(0, last), (kept, last + 4)])
    assert Course(lines, Usual.before(lines, before)).lost_steps() == last + 1 - kept
    assert Course(lines[: before + 1], Usual.before(lines, math.inf)).lost_steps() == 0


def test_a_rank_that_prints_late_has_lost_nothing() -> None:
    lines = [
        CommandLogLine(t, "node0", step, None)
        for t, step in enumerate([0, 0, 1, 1, 2, 2, 3, 4, 3, 4])
    ]
    assert Course(lines, Usual({0: 2, 1: 2, 2: 2, 3: 2, 4: 2})).lost_steps() == 0


def test_a_loss_on_its_own_line_belongs_to_the_last_step_of_its_node() -> None:
    lines = [
        CommandLogLine(0, "node0", None, "9"),  # the loss belongs to no step
        CommandLogLine(1, "node0", 4, None),
        CommandLogLine(2, "node1", 5, None),
        CommandLogLine(3, "node0", None, "0.5"),
        CommandLogLine(4, "node1", None, "0.25"),
    ]
    assert Course(lines).losses() == {4: (0.5,), 5: (0.25,)}


def test_a_recovery_ends_with_a_step_that_is_new() -> None:
    lines = [
        CommandLogLine(t, "node0", step, None) for t, step in enumerate([0, 1, 2, 3, 1, 2, 3, 4])
    ]
    course = Course(lines)
    assert course.next_record(3) == (7, 4)
    assert course.went_back(3, 7) == 1
    assert course.highest_before(3) == 3
    assert course.next_record(7) is None
    assert [shown_step.attempt for shown_step in course.steps.values()] == [1, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("mine", "theirs", "tolerance", "other"),
    [
        ((0.5,), (0.5,), 0.0, False),
        ((0.5,), (0.5000000001,), 0.0, True),
        ((0.5,), (0.5000000001,), 1e-9, False),
        ((1000.0,), (1001.0,), 1e-2, False),
        ((math.nan,), (math.nan,), 0.0, False),
        ((math.nan,), (0.5,), 1.0, True),
        ((0.5, 0.7), (0.5,), 0.0, True),  # one rank printed another loss
        ((0.5,), (0.5, 0.7), 0.0, True),
        ((-0.0,), (0.0,), 0.0, True),
    ],
)
def test_losses_are_equal_unless_a_tolerance_is_given(
    mine: tuple[float, ...], theirs: tuple[float, ...], tolerance: float, other: bool
) -> None:
    assert differs(mine, theirs, tolerance) is other


# -- how a fault was felt --------------------------------------------------------------------------

SECOND = 1_000_000_000


def course(*shown: tuple[float, int]) -> Course:
    """Return a course with steps shown at these seconds, after ten steps of a second each."""
    usual = [(float(step), step) for step in range(10)]
    return Course(
        [CommandLogLine(int(at_s * SECOND), "node0", step, None) for at_s, step in (*usual, *shown)]
    )


@pytest.mark.parametrize(
    ("after", "felt"),
    [
        ([(10.0, 10), (11.0, 11), (12.0, 12)], None),
        ([], None),
        ([(10.0, 10)], None),  # a step in flight, and then no more
        ([(16.0, 10)], Felt(9, None, 6.7, (16 * SECOND, 10))),
        ([(10.0, 10), (20.0, 11)], Felt(10, None, 10.0, (20 * SECOND, 11))),  # a step was in flight
        ([(12.0, 7), (13.0, 8), (14.0, 9), (15.0, 10)], Felt(9, 7, 5.7, (15 * SECOND, 10))),
        (
            [(10.0, 10), (11.0, 11), (12.0, 12), (13.0, 13), (14.0, 12), (15.0, 13), (16.0, 14)],
            Felt(13, 12, 3.0, (16 * SECOND, 14)),
        ),
        (
            [(10.0, 10), (12.0, 7)],
            Felt(10, 7, 0.0, None),
        ),  # the training went back, and never came further
        (
            [*((10.0 + step, 10 + step) for step in range(10)), (40.0, 20)],
            None,
        ),  # a long pause after the fault
        (
            [(10.0, 10), (13.5, 11), (14.0, 12), (30.0, 9), (31.0, 12), (33.0, 13)],
            Felt(12, 9, 19.0, (33 * SECOND, 13)),
        ),  # a busy machine made a short pause before the training went back
    ],
)
def test_a_recovery_begins_where_the_fault_was_felt(
    after: list[tuple[float, int]], felt: Felt | None
) -> None:
    assert look(course(*after), int(9.3 * SECOND), math.inf) == felt


def test_a_pause_may_begin_when_the_struck_process_has_ended() -> None:
    """The processes of a deleted pod live for a second, and the log goes on until then."""
    log = course(*((10.0 + step, 10 + step) for step in range(6)), (40.0, 16))
    assert look(log, int(9.3 * SECOND), math.inf) is None
    assert look(log, int(9.3 * SECOND), math.inf, settle_s=3.0) == Felt(
        15, None, 25.0, (40 * SECOND, 16)
    )


def test_a_line_that_a_rank_wrote_before_it_was_struck_is_no_recovery() -> None:
    """Another rank has shown the step first, and both show it again later."""
    before = [(step + rank / 10, step) for step in range(10) for rank in range(2)]
    again = [(4.0 + step + rank / 10, step) for step in range(8, 12) for rank in range(2)]
    lines = [
        CommandLogLine(int(at_s * SECOND), "node0", step, None)
        for at_s, step in (*before, (10.0, 10), *again)
    ]
    log = Course(lines, Usual(dict.fromkeys(range(12), 2)))
    felt = look(log, int(9.05 * SECOND), math.inf)  # before the line of the other rank
    assert felt == Felt(10, 8, 5.0, (15 * SECOND, 11))


def test_what_another_fault_did_is_not_the_first_ones() -> None:
    log = course((10.0, 10), (11.0, 11), (12.0, 12), (13.0, 8), (14.0, 9), (20.0, 13))
    assert look(log, int(9.3 * SECOND), 11.5 * SECOND) is None
    felt = look(log, int(12.5 * SECOND), math.inf)
    assert felt is not None
    assert felt.back == 8
    assert usual_step_s(log, 9.3 * SECOND) == 1.0
    assert usual_step_s(course(), 0) == 1.0
    assert usual_step_s(Course([]), 0) == 0.0
