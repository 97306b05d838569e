"""Fault ``TornWrite``: a node ends between two acts by which a state is copied or stored.

-> checkpoint/layout/boundaries.py lists the boundaries; checkpoint/disk/breakpoints.py stops the
thread that reaches one.
-> daemon/injection.py sets the breakpoint in the checkpoint daemon; runtime/injection/waiting.py in
the worker.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from chaoskit.checkpoint.layout import boundaries
from chaoskit.config import RunConfig
from chaoskit.errors import BadInput
from chaoskit.faults.base import LIVE_ROLES, Fault
from chaoskit.faults.evidence import Evidence, ReadBack
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.nodes.node import NODE_LOST_CAUSES, KillNode
from chaoskit.faults.processes.signals import all_gone, look_up, signal_all
from chaoskit.faults.target import Target

_ARMED_S = 5.0  # longest wait for the answer of the node
#: Boundaries that every node reaches that stores. Only the node of rank 0 reaches the others.
_BY_ALL = ("write", "sync")


@dataclass(frozen=True, kw_only=True)
class TornWrite(Fault):
    """Kill the process that copies or stores the state, exactly at a boundary of its work.

    Nothing, half or all of the work is done by then. From ``at_step`` on, the thread of the rank's
    node that first reaches the boundary waits there until all of the node is killed. In a sharded
    job the worker copies its piece itself: at the boundaries of the memory tier only the worker
    dies. A replicated state is copied now and then (``copies="affordable"``): these boundaries are
    reached with the next copy.

    Args:
        boundary: of the memory tier: ``begun``, ``chunk``, ``copied``, ``sealed``; of a copy on
            another node, at its owner: ``offering``, ``sending``, ``acknowledged``, at the partner:
            ``receiving``, ``verified``, ``answering``; of the disk tier: ``stage``, ``write``,
            ``sync``, ``metadata``, ``manifest``, ``seal``, ``commit``, ``publish``, ``committed``,
            ``prune``, ``delete``, ``pruned``; of the remote tier: ``upload``, ``uploaded``,
            ``announced``, ``expire``, ``expired``. See
            ``chaoskit/checkpoint/layout/boundaries.py``.
    """

    boundary: str = "write"

    family: ClassVar[str] = "checkpoint"
    whole_node: ClassVar[bool] = True
    ends_node: ClassVar[bool] = True
    of_runtime: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = NODE_LOST_CAUSES
    effect: ClassVar[str] = "one node ends at an instant at which a copy of the state is half made"
    evidence: ClassVar[str] = (
        "a thread said that it stood at this boundary; then every process of its node is gone"
    )
    stands_for: ClassVar[str] = "machines that fail while a checkpoint is written"
    counted: ClassVar[tuple[IncidentKind, ...]] = KillNode.counted
    impact: ClassVar[str] = (
        "the workers of the node are given up; what was half made counts nowhere"
    )
    sample: ClassVar[Mapping[str, Any]] = {"rank": 0, "at_step": 20, "boundary": "commit"}
    example: ClassVar[str] = """chaos.run(
    "gpt",
    nodes=4,
    steps=60,
    disk={{"target": "/tmp/job", "every_steps": 10}},
    faults=[{fault}],
)"""

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.boundary not in boundaries.PLACES:
            raise BadInput("boundary", self.boundary, f"use one of {', '.join(boundaries.PLACES)}")
        if self.rank != 0 and self._is_stored and self.boundary not in _BY_ALL:
            raise BadInput("rank", self.rank, f"use 0: no other node reaches {self.boundary!r}")

    def require(self, config: RunConfig) -> None:
        if self.boundary in boundaries.BOUNDARIES and config.disk is None:
            raise BadInput(
                "disk", config.disk, f"store snapshots: else nothing reaches {self.boundary!r}"
            )
        if self.boundary in boundaries.REMOTE and config.remote is None:
            raise BadInput(
                "remote", config.remote, f"upload snapshots: else nothing reaches {self.boundary!r}"
            )
        if self.boundary in (*boundaries.OUTWARD, *boundaries.INWARD):
            self._require_partners(config)
        if self.boundary in boundaries.MEMORY and not config.job.sharded:
            self._require_copy(config)
        for places, tier in (
            (("prune", "delete", "pruned"), config.disk),
            (("expire", "expired"), config.remote),
        ):
            if self.boundary in places and tier is not None and not tier.keep_last:
                raise BadInput(
                    "keep_last",
                    tier.keep_last,
                    f"keep a few: else nothing reaches {self.boundary!r}",
                )

    @property
    def _is_stored(self) -> bool:
        return self.boundary in (*boundaries.BOUNDARIES, *boundaries.REMOTE)

    def _require_partners(self, config: RunConfig) -> None:
        """Raise BadInput unless nodes send copies of the state to each other."""
        if not config.job.sharded:
            raise BadInput(
                "job", config.job.name, f"use a sharded one: else nothing reaches {self.boundary!r}"
            )
        if not config.memory_copies or config.nodes < 2:
            raise BadInput(
                "memory_copies", config.memory_copies, "use 1 or more, and 2 nodes or more"
            )
        if self.boundary == "sending" and config.transport != "tcp":
            raise BadInput(
                "transport",
                config.transport,
                "use 'tcp': partners on one host read the owner's memory",
            )

    def _require_copy(self, config: RunConfig) -> None:
        """Raise BadInput unless the node of the rank copies the state.

        The nodes of the lowest ranks copy a replicated state, unless racks play a part.
        """
        copies = config.memory_copies
        is_fixed = isinstance(self.rank, int) and not config.rack_nodes
        if not copies or (is_fixed and int(self.rank) >= copies) or self.rank in LIVE_ROLES:
            raise BadInput(
                "memory_copies",
                copies,
                f"use more, so that the node of rank {self.rank} copies the state",
            )

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.order(target.node, "break", place=self.boundary)
        await target.heard(lambda: target.reports, within_s=_ARMED_S)
        target.act("break", place=self.boundary)  # the rank goes on with a breakpoint of its own
        await target.heard(lambda: any(report.effective for report in target.reports))
        reached = next(report for report in target.reports if report.effective)
        with contextlib.suppress(ProcessLookupError):  # the process may have ended by another cause
            processes = look_up(target)
            if reached.worker:
                processes = [process for process in processes if process.pid == target.pid]
            target.claim()
            signal_all(processes, signal.SIGKILL)
            if not processes:
                return
            node_gone = await all_gone(target, processes)
            gone = (
                f"{target.worker} (pid {target.pid}) is gone" if reached.worker else str(node_gone)
            )
            subject = target.rank_process if reached.worker else target.whole_node
            yield ReadBack(
                subject=subject,
                source="the thread that stood there, and the kernel",
                value=f"{reached.observed}; {gone}",
            )
