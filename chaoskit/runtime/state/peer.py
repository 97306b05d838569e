"""State from a peer or a sealed copy: through shared memory on the same host, by an authenticated connection else.

The peer goes on working; its training thread takes no part. Every copy is checked against the peer's sequence number:
one that overlapped a commit is repeated. What is read from a sealed copy must have the checksum of its seal.
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

#: Told how many bytes of a state have been read.
Probe = Callable[[int], None]

_SEQUENCE = struct.Struct("!q")
_RETRY_S = 0.001
_SILENT_S = 10.0  # a peer that sends nothing for so long, or writes all the time, cannot be read


class PeerLost(ChaoskitError):
    """The peer could not be read to the end. Another one, or a newer plan, may help."""


class Corrupt(ChaoskitError):
    """What was read is not what was sealed. The replica is then incomplete and must read another copy."""


class NotComplete(ChaoskitError):
    """The script of the peer may still write into the state of this step. It can be read a little later."""


class _Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sequence: int
    step: int
    at_entry: bool
    complete: bool
    in_call: bool
    index: bytes
    scalars: bytes
    size_bytes: int


_offers = msgspec.msgpack.Decoder(_Offer)


@dataclass(frozen=True, slots=True)
class Pulled:
    """What was received: the step of the state, its size, by which way it came, and its checksum if it was sealed.

    Attributes:
        at_entry: the state of a step counts, for the peer, from the entry of the next transaction on.
        complete: the peer had entered that transaction.
    """

    step: int
    size_bytes: int
    transport: str
    checksum: str = ""
    at_entry: bool = False
    complete: bool = True


class StateServer:
    """Answers peers on other hosts from a thread of its own: with the state of a replica, or of a sealed copy."""

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
        """Answer nobody any more."""
        reown(self._listener.fileno())
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                self._send_state(connection)
            except (OSError, Refused):
                return  # the peer went away, or is not one of ours
            finally:
                reown(connection.fileno())

    def _send_state(self, connection: socket.socket) -> None:
        state, sequence = self._state, -1
        arena = state if isinstance(state, ArenaView) else state.arena
        while sequence != state.sequence:  # what was read during a write fits nothing
            sequence = _even_sequence(
                state, patience_s=0.0 if isinstance(state, ArenaView) else _SILENT_S
            )
            flags = (
                state.at_entry,
                state.is_complete,
                state.in_call,
            )  # before the data: what is complete stays so
            if arena is not None:
                step, index, scalars, data = (
                    arena.step,
                    arena.index_bytes(),
                    arena.scalars_bytes(),
                    arena.data(),
                )
            else:
                assert isinstance(state, Replica)
                step = state.step
                index, scalars, packed = state.pack()
                data = memoryview(packed)
        body = msgspec.msgpack.encode(_Offer(sequence, step, *flags, index, scalars, len(data)))
        connection.sendall(_SEQUENCE.pack(len(body)) + body)
        connection.sendall(data)
        connection.sendall(_SEQUENCE.pack(state.sequence))


def _even_sequence(
    state: ArenaView | Replica, pid: int | None = None, patience_s: float = _SILENT_S
) -> int:
    deadline_s = time.monotonic() + patience_s
    while (sequence := state.sequence) % 2:
        if pid is not None and is_ending(pid):
            raise ConnectionError("it ended while its state was written")
        if time.monotonic() > deadline_s:
            raise TimeoutError("it does not come to rest, or ended while it was written")
        time.sleep(_RETRY_S)
    return sequence


def pull(
    replica: Replica,
    peer: Endpoint,
    token: str,
    transport: str,
    sealed: str = "",
    *,
    entering: int = -1,
    silent_s: float = _SILENT_S,
    probe: Probe = lambda done_bytes: None,
) -> Pulled:
    """Replace the state of ``replica`` by that of ``peer``.

    Args:
        transport: ``auto`` (shared memory where the peer is on this host, else TCP) or ``tcp``.
        sealed: the checksum that the state must have; "" for that of a peer that trains.
        entering: the step whose next transaction this rank enters: only the complete state of it will do. Of another
            step the state is taken from a peer that waits in a collective, too, as that may wait for this rank.
        silent_s: a peer that sends nothing for so long, or writes all the time, is lost.
        probe: told after each part of the data how many bytes are there, for tests that let the peer go on there.

    Raises:
        PeerLost: if the peer ended meanwhile. A replica that had no state is then incomplete and must pull again; one
            that had keeps it.
        Corrupt: if the state has another checksum. The same holds.
        NotComplete: if the script of the peer may still write into it. The replica keeps what it has.
    """
    while True:
        try:
            if transport == "auto" and peer.arena_fd >= 0 and peer.host_id == host_id():
                pulled = _pull_shared(replica, peer, sealed, entering, silent_s, probe)
            else:
                pulled = _pull_tcp(replica, peer, token, sealed, entering, silent_s, probe)
        except (OSError, Refused) as error:
            raise PeerLost(
                f"peer at {peer.address}:{peer.port} (pid {peer.pid}): {error}"
            ) from error
        except ChaoskitError as error:
            if sealed and not isinstance(error, Corrupt):  # not even its index can be read
                raise Corrupt(str(error)) from error
            raise
        if pulled is not None:
            return pulled


def fetch(peer: Endpoint, token: str) -> tuple[int, bytes, bytes, bytearray]:
    """Step, index, scalars and data of what a peer serves, by TCP; to be verified by the caller.

    Raises:
        PeerLost: if it cannot be read to the end.
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
    if step < 0:
        raise ConnectionError("it has no state any more")
    if not complete and not (in_call and step != entering):
        raise NotComplete(f"the script of the peer is not done with the state of step {step}")


def _pull_shared(
    replica: Replica, peer: Endpoint, sealed: str, entering: int, silent_s: float, probe: Probe
) -> Pulled | None:
    view = ArenaView.open(f"/proc/{peer.pid}/fd/{peer.arena_fd}")
    try:
        sequence = _even_sequence(view, peer.pid, 0.0 if sealed else silent_s)
        index, scalars, step, size_bytes = (
            view.index_bytes(),
            view.scalars_bytes(),
            view.step,
            view.size_bytes,
        )
        at_entry, complete = view.at_entry, view.is_complete
        if not sealed:
            _require_complete(step, complete, view.in_call, entering)
        if view.sequence != sequence:
            return None  # what was read during a write fits nothing
        direct = _has_none_to_lose(replica)
        packed = bytearray(0 if direct else size_bytes)
        target = receive_into(replica, index, size_bytes) if direct else memoryview(packed)
        _read_all(view, target, probe)
        if view.sequence != sequence:
            return None
        found = _verify(sealed, step, index, scalars, target)
        if packed:
            receive_into(replica, index, size_bytes)[:] = packed
        replica.load_scalars(scalars, step)
        publish(replica, scalars)
        return Pulled(step, size_bytes, "shared memory", found, at_entry, complete)
    finally:
        view.close()


def _has_none_to_lose(replica: Replica) -> bool:
    """Whether it is a joiner's. A survivor must not lose the state that it has to a peer that ends half-way."""
    return replica.step <= 0


def _read_all(view: ArenaView, target: memoryview, probe: Probe) -> None:
    done = 0
    while done < len(target):
        done += view.read_into(target[done : done + CHUNK_BYTES], done)
        probe(done)


def _verify(sealed: str, step: int, index: bytes, scalars: bytes, data: memoryview) -> str:
    """The checksum of what was read; "" if it is not sealed."""
    found = checksum(step, index, scalars, data) if sealed else ""
    if found != sealed:
        raise Corrupt(f"checksum {found}, sealed as {sealed}")
    return found


def _pull_tcp(
    replica: Replica,
    peer: Endpoint,
    token: str,
    sealed: str,
    entering: int,
    silent_s: float,
    probe: Probe,
) -> Pulled | None:
    with frames.connect((peer.address, peer.port), token, made=disown) as connection:
        connection.settimeout(silent_s)
        try:
            (length,) = _SEQUENCE.unpack(frames.receive_exactly(connection, _SEQUENCE.size))
            offer = _read_offer(frames.receive_exactly(connection, length))
            if not sealed:
                _require_complete(offer.step, offer.complete, offer.in_call, entering)
            direct = replica.arena is not None and _has_none_to_lose(replica)
            packed = bytearray(0 if direct else offer.size_bytes)
            target = (
                receive_into(replica, offer.index, offer.size_bytes)
                if direct
                else memoryview(packed)
            )
            _fill(target, connection, probe)
            (sequence,) = _SEQUENCE.unpack(frames.receive_exactly(connection, _SEQUENCE.size))
        finally:
            reown(connection.fileno())
    if sequence != offer.sequence:
        return None
    found = _verify(sealed, offer.step, offer.index, offer.scalars, target)
    if replica.arena is None:
        replica.begin_write()
        replica.unpack(offer.index, packed)
    elif packed:
        receive_into(replica, offer.index, offer.size_bytes)[:] = packed
    replica.load_scalars(offer.scalars, offer.step)
    publish(replica, offer.scalars)
    return Pulled(offer.step, offer.size_bytes, "tcp", found, offer.at_entry, offer.complete)


def _read_offer(body: bytes) -> _Offer:
    try:
        return _offers.decode(body)
    except msgspec.MsgspecError as error:
        raise Refused(f"not the offer of a state: {error}") from None


def _fill(
    target: memoryview, connection: socket.socket, probe: Probe = lambda done_bytes: None
) -> None:
    received = 0
    while received < len(target):
        count = connection.recv_into(target[received : received + CHUNK_BYTES])
        if not count:
            raise ConnectionError("connection closed in the middle of the state")
        received += count
        probe(received)


def receive_into(replica: Replica, index: bytes, size_bytes: int) -> memoryview:
    """The memory of ``replica`` that the peer's data belongs to; peers that read us meanwhile are told to retry."""
    assert replica.arena is not None
    replica.step = -1  # until all of it is there
    if replica.arena.sequence % 2 == 0:
        replica.arena.begin_write()
    if not replica.layout_matches(index):
        replica.prepare_layout(index, size_bytes)
    return replica.arena.data()


def publish(replica: Replica, scalars: bytes) -> None:
    """The state is complete: others may read it."""
    if replica.arena is not None:
        replica.arena.publish([path for path, _ in replica.tensors()], scalars, replica.step)
    replica.end_write()
