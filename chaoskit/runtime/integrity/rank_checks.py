"""The checks of one rank's numbers: class RankChecks computes the seal to show in a reduction.

The class of a seal, RankSeal, is in ``voting.py``, with the votes over the seals of all ranks.

-> step/inquiry.py compares the seals, and acts on a difference. step/shardwork.py sends the seal
along with the gradients. integrity/piece_check.py: the seal of a sharded job.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from chaoskit.config import RunConfig
from chaoskit.runtime.integrity.mistakes import Mistakes
from chaoskit.runtime.integrity.slice_memory import SliceMemory
from chaoskit.runtime.integrity.slices import ArenaSlices
from chaoskit.runtime.integrity.voting import Pair, RankSeal, audit_at, audited_shard
from chaoskit.runtime.reduction.checksums import checksum, join, slice_checksum
from chaoskit.runtime.state.replica import Replica
from chaoskit.runtime.state.script_writes import ScriptWrite, ScriptWrites
from chaoskit.wire.messages import Plan

_SELF_BYTES = 2**23  # compared with itself by one of two ranks in a step: half a millisecond
_PATIENCE = 2  # so many corrupt transfers from one sender are no accident


class RankChecks:
    """The checksums of one rank's numbers, and its memory of corrupt transfers.

    :meth:`seal` gives the words that this rank shows to the others in a step. :meth:`comparable`
    prepares the seals of all ranks for a vote. :meth:`pair` and :meth:`duty` give the shard that
    two ranks compute, to find wrong arithmetic.

    Nothing changes the state, including buffers, in the middle of a step, so it can be compared
    then. A slice of it is read as a range of the arena if all ranks showed equal layouts in the
    previous reduction. Otherwise it is read tensor by tensor.
    """

    def __init__(self, replica: Replica, config: RunConfig, writes: ScriptWrites) -> None:
        self._replica, self._config, self._writes = replica, config, writes
        self._memory = SliceMemory()
        self._remembered_by_range = False  # how the remembered slices were read
        self._compared_slice = -1  # the slice that was compared in this step
        # changed slices turned out to be equal on all ranks: the script itself changes the state
        self._torn_by_script = False
        arena, parts = replica.arena, config.state_hash_steps
        self._slices = ArenaSlices(arena, parts) if arena is not None and parts else None
        self._by_range = False
        # the step at which every slice of a copied state will have been compared
        self._heir_until = 0
        self._gradient_checksum = 0
        self._shard_checksums: dict[int, int] = {}
        self._corrupt_transfers = Mistakes()

    # -- records of each step ----------------------------------------------------------------------

    def committed(self, grad_sum: int, world: int) -> None:
        """Record the checksums of a committed step.

        Two ranks have no majority, so each remembers its own state, in order to find its own error.
        It compares more slices with itself than the one that all compare, if they are small. A
        change is reported when the turn of its slice comes.

        Args:
            grad_sum: the checksum of the reduced gradients.
            world: the number of ranks.
        """
        step, hash_every = self._replica.step, self._config.hash_every
        is_checked_late = (
            self._config.reduction == "fast" and hash_every and (step - 1) % hash_every == 0
        )
        self._gradient_checksum = (grad_sum or 1) if is_checked_late else 0
        if world == 2 and self._config.state_hash_steps:
            self._torn_by_script |= self._memory.settle(self._compared_slice)
            self._remember()

    def _remember(self) -> None:
        """Keep the digests of the slices that this rank compares with itself."""
        parts = {part: self._state_slice(self._by_range, part) for part in self._own_parts()}
        self._memory.remember(self._replica.step, parts)
        self._remembered_by_range = self._by_range

    def entered(self, change: ScriptWrite, world: int) -> None:
        """Record the state as the next transaction is entered.

        A certain ``change`` is the script's own, and no sign of damage.
        """
        if change is ScriptWrite.CERTAIN and world == 2 and self._config.state_hash_steps:
            self._remember()

    def adopted(self) -> None:
        """Record that the state was taken over from a peer.

        The seals show this rank as an heir until every slice was compared.
        """
        self._heir_until = self._replica.step + self._config.state_hash_steps
        self._gradient_checksum = 0
        self._memory.forget()

    def enter(self) -> None:
        """Enter a new generation. The layouts of its members are not known yet."""
        self._by_range = False

    def forget(self) -> None:
        """Forget the shards of a step that is over, or is computed again from the beginning."""
        self._shard_checksums.clear()

    def note(self, shard: int, shard_count: int, gradients: Sequence[Tensor | None]) -> None:
        """Record this rank's gradients of a shard, if the shard is audited in this step."""
        if shard == audited_shard(self._replica.step, self._config.audit_every, shard_count):
            self._shard_checksums[shard] = checksum(gradients)

    def distrust(self, workers: Iterable[str], step: int) -> None:
        """Record that this rank received corrupt data from ``workers``, for its complaint."""
        self._corrupt_transfers.add(workers, step)

    # -- audits and seals --------------------------------------------------------------------------

    def pair(self, plan: Plan) -> Pair | None:
        """Return the shard that is audited in this step, with its owner and auditor, or None."""
        every = self._config.audit_every
        return audit_at(self._replica.step, every, [member.shards for member in plan.members])

    def duty(self, plan: Plan, rank: int) -> list[int]:
        """Return the shard of another rank that this rank still has to compute for an audit.

        The list is empty if there is none.
        """
        pair = self.pair(plan)
        return (
            [pair.shard]
            if pair and pair.auditor == rank and pair.shard not in self._shard_checksums
            else []
        )

    @property
    def verify(self) -> bool:
        """True if the reduction of this step checks the data that it receives."""
        return bool(self._config.hash_every) and self._replica.step % self._config.hash_every == 0

    def seal(self, plan: Plan, rank: int) -> RankSeal:
        """Return the seal to show to the others; a rank that trains alone shows an empty one.

        Reads the state: call it when the shards are computed.
        """
        if len(plan.members) == 1:
            return RankSeal()
        pair, torn, state, layout = self.pair(plan), False, 0, 0
        if self._config.state_hash_steps:
            state_checksum = self._state_slice(self._by_range, self._due_slice)
            torn = self._contradicts_itself(state_checksum)
            if self._replica.step == 0:  # the initial state is compared as a whole
                state_checksum = checksum(tensor for _, tensor in self._replica.tensors())
            state = join(state_checksum, self._replica.scalars_checksum())
            layout = self._slices.layout if self._slices is not None else 0
        shard = self._shard_checksums.get(pair.shard, 0) if pair else 0
        heir = int(self._replica.step < self._heir_until)
        written = self._writes.word, self._writes.state_word
        return RankSeal(
            state,
            self._gradient_checksum,
            int(torn),
            self._complaint(plan, rank),
            shard,
            heir,
            layout,
            *written,
        )

    def comparable(self, seals: Sequence[RankSeal]) -> Sequence[RankSeal]:
        """Return the seals of all ranks, without state checksums if these cover different ranges.

        The layouts in the seals also decide how the next slice is read: as a range of the arena if
        all are equal. All ranks see the same layouts, so all read it alike. Call this once for each
        reduction.
        """
        layouts = {seal.layout for seal in seals}
        was_by_range, self._by_range = self._by_range, len(layouts) == 1 and 0 not in layouts
        self._compared_slice = self._due_slice if was_by_range and self._by_range else -1
        return (
            [seal._replace(state=0) for seal in seals]
            if was_by_range and not self._by_range
            else seals
        )

    @property
    def _due_slice(self) -> int:
        """The slice that all ranks compare in this step."""
        return self._replica.step % self._config.state_hash_steps

    def _own_parts(self) -> list[int]:
        """Return the slices that this rank compares with itself.

        They are the due slice, and others if reading them is fast.
        """
        parts, count = self._config.state_hash_steps, 1
        if self._by_range and self._slices is not None and not self._torn_by_script:
            count = max(1, min(parts, _SELF_BYTES * parts // max(1, self._slices.size_bytes)))
        return [(self._due_slice + distance) % parts for distance in range(count)]

    def _contradicts_itself(self, due_checksum: int) -> bool:
        """Return whether the state has changed between two commits, so that it was damaged.

        Args:
            due_checksum: the digest of the slice that is due.
        """
        due, by_range = self._due_slice, self._remembered_by_range

        def digest(part: int) -> int:
            return (
                due_checksum
                if part == due and by_range == self._by_range
                else self._state_slice(by_range, part)
            )

        return self._memory.is_contradicted(self._replica.step, due, digest)

    def _state_slice(self, by_range: bool, part: int) -> int:
        """Return the digest of one slice, read as a range of the arena or tensor by tensor."""
        if by_range and self._slices is not None:
            return self._slices.digest(part)
        tensors = (tensor for _, tensor in self._replica.tensors())
        return slice_checksum(tensors, part, self._config.state_hash_steps)

    def _complaint(self, plan: Plan, rank: int) -> int:
        """Return 1 + the rank that sends corrupt data, or 0.

        The rank is this rank itself if there are several senders.
        """
        step = self._replica.step
        corrupt_senders = [
            member.rank
            for member in plan.members
            if self._corrupt_transfers.count(member.worker, step) >= _PATIENCE
        ]
        return (
            1 + (corrupt_senders[0] if len(corrupt_senders) == 1 else rank)
            if corrupt_senders
            else 0
        )
