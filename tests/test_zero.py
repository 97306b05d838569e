"""Jobs with ZeRO-1, broken for real: weights are on every rank, the optimizer's state of a row on one only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_durable import Launches, plain_load

from chaoskit.checkpoint.disk import DiskTier
from chaoskit.errors import BadInput
from chaoskit.experiment.outcome import Outcome
from chaoskit.fixtures.jobs import gpt
from chaoskit.journal import Record, read_journals
from chaoskit.suites.goals import happened
from chaoskit.vocabulary import Event
from faults import BadBatch, Cut, Fault, Hang, Kill, KillNode, NaN, Rack

TINY = {"size": "tiny"}
AT = 8
JOBS = Path(__file__).parent / "jobs"


def run(chaos: Any, *faults: Fault, **plan: Any) -> Outcome:
    settings = {"nodes": 4, "spares": 1, "steps": 20, "options": TINY} | plan
    return chaos.run("zero", faults=faults, **settings)  # type: ignore[no-any-return]


def events(outcome: Outcome, event: Event) -> list[Record]:
    return [record for record in read_journals(Path(outcome.directory) / "journal") if record.event == event]


def losses(outcome: Outcome) -> list[float]:
    return [point.loss for point in outcome.steps]


# -- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("After a fault `train` is entered again, as for a sharded model.")
def test_a_lost_rank_costs_one_step_at_most_and_no_bit(chaos: Any) -> None:
    outcome = run(chaos, Kill(rank=2, at_step=AT))
    outcome.assert_same_losses_as_twin()
    assert outcome.lost_steps <= 1


@pytest.mark.parametrize("phase", ["forward", "backward", "reduce", "optimizer"])
@pytest.mark.parametrize("rank", [0, 3])
def test_in_every_phase_of_a_step(chaos: Any, phase: str, rank: int) -> None:
    outcome = run(chaos, Kill(rank=rank, at_step=AT, phase=phase))
    outcome.assert_same_losses_as_twin()
    assert outcome.lost_steps <= 1


@pytest.mark.parametrize("moment", ["regroup", "restore", "recommit"])
def test_another_loss_during_the_recovery(chaos: Any, moment: str) -> None:
    run(chaos, Kill(rank=2, at_step=AT), Kill(rank=1, during=moment), spares=2).assert_same_losses_as_twin()


def test_two_ranks_at_once(chaos: Any) -> None:
    outcome = run(chaos, Kill(rank=0, at_step=AT), Kill(rank=3, at_step=AT), spares=2)
    outcome.assert_same_losses_as_twin()


def test_all_ranks_at_once(chaos: Any) -> None:
    outcome = run(chaos, *(Kill(rank=rank, at_step=AT) for rank in range(4)), spares=0)
    outcome.assert_same_losses_as_twin()
    assert {record["source"] for record in events(outcome, Event.RESTORED)} == {f"memory of node{n}" for n in range(4)}


def test_a_rank_that_hangs(chaos: Any) -> None:
    run(chaos, Hang(rank=2, at_step=AT, how="stop")).assert_same_losses_as_twin()


def test_a_loss_in_the_last_step(chaos: Any) -> None:
    run(chaos, Kill(rank=2, at_step=19, phase="optimizer")).assert_same_losses_as_twin()


# -- nodes ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.promise(
    "A rank keeps, copies and restores only its rows: of weights and moments together 1/N of the bytes."
)
def test_a_lost_nodes_rows_come_from_its_partner_and_each_piece_is_its_share(chaos: Any) -> None:
    outcome = run(chaos, KillNode(rank=2, at_step=AT))
    outcome.assert_same_losses_as_twin()
    restored = events(outcome, Event.RESTORED)
    assert len([one for one in restored if one["source"].startswith("peer of ")]) == 1
    sizes = [one["size_bytes"] for one in restored]
    assert len(sizes) == 4
    assert max(sizes) < 1.05 * sum(sizes) / 4
    weights = sum(weight.numel() for weight in gpt.build(gpt.SIZES["tiny"], dropout=0.0).parameters())
    assert sum(sizes) < 1.2 * 3 * 4 * weights, "weights and two moments in float32, and nothing twice"


def test_a_lost_rack(chaos: Any) -> None:
    run(chaos, Rack(rank=2, at_step=AT), rack_nodes=2, spares=2).assert_same_losses_as_twin()


@pytest.mark.chaos(substrate="netns")
def test_rows_cross_a_network(chaos: Any) -> None:
    run(chaos, Cut(rank=2, at_step=AT, heal_after_s=1.0)).assert_same_losses_as_twin()


# -- worlds of another size -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.promise(
    "world that shrinks and grows, or a job that is resumed with more ranks, has the bits of one that never changed"
)
def test_a_world_that_shrinks_and_grows_keeps_every_bit(chaos: Any) -> None:
    """The sum does not depend on which rank computes which shard, so there is nothing to tolerate."""
    outcome = run(
        chaos,
        Kill(rank=1, at_step=AT),
        nodes=3,
        spares=0,
        shards=6,
        replacement_s=0,
        steps=20,
        until={"world": 3},
        options=TINY | {"batch": 6, "schedule_steps": 120},
        max_lost_steps=2,  # growing costs one, too
    )
    worlds = [point.world for point in outcome.steps]
    assert worlds.count(2) > 1
    assert worlds[-1] == 3
    assert losses(outcome) == outcome.twin_losses


@pytest.mark.promise("the bits of every world size are the same, as without it")
def test_the_bits_are_those_of_the_replicated_job(chaos: Any) -> None:
    """Without a limit on the norm, which is summed in another order."""
    found = [
        chaos.harness.run(job, nodes=nodes, spares=0, shards=6, steps=10, twin=False, options=options)
        for job, nodes, options in (
            ("gpt", 2, TINY | {"batch": 6, "clip_norm": 1e9}),
            ("zero", 2, TINY | {"batch": 6, "clip_norm": 0}),
            ("zero", 3, TINY | {"batch": 6, "clip_norm": 0}),
        )
    ]
    assert losses(found[0]) == losses(found[1]) == losses(found[2])


@pytest.mark.slow
@pytest.mark.promise("Gradients are summed in the same order in every world, the norm for `clip_norm` too")
def test_a_limited_norm_has_the_same_bits_in_every_world(chaos: Any) -> None:
    found = [chaos.harness.run("zero", nodes=nodes, spares=0, shards=4, steps=10, options=TINY) for nodes in (1, 3)]
    assert losses(found[0]) == losses(found[1])


@pytest.mark.costly
@pytest.mark.slow
def test_the_whole_job_is_resumed_at_another_world_size(tmp_path: Path) -> None:
    launches = Launches(tmp_path, "zero", "--set", "steps=60", "--set", "size=tiny", "--shards", "4")
    unbroken = launches.end("unbroken")
    launches.kill_at(10, *launches.keep())
    resumed = launches.end("resumed", *launches.keep(), nodes=3)
    assert resumed["steps"] == 60
    assert launches.restored("resumed")
    assert resumed["loss"] == unbroken["loss"]


def test_plain_dcp_reads_what_is_stored_and_plain_torch_goes_on_with_it(chaos: Any, tmp_path: Path) -> None:
    stored = DiskTier(tmp_path / "stored")
    disk, goal = {"target": str(stored.root), "every_steps": 10}, happened(chaos, Event.SAVED)
    plan: dict[str, Any] = {"nodes": 3, "spares": 0, "steps": 20, "shards": 3, "until": goal.until, "watch": goal}
    plan["options"] = TINY | {"batch": 6, "schedule_steps": 40}
    outcome = chaos.run("zero", **plan, twin=False, disk=disk)
    assert not events(outcome, Event.SAVE_FAILED)
    newest = stored.snapshots().snapshots[0]
    state = plain_load(newest.path)
    assert state["scalars"]["step"] == newest.manifest.step
    names = {name.removeprefix("model.") for name in state if name.startswith("model.")}
    for name in names - {name for name in names if f"optimizer.state.{name}.step" not in state}:
        assert state[f"optimizer.state.{name}.step"] == newest.manifest.step
        assert state[f"optimizer.state.{name}.exp_avg"].shape == state[f"model.{name}"].shape
        assert state[f"optimizer.state.{name}.exp_avg_sq"].count_nonzero()


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.promise("BatchNorm that keeps them is refused", how="batchnorm")
@pytest.mark.promise("it is tried on a small tensor when it is made", how="muon")
@pytest.mark.parametrize(
    ("how", "field", "remedy"),
    [
        ("batchnorm", "model", "GroupNorm"),
        ("both", "params", "no use for both"),
        ("partly", "optimizer", "have a ZeroOptimizer train every parameter"),
        ("neither", "model", "or use ZeroOptimizer"),
        ("muon", "optimizer", "treats each element for itself"),
    ],
)
def test_what_cannot_be_trained_so_is_refused_in_the_rehearsal(chaos: Any, how: str, field: str, remedy: str) -> None:
    with pytest.raises(BadInput, match=remedy) as refused:
        chaos.harness.run(str(JOBS / "zero_wrong.py"), nodes=1, spares=0, steps=3, options={"how": how}, twin=False)
    assert refused.value.field == field


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["activation", "weight", "gradient"])
def test_a_nan_is_never_committed(chaos: Any, where: str) -> None:
    outcome = run(chaos, NaN(rank=2, at_step=AT, parameter="head.weight", where=where))
    outcome.assert_same_losses_as_twin()


def test_a_rank_that_always_computes_nans_is_told_from_a_bad_batch(chaos: Any) -> None:
    outcome = run(chaos, NaN(rank=2, at_step=AT, parameter="head.weight", where="activation", sticky=True))
    assert "rank 2" in outcome.recovery.cause


def test_a_bad_batch_is_skipped_whoever_computes_it(chaos: Any) -> None:
    outcome = run(chaos, BadBatch(at_step=AT, shard=1), twin=False)
    assert len(outcome.ledger.skipped) > 0
