"""Copies on other nodes: acknowledged when verified, complete or invisible, read back when their
owner is gone.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import pytest
import torch
from support import ranks
from support.descriptors import many_open
from support.nodes.relay import Relay
from support.ranks import Line, Rank
from support.waiting import LIMIT_S, wait_until

from chaoskit.checkpoint.layout.arena import DATA_OFFSET, ArenaView, Slot
from chaoskit.checkpoint.layout.held import HeldTensor
from chaoskit.checkpoint.layout.manifest import Damaged
from chaoskit.checkpoint.layout.seal import Seal
from chaoskit.checkpoint.memory.slots import Slots
from chaoskit.checkpoint.memory.snapshotter import Snapshotter
from chaoskit.checkpoint.peer import protocol
from chaoskit.checkpoint.peer import sender as peer_sender
from chaoskit.checkpoint.peer import server as peer_server
from chaoskit.checkpoint.peer.protocol import PeerAddress, PeerCopy
from chaoskit.checkpoint.peer.sender import CopySender
from chaoskit.checkpoint.peer.server import CopyServer
from chaoskit.daemon.snapshot_server import Offers
from chaoskit.errors import ChaoskitError
from chaoskit.runtime.state.peer import PeerLost
from chaoskit.runtime.state.peer import fetch as fetch_state
from chaoskit.runtime.state.pieces import NoCopy, Restorer
from chaoskit.wire import frames
from chaoskit.wire.messages import OfferedSnapshot

pytestmark = pytest.mark.costly

TOKEN = "test-token"
SIZES = (300_000, 7, 1_000_000)
STATE_BYTES = 1_200_000 + 64 + 4_000_000
BUDGET_BYTES = 2**28
TRANSPORTS = pytest.mark.parametrize("transport", ["auto", "tcp"])


def state(step: int, sizes: tuple[int, ...] = SIZES) -> list[HeldTensor]:
    return [
        HeldTensor(f"t{number}", torch.full((size,), float(step)))
        for number, size in enumerate(sizes)
    ]


def copies_at(peer: PeerAddress, piece: str = "", token: str = TOKEN) -> tuple[PeerCopy, ...]:
    """Return the copies that a partner reports."""
    with frames.connect((peer.host, peer.port), token) as connection:
        connection.settimeout(LIMIT_S)
        protocol.send(connection, protocol.Ask(piece))
        answer = protocol.receive(connection)
    assert isinstance(answer, protocol.PeerHolding)
    return answer.copies


@contextlib.contextmanager
def offered(copy: PeerCopy) -> Iterator[OfferedSnapshot]:
    """Offer a copy of a partner to ranks, as its keeper does."""
    offers = Offers("node1", "127.0.0.1", TOKEN)
    yield offers.offer("node0.0", copy.seal, ArenaView.open(copy.place.path), tier="peer")
    offers.withdraw([])


class Target:
    """A state that is restored: tensors of any cut, and the scalars."""

    def __init__(self, tensors: list[HeldTensor]) -> None:
        self.tensors, self.scalars = tensors, b""

    def prepare(self, slots: list[Slot]) -> list[HeldTensor]:
        return self.tensors

    def load_scalars(self, scalars: bytes, step: int) -> None:
        self.scalars = scalars


def restore(snapshot: OfferedSnapshot, tensors: list[HeldTensor], transport: str = "auto") -> bytes:
    """Read a copy as a restoring rank does. Return the scalars.

    Raises:
        Damaged: if the rank reports the copy as corrupt.
        NoCopy: if it cannot be read for another reason.
    """
    failures: list[tuple[bool, str]] = []
    target: Any = Target(tensors)
    restorer = Restorer(
        [snapshot],
        node="node2",
        rank=0,
        token=TOKEN,
        transport=transport,
        report_failure=lambda _, corrupt, reason: failures.append((corrupt, reason)),
    )
    try:
        restorer.restore(target, 0, 1)
    except NoCopy as error:
        kind = Damaged if any(corrupt for corrupt, _ in failures) else NoCopy
        raise kind("; ".join([str(error), *(reason for _, reason in failures)])) from error
    scalars: bytes = target.scalars
    return scalars


def fetch(
    peer: PeerAddress, piece: str = "piece", *, step: int = -1, transport: str = "auto"
) -> Seal:
    """Return the newest copy, or that of a step; every byte of it must belong to its step."""
    copy = next(copy for copy in copies_at(peer, piece) if step in (-1, copy.seal.step))
    targets = state(-1)
    with offered(copy) as snapshot:
        scalars = restore(snapshot, targets, transport)
    assert scalars == str(copy.seal.step).encode()
    for held in targets:
        assert torch.equal(held.tensor, torch.full_like(held.tensor, float(copy.seal.step)))
    return copy.seal


class Owner:
    """A piece that is trained, and its sender."""

    def __init__(
        self,
        peers: list[PeerAddress],
        piece: str = "piece",
        sizes: tuple[int, ...] = SIZES,
        **options: Any,
    ) -> None:
        self.tensors, self.step = state(0, sizes), 0
        self.acknowledged: SimpleQueue[tuple[str, Seal]] = SimpleQueue()
        self.failed: SimpleQueue[tuple[str, str]] = SimpleQueue()
        self.snapshotter = Snapshotter(
            Slots(), self.tensors, lambda: str(self.step).encode(), on_sealed=self._sealed
        )
        self.sender: CopySender | None = None
        self.sender = CopySender(
            piece,
            self.snapshotter.slots.paths,
            peers,
            TOKEN,
            on_acknowledged=lambda node, seal: self.acknowledged.put((node, seal)),
            on_failed=lambda node, reason: self.failed.put((node, reason)),
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
        """Train a step that all of ``count`` partners acknowledge."""
        self.train()
        for _ in range(count):
            node, seal = self.acknowledged.get(timeout=LIMIT_S)
            assert seal.step == self.step, node

    def close(self) -> None:
        assert self.sender is not None
        self.sender.close()
        self.snapshotter.close()


@pytest.fixture
def owners() -> Iterator[Callable[..., Owner]]:
    owners_made: list[Owner] = []

    def make(*arguments: Any, **options: Any) -> Owner:
        owners_made.append(Owner(*arguments, **options))
        return owners_made[-1]

    yield make
    for owner in owners_made:
        owner.close()


@pytest.fixture
def servers() -> Iterator[Callable[..., CopyServer]]:
    running: list[CopyServer] = []

    def make(node: str = "node1", budget_bytes: int = BUDGET_BYTES, **options: Any) -> CopyServer:
        running.append(CopyServer(node, "127.0.0.1", TOKEN, budget_bytes, niceness=0, **options))
        return running[-1]

    yield make
    for server in running:
        server.close()


Run = Callable[..., Rank]


@pytest.fixture
def run() -> Iterator[Run]:
    """Yield a function that starts processes, which end with the test."""
    running: list[Rank] = []

    def start(body: Callable[..., None], *arguments: Any) -> Rank:
        running.extend(ranks.start(1, body, *arguments))
        return running[-1]

    yield start
    for rank in running:
        rank.destroy()


Moment = tuple[str, int]
NEVER: Moment = ("", 0)


def kill_self_at(moment: Moment) -> Callable[[str], None]:
    """Return a probe that kills its process at the n-th occurrence of a moment, counted from 0."""
    target_moment, occurrence = moment
    counts = itertools.count()

    def probe(reached: str) -> None:
        if reached == target_moment and next(counts) == occurrence:
            os.kill(os.getpid(), signal.SIGKILL)

    return probe


def serve_copies(line: Line, moment: Moment, port: int) -> None:
    server = CopyServer(
        "node1", "127.0.0.1", TOKEN, BUDGET_BYTES, niceness=0, port=port, probe=kill_self_at(moment)
    )
    line.send(server.address)
    line.receive()


def serve(run: Run, moment: Moment = NEVER, port: int = 0) -> tuple[Rank, PeerAddress]:
    """Start a copy server in its own process."""
    rank = run(serve_copies, moment, port)
    return rank, rank.receive()


def train_on(
    line: Line,
    peer: PeerAddress,
    transport: str,
    moment: Moment,
    moments: ranks.Counters | None = None,
) -> None:
    """Run as an owner, which sends the acknowledged steps, and counts the moments of its sender."""
    kill = kill_self_at(moment)

    def probe(reached: str) -> None:
        kill(reached)
        if moments is not None:
            moments[0] += 1

    owner = Owner([peer], transport=transport, probe=probe)
    while True:
        owner.train()
        with contextlib.suppress(Empty):
            line.send(owner.acknowledged.get(timeout=0.005)[1].step)


# -- there and back --------------------------------------------------------------------------------


@pytest.mark.promise(
    "A partner answers when its copy is complete and has the checksum of the seal.", transport="tcp"
)
@TRANSPORTS
def test_every_snapshot_reaches_its_partner(servers: Any, owners: Any, transport: str) -> None:
    """A partner has the two newest copies, and sends either; older copies are gone."""
    server = servers()
    owner = owners([server.address], transport=transport)
    for step in range(1, 6):
        owner.replicate()
        assert owner.sender.protected_step == step
        assert fetch(server.address, transport=transport) == owner.sender.acknowledged["node1"]
    assert {copy.seal.step for copy in copies_at(server.address)} == {4, 5}
    assert fetch(server.address, step=4, transport=transport).step == 4
    assert copies_at(server.address, "other") == ()


@TRANSPORTS
def test_a_copy_is_read_in_another_cut(servers: Any, owners: Any, transport: str) -> None:
    """Any box of a tensor in the copy can be read; a box that the copy lacks is an error."""
    server = servers()
    owner = owners([server.address])
    owner.replicate()
    target = HeldTensor("t0", torch.zeros(1000), (300_000,), (5_000,))
    with offered(server.holding()[0]) as snapshot:
        restore(snapshot, [target], transport)
        assert torch.equal(target.tensor, torch.ones(1000))
        with pytest.raises(NoCopy, match="elements of the box"):
            restore(snapshot, [HeldTensor("t9", torch.zeros(1))], transport)


def test_one_partner_that_is_dead_does_not_hold_up_the_other(servers: Any, owners: Any) -> None:
    """A partner that listens and never answers delays no copy at another one."""
    deaf = socket.create_server(("127.0.0.1", 0))
    server = servers()
    silent = PeerAddress("node2", server.address.host_id, "127.0.0.1", deaf.getsockname()[1])
    owner = owners([silent, server.address])
    for _ in range(3):
        owner.replicate()
    assert list(owner.sender.acknowledged) == ["node1"]
    deaf.close()


def test_copies_are_sent_by_a_process_with_many_open_files(servers: Any, owners: Any) -> None:
    """A copy arrives, and a closed partner is noticed, with descriptors above 1,023."""
    with many_open():
        server = servers()
        owner = owners([server.address])
        owner.replicate()
        server.close()
        node, _ = owner.failed.get(timeout=LIMIT_S)
        assert node == "node1"


def test_two_partners(servers: Any, owners: Any) -> None:
    """Each of two partners acknowledges its own copy."""
    first, second = servers("node1"), servers("node2")
    owner = owners([first.address, second.address])
    owner.replicate(2)
    assert set(owner.sender.acknowledged) == {"node1", "node2"}
    assert fetch(first.address) == fetch(second.address)


@pytest.mark.promise("Every connection begins with a mutual challenge over the token.")
def test_strangers_are_refused(servers: Any, owners: Any) -> None:
    """A connection with a wrong token, or with garbage, is closed; the server goes on."""
    server = servers()
    with pytest.raises(ConnectionError, match="closed by the other side"):
        copies_at(server.address, token="another-token")
    with socket.create_connection((server.address.host, server.address.port)) as stranger:
        stranger.sendall(b"\xff" * 100)
        stranger.settimeout(LIMIT_S)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(1000):
                pass  # the challenge of the server, and the end
    owners([server.address]).replicate()
    with (
        offered(server.holding()[0]) as snapshot,
        pytest.raises(PeerLost, match="closed by the other side"),
    ):
        fetch_state(snapshot.endpoint, "another-token")


def test_the_protected_step_is_kept_until_a_newer_one_is(servers: Any, owners: Any) -> None:
    """A copy of the protected step is not replaced by those of later steps."""
    server = servers()
    owner = owners([server.address])
    owner.replicate()
    owner.snapshotter.protect(1)
    owner.sender.protect(1)
    for step in range(2, 5):
        owner.replicate()
        assert {copy.seal.step for copy in server.holding()} == {1, step}
    owner.sender.protect(4)
    owner.snapshotter.protect(4)
    owner.replicate()
    assert {copy.seal.step for copy in server.holding()} == {4, 5}


def test_when_training_goes_back_the_partner_has_that_step_acknowledged_again(
    servers: Any, owners: Any
) -> None:
    server, last = servers(), 99
    owner = owners([server.address], is_current=lambda seal: seal.step <= last)
    for _ in range(3):
        owner.replicate()
    last = 2
    owner.sender.protect(2)
    owner.sender.notify()
    assert (
        owner.acknowledged.get(timeout=LIMIT_S)[1].step == 2
    )  # otherwise its owner would be awaited in vain
    assert {copy.seal.step for copy in server.holding()} == {2}


@pytest.mark.promise(
    "It counts while the partner is in reach; one that comes back must still have it."
)
def test_a_partner_that_forgot_is_noticed(servers: Any, owners: Any) -> None:
    """The step counts as protected only while the partner confirms its copy."""
    first = servers()
    owner = owners([first.address])
    owner.replicate()
    first.drop("piece")
    first.close()

    def is_told() -> bool:
        owner.train()  # once is not enough: a snapshot is dropped while the slot of the last one is still locked
        return not owner.failed.empty()

    wait_until(is_told, "a copy that failed")
    node, reason = owner.failed.get()
    assert (node, owner.sender.protected_step) == ("node1", -1), reason


def test_a_server_that_closes_hangs_up_on_who_connects_at_this_moment(
    servers: Any, owners: Any
) -> None:
    """A connection that was accepted before the end, and registered only after it, is closed as
    well.
    """
    accepted, closed = threading.Event(), threading.Event()

    def pause_server(_: int) -> None:
        if threading.current_thread().name == "copy-server":
            accepted.set()
            assert closed.wait(LIMIT_S)

    server = servers(made=pause_server)
    owner = owners([server.address])
    assert accepted.wait(LIMIT_S)
    server.close()
    closed.set()
    node, reason = owner.failed.get(timeout=LIMIT_S)
    assert (node, owner.sender.protected_step) == ("node1", -1), reason


# -- the budget ------------------------------------------------------------------------------------


@pytest.mark.promise(
    "First go pieces whose newest copy is older than the protected step, the oldest first"
)
def test_beyond_the_budget_what_fell_behind_is_dropped(servers: Any, owners: Any) -> None:
    dropped: SimpleQueue[tuple[str, str]] = SimpleQueue()
    server = servers(
        budget_bytes=5 * STATE_BYTES, on_dropped=lambda piece, reason: dropped.put((piece, reason))
    )
    old, second, third = (owners([server.address], piece) for piece in ("old", "two", "three"))
    old.replicate()
    for _ in range(4):
        second.replicate()
    for _ in range(2):  # at these steps the first piece may still be of use
        third.train()
        piece, reason = dropped.get(timeout=LIMIT_S)
        assert (piece, "do not fit" in reason) == ("three", True)
    third.replicate()
    assert dropped.get(timeout=LIMIT_S) == ("old", "step 1 fell behind, and three needs its memory")
    assert {copy.piece for copy in server.holding()} == {"two", "three"}
    assert server.size_bytes <= 5 * STATE_BYTES


@pytest.mark.promise("the owner is told at once (`on_lost`), and sends what it has again")
def test_a_copy_that_is_dropped_counts_no_more_and_is_brought_again(
    servers: Any, owners: Any
) -> None:
    """The copy is brought at once, and not with the next step: until then this step has no other
    protection.
    """
    server, lost = servers(), SimpleQueue[str]()
    owner = owners([server.address], on_lost=lost.put)
    owner.replicate()
    server.drop("piece")
    assert lost.get(timeout=LIMIT_S) == "node1"
    assert owner.acknowledged.get(timeout=LIMIT_S)[1].step == 1
    assert owner.sender.protected_step == 1
    assert fetch(server.address).step == 1


def test_a_piece_whose_first_copy_is_on_its_way_does_not_count_as_behind(
    servers: Any, owners: Any
) -> None:
    """Another piece that is brought meanwhile would push it out, though its owner was told that it
    is safe.
    """
    stalled, go_on, dropped = threading.Event(), threading.Event(), list[str]()

    def stall(moment: str) -> None:
        if moment == peer_server.VERIFIED and not stalled.is_set():
            stalled.set()
            assert go_on.wait(LIMIT_S)

    server = servers(
        budget_bytes=3 * STATE_BYTES,
        probe=stall,
        on_dropped=lambda piece, reason: dropped.append(piece),
    )
    first, second = owners([server.address], "first"), owners([server.address], "second")
    first.train()
    assert stalled.wait(LIMIT_S)
    second.train()
    node, reason = second.failed.get(timeout=LIMIT_S)
    assert "do not fit" in reason, node
    go_on.set()
    assert first.acknowledged.get(timeout=LIMIT_S)[1].step == 1
    assert [copy.piece for copy in server.holding()] == ["first"]
    assert set(dropped) == {"second"}


@pytest.mark.promise("It never drops a piece that is needed")
def test_no_copy_is_dropped_for_a_piece_that_does_not_fit_even_then(
    servers: Any, owners: Any
) -> None:
    """A copy that is dropped in vain is lost, and its owner still counts on it."""
    dropped: SimpleQueue[tuple[str, str]] = SimpleQueue()
    server = servers(
        budget_bytes=5 * STATE_BYTES, on_dropped=lambda piece, reason: dropped.put((piece, reason))
    )
    old, second = owners([server.address], "old"), owners([server.address], "two")
    large = owners([server.address], "large", sizes=SIZES * 2)
    old.replicate()
    for _ in range(4):
        second.replicate()
    for _ in range(4):
        large.train()
        piece, reason = dropped.get(timeout=LIMIT_S)
        assert (piece, "do not fit" in reason) == ("large", True)
    assert {copy.piece for copy in server.holding()} == {"old", "two"}
    assert fetch(server.address, "old").step == 1


def test_what_is_needed_is_not_dropped_for_another(servers: Any, owners: Any) -> None:
    dropped: list[tuple[str, str]] = []
    server = servers(
        budget_bytes=3 * STATE_BYTES,
        on_dropped=lambda piece, reason: dropped.append((piece, reason)),
    )
    first, second = owners([server.address], "one"), owners([server.address], "two")
    first.replicate()
    for _ in range(3):
        second.train()
        second.snapshotter.wait()
        first.replicate()
    node, reason = second.failed.get(timeout=LIMIT_S)
    assert node == "node1"
    assert "do not fit" in reason
    assert second.sender.protected_step == -1
    assert {piece for piece, _ in dropped} == {"two"}
    assert fetch(server.address, "one").step == 4


# -- damage ----------------------------------------------------------------------------------------


def flip(path: str, offset: int) -> None:
    fd = os.open(path, os.O_RDWR)
    (value,) = os.pread(fd, 1, offset)
    os.pwrite(fd, bytes([value ^ 1]), offset)
    os.close(fd)


@TRANSPORTS
def test_a_damaged_slot_of_the_partner_is_never_loaded(
    servers: Any, owners: Any, transport: str
) -> None:
    server = servers()
    owner = owners([server.address])
    owner.replicate()
    (copy,) = server.holding()
    flip(copy.place.path, DATA_OFFSET + 2_000_000)
    with pytest.raises(Damaged, match="sealed as"):
        fetch(server.address, transport=transport)
    with offered(copy) as snapshot, pytest.raises(Damaged, match="sealed as"):
        restore(snapshot, state(0)[:1], transport)


@TRANSPORTS
def test_a_damaged_slot_of_the_owner_is_never_acknowledged(servers: Any, transport: str) -> None:
    server = servers()
    snapshotter = Snapshotter(Slots(), state(1), lambda: b"1")
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
        on_failed=lambda node, reason: failed.put(reason),
    )
    assert "sealed as" in failed.get(timeout=LIMIT_S)
    assert sender.protected_step == -1
    assert server.holding() == ()
    sender.close()


def test_a_slot_that_is_cut_off_while_it_is_sent_is_no_copy(servers: Any) -> None:
    server, stored = servers(), threading.Event()
    large = [HeldTensor("large", torch.ones(2**24))]  # more than the buffers of a connection take
    snapshotter = Snapshotter(Slots(), large)
    snapshotter.begin(1)
    snapshotter.close()
    paths = snapshotter.slots.paths
    sender = CopySender(
        "piece", paths, [server.address], TOKEN, on_acknowledged=lambda node, seal: stored.set()
    )
    assert stored.wait(LIMIT_S)
    sender.close()
    (copy,) = server.holding()
    with offered(copy) as snapshot:
        with frames.connect(
            (snapshot.endpoint.address, snapshot.endpoint.port), TOKEN
        ) as connection:
            connection.settimeout(LIMIT_S)
            frames.receive_exactly(connection, 1)  # the server is sending
            os.truncate(copy.place.path, DATA_OFFSET)
            with pytest.raises(ConnectionError):
                frames.receive_exactly(connection, copy.seal.size_bytes)
        assert copies_at(server.address) == (copy,), "it answers others"
        with pytest.raises(Damaged, match="is shorter than its header"):
            restore(snapshot, large)
        with pytest.raises(NoCopy, match="closed"):
            restore(snapshot, large, "tcp")


@TRANSPORTS
def test_a_copy_that_was_replaced_after_its_offer_is_not_read(
    servers: Any, owners: Any, transport: str
) -> None:
    server = servers()
    owner = owners([server.address])
    owner.replicate()
    with offered(server.holding()[0]) as snapshot:
        for _ in range(2):
            owner.replicate()
        with pytest.raises(
            ChaoskitError, match="overwritten by step 3" if transport == "auto" else "sealed as"
        ):
            restore(snapshot, state(0), transport)


@pytest.mark.promise(
    "A partner answers when its copy is complete and has the checksum of the seal."
)
def test_a_bit_that_flips_on_the_way_is_found(servers: Any, owners: Any) -> None:
    """A copy that differs from its seal is declined and not kept, and brought again."""
    server = servers()
    relay = Relay((server.address.host, server.address.port), change_byte=3_000_000)
    relayed = PeerAddress("node1", "", "127.0.0.1", relay.port)
    sending = owners([relayed], transport="tcp")
    sending.train()
    assert "sealed as" in sending.failed.get(timeout=LIMIT_S)[1]
    assert server.holding() == ()
    sending.replicate()  # the bit flips once in each connection: now the copy is whole
    relay.close()
    with offered(server.holding()[0]) as snapshot:
        relay = Relay(("127.0.0.1", snapshot.endpoint.port), change_byte=3_000_000)
        endpoint = msgspec.structs.replace(snapshot.endpoint, port=relay.port)
        with pytest.raises(Damaged, match="sealed as"):
            restore(msgspec.structs.replace(snapshot, endpoint=endpoint), state(0), "tcp")
    relay.close()


# -- one of the two nodes is killed ----------------------------------------------------------------


#: The number of progress reports of a transfer over TCP.
PARTS = -(-STATE_BYTES // protocol.SEND_BYTES)
#: The least and the most complete transfers when an owner is killed at the n-th moment of a kind,
#: counted from 0. When the last part is on its way, the partner may have all of it.
COMPLETE: dict[str, Callable[[int], tuple[int, int]]] = {
    peer_sender.OFFERING: lambda occurrence: (occurrence, occurrence),
    peer_sender.SENDING: lambda occurrence: (occurrence // PARTS, (occurrence + 1) // PARTS),
    peer_sender.ACKNOWLEDGED: lambda occurrence: (occurrence + 1, occurrence + 1),
}


@pytest.mark.parametrize(
    ("moment", "transport"),
    [
        (peer_sender.OFFERING, "auto"),
        (peer_sender.OFFERING, "tcp"),
        (
            peer_sender.SENDING,
            "tcp",
        ),  # over shared memory the partner reads, and the owner sends nothing
        (peer_sender.ACKNOWLEDGED, "auto"),
        (peer_sender.ACKNOWLEDGED, "tcp"),
    ],
)
@pytest.mark.parametrize("occurrence", [0, 1, 4, PARTS, 2 * PARTS + 1])
def test_the_owner_is_killed_at_a_boundary(
    servers: Any, run: Run, moment: str, occurrence: int, transport: str
) -> None:
    """A copy of each complete transfer can be read, or a newer copy; a transfer under way leaves
    none.
    """
    server, (least, most) = servers(), COMPLETE[moment](occurrence)
    owner = run(train_on, server.address, transport, (moment, occurrence))
    acknowledged = owner.rest()
    assert owner.wait() == -signal.SIGKILL
    survivor = check_survivor(server.address)
    assert survivor >= max(acknowledged, default=0)
    assert survivor >= least, "each transfer is of a newer step"
    assert most or not survivor


@TRANSPORTS
def test_the_owner_is_killed_at_any_instant(servers: Any, run: Run, transport: str) -> None:
    """The kill comes as soon as its sender has reached a random number of moments; meanwhile it
    goes on.
    """
    random_ = random.Random(3)
    server = servers()
    of_one = 2 + (PARTS if transport == "tcp" else 0)
    for _ in range(15):
        server.drop("piece")
        moments, shared = random_.randrange(4 * of_one), ranks.counters(1)
        owner = run(train_on, server.address, transport, NEVER, shared)
        wait_until(lambda: shared[0] >= moments, f"{moments} moments of the sender", poll_s=0)  # noqa: B023
        owner.kill()
        acknowledged = owner.rest()
        assert owner.wait() == -signal.SIGKILL
        survivor = check_survivor(server.address)
        assert survivor >= max(acknowledged, default=0)
        assert survivor >= moments // of_one


def check_survivor(peer: PeerAddress) -> int:
    """Check every copy of the partner. Return the newest step, or 0 if there is none."""
    newest = 0
    for copy in copies_at(peer):
        assert fetch(peer, step=copy.seal.step) == copy.seal
        newest = max(newest, copy.seal.step)
    return newest


@TRANSPORTS
@pytest.mark.parametrize(
    "moment", [peer_server.RECEIVING, peer_server.VERIFIED, peer_server.ANSWERING]
)
@pytest.mark.parametrize("occurrence", [0, 3])
def test_the_partner_is_killed_at_a_boundary(
    owners: Any, run: Run, moment: str, occurrence: int, transport: str
) -> None:
    """The owner trains on, reports the loss, and protects its newest snapshot at the next partner.

    This snapshot may be older than its step: a snapshot is dropped while the only slot for it is on
    its way.
    """
    partner, peer = serve(run, (moment, occurrence))
    owner = owners([peer], transport=transport)
    while owner.failed.empty():
        owner.train()
        with contextlib.suppress(Empty):
            owner.acknowledged.get(timeout=0.1)
    assert partner.wait() == -signal.SIGKILL
    assert owner.sender.acknowledged == {}
    _, address = serve(run)
    owner.sender.close()
    owner.snapshotter.close()  # no snapshot is under way after that
    newest = owner.snapshotter.newest
    again = CopySender(
        "piece", owner.snapshotter.slots.paths, [address], TOKEN, transport=transport
    )

    wait_until(lambda: again.acknowledged == {"node1": newest}, "the copy at the next partner")
    assert fetch(address, transport=transport) == newest
    again.close()


def test_a_partner_that_comes_back_empty_gets_its_copy_again(owners: Any, run: Run) -> None:
    """The partner listens at its former address, and remembers nothing."""
    first, peer = serve(run)
    owner = owners([peer])
    owner.replicate()
    first.kill()
    first.wait()
    owner.train()
    owner.failed.get(timeout=LIMIT_S)
    serve(run, port=peer.port)
    assert owner.acknowledged.get(timeout=LIMIT_S)[1].step == 2
    assert fetch(peer).step == 2
