"""Buffers that the forward pass changes, such as the running statistics of BatchNorm.

Every shard's forward pass starts from the committed values ``B0``. Its result ``B_s`` is therefore
a function of ``B0`` and the shard, on any rank. A step commits ``B0 + sum of (B_s - B0) / V``: the
mean over the V shards, and exactly ``B0`` where nothing changed. The differences are reduced like
further gradients, in the same tree. For BatchNorm this is the running average of the shards' mean
statistics. Integers take the value that every shard gives.

Peers copy committed values while a forward pass runs. Committed values therefore have their own
memory. The module works on scratch tensors, which hold the committed values whenever no shard is
being computed.

-> step/shardwork.py sends the differences along with the gradients, and lets all ranks agree on the
integers. step/commit.py commits both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from chaoskit.errors import BadInput


@dataclass(slots=True)
class _Place:
    """A buffer of the model.

    Attributes:
        tensor: the module's own object.
        version: the version counter of the tensor when a shard began.
    """

    name: str
    owner: nn.Module
    key: str
    tensor: Tensor
    version: int = 0

    def current(self) -> Tensor | None:
        """Return the buffer that the module has under this name now, or None."""
        return self.owner._buffers.get(self.key)


class BufferChanges(NamedTuple):
    """The changes of one shard.

    Attributes:
        differences: (B_s - B0) / V of the floating-point buffers.
        integers: the new values of the other buffers.
    """

    differences: list[Tensor]
    integers: list[Tensor]


class MovingBuffers:
    """The buffers of ``model`` that the forward pass changes, and their committed values.

    :meth:`watch` and :meth:`discover` find them in the first pass. From then on :meth:`begin` and
    :meth:`end` enclose each shard, and :meth:`commit` each step.

    Attributes:
        is_known: True once a first forward pass has shown which buffers move.
        committed: the committed values of the moving buffers, by name.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.is_known = False
        self.committed: dict[str, Tensor] = {}
        self._fixed: list[_Place] = []
        self._floating: list[_Place] = []
        self._integral: list[_Place] = []
        self._values_before: list[tuple[_Place, Tensor]] = []

    # -- finding the buffers that move -------------------------------------------------------------

    def watch(self) -> None:
        """Remember all buffers. The next forward pass shows which ones move."""
        self._values_before = [
            (place, place.tensor.detach().clone()) for place in _places(self._model)
        ]
        for place, _ in self._values_before:
            place.version = place.tensor._version

    def discover(self) -> bool:
        """Restore all buffers bit for bit, and give the moving ones scratch tensors.

        Return True if any buffer moves. A buffer that was written counts as moving even if its
        value is the same: a power iteration may have converged. BatchNorm and similar layers always
        count as moving: in evaluation mode they rest, and nothing would show when they begin to
        move.

        Raises:
            BadInput: if a buffer appeared, vanished or changed its shape or type, or if a complex
                one moves.
        """
        statistics = {id(buffer) for buffer in _running_statistics(self._model)}
        names = [place.name for place in _places(self._model)]
        if differing := set(names) ^ {place.name for place, _ in self._values_before}:
            raise BadInput(
                "model",
                min(differing),
                "register every buffer in __init__: the forward pass made or removed it",
            )
        for place, before in self._values_before:
            after = _current_buffer(place)
            was_written = after is not place.tensor or after._version != place.version
            if not was_written and id(after) not in statistics and same_bits(after, before):
                self._fixed.append(place)
                continue
            home = place.tensor.data
            home.copy_(before)
            place.tensor.data = before
            place.owner._buffers[place.key] = place.tensor
            self.committed[place.name] = home
            (self._floating if _is_floating(place) else self._integral).append(place)
        self._values_before, self.is_known = [], True
        return bool(self.committed)

    @property
    def floating(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The shape and the summation type of each floating-point buffer that moves."""
        return [(tuple(place.tensor.shape), _sum_type(place.tensor)) for place in self._floating]

    @property
    def integral(self) -> list[str]:
        """The names of the other buffers that move."""
        return [place.name for place in self._integral]

    # -- one shard ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Prepare for the forward pass of a shard.

        Raises:
            BadInput: if code outside of a loop body has changed a moving buffer, or the shape or
                type of another one.
        """
        for place in self._moving():
            if place.current() is not place.tensor or not same_bits(
                place.tensor, self.committed[place.name]
            ):
                raise BadInput(
                    "model",
                    place.name,
                    "call model.eval() before a forward pass outside of step.shards(), and "
                    "model.train() after it: it changed this buffer. Move code that changes the "
                    "buffer on purpose into trainer.after_update",
                )
        for place in self._fixed:
            place.tensor = _current_buffer(place)
            place.version = place.tensor._version

    def end(self, shard_count: int) -> BufferChanges:
        """Return the changes of a shard, and restore the committed values.

        Args:
            shard_count: V, by which the differences are divided.

        Raises:
            BadInput: if a buffer was changed that the first forward pass left alone, or another one
                got another shape or type.
        """
        for place in self._fixed:
            if place.current() is not place.tensor or place.tensor._version != place.version:
                raise BadInput(
                    "model",
                    place.name,
                    "let the first forward pass change every buffer that later ones change: it "
                    "shows which buffers the ranks must agree on",
                )
        differences = []
        for place in self._floating:
            after, sum_type = _current_buffer(place).detach(), _sum_type(place.tensor)
            difference = torch.sub(after.to(sum_type), self.committed[place.name].to(sum_type))
            differences.append(difference.div_(shard_count))
        integers = [_current_buffer(place).detach().clone() for place in self._integral]
        self.reset()
        return BufferChanges(differences, integers)

    @torch.no_grad()
    def reset(self) -> None:
        """Copy the committed values of the moving buffers into the module's tensors."""
        for place in self._moving():
            place.owner._buffers[place.key] = place.tensor
            place.tensor.copy_(self.committed[place.name])

    # -- the step ----------------------------------------------------------------------------------

    def commit(self, differences: Sequence[Tensor], integers: Sequence[Tensor]) -> None:
        """Write the next committed values. Call it while the state is marked as being written.

        Args:
            differences: summed over all shards.
            integers: the values that all shards agree on.
        """
        for place, difference in zip(self._floating, differences, strict=True):
            committed = self.committed[place.name]
            committed.copy_(committed.to(difference.dtype) + difference)
        for place, integer in zip(self._integral, integers, strict=True):
            self.committed[place.name].copy_(integer)
        self.reset()

    @torch.no_grad()
    def take_in(self) -> None:
        """Commit values that the job's own code wrote into moving buffers as part of an update.

        Raises:
            BadInput: if the code changed the shape or type of such a buffer.
        """
        for place in self._moving():
            self.committed[place.name].copy_(_current_buffer(place))
        self.reset()

    def _moving(self) -> Iterator[_Place]:
        yield from self._floating
        yield from self._integral


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors of one shape and type are equal bit for bit.

    NaN equals itself, and the two zeros differ.
    """
    return torch.equal(_bits(left), _bits(right))


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8) if flat.numel() else flat


def _places(model: nn.Module) -> list[_Place]:
    """Return all buffers of the model, with their modules and names."""
    places = []
    for name, buffer in model.named_buffers():
        path, _, key = name.rpartition(".")
        places.append(_Place(name, model.get_submodule(path), key, buffer))
    return places


def _running_statistics(model: nn.Module) -> Iterator[Tensor]:
    """Yield the buffers of BatchNorm and similar layers that track running statistics."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            yield from module.buffers(recurse=False)


def _current_buffer(place: _Place) -> Tensor:
    """Return the module's current buffer. Raise BadInput if its shape or type has changed."""
    current = place.current()
    if current is None or (current.shape, current.dtype) != (
        place.tensor.shape,
        place.tensor.dtype,
    ):
        raise BadInput(
            "model",
            place.name,
            "keep the shape and type of this buffer: the forward pass changed them",
        )
    return current


def _is_floating(place: _Place) -> bool:
    """Return whether a buffer holds floating-point numbers. Raise BadInput for complex ones."""
    if place.tensor.is_complex():
        raise BadInput(
            "model",
            place.name,
            "keep real and imaginary part apart: complex buffers cannot be averaged",
        )
    return place.tensor.is_floating_point()


def _sum_type(tensor: Tensor) -> torch.dtype:
    """Return the type in which the differences of a buffer are summed."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
