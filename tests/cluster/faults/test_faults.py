"""Faults of nodes, coordinator and replacements: a run survives each, and another source shows that
it took effect.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.goals import Flag
from support.waiting import wait_until

from chaoskit.journal import Record, read_journals
from chaoskit.process import linux
from chaoskit.pytest_plugin import Chaos
from chaoskit.runlog.outcome import Outcome
from chaoskit.substrate.core.actions import NODE_CONTROLLERS
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.undo import runtime_directory
from chaoskit.suites.goals import JournalFlag, happened
from chaoskit.vocabulary import Event, Verdict
from chaoskit.wire.messages import AtHook, Heartbeat, WorkerLost, WorkerReady
from faults import (
    CATALOGUE,
    CrashLoop,
    FailLoad,
    Fault,
    FreezeNode,
    Kill,
    KillAgent,
    KillCoordinator,
    KillNode,
    Preempt,
)

PLAIN = "../../jobs/failing/troubled.py:plain"
THAW_S = 3.0  # three leases: the node is given up by then, even by a late coordinator


def run(chaos: Chaos, *faults: Fault, goal: JournalFlag | None = None, **plan: Any) -> Outcome:
    """Run an experiment that must pass, and that goes on until ``goal`` is reached if there is one."""
    settings: dict[str, Any] = {
        "nodes": 3,
        "spares": 1,
        "steps": 40,
        "deadline_s": 60.0,
        "options": {"step_s": 0.02},
    }
    if goal is not None:
        settings |= {"steps": 20, "until": goal.until, "watch": goal}
    return chaos.run(PLAIN, faults=faults, **settings | plan)


def journal(outcome: Outcome, *events: Event) -> list[Record]:
    """Return the records of ``events`` from all journals of a run, by time."""
    return [
        record
        for record in read_journals(Path(outcome.directory) / "journal")
        if record.event in events
    ]


def effective(outcome: Outcome, number: int = 0) -> str:
    """Return the effect that was observed of a fault, by its number in the plan."""
    return next(
        evidence.observed
        for evidence in outcome.faults[number].evidence
        if evidence.level == "effective"
    )


def is_ready(message: Any, worker: str) -> bool:
    """Return True if ``message`` reports that ``worker`` can train."""
    return isinstance(message, WorkerReady) and message.worker == worker


class Watcher:
    """A watcher that records the states of a worker's process and the undo entries while a run goes
    on.
    """

    def __init__(self, worker: str) -> None:
        self._worker, self._pid = worker, 0
        self.states: list[str | None] = []
        self.undo: set[str] = set()
        self._before = self._entries()
        self.ready: list[str] = []

    def __call__(self, message: Any) -> None:
        if isinstance(message, WorkerReady):
            self.ready.append(message.worker)
            if message.worker == self._worker:
                self._pid = message.endpoint.pid
        if isinstance(message, Heartbeat) and self._pid:
            self.states.append(linux.state(self._pid))
            self.undo |= self._entries() - self._before

    @staticmethod
    def _entries() -> set[str]:
        """Return the entries of this process's undo logs that continue stopped processes."""
        lines = [
            path.read_text().splitlines()
            for path in (runtime_directory() / "undo").glob(f"{os.getpid()}-*.jsonl")
        ]
        return {line for log in lines for line in log if '"continue"' in line}


# -- a node ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [KillAgent, KillNode, Preempt])
@pytest.mark.parametrize("phase", ["forward", "reduce"])
def test_a_node_is_lost(chaos: Chaos, fault: type[Fault], phase: str) -> None:
    """All processes of a node are gone, those of its spare included, and no loss is a false alarm."""
    outcome = run(
        chaos, fault(rank=0, at_step=6, phase=phase), goal=happened(chaos, Event.EVIDENCE)
    )
    assert effective(outcome).startswith("the agent of node0 (pid ")
    assert "its 4 other processes are gone" in effective(outcome)
    late = [
        record for record in journal(outcome, Event.COMMIT) if record.source.startswith("node0.")
    ]
    assert late
    assert max(record["step"] for record in late) < 6
    assert len(outcome.recoveries) == 1
    assert outcome.false_alarms == 0


def test_a_node_with_two_ranks_is_one_incident(chaos: Chaos) -> None:
    """The loss of a node that holds two ranks, one of them taken over by its spare, is one
    recovery.
    """
    goal = happened(chaos, Event.EVIDENCE)
    outcome = run(chaos, Kill(rank=2, at_step=4), KillNode(rank=0, at_step=20), goal=goal, steps=40)
    lost = [record for record in journal(outcome, Event.DETECTED) if record["cause"] == "node lost"]
    assert len(lost) == 2
    assert len(outcome.recoveries) == 2


@pytest.mark.promise("any signal number.")
def test_a_worker_that_a_real_time_signal_ends_is_lost_and_its_node_is_not(chaos: Chaos) -> None:
    """A real-time signal, for most of which Python has no name, ends a worker and not its node."""
    outcome = run(chaos, Kill(rank=1, at_step=4, signum=signal.SIGRTMIN + 1))
    (ended,) = [
        record for record in journal(outcome, Event.WORKER_EXITED) if record["how"] == "killed"
    ]
    assert (ended.source, ended["status"]) == ("node1", "SIGRTMIN+1")
    assert not journal(outcome, Event.NODE_LOST)


def test_two_nodes_at_once(chaos: Chaos) -> None:
    """A majority of the nodes is lost in the same reduction; both faults take effect."""
    outcome = run(
        chaos,
        KillNode(rank="majority", at_step=6, phase="reduce"),
        goal=happened(chaos, Event.EVIDENCE, 2),
    )
    assert [fault.state for fault in outcome.faults] == ["confirmed", "confirmed"]


def test_a_node_at_a_time_and_in_a_recovery(chaos: Chaos) -> None:
    """A fault at a time and one in the recovery from it both take effect, on different ranks."""
    faults = [KillNode(rank=1, after_s=0.1), KillAgent(rank=2, during="regroup")]
    outcome = run(chaos, *faults, goal=happened(chaos, Event.EVIDENCE, 2))
    assert {fault.rank for fault in outcome.faults} == {1, 2}


@pytest.mark.promise("one node is told to end, and after a grace period made to")
def test_what_is_left_of_a_preempted_node_is_killed(chaos: Chaos) -> None:
    """The processes of a preempted node that do not obey SIGTERM are killed after the grace period.

    Its agent is stopped and cannot obey; its worker obeys.
    """
    grace_s = 3.0
    goal = happened(chaos, Event.EVIDENCE)
    ended_ns: dict[str, int] = {}  # noticed at the next heartbeat
    pids: dict[str, int] = {}

    def watch(message: Any) -> None:
        goal(message)
        if isinstance(message, AtHook) and message.worker == "node1.0":
            pids.update(worker=message.pid, agent=_parent(_parent(message.pid)))
            os.kill(pids["agent"], signal.SIGSTOP)
            # of two pending signals, SIGTERM would be delivered first
            wait_until(lambda: linux.state(pids["agent"]) == "T", "the agent stands still")
        for name, pid in pids.items():
            if linux.is_ending(pid):
                ended_ns.setdefault(name, time.monotonic_ns())

    outcome = run(chaos, Preempt(rank=1, at_step=6, grace_s=grace_s), goal=goal, watch=watch)
    left = int(effective(outcome).partition("gone, ")[2].split()[0])
    assert 1 <= left <= 3  # among agent, keeper, fork server and worker
    (injected,) = journal(outcome, Event.INJECTED)
    assert ended_ns["worker"] < injected.t_ns + grace_s * 1e9 < ended_ns["agent"]


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_node_that_freezes_comes_back_as_a_zombie(chaos: Chaos, tmp_path: Path) -> None:
    """A frozen node is given up when its lease ends; no commit of it counts after the thaw."""
    watcher = Watcher("node1.0")

    def is_thawed(message: Any) -> bool:
        watcher(message)
        return "T" in watcher.states and watcher.states[-1] != "T"

    flag = Flag(tmp_path / "thawed", is_thawed)
    fault = FreezeNode(rank=1, at_step=6, thaw_after_s=THAW_S)
    outcome = run(chaos, fault, until=flag.until, watch=flag)
    assert flag.is_up
    assert effective(outcome) == "all 4 processes of node1 are in state T (stopped)"
    assert len(watcher.undo) == 4  # written ahead, one for each process
    zombie = [record for record in journal(outcome, Event.COMMIT) if record.source == "node1.0"]
    assert {record["generation"] for record in zombie} == {1}
    assert next(record for record in journal(outcome, Event.DETECTED))["cause"] == "node lost"


def test_a_frozen_node_is_continued_at_the_end(chaos: Chaos) -> None:
    """A node with a thaw due after the end of the run is continued then: nothing stays stopped."""
    watcher = Watcher("node1.0")
    outcome = run(chaos, FreezeNode(rank=1, at_step=6, thaw_after_s=3600.0), watch=watcher)
    assert outcome.faults[0].undone
    entries = [json.loads(line) for line in watcher.undo]
    assert len(entries) == 4  # agent, keeper, fork server, worker
    assert all(linux.start_ticks(stopped["pid"]) != stopped["ticks"] for stopped in entries)


# -- the coordinator -------------------------------------------------------------------------------


def test_the_coordinator_is_killed(chaos: Chaos) -> None:
    """The evidence names the process that is gone; the run passes with the coordinator that was started after it."""
    outcome = run(chaos, KillCoordinator(at_step=6), goal=happened(chaos, Event.RESUMED))
    observed = journal(outcome, Event.EVIDENCE)
    assert [record["observed"].startswith("the coordinator (pid ") for record in observed] == [True]
    assert journal(outcome, Event.RESUMED)


# -- nodes that stay broken ------------------------------------------------------------------------


def test_a_node_that_kills_every_process(chaos: Chaos, tmp_path: Path) -> None:
    """The first three workers of the node are killed, each once; the fourth trains."""
    watcher = Watcher("node1.0")

    def is_well_again(message: Any) -> bool:
        watcher(message)
        return is_ready(message, "node1.3")

    flag = Flag(tmp_path / "well", is_well_again)
    outcome = run(chaos, CrashLoop(rank=1, at_step=6, times=3), until=flag.until, watch=flag)
    assert effective(outcome) == "3 of 3 workers of node1 were killed and are gone"
    killed = [record["worker"] for record in journal(outcome, Event.DETECTED)]
    assert killed == ["node1.0", "node1.1", "node1.2"]
    assert set(killed) < set(watcher.ready)


def test_replacements_that_cannot_load_the_job(chaos: Chaos, tmp_path: Path) -> None:
    """Two replacements end while they load the job, and are never ready; the third one is."""
    flag = Flag(tmp_path / "loaded", lambda message: is_ready(message, "node1.3"))
    faults = [FailLoad(rank=1, at_step=3, times=2), Kill(rank=1, at_step=6)]
    outcome = run(chaos, *faults, until=flag.until, watch=flag)
    assert effective(outcome) == "2 of 2 workers ended while they loaded the job: node1.1, node1.2"
    failed = {record.source for record in journal(outcome, Event.FAILED)}
    assert failed == {"node1.1", "node1.2"}
    assert not [record for record in journal(outcome, Event.READY) if record.source in failed]
    assert outcome.false_alarms == 0


def test_a_bad_node_that_starts_no_worker_is_unknown(chaos: Chaos) -> None:
    """The verdict is unknown without a loss, because no replacement is started that could show the
    fault.
    """
    outcome = run(chaos, FailLoad(rank=1, at_step=3), check=False)
    assert outcome.verdict == Verdict.UNKNOWN
    assert outcome.faults[0].state == "not observed"


def test_a_later_loss_on_a_struck_node_is_a_false_alarm(chaos: Chaos, tmp_path: Path) -> None:
    """A crash loop explains the workers that it killed, and no other worker of its node."""

    def kill_the_survivor(message: Any) -> bool:
        if is_ready(message, "node1.1"):
            os.kill(message.endpoint.pid, signal.SIGKILL)
        return isinstance(message, WorkerLost) and message.worker == "node1.1"

    flag = Flag(tmp_path / "lost", kill_the_survivor)
    outcome = run(
        chaos, CrashLoop(rank=1, at_step=6, times=1), until=flag.until, watch=flag, check=False
    )
    assert flag.is_up
    assert outcome.false_alarms == 1


# -- signals ---------------------------------------------------------------------------------------


def test_a_process_that_was_looked_up_is_not_its_successor() -> None:
    """A signal goes to the process that was looked up, never to a later one with its pid."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        ticks = linux.start_ticks(child.pid)
        assert ticks is not None
        with pytest.raises(ProcessLookupError, match="is gone"):
            Process(child.pid, ticks - 1, "another").signal(signal.SIGKILL)
        assert child.poll() is None
        Process(child.pid, ticks, "child").signal(signal.SIGKILL)
        assert child.wait(10) == -signal.SIGKILL
    finally:
        child.kill()
        child.wait()


def test_the_catalogue_says_everything() -> None:
    """Each fault has all its descriptions and a name of its own, and is available where it should
    be.
    """
    for fault in CATALOGUE:
        assert fault.effect
        assert fault.evidence
        assert fault.stands_for
        assert fault.undo
        limits = any(action in NODE_CONTROLLERS for action in fault(**fault.sample).needs)
        needs_more = limits or fault.family == "disk"
        assert fault.unavailable() == "" or "local" not in fault.substrates or needs_more
        assert fault.__doc__
    assert len({fault.__name__ for fault in CATALOGUE}) == len(CATALOGUE)
