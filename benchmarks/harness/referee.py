"""Passes a token between two jobs that are alive together, and looks at the CPUs meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from chaoskit.process.linux import descendants

SIDES = ("ddp", "ours")
#: Steps at the begin of a turn that are not looked at: the other job has filled the caches.
DROPPED = 2
#: CPUs that processes of others may use during a turn; with more of it the turn is marked.
OTHER_CPUS_MAX = 0.2

_START_S, _TURN_S = 300.0, 600.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Turn:
    """One block of steps of one side.

    Attributes:
        seconds: of each step on rank 0, without the dropped ones.
        wall_s: of the whole turn, on the referee's clock.
        cpu_s: CPU time of a step, over all processes of the side whose turn it was.
        waiting_cpus: that the processes of the side that waited used.
        other_cpus: that processes of neither side used.
    """

    side: str
    seconds: list[float]
    wall_s: float
    cpu_s: float
    waiting_cpus: float
    other_cpus: float

    @property
    def is_marked(self) -> bool:
        """Whether others used so much of the CPUs that it does not count."""
        return self.other_cpus > OTHER_CPUS_MAX


@dataclass
class _Rank:
    """The referee's end of a rank's connection."""

    connection: socket.socket
    lines: BinaryIO = field(init=False)

    def __post_init__(self) -> None:
        self.lines = self.connection.makefile("rb")

    def hear(self) -> Any:
        line = self.lines.readline()
        if not line:
            raise ConnectionError("a rank has ended")
        return json.loads(line)


class Referee:
    """Serves one comparison.

    Args:
        directory: for the socket. world: ranks of each side.
    """

    def __init__(self, directory: Path, world: int) -> None:
        self.path, self._world = str(directory / "referee"), world
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(2 * world)
        self._listener.settimeout(_START_S)
        self._ranks: dict[str, dict[int, _Rank]] = {side: {} for side in SIDES}

    def gather(self) -> None:
        """Wait until every rank of both jobs has come. Raises TimeoutError, OSError."""
        while any(len(ranks) < self._world for ranks in self._ranks.values()):
            connection, _ = self._listener.accept()
            connection.settimeout(_TURN_S)
            rank = _Rank(connection)
            hello = rank.hear()
            self._ranks[hello["side"]][hello["rank"]] = rank

    def play(self, side: str, ddp_pid: int) -> Turn:
        """Let one side have its turn."""
        ranks, before, begin_s = self._ranks[side], look_at_cpus(ddp_pid), time.monotonic()
        for rank in ranks.values():
            rank.connection.sendall(b"go\n")
        told = {number: rank.hear() for number, rank in ranks.items()}
        wall_s, after = time.monotonic() - begin_s, look_at_cpus(ddp_pid)
        used = {name: max(0.0, after[name] - before[name]) / wall_s for name in after}
        waiting = next(name for name in SIDES if name != side)
        cpu_s = used[side] * wall_s / len(told[0])
        return Turn(side, told[0][DROPPED:], wall_s, cpu_s, used[waiting], used["other"])

    def close(self) -> None:
        """End the turns: ranks that wait for one fail, and so does :meth:`gather` or :meth:`play` on another thread."""
        _end(self._listener)
        for rank in (rank for ranks in self._ranks.values() for rank in ranks.values()):
            _end(rank.connection)


def _end(connection: socket.socket) -> None:
    """Close it, and wake up the thread that reads from it: to close it alone does not."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


@contextlib.contextmanager
def refereed(directory: Path, world: int) -> Iterator[Referee]:
    """A referee for the block."""
    referee = Referee(directory, world)
    try:
        yield referee
    finally:
        referee.close()


def order(pairs: int) -> list[tuple[str, str]]:
    """Who begins each pair: the sides take turns in that, too, so that a machine that becomes slower favours none."""
    return [SIDES if number % 2 == 0 else (SIDES[1], SIDES[0]) for number in range(pairs)]


def look_at_cpus(ddp_pid: int) -> dict[str, float]:
    """CPU seconds so far: of the processes that live below ``ddp_pid``, of this one and all others below it, of others.

    A process that ends takes its time along, and counts among the others.
    """
    ddp = {ddp_pid, *descendants(ddp_pid)}
    ours = {os.getpid(), *descendants(os.getpid())} - ddp
    spent = {"ddp": sum(map(_cpu_seconds, ddp)), "ours": sum(map(_cpu_seconds, ours))}
    return spent | {"other": _busy_seconds() - sum(spent.values())}


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _busy_seconds() -> float:
    """Of all CPUs; time that the host took away is nobody's."""
    with Path("/proc/stat").open() as file:
        user, nice, system, _, _, irq, softirq = map(int, file.readline().split()[1:8])
    return (user + nice + system + irq + softirq) / _TICKS


def plain(turn: Turn) -> Mapping[str, Any]:
    """For the file of results."""
    used = {"other_cpus": round(turn.other_cpus, 3), "waiting_cpus": round(turn.waiting_cpus, 3)}
    return {
        "seconds": turn.seconds,
        "cpu_s": round(turn.cpu_s, 4),
        "marked": turn.is_marked,
        **used,
    }
