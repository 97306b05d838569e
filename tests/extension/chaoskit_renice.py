"""A fault and its backend, outside chaoskit: the main threads of a node get the CPU after all other threads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput
from chaoskit.process.linux import start_ticks
from chaoskit.substrate.cluster.job_cluster import JobCluster
from chaoskit.substrate.core.actions import Action, Applied
from chaoskit.substrate.core.extensions import BackendPlace
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.local import LocalSubstrate
from chaoskit.substrate.undo import CommandEntry, Undo
from chaoskit.vocabulary import HUNG_CAUSES
from faults import Fault, Target
from faults.evidence import Counted, Evidence

# -- the fault -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReniceNode(Fault):
    """Let the main threads of the rank's node have a CPU only when nothing else on the machine wants it.

    Args:
        nice: niceness of the processes, 1 to 19.
        lift_after_s: duration of the fault in seconds.
    """

    nice: int = 19
    lift_after_s: float = 0.5

    family: ClassVar[str] = "time"
    effect: ClassVar[str] = "the main threads of one node get the CPU last"
    evidence: ClassVar[str] = "the kernel's niceness of each main thread, read back"
    stands_for: ClassVar[str] = "a neighbour on the same machine that is more important"
    unlisted: ClassVar[str] = "the tables count what ends a job"
    impact: ClassVar[str] = "steps take longer; nothing may be given up for it"
    undo: ClassVar[str] = "each process gets its niceness back, by the harness, or by its guard"
    substrates: ClassVar[tuple[str, ...]] = ("local", "netns")
    cost: ClassVar[Any] = "nothing"
    drawn: ClassVar[Mapping[str, Sequence[Any]]] = {"nice": (5, 19)}
    whole_node: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = HUNG_CAUSES | {"slow"}

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if not 1 <= self.nice <= 19:
            raise BadInput("nice", self.nice, "use 1 to 19")

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        with target.applied(Renice(self.nice)) as renice:
            target.release()
            count = await target.seen(renice.shown)
            yield Counted(
                subject=target.whole_node,
                source="the kernel, read back",
                count=count or 0,
                seen=f"the main threads of {count} processes of {target.node} have niceness {self.nice}",
            )
            await target.sleep(self.lift_after_s)
        target.lifted()


# -- its backend -----------------------------------------------------------------------------------


class Renice(Action, frozen=True):
    """Give the main threads of the node's processes this niceness.

    ``shown`` returns the number of processes that have it, or 0 while one of them does not.
    """

    nice: int


class ReniceBackend:
    """Changes the niceness of main threads of processes on this host.

    Linux has a niceness for each thread.
    """

    actions = frozenset[type[Action]]({Renice})

    def __init__(self, place: BackendPlace) -> None:
        self._place = place

    def apply(self, node: str, action: Action) -> Applied:
        assert isinstance(action, Renice)
        previous = [
            (process, os.getpriority(os.PRIO_PROCESS, process.pid))
            for process in self._place.processes(node)
        ]
        undo = self._place.undo.plan(CommandEntry(self._undo_command(previous)))
        for process, _ in previous:
            _renice(process, action.nice)
        return Reniced(previous, action.nice, undo)

    def _undo_command(self, previous: list[tuple[Process, int]]) -> str:
        """Return a command that restores the niceness of every process, and writes their number to a file.

        A pid that belongs to another process by then is left alone.
        """
        # The fields are counted behind the name of the process, which may have spaces.
        ticks = "$(sed 's/.*) //' /proc/{process.pid}/stat | cut -d' ' -f20)"
        restore = f"[ x{ticks} != x{{process.ticks}} ] || renice -n {{nice}} -p {{process.pid}}"
        commands = "; ".join(
            restore.format(process=process, nice=nice) for process, nice in previous
        )
        return (
            f"sh -c \"{commands}; echo {len(previous)} >> '{self._place.run_directory}/put-back'\""
        )

    def release(self, node: str | None = None) -> None:
        """Do nothing: a process that gets little CPU can end."""

    def close(self) -> None:
        """Do nothing: the backend holds no resource."""


class Reniced:
    """Processes whose niceness was changed."""

    def __init__(self, previous: list[tuple[Process, int]], nice: int, undo: Undo) -> None:
        self._previous = previous
        self._nice = nice
        self._undo = undo

    def shown(self) -> int:
        live = [
            process for process, _ in self._previous if start_ticks(process.pid) == process.ticks
        ]
        return len(live) if all(_niceness(process.pid) == self._nice for process in live) else 0

    def lift(self) -> bool:
        for process, nice in self._previous:
            _renice(process, nice)
        self._undo.done()
        return True


def _renice(process: Process, nice: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        if start_ticks(process.pid) == process.ticks:
            os.setpriority(os.PRIO_PROCESS, process.pid, nice)


def _niceness(pid: int) -> int:
    """Return the niceness of the main thread, from the kernel."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[16])


make_backend: Callable[[BackendPlace], ReniceBackend] = ReniceBackend


# -- a substrate -----------------------------------------------------------------------------------


class TidySubstrate(LocalSubstrate):
    """Like ``local``, and says in each run's directory that it was here."""

    name = "tidy"

    def launch(self, config: RunConfig, run_directory: Path, **options: Any) -> JobCluster:
        (run_directory / "tidy").touch()
        return super().launch(config, run_directory, **options)
