"""Batches that follow the world: the samples, the optimizers' rates, and the absence of any other
change.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chaoskit.config import BatchScaling, RunConfig
from chaoskit.elastic.settings import ElasticPolicy
from chaoskit.errors import BadInput
from chaoskit.experiment.plan.plan import plan_experiment
from chaoskit.job import JobSpec
from chaoskit.journal import Record, read_journals
from chaoskit.runlog.history import History
from chaoskit.runlog.outcome import Outcome
from chaoskit.runtime.state.batch_follows_world import Following, needed_changes
from chaoskit.runtime.state.registered import Registered
from chaoskit.runtime.state.sampling import Sampler
from chaoskit.suites.goals import JournalFlag
from chaoskit.vocabulary import Event
from faults import Kill, Scale

JOBS = Path(__file__).parents[2] / "jobs" / "failing" / "troubled.py"
JOB = f"{JOBS}:plain"
BATCH = 24  # batch size of the job
ELASTIC = ElasticPolicy(min_replicas=1, max_replicas=4, scaling_timeout_s=0.0)


def config(nodes: int = 2, shards: int = 8, **follow: Any) -> RunConfig:
    scaling = BatchScaling(**{"rule": "square-root", **follow})
    return RunConfig(
        job=JobSpec("job.py"), nodes=nodes, shards=shards, elastic=ELASTIC, follow=scaling
    )


def adam() -> torch.optim.Optimizer:
    return torch.optim.Adam([torch.nn.Parameter(torch.ones(3))], lr=0.01)


# -- samples ---------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=60), st.integers(4, 50), st.integers(0, 2**31)
)
def test_every_sample_comes_once_an_epoch_however_the_batch_changes(
    worlds: list[int], size: int, seed: int
) -> None:
    chosen = config()
    following = Following(chosen, [adam()])
    sampler = Sampler(size, chosen.named_shards, chosen.named_shards, seed)
    dealt: list[int] = []
    for step, world in enumerate(worlds):
        shards = chosen.shards_of(step, world)
        assert shards == 2 * world
        dealt += [
            sample
            for shard in range(shards)
            for sample in sampler.samples(step, shard, following.dealt)
        ]
        following.deal(step, shards)
    assert following.dealt == len(dealt)
    for start in range(0, len(dealt), size):
        epoch = dealt[start : start + size]
        assert len(set(epoch)) == len(epoch)
        assert len(epoch) < size or sorted(epoch) == list(range(size))


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=30),
    st.sampled_from(("square-root", "none")),
    st.integers(0, 12),
)
def test_who_takes_over_the_state_goes_on_alike(
    changes: list[tuple[int, int]], rule: str, warmup_steps: int
) -> None:
    chosen = config(rule=rule, warmup_steps=warmup_steps)
    old, step = Following(chosen, [adam()]), 0
    for lasts, world in changes:
        for _ in range(lasts):
            old.deal(step, 2 * world)
            step += 1
        new = Following(chosen, [adam()])
        new.load(old.state(), step)
        assert new.state() == old.state()
        later = range(step, step + 20)
        assert [new.multiplier(number) for number in later] == [
            old.multiplier(number) for number in later
        ]


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=40),
    st.lists(st.integers(1, 4), min_size=1, max_size=40),
    st.integers(0, 12),
)
def test_ranks_of_different_age_never_disagree_on_the_state(
    before: list[int], after: list[int], warmup: int
) -> None:
    """An old rank must not remember more than a new one was told, as ranks compare checksums in
    every step.
    """
    chosen = config(warmup_steps=warmup)
    old, new = Following(chosen, [adam()]), Following(chosen, [adam()])
    for step, world in enumerate(before):
        old.deal(step, 2 * world)
    new.load(old.state(), len(before))
    for step, world in enumerate(after, len(before)):
        for following in (old, new):
            following.deal(step, 2 * world)
        assert new.state() == old.state()
        assert new.multiplier(step) == old.multiplier(step)


def test_what_is_over_is_not_carried_along() -> None:
    changes = [(10, 2), (20, 4), (23, 6), (25, 8)]
    assert needed_changes(changes, 5, named_shards=3) == changes
    assert needed_changes(changes, 3, named_shards=3) == changes[1:]
    assert needed_changes(changes, 3, named_shards=4) == changes[2:]  # all ranks begin with these
    assert needed_changes(changes, 0, named_shards=3) == changes[2:]
    assert needed_changes([], 3, named_shards=4) == []


def test_a_state_of_a_batch_that_stayed_is_gone_on_from() -> None:
    following = Following(config(), [adam()])
    following.load(None, 7)
    assert following.dealt == 7 * 4
    assert following.multiplier(7) == 1.0


def registered(run_config: RunConfig | None) -> Registered:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    state = Registered(model, torch.optim.Adam(model.parameters(), lr=0.01), None)
    state.following = Following(run_config, state.optimizers) if run_config else None
    return state


def test_what_was_dealt_travels_with_the_state() -> None:
    old, new = registered(config()), registered(config())
    assert old.following
    assert new.following
    for step, shards in enumerate((4, 8, 8, 2)):
        old.following.deal(step, shards)
    new.load_scalars(old.scalars(), 4)
    assert new.following.dealt == 22
    assert new.scalars() == old.scalars()
    with pytest.raises(BadInput, match="set it as before"):
        registered(None).load_scalars(old.scalars(), 4)
    with pytest.raises(BadInput, match="as many nodes and shards as before, 4 shards in total"):
        registered(config(nodes=3)).load_scalars(old.scalars(), 4)


def test_the_optimizers_take_their_steps_with_what_follows_from_the_batch() -> None:
    """A weight moves by rate times gradient: by twice as much with twice the batch."""
    weight = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.25)
    state = Registered(weight, optimizer, None)
    state.following = Following(config(rule="linear"), state.optimizers)
    for step, (shards, moved) in enumerate(((4, 0.25), (8, 0.5), (2, 0.125))):
        before = float(weight.weight.detach())
        weight.weight.grad = torch.ones(1, 1)
        state.following.deal(step, shards)
        with state.running_optimizers():
            state.advance()
        state.step += 1
        assert before - float(weight.weight.detach()) == pytest.approx(moved)
        assert state.following.rate == moved
        assert optimizer.param_groups[0]["lr"] == 0.25


# -- refused settings ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "field"),
    [
        ({"follow": {"rule": "cubic"}}, "follow.rule"),
        ({"follow": {"rule": "linear", "warmup_steps": -1}}, "follow.warmup_steps"),
        ({"follow": {"rule": "linear"}, "shards": 6, "elastic": ELASTIC}, "shards"),
        ({"follow": {"rule": "linear", "schedule": [[0, 2]]}}, "follow.schedule"),
    ],
)
def test_what_cannot_be_followed_is_refused(chosen: dict[str, Any], field: str) -> None:
    with pytest.raises(BadInput) as refused:
        plan_experiment(JOB, nodes=2, steps=4, **chosen)
    assert refused.value.field == field


def test_a_rule_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(BadInput, match=r"'cubic'.*linear, square-root, none"):
        plan_experiment(JOB, nodes=2, steps=4, follow={"rule": "cubic"})


def test_a_sharded_job_keeps_its_batch() -> None:
    with pytest.raises(BadInput, match="a sharded job keeps its batch"):
        plan_experiment(
            str(Path(__file__).parents[2] / "jobs" / "failing" / "shaky.py"),
            nodes=2,
            follow={"rule": "square-root"},
        )


def test_a_rule_for_another_optimizer_is_refused_before_the_first_step() -> None:
    with pytest.raises(BadInput, match="square-root"):
        Following(config(rule="linear"), [adam()])


# -- the judge -------------------------------------------------------------------------------------


def took(worker: str, step: int, generation: int, world: int) -> list[Record]:
    """Return the records of one rank for one step, with two shards a rank and a sample each."""
    rank = int(worker.removeprefix("node").partition(".")[0])
    place = {"step": step, "generation": generation, "rank": rank, "world": world}
    shards = [2 * rank, 2 * rank + 1]
    return [
        Record(step, worker, Event.REDUCE, place | {"shards": shards, "samples": shards}),
        Record(step, worker, Event.COMMIT, place | {"loss": float(world), "grad_sum": world}),
    ]


def ended(worker: str, digest: str) -> Record:
    return Record(9, worker, Event.FINISHED, {"weights_digest": digest})


def test_who_took_the_last_step_alone_and_left_is_not_compared_with_who_took_it_again() -> None:
    """The digest of a rank that left is not compared if its last step was taken again.

    Rank 1 committed step 1 in generation 1 and left; rank 0 took it alone in generation 2.
    """
    both = [*took("node0.0", 0, 1, 2), *took("node1.0", 0, 1, 2)]
    alone = [*took("node1.0", 1, 1, 2), ended("node1.0", "bb")]
    again = [*took("node0.0", 1, 1, 2)[:1], *took("node0.0", 1, 2, 1), ended("node0.0", "aa")]
    history, followed = History([*both, *alone, *again]), config()
    held = msgspec.structs.replace(followed, follow=None)
    assert [end["weights_digest"] for end in history.ends(followed)] == ["aa"]
    assert [end["weights_digest"] for end in history.ends(held)] == ["bb", "aa"]
    assert history.schedule() == ((0, 4), (1, 2))
    assert history.ledger(followed.shards_of).missing == []
    assert history.violations("fast") == []


# -- real runs -------------------------------------------------------------------------------------


def commits(outcome: Outcome) -> list[Record]:
    """Return a commit of each step, of the generation that lives on."""
    latest: dict[int, Record] = {}
    for record in read_journals(Path(outcome.directory) / "journal"):
        if (
            record.event == Event.COMMIT
            and record["generation"] >= latest.get(record["step"], record)["generation"]
        ):
            latest[record["step"]] = record
    return [latest[step] for step in sorted(latest)]


@pytest.mark.slow
@pytest.mark.promise(
    "With `follow` each rank keeps its number of shards, and the batch is as large as the world"
)
def test_the_batch_grows_and_shrinks_with_the_world_and_nothing_else_changes(chaos: Any) -> None:
    """A single rank that computes the same batches gets the same bits of every loss and of the
    weights.
    """
    outcome = chaos.run(
        JOB,
        nodes=2,
        spares=0,
        shards=8,
        buckets=2,
        steps=60,
        options={"step_s": 0.1},  # a node is started, and joins, within thirty steps
        elastic=ELASTIC,
        follow={"rule": "square-root", "warmup_steps": 4},
        faults=[Scale(to=3, at_step=10), Kill(rank=1, at_step=24), Scale(to=1, at_step=40)],
    )
    outcome.assert_same_losses_as_twin()
    records = commits(outcome)
    worlds = [record["world"] for record in records]
    assert {1, 2, 3} == set(worlds)
    assert all(record["samples"] == BATCH // 2 * record["world"] for record in records)
    assert outcome.ledger.samples == sum(record["samples"] for record in records)
    assert not outcome.ledger.missing
    assert not outcome.ledger.repeated
    schedule = [0.01 * 0.7 ** (step // 5) for step in range(60)]
    ratios = [record["multiplier"] for record in records]
    assert [
        record["rate"] / rate for record, rate in zip(records, schedule, strict=True)
    ] == pytest.approx(ratios)
    for (before, now), (old, new) in zip(pairwise(worlds), pairwise(ratios), strict=True):
        assert now >= before or new == pytest.approx((now / 2) ** 0.5)  # a lower rate holds at once
        assert now <= before or new == pytest.approx(old)  # a higher one is reached on a line
    assert ratios[9] == pytest.approx(1.0)
    assert ratios[-1] == pytest.approx(0.5**0.5)


@pytest.mark.promise(
    "whatever is not the batch (a rate, a sample, a warm-up, a state that was taken over) shows"
)
def test_a_batch_that_was_scaled_wrongly_is_noticed(chaos: Any) -> None:
    """All ranks of a world of three deal more samples than the rule allows: they agree, but differ
    from the twin.
    """
    job = Path(__file__).parents[2] / "jobs" / "failing" / "scaled_wrongly.py"
    outcome = chaos.run(
        str(job),
        nodes=2,
        shards=8,
        spares=0,
        steps=20,
        until={"world": 3},
        options={"step_s": 0.03},
        elastic=ELASTIC,
        follow={"rule": "square-root"},
        faults=[Scale(to=3, at_step=10)],
        check=False,
    )
    assert outcome.verdict == "failed"
    failed = {check.name for check in outcome.checks if check.verdict != "passed"}
    ends = {"final weights equal the twin's", "final state equals the twin's"}
    dealt = {"every sample exactly once", "property 39S: epochs are permutations"}
    assert failed == {*dealt, "losses equal the twin's", *ends}


@pytest.mark.parametrize(
    ("job", "options", "skipped"),
    [
        ("bad_batches", {"bad": {"4": [1]}}, "step 4: shards [1] are not finite"),
        ("overflowing", {"at_step": 4}, "step 4: shards [0, 1, 2, 3] are not finite"),
    ],
)
def test_a_bad_batch_is_skipped_by_the_twin_too(
    chaos: Any, job: str, options: dict[str, Any], skipped: str
) -> None:
    """The twin's single rank has more shards than the batch, and only computed shards are audited
    and recorded.
    """
    follow = {"rule": "none"}
    outcome = chaos.run(
        f"{JOBS}:{job}",
        nodes=2,
        shards=8,
        spares=0,
        steps=10,
        options=options,
        elastic=ELASTIC,
        follow=follow,
    )
    assert [step for step, loss in enumerate(outcome.losses) if loss is None] == [4]
    assert outcome.ledger.skipped == [skipped]
    by_step = dealt(History(read_journals(Path(outcome.directory) / "journal")))
    assert once_an_epoch([sample for step in sorted(by_step) for sample in by_step[step]])


def dealt(history: History) -> dict[int, list[int]]:
    """Return step -> its samples, shard by shard."""
    samples_of: dict[int, list[int]] = {}
    for number, step in history.steps.items():
        parts: dict[int, list[int]] = {}
        for record in step.contributions[step.generation].values():
            size = len(record["samples"]) // len(record["shards"])
            for place, shard in enumerate(record["shards"]):
                parts[shard] = record["samples"][place * size : (place + 1) * size]
        samples_of[number] = [sample for shard in sorted(parts) for sample in parts[shard]]
    return samples_of


def once_an_epoch(order: list[int]) -> bool:
    """Return True if none of the job's 128 samples comes again before all others came."""
    epochs = [order[start : start + 128] for start in range(0, len(order), 128)]
    return all(len(set(epoch)) == len(epoch) for epoch in epochs)


def test_a_run_that_is_resumed_goes_on_with_the_next_samples(chaos: Any, tmp_path: Path) -> None:
    """The number of dealt samples is in the snapshot, after steps with batches of two sizes."""
    common: dict[str, Any] = {
        "nodes": 2,
        "shards": 8,
        "spares": 0,
        "options": {"step_s": 0.03},
        "elastic": ELASTIC,
        "follow": {"rule": "square-root", "warmup_steps": 4},
        "disk": {"target": str(tmp_path / "disk"), "every_steps": 5},
        "twin": False,
        "check": False,
    }
    of_one: set[int] = set()

    def is_stored(record: Record) -> bool:
        """Return True if a state after batches of two sizes is on the disk."""
        of_one.update(
            [record["step"]] if record.event == Event.COMMIT and record["world"] == 1 else []
        )
        return record.event == Event.SAVED and bool(of_one) and record["step"] > min(of_one)

    goal = JournalFlag(chaos, is_stored)
    plan = {"steps": 20, "until": goal.until, "watch": goal, "faults": [Scale(to=1, at_step=4)]}
    before = chaos.run(JOB, **plan, **common)
    steps = len(before.steps) + 40
    after = chaos.run(JOB, steps=steps, resume=True, **common)
    old, new = (
        dealt(History(read_journals(Path(outcome.directory) / "journal")))
        for outcome in (before, after)
    )
    begun = min(new)
    assert len({len(samples) for step, samples in old.items() if step < begun}) == 2
    order = [sample for step in range(steps) for sample in (old if step < begun else new)[step]]
    assert len(order) > 5 * 128
    assert once_an_epoch(order)
    resumed = [record for record in commits(after) if record["step"] < begun + 5]
    assert [(record["world"], record["samples"]) for record in resumed] == [(2, BATCH)] * 5
    risen = [
        0.5**0.5 * (1 - part) + part for part in (0, 0.25, 0.5, 0.75, 1)
    ]  # from one rank to two
    assert [record["multiplier"] for record in resumed] == pytest.approx(risen)
