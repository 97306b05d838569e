"""The slices of the state that ranks compare: ranges of the arena where all arenas are laid out alike."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn

from chaoskit.config import RunConfig
from chaoskit.job import JobSpec
from chaoskit.runtime.integrity.rank_seal import Integrity
from chaoskit.runtime.integrity.slices import ArenaSlices
from chaoskit.runtime.integrity.voting import Seal, Suspicion, examine
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
    """A replica that has trained one step. ``aside``: its optimizer's tensors lie behind something else."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(7, 33), nn.BatchNorm1d(33), nn.Linear(33, 5))
    made = Replica(model, torch.optim.AdamW(model.parameters(), lr=0.1), None)
    if aside:
        assert made.arena is not None
        made.arena.slot("something else", torch.float32, (10,))
    train(made)
    return made


def train(replica: Replica) -> None:
    for number, parameter in enumerate(replica.parameters):
        parameter.grad = torch.full_like(parameter, 0.1 * number)
    with replica.update():
        replica.advance()


def rank(replica: Replica) -> Integrity:
    config = RunConfig(job=JobSpec("job.py"), nodes=WORLD, state_hash_steps=PARTS)
    return Integrity(replica, config, ScriptWrites())


def share(ranks: list[Integrity]) -> Suspicion | None:
    """One exchange of seals, and what all ranks conclude from it."""
    plan = msgspec.structs.replace(PLAN, members=PLAN.members[: len(ranks)])
    seals = [one.seal(plan, number) for number, one in enumerate(ranks)]
    found = [examine(one.comparable(seals)) for one in ranks]
    assert found.count(found[0]) == len(found), "all conclude the same"
    return found[0]


def flip(replica: Replica) -> None:
    """The last bit of the state."""
    (_, last) = list(replica.tensors())[-1]
    last.view(-1).view(torch.uint8)[-1] ^= 1


def test_slices_cover_each_byte_of_each_tensor_once() -> None:
    """And nothing between two tensors, which may differ from rank to rank."""
    made = replica()
    assert made.arena is not None
    slices, data = ArenaSlices(made.arena, PARTS), made.arena.data()
    before = [slices.digest(part) for part in range(PARTS)]
    assert 0 not in before
    covered = 0
    for place in range(len(data)):
        data[place] ^= 1
        changed = [part for part in range(PARTS) if slices.digest(part) != before[part]]
        data[place] ^= 1
        assert len(changed) <= 1
        covered += len(changed)
    assert covered == sum(tensor.numel() * tensor.element_size() for _, tensor in made.tensors())


def test_slices_follow_the_layout() -> None:
    """A tensor that comes later is a part of them from then on."""
    made = replica()
    assert made.arena is not None
    slices = ArenaSlices(made.arena, 1)
    layout, digest = slices.layout, slices.digest(0)
    made.optimizers[0].state[made.parameters[0]]["more"] = torch.ones(3)
    made.rehome()
    assert slices.layout not in (0, layout)
    assert slices.digest(0) != digest


def test_arenas_that_are_laid_out_alike_have_the_same_slices() -> None:
    first, second = (
        ArenaSlices(made.arena, PARTS) for made in (replica(), replica()) if made.arena is not None
    )
    assert first.layout == second.layout
    assert [first.digest(part) for part in range(PARTS)] == [
        second.digest(part) for part in range(PARTS)
    ]


@pytest.mark.parametrize("aside", [False, True])
def test_equal_states_are_equal_however_they_are_laid_out(aside: bool) -> None:
    """Until the layouts of a generation are known, and where they differ, tensors are compared one by one."""
    replicas = [replica(), replica(), replica(aside=aside)]
    ranks = [rank(one) for one in replicas]
    for step in range(3 * PARTS):
        if step == PARTS:
            for one in ranks:
                one.enter()
        assert share(ranks) is None
        for one in replicas:
            train(one)


@pytest.mark.parametrize("aside", [False, True])
def test_a_flipped_bit_convicts_its_rank_within_as_many_steps_as_there_are_slices(
    aside: bool,
) -> None:
    replicas = [replica(), replica(), replica(aside=aside)]
    ranks = [rank(one) for one in replicas]
    for _ in range(2):
        assert share(ranks) is None
        for one in replicas:
            train(one)
    flip(replicas[1])
    for _ in range(PARTS):
        if (suspicion := share(ranks)) is not None:
            break
        for one in replicas:
            train(one)
    assert suspicion is not None
    assert suspicion.ranks == (1,)


def test_a_layout_that_changes_on_one_rank_accuses_none() -> None:
    """The words of that step are not comparable; from the next one on tensors are compared one by one."""
    replicas = [replica() for _ in range(WORLD)]
    ranks = [rank(one) for one in replicas]
    assert share(ranks) is None
    state = replicas[2].optimizers[0].state[replicas[2].parameters[0]]
    state["exp_avg"] = state["exp_avg"].reshape(-1)
    replicas[2].rehome()
    assert share(ranks) is None
    seals = [one.seal(PLAN, number) for number, one in enumerate(ranks)]
    assert len({seal.layout for seal in seals}) == 2
    assert len({seal.state for seal in seals}) == 1
    assert seals[0] != Seal()


@pytest.mark.parametrize("at_step", [3, 4, 11, 19])
def test_of_two_ranks_the_one_with_a_flipped_bit_in_any_slice_convicts_itself(at_step: int) -> None:
    """It remembers that the slice has changed between two commits until all compare it."""
    replicas = [replica(), replica()]
    ranks = [rank(one) for one in replicas]
    for step in range(at_step + PARTS):
        if step == at_step:
            flip(replicas[1])
        if (suspicion := share(ranks)) is not None:
            break
        for one, integrity in zip(replicas, ranks, strict=True):
            train(one)
            integrity.committed(0, 2)
    assert suspicion is not None
    assert suspicion.ranks == (1,)


def test_a_script_that_changes_the_state_of_all_ranks_convicts_none() -> None:
    """It does so between two commits, alike on all ranks: that a rank contradicts itself says nothing then."""
    replicas = [replica(), replica()]
    ranks = [rank(one) for one in replicas]
    for _ in range(2 * PARTS):
        for one in replicas:
            one.parameters[0].data.clamp_(-0.01, 0.01)
        assert share(ranks) is None
        for one, integrity in zip(replicas, ranks, strict=True):
            train(one)
            integrity.committed(0, 2)
