"""Standstill of a whole machine, which does not count for the age of a phase."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from chaoskit.agent.standstill import STANDSTILL_INTERVALS, STANDSTILL_NS, Standstill

INTERVAL_MS = 50.0
MS = 1_000_000


def test_readings_in_time_show_no_standstill() -> None:
    standstill = Standstill(INTERVAL_MS)
    assert [standstill.read_ns(10 * MS, 50 * number * MS) for number in range(1, 100)] == [0] * 99


def test_a_pause_of_the_reader_counts_for_the_phase_that_it_interrupts() -> None:
    standstill = Standstill(INTERVAL_MS)
    standstill.read_ns(10 * MS, 50 * MS)
    assert standstill.read_ns(10 * MS, 60_050 * MS) == 60_000 * MS
    assert standstill.read_ns(10 * MS, 60_100 * MS) == 60_000 * MS, "it counts once"
    assert standstill.read_ns(10 * MS, 90_100 * MS) == 90_000 * MS, "and so does another one"
    assert standstill.read_ns(90_110 * MS, 90_150 * MS) == 0, "the next phase was not interrupted"


def test_only_the_part_of_a_pause_after_the_begin_of_a_phase_counts() -> None:
    """The phase began after the last reading, and before the pause."""
    standstill = Standstill(INTERVAL_MS)
    standstill.read_ns(10 * MS, 50 * MS)
    assert standstill.read_ns(70 * MS, 60_050 * MS) == 59_980 * MS


def test_an_agent_that_reads_seldom_does_not_stand_still() -> None:
    """Rare readings are no standstill; otherwise a hang would never be found on that node."""
    interval_ms = 3000.0
    standstill = Standstill(interval_ms)
    late_ns = int(STANDSTILL_INTERVALS * interval_ms * MS)
    assert standstill.read_ns(MS, MS) == 0
    assert standstill.read_ns(MS, MS + late_ns) == 0
    assert standstill.read_ns(MS, 2 * MS + 2 * late_ns) > 0


@settings(deadline=None, database=None)
@given(gaps_ms=st.lists(st.integers(1, 5000), min_size=2, max_size=30))
def test_no_more_than_the_age_of_the_phase_counts(gaps_ms: list[int]) -> None:
    standstill, since_ns, now_ns, expected_ns = Standstill(INTERVAL_MS), MS, MS, 0
    standstill.read_ns(since_ns, now_ns)
    for gap_ms in gaps_ms:
        now_ns += gap_ms * MS
        expected_ns += gap_ms * MS if gap_ms * MS > STANDSTILL_NS else 0
        assert standstill.read_ns(since_ns, now_ns) == expected_ns <= now_ns - since_ns
