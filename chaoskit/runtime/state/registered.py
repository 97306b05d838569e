"""What a job has registered to be trained: model, optimizers, schedulers, and the numbers among their state."""

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
from chaoskit.runtime.state.following import Following
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
    """What a learning-rate scheduler must offer."""

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Registered:
    """The registered objects of a job.

    Args:
        optimizer, scheduler: one, or several that take their steps in this order.

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
        self.script_writes = (
            False  # the script changes this state behind a step; known to each that takes it over
        )
        self._updating = False
        self._own = {id(one): OwnNumbers(one, self._known_objects) for one in self.optimizers}
        for one in self.optimizers:
            one.register_step_pre_hook(self._before_step)
            one.register_step_post_hook(self._after_step)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Refuse a script's own ``optimizer.step()``, or a GradScaler's: it would change the weights of one rank.

        What the optimizer works with is read here, as it is what the journal is to say, not what it was meant to be.
        """
        if not self._updating:
            remedy = "delete optimizer.step() and any GradScaler: leaving the transaction runs the optimizers"
            raise BadInput("optimizer", type(optimizer).__name__, remedy)
        if self.following is not None and optimizer is self.optimizers[0]:
            self.following.rate = float(optimizer.param_groups[0]["lr"])

        self._own[id(optimizer)].begin()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._own[id(optimizer)].end()

    def _known_objects(self) -> set[int]:
        """Return the identities of what an optimizer may refer to: it is state already, or made anew each step."""
        parameters = [parameter for _, parameter in self.owned()]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        states = [optimizer.state for optimizer in self.optimizers]
        return {
            id(known) for known in (*self.optimizers, *self.model.parameters(), *gradients, *states)
        }

    def advance(self) -> None:
        """One step of every optimizer, then one of every scheduler. Only inside :meth:`running_optimizers`."""
        for optimizer in self.optimizers:
            with self.following.apply(optimizer, self.step) if self.following else nullcontext():
                optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()

    @contextmanager
    def running_optimizers(self) -> Iterator[None]:
        """The block may run the optimizers."""
        self._updating = True
        try:
            yield
        finally:
            self._updating = False

    @torch.no_grad()
    def run_after_update(self) -> None:
        """Call the functions that the job has given for the end of each update. None of them runs an optimizer."""
        self._updating = False
        for function in self.after_update:
            function()

    def versioned(self) -> list[Tensor]:
        """Return every registered tensor as the script has it, whose version counter tells writes in place."""
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
        """Return what :meth:`scalars` returns.

        If no number has changed since the newest commit, these are the bytes that were published with it.

        Args:
            fresh: the step was just committed, so no number has changed.
        """
        return self.scalars()

    def memories(self) -> list[Tensor]:
        """Return the memory of every registered tensor that this process holds."""
        return [tensor.detach() for tensor in self.versioned()]

    @contextmanager
    def own_numbers_undone(self) -> Iterator[None]:
        """Put back afterwards the numbers that the optimizers keep on themselves."""
        before = {key: own.all_plain() for key, own in self._own.items()}
        yield
        for key, own in self._own.items():
            own.put_back(before[key])

    def owned(self) -> list[tuple[Optimizer, Tensor]]:
        """Every parameter with its optimizer; numbered through all optimizers."""
        return [
            (one, parameter)
            for one in self.optimizers
            for group in one.param_groups
            for parameter in group["params"]
        ]

    def optimizer_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The optimizers' state under paths that are the same on all ranks."""
        for index, (optimizer, parameter) in enumerate(self.owned()):
            for key, value in optimizer.state.get(parameter, {}).items():
                yield from tensors_in(value, f"{OPTIMIZER}{index}/{key}")

    def rebuild_optimizer_state(self, tensors: dict[str, Tensor]) -> None:
        """Replace the optimizers' tensors by those under optimizer paths; anything else in ``tensors`` is left."""
        owned = self.owned()
        for optimizer, parameter in owned:
            optimizer.state.pop(parameter, None)
        for path, tensor in tensors.items():
            if path.startswith(OPTIMIZER):
                index, _, key = path.removeprefix(OPTIMIZER).partition("/")
                optimizer, parameter = owned[int(index)]
                optimizer.state[parameter][key] = tensor

    # -- numbers --------------------------------------------------------------------------------------------------

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def scalars(self) -> bytes:
        """Learning rates, the schedulers' and the optimizers' numbers, and the names of the optimizers' parameters.

        Raises:
            ChaoskitError: if some of it is not made of numbers, strings, lists and dicts.
        """
        return self._encode(self._compared_numbers())

    def _encode(self, compared: dict[str, Any]) -> bytes:
        """Return :meth:`scalars`, given what all ranks must agree on in them."""
        own = [self._own[id(optimizer)].numbers() for optimizer in self.optimizers]
        writes = {"script_writes": True} if self.script_writes else {}
        return msgspec.msgpack.encode(compared | {"own": own} | writes)

    def _compared_numbers(self) -> dict[str, Any]:
        """What all ranks must agree on."""
        following = {"following": self.following.state()} if self.following else {}
        return self._numbers() | following

    def _numbers(self) -> dict[str, Any]:
        """What :meth:`scalars` holds, without what a batch that follows the world adds."""
        groups = [self._encode_group(optimizer, place) for optimizer, place in self._places()]
        state = {
            f"{index}/{key}": self._encode_state(index, key, value)
            for index, (optimizer, parameter) in enumerate(self.owned())
            for key, value in optimizer.state.get(parameter, {}).items()
            if not isinstance(value, Tensor)
        }
        schedulers = [encode_numbers(scheduler.state_dict()) for scheduler in self.schedulers]
        return {
            "groups": groups,
            "state": state,
            "schedulers": schedulers,
            "names": self.parameter_names,
        }

    def _places(self) -> Iterator[tuple[Optimizer, int]]:
        """Each optimizer with the number of each of its groups."""
        for optimizer in self.optimizers:
            for place in range(len(optimizer.param_groups)):
                yield optimizer, place

    def _encode_group(self, optimizer: Optimizer, place: int) -> dict[str, Any]:
        numbers = {}
        for key, value in optimizer.param_groups[place].items():
            if key == "params":
                continue
            try:
                numbers[key] = encode_numbers(value)
            except ChaoskitError as error:
                where = f"{type(optimizer).__name__}.param_groups[{place}][{key!r}]"
                raise _refusal(where, "numbers, strings, lists and dicts", error) from error
        return numbers

    def _encode_state(self, index: int, key: str, value: Any) -> Any:
        try:
            return encode(value, key)
        except ChaoskitError as error:
            optimizer, _ = self.owned()[index]
            name = self.parameter_names[index] or f"parameter {index}"
            where = f"{type(optimizer).__name__}.state[{name}][{key!r}]"
            raise _refusal(
                where, "tensors, numbers, strings, and lists, tuples and dicts of these", error
            ) from error

    def rates(self) -> list[float]:
        """The learning rate of each group that has one, in the order of optimizers and groups."""
        return [float(group["lr"]) for group in self._groups() if "lr" in group]

    def scalars_checksum(self) -> int:
        """Of what all ranks must agree on in :meth:`scalars`."""
        return checksum_of(self._compared_numbers())

    def scalars_digest(self) -> str:
        """BLAKE2b of :meth:`scalars`, without the sizes of a batch that follows the world: its twin is told these."""
        return hashlib.blake2b(msgspec.msgpack.encode(self._numbers()), digest_size=16).hexdigest()

    def load_scalars(self, data: bytes, step: int) -> None:
        """Take over learning rates, schedulers and step of another state: the end of taking it over."""
        scalars = msgspec.msgpack.decode(data)
        for group, theirs in zip(self._groups(), scalars["groups"], strict=True):
            for key, encoded in theirs.items():
                value = decode(encoded, {})
                mine = group.get(key)
                if isinstance(mine, Tensor):
                    mine.fill_(value)  # the optimizer and its scheduler may both hold it
                else:
                    group[key] = tuple(value) if isinstance(mine, tuple) else value
        owned = self.owned()
        for path, value in scalars["state"].items():
            index, _, key = path.partition("/")
            optimizer, parameter = owned[int(index)]
            assemble(optimizer.state[parameter], key, value)
        for optimizer, numbers in zip(self.optimizers, scalars["own"], strict=True):
            self._own[id(optimizer)].load(numbers)
        for scheduler, theirs in zip(self.schedulers, scalars["schedulers"], strict=True):
            scheduler.load_state_dict(decode(theirs, {}))
        self.script_writes |= scalars.get("script_writes", False)
        if self.following is not None:
            self.following.load(scalars.get("following"), step)
        elif "following" in scalars:
            raise BadInput(
                "follow", None, "give it as before: the batches of this state followed their world"
            )
        self.step = step


def checksum_of(numbers: dict[str, Any]) -> int:
    """Return a checksum of numbers, by which ranks compare them."""
    return zlib.crc32(msgspec.msgpack.encode(numbers))


def _refusal(where: str, kinds: str, error: ChaoskitError) -> BadInput:
    return BadInput("optimizer", where, f"keep {kinds} there, for a rank that joins: {error}")
