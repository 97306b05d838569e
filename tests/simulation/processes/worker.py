"""The model of a training process: the rules of ``runtime/step/trainer.py``, with numbers.

It has two threads like the real one: the main thread trains (``main``), the control thread carries
out orders (``hear``). The state of the training is a hash of all that was ever reduced. So ranks
agree on it only if they did the same steps with the same shards, each computed from the same state.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from chaoskit.runtime.group.generations import FirstMove, healing_limit_s, may_appeal
from chaoskit.runtime.step.restore import StateSource, sources
from chaoskit.vocabulary import TIMED_PHASES, Phase
from chaoskit.wire import messages
from chaoskit.wire.messages import (
    Endpoint,
    GroupBroken,
    Healed,
    Plan,
    WorkerDone,
    WorkerFailed,
    WorkerReady,
)
from simulation.engine import Process, Strand, Wish, Work, until
from simulation.mesh import Contribution
from simulation.processes.regroup import Broken, Formation, LeaseOver, Regrouper, Superseded

if TYPE_CHECKING:
    from simulation.processes.node import Agent
    from simulation.world import World

GENESIS = 1
#: ``peer._SILENT_S``
SILENT_S = 1.0

_LOCAL_S = 0.0003


def gradient(state: int, step: int, shard: int, count: int) -> int:
    """Return the gradient of ``shard``, one of ``count``, of ``step``, from ``state``."""
    return hash((state, step, shard, count))


def advance(state: int, gradients: dict[int, int]) -> int:
    """Return the state after a step with these sums, as the optimizer does."""
    return hash((state, *sorted(gradients.items())))


class TrainingOver(Exception):
    """The training is over, as in ``trainer.py``."""


class PeerLost(Exception):
    """The peer cannot be read, as in ``peer.py``."""


class Board:
    """The progress board of a worker: the model of ``process/progress_board.py``."""

    __slots__ = (
        "commits",
        "generation",
        "longest_s",
        "phase",
        "rank",
        "since_s",
        "step",
        "trained_in",
    )

    def __init__(self, now_s: float) -> None:
        self.generation, self.rank, self.step, self.commits, self.trained_in = 0, -1, 0, 0, 0
        self.phase, self.since_s = int(Phase.START), now_s
        self.longest_s: dict[int, float] = dict.fromkeys(map(int, TIMED_PHASES), 0.0)

    def enter(self, phase: Phase, now_s: float) -> None:
        """Begin a phase, and take in the duration of the last one."""
        if self.phase in self.longest_s and 0 < self.trained_in == self.generation:
            self.longest_s[self.phase] = max(self.longest_s[self.phase], now_s - self.since_s)
        self.phase, self.since_s = int(phase), now_s


class Worker(Process):
    """The model of ``worker.Control`` and ``ReplicatedTrainer``."""

    def __init__(self, world: World, agent: Agent, name: str) -> None:
        super().__init__(world.engine, name)
        self.world, self.agent = world, agent
        self.step, self.state = 0, GENESIS
        self.board = Board(self.engine.now_s)
        self.regrouper = Regrouper(self)
        self.over = False  # has committed the last step
        self._work: dict[int, int] = {}
        self._count = 0  # shards of the batch that this work belongs to
        self._formation: Formation | None = None
        self._unhealed = 0
        world.laws.started(self)
        self.ends.append(lambda: agent.notice_end(self))
        self._main: Strand = self.begin(self.main())

    # -- the control thread ------------------------------------------------------------------------

    def hear(self, message: Any) -> None:
        """Handle an order of the agent, like ``Control._handle``."""
        if isinstance(message, Plan):
            if message.member(self.name) is None and self.name not in message.leavers:
                self.kill()  # fenced: the others go on without this worker
            else:
                self.regrouper.offer(message)

    def send(self, message: messages.Message) -> None:
        """Send a message to the agent, like ``Control.send``."""
        self.agent.after(_LOCAL_S, self.agent.hear, self, message)

    # -- what may go wrong -------------------------------------------------------------------------

    deaf = False  # holds the interpreter lock: no thread of it runs

    def hang(self, *, deaf: bool) -> None:
        """Let the main thread hang for ever; if ``deaf``, all threads."""
        self.engine.note(f"{self.name} hangs in {Phase(self.board.phase).label}, deaf={deaf}")
        self._main.hung = True
        self.world.laws.excused.add(self.name)
        if deaf:
            self.deaf = True
            self.freeze()

    def thaw(self) -> None:
        if not self.deaf:
            super().thaw()

    @property
    def hung(self) -> bool:
        """True if the main thread hangs for ever."""
        return self._main.hung

    def fail(self, error: str) -> None:
        """Let the user's code raise an exception, like ``_report_failure``."""
        self.engine.note(f"{self.name} raises {error}")
        self._main.hung = True
        self.world.laws.excused.add(self.name)
        self.send(WorkerFailed(self.name, error, fatal=False))

    # -- the main thread ---------------------------------------------------------------------------

    def main(self) -> Work:
        """Train all steps of the world, like ``_train``."""
        world = self.world
        yield self.engine.uniform(0.15, 0.45)
        if world.fails_to_start(self):
            self.kill()
            return
        self.send(WorkerReady(self.name, self.agent.node, Endpoint("host", "", 0, 0, 0)))
        self.enter(Phase.REGROUP)
        try:
            while self.step < world.steps:
                yield from self._transaction()
        except TrainingOver:
            pass
        except PeerLost as error:
            self.fail(f"PeerLost: {error}")
            return
        self.enter(Phase.DONE)
        self.over = self.regrouper.course.done = True
        self.send(WorkerDone(self.name, self.step, format(self.state, "x")))

    def enter(self, phase: Phase) -> None:
        """Show the phase; a fault may wait for it."""
        self.board.enter(phase, self.engine.now_s)
        if self.world.watched_phase == phase:
            self.world.reached(self)

    def _transaction(self) -> Work:
        """Take a step, like ``_begin``, the user's block and ``_finish``."""
        step = self.step
        yield from self._settle()
        if self.step != step:
            return
        self.enter(Phase.FORWARD)
        for shard in self._missing():
            yield self.engine.uniform(*self.world.shard_s)
            self._work[shard] = gradient(self.state, self.step, shard, self._count)
        while not self._missing():
            step = self.step
            done = yield from self._attempt()
            if done:
                return
            yield from self._settle()
            if self.step != step:
                return

    def _missing(self) -> list[int]:
        assert self._formation is not None
        return [shard for shard in self._formation.me.shards if shard not in self._work]

    def _settle(self) -> Generator[Wish, None, None]:
        """Enter the newest generation, at its step, like ``ReplicatedTrainer._settle``."""
        course, board = self.regrouper.course, self.board
        while True:
            formation = course.met
            if formation is None:
                self.enter(Phase.REGROUP)
                yield lambda: course.met is not None
                continue
            if formation is self._formation:
                return
            board.generation, board.rank = formation.plan.generation, formation.me.rank
            if (move := formation.first_move(self.step)) is FirstMove.HEAL:
                healed = yield from self._heal(formation)
                if not healed:
                    continue
                move = formation.first_move(self.step)
            if move is FirstMove.END:
                raise TrainingOver
            if move is FirstMove.FAIL:
                self.world.laws.torn = True
                raise PeerLost(
                    "no member has the state: the last rank that had it ended while it was copied"
                )
            self._formation = formation
            self._cut(formation)
            self._stand_in(formation)
            return

    def _stand_in(self, formation: Formation) -> None:
        """Report the entry into a generation, like the end of ``ReplicatedTrainer._enter``."""
        if formation.plan.generation > 1:
            self.send(Healed(self.name, formation.plan.generation))

    def _cut(self, formation: Formation) -> None:
        """Keep the own shards, like ``ReplicatedTrainer._cut`` and ``ShardWork.keep_only``."""
        count = self.world.config.shards_of(self.step, len(formation.plan.members))
        kept = formation.me.shards if count == self._count else ()
        self._count, self._work = (
            count,
            {shard: sums for shard, sums in self._work.items() if shard in kept},
        )

    def _heal(self, formation: Formation) -> Generator[Wish, None, bool]:
        """Take the state of a member that is ahead, like ``ReplicatedTrainer._heal``."""
        self.enter(Phase.RESTORE)
        for source in sources(formation):
            try:
                yield from self._pull(formation, source)
            except Superseded:
                break
            except PeerLost:
                continue
            self.board.step = self.step
            self._unhealed = 0
            return True
        self.enter(Phase.REGROUP)
        course, limit_s = self.regrouper.course, healing_limit_s(formation)
        newer = yield from until(self, lambda: course.current is not formation, limit_s)
        if newer:
            return False
        self._unhealed += 1
        error = (
            f"the state of step {formation.goal_step} could not be read from any rank that has it"
        )
        if not may_appeal(self.step, self._unhealed):
            raise PeerLost(error)
        yield from self._leave(formation, error)
        return False

    def _leave(self, formation: Formation, error: str) -> Generator[Wish, None, None]:
        """Leave a generation until a plan explains its end, like ``ReplicatedTrainer._leave``."""
        self.enter(Phase.REGROUP)
        if error:
            self.send(GroupBroken(self.name, formation.plan.generation, error))
        self.regrouper.give_up(formation)
        yield lambda: self.regrouper.course.current is not formation

    def _pull(self, formation: Formation, source: StateSource) -> Generator[Wish, None, None]:
        """Copy the state of a member, like ``ReplicatedTrainer._pull``.

        Meanwhile no step is reported to a newer generation.
        """
        name = source.name
        regrouper, healer = self.regrouper, self.world.workers[name]
        with regrouper.advance(formation):
            self._work = {}
            try:
                if self.world.apart(self.agent.node, healer.agent.node):
                    yield SILENT_S
                    raise PeerLost(name)
                if not healer.alive:
                    raise PeerLost(name)
                if self.step <= 0:
                    self.step = -1  # copied in place; a survivor keeps its state until it has the whole other one
                self.world.healing(self, healer)
                yield self.engine.uniform(0.002, 0.06)
                if not healer.alive or healer.step < 0:
                    raise PeerLost(name)
                self.step, self.state = healer.step, healer.state
                self.world.laws.healed(self, formation)
            finally:
                regrouper.course.step = self.step

    def _attempt(self) -> Generator[Wish, None, bool]:
        """Reduce and commit once, like ``ReplicatedTrainer._attempt``.

        Return False if the generation is over.
        """
        formation, regrouper = self._formation, self.regrouper
        assert formation is not None
        self.enter(Phase.REDUCE)
        try:
            yield lambda: formation.mesh is not None or regrouper.is_over(formation)
            sums = yield from self._reduce(formation)
            yield from self._commit(formation, sums)
        except (Superseded, Broken) as error:
            yield from self._leave(formation, str(error) if isinstance(error, Broken) else "")
            return False
        return True

    def _reduce(self, formation: Formation) -> Generator[Wish, None, tuple[dict[int, int], int]]:
        """Return the sums of all shards and the lowest vote, like ``ShardWork.reduce``."""
        regrouper, mesh, rank = self.regrouper, formation.mesh, formation.me.rank
        if regrouper.is_over(formation) or mesh is None:
            raise Superseded
        if rank in mesh.broken:
            raise Broken("a connection of the group ended")
        own = {shard: self._work[shard] for shard in formation.me.shards}
        outcome = mesh.contribute(
            rank, self.step, Contribution(self.state, own, regrouper.course.vote)
        )
        yield lambda: rank in outcome.done or rank in mesh.broken or regrouper.is_over(formation)
        if rank not in outcome.done:
            if regrouper.is_over(formation):
                raise Superseded
            raise Broken("a connection of the group ended in the reduction")
        sums: dict[int, int] = {}
        for brought in outcome.brought.values():
            sums |= brought.shards
        return sums, min(brought.vote for brought in outcome.brought.values())

    def _commit(
        self, formation: Formation, reduced: tuple[dict[int, int], int]
    ) -> Generator[Wish, None, None]:
        """Commit, like ``ReplicatedTrainer._commit``, and move to a plan that waits for that."""
        sums, vote = reduced
        self.enter(Phase.OPTIMIZER)
        if self.engine.now_s > self.agent.lease_until_s:
            self.world.laws.excused_nodes.add(self.agent.node)
            raise LeaseOver("the lease of this node has run out")
        with self.regrouper.advance(formation):
            yield self.engine.uniform(0.0005, 0.005)
            self.state = advance(self.state, sums)
            self.step += 1
            self.regrouper.course.step = self.step
        self.world.laws.committed(self, formation)
        self.board.step, self._work = self.step, {}
        self.board.commits += 1
        self.board.trained_in = self.board.generation
        self.enter(Phase.OUTSIDE)
        self.regrouper.move_on(vote)
