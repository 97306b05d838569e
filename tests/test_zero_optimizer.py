"""ZeroOptimizer alone: how it shares out rows, what it refuses, and that its bits are those of the plain optimizer."""

from __future__ import annotations

import itertools
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import ranks
from support.ranks import Line
from test_world import make
from torch import Tensor, nn, optim

from chaoskit.checkpoint.layout import cover, whole
from chaoskit.errors import BadInput
from chaoskit.runtime.gradients import FlatLayout
from chaoskit.runtime.zero import ZeroOptimizer
from chaoskit.runtime.zero.cut import cut, slices
from chaoskit.runtime.zero.elementwise import require_elementwise

CPU = torch.device("cpu")
WORLD = 3
STEPS = 4


# -- the cut ----------------------------------------------------------------------------------------------------------

SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=6)


def layout_of(shapes: list[tuple[int, ...]]) -> FlatLayout:
    return FlatLayout(shapes, [torch.float32] * len(shapes), CPU)


@given(SHAPES, st.integers(1, 9), st.integers(1, 9))
def test_every_element_has_one_owner_and_any_world_reads_the_boxes_of_any_other(
    shapes: list[tuple[int, ...]], parts: int, others: int
) -> None:
    layout = layout_of(shapes)
    stored = [one for low, high in itertools.pairwise(cut(layout, parts)) for one in slices(layout, low, high)]
    for number, shape in enumerate(shapes):
        boxes = [one.box for one in stored if one.number == number]
        assert sum(box.size for box in boxes) == prod(shape)
        if prod(shape):
            cover(whole(shape), boxes)
    for low, high in itertools.pairwise(cut(layout, others)):
        for one in slices(layout, low, high):
            assert one.stop - one.start == one.box.size
            cover(one.box, [other.box for other in stored if other.number == one.number])


@given(SHAPES, st.integers(1, 9))
def test_parts_are_as_large_as_each_other_up_to_a_row(shapes: list[tuple[int, ...]], parts: int) -> None:
    layout = layout_of(shapes)
    row = max(prod(shape[1:]) if len(shape) > 1 else 32 for shape in shapes)
    for low, high in itertools.pairwise(cut(layout, parts)):
        assert abs(high - low - layout.numel / parts) <= row + 32


# -- what is refused --------------------------------------------------------------------------------------------------


class Lion(optim.Optimizer):
    """As many people have it: its step count is a plain number."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["moment"], state["step"] = torch.zeros_like(parameter), 0
                state["step"] += 1
                update = (state["moment"] * 0.9 + parameter.grad * 0.1).sign_()
                parameter.add_(update, alpha=-group["lr"] / state["step"])
                state["moment"].mul_(0.99).add_(parameter.grad, alpha=0.01)


ELEMENTWISE: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (optim.Adam, {"amsgrad": True}),
    (optim.AdamW, {"fused": True}),
    (optim.AdamW, {"foreach": True}),
    (optim.AdamW, {"lr": 0.0}),
    (optim.Adagrad, {}),
    (optim.RMSprop, {"centered": True}),
    (optim.NAdam, {}),
    (optim.Rprop, {}),
    (Lion, {}),
]


@pytest.mark.parametrize(("kind", "options"), ELEMENTWISE)
def test_elementwise_optimizers_are_known_by_what_they_do(kind: type[optim.Optimizer], options: dict[str, Any]) -> None:
    numbers = require_elementwise(kind, options, CPU)
    assert numbers == ({"step"} if kind is Lion else set())


class Normalised(optim.SGD):
    """Divides by the norm of the gradient, as LARS and LAMB do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(parameter.grad.norm())
        super().step()


@pytest.mark.parametrize("kind", [optim.Muon, optim.Adafactor, optim.LBFGS, optim.SparseAdam, Normalised])
def test_what_looks_at_whole_tensors_is_refused(kind: type[optim.Optimizer]) -> None:
    with pytest.raises(BadInput, match="treats each element for itself") as refused:
        require_elementwise(kind, {}, CPU)
    assert refused.value.value == kind.__name__


def test_trying_an_optimizer_uses_no_random_numbers_of_the_job() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    require_elementwise(optim.AdamW, {}, CPU)
    assert torch.equal(torch.rand(1), expected)


# -- the bits of the plain optimizer ----------------------------------------------------------------------------------


def build() -> nn.Module:
    """Rows that no world divides, a scalar, a frozen one, and one that has a gradient on one rank only."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 7), nn.LayerNorm(7))
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.5)))
    model.register_parameter("rare", nn.Parameter(torch.ones(5, 2)))
    model.register_parameter("unused", nn.Parameter(torch.ones(9)))
    model[2].bias.requires_grad_(False)
    return model


def loss_of(model: Any, step: int, rank: int) -> Tensor:
    torch.manual_seed(100 * step + rank)
    loss: Tensor = (model(model(torch.randn(4, 7))) * model.scale).square().mean()
    return loss + model.rare.square().sum() if rank == 1 and step else loss


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.03}]


def train_plain(kind: type[optim.Optimizer], options: dict[str, Any], max_norm: float | None) -> list[Tensor]:
    """One process, with the gradients of all ranks, added as the canonical tree adds them."""
    model = build()
    optimizer = kind(groups_of(model), **options)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(STEPS):
        found: list[list[Tensor | None]] = []
        for rank in range(WORLD):
            model.zero_grad()
            loss_of(model, step, rank).backward()
            found.append([one.grad for one in model.parameters()])
        for parameter, grads in zip(model.parameters(), zip(*found, strict=True), strict=True):
            first, second, third = (torch.zeros_like(parameter) if one is None else one for one in grads)
            parameter.grad = None if all(one is None for one in grads) else ((first + second) + third).mul_(1 / WORLD)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        scheduler.step()
    return [one.detach() for one in model.parameters()]


def train_zero(line: Line, directory: Path, kind: Any, options: dict[str, Any], max_norm: float | None) -> Any:
    world = make(line.rank, WORLD, directory / "store")
    model = build()
    optimizer = ZeroOptimizer(groups_of(model), kind, mesh=world.mesh({"shard": WORLD}), **options)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, line.rank).backward()
        if max_norm is not None:
            optimizer.clip_grad_norm_(max_norm)
        optimizer.step()
        scheduler.step()
    tensors = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    return [one.detach().tolist() for one in model.parameters()], sum(one.numel() for one in tensors)


@pytest.mark.promise("Any optimizer that treats each element for itself will do", kind=Lion)
@pytest.mark.costly
@pytest.mark.parametrize(("kind", "options"), [*ELEMENTWISE[:3], ELEMENTWISE[-1]])
def test_weights_have_the_bits_of_the_plain_optimizer_on_every_rank(
    tmp_path: Path, kind: type[optim.Optimizer], options: dict[str, Any]
) -> None:
    found = ranks.results(WORLD, train_zero, tmp_path, kind, options, None)
    expected = [one.tolist() for one in train_plain(kind, options, None)]
    assert [weights for weights, _ in found] == [expected] * WORLD
    if kind is Lion:
        unused, scale = 9, 1
        trained = sum(one.numel() for one in build().parameters() if one.requires_grad) - unused - scale
        assert sum(elements for _, elements in found) == trained
        assert max(elements for _, elements in found) < trained / 2  # rows of 13, and one rank has what is never used


@pytest.mark.costly
def test_the_norm_is_that_of_the_whole_gradient(tmp_path: Path) -> None:
    found = ranks.results(WORLD, train_zero, tmp_path, optim.SGD, {"lr": 0.1}, 0.05)
    expected = train_plain(optim.SGD, {"lr": 0.1}, 0.05)
    for weights, _ in found:
        for one, other in zip(weights, expected, strict=True):
            torch.testing.assert_close(torch.tensor(one), other)
    assert found[0][0] == found[1][0] == found[2][0]


def restored(line: Line, directory: Path, kind: Any, options: dict[str, Any], state: dict[str, Any]) -> Any:
    """The state of a plain optimizer is taken over, and given back after a step, in whatever form that has it."""
    world = make(line.rank, WORLD, directory / "store")
    model = build()
    optimizer = ZeroOptimizer(groups_of(model), kind, mesh=world.mesh({"shard": WORLD}), **options)
    optimizer.load_state_dict(state)
    same = _listed(whole_state := optimizer.state_dict())
    plain = kind(groups_of(other := build()), **options)
    plain.load_state_dict(whole_state)
    for trained, one in ((model, optimizer), (other, plain)):
        for parameter in trained.parameters():
            parameter.grad = torch.full_like(parameter, 0.3) if parameter.requires_grad else None
        one.step()
    return [same, _listed(optimizer.state_dict()), _listed(plain.state_dict())]


def _listed(state: dict[str, Any]) -> Any:
    """As values that can be compared."""
    return [
        {
            number: {key: torch.as_tensor(one).tolist() for key, one in kept.items()}
            for number, kept in state["state"].items()
        },
        [{key: value for key, value in group.items() if key in ("params", "lr")} for group in state["param_groups"]],
    ]


@pytest.mark.costly
@pytest.mark.parametrize(("kind", "options"), [ELEMENTWISE[1], ELEMENTWISE[-1]])
def test_the_state_dict_is_that_of_the_plain_optimizer(
    tmp_path: Path, kind: type[optim.Optimizer], options: dict[str, Any]
) -> None:
    model = build()
    plain = kind(groups_of(model), **options)
    for step in range(2):
        loss_of(model, step, 1).backward()
        plain.step()
    state = plain.state_dict()
    found = ranks.results(WORLD, restored, tmp_path, kind, options, state)
    assert found[0] == found[1] == found[2]
    same, after, expected = found[0]
    assert same == _listed(state)
    assert after == expected


def misuse(line: Line, directory: Path) -> Any:
    world = make(line.rank, 2, directory / "store")
    mesh, told = world.mesh({"shard": 2}), []
    model = nn.Linear(4, 4)
    acts = [
        lambda: ZeroOptimizer(model.parameters(), optim.Muon, mesh=mesh),
        lambda: ZeroOptimizer(model.parameters(), optim.SGD, mesh=world.mesh({"a": 1, "b": 2})),
        lambda: ZeroOptimizer([model.weight, nn.Parameter(torch.ones(2).half())], optim.SGD, mesh=mesh),
        lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
        lambda: optimizer.step(lambda: 1.0),
        lambda: (model.double(), optimizer.step()),
    ]
    optimizer = ZeroOptimizer(model.parameters(), optim.SGD, mesh=mesh, lr=0.1)
    for act in acts:
        try:
            act()
        except BadInput as error:
            told.append(error.field)
    return told


@pytest.mark.costly
def test_mistakes_are_named_before_anybody_waits(tmp_path: Path) -> None:
    expected = ["optimizer", "mesh", "params", "optimizer", "closure", "model"]
    assert ranks.results(2, misuse, tmp_path) == [expected, expected]
