"""Silent bit flips in a rank of a sharded job are found by ranks that hold replicas of its piece
(HSDP).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from chaoskit.config import RunConfig
from chaoskit.job import JobSpec
from chaoskit.runlog.outcome import Outcome
from chaoskit.runtime.integrity.piece_check import PieceCheck
from chaoskit.runtime.integrity.voting import RankSeal, examine
from chaoskit.runtime.state.sharding import ShardedState
from chaoskit.vocabulary import Verdict
from faults import BitFlip, Fault, Kill

AT = 8
TINY = {"size": "tiny"}
WEIGHT = "head.weight"


def run(chaos: Any, fault: Fault, *, replicas: int = 2, **plan: Any) -> Outcome:
    """Run HSDP over two shards, each held by ``replicas`` ranks."""
    options = TINY | {"replicas": replicas, "batch": 12}
    settings = {
        "nodes": 2 * replicas,
        "spares": 1,
        "steps": 20,
        "options": options,
        "shards": 2 * replicas,
    } | plan
    return chaos.run("fsdp", faults=[fault], **settings)  # type: ignore[no-any-return]


def first_worker(outcome: Outcome, rank: int) -> str:
    """Return the worker that had ``rank`` at first."""
    return str(outcome.records("plan")[0]["members"][rank]["worker"])


def given_up(outcome: Outcome) -> set[tuple[str, str]]:
    return {(record["worker"], record["cause"]) for record in outcome.records("detected")}


def verdicts(outcome: Outcome) -> set[tuple[str, str]]:
    return {(record["worker"], record["verdict"]) for record in outcome.records("corrupt")}


# -- state -----------------------------------------------------------------------------------------


@pytest.mark.promise(
    "with HSDP the ranks that hold the same shard compare a slice of it in each step",
    where="optimizer",
)
@pytest.mark.parametrize("where", ["weight", "optimizer"])
def test_of_two_replicas_the_one_that_contradicts_itself_is_replaced(
    chaos: Any, where: str
) -> None:
    outcome = run(
        chaos,
        BitFlip(rank=2, at_step=AT, parameter=WEIGHT, bit=23, where=where),
        state_hash_steps=4,
    )
    outcome.assert_same_losses_as_twin()
    assert given_up(outcome) == {(first_worker(outcome, 2), "corrupt")}
    assert {record["step"] for record in outcome.records("corrupt")} == {AT}
    (line,) = [check.detail for check in outcome.checks if check.name == "properties"]
    assert "21L" in line, "the judge expects that it is found"
    assert "not compared" not in line


@pytest.mark.slow
@pytest.mark.promise("no copy of a convict's piece is taken over")
def test_the_copies_of_an_outvoted_rank_are_not_taken(chaos: Any) -> None:
    """Copies of a convicted rank are not restored, although their checksums are right.

    The flip is committed and copied before the replicas compare again. The spare is on the node of
    rank 0, and would read its copies first.
    """
    fault = BitFlip(rank=0, at_step=AT, phase="optimizer", parameter=WEIGHT, bit=23)
    outcome = run(chaos, fault, replicas=3)
    outcome.assert_same_losses_as_twin()
    guilty = first_worker(outcome, 0)
    assert given_up(outcome) == {(guilty, "corrupt")}
    copies = {
        record["checksum"] for record in outcome.records("sealed") if record["worker"] == guilty
    }
    assert copies, "its copies were there"
    assert not copies & {record["checksum"] for record in outcome.records("restored")}


@pytest.mark.slow
def test_two_replicas_that_cannot_tell_end_the_job(chaos: Any) -> None:
    """The job ends if the flip came between the comparison and the update.

    The committed states differ, and no rank had another state before.
    """
    fault = BitFlip(rank=2, at_step=AT, phase="optimizer", parameter=WEIGHT, bit=23)
    outcome = run(chaos, fault, check=False, twin=False)
    assert any(f"silent corruption at step {AT + 1}" in reason for reason in outcome.reasons), (
        outcome.reasons
    )
    assert any("no vote can decide" in reason for reason in outcome.reasons)
    assert verdicts(outcome) == {(first_worker(outcome, rank), "undecided") for rank in (0, 2)}
    assert len(outcome.steps) == AT + 1


@pytest.mark.slow
@pytest.mark.promise("With FSDP no other rank has a copy to compare with")
def test_without_replicas_no_check_expects_that_it_is_found(chaos: Any) -> None:
    """A flip that no check promises to find counts neither for the run nor against it."""
    flip = BitFlip(rank=1, at_step=4, parameter=WEIGHT, bit=20)
    plan: dict[str, Any] = {
        "nodes": 2,
        "spares": 0,
        "steps": 20,
        "options": TINY,
        "check": False,
        "twin": False,
    }
    outcome = chaos.run("fsdp", faults=[flip], state_hash_steps=4, **plan)
    assert len(outcome.steps) == 20
    assert not outcome.records("corrupt")
    assert not [check.name for check in outcome.checks if check.verdict != Verdict.PASSED]
    (line,) = [check.detail for check in outcome.checks if check.name == "properties"]
    assert line.endswith(
        "not compared, as each rank alone holds its shard: weights, optimizer state and gradients"
    )


# -- gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_gradient_that_one_replica_received_damaged_is_computed_again(
    chaos: Any, replicas: int
) -> None:
    fault = BitFlip(rank=2, at_step=AT, parameter=WEIGHT, bit=23, where="received")
    outcome = run(chaos, fault, replicas=replicas)
    outcome.assert_same_losses_as_twin()
    assert given_up(outcome) == set()
    assert outcome.lost_steps == 0
    suspects = {0, 2} if replicas == 2 else {2}
    verdict = "undecided" if replicas == 2 else "transfer"
    assert verdicts(outcome) == {(first_worker(outcome, rank), verdict) for rank in suspects}


# -- healthy runs ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", [{"shards": 6}, {"shards": 12}, {"nodes": 2, "shards": 4}], ids=str
)
def test_replicas_agree_whatever_breaks(chaos: Any, plan: dict[str, Any]) -> None:
    """Replicas agree if ranks have several shards, fewer than others, or a whole state, and if one
    is replaced.
    """
    outcome = run(chaos, Kill(rank=1, at_step=AT, phase="optimizer"), state_hash_steps=1, **plan)
    outcome.assert_same_losses_as_twin()
    assert outcome.records("corrupt") == []
    assert {cause for _, cause in given_up(outcome)} == {"exited"}


# -- seals of replicas -----------------------------------------------------------------------------

PARTS, SLICES = 16, 3  # a piece of 3.1 MiB has fewer slices than it might have


@pytest.fixture
def lonely(tmp_path: Path) -> Iterator[None]:
    """Make a world of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/gloo", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Replica:
    """A replica of a piece of 3.1 MiB, with its seals.

    Replicas train alike.
    """

    def __init__(self, replicas: int) -> None:
        torch.manual_seed(3)
        model = nn.Linear(512, 512, dtype=torch.float32)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        self.state = ShardedState(model, torch.optim.Adam(model.parameters(), lr=0.1))
        self._replicas = replicas
        self.enter()

    def enter(self, *, heir: bool = False) -> None:
        """Begin a new membership."""
        job = JobSpec("job.py", sharded=True)
        config = RunConfig(job=job, nodes=2 * self._replicas, state_hash_steps=PARTS)
        self._check = PieceCheck(self.state, config, self._replicas, heir=heir)

    def train(self) -> RankSeal:
        """Train one step, and return the seal of the next."""
        for parameter in self.state.parameters:
            parameter.grad = torch.full_like(parameter, 0.5)
        with self.state.running_optimizers():
            self.state.advance()
        self._check.updated()
        self.state.step += 1
        return self.seal()

    def seal(self) -> RankSeal:
        return self._check.seal()

    def flip(self, tensor: int) -> None:
        """Flip a bit in the last element of one of the tensors."""
        self.state.piece()[tensor].view(-1).view(torch.uint8)[-1] ^= 1


def trained(count: int) -> list[Replica]:
    """Return replicas that have trained one step."""
    replicas = [Replica(count) for _ in range(count)]
    assert len({replica.train() for replica in replicas}) == 1
    return replicas


@pytest.mark.usefixtures("lonely")
@pytest.mark.parametrize("tensor", range(4))
def test_every_byte_is_compared_within_the_steps_that_the_setting_names(tensor: int) -> None:
    replicas = trained(3)
    replicas[1].flip(tensor)
    verdict, steps = examine([replica.seal() for replica in replicas]), 0
    while verdict is None and steps < PARTS:
        verdict, steps = examine([replica.train() for replica in replicas]), steps + 1
    assert verdict is not None
    assert verdict.ranks == (1,)


@pytest.mark.usefixtures("lonely")
@pytest.mark.parametrize("tensor", range(4))
def test_of_two_the_one_that_changed_remembers_it_until_its_slice_is_compared(tensor: int) -> None:
    replicas = trained(2)
    replicas[1].flip(tensor)
    verdict, steps = examine([replica.seal() for replica in replicas]), 0
    while verdict is None and steps < PARTS:
        verdict, steps = examine([replica.train() for replica in replicas]), steps + 1
    assert verdict is not None
    assert verdict.ranks == (1,)


@pytest.mark.usefixtures("lonely")
def test_a_learning_rate_counts_too() -> None:
    replicas = trained(3)
    replicas[2].state.optimizers[0].param_groups[0]["lr"] *= 2
    verdict = examine([replica.seal() for replica in replicas])
    assert verdict is not None
    assert verdict.ranks == (2,)


@pytest.mark.usefixtures("lonely")
def test_a_copied_piece_is_no_witness_until_all_of_it_was_compared() -> None:
    replica = trained(3)[0]
    replica.enter(heir=True)
    heirs = [replica.seal().heir, *(replica.train().heir for _ in range(SLICES))]
    assert heirs == [1] * SLICES + [0]


@pytest.mark.usefixtures("lonely")
def test_a_flip_in_the_first_step_of_a_membership_is_remembered() -> None:
    replicas = trained(2)
    for replica in replicas:
        replica.enter()
    replicas[0].flip(0)
    assert [replica.seal().torn for replica in replicas] == [1, 0]


@pytest.mark.usefixtures("lonely")
def test_a_piece_that_no_other_rank_holds_is_not_read() -> None:
    assert Replica(1).train() == RankSeal()
