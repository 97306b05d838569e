"""Tests of packet delays without netem, in a network of its own, measured by echoes."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from support.waiting import LIMIT_S, wait_until

from chaoskit.substrate.core import namespaces
from chaoskit.substrate.core.echo import Echoes, open_socket
from chaoskit.substrate.core.traffic import Degrade, Narrow, between, towards
from chaoskit.substrate.limits import capabilities
from chaoskit.substrate.network.fabric import Fabric
from chaoskit.substrate.network.wiring import DelayQueues, TrafficShaper, Wiring


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    if not capabilities.privileged():
        pytest.skip("this test makes networks itself: run it as root")
    fabric = Fabric(["a", "b", "c"])
    yield fabric
    fabric.close()


@pytest.fixture
def queues(fabric: Fabric) -> Iterator[DelayQueues]:
    if reason := capabilities.queues():
        pytest.skip(reason)
    queues = DelayQueues(fabric)
    yield queues
    queues.close()


def echo(
    fabric: Fabric, source: str, target: str, count: int = 5, timeout_s: float = LIMIT_S
) -> list[float]:
    with namespaces.entered(fabric.stations[source].namespace):
        echoes = Echoes(open_socket())
    try:
        return echoes.round_trips_ms(fabric.stations[target].address, count, timeout_s)
    finally:
        echoes.close()


def flood(fabric: Fabric, source: str, target: str) -> None:
    """Send far more at once than a narrow link takes."""
    with namespaces.entered(fabric.stations[source].namespace):
        sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with sender:
        for _ in range(400):
            sender.sendto(bytes(1400), (fabric.stations[target].address, 9))


def await_echo(fabric: Fabric, source: str, target: str, below_ms: float) -> None:
    """Wait for an echo that is quicker than it could be with the delay.

    One is enough: a packet that is held up is never early, and one that is not may be late on a
    busy machine.
    """
    wait_until(
        lambda: min(echo(fabric, source, target, 1)) < below_ms, f"an echo within {below_ms:g} ms"
    )


def test_a_delay_is_added_to_one_way(fabric: Fabric, queues: DelayQueues) -> None:
    """A delay strikes each packet once, on the way that it names, in that direction."""
    queues.impose(1, Degrade(ways=towards(["a"], ["b"]), delay_ms=30.0))
    echoes_ms = echo(fabric, "a", "b")
    assert len(echoes_ms) == 5
    assert min(echoes_ms) >= 29.9
    assert min(echo(fabric, "b", "a")) >= 29.9  # the question is quick, the answer late
    assert queues.packets(1) == 10
    await_echo(fabric, "a", "b", 60.0)  # once, not twice
    counted = queues.packets(1)
    await_echo(fabric, "a", "c", 30.0)
    assert queues.packets(1) == counted


def test_a_delay_counts_from_its_own_begin(fabric: Fabric, queues: DelayQueues) -> None:
    """Packets counted by an earlier delay of the same way are no evidence of a later one."""
    queues.impose(1, Degrade(ways=towards(["a"], ["b"]), delay_ms=5.0))
    echo(fabric, "a", "b")
    assert queues.packets(1) == 5
    queues.lift(1)
    queues.impose(2, Degrade(ways=towards(["a"], ["b"]), delay_ms=5.0))
    assert queues.packets(2) == 0
    queues.impose(3, Degrade(ways=towards(["a"], ["b"]), delay_ms=5.0))
    echo(fabric, "a", "b", 2)
    assert queues.packets(2) == queues.packets(3) == 2


def test_a_rate_goes_on_counting_while_others_come_and_go(fabric: Fabric) -> None:
    """The kernel's counters restart each time that the queues of a link are replaced; a change
    keeps them.
    """
    if reason := capabilities.rates():
        pytest.skip(reason)
    shapes = TrafficShaper(fabric)
    try:
        shapes.impose(1, Narrow(bits_per_s=1e6, ways=towards(["a"], ["b"])))
        flood(fabric, "a", "b")
        wait_until(lambda: shapes.packets(1) > 20, "packets that wait for the rate")
        met = shapes.packets(1)
        shapes.impose(2, Narrow(bits_per_s=1e6, ways=towards(["a"], ["b"])))
        assert shapes.packets(1) >= met
        assert shapes.packets(2) < 20, (
            "what waited before is no evidence of this one; some are still under way"
        )
        flood(fabric, "a", "b")
        wait_until(lambda: shapes.packets(2) > 20, "packets that wait for the rate")
        shapes.lift(2)
        assert shapes.packets(1) > met
    finally:
        shapes.close()


def test_delays_add_up_and_end_one_by_one(fabric: Fabric, queues: DelayQueues) -> None:
    """Delays of two faults add up; each ends when its own fault is lifted, and a queue can be used
    again.
    """
    queues.impose(1, Degrade(ways=between(["a"], ["b"]), delay_ms=10.0))
    queues.impose(2, Degrade(ways=towards(["a"], ["b"]), delay_ms=20.0))
    assert min(echo(fabric, "a", "b")) >= 39.9
    queues.lift(1)
    assert min(echo(fabric, "a", "b")) >= 19.9
    await_echo(fabric, "a", "b", 39.9)
    queues.lift(2)
    await_echo(fabric, "a", "b", 19.9)
    queues.impose(3, Degrade(ways=towards(["a"], ["b"]), delay_ms=10.0))
    assert min(echo(fabric, "a", "b")) >= 9.9


def test_the_kernel_s_netem_and_our_queues_do_the_same(fabric: Fabric) -> None:
    """The means that this machine has adds the delay, counts the packets, and ends when it is
    lifted.
    """
    if reason := capabilities.delays():
        pytest.skip(reason)
    wiring = Wiring(fabric)
    try:
        number = wiring.impose(Degrade(ways=towards(["a"], ["b"]), delay_ms=10.0))
        assert min(echo(fabric, "a", "b")) >= 9.9
        assert wiring.lift(number) >= 5
        await_echo(fabric, "a", "b", 9.9)
    finally:
        wiring.close()
