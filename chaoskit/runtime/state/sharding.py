"""The part of a training state that one rank of a sharded job holds: boxes and numbers.

A sharded parameter (a DTensor: FSDP2, HSDP, tensor parallelism) is here with its local box.
Everything else is here whole. The paths are the same on all ranks and together make up the state,
so a world of any size can read it.

-> state/copies.py copies the state; state/pieces.py reads copies of it. state/registered.py: the
numbers. state/replica.py: replicated jobs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from chaoskit.checkpoint.layout.arena import Slot, dtype_named
from chaoskit.checkpoint.layout.boxes import Box, whole
from chaoskit.checkpoint.layout.finite import largest
from chaoskit.checkpoint.layout.held import HeldTensor
from chaoskit.errors import BadInput
from chaoskit.runtime.reduction.clipping import clip_gradients
from chaoskit.runtime.state.optimizer_state import tensors_in
from chaoskit.runtime.state.registered import MODEL, OPTIMIZER, Registered, Scheduler
from chaoskit.sketch import TensorBox


def is_sharded(tensors: Iterable[Tensor]) -> bool:
    """Return whether any of the tensors is sharded over ranks."""
    return any(isinstance(tensor, DTensor) for tensor in tensors)


def local_memory(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor; any other tensor is returned as it is."""
    return _local(tensor) if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> tuple[Tensor, tuple[int, ...], Box]:
    """Return this rank's memory of ``tensor``, the shape of the whole, and the box in memory.

    Raises:
        BadInput: if the part is not one box of the whole.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach(), tuple(tensor.shape), whole(tuple(tensor.shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local = _local(tensor)
    shape, start = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    if tuple(local.shape) != tuple(shape) or _is_partial(tensor):
        raise _refusal(tensor)
    return local, tuple(tensor.shape), Box(tuple(start), tuple(shape))


class ShardedState(Registered):
    """The registered objects of a job whose parameters are sharded over ranks.

    Args:
        optimizer, scheduler: one, or several that take their steps in this order.

    Raises:
        BadInput: if no parameter is sharded, or the objects cannot be trained by a transaction.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        scheduler: Scheduler | Sequence[Scheduler] | None = None,
    ) -> None:
        super().__init__(model, optimizer, scheduler)
        if not is_sharded(self.parameters):
            remedy = "shard it over trainer.mesh(): fully_shard(model, mesh=mesh)"
            raise BadInput("model", type(self.model).__name__, remedy)
        self._weights = {
            MODEL + name: parameter for name, parameter in self.model.named_parameters()
        }

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of this rank, sharded ones as DTensors.

        Their paths are the same on all ranks.
        """
        yield from self._weights.items()
        yield from self._buffers()
        yield from self.optimizer_tensors()

    def parts(self) -> dict[str, tuple[Tensor, tuple[int, ...], Box]]:
        """Return this rank's memory, the shape of the whole tensor, and the box, by path.

        Raises:
            BadInput: if this rank's part of a tensor is not one box of the whole.
        """
        return {path: local_part(tensor) for path, tensor in self.tensors()}

    def memories(self) -> list[Tensor]:
        """Return this rank's memory of every registered tensor."""
        return [_memory(tensor) for tensor in self.versioned()]

    def piece(self) -> list[Tensor]:
        """Return this rank's memory of sharded parameters, and of the optimizers' state for them.

        Ranks that hold the same boxes have the same bits in it. Buffers and whole parameters are
        left out, because nothing reduces them over the ranks.
        """
        weights: list[Tensor] = [
            parameter for parameter in self._weights.values() if isinstance(parameter, DTensor)
        ]
        states = [
            nested
            for optimizer, parameter in self.owned()
            if isinstance(parameter, DTensor)
            for _, nested in sorted(
                tensors_in(optimizer.state.get(parameter, {}), ""), key=itemgetter(0)
            )
        ]
        return [_memory(tensor) for tensor in weights + states]

    # -- gradients ---------------------------------------------------------------------------------

    def gradients(self) -> list[Tensor]:
        """Return this rank's part of the reduced gradients, for the parameters that have one.

        Raises:
            BadInput: if a gradient is a partial sum, so that it is not reduced over all ranks.
        """
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        for gradient in gradients:  # their boxes are those of the parameters, which were checked
            if isinstance(gradient, DTensor) and _is_partial(gradient):
                raise _refusal(gradient)
        return [_memory(gradient) for gradient in gradients]

    def piece_gradients(self) -> list[Tensor]:
        """Return this rank's part of the gradients of sharded parameters.

        It is the same on all ranks that hold the same boxes.
        """
        return [
            _local(parameter.grad)
            for parameter in self.parameters
            if isinstance(parameter.grad, DTensor)
        ]

    def clip_gradients(self, max_norm: float) -> None:
        """Limit the 2-norm of the whole reduced gradient.

        Raise RuntimeError if a rank is lost meanwhile.
        """
        clip_gradients(self.parameters, max_norm)

    def forget_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    # -- taking over -------------------------------------------------------------------------------

    def held(self) -> list[HeldTensor]:
        """Return the tensors of this rank in the form in which they are copied and read.

        Raises:
            BadInput: as :meth:`parts`.
        """
        return [
            HeldTensor(
                path,
                memory,
                shape if box.extent != shape else (),
                box.start if box.extent != shape else (),
            )
            for path, (memory, shape, box) in self.parts().items()
        ]

    def prepare(self, slots: Iterable[Slot]) -> list[HeldTensor]:
        """Prepare to read a stored state, and return this rank's memory and box of each tensor.

        The optimizers' state is replaced by uninitialised memory for the stored tensors. Weights
        and buffers keep their memory and their values.

        Args:
            slots: the slots of all pieces that make up the state.

        Raises:
            BadInput: if the model or its optimizers differ from those that were stored.
        """
        stored = {slot.path: slot for slot in slots}
        self._check(stored)
        owned = self.owned()
        new_tensors: dict[str, Tensor] = {}
        for path, slot in stored.items():
            if path.startswith(OPTIMIZER):
                new_tensors[path] = _memory_for(owned[_number(path)][1], slot)
        self.rebuild_optimizer_state(new_tensors)
        return self.held()

    def _check(self, stored: dict[str, Slot]) -> None:
        """Raise BadInput if the stored state is that of another model or of other optimizers."""
        own_kinds = {
            path: (tuple(held.shape), held.dtype)
            for path, held in (*self._weights.items(), *self._buffers())
        }
        stored_kinds = {
            path: (slot.whole or slot.shape, dtype_named(slot.dtype))
            for path, slot in stored.items()
            if path.startswith(MODEL)
        }
        paths = {path for path, _ in self.tensors() if path.startswith(MODEL)}
        if differing := [
            path for path, kind in stored_kinds.items() if own_kinds.get(path) != kind
        ] or sorted(paths - stored_kinds.keys()):
            remedy = "build the same model on every rank and in every run: the stored one differs"
            raise BadInput("model", min(differing), remedy)
        count = len(self.owned())
        for path in stored:
            index, _, _ = path.removeprefix(OPTIMIZER).partition("/")
            if path.startswith(OPTIMIZER) and not (index.isdecimal() and int(index) < count):
                raise BadInput(
                    "optimizer",
                    path,
                    "build the same optimizer on every rank: the stored state differs",
                )

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for name, buffer in self.model.named_buffers():
            yield MODEL + name, buffer

    # -- comparing ---------------------------------------------------------------------------------

    def is_finite(self) -> bool:
        """Return whether every trained weight of this rank is a finite number."""
        return are_finite(local_part(parameter)[0] for parameter in self.parameters)

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each replica of the state; empty if there is only one replica.

        There are several with HSDP. The placement of the first sharded parameter decides.
        """
        for parameter in self.parameters:
            if isinstance(parameter, DTensor):
                mesh, places = parameter.device_mesh.mesh, parameter.placements
                cut = [dim for dim, place in enumerate(places) if place.is_shard()]
                whole_over = [dim for dim in range(mesh.ndim) if dim not in cut]
                rows = mesh.permute(*whole_over, *cut).reshape(
                    math.prod(mesh.shape[dim] for dim in whole_over), -1
                )
                return tuple(map(tuple, rows.tolist())) if len(rows) > 1 else ()
        return ()

    def boxes_digest(self) -> bytes:
        """Return the SHA-256, 32 bytes, over paths, shapes and boxes of this rank's model tensors.

        It is equal on ranks that hold the same piece.
        """
        parts = {
            path: (shape, box)
            for path, (_, shape, box) in self.parts().items()
            if path.startswith(MODEL)
        }
        return hashlib.sha256(repr(sorted(parts.items())).encode()).digest()

    def weights_digest(self) -> bytes:
        """Return the SHA-256, 32 bytes, over names, types, boxes and bits of the model's tensors.

        Only this rank's part of them counts.
        """
        return self._digest(MODEL)

    def state_digest(self) -> bytes:
        """Return the SHA-256, 32 bytes, over this rank's whole state, optimizers included."""
        return self._digest("")

    def described(self) -> Iterator[TensorBox]:
        """Yield this rank's part of every tensor except buffers, which are each rank's own."""
        buffers = {path for path, _ in self._buffers()}
        for path, (memory, shape, box) in self.parts().items():
            if path not in buffers:
                yield TensorBox(path, memory, shape, tuple(box.start))

    def _digest(self, prefix: str) -> bytes:
        """Return a SHA-256 over this rank's part of the tensors with paths below ``prefix``."""
        digest = hashlib.sha256()
        for path, (memory, _, box) in sorted(self.parts().items(), key=itemgetter(0)):
            if path.startswith(prefix):
                digest.update(f"{path}:{memory.dtype}:{box.start}:{box.extent}\n".encode())
                digest.update(memory.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.digest()


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all numbers are finite.

    On the host, a sum is tested first, and its terms only if it is not finite. All tensors on a
    device are reduced to one number there, because the host waits for each number that it reads.
    """
    on_host, on_device = list[Tensor](), list[Tensor]()
    for tensor in tensors:
        (on_device if tensor.is_cuda and tensor.numel() else on_host).append(tensor)
    if on_device and not math.isfinite(float(largest(on_device))):
        return False
    return all(
        bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
        for tensor in on_host
    )


def _number(path: str) -> int:
    """Return the number of the parameter to which an optimizer's tensor belongs."""
    return int(path.removeprefix(OPTIMIZER).partition("/")[0])


def _is_partial(tensor: DTensor) -> bool:
    return any(placement.is_partial() for placement in tensor.placements)


def _refusal(tensor: DTensor) -> BadInput:
    """Return the error for a tensor of which this rank's part is not one box."""
    return BadInput(
        "model",
        str(tensor.placements),
        "shard parameters evenly along dimensions, or replicate them",
    )


def _local(tensor: DTensor) -> Tensor:
    """Return this rank's memory of a sharded tensor."""
    with torch.no_grad():  # otherwise the result would belong to a graph
        return tensor.to_local()


def _memory(tensor: Tensor) -> Tensor:
    return _local(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def _memory_for(parameter: Tensor, slot: Slot) -> Tensor:
    """Return uninitialised memory for a stored tensor of an optimizer.

    It is sharded like ``parameter`` if the stored tensor was.
    """
    shape = slot.whole or slot.shape
    if not isinstance(parameter, DTensor) or shape != tuple(parameter.shape):
        on_host = not shape  # step counts stay on the host
        return torch.empty(
            shape, dtype=dtype_named(slot.dtype), device="cpu" if on_host else parameter.device
        )
    local = torch.empty_like(_local(parameter), dtype=dtype_named(slot.dtype))
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
