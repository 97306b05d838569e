"""What must not count as evidence, nor excuse anything. Pure: targets and journals are written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chaoskit.messages import WorkerLost
from chaoskit.substrate.undo import UndoLog
from faults import Exit
from faults.base import Fault, Target


@pytest.fixture
def undo(tmp_path: Path) -> Any:
    log = UndoLog(tmp_path)
    yield log
    log.close()


def target(undo: UndoLog, **known: Any) -> Target:
    """Rank 1 of a run, struck in step 8. Its cluster is gone."""
    where: dict[str, Any] = {"worker": "node1.w0", "node": "node1", "rank": 1, "step": 8, "phase": "forward"}
    process = {"pid": 2**22 + 1, "tid": 2**22 + 1, "ticks": 1}  # above the largest pid
    gone: Any = None
    return Target(cluster=gone, undo=undo, fault_id="fault0", **where, **process, **known)


def seen(fault: Fault, struck: Target) -> bool:
    return fault.observe(struck) is not None


def test_the_end_of_the_job_is_no_early_exit(undo: UndoLog) -> None:
    """Every worker exits with status 0 in the end, a rank that ignored the fault, too."""
    struck = target(undo, exited=("exited", "status 0"))
    assert not seen(Exit(rank=1, at_step=8), struck)
    struck.lost = WorkerLost("node1.w0", "node1", "exited", "exited with status 0", 1)
    assert seen(Exit(rank=1, at_step=8), struck)
