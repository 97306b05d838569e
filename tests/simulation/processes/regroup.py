"""The moves of a simulated worker between generations, by the real ``GenerationCourse``."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chaoskit.runtime.group.generations import Generation, GenerationChange, GenerationCourse
from chaoskit.wire.messages import STANDING, Exchange, Exchanged, Formed, GroupBroken, Plan
from chaoskit.wire.messages import Superseded as SupersededReply
from simulation.engine import Wish, Work
from simulation.mesh import Mesh
from simulation.network import CLIENT, Line

if TYPE_CHECKING:
    from simulation.processes.worker import Worker


class Superseded(Exception):
    """``GenerationSuperseded``."""


class Broken(Exception):
    """A group, or its formation, broke: really a ``RuntimeError`` or ``ConnectionError``."""


class LeaseOver(Broken):
    """The lease of the node is over, as in ``commit.py``."""


@dataclass(eq=False)
class Formation(Generation):
    """The model of ``regroup.Formation``."""

    mesh: Mesh | None = None
    line: Line | None = None


class Regrouper:
    """The model of ``regroup.Regrouper``; the worker stands for the lock and its condition."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.course = GenerationCourse(worker.name, Formation)

    # -- control thread ----------------------------------------------------------------------------

    def offer(self, plan: Plan) -> None:
        self._carry_out(self.course.offer(plan))

    def _carry_out(self, change: GenerationChange[Formation] | None) -> None:
        if change is None:
            return
        if (left := change.previous) is not None:
            if left.line is not None:
                left.line.close(CLIENT)
            if left.mesh is not None:
                left.mesh.leave(left.me.rank)
        if change.takes_part:
            self._worker.begin(self._form(change.begun))
        self._worker.notify()

    # -- forming threads ---------------------------------------------------------------------------

    def _form(self, formation: Formation) -> Work:
        worker = self._worker
        try:
            yield from self._meet(formation)
        except Superseded:
            return
        except Broken as error:
            formation.broken = True
            worker.notify()
            worker.send(GroupBroken(worker.name, formation.plan.generation, str(error)))

    def _meet(self, formation: Formation) -> Generator[Wish, None, None]:
        worker, plan, rank = self._worker, formation.plan, formation.me.rank
        line = worker.world.connect(worker)
        if line is None:
            raise Broken("no coordinator to meet the others at")
        yield lambda: self.course.may_report(formation)
        standing = self.course.progress_for(formation)
        if standing is None:
            line.close(CLIENT)
            return
        formation.line = line
        replies = _Replies(worker, line)
        values = yield from replies.exchange(formation, STANDING, standing.encode())
        formation.learn(values)
        worker.world.laws.met(formation)
        worker.notify()
        yield from replies.exchange(formation, "store addresses", b"")
        mesh = worker.world.mesh(plan)
        mesh.join(rank, worker)
        yield worker.engine.uniform(0.001, 0.01)
        yield lambda: not mesh.apart(rank) or not mesh.whole or self.is_over(formation)
        if self.is_over(formation):
            mesh.leave(rank)
            return
        if not mesh.whole:
            mesh.leave(rank)
            raise Broken("a peer ended while the group was built")
        formation.mesh = mesh
        worker.send(Formed(worker.name, plan.generation))
        worker.notify()

    # -- main thread -------------------------------------------------------------------------------

    def is_over(self, formation: Formation) -> bool:
        return self.course.is_over(formation)

    def move_on(self, lowest_vote: int) -> None:
        self._carry_out(self.course.move_on(lowest_vote))

    def give_up(self, formation: Formation) -> None:
        self._carry_out(self.course.give_up(formation))

    @contextmanager
    def advance(self, formation: Formation) -> Iterator[None]:
        if not self.course.begin_step_change(formation):
            raise Superseded
        try:
            yield
        finally:
            self.course.end_step_change()
            self._worker.notify()


class _Replies:
    """The model of ``runtime/group/rendezvous.py``: one request after the other."""

    def __init__(self, worker: Worker, line: Line) -> None:
        self._worker, self._line = worker, line
        self._reply: Any = None
        self._lost = False
        line.bind(CLIENT, self._hear, self._end)

    def _hear(self, reply: Any) -> None:
        self._reply = reply
        self._worker.notify()

    def _end(self) -> None:
        self._lost = True
        self._worker.notify()

    def exchange(
        self, formation: Formation, name: str, value: bytes
    ) -> Generator[Wish, None, tuple[bytes, ...]]:
        self._reply = None
        self._line.send(CLIENT, Exchange(formation.plan.generation, name, formation.me.rank, value))
        interrupted = self._worker.regrouper.is_over
        yield lambda: self._reply is not None or self._lost or interrupted(formation)
        reply = self._reply
        if interrupted(formation) or isinstance(reply, SupersededReply):
            raise Superseded
        if reply is None:
            raise Broken("lost the coordinator during a rendezvous")
        assert isinstance(reply, Exchanged)
        return reply.values
