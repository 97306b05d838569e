"""Buffers that the forward pass changes, such as the running statistics of BatchNorm.

Every shard's forward pass starts from the committed values ``B0``, so what it leaves, ``B_s``, is a function of ``B0``
and the shard alone, whichever rank computes it. A step commits ``B0 + sum of (B_s - B0) / V``: the mean over the V
shards, and exactly ``B0`` where nothing moved. The differences travel as further gradients, in the same tree. For
BatchNorm this is the running average of the shards' mean statistics. Integers take the value that every shard gives.

Peers copy committed values while a forward pass runs. So these lie apart: the module works on scratch tensors, which
hold the committed values whenever no shard is being computed.
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
    """A buffer of the model. ``tensor``: the module's own object; ``version``: its writes when a shard began."""

    name: str
    owner: nn.Module
    key: str
    tensor: Tensor
    version: int = 0

    def now(self) -> Tensor | None:
        return self.owner._buffers.get(self.key)


class Moved(NamedTuple):
    """What one shard did. ``differences``: (B_s - B0) / V of the floating-point buffers. ``integers``: the others."""

    differences: list[Tensor]
    integers: list[Tensor]


class MovingBuffers:
    """Which buffers of ``model`` move, and where their committed values lie.

    Attributes:
        known: whether a first forward pass has shown which ones move.
        committed: by name, those of the buffers that move.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.known = False
        self.committed: dict[str, Tensor] = {}
        self._fixed: list[_Place] = []
        self._floating: list[_Place] = []
        self._integral: list[_Place] = []
        self._before: list[tuple[_Place, Tensor]] = []

    # -- which ones -----------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Remember all buffers: the forward pass that follows shows which ones move."""
        self._before = [(place, place.tensor.detach().clone()) for place in _places(self._model)]
        for place, _ in self._before:
            place.version = place.tensor._version

    def discover(self) -> bool:
        """Put everything back, bit for bit, and give the buffers that moved a scratch tensor. True: there are some.

        A buffer that was written moves, also where its value stayed: a power iteration may have converged. BatchNorm
        and its kin count whatever they did: in evaluation mode they rest, and nothing would betray it when they are
        woken.

        Raises:
            BadInput: if a buffer appeared, vanished or changed its shape or type.
        """
        statistics = {id(buffer) for buffer in _running_statistics(self._model)}
        names = [place.name for place in _places(self._model)]
        if odd := set(names) ^ {place.name for place, _ in self._before}:
            raise BadInput(
                "model",
                min(odd),
                "register every buffer in __init__: the forward pass made or removed it",
            )
        for place, before in self._before:
            after = _same_kind(place)
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
        self._before, self.known = [], True
        return bool(self.committed)

    @property
    def floating(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape of each floating-point buffer that moves, and the type in which its differences are summed."""
        return [(tuple(place.tensor.shape), _sum_type(place.tensor)) for place in self._floating]

    @property
    def integral(self) -> list[str]:
        """Names of the other buffers that move."""
        return [place.name for place in self._integral]

    # -- one shard ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A shard's forward pass follows.

        Raises:
            BadInput: if a forward pass outside of a transaction has changed a buffer.
        """
        for place in self._moving():
            if place.now() is not place.tensor or not same_bits(
                place.tensor, self.committed[place.name]
            ):
                raise BadInput(
                    "model",
                    place.name,
                    "call model.eval() before a forward pass outside of step.shards(), and model.train() after it: "
                    "it changed this buffer. Code that is to change it belongs into trainer.after_update",
                )
        for place in self._fixed:
            place.tensor = _same_kind(place)
            place.version = place.tensor._version

    def end(self, shard_count: int) -> Moved:
        """The shard is computed: say what it moved, and put the committed values back.

        Raises:
            BadInput: if a buffer was changed that the first forward pass left alone.
        """
        for place in self._fixed:
            if place.now() is not place.tensor or place.tensor._version != place.version:
                raise BadInput(
                    "model",
                    place.name,
                    "let the first forward pass change every buffer that later ones change: it shows what must be "
                    "agreed on",
                )
        differences = []
        for place in self._floating:
            after, sum_type = _same_kind(place).detach(), _sum_type(place.tensor)
            difference = torch.sub(after.to(sum_type), self.committed[place.name].to(sum_type))
            differences.append(difference.div_(shard_count))
        integers = [_same_kind(place).detach().clone() for place in self._integral]
        self.reset()
        return Moved(differences, integers)

    @torch.no_grad()
    def reset(self) -> None:
        """Show the module, and the user's code, the committed values."""
        for place in self._moving():
            place.owner._buffers[place.key] = place.tensor
            place.tensor.copy_(self.committed[place.name])

    # -- the step -------------------------------------------------------------------------------------------------

    def commit(self, differences: Sequence[Tensor], integers: Sequence[Tensor]) -> None:
        """Write the next values; to be called while peers are told not to read. ``differences``: summed over all."""
        for place, difference in zip(self._floating, differences, strict=True):
            committed = self.committed[place.name]
            committed.copy_(committed.to(difference.dtype) + difference)
        for place, value in zip(self._integral, integers, strict=True):
            self.committed[place.name].copy_(value)
        self.reset()

    @torch.no_grad()
    def take_in(self) -> None:
        """Commit what the job's own code wrote into moving buffers as part of an update."""
        for place in self._moving():
            self.committed[place.name].copy_(_same_kind(place))
        self.reset()

    def _moving(self) -> Iterator[_Place]:
        yield from self._floating
        yield from self._integral


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and type are equal bit for bit: NaN equals itself, the zeros differ."""
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8) if flat.numel() else flat


def _places(model: nn.Module) -> list[_Place]:
    found = []
    for name, buffer in model.named_buffers():
        path, _, key = name.rpartition(".")
        found.append(_Place(name, model.get_submodule(path), key, buffer))
    return found


def _running_statistics(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            yield from module.buffers(recurse=False)


def _same_kind(place: _Place) -> Tensor:
    """The module's buffer as it is now, which must fit its place."""
    now = place.now()
    if now is None or (now.shape, now.dtype) != (place.tensor.shape, place.tensor.dtype):
        raise BadInput(
            "model",
            place.name,
            "keep the shape and type of this buffer: the forward pass changed them",
        )
    return now


def _is_floating(place: _Place) -> bool:
    if place.tensor.is_complex():
        raise BadInput(
            "model",
            place.name,
            "keep real and imaginary part apart: complex buffers cannot be averaged",
        )
    return place.tensor.is_floating_point()


def _sum_type(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
