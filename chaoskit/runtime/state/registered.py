"""The registered objects of a job, and the numbers in their state.

-> state/replica.py and state/sharding.py: the tensors. state/admission.py: which objects are
refused. state/optimizer_state.py: the encoding. step/base_trainer.py: ``after_update``.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from chaoskit.errors import BadInput, ChaoskitError
from chaoskit.runtime.state.admission import require_model, require_optimizers, require_schedulers
from chaoskit.runtime.state.batch_follows_world import Following
from chaoskit.runtime.state.optimizer_state import (
    OwnNumbers,
    assemble,
    decode,
    encode,
    encode_numbers,
    tensors_in,
)

#: Paths of a training state begin with one of these.
MODEL, OPTIMIZER = "model/", "optimizer/"


class Scheduler(Protocol):
    """The methods that a learning-rate scheduler must have."""

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Registered:
    """The registered objects of a job.

    Making the object adds hooks to each optimizer, which then refuses a step of the script's own.

    Args:
        optimizer, scheduler: one, or several that take their steps in this order.

    Attributes:
        step: committed steps; -1 without a state.
        parameters: the trained parameters, in the order of the model.
        parameter_names: of all optimizers' parameters, in their order; "" without a name.
        following: the batch that follows the world; None for a fixed batch.
        after_update: the job's functions for the end of each update.
        script_writes: True once the script has changed the state between two steps.

    Raises:
        BadInput: if they cannot be trained by a transaction.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        scheduler: Scheduler | Sequence[Scheduler] | None,
    ) -> None:
        self.model = model
        self.optimizers = tuple(optimizer) if isinstance(optimizer, Sequence) else (optimizer,)
        schedulers = () if scheduler is None else scheduler
        self.schedulers = tuple(schedulers) if isinstance(schedulers, Sequence) else (schedulers,)
        require_model(model)
        require_optimizers(self.optimizers, model)
        require_schedulers(self.schedulers)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.device = self.parameters[0].device
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.parameter_names = [names.get(id(parameter), "") for _, parameter in self.owned()]
        self.step = 0
        self.following: Following | None = None
        self.after_update: list[Callable[[], object]] = []
        self.script_writes = False  # the script changes the state after steps
        self._updating = False
        self._own_numbers = {
            id(each): OwnNumbers(each, self._known_objects) for each in self.optimizers
        }
        for each in self.optimizers:
            each.register_step_pre_hook(self._before_step)
            each.register_step_post_hook(self._after_step)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Refuse a script's own ``optimizer.step()``, or a GradScaler's, by BadInput.

        It would change the weights of one rank only.

        The learning rate is read here, because the journal must have the rate that the optimizer
        actually uses.
        """
        if not self._updating:
            remedy = "delete optimizer.step() and any GradScaler: leaving the transaction runs the optimizers"
            raise BadInput("optimizer", type(optimizer).__name__, remedy)
        if self.following is not None and optimizer is self.optimizers[0]:
            self.following.rate = float(optimizer.param_groups[0]["lr"])

        self._own_numbers[id(optimizer)].begin()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Record which numbers of the optimizer's own the step has changed."""
        self._own_numbers[id(optimizer)].end()

    def _known_objects(self) -> set[int]:
        """Return the identities of objects that an optimizer may refer to.

        They are state already, or are made anew each step.
        """
        parameters = [parameter for _, parameter in self.owned()]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        states = [optimizer.state for optimizer in self.optimizers]
        return {
            id(held) for held in (*self.optimizers, *self.model.parameters(), *gradients, *states)
        }

    def advance(self) -> None:
        """Take one step of every optimizer, then of every scheduler.

        Call it inside :meth:`running_optimizers`. The count of steps stays.
        """
        for optimizer in self.optimizers:
            with self.following.apply(optimizer, self.step) if self.following else nullcontext():
                optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()

    @contextmanager
    def running_optimizers(self) -> Iterator[None]:
        """Allow the block to run the optimizers. Outside of it, their steps are refused."""
        self._updating = True
        try:
            yield
        finally:
            self._updating = False

    @torch.no_grad()
    def run_after_update(self) -> None:
        """Call the job's functions for the end of each update.

        A step of an optimizer in them raises BadInput.
        """
        self._updating = False
        for function in self.after_update:
            function()

    def versioned(self) -> list[Tensor]:
        """Return every registered tensor as the script sees it.

        The version counters of these tensors show writes in place.
        """
        states = [tensor for _, tensor in self.optimizer_tensors()]
        return [*self.model.parameters(), *self.model.buffers(), *states]

    def placed(self, *, fresh: bool) -> tuple[list[Tensor], list[int]]:
        """Return :meth:`versioned`, and the address of each of these tensors.

        Args:
            fresh: the step was just committed, so nothing has moved since.
        """
        tensors = self.versioned()
        return tensors, [tensor.data_ptr() for tensor in tensors]

    def noted_scalars(self, *, fresh: bool) -> bytes:
        """Return the result of :meth:`scalars`.

        If no number has changed since the newest commit, these are the bytes that were published
        with it.

        Args:
            fresh: the step was just committed, so no number has changed.
        """
        return self.scalars()

    def memories(self) -> list[Tensor]:
        """Return the memory of each registered tensor in this process, as detached views."""
        return [tensor.detach() for tensor in self.versioned()]

    @contextmanager
    def own_numbers_undone(self) -> Iterator[None]:
        """Restore, after the block, the numbers that the optimizers keep on themselves.

        They are not restored if the block raises.
        """
        before = {key: own.all_plain() for key, own in self._own_numbers.items()}
        yield
        for key, own in self._own_numbers.items():
            own.put_back(before[key])

    def owned(self) -> list[tuple[Optimizer, Tensor]]:
        """Return every parameter with its optimizer, in the order of all optimizers."""
        return [
            (owner, parameter)
            for owner in self.optimizers
            for group in owner.param_groups
            for parameter in group["params"]
        ]

    def optimizer_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the optimizers' tensors under paths that are the same on all ranks."""
        for index, (optimizer, parameter) in enumerate(self.owned()):
            for key, nested in optimizer.state.get(parameter, {}).items():
                yield from tensors_in(nested, f"{OPTIMIZER}{index}/{key}")

    def rebuild_optimizer_state(self, tensors: dict[str, Tensor]) -> None:
        """Replace the state of all optimizers by the tensors that have optimizer paths.

        Numbers and nested containers in that state are missing until :meth:`load_scalars`.
        """
        owned = self.owned()
        for optimizer, parameter in owned:
            optimizer.state.pop(parameter, None)
        for path, tensor in tensors.items():
            if path.startswith(OPTIMIZER):
                index, _, key = path.removeprefix(OPTIMIZER).partition("/")
                optimizer, parameter = owned[int(index)]
                optimizer.state[parameter][key] = tensor

    # -- numbers -----------------------------------------------------------------------------------

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def scalars(self) -> bytes:
        """Return all numbers of the state, encoded.

        They are learning rates, the schedulers' and the optimizers' numbers, and the names of the
        optimizers' parameters. Also the shards dealt so far, if the batch follows the world.

        Raises:
            BadInput: if a parameter group, or the state of a parameter, has anything that cannot be
                encoded.
            ChaoskitError: if a scheduler has, or an attribute of an optimizer that steps change.
        """
        return self._encode(self._compared_numbers())

    def _encode(self, compared: dict[str, Any]) -> bytes:
        """Return :meth:`scalars`, given the numbers that all ranks must agree on."""
        own = [self._own_numbers[id(optimizer)].numbers() for optimizer in self.optimizers]
        writes = {"script_writes": True} if self.script_writes else {}
        return msgspec.msgpack.encode(compared | {"own": own} | writes)

    def _compared_numbers(self) -> dict[str, Any]:
        """Return the numbers that all ranks must agree on, by their part of the state."""
        following = {"following": self.following.state()} if self.following else {}
        return self._numbers() | following

    def _numbers(self) -> dict[str, Any]:
        """Return the compared numbers without those of a batch that follows the world."""
        groups = [
            self._encode_group(optimizer, group_index)
            for optimizer, group_index in self._group_indices()
        ]
        state = {
            f"{index}/{key}": self._encode_state(index, key, nested)
            for index, (optimizer, parameter) in enumerate(self.owned())
            for key, nested in optimizer.state.get(parameter, {}).items()
            if not isinstance(nested, Tensor)
        }
        schedulers = [encode_numbers(scheduler.state_dict()) for scheduler in self.schedulers]
        return {
            "groups": groups,
            "state": state,
            "schedulers": schedulers,
            "names": self.parameter_names,
        }

    def _group_indices(self) -> Iterator[tuple[Optimizer, int]]:
        """Yield each optimizer with the index of each of its groups."""
        for optimizer in self.optimizers:
            for group_index in range(len(optimizer.param_groups)):
                yield optimizer, group_index

    def _encode_group(self, optimizer: Optimizer, group_index: int) -> dict[str, Any]:
        """Return the numbers of a parameter group; raise BadInput for anything else in it."""
        numbers = {}
        for key, number in optimizer.param_groups[group_index].items():
            if key == "params":
                continue
            try:
                numbers[key] = encode_numbers(number)
            except ChaoskitError as error:
                attribute = f"{type(optimizer).__name__}.param_groups[{group_index}][{key!r}]"
                raise _refusal(attribute, "numbers, strings, lists and dicts", error) from error
        return numbers

    def _encode_state(self, index: int, key: str, value: Any) -> Any:
        """Return a value of the state of parameter ``index``, encoded. Raise BadInput if that fails."""
        try:
            return encode(value, key)
        except ChaoskitError as error:
            optimizer, _ = self.owned()[index]
            name = self.parameter_names[index] or f"parameter {index}"
            attribute = f"{type(optimizer).__name__}.state[{name}][{key!r}]"
            raise _refusal(
                attribute, "tensors, numbers, strings, and lists, tuples and dicts of these", error
            ) from error

    def rates(self) -> list[float]:
        """Return the learning rate of each group that has one, in the order of the optimizers."""
        return [float(group["lr"]) for group in self._groups() if "lr" in group]

    def scalars_checksum(self) -> int:
        """Return a checksum of the numbers in :meth:`scalars` that all ranks must agree on."""
        return checksum_of(self._compared_numbers())

    def scalars_digest(self) -> str:
        """Return a BLAKE2b digest of the numbers that all ranks agree on, in hexadecimal digits.

        The sizes of a batch that follows the world are left out: the unbroken run that the job is
        compared with is given these.
        """
        return hashlib.blake2b(msgspec.msgpack.encode(self._numbers()), digest_size=16).hexdigest()

    def load_scalars(self, data: bytes, step: int) -> None:
        """Take over learning rates, schedulers and step of another state.

        This is the last part of taking a state over.

        Args:
            data: the result of :meth:`scalars` on another rank, or in another run.

        Raises:
            BadInput: if the batches of that state followed the world, and those here do not, or
                follow it from another number of nodes or shards.
            ChaoskitError: if the optimizer lacks a tensor that the numbers refer to.
            ValueError: if that state has another number of parameter groups or schedulers.
        """
        scalars = msgspec.msgpack.decode(data)
        for group, stored in zip(self._groups(), scalars["groups"], strict=True):
            for key, encoded in stored.items():
                decoded = decode(encoded, {})
                current = group.get(key)
                if isinstance(current, Tensor):
                    current.fill_(decoded)  # the optimizer and its scheduler may both hold it
                else:
                    group[key] = tuple(decoded) if isinstance(current, tuple) else decoded
        owned = self.owned()
        for path, decoded in scalars["state"].items():
            index, _, key = path.partition("/")
            optimizer, parameter = owned[int(index)]
            assemble(optimizer.state[parameter], key, decoded)
        for optimizer, numbers in zip(self.optimizers, scalars["own"], strict=True):
            self._own_numbers[id(optimizer)].load(numbers)
        for scheduler, stored in zip(self.schedulers, scalars["schedulers"], strict=True):
            scheduler.load_state_dict(decode(stored, {}))
        self.script_writes |= scalars.get("script_writes", False)
        if self.following is not None:
            self.following.load(scalars.get("following"), step)
        elif "following" in scalars:
            raise BadInput(
                "follow", None, "set it as before: the batch of this state followed the world size"
            )
        self.step = step


def checksum_of(numbers: dict[str, Any]) -> int:
    """Return a CRC-32 of numbers, which ranks compare."""
    return zlib.crc32(msgspec.msgpack.encode(numbers))


def _refusal(attribute: str, kinds: str, error: ChaoskitError) -> BadInput:
    """Return the error for an object of an optimizer that a rank that joins cannot get."""
    remedy = f"keep only {kinds} there, which a rank that joins can get: {error}"
    return BadInput("optimizer", attribute, remedy)
