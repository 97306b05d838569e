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

# -- the fault --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReniceNode(Fault):
    """Let the main threads of the rank's node have a CPU only when nothing else on the machine wants it.

    Args:
        nice: of the processes, 1 to 19.
        lift_after_s: how long it lasts.
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

    @property
    def from_outside(self) -> bool:
        return True

    @property
    def leads_to(self) -> frozenset[str]:
        return HUNG_CAUSES | {"slow"}

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if not 1 <= self.nice <= 19:
            raise BadInput("nice", self.nice, "use 1 to 19")

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        with target.applied(Renice(self.nice)) as renice:
            target.release()
            many = await target.seen(renice.shown)
            told = (
                f"the main threads of {many} processes of {target.node} have niceness {self.nice}"
            )
            yield Counted(
                subject=target.whole_node,
                source="the kernel, read back",
                count=many or 0,
                seen=told,
            )
            await target.sleep(self.lift_after_s)
        target.lifted()


# -- its backend ------------------------------------------------------------------------------------------------------


class Renice(Action, frozen=True):
    """Give the main threads of the node's processes this niceness. Shown: how many have it; 0 while one has not."""

    nice: int


class ReniceBackend:
    """Changes the niceness of processes of this host: of their main threads, as Linux has one for each thread."""

    actions = frozenset[type[Action]]({Renice})

    def __init__(self, place: BackendPlace) -> None:
        self._place = place

    def apply(self, node: str, action: Action) -> Applied:
        assert isinstance(action, Renice)
        found = [
            (one, os.getpriority(os.PRIO_PROCESS, one.pid)) for one in self._place.processes(node)
        ]
        undo = self._place.undo.plan(CommandEntry(self._in_words(found)))
        for one, _ in found:
            _renice(one, action.nice)
        return Reniced(found, action.nice, undo)

    def _in_words(self, found: list[tuple[Process, int]]) -> str:
        """A command that gives every process its niceness back, if it is still the one that it was, and says so."""
        ticks = "$(sed 's/.*) //' /proc/{one.pid}/stat | cut -d' ' -f20)"  # behind the name, which may have spaces
        same = f"[ x{ticks} != x{{one.ticks}} ] || renice -n {{was}} -p {{one.pid}}"
        changes = "; ".join(same.format(one=one, was=was) for one, was in found)
        return f"sh -c \"{changes}; echo {len(found)} >> '{self._place.run_directory}/put-back'\""

    def release(self, node: str | None = None) -> None:
        """A process that gets little CPU ends all the same."""

    def close(self) -> None:
        """Nothing is held."""


class Reniced:
    """Processes whose niceness was changed."""

    def __init__(self, found: list[tuple[Process, int]], nice: int, undo: Undo) -> None:
        self._found, self._nice, self._undo = found, nice, undo

    def shown(self) -> int:
        live = [one for one, _ in self._found if start_ticks(one.pid) == one.ticks]
        return len(live) if all(_niceness(one.pid) == self._nice for one in live) else 0

    def lift(self) -> bool:
        for one, was in self._found:
            _renice(one, was)
        self._undo.done()
        return True


def _renice(process: Process, nice: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        if start_ticks(process.pid) == process.ticks:
            os.setpriority(os.PRIO_PROCESS, process.pid, nice)


def _niceness(pid: int) -> int:
    """Of the main thread, as the kernel lists it."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[16])


make_backend: Callable[[BackendPlace], ReniceBackend] = ReniceBackend


# -- a substrate ------------------------------------------------------------------------------------------------------


class TidySubstrate(LocalSubstrate):
    """Like ``local``, and says in each run's directory that it was here."""

    name = "tidy"

    def launch(self, config: RunConfig, run_directory: Path, **options: Any) -> JobCluster:
        (run_directory / "tidy").touch()
        return super().launch(config, run_directory, **options)
