"""The cost of connections without the token, at every door of a run: nearly nothing, and no client
waits.
"""

from __future__ import annotations

import contextlib
import resource
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.nodes.coordinators import serving
from support.waiting import LIMIT_S, wait_until
from torch import nn
from torch.optim import SGD

from chaoskit.checkpoint.peer import protocol
from chaoskit.checkpoint.peer.server import CopyServer
from chaoskit.coordinator.refused_connections import Refusals
from chaoskit.health import pair
from chaoskit.health.pair import PairServer
from chaoskit.journal import read_events
from chaoskit.runtime.state.peer import StateServer, fetch
from chaoskit.runtime.state.replica import Replica
from chaoskit.vocabulary import Event
from chaoskit.wire import frames
from chaoskit.wire.messages import AgentHello, Challenge, EndJob, Endpoint, ObserverHello, Welcome

HOST, TOKEN = "127.0.0.1", "token"
#: More connections than any door keeps without a proof.
MANY = 300
#: A door that closes a connection does so at once; a door that takes longer waits for the stranger.
SOON_S = 5.0

Address = tuple[str, int]
#: The address of a door, and a client that knows the token and is served there.
Door = tuple[Address, Callable[[], object]]


@contextlib.contextmanager
def pair_tests() -> Iterator[Door]:
    with PairServer(TOKEN, socket.create_server((HOST, 0), backlog=MANY)) as server:

        def client() -> None:
            assert pair.read(server.address, TOKEN, stream_bytes=1).error == ""

        yield server.address, client


@contextlib.contextmanager
def states() -> Iterator[Door]:
    model = nn.Linear(2, 2)
    server = StateServer(Replica(model, SGD(model.parameters(), lr=0.1), None), TOKEN, HOST)

    def client() -> None:
        assert fetch(Endpoint("elsewhere", HOST, server.port, 1, -1), TOKEN)

    try:
        yield (HOST, server.port), client
    finally:
        server.close()


@contextlib.contextmanager
def copies() -> Iterator[Door]:
    server = CopyServer("node1", HOST, TOKEN, 2**20, niceness=0)
    address = (HOST, server.address.port)

    def client() -> None:
        with frames.connect(address, TOKEN, LIMIT_S) as connection:
            connection.settimeout(LIMIT_S)
            protocol.send(connection, protocol.Ask(""))
            assert protocol.receive(connection) == protocol.PeerHolding(())

    try:
        yield address, client
    finally:
        server.close()


@pytest.fixture(
    params=[pair_tests, states, copies, "coordinator"],
    ids=["pair", "states", "copies", "coordinator"],
)
def door(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Door]:
    with contextlib.ExitStack() as stack:
        if request.param == "coordinator":
            coordinator = stack.enter_context(serving(tmp_path))

            def client() -> None:
                with coordinator.connect(ObserverHello()) as observer:
                    assert isinstance(frames.receive(observer), Welcome)

            yield coordinator.address, client
        else:
            yield stack.enter_context(request.param())


def stranger(address: Address) -> socket.socket:
    """Open a connection that sends nothing."""
    return socket.create_connection(address, LIMIT_S)


def is_closed(connection: socket.socket) -> bool:
    """Return whether the other side has closed the connection; its data is read."""
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def test_silent_strangers_are_sent_away_and_keep_no_client_waiting(door: Door) -> None:
    """The first of too many connections is closed; a client shows its token within a round trip."""
    address, client = door
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(stranger(address)) for _ in range(MANY)]
        client()
        wait_until(lambda: is_closed(strangers[0]), "the end of the first stranger", limit_s=SOON_S)
        assert not is_closed(strangers[-1]), "it may still prove itself"
        client()


@pytest.mark.parametrize(
    "door", [pair_tests, states, copies], ids=["pair", "states", "copies"], indirect=True
)
def test_a_stranger_costs_no_thread(door: Door) -> None:
    address, client = door
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(stranger(address)) for _ in range(20)]
        for connection in strangers:
            assert isinstance(frames.receive(connection), Challenge), (
                "it was let in, and has to prove itself"
            )
        assert threading.active_count() <= before
        client()


def test_a_frame_that_is_too_long_for_a_proof_ends_the_connection(door: Door) -> None:
    """The connection ends before the rest of the frame has come."""
    address, client = door
    with stranger(address) as connection:
        assert isinstance(frames.receive(connection), Challenge)
        connection.sendall(struct.pack("!I", 4096))
        wait_until(lambda: is_closed(connection), "the end of the connection", limit_s=SOON_S)
    client()


def test_a_flood_costs_a_line_and_is_counted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first refusal is written down at once; those within a minute are counted and reported
    when the run ends.
    """
    with serving(tmp_path) as coordinator:
        for _ in range(MANY):
            send_long_frame(coordinator.address)
        with coordinator.connect(ObserverHello()) as observer:
            frames.send(observer, EndJob(False, "as a test"))
            wait_until(lambda: count(tmp_path) == MANY, "the records")
    lines = [line for line in capfd.readouterr().err.splitlines() if "refused" in line]
    assert lines == [
        "refused a connection: frame of 4096 bytes, more than 1024: not a chaoskit connection",
        f"refused {MANY - 1} connections, the last one: frame of 4096 bytes, more than 1024: not a chaoskit connection",
    ]


def test_a_refusal_that_cannot_be_written_down_ends_no_coordinator(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The connection is closed, and the coordinator goes on; the next refusal is written down."""
    with serving(tmp_path) as coordinator, coordinator.connect(ObserverHello()) as observer:
        assert isinstance(frames.receive(observer), Welcome)
        size_bytes = (tmp_path / "journal" / "coordinator.jsonl").stat().st_size
        resource.prlimit(
            coordinator.pid, resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY)
        )
        send_long_frame(coordinator.address)
        with coordinator.connect(ObserverHello()) as other:
            assert isinstance(frames.receive(other), Welcome)
        resource.prlimit(coordinator.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        send_long_frame(coordinator.address)
        frames.send(observer, EndJob(False, "as a test"))
        wait_until(lambda: count(tmp_path) == 1, "the record")
    assert "Traceback" not in capfd.readouterr().err


def send_long_frame(address: Address) -> None:
    """Send no proof, and wait until the connection is closed."""
    with stranger(address) as connection:
        assert isinstance(frames.receive(connection), Challenge)
        connection.sendall(struct.pack("!I", 4096))
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b"", "it is closed"


def count(directory: Path) -> int:
    """Return how many refused connections a coordinator has written down."""
    return sum(
        record["count"] for record in read_events(directory / "journal", Event.CONNECTIONS_REFUSED)
    )


def test_refusals_are_summed_up_once_a_minute() -> None:
    refusals, summaries = Refusals(), []
    for tenth_s in range(1800):
        refusals.add(f"the token\nis wrong {'x' * 1000}")
        if (summary := refusals.take_due_summary(tenth_s / 10)) is not None:
            summaries.append(summary)
    assert [summary.count for summary in summaries] == [1, 600, 600]
    assert all(len(summary.reason) == 200 and "\n" not in summary.reason for summary in summaries)
    assert refusals.take_due_summary(180.0 - 0.1) is None
    last = refusals.take_summary(180.0)
    assert last is not None
    assert last.count == 599
    assert refusals.take_summary(1000.0) is None


def test_a_server_that_does_not_know_the_token_cannot_send_a_long_frame() -> None:
    with socket.create_server((HOST, 0)) as listener:

        def flood() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(struct.pack("!I", 2**20))
                connection.recv(1)

        thread = threading.Thread(target=flood, daemon=True)
        thread.start()
        with pytest.raises(frames.Refused, match="frame of 1048576 bytes"):
            frames.connect(listener.getsockname(), TOKEN, SOON_S)
        thread.join(LIMIT_S)


def test_who_proves_itself_ever_so_slowly_has_a_limit_for_all_of_it() -> None:
    """A byte now and then is no proof."""
    with (
        PairServer(TOKEN, socket.create_server((HOST, 0)), silent_s=0.5) as server,
        stranger(server.address) as slow,
    ):
        frame: list[Any] = [*frames.encode(AgentHello("x" * 900, "host", 1))]

        def is_sent_away() -> bool:
            if is_closed(slow):
                return True
            with contextlib.suppress(OSError):
                slow.send(bytes([frame.pop(0)]))
            return False

        wait_until(is_sent_away, "the end of the connection", limit_s=SOON_S, poll_s=0.05)
