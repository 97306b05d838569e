"""Tests of the decisions on uneven work: paces, shares, stragglers, and ranks that are too slow to
stay.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from chaoskit.coordinator.detectors import balance
from chaoskit.coordinator.detectors.balance import (
    LEAST_GAIN,
    PAUSE,
    PAUSE_MAX,
    SUSTAINED,
    SUSTAINED_STARVED,
    Balancer,
    Cost,
)
from chaoskit.coordinator.detectors.pace import WINDOW_S, WINDOW_SAMPLES, Paces, RankPace, Round
from chaoskit.coordinator.detectors.stragglers import (
    NETWORK_SCORE,
    SlowRanks,
    Straggler,
    Stragglers,
    diagnose,
)
from chaoskit.vocabulary import Phase
from chaoskit.wire.messages import Beat, Effort

WORKERS = tuple(f"n{number}.0" for number in range(4))

Speeds = Callable[[int], Mapping[str, float]]


def split(costs: Mapping[str, float], current: Mapping[str, int]) -> dict[str, int]:
    return balance.split({worker: Cost(cost) for worker, cost in costs.items()}, current)


def slowest_s(costs: Mapping[str, float], shares: Mapping[str, int]) -> float:
    return balance.slowest_s({worker: Cost(cost) for worker, cost in costs.items()}, shares)


def even(shard_count: int, world: int = 4) -> dict[str, int]:
    return split(
        dict.fromkeys(WORKERS[:world], 1.0),
        dict(zip(WORKERS, _counts(shard_count, world), strict=False)),
    )


def _counts(shard_count: int, world: int) -> list[int]:
    least, extras = divmod(shard_count, world)
    return [least + (rank < extras) for rank in range(world)]


def paces_of(
    costs: Mapping[str, float], shares: Mapping[str, int], *, exchange_s: float = 0.0
) -> dict[str, RankPace]:
    """Return the paces of ranks that wait for the slowest of them."""
    step_s = slowest_s(costs, shares)
    return {
        worker: RankPace(cost, 0.0, wait_s=step_s - cost * shares[worker] + exchange_s)
        for worker, cost in costs.items()
    }


# -- pace ------------------------------------------------------------------------------------------


class Clockwork:
    """Workers that take steps and beat: the sums that their boards would show."""

    def __init__(self, *workers: str) -> None:
        self.efforts = dict.fromkeys(workers, Effort())
        self.paces = Paces()

    def step(
        self,
        costs_ms: Mapping[str, float],
        *,
        shards: int = 4,
        wait_ms: float = 1.0,
        steps: int = 1,
    ) -> None:
        for worker, cost_ms in costs_ms.items():
            before = self.efforts[worker]
            self.efforts[worker] = Effort(
                before.steps + steps,
                before.shards + shards * steps,
                before.compute_ms + cost_ms * shards * steps,
                before.input_ms,
                before.wait_ms + wait_ms * steps,
            )

    def beat(self, *workers: str) -> None:
        for worker in workers or self.efforts:
            effort = self.efforts[worker]
            self.paces.hear(
                [Beat(worker, 1, 0, effort.steps, Phase.REDUCE, 1.0, 0.0, 0, 0.0, effort=effort)]
            )

    def round(self) -> Round | None:
        return self.paces.round(self.efforts)


def test_a_pace_is_known_when_all_have_taken_enough_steps() -> None:
    clock = Clockwork("a", "b")
    for _ in range(WINDOW_SAMPLES - 1):
        clock.step({"a": 50.0, "b": 100.0})
        clock.beat()
        assert clock.round() is None
    clock.step({"a": 50.0, "b": 100.0})
    clock.beat("a")
    assert clock.round() is None, "b has not said that it took a step"
    clock.beat("b")
    round_ = clock.round()
    assert round_ is not None
    assert (round_.paces["a"].compute_s, round_.paces["b"].compute_s) == pytest.approx((0.05, 0.1))
    assert clock.round() is None, "nothing is new"


def test_short_steps_need_more_samples() -> None:
    """The effect of a scheduler on steps of a millisecond is no pace."""
    clock, beats = Clockwork("a"), 0
    while clock.round() is None:
        clock.step({"a": 1.0}, shards=1, steps=10)
        clock.beat()
        beats += 1
    assert beats * 20e-3 >= WINDOW_S


def test_one_slow_step_does_not_show_and_a_slow_rank_does_after_half_a_window() -> None:
    clock = Clockwork("a")
    for _ in range(WINDOW_SAMPLES):
        clock.step({"a": 50.0})
        clock.beat()
    clock.step({"a": 5000.0})
    clock.beat()
    round_ = clock.round()
    assert round_ is not None
    assert round_.paces["a"].compute_s == pytest.approx(0.05)
    for _ in range(WINDOW_SAMPLES // 2):
        clock.step({"a": 100.0})
        clock.beat()
    round_ = clock.round()
    assert round_ is not None
    assert round_.paces["a"].compute_s == pytest.approx(0.1)


def test_a_lost_beat_loses_nothing_and_a_beat_that_comes_twice_counts_once() -> None:
    clock = Clockwork("a")
    for _ in range(2 * WINDOW_SAMPLES):
        clock.step({"a": 10.0})
        clock.step({"a": 30.0})  # no beat came after the step before
        clock.beat()
        clock.beat()
        round_ = clock.round()
    assert round_ is not None
    assert round_.paces["a"].compute_s == pytest.approx(0.02)


def test_who_is_no_member_is_forgotten() -> None:
    clock = Clockwork("a", "b")
    for _ in range(WINDOW_SAMPLES):
        clock.step({"a": 50.0, "b": 50.0})
        clock.beat()
    assert clock.paces.round(["b"]) is not None
    clock.step({"a": 50.0, "b": 50.0})
    clock.beat()
    assert clock.paces.round(["a", "b"]) is None, "of a there is one sample, of all its steps"


# -- the split -------------------------------------------------------------------------------------


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to give every rank at least one shard."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield tuple(hi - lo for lo, hi in itertools.pairwise((0, *cuts, total)))


COSTS = st.floats(0.01, 10.0, allow_nan=False)


@settings(max_examples=examples(300), deadline=None, database=None)
@given(st.lists(st.builds(Cost, COSTS, st.floats(0.0, 20.0)), min_size=1, max_size=4), st.data())
def test_a_split_is_complete_and_as_good_as_the_best_of_all(
    costs: list[Cost], data: st.DataObject
) -> None:
    world = len(costs)
    current = dict(
        zip(WORKERS, data.draw(st.sampled_from([*compositions(12, world)])), strict=False)
    )
    by_worker = dict(zip(WORKERS, costs, strict=False))
    shares = balance.split(by_worker, current)
    assert sum(shares.values()) == 12
    assert min(shares.values()) >= 1
    best_s = min(
        balance.slowest_s(by_worker, dict(zip(WORKERS, counts, strict=False)))
        for counts in compositions(12, world)
    )
    assert balance.slowest_s(by_worker, shares) == pytest.approx(best_s)


def test_a_split_moves_nothing_without_need() -> None:
    current = {"a": 5, "b": 6, "c": 5}
    assert split({"a": 1.0, "b": 1.0, "c": 1.0}, current) == current
    assert split({"a": 2.0, "b": 1.0, "c": 1.0}, current)["a"] == 3


# -- the balancer ----------------------------------------------------------------------------------


class Run:
    """A balancer over steps of ranks of which the windows follow changes at once."""

    def __init__(self, shard_count: int, world: int = 4, *, exchange_s: float = 0.0) -> None:
        self.balancer, self.shares = Balancer(), even(shard_count, world)
        self.exchange_s = exchange_s
        self.moves: list[tuple[int, dict[str, int]]] = []
        self.steps = 0

    def go_on(self, steps: int, speeds: Speeds) -> Run:
        for _ in range(steps):
            costs = speeds(self.steps)
            proposal = self.balancer.look(
                self.shares, paces_of(costs, self.shares, exchange_s=self.exchange_s)
            )
            self.steps += 1
            if proposal is not None:
                assert sum(proposal.shares.values()) == sum(self.shares.values())
                assert proposal.shares != self.shares
                self.shares = proposal.shares
                self.moves.append((self.steps, proposal.shares))
        return self


def constant(**costs: float) -> Speeds:
    by_worker = {f"{name}.0": cost for name, cost in costs.items()}
    return lambda step: by_worker


EVEN = constant(n0=1.0, n1=1.0, n2=1.0, n3=1.0)
ONE_SLOW = constant(n0=1.0, n1=2.0, n2=1.0, n3=1.0)


@pytest.mark.parametrize("shard_count", [8, 16, 32, 33])
def test_a_rank_at_half_speed_gets_about_half(shard_count: int) -> None:
    run = Run(shard_count).go_on(SUSTAINED, ONE_SLOW)
    assert len(run.moves) == 1
    costs = ONE_SLOW(0)
    best = min(
        slowest_s(costs, dict(zip(WORKERS, counts, strict=True)))
        for counts in compositions(shard_count, 4)
    )
    assert slowest_s(costs, run.shares) == best


def test_when_it_recovers_everybody_gets_as_many_as_before() -> None:
    run = Run(32).go_on(10, ONE_SLOW).go_on(40, EVEN)
    assert run.shares == dict.fromkeys(WORKERS, 8)
    assert len(run.moves) == 2


def test_the_way_back_is_taken_also_where_it_gains_little() -> None:
    """Each of 64 ranks carries an eighth of the shards that the slow one gave away: nearly nothing."""
    workers = [f"n{number}.0" for number in range(64)]
    balancer, shares = Balancer(), dict.fromkeys(workers, 64)
    for cost in [4.0] * 5 + [1.0] * 40:
        costs = dict.fromkeys(workers, 1.0) | {workers[7]: cost}
        proposal = balancer.look(shares, paces_of(costs, shares))
        shares = proposal.shares if proposal else shares
    assert set(shares.values()) == {64}


def test_a_gain_that_the_exchange_outweighs_is_none() -> None:
    assert Run(16, exchange_s=20.0).go_on(50, ONE_SLOW).moves == []


def test_what_a_rank_does_besides_counts_once_a_step() -> None:
    """Rank 0 also writes logs, say: it can compute fewer shards, but not in proportion.

    There is no way to and fro.
    """
    balancer, shares = Balancer(), even(16)
    moves = []
    for _ in range(300):
        paces = dict.fromkeys(WORKERS, RankPace(1.0, 0.0)) | {
            WORKERS[0]: RankPace(1.0, 0.0, other_s=2.0)
        }
        if proposal := balancer.look(shares, paces):
            shares = proposal.shares
            moves.append([*shares.values()])
    assert moves == [[3, 5, 4, 4]]


def test_with_as_many_shards_as_ranks_nothing_moves() -> None:
    assert Run(4).go_on(50, ONE_SLOW).moves == []


def starved(costs: Mapping[str, float], shares: Mapping[str, int]) -> dict[str, RankPace]:
    """All time above one second a shard is time in which other processes had the CPU."""
    return {
        worker: replace(pace, starved_s=costs[worker] - 1.0)
        for worker, pace in paces_of(costs, shares).items()
    }


def test_for_a_lack_of_cpus_shards_are_moved_when_it_lasts() -> None:
    balancer, shares = Balancer(), even(16)
    paces = starved(ONE_SLOW(0), shares)
    proposals = [balancer.look(shares, paces) for _ in range(SUSTAINED_STARVED)]
    assert proposals[:-1] == [None] * (SUSTAINED_STARVED - 1)
    assert proposals[-1] is not None
    assert proposals[-1].shares[WORKERS[1]] == 2


def test_for_a_lack_of_cpus_that_wanders_no_shard_is_moved() -> None:
    balancer, shares = Balancer(), even(16)
    for step in range(1000):
        costs = dict.fromkeys(WORKERS, 1.0) | {WORKERS[step // 20 % 4]: 3.0}
        assert balancer.look(shares, starved(costs, shares)) is None


def test_other_members_begin_anew() -> None:
    balancer, few = Balancer(), even(16, 3)
    for shares in (even(16), few, even(16)):
        costs = {worker: 2.0 if worker == WORKERS[1] else 1.0 for worker in shares}
        for _ in range(SUSTAINED - 1):
            assert balancer.look(shares, paces_of(costs, shares)) is None


def test_what_nobody_has_measured_moves_nothing() -> None:
    assert Run(16).go_on(50, constant(n0=0.0, n1=1.0, n2=1.0, n3=1.0)).moves == []


@settings(max_examples=examples(300), deadline=None, database=None)
@given(st.integers(2, 4), st.integers(4, 40), st.data())
def test_ranks_that_are_alike_are_never_moved_whatever_the_noise_between_them(
    world: int, shard_count: int, data: st.DataObject
) -> None:
    """Alike: less apart than ``LEAST_GAIN`` promises. Not likely: never."""
    cost = st.floats(1.0, 1.0 / (1 - LEAST_GAIN) - 1e-6)
    noise = data.draw(
        st.lists(st.lists(cost, min_size=world, max_size=world), min_size=1, max_size=30)
    )
    run = Run(shard_count, world)
    run.go_on(60, lambda step: dict(zip(WORKERS, noise[step % len(noise)], strict=False)))
    assert run.moves == []


def noisy(
    costs: Mapping[str, float], chance: random.Random, share: float = 0.1
) -> Iterator[Mapping[str, float]]:
    """Return the paces by windows of steps that each take up to ``share`` more or less."""
    windows: dict[str, list[float]] = {worker: [] for worker in costs}
    while True:
        for worker, cost in costs.items():
            windows[worker] = [*windows[worker], cost * (1 + chance.uniform(-share, share))][
                -WINDOW_SAMPLES:
            ]
        yield {worker: sorted(window)[len(window) // 2] for worker, window in windows.items()}


@settings(max_examples=examples(60), deadline=None, database=None)
@given(st.integers(0, 2**32), st.sampled_from([16, 32, 128]))
def test_equal_ranks_with_noise_of_a_tenth_are_left_alone(seed: int, shard_count: int) -> None:
    windows = noisy(EVEN(0), random.Random(seed))
    assert Run(shard_count).go_on(400, lambda step: next(windows)).moves == []


@settings(max_examples=examples(100), deadline=None, database=None)
@given(
    st.integers(0, 2**32),
    st.lists(st.floats(0.3, 3.0), min_size=4, max_size=4),
    st.sampled_from([8, 16, 32, 128]),
)
def test_ranks_of_any_pace_are_balanced_soon_and_then_left_alone(
    seed: int, costs: list[float], shard_count: int
) -> None:
    """Within ten steps of a change the split is as good as noise of a tenth allows, and it does not flap."""
    true = dict(zip(WORKERS, costs, strict=True))
    windows = noisy(true, random.Random(seed))
    run = Run(shard_count).go_on(10, lambda step: next(windows))
    best_s = slowest_s(true, split(true, run.shares))
    assert slowest_s(true, run.shares) <= best_s / (1 - LEAST_GAIN) * 1.1 / 0.9
    run.go_on(500, lambda step: next(windows))
    assert len(run.moves) <= 4, run.moves


def test_a_machine_whose_pace_changes_all_the_time_is_moved_ever_more_seldom() -> None:
    def fickle(step: int) -> Mapping[str, float]:
        return dict.fromkeys(WORKERS, 1.0) | {WORKERS[step // 15 % 4]: 3.0}

    run = Run(16).go_on(5000, fickle)
    assert len(run.moves) <= 20
    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(run.moves)]
    assert gaps[0] >= PAUSE
    assert gaps[-1] >= PAUSE_MAX / 2
    run.go_on(20 * PAUSE_MAX, EVEN)
    moves = len(run.moves)
    run.go_on(SUSTAINED, ONE_SLOW)
    assert len(run.moves) == moves + 1, "after a calm time the first move is as quick as ever"


# -- stragglers ------------------------------------------------------------------------------------

USUAL = RankPace(0.02, 0.002, wait_s=0.01)
SHARES = dict.fromkeys(WORKERS, 4)


def world(**odd: RankPace) -> dict[str, RankPace]:
    return dict.fromkeys(WORKERS, USUAL) | {f"{name}.0": pace for name, pace in odd.items()}


def kinds(stragglers: list[Straggler]) -> list[tuple[str, str]]:
    return [(straggler.worker, straggler.kind) for straggler in stragglers]


def test_compute_input_and_network_are_told_apart() -> None:
    assert diagnose(world(), SHARES) == []
    assert kinds(diagnose(world(n1=RankPace(0.04, 0.002)), SHARES)) == [("n1.0", "compute")]
    assert kinds(diagnose(world(n1=RankPace(0.02, 0.03)), SHARES)) == [("n1.0", "input")]
    assert kinds(diagnose(world(n1=RankPace(0.05, 0.02)), SHARES)) == [("n1.0", "compute")]
    waits = dict.fromkeys(WORKERS, replace(USUAL, wait_s=0.5))
    assert kinds(diagnose(waits, SHARES, 0.05)) == [("", "network")]
    assert diagnose(waits, SHARES) == [], "nobody knows that it was ever faster"
    one_waits = waits | {"n2.0": USUAL}
    assert diagnose(one_waits, SHARES, 0.01) == [], "the others wait for n2, not for the network"


def test_a_cpu_that_others_have_is_told() -> None:
    (straggler,) = diagnose(world(n1=RankPace(0.04, 0.002, starved_s=0.018)), SHARES)
    assert "without a CPU for 18.0 ms" in straggler.detail
    assert straggler.score == pytest.approx(42 / 22)


def test_a_straggler_is_told_once_and_again_when_it_comes_back() -> None:
    stragglers, slow = Stragglers(), world(n1=RankPace(0.04, 0.002))

    def look(paces: dict[str, RankPace], rounds: int = 5) -> list[tuple[str, str]]:
        return kinds(
            [late for _ in range(rounds) for late in stragglers.look(Round(paces, paces), SHARES)]
        )

    assert look(world()) == []
    assert look(slow, 2) == [], "may be chance"
    assert look(slow) == [("n1.0", "compute")]
    assert look(slow) == []
    assert look(world()) == []
    assert look(slow) == [("n1.0", "compute")]


def test_a_network_that_becomes_slow_is_told() -> None:
    stragglers = Stragglers()
    waits = dict.fromkeys(WORKERS, replace(USUAL, wait_s=0.01 * (NETWORK_SCORE + 8)))
    assert [
        late for _ in range(9) for late in stragglers.look(Round(world(), world()), SHARES)
    ] == []
    assert kinds(
        [late for _ in range(9) for late in stragglers.look(Round(waits, waits), SHARES)]
    ) == [("", "network")]


# -- ranks that are too slow to stay
# ------------------------------------------------------------------------------


def given_up(slow: SlowRanks, paces: Mapping[str, RankPace], rounds: int) -> list[str]:
    workers: list[str] = []
    for _ in range(rounds):
        workers += [late.worker for late in slow.look(Round(paces, paces))]
    return workers


def test_a_rank_over_the_limit_is_named_after_its_time() -> None:
    slow = SlowRanks(4.0, 20)
    paces = world(n1=RankPace(0.1, 0.0))
    assert given_up(slow, paces, 19) == []
    assert given_up(slow, paces, 1) == ["n1.0"]
    assert given_up(slow, paces, 1) == ["n1.0"], "it is, until it is gone: a spare may come later"
    assert given_up(slow, world(), 1) == []
    assert given_up(slow, paces, 19) == [], "from the beginning"


def test_without_a_limit_nobody_is() -> None:
    assert given_up(SlowRanks(0.0, 5), world(n1=RankPace(100.0, 0.0)), 100) == []


def test_input_and_cpus_that_others_have_are_no_fault_of_a_rank() -> None:
    assert given_up(SlowRanks(4.0, 5), world(n1=RankPace(0.02, 9.0)), 50) == []
    assert given_up(SlowRanks(4.0, 5), world(n1=RankPace(0.5, 0.0, starved_s=0.45)), 50) == []


def test_of_two_nobody_knows_which_one_is_odd() -> None:
    assert (
        given_up(SlowRanks(4.0, 5), {"a": RankPace(1.0, 0.0), "b": RankPace(0.01, 0.0)}, 50) == []
    )


@settings(max_examples=examples(300), deadline=None, database=None)
@given(st.data())
def test_a_healthy_rank_is_never_given_up(data: st.DataObject) -> None:
    """A rank stays if its input, the CPUs, other ranks or some of its steps are slow."""
    limit, steps, size = (
        data.draw(st.floats(2.0, 8.0)),
        data.draw(st.integers(5, 9)),
        data.draw(st.integers(3, 5)),
    )
    slow, sick = (
        SlowRanks(limit, steps),
        data.draw(st.integers(0, (size - 1) // 2), label="ranks that are slow"),
    )
    chance = random.Random(data.draw(st.integers(0, 2**32)))

    def pace(number: int) -> RankPace:
        starved_s = chance.choice([0.0, chance.uniform(0.0, 1.0)])
        own_s = chance.uniform(0.01, 0.0199)  # of two that are well one may take twice as long
        compute_s = chance.uniform(0.5, 1.5) if number < sick else own_s + starved_s
        return RankPace(
            compute_s, chance.uniform(0.0, 1.0), chance.uniform(0.0, 1.0), 0.0, starved_s
        )

    for _ in range(60):
        usual, latest = ({f"n{number}.0": pace(number) for number in range(size)} for _ in range(2))
        assert [
            late.worker for late in slow.look(Round(usual, latest)) if int(late.worker[1]) >= sick
        ] == []


@settings(max_examples=examples(200), deadline=None, database=None)
@given(st.integers(0, 2**32))
def test_rare_spikes_never_add_up_to_a_slow_rank(seed: int) -> None:
    """A step in five takes a hundred times as long."""
    chance, slow, clock = random.Random(seed), SlowRanks(2.0, 20), Clockwork(*WORKERS)
    for _ in range(150):
        clock.step({worker: 5000.0 if chance.random() < 0.2 else 50.0 for worker in WORKERS})
        clock.beat()
        round_ = clock.round()
        named = slow.look(round_) if round_ else []
        assert named == []
