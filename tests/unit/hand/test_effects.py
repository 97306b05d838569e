"""Tests of the hand's clockwork: times to live, silence, and duty cycles, for any times."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chaoskit.hand.effects import EffectSchedule, Silence
from chaoskit.hand.processes.duty_cycle import DutyCycle

TIMES_S = st.floats(0, 1000)
ACTS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "end", "wait"]),
        st.integers(0, 3),
        st.floats(0.001, 100),
    ),
    max_size=30,
)


@given(ACTS)
def test_each_effect_ends_at_its_time_and_not_before(
    acts: list[tuple[str, int, float]],
) -> None:
    """The model keeps one time for each effect."""
    schedule, ends_s, now_s = EffectSchedule(), dict[int, float](), 50.0
    for act, number, seconds in acts:
        if act == "begin":
            schedule.begin(number, seconds, now_s)
            ends_s[number] = now_s + seconds
        elif act == "end":
            schedule.end(number)
            ends_s.pop(number, None)
        else:
            now_s += seconds
        assert schedule.next_s() == min(ends_s.values(), default=math.inf)
        due = schedule.due(now_s)
        assert set(due) == {number for number, end_s in ends_s.items() if end_s <= now_s}
        assert [ends_s[number] for number in due] == sorted(ends_s[number] for number in due)
        for other in range(4):
            assert schedule.left_s(other, now_s) == max(0.0, ends_s.get(other, now_s) - now_s)


@given(st.lists(st.floats(0.01, 5), max_size=20), st.floats(0.1, 10))
def test_a_client_is_dead_after_a_time_without_a_line_only(
    pauses_s: list[float], limit_s: float
) -> None:
    silence, now_s = Silence(limit_s, 3.0), 3.0
    for pause_s in pauses_s:
        assert silence.is_over(now_s + pause_s) == (now_s + pause_s >= now_s + limit_s)
        now_s += pause_s
        silence.hear(now_s)
        assert not silence.is_over(now_s)
        assert silence.end_s() == now_s + limit_s


@example(0.5, 0.02, [0.004] * 400)
@given(
    st.floats(0.05, 0.95),
    st.floats(0.02, 2),
    st.lists(st.floats(0, 0.004), min_size=400, max_size=400),
)
def test_the_measured_share_is_the_wanted_one_though_acts_come_late(
    share: float, period_s: float, delays_s: list[float]
) -> None:
    """A delay of up to 4 ms at each act makes up for itself in the next stops."""
    cycle, now_s = DutyCycle(share, period_s, 7.0), 7.0
    for delay_s in delays_s:
        now_s = max(now_s, cycle.next_s) + min(delay_s, period_s * min(share, 1 - share) / 4)
        if cycle.is_stopped:
            cycle.let_go(now_s)
        else:
            cycle.stop(now_s)
    assert cycle.running_share(now_s) == pytest.approx(share, abs=0.03)
    assert cycle.stop_count == 200


@given(st.floats(0.01, 0.99), st.floats(0.01, 10), st.lists(st.floats(0, 30), max_size=40))
def test_a_process_always_runs_for_half_of_its_share_between_two_stops(
    share: float, period_s: float, delays_s: list[float]
) -> None:
    """This holds however late the acts come."""
    cycle, now_s, ran_since_s = DutyCycle(share, period_s, 0.0), 0.0, -math.inf
    for delay_s in delays_s:
        now_s = max(now_s, cycle.next_s) + delay_s
        if cycle.is_stopped:
            cycle.let_go(now_s)
            ran_since_s = now_s
        else:
            assert now_s - ran_since_s >= share * period_s / 2 - 1e-9
            cycle.stop(now_s)
            assert cycle.next_s - now_s <= period_s * (1 - share / 2) + 1e-9
        assert cycle.next_s >= now_s
        assert 0 <= cycle.running_share(now_s) <= 1
