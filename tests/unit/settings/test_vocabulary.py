"""The shared names: verdicts and how they merge, phases and how they are used."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaoskit import vocabulary
from chaoskit.vocabulary import EXIT_BAD_INPUT, Event, Phase, Verdict

ORDER = [Verdict.PASSED, Verdict.UNKNOWN, Verdict.FAILED, Verdict.ERROR]
verdicts = st.lists(st.sampled_from(Verdict), max_size=6)


@pytest.mark.parametrize("better", range(4))
@pytest.mark.parametrize("worse", range(4))
def test_the_worse_of_two_verdicts_wins(better: int, worse: int) -> None:
    """Error beats failed beats unknown beats passed, in either order."""
    expected = ORDER[max(better, worse)]
    assert Verdict.worst([ORDER[better], ORDER[worse]]) is expected


@given(verdicts, verdicts)
def test_verdicts_can_be_merged_in_any_grouping(
    first: list[Verdict], second: list[Verdict]
) -> None:
    """Order and grouping do not matter, and only passed verdicts give passed."""
    merged = Verdict.worst(first + second)
    assert merged is Verdict.worst(second + first)
    if first and second:
        assert merged is Verdict.worst([Verdict.worst(first), Verdict.worst(second)])
    assert (merged is Verdict.PASSED) == (set(first + second) == {Verdict.PASSED})


def test_no_verdict_is_unknown() -> None:
    """Merging no verdicts gives unknown, as nothing is proved."""
    assert Verdict.worst([]) is Verdict.UNKNOWN


def test_exit_codes_tell_verdicts_apart_from_each_other_and_from_pytest() -> None:
    """Every verdict has its own status; none is that of bad input, or of an internal failure of
    pytest.
    """
    codes = {verdict: verdict.exit_code for verdict in Verdict}
    assert len(set(codes.values())) == len(Verdict)
    assert codes[Verdict.PASSED] == pytest.ExitCode.OK
    assert codes[Verdict.FAILED] == pytest.ExitCode.TESTS_FAILED
    assert EXIT_BAD_INPUT == 2
    assert not {EXIT_BAD_INPUT, 3, 4, 5} & set(codes.values())
    codes_of_pytest = {
        pytest.ExitCode.INTERNAL_ERROR,
        pytest.ExitCode.USAGE_ERROR,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    }
    assert codes_of_pytest == {3, 4, 5}
    assert all(0 <= code < 126 for code in codes.values()), "126 and more are the shell's"


def test_phases_keep_their_numbers_and_names() -> None:
    """Phases cross processes as numbers and are named in journals and triggers: neither may
    change.
    """
    assert [phase.label for phase in Phase] == [
        "start",
        "outside",
        "forward",
        "backward",
        "reduce",
        "optimizer",
        "regroup",
        "restore",
        "long",
        "done",
        "untimed",
    ]
    assert [int(phase) for phase in Phase] == list(range(11))
    assert {phase.label for phase in Phase} >= set(vocabulary.TRIGGER_PHASES)


def test_a_phase_that_waits_is_never_timed() -> None:
    """A rank that waits for others cannot be the one that hangs, so no limit of a step applies to
    it.
    """
    phases = [*vocabulary.WAITING_PHASES, *vocabulary.TIMED_PHASES, Phase.OUTSIDE]
    assert sorted(phases) == sorted(Phase), "each is of one kind"


def test_names_of_events_are_distinct() -> None:
    """Every kind of record has its own name."""
    assert len({event.value for event in Event}) == len(Event.__members__)


def test_a_recovery_is_told_in_one_order() -> None:
    """The timeline starts with the detection and ends when the redundancy is back; no phase comes
    twice.
    """
    phases = vocabulary.RECOVERY_PHASES
    assert phases[0] == "detected"
    assert phases[-1] == "redundancy restored"
    assert len(set(phases)) == len(phases)
