"""The part of one rank in a step: the contributions, losses and samples of its shards.

They are kept until the step has committed. A contribution consists of the differences of the
buffers that move, followed by the gradients of the parameters.

-> coordinator/membership/assignment.py: which shards a rank owns. reduction/gradients.py sums them
here, reduction/reducer.py over the ranks. state/buffers.py: the buffers that move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput
from chaoskit.runtime.integrity.voting import RankSeal
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
from chaoskit.runtime.state.buffers import BufferChanges
from chaoskit.runtime.state.parameter_watch import ParameterWatch
from chaoskit.runtime.state.replica import Replica
from chaoskit.runtime.state.sampling import Sampler


@dataclass(frozen=True, slots=True)
class Shard:
    """A slice of the global batch.

    Attributes:
        index: the number of the shard, from 0.
        samples: indices into the dataset.
        batch: the dataset's batch of these samples, on the trainer's device.
    """

    index: int
    samples: list[int]
    batch: Any


class Update(NamedTuple):
    """The values that a step commits.

    Attributes:
        gradients: one for each parameter; None if no shard has one, as in plain training.
        buffer_changes: the changes of the buffers that move.
    """

    gradients: list[Tensor | None]
    buffer_changes: BufferChanges


class ShardWork:
    """Runs the backward passes of shards and folds their results into one contribution.

    The contribution, with a sidecar, is then reduced over the ranks, which gives the update of the
    step.
    """

    def __init__(self, replica: Replica, config: RunConfig) -> None:
        self._parameters, self._config = replica.parameters, config
        self._named_parameters = list(replica.model.named_parameters())
        self._trainable = self._trainable_flags()  # at registration
        self._frozen_digest = digest(bytes(self._trainable))
        self._latest_flags = self._trainable
        self._watch = ParameterWatch(replica.model)
        self._buffers = replica.buffers
        self.shard_count = config.named_shards
        self.overlap: Overlap | None = None
        self._former_reducers: list[Reducer] = []  # old transfers may still use their buffers
        self._lay_out()
        self._is_overlapping = False
        self._samplers: dict[tuple[int, int], Sampler] = {}
        self._losses: dict[int, Tensor] = {}
        self._samples: dict[int, list[int]] = {}
        self._present_bits: dict[int, int] = {}
        self._integers: dict[int, list[Tensor]] = {}
        self._loss: Tensor | None = None
        self._buffer_changes = BufferChanges([], [])

    def _lay_out(self) -> None:
        """Lay out contributions of buffers and parameters, and make the reducer.

        The buffers lie at the end of the flat gradient, because they are complete last.
        """
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
        self._sidecar_layout = SidecarLayout(
            self.shard_count, len(self._parameters), len(RankSeal._fields)
        )
        self._local = LocalGradients(layout, self.shard_count)
        self.reducer = make_reducer(
            config.reduction, self._local, sidecar_size=self._sidecar_layout.size
        )
        if config.buckets > 1:
            self.overlap = Overlap(
                self._parameters, self._local, self.reducer, self._contribution_part
            )

    def resize(self, shard_count: int) -> bool:
        """Prepare for steps of ``shard_count`` shards.

        Results that were computed with another number of shards are dropped.

        Returns:
            True if the number has changed.
        """
        if shard_count == self.shard_count:
            return False
        self.forget()
        self.shard_count = shard_count
        self._former_reducers.append(self.reducer)
        self._lay_out()
        return True

    def former_buffers(self) -> Callable[[], None]:
        """Return a function that releases the buffers of all former reducers.

        Call it when their groups are gone.
        """
        reducers, self._former_reducers = self._former_reducers, []
        release = self.reducer.take_abandoned()

        def free() -> None:
            reducers.clear()
            release()

        return free

    def sampler(self, dataset_size: int, batch_size: int) -> Sampler:
        """Return the sampler that deals a dataset of ``dataset_size`` samples in global batches.

        Raises:
            BadInput: if the batch does not fit the dataset or cannot be cut into equal shards.
        """
        key = (dataset_size, batch_size)
        if key not in self._samplers:
            self._samplers[key] = Sampler(
                dataset_size, batch_size, self._config.named_shards, self._config.seed
            )
        return self._samplers[key]

    # -- one shard ---------------------------------------------------------------------------------

    def begin(self, shard: int, *, overlap: bool, launch: bool) -> None:
        """Prepare for the forward pass of a shard.

        Args:
            overlap: fold gradients during the backward pass.
            launch: also start to reduce them then.

        Raises:
            BadInput: if a parameter was unfrozen that was frozen at registration, or a moving
                buffer was changed outside of loop bodies.
        """
        self._check_frozen()
        self._watch.begin(rehearses=not self._buffers.is_known)
        if self._buffers.is_known:
            self._buffers.begin()
        else:
            self._buffers.watch()
        self._clear_gradients()
        self._loss = None
        self._is_overlapping = overlap and self.overlap is not None
        if self._is_overlapping and self.overlap is not None:
            self.overlap.begin(shard, launch=launch)

    def backward(self, loss: Tensor) -> None:
        """Run one backward pass, and add its loss to that of the shard.

        An exception of the pass is raised after its results are dropped.

        Raises:
            BadInput: if the shard has had one, and gradients are folded during the pass.
        """
        if self._loss is not None and self._is_overlapping:
            raise BadInput(
                "buckets", self._config.buckets, "use buckets=1 for several backward passes a shard"
            )
        # a power of two scales without rounding; any other V rounds alike at every world size
        try:
            (loss / self.shard_count).backward()
        except BaseException:
            self._forget_pass()
            raise
        detached = loss.detach()
        self._loss = detached if self._loss is None else self._loss + detached

    def _forget_pass(self) -> None:
        """Drop the results of a backward pass that failed, as the user's code may repeat it.

        Results of an earlier pass of the same shard are kept.
        """
        if self._loss is None:
            self._clear_gradients()
        if self._is_overlapping and self.overlap is not None:
            self.overlap.restart()

    def abandon(self) -> None:
        """Drop the results of a loop body that was left before its end, if there are any."""
        if self.overlap is not None:
            self.overlap.abandon()

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def end(self, shard: int) -> None:
        """End the loop body of a shard.

        The first call finds the buffers that move, and restores their values.

        Raises:
            BadInput: if the body computed no loss, computed gradients that cannot be reduced, or
                wrote into a parameter.
        """
        self.require_loss(shard)
        self._watch.end()
        if self._buffers.is_known:
            self._buffer_changes = self._buffers.end(self.shard_count)
            return
        for name, parameter in self._named_parameters:
            require_dense(name, parameter.grad)
        if self._buffers.discover():
            self._lay_out()

    @property
    def contribution(self) -> list[Tensor | None]:
        """The contribution of the shard that was computed last.

        It has the differences of the moving buffers, then a gradient for each parameter.
        """
        return [
            *self._buffer_changes.differences,
            *(parameter.grad for parameter in self._parameters),
        ]

    def _contribution_part(self, number: int) -> Tensor | None:
        """Return a part of the contribution. Gradients are complete before the differences are."""
        buffer_count = len(self._buffers.floating)
        return (
            self._buffer_changes.differences[number]
            if number < buffer_count
            else self._parameters[number - buffer_count].grad
        )

    def _trainable_flags(self) -> list[bool]:
        """Return whether each parameter is trained, in the order of the model."""
        return [parameter.requires_grad for _, parameter in self._named_parameters]

    def _check_frozen(self) -> None:
        """Raise BadInput if a parameter was unfrozen that was frozen at registration."""
        flags = self._trainable_flags()
        if flags == self._latest_flags:
            return
        for (name, _), is_trainable, was_trainable in zip(
            self._named_parameters, flags, self._trainable, strict=True
        ):
            if is_trainable and not was_trainable:
                remedy = (
                    "register the model before you freeze parameters that are trained later: one "
                    "that is frozen then gets no gradient buffer"
                )
                raise BadInput("requires_grad", name, remedy)
        self._latest_flags, self._frozen_digest = flags, digest(bytes(flags))

    def require_loss(self, shard: int) -> Tensor:
        """Return the loss of the current shard.

        Raises:
            BadInput: if its loop body computed none.
        """
        if self._loss is None:
            raise BadInput(
                "loss", None, f"call step.backward(loss) for shard {shard}: its loop body did not"
            )
        return self._loss

    def keep(self, shard: int, samples: list[int]) -> None:
        """Fold the shard that was computed last into this rank's contribution.

        Raises:
            BadInput: if the shard has no loss, or no parameter has a gradient.
        """
        loss = self.require_loss(shard)
        if self._is_overlapping and self.overlap is not None:
            self.overlap.end()
        else:
            self._local.add(shard, self.contribution)
        self._losses[shard], self._samples[shard] = loss, samples
        self._present_bits[shard] = self._presence()
        if self._buffer_changes.integers:
            self._integers[shard] = self._buffer_changes.integers

    def _presence(self) -> int:
        """Return the parameters that have a gradient, as bits; bit i is parameter i.

        Raises:
            BadInput: if none has one.
        """
        absent = [
            number for number, parameter in enumerate(self._parameters) if parameter.grad is None
        ]
        if len(absent) == len(self._parameters):
            remedy = "do not clear gradients inside the transaction: after this shard no parameter has one"
            raise BadInput("gradients", None, remedy)
        return (1 << len(self._parameters)) - 1 - sum(1 << number for number in absent)

    # -- the step ----------------------------------------------------------------------------------

    def missing(self, shards: Iterable[int]) -> list[int]:
        """Return those of ``shards`` that are not in the contribution yet."""
        return [shard for shard in shards if not self._local.has(shard)]

    def keep_only(self, shards: Iterable[int]) -> None:
        """Drop the shards that this rank no longer owes.

        A sum cannot be unfolded, so some of ``shards`` may have to be computed again.
        """
        if self.overlap is not None:
            self.overlap.drop()
        self._local.keep(shards)

    def samples(self, shards: Iterable[int]) -> list[int]:
        """Return the samples of computed shards, one shard after the other.

        Raise KeyError for a shard that was not computed in this step.
        """
        return [sample for shard in shards for sample in self._samples[shard]]

    def sidecar(self, shards: Iterable[int], vote: int, seal: RankSeal) -> Tensor:
        """Return the data that this rank sends along with its gradients to all others.

        Args:
            vote: the newest generation that this rank knows.
        """
        losses, present, integers = {}, 0, b""
        for shard in shards:
            losses[shard] = float(self._losses[shard])
            present |= self._present_bits[shard]
            integers = self._integers_of(shard)
        marks = {"frozen": self._frozen_digest, "integers": digest(integers), "present": present}
        return self._sidecar_layout.write(losses, **marks, vote=vote, seal=seal)

    def _integers_of(self, shard: int) -> bytes:
        """Return the integer buffers that a shard left, as bytes. All shards must agree on them."""
        buffers = [
            tensor.cpu().contiguous().numpy().tobytes() for tensor in self._integers.get(shard, ())
        ]
        return b"|".join(buffers)

    def lowest_vote(self, sidecars: Tensor) -> int:
        """Return the newest generation of which every rank has the plan."""
        return self._sidecar_layout.lowest_vote(sidecars)

    def seals(self, sidecars: Tensor) -> list[RankSeal]:
        """Return the seals of all ranks, by rank."""
        return [RankSeal(*words) for words in self._sidecar_layout.seals(sidecars)]

    def reduce(
        self, sidecar: Tensor, *, verify: bool, arrived: Callable[[list[Tensor]], None]
    ) -> Reduced:
        """Sum the contributions over all ranks, and return the result.

        The own contribution is kept, so that it can be reduced again.

        Args:
            verify: compare received data with the checksums of the senders.
            arrived: called with the parameters' reduced gradients before they are read.

        Raises:
            GenerationSuperseded, GroupFailed: and other errors of :meth:`Reducer.reduce`.
        """
        buffer_count = len(self._buffers.floating)
        self.reducer.verify, self.reducer.arrived = (
            verify,
            lambda views: arrived(views[buffer_count:]),
        )
        if self.overlap is not None:
            self.overlap.check()
        return self.reducer.reduce(sidecar)

    def update_of(self, reduced: Reduced) -> Update:
        """Return the update to commit.

        Raises:
            BadInput: if the ranks froze different parameters, or the shards left different values
                in an integer buffer.
        """
        if not self._sidecar_layout.agree(reduced.sidecars, self._sidecar_layout.frozen_at):
            remedy = "let trainer.step alone decide which parameters are frozen: the ranks differ"
            raise BadInput(
                "requires_grad", [name for name, _ in self._named_parameters][:3], remedy
            )
        integers = list(self._integers.values())
        are_alike = all(
            torch.equal(left, right)
            for buffers in integers
            for left, right in zip(buffers, integers[0], strict=True)
        )
        if not are_alike or not self._sidecar_layout.agree(
            reduced.sidecars, self._sidecar_layout.integers_at
        ):
            remedy = (
                "keep values that differ from batch to batch in a floating-point buffer: integers "
                "cannot be averaged"
            )
            raise BadInput("model", self._buffers.integral, remedy)
        buffer_count = len(self._buffers.floating)
        present = self._sidecar_layout.present(reduced.sidecars)
        gradients = [
            gradient if present >> number & 1 else None
            for number, gradient in enumerate(reduced.gradients[buffer_count:])
        ]
        return Update(
            gradients,
            BufferChanges(reduced.gradients[:buffer_count], integers[0] if integers else []),
        )

    def forget(self) -> None:
        """Drop everything: the step is over, or must be computed again from the beginning."""
        if self.overlap is not None:
            self.overlap.drop()
        self._local.clear()
        self._losses.clear()
        self._samples.clear()
        self._present_bits.clear()
        self._integers.clear()
