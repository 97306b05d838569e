"""Loss of silent nodes, and never because the coordinator itself did not listen."""

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
    """Play beats and ticks in the order of time, a beat before a tick of the same moment.

    Return when each node was lost.
    """
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
    """The lease has run out within as many intervals after the moment at which the node fell
    silent.
    """
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
    """A node has one lease after its last beat; it is named by the first tick after that,
    and once.
    """
    beats = {"a": every(INTERVAL_S, 0, 3), "b": every(INTERVAL_S, 0, 1)}
    lost = run(Leases(INTERVAL_S, BEATS), beats, every(TICK_S, 0, 3))
    assert list(lost) == ["b"]
    assert 1 + LEASE_S < lost["b"] <= 1 + LEASE_S + 2 * TICK_S


def test_a_beat_within_the_lease_keeps_a_node() -> None:
    """Reports may be late by up to the whole lease, any number of times."""
    beats = {"a": every(LEASE_S - 0.001, 0, 6)}
    assert run(Leases(INTERVAL_S, BEATS), beats, every(TICK_S, 0, 6)) == {}
    beats = {"a": every(LEASE_S + 0.001, 0, 6)}
    assert run(Leases(INTERVAL_S, BEATS), beats, every(0.0001, 0, 6))


def test_only_nodes_that_were_heard_are_watched() -> None:
    """A node is expected after its first beat, not any more once dropped, and again after another
    beat.
    """
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
    """Nodes with unread beats are not lost if the coordinator had no CPU for a while."""
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
    """Deafness extends leases by its own length: a node that was dead before is lost soon
    after it.
    """
    leases = Leases(INTERVAL_S, BEATS)
    run(leases, {"a": [0.99]}, every(TICK_S, 0, 1))
    lost = run(leases, {}, every(TICK_S, 11, 13))
    assert 11 < lost["a"] <= 11 + LEASE_S + TICK_S


def test_a_node_that_spoke_after_the_deafness_gets_no_more_than_one_lease() -> None:
    """A beat read on waking up starts an ordinary lease, for any length of the deafness before."""
    leases = Leases(INTERVAL_S, BEATS)
    run(leases, {"a": every(INTERVAL_S, 0, 1)}, every(TICK_S, 0, 1))
    wake_s = 11.0
    lost = run(leases, {"a": [wake_s - 0.001]}, every(TICK_S, wake_s, wake_s + 2))
    assert wake_s + LEASE_S - 0.001 < lost["a"] <= wake_s + LEASE_S + 2 * TICK_S


def test_silence_before_the_deafness_still_counts() -> None:
    """A lease that had nearly run out when the coordinator fell deaf is not a whole one
    afterwards.
    """
    leases = Leases(INTERVAL_S, BEATS)
    leases.beat("a", 0)
    assert leases.expired(LEASE_S - 0.01) == []
    lost = run(leases, {}, every(0.001, 5 + LEASE_S - 0.01, 6))
    assert lost["a"] < 5 + LEASE_S + 0.1


def test_a_tick_that_is_only_a_little_late_is_no_deafness() -> None:
    """Ticks a whole interval apart extend no lease: a silent node is lost after its lease."""
    lost = run(Leases(INTERVAL_S, BEATS), {"a": [0.0]}, every(INTERVAL_S, 0, 1))
    assert lost["a"] <= LEASE_S + 2 * INTERVAL_S


def test_a_node_can_be_given_more_time() -> None:
    """A node that could not report, through no fault of its own, gets that time and keeps it
    through deafness.
    """
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


# -- nodes with kernels that acknowledge messages --------------------------------------------------

SLOW_S = 1.0
ANSWER_S = 0.042  # a delayed acknowledgement


class Kernels:
    """Kernels that acknowledge messages to their nodes, up to a time; the agents are silent."""

    def __init__(self, leases: Leases, live_until_s: float = math.inf) -> None:
        self.lost: dict[str, float] = {}
        self.asked_s: list[float] = []
        self._leases, self._live_until_s = leases, live_until_s
        self._owed: list[tuple[float, str]] = []

    def run(self, ticks: list[float]) -> Kernels:
        for at_s in ticks:
            answered = [question for question in self._owed if question[0] <= at_s]
            self._owed = [question for question in self._owed if question not in answered]
            self._leases.acknowledge(
                [node for answer_s, node in answered if answer_s <= self._live_until_s]
            )
            self.lost |= dict.fromkeys(self._leases.expired(at_s), at_s)
            questioned = self._leases.ask(at_s)
            self._owed += [(at_s + ANSWER_S, node) for node in questioned]
            self.asked_s += [at_s] * len(questioned)
        return self


def slow_leases(node: str = "a", heard_s: float = 0.0) -> Leases:
    leases = Leases(INTERVAL_S, BEATS, SLOW_S)
    leases.beat(node, heard_s)
    return leases


def test_a_node_whose_kernel_acknowledges_is_kept_for_longer() -> None:
    """The node is lost when its agent is silent for the longer limit.

    The first question is asked when a report is late.
    """
    kernels = Kernels(slow_leases()).run(every(TICK_S, 0, 2))
    assert SLOW_S < kernels.lost["a"] <= SLOW_S + 2 * TICK_S
    asked_s = kernels.asked_s
    assert INTERVAL_S <= asked_s[0] <= INTERVAL_S + TICK_S
    assert all(later - sooner >= INTERVAL_S - 1e-9 for sooner, later in itertools.pairwise(asked_s))
    assert asked_s[-1] <= kernels.lost["a"]


def test_a_node_whose_kernel_is_silent_is_lost_as_fast_as_without_a_question() -> None:
    kernels = Kernels(slow_leases(), live_until_s=0.0).run(every(TICK_S, 0, 2))
    assert kernels.asked_s
    assert kernels.lost == run(Leases(INTERVAL_S, BEATS), {"a": [0.0]}, every(TICK_S, 0, 2))


def test_a_slow_node_that_is_cut_off_is_lost_in_one_lease() -> None:
    """An acknowledgement of its kernel counts at the time of the question."""
    kernels = Kernels(slow_leases(), live_until_s=0.5).run(every(TICK_S, 0, 2))
    assert 0.5 < kernels.lost["a"] < 0.5 + LEASE_S + TICK_S


def test_slow_nodes_are_told_from_others() -> None:
    """A node is slow between the end of its lease and its next report."""
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
    """An acknowledgement before a report says nothing about the silence after it; neither does an
    unknown node's kernel.
    """
    leases = slow_leases()
    assert leases.ask(0.06) == ["a"]
    leases.beat("a", 0.07)
    leases.acknowledge(["a", "never heard"])
    assert leases.expired(0.07 + LEASE_S + 0.001) == ["a"]


def test_the_longer_limit_is_no_shorter_than_the_lease() -> None:
    """The kernel is not asked if the lease is longer: its answer would change nothing."""
    leases = Leases(1.0, 4, SLOW_S)
    assert leases.slow_s == leases.lease_s
    leases.beat("a", 0.0)
    kernels = Kernels(leases).run(every(0.1, 0, 5))
    assert kernels.asked_s == []
    assert leases.lease_s < kernels.lost["a"] < leases.lease_s + 0.2


def test_deafness_of_the_coordinator_costs_no_slow_node_its_time() -> None:
    """Questions and acknowledgements before the deafness keep their age."""
    kernels = Kernels(slow_leases()).run([*every(TICK_S, 0, 0.4), *every(TICK_S, 5.4, 8)])
    assert 5.9 < kernels.lost["a"] < 6.1


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
    """A node keeps its lease if its beats are read on waking up, just before or after, for any
    ticks.
    """
    ticks, beats = [0.0], [0.0]
    for pause_s in pauses_s:
        ticks.append(ticks[-1] + pause_s)
    for number in range(10**6):
        if beats[-1] > ticks[-1]:
            break
        beats.append(beats[-1] + gaps_s[number % len(gaps_s)])
    read_s = [
        next((at_s for at_s in ticks if at_s >= beat_s), beat_s) + late_s for beat_s in beats
    ]  # read when awake
    assert run(Leases(INTERVAL_S, BEATS), {"a": read_s}, ticks) == {}


@settings(max_examples=examples(200), deadline=None, database=None)
@given(
    st.lists(st.one_of(st.floats(0.001, 0.02), st.floats(0.02, 5.0)), min_size=1, max_size=40),
    st.data(),
)
def test_a_dead_node_is_always_lost(pauses_s: list[float], data: st.DataObject) -> None:
    """A dead node is lost within a lease of ordinary ticks, whatever the ticks were before."""
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
