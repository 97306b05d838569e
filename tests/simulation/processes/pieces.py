"""The fast tiers of a sharded job: slots of memory, and copies of them at partner nodes.

They stand for ``checkpoint/memory/slots.py``, ``daemon/piece_keeper.py`` and the sender and
server of copies between nodes. A copy in a slot is replaced, never changed: a copy that is not in
its slot any more was overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from chaoskit.checkpoint.memory.rotation import Content, undone, write_order
from chaoskit.checkpoint.peer.copy_placement import Node, Piece, Placement, place
from chaoskit.wire.messages import Endpoint, OfferedSnapshot, Plan, Recall, Sealed

if TYPE_CHECKING:
    from simulation.processes.node import Agent
    from simulation.processes.sharded import ShardedWorker

Age = tuple[int, int]
_RETRY_S = 0.2
_LOCAL_S = 0.0003


@dataclass(eq=False)
class Copy:
    """The content of a slot; it counts once it is ``sealed``."""

    worker: str
    piece: int
    pieces: int
    step: int
    generation: int
    state: int
    sealed: bool = False
    corrupt: bool = False

    @property
    def age(self) -> Age:
        """The step and the generation of the state."""
        return self.step, self.generation

    @property
    def content(self) -> Content:
        """The content as the rule of slots sees it.

        A copy that is not sealed is being written, as copies that broke off are dropped.
        """
        return Content(self.step, self.generation, complete=self.sealed, taken=not self.sealed)


class Slots:
    """Two slots, under the rule of the real ones."""

    def __init__(self) -> None:
        self.copies: list[Copy | None] = [None, None]

    def complete(self) -> list[Copy]:
        """Return the sealed copies, the newest first."""
        sealed = [copy for copy in self.copies if copy and copy.sealed]
        return sorted(sealed, key=lambda copy: copy.content.recency, reverse=True)

    def _contents(self) -> list[Content]:
        return [copy.content if copy else Content() for copy in self.copies]

    def put(self, copy: Copy, protected: int) -> bool:
        """Begin to write ``copy`` over the least needed one.

        Return False if there is no free slot.
        """
        free = write_order(self._contents(), protected)
        if free:
            self.copies[free[0]] = copy
        return bool(free)

    def drop(self, copy: Copy) -> None:
        """Remove a copy that was not completed."""
        self.copies = [None if held is copy else held for held in self.copies]

    def forget_after(self, step: int) -> None:
        """Remove copies of later steps, which are undone."""
        for index in undone(self._contents(), step):
            self.copies[index] = None


class PieceKeeper:
    """The states that an agent keeps: slots of its workers, and copies for other nodes."""

    def __init__(self, agent: Agent) -> None:
        self._agent, self._world = agent, agent.world
        self.held: dict[str, tuple[ShardedWorker, Slots]] = {}
        self.copies: dict[tuple[str, int, int], Slots] = {}  # (worker, piece, pieces) -> slots
        self._placement: Placement = {}
        self._acknowledged: dict[tuple[str, str], Age] = {}
        self._sending: set[tuple[str, str]] = set()
        self._numbers: dict[Copy, int] = {}
        self.recalls = 0  # with each recall, the copies are offered again

    def all(self) -> list[tuple[str, Copy]]:
        """Return every complete copy, with the tier that it is in."""
        own = [("memory", copy) for _, slots in self.held.values() for copy in slots.complete()]
        return own + [("peer", copy) for slots in self.copies.values() for copy in slots.complete()]

    # -- sending -----------------------------------------------------------------------------------

    def follow(self, plan: Plan) -> None:
        """Place the copies of a plan's pieces on partner nodes, like ``_follow``."""
        nodes = sorted({member.node for member in plan.members})
        copies = min(self._world.config.memory_copies, len(nodes) - 1)
        pieces = [Piece(member.worker, member.node) for member in plan.members]
        candidates = [Node(node) for node in nodes]
        self._placement = place(candidates, pieces, copies, self._placement) if copies else {}
        for worker in tuple(self.held):
            self._send(worker)

    def hold(self, worker: ShardedWorker) -> None:
        """Take in the slots of a worker."""
        self.held.setdefault(worker.name, (worker, worker.slots))

    def sealed(self, worker: str) -> None:
        """Send a copy that a worker has completed to its partners."""
        self._send(worker)
        self._protect(worker)

    def _send(self, name: str) -> None:
        if name not in self.held:
            return
        worker, slots = self.held[name]
        for partner in self._placement.get(name, ()) if worker.alive else ():
            line, copy = (name, partner), next(iter(slots.complete()), None)
            if (
                copy
                and line not in self._sending
                and self._acknowledged.get(line, (-1, -1)) < copy.age
            ):
                self._sending.add(line)
                self._agent.after(
                    self._world.engine.uniform(0.0005, 0.008), self._deliver, line, copy
                )

    def _deliver(self, line: tuple[str, str], copy: Copy) -> None:
        worker, slots = self.held.get(line[0], (None, None))
        partner = self._world.agents[line[1]]
        away = self._world.apart(self._agent.node, partner.node) or not partner.alive
        if worker is None or slots is None or not worker.alive:
            self._sending.discard(line)
        elif away or partner.kept is None:
            self._acknowledged.pop(
                line, None
            )  # the partner's copy counts again once it is acknowledged again
            self._agent.after(_RETRY_S, self._end_sending, line)
        else:
            partner.after(_LOCAL_S, partner.kept.receive, self, line, slots, copy, worker.kept)

    def receive(
        self, owner: PieceKeeper, line: tuple[str, str], source: Slots, copy: Copy, protected: int
    ) -> None:
        """Begin to receive a copy of another node, like ``CopyServer._take``."""
        received = Copy(
            copy.worker, copy.piece, copy.pieces, copy.step, copy.generation, copy.state
        )
        slots = self.copies.setdefault((copy.worker, copy.piece, copy.pieces), Slots())
        if slots.put(received, protected):
            delay_s = self._world.engine.uniform(0.0005, 0.008)
            self._agent.after(delay_s, self._verify, owner, line, source, copy, slots, received)
        else:
            self._world.engine.after(_RETRY_S, owner._agent.run, owner._end_sending, line)

    def _verify(
        self,
        owner: PieceKeeper,
        line: tuple[str, str],
        source: Slots,
        copy: Copy,
        slots: Slots,
        received: Copy,
    ) -> None:
        away = self._world.apart(owner._agent.node, self._agent.node)
        if not owner._agent.alive or away or copy.corrupt or copy not in source.copies:
            slots.drop(received)
            self._world.engine.after(_RETRY_S, owner._agent.run, owner._end_sending, line)
            return
        received.sealed = received in slots.copies
        owner._agent.after(
            self._world.engine.uniform(0.0002, 0.004), owner._acknowledge, line, copy.age
        )

    def _acknowledge(self, line: tuple[str, str], age: Age) -> None:
        self._acknowledged[line] = age
        self._end_sending(line)
        self._protect(line[0])

    def _end_sending(self, line: tuple[str, str]) -> None:
        self._sending.discard(line)
        self._send(line[0])

    def _protect(self, name: str) -> None:
        """Report the newest step of which a piece has all its copies, like ``_acknowledged``."""
        worker, slots = self.held.get(name, (None, None))
        if worker is None or slots is None:
            return
        partners = self._placement.get(name, ())
        if partners:
            step = min(self._acknowledged.get((name, partner), (-1, -1))[0] for partner in partners)
        else:
            step = max((copy.step for copy in slots.complete()), default=-1)
        if step >= 0:
            worker.protected = step
            worker.run(worker.notify)

    # -- what outlives a worker --------------------------------------------------------------------

    def ended(self, worker: str) -> None:
        """Forget the slots of a worker that has ended without a complete copy."""
        if worker in self.held and not self.held[worker][1].complete():
            del self.held[worker]

    def went_on(self, step: int) -> None:
        """Forget the old copies of ended workers, like ``_forget_older``."""
        for name, (worker, slots) in tuple(self.held.items()):
            if not worker.alive and all(copy.step + 1 < step for copy in slots.complete()):
                del self.held[name]

    def recall(self, order: Recall) -> None:
        """Offer all copies to the coordinator, like ``_recall``."""
        self.recalls += 1
        offers = tuple(self._offer(tier, copy) for tier, copy in self.all())
        self._agent.after(_LOCAL_S, self._agent.tell, self._answer(order, offers))

    def _committed(self) -> int:
        charges = self._agent.charges.values()
        return max((charge.process.board.step for charge in charges if not charge.lost), default=0)

    def _answer(self, order: Recall, offers: tuple[OfferedSnapshot, ...]) -> Sealed:
        return Sealed(self._agent.node, offers, order.number, self._committed())

    def _offer(self, tier: str, copy: Copy) -> OfferedSnapshot:
        number = self._numbers.setdefault(copy, len(self._numbers))  # stands for its descriptor
        checksum, where = (
            format(copy.state, "x"),
            Endpoint("host", "", self.recalls, self._agent.pid, number),
        )
        place_ = (
            self._agent.node,
            copy.worker,
            *copy.age,
            1,
            checksum,
            where,
            tier,
            copy.piece,
            copy.pieces,
        )
        return OfferedSnapshot(*place_, inode=number + 1)

    def read(self, snapshot: OfferedSnapshot) -> Copy | None:
        """Return the copy that was offered as ``snapshot``, or None if it is gone."""
        if snapshot.endpoint.port != self.recalls or snapshot.endpoint.pid != self._agent.pid:
            return None
        for tier, copy in self.all():
            if (tier, self._numbers.get(copy)) == (snapshot.tier, snapshot.endpoint.arena_fd):
                return copy
        return None
