"""Copies on other nodes: acknowledged when verified, complete or invisible, read back when their owner is gone."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import pytest
import torch

from chaoskit import wire
from chaoskit.checkpoint import peer_protocol as protocol
from chaoskit.checkpoint import peer_sender, peer_server
from chaoskit.checkpoint.arena import DATA_OFFSET
from chaoskit.checkpoint.held import HeldTensor
from chaoskit.checkpoint.manifest import Damaged
from chaoskit.checkpoint.peer_fetch import copies_at, fetch_into
from chaoskit.checkpoint.peer_protocol import NotHeld, PeerAddress, PeerLost
from chaoskit.checkpoint.peer_sender import CopySender
from chaoskit.checkpoint.peer_server import CopyServer
from chaoskit.checkpoint.seal import Seal
from chaoskit.checkpoint.slots import Slots
from chaoskit.checkpoint.snapshotter import Snapshotter
from chaoskit.errors import ChaoskitError

pytestmark = pytest.mark.costly

TOKEN = "test-token"
SIZES = (300_000, 7, 1_000_000)
STATE_BYTES = 1_200_000 + 64 + 4_000_000
BUDGET_BYTES = 2**28
TRANSPORTS = pytest.mark.parametrize("transport", ["auto", "tcp"])


def state(step: int, sizes: tuple[int, ...] = SIZES) -> list[HeldTensor]:
    return [HeldTensor(f"t{number}", torch.full((size,), float(step))) for number, size in enumerate(sizes)]


def fetch(peer: PeerAddress, piece: str = "piece", **options: Any) -> Seal:
    """The newest copy, every byte of which is that of its step."""
    targets = state(-1)
    fetched = fetch_into(peer, TOKEN, piece, targets, **options)
    assert fetched.scalars == str(fetched.seal.step).encode()
    for held in targets:
        assert torch.equal(held.tensor, torch.full_like(held.tensor, float(fetched.seal.step)))
    assert fetched.transport == ("tcp" if options.get("transport") == "tcp" else "shared memory")
    return fetched.seal


class Owner:
    """A piece that is trained, and its sender."""

    def __init__(self, peers: list[PeerAddress], piece: str = "piece", **options: Any) -> None:
        self.tensors, self.step = state(0), 0
        self.acknowledged: SimpleQueue[tuple[str, Seal]] = SimpleQueue()
        self.failed: SimpleQueue[tuple[str, str]] = SimpleQueue()
        self.snapshotter = Snapshotter(
            Slots.in_memory(), self.tensors, lambda: str(self.step).encode(), sealed=self._sealed
        )
        self.sender: CopySender | None = None
        self.sender = CopySender(
            piece,
            self.snapshotter.slots.paths,
            peers,
            TOKEN,
            acknowledged=lambda node, seal: self.acknowledged.put((node, seal)),
            failed=lambda node, reason: self.failed.put((node, reason)),
            niceness=0,
            **options,
        )

    def _sealed(self, seal: Seal) -> None:
        if self.sender is not None:
            self.sender.notify()

    def train(self) -> None:
        self.snapshotter.wait()
        for held in self.tensors:
            held.tensor.add_(1)
        self.step += 1
        self.snapshotter.begin(self.step)

    def replicate(self, count: int = 1) -> None:
        """A step that all of ``count`` partners acknowledge."""
        self.train()
        for _ in range(count):
            node, seal = self.acknowledged.get(timeout=10)
            assert seal.step == self.step, node

    def close(self) -> None:
        assert self.sender is not None
        self.sender.close()
        self.snapshotter.close()


@pytest.fixture
def owners() -> Iterator[Callable[..., Owner]]:
    made: list[Owner] = []

    def make(*arguments: Any, **options: Any) -> Owner:
        made.append(Owner(*arguments, **options))
        return made[-1]

    yield make
    for owner in made:
        owner.close()


@pytest.fixture
def servers() -> Iterator[Callable[..., CopyServer]]:
    made: list[CopyServer] = []

    def make(node: str = "node1", budget_bytes: int = BUDGET_BYTES, **options: Any) -> CopyServer:
        made.append(CopyServer(node, "127.0.0.1", TOKEN, budget_bytes, niceness=0, **options))
        return made[-1]

    yield make
    for server in made:
        server.close()


class Process:
    """A forked process, with a line to it. What it is told to do gets that line and runs until it is killed."""

    def __init__(self, act: Callable[[socket.socket], None]) -> None:
        self.line, theirs = socket.socketpair()
        self.line.settimeout(20)
        self.pid = os.fork()
        if self.pid == 0:
            self.line.close()
            try:
                act(theirs)
            finally:
                os._exit(1)
        theirs.close()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        self.line.close()


def serve(probe: Callable[[str], None] = lambda moment: None, port: int = 0) -> tuple[Process, PeerAddress]:
    """A copy server in a process of its own."""

    def act(line: socket.socket) -> None:
        server = CopyServer("node1", "127.0.0.1", TOKEN, BUDGET_BYTES, niceness=0, port=port, probe=probe)
        line.sendall(str(server.address.port).encode() + b" " + server.address.host_id.encode())
        line.recv(1)

    process = Process(act)
    port, host_id = process.line.recv(1000).decode().split(" ")
    return process, PeerAddress("node1", host_id, "127.0.0.1", int(port))


def train_on(
    peer: PeerAddress, probe: Callable[[str], None] = lambda moment: None, transport: str = "auto", steps: int = 10**9
) -> Process:
    """An owner in a process of its own, which tells what was acknowledged."""

    def act(line: socket.socket) -> None:
        owner = Owner([peer], transport=transport, probe=probe)
        for _ in range(steps):
            owner.train()
            try:
                _, seal = owner.acknowledged.get(timeout=0.005)
                line.sendall(f"{seal.step} ".encode())
            except Empty:
                pass
        line.sendall(b"end")
        line.recv(1)

    return Process(act)


def kill_self_at(wanted: str, occurrence: int) -> Callable[[str], None]:
    counts = itertools.count()

    def probe(moment: str) -> None:
        if moment == wanted and next(counts) == occurrence:
            os.kill(os.getpid(), signal.SIGKILL)

    return probe


def drain(line: socket.socket) -> list[int]:
    """Steps that a process told before it ended."""
    data = b""
    while part := line.recv(4096):
        data += part
    return [int(word) for word in data.split()]


# -- there and back -------------------------------------------------------------------------------------------------


@TRANSPORTS
def test_every_snapshot_reaches_its_partner(servers: Any, owners: Any, transport: str) -> None:
    server = servers()
    owner = owners([server.address], transport=transport)
    for step in range(1, 6):
        owner.replicate()
        assert owner.sender.protected_step == step
        assert fetch(server.address, transport=transport) == owner.sender.acknowledged["node1"]
    assert {copy.seal.step for copy in copies_at(server.address, TOKEN)} == {4, 5}
    assert fetch(server.address, step=4, transport=transport).step == 4
    with pytest.raises(NotHeld, match="no copy of piece of step 3"):
        fetch(server.address, step=3)
    with pytest.raises(NotHeld, match="no copy of other"):
        fetch(server.address, "other")


@TRANSPORTS
def test_a_copy_is_read_in_another_cut(servers: Any, owners: Any, transport: str) -> None:
    server = servers()
    owner = owners([server.address])
    owner.replicate()
    target = HeldTensor("t0", torch.zeros(1000), (300_000,), (5_000,))
    fetch_into(server.address, TOKEN, "piece", [target], transport=transport)
    assert torch.equal(target.tensor, torch.ones(1000))
    with pytest.raises(ChaoskitError, match="elements of the box"):
        fetch_into(server.address, TOKEN, "piece", [HeldTensor("t9", torch.zeros(1))], transport=transport)


def test_one_partner_that_is_dead_does_not_hold_up_the_other(servers: Any, owners: Any) -> None:
    """It listens, but never says a word."""
    deaf = socket.create_server(("127.0.0.1", 0))
    server = servers()
    silent = PeerAddress("node2", server.address.host_id, "127.0.0.1", deaf.getsockname()[1])
    owner = owners([silent, server.address])
    for _ in range(3):
        owner.replicate()
    assert list(owner.sender.acknowledged) == ["node1"]
    deaf.close()


def test_two_partners(servers: Any, owners: Any) -> None:
    one, other = servers("node1"), servers("node2")
    owner = owners([one.address, other.address])
    owner.replicate(2)
    assert set(owner.sender.acknowledged) == {"node1", "node2"}
    assert fetch(one.address) == fetch(other.address)


def test_strangers_are_refused(servers: Any, owners: Any) -> None:
    server = servers()
    with pytest.raises(PeerLost, match="closed by the other side"):
        fetch_into(server.address, "another-token", "piece", state(0))
    with socket.create_connection((server.address.host, server.address.port)) as stranger:
        stranger.sendall(b"\xff" * 100)
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(1000):
                pass  # its challenge, and the end
    owners([server.address]).replicate()


def test_the_protected_step_is_kept_until_a_newer_one_is(servers: Any, owners: Any) -> None:
    server = servers()
    owner = owners([server.address])
    owner.replicate()
    owner.snapshotter.protected(1)
    owner.sender.protect(1)
    for step in range(2, 5):
        owner.replicate()
        assert {copy.seal.step for copy in server.holding()} == {1, step}
    owner.sender.protect(4)
    owner.snapshotter.protected(4)
    owner.replicate()
    assert {copy.seal.step for copy in server.holding()} == {4, 5}


def test_when_training_goes_back_the_partner_has_that_step_acknowledged_again(servers: Any, owners: Any) -> None:
    server, last = servers(), 99
    owner = owners([server.address], counts=lambda seal: seal.step <= last)
    for _ in range(3):
        owner.replicate()
    last = 2
    owner.sender.protect(2)
    owner.sender.notify()
    assert owner.acknowledged.get(timeout=10)[1].step == 2  # or its owner would be waited for in vain
    assert {copy.seal.step for copy in server.holding()} == {2}


def test_a_partner_that_forgot_is_noticed(servers: Any, owners: Any) -> None:
    """It counts as protected only while the partner confirms that it has the copy."""
    first = servers()
    owner = owners([first.address])
    owner.replicate()
    first.drop("piece")
    first.close()
    owner.train()
    node, reason = owner.failed.get(timeout=10)
    assert (node, owner.sender.protected_step) == ("node1", -1), reason


# -- the budget -----------------------------------------------------------------------------------------------------


def test_beyond_the_budget_what_fell_behind_is_dropped(servers: Any, owners: Any) -> None:
    dropped: SimpleQueue[tuple[str, str]] = SimpleQueue()
    server = servers(budget_bytes=5 * STATE_BYTES, dropped=lambda piece, reason: dropped.put((piece, reason)))
    old, two, three = (owners([server.address], piece) for piece in ("old", "two", "three"))
    old.replicate()
    for _ in range(4):
        two.replicate()
    for _ in range(2):  # at these steps the first piece may be of use yet
        three.train()
        piece, reason = dropped.get(timeout=10)
        assert (piece, "do not fit" in reason) == ("three", True)
    three.replicate()
    assert dropped.get(timeout=10) == ("old", "step 1 fell behind, and three needs its memory")
    assert {copy.piece for copy in server.holding()} == {"two", "three"}
    assert server.size_bytes <= 5 * STATE_BYTES


def test_a_copy_that_is_dropped_counts_no_more_and_is_brought_again(servers: Any, owners: Any) -> None:
    """At once, and not with the next step: until then nothing else would protect this one."""
    server, lost = servers(), SimpleQueue[str]()
    owner = owners([server.address], lost=lost.put)
    owner.replicate()
    server.drop("piece")
    assert lost.get(timeout=10) == "node1"
    assert owner.acknowledged.get(timeout=10)[1].step == 1
    assert owner.sender.protected_step == 1
    assert fetch(server.address).step == 1


def test_a_piece_whose_first_copy_is_on_its_way_does_not_count_as_behind(servers: Any, owners: Any) -> None:
    """Another one that is brought meanwhile would push it out, and its owner be told that it is safe."""
    stalled, go_on, dropped = threading.Event(), threading.Event(), list[str]()

    def stall(moment: str) -> None:
        if moment == peer_server.VERIFIED and not stalled.is_set():
            stalled.set()
            assert go_on.wait(10)

    server = servers(budget_bytes=3 * STATE_BYTES, probe=stall, dropped=lambda piece, reason: dropped.append(piece))
    first, second = owners([server.address], "first"), owners([server.address], "second")
    first.train()
    assert stalled.wait(10)
    second.train()
    node, reason = second.failed.get(timeout=10)
    assert "do not fit" in reason, node
    go_on.set()
    assert first.acknowledged.get(timeout=10)[1].step == 1
    assert [copy.piece for copy in server.holding()] == ["first"]
    assert set(dropped) == {"second"}


def test_what_is_needed_is_not_dropped_for_another(servers: Any, owners: Any) -> None:
    dropped: list[tuple[str, str]] = []
    server = servers(budget_bytes=3 * STATE_BYTES, dropped=lambda piece, reason: dropped.append((piece, reason)))
    one, two = owners([server.address], "one"), owners([server.address], "two")
    one.replicate()
    for _ in range(3):
        two.train()
        two.snapshotter.wait()
        one.replicate()
    node, reason = two.failed.get(timeout=10)
    assert node == "node1"
    assert "do not fit" in reason
    assert two.sender.protected_step == -1
    assert {piece for piece, _ in dropped} == {"two"}
    assert fetch(server.address, "one").step == 4


# -- damage ---------------------------------------------------------------------------------------------------------


def flip(path: str, offset: int) -> None:
    fd = os.open(path, os.O_RDWR)
    (value,) = os.pread(fd, 1, offset)
    os.pwrite(fd, bytes([value ^ 1]), offset)
    os.close(fd)


@TRANSPORTS
def test_a_damaged_slot_of_the_partner_is_never_loaded(servers: Any, owners: Any, transport: str) -> None:
    server = servers()
    owner = owners([server.address])
    owner.replicate()
    (copy,) = server.holding()
    flip(copy.place.path, DATA_OFFSET + 2_000_000)
    with pytest.raises(Damaged, match="sealed as"):
        fetch(server.address, transport=transport)
    with pytest.raises(Damaged, match="sealed as"):
        fetch_into(server.address, TOKEN, "piece", state(0)[:1], transport=transport)


@TRANSPORTS
def test_a_damaged_slot_of_the_owner_is_never_acknowledged(servers: Any, transport: str) -> None:
    server = servers()
    snapshotter = Snapshotter(Slots.in_memory(), state(1), lambda: b"1")
    snapshotter.begin(1)
    snapshotter.close()
    flip(snapshotter.slots.paths[0], DATA_OFFSET + 1_300_000)
    failed: SimpleQueue[str] = SimpleQueue()
    sender = CopySender(
        "piece",
        snapshotter.slots.paths,
        [server.address],
        TOKEN,
        transport=transport,
        failed=lambda node, reason: failed.put(reason),
    )
    assert "sealed as" in failed.get(timeout=10)
    assert sender.protected_step == -1
    assert server.holding() == ()
    sender.close()


def test_a_slot_that_is_cut_off_while_it_is_sent_is_no_copy(servers: Any) -> None:
    server, stored = servers(), threading.Event()
    large = [HeldTensor("large", torch.ones(2**24))]  # more than the buffers of a connection take
    snapshotter = Snapshotter(Slots.in_memory(), large)
    snapshotter.begin(1)
    snapshotter.close()
    paths = snapshotter.slots.paths
    sender = CopySender("piece", paths, [server.address], TOKEN, acknowledged=lambda node, seal: stored.set())
    assert stored.wait(10)
    sender.close()
    with wire.connect((server.address.host, server.address.port), TOKEN) as connection:
        connection.settimeout(10)
        (copy,) = server.holding()
        protocol.send(connection, protocol.Fetch("piece", copy.seal))
        assert isinstance(protocol.receive(connection), protocol.Offer)
        os.truncate(copy.place.path, DATA_OFFSET)
        with pytest.raises(ConnectionError):
            protocol.receive_into(connection, [memoryview(bytearray(copy.seal.size_bytes))])
    assert copies_at(server.address, TOKEN) == (copy,), "it answers others"
    with pytest.raises(NotHeld, match="cut off"):
        fetch_into(server.address, TOKEN, "piece", large, transport="tcp")


def test_a_copy_under_another_seal_is_not_sent(servers: Any, owners: Any) -> None:
    server = servers()
    owners([server.address]).replicate()
    (copy,) = server.holding()
    other = msgspec.structs.replace(copy.seal, generation=copy.seal.generation + 1)  # whose bytes may be the same
    with wire.connect((server.address.host, server.address.port), TOKEN) as connection:
        connection.settimeout(10)
        protocol.send(connection, protocol.Fetch("piece", other))
        assert isinstance(protocol.receive(connection), protocol.Declined)


class Relay:
    """A proxy that changes one byte of what passes, far into the stream."""

    def __init__(self, peer: PeerAddress, damaged_at: int) -> None:
        self._peer, self._damaged_at = peer, damaged_at
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = PeerAddress("node1", "", "127.0.0.1", self._listener.getsockname()[1])
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection((self._peer.host, self._peer.port))
            threading.Thread(target=self._pump, args=(near, far, self._damaged_at), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, self._damaged_at), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, damaged_at: int) -> None:
        passed = 0
        try:
            while data := bytearray(source.recv(65536)):
                if passed <= damaged_at < passed + len(data):
                    data[damaged_at - passed] ^= 1
                passed += len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            source.close()
            target.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def test_a_bit_that_flips_on_the_way_is_found(servers: Any, owners: Any) -> None:
    server = servers()
    relay = Relay(server.address, 3_000_000)
    sending = owners([relay.address], transport="tcp")
    sending.train()
    assert "sealed as" in sending.failed.get(timeout=10)[1]
    assert server.holding() == ()
    sending.replicate()  # the bit flips once in each connection: now the copy is whole
    with pytest.raises(Damaged, match="sealed as"):
        fetch(relay.address, transport="tcp")
    relay.close()


# -- one of the two nodes is killed ---------------------------------------------------------------------------------


@TRANSPORTS
@pytest.mark.parametrize("moment", [peer_sender.OFFERING, peer_sender.SENDING, peer_sender.ACKNOWLEDGED])
@pytest.mark.parametrize("occurrence", [0, 1, 4])
def test_the_owner_is_killed_at_a_boundary(servers: Any, moment: str, occurrence: int, transport: str) -> None:
    if moment == peer_sender.SENDING and transport == "auto":
        pytest.skip("then the partner reads, and the owner sends nothing")
    server = servers()
    owner = train_on(server.address, kill_self_at(moment, occurrence), transport)
    acknowledged = drain(owner.line)
    owner.wait()
    check_survivor(server.address, max(acknowledged, default=0))


@TRANSPORTS
def test_the_owner_is_killed_at_any_instant(servers: Any, transport: str) -> None:
    random_ = random.Random(3)
    server = servers()
    found = []
    for _ in range(15):
        server.drop("piece")
        owner = train_on(server.address, transport=transport)
        owner.line.recv(1, socket.MSG_PEEK)
        time.sleep(random_.uniform(0, 0.03))
        os.kill(owner.pid, signal.SIGKILL)
        acknowledged = drain(owner.line)
        owner.wait()
        found.append(check_survivor(server.address, max(acknowledged)))
    assert max(found) > 2


def check_survivor(peer: PeerAddress, acknowledged: int) -> int:
    """What was acknowledged, or something newer, can be read, and is right."""
    found = 0
    for copy in copies_at(peer, TOKEN):
        assert fetch(peer, step=copy.seal.step) == copy.seal
        found = max(found, copy.seal.step)
    assert found >= acknowledged
    return found


@TRANSPORTS
@pytest.mark.parametrize("moment", [peer_server.RECEIVING, peer_server.VERIFIED, peer_server.ANSWERING])
@pytest.mark.parametrize("occurrence", [0, 3])
def test_the_partner_is_killed_at_a_boundary(owners: Any, moment: str, occurrence: int, transport: str) -> None:
    """The owner trains on, says so, and protects its state at the next partner."""
    process, peer = serve(kill_self_at(moment, occurrence))
    owner = owners([peer], transport=transport)
    while owner.failed.empty():
        owner.train()
        with contextlib.suppress(Empty):
            owner.acknowledged.get(timeout=0.1)
    process.wait()
    assert owner.sender.acknowledged == {}
    other, there = serve()
    owner.sender.close()
    again = CopySender("piece", owner.snapshotter.slots.paths, [there], TOKEN, transport=transport)
    deadline_s = time.monotonic() + 10
    while again.protected_step < owner.step:
        assert time.monotonic() < deadline_s
        again.notify()  # the last snapshot may have been sealed meanwhile
        time.sleep(0.001)
    assert fetch(there, transport=transport).step == owner.step
    again.close()
    other.kill()


def test_a_partner_that_comes_back_empty_gets_its_copy_again(owners: Any) -> None:
    """It listens where it did before, and remembers nothing."""
    first, peer = serve()
    owner = owners([peer])
    owner.replicate()
    first.kill()
    owner.train()
    owner.failed.get(timeout=10)
    second, _ = serve(port=peer.port)
    assert owner.acknowledged.get(timeout=20)[1].step == 2
    assert fetch(peer).step == 2
    second.kill()
