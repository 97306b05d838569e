"""The copies that a node keeps for others: received, verified, and only then acknowledged.

Each piece has two slots here, under the rule of :class:`Slots`: a copy that is being received replaces none that may
be needed. Memory is bounded: beyond the budget, pieces that no restore can use go first; then new ones are declined.
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
    Copy,
    Declined,
    Go,
    Holding,
    Offer,
    PeerAddress,
    SlotPlace,
    Stored,
)
from chaoskit.errors import ChaoskitError, Refused
from chaoskit.process.linux import host_id, lower_priority, set_name
from chaoskit.wire import frames
from chaoskit.wire.handshakes import proven

_NICENESS = 10

#: Moments that ``probe`` is told of: within a copy that is received, before it is complete, before the answer.
RECEIVING, VERIFIED, ANSWERING = "receiving", "verified", "answering"


class Full(ChaoskitError):
    """The budget does not allow this copy."""


class CopyServer:
    """Keeps copies of pieces of other nodes, for the keeper of its node to offer.

    Args:
        host: where to listen; also what others are told.
        budget_bytes: of memory, for all slots together; a piece takes twice its size.
        port: 0 for one that is free.
        listener: listens already, at ``host``; then ``port`` means nothing.
        dropped: told piece and reason when a copy is dropped or declined; on a thread of the server.
        made: told the descriptor of each socket; ``unmade`` before it is closed.
        probe: told the moments named above, for tests that end the process there.

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
        dropped: Callable[[str, str], None] = lambda piece, reason: None,
        made: Callable[[int], None] = lambda fd: None,
        unmade: Callable[[int], None] = lambda fd: None,
        niceness: int = _NICENESS,
        probe: Callable[[str], None] = lambda moment: None,
    ) -> None:
        self._token, self._budget_bytes, self._niceness = token, budget_bytes, niceness
        self._tell_dropped, self._made, self._unmade, self._probe = dropped, made, unmade, probe
        self._pieces: dict[str, Slots] = {}
        self._arriving: dict[str, int] = {}  # steps of copies that are on their way here
        self._lock = threading.Lock()
        self._connections: dict[
            socket.socket, set[str]
        ] = {}  # with the pieces that were offered there
        self._closed = False
        self._listener = listener or socket.create_server((host, port))
        made(self._listener.fileno())
        self.address = PeerAddress(node, host_id(), host, self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="copy-server", daemon=True).start()

    @property
    def size_bytes(self) -> int:
        """Memory that the copies take."""
        with self._lock:
            return sum(slots.size_bytes for slots in self._pieces.values())

    @property
    def paths(self) -> list[str]:
        """Where processes of this host can open the slots, whatever is in them."""
        with self._lock:
            return [path for slots in self._pieces.values() for path in slots.paths]

    def holding(self, piece: str = "") -> tuple[Copy, ...]:
        """Complete copies of ``piece``, or of all, the newest of each first."""
        with self._lock:
            wanted = {name: slots for name, slots in self._pieces.items() if piece in ("", name)}
        here = host_id()
        return tuple(
            Copy(name, seal, SlotPlace.at(path, here))
            for name, slots in sorted(wanted.items())
            for path, seal in slots.complete()
        )

    def drop(self, piece: str, reason: str = "it is kept elsewhere now") -> None:
        """Give up the copies of ``piece``. Whoever has brought them hears of it, and may bring newer ones."""
        with self._lock:
            found = self._pieces.pop(piece, None)
        if found is not None:
            self._hang_up(piece)
            self._tell_dropped(piece, reason)

    def _hang_up(self, piece: str) -> None:
        """What was acknowledged of ``piece`` is not here any more: its owner must not count on it."""
        with self._lock:
            for connection, offered in self._connections.items():
                if piece in offered:
                    _shut(connection)

    def close(self) -> None:
        """Answer nobody any more. Copies go with their last reader."""
        self._unmade(self._listener.fileno())
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        with self._lock:
            self._closed = True
            connections = list(self._connections)
            self._pieces.clear()
        for connection in connections:
            _shut(connection)

    # -- connections -----------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        set_name("ck-copies")
        for connection in proven(self._listener, self._token, made=self._made, unmade=self._unmade):
            threading.Thread(
                target=self._serve, args=(connection,), name="copies", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        set_name("ck-copies")
        with connection, self._known(connection):
            try:
                while True:
                    connection.settimeout(None)  # an owner may have nothing to send for long
                    message = protocol.receive(connection)
                    connection.settimeout(protocol.SILENT_S)
                    self._answer(connection, message)
            except (OSError, ChaoskitError):
                return  # the peer went away, or is not one of ours

    @contextmanager
    def _known(self, connection: socket.socket) -> Iterator[None]:
        with self._lock:
            self._connections[connection] = set()
            if self._closed:  # accepted before the end
                _shut(connection)
        try:
            yield
        finally:
            with self._lock:
                del self._connections[connection]
            self._unmade(connection.fileno())

    def _answer(self, connection: socket.socket, message: protocol.Message) -> None:
        match message:
            case Offer():
                lower_priority(self._niceness)
                with self._lock:
                    self._connections[connection].add(message.piece)
                answer = self._take(connection, message)
                self._probe(ANSWERING)
                protocol.send(connection, answer)
            case Ask(piece):
                protocol.send(connection, Holding(self.holding(piece)))
            case _:
                raise Refused(f"{type(message).__name__} is not for a server")

    # -- receiving -------------------------------------------------------------------------------------------------

    def _take(self, connection: socket.socket, offer: Offer) -> Stored | Declined:
        """Store what is offered. Afterwards the stream is at the next message, or broken."""
        try:
            return self._store(connection, offer)
        finally:
            with self._lock:
                self._arriving.pop(offer.piece, None)

    def _store(self, connection: socket.socket, offer: Offer) -> Stored | Declined:
        shared = offer.place is not None and offer.place.host_id == host_id()
        try:
            slots = self._room_for(offer)
            image = slots.take(offer.protected)
        except (Busy, Full, OSError, MemoryError) as error:
            reason = str(error) or type(error).__name__
            self._tell_dropped(offer.piece, reason)
            return Declined(reason)
        try:
            if shared and offer.place is not None:
                self._read(offer, offer.place, image)
            else:
                self._receive(connection, offer, image)
        except (Damaged, Torn) as error:
            image.spoil()
            self._tell_dropped(offer.piece, str(error))
            return Declined(str(error))
        finally:
            slots.give_back(image)
        return Stored(offer.seal)

    def _read(self, offer: Offer, place: SlotPlace, image: ArenaImage) -> None:
        """From shared memory. Raises Torn if the owner is gone, Damaged if it is not what was offered."""
        try:
            with StoredCopy(place.path) as copy:
                if copy.seal != offer.seal:
                    raise Torn(f"step {offer.seal.step} was overwritten before it was read")
                self._fill(offer, image, copy.index, copy.scalars, copy.read_bytes)
        except OSError as error:
            raise Torn(f"the slot of its owner is gone: {error}") from None

    def _receive(self, connection: socket.socket, offer: Offer, image: ArenaImage) -> None:
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
        """The slots of the piece, large enough. Raises Full if the budget is spent, OSError if memory is."""
        size_bytes = offer.seal.size_bytes
        with self._lock:
            slots = self._pieces.get(offer.piece)
            if slots is not None and slots.capacity_bytes >= size_bytes:
                self._arriving[offer.piece] = offer.seal.step
                return slots
            slots = slots or Slots()
            dropped = self._make_room(offer, 2 * size_bytes)
            slots.reserve(size_bytes)
            self._pieces[offer.piece] = slots
            self._arriving[offer.piece] = offer.seal.step
        for piece, reason in dropped:
            self._hang_up(piece)
            self._tell_dropped(piece, reason)
        return slots

    def _make_room(self, offer: Offer, needed_bytes: int) -> list[tuple[str, str]]:
        """Drop pieces that fell behind, the oldest first, until there is room.

        What is older than the protected step serves no restore. Where that is unknown, owners are taken to be at most
        one step apart. Nothing else is dropped: pieces that are needed would only take turns.
        """
        others = {name: slots for name, slots in self._pieces.items() if name != offer.piece}
        used_bytes = sum(slots.size_bytes for slots in others.values())
        useful_from = offer.protected if offer.protected >= 0 else offer.seal.step - 1
        steps = {
            name: max([self._arriving.get(name, -1), *(seal.step for _, seal in slots.complete())])
            for name, slots in others.items()
        }
        dropped = []
        for step, name in sorted(
            (step, name) for name, step in steps.items() if step < useful_from
        ):
            if used_bytes + needed_bytes <= self._budget_bytes:
                break
            used_bytes -= self._pieces.pop(name).size_bytes
            dropped.append((name, f"step {step} fell behind, and {offer.piece} needs its memory"))
        if used_bytes + needed_bytes > self._budget_bytes:
            wanted = f"{needed_bytes} bytes for {offer.piece}"
            raise Full(
                f"{wanted} do not fit: {used_bytes} of the budget of {self._budget_bytes} are taken"
            )
        return dropped


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):  # the other side was faster
        connection.shutdown(socket.SHUT_RDWR)
