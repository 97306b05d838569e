"""What one rank knows about the health of its numbers: the seal it shows in every reduction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from chaoskit.config import RunConfig
from chaoskit.runtime.integrity.mistakes import Mistakes
from chaoskit.runtime.integrity.slice_memory import SliceMemory
from chaoskit.runtime.integrity.slices import ArenaSlices
from chaoskit.runtime.integrity.voting import Pair, Seal, audit_at, audited_shard
from chaoskit.runtime.reduction.checksums import checksum, join, slice_checksum
from chaoskit.runtime.state.replica import Replica
from chaoskit.runtime.state.script_writes import Change, ScriptWrites
from chaoskit.wire.messages import Plan

_SELF_BYTES = (
    2**23
)  # of its own state that one of two ranks compares with itself in a step: half a millisecond
_PATIENCE = 2  # as much corrupt data from one sender is no accident


class Integrity:
    """Keeps the checksums of a step, and remembers corrupt transfers.

    Only a commit changes the state, buffers included: it can be compared in the middle of a step. A slice of it is read
    as a range of the arena, if all ranks of the generation have told, in the reduction before, that theirs are laid out
    alike; else tensor by tensor.
    """

    def __init__(self, replica: Replica, config: RunConfig, writes: ScriptWrites) -> None:
        self._replica, self._config, self._writes = replica, config, writes
        self._memory = SliceMemory()
        self._remembered_by_range = False  # how what is remembered was read
        self._compared = -1  # the slice that was compared in this step
        self._torn_by_script = (
            False  # those turned out to be equal on all ranks: the script itself changes the state
        )
        arena, parts = replica.arena, config.state_hash_steps
        self._slices = ArenaSlices(arena, parts) if arena is not None and parts else None
        self._by_range = False
        self._heir_until = (
            0  # the step by which every slice of a copied state will have been compared
        )
        self._gradient = 0
        self._shards: dict[int, int] = {}
        self._distrust = Mistakes()

    # -- what changes -------------------------------------------------------------------------------------------

    def committed(self, grad_sum: int, world: int) -> None:
        """A step was committed. Two ranks have no majority: each remembers what it had, to convict itself.

        It compares more slices with itself than the one that all compare, if they are small: a change is told when its
        slice's turn comes.
        """
        step, every = self._replica.step, self._config.hash_every
        late = self._config.reduction == "fast" and every and (step - 1) % every == 0
        self._gradient = (grad_sum or 1) if late else 0
        if world == 2 and self._config.state_hash_steps:
            self._torn_by_script |= self._memory.settle(self._compared)
            self._remember()

    def _remember(self) -> None:
        parts = {part: self._state_slice(self._by_range, part) for part in self._own_parts()}
        self._memory.remember(self._replica.step, parts)
        self._remembered_by_range = self._by_range

    def entered(self, change: Change, world: int) -> None:
        """The next transaction is entered. A certain ``change`` is the script's own, and no sign of damage."""
        if change is Change.CERTAIN and world == 2 and self._config.state_hash_steps:
            self._remember()

    def adopted(self) -> None:
        """The state is a peer's now."""
        self._heir_until = self._replica.step + self._config.state_hash_steps
        self._gradient = 0
        self._memory.forget()

    def enter(self) -> None:
        """A new generation: the layouts of its members are not known yet."""
        self._by_range = False

    def forget(self) -> None:
        """The step is over, or is computed again from the beginning."""
        self._shards.clear()

    def note(self, shard: int, shard_count: int, gradients: Sequence[Tensor | None]) -> None:
        """This rank's gradients of one of the shards, computed just now; kept if it is audited in this step."""
        if shard == audited_shard(self._replica.step, self._config.audit_every, shard_count):
            self._shards[shard] = checksum(gradients)

    def distrust(self, workers: Iterable[str], step: int) -> None:
        """This rank received corrupt data from them."""
        self._distrust.add(workers, step)

    # -- what follows from it -----------------------------------------------------------------------------------

    def pair(self, plan: Plan) -> Pair | None:
        """Which shard is audited in this step, and by whom."""
        every = self._config.audit_every
        return audit_at(self._replica.step, every, [member.shards for member in plan.members])

    def duty(self, plan: Plan, rank: int) -> list[int]:
        """A shard of another rank that this one still has to compute for an audit."""
        pair = self.pair(plan)
        return (
            [pair.shard] if pair and pair.auditor == rank and pair.shard not in self._shards else []
        )

    @property
    def verify(self) -> bool:
        """Whether the reduction of this step checks what it receives."""
        return bool(self._config.hash_every) and self._replica.step % self._config.hash_every == 0

    def seal(self, plan: Plan, rank: int) -> Seal:
        """To be shown to the others. Reads the state: call it when the shards are computed."""
        if len(plan.members) == 1:
            return Seal()
        pair, torn, state, layout = self.pair(plan), False, 0, 0
        if self._config.state_hash_steps:
            now = self._state_slice(self._by_range, self._due)
            torn = self._contradicts_itself(now)
            if self._replica.step == 0:  # the state as it was built is compared whole
                now = checksum(tensor for _, tensor in self._replica.tensors())
            state = join(now, self._replica.scalars_checksum())
            layout = self._slices.layout if self._slices is not None else 0
        shard = self._shards.get(pair.shard, 0) if pair else 0
        heir = int(self._replica.step < self._heir_until)
        written = self._writes.word, self._writes.state_word
        return Seal(
            state,
            self._gradient,
            int(torn),
            self._complaint(plan, rank),
            shard,
            heir,
            layout,
            *written,
        )

    def comparable(self, seals: Sequence[Seal]) -> Sequence[Seal]:
        """The seals of all ranks, without the words on their states if these were read as ranges that differ.

        All see the same layouts, so all read the next slice alike.
        """
        layouts = {seal.layout for seal in seals}
        before, self._by_range = self._by_range, len(layouts) == 1 and 0 not in layouts
        self._compared = self._due if before and self._by_range else -1
        return (
            [seal._replace(state=0) for seal in seals] if before and not self._by_range else seals
        )

    @property
    def _due(self) -> int:
        """The slice that all ranks compare in this step."""
        return self._replica.step % self._config.state_hash_steps

    def _own_parts(self) -> list[int]:
        """The slices that this rank compares with itself: the one that is due, and others that can be read as fast."""
        parts, count = self._config.state_hash_steps, 1
        if self._by_range and self._slices is not None and not self._torn_by_script:
            count = max(1, min(parts, _SELF_BYTES * parts // max(1, self._slices.size_bytes)))
        return [(self._due + distance) % parts for distance in range(count)]

    def _contradicts_itself(self, now: int) -> bool:
        """Whether the state has changed between two commits. ``now``: digest of the slice that is due."""
        due, by_range = self._due, self._remembered_by_range

        def digest(part: int) -> int:
            return (
                now
                if part == due and by_range == self._by_range
                else self._state_slice(by_range, part)
            )

        return self._memory.is_contradicted(self._replica.step, due, digest)

    def _state_slice(self, by_range: bool, part: int) -> int:
        if by_range and self._slices is not None:
            return self._slices.digest(part)
        tensors = (tensor for _, tensor in self._replica.tensors())
        return slice_checksum(tensors, part, self._config.state_hash_steps)

    def _complaint(self, plan: Plan, rank: int) -> int:
        step = self._replica.step
        bad = [
            member.rank
            for member in plan.members
            if self._distrust.count(member.worker, step) >= _PATIENCE
        ]
        return 1 + (bad[0] if len(bad) == 1 else rank) if bad else 0
