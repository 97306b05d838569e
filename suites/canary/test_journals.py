"""No mistake in what is written of a run ends as passed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chaoskit import Chaos, Outcome, Verdict, judge_directory
from chaoskit.suites.canary.damages import AT, DAMAGES, Damage
from chaoskit.suites.canary.journals import Journals
from faults import Kill

pytestmark = pytest.mark.costly

#: Cell of the matrix -> how a run of it is planned.
CELLS: dict[str, dict[str, Any]] = {
    "exact": {"job": "gpt", "shards": 4},
    "fast": {"job": "gpt", "shards": 4, "reduction": "fast"},
    "sharded": {"job": "fsdp", "shards": 3},
}

_runs: dict[str, Path] = {}
_Copy = Callable[[str], Path]


@pytest.fixture
def copy_of_a_run(chaos: Chaos, tmp_path: Path) -> _Copy:
    """A copy of the directory of one run of this session, in which rank 1 is killed and replaced."""

    def copy(cell: str) -> Path:
        if cell not in _runs:
            plan = {"nodes": 3, "steps": 10, "options": {"size": "tiny", "batch": 12}, **CELLS[cell]}
            outcome = chaos.run(plan.pop("job"), faults=[Kill(rank=1, at_step=AT)], **plan)
            _runs[cell] = Path(outcome.directory)
        return Path(shutil.copytree(_runs[cell], tmp_path / "run"))

    return copy


@pytest.mark.promise("None of these mistakes ends as *passed*.", cell="exact")
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
def test_a_mistake_in_the_journals_does_not_pass(copy_of_a_run: _Copy, damage: Damage, cell: str) -> None:
    directory = copy_of_a_run(cell)
    journals = Journals(directory)
    damage.change(journals)
    journals.write()
    outcome: Outcome = judge_directory(directory)
    assert outcome.verdict == damage.verdict, outcome.reasons


@pytest.mark.parametrize("cell", CELLS)
def test_journals_that_are_written_anew_are_the_same(copy_of_a_run: _Copy, cell: str) -> None:
    """What is caught is the mistake, and not that files were changed."""
    directory = copy_of_a_run(cell)
    before = judge_directory(directory)
    Journals(directory).write()
    assert judge_directory(directory).verdict == before.verdict == Verdict.PASSED
