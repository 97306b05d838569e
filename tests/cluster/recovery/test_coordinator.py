"""Training goes on when the coordinator is killed, and the next coordinator knows every decision of
the one before.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.goals import Flag
from support.waiting import wait_until

from chaoskit.config import RunConfig
from chaoskit.coordinator.log import CoordinatorLog, Fenced
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.outputs import LogEntry
from chaoskit.coordinator.plane import ControlPlane
from chaoskit.job import JobSpec
from chaoskit.journal import Record as JournalRecord
from chaoskit.journal import read_journals
from chaoskit.process import linux
from chaoskit.pytest_plugin import Chaos
from chaoskit.runlog.outcome import Outcome
from chaoskit.vocabulary import Event, Verdict
from chaoskit.wire.messages import (
    AgentHello,
    AtHook,
    EndJob,
    Formed,
    GroupBroken,
    Healed,
    Heartbeat,
    Plan,
    SpotNotice,
    Welcome,
    WorkerDone,
    WorkerLost,
    WorkerReady,
)
from faults import Kill

PLAIN = "../../jobs/failing/troubled.py:plain"
HELD = "../../jobs/failing/held.py"


def journal(outcome: Outcome, *events: Event) -> list[JournalRecord]:
    """Return the records of ``events`` from all journals of a run, by time."""
    return [
        record
        for record in read_journals(Path(outcome.directory) / "journal")
        if record.event in events
    ]


class CoordinatorKiller:
    """A watcher that kills the coordinator, as often as it is told to, on messages for which
    ``moment`` returns True.
    """

    def __init__(self, moment: Callable[[CoordinatorKiller, Any], bool], times: int = 1) -> None:
        self._moment, self._times = moment, times
        self.pid = 0
        self.kills = 0
        self.committed = 0
        self.plans: list[Plan] = []
        self.over = False

    def __call__(self, message: Any) -> None:
        match message:
            case Welcome(pid=pid):
                self.pid = pid
            case Plan():
                self.plans.append(message)
            case Heartbeat(_, beats):
                self.committed = max([self.committed, *(beat.step for beat in beats)])
            case EndJob():
                self.over = True
        # without a pid, the message comes from a coordinator that was killed already
        if self.pid and self.kills < self._times and not self.over and self._moment(self, message):
            self.kills += 1
            os.kill(self.pid, signal.SIGKILL)
            self.pid = 0

    @property
    def is_done(self) -> bool:
        """True if the coordinator was killed ``times`` times, and another one has answered since."""
        return self.kills == self._times and self.pid != 0


def run_with_coordinator_kills(
    chaos: Chaos,
    directory: Path,
    moment: Callable[[CoordinatorKiller, Any], bool],
    times: int = 1,
    **plan: Any,
) -> Outcome:
    """Run a job that must pass every check although its coordinator is killed ``times`` times.

    The run does not end before another coordinator has taken over.
    """
    killer = CoordinatorKiller(moment, times)

    def is_done(message: Any) -> bool:
        killer(message)
        return killer.is_done

    flag = Flag(directory / "killed", is_done)
    settings = {
        "nodes": 3,
        "spares": 1,
        "steps": 20,
        "options": {"step_s": 0.02},
        "deadline_s": 120.0,
    } | plan
    outcome = chaos.run(
        PLAIN, watch=flag, **settings | {"until": flag.until | settings.get("until", {})}
    )
    check(outcome, killer, times)
    return outcome


def check(outcome: Outcome, killer: CoordinatorKiller, times: int) -> None:
    """Assert that a coordinator resumed the run after each kill, and that generations only went up."""
    assert killer.kills == times, outcome.directory
    resumed = journal(outcome, Event.RESUMED)
    assert [record["term"] for record in resumed] == list(range(2, times + 2)), outcome.directory
    generations = [record["generation"] for record in journal(outcome, Event.PLAN)]
    assert generations == sorted(set(generations)), "a generation came twice, or went down"


# -- real runs -------------------------------------------------------------------------------------


def test_training_goes_on_without_a_coordinator(chaos: Chaos, tmp_path: Path) -> None:
    """No rank is lost, so the membership does not change, and no rank regroups."""
    outcome = run_with_coordinator_kills(
        chaos, tmp_path, lambda killer, message: killer.committed >= 5
    )
    assert len(journal(outcome, Event.PLAN)) == 1
    assert outcome.false_alarms == 0


def test_killed_again_and_again(chaos: Chaos, tmp_path: Path) -> None:
    """Five coordinators are killed in turn; the membership stays that of the first one to the end."""
    moments = iter(range(4, 24, 4))
    due = [next(moments)]

    def moment(killer: CoordinatorKiller, message: Any) -> bool:
        if not isinstance(message, Heartbeat) or killer.committed < due[0]:
            return False  # a coordinator records that it resumed only when it hears a node
        due[0] = next(moments, 10**9)
        return True

    outcome = run_with_coordinator_kills(chaos, tmp_path, moment, times=5)
    assert len(journal(outcome, Event.PLAN)) == 1


@pytest.mark.promise(
    "Each event is written to the run's record (`coordinator/log.py`) "
    "and synced before anything that follows from it is sent.",
    kind=[WorkerLost, Formed],
    spares=1,
)
@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("kind", [WorkerLost, Plan, Formed, Healed, GroupBroken])
def test_killed_in_the_middle_of_a_recovery(
    chaos: Chaos, tmp_path: Path, kind: type, spares: int
) -> None:
    """The world is full again in the end when the coordinator is killed in the middle of a
    recovery.

    The kill comes when it hears of a loss, has published a plan, hears that a group is formed, and
    so on.
    """
    strikes = False  # heartbeats before this hook may report no step

    def moment(killer: CoordinatorKiller, message: Any) -> bool:
        nonlocal strikes
        strikes |= isinstance(message, AtHook)
        return strikes and isinstance(message, kind)

    plan: dict[str, Any] = {"spares": spares, "faults": [Kill(rank=1, at_step=8, phase="reduce")]}
    outcome = run_with_coordinator_kills(chaos, tmp_path, moment, until={"world": 3}, **plan)
    assert outcome.steps[-1].world == 3
    first, last = (journal(outcome, Event.PLAN)[at]["members"] for at in (0, -1))
    killed = first[1]["worker"]  # the node of rank 1 depends on the order in which nodes joined
    assert len(last) == 3
    assert killed not in [member["worker"] for member in last]


@pytest.mark.promise(
    "An agent tells the next coordinator what its workers have said, why they failed and which of them ended"
)
def test_a_rank_dies_while_there_is_no_coordinator(chaos: Chaos, tmp_path: Path) -> None:
    """The next coordinator learns from the agent of a rank that died together with its coordinator."""
    lost: list[str] = []

    def moment(killer: CoordinatorKiller, message: Any) -> bool:
        if killer.committed < 5:
            return False
        os.kill(killer.plans[0].members[2].endpoint.pid, signal.SIGKILL)
        return True

    def is_done(message: Any) -> bool:
        killer(message)
        lost.extend([message.worker] if isinstance(message, WorkerLost) else [])
        return killer.is_done and bool(lost)

    killer, flag = CoordinatorKiller(moment), Flag(tmp_path / "killed", is_done)
    settings: dict[str, Any] = {"options": {"step_s": 0.02}, "deadline_s": 120.0, "check": False}
    outcome = chaos.run(
        PLAIN, nodes=3, spares=1, steps=20, until=flag.until, watch=flag, **settings
    )
    problems = [check for check in outcome.checks if check.verdict != Verdict.PASSED]
    assert [check.name for check in problems] == ["no false alarm"], outcome.directory
    assert lost == ["node2.0"]
    assert journal(outcome, Event.RESUMED)


def test_killed_before_anybody_is_ready(chaos: Chaos, tmp_path: Path) -> None:
    """The nodes attach to the next coordinator, and the run begins: there were no decisions yet."""
    run_with_coordinator_kills(
        chaos, tmp_path, lambda killer, message: isinstance(message, Welcome)
    )


def test_killed_before_the_first_plan(chaos: Chaos, tmp_path: Path) -> None:
    run_with_coordinator_kills(
        chaos, tmp_path, lambda killer, message: isinstance(message, WorkerReady)
    )


def run_with_a_held_rank(chaos: Chaos, last: Path, watch: Callable[[Any], None]) -> Outcome:
    """Run a job of two ranks, one of which is not done until the file ``last`` exists."""
    options = {"step_s": 0.02, "last": str(last)}
    plan: dict[str, Any] = {
        "steps": 20,
        "until": {"world": 2},
        "options": options,
        "deadline_s": 120.0,
    }
    return chaos.run(HELD, nodes=2, spares=0, watch=watch, **plan)


def test_killed_when_a_rank_is_done(chaos: Chaos, tmp_path: Path) -> None:
    """The second rank ends under another coordinator than the first one."""

    def is_done(message: Any) -> bool:
        killer(message)
        return killer.is_done

    killer, last = (
        CoordinatorKiller(lambda killer, message: isinstance(message, WorkerDone)),
        tmp_path / "killed",
    )
    check(run_with_a_held_rank(chaos, last, Flag(last, is_done)), killer, times=1)


def test_an_observer_hears_of_the_end_however_late_it_finds_the_next_coordinator(
    chaos: Chaos, tmp_path: Path
) -> None:
    """An observer that attaches after every worker has ended is told of the end of the job."""
    last = tmp_path / "killed"

    def watch(message: Any) -> None:
        before = killer.kills
        killer(message)
        if killer.kills > before:
            last.touch()
            pids = [member.endpoint.pid for member in killer.plans[-1].members]
            wait_until(lambda: all(linux.is_ending(pid) for pid in pids), "the ends of all ranks")

    killer = CoordinatorKiller(lambda killer, message: isinstance(message, WorkerDone))
    check(run_with_a_held_rank(chaos, last, watch), killer, times=1)


def test_too_many_deaths_end_the_run_with_a_reason(chaos: Chaos) -> None:
    """A coordinator that always dies is not started for ever, and the run ends with a reason."""
    killer = CoordinatorKiller(lambda killer, message: isinstance(message, Welcome), times=100)
    with pytest.raises(Exception, match="coordinator"):
        chaos.run(PLAIN, nodes=2, spares=0, steps=10**6, watch=killer, deadline_s=120.0, twin=False)
    assert 10 < killer.kills < 100


# -- the log ---------------------------------------------------------------------------------------

JOINED = LogEntry(events.NodeJoined("node0"), 1.0)


def test_a_record_is_read_by_the_next_term(tmp_path: Path) -> None:
    path = tmp_path / "record"
    first = CoordinatorLog(path)
    first.append([JOINED, LogEntry(events.GenerationSeen(7), 2.0)])
    second = CoordinatorLog(path)
    assert (first.term, second.term) == (1, 2)
    assert second.entries == [JOINED, LogEntry(events.GenerationSeen(7), 2.0)]


@pytest.mark.parametrize("grace_s", [math.inf, -math.inf])
def test_a_record_holds_numbers_that_are_not_finite(tmp_path: Path, grace_s: float) -> None:
    """A log keeps infinite numbers, which JSON does not have.

    A line that the next coordinator could not read would cost it the whole log.
    """
    path = tmp_path / "record"
    endless = LogEntry(SpotNotice("node0", grace_s), 2.0)
    CoordinatorLog(path).append([JOINED, endless, JOINED])
    successor = CoordinatorLog(path)
    assert (successor.damage, successor.entries) == ("", [JOINED, endless, JOINED])
    assert CoordinatorLog(path).entries == successor.entries


def test_the_directory_is_synced_after_a_record_has_taken_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is synced after the new log is renamed into place.

    Otherwise a power cut could bring the log of the coordinator before back.
    """
    path = tmp_path / "record"
    genuine, synced = os.fsync, list[tuple[bool, bool]]()

    def spy(fd: int) -> None:
        genuine(fd)
        synced.append((os.fstat(fd).st_ino == tmp_path.stat().st_ino, path.exists()))

    monkeypatch.setattr(os, "fsync", spy)
    CoordinatorLog(path)
    assert synced == [(False, False), (True, True)], (
        "the file before it is renamed, the directory after it"
    )


def test_two_coordinators_with_the_same_pid_write_two_drafts(tmp_path: Path) -> None:
    """Coordinators that are process 1 of their containers, with one volume, write two drafts."""
    path = tmp_path / "record"
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text("of another container")
    CoordinatorLog(path)
    assert draft.read_text() == "of another container"
    assert {file.name for file in tmp_path.iterdir()} == {path.name, draft.name}


def test_a_coordinator_that_was_only_asleep_is_fenced(tmp_path: Path) -> None:
    """A coordinator must not decide anything after another one has taken over."""
    path = tmp_path / "record"
    asleep, awake = CoordinatorLog(path), CoordinatorLog(path)
    with pytest.raises(Fenced):
        asleep.append([JOINED])
    awake.append([JOINED])
    assert CoordinatorLog(path).entries == [JOINED]


class Slow(list[LogEntry]):
    """A list of entries that calls ``meanwhile`` before its first entry is read."""

    def __init__(self, entries: list[LogEntry], meanwhile: Callable[[], Any]) -> None:
        super().__init__(entries)
        self._meanwhile = meanwhile

    def __iter__(self) -> Iterator[LogEntry]:
        self._meanwhile()
        return super().__iter__()


def test_a_coordinator_that_falls_asleep_while_it_writes_is_fenced(tmp_path: Path) -> None:
    """Entries that are in no log must not be carried out."""
    path = tmp_path / "record"
    asleep = CoordinatorLog(path)
    with pytest.raises(Fenced):
        asleep.append(Slow([JOINED], lambda: CoordinatorLog(path)))
    assert CoordinatorLog(path).entries == []


def test_what_is_written_while_a_record_is_taken_over_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries of a coordinator that still held the log are carried out, and are in the next log."""
    path = tmp_path / "record"
    first = CoordinatorLog(path)
    first.append([JOINED])
    genuine = os.fsync

    def meanwhile(fd: int) -> None:
        """Append to the old log while the new one is complete and not yet renamed into place."""
        genuine(fd)
        monkeypatch.undo()
        first.append([LogEntry(events.GenerationSeen(7), 2.0)])

    monkeypatch.setattr(os, "fsync", meanwhile)
    second = CoordinatorLog(path)
    assert second.entries == [JOINED, LogEntry(events.GenerationSeen(7), 2.0)]
    assert CoordinatorLog(path).entries == second.entries


def test_a_torn_line_was_never_decided(tmp_path: Path) -> None:
    path = tmp_path / "record"
    CoordinatorLog(path).append([JOINED, JOINED])
    path.write_bytes(path.read_bytes()[:-7])
    assert CoordinatorLog(path).entries == [JOINED]


NO_ROOM = """
import resource, sys
from pathlib import Path
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.outputs import LogEntry
from chaoskit.coordinator.log import CoordinatorLog

path = Path(sys.argv[1])
record = CoordinatorLog(path)
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, resource.RLIM_INFINITY))
record.append([LogEntry(events.NodeJoined("node0"), 1.0)])
"""


def test_a_record_that_has_no_room_says_so(tmp_path: Path) -> None:
    """A log without room raises an error: the kernel writes a part of the line and reports success."""
    path = tmp_path / "record"
    # a subprocess, because the limit holds for all writes of a process
    done = subprocess.run(
        [sys.executable, "-c", NO_ROOM, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "File too large" in done.stderr
    assert CoordinatorLog(path).entries == []


# -- a new coordinator and the log -----------------------------------------------------------------


def plane(entries: list[LogEntry] | None = None) -> ControlPlane:
    """Return a control plane of one node without spares that has read ``entries``."""
    return ControlPlane(RunConfig(job=JobSpec("job.py"), nodes=1, spares=0), entries or [], 100.0)


def test_a_lost_record_does_not_bring_a_generation_back() -> None:
    """A coordinator without its log learns from the nodes which generations there were."""
    fresh = plane()
    outputs = fresh.attach(AgentHello("node0", "host", 1, generation=41), 100.0)
    remembered = [output.event for output in outputs if isinstance(output, LogEntry)]
    assert remembered[0] == events.GenerationSeen(41, "node0")


# -- zombies and bad nodes -------------------------------------------------------------------------


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.promise("A node whose lease ran out is disconnected.")
def test_a_node_that_wakes_up_after_its_lease_is_fenced_and_taken_back(
    chaos: Chaos, tmp_path: Path
) -> None:
    """A node with an agent stopped beyond its lease has lost its rank, and is taken
    back.

    Its old worker has committed nothing more, and is ended.
    """
    stopped: list[int] = []
    state: dict[str, Any] = {"lost": None, "thawed": False, "committed": 0}

    def act(message: Any) -> bool:
        match message:
            case Plan(generation=1):
                worker = message.members[1].endpoint.pid
                stopped[:] = [_parent(_parent(worker)), worker]  # the agent and the worker
            case WorkerLost(cause="node lost"):
                state["lost"] = message.worker
            case Heartbeat(_, beats):
                state["committed"] = max([state["committed"], *(beat.step for beat in beats)])
        if state["committed"] >= 4 and len(stopped) == 2 and "frozen" not in state:
            state["frozen"] = state["committed"]
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
        if state["lost"] and state["committed"] >= state["frozen"] + 6 and not state["thawed"]:
            state["thawed"] = True
            for pid in reversed(stopped):
                os.kill(pid, signal.SIGCONT)
        is_heard = isinstance(message, Heartbeat) and message.node == "node1"
        return (
            state["thawed"]
            and is_heard
            and state["lost"] not in {beat.worker for beat in message.beats}
        )

    flag = Flag(tmp_path / "taken back", act)
    settings: dict[str, Any] = {"options": {"step_s": 0.02}, "check": False, "deadline_s": 120.0}
    try:
        outcome = chaos.run(
            PLAIN, nodes=3, spares=1, steps=20, until=flag.until, watch=flag, **settings
        )
    finally:
        for pid in stopped:
            _continue(pid)
    problems = [check for check in outcome.checks if check.verdict != Verdict.PASSED]
    assert [check.name for check in problems] == ["no false alarm"], outcome.directory
    assert flag.is_up, outcome.directory
    zombie = state["lost"]
    fenced_ns = next(
        record.t_ns for record in journal(outcome, Event.DETECTED) if record["worker"] == zombie
    )
    commits = [record for record in journal(outcome, Event.COMMIT) if record["generation"] == 1]
    decided = {
        record["step"] for record in commits if record.source != zombie and record.t_ns < fenced_ns
    }
    late = [
        record["step"] for record in commits if record.source == zombie and record.t_ns >= fenced_ns
    ]
    assert set(late) <= decided, (
        "a zombie has committed"
    )  # a commit that was decided before the stop may still be recorded
    assert [record["worker"] for record in journal(outcome, Event.WORKER_EXITED)].count(zombie) == 1


def _continue(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass  # it ended with the run


def test_a_node_that_loses_every_worker_is_set_aside(chaos: Chaos, tmp_path: Path) -> None:
    """The other nodes take over the share of a node on which every worker dies, and the run ends
    well.
    """
    pids: dict[str, int] = {}
    killed: list[str] = []
    lost: set[str] = set()
    training = False

    def act(message: Any) -> bool:
        nonlocal training
        if isinstance(message, WorkerReady) and message.node == "node1":
            pids[message.worker] = message.endpoint.pid
        if isinstance(message, WorkerLost):
            lost.add(message.worker)
        training |= isinstance(message, Heartbeat) and any(beat.step >= 4 for beat in message.beats)
        for worker in pids.keys() - killed if training else ():
            killed.append(worker)
            os.kill(pids[worker], signal.SIGKILL)
        return len(lost) == 3

    flag = Flag(tmp_path / "lost", act)
    settings: dict[str, Any] = {
        "nodes": 3,
        "spares": 0,
        "options": {"step_s": 0.03},
        "strikes_max": 3,
    }
    goal = flag.until | {"world": 3}
    outcome = chaos.run(
        PLAIN, steps=20, until=goal, watch=flag, check=False, deadline_s=120.0, **settings
    )
    problems = [check for check in outcome.checks if check.verdict != Verdict.PASSED]
    assert [check.name for check in problems] == ["no false alarm"], outcome.directory
    assert [record["node"] for record in journal(outcome, Event.SET_ASIDE)] == ["node1"]
    assert len(killed) == 3, killed
    assert outcome.steps[-1].world == 3, "the other nodes were not given its share"
    assert "node1" not in {member["node"] for member in journal(outcome, Event.PLAN)[-1]["members"]}


@pytest.mark.promise("one that differs is not let in")
def test_a_worker_whose_numbers_would_differ_is_not_let_in(chaos: Chaos, tmp_path: Path) -> None:
    """A replacement with another numeric setting is refused; its successor is let in.

    It would train on, plausibly and wrongly.
    """
    options = {"marker": str(tmp_path / "trained"), "step_s": 0.03}
    plan: dict[str, Any] = {
        "nodes": 2,
        "spares": 0,
        "faults": [Kill(rank=1, at_step=6)],
        "deadline_s": 120.0,
    }
    job = "../../jobs/failing/troubled.py:late_ones_differ"
    outcome = chaos.run(
        job, steps=20, until={"world": 2}, options=options, twin=False, check=False, **plan
    )
    refused = [
        record for record in journal(outcome, Event.DETECTED) if record["cause"] == "differs"
    ]
    assert [record["detail"] for record in refused] == [
        "matmul medium instead of matmul highest"
    ], outcome.directory
    members = {
        member["worker"] for record in journal(outcome, Event.PLAN) for member in record["members"]
    }
    assert refused[0]["worker"] not in members
    assert outcome.steps[-1].world == 2
