"""The registered state of one rank of a replicated job: shared, compared and replaced as one.

-> state/registered.py: the numbers of the state. state/peer.py: a state is read from a peer.
daemon/replica_keeper.py: copies that outlive this process. state/sharding.py: sharded jobs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter

import msgspec
import torch
from torch import Tensor, nn

from chaoskit.checkpoint.layout.arena import Arena, Slot, aligned, decode_index, dtype_named
from chaoskit.errors import BadInput
from chaoskit.runtime.state.buffers import MovingBuffers
from chaoskit.runtime.state.held_numbers import HeldNumbers
from chaoskit.runtime.state.homes import Homes
from chaoskit.runtime.state.optimizer_state import rehome
from chaoskit.runtime.state.registered import MODEL, OPTIMIZER, Registered, Scheduler, checksum_of
from chaoskit.runtime.state.sampling import DRAW_TRIALS, drawn_generators
from chaoskit.sketch import TensorBox


class Replica(Registered):
    """The registered objects of a job. On a CPU their tensors are moved into shared memory.

    Args:
        optimizer, scheduler: one, or several that take their steps in this order.
        shared: keep the tensors in shared memory, where the device allows it.

    Attributes:
        arena: the shared memory; None on another device, and without ``shared``.
        buffers: the buffers that the forward pass changes.

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
        model_bytes = sum(
            tensor.numel() * tensor.element_size() for _, tensor in self._model_tensors()
        )
        shared = shared and self.device.type == "cpu"
        self.arena = Arena(capacity_bytes=16 * model_bytes + 64 * 2**20) if shared else None
        self._sequence = 0  # this and the next three: only without an arena
        self._at_entry, self._in_call, self._entered = False, False, 0
        self._arena_paths: list[str] = []
        self._homes: Homes | None = None
        self._published, self._published_checksum = b"", 0  # scalars of the newest commit
        self._held_numbers = HeldNumbers(self.optimizers, self.schedulers)  # at the newest commit
        self.rehome()

    # -- inventory ---------------------------------------------------------------------------------

    def _model_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters and the committed values of the buffers, each with its path."""
        for name, parameter in self.model.named_parameters():
            yield MODEL + name, parameter.data
        for name, buffer in self.model.named_buffers():
            yield MODEL + name, self.buffers.committed.get(name, buffer)

    def placed(self, *, fresh: bool) -> tuple[list[Tensor], list[int]]:
        """Return all registered tensors and their addresses, as :meth:`Registered.placed`."""
        if self._homes is not None and (fresh or self._homes.are_unchanged()):
            return self._homes.tensors, self._homes.addresses  # saves a walk through all modules
        return super().placed(fresh=fresh)

    def noted_scalars(self, *, fresh: bool) -> bytes:
        """Return the encoded numbers: the published ones, unless some may have changed since."""
        return (
            self._published
            if self._published and (fresh or self._held_numbers.are_unchanged())
            else self.scalars()
        )

    def scalars_checksum(self) -> int:
        """Return a checksum of the numbers that all ranks must agree on."""
        return (
            self._published_checksum
            if self._held_numbers.are_unchanged()
            else super().scalars_checksum()
        )

    def memories(self) -> list[Tensor]:
        """Return the memory of every tensor of the committed state."""
        return [tensor.detach() for _, tensor in self.tensors()]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the committed state under a path that is the same on all ranks."""
        yield from self._model_tensors()
        yield from self.optimizer_tensors()

    # -- sharing -----------------------------------------------------------------------------------

    @property
    def shared_arena(self) -> Arena:
        """The arena that holds the tensors.

        Raises:
            RuntimeError: if they are on a device, or are not shared.
        """
        if self.arena is None:
            raise RuntimeError("the tensors of this replica are not in shared memory")
        return self.arena

    def rehome(self) -> None:
        """Move tensors that are not in the arena into it, and publish the state.

        Cheap if there are none. Does nothing without an arena.
        """
        if self.arena is None:
            return
        with self.arena.writing():
            self._move_in()
            self.arena.publish(self._arena_paths, self.scalars(), self.step)

    def _move_in(self) -> None:
        """Move all tensors into the arena, and remember their paths."""
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
            for key, nested in state.items():
                state[key] = rehome(nested, f"{OPTIMIZER}{index}/{key}", self._home)
        self._arena_paths = [path for path, _ in self.tensors()]
        self._homes = None

    def _home(self, path: str, tensor: Tensor) -> Tensor:
        """Return the tensor's place in the arena, after copying the values there."""
        arena = self.shared_arena
        home = arena.tensor(arena.slot(path, tensor.dtype, tuple(tensor.shape)))
        if home.data_ptr() == tensor.data_ptr():
            return tensor
        home.copy_(tensor)
        return home

    def _is_at_home(self, arena: Arena) -> bool:
        """Return whether all tensors are in their places.

        They are not once a tensor came, went, or was replaced by the optimizer or the user instead
        of written into.
        """
        if self._homes is not None and self._homes.are_unchanged():
            return True
        named = list(self.tensors())
        at_home = [path for path, _ in named] == self._arena_paths and all(
            arena.holds(tensor) for _, tensor in named
        )
        self._homes = (
            Homes(self.model, self.optimizers, self.buffers.committed) if at_home else None
        )
        return at_home

    @contextmanager
    def update(self) -> Iterator[None]:
        """Bracket one optimizer step.

        Afterwards ``step`` has grown by one, and peers see the new state.

        If the block raises, the state stays marked as being written, so that no peer takes over
        half an update.
        """
        self.begin_write()
        with self.running_optimizers():
            yield
        self.step += 1
        self._publish()
        self.end_write()

    def _publish(self) -> None:
        """Encode the numbers, move new tensors into the arena, and publish the state there."""
        self._read_numbers()
        if self.arena is not None:
            if not self._is_at_home(self.arena):
                self._move_in()
            self.arena.publish(self._arena_paths, self._published, self.step)

    def _read_numbers(self) -> None:
        """Encode all numbers, to be published, and remember their objects. Called once a commit."""
        numbers = self._compared_numbers()
        self._published, self._published_checksum = self._encode(numbers), checksum_of(numbers)
        if (
            numbers["state"]
            or self.following is not None
            or any(own.has_numbers for own in self._own_numbers.values())
        ):
            self._held_numbers.forget()  # some numbers are not followed
        else:
            self._held_numbers.remember()

    def publish_again(self) -> None:
        """Show peers the writes of the script since the commit.

        Peers that have read the state read it again.
        """
        self.begin_write()
        self._publish()
        self.end_write()

    # -- validity of the state of a step -----------------------------------------------------------

    @property
    def at_entry(self) -> bool:
        """True if the state of a step is valid only once the next transaction is entered."""
        return self.arena.at_entry if self.arena is not None else self._at_entry

    @property
    def is_complete(self) -> bool:
        """True if the script has finished its writes into the state of this step."""
        if self.arena is not None:
            return self.arena.is_complete
        return not self._at_entry or self._entered >= self.step

    @property
    def in_call(self) -> bool:
        """True while this rank waits in a collective between two steps."""
        return self.arena.in_call if self.arena is not None else self._in_call

    def count_at_entry(self, at_entry: bool) -> None:
        """Set the value of :attr:`at_entry`, for this rank and for peers that read its state.

        Args:
            at_entry: True if the state of a step is valid only once the next transaction is
                entered.
        """
        self._at_entry = at_entry
        if self.arena is not None:
            self.arena.count_at_entry(at_entry)

    def enter(self) -> None:
        """Mark the next transaction as entered: the registered state is the state of this step."""
        self._entered = self.step
        if self.arena is not None:
            self.arena.enter(self.step)

    def give_up(self) -> None:
        """Drop the state: the step becomes -1, and peers see that there is none."""
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
        """Mark the state, in the arena, as the one that ``generation`` trains on."""
        if self.arena is not None:
            self.arena.set_generation(generation)

    @property
    def sequence(self) -> int:
        """The sequence number: odd while the state is being written; each write adds 2."""
        return self._sequence if self.arena is None else self.arena.sequence

    def begin_write(self) -> None:
        """Begin a write. Peers that read from here on must read again."""
        if self.arena is None:
            self._sequence += 1
        else:
            self.arena.begin_write()

    def end_write(self) -> None:
        """End a write, once a device has finished its work: peers may read the state."""
        if self.arena is None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._sequence += 1
        else:
            self.arena.end_write()

    def pack(self) -> tuple[bytes, bytes, bytearray]:
        """Return the encoded index, the encoded scalars and the data, copied to the host.

        They have the form in which an arena holds them, so that only a replica without an arena
        needs this.
        """
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
        """Replace the tensors by those that a peer has packed; :meth:`load_scalars` must follow.

        Args:
            index, data: two of the results of :meth:`pack` there.

        Raises:
            BadInput: if the peer has another model or other optimizers.
        """
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
            {path: self._like_state(path, tensor) for path, tensor in received.items()}
        )

    def _like_state(self, path: str, tensor: Tensor) -> Tensor:
        """Return the tensor where the optimizer needs it: step counts stay on the host."""
        return (
            tensor.clone()
            if tensor.dim() == 0 or not path.startswith(OPTIMIZER)
            else tensor.to(self.device)
        )

    # -- taking over a peer's state ----------------------------------------------------------------

    def layout_matches(self, index: bytes) -> bool:
        """Return whether a peer's data can be copied into this arena as one block.

        No object needs to be touched then.
        """
        return (
            self.arena is not None
            and self.arena.index_bytes() == index
            and self._is_at_home(self.arena)
        )

    def prepare_layout(self, index: bytes, size_bytes: int) -> None:
        """Give every tensor of a peer's index the same place here, and drop all other tensors.

        The caller then copies the peer's data into the arena, and calls :meth:`load_scalars`.

        Raises:
            BadInput: if the peer has another model or other optimizers.
            RuntimeError: if this replica is not in shared memory.
        """
        arena = self.shared_arena
        slots = decode_index(index, size_bytes)
        self._check_inventory(slots)
        arena.adopt_layout(slots, size_bytes)
        by_path = {slot.path: slot for slot in slots}
        for name, parameter in self.model.named_parameters():
            parameter.data = arena.tensor(by_path[MODEL + name])
        for name, buffer in self.model.named_buffers():
            home = arena.tensor(by_path[MODEL + name])
            if name in self.buffers.committed:
                self.buffers.committed[name] = home
            else:
                buffer.data = home
        self.rebuild_optimizer_state({slot.path: arena.tensor(slot) for slot in slots})
        self._arena_paths = [slot.path for slot in slots]
        self._homes = None

    def _check_inventory(self, slots: list[Slot]) -> None:
        """Raise BadInput if a peer's index has other tensors than this model and its optimizers."""
        own = {
            (path, str(tensor.dtype), tuple(tensor.shape)) for path, tensor in self._model_tensors()
        }
        stored = {
            (slot.path, f"torch.{slot.dtype}", slot.shape)
            for slot in slots
            if slot.path.startswith(MODEL)
        }
        if own != stored:
            differing, *_ = min(own ^ stored)
            raise BadInput(
                "model",
                differing,
                "build the same model on every rank: a peer's state has other tensors",
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
        """Take over numbers and step of another state; see :meth:`Registered.load_scalars`."""
        super().load_scalars(data, step)
        self.buffers.reset()
        self._published = b""
        self._held_numbers.forget()
        self._entered = -1
        if self.arena is not None:
            self.arena.enter(-1)  # the former state's entry does not apply

    # -- comparing ---------------------------------------------------------------------------------

    def is_finite(self) -> bool:
        """Return whether every trained weight is a finite number."""
        return all(
            bool(torch.isfinite(parameter.detach().sum())) for parameter in self.parameters
        ) or all(bool(torch.isfinite(parameter.detach()).all()) for parameter in self.parameters)

    def weights_digest(self) -> str:
        """Return the SHA-256, in hexadecimal digits, over names and bits of the model's tensors."""
        return _digest(self._model_tensors())

    def state_digest(self) -> str:
        """Return the SHA-256, in hexadecimal digits, over all tensors of the state by path."""
        return _digest(iter(sorted(self.tensors(), key=itemgetter(0))))

    def described(self) -> Iterator[TensorBox]:
        """Yield every tensor of the committed state, whole, with its path and box."""
        buffers = {MODEL + name for name, _ in self.model.named_buffers()}
        for path, tensor in self.tensors():
            yield TensorBox(
                path, tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim(), path in buffers
            )

    # -- rehearsal ---------------------------------------------------------------------------------

    def rehearse(self, update: Callable[[], None]) -> None:
        """Run ``update``, a warm-up optimizer step, and restore the state bit for bit.

        The state is not restored after an error. If the update draws random numbers, it is run
        again: another thread may have drawn them, an optimizer that draws does so each time.

        Raises:
            BadInput: if an optimizer draws from the generators of the process, which are in
                different states on different ranks, or keeps state that cannot be given to another
                rank.
        """
        for _ in range(DRAW_TRIALS):
            with self._undone_afterwards():
                drawn_names = drawn_generators(update)
            if not drawn_names:
                return
        names = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
        remedy = (
            "seed a new torch.Generator in each step, from a count in its state: ranks get other "
            f"numbers from the generators of {', '.join(drawn_names)}, and their weights would "
            "differ"
        )
        raise BadInput("optimizer", names, remedy)

    @contextmanager
    def _undone_afterwards(self) -> Iterator[None]:
        """Run the block, and restore the state bit for bit."""
        tensors = {path: tensor.clone() for path, tensor in self.tensors()}
        scalars, step = self.scalars(), self.step
        with self.own_numbers_undone(), self.running_optimizers():
            yield
            self.scalars()  # raises for state that cannot be given to another rank
        self.rehome()  # touches the memory that the optimizer's state will live in
        with torch.no_grad():
            for path, tensor in self._model_tensors():
                tensor.copy_(tensors[path])
        kept = {path: tensor for path, tensor in tensors.items() if path.startswith(OPTIMIZER)}
        self.rebuild_optimizer_state(kept)
        self.load_scalars(scalars, step)
        self.rehome()


def _digest(tensors: Iterator[tuple[str, Tensor]]) -> str:
    """Return the SHA-256, in hexadecimal digits, over paths, types, shapes and bits of tensors."""
    digest = hashlib.sha256()
    for path, tensor in tensors:
        digest.update(f"{path}:{tensor.dtype}:{tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
