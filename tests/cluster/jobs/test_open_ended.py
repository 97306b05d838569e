"""Open-ended jobs end when their goal is reached, on all ranks after the same step, and have a
twin.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.goals import Flag
from support.waiting import stays, wait_until

from chaoskit.errors import BadInput
from chaoskit.experiment.plan.plan import plan_experiment
from chaoskit.experiment.plan.planfile import FILE_NAME, load
from chaoskit.fixtures.jobs.goal import ROUND_STEPS, Goal
from chaoskit.journal import Journal
from chaoskit.pytest_plugin import Chaos
from chaoskit.suites.recovery.expect import STEADY
from chaoskit.vocabulary import Event, Verdict
from chaoskit.wire.messages import Heartbeat
from faults import Kill, KillNode


def test_a_job_trains_until_the_world_is_full_again(chaos: Chaos) -> None:
    """The run goes on after its least number of steps until the replacement is there, with the bits
    of the twin.
    """
    kill = Kill(rank=0, at_step=3)  # rank 0 checks the goal
    outcome = chaos.run(STEADY, nodes=3, spares=0, steps=5, until={"world": 3}, faults=[kill])
    outcome.assert_same_losses_as_twin()
    assert outcome.steps[-1].world == 3
    assert {point.world for point in outcome.steps} == {2, 3}
    assert len(outcome.steps) % ROUND_STEPS == 0


def test_a_goal_that_a_test_reaches_by_what_it_sees(chaos: Chaos, tmp_path: Path) -> None:
    """The run goes on after the loss of a node, and of rank 0, until the file is there, and no
    further than needed.
    """
    commits: list[int] = []

    def is_late(message: object) -> bool:
        if isinstance(message, Heartbeat):
            commits.extend(beat.step for beat in message.beats)
        return max(commits, default=0) > 2 * ROUND_STEPS

    flag = Flag(tmp_path / "seen", is_late)
    kill = KillNode(rank=0, at_step=3)
    outcome = chaos.run(STEADY, nodes=3, steps=5, until=flag.until, watch=flag, faults=[kill])
    outcome.assert_same_losses_as_twin()
    assert len(outcome.steps) > 2 * ROUND_STEPS
    assert len(outcome.steps) % ROUND_STEPS == 0


def test_no_rank_begins_step_1_before_the_spares_are_ready(tmp_path: Path) -> None:
    """A member of the first world is no spare, although it was ready as one."""
    disk = tmp_path / "disk" / "node0"
    disk.mkdir(parents=True)
    trainer = SimpleNamespace(step=1, world=1, rank=0, disk=disk)
    goal, journal = Goal(trainer, 20, {"spares": 1}), Journal(tmp_path / "journal", "coordinator")
    journal.write(Event.SPARE_READY, worker="node0.0")
    journal.write(Event.PLAN, members=[{"worker": "node0.0"}])
    thread = threading.Thread(target=goal.is_ahead, daemon=True)
    thread.start()
    stays(thread.is_alive, "the wait for a spare", for_s=0.3)
    journal.write(Event.SPARE_READY, worker="node1.0")
    wait_until(lambda: not thread.is_alive(), "the end of the wait")
    journal.close()


def test_a_goal_that_is_never_reached_fails_the_run(chaos: Chaos, tmp_path: Path) -> None:
    """The harness enforces the deadline, and trains no twin for such a run."""
    until = {"file": str(tmp_path / "never")}
    outcome = chaos.run(
        STEADY, nodes=1, spares=0, steps=5, until=until, deadline_s=8.0, check=False
    )
    assert outcome.verdict == Verdict.FAILED
    assert "did not end within its deadline" in outcome.reasons[0]
    assert outcome.twin_losses is None


def test_an_open_ended_plan_is_kept_in_its_file(chaos: Chaos) -> None:
    """``chaoskit replay`` runs the same open-ended job."""
    outcome = chaos.run(STEADY, nodes=1, spares=0, steps=5, until={"world": 1}, twin=False)
    plan = load(Path(outcome.directory) / FILE_NAME)
    assert plan.is_open_ended
    assert plan.steps == 5
    assert plan.config.job.options["until"] == {"world": 1}


def test_the_least_number_of_steps_is_required() -> None:
    """A run without a least number of steps could end before its faults are due."""
    with pytest.raises(BadInput, match="until"):
        plan_experiment("gpt", until={"world": 1})
