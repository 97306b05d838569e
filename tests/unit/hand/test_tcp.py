"""TCP counters in the texts of the kernel."""

from __future__ import annotations

from chaoskit.hand.processes.tcp import troubles_in

SNMP = """Ip: Forwarding RetransSegs
Ip: 1 1000
Tcp: EstabResets AttemptFails RetransSegs InErrs
Tcp: 30 12 500 7
"""
NETSTAT = """TcpExt: TCPAbortOnData TCPAbortOnClose TCPAbortOnTimeout TCPDSACKRecv TCPDSACKOfoRecv{name}
TcpExt: 1 2 4 60 8{value}
IpExt: EstabResets
IpExt: 1000
"""


def test_needless_retransmissions_and_resets_of_this_side_are_left_out() -> None:
    old = troubles_in(SNMP, NETSTAT.format(name="", value=""))
    assert old == {"losses": 500 - 68, "resets": 42 - 7}
    new = troubles_in(SNMP, NETSTAT.format(name=" TCPDSACKRecvSegs", value=" 90"))
    assert new == {"losses": 500 - 90, "resets": 42 - 7}
