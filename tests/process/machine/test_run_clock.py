"""Tests of the clock of a run, on machines with clocks that are hours apart: time namespaces stand
for them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.nodes.far_nodes import ApartSubstrate, FarNode, clock, no_clocks, unavailable

from chaoskit.config import DETECTION
from chaoskit.coordinator.log import CoordinatorLog
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.outputs import LogEntry
from chaoskit.experiment.harness import Harness
from chaoskit.journal import Journal, read_journals
from chaoskit.process import run_clock
from chaoskit.substrate.undo import UndoLog
from chaoskit.suites.recovery.expect import AT, STEADY
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import WorkerLost
from faults import Fault, Hang, Kill, KillAgent, KillCoordinator, NaN, ReplaceNode

TESTS = Path(__file__).parents[2]
SUBSTRATE = "support.nodes.far_nodes:ApartSubstrate"
WHY_NOT = unavailable() or no_clocks()
apart = pytest.mark.skipif(bool(WHY_NOT), reason=f"clocks of their own: {WHY_NOT}")
HOUR_NS = 3600 * 10**9


@pytest.fixture
def ahead() -> Iterator[int]:
    """Set the run's clock an hour ahead of this process's clock, and yield the difference."""
    run_clock.set_ahead(HOUR_NS)
    yield HOUR_NS
    run_clock.set_ahead(0)
    del os.environ[run_clock.VARIABLE]


def test_journals_tell_the_time_of_the_run(ahead: int, tmp_path: Path) -> None:
    journal, before_ns = Journal(tmp_path, "one", role="test"), time.monotonic_ns()
    journal.write(Event.COMMIT, step=1)
    journal.write(Event.COMMIT, step=2, t_ns=before_ns)
    journal.close()
    then, now = (record for record in read_journals(tmp_path) if record.event == Event.COMMIT)
    assert before_ns + ahead <= now.t_ns <= time.monotonic_ns() + ahead
    assert then.t_ns == before_ns + ahead
    (opened,) = (record for record in read_journals(tmp_path) if record.event == Event.OPENED)
    assert opened["clock_ahead_ns"] == ahead


def test_a_record_that_was_written_is_found_again(ahead: int, tmp_path: Path) -> None:
    journal = Journal(tmp_path, "one")
    journal.write(Event.COMMIT, step=2, t_ns=81)
    assert journal.has(Event.COMMIT, step=2, t_ns=81)
    journal.close()


def test_what_another_machine_tells_of_is_no_later_than_now(ahead: int) -> None:
    """A detection that came after its plan would belong to no incident."""
    now_ns = time.monotonic_ns()
    assert run_clock.heard_ns(run_clock.to_run(now_ns - 5)) == now_ns - 5
    assert now_ns <= run_clock.heard_ns(run_clock.to_run(now_ns + 10**12)) <= time.monotonic_ns()


def test_a_process_that_is_started_knows_it(ahead: int) -> None:
    code = "from chaoskit.process import run_clock as runclock; print(runclock.to_run(1), runclock.to_own(1))"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.split() == [str(1 + HOUR_NS), str(1 - HOUR_NS)]


def test_a_record_is_read_by_the_clock_of_the_machine_that_it_has_moved_to(tmp_path: Path) -> None:
    """The next coordinator repeats the last decision with the time at which it happened."""
    lost = WorkerLost("node1.0", "node1", "exited", "", detected_ns=90 * 10**9)
    first = CoordinatorLog(tmp_path / "coordinator.wal")
    first.append([LogEntry(events.Tick(), 80.5, 3.25), LogEntry(lost, 91.0, 3.25)])
    run_clock.set_ahead(
        -HOUR_NS
    )  # the next machine's clock is an hour ahead of the run's clock, and so of the first machine's
    try:
        tick, repeated = CoordinatorLog(tmp_path / "coordinator.wal").entries
    finally:
        run_clock.set_ahead(0)
        del os.environ[run_clock.VARIABLE]
    assert isinstance(repeated.event, WorkerLost)
    assert repeated.event.detected_ns == 90 * 10**9 + HOUR_NS
    assert (tick.now_s, repeated.now_s) == (3680.5, 3691.0)
    assert repeated.now_s - repeated.lag_s == 91.0 - 3.25  # the membership's own time has not moved


@apart
@pytest.mark.costly
@pytest.mark.parametrize("hours", [0, 5])
def test_how_far_the_clock_of_a_node_is_behind_is_measured(hours: int) -> None:
    """The measured difference is exact to half of a round trip of 40 ms. A node with the same clock
    is not asked.
    """
    undo = UndoLog()
    node = FarNode("node0", undo, clock(3600 * hours) if hours else ())
    try:
        node.connect()
        node.await_ready()
        ahead_ns = node.link.clock_ahead_ns()
    finally:
        node.close()
    if hours:
        assert abs(ahead_ns + hours * HOUR_NS) < 20e6
    else:
        assert ahead_ns == 0


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    substrate = ApartSubstrate()
    yield Harness(substrate, tmp_path_factory.mktemp("runs"))
    substrate.close()


@apart
@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.promise("**Clocks of machines may be hours apart**")
@pytest.mark.parametrize(
    "fault",
    [
        Kill(rank=1, at_step=AT),
        Hang(rank=1, at_step=AT, how="stop"),
        NaN(rank=1, at_step=AT),
        KillAgent(rank=1, at_step=AT),
        KillCoordinator(at_step=AT),
        ReplaceNode(rank=1, at_step=AT),
    ],
    ids=str,
)
def test_a_run_is_judged_by_one_clock(harness: Harness, fault: Fault) -> None:
    """Each node has another clock. Acts, observations and effects are recorded in order, with their
    real durations.
    """
    outcome = harness.run(STEADY, nodes=3, steps=40, faults=[fault], **DETECTION["relaxed"])
    assert outcome.verdict.value == "passed", outcome.reasons
    assert outcome.lost_steps == outcome.false_alarms == 0
    outcome.assert_same_losses_as_twin()
    for recovery in outcome.recoveries:
        assert 0 < recovery.seconds < 60


@apart
@pytest.mark.costly
@pytest.mark.slow
def test_smoke_is_green_on_clocks_that_are_apart() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(TESTS.parent / "suites" / "smoke"),
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    done = subprocess.run(
        [*command, "--chaos-substrate", SUBSTRATE],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
