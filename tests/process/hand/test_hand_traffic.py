"""Tests of the backend for traffic: hands in network namespaces, and packets between them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hand import traffic_client
from support.hand.network import PORT, WHY_NOT
from support.hand.traffic import JobNodes, job_nodes
from support.waiting import stays, wait_until

from chaoskit.attach.hands.traffic import HandTraffic
from chaoskit.errors import HarnessError, NodeUnreachable
from chaoskit.substrate.core.traffic import Block, Narrow, between, towards

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"packets: {WHY_NOT}")
LASTS_S = 2.0
KERNEL_S = 1.0
#: Number of the request after ``hello`` and ``connect``, by which the hand names its first effect.
FIRST_EFFECT = 3
#: Ways whose rules need the hands of ``b`` and of ``d``.
TWO_HANDS = (("a", "b"), ("c", "d"))


@pytest.fixture
def nodes() -> Iterator[JobNodes]:
    with job_nodes("a", "b", "c", "d") as made:
        yield made


@contextlib.contextmanager
def backend(nodes: JobNodes, lasts_s: float = 10.0) -> Iterator[HandTraffic]:
    with contextlib.closing(HandTraffic(nodes.hand, nodes.address, lasts_s=lasts_s)) as traffic:
        yield traffic


def test_both_ways_of_a_node_are_blocked_and_counted_by_one_hand(nodes: JobNodes) -> None:
    with backend(nodes) as traffic:
        ways = between(["a"], ["b", "c"])
        applied = traffic.apply("a", Block(ways=ways))
        assert nodes.started() == {"a"}
        assert nodes.blocked() == set(ways)
        assert applied.shown() == len(ways)
        assert applied.lift()
        assert nodes.blocked() == set()
        assert nodes.run("a", "nft", "list", "tables") == ""
        assert applied.shown() == len(ways)
        assert applied.lift()


@pytest.mark.parametrize(
    ("ways", "hands"),
    [([("a", "b")], {"b"}), (towards(["a"], ["b", "c", "d"]), {"a"}), (TWO_HANDS, {"b", "d"})],
)
def test_single_ways_are_blocked_and_those_back_are_not(
    nodes: JobNodes, ways: list[tuple[str, str]], hands: set[str]
) -> None:
    with backend(nodes) as traffic:
        applied = traffic.apply("a", Block(ways=tuple(ways)))
        assert nodes.started() == hands
        assert nodes.blocked() == set(ways)
        assert applied.lift()
        assert nodes.blocked() == set()
        assert applied.shown() == len(ways)


def test_a_block_is_healed_once_a_new_connection_passes(nodes: JobNodes) -> None:
    """Something else may still drop packets when the rules of the hands are gone."""
    with backend(nodes) as traffic:
        applied = traffic.apply("a", Block(ways=between(["a"], ["b"])))
        nodes.run("b", "nft", "add table inet other")
        nodes.run("b", "nft", "add chain inet other in { type filter hook input priority 0; }")
        nodes.run("b", "nft", f"add rule inet other in ip saddr {nodes.address('a')} drop")
        assert not applied.lift()
        assert "chaoskit" not in nodes.run("a", "nft", "list", "tables")
        second = traffic.apply("a", Block(ways=between(["a"], ["b"])))
        nodes.run("b", "nft", "delete table inet other")
        assert second.lift(), "no connection passed before the second block either"
        third = traffic.apply("a", Block(ways=between(["a"], ["b"])))
        assert third.lift()
        assert traffic.is_reachable("a", "b")


def test_a_share_is_lost_and_counted(nodes: JobNodes) -> None:
    with backend(nodes) as traffic:
        applied = traffic.apply("a", Block(ways=between(["a"], ["b"]), share=0.5))
        for source, target in between(["a"], ["b"]):
            sender = nodes.socket(source, socket.SOCK_DGRAM)
            for _ in range(1_000):
                sender.sendto(b"x", (nodes.address(target), PORT))
        assert applied.shown() / 2_000 == pytest.approx(0.5, abs=0.06)
        assert applied.lift()


def test_a_loud_block_breaks_connections_and_refuses_new_ones(nodes: JobNodes) -> None:
    near, far = nodes.connection("a", "b")
    other_near, other_far = nodes.connection("a", "c")
    with backend(nodes) as traffic:
        applied = traffic.apply("a", Block(ways=between(["a"], ["b"]), loud=True))
        for end in (far, near):
            with pytest.raises(ConnectionError):
                wait_until(lambda end=end: end.send(b"x") and None, "the reset")
        with pytest.raises(ConnectionRefusedError):
            nodes.connection("a", "b")
        with pytest.raises(ConnectionRefusedError):
            nodes.connection("b", "a")
        assert nodes.blocked() == set()
        other_near.sendall(b"x")
        assert other_far.recv(1) == b"x"
        assert applied.shown() >= 4
        assert traffic.connect("a", "b").how == "refused"
        assert not traffic.is_reachable("a", "b")
        assert traffic.is_reachable("a", "c")
        assert applied.lift()
        assert traffic.is_reachable("a", "b")
        assert nodes.connection("a", "b")


def test_a_block_is_extended_beyond_its_time_to_live(nodes: JobNodes) -> None:
    with backend(nodes, LASTS_S) as traffic:
        applied = traffic.apply("a", Block(ways=(("a", "b"),)))
        stays(lambda: not nodes.passes("a", "b"), "the block", for_s=2.5 * LASTS_S)
        assert applied.lift()
        assert nodes.passes("a", "b")


def test_a_block_ends_after_its_time_to_live_if_its_client_is_killed(nodes: JobNodes) -> None:
    """The pipes to the hands stay open: the end of their input tells them nothing."""
    processes = {name: nodes.process(name) for name in ("a", "b")}
    descriptors = [(process.input_fd, process.output_fd) for process in processes.values()]
    parts = [
        f"{name},{nodes.address(name)},{process.input_fd},{process.output_fd}"
        for name, process in processes.items()
    ]
    client = subprocess.Popen(
        [sys.executable, str(Path(traffic_client.__file__)), str(LASTS_S), *parts],
        stdout=subprocess.PIPE,
        pass_fds=[descriptor for pair in descriptors for descriptor in pair],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},  # the package `support`
    )
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == b"blocked\n"
        ways = set(between(["a"], ["b"]))
        stays(lambda: nodes.blocked() == ways, "the block", for_s=1.5 * LASTS_S)
    finally:
        client.kill()
        client.wait()
    killed_s = time.monotonic()
    wait_until(lambda: not nodes.blocked(), "the end of the block")
    assert time.monotonic() - killed_s < LASTS_S + KERNEL_S


def test_rules_of_a_killed_hand_expire_and_their_count_stays(nodes: JobNodes) -> None:
    with backend(nodes, LASTS_S) as traffic:
        applied = traffic.apply("a", Block(ways=TWO_HANDS))
        assert nodes.blocked() == set(TWO_HANDS)
        assert applied.shown() == 2
        nodes.process("b").kill()
        assert nodes.blocked() == set(TWO_HANDS)
        assert applied.shown() == 3
        assert applied.lift()
        assert nodes.blocked() == set()
        assert applied.shown() == 3


def test_a_hand_that_is_gone_with_its_pod_is_not_waited_for(nodes: JobNodes) -> None:
    with backend(nodes, 30.0) as traffic:
        applied = traffic.apply("a", Block(ways=(("a", "b"),)))
        nodes.process("b").kill()
        nodes.gone.add("b")
        began_s = time.monotonic()
        assert applied.lift()
        assert time.monotonic() - began_s < 10


def test_a_silent_hand_keeps_no_other_one_from_being_extended(nodes: JobNodes) -> None:
    with backend(nodes, LASTS_S) as traffic:
        applied = traffic.apply("a", Block(ways=TWO_HANDS))
        nodes.signal("b", signal.SIGSTOP)
        wait_until(lambda: nodes.passes("a", "b"), "the end of the silent hand's rules")
        stays(lambda: not nodes.passes("c", "d"), "the other rules", for_s=1.5 * LASTS_S)
        assert applied.shown() > 0
        began_s = time.monotonic()
        assert applied.lift()
        assert time.monotonic() - began_s < LASTS_S + KERNEL_S + 3
        assert nodes.blocked() == set()
        nodes.signal("b", signal.SIGCONT)
        wait_until(lambda: nodes.run("b", "nft", "list", "tables") == "", "the end of the table")


def test_an_effect_that_ends_before_its_lift_is_an_error(nodes: JobNodes) -> None:
    with backend(nodes) as traffic:
        applied = traffic.apply("a", Block(ways=(("a", "b"),)))
        nodes.hand("b").ask("extend", effect=FIRST_EFFECT, lasts_s=0.1)
        wait_until(lambda: nodes.passes("a", "b"), "the end of the block")
        with pytest.raises(HarnessError, match="the effect has ended before it was lifted"):
            applied.shown()
        assert applied.lift()
        assert applied.shown() == 0


def test_a_block_that_one_hand_does_not_begin_is_lifted_in_the_others(nodes: JobNodes) -> None:
    with backend(nodes) as traffic:
        nodes.hand("d")
        nodes.process("d").kill()
        with pytest.raises(NodeUnreachable, match="hand of d"):
            traffic.apply("a", Block(ways=TWO_HANDS))
        assert nodes.blocked() == set()
        assert nodes.run("b", "nft", "list", "tables") == ""


def test_the_end_of_the_backend_lifts_all(nodes: JobNodes) -> None:
    with backend(nodes) as traffic:
        traffic.apply("a", Block(ways=TWO_HANDS))
        traffic.apply("a", Block(ways=between(["a"], ["c"])))
    assert nodes.blocked() == set()


def test_a_new_connection_shows_whether_a_block_has_healed(nodes: JobNodes) -> None:
    with backend(nodes) as traffic:
        assert traffic.connect("a", "b").how == "refused"
        assert traffic.is_reachable("a", "b")
        for way in between(["a"], ["b"]):
            applied = traffic.apply("a", Block(ways=(way,)))
            reach = traffic.connect("a", "b")
            assert (reach.how, reach.took_ms >= 600) == ("timeout", True)
            assert not traffic.is_reachable("a", "b")
            assert traffic.is_reachable("a", "c")
            assert applied.lift()
            assert traffic.is_reachable("a", "b")
        with nodes.socket("b", socket.SOCK_STREAM) as listener:
            listener.bind((nodes.address("b"), 0))
            listener.listen()
            reach = traffic.connect("a", "b", listener.getsockname()[1])
        assert reach.how == "connected"
        assert 0 < reach.took_ms < 1000


def retransmitted(nodes: JobNodes, name: str) -> int:
    names, values = [
        line.split()
        for line in nodes.run(name, "cat", "/proc/net/snmp").splitlines()
        if "Tcp:" in line
    ]
    return int(values[names.index("RetransSegs")])


def test_tcp_sends_again_what_is_dropped_in_the_pod_of_its_sender(nodes: JobNodes) -> None:
    near, far = nodes.connection("a", "b")
    with backend(nodes) as traffic:
        before = retransmitted(nodes, "a")
        applied = traffic.apply("a", Block(ways=towards(["a"], ["b", "c"])))
        assert nodes.started() == {"a"}
        near.sendall(b"x")
        wait_until(lambda: retransmitted(nodes, "a") > before, "a segment that is sent again")
        assert applied.shown() >= 2
        assert applied.lift()
        assert far.recv(1) == b"x"


@pytest.mark.parametrize("ways", [[("a", "b")], [("b", "a")], towards(["a"], ["b", "c"])])
def test_blocks_and_connections_by_ipv6(nodes: JobNodes, ways: list[tuple[str, str]]) -> None:
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("packets: no IPv6")
    addresses = {name: f"fd00::{number}" for number, name in enumerate("abc", 1)}
    for name, address in addresses.items():
        nodes.run(name, "ip", "-6", "address", "add", f"{address}/64", "dev", "eth0", "nodad")
    with contextlib.closing(HandTraffic(nodes.hand, addresses.__getitem__)) as traffic:
        for loud, how in ((False, "timeout"), (True, "refused")):
            wait_until(lambda: traffic.is_reachable("a", "b"), "a connection by IPv6")
            applied = traffic.apply("a", Block(ways=tuple(ways), loud=loud))
            assert traffic.connect("a", "b").how == how
            with nodes.socket("a", socket.SOCK_DGRAM, socket.AF_INET6) as sender:
                assert sender.sendto(b"x", (addresses["b"], PORT)) == 1  # its loss is silent
            assert not traffic.is_reachable("a", "b")
            is_met = not loud or ("a", "b") in ways  # the reset that comes back from b passes
            assert (applied.shown() > 0) == is_met
            assert applied.lift()
        assert traffic.is_reachable("a", "b")


def test_a_limit_slows_what_a_pod_sends(nodes: JobNodes) -> None:
    with backend(nodes, LASTS_S) as traffic:
        applied = traffic.apply("a", Narrow(bits_per_s=2e6, stations=("a", "coordinator")))
        assert nodes.started() == {"a"}
        near, far = nodes.connection("a", "b")
        began_s = time.monotonic()
        near.sendall(b"x" * 500_000)
        near.shutdown(socket.SHUT_WR)
        while far.recv(65536):
            pass
        assert time.monotonic() - began_s > LASTS_S
        assert applied.shown() > 0
        assert applied.lift()
        assert applied.shown() > 0
        assert "tbf" not in nodes.run("a", "tc", "qdisc", "show", "dev", "eth0")


def test_a_limit_of_a_killed_hand_is_not_reported_as_lifted(nodes: JobNodes) -> None:
    """The kernel keeps no time for it: ``sweep`` removes it."""
    with backend(nodes, LASTS_S) as traffic:
        applied = traffic.apply("a", Narrow(bits_per_s=2e6, stations=("a",)))
        nodes.process("a").kill()
        assert not applied.lift()
        assert "tbf" in nodes.run("a", "tc", "qdisc", "show", "dev", "eth0")
