"""TCP error counters of a network namespace, read from /proc.

-> ``hand/processes/operations.py`` answers with them.
"""

from __future__ import annotations

from .proc import read


def tcp_troubles(pid: int) -> dict[str, int] | None:
    """Return the counters of a process's network namespace; None if the process is gone.

    ``losses`` are retransmitted segments, without those that the other side reported as duplicates.
    ``resets`` are connections that the other side reset or refused. The counters are those of
    /proc/net/snmp (RFC 4022) and /proc/net/netstat.
    """
    snmp, netstat = (read(f"/proc/{pid}/net/{name}") for name in ("snmp", "netstat"))
    if not snmp or not netstat:  # a zombie has no network namespace
        return None
    return troubles_in(snmp, netstat)


def troubles_in(snmp: str, netstat: str) -> dict[str, int]:
    """Return losses and resets by the texts of the two files of counters."""
    counts = {**_tcp_counts(snmp), **_tcp_counts(netstat)}

    def total(*names: str) -> int:
        return sum(counts.get(name, 0) for name in names)

    # the first counter exists since Linux 5.9
    needless = total("TCPDSACKRecvSegs") or total("TCPDSACKRecv", "TCPDSACKOfoRecv")
    own_resets = total("TCPAbortOnClose", "TCPAbortOnData", "TCPAbortOnTimeout")
    return {
        "losses": total("RetransSegs") - needless,
        "resets": total("EstabResets", "AttemptFails") - own_resets,
    }


def _tcp_counts(text: str) -> dict[str, int]:
    """Return the TCP counters in a file, whose lines are pairs of names and values."""
    lines = [line.split() for line in text.splitlines()]
    return {
        name: int(value)
        for names, values in zip(lines[::2], lines[1::2])
        if names[0] in ("Tcp:", "TcpExt:")
        for name, value in zip(names[1:], values[1:])
    }
