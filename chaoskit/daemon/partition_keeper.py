"""A node's part of the fast tiers in a sharded job: the pieces of its workers, and of other nodes' workers.

A worker copies each committed state of its piece into slots of memory; the keeper has them open, too, so they outlive
the worker. From there each copy goes to other nodes (:mod:`chaoskit.checkpoint.peer.placement` says which), so that it
outlives the node. Nothing is offered until the coordinator asks, which it does when a rank was lost: nobody else has
its piece.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from chaoskit.checkpoint.disk.portion import Portion, copy_piece
from chaoskit.checkpoint.layout.arena import ArenaView
from chaoskit.checkpoint.layout.manifest import Damaged
from chaoskit.checkpoint.layout.seal import Seal, Torn
from chaoskit.checkpoint.peer.placement import Node, Piece, Placement, place
from chaoskit.checkpoint.peer.protocol import PeerAddress
from chaoskit.checkpoint.peer.sender import CopySender
from chaoskit.checkpoint.peer.server import CopyServer
from chaoskit.daemon.copy_faults import KeptCopy, newest, spoil
from chaoskit.daemon.keeper_base import NodeContext, NodeKeeper
from chaoskit.daemon.saving import Saver
from chaoskit.process.heartbeat_page import Board
from chaoskit.process.linux import lower_priority, raise_priority
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import Endpoint, Holding, Plan, Sealed, Snapshot

#: Of threads that send and receive copies: as urgent as training, which loses the steps that they are behind.
_NICENESS = 0
_BUDGET_SHARE = 0.25  # of the node's memory, for the copies of other nodes


@dataclass(slots=True)
class _Held:
    """The slots of one worker, through descriptors of our own."""

    holding: Holding
    fds: tuple[int, ...]
    board: Board | None  # None: the worker has ended
    partners: tuple[PeerAddress, ...] = ()
    sender: CopySender | None = None
    told: bool = False  # that all copies are there, in this generation

    @property
    def paths(self) -> list[str]:
        return [f"/proc/{os.getpid()}/fd/{fd}" for fd in self.fds]

    def copies(self) -> list[tuple[Seal, ArenaView]]:
        """What is complete in the slots now."""
        return [(seal, view) for _, seal, view in self.sealed()]

    def sealed(self) -> list[tuple[str, Seal, ArenaView]]:
        """The same, with the paths of the slots."""
        views = [(path, ArenaView.open(path)) for path in self.paths]
        return [
            (path, Seal(view.step, view.generation, view.size_bytes, checksum), view)
            for path, view in views
            if (checksum := view.checksum)
        ]

    def stop_sending(self) -> None:
        if self.sender is not None:
            self.sender.close()
            self.sender = None

    def close(self) -> None:
        self.stop_sending()
        for fd in self.fds:
            os.close(fd)


class PieceKeeper(NodeKeeper):
    """Holds, sends and offers pieces.

    Args:
        listener: where partners bring copies of their pieces; None for a port that is free.
    """

    def __init__(self, context: NodeContext, listener: socket.socket | None = None) -> None:
        super().__init__(context, _NICENESS)
        self._token = context.token
        self._held: dict[str, _Held] = {}
        self._boards: dict[str, Board] = {}
        self._newest = 0  # step that a live worker of this node has committed
        self._placement: Placement = {}
        self._placed_before: Placement = {}  # in the last membership
        self._groups: tuple[tuple[int, ...], ...] = ()  # ranks that hold a whole state together
        self._addresses: dict[str, PeerAddress] = {}
        self._server = CopyServer(
            context.node,
            context.host,
            context.token,
            _budget_bytes(),
            listener=listener,
            dropped=self._dropped,
            niceness=_NICENESS,
            probe=self.breakpoints.reach,
        )
        self._saved: dict[
            str, tuple[int, int]
        ] = {}  # by worker: of the piece that was last offered to be stored
        self._start()

    # -- orders ---------------------------------------------------------------------------------------------------

    def adopt(self, worker: str, endpoint: Endpoint, board: Board) -> None:
        """A worker is ready. It says what there is to keep when it has a piece."""
        self._orders.give(lambda: self._boards.update({worker: board}))

    def hold(self, holding: Holding) -> None:
        """A worker copies its piece into slots: have them open, too."""
        with contextlib.suppress(OSError):  # it has ended already
            fds = tuple(
                os.open(f"/proc/{holding.pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
                for fd in holding.fds
            )
            self._orders.give(lambda: self._hold(holding, fds))

    def went_on(self, step: int) -> None:
        """A live worker of this node has committed ``step`` steps: what others left two steps before is of no use."""
        if step != self._newest:
            self._newest = step
            self._orders.give(lambda: self._forget_older(step))

    # -- the thread -----------------------------------------------------------------------------------------------

    def _bells(self) -> dict[int, Callable[[], None]]:
        living = [(held.board, held) for held in self._held.values() if held.board is not None]
        return {board.bell: partial(self._sealed, held) for board, held in living}

    def _hold(self, holding: Holding, fds: tuple[int, ...]) -> None:
        board, before = self._boards.get(holding.worker), self._held.get(holding.worker)
        if board is None:  # it has ended meanwhile
            for fd in fds:
                os.close(fd)
            return
        if before is not None:
            before.close()
        held = self._held[holding.worker] = _Held(holding, fds, board)
        if holding.groups != self._groups:
            self._groups = holding.groups
            if self._plan is not None:
                self._place(self._plan)
        self._send(held)
        self._sealed(held)  # it may have rung before anybody listened

    def _place(self, plan: Plan) -> None:
        """Who is whose partner. Parallel groups are those of the newest mesh, if it is one of a world of this size."""
        nodes = sorted({member.node for member in plan.members})
        copies = min(self._config.memory_copies, len(nodes) - 1)
        if not copies:
            self._placement = {}
            return
        group = {rank: str(number) for number, ranks in enumerate(self._groups) for rank in ranks}
        fits = len(group) == len(plan.members)
        pieces = [
            Piece(member.worker, member.node, (group[member.rank],) if fits else ())
            for member in plan.members
        ]
        known = [Node(node, self._config.rack(node)) for node in nodes]
        self._placement = place(known, pieces, copies, self._placed_before)

    def _follow(self, plan: Plan) -> None:
        self._addresses = {
            member.node: PeerAddress(
                member.node, member.endpoint.host_id, member.endpoint.address, member.endpoint.port
            )
            for member in plan.members
        }
        self._plan, self._placed_before = plan, self._placement
        self._place(plan)
        self._archive.follow(plan.generation)
        for held in self._held.values():
            held.told = False
            if held.board is not None:
                held.board.protect(-1)
            if held.sender is not None and plan.restore:
                held.sender.protect(plan.restore[0].step)
            self._send(held)
            self._acknowledged(held)

    def _counts(self, seal: Seal) -> bool:
        """Whether a copy is of what is trained now, and not of steps that are trained again."""
        plan = self._plan
        if plan is None:
            return False  # it is not known yet which nodes shall have it
        if seal.generation >= plan.generation:
            return True
        return seal.step <= (plan.restore[0].step if plan.restore else 0)

    def _send(self, held: _Held) -> None:
        """Keep copies of a live worker's piece at its partners."""
        names = self._placement.get(held.holding.worker, ()) if held.board is not None else ()
        partners = tuple(self._addresses[name] for name in names)
        if held.sender is not None and partners == held.partners:
            held.sender.follow(held.paths)
            return
        held.stop_sending()
        held.partners = partners
        if partners:
            held.sender = CopySender(
                _name(held.holding),
                held.paths,
                partners,
                self._token,
                transport=self._config.transport,
                counts=self._counts,
                acknowledged=lambda node, seal: self._orders.give(lambda: self._acknowledged(held)),
                lost=lambda node: self._orders.give(lambda: self._acknowledged(held)),
                failed=lambda node, reason: self._failed(held, node, reason),
                niceness=_NICENESS,
                probe=self.breakpoints.reach,
            )

    def _sealed(self, held: _Held) -> None:
        """A worker has completed a copy."""
        if held.sender is not None and held.board is not None:
            held.sender.protect(held.board.kept)
            held.sender.notify()
        else:
            self._acknowledged(held)
        if self._archive.saver is not None and held.board is not None:
            self._save(held, self._archive.saver)

    def _save(self, held: _Held, saver: Saver) -> None:
        """Have a copy stored whose step is due: once, in the membership that committed it."""
        plan, part = self._plan, held.holding
        if plan is None or plan.member(part.worker) is None or held.board is None:
            return
        if (
            saver.due.after(held.board.step - 3) > held.board.step + 1
        ):  # nothing due can be in the slots
            return
        for path, seal, _ in held.sealed():
            age = (seal.step, seal.generation)
            fresh = seal.generation == plan.generation and age > self._saved.get(
                part.worker, (-1, -1)
            )
            if not (fresh and saver.due.at(seal.step)):
                continue
            self._saved[part.worker] = age
            if not saver.wants(age):
                continue
            for portion in self._piece(path, seal, part, plan, seal.generation):
                saver.offer(portion)

    def _save_present(self, saver: Saver, step: int) -> None:
        """See there. ``step`` is due by now, and both slots of each worker are looked at."""
        for held in list(self._held.values()):
            self._save(held, saver)

    def _piece(
        self,
        path: str,
        seal: Seal,
        part: Holding,
        plan: Plan,
        generation: int,
        *,
        last: bool = False,
    ) -> list[Portion]:
        """A copy of a piece; nothing if it cannot be read."""
        try:
            boxes, scalars = copy_piece(path, (seal.step, seal.generation))
        except (Torn, Damaged, OSError) as error:
            self._refuse(seal.step, error)
            return []
        member = plan.member(part.worker)
        world, leads = len(plan.members), member is not None and not member.rank
        return [
            Portion(
                seal.step,
                generation,
                part.piece,
                part.pieces,
                world,
                leads,
                tuple(boxes),
                scalars,
                last,
            )
        ]

    def _last(self) -> list[Portion]:
        plan, portions = self._plan, list[Portion]()
        for held in self._held.values():
            copies = held.sealed()
            if plan is None or plan.member(held.holding.worker) is None or not copies:
                continue
            path, seal, _ = max(copies, key=lambda copy: copy[1].recency)
            portions += self._piece(path, seal, held.holding, plan, plan.generation, last=True)
        return portions

    def _acknowledged(self, held: _Held) -> None:
        """A partner has verified a copy, or lost it; or there is no partner, and the worker has sealed one."""
        if (
            held.board is None or self._held.get(held.holding.worker) is not held
        ):  # a sender that is closed speaks late
            return
        if held.sender is not None:
            found = [seal.step for seal in held.sender.acknowledged.values() if self._counts(seal)]
            step = min(found) if len(found) == len(held.partners) else -1
        else:
            step = max((seal.step for seal, _ in held.copies() if self._counts(seal)), default=-1)
        if step >= 0 or held.told:  # else it has had no copies yet
            held.board.protect(step)
        if held.told != (step >= 0):
            held.told = step >= 0
            part, event = held.holding, Event.PROTECTED if held.told else Event.EXPOSED
            nodes = [partner.node for partner in held.partners]
            self._journal.write(event, worker=part.worker, step=step, piece=part.piece, nodes=nodes)

    def _failed(self, held: _Held, node: str, reason: str) -> None:
        self._journal.write(
            Event.COPY_FAILED, worker=held.holding.worker, step=-1, reason=f"to {node}: {reason}"
        )

    def _dropped(self, name: str, reason: str) -> None:
        self._journal.write(Event.COPY_FAILED, worker=name, step=-1, reason=reason)

    # -- what faults do to copies ---------------------------------------------------------------------------------

    def kept(self, worker: str) -> list[KeptCopy]:
        """See :class:`chaoskit.daemon.injection.KeepsCopies`."""
        held = self._held.get(worker)
        own = (
            [KeptCopy(worker, "memory", seal, path) for path, seal, _ in held.sealed()]
            if held is not None
            else []
        )
        theirs = [copy for copy in self._server.holding() if _holding(copy.piece).worker == worker]
        return own + [KeptCopy(worker, "peer", copy.seal, copy.place.path) for copy in theirs]

    def owes(self, worker: str, step: int) -> bool:
        """See there."""
        here = [copy.seal for copy in newest(self.kept(worker))]
        held = self._held.get(worker)
        if held is not None and held.sender is not None:
            sent = held.sender.acknowledged
            here += [sent.get(partner.node, Seal(-1, -1, 0, "")) for partner in held.partners]
        belongs = held is not None or self._node in self._placement.get(worker, ())
        return belongs and (not here or any(seal.step != step for seal in here))

    def lose(self, copies: list[KeptCopy]) -> None:
        """See there."""
        for copy in [one for one in copies if one.tier == "memory"]:
            spoil(copy)
        workers = {copy.worker for copy in copies if copy.tier == "peer"}
        for name in {copy.piece for copy in self._server.holding()}:
            if _holding(name).worker in workers:
                self._server.drop(name, "a fault has it dropped")

    # -- what outlives a worker -----------------------------------------------------------------------------------

    def _ended(self, worker: str) -> None:
        board, held = self._boards.pop(worker, None), self._held.get(worker)
        if board is not None:
            os.close(board.bell)
        if held is not None and held.board is not None:
            held.board = None
            held.stop_sending()
            if not held.copies():
                self._forget(worker)

    def _forget(self, worker: str) -> None:
        self._held.pop(worker).close()

    def _forget_older(self, step: int) -> None:
        for worker, held in list(self._held.items()):
            if held.board is None and all(seal.step + 1 < step for seal, _ in held.copies()):
                self._forget(worker)

    def _committed(self) -> int:
        """Steps that live workers of this node have committed, whether there is a copy or not."""
        return max((board.step for board in self._boards.values()), default=0)

    def _recall(self, number: int) -> None:
        raise_priority()  # a recovery waits for this
        self._quarantine()
        found = [
            (held.holding, seal, view, "memory")
            for held in self._held.values()
            for seal, view in held.copies()
        ]
        for copy in self._server.holding():
            with contextlib.suppress(OSError):
                found.append(
                    (_holding(copy.piece), copy.seal, ArenaView.open(copy.place.path), "peer")
                )
        self._offers.withdraw([])
        snapshots: list[Snapshot] = []
        with contextlib.suppress(
            OSError
        ):  # no descriptor or port for a server: others may have copies
            for part, seal, view, tier in found:
                offer = self._offers.offer(
                    part.worker, seal, view, tier=tier, piece=part.piece, pieces=part.pieces
                )
                snapshots.append(offer)
        for offered in snapshots:
            self._journal.write(
                Event.SEALED,
                worker=offered.worker,
                step=offered.step,
                generation=offered.generation,
                checksum=offered.checksum,
                piece=offered.piece,
                tier=offered.tier,
            )
        self._archive.answer(
            Sealed(self._node, tuple(snapshots), number, self._committed()), self._tell
        )
        lower_priority(self._niceness)

    def _quarantine(self) -> None:
        """Copies whose seal was changed are not offered: say so."""
        own = [("memory", path) for held in self._held.values() for path in held.paths]
        for tier, path in [*own, *(("peer", path) for path in self._server.paths)]:
            view = ArenaView.open(path)
            if view.is_damaged:
                source, detail = f"{tier} of {self._node}", "its seal was changed"
                self._journal.write(
                    Event.QUARANTINED, generation=0, step=view.step, source=source, detail=detail
                )
            view.close()


def _name(holding: Holding) -> str:
    """Of a piece at a partner: whose it is, and which part of what."""
    return f"{holding.piece}/{holding.pieces}/{holding.worker}"


def _holding(name: str) -> Holding:
    piece, pieces, worker = name.split("/", 2)
    return Holding(worker, 0, (), int(piece), int(pieces))


def _budget_bytes() -> int:
    return int(_BUDGET_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
