"""State of a peer or of a sealed copy, read through shared memory on the same host, or else by TCP.

The peer goes on working; its training thread takes no part. Every copy is checked against the
peer's sequence number, and a copy that overlapped a commit is repeated. A state that is read from a
sealed copy must have the checksum of its seal.

-> step/restore.py: which copy a rank reads. state/from_store.py: a copy on a disk or in a store.
daemon/snapshot_server.py serves sealed copies. checkpoint/layout/arena.py: the shared memory.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from chaoskit.checkpoint.layout.arena import ArenaView
from chaoskit.checkpoint.layout.seal import CHUNK_BYTES, checksum
from chaoskit.errors import ChaoskitError, Refused
from chaoskit.process.linux import host_id, is_ending
from chaoskit.runtime.group.process_group import disown, reown
from chaoskit.runtime.state.replica import Replica
from chaoskit.wire import frames
from chaoskit.wire.handshakes import proven
from chaoskit.wire.messages import Endpoint

#: Called with the number of bytes of a state that have been read.
Probe = Callable[[int], None]

_SEQUENCE = struct.Struct("!q")
_RETRY_S = 0.001
_SILENT_S = 10.0  # limit for a peer that sends nothing, or writes all the time


class PeerLost(ChaoskitError):
    """The peer could not be read to the end. Another peer, or a newer plan, may help."""


class Corrupt(ChaoskitError):
    """The data that was read is not the data that was sealed.

    The replica is then incomplete and must read another copy.
    """


class NotComplete(ChaoskitError):
    """The error of a pull while the script of the peer may still write into the state of this step.

    The state can be read a little later.
    """


class _StateOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The header that a state server sends before the data of its state.

    Attributes:
        sequence: the sequence number before the data was read; sent again after the data.
        at_entry, complete, in_call: as in :class:`~chaoskit.runtime.state.replica.Replica`.
    """

    sequence: int
    step: int
    at_entry: bool
    complete: bool
    in_call: bool
    index: bytes
    scalars: bytes
    size_bytes: int


_offers = msgspec.msgpack.Decoder(_StateOffer)


@dataclass(frozen=True, slots=True)
class Pulled:
    """The result of a pull: step, size and transport of the state, and its checksum if sealed.

    Attributes:
        transport: ``shared memory``, ``tcp``, or the tier of a stored copy.
        checksum: that of the seal; "" for the state of a peer that trains.
        at_entry: on the peer, the state of a step is valid only once the next transaction is
            entered.
        complete: the peer had entered that transaction.
    """

    step: int
    size_bytes: int
    transport: str
    checksum: str = ""
    at_entry: bool = False
    complete: bool = True


class StateServer:
    """The server of a state, a replica's or a sealed copy's, to peers on other hosts.

    It listens on a free port, ``port``, from its creation on, in its own threads.

    Args:
        token: the secret that a peer must know.
        host: the address of this node, on which it listens.

    Raises:
        OSError: if the address is not one of this host.
    """

    def __init__(self, state: Replica | ArenaView, token: str, host: str) -> None:
        self._state, self._token = state, token
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        disown(self._listener.fileno())
        threading.Thread(target=self._accept, name="state-server", daemon=True).start()

    def _accept(self) -> None:
        for connection in proven(self._listener, self._token, made=disown, unmade=reown):
            threading.Thread(
                target=self._serve, args=(connection,), name="state-send", daemon=True
            ).start()

    def close(self) -> None:
        """Stop accepting connections. A transfer in progress is completed."""
        reown(self._listener.fileno())
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _serve(self, connection: socket.socket) -> None:
        """Send the state to one peer, and close the connection."""
        with connection:
            try:
                self._send_state(connection)
            except (OSError, Refused):
                return  # the peer went away, or does not know the token
            finally:
                reown(connection.fileno())

    def _send_state(self, connection: socket.socket) -> None:
        """Send the state, and the sequence number before and after it."""
        state, sequence = self._state, -1
        arena = state if isinstance(state, ArenaView) else state.arena
        while sequence != state.sequence:  # data that was read during a write is inconsistent
            sequence = _even_sequence(
                state, patience_s=0.0 if isinstance(state, ArenaView) else _SILENT_S
            )
            flags = state.at_entry, state.is_complete, state.in_call  # a state stays complete
            if arena is not None:
                step = arena.step
                index = arena.index_bytes()
                scalars = arena.scalars_bytes()
                data = arena.data()
            else:
                assert isinstance(state, Replica)
                step = state.step
                index, scalars, packed = state.pack()
                data = memoryview(packed)
        body = msgspec.msgpack.encode(
            _StateOffer(sequence, step, *flags, index, scalars, len(data))
        )
        connection.sendall(_SEQUENCE.pack(len(body)) + body)
        connection.sendall(data)
        connection.sendall(_SEQUENCE.pack(state.sequence))


def _even_sequence(
    state: ArenaView | Replica, pid: int | None = None, patience_s: float = _SILENT_S
) -> int:
    """Wait until no write is in progress, and return the sequence number, which is even.

    Raises:
        ConnectionError: if process ``pid`` ends.
        TimeoutError: if the write lasts longer than ``patience_s``.
    """
    deadline_s = time.monotonic() + patience_s
    while (sequence := state.sequence) % 2:
        if pid is not None and is_ending(pid):
            raise ConnectionError("the process ended while its state was being written")
        if time.monotonic() > deadline_s:
            raise TimeoutError(
                f"its state was still being written after {patience_s:g} s, "
                "or the process ended during a write"
            )
        time.sleep(_RETRY_S)
    return sequence


def pull(
    replica: Replica,
    peer: Endpoint,
    token: str,
    transport: str,
    seal_checksum: str = "",
    *,
    entering: int = -1,
    silent_s: float = _SILENT_S,
    probe: Probe = lambda done_bytes: None,
) -> Pulled:
    """Replace the state of ``replica`` by that of ``peer``, publish it, and return what was read.

    Args:
        transport: ``auto`` (shared memory if the peer is on this host, else TCP) or ``tcp``.
        seal_checksum: the checksum that the state must have; "" for that of a peer that trains.
        entering: this rank enters the transaction after this step; -1 for none. Only the complete
            state of that step will do. The state of another step is also taken from a peer that
            waits in a collective, as that peer may wait for this rank.
        silent_s: a peer that sends nothing for so long, or writes all the time, is lost.
        probe: called after each part of the data with the number of bytes read so far, for tests.

    Raises:
        PeerLost: if the peer cannot be reached, refuses the token, falls silent or ends meanwhile.
            A replica without a state is then incomplete and must pull again; a replica with a state
            keeps it.
        Corrupt: if the state has another checksum, or a sealed copy has an index that cannot be
            read, or that of another model. The replica is then as after PeerLost.
        NotComplete: if the script of the peer may still write into it. The replica keeps its state.
        BadInput: if the state of a peer that trains is that of another model or optimizer.
    """
    while True:
        try:
            if transport == "auto" and peer.arena_fd >= 0 and peer.host_id == host_id():
                pulled = _pull_shared(replica, peer, seal_checksum, entering, silent_s, probe)
            else:
                pulled = _pull_tcp(replica, peer, token, seal_checksum, entering, silent_s, probe)
        except (OSError, Refused) as error:
            raise PeerLost(
                f"peer at {peer.address}:{peer.port} (pid {peer.pid}): {error}"
            ) from error
        except ChaoskitError as error:
            # such as an index that cannot be read
            if seal_checksum and not isinstance(error, Corrupt):
                raise Corrupt(str(error)) from error
            raise
        if pulled is not None:
            return pulled


def fetch(peer: Endpoint, token: str) -> tuple[int, bytes, bytes, bytearray]:
    """Return step, index, scalars and data of the state that a peer serves, read by TCP.

    The caller must verify the data.

    Raises:
        PeerLost: if it cannot be read to the end, or the peer refuses the token.
    """
    try:
        with frames.connect((peer.address, peer.port), token, made=disown) as connection:
            connection.settimeout(_SILENT_S)
            try:
                (length,) = _SEQUENCE.unpack(frames.receive_exactly(connection, _SEQUENCE.size))
                offer = _read_offer(frames.receive_exactly(connection, length))
                data = bytearray(offer.size_bytes)
                _fill(memoryview(data), connection)
            finally:
                reown(connection.fileno())
    except (OSError, Refused) as error:
        raise PeerLost(f"peer at {peer.address}:{peer.port} (pid {peer.pid}): {error}") from error
    return offer.step, offer.index, offer.scalars, data


def _require_complete(step: int, complete: bool, in_call: bool, entering: int) -> None:
    """Raise NotComplete if the peer's script may still write into the state.

    Raise ConnectionError if the peer has no state, so that its step is -1.

    Args:
        complete: the peer's script has finished its writes into the state of this step.
        in_call: the peer waits in a collective, and writes nothing meanwhile.
        entering: the committed step after which this rank enters a transaction; -1 for none.
    """
    if step < 0:
        raise ConnectionError("the process has no state any more")
    if not complete and not (in_call and step != entering):
        raise NotComplete(f"the script of the peer may still write into the state of step {step}")


def _pull_shared(
    replica: Replica,
    peer: Endpoint,
    seal_checksum: str,
    entering: int,
    silent_s: float,
    probe: Probe,
) -> Pulled | None:
    """Pull through shared memory. Return None if the peer wrote meanwhile: call it again."""
    view = ArenaView.open(f"/proc/{peer.pid}/fd/{peer.arena_fd}")
    try:
        sequence = _even_sequence(view, peer.pid, 0.0 if seal_checksum else silent_s)
        index = view.index_bytes()
        scalars = view.scalars_bytes()
        step = view.step
        size_bytes = view.size_bytes
        at_entry, complete = view.at_entry, view.is_complete
        if not seal_checksum:
            _require_complete(step, complete, view.in_call, entering)
        if view.sequence != sequence:
            return None  # data that was read during a write is inconsistent
        reads_in_place = _has_no_state(replica)
        packed = bytearray(0 if reads_in_place else size_bytes)
        target = receive_into(replica, index, size_bytes) if reads_in_place else memoryview(packed)
        _read_all(view, target, probe)
        if view.sequence != sequence:
            return None
        digest = _verify(seal_checksum, step, index, scalars, target)
        if packed:
            receive_into(replica, index, size_bytes)[:] = packed
        replica.load_scalars(scalars, step)
        publish(replica, scalars)
        return Pulled(step, size_bytes, "shared memory", digest, at_entry, complete)
    finally:
        view.close()


def _has_no_state(replica: Replica) -> bool:
    """Return whether the replica has no trained state: it has committed no step, or gave up.

    A survivor must not lose its state to a peer that ends half-way.
    """
    return replica.step <= 0


def _read_all(view: ArenaView, target: memoryview, probe: Probe) -> None:
    """Fill ``target`` with the data of an arena, part by part, and call ``probe`` after each."""
    read_bytes = 0
    while read_bytes < len(target):
        read_bytes += view.read_into(target[read_bytes : read_bytes + CHUNK_BYTES], read_bytes)
        probe(read_bytes)


def _verify(seal_checksum: str, step: int, index: bytes, scalars: bytes, data: memoryview) -> str:
    """Return the checksum of the data, or "" if it is not sealed.

    Raise Corrupt if it differs from the seal.
    """
    digest = checksum(step, index, scalars, data) if seal_checksum else ""
    if digest != seal_checksum:
        raise Corrupt(f"checksum {digest}, sealed as {seal_checksum}")
    return digest


def _pull_tcp(
    replica: Replica,
    peer: Endpoint,
    token: str,
    seal_checksum: str,
    entering: int,
    silent_s: float,
    probe: Probe,
) -> Pulled | None:
    """Pull through a TCP connection. Return None if the peer wrote meanwhile: call it again."""
    with frames.connect((peer.address, peer.port), token, made=disown) as connection:
        connection.settimeout(silent_s)
        try:
            (length,) = _SEQUENCE.unpack(frames.receive_exactly(connection, _SEQUENCE.size))
            offer = _read_offer(frames.receive_exactly(connection, length))
            if not seal_checksum:
                _require_complete(offer.step, offer.complete, offer.in_call, entering)
            reads_in_place = replica.arena is not None and _has_no_state(replica)
            packed = bytearray(0 if reads_in_place else offer.size_bytes)
            target = (
                receive_into(replica, offer.index, offer.size_bytes)
                if reads_in_place
                else memoryview(packed)
            )
            _fill(target, connection, probe)
            (sequence,) = _SEQUENCE.unpack(frames.receive_exactly(connection, _SEQUENCE.size))
        finally:
            reown(connection.fileno())
    if sequence != offer.sequence:
        return None
    digest = _verify(seal_checksum, offer.step, offer.index, offer.scalars, target)
    if replica.arena is None:
        replica.begin_write()
        replica.unpack(offer.index, packed)
    elif packed:
        receive_into(replica, offer.index, offer.size_bytes)[:] = packed
    replica.load_scalars(offer.scalars, offer.step)
    publish(replica, offer.scalars)
    return Pulled(offer.step, offer.size_bytes, "tcp", digest, offer.at_entry, offer.complete)


def _read_offer(body: bytes) -> _StateOffer:
    """Return the decoded header. Raise Refused if it is not one."""
    try:
        return _offers.decode(body)
    except msgspec.MsgspecError as error:
        raise Refused(f"not the offer of a state: {error}") from None


def _fill(
    target: memoryview, connection: socket.socket, probe: Probe = lambda done_bytes: None
) -> None:
    """Fill ``target`` from a connection. Raise ConnectionError if the connection ends before."""
    received_bytes = 0
    while received_bytes < len(target):
        count = connection.recv_into(target[received_bytes : received_bytes + CHUNK_BYTES])
        if not count:
            raise ConnectionError("connection closed in the middle of the state")
        received_bytes += count
        probe(received_bytes)


def receive_into(replica: Replica, index: bytes, size_bytes: int) -> memoryview:
    """Return the memory of ``replica`` that receives the peer's data, laid out by ``index``.

    The replica has no state from here on: its step is -1. It is marked as being written, so that
    peers that read it retry.

    Args:
        index: the encoded slots of the peer's tensors, as in an arena.
        size_bytes: the size of the peer's data.

    Raises:
        BadInput: if the peer has another model or other optimizers.
        RuntimeError: if the replica is not in shared memory.
    """
    arena = replica.shared_arena
    replica.step = -1  # until all data has arrived
    if arena.sequence % 2 == 0:
        arena.begin_write()
    if not replica.layout_matches(index):
        replica.prepare_layout(index, size_bytes)
    return arena.data()


def publish(replica: Replica, scalars: bytes) -> None:
    """Publish a state that was taken over, and end the write: peers may read it."""
    if replica.arena is not None:
        replica.arena.publish([path for path, _ in replica.tensors()], scalars, replica.step)
    replica.end_write()
