"""The control protocol: what coordinator, agents, workers and the harness say to each other.

Every message is a typed struct, encoded as MessagePack behind a 4-byte length. Unknown fields, unknown types and
oversized frames are refused. Nothing is ever unpickled. TCP connections start with :func:`prove` on both sides: a
mutual challenge that shows knowledge of the run's token without sending it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from chaoskit.config import RunConfig
from chaoskit.errors import ChaoskitError

FRAME_BYTES_MAX = 16 * 2**20
#: The barrier at which every member of a new generation reports how far it is.
STANDING = "standing"
_LENGTH = struct.Struct("!I")


class Refused(ChaoskitError):
    """The other side does not know the token, or does not speak this protocol."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages; the class name is the tag on the wire."""


# -- who and where ------------------------------------------------------------------------------------------------


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the state of a worker can be read. ``host_id`` tells whether shared memory will do."""

    host_id: str
    address: str
    port: int
    pid: int
    arena_fd: int


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank of a generation. ``shards`` are the slices of the global batch that it computes."""

    rank: int
    worker: str
    node: str
    endpoint: Endpoint
    shards: tuple[int, ...]


class Snapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A complete copy of the state of the training, sealed: what ``endpoint`` offers counts only with this checksum.

    ``tier`` names the place it is kept in; ``node`` and ``worker`` tell whose state it was.
    """

    node: str
    worker: str
    step: int  # committed steps
    generation: int  # the one that trained on it last
    size_bytes: int
    checksum: str
    endpoint: Endpoint
    tier: str = "memory"

    @property
    def age(self) -> tuple[int, int]:
        """Grows with every step and generation: of two snapshots the newer one has the larger age."""
        return self.step, self.generation


class Plan(Message, frozen=True):
    """A membership. ``abort``: leave the current collective at once (a rank was lost); else at a step boundary.

    ``restore``: where the state can be read when no member has it, the newest first.
    """

    generation: int
    members: tuple[Member, ...]  # by rank
    abort: bool
    restore: tuple[Snapshot, ...] = ()

    def member(self, worker: str) -> Member | None:
        """The place of ``worker`` in this membership, if it has one."""
        return next((member for member in self.members if member.worker == worker), None)

    @property
    def heaviest(self) -> int:
        """The rank with most shards; the lowest of them on a tie."""
        return max(self.members, key=lambda member: (len(member.shards), -member.rank)).rank


# -- faults inside a worker ---------------------------------------------------------------------------------------


class Trigger(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The moment at which a rank stops and waits for its fault.

    ``rank`` and ``step`` -1 match any. ``phase``: of a step or a recovery, or ``load``. ``generation``: the least one.
    ``role`` "most_shards" matches the rank that has most of them; "healer" stops the rank that is about to pull.
    """

    fault: str
    rank: int
    step: int
    phase: str
    generation: int = 0
    role: str = ""


class Lever(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An act that a worker does to itself on order, by its name in :mod:`chaoskit.runtime.levers`."""

    act: str
    options: dict[str, Any] = {}


# -- agent or harness <-> coordinator -----------------------------------------------------------------------------


class AgentHello(Message, frozen=True):
    """A node reports for duty: for the first time, or to a coordinator that must be told what it has missed.

    ``generation``: the newest plan that this node has seen. ``workers``: those that live here; ``ended``: those that
    did. What else must be known follows as the messages that say it, and may have been heard before.
    """

    node: str
    host_id: str
    pid: int
    generation: int = 0
    workers: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()


class ObserverHello(Message, frozen=True):
    """The harness, or a live view: sees everything, may release triggers and stop the run."""


class Welcome(Message, frozen=True):
    """``term``: number of this coordinator, higher than that of all before it; ``pid``: its process."""

    config: RunConfig
    triggers: tuple[Trigger, ...]
    term: int
    pid: int


class Beat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the progress board of one worker said. ``starved_ms``: of ``age_ms``, time spent waiting for a CPU.

    ``rehearsal_ms``: what one shard took in the rehearsal, compilation and all; 0 if that is not known.
    """

    worker: str
    generation: int
    rank: int
    step: int
    phase: int
    age_ms: float
    starved_ms: float
    commits: int
    loss: float
    rehearsal_ms: float = 0.0


class Heartbeat(Message, frozen=True):
    node: str
    beats: tuple[Beat, ...]


class WorkerReady(Message, frozen=True):
    """A worker has built its model, is warm, and can take a rank.

    ``fingerprint``: what its numbers depend on; the same on all who train together.
    """

    worker: str
    node: str
    endpoint: Endpoint
    fingerprint: str = ""


class WorkerLost(Message, frozen=True):
    """``cause``: killed, stopped, exited, raised, hung, nonfinite, corrupt, node lost. ``detail`` is for people."""

    worker: str
    node: str
    cause: str
    detail: str
    detected_ns: int


class HookReached(Message, frozen=True):
    """A worker waits at a trigger; said again until it is released. ``peer``: whom it is about to pull from."""

    worker: str
    fault: str
    rank: int
    step: int
    phase: str
    pid: int
    tid: int
    peer: str = ""


class Arm(Message, frozen=True):
    """Stop ``worker`` at a trigger that was not planned before the start.

    ``worker`` "": stop those that ``node`` starts from now on.
    """

    node: str
    worker: str
    trigger: Trigger


class Release(Message, frozen=True):
    """Let the worker that waits for ``fault`` go on, after pulling ``lever``."""

    worker: str
    fault: str
    lever: Lever


class LeverPulled(Message, frozen=True):
    """A worker reports what its lever did, with values read back from the target."""

    worker: str
    fault: str
    observed: str
    effective: bool


class Accuse(Message, frozen=True):
    """Ranks agreed, inside a step, that the workers ``accused`` compute wrongly."""

    worker: str
    accused: tuple[str, ...]
    generation: int
    step: int
    cause: str
    detail: str


class WorkerDone(Message, frozen=True):
    worker: str
    step: int
    weights_digest: str


class WorkerFailed(Message, frozen=True):
    """User code raised in a worker. ``fatal``: the same would happen on every rank, so the job is over.

    ``refused`` holds field, value and remedy where the error was BadInput.
    """

    worker: str
    error: str
    fatal: bool
    refused: tuple[str, str, str] | None = None


class Formed(Message, frozen=True):
    """The worker's process group of this generation can be used."""

    worker: str
    generation: int


class Healed(Message, frozen=True):
    """The worker holds the state that its generation trains on."""

    worker: str
    generation: int


class Recall(Message, frozen=True):
    """No live worker has the state of the training: asks an agent for what is left of it on its node."""


class Sealed(Message, frozen=True):
    """Answers :class:`Recall`: what can be read on ``node``; nothing, if every state was torn."""

    node: str
    snapshots: tuple[Snapshot, ...]


class SourceFailed(Message, frozen=True):
    """``snapshot`` could not be restored. ``corrupt``: it was read, and is not what was sealed."""

    worker: str
    snapshot: Snapshot
    corrupt: bool
    detail: str


class GroupBroken(Message, frozen=True):
    """A collective or the building of a group failed, and no newer plan explains it yet."""

    worker: str
    generation: int
    detail: str


class StartWorker(Message, frozen=True):
    worker: str


class StopWorker(Message, frozen=True):
    worker: str
    cause: str


class Ping(Message, frozen=True):
    """Asks the control thread of a worker for a :class:`Pong`: silence means that the GIL is held."""

    worker: str
    number: int


class Pong(Message, frozen=True):
    worker: str
    number: int


class EndJob(Message, frozen=True):
    ok: bool
    reason: str


# -- rendezvous, worker <-> coordinator ---------------------------------------------------------------------------


class RendezvousHello(Message, frozen=True):
    worker: str


class Put(Message, frozen=True):
    generation: int
    key: str
    value: bytes


class Get(Message, frozen=True):
    """Answered by :class:`Value` as soon as the key exists, or by :class:`Superseded`."""

    generation: int
    key: str


class Value(Message, frozen=True):
    value: bytes


class Exchange(Message, frozen=True):
    """A barrier that carries one small value a rank; answered by :class:`Exchanged` when the last one arrived."""

    generation: int
    name: str
    rank: int
    value: bytes


class Exchanged(Message, frozen=True):
    values: tuple[bytes, ...]


class Superseded(Message, frozen=True):
    """The generation asked for is not the current one any more."""

    generation: int


# -- authentication -----------------------------------------------------------------------------------------------


class Challenge(Message, frozen=True):
    nonce: bytes


class Proof(Message, frozen=True):
    nonce: bytes
    digest: bytes


class Accepted(Message, frozen=True):
    digest: bytes


AnyMessage = (
    Plan
    | AgentHello
    | ObserverHello
    | Welcome
    | Heartbeat
    | WorkerReady
    | WorkerLost
    | HookReached
    | Arm
    | Release
    | LeverPulled
    | Accuse
    | WorkerDone
    | WorkerFailed
    | Formed
    | Healed
    | Recall
    | Sealed
    | SourceFailed
    | GroupBroken
    | StartWorker
    | StopWorker
    | Ping
    | Pong
    | EndJob
    | RendezvousHello
    | Put
    | Get
    | Value
    | Exchange
    | Exchanged
    | Superseded
    | Challenge
    | Proof
    | Accepted
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """One frame: length and body."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Any:
    """The message in one frame's body.

    Raises:
        Refused: if it is not a valid message.
    """
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:  # a stranger's bytes may be anything
        raise Refused(f"not a chaoskit message: {error}") from None


def _checked_length(header: bytes | bytearray) -> int:
    (length,) = _LENGTH.unpack(header)
    if length > FRAME_BYTES_MAX:
        raise Refused(f"frame of {length} bytes, more than {FRAME_BYTES_MAX}: not a chaoskit connection")
    return int(length)


class Splitter:
    """Cuts a byte stream into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that ``data`` completes."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _checked_length(self._buffer[: _LENGTH.size])
            if len(self._buffer) < end:
                break
            messages.append(decode(bytes(self._buffer[_LENGTH.size : end])))
            del self._buffer[:end]
        return messages


# -- blocking sockets (workers) -----------------------------------------------------------------------------------


def receive_exactly(connection: socket.socket, size_bytes: int) -> bytes:
    """Read ``size_bytes`` bytes. Raises ConnectionError at the end of the stream."""
    data = bytearray()
    while len(data) < size_bytes:
        piece = connection.recv(size_bytes - len(data))
        if not piece:
            raise ConnectionError("connection closed by the other side")
        data += piece
    return bytes(data)


def send(connection: socket.socket, message: Message) -> None:
    connection.sendall(encode(message))


def receive(connection: socket.socket) -> Any:
    """The next message. Raises ConnectionError at the end of the stream."""
    return decode(receive_exactly(connection, _checked_length(receive_exactly(connection, _LENGTH.size))))


# -- asyncio streams (coordinator, agents, harness) ---------------------------------------------------------------


async def read_message(reader: asyncio.StreamReader) -> Any:
    """The next message. Raises ConnectionError at the end of the stream."""
    try:
        header = await reader.readexactly(_LENGTH.size)
        return decode(await reader.readexactly(_checked_length(header)))
    except asyncio.IncompleteReadError:
        raise ConnectionError("connection closed by the other side") from None


# -- mutual proof of the token ------------------------------------------------------------------------------------


def _digest(token: str, side: str, *nonces: bytes) -> bytes:
    return hmac.new(token.encode(), side.encode() + b"".join(nonces), hashlib.sha256).digest()


class Handshake:
    """Both halves of the challenge, without I/O: server sends Challenge, client Proof, server Accepted."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._nonce = secrets.token_bytes(32)

    def challenge(self) -> Challenge:
        return Challenge(self._nonce)

    def answer(self, challenge: Any) -> Proof:
        if not isinstance(challenge, Challenge):
            raise Refused("expected a challenge: not a chaoskit server")
        self._theirs = challenge.nonce
        return Proof(self._nonce, _digest(self._token, "client", challenge.nonce, self._nonce))

    def accept(self, proof: Any) -> Accepted:
        if not isinstance(proof, Proof):
            raise Refused("expected a proof of the token")
        if not hmac.compare_digest(proof.digest, _digest(self._token, "client", self._nonce, proof.nonce)):
            raise Refused("wrong token: use the one this run was started with")
        return Accepted(_digest(self._token, "server", proof.nonce, self._nonce))

    def confirm(self, accepted: Any) -> None:
        expected = _digest(self._token, "server", self._nonce, self._theirs)
        if not isinstance(accepted, Accepted) or not hmac.compare_digest(accepted.digest, expected):
            raise Refused("the server does not know the token")


def connect(
    address: tuple[str, int],
    token: str,
    timeout_s: float = 10.0,
    *,
    made: Callable[[int], None] = lambda fd: None,
) -> socket.socket:
    """An authenticated, blocking connection.

    Args:
        made: is told the descriptor of the socket before it is connected.

    Raises:
        OSError: nobody listens there. Refused: the other side does not know the token.
    """
    family, kind, protocol, _, resolved = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family, kind, protocol)
    try:
        made(connection.fileno())
        connection.settimeout(timeout_s)
        connection.connect(resolved)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        handshake = Handshake(token)
        send(connection, handshake.answer(receive(connection)))
        handshake.confirm(receive(connection))
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def accept(connection: socket.socket, token: str, timeout_s: float = 10.0) -> None:
    """Authenticate the client of a blocking server-side connection."""
    connection.settimeout(timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    handshake = Handshake(token)
    send(connection, handshake.challenge())
    send(connection, handshake.accept(receive(connection)))
    connection.settimeout(None)


async def connect_async(address: tuple[str, int], token: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """An authenticated connection for asyncio code."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        handshake = Handshake(token)
        writer.write(encode(handshake.answer(await read_message(reader))))
        handshake.confirm(await read_message(reader))
    except BaseException:
        writer.close()
        raise
    return reader, writer


async def accept_async(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str, timeout_s: float = 10.0
) -> None:
    """Authenticate the client of a server-side asyncio connection."""
    handshake = Handshake(token)
    writer.write(encode(handshake.challenge()))
    try:
        proof = await asyncio.wait_for(read_message(reader), timeout_s)
    except TimeoutError:
        raise Refused(f"said nothing for {timeout_s:g} s") from None
    writer.write(encode(handshake.accept(proof)))
