"""Packets are held up, overtaken and damaged without netem; rates are kept. In a network of its own, by echoes."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import pytest

from chaoskit.substrate import abilities, namespaces
from chaoskit.substrate.echo import Echoes
from chaoskit.substrate.fabric import Fabric
from chaoskit.substrate.traffic import Degrade, between, towards
from chaoskit.substrate.wiring import Wiring, _Queues

WIDE_MS = 100.0  # what a busy machine may add to an echo


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    if not abilities.privileged():
        pytest.skip("this test makes networks itself: run it as root")
    fabric = Fabric(["a", "b", "c"])
    yield fabric
    fabric.close()


@pytest.fixture
def queues(fabric: Fabric) -> Iterator[_Queues]:
    if reason := abilities.queues():
        pytest.skip(reason)
    queues = _Queues(fabric)
    yield queues
    queues.close()


def echo(fabric: Fabric, source: str, target: str, count: int = 5, timeout_s: float = 0.5) -> list[float]:
    with namespaces.entered(fabric.stations[source].namespace):
        echoes = Echoes()
    try:
        return echoes.round_trips_ms(fabric.stations[target].address, count, timeout_s)
    finally:
        echoes.close()


def test_a_delay_is_added_to_one_way(fabric: Fabric, queues: _Queues) -> None:
    assert median(echo(fabric, "a", "b")) < 5.0
    queues.impose(1, Degrade(ways=towards(["a"], ["b"]), delay_ms=10.0))
    found = echo(fabric, "a", "b")
    assert len(found) == 5
    assert min(found) >= 9.9
    assert min(found) < 10.0 + WIDE_MS
    assert min(echo(fabric, "b", "a")) >= 9.9  # the question is quick, the answer late
    assert median(echo(fabric, "a", "c")) < 5.0
    assert queues.packets(1) == 10


def test_delays_add_up_and_end_one_by_one(fabric: Fabric, queues: _Queues) -> None:
    queues.impose(1, Degrade(ways=between(["a"], ["b"]), delay_ms=10.0))
    queues.impose(2, Degrade(ways=towards(["a"], ["b"]), delay_ms=20.0))
    assert min(echo(fabric, "a", "b")) >= 39.9
    queues.lift(1)
    assert 19.9 <= min(echo(fabric, "a", "b")) < 39.9
    queues.lift(2)
    assert median(echo(fabric, "a", "b")) < 5.0
    queues.impose(3, Degrade(ways=towards(["a"], ["b"]), delay_ms=10.0))  # the same queue again
    assert min(echo(fabric, "a", "b")) >= 9.9


def test_who_overtakes_is_not_held_up(fabric: Fabric, queues: _Queues) -> None:
    queues.impose(1, Degrade(ways=towards(["a"], ["b"]), delay_ms=50.0, overtaking=1.0))
    assert median(echo(fabric, "a", "b")) < 20.0
    assert queues.packets(1) == 0


def test_a_flipped_bit_is_found_by_a_checksum(fabric: Fabric, queues: _Queues) -> None:
    """Of an echo: who receives it drops it."""
    queues.impose(1, Degrade(ways=towards(["a"], ["b"]), corrupted=1.0))
    assert echo(fabric, "a", "b", 3, 0.1) == []
    assert queues.packets(1) == 3
    queues.lift(1)
    assert len(echo(fabric, "a", "b", 3)) == 3


def test_the_kernel_s_netem_and_our_queues_do_the_same(fabric: Fabric) -> None:
    """Whichever of them this machine has."""
    if reason := abilities.delays():
        pytest.skip(reason)
    wiring = Wiring(fabric)
    try:
        number = wiring.impose(Degrade(ways=towards(["a"], ["b"]), delay_ms=10.0))
        assert min(echo(fabric, "a", "b")) >= 9.9
        assert wiring.lift(number) >= 5
        assert median(echo(fabric, "a", "b")) < 5.0
    finally:
        wiring.close()
