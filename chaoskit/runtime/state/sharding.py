"""The part of a training state that one rank of a sharded job holds: boxes of tensors, and the numbers beside them.

A parameter that is sharded (a DTensor: FSDP2, HSDP, tensor parallelism) is here with its local box; everything else is
here whole. The same paths, on all ranks together, make up the state, so a world of any size can read it.
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
    """Whether any of the tensors is spread over ranks."""
    return any(isinstance(tensor, DTensor) for tensor in tensors)


def local_memory(tensor: Tensor) -> Tensor:
    """Return the tensor whose memory of ``tensor`` this rank holds: itself, unless it is sharded."""
    return _local(tensor) if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> tuple[Tensor, tuple[int, ...], Box]:
    """The memory of this rank behind ``tensor``, the shape of the whole, and the box of it that the memory holds.

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
    """The registered objects of a job whose parameters are spread over ranks.

    Raises:
        BadInput: if none is.
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
        """Every tensor of this rank under a path that is the same on all ranks; sharded ones as DTensors."""
        yield from self._weights.items()
        yield from self._buffers()
        yield from self.optimizer_tensors()

    def parts(self) -> dict[str, tuple[Tensor, tuple[int, ...], Box]]:
        """Path -> this rank's memory, the shape of the whole tensor, and the box that the memory holds."""
        return {path: local_part(tensor) for path, tensor in self.tensors()}

    def memories(self) -> list[Tensor]:
        """See :meth:`Registered.memories`."""
        return [_memory(tensor) for tensor in self.versioned()]

    def piece(self) -> list[Tensor]:
        """This rank's memory of the parameters that are spread over ranks, and of the optimizers' state for them.

        Ranks that hold the same boxes have the same bits in it. Buffers, and parameters that every rank has whole, are
        left out: nothing reduces them over the ranks.
        """
        weights: list[Tensor] = [one for one in self._weights.values() if isinstance(one, DTensor)]
        states = [
            value
            for optimizer, parameter in self.owned()
            if isinstance(parameter, DTensor)
            for _, value in sorted(
                tensors_in(optimizer.state.get(parameter, {}), ""), key=itemgetter(0)
            )
        ]
        return [_memory(tensor) for tensor in weights + states]

    # -- gradients ------------------------------------------------------------------------------------------------

    def gradients(self) -> list[Tensor]:
        """This rank's part of the reduced gradients, of the parameters that have one."""
        found = [one.grad for one in self.parameters if one.grad is not None]
        for gradient in (
            found
        ):  # their boxes are those of the parameters, which were looked at when they were read
            if isinstance(gradient, DTensor) and _is_partial(gradient):
                raise _refusal(gradient)
        return [_memory(gradient) for gradient in found]

    def piece_gradients(self) -> list[Tensor]:
        """The same of the parameters that are spread over ranks: alike on all ranks that hold the same boxes."""
        return [_local(one.grad) for one in self.parameters if isinstance(one.grad, DTensor)]

    def clip_gradients(self, max_norm: float) -> None:
        """Limit the 2-norm of the whole reduced gradient. Raises RuntimeError if a rank is lost meanwhile."""
        clip_gradients(self.parameters, max_norm)

    def forget_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    # -- taking over ----------------------------------------------------------------------------------------------

    def held(self) -> list[HeldTensor]:
        """What this rank holds, as copies of it are made and read."""
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
        """Make place for a stored state: the memory of this rank, and the box of each tensor that belongs there.

        Args:
            slots: of all pieces that make up the state.

        Raises:
            BadInput: if the model or its optimizers are others than those that were stored.
        """
        stored = {slot.path: slot for slot in slots}
        self._check(stored)
        owned = self.owned()
        fresh: dict[str, Tensor] = {}
        for path, slot in stored.items():
            if path.startswith(OPTIMIZER):
                fresh[path] = _like(owned[_number(path)][1], slot)
        self.rebuild_optimizer_state(fresh)
        return self.held()

    def _check(self, stored: dict[str, Slot]) -> None:
        known = {
            path: (tuple(t.shape), t.dtype)
            for path, t in (*self._weights.items(), *self._buffers())
        }
        theirs = {
            path: (slot.whole or slot.shape, dtype_named(slot.dtype))
            for path, slot in stored.items()
            if path.startswith(MODEL)
        }
        mine = {path for path, _ in self.tensors() if path.startswith(MODEL)}
        if odd := [path for path, what in theirs.items() if known.get(path) != what] or sorted(
            mine - theirs.keys()
        ):
            remedy = "build the same model on every rank and in every run: the stored one differs"
            raise BadInput("model", min(odd), remedy)
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

    # -- comparing ------------------------------------------------------------------------------------------------

    def is_finite(self) -> bool:
        """Whether every trained weight of this rank is a finite number."""
        return are_finite(local_part(parameter)[0] for parameter in self.parameters)

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each replica of the state, where it is sharded within several (HSDP); else empty."""
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
        """SHA-256 over which boxes of which parameters this rank holds: equal where ranks hold the same piece."""
        parts = {
            path: (shape, box)
            for path, (_, shape, box) in self.parts().items()
            if path.startswith(MODEL)
        }
        return hashlib.sha256(repr(sorted(parts.items())).encode()).digest()

    def weights_digest(self) -> bytes:
        """SHA-256 over names, types, boxes and bits of this rank's parameters and buffers."""
        return self._digest(MODEL)

    def state_digest(self) -> bytes:
        """The same over the whole state, the optimizers' tensors included."""
        return self._digest("")

    def described(self) -> Iterator[TensorBox]:
        """This rank's part of every tensor but buffers: those are each rank's own."""
        buffers = {path for path, _ in self._buffers()}
        for path, (memory, shape, box) in self.parts().items():
            if path not in buffers:
                yield TensorBox(path, memory, shape, tuple(box.start))

    def _digest(self, prefix: str) -> bytes:
        digest = hashlib.sha256()
        for path, (memory, _, box) in sorted(self.parts().items(), key=itemgetter(0)):
            if path.startswith(prefix):
                digest.update(f"{path}:{memory.dtype}:{box.start}:{box.extent}\n".encode())
                digest.update(memory.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.digest()


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all numbers are finite. A sum is (in all but a few cases) as telling as all of its terms.

    Of those on a device one number is asked for: for each answer the host waits until the device is idle.
    """
    on_host, on_device = list[Tensor](), list[Tensor]()
    for one in tensors:
        (on_device if one.is_cuda and one.numel() else on_host).append(one)
    if on_device and not math.isfinite(float(largest(on_device))):
        return False
    return all(
        bool(torch.isfinite(one.sum())) or bool(torch.isfinite(one).all()) for one in on_host
    )


def _number(path: str) -> int:
    """Of the parameter to which an optimizer's tensor belongs."""
    return int(path.removeprefix(OPTIMIZER).partition("/")[0])


def _is_partial(tensor: DTensor) -> bool:
    return any(placement.is_partial() for placement in tensor.placements)


def _refusal(tensor: DTensor) -> BadInput:
    return BadInput(
        "model",
        str(tensor.placements),
        "shard parameters evenly along dimensions, or replicate them",
    )


def _local(tensor: DTensor) -> Tensor:
    with torch.no_grad():  # else the result would belong to a graph
        return tensor.to_local()


def _memory(tensor: Tensor) -> Tensor:
    return _local(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def _like(parameter: Tensor, slot: Slot) -> Tensor:
    """Uninitialised memory for what an optimizer stored beside ``parameter``: spread as that is, if it was."""
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
