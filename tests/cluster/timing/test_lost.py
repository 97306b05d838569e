"""Processes and nodes that are gone, stopped, silent or cut off are detected in time, and not
mistaken for each other.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.goals import Flag
from support.stopwatch import Stopwatch

from chaoskit.elastic.settings import ElasticPolicy
from chaoskit.journal import Record
from chaoskit.process import linux
from chaoskit.pytest_plugin import Chaos
from chaoskit.runlog.outcome import Outcome
from chaoskit.substrate.limits.cgroup import unavailable
from chaoskit.suites.recovery.expect import STEADY
from chaoskit.wire.messages import Heartbeat, Plan, WorkerLost
from faults import Cut, Delay, Fault, FreezeNode, Hang, Kill, Scale

AT = 8


def run(
    chaos: Chaos, *faults: Fault, nodes: int = 3, spares: int = 1, steps: int = 24, **plan: Any
) -> Outcome:
    for fault in faults:
        if reason := fault.unavailable():
            pytest.skip(reason)
    settings = {"deadline_s": 60.0, "twin": False} | plan
    assert not chaos.limits, "the limits of production"
    return chaos.run(STEADY, faults=faults, nodes=nodes, spares=spares, steps=steps, **settings)


def struck(outcome: Outcome) -> Record:
    (record,) = outcome.records("injected")
    return record


def lost(outcome: Outcome) -> Record:
    """Return the only loss, that of the struck rank."""
    (record,) = outcome.records("detected")
    assert record["rank"] == struck(outcome)["rank"]
    return record


def assert_left_alone(outcome: Outcome) -> None:
    assert outcome.records("detected", "node_lost", "left_out") == []
    assert len(outcome.records("plan")) == 1


# -- exit ------------------------------------------------------------------------------------------


def test_a_process_that_ends_is_missed(chaos: Chaos, stopwatch: Stopwatch) -> None:
    """The kernel reports the end of the process to its agent: no limit has to pass."""
    outcome = run(chaos, Kill(rank=1, at_step=AT))
    assert lost(outcome)["cause"] == "exited"
    stopwatch.within(0.1, struck(outcome), lost(outcome))


def test_a_process_that_leaves_as_planned_is_not_missed(chaos: Chaos) -> None:
    """A process that leaves ends before the job, like a dying one, but is no member of the world
    any more.
    """
    policy = ElasticPolicy(min_replicas=2, max_replicas=3, scaling_timeout_s=0)
    plan = {"elastic": policy, "shards": 6, "options": {"step_s": 0.05}}
    outcome = run(chaos, Scale(to=2, at_step=AT), spares=0, steps=40, **plan)
    (ended,) = outcome.records("job_ended")
    gone = [record for record in outcome.records("worker_exited") if record.t_ns < ended.t_ns]
    assert [record["status"] for record in gone] == ["status 0"]
    assert outcome.records("detected", "evicted", "node_lost") == []
    assert outcome.steps[-1].world == 2


# -- stop ------------------------------------------------------------------------------------------


def test_a_process_that_is_stopped_is_found_at_once(chaos: Chaos, stopwatch: Stopwatch) -> None:
    """The kernel reports the stop to the parent, long before the limit of the phase."""
    outcome = run(chaos, Hang(rank=1, at_step=AT, how="stop"))
    assert lost(outcome)["cause"] == "stopped"
    stopwatch.within(0.1, struck(outcome), lost(outcome))


def test_a_node_that_is_suspended_and_resumed_is_kept(chaos: Chaos) -> None:
    """All processes of a node are stopped for twice its lease and continued together: none is given
    up as stopped.
    """
    outcome = run(chaos, FreezeNode(rank=1, at_step=AT, thaw_after_s=0.3))
    assert_left_alone(outcome)


# -- lease -----------------------------------------------------------------------------------------


FREEZER = "signal" if unavailable("freezer") else "cgroup"


SILENT = "silent for 3 beats"
SLOW = "no report for 1 s, although the kernel of the node acknowledges"


@pytest.mark.chaos(substrate="netns")
def test_a_node_that_is_cut_off_is_lost_when_its_lease_ends(
    chaos: Chaos, stopwatch: Stopwatch
) -> None:
    """A node that acknowledges nothing is lost after the beats of a lease, 150 ms."""
    outcome = run(chaos, Cut(rank=1, at_step=AT))
    assert lost(outcome)["cause"] == "node lost"
    (node,) = outcome.records("node_lost")
    assert node["detail"] == SILENT
    stopwatch.within(0.2, struck(outcome), lost(outcome))


def test_a_node_that_stands_still_is_lost_in_a_second(chaos: Chaos, stopwatch: Stopwatch) -> None:
    """A node may be merely slow for a second, as its kernel acknowledges data although its
    processes are stopped.
    """
    outcome = run(chaos, FreezeNode(rank=1, at_step=AT, thaw_after_s=3.0, how=FREEZER))
    assert lost(outcome)["cause"] == "node lost"
    (node,) = outcome.records("node_lost")
    assert node["detail"] == SLOW
    assert lost(outcome).t_ns - struck(outcome).t_ns > 0.9e9
    stopwatch.within(1.2, struck(outcome), lost(outcome))


def test_a_longer_lease_ends_later(chaos: Chaos, stopwatch: Stopwatch) -> None:
    """A lease of thirty beats, 1490 ms, decides, and not the shorter limit of silence."""
    outcome = run(
        chaos, FreezeNode(rank=1, at_step=AT, thaw_after_s=4.0, how=FREEZER), lease_beats=30
    )
    assert lost(outcome)["cause"] == "node lost"
    stopwatch.within(1.7, struck(outcome), lost(outcome))
    assert lost(outcome).t_ns - struck(outcome).t_ns > 1.4e9


def test_a_node_that_stands_still_for_a_moment_is_kept(chaos: Chaos) -> None:
    """A node that stands still for twice its lease goes on, and no membership changes."""
    outcome = run(chaos, FreezeNode(rank=1, at_step=AT, thaw_after_s=0.3, how=FREEZER))
    assert_left_alone(outcome)


# -- an agent that does not run --------------------------------------------------------------------


class AgentStop:
    """A watcher that stops the agent of node1, and no other process there, once its rank is in step
    ``AT``.

    It is called with every message of the run, and returns True once the run has shown the
    consequence.

    Args:
        for_s: length of the stop; None: to the end of the run.
    """

    def __init__(self, for_s: float | None) -> None:
        self._for_s, self._pid = for_s, 0
        self.stopped_ns = self.continued_ns = 0

    def __call__(self, message: Any) -> bool:
        match message:
            case Plan(generation=1):
                (member,) = [member for member in message.members if member.node == "node1"]
                self._pid = linux.parent(linux.parent(member.endpoint.pid) or 0) or 0
            case Heartbeat("node1", beats, sent_ns):
                if not self.stopped_ns and any(beat.step >= AT for beat in beats):
                    self._stop()
                return 0 < self.continued_ns < sent_ns
            case WorkerLost(node="node1"):
                return self._for_s is None
        return False

    def _stop(self) -> None:
        self.stopped_ns = time.monotonic_ns()
        os.kill(self._pid, signal.SIGSTOP)
        if self._for_s is not None:
            threading.Timer(self._for_s, self.go_on).start()

    def go_on(self) -> None:
        """Continue the agent, if it still exists."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGCONT)
        self.continued_ns = time.monotonic_ns()

    @property
    def record(self) -> Record:
        """The stop as a record of an injection."""
        return Record(self.stopped_ns, "test", "injected", {"rank": 1})


@pytest.mark.parametrize(
    "substrate", ["local", pytest.param("netns", marks=pytest.mark.chaos(substrate="netns"))]
)
@pytest.mark.parametrize("for_s", [0.3, 0.5])
def test_an_agent_that_is_slow_costs_its_node_nothing(
    chaos: Chaos, tmp_path: Path, substrate: str, for_s: float
) -> None:
    """The ranks of a node train on while its agent is slow, because its kernel acknowledges the
    coordinator's data.
    """
    stop = AgentStop(for_s)
    flag = Flag(tmp_path / "heard again", stop)
    outcome = run(chaos, until=flag.until, watch=flag)
    assert flag.is_up
    assert outcome.substrate == substrate
    assert stop.continued_ns - stop.stopped_ns > for_s * 1e9
    assert_left_alone(outcome)


def test_an_agent_that_is_stopped_for_good_is_missed(
    chaos: Chaos, stopwatch: Stopwatch, tmp_path: Path
) -> None:
    """A rank that cannot be ended, or told of a new plan, is no member, even if its node's kernel
    acknowledges data.
    """
    stop = AgentStop(None)
    flag = Flag(tmp_path / "lost", stop)
    try:
        outcome = run(chaos, until=flag.until, watch=flag, check=False)
    finally:
        stop.go_on()
    (detected,) = outcome.records("detected")
    assert (detected["rank"], detected["cause"]) == (1, "node lost")
    (node,) = outcome.records("node_lost")
    assert node["detail"] == SLOW
    assert detected.t_ns - stop.stopped_ns > 0.9e9
    stopwatch.within(1.2, stop.record, detected)


# -- link ------------------------------------------------------------------------------------------


@pytest.mark.chaos(substrate="netns")
def test_a_link_that_is_cut_has_a_node_left_out(chaos: Chaos, stopwatch: Stopwatch) -> None:
    """Both nodes reach the coordinator, so that only their own reports show the broken link."""
    outcome = run(chaos, Cut(rank=1, at_step=AT, apart_from=(2,)), spares=0)
    (left_out,) = outcome.records("left_out")
    assert left_out["nodes"] in (["node1"], ["node2"])
    assert left_out["detail"] == "no connection node1-node2"
    assert {record["cause"] for record in outcome.records("detected")} == {"unreachable"}
    stopwatch.within(1.5, struck(outcome), left_out)


@pytest.mark.chaos(substrate="netns")
def test_a_slow_link_has_no_node_left_out(chaos: Chaos) -> None:
    """Each reduction takes several round trips of 40 ms, all shorter than a suspicion."""
    outcome = run(chaos, Delay(rank=1, at_step=AT, delay_ms=20, apart_from=(2,)), spares=0)
    assert_left_alone(outcome)
    assert max(point.seconds for point in outcome.steps[AT:]) > 0.04
