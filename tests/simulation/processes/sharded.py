"""The model of a worker of a sharded job.

It has the rules of ``runtime/worker/entries.py``, ``sharded_trainer.py``, ``copies.py`` and
``pieces.py``. Each rank holds a piece of the state. Here each piece has the hash of the whole, so
that pieces of different states can be told apart.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from chaoskit.runtime.group.generations import ENTRY_S, entry_limit_s
from chaoskit.runtime.integrity.ballot import whole_step
from chaoskit.vocabulary import Phase
from chaoskit.wire.messages import (
    Endpoint,
    GroupBroken,
    Healed,
    OfferedSnapshot,
    SourceFailed,
    WorkerDone,
    WorkerReady,
)
from simulation.engine import Wish, Work, until
from simulation.mesh import Contribution, Round
from simulation.processes.pieces import Copy, Slots
from simulation.processes.regroup import Broken, Formation, LeaseOver, Superseded
from simulation.processes.worker import GENESIS, Worker, advance, gradient

if TYPE_CHECKING:
    from simulation.processes.node import Agent
    from simulation.world import World

#: ``copies._ACK_WAIT_S``
ACK_WAIT_S = 0.05
#: ``peer._SILENT_S``
SILENT_S = 1.0
_LOCAL_S = 0.0003
#: A collective that belongs to no step.
RESTORED = -1


class NoCopy(Exception):
    """No copy of a piece can be read, as in ``runtime/state/pieces.py``."""


class ShardedWorker(Worker):
    """The model of ``Entries`` and ``ShardedTrainer``.

    Attributes:
        slots: its slots of memory, which its agent has, too.
        protected: the newest step of which its piece has all copies, by its agent's report.
        kept: the newest step of which every piece has all copies.
    """

    def __init__(self, world: World, agent: Agent, name: str) -> None:
        self.slots = Slots()
        self.protected = self.kept = -1
        self._copying: Copy | None = None
        self._last: Formation | None = None
        self._state_generation = 0
        super().__init__(world, agent, name)

    # -- entries -----------------------------------------------------------------------------------

    def main(self) -> Work:
        yield self.engine.uniform(0.15, 0.45)
        if self.world.fails_to_start(self):
            self.kill()
            return
        fingerprint = self.world.fingerprint_of(self)
        self.send(
            WorkerReady(self.name, self.agent.node, Endpoint("host", "", 0, 0, 0), fingerprint)
        )
        course = self.regrouper.course
        while True:
            self.enter(Phase.REGROUP)
            yield lambda: course.met is not None
            formation = course.met
            assert formation is not None
            if formation is self._last:
                yield lambda formation=formation: course.current is not formation
                continue
            self._last = formation
            course.done = self.over = False
            try:
                yield from self._enter(formation)
            except Superseded:
                continue
            except (Broken, NoCopy) as error:
                newer = yield from self._give_up(formation, error)
                if newer:
                    continue
                self.fail(f"{type(error).__name__}: {error}")
                return
            self.enter(Phase.DONE)
            self.over = course.done = True
            self.send(self._done(formation))
            yield lambda formation=formation: course.current is not formation

    def _done(self, formation: Formation) -> WorkerDone:
        return WorkerDone(self.name, self.step, format(self.state, "x"), formation.plan.generation)

    def _give_up(self, formation: Formation, error: Exception) -> Generator[Wish, None, bool]:
        """Give up a generation, like ``ShardedTrainer.give_up``.

        Return whether a newer generation explains the error.
        """
        regrouper, over = self.regrouper, isinstance(error, LeaseOver) or formation.broken
        if not over and not isinstance(error, Broken):
            return False
        self.enter(Phase.REGROUP)
        self.send(GroupBroken(self.name, formation.plan.generation, str(error)))
        regrouper.give_up(formation)
        limit_s = entry_limit_s(over, self.world.config)
        return (yield from until(self, lambda: regrouper.course.current is not formation, limit_s))

    def _enter(self, formation: Formation) -> Generator[Wish, None, None]:
        """Run the user's function from the beginning to the end."""
        board, regrouper = self.board, self.regrouper
        board.generation, board.rank, board.step = formation.plan.generation, formation.me.rank, 0
        yield lambda: formation.mesh is not None or regrouper.is_over(formation)
        self._still_in(formation)
        self.enter(Phase.OUTSIDE)
        yield self.engine.uniform(0.001, 0.02)  # fresh objects, fresh groups
        self.step, self.state, self._state_generation = 0, GENESIS, 0
        yield from self._take_over(formation)
        while self.step < self.world.steps:
            yield from self._transact(formation)
        self.enter(Phase.REDUCE)  # agree_on_end
        yield from self._meet(formation, self.world.steps + 1)

    def _still_in(self, formation: Formation) -> None:
        if self.regrouper.is_over(formation):
            raise Superseded

    # -- the state ---------------------------------------------------------------------------------

    def _take_over(self, formation: Formation) -> Generator[Wish, None, None]:
        plan = formation.plan
        if plan.restore:
            self.board.step = 0
            self.enter(Phase.RESTORE)
            try:
                yield from self._restore(formation, plan.restore)
            except NoCopy:
                newer = yield from until(
                    self, lambda: self.regrouper.course.current is not formation, ENTRY_S
                )
                if newer:
                    raise Superseded from None
                raise
        self.slots.forget_after(self.step)
        if plan.restore:
            self.kept = self.step
            self.board.step = self.step
            self.enter(Phase.REDUCE)
            yield from self._meet(
                formation, RESTORED
            )  # others may still read what this rank is going to overwrite
        with self.regrouper.advance(formation):
            self.regrouper.course.step = self.step
        self.board.step = self.step
        self.agent.kept.hold(self)
        self.world.laws.took_over(self, formation)
        self._begin_copy(formation)
        if plan.generation > 1:
            self.send(Healed(self.name, plan.generation))
        self.enter(Phase.OUTSIDE)

    def _restore(
        self, formation: Formation, restore: tuple[OfferedSnapshot, ...]
    ) -> Generator[Wish, None, None]:
        """Restore the own piece if the state was cut alike, else all pieces, like ``Restorer``."""
        age, rank, world = (
            max(snapshot.age for snapshot in restore),
            formation.me.rank,
            len(formation.plan.members),
        )
        copies: dict[int, list[OfferedSnapshot]] = {}
        for snapshot in restore:
            if snapshot.age == age:
                copies.setdefault(snapshot.piece, []).append(snapshot)
        for piece, offered in copies.items():
            turn = rank % len(offered)
            copies[piece] = sorted(
                offered[turn:] + offered[:turn], key=lambda offer: offer.node != self.agent.node
            )
        read: list[Copy] = []
        if len(copies) == world and rank in copies:
            own = yield from self._read_one(copies[rank])
            read = [own] if own.pieces == world else []
        if not read:
            for piece in sorted(copies):
                piece_copy = yield from self._read_one(copies[piece])
                read.append(piece_copy)
            if {copy.pieces for copy in read} != {len(read)}:
                raise NoCopy(f"the copies of step {age[0]} do not make up a state")
        self.world.laws.read(self, read)
        self.step, self.state, self._state_generation = (
            read[0].step,
            read[0].state,
            read[0].generation,
        )

    def _read_one(self, order: list[OfferedSnapshot]) -> Generator[Wish, None, Copy]:
        for snapshot in order:
            agent = self.world.agents[snapshot.node]
            if self.world.apart(self.agent.node, agent.node):
                yield SILENT_S
                failed = True
            else:
                failed = not agent.alive
                yield self.engine.uniform(0.001, 0.02)
            copy = agent.kept.read(snapshot) if agent.alive and not failed and agent.kept else None
            if copy is not None and not copy.corrupt:
                return copy
            self.world.laws.unreadable.add(self.board.generation)
            self.send(
                SourceFailed(self.name, snapshot, copy is not None, "corrupt" if copy else "gone")
            )
        raise NoCopy(f"no copy of piece {order[0].piece} of step {order[0].step} could be read")

    def _begin_copy(self, formation: Formation) -> None:
        """Begin a copy of the state if there is a slot for it, like ``Snapshotter.begin``."""
        copy = Copy(
            self.name,
            formation.me.rank,
            len(formation.plan.members),
            self.step,
            self._state_generation,
            self.state,
        )
        if self.slots.put(copy, self.kept):
            self._copying = copy
            self.after(self.engine.uniform(0.001, 0.012), self._seal, copy)

    def _seal(self, copy: Copy) -> None:
        copy.sealed = copy in self.slots.copies
        if self._copying is copy:
            self._copying = None
        self.agent.after(_LOCAL_S, self.agent.kept.sealed, self.name)
        self.notify()

    # -- a step ------------------------------------------------------------------------------------

    def _transact(self, formation: Formation) -> Generator[Wish, None, None]:
        self._still_in(formation)
        self.enter(Phase.FORWARD)
        own: dict[int, int] = {}
        for shard in formation.me.shards:
            yield self.engine.uniform(*self.world.shard_s)
            own[shard] = gradient(self.state, self.step, shard, self.world.config.shard_count)
        self._still_in(formation)
        self.enter(Phase.REDUCE)
        step = self.step
        yield from until(self, lambda: self.protected >= step, ACK_WAIT_S)
        outcome = yield from self._meet(
            formation, self.step, Contribution(self.state, own, self.protected)
        )
        sums: dict[int, int] = {}
        for brought in outcome.brought.values():
            sums |= brought.shards
        self.kept = whole_step(
            self.kept, self.step, [brought.vote for brought in outcome.brought.values()]
        )
        self.enter(Phase.OPTIMIZER)
        yield lambda: self._copying is None
        if self.engine.now_s > self.agent.lease_until_s:
            self.world.laws.excused_nodes.add(self.agent.node)
            raise LeaseOver("the lease of this node has run out")
        with self.regrouper.advance(formation):
            yield self.engine.uniform(0.0005, 0.005)
            self.state = advance(self.state, sums)
            self.step += 1
            self.regrouper.course.step = self.step
        self.world.laws.committed(self, formation)
        self._state_generation = formation.plan.generation
        self._begin_copy(formation)
        self.board.step = self.step
        self.board.commits += 1
        self.board.trained_in = self.board.generation
        self.enter(Phase.OUTSIDE)

    def _meet(
        self, formation: Formation, step: int, contribution: Contribution | None = None
    ) -> Generator[Wish, None, Round]:
        """Take part in a collective of all ranks and return it."""
        regrouper, mesh, rank = self.regrouper, formation.mesh, formation.me.rank
        if regrouper.is_over(formation) or mesh is None:
            raise Superseded
        if rank in mesh.broken:
            raise Broken("a connection of the group ended")
        outcome = mesh.contribute(rank, step, contribution)
        yield lambda: rank in outcome.done or rank in mesh.broken or regrouper.is_over(formation)
        if rank not in outcome.done:
            if regrouper.is_over(formation):
                raise Superseded
            raise Broken("a connection of the group ended in a collective")
        return outcome
