"""Replacements are started after the run has recovered."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaoskit.coordinator.schedules.start_order import PATIENCE_S, Deferral
from chaoskit.journal import read_journals
from chaoskit.pytest_plugin import Chaos
from chaoskit.suites.goals import happened
from chaoskit.suites.recovery.expect import STEADY
from chaoskit.vocabulary import Event, Phase
from chaoskit.wire.messages import Beat
from faults import Kill


def beat(worker: str, generation: int, commits: int) -> Beat:
    """Return a heartbeat of a worker in the reduction."""
    return Beat(worker, generation, 0, commits, Phase.REDUCE, 1.0, 0.0, commits, 0.0)


def test_without_a_recovery_nothing_waits() -> None:
    """A worker is started at once if no recovery is in progress."""
    deferral = Deferral[str]()
    assert deferral.submit("a") == ["a"]
    assert deferral.observe([beat("x", 1, 5)], 0.0) == []


def test_a_start_waits_until_every_rank_has_committed() -> None:
    """Commits of former generations, and earlier commits of a worker, do not count."""
    deferral = Deferral[str]()
    deferral.recover(2, 2, 10.0)
    assert deferral.submit("a") == []
    assert deferral.observe([beat("x", 1, 7)], 10.1) == []
    assert deferral.observe([beat("x", 2, 7), beat("y", 2, 0)], 10.2) == []
    assert deferral.submit("b") == []
    assert deferral.observe([beat("x", 2, 7), beat("y", 2, 1)], 10.3) == []
    assert deferral.observe([beat("x", 2, 8)], 10.4) == ["a", "b"]
    assert deferral.submit("c") == ["c"]


def test_a_generation_that_commits_nothing_gets_its_replacement() -> None:
    """The wait ends after `PATIENCE_S`, and a second loss begins it again."""
    deferral = Deferral[str]()
    deferral.recover(2, 2, 10.0)
    assert deferral.submit("a") == []
    assert deferral.observe([], 10.0 + PATIENCE_S) == ["a"]
    deferral.recover(3, 2, 20.0)
    assert deferral.submit("b") == []
    assert deferral.observe([beat("x", 2, 9)], 20.1) == []


@pytest.mark.promise("Its start waits until every rank has committed in the new generation")
def test_a_real_replacement_starts_after_the_repeated_step(chaos: Chaos) -> None:
    """Every rank of the new generation has committed before the next spare is forked."""
    goal = happened(chaos, Event.WORKER_STARTED, 4)  # two ranks, their spare, and the next spare
    kill = Kill(rank=1, at_step=8)
    outcome = chaos.run(
        STEADY, nodes=2, spares=1, steps=20, until=goal.until, watch=goal, faults=[kill]
    )
    records = read_journals(Path(outcome.directory) / "journal")
    injected = next(record for record in records if record.event == Event.INJECTED)
    started = [record for record in records if record.event == Event.WORKER_STARTED][3]
    assert started.t_ns > injected.t_ns
    before = [
        r
        for r in records
        if r.event == Event.COMMIT and r.t_ns < started.t_ns and r["generation"] == 2
    ]
    planned = next(r for r in records if r.event == Event.PLAN and r["generation"] == 2)
    if started.t_ns - planned.t_ns < PATIENCE_S * 1e9:  # after that it starts without waiting
        assert {record["rank"] for record in before} == {
            member["rank"] for member in planned["members"]
        }
