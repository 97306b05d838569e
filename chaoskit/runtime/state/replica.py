"""Model, optimizers and schedulers of one rank: one piece of state that can be shared, compared and replaced."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from chaoskit.checkpoint.layout.arena import Arena, Slot, aligned, decode_index, dtype_named
from chaoskit.errors import BadInput
from chaoskit.runtime.state.buffers import MovingBuffers
from chaoskit.runtime.state.held_numbers import HeldNumbers
from chaoskit.runtime.state.homes import Homes
from chaoskit.runtime.state.optimizer_state import rehome
from chaoskit.runtime.state.prefetch import generator_states
from chaoskit.runtime.state.registered import MODEL, OPTIMIZER, Registered, Scheduler, checksum_of
from chaoskit.sketch import TensorBox


class Replica(Registered):
    """The registered objects of a job.

    Args:
        optimizer, scheduler: one, or several that take their steps in this order.
        shared: keep the tensors in shared memory, where the device allows it.

    Raises:
        BadInput: if they cannot be trained to the same bits at every world size.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        scheduler: Scheduler | Sequence[Scheduler] | None,
        *,
        shared: bool = True,
    ) -> None:
        super().__init__(model, optimizer, scheduler)
        self.buffers = MovingBuffers(model)
        total = sum(tensor.numel() * tensor.element_size() for _, tensor in self._model_tensors())
        shared = shared and self.device.type == "cpu"
        self.arena = Arena(capacity_bytes=16 * total + 64 * 2**20) if shared else None
        self._sequence = 0  # of a replica without an arena, as the next three
        self._at_entry, self._in_call, self._entered = False, False, 0
        self._homed: list[str] = []
        self._homes: Homes | None = None
        self._published, self._published_checksum = b"", 0  # of the scalars of the newest commit
        self._held_numbers = HeldNumbers(self.optimizers, self.schedulers)  # of the newest commit
        self.rehome()

    # -- inventory --------------------------------------------------------------------------------------------

    def _model_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield MODEL + name, parameter.data
        for name, buffer in self.model.named_buffers():
            yield MODEL + name, self.buffers.committed.get(name, buffer)

    def placed(self, *, fresh: bool) -> tuple[list[Tensor], list[int]]:
        """See :meth:`Registered.placed`."""
        if self._homes is not None and (fresh or self._homes.are_unchanged()):
            return self._homes.tensors, self._homes.addresses  # without a walk through all modules
        return super().placed(fresh=fresh)

    def noted_scalars(self, *, fresh: bool) -> bytes:
        """See :meth:`Registered.noted_scalars`."""
        return (
            self._published
            if self._published and (fresh or self._held_numbers.are_unchanged())
            else self.scalars()
        )

    def scalars_checksum(self) -> int:
        """See :meth:`Registered.scalars_checksum`."""
        return (
            self._published_checksum
            if self._held_numbers.are_unchanged()
            else super().scalars_checksum()
        )

    def memories(self) -> list[Tensor]:
        """See :meth:`Registered.memories`. Buffers that move are here as they were committed."""
        return [tensor.detach() for _, tensor in self.tensors()]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the state, as it was committed, under a path that is the same on all ranks."""
        yield from self._model_tensors()
        yield from self.optimizer_tensors()

    # -- sharing ----------------------------------------------------------------------------------------------

    def rehome(self) -> None:
        """Move tensors that are not in the arena into it. Cheap when there is nothing to do."""
        if self.arena is None:
            return
        with self.arena.writing():
            self._move_in()
            self.arena.publish(self._homed, self.scalars(), self.step)

    def _move_in(self) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.data = self._home(MODEL + name, parameter.data)
        committed = self.buffers.committed
        for name, buffer in self.model.named_buffers():
            if name in committed:
                committed[name] = self._home(MODEL + name, committed[name])
            else:
                buffer.data = self._home(MODEL + name, buffer.data)
        for index, (optimizer, owner) in enumerate(self.owned()):
            state = optimizer.state.get(owner, {})
            for key, value in state.items():
                state[key] = rehome(value, f"{OPTIMIZER}{index}/{key}", self._home)
        self._homed = [path for path, _ in self.tensors()]
        self._homes = None

    def _home(self, path: str, tensor: Tensor) -> Tensor:
        assert self.arena is not None
        slot = self.arena.slot(path, tensor.dtype, tuple(tensor.shape))
        home = self.arena.tensor(slot)
        if home.data_ptr() == tensor.data_ptr():
            return tensor
        home.copy_(tensor)
        return home

    def _is_at_home(self, arena: Arena) -> bool:
        """False once a tensor came, went, or was replaced by the optimizer or the user instead of written into."""
        if self._homes is not None and self._homes.are_unchanged():
            return True
        found = list(self.tensors())
        at_home = [path for path, _ in found] == self._homed and all(
            arena.holds(tensor) for _, tensor in found
        )
        self._homes = (
            Homes(self.model, self.optimizers, self.buffers.committed) if at_home else None
        )
        return at_home

    @contextmanager
    def update(self) -> Iterator[None]:
        """Bracket one optimizer step: afterwards ``step`` has grown by one and peers see the new state.

        If the block raises, the state stays marked as being written: nobody takes over half an update.
        """
        self.begin_write()
        with self.running_optimizers():
            yield
        self.step += 1
        self._publish()
        self.end_write()

    def _publish(self) -> None:
        self._read_numbers()
        if self.arena is not None:
            if not self._is_at_home(self.arena):
                self._move_in()
            self.arena.publish(self._homed, self._published, self.step)

    def _read_numbers(self) -> None:
        """Walk through all numbers, once a commit."""
        numbers = self._compared_numbers()
        self._published, self._published_checksum = self._encode(numbers), checksum_of(numbers)
        if (
            numbers["state"]
            or self.following is not None
            or any(own.has_numbers for own in self._own.values())
        ):
            self._held_numbers.forget()  # some of them are elsewhere
        else:
            self._held_numbers.remember()

    def publish_again(self) -> None:
        """Show peers what the script has written since the commit. They read again what they have read."""
        self.begin_write()
        self._publish()
        self.end_write()

    # -- when a state counts --------------------------------------------------------------------------------------

    @property
    def at_entry(self) -> bool:
        """The state of a step counts only once the next transaction is entered."""
        return self.arena.at_entry if self.arena is not None else self._at_entry

    @property
    def is_complete(self) -> bool:
        """The script is done with the state of this step."""
        if self.arena is not None:
            return self.arena.is_complete
        return not self._at_entry or self._entered >= self.step

    @property
    def in_call(self) -> bool:
        """This rank waits in a collective between two steps."""
        return self.arena.in_call if self.arena is not None else self._in_call

    def count_at_entry(self, at_entry: bool) -> None:
        """Set :attr:`at_entry`."""
        self._at_entry = at_entry
        if self.arena is not None:
            self.arena.count_at_entry(at_entry)

    def enter(self) -> None:
        """Show that the next transaction is entered: what is registered now is the state of this step."""
        self._entered = self.step
        if self.arena is not None:
            self.arena.enter(self.step)

    def give_up(self) -> None:
        """Have no state any more, and show that."""
        self.step = -1
        if self.arena is not None:
            self.arena.give_up()

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Show that the block waits in a collective between two steps, and writes nothing."""
        self._call(True)
        try:
            yield
        finally:
            self._call(False)

    def _call(self, in_call: bool) -> None:
        self._in_call = in_call
        if self.arena is not None:
            self.arena.call(in_call)

    def stand_in(self, generation: int) -> None:
        """Mark the state as the one that ``generation`` trains on."""
        if self.arena is not None:
            self.arena.stand_in(generation)

    @property
    def sequence(self) -> int:
        """Odd while the state is being written; changes with every write."""
        return self._sequence if self.arena is None else self.arena.sequence

    def begin_write(self) -> None:
        """Peers that read from here on must read again."""
        if self.arena is None:
            self._sequence += 1
        else:
            self.arena.begin_write()

    def end_write(self) -> None:
        if self.arena is None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._sequence += 1
        else:
            self.arena.end_write()

    def pack(self) -> tuple[bytes, bytes, bytearray]:
        """Index, scalars and data of a replica on a device, copied to the host: what an arena holds already."""
        slots, tensors, offset = [], [], 0
        for path, tensor in self.tensors():
            slots.append(
                Slot(path, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset)
            )
            tensors.append(tensor)
            offset += aligned(slots[-1].size_bytes)
        data = bytearray(offset)
        for slot, tensor in zip(slots, tensors, strict=True):
            if slot.size_bytes:
                target = torch.frombuffer(
                    data, dtype=tensor.dtype, count=tensor.numel(), offset=slot.offset
                )
                target.copy_(tensor.detach().reshape(-1))
        return msgspec.msgpack.encode(slots), self.scalars(), data

    def unpack(self, index: bytes, data: bytearray) -> None:
        """Take over tensors that a peer has packed."""
        slots = decode_index(index, len(data))
        self._check_inventory(slots)
        received = {}
        for slot in slots:
            dtype, flat = dtype_named(slot.dtype), torch.empty(0)
            if slot.size_bytes:
                count = slot.size_bytes // dtype.itemsize
                flat = torch.frombuffer(data, dtype=dtype, count=count, offset=slot.offset)
            received[slot.path] = flat.to(dtype).view(slot.shape)
        with torch.no_grad():
            for path, tensor in self._model_tensors():
                tensor.copy_(received[path])
        self.rebuild_optimizer_state(
            {path: self._like_state(path, value) for path, value in received.items()}
        )

    def _like_state(self, path: str, value: Tensor) -> Tensor:
        """A copy where the optimizer keeps such a value: step counts stay on the host."""
        return (
            value.clone()
            if value.dim() == 0 or not path.startswith(OPTIMIZER)
            else value.to(self.device)
        )

    # -- taking over a peer's state -----------------------------------------------------------------------------

    def layout_matches(self, index: bytes) -> bool:
        """Whether a peer's data can be copied into this arena as one block, without touching any object."""
        return (
            self.arena is not None
            and self.arena.index_bytes() == index
            and self._is_at_home(self.arena)
        )

    def prepare_layout(self, index: bytes, size_bytes: int) -> None:
        """Give every tensor named in a peer's index the same place, and drop those that it does not name."""
        assert self.arena is not None
        slots = decode_index(index, size_bytes)
        self._check_inventory(slots)
        self.arena.adopt_layout(slots, size_bytes)
        by_path = {slot.path: slot for slot in slots}
        for name, parameter in self.model.named_parameters():
            parameter.data = self.arena.tensor(by_path[MODEL + name])
        for name, buffer in self.model.named_buffers():
            home = self.arena.tensor(by_path[MODEL + name])
            if name in self.buffers.committed:
                self.buffers.committed[name] = home
            else:
                buffer.data = home
        self.rebuild_optimizer_state({slot.path: self.arena.tensor(slot) for slot in slots})
        self._homed = [slot.path for slot in slots]
        self._homes = None

    def _check_inventory(self, slots: list[Slot]) -> None:
        mine = {
            (path, str(tensor.dtype), tuple(tensor.shape)) for path, tensor in self._model_tensors()
        }
        theirs = {
            (slot.path, f"torch.{slot.dtype}", slot.shape)
            for slot in slots
            if slot.path.startswith(MODEL)
        }
        if mine != theirs:
            odd, *_ = min(mine ^ theirs)
            raise BadInput(
                "model", odd, "build the same model on every rank: a peer's state has other tensors"
            )
        parameters = {str(index) for index, _ in enumerate(self.owned())}
        for slot in slots:
            index, _, _ = slot.path.removeprefix(OPTIMIZER).partition("/")
            if not slot.path.startswith(MODEL) and index not in parameters:
                raise BadInput(
                    "optimizer",
                    slot.path,
                    "build the same optimizer on every rank: a peer has other state",
                )

    def load_scalars(self, data: bytes, step: int) -> None:
        """See :meth:`Registered.load_scalars`."""
        super().load_scalars(data, step)
        self.buffers.reset()
        self._published = b""
        self._held_numbers.forget()
        self._entered = -1
        if self.arena is not None:
            self.arena.enter(-1)  # that of the state before says nothing about this one

    # -- comparing ----------------------------------------------------------------------------------------------

    def is_finite(self) -> bool:
        """Whether every trained weight is a finite number."""
        return all(
            bool(torch.isfinite(parameter.detach().sum())) for parameter in self.parameters
        ) or all(bool(torch.isfinite(parameter.detach()).all()) for parameter in self.parameters)

    def weights_digest(self) -> str:
        """SHA-256 over names, types and bits of parameters and buffers."""
        return _digest(self._model_tensors())

    def state_digest(self) -> str:
        """SHA-256 over the whole state, the optimizer's tensors included, whatever the order in which they came."""
        return _digest(iter(sorted(self.tensors(), key=itemgetter(0))))

    def described(self) -> Iterator[TensorBox]:
        """Every tensor of the state, whole."""
        buffers = {MODEL + name for name, _ in self.model.named_buffers()}
        for path, tensor in self.tensors():
            yield TensorBox(
                path, tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim(), path in buffers
            )

    # -- rehearsal ----------------------------------------------------------------------------------------------

    @contextmanager
    def undone_afterwards(self) -> Iterator[None]:
        """Run an optimizer step for its warming effect, then put everything back, bit for bit."""
        tensors = {path: tensor.clone() for path, tensor in self.tensors()}
        scalars, step = self.scalars(), self.step
        drawn_before = generator_states()
        with self.own_numbers_undone(), self.running_optimizers():
            yield
            self._require_no_draws(drawn_before)
            self.scalars()  # refuses state that no other rank could be given
        self.rehome()  # touches the memory that the optimizer's state will live in
        with torch.no_grad():
            for path, tensor in self._model_tensors():
                tensor.copy_(tensors[path])
        kept = {path: tensor for path, tensor in tensors.items() if path.startswith(OPTIMIZER)}
        self.rebuild_optimizer_state(kept)
        self.load_scalars(scalars, step)
        self.rehome()

    def _require_no_draws(self, before: dict[str, Any]) -> None:
        """Refuse optimizers that draw random numbers, which ranks have left in different states."""
        after = generator_states()
        if drawn := [name for name, state in before.items() if after[name] != state]:
            names = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
            remedy = (
                f"seed a new torch.Generator in each step, from a count in its state: ranks get other numbers "
                f"from the generators of {', '.join(drawn)}, and their weights would differ"
            )
            raise BadInput("optimizer", names, remedy)


def _digest(tensors: Iterator[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for path, tensor in tensors:
        digest.update(f"{path}:{tensor.dtype}:{tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
