"""Copies that a node keeps for other nodes: received, verified, and only then acknowledged.

Each piece has two slots here, under the rules of :class:`Slots`: a copy that is being received
never replaces one that may be needed. Memory is bounded: beyond the budget, pieces that no restore
can use are dropped first; then new ones are declined.

-> ``peer/sender.py``: the owner of a piece, which sends it again after a drop.
-> ``daemon/piece_keeper.py``: offers the copies after a loss. ``runtime/state/peer.py``: sends
them to the ranks that restore.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from chaoskit.checkpoint.layout.arena import ArenaImage
from chaoskit.checkpoint.layout.manifest import Damaged
from chaoskit.checkpoint.layout.seal import Checksum, Torn
from chaoskit.checkpoint.memory.copying import CHUNK_BYTES
from chaoskit.checkpoint.memory.slots import Busy, Slots
from chaoskit.checkpoint.memory.stored import StoredCopy, compare
from chaoskit.checkpoint.peer import protocol
from chaoskit.checkpoint.peer.protocol import (
    Ask,
    Declined,
    Go,
    Offer,
    PeerAddress,
    PeerCopy,
    PeerHolding,
    PeerStored,
    SlotPlace,
)
from chaoskit.errors import ChaoskitError, Refused
from chaoskit.process.linux import host_id, lower_priority, set_name
from chaoskit.wire import frames
from chaoskit.wire.handshakes import proven

_NICENESS = 10

#: Moments at which ``probe`` is called: within a copy that is received, before it is complete,
#: before the answer.
RECEIVING, VERIFIED, ANSWERING = "receiving", "verified", "answering"


class PeerMemoryFull(ChaoskitError):
    """There is no room for a copy within the memory budget of the server."""


class CopyServer:
    """A server that keeps copies of pieces of other nodes, for the keeper of its node to offer.

    It starts to listen and serve when it is made.

    Args:
        node: name of this node.
        host: address to listen at, and for the other nodes to connect to.
        token: secret that authenticates connections.
        budget_bytes: memory for all slots together; a piece takes twice its size.
        port: port to listen at; 0 for a free one.
        listener: a socket that listens already, at ``host``; ``port`` is then ignored.
        on_dropped: called with piece and reason when a copy is dropped or declined, on a server
            thread or that of a caller of :meth:`drop`.
        made: called with the descriptor of each socket.
        unmade: called with the descriptor before the socket is closed.
        niceness: niceness of the threads that receive.
        probe: called with :data:`RECEIVING`, :data:`VERIFIED` and :data:`ANSWERING` at these
            moments, for tests that end the process there.

    Attributes:
        address: address to be given to the owners of pieces.

    Raises:
        OSError: if it cannot listen there.
    """

    def __init__(
        self,
        node: str,
        host: str,
        token: str,
        budget_bytes: int,
        *,
        port: int = 0,
        listener: socket.socket | None = None,
        on_dropped: Callable[[str, str], None] = lambda piece, reason: None,
        made: Callable[[int], None] = lambda fd: None,
        unmade: Callable[[int], None] = lambda fd: None,
        niceness: int = _NICENESS,
        probe: Callable[[str], None] = lambda moment: None,
    ) -> None:
        self._token, self._budget_bytes, self._niceness = token, budget_bytes, niceness
        self._report_dropped, self._made, self._unmade, self._probe = (
            on_dropped,
            made,
            unmade,
            probe,
        )
        self._pieces: dict[str, Slots] = {}
        # by piece: steps of copies that are being received
        self._arriving_steps: dict[str, int] = {}
        self._lock = threading.Lock()
        # connections with the pieces that were offered on them
        self._connections: dict[socket.socket, set[str]] = {}
        self._closed = False
        self._listener = listener or socket.create_server((host, port))
        made(self._listener.fileno())
        self.address = PeerAddress(node, host_id(), host, self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="copy-server", daemon=True).start()

    @property
    def size_bytes(self) -> int:
        """The memory of all slots in bytes, whether or not a copy is in them."""
        with self._lock:
            return sum(slots.size_bytes for slots in self._pieces.values())

    @property
    def paths(self) -> list[str]:
        """The paths at which processes of this host can open the slots, complete or not."""
        with self._lock:
            return [path for slots in self._pieces.values() for path in slots.paths]

    def holding(self, piece: str = "") -> tuple[PeerCopy, ...]:
        """Return the complete copies of ``piece``, or of all pieces, the newest of each first."""
        with self._lock:
            pieces = {name: slots for name, slots in self._pieces.items() if piece in ("", name)}
        here = host_id()
        return tuple(
            PeerCopy(name, seal, SlotPlace.at(path, here))
            for name, slots in sorted(pieces.items())
            for path, seal in slots.complete()
        )

    def drop(self, piece: str, reason: str = "other nodes keep it now") -> None:
        """Drop the copies of ``piece`` and report it. Does nothing if there are none.

        The owner of the piece is disconnected, and may send newer copies.
        """
        with self._lock:
            slots = self._pieces.pop(piece, None)
        if slots is not None:
            self._disconnect_owners(piece)
            self._report_dropped(piece, reason)

    def _disconnect_owners(self, piece: str) -> None:
        """Disconnect the owners of ``piece``, whose acknowledged copies are dropped."""
        with self._lock:
            for connection, offered in self._connections.items():
                if piece in offered:
                    _shut_down(connection)

    def close(self) -> None:
        """Stop serving. The memory of a copy is freed with its last reader."""
        self._unmade(self._listener.fileno())
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        with self._lock:
            self._closed = True
            connections = list(self._connections)
            self._pieces.clear()
        for connection in connections:
            _shut_down(connection)

    # -- connections -------------------------------------------------------------------------------

    def _accept(self) -> None:
        """Start a thread for each authenticated connection, until the listener is closed.

        A client that does not know the token is disconnected.
        """
        set_name("ck-copies")
        for connection in proven(self._listener, self._token, made=self._made, unmade=self._unmade):
            threading.Thread(
                target=self._serve, args=(connection,), name="copies", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer the messages of one connection until it ends."""
        set_name("ck-copies")
        with connection, self._registered(connection):
            try:
                while True:
                    connection.settimeout(None)  # an owner may have nothing to send for long
                    message = protocol.receive(connection)
                    connection.settimeout(protocol.SILENT_S)
                    self._answer(connection, message)
            except (OSError, ChaoskitError):
                return  # the peer is gone, or broke the protocol

    @contextmanager
    def _registered(self, connection: socket.socket) -> Iterator[None]:
        """Register the connection for the time of a with statement, so that it can be shut down."""
        with self._lock:
            self._connections[connection] = set()
            if self._closed:  # accepted before the end
                _shut_down(connection)
        try:
            yield
        finally:
            with self._lock:
                del self._connections[connection]
            self._unmade(connection.fileno())

    def _answer(self, connection: socket.socket, message: protocol.Message) -> None:
        """Answer one message. Raise Refused for a message that a server does not accept."""
        match message:
            case Offer():
                lower_priority(self._niceness)
                with self._lock:
                    self._connections[connection].add(message.piece)
                answer = self._handle_offer(connection, message)
                self._probe(ANSWERING)
                protocol.send(connection, answer)
            case Ask(piece):
                protocol.send(connection, PeerHolding(self.holding(piece)))
            case _:
                raise Refused(f"a copy server does not accept {type(message).__name__}")

    # -- receiving ---------------------------------------------------------------------------------

    def _handle_offer(self, connection: socket.socket, offer: Offer) -> PeerStored | Declined:
        """Store an offered copy, and return the answer to its owner.

        Afterwards the stream is at the next message, or broken. Raise OSError if it broke before
        the copy was complete.
        """
        try:
            return self._store(connection, offer)
        finally:
            with self._lock:
                self._arriving_steps.pop(offer.piece, None)

    def _store(self, connection: socket.socket, offer: Offer) -> PeerStored | Declined:
        """Take a slot, fill it with the offered copy, and return the answer.

        A copy that is not stored is declined, and reported as dropped.
        """
        try:
            slots = self._room_for(offer)
            image = slots.take(offer.protected)
        except (Busy, PeerMemoryFull, OSError, MemoryError) as error:
            reason = str(error) or type(error).__name__
            self._report_dropped(offer.piece, reason)
            return Declined(reason)
        try:
            place = offer.place
            if place is not None and place.host_id == host_id():
                self._read_slot(offer, place, image)
            else:
                self._receive(connection, offer, image)
        except (Damaged, Torn) as error:
            image.invalidate()
            self._report_dropped(offer.piece, str(error))
            return Declined(str(error))
        finally:
            slots.give_back(image)
        return PeerStored(offer.seal)

    def _read_slot(self, offer: Offer, place: SlotPlace, image: ArenaImage) -> None:
        """Fill a slot from shared memory.

        Raises:
            Torn: if the owner is gone or has overwritten the slot.
            Damaged: if the data does not match the seal.
        """
        try:
            with StoredCopy(place.path) as copy:
                if copy.seal != offer.seal:
                    raise Torn(f"step {offer.seal.step} was overwritten before it was read")
                self._fill(offer, image, copy.index, copy.scalars, copy.read_bytes)
        except OSError as error:
            raise Torn(f"the owner's slot cannot be opened: {error}") from None

    def _receive(self, connection: socket.socket, offer: Offer, image: ArenaImage) -> None:
        """Request the copy, and fill a slot from the connection.

        Raises:
            Damaged: if the data does not match the seal.
            OSError: if the connection fails.
        """
        protocol.send(connection, Go())
        index = frames.receive_exactly(connection, offer.index_bytes)
        scalars = frames.receive_exactly(connection, offer.scalars_bytes)
        self._fill(
            offer, image, index, scalars, lambda part, _: protocol.receive_into(connection, [part])
        )

    def _fill(
        self,
        offer: Offer,
        image: ArenaImage,
        index: bytes,
        scalars: bytes,
        read: Callable[[memoryview, int], None],
    ) -> None:
        """Fill a slot by means of ``read``, and seal it.

        Raise Damaged if the checksum is wrong.

        Args:
            read: fills a part of the data, from the given offset on.
        """
        seal = offer.seal
        image.begin(seal.step, seal.generation, index, scalars, seal.size_bytes)
        digest, data = Checksum(seal.step, index, scalars), image.data()
        for start in range(0, seal.size_bytes, CHUNK_BYTES):
            part = data[start : start + CHUNK_BYTES]
            read(part, start)
            digest.update(part)
            self._probe(RECEIVING)
        compare(seal, digest)
        self._probe(VERIFIED)
        image.end(seal.checksum)

    def _room_for(self, offer: Offer) -> Slots:
        """Return slots for the piece that are large enough, and note the step that arrives.

        Other pieces are dropped if that makes enough room. Their owners are disconnected, and each
        drop is reported.

        Raises:
            PeerMemoryFull: if the budget is spent.
            OSError: if the memory of the host is.
        """
        size_bytes = offer.seal.size_bytes
        dropped: list[tuple[str, str]] = []
        try:
            with self._lock:
                slots = self._pieces.get(offer.piece)
                if slots is not None and slots.capacity_bytes >= size_bytes:
                    self._arriving_steps[offer.piece] = offer.seal.step
                    return slots
                slots = slots or Slots()
                dropped = self._make_room(offer, 2 * size_bytes)
                slots.reserve(size_bytes)
                self._pieces[offer.piece] = slots
                self._arriving_steps[offer.piece] = offer.seal.step
        finally:  # also if the memory of the host is full: owners must not count on dropped pieces
            for piece, reason in dropped:
                self._disconnect_owners(piece)
                self._report_dropped(piece, reason)
        return slots

    def _make_room(self, offer: Offer, needed_bytes: int) -> list[tuple[str, str]]:
        """Drop pieces that fell behind, the oldest first, until there is room.

        Return their names with reasons. Raise PeerMemoryFull if that makes too little room; no
        piece is dropped then.

        Copies older than the protected step serve no restore. If that step is unknown, owners are
        assumed to be at most one step apart. Other pieces are not dropped, because needed pieces
        would only displace each other.
        """
        others = {name: slots for name, slots in self._pieces.items() if name != offer.piece}
        used_bytes = sum(slots.size_bytes for slots in others.values())
        protected_step = offer.protected  # -1 if unknown
        oldest_useful_step = protected_step if protected_step >= 0 else offer.seal.step - 1
        newest_steps = {
            name: max(
                [self._arriving_steps.get(name, -1), *(seal.step for _, seal in slots.complete())]
            )
            for name, slots in others.items()
        }
        to_drop: list[tuple[int, str]] = []
        for step, name in sorted(
            (step, name) for name, step in newest_steps.items() if step < oldest_useful_step
        ):
            if used_bytes + needed_bytes <= self._budget_bytes:
                break
            used_bytes -= others[name].size_bytes
            to_drop.append((step, name))
        if used_bytes + needed_bytes > self._budget_bytes:
            raise PeerMemoryFull(
                f"{needed_bytes} bytes for {offer.piece} do not fit: "
                f"other pieces take {used_bytes} bytes of {self._budget_bytes}"
            )
        for _, name in to_drop:
            del self._pieces[name]
        return [
            (name, f"step {step} fell behind, and {offer.piece} needs its memory")
            for step, name in to_drop
        ]


def _shut_down(connection: socket.socket) -> None:
    """End a connection, which wakes the thread that serves it. The socket stays open."""
    with suppress(OSError):  # the other end has closed it already
        connection.shutdown(socket.SHUT_RDWR)
