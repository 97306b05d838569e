"""Keeper of a node in a sharded job: pieces of its own workers, and copies of other nodes' pieces.

A worker copies each committed state of its piece into slots of memory. The keeper has them open,
too, so they outlive the worker. Each copy is then sent to partner nodes, which
:mod:`chaoskit.checkpoint.peer.copy_placement` chooses, so that it outlives the node. Nothing is offered
until the coordinator asks, which it does when a rank was lost, because no other rank has its piece.

-> ``runtime/state/copies.py``: the worker's end. ``checkpoint/peer/server.py``: copies of others.
-> ``coordinator/membership/copy_search.py``: chooses among the offered copies.
-> ``runtime/state/pieces.py``: a rank reads them back.
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
from chaoskit.checkpoint.peer.copy_placement import Node, Piece, Placement, place
from chaoskit.checkpoint.peer.protocol import PeerAddress
from chaoskit.checkpoint.peer.sender import CopySender
from chaoskit.checkpoint.peer.server import CopyServer
from chaoskit.daemon.copy_faults import KeptCopy, newest, unseal
from chaoskit.daemon.keeper_base import NodeContext, NodeKeeper
from chaoskit.daemon.saving import Saver
from chaoskit.process.linux import lower_priority, raise_priority
from chaoskit.process.progress_board import Board
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import Endpoint, Holding, OfferedSnapshot, Plan, Sealed

#: Niceness of threads that send and receive copies: as urgent as training, which loses the steps
#: they are behind.
_NICENESS = 0
_BUDGET_FRACTION = 0.25  # share of the node's memory for copies of other nodes


@dataclass(slots=True)
class _HeldPiece:
    """The slots of one worker, through descriptors of this process.

    Attributes:
        holding: name of the worker, and number of its piece.
        fds: descriptors of the slots, which this process owns.
        partners: copy servers of the nodes that get copies.
        sender: sends the copies; None without partners.
    """

    holding: Holding
    fds: tuple[int, ...]
    board: Board | None  # None if the worker has ended
    partners: tuple[PeerAddress, ...] = ()
    sender: CopySender | None = None
    protected: bool = False  # all copies exist in this generation, as the journal has it

    @property
    def paths(self) -> list[str]:
        """The paths of the slots."""
        return [f"/proc/{os.getpid()}/fd/{fd}" for fd in self.fds]

    def copies(self) -> list[tuple[Seal, ArenaView]]:
        """Return seal and view of the complete copies in the slots."""
        return [(seal, view) for _, seal, view in self.sealed()]

    def sealed(self) -> list[tuple[str, Seal, ArenaView]]:
        """Return path, seal and view of the complete copies in the slots."""
        views = [(path, ArenaView.open(path)) for path in self.paths]
        return [
            (path, Seal(view.step, view.generation, view.size_bytes, checksum), view)
            for path, view in views
            if (checksum := view.checksum)
        ]

    def stop_sending(self) -> None:
        """Stop sending copies to partners. The partners keep what they have."""
        if self.sender is not None:
            self.sender.close()
            self.sender = None

    def close(self) -> None:
        """Close the slots, whose memory is then freed."""
        self.stop_sending()
        for fd in self.fds:
            os.close(fd)


class PieceKeeper(NodeKeeper):
    """The keeper of a sharded state: it holds, sends and offers pieces.

    Args:
        listener: socket at which partners connect to bring copies; None to listen at a free port.
    """

    def __init__(self, context: NodeContext, listener: socket.socket | None = None) -> None:
        super().__init__(context, _NICENESS)
        self._token = context.token
        self._held: dict[str, _HeldPiece] = {}
        self._boards: dict[str, Board] = {}
        self._committed_step = 0  # newest step that a live worker of this node has committed
        self._placement: Placement = {}
        self._placed_before: Placement = {}  # placement in the last generation
        self._groups: tuple[tuple[int, ...], ...] = ()  # ranks that hold a whole state together
        self._addresses: dict[str, PeerAddress] = {}
        self._server = CopyServer(
            context.node,
            context.host,
            context.token,
            _budget_bytes(),
            listener=listener,
            on_dropped=self._dropped,
            niceness=_NICENESS,
            probe=self.breakpoints.reach,
        )
        # by worker: age of its last piece that was offered for storing
        self._offered_ages: dict[str, tuple[int, int]] = {}
        self._start()

    # -- orders ------------------------------------------------------------------------------------

    def adopt(self, worker: str, endpoint: Endpoint, board: Board) -> None:
        """Keep the board of a worker that is ready. Its slots follow when it has a piece."""
        self._orders.give(lambda: self._boards.update({worker: board}))

    def hold(self, holding: Holding) -> None:
        """Open the slots into which a worker copies its piece.

        Does nothing if the worker has ended already.
        """
        with contextlib.suppress(OSError):  # the worker has ended already
            fds = tuple(
                os.open(f"/proc/{holding.pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
                for fd in holding.fds
            )
            self._orders.give(lambda: self._hold(holding, fds))

    def went_on(self, step: int) -> None:
        """Queue the release of ended workers' pieces that are two steps behind ``step``, or more.

        Does nothing if the step is the one of the last call.
        """
        if step != self._committed_step:
            self._committed_step = step
            self._orders.give(lambda: self._forget_older(step))

    # -- the thread --------------------------------------------------------------------------------

    def _event_handlers(self) -> dict[int, Callable[[], None]]:
        """Return the handler of each live worker's event, which is set with each sealed copy."""
        held_by_board = [
            (held.board, held) for held in self._held.values() if held.board is not None
        ]
        return {board.bell: partial(self._sealed, held) for board, held in held_by_board}

    def _hold(self, holding: Holding, fds: tuple[int, ...]) -> None:
        """Take the slots of a worker, in place of its earlier ones, and start to send copies.

        The descriptors are closed if the worker has ended meanwhile.
        """
        board, before = self._boards.get(holding.worker), self._held.get(holding.worker)
        if board is None:  # the worker has ended meanwhile
            for fd in fds:
                os.close(fd)
            return
        if before is not None:
            before.close()
        held = self._held[holding.worker] = _HeldPiece(holding, fds, board)
        if holding.groups != self._groups:
            self._groups = holding.groups
            if self._plan is not None:
                self._place(self._plan)
        self._send(held)
        self._sealed(held)  # its event may have been set before it was waited for

    def _place(self, plan: Plan) -> None:
        """Set the partners of each piece, by the nodes of ``plan``.

        Parallel groups are those of the newest mesh, if it belongs to a world of this size.
        """
        nodes = sorted({member.node for member in plan.members})
        copies = min(self._config.memory_copies, len(nodes) - 1)
        if not copies:
            self._placement = {}
            return
        group = {rank: str(number) for number, ranks in enumerate(self._groups) for rank in ranks}
        mesh_fits = len(group) == len(plan.members)
        pieces = [
            Piece(member.worker, member.node, (group[member.rank],) if mesh_fits else ())
            for member in plan.members
        ]
        placement_nodes = [Node(node, self._config.rack(node)) for node in nodes]
        self._placement = place(placement_nodes, pieces, copies, self._placed_before)

    def _follow(self, plan: Plan) -> None:
        """Choose partners for the new generation, and send them copies.

        No step counts as protected until they have acknowledged a copy.
        """
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
            held.protected = False
            if held.board is not None:
                held.board.protect(-1)
            if held.sender is not None and plan.restore:
                held.sender.protect(plan.restore[0].step)
            self._send(held)
            self._acknowledged(held)

    def _is_current(self, seal: Seal) -> bool:
        """Return True if a copy belongs to the present course of training.

        Copies of steps that are repeated do not. Before the first plan no copy does.
        """
        plan = self._plan
        if plan is None:
            return False  # there are no partners yet
        if seal.generation >= plan.generation:
            return True
        return seal.step <= (plan.restore[0].step if plan.restore else 0)

    def _send(self, held: _HeldPiece) -> None:
        """Send copies of a live worker's piece to its present partners.

        Sending to former partners stops. An ended worker has no partners.
        """
        names = self._placement.get(held.holding.worker, ()) if held.board is not None else ()
        partners = tuple(self._addresses[name] for name in names)
        if held.sender is not None and partners == held.partners:
            held.sender.follow(held.paths)
            return
        held.stop_sending()
        held.partners = partners
        if partners:
            held.sender = CopySender(
                _piece_name(held.holding),
                held.paths,
                partners,
                self._token,
                transport=self._config.transport,
                is_current=self._is_current,
                on_acknowledged=lambda node, seal: self._orders.give(
                    lambda: self._acknowledged(held)
                ),
                on_lost=lambda node: self._orders.give(lambda: self._acknowledged(held)),
                on_failed=lambda node, reason: self._failed(held, node, reason),
                niceness=_NICENESS,
                probe=self.breakpoints.reach,
            )

    def _sealed(self, held: _HeldPiece) -> None:
        """Send a copy that a worker has completed, and store it if its step is due."""
        if held.sender is not None and held.board is not None:
            held.sender.protect(held.board.kept)
            held.sender.notify()
        else:
            self._acknowledged(held)
        if self._archive.saver is not None and held.board is not None:
            self._save(held, self._archive.saver)

    def _save(self, held: _HeldPiece, saver: Saver) -> None:
        """Offer each copy whose step is due to the saver, once.

        Only copies of the present generation and of its members are offered.
        """
        plan, holding = self._plan, held.holding
        if plan is None or plan.member(holding.worker) is None or held.board is None:
            return
        # return early if no due step can be in the slots
        if saver.due.earliest_after(held.board.step - 3) > held.board.step + 1:
            return
        for path, seal, _ in held.sealed():
            age = (seal.step, seal.generation)
            is_new = seal.generation == plan.generation and age > self._offered_ages.get(
                holding.worker, (-1, -1)
            )
            if not (is_new and saver.due.is_due(seal.step)):
                continue
            self._offered_ages[holding.worker] = age
            if not saver.wants(age):
                continue
            for portion in self._copy_piece(path, seal, holding, plan, seal.generation):
                saver.offer(portion)

    def _save_present(self, saver: Saver, step: int) -> None:
        """Offer the copies of ``step``, which is due by now, in the slots of all workers."""
        for held in list(self._held.values()):
            self._save(held, saver)

    def _copy_piece(
        self,
        path: str,
        seal: Seal,
        holding: Holding,
        plan: Plan,
        generation: int,
        *,
        last: bool = False,
    ) -> list[Portion]:
        """Return a copy of a piece as a portion, or [] if it cannot be read.

        The failure is then recorded in the journal.
        """
        try:
            boxes, scalars = copy_piece(path, (seal.step, seal.generation))
        except (Torn, Damaged, OSError) as error:
            self._record_failure(seal.step, error)
            return []
        member = plan.member(holding.worker)
        world, leads = len(plan.members), member is not None and not member.rank
        return [
            Portion(
                seal.step,
                generation,
                holding.piece,
                holding.pieces,
                world,
                leads,
                tuple(boxes),
                scalars,
                last,
            )
        ]

    def _last_portions(self) -> list[Portion]:
        """Return the pieces of the last state; see the base class."""
        plan, portions = self._plan, list[Portion]()
        for held in self._held.values():
            copies = held.sealed()
            if plan is None or plan.member(held.holding.worker) is None or not copies:
                continue
            path, seal, _ = max(copies, key=lambda copy: copy[1].recency)
            portions += self._copy_piece(path, seal, held.holding, plan, plan.generation, last=True)
        return portions

    def _acknowledged(self, held: _HeldPiece) -> None:
        """Set the protected step on the board of a piece's worker.

        Record it in the journal if the piece became protected or exposed.

        Called when a partner has verified or lost a copy. Without partners, called for each sealed
        copy.
        """
        # ignore late calls of a closed sender
        if held.board is None or self._held.get(held.holding.worker) is not held:
            return
        if held.sender is not None:
            steps = [
                seal.step for seal in held.sender.acknowledged.values() if self._is_current(seal)
            ]
            step = min(steps) if len(steps) == len(held.partners) else -1
        else:
            step = max(
                (seal.step for seal, _ in held.copies() if self._is_current(seal)), default=-1
            )
        if step >= 0 or held.protected:  # otherwise there were no copies before either
            held.board.protect(step)
        if held.protected != (step >= 0):
            held.protected = step >= 0
            holding, event = held.holding, Event.PROTECTED if held.protected else Event.EXPOSED
            nodes = [partner.node for partner in held.partners]
            self._journal.write(
                event, worker=holding.worker, step=step, piece=holding.piece, nodes=nodes
            )

    def _failed(self, held: _HeldPiece, node: str, reason: str) -> None:
        """Record in the journal that a copy could not be sent to a node."""
        self._journal.write(
            Event.COPY_FAILED, worker=held.holding.worker, step=-1, reason=f"to {node}: {reason}"
        )

    def _dropped(self, name: str, reason: str) -> None:
        """Record in the journal that a copy of another node was dropped or declined."""
        self._journal.write(Event.COPY_FAILED, worker=name, step=-1, reason=reason)

    # -- acts of faults on copies ------------------------------------------------------------------

    def kept_copies(self, worker: str) -> list[KeptCopy]:
        """Return all copies; see the base class."""
        held = self._held.get(worker)
        own = (
            [KeptCopy(worker, "memory", seal, path) for path, seal, _ in held.sealed()]
            if held is not None
            else []
        )
        peer_copies = [
            copy
            for copy in self._server.holding()
            if _parse_piece_name(copy.piece).worker == worker
        ]
        return own + [KeptCopy(worker, "peer", copy.seal, copy.place.path) for copy in peer_copies]

    def lacks_copy(self, worker: str, step: int) -> bool:
        """Return True unless the newest copies, here and at all partners, are of this step.

        Always False if this node is to keep no copy of the worker's piece.
        """
        seals = [copy.seal for copy in newest(self.kept_copies(worker))]
        held = self._held.get(worker)
        if held is not None and held.sender is not None:
            sent = held.sender.acknowledged
            seals += [sent.get(partner.node, Seal(-1, -1, 0, "")) for partner in held.partners]
        belongs = held is not None or self._node in self._placement.get(worker, ())
        return belongs and (not seals or any(seal.step != step for seal in seals))

    def drop_copies(self, copies: list[KeptCopy]) -> None:
        """Mark own copies as incomplete, and drop copies of pieces of other nodes' workers.

        Of each such worker among ``copies``, all copies are dropped.
        """
        for copy in [kept for kept in copies if kept.tier == "memory"]:
            unseal(copy)
        workers = {copy.worker for copy in copies if copy.tier == "peer"}
        for name in {copy.piece for copy in self._server.holding()}:
            if _parse_piece_name(name).worker in workers:
                self._server.drop(name, "a fault dropped it")

    # -- pieces that outlive workers ---------------------------------------------------------------

    def _ended(self, worker: str) -> None:
        """Keep the slots of an ended worker if they hold a complete copy, and stop sending it."""
        board, held = self._boards.pop(worker, None), self._held.get(worker)
        if board is not None:
            os.close(board.bell)
        if held is not None and held.board is not None:
            held.board = None
            held.stop_sending()
            if not held.copies():
                self._forget(worker)

    def _forget(self, worker: str) -> None:
        """Close the slots of a worker, whose memory is then freed."""
        self._held.pop(worker).close()

    def _forget_older(self, step: int) -> None:
        """Release the slots of ended workers whose copies are too old."""
        for worker, held in list(self._held.items()):
            if held.board is None and all(seal.step + 1 < step for seal, _ in held.copies()):
                self._forget(worker)

    def _committed(self) -> int:
        """Return the newest step that live workers have committed, with or without a copy."""
        return max((board.step for board in self._boards.values()), default=0)

    def _recall(self, number: int) -> None:
        """Serve all copies, own and of other nodes, and send the list to the coordinator.

        Copies whose seal was changed are left out, and recorded in the journal as quarantined.
        """
        raise_priority()  # a recovery waits for this
        self._record_damaged_copies()
        copies = [
            (held.holding, seal, view, "memory")
            for held in self._held.values()
            for seal, view in held.copies()
        ]
        for copy in self._server.holding():
            with contextlib.suppress(OSError):
                copies.append(
                    (
                        _parse_piece_name(copy.piece),
                        copy.seal,
                        ArenaView.open(copy.place.path),
                        "peer",
                    )
                )
        self._offers.withdraw([])
        snapshots: list[OfferedSnapshot] = []
        # without a descriptor or port for a server, other nodes may have copies
        with contextlib.suppress(OSError):
            for holding, seal, view, tier in copies:
                offer = self._offers.offer(
                    holding.worker,
                    seal,
                    view,
                    tier=tier,
                    piece=holding.piece,
                    pieces=holding.pieces,
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
            Sealed(self._node, tuple(snapshots), number, self._committed()), self._send_message
        )
        lower_priority(self._niceness)

    def _record_damaged_copies(self) -> None:
        """Record in the journal the copies whose seal was changed. They are not offered."""
        own = [("memory", path) for held in self._held.values() for path in held.paths]
        for tier, path in [*own, *(("peer", path) for path in self._server.paths)]:
            view = ArenaView.open(path)
            if view.is_damaged:
                source, detail = f"{tier} of {self._node}", "its seal was changed"
                self._journal.write(
                    Event.QUARANTINED, generation=0, step=view.step, source=source, detail=detail
                )
            view.close()


def _piece_name(holding: Holding) -> str:
    """Return the name of a piece at a partner: its number, the number of pieces, and its worker."""
    return f"{holding.piece}/{holding.pieces}/{holding.worker}"


def _parse_piece_name(name: str) -> Holding:
    """Return worker, number and number of pieces from a name of :func:`_piece_name`.

    The other fields are empty.
    """
    piece, pieces, worker = name.split("/", 2)
    return Holding(worker, 0, (), int(piece), int(pieces))


def _budget_bytes() -> int:
    """Return the memory for copies of other nodes, in bytes: a share of the node's memory."""
    return int(_BUDGET_FRACTION * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
