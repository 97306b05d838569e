"""Runs that the tests of the canary share."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chaoskit import Chaos
from chaoskit.faults import Kill
from chaoskit.suites.canary.damages import AT

#: Cell of the matrix -> plan of its run.
_CELLS: dict[str, dict[str, Any]] = {
    "exact": {"job": "gpt", "shards": 4},
    "fast": {"job": "gpt", "shards": 4, "reduction": "fast"},
    "sharded": {"job": "fsdp", "shards": 3},
}

_runs: dict[str, Path] = {}


@pytest.fixture
def copy_of_a_run(chaos: Chaos, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that copies the directory of a run of this session.

    Its argument is a cell of the matrix, and its result the copy, one in each test. Rank 1 is
    killed and replaced in that run.
    """

    def copy(cell: str) -> Path:
        if cell not in _runs:
            plan = {
                "nodes": 3,
                "steps": 10,
                "options": {"size": "tiny", "batch": 12},
                **_CELLS[cell],
            }
            outcome = chaos.run(plan.pop("job"), faults=[Kill(rank=1, at_step=AT)], **plan)
            _runs[cell] = Path(outcome.directory)
        return Path(shutil.copytree(_runs[cell], tmp_path / "run"))

    return copy
