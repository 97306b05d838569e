"""How a simulated worker moves from one generation to the next: the rules of ``runtime/regroup.py``."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chaoskit.messages import STANDING, Exchange, Exchanged, Formed, GroupBroken, Member, Plan
from chaoskit.messages import Superseded as SupersededReply
from chaoskit.runtime.regroup import Standing
from simulation.engine import Wish, Work
from simulation.mesh import Mesh
from simulation.network import CLIENT, Line

if TYPE_CHECKING:
    from simulation.worker import Worker


class Superseded(Exception):
    """``GenerationSuperseded``."""


class Broken(Exception):
    """A group, or the way to it, broke: ``RuntimeError`` and ``ConnectionError`` in the real one."""


@dataclass(eq=False)
class Formation:
    """``regroup.Formation``."""

    plan: Plan
    me: Member
    standings: tuple[Standing, ...] | None = None
    mesh: Mesh | None = None
    broken: bool = False
    line: Line | None = None

    @property
    def target(self) -> Standing:
        assert self.standings is not None
        return max(self.standings, key=lambda standing: standing.step)


class Regrouper:
    """``regroup.Regrouper``, method by method; the worker stands for the lock and its condition."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.current: Formation | None = None
        self._soft: Plan | None = None
        self._advancing = False
        self.step = 0
        self.done = False

    # -- control thread -------------------------------------------------------------------------------------------

    def offer(self, plan: Plan) -> None:
        if self.current is not None and plan.generation <= self.current.plan.generation:
            return
        if plan.abort or self.current is None or self.current.broken:
            self._begin(plan)
        elif self._soft is None or plan.generation > self._soft.generation:
            self._soft = plan
            self._worker.notify()

    def _begin(self, plan: Plan) -> None:
        me, previous = plan.member(self._worker.name), self.current
        last = me or (previous.me if previous is not None else None)
        assert last is not None
        self.current = Formation(plan, last)
        self._soft = None
        if previous is not None:
            previous.broken = True
            if previous.line is not None:
                previous.line.close(CLIENT)
            if previous.mesh is not None:
                previous.mesh.leave(previous.me.rank)
        if me is not None:
            self._worker.begin(self._form(self.current))
        self._worker.notify()

    # -- forming threads ------------------------------------------------------------------------------------------

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
        yield lambda: not self._advancing or formation.broken
        if formation.broken:
            line.close(CLIENT)
            return
        formation.line = line
        standing = Standing(rank, self.step, self.done)
        replies = _Replies(worker, line)
        values = yield from replies.exchange(formation, STANDING, standing.encode())
        formation.standings = tuple(Standing.decode(other, value) for other, value in enumerate(values))
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

    # -- main thread ----------------------------------------------------------------------------------------------

    def membership_now(self) -> Formation | None:
        current = self.current
        return current if current is not None and current.standings is not None else None

    def is_over(self, formation: Formation) -> bool:
        return formation.broken or self.current is not formation

    @property
    def vote(self) -> int:
        newest = self._soft or (self.current.plan if self.current else None)
        return newest.generation if newest else 0

    def move_on(self, generation: int) -> None:
        if self._soft is not None and self._soft.generation <= generation:
            self._begin(self._soft)

    def give_up(self, formation: Formation) -> None:
        formation.broken = True
        if self._soft is not None and self.current is formation:
            self._begin(self._soft)

    @contextmanager
    def advance(self, formation: Formation) -> Iterator[None]:
        if self.is_over(formation):
            raise Superseded
        self._advancing = True
        try:
            yield
        finally:
            self._advancing = False
            self._worker.notify()


class _Replies:
    """``runtime/rendezvous.py``: one connection, one request after the other."""

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

    def exchange(self, formation: Formation, name: str, value: bytes) -> Generator[Wish, None, tuple[bytes, ...]]:
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
