"""State of a script's own optimizers is carried over wherever it is kept, or refused by name."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from chaoskit import BadInput, Chaos
from chaoskit.runtime.state.naming import path_of, stored_name
from chaoskit.runtime.state.optimizer_state import assemble, decode, encode, tensors_in
from chaoskit.runtime.state.replica import Replica
from chaoskit.vocabulary import Event
from faults import Kill

Act = Callable[["Custom", nn.Parameter], Any]


class Custom(Optimizer):
    """A plain gradient descent; ``act`` keeps something in each step."""

    def __init__(self, model: nn.Module, act: Act, **defaults: Any) -> None:
        super().__init__(model.parameters(), {"lr": 0.1} | defaults)
        self.act = act
        self.parameters = list(model.parameters())
        self.model = model
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.options = {"nesterov": True, "betas": (0.9, 0.99)}
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.parameters:
            assert parameter.grad is not None
            parameter.sub_(0.1 * parameter.grad)
            self.act(self, parameter)


def build(act: Act = lambda optimizer, parameter: None, **defaults: Any) -> Replica:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return Replica(model, Custom(model, act, **defaults), None)


def backward(replica: Replica) -> None:
    replica.model(torch.ones(4, 3)).square().mean().backward()


def rehearse(replica: Replica) -> None:
    backward(replica)
    replica.rehearse(replica.advance)


def train(replica: Replica) -> None:
    backward(replica)
    with replica.update():
        replica.advance()


def kept(name: str, value: Callable[[nn.Parameter], Any]) -> Act:
    return lambda optimizer, parameter: optimizer.state[parameter].update({name: value(parameter)})


def on_itself(value: Callable[[nn.Parameter], Any]) -> Act:
    return lambda optimizer, parameter: setattr(optimizer, "kept", value(parameter))


class Helper:
    def __init__(self, parameter: nn.Parameter) -> None:
        self.tensor = parameter.detach().clone()


# -- refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        Helper,
        lambda parameter: deque([parameter.detach().clone()]),
        lambda parameter: {1, 2},
        lambda parameter: [{"nested": object()}],
        lambda parameter: {(0, 1): parameter.detach().clone()},
        lambda parameter: np.zeros(3),
        lambda parameter: np.complex64(1),
    ],
    ids=["object", "deque", "set", "nested", "keys", "array", "complex"],
)
def test_state_that_cannot_be_given_to_another_rank_is_refused_in_the_rehearsal(
    value: Callable[[nn.Parameter], Any],
) -> None:
    """The message names optimizer, parameter and key."""
    with pytest.raises(BadInput, match="keep only tensors, numbers") as caught:
        rehearse(build(kept("history", value)))
    assert caught.value.field == "optimizer"
    assert caught.value.value == "Custom.state[weight]['history']"


@pytest.mark.parametrize(
    "value",
    [
        lambda parameter: parameter.detach().clone(),
        lambda parameter: {parameter: parameter.detach().clone()},
        lambda parameter: [[parameter.detach().clone()]],
        lambda parameter: deque([parameter.detach().clone()]),
        Helper,
    ],
    ids=["tensor", "by_parameter", "lists", "deque", "helper"],
)
def test_tensors_on_the_optimizer_object_are_refused(value: Callable[[nn.Parameter], Any]) -> None:
    with pytest.raises(BadInput, match=r"optimizer\.state\[parameter\]") as caught:
        rehearse(build(on_itself(value)))
    assert caught.value.value == "Custom.kept"


def test_tensors_that_a_step_writes_in_place_are_refused() -> None:
    replica = build(lambda optimizer, parameter: optimizer.total.add_(1))
    replica.optimizers[0].total = torch.zeros(3)  # type: ignore[attr-defined]
    with pytest.raises(BadInput, match=r"Custom\.total"):
        rehearse(replica)


@pytest.mark.parametrize(
    "generator", [torch.Generator(), np.random.default_rng(3)], ids=["torch", "numpy"]
)
def test_a_generator_of_the_optimizer_is_refused(generator: Any) -> None:
    """A rank that joins would draw other numbers."""

    def draw(optimizer: Any, parameter: nn.Parameter) -> None:
        if isinstance(generator, torch.Generator):
            torch.randn(3, generator=optimizer.chance)
        else:
            optimizer.chance.normal()

    replica = build(draw)
    replica.optimizers[0].chance = generator  # type: ignore[attr-defined]
    with pytest.raises(BadInput, match=r"Custom\.chance"):
        rehearse(replica)


@pytest.mark.parametrize("draw", [lambda: torch.randn(2), random.random, np.random.rand])
def test_an_optimizer_that_draws_random_numbers_is_refused(draw: Callable[[], Any]) -> None:
    """The process's generators depend on the shard that a rank computed last."""
    with pytest.raises(BadInput, match=r"seed a new torch\.Generator") as caught:
        rehearse(build(lambda optimizer, parameter: draw()))
    assert (caught.value.field, caught.value.value) == ("optimizer", "Custom")


def test_a_thread_that_draws_meanwhile_does_not_have_the_optimizer_refused() -> None:
    """Clients of trackers draw the delays of their retries from the process's generator."""
    steps = itertools.count()

    def draw_once(optimizer: Any, parameter: nn.Parameter) -> None:
        if next(steps) == 0:
            thread = threading.Thread(target=random.random)
            thread.start()
            thread.join()

    replica = build(draw_once)
    digest = replica.state_digest()
    rehearse(replica)
    assert next(steps) > len(replica.parameters), "the update was not run again"
    assert replica.state_digest() == digest


def test_an_optimizer_that_seeds_a_generator_in_each_step_is_trained() -> None:
    def noise(optimizer: Custom, parameter: nn.Parameter) -> None:
        optimizer.steps += 1
        generator = torch.Generator().manual_seed(optimizer.steps)
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=1e-3)

    replica = build(noise)
    rehearse(replica)
    train(replica)


class Lookahead(Optimizer):
    """An optimizer that wraps another one, and may share its state."""

    def __init__(self, inner: Optimizer, *, shared: bool) -> None:
        super().__init__(inner.param_groups, {"lr": 0.1})
        self.inner = inner
        self.param_groups = inner.param_groups
        if shared:
            self.state = inner.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


@pytest.mark.parametrize("shared", [False, True])
def test_an_optimizer_within_another_must_share_its_state(shared: bool) -> None:
    model = nn.Linear(3, 2)
    inner = SGD(model.parameters(), lr=0.1, momentum=0.9)
    replica = Replica(model, Lookahead(inner, shared=shared), None)
    if shared:
        rehearse(replica)
        train(replica)
        assert [path for path, _ in replica.optimizer_tensors()] == [
            f"optimizer/{number}/momentum_buffer" for number in (0, 1)
        ]
    else:
        with pytest.raises(BadInput, match=r"Lookahead\.inner"):
            rehearse(replica)


def test_a_group_names_what_it_cannot_share() -> None:
    with pytest.raises(BadInput, match="keep only numbers") as caught:
        build(decay=torch.zeros(3))
    assert caught.value.value == "Custom.param_groups[0]['decay']"


# -- carried over ----------------------------------------------------------------------------------


def test_what_no_step_changes_stays_each_ranks_own() -> None:
    """A rank may keep its number, its model or a table of names on its optimizer."""
    replica = build()
    rehearse(replica)
    train(replica)
    before = replica.scalars()
    replica.optimizers[0].rank = 3  # type: ignore[attr-defined]
    assert replica.scalars() == before


def test_a_clock_on_the_optimizer_is_not_compared() -> None:
    """No rank is accused because of a clock, which differs between ranks."""
    replica = build(on_itself(lambda parameter: time.monotonic()))
    rehearse(replica)
    before = replica.scalars_checksum(), replica.scalars_digest()
    train(replica)
    assert (replica.scalars_checksum(), replica.scalars_digest()) == before


def test_a_rehearsal_puts_the_optimizers_own_numbers_back() -> None:
    def count(optimizer: Custom, parameter: nn.Parameter) -> None:
        optimizer.steps += 1
        optimizer.options["calls"] = optimizer.options.get("calls", 0) + 1
        optimizer.late = optimizer.steps  # type: ignore[attr-defined]

    replica = build(count)
    rehearse(replica)
    optimizer = replica.optimizers[0]
    assert isinstance(optimizer, Custom)
    assert optimizer.steps == 0
    assert "calls" not in optimizer.options
    assert not hasattr(optimizer, "late")


NESTED: list[Any] = [
    {"a": [torch.ones(2), 3], 4: (torch.zeros(1), None, "text")},
    [np.float32(0.1), np.int64(3), np.bool_(True), np.float64("inf"), 0.5],
    {"dots.and/slashes": {"%": torch.ones(3)}, "empty": [[], {}, ()]},
    (1, (2, [3])),
]


@pytest.mark.parametrize("value", NESTED)
def test_nested_state_is_taken_apart_and_put_together(value: Any) -> None:
    """Types and the order of the tensors are kept."""
    encoded = encode(value, "key")
    state = {"first": torch.ones(1)} | dict(tensors_in(value, "key")) | {"last": torch.ones(2)}
    order = [tensor for _, tensor in tensors_in(state, "")]
    assemble(state, "key", encoded)
    assert _described(state["key"]) == _described(value)
    assert all(
        map(
            lambda first, second: first is second,
            order,
            [tensor for _, tensor in tensors_in(state, "")],
        )
    )
    assert _described(decode(encode([1, (2,)], "x"), {})) == _described([1, (2,)])


def _described(part: Any) -> Any:
    if isinstance(part, dict):
        return [(key, _described(element)) for key, element in part.items()]
    if isinstance(part, (list, tuple)):
        return type(part), [_described(element) for element in part]
    return type(part), part.tolist() if isinstance(part, Tensor) else part


def test_nested_tensors_have_names_in_a_store() -> None:
    state = {"dots.and/slashes": [torch.ones(3)], 5: torch.ones(1)}
    names = ["layer.0.weight"]
    for path, _ in tensors_in(state, "optimizer/0/history"):
        assert path_of(stored_name(path, names), names) == path


# -- runs ------------------------------------------------------------------------------------------

JOB = "../../jobs/training/own_optimizers.py"


@pytest.mark.parametrize("job", ["averaging", pytest.param("sharded", marks=pytest.mark.slow)])
def test_a_rank_that_joins_has_the_state_of_such_an_optimizer(chaos: Chaos, job: str) -> None:
    """Lists of tensors, a count on the object and rates of NumPy arrive with the bits of the
    unbroken run.
    """
    fault = Kill(rank=1, at_step=6)
    outcome = chaos.run(f"{JOB}:{job}", nodes=2, spares=1, steps=20, faults=[fault])
    assert outcome.records(Event.ADOPT)


def test_state_that_begins_late_is_refused_before_a_rank_is_replaced(chaos: Chaos) -> None:
    with pytest.raises(BadInput, match=r"Hoarding\.means") as refused:
        chaos.run(f"{JOB}:hoarding", nodes=2, spares=0, steps=10, twin=False)
    assert refused.value.field == "optimizer"
