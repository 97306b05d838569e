"""Jobs with sharded state recover from real faults: no rank has the state of another one, and all
begin again together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chaoskit.errors import BadInput
from chaoskit.experiment.plan.plan import plan_experiment
from chaoskit.journal import read_journals
from chaoskit.runlog.outcome import Outcome
from chaoskit.suites.goals import JournalFlag, all_took_effect, happened
from chaoskit.vocabulary import Event
from faults import (
    BadBatch,
    BitFlip,
    Cut,
    Fault,
    FreezeNode,
    Hang,
    Kill,
    KillCoordinator,
    KillNode,
    LoseNode,
    NaN,
    Rack,
    Raise,
    ReplaceNode,
)

TINY = {"size": "tiny"}
AT = 8


def run(chaos: Any, *faults: Fault, **plan: Any) -> Outcome:
    """Run the small FSDP job with ``faults``; it must pass every check."""
    settings = {"nodes": 4, "spares": 1, "steps": 20, "options": TINY} | plan
    return chaos.run("fsdp", faults=faults, **settings)  # type: ignore[no-any-return]


def open_ended(goal: JournalFlag) -> dict[str, Any]:
    """Return settings of a run that goes on until ``goal`` is reached."""
    return {
        "steps": 20,
        "until": goal.until,
        "watch": goal,
        "options": TINY | {"schedule_steps": 40},
    }


def events(outcome: Outcome, event: Event) -> list[Any]:
    return [
        record
        for record in read_journals(Path(outcome.directory) / "journal")
        if record.event == event
    ]


@pytest.mark.promise(
    "A lost rank costs at most the last step; its piece of the state was copied to another node."
)
def test_a_lost_rank_costs_one_step_at_most_and_no_process(chaos: Any) -> None:
    outcome = run(chaos, Kill(rank=2, at_step=AT))
    outcome.assert_same_losses_as_twin()
    assert outcome.lost_steps <= 1
    entered = events(outcome, Event.ENTERED)
    survivors = {
        record.source for record in entered if record["generation"] == 1 and record["rank"] != 2
    }
    again = {record.source for record in entered if record["generation"] == 2}
    assert survivors < again  # in the same processes
    assert len(again) == 4


@pytest.mark.slow
@pytest.mark.promise(
    "A kill that strikes before the copy of the last committed step is complete costs that step, which "
    "all compute again: at most one.",
    phase="optimizer",
)
@pytest.mark.parametrize("phase", ["backward", "reduce", "optimizer"])
def test_in_every_phase_of_a_step(chaos: Any, phase: str) -> None:
    run(chaos, Kill(rank=1, at_step=AT, phase=phase)).assert_same_losses_as_twin()


@pytest.mark.slow
@pytest.mark.promise("waits are shown on the progress board", how="gil")
@pytest.mark.parametrize("how", ["stop", "gil", "spin"])
def test_a_rank_that_hangs_while_the_others_wait_in_their_collectives(chaos: Any, how: str) -> None:
    outcome = run(chaos, Hang(rank=2, at_step=AT, how=how))
    assert "hung" in outcome.recovery.cause or "stopped" in outcome.recovery.cause


def test_an_exception_in_the_users_code(chaos: Any) -> None:
    run(chaos, Raise(rank=0, at_step=AT))


def test_two_ranks_at_once(chaos: Any) -> None:
    run(chaos, Kill(rank=0, at_step=AT), Kill(rank=3, at_step=AT), spares=2)


@pytest.mark.slow
@pytest.mark.promise(
    "As a rule a rank reads one piece, from its own node, straight into its tensors"
)
def test_all_ranks_at_once_come_back_from_what_their_agents_have(chaos: Any) -> None:
    outcome = run(chaos, *(Kill(rank=rank, at_step=AT) for rank in range(4)), spares=0)
    assert {record["source"] for record in events(outcome, Event.RESTORED)} == {
        f"memory of node{n}" for n in range(4)
    }


@pytest.mark.slow
@pytest.mark.promise("A job that has no spare waits `replacement_s` for a replacement")
def test_without_a_spare_the_world_waits_for_a_replacement(chaos: Any) -> None:
    outcome = run(chaos, Kill(rank=2, at_step=AT), spares=0)
    assert {point.world for point in outcome.steps} == {4}


def test_a_world_that_may_not_wait_reads_the_pieces_in_another_cut_and_grows_again(
    chaos: Any,
) -> None:
    """Two ranks go on with the pieces of three, and take in the replacement when it is warm."""
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
        max_lost_steps=2,  # growing costs a step, too
    )
    worlds = [point.world for point in outcome.steps]
    assert worlds.count(2) > 1
    assert worlds[-1] == 3


@pytest.mark.slow
@pytest.mark.promise("publishes a plan that names these copies", moment="restore")
@pytest.mark.parametrize("moment", ["regroup", "restore", "recommit"])
def test_another_loss_during_the_recovery(chaos: Any, moment: str) -> None:
    run(chaos, Kill(rank=2, at_step=AT), Kill(rank=1, during=moment), spares=2)


def test_the_coordinator_is_lost_with_a_rank(chaos: Any) -> None:
    goal = happened(chaos, Event.RESUMED)
    run(chaos, Kill(rank=2, at_step=AT), KillCoordinator(rank=0, at_step=AT), **open_ended(goal))


def test_a_loss_in_the_last_step(chaos: Any) -> None:
    run(chaos, Kill(rank=2, at_step=19, phase="optimizer")).assert_same_losses_as_twin()


@pytest.mark.promise("`entries_max` entries in a row that failed here and committed nothing")
@pytest.mark.parametrize("resets", [False, True])
def test_a_process_that_gets_nowhere_is_replaced(chaos: Any, resets: bool) -> None:
    """Entries of a train function that commit nothing have a budget; then a new process takes over."""
    job = Path(__file__).parents[2] / "jobs" / "failing" / "shaky.py"
    options = {"resets": resets}
    outcome = chaos.harness.run(
        str(job), nodes=2, spares=0, steps=20, options=options, entries_max=3, twin=False
    )
    assert len(outcome.steps) == 20
    assert outcome.reasons[0].startswith("no exception in the job: node1.0")  # no fault was planned
    causes = [
        record["cause"] for record in events(outcome, Event.ENTERED) if record.source == "node1.0"
    ]
    assert (
        4 <= len(causes) <= 7
    )  # the first entry trained, and some count half because the other rank was faster
    assert len([cause for cause in causes[1:] if "fails for this process" in cause]) >= 3
    assert [record.source for record in events(outcome, Event.FAILED)] == ["node1.0"]


def test_a_rank_that_dies_while_a_nan_is_looked_into(chaos: Any, tmp_path: Path) -> None:
    """A new membership begins without a suspicion: its newcomer has none, and all ranks must decide
    alike.
    """
    job, options = (
        Path(__file__).parents[2] / "jobs" / "failing" / "suspected.py",
        {"bad_step": 5, "marker": str(tmp_path / "ended")},
    )
    outcome = chaos.harness.run(str(job), nodes=4, spares=1, steps=20, options=options, twin=False)
    assert [record["rank"] for record in events(outcome, Event.DETECTED)] == [1], outcome.directory
    assert len(events(outcome, Event.NONFINITE)) == 4
    twin = chaos.harness.twin(plan_experiment(str(job), nodes=4, steps=20))
    assert [point.loss for point in outcome.steps] == twin.losses


@pytest.mark.slow
@pytest.mark.promise(
    "After a fault every rank leaves its train function and enters it again, in the same process, with "
    "fresh groups and fresh objects"
)
def test_who_stays_knows_the_operations_and_makes_up_no_weights(chaos: Any) -> None:
    job = Path(__file__).parents[2] / "jobs" / "training" / "entered_again.py"
    outcome = chaos.run(
        str(job), nodes=4, spares=1, steps=20, faults=[Kill(rank=2, at_step=AT, phase="backward")]
    )
    outcome.assert_same_losses_as_twin()
    notes = {path.name: path.read_text() for path in Path(outcome.directory).rglob("* from step *")}
    again = {name: text for name, text in notes.items() if not name.endswith(" 0")}
    assert len(notes) == 8
    assert all(bool(text) == name.startswith("2 ") for name, text in again.items())


# -- nodes -----------------------------------------------------------------------------------------


@pytest.mark.promise("It hands each copy to a partner node")
def test_a_lost_nodes_piece_comes_from_its_partner(chaos: Any) -> None:
    outcome = run(chaos, KillNode(rank=2, at_step=AT))
    outcome.assert_same_losses_as_twin()
    first = {
        record.source for record in events(outcome, Event.ENTERED) if record["generation"] == 1
    }
    replacement = [
        record for record in events(outcome, Event.RESTORED) if record.source not in first
    ]
    assert replacement
    assert all(record["source"].startswith("peer of ") for record in replacement)
    partners = {tuple(record["nodes"]) for record in events(outcome, Event.PROTECTED)}
    assert all(len(nodes) == 1 for nodes in partners)


@pytest.mark.slow
@pytest.mark.promise("The first copy is never in the rack of its owner if there is another rack")
def test_a_lost_rack_takes_no_piece_with_all_its_copies(chaos: Any) -> None:
    """No piece is lost with a rack of three of four nodes.

    Two of its nodes would be partners in any assignment that ignored racks.
    """
    outcome = run(chaos, Rack(rank=1, at_step=AT), rack_nodes=3, spares=0)
    outcome.assert_same_losses_as_twin()
    assert len(events(outcome, Event.NODE_LOST)) == 3
    restored = [record["source"] for record in events(outcome, Event.RESTORED)]
    assert restored.count("peer of node3") == 3


@pytest.mark.parametrize("fault", [ReplaceNode(rank=2, at_step=AT), FreezeNode(rank=2, at_step=AT)])
def test_a_node_that_is_replaced_or_stands_still(chaos: Any, fault: Fault) -> None:
    run(chaos, fault, **open_ended(all_took_effect(chaos, 1)))


@pytest.mark.slow
@pytest.mark.promise("else the bytes go over TCP, in the clear", fault=LoseNode(rank=2, at_step=AT))
@pytest.mark.chaos(substrate="netns")
@pytest.mark.parametrize(
    "fault", [LoseNode(rank=2, at_step=AT), Cut(rank=2, at_step=AT, heal_after_s=1.0)]
)
def test_copies_cross_a_network(chaos: Any, fault: Fault) -> None:
    run(chaos, fault).assert_same_losses_as_twin()


def test_replicas_of_a_shard_are_copies_of_each_other(chaos: Any) -> None:
    outcome = run(
        chaos, KillNode(rank=2, at_step=AT), options=TINY | {"replicas": 2}, memory_copies=0
    )
    pieces = {record["piece"] for record in events(outcome, Event.SEALED)}
    assert pieces == {0, 1}


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.promise(
    "Numbers that are not finite are computed again with every shard on another rank",
    where="gradient",
)
@pytest.mark.parametrize("where", ["activation", "weight", "gradient"])
def test_a_nan_is_never_committed(chaos: Any, where: str) -> None:
    outcome = run(chaos, NaN(rank=2, at_step=AT, parameter="head.weight", where=where))
    outcome.assert_same_losses_as_twin()
    records = events(outcome, Event.NONFINITE)
    if where == "gradient":  # all losses are finite: only the sum is not, which names no rank
        assert {(record["owner"], record["step"]) for record in records} == {(None, AT)}


def test_a_bit_of_a_gradient_is_flipped_where_a_rank_holds_it(chaos: Any) -> None:
    """A bit of a sharded gradient is flipped after the reduction, when the parameter's hooks
    receive it.
    """
    fault = BitFlip(
        rank=2, at_step=AT, phase="backward", parameter="head.weight", where="gradient", bit=3
    )
    outcome = run(chaos, fault, twin=False)
    assert outcome.faults[0].state == "confirmed"
    (evidence,) = events(outcome, Event.EVIDENCE)
    assert "gradient of head.weight, element 0" in evidence["observed"]


def test_a_rank_that_always_computes_nans_is_told_from_a_bad_batch(chaos: Any) -> None:
    fault = NaN(rank=2, at_step=AT, parameter="head.weight", where="activation", sticky=True)
    outcome = run(chaos, fault)
    assert "rank 2" in outcome.recovery.cause
    verdicts = {record["verdict"] for record in events(outcome, Event.ATTRIBUTED)}
    assert verdicts == {"rank"}


@pytest.mark.slow
@pytest.mark.promise(
    "what stays with the rank is its fault, what goes with the shard is the batch's"
)
def test_a_bad_batch_is_skipped_whoever_computes_it(chaos: Any) -> None:
    outcome = run(chaos, BadBatch(at_step=AT, shard=1), twin=False)
    assert len(outcome.ledger.skipped) > 0
    assert {record["verdict"] for record in events(outcome, Event.ATTRIBUTED)} == {"batch"}


# -- refused jobs ----------------------------------------------------------------------------------

NOT_SHARDED = """
import torch

def train(trainer, steps):
    trainer.mesh()
    model = torch.nn.Linear(4, 4)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with trainer.transaction() as step:
        for shard in step.shards(torch.ones(8, 4), batch_size=4):
            step.backward(model(shard.batch).sum())
"""


def test_a_model_that_is_not_sharded_over_the_mesh_is_refused(chaos: Any, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(NOT_SHARDED)
    with pytest.raises(BadInput, match="fully_shard") as refused:
        chaos.harness.run(str(tmp_path / "job.py"), nodes=1, spares=0, steps=3, twin=False)
    assert refused.value.field == "model"
