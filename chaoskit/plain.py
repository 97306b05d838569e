"""The training of a job by plain PyTorch in one process, as an independent reference for runs.

``python -m chaoskit.plain REQUEST ANSWER`` reads a :class:`Request` and writes a
:class:`PlainAnswer`, both JSON. The process imports torch and the job, and nothing of
``chaoskit.runtime``, ``chaoskit.checkpoint`` or ``chaoskit.agent``: a mistake that these make in
every run, even in the unbroken one, is not made here. So the rules that a run promises are
implemented here a second time: the samples and the seed of a shard, the order of the sum, the mean
of the losses.

-> ``experiment/reference/plain_process.py`` starts it. ``experiment/judge/comparison.py``: how a
run is compared with its answer.
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

#: Packages under test, of which no module may be loaded in this process.
UNDER_TEST = (
    "chaoskit.agent",
    "chaoskit.checkpoint",
    "chaoskit.coordinator",
    "chaoskit.daemon",
    "chaoskit.logs",
    "chaoskit.process.progress_board",
    "chaoskit.runtime",
    "chaoskit.wire.announcements",
    "chaoskit.wire.lease",
)


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A training to repeat.

    Attributes:
        job: the job.
        seed: the seed of the run.
        samples: step -> shard -> indices into the dataset, as the run has recorded them.
        seeds: further seeds with which two orders of summation are compared; see
            :attr:`PlainAnswer.spread`.
        orders: numbers of further orders of summation of which the final states are compared; see
            :attr:`PlainAnswer.floor`. Not used if there are ``seeds``.
        budget_s: time in which further orders may begin, the usual one included. The first further
            one is tried however long it takes.
        skips: True if a step with gradients that are not finite is skipped.
    """

    job: JobSpec
    seed: int
    samples: list[list[list[int]]]
    seeds: list[int] = []
    orders: list[int] = []
    budget_s: float = 60.0
    skips: bool = False


class PlainAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a training.

    Attributes:
        run_id: a new identifier.
        losses: losses of the steps, from step 0; None for a step that was skipped.
        state: path -> sketch of each tensor after the last step; see :mod:`chaoskit.sketch`. For a
            sharded job it has no buffers, as each rank has its own.
        spread: step -> the largest relative difference between the losses of two orders of
            summation; empty if no seeds were given.
        floor: path of a tensor -> the largest 2-norm of the difference between its final values in
            the usual order of summation and in another one, for one seed or for each; at least a
            unit in the last place of its largest value.
        orders: number of such pairs for which there was time.
        is_steady: True if rates, schedules and counts were equal in all orders; False without
            orders.
        rates: learning rates after the last step, by group of parameters.
        misdealt: the first samples that differ from those which seed and dataset give; empty if
            none do.
        reason: the reason why there is no result; empty if everything was trained. With a reason,
            all fields before it except ``run_id`` are empty or 0.
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
    """Plain PyTorch in one process cannot reproduce this job, for the reason in the message."""


class _AllStepsTaken(BaseException):
    """Raised when all steps were taken, to leave the train function."""


class _OutOfTime(BaseException):
    """Raised when the time is over, to leave the train function."""


@dataclass(frozen=True)
class PlainShard:
    """A slice of the global batch, like :class:`chaoskit.Shard`."""

    index: int
    samples: list[int]
    batch: Any


def sum_in_halves(parts: Sequence[Any]) -> Any:
    """Return the sum in the order of runs: left half plus right half, cut at a power of two."""
    if len(parts) == 1:
        return parts[0]
    middle = 1 << (len(parts) - 1).bit_length() - 1
    return sum_in_halves(parts[:middle]) + sum_in_halves(parts[middle:])


def dealt_samples(size: int, seed: int, first: int, count: int) -> list[int]:
    """Return ``count`` samples, from place ``first``, of all that are ever dealt of a dataset.

    Each epoch has a new order.
    """
    return [_shuffled(size, seed, *divmod(place, size)) for place in range(first, first + count)]


def _shuffled(size: int, seed: int, epoch: int, place: int) -> int:
    """Return the sample at a place of an epoch's order.

    The place goes through 8 rounds of a Feistel network, repeatedly while the result is out of
    range.
    """
    bits = max(6, (size - 1).bit_length())
    low_bits = bits // 2
    low_mask, high_mask = (1 << low_bits) - 1, (1 << bits - low_bits) - 1
    digest = hashlib.blake2b(f"{size},{seed},{epoch}".encode(), digest_size=64).digest()
    keys = [int.from_bytes(digest[start : start + 8], "little") for start in range(0, 64, 8)]
    mixed = place
    while True:
        high, low = mixed >> low_bits, mixed & low_mask
        for high_key, low_key in zip(keys[::2], keys[1::2], strict=True):
            high ^= _mixed(low + high_key) & high_mask
            low ^= _mixed(high + low_key) & low_mask
        mixed = high << low_bits | low
        if mixed < size:
            return mixed


def _mixed(bits: int) -> int:
    """Return the finalizer of SplitMix64 of an integer."""
    bits &= 2**64 - 1
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
    return bits ^ bits >> 31


def sum_in_random_order(parts: Sequence[Any], generator: random.Random) -> Any:
    """Return the sum in a random order, to show the size of rounding errors.

    Two parts, drawn at random, are replaced by their sum until one part is left.
    """
    remaining = list(parts)
    while len(remaining) > 1:
        first = remaining.pop(generator.randrange(len(remaining)))
        second = remaining.pop(generator.randrange(len(remaining)))
        remaining.append(first + second)
    return remaining[0]


def clip_as_one(parameters: Sequence[Any], clip_norm: float) -> None:
    """Clip like ``clip_grad_norm_``, by the norm of one long vector: another order of that sum."""
    import torch

    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.linalg.vector_norm(
        torch.cat([gradient.reshape(-1).float() for gradient in gradients])
    )
    torch._foreach_mul_(gradients, float((clip_norm / (norm + 1e-6)).clamp(max=1.0)))


class PlainTrainer:
    """A :class:`chaoskit.Trainer` for one process that has all shards.

    Args:
        seed: the seed of the run.
        samples: step -> shard -> indices into the dataset.
        disk: a directory for files that the job writes.
        order: 0 to sum the gradients of the shards, and their norm, as runs do; else the number of
            another order.
        give_up_s: time on the monotonic clock; the first transaction after it leaves the job.
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
        self._random = random.Random(order) if order else None
        self._calls = 0
        self._shard_losses: list[Any] = []
        self._after_update: list[Callable[[], object]] = []

    # -- what is trained ---------------------------------------------------------------------------

    def register(
        self, *, model: Any, optimizer: Any, scheduler: Any = None, clip_norm: float | None = None
    ) -> None:
        """Register the model, its optimizers and schedulers, and the norm to clip to.

        Args:
            optimizer, scheduler: one, or several that take their steps in this order.
            clip_norm: largest 2-norm of the summed gradient; None leaves it as it is.
        """
        self._model, self._clip_norm = model, clip_norm
        self._optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        schedulers = [] if scheduler is None else scheduler
        self._schedulers = list(schedulers) if isinstance(schedulers, Sequence) else [schedulers]
        self._parameters = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]

    def after_update(self, function: Callable[[], object]) -> Callable[[], object]:
        """Call ``function`` at the end of each update; a step that is skipped has none.

        Return ``function``, so that this can be used as a decorator.
        """
        self._after_update.append(function)
        return function

    def transaction(self) -> PlainTransaction:
        """Return the next step.

        After the last one, or when the time is over, an exception leaves the train function.

        Raises:
            _AllStepsTaken: if there is no further step.
            _OutOfTime: if the time is over.
        """
        if self.step == len(self._samples):
            raise _AllStepsTaken
        if time.monotonic() > self._give_up_s:
            raise _OutOfTime
        return PlainTransaction(self)

    def shards(self, dataset: Any) -> Iterator[PlainShard]:
        """Yield all shards of the step.

        After the last one the gradients are summed and clipped, optimizers and schedulers are
        stepped, and the functions of :meth:`after_update` are called. The mean loss of the shards
        is added to ``losses``, and ``step`` grows by one.

        With ``skips``, a step whose summed gradients are not finite updates nothing, and adds None
        to ``losses``. ``step`` grows by one as well.

        Raises:
            CannotTell: if a loop body calls no ``step.backward(loss)``, or the forward pass changes
                a buffer. Also if the loss is not finite and the step is not skipped.
        """
        import torch

        before = self._buffers()
        parts, losses = list[list[Any]](), list[float]()
        for index, samples in enumerate(self._samples[self.step]):
            if not self.misdealt and self._random is None:
                self._compare_samples(len(dataset), index, samples)
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

    def _compare_samples(self, size: int, index: int, samples: Sequence[int]) -> None:
        """Set ``misdealt`` if the recorded samples of a shard differ from the expected ones."""
        number = self.step * len(self._samples[self.step]) + index
        expected = dealt_samples(size, self.seed, number * len(samples), len(samples))
        if expected != list(samples):
            self.misdealt = f"step {self.step}, shard {index}: {list(samples)[:4]}... instead of {expected[:4]}..."

    def _buffers(self) -> list[Any]:
        return [buffer.detach().clone() for buffer in self._model.buffers()]

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def backward(self, loss: Any) -> None:
        """Add the gradients of one shard's loss to the parameters, and note the loss.

        The gradients are divided by the number of shards, and the noted loss is not.
        """
        (loss / len(self._samples[self.step])).backward()
        self._shard_losses.append(loss.detach())

    def _reduce(self, parts: list[list[Any]]) -> None:
        """Set the gradient of each parameter to the sum over the shards.

        Args:
            parts: gradients by shard and parameter.
        """
        for parameter, gradients in zip(self._parameters, zip(*parts, strict=True), strict=True):
            parameter.grad = self._total(gradients)

    def _is_finite(self) -> bool:
        """Return whether every value of the summed gradients is a finite number."""
        import torch

        return all(
            bool(torch.isfinite(param.grad).all())
            for param in self._parameters
            if param.grad is not None
        )

    def _update(self) -> None:
        """Clip the gradients, step optimizers and schedulers, and call the user's functions."""
        from torch.nn.utils import clip_grad_norm_

        if self._clip_norm is not None:
            clip = clip_as_one if self._random else clip_grad_norm_
            clip(self._parameters, self._clip_norm)
        for stepped in (*self._optimizers, *self._schedulers):
            stepped.step()
        self._run_after_update()

    def _run_after_update(self) -> None:
        """Call the functions of ``after_update`` with the seed of runs, and without gradients."""
        import torch

        if self._after_update:
            seed_all(self.seed, self.step, len(self._samples[self.step]))
            with torch.no_grad():
                for function in self._after_update:
                    function()

    def _total(self, gradients: Sequence[Any]) -> Any:
        """Return the sum of a parameter's gradients over the shards, or None if no shard has one.

        A missing gradient counts as zeros.
        """
        import torch

        present = [gradient for gradient in gradients if gradient is not None]
        if not present:
            return None
        wide_dtype = torch.promote_types(present[0].dtype, torch.float32)
        parts = [
            torch.zeros_like(present[0]) if gradient is None else gradient for gradient in gradients
        ]
        wide_parts = [part.to(wide_dtype) for part in parts]
        total = (
            sum_in_random_order(wide_parts, self._random)
            if self._random
            else sum_in_halves(wide_parts)
        )
        return total.to(present[0].dtype)

    def state(self) -> dict[str, Any]:
        """Return every tensor of the model and its optimizers, by its path in journals.

        The tensors are not copied: a later step changes them.
        """
        state = self.weights() | self.buffers() | self.slots()
        return {path: tensor.detach() for path, tensor in state.items()}

    def weights(self) -> dict[str, Any]:
        """Return the parameters of the model by their path."""
        return {f"model/{name}": parameter for name, parameter in self._model.named_parameters()}

    def buffers(self) -> dict[str, Any]:
        """Return the buffers of the model by their path."""
        return {f"model/{name}": buffer for name, buffer in self._model.named_buffers()}

    def slots(self) -> dict[str, Any]:
        """Return the tensors that the optimizers keep for each parameter, by their path."""
        owned = [
            (optimizer, parameter)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        slots: dict[str, Any] = {}
        for index, (optimizer, parameter) in enumerate(owned):
            for key, slot in optimizer.state.get(parameter, {}).items():
                slots |= dict(_tensors_in(slot, f"optimizer/{index}/{key}"))
        return slots

    def rates(self) -> list[float]:
        """Return the learning rate of each group of parameters that has one."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return [float(group["lr"]) for group in groups if "lr" in group]

    def numbers(self) -> str:
        """Return rates, schedules and counts as text: all state that is no tensor."""
        groups = [
            {name: setting for name, setting in group.items() if name != "params"}
            for optimizer in self._optimizers
            for group in optimizer.param_groups
        ]
        counts = [
            slot
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            for slot in optimizer.state.get(parameter, {}).values()
            if not dict(_tensors_in(slot, ""))
        ]
        return repr((groups, counts, [scheduler.state_dict() for scheduler in self._schedulers]))

    # -- what else a job may call ------------------------------------------------------------------

    def mesh(self, **sizes: int) -> None:
        """Return None: the model stays whole, as ``fully_shard`` does nothing here."""

    def all_reduce(self, value: Any, op: str = "sum", *, shards: int | None = None) -> Any:
        """Return the sum or the mean of a function of the shard over all shards.

        Raises:
            CannotTell: for values of ranks, which do not exist here, and for ``max`` and ``min``.
        """
        if shards is None or not callable(value):
            self._refuse("all_reduce with one value of each rank")
        number, self._calls = self._calls, self._calls + 1
        parts = []
        for shard in range(shards):
            seed_all(self.seed, self.step, number, shard)
            parts.append(value(shard))
        if op in ("max", "min"):
            self._refuse(f"all_reduce with op={op!r}")
        total = sum_in_halves(parts)
        return total / shards if op == "mean" else total

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the value, or the result of a function that is called, of rank 0.

        Raises:
            CannotTell: for another source.
        """
        if source != 0:
            self._refuse(f"broadcast from rank {source}")
        self._calls += 1
        return value() if callable(value) else value

    def barrier(self) -> None:
        """Count the call, which seeds later ones; there is no other rank to wait for."""
        self._calls += 1

    def _refuse(self, what: str) -> NoReturn:
        raise CannotTell(f"the job calls trainer.{what}")

    def long_phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context that does nothing: no limit applies to this process."""
        return nullcontext()

    def elastic_event_detected(self) -> bool:
        """Return False: the world never changes."""
        return False

    def on_resize(self, callback: Any) -> Any:
        """Return the callback, which is never called: no rank is lost here.

        ``on_preempt`` and ``on_fault`` are this method as well.
        """
        return callback

    on_preempt = on_fault = on_resize


class PlainTransaction:
    """The ``with`` block around one step."""

    def __init__(self, trainer: PlainTrainer) -> None:
        self._trainer = trainer

    @property
    def number(self) -> int:
        """The number of the step, from 0."""
        return self._trainer.step

    def shards(
        self, dataset: Any, *, batch_size: int, prefetch: bool = False
    ) -> Iterator[PlainShard]:
        """Return an iterator over all shards of the step; see :meth:`PlainTrainer.shards`.

        ``batch_size`` and ``prefetch`` are not used: the recorded samples make up the batches.
        """
        return self._trainer.shards(dataset)

    def backward(self, loss: Any) -> None:
        """Run the backward pass of ``loss``, and add it and its gradients to those of the shard."""
        self._trainer.backward(loss)

    def __enter__(self) -> PlainTransaction:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Do nothing: the step was taken by the iterator over its shards."""


def _tensors_in(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield each tensor in a value of an optimizer's state, with its path in journals."""
    if hasattr(value, "detach"):
        yield path, value
    elif type(value) in (dict, list, tuple):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            name = str(key).replace("%", "%25").replace("/", "%2F").replace(".", "%2E")
            yield from _tensors_in(part, f"{path}/{name}")


def seed_all(*key: int) -> None:
    """Seed torch, random and, if it is imported, NumPy from integers.

    The seed is the first 8 bytes of BLAKE2b over them, without the last bit.
    """
    import torch

    digest = hashlib.blake2b(",".join(map(str, key)).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "big") >> 1
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


def load(dataset: Any, samples: Sequence[int]) -> Any:
    """Return the batch of these samples, collated as by ``DataLoader``.

    A batch that ``__getitems__`` of the dataset returns is collated only if it is a list.
    """
    from torch.utils.data import default_collate

    load_many = getattr(dataset, "__getitems__", None)
    batch = (
        load_many(list(samples)) if load_many is not None else [dataset[index] for index in samples]
    )
    return default_collate(batch) if isinstance(batch, list) else batch


# -- the process -----------------------------------------------------------------------------------


def answer(request: Request) -> PlainAnswer:
    """Train the job of ``request`` and return the result.

    A failure of the job, or an import of a package under test, becomes the result's reason; the
    result then has no losses. ``fully_shard`` and ``time.sleep`` are replaced in
    this process, and torch uses one thread.
    """
    import torch

    torch.set_num_threads(1)
    fsdp = importlib.import_module("torch.distributed.fsdp")
    vars(fsdp)["fully_shard"] = _keep_whole  # before the job imports it
    sleep = time.sleep
    vars(time)["sleep"] = lambda _: sleep(0.0)  # a job that paces itself with sleeps is sped up
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
    """Return the sketches of the final state; see :attr:`PlainAnswer.state`."""
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
    """Return the spread of the losses and the floor of the final state, over all seeds.

    See :attr:`PlainAnswer.spread` and :attr:`PlainAnswer.floor`.
    """
    spread, floor = (
        [0.0] * len(request.samples),
        {path: _unit(tensor) for path, tensor in usual.items()},
    )
    for seed in request.seeds:
        trainer, trainer_reordered = (_train(train, request, seed, order=order) for order in (0, 1))
        for step, (loss, other_loss) in enumerate(
            zip(trainer.losses, trainer_reordered.losses, strict=True)
        ):
            if loss is not None and other_loss is not None:
                spread[step] = max(spread[step], abs(loss - other_loss) / max(1.0, abs(loss)))
        floor = _wider(floor, trainer.state(), trainer_reordered.state())
    return spread, floor


def _wider(
    floor: dict[str, float], first: dict[str, Any], other: dict[str, Any]
) -> dict[str, float]:
    """Return ``floor``, raised to the difference between two states where that is larger."""
    return {path: max(norm, _distance(first[path], other[path])) for path, norm in floor.items()}


def _floor(
    train: Callable[..., None], request: Request, usual: PlainTrainer, give_up_s: float
) -> tuple[dict[str, float], int, bool]:
    """Return the fields ``floor``, ``orders`` and ``is_steady`` of :class:`PlainAnswer`.

    At least one order is tried, however long it takes.
    """
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
    """Return a unit in the last place of a tensor's largest finite value.

    Ten orders may show no rounding in bfloat16, so the floor must not be less than this.
    """
    import torch

    if not tensor.is_floating_point() or not tensor.numel():
        return 0.0
    largest = torch.where(torch.isfinite(tensor), tensor, 0.0).abs().max()
    return float(largest) * torch.finfo(tensor.dtype).eps


def _distance(first: Any, other: Any) -> float:
    """Return the 2-norm of the difference of two tensors, or 0 if it is not finite."""
    import torch

    difference = torch.where(
        first == other, 0.0, first.double() - other.double()
    )  # infinities may be equal
    norm = float(torch.linalg.vector_norm(difference))
    return norm if math.isfinite(norm) else 0.0


def _keep_whole(module: Any, *, mp_policy: Any = None, **_: Any) -> Any:
    """Return the module as it is; takes the place of ``fully_shard``.

    Raises:
        CannotTell: if a mixed precision is set, which one process cannot reproduce.
    """
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
    """Call the train function until all steps are taken, and return its trainer.

    A function that returns early gives a trainer with fewer losses. Exceptions of the job are
    raised.

    Raises:
        _OutOfTime: if a transaction is begun after ``give_up_s``.
        CannotTell: if one process cannot reproduce the job.
    """
    with tempfile.TemporaryDirectory(prefix="chaoskit-plain-") as directory:
        disk = Path(directory) / "node0"
        disk.mkdir()
        options: dict[str, Any] = {"order": order, "give_up_s": give_up_s, "skips": request.skips}
        trainer = PlainTrainer(seed, request.samples, disk, **options)
        try:
            train(trainer, **request.job.options)
        except _AllStepsTaken:
            pass
    return trainer


def main() -> None:
    """Answer the request in the file of the first argument, into the file of the second."""
    source, target = map(Path, sys.argv[1:])
    request = msgspec.json.decode(source.read_bytes(), type=Request)
    draft = target.with_suffix(".draft")
    draft.write_bytes(msgspec.json.encode(answer(request)))
    draft.rename(target)


if __name__ == "__main__":
    main()
