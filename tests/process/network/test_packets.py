"""Tests of packets that a network namespace receives: dropped, answered with a reset, or delayed.
The packets are real.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
from support.waiting import wait_until

from chaoskit.substrate.core import namespaces
from chaoskit.substrate.core.echo import Echoes, open_socket
from chaoskit.substrate.limits import capabilities
from chaoskit.substrate.network.fabric import Fabric
from chaoskit.substrate.network.packets import (
    DropReceived,
    HoldReceived,
    ReceivedPackets,
    SendEchoes,
    Sending,
)

WHY_NOT = (
    capabilities.rules()
    or capabilities.queues()
    or ("" if capabilities.privileged() else "not root")
)
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"packets: {WHY_NOT}")
ECHO_S = 0.3


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with contextlib.closing(Fabric(["near", "far", "other"])) as made:
        yield made


@pytest.fixture
def received(fabric: Fabric) -> Iterator[ReceivedPackets]:
    """Provide the actions on packets that ``near`` receives. The test runs in its namespace
    meanwhile.
    """
    with (
        namespaces.entered(fabric.stations["near"].namespace),
        contextlib.closing(ReceivedPackets()) as packets,
    ):
        yield packets


def address(fabric: Fabric, station: str) -> str:
    return fabric.stations[station].address


def echoes_ms(fabric: Fabric, station: str, count: int = 3) -> list[float]:
    """Send echoes from ``near`` to a station, and return the milliseconds of those that were
    answered.
    """
    with contextlib.closing(Echoes(open_socket())) as sent:
        return sent.round_trips_ms(address(fabric, station), count, ECHO_S)


def test_what_comes_from_an_address_is_dropped_until_that_is_lifted(
    fabric: Fabric, received: ReceivedPackets
) -> None:
    """Packets of other addresses pass."""
    dropped = received.apply("near", DropReceived(sources=(address(fabric, "far"),)))
    assert echoes_ms(fabric, "far") == []
    assert len(echoes_ms(fabric, "other")) == 3
    wait_until(lambda: dropped.shown() == 3, "the packets to be counted")
    assert dropped.lift()
    assert dropped.lift()
    assert dropped.shown() == 3
    assert len(echoes_ms(fabric, "far")) == 3


def test_a_share_of_them_is_dropped(fabric: Fabric, received: ReceivedPackets) -> None:
    dropped = received.apply("near", DropReceived(sources=(address(fabric, "far"),), share=0.5))
    echoes_ms(fabric, "far", 30)
    dropped.lift()
    assert 1 < dropped.shown() < 29


def test_segments_are_answered_with_a_reset(fabric: Fabric, received: ReceivedPackets) -> None:
    """Segments to other ports than the named one are not answered with a reset."""
    near, far = address(fabric, "near"), address(fabric, "far")
    with socket.create_server((near, 0)) as named, socket.create_server((near, 0)) as unnamed:
        reset = received.apply(
            "near", DropReceived(sources=(far,), loud=True, port=named.getsockname()[1])
        )
        with namespaces.entered(fabric.stations["far"].namespace):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(named.getsockname(), 2.0)
            socket.create_connection(unnamed.getsockname(), 2.0).close()
        reset.lift()
        assert reset.shown() == 1
        with namespaces.entered(fabric.stations["far"].namespace):
            socket.create_connection(named.getsockname(), 2.0).close()


def test_what_comes_from_an_address_is_held_up(fabric: Fabric, received: ReceivedPackets) -> None:
    before_ms = min(wait_until(lambda: echoes_ms(fabric, "far"), "an answer"))
    held = received.apply("near", HoldReceived(sources=(address(fabric, "far"),), delay_ms=40.0))
    assert min(echoes_ms(fabric, "far")) > before_ms + 35.0
    assert min(echoes_ms(fabric, "other")) < 35.0
    assert held.lift()
    assert held.shown() == 3
    assert min(echoes_ms(fabric, "far")) < 35.0


def test_two_delays_add_up(fabric: Fabric, received: ReceivedPackets) -> None:
    first, second = (
        received.apply("near", HoldReceived(sources=(address(fabric, "far"),), delay_ms=delay_ms))
        for delay_ms in (20.0, 30.0)
    )
    assert min(echoes_ms(fabric, "far")) > 45.0
    first.lift()
    assert 25.0 < min(echoes_ms(fabric, "far")) < 45.0
    assert second.lift()


def test_echoes_are_sent_until_that_is_lifted(fabric: Fabric, received: ReceivedPackets) -> None:
    sending = received.apply("near", SendEchoes(address(fabric, "far"), ECHO_S))
    assert isinstance(sending, Sending)
    wait_until(lambda: len(sending.results_ms()) >= 3, "echoes")
    received.apply("near", DropReceived(sources=(address(fabric, "far"),)))
    wait_until(lambda: None in sending.results_ms(), "an echo that is lost")
    sending.lift()


def test_everything_is_lifted_when_it_closes(fabric: Fabric) -> None:
    far = address(fabric, "far")
    with namespaces.entered(fabric.stations["near"].namespace):
        with contextlib.closing(ReceivedPackets()) as made:
            made.apply("near", DropReceived(sources=(far,)))
            made.apply("near", HoldReceived(sources=(far,), delay_ms=40.0))
            assert echoes_ms(fabric, "far") == []
        assert min(echoes_ms(fabric, "far")) < 35.0


@pytest.mark.parametrize("action", [DropReceived, HoldReceived, SendEchoes])
def test_whether_it_can_be_done_is_tried(
    fabric: Fabric,
    received: ReceivedPackets,
    action: type[DropReceived | HoldReceived | SendEchoes],
) -> None:
    """No trace of the attempt is left."""
    assert received.why_not(action) == ""
    assert received.why_not(action) == ""
    assert len(echoes_ms(fabric, "far")) == 3
