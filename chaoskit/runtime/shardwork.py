"""One rank's part of one step: the gradients, losses and samples of its shards, kept until the step has committed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput
from chaoskit.runtime.overlap import Overlap
from chaoskit.runtime.reduction import FlatLayout, LocalGradients, Reduced, make_reducer
from chaoskit.runtime.replica import Replica
from chaoskit.runtime.sampling import Sampler
from chaoskit.runtime.voting import Seal

_SEAL_SIZE = len(Seal._fields)


@dataclass(frozen=True, slots=True)
class Shard:
    """One slice of the global batch.

    Attributes:
        index: which of the V shards.
        samples: indices into the dataset.
        batch: what the dataset gave for them, on the trainer's device.
    """

    index: int
    samples: list[int]
    batch: Any


class ShardWork:
    """Runs the backward passes of shards and folds what they give."""

    def __init__(self, replica: Replica, config: RunConfig) -> None:
        self._parameters, self._config = replica.parameters, config
        layout = FlatLayout.of(replica.parameters, config.buckets)
        self._local = LocalGradients(layout, config.shard_count)
        self.reducer = make_reducer(config.reduction, self._local, sidecar_size=config.shard_count + 1 + _SEAL_SIZE)
        overlaps = config.buckets > 1
        self.overlap = Overlap(replica.parameters, self._local, self.reducer) if overlaps else None
        self._overlapping = False
        self._samplers: dict[tuple[int, int], Sampler] = {}
        self._losses: dict[int, Tensor] = {}
        self._samples: dict[int, list[int]] = {}
        self._loss: Tensor | None = None

    def sampler(self, size: int, batch_size: int) -> Sampler:
        """The order in which a dataset of ``size`` samples is dealt."""
        key = (size, batch_size)
        if key not in self._samplers:
            self._samplers[key] = Sampler(size, batch_size, self._config.shard_count, self._config.seed)
        return self._samplers[key]

    # -- one shard ----------------------------------------------------------------------------------------------

    def begin(self, shard: int, *, overlap: bool, launch: bool) -> None:
        """Before the forward pass. ``overlap``: fold during the backward pass; ``launch``: and start to reduce."""
        for parameter in self._parameters:
            parameter.grad = None
        self._loss = None
        self._overlapping = overlap and self.overlap is not None
        if self._overlapping and self.overlap is not None:
            self.overlap.begin(shard, launch=launch)

    def backward(self, loss: Tensor) -> None:
        """One backward pass."""
        if self._loss is not None and self._overlapping:
            raise BadInput("buckets", self._config.buckets, "use buckets=1 for several backward passes a shard")
        # a power of two scales without rounding; any other V rounds the same way at every world size
        (loss / self._config.shard_count).backward()
        detached = loss.detach()
        self._loss = detached if self._loss is None else self._loss + detached

    @property
    def gradients(self) -> list[Tensor | None]:
        """Of the shard that was computed last, one for each parameter."""
        return [parameter.grad for parameter in self._parameters]

    def require_loss(self, shard: int) -> Tensor:
        """The loss of the shard under way.

        Raises:
            BadInput: if its loop body computed none.
        """
        if self._loss is None:
            raise BadInput("loss", None, f"call step.backward(loss) for shard {shard}: its loop body did not")
        return self._loss

    def keep(self, shard: int, samples: list[int]) -> None:
        """Fold the shard that was computed last into this rank's contribution."""
        loss = self.require_loss(shard)
        if self._overlapping and self.overlap is not None:
            self.overlap.end()
        else:
            self._local.add(shard, self.gradients)
        self._losses[shard], self._samples[shard] = loss, samples

    # -- the step -----------------------------------------------------------------------------------------------

    def missing(self, wanted: Iterable[int]) -> list[int]:
        """Which of ``wanted`` are not computed yet."""
        return [shard for shard in wanted if not self._local.has(shard)]

    def keep_only(self, shards: Iterable[int]) -> None:
        """Drop what this rank does not owe any more; a sum cannot be unfolded, so some may have to be recomputed."""
        if self.overlap is not None:
            self.overlap.drop()
        self._local.keep(shards)

    def samples(self, shards: Iterable[int]) -> list[int]:
        """Samples of computed shards, one shard after the other."""
        return [sample for shard in shards for sample in self._samples[shard]]

    def sidecar(self, shards: Iterable[int], vote: int, seal: Seal) -> Tensor:
        """Float64 of shape (V + 7,): losses of this rank's shards, newest generation it knows, the bits of its seal."""
        sidecar = torch.zeros(self._config.shard_count + 1 + _SEAL_SIZE, dtype=torch.float64)
        for shard in shards:
            sidecar[shard] = float(self._losses[shard])
        sidecar[self._config.shard_count] = vote
        sidecar.view(torch.int64)[-_SEAL_SIZE:] = torch.tensor(seal, dtype=torch.int64)
        return sidecar

    def lowest_vote(self, sidecars: Tensor) -> int:
        """The newest generation that every rank knows."""
        return int(sidecars[:, self._config.shard_count].min())

    def seals(self, sidecars: Tensor) -> list[Seal]:
        """Of all ranks."""
        return [Seal(*words) for words in sidecars.view(torch.int64)[:, -_SEAL_SIZE:].tolist()]

    def reduce(self, sidecar: Tensor, *, verify: bool = True) -> Reduced:
        """Sum over all ranks. Raises RuntimeError when a rank is lost or data is corrupt; the contribution is kept."""
        self.reducer.verify = verify
        if self.overlap is not None:
            self.overlap.check()
        return self.reducer.reduce(sidecar)

    def forget(self) -> None:
        """The step is over, or must be computed again from the beginning."""
        if self.overlap is not None:
            self.overlap.drop()
        self._local.clear()
        self._losses.clear()
        self._samples.clear()
