"""One rank's part of one step: what its shards contribute, their losses and samples, kept until the step has committed.

A contribution is the differences of the buffers that move, then the gradients of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput
from chaoskit.runtime.integrity.voting import Seal
from chaoskit.runtime.reduction.choice import (
    FlatLayout,
    LocalGradients,
    Reduced,
    Reducer,
    make_reducer,
)
from chaoskit.runtime.reduction.overlap import Overlap
from chaoskit.runtime.reduction.sidecar import SidecarLayout, digest
from chaoskit.runtime.state.admission import require_dense
from chaoskit.runtime.state.buffers import Moved
from chaoskit.runtime.state.parameter_watch import ParameterWatch
from chaoskit.runtime.state.replica import Replica
from chaoskit.runtime.state.sampling import Sampler


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


class Update(NamedTuple):
    """What a step commits. ``gradients``: one a parameter, None where no shard gave one, as in plain training."""

    gradients: list[Tensor | None]
    moved: Moved


class ShardWork:
    """Runs the backward passes of shards and folds what they give."""

    def __init__(self, replica: Replica, config: RunConfig) -> None:
        self._parameters, self._config = replica.parameters, config
        self._all = list(replica.model.named_parameters())
        self._trainable = self._flags()  # when registered
        self._frozen = digest(bytes(self._trainable))
        self._flags_seen = self._trainable
        self._watch = ParameterWatch(replica.model)
        self._buffers = replica.buffers
        self.shard_count = config.named_shards
        self.overlap: Overlap | None = None
        self._former: list[
            Reducer
        ] = []  # whose buffers the transfers of former generations may still touch
        self._lay_out()
        self._overlapping = False
        self._samplers: dict[tuple[int, int], Sampler] = {}
        self._losses: dict[int, Tensor] = {}
        self._samples: dict[int, list[int]] = {}
        self._present: dict[int, int] = {}
        self._integers: dict[int, list[Tensor]] = {}
        self._loss: Tensor | None = None
        self._moved = Moved([], [])

    def _lay_out(self) -> None:
        """Prepare for contributions of buffers and parameters. The buffers lie behind: they are complete last."""
        if self.overlap is not None:
            self.overlap.detach()
        floating, config = self._buffers.floating, self._config
        shapes = [shape for shape, _ in floating] + [
            tuple(parameter.shape) for parameter in self._parameters
        ]
        dtypes = [dtype for _, dtype in floating] + [
            parameter.dtype for parameter in self._parameters
        ]
        layout = FlatLayout(shapes, dtypes, self._parameters[0].device, config.buckets)
        self._news = SidecarLayout(self.shard_count, len(self._parameters), len(Seal._fields))
        self._local = LocalGradients(layout, self.shard_count)
        self.reducer = make_reducer(config.reduction, self._local, sidecar_size=self._news.size)
        if config.buckets > 1:
            self.overlap = Overlap(self._parameters, self._local, self.reducer, self._part)

    def resize(self, shard_count: int) -> bool:
        """Prepare for steps of so many shards. What was computed of one with another number is of no use any more.

        Returns:
            Whether that is another number than before.
        """
        if shard_count == self.shard_count:
            return False
        self.forget()
        self.shard_count = shard_count
        self._former.append(self.reducer)
        self._lay_out()
        return True

    def former_buffers(self) -> Callable[[], None]:
        """The release of the buffers of all reductions cut off so far, to be called when their groups are gone."""
        former, self._former = self._former, []
        release = self.reducer.take_abandoned()

        def free() -> None:
            former.clear()
            release()

        return free

    def sampler(self, size: int, batch_size: int) -> Sampler:
        """The order in which a dataset of ``size`` samples is dealt."""
        key = (size, batch_size)
        if key not in self._samplers:
            self._samplers[key] = Sampler(
                size, batch_size, self._config.named_shards, self._config.seed
            )
        return self._samplers[key]

    # -- one shard ----------------------------------------------------------------------------------------------

    def begin(self, shard: int, *, overlap: bool, launch: bool) -> None:
        """Before the forward pass. ``overlap``: fold during the backward pass; ``launch``: and start to reduce.

        Raises:
            BadInput: if the user's code did to the model what other ranks cannot know.
        """
        self._check_frozen()
        self._watch.begin(rehearses=not self._buffers.known)
        if self._buffers.known:
            self._buffers.begin()
        else:
            self._buffers.watch()
        self._clear_gradients()
        self._loss = None
        self._overlapping = overlap and self.overlap is not None
        if self._overlapping and self.overlap is not None:
            self.overlap.begin(shard, launch=launch)

    def backward(self, loss: Tensor) -> None:
        """One backward pass."""
        if self._loss is not None and self._overlapping:
            raise BadInput(
                "buckets", self._config.buckets, "use buckets=1 for several backward passes a shard"
            )
        # a power of two scales without rounding; any other V rounds the same way at every world size
        try:
            (loss / self.shard_count).backward()
        except BaseException:
            self._forget_pass()
            raise
        detached = loss.detach()
        self._loss = detached if self._loss is None else self._loss + detached

    def _forget_pass(self) -> None:
        """A backward pass has failed, which the user's code may repeat. What a pass before it gave is left as it is."""
        if self._loss is None:
            self._clear_gradients()
        if self._overlapping and self.overlap is not None:
            self.overlap.restart()

    def abandon(self) -> None:
        """Forget what a loop body left that did not come to its end."""
        if self.overlap is not None:
            self.overlap.abandon()

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def end(self, shard: int) -> None:
        """The loop body is over. The first time this shows which buffers move, and puts them back.

        Raises:
            BadInput: if the body computed no loss or something that cannot be reduced, or wrote into a parameter.
        """
        self.require_loss(shard)
        self._watch.end()
        if self._buffers.known:
            self._moved = self._buffers.end(self.shard_count)
            return
        for name, parameter in self._all:
            require_dense(name, parameter.grad)
        if self._buffers.discover():
            self._lay_out()

    @property
    def contribution(self) -> list[Tensor | None]:
        """Of the shard that was computed last: differences of the moving buffers, then a gradient a parameter."""
        return [*self._moved.differences, *(parameter.grad for parameter in self._parameters)]

    def _part(self, number: int) -> Tensor | None:
        """One of the contribution; gradients are there before the differences are."""
        moving = len(self._buffers.floating)
        return (
            self._moved.differences[number]
            if number < moving
            else self._parameters[number - moving].grad
        )

    def _flags(self) -> list[bool]:
        return [parameter.requires_grad for _, parameter in self._all]

    def _check_frozen(self) -> None:
        flags = self._flags()
        if flags == self._flags_seen:
            return
        for (name, _), now, registered in zip(self._all, flags, self._trainable, strict=True):
            if now and not registered:
                remedy = "register the model before you freeze what is trained later: its gradient has no place"
                raise BadInput("requires_grad", name, remedy)
        self._flags_seen, self._frozen = flags, digest(bytes(flags))

    def require_loss(self, shard: int) -> Tensor:
        """The loss of the shard under way.

        Raises:
            BadInput: if its loop body computed none.
        """
        if self._loss is None:
            raise BadInput(
                "loss", None, f"call step.backward(loss) for shard {shard}: its loop body did not"
            )
        return self._loss

    def keep(self, shard: int, samples: list[int]) -> None:
        """Fold the shard that was computed last into this rank's contribution."""
        loss = self.require_loss(shard)
        if self._overlapping and self.overlap is not None:
            self.overlap.end()
        else:
            self._local.add(shard, self.contribution)
        self._losses[shard], self._samples[shard] = loss, samples
        self._present[shard] = self._presence()
        if self._moved.integers:
            self._integers[shard] = self._moved.integers

    def _presence(self) -> int:
        """The parameters that have a gradient, as bits."""
        absent = [
            number for number, parameter in enumerate(self._parameters) if parameter.grad is None
        ]
        if len(absent) == len(self._parameters):
            remedy = "do not clear gradients inside the transaction: after this shard no parameter has one"
            raise BadInput("zero_grad", "", remedy)
        return (1 << len(self._parameters)) - 1 - sum(1 << number for number in absent)

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
        """This rank's news for all others. ``vote``: the newest generation it knows."""
        losses, present, integers = {}, 0, b""
        for shard in shards:
            losses[shard] = float(self._losses[shard])
            present |= self._present[shard]
            integers = self._integers_of(shard)
        marks = {"frozen": self._frozen, "integers": digest(integers), "present": present}
        return self._news.write(losses, **marks, vote=vote, seal=seal)

    def _integers_of(self, shard: int) -> bytes:
        """The integer buffers that a shard left, which those of this rank must agree on."""
        values = [
            value.cpu().contiguous().numpy().tobytes() for value in self._integers.get(shard, ())
        ]
        return b"|".join(values)

    def lowest_vote(self, sidecars: Tensor) -> int:
        """The newest generation that every rank knows."""
        return self._news.lowest_vote(sidecars)

    def seals(self, sidecars: Tensor) -> list[Seal]:
        """Of all ranks."""
        return [Seal(*words) for words in self._news.seals(sidecars)]

    def reduce(
        self, sidecar: Tensor, *, verify: bool, arrived: Callable[[list[Tensor]], None]
    ) -> Reduced:
        """Sum over all ranks. Raises as :meth:`Reducer.reduce`; the contribution is kept.

        Args:
            arrived: is shown the parameters' reduced gradients before anybody reads them.
        """
        moving = len(self._buffers.floating)
        self.reducer.verify, self.reducer.arrived = verify, lambda views: arrived(views[moving:])
        if self.overlap is not None:
            self.overlap.check()
        return self.reducer.reduce(sidecar)

    def update_of(self, reduced: Reduced) -> Update:
        """What to commit.

        Raises:
            BadInput: if the ranks froze other parameters, or the shards left other numbers in an integer buffer.
        """
        if not self._news.agree(reduced.sidecars, self._news.frozen_at):
            remedy = "let trainer.step alone decide what is frozen: the ranks differ"
            raise BadInput("requires_grad", [name for name, _ in self._all][:3], remedy)
        mine = list(self._integers.values())
        alike = all(
            torch.equal(one, other)
            for values in mine
            for one, other in zip(values, mine[0], strict=True)
        )
        if not alike or not self._news.agree(reduced.sidecars, self._news.integers_at):
            remedy = "keep what differs from batch to batch in a floating-point buffer: integers cannot be averaged"
            raise BadInput("model", self._buffers.integral, remedy)
        moving, present = len(self._buffers.floating), self._news.present(reduced.sidecars)
        gradients = [
            gradient if present >> number & 1 else None
            for number, gradient in enumerate(reduced.gradients[moving:])
        ]
        return Update(gradients, Moved(reduced.gradients[:moving], mine[0] if mine else []))

    def forget(self) -> None:
        """The step is over, or must be computed again from the beginning."""
        if self.overlap is not None:
            self.overlap.drop()
        self._local.clear()
        self._losses.clear()
        self._samples.clear()
        self._present.clear()
        self._integers.clear()
