"""Which nodes are called lost: the silent ones, and never because the coordinator itself did not listen."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from chaoskit.wire.lease import REPORT_SHARE, Leases

INTERVAL_S = 0.05
BEATS = 3
LEASE_S = Leases(INTERVAL_S, BEATS).lease_s
TICK_S = 0.02


def run(leases: Leases, beats: dict[str, list[float]], ticks: list[float]) -> dict[str, float]:
    """Play beats and ticks in the order of time, a beat before a tick of the same moment; when each node was lost."""
    events = [(at_s, 0, node) for node, times in beats.items() for at_s in times] + [
        (at_s, 1, "") for at_s in ticks
    ]
    lost: dict[str, float] = {}
    for at_s, is_tick, node in sorted(events):
        if is_tick:
            lost |= dict.fromkeys(leases.expired(at_s), at_s)
        else:
            leases.beat(node, at_s)
    return lost


def every(step_s: float, start_s: float, stop_s: float) -> list[float]:
    return [start_s + number * step_s for number in range(int((stop_s - start_s) / step_s) + 1)]


def test_as_many_reports_are_missing_as_a_lease_has_beats() -> None:
    """And it has run out within as many intervals of the moment at which the node fell silent."""
    assert BEATS * INTERVAL_S * REPORT_SHARE < LEASE_S < BEATS * INTERVAL_S


def test_it_is_known_when_the_next_lease_runs_out() -> None:
    leases = Leases(INTERVAL_S, BEATS)
    assert leases.next_look_s() == math.inf
    leases.beat("a", 1.0)
    leases.beat("b", 1.01)
    first_s = leases.next_look_s()
    assert leases.expired(first_s - 1e-6) == []
    assert leases.expired(first_s + 1e-6) == ["a"]
    assert leases.next_look_s() > first_s


def test_a_silent_node_is_lost_and_the_others_are_not() -> None:
    """After its last beat a node has one lease; it is named by the first tick after that, and once."""
    beats = {"a": every(INTERVAL_S, 0, 3), "b": every(INTERVAL_S, 0, 1)}
    lost = run(Leases(INTERVAL_S, BEATS), beats, every(TICK_S, 0, 3))
    assert list(lost) == ["b"]
    assert 1 + LEASE_S < lost["b"] <= 1 + LEASE_S + 2 * TICK_S


def test_a_beat_within_the_lease_keeps_a_node() -> None:
    """Reports may come late, up to the whole lease, as often as they like."""
    beats = {"a": every(LEASE_S - 0.001, 0, 6)}
    assert run(Leases(INTERVAL_S, BEATS), beats, every(TICK_S, 0, 6)) == {}
    beats = {"a": every(LEASE_S + 0.001, 0, 6)}
    assert run(Leases(INTERVAL_S, BEATS), beats, every(0.0001, 0, 6))


def test_only_nodes_that_were_heard_are_watched() -> None:
    """A node is expected from its first beat on, not any more once dropped, and again after another beat."""
    leases = Leases(INTERVAL_S, BEATS)
    assert run(leases, {}, every(TICK_S, 0, 1)) == {}
    leases.beat("a", 1)
    leases.drop("a")
    leases.drop("never heard")
    assert run(leases, {}, every(TICK_S, 1, 2)) == {}
    leases.beat("a", 2)
    assert list(run(leases, {}, every(TICK_S, 2, 3))) == ["a"]


def test_a_lost_node_is_named_once() -> None:
    """Losing it ends the watch; a node that comes back is watched anew."""
    leases = Leases(INTERVAL_S, BEATS)
    ticks = every(TICK_S, 0, 1)
    leases.beat("a", 0)
    named = [node for at_s in ticks for node in leases.expired(at_s)]
    assert named == ["a"]


def test_deafness_of_the_coordinator_costs_nobody_the_lease() -> None:
    """When the coordinator had no CPU for a while, the nodes whose beats it could not read are not lost."""
    for deaf_s in (LEASE_S, 1, 10, 1000):
        leases = Leases(INTERVAL_S, BEATS)
        assert run(leases, {"a": every(INTERVAL_S, 0, 1)}, every(TICK_S, 0, 1)) == {}
        wake_s = 1 + deaf_s
        assert leases.expired(wake_s) == []
        assert (
            run(
                leases,
                {"a": every(INTERVAL_S, wake_s, wake_s + 1)},
                every(TICK_S, wake_s, wake_s + 1),
            )
            == {}
        )


def test_a_node_that_stays_silent_after_the_deafness_is_lost_in_one_lease() -> None:
    """Deafness extends leases by its own length: a node that was dead all along is lost soon after it."""
    leases = Leases(INTERVAL_S, BEATS)
    run(leases, {"a": [0.99]}, every(TICK_S, 0, 1))
    lost = run(leases, {}, every(TICK_S, 11, 13))
    assert 11 < lost["a"] <= 11 + LEASE_S + TICK_S


def test_a_node_that_spoke_after_the_deafness_gets_no_more_than_one_lease() -> None:
    """A beat read on waking up starts an ordinary lease, however long the coordinator was deaf before."""
    leases = Leases(INTERVAL_S, BEATS)
    run(leases, {"a": every(INTERVAL_S, 0, 1)}, every(TICK_S, 0, 1))
    wake_s = 11.0
    lost = run(leases, {"a": [wake_s - 0.001]}, every(TICK_S, wake_s, wake_s + 2))
    assert wake_s + LEASE_S - 0.001 < lost["a"] <= wake_s + LEASE_S + 2 * TICK_S


def test_silence_before_the_deafness_still_counts() -> None:
    """A lease that had nearly run out when the coordinator fell deaf is not a whole one afterwards."""
    leases = Leases(INTERVAL_S, BEATS)
    leases.beat("a", 0)
    assert leases.expired(LEASE_S - 0.01) == []
    lost = run(leases, {}, every(0.001, 5 + LEASE_S - 0.01, 6))
    assert lost["a"] < 5 + LEASE_S + 0.1


def test_a_tick_that_is_only_a_little_late_is_no_deafness() -> None:
    """Ticks a whole interval apart extend nothing: a silent node is lost after its lease all the same."""
    lost = run(Leases(INTERVAL_S, BEATS), {"a": [0.0]}, every(INTERVAL_S, 0, 1))
    assert lost["a"] <= LEASE_S + 2 * INTERVAL_S


def test_a_node_can_be_given_more_time() -> None:
    """A node that could not report, through no fault of its own, gets that time and keeps it through deafness."""
    leases = Leases(INTERVAL_S, BEATS)
    leases.beat("a", 0)
    leases.extend("a", 2)
    leases.extend("never heard", 2)
    lost = run(leases, {}, every(TICK_S, 0, 3))
    assert 2 + LEASE_S - 1e-6 < lost["a"] <= 2 + LEASE_S + 2 * TICK_S
    leases.beat("a", 10)
    leases.extend("a", 5)
    lost = run(leases, {}, [*every(TICK_S, 10, 11), *every(TICK_S, 12, 20)])
    assert lost["a"] > 15 + LEASE_S - 1e-6


# -- nodes whose kernels acknowledge what they are sent -----------------------------------------------------------

SLOW_S = 1.0
ANSWER_S = 0.042  # a delayed acknowledgement


class Kernels:
    """Acknowledge what their nodes are sent, up to a time; the agents say nothing."""

    def __init__(self, leases: Leases, live_until_s: float = math.inf) -> None:
        self.lost: dict[str, float] = {}
        self.asked_s: list[float] = []
        self._leases, self._live_until_s = leases, live_until_s
        self._owed: list[tuple[float, str]] = []

    def run(self, ticks: list[float]) -> Kernels:
        for at_s in ticks:
            answered = [one for one in self._owed if one[0] <= at_s]
            self._owed = [one for one in self._owed if one not in answered]
            self._leases.acknowledge(
                [node for answer_s, node in answered if answer_s <= self._live_until_s]
            )
            self.lost |= dict.fromkeys(self._leases.expired(at_s), at_s)
            asked = self._leases.ask(at_s)
            self._owed += [(at_s + ANSWER_S, node) for node in asked]
            self.asked_s += [at_s] * len(asked)
        return self


def slow_leases(node: str = "a", heard_s: float = 0.0) -> Leases:
    leases = Leases(INTERVAL_S, BEATS, SLOW_S)
    leases.beat(node, heard_s)
    return leases


def test_a_node_whose_kernel_acknowledges_is_kept_for_longer() -> None:
    """It is lost when nothing came from its agent for the longer limit; the first question is asked when it is late."""
    found = Kernels(slow_leases()).run(every(TICK_S, 0, 2))
    assert SLOW_S < found.lost["a"] <= SLOW_S + 2 * TICK_S
    asked_s = found.asked_s
    assert INTERVAL_S <= asked_s[0] <= INTERVAL_S + TICK_S
    assert all(later - sooner >= INTERVAL_S - 1e-9 for sooner, later in itertools.pairwise(asked_s))
    assert asked_s[-1] <= found.lost["a"]


def test_a_node_whose_kernel_is_silent_is_lost_as_fast_as_without_a_question() -> None:
    found = Kernels(slow_leases(), live_until_s=0.0).run(every(TICK_S, 0, 2))
    assert found.asked_s
    assert found.lost == run(Leases(INTERVAL_S, BEATS), {"a": [0.0]}, every(TICK_S, 0, 2))


def test_a_slow_node_that_is_cut_off_is_lost_in_one_lease() -> None:
    """What its kernel acknowledged counts from when it was asked."""
    found = Kernels(slow_leases(), live_until_s=0.5).run(every(TICK_S, 0, 2))
    assert 0.5 < found.lost["a"] < 0.5 + LEASE_S + TICK_S


def test_slow_nodes_are_told_from_others() -> None:
    """A node is slow from the end of its lease to its next report."""
    leases = slow_leases()
    kernels = Kernels(leases).run(every(TICK_S, 0, LEASE_S))
    assert leases.slow == frozenset()
    kernels.run(every(TICK_S, LEASE_S, 0.8))
    assert leases.slow == {"a"}
    leases.beat("a", 0.8)
    assert leases.slow == frozenset()


@pytest.mark.parametrize("live_until_s", [math.inf, 0.6])
def test_a_node_that_is_lost_was_slow_if_its_kernel_still_acknowledged(live_until_s: float) -> None:
    leases = slow_leases()
    kernels = Kernels(leases, live_until_s)
    for at_s in every(TICK_S, 0, 2):
        if kernels.run([at_s]).lost:
            break
    assert leases.slow == ({"a"} if live_until_s > SLOW_S else set())


def test_an_old_answer_keeps_no_node() -> None:
    """What was acknowledged before a report says nothing of the silence after it; nor does an unknown node's kernel."""
    leases = slow_leases()
    assert leases.ask(0.06) == ["a"]
    leases.beat("a", 0.07)
    leases.acknowledge(["a", "never heard"])
    assert leases.expired(0.07 + LEASE_S + 0.001) == ["a"]


def test_the_longer_limit_is_no_shorter_than_the_lease() -> None:
    """Where a lease is longer no kernel is asked: its answer would change nothing."""
    leases = Leases(1.0, 4, SLOW_S)
    assert leases.slow_s == leases.lease_s
    leases.beat("a", 0.0)
    found = Kernels(leases).run(every(0.1, 0, 5))
    assert found.asked_s == []
    assert leases.lease_s < found.lost["a"] < leases.lease_s + 0.2


def test_deafness_of_the_coordinator_costs_no_slow_node_its_time() -> None:
    """What was asked and acknowledged before the deafness is as old after it as it was."""
    found = Kernels(slow_leases()).run([*every(TICK_S, 0, 0.4), *every(TICK_S, 5.4, 8)])
    assert 5.9 < found.lost["a"] < 6.1


def test_it_is_known_when_the_next_question_is_due() -> None:
    leases = slow_leases(heard_s=1.0)
    due_s = leases.next_look_s()
    assert due_s == 1.0 + INTERVAL_S
    assert leases.ask(due_s - 1e-6) == []
    assert leases.ask(due_s) == ["a"]
    again_s = leases.next_look_s()
    assert again_s == due_s + INTERVAL_S
    assert leases.ask(again_s) == ["a"]
    assert leases.next_look_s() == 1.0 + leases.lease_s


@settings(max_examples=examples(200), deadline=None, database=None)
@given(
    st.lists(st.floats(0.001, INTERVAL_S), min_size=1, max_size=60),
    st.lists(st.one_of(st.floats(0.001, 0.02), st.floats(0.02, 5.0)), min_size=1, max_size=60),
    st.sampled_from([0.0, 1e-6]),
)
def test_a_node_that_beats_is_never_lost(
    gaps_s: list[float], pauses_s: list[float], late_s: float
) -> None:
    """However the ticks fall, a node whose beats are read on waking up, just before or after, keeps its lease."""
    ticks, beats = [0.0], [0.0]
    for pause_s in pauses_s:
        ticks.append(ticks[-1] + pause_s)
    for number in range(10**6):
        if beats[-1] > ticks[-1]:
            break
        beats.append(beats[-1] + gaps_s[number % len(gaps_s)])
    heard = [
        next((at_s for at_s in ticks if at_s >= beat_s), beat_s) + late_s for beat_s in beats
    ]  # read when awake
    assert run(Leases(INTERVAL_S, BEATS), {"a": heard}, ticks) == {}


@settings(max_examples=examples(200), deadline=None, database=None)
@given(
    st.lists(st.one_of(st.floats(0.001, 0.02), st.floats(0.02, 5.0)), min_size=1, max_size=40),
    st.data(),
)
def test_a_dead_node_is_always_lost(pauses_s: list[float], data: st.DataObject) -> None:
    """However the ticks fall before, a node that died is lost within a lease of ordinary ticks."""
    leases = Leases(INTERVAL_S, BEATS)
    now_s = 0.0
    for pause_s in pauses_s:
        now_s += pause_s
        if data.draw(st.booleans()):
            leases.beat("a", now_s)
        leases.expired(now_s)
    leases.beat("a", now_s)
    lost = run(leases, {}, every(TICK_S, now_s + TICK_S, now_s + 1))
    assert lost["a"] <= now_s + LEASE_S + 2 * TICK_S
