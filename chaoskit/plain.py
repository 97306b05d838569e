"""A job trained by plain PyTorch in one process: what a run is compared with that shares no code with the runtime.

``python -m chaoskit.plain REQUEST ANSWER`` reads a :class:`Request` and writes a :class:`PlainAnswer`, both JSON. The
process imports torch and the job, and nothing of ``chaoskit.runtime``, ``chaoskit.checkpoint`` or ``chaoskit.agent``:
what these do wrong in every run, also in the unbroken one, is not done here. The rules that a run promises are stated
here once more: the samples and the seed of a shard, the order of the sum, the mean of the losses.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import random
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import msgspec

from chaoskit.job import JobSpec, import_job

#: Packages of which nothing may be loaded in this process.
UNDER_TEST = (
    "chaoskit.agent",
    "chaoskit.checkpoint",
    "chaoskit.coordinator",
    "chaoskit.daemon",
    "chaoskit.logs",
    "chaoskit.process.heartbeat_page",
    "chaoskit.runtime",
    "chaoskit.wire.announcements",
    "chaoskit.wire.lease",
)


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is to be trained.

    Attributes:
        samples: step -> shard -> indices into the dataset, as the run has named them.
        seeds: further seeds with which two orders of summation are compared; see :attr:`PlainAnswer.spread`.
        orders: numbers of further orders of summation whose final states are compared; see :attr:`PlainAnswer.floor`.
        budget_s: no further order is tried for longer, once there is one.
        skips: whether a step whose numbers are not finite is skipped.
    """

    job: JobSpec
    seed: int
    samples: list[list[list[int]]]
    seeds: list[int] = []
    orders: list[int] = []
    budget_s: float = 60.0
    skips: bool = False


class PlainAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What came of it.

    Attributes:
        losses: of the steps, from 0; None of one that was skipped.
        misdealt: the first samples that are not those which seed and dataset give; empty if all are.
        state: path -> numbers of each tensor behind the last step; see :mod:`chaoskit.sketch`. Of a sharded job
            without buffers, which are each rank's own.
        spread: by step, the largest relative difference between the losses of two orders of summation; empty if no
            seeds were given.
        floor: by path of a tensor, the largest 2-norm of the difference between its final values in the usual order of
            summation and in another one, of one seed or of each; at least a unit in the last place of its largest
            value.
        orders: how many such pairs there were time for.
        rates: learning rates behind the last step, by group of parameters.
        is_steady: whether rates, schedules and counts were the same in all orders.
        reason: why nothing can be said; empty if everything was trained.
    """

    run_id: str
    losses: list[float | None]
    state: dict[str, list[float]] = {}
    spread: list[float] = []
    floor: dict[str, float] = {}
    orders: int = 0
    is_steady: bool = False
    rates: list[float] = []
    misdealt: str = ""
    reason: str = ""


class CannotTell(Exception):
    """Plain PyTorch in one process does not show what this job does on several ranks."""


class _Enough(BaseException):
    """All steps were taken; leaves the train function."""


class _OutOfTime(BaseException):
    """The time is over; leaves the train function."""


@dataclass(frozen=True)
class PlainShard:
    """A slice of the global batch, as :class:`chaoskit.Shard`."""

    index: int
    samples: list[int]
    batch: Any


def in_halves(parts: Sequence[Any]) -> Any:
    """Sum in the order that every world size has: left half plus right half, cut at a power of two."""
    if len(parts) == 1:
        return parts[0]
    middle = 1 << (len(parts) - 1).bit_length() - 1
    return in_halves(parts[:middle]) + in_halves(parts[middle:])


def dealt(size: int, seed: int, first: int, count: int) -> list[int]:
    """Samples ``first`` to ``first + count`` of all that are ever dealt of a dataset: a new order in each epoch."""
    return [_shuffled(size, seed, *divmod(place, size)) for place in range(first, first + count)]


def _shuffled(size: int, seed: int, epoch: int, place: int) -> int:
    """What stands at a place of an epoch's order: 8 rounds of a Feistel network, again while it is out of range."""
    bits = max(6, (size - 1).bit_length())
    low_bits = bits // 2
    low_mask, high_mask = (1 << low_bits) - 1, (1 << bits - low_bits) - 1
    digest = hashlib.blake2b(f"{size},{seed},{epoch}".encode(), digest_size=64).digest()
    keys = [int.from_bytes(digest[start : start + 8], "little") for start in range(0, 64, 8)]
    value = place
    while True:
        high, low = value >> low_bits, value & low_mask
        for one, other in zip(keys[::2], keys[1::2], strict=True):
            high ^= _mixed(low + one) & high_mask
            low ^= _mixed(high + other) & low_mask
        value = high << low_bits | low
        if value < size:
            return value


def _mixed(value: int) -> int:
    """The finalizer of SplitMix64."""
    value &= 2**64 - 1
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def as_drawn(parts: Sequence[Any], chance: random.Random) -> Any:
    """Sum two parts at a time, drawn by chance, until one is left: another order, for the size of rounding errors."""
    left = list(parts)
    while len(left) > 1:
        one = left.pop(chance.randrange(len(left)))
        other = left.pop(chance.randrange(len(left)))
        left.append(one + other)
    return left[0]


def clip_as_one(parameters: Sequence[Any], clip_norm: float) -> None:
    """As ``clip_grad_norm_``, with the norm of one long vector: another order of that sum, too."""
    import torch

    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.linalg.vector_norm(
        torch.cat([gradient.reshape(-1).float() for gradient in gradients])
    )
    torch._foreach_mul_(gradients, float((clip_norm / (norm + 1e-6)).clamp(max=1.0)))


class PlainTrainer:
    """The interface of :class:`chaoskit.Trainer`, for one process that has all shards.

    Args:
        samples: step -> shard -> indices into the dataset.
        order: 0 to sum the gradients of the shards, and their norm, as runs do; else the number of another order.
        give_up_s: on the monotonic clock, when the job is left.
        skips: see :attr:`Request.skips`.
    """

    rank, world, worker, will_restore = 0, 1, "reference", False

    def __init__(
        self,
        seed: int,
        samples: Sequence[Sequence[Sequence[int]]],
        disk: Path,
        *,
        order: int = 0,
        give_up_s: float = math.inf,
        skips: bool = False,
    ) -> None:
        import torch

        self.seed, self.disk, self.device = seed, disk, torch.device("cpu")
        self.step, self.losses = 0, list[float | None]()
        self.misdealt = ""
        self._skips = skips
        self._samples, self._give_up_s = samples, give_up_s
        self._chance = random.Random(order) if order else None
        self._calls = 0
        self._shard_losses: list[Any] = []
        self._after_update: list[Callable[[], object]] = []

    # -- what is trained ------------------------------------------------------------------------------------------

    def register(
        self, *, model: Any, optimizer: Any, scheduler: Any = None, clip_norm: float | None = None
    ) -> None:
        """Name what is trained."""
        self._model, self._clip_norm = model, clip_norm
        self._optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        schedulers = [] if scheduler is None else scheduler
        self._schedulers = list(schedulers) if isinstance(schedulers, Sequence) else [schedulers]
        self._parameters = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]

    def after_update(self, function: Callable[[], object]) -> Callable[[], object]:
        """Call ``function`` at the end of each update."""
        self._after_update.append(function)
        return function

    def transaction(self) -> PlainTransaction:
        """One step."""
        if self.step == len(self._samples):
            raise _Enough
        if time.monotonic() > self._give_up_s:
            raise _OutOfTime
        return PlainTransaction(self)

    def shards(self, dataset: Any) -> Iterator[PlainShard]:
        """All shards of the step; behind the last one the step is taken."""
        import torch

        before = self._buffers()
        parts, losses = list[list[Any]](), list[float]()
        for index, samples in enumerate(self._samples[self.step]):
            if not self.misdealt and self._chance is None:
                self._look_at(len(dataset), index, samples)
            seed_all(self.seed, self.step, index)
            self._clear()
            self._shard_losses = []
            yield PlainShard(index, list(samples), load(dataset, samples))
            if not self._shard_losses:
                raise CannotTell(f"the loop body of step {self.step} called no step.backward(loss)")
            parts.append([parameter.grad for parameter in self._parameters])
            losses.append(float(sum(self._shard_losses[1:], self._shard_losses[0])))
        if not all(map(torch.equal, before, self._buffers())):
            raise CannotTell("the forward pass changes buffers of the model, as BatchNorm does")
        with torch.autocast("cpu", enabled=False):
            self._reduce(parts)
            is_skipped = self._skips and not self._is_finite()
            if not is_skipped:
                self._update()
        self._clear()
        torch.clear_autocast_cache()
        loss = sum(losses) / len(losses)
        if not is_skipped and not math.isfinite(loss):
            raise CannotTell(f"the loss of step {self.step} is {loss}")
        self.losses.append(None if is_skipped else loss)
        self.step += 1
        self._calls = 0

    def _look_at(self, size: int, index: int, samples: Sequence[int]) -> None:
        """Compare the samples that the run has named for a shard with those that it had to take."""
        number = self.step * len(self._samples[self.step]) + index
        expected = dealt(size, self.seed, number * len(samples), len(samples))
        if expected != list(samples):
            self.misdealt = f"step {self.step}, shard {index}: {list(samples)[:4]}... instead of {expected[:4]}..."

    def _buffers(self) -> list[Any]:
        return [buffer.detach().clone() for buffer in self._model.buffers()]

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def backward(self, loss: Any) -> None:
        """The gradients of one shard."""
        (loss / len(self._samples[self.step])).backward()
        self._shard_losses.append(loss.detach())

    def _reduce(self, parts: list[list[Any]]) -> None:
        for parameter, gradients in zip(self._parameters, zip(*parts, strict=True), strict=True):
            parameter.grad = self._total(gradients)

    def _is_finite(self) -> bool:
        """Whether every value of the summed gradients is a finite number."""
        import torch

        return all(
            bool(torch.isfinite(one.grad).all()) for one in self._parameters if one.grad is not None
        )

    def _update(self) -> None:
        from torch.nn.utils import clip_grad_norm_

        if self._clip_norm is not None:
            clip = clip_as_one if self._chance else clip_grad_norm_
            clip(self._parameters, self._clip_norm)
        for stepped in (*self._optimizers, *self._schedulers):
            stepped.step()
        self._run_after_update()

    def _run_after_update(self) -> None:
        import torch

        if self._after_update:
            seed_all(self.seed, self.step, len(self._samples[self.step]))
            with torch.no_grad():
                for function in self._after_update:
                    function()

    def _total(self, gradients: Sequence[Any]) -> Any:
        """Over the shards; one that a shard did not give counts as zeros, unless no shard gave one."""
        import torch

        given = [gradient for gradient in gradients if gradient is not None]
        if not given:
            return None
        wide = torch.promote_types(given[0].dtype, torch.float32)
        parts = [
            torch.zeros_like(given[0]) if gradient is None else gradient for gradient in gradients
        ]
        wide_parts = [part.to(wide) for part in parts]
        total = as_drawn(wide_parts, self._chance) if self._chance else in_halves(wide_parts)
        return total.to(given[0].dtype)

    def state(self) -> dict[str, Any]:
        """Every tensor of the model and its optimizers, under the path that it has in journals."""
        state = self.weights() | self.buffers() | self.slots()
        return {path: one.detach() for path, one in state.items()}

    def weights(self) -> dict[str, Any]:
        return {f"model/{name}": one for name, one in self._model.named_parameters()}

    def buffers(self) -> dict[str, Any]:
        return {f"model/{name}": one for name, one in self._model.named_buffers()}

    def slots(self) -> dict[str, Any]:
        """What the optimizers keep of each parameter."""
        owned = [
            (one, parameter)
            for one in self._optimizers
            for group in one.param_groups
            for parameter in group["params"]
        ]
        slots: dict[str, Any] = {}
        for index, (optimizer, parameter) in enumerate(owned):
            for key, value in optimizer.state.get(parameter, {}).items():
                slots |= dict(_tensors_in(value, f"optimizer/{index}/{key}"))
        return slots

    def rates(self) -> list[float]:
        """Of each group of parameters that has one."""
        groups = [group for one in self._optimizers for group in one.param_groups]
        return [float(group["lr"]) for group in groups if "lr" in group]

    def numbers(self) -> str:
        """Rates, schedules and counts: what optimizers and schedulers keep that is no tensor, in words."""
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for one in self._optimizers
            for group in one.param_groups
        ]
        counts = [
            value
            for one in self._optimizers
            for group in one.param_groups
            for parameter in group["params"]
            for value in one.state.get(parameter, {}).values()
            if not dict(_tensors_in(value, ""))
        ]
        return repr((groups, counts, [one.state_dict() for one in self._schedulers]))

    # -- what else a job may call ---------------------------------------------------------------------------------

    def mesh(self, **sizes: int) -> None:
        """No mesh: the model stays whole, as ``fully_shard`` does nothing in this process."""

    def all_reduce(self, value: Any, op: str = "sum", *, shards: int | None = None) -> Any:
        """Of all shards; values of other ranks are not known here."""
        if shards is None or not callable(value):
            self._refuse("all_reduce with one value of each rank")
        number, self._calls = self._calls, self._calls + 1
        parts = []
        for shard in range(shards):
            seed_all(self.seed, self.step, number, shard)
            parts.append(value(shard))
        if op in ("max", "min"):
            self._refuse(f"all_reduce with op={op!r}")
        total = in_halves(parts)
        return total / shards if op == "mean" else total

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The value of rank 0."""
        if source != 0:
            self._refuse(f"broadcast from rank {source}")
        self._calls += 1
        return value() if callable(value) else value

    def barrier(self) -> None:
        """There is no other rank."""
        self._calls += 1

    def _refuse(self, what: str) -> NoReturn:
        raise CannotTell(f"the job calls trainer.{what}")

    def long_phase(self, name: str) -> AbstractContextManager[None]:
        """Nothing waits for this process."""
        return nullcontext()

    def elastic_event_detected(self) -> bool:
        """The world never changes."""
        return False

    def on_resize(self, callback: Any) -> Any:
        """Never called; so are the next two."""
        return callback

    on_preempt = on_fault = on_resize


class PlainTransaction:
    """The ``with`` block around one step."""

    def __init__(self, trainer: PlainTrainer) -> None:
        self._trainer = trainer

    @property
    def number(self) -> int:
        """Number of the step, from 0."""
        return self._trainer.step

    def shards(
        self, dataset: Any, *, batch_size: int, prefetch: bool = False
    ) -> Iterator[PlainShard]:
        """All shards of the step."""
        return self._trainer.shards(dataset)

    def backward(self, loss: Any) -> None:
        """The gradients of one shard."""
        self._trainer.backward(loss)

    def __enter__(self) -> PlainTransaction:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Nothing is left to do."""


def _tensors_in(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield each tensor of a value that an optimizer keeps, with its path, as journals have it."""
    if hasattr(value, "detach"):
        yield path, value
    elif type(value) in (dict, list, tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            name = str(key).replace("%", "%25").replace("/", "%2F").replace(".", "%2E")
            yield from _tensors_in(item, f"{path}/{name}")


def seed_all(*key: int) -> None:
    """Seed torch, random and NumPy from integers: the first 8 bytes of BLAKE2b over them, without the last bit."""
    import torch

    digest = hashlib.blake2b(",".join(map(str, key)).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "big") >> 1
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


def load(dataset: Any, samples: Sequence[int]) -> Any:
    """The batch of these samples, as ``DataLoader`` makes it."""
    from torch.utils.data import default_collate

    many = getattr(dataset, "__getitems__", None)
    batch = many(list(samples)) if many is not None else [dataset[index] for index in samples]
    return default_collate(batch) if isinstance(batch, list) else batch


# -- the process --------------------------------------------------------------------------------------------------


def answer(request: Request) -> PlainAnswer:
    """Train what ``request`` names."""
    import torch

    torch.set_num_threads(1)
    fsdp = importlib.import_module("torch.distributed.fsdp")
    vars(fsdp)["fully_shard"] = _keep_whole  # before the job imports it
    sleep = time.sleep
    vars(time)["sleep"] = lambda _: sleep(
        0.0
    )  # nothing waits for this process: a job that paces itself is hurried
    run_id = uuid.uuid4().hex
    try:
        train = _load_train(request.job)
        give_up_s = time.monotonic() + request.budget_s
        usual = _train(train, request, request.seed)
        spread, floor, orders, is_steady = list[float](), dict[str, float](), 0, False
        if request.seeds:
            spread, floor = _spread(train, request, usual.state())
            orders = len(request.seeds)
        elif request.orders:
            floor, orders, is_steady = _floor(train, request, usual, give_up_s)
    except CannotTell as error:
        return PlainAnswer(run_id, [], reason=str(error))
    except Exception as error:  # noqa: BLE001 - of the job
        reason = f"the job fails in plain PyTorch: {type(error).__name__}: {error}"[:300]
        return PlainAnswer(run_id, [], reason=reason)
    if loaded := [name for name in sys.modules if name.startswith(UNDER_TEST)]:
        return PlainAnswer(run_id, [], reason=f"the job imports {min(loaded)}, which is under test")
    state = _numbers(usual, request.job)
    return PlainAnswer(
        run_id, usual.losses, state, spread, floor, orders, is_steady, usual.rates(), usual.misdealt
    )


def _numbers(trainer: PlainTrainer, job: JobSpec) -> dict[str, list[float]]:
    """See :attr:`PlainAnswer.state`."""
    from chaoskit.sketch import TensorBox, sketch  # imports torch

    buffers = trainer.buffers()
    parts = [
        TensorBox(path, tensor, tuple(tensor.shape), (0,) * tensor.dim(), path in buffers)
        for path, tensor in trainer.state().items()
        if not (job.sharded and path in buffers)
    ]
    return {path: numbers for path, (_, _, numbers) in sketch(parts).items()}


def _spread(
    train: Callable[..., None], request: Request, usual: dict[str, Any]
) -> tuple[list[float], dict[str, float]]:
    """Of the losses and of the final state; see :attr:`PlainAnswer.spread` and :attr:`PlainAnswer.floor`."""
    spread, floor = (
        [0.0] * len(request.samples),
        {path: _unit(tensor) for path, tensor in usual.items()},
    )
    for seed in request.seeds:
        one, other = (_train(train, request, seed, order=order) for order in (0, 1))
        for step, (loss, another) in enumerate(zip(one.losses, other.losses, strict=True)):
            if loss is not None and another is not None:
                spread[step] = max(spread[step], abs(loss - another) / max(1.0, abs(loss)))
        floor = _wider(floor, one.state(), other.state())
    return spread, floor


def _wider(floor: dict[str, float], one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    return {path: max(known, _apart(one[path], other[path])) for path, known in floor.items()}


def _floor(
    train: Callable[..., None], request: Request, usual: PlainTrainer, give_up_s: float
) -> tuple[dict[str, float], int, bool]:
    """See the fields ``floor``, ``orders`` and ``is_steady`` of :class:`PlainAnswer`. One order is always tried."""
    state, is_steady = usual.state(), True
    floor = {path: _unit(tensor) for path, tensor in state.items()}
    for count, order in enumerate(request.orders):
        end_s = give_up_s if count else math.inf
        try:
            other = _train(train, request, request.seed, order=order, give_up_s=end_s)
        except _OutOfTime:
            return floor, count, is_steady
        floor = _wider(floor, state, other.state())
        is_steady = is_steady and other.numbers() == usual.numbers()
    return floor, len(request.orders), is_steady


def _unit(tensor: Any) -> float:
    """A unit in the last place of a tensor's largest finite value: of bfloat16 ten orders may show no rounding."""
    import torch

    if not tensor.is_floating_point() or not tensor.numel():
        return 0.0
    largest = torch.where(torch.isfinite(tensor), tensor, 0.0).abs().max()
    return float(largest) * torch.finfo(tensor.dtype).eps


def _apart(one: Any, other: Any) -> float:
    """2-norm of the difference of two tensors; 0 where it is not finite, which is for another check to say."""
    import torch

    difference = torch.where(
        one == other, 0.0, one.double() - other.double()
    )  # infinities may be equal
    norm = float(torch.linalg.vector_norm(difference))
    return norm if math.isfinite(norm) else 0.0


def _keep_whole(module: Any, *, mp_policy: Any = None, **_: Any) -> Any:
    """Take the place of ``fully_shard``."""
    types = ("param_dtype", "reduce_dtype", "output_dtype")
    if any(getattr(mp_policy, name, None) is not None for name in types):
        raise CannotTell("fully_shard has a mixed precision, of which one process knows nothing")
    return module


def _load_train(job: JobSpec) -> Callable[..., None]:
    train: Callable[..., None] = getattr(import_job(job), job.function)
    return train


def _train(
    train: Callable[..., None],
    request: Request,
    seed: int,
    *,
    order: int = 0,
    give_up_s: float = math.inf,
) -> PlainTrainer:
    with tempfile.TemporaryDirectory(prefix="chaoskit-plain-") as directory:
        disk = Path(directory) / "node0"
        disk.mkdir()
        options: dict[str, Any] = {"order": order, "give_up_s": give_up_s, "skips": request.skips}
        trainer = PlainTrainer(seed, request.samples, disk, **options)
        try:
            train(trainer, **request.job.options)
        except _Enough:
            pass
    return trainer


def main() -> None:
    """Answer one request."""
    source, target = map(Path, sys.argv[1:])
    request = msgspec.json.decode(source.read_bytes(), type=Request)
    draft = target.with_suffix(".draft")
    draft.write_bytes(msgspec.json.encode(answer(request)))
    draft.rename(target)


if __name__ == "__main__":
    main()
