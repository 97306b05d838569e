"""The state of a replica: in shared memory without changing a bit of training, and copied whole or
not at all.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ranks
from support.nodes.network import accept
from support.nodes.relay import Relay
from support.ranks import Line
from support.waiting import LIMIT_S, stays, wait_until
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adagrad, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from chaoskit.checkpoint.layout.arena import Arena, Slot, decode_index, plain
from chaoskit.errors import BadInput, ChaoskitError
from chaoskit.process.linux import host_id
from chaoskit.runtime.state.peer import PeerLost, Pulled, StateServer, pull
from chaoskit.runtime.state.replica import Replica
from chaoskit.wire import frames, messages
from chaoskit.wire.messages import Endpoint

TOKEN = "a token of this test"
NEVER_S = 600.0  # a limit of the product that no test reaches


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # as in a rank: other numbers of threads add in another order


# -- a small job with everything that is awkward ---------------------------------------------------


class Small(nn.Module):
    """A model with tied weights, frozen parameters, a scalar, an empty parameter, and buffers that
    training changes.
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.inner = nn.Linear(width, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(0))
        self.seen: Tensor
        self.count: Tensor

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.frozen(torch.relu(self.inner(self.embedding(tokens))))) * self.scale
        logits: Tensor = self.head(hidden)
        return logits


class Restless(Optimizer):
    """Momentum that replaces its state with new tensors at every step, and also keeps a number."""

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["mean"] = (
                    0.9 * state.get("mean", torch.zeros_like(parameter)) + parameter.grad
                )
                state["steps"] = state.get("steps", 0) + 1
                parameter.sub_(group["lr"] / state["steps"] * state["mean"])


class Nested(Optimizer):
    """Optimizer that keeps its last gradients in nested containers, and counts on itself and beside
    the parameters.
    """

    def __init__(self, groups: Any, lr: Any) -> None:
        super().__init__(groups, {"lr": lr})
        self.steps = 0
        self.rates: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        self.rates = [*self.rates[-2:], float(self.param_groups[0]["lr"])]
        self.state["calls"] = self.state.get("calls", 0) + 1  # type: ignore[index]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["norms"] = np.float32(0)
                    state["history"] = [torch.zeros_like(parameter) for _ in range(2)]
                    state["late"] = {
                        "pair": (torch.ones(1), 3),
                        5: {"a.b/c": torch.zeros_like(parameter)},
                    }
                    state["mean"] = torch.zeros_like(parameter)
                state["history"] = [state["history"][1], parameter.grad.clone()]
                state["late"][5]["a.b/c"].mul_(0.5).add_(sum(state["history"]))
                pair, count = state["late"]["pair"]
                state["late"]["pair"] = (pair * 0.9, count + 1)
                state["norms"] = state["norms"] * np.float32(0.9) + np.float32(parameter.grad.sum())
                state["mean"].lerp_(state["late"][5]["a.b/c"] * float(pair), 0.1)
                scale = 1 + 0.01 * (self.steps + self.state["calls"]) + sum(self.rates)  # type: ignore[index]
                parameter.sub_(
                    float(group["lr"] / (count + state["norms"] ** 2)) * scale * state["mean"]
                )


Objects = tuple[Small, Optimizer, LambdaLR | None]
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda groups: AdamW(groups, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.99)),
    "AdamW, lr a tensor": lambda groups: AdamW(groups, lr=torch.tensor(1e-2), foreach=False),
    "SGD": lambda groups: SGD(groups, lr=0.1),
    "SGD, momentum": lambda groups: SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda groups: Adagrad(groups, lr=0.1),
    "replaces its tensors": lambda groups: Restless(groups, lr=0.1),
    "nested": lambda groups: Nested(groups, lr=0.1),
    "nested, lr of NumPy": lambda groups: Nested(groups, lr=np.float32(0.1)),
    "AdamW, lr of NumPy": lambda groups: AdamW(
        groups, lr=np.float64(1e-2), betas=(np.float64(0.8), np.float64(0.9))
    ),
}
optimizers = pytest.mark.parametrize("optimizer", OPTIMIZERS)
schedules = pytest.mark.parametrize("scheduled", [True, False], ids=["scheduled", "unscheduled"])


def build(optimizer: str, scheduled: bool = True, seed: int = 0, width: int = 8) -> Objects:
    torch.manual_seed(seed)
    model = Small(width)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    not_decayed = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    built = OPTIMIZERS[optimizer](
        [{"params": decayed}, {"params": not_decayed, "weight_decay": 0.0}]
    )
    rate = built.param_groups[1]["lr"]
    built.param_groups[1]["lr"] = 3 * rate
    # A restored scheduler computes with numbers where a fresh one would with tensors, to other last
    # bits.
    scheduled = scheduled and not isinstance(rate, Tensor)
    return model, built, LambdaLR(built, lambda step: 1 / (1 + step)) if scheduled else None


def backward(model: Small, step: int) -> None:
    tokens = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(step))
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1).flatten()).backward()


def advance(model: Small, optimizer: Optimizer, scheduler: Any) -> None:
    """Apply the changes of a commit.

    Buffers change here: a forward pass must not change state that all ranks share.
    """
    optimizer.step()
    model.seen += model.scale.detach().double() / 3
    model.count += 1
    if scheduler is not None:
        scheduler.step()


def train(replica: Replica, steps: int) -> None:
    """Train ordinary steps of a replica, each a function of its number."""
    assert isinstance(replica.model, Small)
    for _ in range(steps):
        backward(replica.model, replica.step)
        with replica.update():
            advance(replica.model, replica.optimizers[0], next(iter(replica.schedulers), None))
        replica.optimizers[0].zero_grad()


def train_bare(objects: Objects, steps: range) -> None:
    """Train the same steps without a replica."""
    model, optimizer, _ = objects
    for step in steps:
        backward(model, step)
        advance(*objects)
        optimizer.zero_grad()


def rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def everything(model: Small, optimizer: Optimizer, scheduler: Any) -> dict[str, Any]:
    """Return all values that training depends on, as plain values."""

    def bits(value: Any) -> Any:
        if isinstance(value, (Tensor, np.generic)):
            return str(value.dtype), value.tolist()
        if isinstance(value, dict):
            return [(key, bits(item)) for key, item in value.items()]
        return type(value)(map(bits, value)) if isinstance(value, (list, tuple)) else value

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        "model": {name: bits(value) for name, value in model.state_dict().items()},
        "optimizer": {
            names.get(id(parameter), parameter): dict(sorted(bits(state)))
            if isinstance(state, dict)
            else state
            for parameter, state in optimizer.state.items()
        },
        "own": {
            name: bits(vars(optimizer)[name])
            for name in ("steps", "rates")
            if name in vars(optimizer)
        },
        "groups": [
            {key: bits(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ],
        "scheduler": scheduler and bits(scheduler.state_dict()),
    }


def everything_of(replica: Replica) -> dict[str, Any]:
    assert isinstance(replica.model, Small)
    scheduler = next(iter(replica.schedulers), None)
    return everything(replica.model, replica.optimizers[0], scheduler) | {"step": replica.step}


def in_arena(replica: Replica) -> bool:
    assert replica.arena is not None
    return all(replica.arena.holds(tensor) for _, tensor in replica.tensors())


# -- one replica -----------------------------------------------------------------------------------


@optimizers
@schedules
def test_training_in_the_arena_gives_the_same_bits(optimizer: str, scheduled: bool) -> None:
    """Moving the tensors keeps their values, and every later step equals that of a twin that was
    not moved.
    """
    twin = build(optimizer, scheduled)
    train_bare(twin, range(2))
    moved = build(optimizer, scheduled)
    train_bare(moved, range(2))
    replica = Replica(*moved)
    replica.step = 2
    assert everything(*moved) == everything(*twin)
    assert in_arena(replica)
    for step in range(2, 6):
        train(replica, 1)
        train_bare(twin, range(step, step + 1))
        assert everything(*moved) == everything(*twin)
        assert in_arena(replica), "peers would copy what is not used any more"
        assert replica.step == step + 1
    assert moved[0].head.weight is moved[0].embedding.weight, "tied weights stay tied"
    assert moved[0].head.weight.data_ptr() == moved[0].embedding.weight.data_ptr()


def test_a_step_is_published_in_one_piece() -> None:
    """The first step makes the optimizer's state; readers see it with the step or not at all."""
    replica = Replica(*build("AdamW"))
    assert replica.arena is not None
    for step in range(1, 4):
        before = replica.sequence
        train(replica, 1)
        assert replica.sequence == before + 2, "a reader could have come between"
        assert replica.arena.step == step
        paths = [
            slot.path
            for slot in decode_index(replica.arena.index_bytes(), replica.arena.size_bytes)
        ]
        assert paths == [path for path, _ in replica.tensors()]
        assert any(path.endswith("exp_avg") for path in paths)


def test_readers_are_told_while_the_optimizer_writes() -> None:
    """The sequence number is odd during an update and even outside, and never the same twice."""
    replica = Replica(*build("SGD"))
    numbers = [replica.sequence]
    for step in range(3):
        assert isinstance(replica.model, Small)
        backward(replica.model, step)
        with replica.update():
            assert replica.sequence % 2 == 1
            replica.optimizers[0].step()
            numbers.append(replica.sequence)
        numbers.append(replica.sequence)
    assert [number % 2 for number in numbers] == [0, 1, 0, 1, 0, 1, 0]
    assert len(set(numbers)) == len(numbers)


def test_state_that_the_user_drops_is_not_shown_any_more() -> None:
    """Momentum that is cleared for good is in no later copy."""
    replica = Replica(*build("SGD, momentum"))
    train(replica, 2)
    for group in replica.optimizers[0].param_groups:
        group.update(momentum=0, nesterov=False)
    replica.optimizers[0].state.clear()
    train(replica, 1)
    assert replica.arena is not None
    slots = decode_index(replica.arena.index_bytes(), replica.arena.size_bytes)
    assert {slot.path.partition("/")[0] for slot in slots} == {"model"}


def test_a_buffer_that_the_model_replaces_is_followed() -> None:
    """``self.seen = self.seen + x`` makes a new tensor; the arena holds its value after the step
    nevertheless.
    """
    replica = Replica(*build("SGD"))
    model = replica.model
    assert isinstance(model, Small)
    model.seen = model.seen + 50
    model.inner.weight.data = model.inner.weight.data * 2
    assert not in_arena(replica)
    train(replica, 1)
    assert in_arena(replica)
    assert float(model.seen[0]) > 40


def test_what_is_replaced_between_two_steps_is_followed() -> None:
    """A buffer, the memory of a weight, or the optimizer's tensors may be replaced after many steps
    in place.
    """
    replica = Replica(*build("AdamW"))
    model, optimizer = replica.model, replica.optimizers[0]
    assert isinstance(model, Small)

    def replace_buffer() -> None:
        model.seen = model.seen.clone()

    def replace_memory() -> None:
        model.inner.weight.data = model.inner.weight.data.clone()

    def replace_tensor() -> None:
        state = optimizer.state[model.inner.weight]
        state["exp_avg"] = state["exp_avg"].clone()

    def reload() -> None:
        optimizer.load_state_dict(
            optimizer.state_dict() | {"state": deepcopy(optimizer.state_dict()["state"])}
        )

    for replace in (replace_buffer, replace_memory, replace_tensor, reload):
        train(replica, 3)
        assert in_arena(replica)
        replace()
        assert not in_arena(replica), f"{replace.__name__} has no effect"
        train(replica, 1)
        assert in_arena(replica)


@optimizers
@schedules
@pytest.mark.parametrize("trained", [0, 3])
def test_a_rehearsed_step_leaves_no_trace(optimizer: str, scheduled: bool, trained: int) -> None:
    """Weights, optimizer state and its keys, rates and scheduler are bit for bit unchanged, and
    train on so.
    """
    objects = build(optimizer, scheduled)
    replica, twin = Replica(*objects), Replica(*build(optimizer, scheduled))
    train(replica, trained)
    train(twin, trained)
    before, digest, weights = (
        deepcopy(everything_of(replica)),
        replica.state_digest(),
        replica.weights_digest(),
    )
    model = objects[0]

    def update() -> None:
        advance(*objects)
        assert replica.weights_digest() != weights

    for _ in range(2):
        backward(model, 99)
        replica.rehearse(update)
        objects[1].zero_grad()
    assert everything_of(replica) == before
    assert (replica.state_digest(), replica.weights_digest()) == (digest, weights)
    assert in_arena(replica)
    train(replica, 3)
    train(twin, 3)
    assert everything_of(replica) == everything_of(twin)


def test_digests_see_every_bit_and_every_name() -> None:
    """The least change of a weight, a buffer, an optimizer's tensor or its type changes the
    digest.
    """
    replica = Replica(*build("AdamW"))
    train(replica, 1)
    model, weights, state = replica.model, replica.weights_digest(), replica.state_digest()
    assert isinstance(model, Small)
    assert (
        Replica(*build("AdamW", seed=0)).weights_digest()
        != Replica(*build("AdamW", seed=1)).weights_digest()
    )
    with torch.no_grad():
        for tensor in (model.scale, model.frozen.bias, model.seen):
            flat = tensor.view(-1)
            kept = flat[0].clone()
            flat[0] = torch.nextafter(kept, kept + 1)
            assert replica.weights_digest() != weights
            flat[0] = kept
        assert replica.weights_digest() == weights
        moment = replica.optimizers[0].state[model.scale]["exp_avg"]
        moment.neg_()
        assert replica.state_digest() != state
        assert replica.weights_digest() == weights
        moment.neg_()
        assert replica.state_digest() == state
        model.count = model.count.int()
        assert replica.weights_digest() != weights


# -- what is refused -------------------------------------------------------------------------------


def refused(field: str, remedy: str, *objects: Any) -> None:
    with pytest.raises(BadInput, match=remedy) as caught:
        Replica(*objects)
    assert caught.value.field == field


def test_models_that_cannot_be_elastic_are_refused() -> None:
    """SyncBatchNorm's statistics depend on the world; a model must have something to train, of a
    known shape.
    """
    model = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    refused("model", "use BatchNorm", model, SGD(model.parameters(), 0.1), None)
    lazy = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))
    refused(
        "model", "run one batch through the model first", lazy, SGD(lazy[0].parameters(), 0.1), None
    )
    complex_one = nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    refused(
        "model", "real floating-point type", complex_one, SGD(complex_one.parameters(), 0.1), None
    )
    wrapped = nn.DataParallel(nn.Linear(4, 4))
    refused("model", "register the model itself", wrapped, SGD(wrapped.parameters(), 0.1), None)
    still = nn.Linear(4, 4).requires_grad_(False)
    refused("model", "at least one trainable parameter", still, SGD(still.parameters(), 0.1), None)


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    """An optimizer that was built from another model, or before the parameters were replaced,
    trains nothing.
    """
    model = nn.Linear(4, 4)
    refused(
        "optimizer",
        "from the parameters of the registered model",
        model,
        AdamW(nn.Linear(4, 4).parameters()),
        None,
    )
    assert Replica(model, AdamW(model.parameters()), None).step == 0
    more = [*model.parameters(), nn.Parameter(torch.zeros(3))]
    refused("optimizer", "one module that holds all", model, SGD(more, 0.1), None)
    refused("optimizer", "needs no closure", model, LBFGS(model.parameters()), None)


def test_schedulers_that_need_more_than_a_step_are_refused() -> None:
    """A metric differs by rank; a learning rate in a tensor is restored as a number, and computes
    other last bits.
    """
    model = nn.Linear(4, 4)
    optimizer = SGD(model.parameters(), 0.1)
    refused("scheduler", "a schedule over steps", model, optimizer, ReduceLROnPlateau(optimizer))
    tensor_rate = AdamW(model.parameters(), lr=torch.tensor(1e-2), foreach=False)
    refused("scheduler", "lr=0.01", model, tensor_rate, LambdaLR(tensor_rate, lambda step: 1.0))


def test_a_step_of_the_optimizer_outside_a_commit_is_refused() -> None:
    """A line left over from the original script would change the weights of a single rank."""
    model = nn.Linear(4, 4)
    optimizer = SGD(model.parameters(), 0.1)
    replica = Replica(model, optimizer, None)
    before = replica.weights_digest()
    model(torch.ones(4)).sum().backward()
    with pytest.raises(BadInput, match=r"delete optimizer.step\(\) and any GradScaler"):
        optimizer.step()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(4)).sum()).backward()
    with pytest.raises(BadInput, match="GradScaler"):
        scaler.step(optimizer)
    assert replica.weights_digest() == before


def test_a_saved_tensor_does_not_bring_the_arena_along(tmp_path: Path) -> None:
    """``torch.save`` writes the whole storage behind a view."""
    model = nn.Linear(4, 4)
    Replica(model, SGD(model.parameters(), 0.1), None)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    assert (tmp_path / "model.pt").stat().st_size < 10_000


def test_state_that_is_no_tensor_or_number_is_refused() -> None:
    """Numbers, strings, lists and dicts can be shared; an object cannot, and is named."""
    assert plain({"a": (1, [2.5, None]), 3: torch.tensor(4)}) == {"a": [1, [2.5, None]], 3: 4}
    for value in (object(), {1, 2}, torch.zeros(2), [lambda: 0]):
        with pytest.raises(ChaoskitError, match="cannot be shared with peers"):
            plain(value)


def test_a_state_that_outgrows_its_arena_is_refused() -> None:
    """The arena has a limit, and reports it before it writes beyond it."""
    arena = Arena(capacity_bytes=256)
    arena.slot("a", torch.float32, (32,))
    assert arena.slot("a", torch.float32, (32,)).offset == 0
    with pytest.raises(ChaoskitError, match="outgrew its arena of 256 bytes at b"):
        arena.slot("b", torch.float32, (33,))
    with pytest.raises(ChaoskitError, match="does not fit"):
        arena.adopt_layout([], 257)


SLOTS = [
    Slot("model/a", "float32", (4, 5), 0),
    Slot("model/b", "int64", (), 128),
    Slot("model/c", "bfloat16", (0,), 192),
]
INDEX = msgspec.msgpack.encode(SLOTS)


def encoded(*slots: Slot) -> bytes:
    return msgspec.msgpack.encode(list(slots))


@pytest.mark.parametrize(
    "index",
    [
        b"",
        INDEX[:-1],
        INDEX + b"\x00",
        b"\xc1" * 20,
        msgspec.msgpack.encode({"a": 1}),
        msgspec.msgpack.encode([{"path": "a"}]),
        encoded(Slot("a", "no_such_type", (1,), 0)),
        encoded(Slot("a", "load", (1,), 0)),
        encoded(Slot("a", "float32", (-1,), 0)),
        encoded(Slot("a", "float32", (1,), -64)),
        encoded(Slot("a", "float32", (1,), 4)),
        encoded(Slot("a", "float32", (17,), 192)),
        encoded(Slot("a", "float32", (2**40,), 0)),
    ],
)
def test_a_damaged_index_is_refused(index: bytes) -> None:
    """A truncated index, another form, unknown types or places beyond the data never reach a
    tensor.
    """
    assert decode_index(INDEX, 256) == SLOTS
    with pytest.raises(ChaoskitError):
        decode_index(index, 256)


@settings(max_examples=200, deadline=None, database=None)
@given(st.integers(0, len(INDEX) - 1), st.integers(0, 255))
def test_a_changed_byte_leads_to_an_index_or_a_refusal(place: int, value: int) -> None:
    """Every accepted index lies within the data, so that a tensor can be made of it."""
    index = bytearray(INDEX)
    index[place] = value
    try:
        slots = decode_index(bytes(index), 256)
    except ChaoskitError:
        return
    arena = Arena(256)
    arena.adopt_layout(slots, 256)
    for slot in slots:
        assert arena.tensor(slot).shape == slot.shape


# -- peers -----------------------------------------------------------------------------------------


class Peer:
    """Another process with its own replica, which executes commands."""

    def __init__(self, optimizer: str, options: dict[str, Any]) -> None:
        (self._rank,) = ranks.start(1, serve, optimizer, options)
        self.pid = self._rank.pid
        self.endpoint = Endpoint(*self.ask("endpoint"))

    def ask(self, act: str, value: Any = None) -> Any:
        self.send(act, value)
        return self.receive()

    def send(self, act: str, value: Any = None) -> None:
        self._rank.send((act, value))

    def receive(self) -> Any:
        return self._rank.receive()

    def stop(self) -> None:
        self._rank.signal(signal.SIGSTOP)
        self._rank.await_state("T")

    def kill(self) -> None:
        self._rank.kill()
        self._rank.wait()

    def end(self) -> None:
        self._rank.destroy()


def serve(line: Line, optimizer: str, options: dict[str, Any]) -> None:
    """Serve the commands of a test with a replica."""
    shared = options.pop("shared", True)
    replica = Replica(*build(optimizer, **options), shared=shared)
    arena_fd = -1 if replica.arena is None else replica.arena.fd
    server = StateServer(replica, TOKEN, "127.0.0.1")

    def pull_from(value: list[Any]) -> list[Any]:
        pull(replica, Endpoint(*value), TOKEN, "auto")
        return describe(replica)

    def train_on(steps: int) -> list[Any]:
        train(replica, steps)
        return describe(replica)

    def stop_while_writing(_: Any) -> None:
        replica.begin_write()
        line.send(True)
        signal.pause()

    acts: dict[str, Callable[[Any], Any]] = {
        "endpoint": lambda _: [host_id(), "127.0.0.1", server.port, os.getpid(), arena_fd],
        "train": train_on,
        "describe": lambda _: describe(replica),
        "pull": pull_from,
        "stop while writing": stop_while_writing,
    }
    while True:
        act, value = line.receive()
        line.send(acts[act](value))


Start = Callable[..., Peer]


@pytest.fixture
def start() -> Iterator[Start]:
    """Yield a function that starts peers, which end with the test."""
    peers: list[Peer] = []

    def run(optimizer: str = "AdamW", **options: Any) -> Peer:
        peers.append(Peer(optimizer, options))
        return peers[-1]

    yield run
    for peer in peers:
        peer.end()


def describe(replica: Replica) -> list[Any]:
    return [replica.step, replica.state_digest(), rates(replica.optimizers[0])]


ways = pytest.mark.parametrize(("transport", "way"), [("auto", "shared memory"), ("tcp", "tcp")])


@ways
@optimizers
@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        pytest.param(0, 3, id="joiner"),
        pytest.param(0, 0, id="both new", marks=pytest.mark.costly),
        pytest.param(2, 3, id="behind", marks=pytest.mark.costly),
        pytest.param(3, 0, id="back to the start", marks=pytest.mark.costly),
    ],
)
def test_a_pulled_state_is_the_peers_and_trains_on_like_it(
    start: Start, transport: str, way: str, optimizer: str, mine: int, theirs: int
) -> None:
    """The peer determines weights, optimizer state, rates and step, whatever was there before, and
    all later steps.
    """
    peer = start(optimizer)
    replica = Replica(*build(optimizer, seed=7))
    train(replica, mine)
    expected = peer.ask("train", theirs)
    assert describe(replica) != expected
    pulled = pull(replica, peer.endpoint, TOKEN, transport)
    assert replica.arena is not None
    assert pulled == Pulled(theirs, replica.arena.size_bytes, way)
    assert describe(replica) == expected
    assert in_arena(replica)
    for _ in range(3):
        train(replica, 1)
        assert describe(replica) == peer.ask("train", 1)
    train(replica, 1)
    assert describe(replica) != peer.ask("describe")
    pull(
        replica, peer.endpoint, TOKEN, transport
    )  # the layouts are the same now: one block is copied
    assert describe(replica) == peer.ask("describe")
    train(replica, 2)
    assert describe(replica) == peer.ask("train", 2)


def test_a_pulled_state_can_be_pulled_on(start: Start) -> None:
    """A rank that has received a state gives it to others like the first owner."""
    first, last = start(seed=1), start(seed=2)
    expected = first.ask("train", 3)
    replica = Replica(*build("AdamW", seed=3))
    pull(replica, first.endpoint, TOKEN, "auto")
    assert replica.arena is not None
    server = StateServer(replica, TOKEN, "127.0.0.1")
    here = [host_id(), "127.0.0.1", server.port, os.getpid(), replica.arena.fd]
    assert last.ask("pull", here) == expected
    train(replica, 1)
    assert (
        last.ask("pull", ["another host", *here[1:]]) == describe(replica) == first.ask("train", 1)
    )


def test_a_peer_that_offers_nonsense_is_lost() -> None:
    """An invalid offer raises PeerLost, which does not end the rank: another peer may help."""

    def offer() -> None:
        connection, _ = listener.accept()
        with connection:
            accept(connection, TOKEN)
            connection.sendall(struct.pack("!q", 3) + b"abc")
            while connection.recv(
                100
            ):  # a socket that is closed with unread data in it takes back what it sent
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT_S)
        thread = threading.Thread(target=offer, daemon=True)
        thread.start()
        replica = Replica(*build("AdamW", seed=3))
        with pytest.raises(PeerLost, match="not the offer of a state"):
            pull(replica, Endpoint("elsewhere", *listener.getsockname(), 1, -1), TOKEN, "tcp")
        thread.join(LIMIT_S)
        assert not thread.is_alive()


@pytest.mark.parametrize(("mine", "theirs"), [(True, False), (False, True), (False, False)])
def test_replicas_with_and_without_shared_memory_understand_each_other(
    start: Start, mine: bool, theirs: bool
) -> None:
    """A replica with tensors that cannot be shared is packed and unpacked, to the same bits."""
    peer = start(shared=theirs)
    expected = peer.ask("train", 3)
    replica = Replica(*build("AdamW", seed=7), shared=mine)
    train(replica, 1)
    pulled = pull(replica, peer.endpoint, TOKEN, "tcp" if theirs else "auto")
    assert (pulled.step, pulled.transport) == (3, "tcp")
    assert describe(replica) == expected
    train(replica, 2)
    assert describe(replica) == peer.ask("train", 2)


WIDE = 1280  # 26 MB with the optimizer's tensors: several parts, and more than sockets buffer


@ways
@pytest.mark.parametrize("parts", [1, 3])
def test_a_pull_that_overlaps_a_commit_is_repeated(
    start: Start, transport: str, way: str, parts: int
) -> None:
    """A commit of the peer in the middle of a pull leads to a second pull, and to no mixture of two
    states.
    """
    origin = start(width=WIDE)
    origin.ask("train", 1)
    replica = Replica(*build("AdamW", width=WIDE, seed=7))
    assert replica.arena is not None
    read_bytes: list[int] = []
    committed: list[Any] = []

    def go_on(done_bytes: int) -> None:
        read_bytes.append(done_bytes)
        if len(read_bytes) == parts:
            committed.extend(origin.ask("train", 1))

    pulled = pull(replica, origin.endpoint, TOKEN, transport, probe=go_on)
    assert (pulled.step, pulled.transport) == (2, way)
    assert describe(replica) == committed
    size_bytes = replica.arena.size_bytes
    assert read_bytes[parts - 1] < size_bytes, "the commit came when all was read"
    assert read_bytes.count(size_bytes) == 2, "of each attempt"


@pytest.mark.parametrize(("transport", "width"), [("auto", 900), ("tcp", 300)])
def test_a_pull_from_a_peer_that_trains_gives_a_committed_state(
    start: Start, transport: str, width: int
) -> None:
    """Every copy is a state that the peer committed, with its step, at any progress of the peer."""
    peer = start(width=width)
    replica = Replica(*build("AdamW", width=width, seed=7))
    pulls: list[tuple[int, list[Any]]] = []
    for _ in range(12):
        peer.send("train", 4)
        pulled = pull(replica, peer.endpoint, TOKEN, transport, silent_s=NEVER_S)
        assert pulled.step == replica.step
        pulls.append((replica.step, describe(replica)))
        peer.receive()
    twin = Replica(*build("AdamW", width=width))
    for step, pulled_state in pulls:
        train(twin, step - twin.step)
        assert pulled_state == describe(twin), f"a mixture at step {step}"


def pulling(
    replica: Replica, endpoint: Endpoint, transport: str = "tcp", silent_s: float = NEVER_S
) -> tuple[threading.Thread, list[Exception | None]]:
    """Start a pull on a thread, and return it with the list for its error."""
    errors: list[Exception | None] = []

    def run() -> None:
        try:
            pull(replica, endpoint, TOKEN, transport, silent_s=silent_s)
            errors.append(None)
        except Exception as error:  # noqa: BLE001  # looked at by the test
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


def through_relay(endpoint: Endpoint, hold_after: int) -> tuple[Relay, Endpoint]:
    """Start a relay that holds back the state of a peer after some bytes.

    Return it with the peer's endpoint behind it.
    """
    relay = Relay((endpoint.address, endpoint.port), hold_after=hold_after)
    return relay, msgspec.structs.replace(endpoint, port=relay.port)


@pytest.mark.parametrize("behind", [0, 1], ids=["joiner", "survivor"])
def test_a_peer_killed_in_the_middle_of_a_pull_is_lost(start: Start, behind: int) -> None:
    """The pull ends with PeerLost; a survivor keeps its state, and another peer can be asked."""
    first, second = start(width=WIDE), start(width=WIDE)
    first.ask("train", 2)
    expected = second.ask("train", 2)
    replica = Replica(*build("AdamW", width=WIDE, seed=7))
    train(replica, behind)
    before = describe(replica)
    relay, behind_it = through_relay(first.endpoint, 2 * 2**20)
    thread, errors = pulling(replica, behind_it)
    assert relay.held.wait(LIMIT_S)
    first.kill()
    relay.close()
    thread.join(LIMIT_S)
    assert [type(error) for error in errors] == [PeerLost]
    assert str(first.pid) in str(errors[0])
    if behind:
        assert describe(replica) == before
        assert replica.sequence % 2 == 0
    else:
        assert replica.step == -1, "incomplete: it must not be taken for a state"
        assert replica.sequence % 2 == 1
    pull(replica, second.endpoint, TOKEN, "tcp")
    assert describe(replica) == expected
    train(replica, 1)
    assert describe(replica) == second.ask("train", 1)


def test_a_survivor_keeps_its_state_if_the_peer_ends_in_an_update(start: Start) -> None:
    """The survivor keeps its state through shared memory, too: it may be the last state of
    the job.
    """
    peer = start(width=WIDE)
    peer.ask("train", 2)
    replica = Replica(*build("AdamW", width=WIDE, seed=7))
    train(replica, 1)
    before = describe(replica)

    def end_in_an_update(done_bytes: int) -> None:
        peer.ask("stop while writing")
        peer.kill()

    with pytest.raises(PeerLost):
        pull(replica, peer.endpoint, TOKEN, "auto", probe=end_in_an_update)
    assert describe(replica) == before
    assert replica.sequence % 2 == 0


def test_a_peer_that_is_gone_is_lost(start: Start) -> None:
    """A peer is lost if neither its shared memory nor its port can be opened."""
    peer = start()
    peer.kill()
    for transport in ("auto", "tcp"):
        replica = Replica(*build("AdamW"))
        before = describe(replica)
        with pytest.raises(PeerLost):
            pull(replica, peer.endpoint, TOKEN, transport)
        assert describe(replica) == before


def is_read_by_this_process(endpoint: Endpoint, transport: str) -> bool:
    """Return whether a pull has opened the state of a peer: its shared memory, or a connection to
    it.
    """
    if transport == "tcp":
        connections = psutil.Process().net_connections("tcp")
        return any(
            connection.raddr
            and connection.raddr.port == endpoint.port
            and connection.status == "ESTABLISHED"
            for connection in connections
        )
    inode = Path(f"/proc/{endpoint.pid}/fd/{endpoint.arena_fd}").stat().st_ino
    return any(
        line.split()[4] == str(inode) for line in Path("/proc/self/maps").read_text().splitlines()
    )


@ways
def test_a_peer_that_dies_while_it_writes_is_lost(start: Start, transport: str, way: str) -> None:
    """A reader that waits for the end of a commit is told of the death; it does not wait
    for ever.
    """
    peer = start()
    assert peer.ask("stop while writing") is True
    assert not is_read_by_this_process(peer.endpoint, transport)
    thread, errors = pulling(Replica(*build("AdamW")), peer.endpoint, transport)
    wait_until(lambda: is_read_by_this_process(peer.endpoint, transport), f"a reader over {way}")
    stays(thread.is_alive, f"{way}: an odd sequence number must be waited out", for_s=0.2)
    peer.kill()
    thread.join(LIMIT_S)
    assert [type(error) for error in errors] == [PeerLost]


def test_a_peer_that_falls_silent_is_lost(start: Start) -> None:
    """A stopped process keeps its connection open; it is given up after it has sent no data for a
    while.
    """
    peer = start(width=WIDE)
    peer.ask("train", 1)
    replica = Replica(*build("AdamW", width=WIDE, seed=7))
    relay, behind_it = through_relay(peer.endpoint, 2**20)
    thread, errors = pulling(replica, behind_it, silent_s=1.0)
    thread.join(LIMIT_S)
    assert relay.held.is_set()
    assert [type(error) for error in errors] == [PeerLost]
    assert "timed out" in str(errors[0])
    relay.close()


def test_a_wrong_token_cannot_read_the_state(start: Start) -> None:
    """Over TCP no part of the state is sent before the token is proved, and the puller keeps its
    state.
    """
    peer = start()
    replica = Replica(*build("AdamW", seed=7))
    before = describe(replica)
    with pytest.raises(PeerLost):
        pull(replica, peer.endpoint, "another token", "tcp")
    assert describe(replica) == before
    with socket.create_connection(
        (peer.endpoint.address, peer.endpoint.port), timeout=LIMIT_S
    ) as connection:
        assert isinstance(frames.receive(connection), messages.Challenge)
        frames.send(connection, messages.Proof(bytes(32), bytes(32)))
        assert connection.recv(4096) == b""
    pull(replica, peer.endpoint, TOKEN, "tcp")
    assert describe(replica) == peer.ask("describe")


class Renamed(Small):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.zeros(1))


class Doubled(Small):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))


@ways
@pytest.mark.parametrize(
    ("make", "odd"),
    [
        (Renamed, "model/other"),
        (lambda: Small(12), "model/embedding.weight"),
        (Doubled, "model/scale"),
    ],
    ids=["other name", "other shape", "other type"],
)
def test_another_model_is_refused(
    start: Start, transport: str, way: str, make: Callable[[], Small], odd: str
) -> None:
    """A peer with tensors of another name, shape or type is bad input; the weights stay
    unchanged.
    """
    peer = start()
    model = make()
    replica = Replica(model, AdamW(model.parameters(), lr=0.1), None)
    before = replica.weights_digest()
    with pytest.raises(BadInput, match="build the same model on every rank") as caught:
        pull(replica, peer.endpoint, TOKEN, transport)
    assert (caught.value.field, caught.value.value) == ("model", odd), way
    assert replica.weights_digest() == before


def test_an_optimizer_of_more_parameters_is_refused() -> None:
    """State for a parameter that this optimizer lacks is not dropped silently."""
    model = nn.Linear(4, 4)
    donor = Replica(model, AdamW(model.parameters()), None)
    model(torch.ones(4)).sum().backward()
    with donor.update():
        donor.optimizers[0].step()
    assert donor.arena is not None
    partial = nn.Linear(4, 4)
    replica = Replica(partial, AdamW([partial.weight]), None)
    with pytest.raises(BadInput, match="build the same optimizer on every rank"):
        replica.prepare_layout(donor.arena.index_bytes(), donor.arena.size_bytes)
