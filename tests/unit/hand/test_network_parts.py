"""Tests of what the hand writes for nftables, and reads from the kernel."""

from __future__ import annotations

import ipaddress

import pytest

from chaoskit.hand.fields import addresses
from chaoskit.hand.network.connections import parse_connections
from chaoskit.hand.network.packet_rules import packets
from chaoskit.hand.network.tools import run_tool
from chaoskit.hand.refusals import Unable

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
LISTED = "   0: {own} {peer} {state} 00000000:00000000 00:00000000 00000000     0        0 4711 1\n"


def test_overlapping_addresses_become_networks_without_overlaps() -> None:
    networks = addresses(["10.0.0.7", "10.0.0.0/24", "fd00::1", "10.0.1.0/24"])
    assert [str(network) for network in networks] == ["10.0.0.0/23", "fd00::1/128"]


@pytest.mark.parametrize("value", ["10.0.0.7", [], [7], ["host"], ["10.0.0.1/24"], ["10.0.0.1;"]])
def test_other_addresses_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="give a list"):
        addresses(value)


def test_counters_of_a_table_are_summed_by_direction() -> None:
    line = '\t\tip saddr @v4 counter packets {} bytes 9 comment "{}"\n'
    text = line.format(3, "in_seen") + line.format(4, "in_seen") + line.format(5, "out_dropped")
    assert packets(text) == {"in": {"seen": 7}, "out": {"dropped": 5}}


def test_connections_are_read_and_listeners_are_left_out() -> None:
    text = HEAD
    text += LISTED.format(own="0100007F:1F90", peer="00000000:0000", state="0A")
    text += LISTED.format(own="0200000A:1F90", peer="0300000A:01BB", state="01")
    mapped = "0000000000000000FFFF00000300000A:01BB"
    text += LISTED.format(own="0000000000000000FFFF00000200000A:1F91", peer=mapped, state="01")
    connections = list(parse_connections(text))
    assert [connection.own_port for connection in connections] == [0x1F90, 0x1F91]
    assert {connection.peer for connection in connections} == {ipaddress.ip_address("10.0.0.3")}
    assert connections[0].inode == 4711


def test_a_missing_tool_is_named() -> None:
    with pytest.raises(Unable, match="no-such-tool is not in this image"):
        run_tool("no-such-tool")


def test_a_failing_tool_tells_its_error() -> None:
    with pytest.raises(Unable, match=r"ls: .*No such file or directory"):
        run_tool("ls", "/no/such/file")
