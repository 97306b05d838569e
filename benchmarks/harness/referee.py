"""The referee of two jobs that run together: it passes a token between them and measures their CPU
time.
"""

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
    """A block of steps of one side.

    Attributes:
        seconds: the duration of each step on rank 0, without the dropped ones.
        wall_s: the duration of the whole turn, on the referee's clock.
        cpu_s: CPU time of a step, over all processes of the side that had the turn.
        waiting_cpus: CPUs used by the processes of the waiting side.
        other_cpus: CPUs used by processes of neither side.
    """

    side: str
    seconds: list[float]
    wall_s: float
    cpu_s: float
    waiting_cpus: float
    other_cpus: float

    @property
    def is_marked(self) -> bool:
        """True if other processes used so much of the CPUs that the turn does not count."""
        return self.other_cpus > OTHER_CPUS_MAX


@dataclass
class _Rank:
    """The referee's end of a rank's connection."""

    connection: socket.socket
    lines: BinaryIO = field(init=False)

    def __post_init__(self) -> None:
        self.lines = self.connection.makefile("rb")

    def receive(self) -> Any:
        line = self.lines.readline()
        if not line:
            raise ConnectionError("a rank has ended")
        return json.loads(line)


class Referee:
    """The referee of one comparison.

    Args:
        directory: the directory of its socket.
        world: the number of ranks of each side.
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
            hello = rank.receive()
            self._ranks[hello["side"]][hello["rank"]] = rank

    def play(self, side: str, ddp_pid: int) -> Turn:
        """Give the token to one side, and return its turn once all of its ranks have handed it
        back.
        """
        ranks, before, begin_s = self._ranks[side], look_at_cpus(ddp_pid), time.monotonic()
        for rank in ranks.values():
            rank.connection.sendall(b"go\n")
        rank_seconds = {number: rank.receive() for number, rank in ranks.items()}
        wall_s, after = time.monotonic() - begin_s, look_at_cpus(ddp_pid)
        used = {name: max(0.0, after[name] - before[name]) / wall_s for name in after}
        waiting = next(name for name in SIDES if name != side)
        cpu_s = used[side] * wall_s / len(rank_seconds[0])
        return Turn(side, rank_seconds[0][DROPPED:], wall_s, cpu_s, used[waiting], used["other"])

    def close(self) -> None:
        """End the turns.

        Ranks that wait for the token fail, and so does :meth:`gather` or :meth:`play` on another
        thread.
        """
        _end(self._listener)
        for rank in (rank for ranks in self._ranks.values() for rank in ranks.values()):
            _end(rank.connection)


def _end(connection: socket.socket) -> None:
    """Shut ``connection`` down before closing it: closing alone does not wake a thread that reads
    from it.
    """
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


@contextlib.contextmanager
def refereed(directory: Path, world: int) -> Iterator[Referee]:
    """Provide a referee for the duration of the context."""
    referee = Referee(directory, world)
    try:
        yield referee
    finally:
        referee.close()


def order(pairs: int) -> list[tuple[str, str]]:
    """Return the order of the sides in each pair.

    Each side begins every other pair, so that a machine that gets slower favours neither.
    """
    return [SIDES if number % 2 == 0 else (SIDES[1], SIDES[0]) for number in range(pairs)]


def look_at_cpus(ddp_pid: int) -> dict[str, float]:
    """Return the CPU seconds so far of DDP's processes, of this process tree without them, and of
    all others.

    DDP's processes are those below ``ddp_pid``. The time of a process that ended counts among the
    others.
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
    """Return the busy seconds of all CPUs; time that the host took away is not counted."""
    with Path("/proc/stat").open() as file:
        user, nice, system, _, _, irq, softirq = map(int, file.readline().split()[1:8])
    return (user + nice + system + irq + softirq) / _TICKS


def plain(turn: Turn) -> Mapping[str, Any]:
    """Return ``turn`` as a dictionary for the file of results."""
    used = {"other_cpus": round(turn.other_cpus, 3), "waiting_cpus": round(turn.waiting_cpus, 3)}
    return {
        "seconds": turn.seconds,
        "cpu_s": round(turn.cpu_s, 4),
        "marked": turn.is_marked,
        **used,
    }
