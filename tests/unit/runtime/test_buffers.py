"""Buffers that the forward pass changes: detected, kept from peers while they move, merged in a
single order, or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput
from chaoskit.job import JobSpec
from chaoskit.runtime.integrity.voting import RankSeal
from chaoskit.runtime.reduction.choice import Reduced
from chaoskit.runtime.reduction.sidecar import SidecarLayout, digest
from chaoskit.runtime.state.buffers import MovingBuffers, same_bits
from chaoskit.runtime.state.replica import Replica
from chaoskit.runtime.step.shardwork import ShardWork, Update


def network() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))


def batch(step: int, shard: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + shard)) * (
        1 + shard
    )


class Rank:
    """A world of a single rank that computes whole steps, as the trainer does."""

    def __init__(self, model: nn.Module, shards: int = 4, lr: float = 0.1) -> None:
        self.model, self.shards = model, shards
        self.replica = Replica(model, torch.optim.SGD(model.parameters(), lr=lr), None)
        self.work = ShardWork(self.replica, RunConfig(job=JobSpec("job.py"), nodes=shards))
        self.arrived: list[
            list[Tensor]
        ] = []  # the arrived gradients as the reductions showed them, before they were read
        self.compute(0, 0)

    def compute(self, step: int, shard: int) -> None:
        counts = self.work._buffers.is_known
        self.work.begin(shard, overlap=False, launch=False)
        self.work.backward(self.model(batch(step, shard)).square().mean())
        self.work.end(shard)
        if counts:
            self.work.keep(shard, [])

    def reduced(self) -> Reduced:
        self.work.reducer.begin(None, [range(self.shards)])
        sidecar = self.work.sidecar(range(self.shards), 1, RankSeal())
        return self.work.reduce(sidecar, verify=True, arrived=self.arrived.append)

    def reduce(self) -> Update:
        return self.work.update_of(self.reduced())

    def step(self, order: Sequence[int] | None = None) -> None:
        for shard in order or range(self.shards):
            self.compute(self.replica.step, shard)
        gradients, moved = self.reduce()
        for parameter, gradient in zip(self.replica.parameters, gradients, strict=True):
            parameter.grad = gradient
        with self.replica.update():
            self.replica.advance()
            self.replica.buffers.commit(moved.differences, moved.integers)
        self.work.forget()


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


# -- what is committed -----------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3, 4])
def test_batchnorm_commits_the_mean_over_the_shards(shards: int) -> None:
    """Each shard alone moves the running averages from the committed values; the mean of the
    results is committed.
    """
    rank = Rank(network(), shards)
    for step in range(3):
        alone = []
        for shard in range(shards):
            copy = deepcopy(rank.model)
            copy(batch(step, shard))
            alone.append(statistics(copy))
        rank.step()
        for name, statistic in statistics(rank.model).items():
            expected = torch.stack([of_shard[name].double() for of_shard in alone]).mean(0)
            torch.testing.assert_close(statistic.double(), expected, rtol=1e-6, atol=1e-7)
    assert int(rank.model[1].num_batches_tracked) == 3


def test_what_has_arrived_is_shown_without_the_buffers() -> None:
    """A fault that strikes received data finds its parameter by number."""
    rank = Rank(network())
    rank.step()
    (views,) = rank.arrived
    assert [view.shape for view in views] == [
        parameter.shape for parameter in rank.replica.parameters
    ]


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(6)))
def test_the_order_of_computation_changes_no_bit(order: list[int]) -> None:
    """The tree alone decides the order in which buffers are added; the rank and the time of a shard
    do not matter.
    """
    in_order, reordered = Rank(network(), 6), Rank(network(), 6)
    for _ in range(2):
        in_order.step()
        reordered.step(order)
    assert in_order.replica.state_digest() == reordered.replica.state_digest()


def test_statistics_at_rest_stay_bit_for_bit() -> None:
    """Statistics do not move in evaluation mode; thirds that are added up again would."""
    rank = Rank(network(), 3)
    rank.step()
    before = statistics(rank.model)
    rank.model.eval()
    rank.step()
    assert all(same_bits(before[name], now) for name, now in statistics(rank.model).items())
    rank.model.train()
    rank.step()
    assert not same_bits(before["1.running_mean"], rank.model[1].running_mean)


def test_statistics_that_slept_in_the_rehearsal_are_followed() -> None:
    model = network().eval()
    rank = Rank(model, 2)
    assert set(rank.replica.buffers.committed) == {name for name, _ in model.named_buffers()}
    model.train()
    rank.step()
    assert int(model[1].num_batches_tracked) == 1


# -- what others see -------------------------------------------------------------------------------


def test_peers_see_committed_values_while_a_shard_is_computed() -> None:
    rank = Rank(network())
    rank.step()
    arena = rank.replica.arena
    assert arena is not None
    committed, digest_before = bytes(arena.data()), rank.replica.state_digest()
    rank.work.begin(0, overlap=False, launch=False)
    loss = rank.model(batch(1, 0)).mean()
    assert not same_bits(
        rank.model[1].running_mean, rank.replica.buffers.committed["1.running_mean"]
    )
    assert (bytes(arena.data()), rank.replica.state_digest()) == (committed, digest_before)
    rank.work.backward(loss)
    rank.work.end(0)
    assert same_bits(rank.model[1].running_mean, rank.replica.buffers.committed["1.running_mean"])


def test_the_rehearsal_leaves_every_buffer_as_it_was() -> None:
    model = network()
    before = statistics(model)
    rank = Rank(model)
    assert all(same_bits(before[name], now) for name, now in statistics(model).items())
    assert all(rank.replica.arena.holds(home) for home in rank.replica.buffers.committed.values())


@pytest.mark.parametrize("shared", [True, False])
def test_a_state_that_is_taken_over_is_what_the_model_computes_with(shared: bool) -> None:
    ahead, behind = Rank(network()), Rank(network())
    ahead.step()
    ahead.step()
    if shared:
        own_arena, arena_of_peer = behind.replica.arena, ahead.replica.arena
        assert own_arena is not None
        assert arena_of_peer is not None
        behind.replica.prepare_layout(arena_of_peer.index_bytes(), arena_of_peer.size_bytes)
        own_arena.data()[:] = arena_of_peer.data()
    else:
        index, _, data = ahead.replica.pack()
        behind.replica.unpack(index, data)
    behind.replica.load_scalars(ahead.replica.scalars(), ahead.replica.step)
    assert same_bits(behind.model[1].running_var, ahead.model[1].running_var)
    ahead.step()
    behind.step()
    assert behind.replica.state_digest() == ahead.replica.state_digest()


def test_a_model_without_such_buffers_pays_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    model.register_buffer("mask", torch.ones(3))
    rank = Rank(model)
    assert not rank.replica.buffers.committed
    assert rank.work.reducer.layout.numel == sum(
        -(-p.numel() // 16) * 16 for p in model.parameters()
    )


# -- what is refused -------------------------------------------------------------------------------


class Odd(nn.Module):
    """Module that calls ``act`` on itself in a forward pass."""

    def __init__(self, act: Callable[[Odd], None]) -> None:
        super().__init__()
        self.act = act
        self.linear = nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("number", torch.zeros((), dtype=torch.int64))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.act(self)
        result: Tensor = self.linear(x)
        return result


def refused(act: Callable[[Odd], None], name: str, remedy: str, shards: int = 2) -> None:
    with pytest.raises(BadInput, match=remedy) as caught:
        Rank(Odd(act), shards).step()
    assert name in str(caught.value.value)


def test_buffers_that_cannot_be_merged_are_refused() -> None:
    """Each refused buffer is named, with a remedy."""
    refused(lambda odd: odd.register_buffer("late", torch.zeros(1)), "late", "in __init__")
    refused(
        lambda odd: setattr(odd, "seen", torch.zeros(odd.calls)), "seen", "keep the shape and type"
    )
    refused(lambda odd: odd.calls > 1 and odd.seen.add_(1), "seen", "the first forward pass")
    refused(lambda odd: odd.number.fill_(odd.calls), "number", "integers cannot be averaged")


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_a_spectral_norm_that_has_converged_at_first_goes_on_later(
    norm: Callable[[nn.Module], nn.Module],
) -> None:
    """The power iteration writes the same bits in the first pass, and others once the weight has
    changed.
    """
    torch.manual_seed(5)
    layer = norm(nn.Linear(4, 6))
    with torch.no_grad():
        for _ in range(300):
            layer(batch(0, 0))
    before = statistics(layer)
    layer(batch(0, 0))
    assert all(
        torch.equal(before[name], after)
        for name, after in statistics(layer).items()
        if name in before
    )
    rank = Rank(nn.Sequential(layer, nn.Linear(6, 2)))
    for _ in range(3):
        rank.step()
    moved = statistics(rank.model)
    assert any(not torch.equal(value, moved[f"0.{name}"]) for name, value in before.items())


@pytest.mark.parametrize(
    "act",
    [
        lambda odd: odd.seen.add_(odd.calls > 1),
        lambda odd: odd.seen.copy_(torch.full((2,), float(odd.calls // 3))),
        lambda odd: setattr(odd, "seen", odd.seen + (odd.calls > 2)),
        lambda odd: odd.number.fill_(odd.work_step),
    ],
    ids=["counter that starts late", "observer", "replaced by an equal one", "number"],
)
def test_a_buffer_that_keeps_its_value_in_the_first_pass_may_move_later(
    act: Callable[[Odd], None],
) -> None:
    odd = Odd(act)
    odd.work_step = 0
    rank = Rank(odd, 2)
    for odd.work_step in range(3):
        rank.step()


def test_ranks_that_disagree_are_told() -> None:
    """The other rank has another integer buffer, or another frozen parameter."""
    rank = Rank(network(), 2)
    for place, remedy in (
        ("integers_at", "integers cannot be averaged"),
        ("frozen_at", "trainer.step alone"),
    ):
        rank.work.forget()
        rank.compute(0, 0)
        rank.compute(0, 1)
        reduced = rank.reduced()
        other = reduced.sidecars.clone()
        other[0, getattr(rank.work._sidecar_layout, place)] += 1
        object.__setattr__(reduced, "sidecars", torch.cat([reduced.sidecars, other]))
        with pytest.raises(BadInput, match=remedy):
            rank.work.update_of(reduced)


def test_a_training_pass_outside_of_a_step_is_refused() -> None:
    rank = Rank(network())
    rank.model.eval()
    rank.model(batch(0, 0))
    rank.model.train()
    rank.step()
    rank.model(batch(0, 0))
    with pytest.raises(BadInput, match=r"call model.eval\(\)") as caught:
        rank.step()
    assert caught.value.value == "1.running_mean"


def test_what_was_frozen_at_first_cannot_learn_later() -> None:
    model = network()
    model[0].requires_grad_(False)
    rank = Rank(model)
    rank.step()
    model[3].requires_grad_(False)
    model[1].requires_grad_(True)
    rank.step()
    model[0].weight.requires_grad_(True)
    with pytest.raises(BadInput, match="before you freeze") as caught:
        rank.step()
    assert caught.value.value == "0.weight"


def test_gradients_that_are_cleared_or_sparse_are_refused() -> None:
    rank = Rank(network())
    rank.work.begin(0, overlap=False, launch=False)
    rank.work.backward(rank.model(batch(0, 0)).mean())
    rank.model.zero_grad()
    rank.work.end(0)
    with pytest.raises(BadInput, match="do not clear gradients"):
        rank.work.keep(0, [])

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(4, 2, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            vectors: Tensor = self.embedding(x.flatten().long() % 4)
            return vectors

    with pytest.raises(BadInput, match="sparse=False") as caught:
        Rank(Sparse())
    assert caught.value.value == "embedding.weight"


# -- bits ------------------------------------------------------------------------------------------


def test_same_bits_tells_zeros_apart_and_nan_not() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.empty(0, 3), torch.empty(0, 3))
    assert same_bits(torch.tensor(True), torch.tensor(True))


def test_tied_buffers_stay_one() -> None:
    model = nn.ModuleList([nn.BatchNorm1d(3), nn.BatchNorm1d(3)])
    model[1].running_mean = model[0].running_mean
    buffers = MovingBuffers(model)
    buffers.watch()
    model[0](torch.randn(4, 3))
    assert buffers.discover()
    model[0](torch.randn(4, 3))
    assert model[1].running_mean is model[0].running_mean


@given(st.integers(1, 200), st.data())
def test_the_sidecar_carries_every_bit_of_presence(parameters: int, data: st.DataObject) -> None:
    layout = SidecarLayout(3, parameters)
    masks = data.draw(st.lists(st.integers(0, (1 << parameters) - 1), min_size=1, max_size=4))
    word = digest(b"any")
    rows = [layout.write({1: 2.5}, frozen=word, integers=0, present=mask, vote=7) for mask in masks]
    together = 0
    for mask in masks:
        together |= mask
    sidecars = torch.stack(rows)
    assert layout.present(sidecars) == together
    assert layout.agree(sidecars, layout.frozen_at)
    assert all(
        int(row[layout.frozen_at]) == word and row[1] == 2.5 and row[-1] == 7 for row in rows
    )


@pytest.mark.parametrize("words", [[1, 2], [1, 2, 3, 4]])
def test_a_seal_of_another_length_is_refused(words: list[int]) -> None:
    """Ranks would otherwise exchange tensors of different sizes."""
    layout = SidecarLayout(2, 5, 3)
    marks = {"frozen": 1, "integers": 2, "present": 3, "vote": 4}
    assert layout.write({0: 0.5}, **marks, seal=[-1, 2**62, 3]).numel() == layout.size
    assert layout.write({0: 0.5}, **marks).numel() == layout.size
    with pytest.raises(ValueError, match=f"a seal of {len(words)} words"):
        layout.write({0: 0.5}, **marks, seal=words)
