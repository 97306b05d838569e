"""Restoring from the copies that other nodes keep: through shared memory on the same host, by TCP else."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from chaoskit import wire
from chaoskit.checkpoint import peer_protocol as protocol
from chaoskit.checkpoint.arena import ArenaImage, decode_index
from chaoskit.checkpoint.held import HeldTensor, lay_out
from chaoskit.checkpoint.manifest import Damaged
from chaoskit.checkpoint.peer_protocol import (
    Ask,
    Copy,
    Declined,
    Fetch,
    Holding,
    NotHeld,
    Offer,
    PeerAddress,
    PeerLost,
)
from chaoskit.checkpoint.seal import Seal, Torn
from chaoskit.checkpoint.stored import StoredCopy, fill_all
from chaoskit.errors import ChaoskitError, Refused
from chaoskit.osprocess import host_id


@dataclass(frozen=True, slots=True)
class Fetched:
    """What came: the scalars of the copy, its seal, and by which way."""

    seal: Seal
    scalars: bytes
    transport: str


def copies_at(
    peer: PeerAddress, token: str, piece: str = "", *, made: Callable[[int], None] = lambda fd: None
) -> tuple[Copy, ...]:
    """What a peer has of ``piece``, or of all, the newest of each first.

    Raises:
        PeerLost: if it does not answer.
    """
    with _connected(peer, token, made, lambda fd: None) as connection:
        return _ask(connection, piece)


def fetch_into(
    peer: PeerAddress,
    token: str,
    piece: str,
    tensors: Sequence[HeldTensor],
    *,
    step: int = -1,
    transport: str = "auto",
    made: Callable[[int], None] = lambda fd: None,
    unmade: Callable[[int], None] = lambda fd: None,
) -> Fetched:
    """Fill ``tensors`` with the copy of ``piece`` that ``peer`` has, and verify it.

    Args:
        step: of which the copy must be; -1 for the newest.
        transport: ``auto`` (shared memory where the peer is on this host) or ``tcp``.
        made: told the descriptor of the socket, before it is connected; ``unmade`` before it is closed.

    Raises:
        NotHeld: if it has no such copy.
        Damaged: if the copy is not what was sealed; the tensors are then of no use.
        PeerLost: if the peer ends meanwhile. The same holds.
        ChaoskitError: if something of a tensor is not in the copy, or is of another type.
    """
    with _connected(peer, token, made, unmade) as connection:
        copy = next((copy for copy in _ask(connection, piece) if step in (-1, copy.seal.step)), None)
        if copy is None:
            raise NotHeld(f"{peer.node} has no copy of {piece}" + (f" of step {step}" if step >= 0 else ""))
        if transport == "auto" and copy.place.host_id == host_id():
            return _read(copy, tensors)
        return _receive(connection, copy, tensors)


@contextmanager
def _connected(
    peer: PeerAddress, token: str, made: Callable[[int], None], unmade: Callable[[int], None]
) -> Iterator[socket.socket]:
    try:
        with wire.connect((peer.host, peer.port), token, made=made) as connection:
            connection.settimeout(protocol.SILENT_S)
            try:
                yield connection
            finally:
                unmade(connection.fileno())
    except (OSError, Refused) as error:
        raise PeerLost(f"{peer.node} at {peer.host}:{peer.port}: {error}") from error


def _ask(connection: socket.socket, piece: str) -> tuple[Copy, ...]:
    protocol.send(connection, Ask(piece))
    answer = protocol.receive(connection)
    if not isinstance(answer, Holding):
        raise Refused(f"{type(answer).__name__} is no answer to that question")
    return answer.copies


def _read(copy: Copy, tensors: Sequence[HeldTensor]) -> Fetched:
    try:
        with StoredCopy(copy.place.path) as found:
            if found.seal != copy.seal:
                raise Torn("overwritten")
            return Fetched(found.seal, found.read_into(tensors), "shared memory")
    except Torn:
        raise NotHeld(f"step {copy.seal.step} of {copy.piece} was replaced by a newer one") from None


def _receive(connection: socket.socket, copy: Copy, tensors: Sequence[HeldTensor]) -> Fetched:
    protocol.send(connection, Fetch(copy.piece, copy.seal))
    offer = protocol.receive(connection)
    if isinstance(offer, Declined):
        raise NotHeld(offer.reason)
    if not isinstance(offer, Offer):
        raise Refused(f"{type(offer).__name__} is no answer to that question")
    index = wire.receive_exactly(connection, offer.index_bytes)
    scalars = wire.receive_exactly(connection, offer.scalars_bytes)
    try:
        slots = decode_index(index, offer.seal.size_bytes)
    except ChaoskitError as error:
        raise Damaged(str(error)) from None
    if slots == lay_out(tensors)[0]:
        fill_all(
            tensors, slots, offer.seal, index, scalars, lambda pieces, _: protocol.receive_into(connection, pieces)
        )
    else:
        _receive_whole(connection, offer.seal, index, scalars, tensors)
    return Fetched(offer.seal, scalars, "tcp")


def _receive_whole(
    connection: socket.socket, seal: Seal, index: bytes, scalars: bytes, tensors: Sequence[HeldTensor]
) -> None:
    """By way of a slot of our own: the tensors are cut in another way than the copy."""
    image = ArenaImage(seal.size_bytes)
    image.begin(seal.step, seal.generation, index, scalars, seal.size_bytes)
    protocol.receive_into(connection, [image.data()])
    image.end(seal.checksum)
    with StoredCopy(f"/proc/self/fd/{image.fd}") as copy:
        copy.read_into(tensors)
