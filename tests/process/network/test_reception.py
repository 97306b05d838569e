"""Tests of the reception of supervisors that dial the runner: which are accepted, and for which
place.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from support.nodes.supervisors import dialing

from chaoskit.substrate.supervisor.messages import SupervisorHello
from chaoskit.substrate.supervisor.reception import Reception
from chaoskit.wire import frames

TOKEN = "of this test"
COME_S = 60.0


@pytest.fixture
def reception() -> Iterator[Reception]:
    with contextlib.closing(Reception("127.0.0.1", TOKEN)) as made:
        yield made


def visit(reception: Reception, place: str, token: str = TOKEN) -> socket.socket:
    connection = frames.connect(reception.address, token)
    frames.send(connection, SupervisorHello(place, "10.0.0.1"))
    return connection


def test_each_supervisor_comes_to_its_own_place(reception: Reception) -> None:
    for place in ("a", "b"):
        reception.expect(place)
    second, first = visit(reception, "b"), visit(reception, "a")
    for place, connection in (("a", first), ("b", second)):
        visitor = reception.await_any([place], COME_S)
        assert visitor is not None
        assert visitor[0] == place
        assert visitor[1].address == "10.0.0.1"
        visitor[1].connection.sendall(place.encode())
        assert connection.recv(1) == place.encode()
        visitor[1].connection.close()
        connection.close()


def test_one_that_is_not_expected_is_hung_up_on(reception: Reception) -> None:
    """A second supervisor of a place is hung up on, too, such as one of a node that was given up
    and comes back.
    """
    reception.expect("a")
    with visit(reception, "a"), visit(reception, "other") as stranger:
        assert stranger.recv(1) == b""
        assert reception.await_any(["other"], 0.0) is None
        taken = reception.await_any(["a"], COME_S)
        assert taken is not None
        with taken[1].connection, visit(reception, "a") as again:
            assert again.recv(1) == b""


def test_a_place_that_was_given_up_takes_nothing(reception: Reception) -> None:
    """Supervisors that come before or after that are hung up on."""
    for place in ("come", "late"):
        reception.expect(place)
    with visit(reception, "come") as come:
        wait_for(reception, "come")
        reception.give_up("come")
        assert come.recv(1) == b""
    reception.give_up("late")
    with visit(reception, "late") as late:
        assert late.recv(1) == b""


def wait_for(reception: Reception, place: str) -> None:
    """Wait until the supervisor of a place has come, without taking it."""
    with visit(reception, "not expected") as after:  # is handled after it
        assert after.recv(1) == b""
    assert place


def test_a_connection_that_says_nothing_keeps_no_other_one_out(reception: Reception) -> None:
    """The connection sends no proof; one with a proof is trusted, and has 10 s."""
    reception.expect("a")
    with socket.create_connection(reception.address), visit(reception, "a"):
        visitor = reception.await_any(["a"], COME_S)
        assert visitor is not None
        visitor[1].connection.close()


def test_waiting_for_a_place_ends_in_time(reception: Reception) -> None:
    reception.expect("a")
    assert reception.await_any(["a"], 0.01) is None


def test_a_closed_reception_is_reached_by_nothing() -> None:
    reception = Reception("127.0.0.1", TOKEN)
    reception.expect("a")
    with visit(reception, "a") as untaken:
        wait_for(reception, "a")
        reception.close()
        assert untaken.recv(1) == b""
    with pytest.raises(OSError, match="refused"):
        visit(reception, "a")
    assert not any(thread.name == "ck-reception" for thread in threading.enumerate())


def test_a_supervisor_that_is_not_wanted_ends(reception: Reception) -> None:
    """The status is 0, so that nothing restarts the supervisor."""
    assert dialing(reception.address, TOKEN, "elsewhere").wait(COME_S) == 0
