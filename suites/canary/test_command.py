"""Tests that no mistake in the files of a command's run ends as passed."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from chaoskit import Chaos, LogPatterns, Verdict, judge_directory
from chaoskit.faults import Kill
from chaoskit.suites.canary.command_damages import (
    AT,
    COMMAND_DAMAGES,
    STEPS,
    CommandDamage,
    RunFiles,
)
from chaoskit.suites.canary.telling import Record, record_trial

pytestmark = pytest.mark.costly

JOB = Path(__file__).with_name("command_job.py")
WATCH = LogPatterns(step=r"step (\d+)", loss=r"loss (\S+)")

_runs: list[Path] = []
_Copy = Callable[[], Path]


@pytest.fixture
def copy_of_a_run(chaos: Chaos, tmp_path: Path) -> _Copy:
    """Return a function that copies the directory of a run of this session.

    Rank 1 is killed in that run, and both ranks come back.
    """

    def copy() -> Path:
        if not _runs:
            outcome = chaos.run(
                command=[sys.executable, str(JOB), str(STEPS), "0.02"],
                watch=WATCH,
                ranks=2,
                faults=[Kill(rank=1, at_step=AT)],
                max_lost_steps=STEPS,
            )
            _runs.append(Path(outcome.directory))
        return Path(shutil.copytree(_runs[0], tmp_path / "run"))

    return copy


@pytest.mark.parametrize("damage", COMMAND_DAMAGES, ids=lambda damage: damage.name)
def test_a_mistake_in_what_is_written_does_not_pass(
    copy_of_a_run: _Copy, damage: CommandDamage, record_property: Record
) -> None:
    directory = copy_of_a_run()
    files = RunFiles(directory)
    damage.change(files)
    files.write()
    outcome = judge_directory(directory)
    record_trial(record_property, damage.name, "command", outcome)
    assert outcome.verdict == damage.verdict, outcome.reasons


def test_what_is_written_anew_is_the_same(copy_of_a_run: _Copy) -> None:
    """The mistake is caught, and not the rewriting of files."""
    directory = copy_of_a_run()
    before = judge_directory(directory)
    RunFiles(directory).write()
    again = judge_directory(directory)
    assert again.verdict == before.verdict == Verdict.PASSED, again.reasons
    assert before.recoveries
    assert before.lost_steps > 0
