"""The slices of the state that ranks compare: ranges of the arena where all arenas are laid out
alike.
"""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn

from chaoskit.config import RunConfig
from chaoskit.job import JobSpec
from chaoskit.runtime.integrity.rank_checks import RankChecks
from chaoskit.runtime.integrity.slices import ArenaSlices
from chaoskit.runtime.integrity.voting import RankSeal, SuspectRanks, examine
from chaoskit.runtime.state.replica import Replica
from chaoskit.runtime.state.script_writes import ScriptWrites
from chaoskit.wire.messages import Endpoint, Member, Plan

PARTS = 16
WORLD = 3
NOWHERE = Endpoint("host", "", 0, 0, 0)
PLAN = Plan(
    1,
    tuple(Member(rank, f"node{rank}.0", f"node{rank}", NOWHERE, (rank,)) for rank in range(WORLD)),
    True,
)


def replica(*, aside: bool = False) -> Replica:
    """Return a replica that has trained one step.

    Args:
        aside: place its optimizer's tensors behind another slot.
    """
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(7, 33), nn.BatchNorm1d(33), nn.Linear(33, 5))
    trained = Replica(model, torch.optim.AdamW(model.parameters(), lr=0.1), None)
    if aside:
        assert trained.arena is not None
        trained.arena.slot("something else", torch.float32, (10,))
    train(trained)
    return trained


def train(replica: Replica) -> None:
    for number, parameter in enumerate(replica.parameters):
        parameter.grad = torch.full_like(parameter, 0.1 * number)
    with replica.update():
        replica.advance()


def rank(replica: Replica) -> RankChecks:
    config = RunConfig(job=JobSpec("job.py"), nodes=WORLD, state_hash_steps=PARTS)
    return RankChecks(replica, config, ScriptWrites())


def share(ranks: list[RankChecks]) -> SuspectRanks | None:
    """Exchange seals once, and return the conclusion of all ranks."""
    plan = msgspec.structs.replace(PLAN, members=PLAN.members[: len(ranks)])
    seals = [integrity.seal(plan, number) for number, integrity in enumerate(ranks)]
    suspicions = [examine(integrity.comparable(seals)) for integrity in ranks]
    assert suspicions.count(suspicions[0]) == len(suspicions), "all conclude the same"
    return suspicions[0]


def flip(replica: Replica) -> None:
    """Flip the last bit of the state."""
    (_, last) = list(replica.tensors())[-1]
    last.view(-1).view(torch.uint8)[-1] ^= 1


def test_slices_cover_each_byte_of_each_tensor_once() -> None:
    """Gaps between two tensors, which may differ from rank to rank, are not covered."""
    trained = replica()
    assert trained.arena is not None
    slices, data = ArenaSlices(trained.arena, PARTS), trained.arena.data()
    before = [slices.digest(part) for part in range(PARTS)]
    assert 0 not in before
    covered = 0
    for place in range(len(data)):
        data[place] ^= 1
        changed = [part for part in range(PARTS) if slices.digest(part) != before[part]]
        data[place] ^= 1
        assert len(changed) <= 1
        covered += len(changed)
    assert covered == sum(tensor.numel() * tensor.element_size() for _, tensor in trained.tensors())


def test_slices_follow_the_layout() -> None:
    """A tensor that comes later is a part of the slices afterwards."""
    trained = replica()
    assert trained.arena is not None
    slices = ArenaSlices(trained.arena, 1)
    layout, digest = slices.layout, slices.digest(0)
    trained.optimizers[0].state[trained.parameters[0]]["more"] = torch.ones(3)
    trained.rehome()
    assert slices.layout not in (0, layout)
    assert slices.digest(0) != digest


def test_arenas_that_are_laid_out_alike_have_the_same_slices() -> None:
    first, second = (
        ArenaSlices(trained.arena, PARTS)
        for trained in (replica(), replica())
        if trained.arena is not None
    )
    assert first.layout == second.layout
    assert [first.digest(part) for part in range(PARTS)] == [
        second.digest(part) for part in range(PARTS)
    ]


@pytest.mark.parametrize("aside", [False, True])
def test_equal_states_are_equal_however_they_are_laid_out(aside: bool) -> None:
    """Tensors are compared one by one until the layouts of a generation are known, and while they
    differ.
    """
    replicas = [replica(), replica(), replica(aside=aside)]
    ranks = [rank(trained) for trained in replicas]
    for step in range(3 * PARTS):
        if step == PARTS:
            for member in ranks:
                member.enter()
        assert share(ranks) is None
        for member in replicas:
            train(member)


@pytest.mark.parametrize("aside", [False, True])
def test_a_flipped_bit_convicts_its_rank_within_as_many_steps_as_there_are_slices(
    aside: bool,
) -> None:
    replicas = [replica(), replica(), replica(aside=aside)]
    ranks = [rank(trained) for trained in replicas]
    for _ in range(2):
        assert share(ranks) is None
        for trained in replicas:
            train(trained)
    flip(replicas[1])
    for _ in range(PARTS):
        if (suspicion := share(ranks)) is not None:
            break
        for trained in replicas:
            train(trained)
    assert suspicion is not None
    assert suspicion.ranks == (1,)


def test_a_layout_that_changes_on_one_rank_accuses_none() -> None:
    """The words of that step are not comparable; afterwards tensors are compared one by one."""
    replicas = [replica() for _ in range(WORLD)]
    ranks = [rank(trained) for trained in replicas]
    assert share(ranks) is None
    state = replicas[2].optimizers[0].state[replicas[2].parameters[0]]
    state["exp_avg"] = state["exp_avg"].reshape(-1)
    replicas[2].rehome()
    assert share(ranks) is None
    seals = [integrity.seal(PLAN, number) for number, integrity in enumerate(ranks)]
    assert len({seal.layout for seal in seals}) == 2
    assert len({seal.state for seal in seals}) == 1
    assert seals[0] != RankSeal()


@pytest.mark.parametrize("at_step", [3, 4, 11, 19])
def test_of_two_ranks_the_one_with_a_flipped_bit_in_any_slice_convicts_itself(at_step: int) -> None:
    """The rank remembers that the slice has changed between two commits until all compare it."""
    replicas = [replica(), replica()]
    ranks = [rank(trained) for trained in replicas]
    for step in range(at_step + PARTS):
        if step == at_step:
            flip(replicas[1])
        if (suspicion := share(ranks)) is not None:
            break
        for trained, integrity in zip(replicas, ranks, strict=True):
            train(trained)
            integrity.committed(0, 2)
    assert suspicion is not None
    assert suspicion.ranks == (1,)


def test_a_script_that_changes_the_state_of_all_ranks_convicts_none() -> None:
    """The script changes the state between two commits, alike on all ranks: self-contradiction
    proves nothing then.
    """
    replicas = [replica(), replica()]
    ranks = [rank(trained) for trained in replicas]
    for _ in range(2 * PARTS):
        for trained in replicas:
            trained.parameters[0].data.clamp_(-0.01, 0.01)
        assert share(ranks) is None
        for trained, integrity in zip(replicas, ranks, strict=True):
            train(trained)
            integrity.committed(0, 2)
