"""No mistake in what is written of a command's run ends as passed."""

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
    Written,
)
from chaoskit.suites.canary.telling import Record, tell

pytestmark = pytest.mark.costly

JOB = Path(__file__).with_name("command_job.py")
WATCH = LogPatterns(step=r"step (\d+)", loss=r"loss (\S+)")

_runs: list[Path] = []
_Copy = Callable[[], Path]


@pytest.fixture
def copy_of_a_run(chaos: Chaos, tmp_path: Path) -> _Copy:
    """A copy of the directory of one run of this session, in which rank 1 is killed, and both ranks come back."""

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
    written = Written(directory)
    damage.change(written)
    written.write()
    outcome = judge_directory(directory)
    tell(record_property, damage.name, "command", outcome)
    assert outcome.verdict == damage.verdict, outcome.reasons


def test_what_is_written_anew_is_the_same(copy_of_a_run: _Copy) -> None:
    """What is caught is the mistake, and not that files were changed."""
    directory = copy_of_a_run()
    before = judge_directory(directory)
    Written(directory).write()
    again = judge_directory(directory)
    assert again.verdict == before.verdict == Verdict.PASSED, again.reasons
    assert before.recoveries
    assert before.lost_steps > 0
