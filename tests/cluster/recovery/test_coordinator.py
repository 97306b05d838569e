"""The coordinator is killed at any moment: training goes on, and the next one knows what this one had decided."""

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
from chaoskit.coordinator.log import Fenced, Record
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.outputs import Remember
from chaoskit.coordinator.plane import ControlPlane
from chaoskit.elastic import events as happenings
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
    Welcome,
    WorkerDone,
    WorkerLost,
    WorkerReady,
)
from faults import Kill

PLAIN = "../../jobs/failing/troubled.py:plain"
HELD = "../../jobs/failing/held.py"


def journal(outcome: Outcome, *events: Event) -> list[JournalRecord]:
    return [
        record
        for record in read_journals(Path(outcome.directory) / "journal")
        if record.event in events
    ]


class Regicide:
    """Kills the coordinator whenever ``moment`` says so, at most ``times`` times; shown every message."""

    def __init__(self, moment: Callable[[Regicide, Any], bool], times: int = 1) -> None:
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
        # without a pid, this is still what one said that is dead: it cannot be killed again
        if self.pid and self.kills < self._times and not self.over and self._moment(self, message):
            self.kills += 1
            os.kill(self.pid, signal.SIGKILL)
            self.pid = 0

    @property
    def is_done(self) -> bool:
        """Whether the coordinator was killed as often as it was to be, and another one has answered since."""
        return self.kills == self._times and self.pid != 0


def regicide(
    chaos: Chaos,
    directory: Path,
    moment: Callable[[Regicide, Any], bool],
    times: int = 1,
    **plan: Any,
) -> Outcome:
    """A run that must pass every check although its coordinator is killed.

    It does not end before that, and another one has taken over.
    """
    assassin = Regicide(moment, times)

    def look(message: Any) -> bool:
        assassin(message)
        return assassin.is_done

    flag = Flag(directory / "killed", look)
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
    check(outcome, assassin, times)
    return outcome


def check(outcome: Outcome, assassin: Regicide, times: int) -> None:
    """What holds of every such run."""
    assert assassin.kills == times, outcome.directory
    resumed = journal(outcome, Event.RESUMED)
    assert [record["term"] for record in resumed] == list(range(2, times + 2)), outcome.directory
    generations = [record["generation"] for record in journal(outcome, Event.PLAN)]
    assert generations == sorted(set(generations)), "a generation came twice, or went down"


# -- real runs ----------------------------------------------------------------------------------------------------


def test_training_goes_on_without_a_coordinator(chaos: Chaos, tmp_path: Path) -> None:
    """No rank is lost, so no membership changes, and no rank regroups."""
    outcome = regicide(chaos, tmp_path, lambda assassin, message: assassin.committed >= 5)
    assert len(journal(outcome, Event.PLAN)) == 1
    assert outcome.false_alarms == 0


def test_killed_again_and_again(chaos: Chaos, tmp_path: Path) -> None:
    """Five coordinators in turn are killed; the membership is that of the first one to the end."""
    moments = iter(range(4, 24, 4))
    due = [next(moments)]

    def moment(assassin: Regicide, message: Any) -> bool:
        if not isinstance(message, Heartbeat) or assassin.committed < due[0]:
            return False  # before a node is heard, the coordinator has not said that it goes on
        due[0] = next(moments, 10**9)
        return True

    outcome = regicide(chaos, tmp_path, moment, times=5)
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
    """It is killed when it hears of a loss, has published a plan, hears that a group is formed, and so on: with a
    spare and without one, the world is full again in the end."""
    strikes = False  # a heartbeat may tell of no step before

    def moment(assassin: Regicide, message: Any) -> bool:
        nonlocal strikes
        strikes |= isinstance(message, AtHook)
        return strikes and isinstance(message, kind)

    plan: dict[str, Any] = {"spares": spares, "faults": [Kill(rank=1, at_step=8, phase="reduce")]}
    outcome = regicide(chaos, tmp_path, moment, until={"world": 3}, **plan)
    assert outcome.steps[-1].world == 3
    first, last = (journal(outcome, Event.PLAN)[at]["members"] for at in (0, -1))
    killed = first[1]["worker"]  # which node has rank 1 depends on the order in which nodes came
    assert len(last) == 3
    assert killed not in [member["worker"] for member in last]


@pytest.mark.promise(
    "An agent tells the next coordinator what its workers have said, why they failed and which of them ended"
)
def test_a_rank_dies_while_there_is_no_coordinator(chaos: Chaos, tmp_path: Path) -> None:
    """Both at once: the next coordinator hears of the loss from the agent."""
    told: list[str] = []

    def moment(assassin: Regicide, message: Any) -> bool:
        if assassin.committed < 5:
            return False
        os.kill(assassin.plans[0].members[2].endpoint.pid, signal.SIGKILL)
        return True

    def look(message: Any) -> bool:
        assassin(message)
        told.extend([message.worker] if isinstance(message, WorkerLost) else [])
        return assassin.is_done and bool(told)

    assassin, flag = Regicide(moment), Flag(tmp_path / "killed", look)
    settings: dict[str, Any] = {"options": {"step_s": 0.02}, "deadline_s": 120.0, "check": False}
    outcome = chaos.run(
        PLAIN, nodes=3, spares=1, steps=20, until=flag.until, watch=flag, **settings
    )
    problems = [check for check in outcome.checks if check.verdict != Verdict.PASSED]
    assert [check.name for check in problems] == ["no false alarm"], outcome.directory
    assert told == ["node2.0"]
    assert journal(outcome, Event.RESUMED)


def test_killed_before_anybody_is_ready(chaos: Chaos, tmp_path: Path) -> None:
    """Nothing is decided yet: the nodes attach to the next coordinator, and the run begins."""
    regicide(chaos, tmp_path, lambda assassin, message: isinstance(message, Welcome))


def test_killed_before_the_first_plan(chaos: Chaos, tmp_path: Path) -> None:
    regicide(chaos, tmp_path, lambda assassin, message: isinstance(message, WorkerReady))


def regicide_at_the_end(chaos: Chaos, last: Path, watch: Callable[[Any], None]) -> Outcome:
    """A run of whose two ranks one is not done before the file ``last`` is there."""
    options = {"step_s": 0.02, "last": str(last)}
    plan: dict[str, Any] = {
        "steps": 20,
        "until": {"world": 2},
        "options": options,
        "deadline_s": 120.0,
    }
    return chaos.run(HELD, nodes=2, spares=0, watch=watch, **plan)


def test_killed_when_a_rank_is_done(chaos: Chaos, tmp_path: Path) -> None:
    """The other one is done when another coordinator is there."""

    def look(message: Any) -> bool:
        assassin(message)
        return assassin.is_done

    assassin, last = (
        Regicide(lambda assassin, message: isinstance(message, WorkerDone)),
        tmp_path / "killed",
    )
    check(regicide_at_the_end(chaos, last, Flag(last, look)), assassin, times=1)


def test_an_observer_hears_of_the_end_however_late_it_finds_the_next_coordinator(
    chaos: Chaos, tmp_path: Path
) -> None:
    """An observer that attaches after every worker has ended is told of the end of the job."""
    last = tmp_path / "killed"

    def watch(message: Any) -> None:
        before = assassin.kills
        assassin(message)
        if assassin.kills > before:
            last.touch()
            pids = [member.endpoint.pid for member in assassin.plans[-1].members]
            wait_until(lambda: all(linux.is_ending(pid) for pid in pids), "the ends of all ranks")

    assassin = Regicide(lambda assassin, message: isinstance(message, WorkerDone))
    check(regicide_at_the_end(chaos, last, watch), assassin, times=1)


def test_too_many_deaths_end_the_run_with_a_reason(chaos: Chaos) -> None:
    """A coordinator that always dies is not started for ever. Steps are taken meanwhile, but not that many."""
    assassin = Regicide(lambda assassin, message: isinstance(message, Welcome), times=100)
    with pytest.raises(Exception, match="coordinator"):
        chaos.run(
            PLAIN, nodes=2, spares=0, steps=10**6, watch=assassin, deadline_s=120.0, twin=False
        )
    assert 10 < assassin.kills < 100


# -- the record ---------------------------------------------------------------------------------------------------

JOINED = Remember(events.NodeJoined("node0"), 1.0)


def test_a_record_is_read_by_the_next_term(tmp_path: Path) -> None:
    path = tmp_path / "record"
    first = Record(path)
    first.append([JOINED, Remember(events.GenerationSeen(7), 2.0)])
    second = Record(path)
    assert (first.term, second.term) == (1, 2)
    assert second.memory == [JOINED, Remember(events.GenerationSeen(7), 2.0)]


@pytest.mark.parametrize("deadline_s", [math.inf, -math.inf])
def test_a_record_holds_numbers_that_are_not_finite(tmp_path: Path, deadline_s: float) -> None:
    """JSON has none of them. A line that the next coordinator cannot read would cost it the whole record."""
    path = tmp_path / "record"
    endless = Remember(events.Elastic(happenings.Notice("node0", deadline_s)), 2.0)
    Record(path).append([JOINED, endless, JOINED])
    heir = Record(path)
    assert (heir.damage, heir.memory) == ("", [JOINED, endless, JOINED])
    assert Record(path).memory == heir.memory


def test_the_directory_is_synced_after_a_record_has_taken_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the record of the coordinator before may be there again after a power cut."""
    path = tmp_path / "record"
    genuine, synced = os.fsync, list[tuple[bool, bool]]()

    def spy(fd: int) -> None:
        genuine(fd)
        synced.append((os.fstat(fd).st_ino == tmp_path.stat().st_ino, path.exists()))

    monkeypatch.setattr(os, "fsync", spy)
    Record(path)
    assert synced == [(False, False), (True, True)], (
        "the file before it is renamed, the directory after it"
    )


def test_two_coordinators_with_the_same_pid_write_two_drafts(tmp_path: Path) -> None:
    """Each is process 1 of its container, and the directory is on a volume of both."""
    path = tmp_path / "record"
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text("of another container")
    Record(path)
    assert draft.read_text() == "of another container"
    assert {one.name for one in tmp_path.iterdir()} == {path.name, draft.name}


def test_a_coordinator_that_was_only_asleep_is_fenced(tmp_path: Path) -> None:
    """It must not decide anything after another one has taken over."""
    path = tmp_path / "record"
    asleep, awake = Record(path), Record(path)
    with pytest.raises(Fenced):
        asleep.append([JOINED])
    awake.append([JOINED])
    assert Record(path).memory == [JOINED]


class Slow(list[Remember]):
    """Entries, of which the first is reached only when ``meanwhile`` is over."""

    def __init__(self, entries: list[Remember], meanwhile: Callable[[], Any]) -> None:
        super().__init__(entries)
        self._meanwhile = meanwhile

    def __iter__(self) -> Iterator[Remember]:
        self._meanwhile()
        return super().__iter__()


def test_a_coordinator_that_falls_asleep_while_it_writes_is_fenced(tmp_path: Path) -> None:
    """What it wrote is in no record: it may not be carried out."""
    path = tmp_path / "record"
    asleep = Record(path)
    with pytest.raises(Fenced):
        asleep.append(Slow([JOINED], lambda: Record(path)))
    assert Record(path).memory == []


def test_what_is_written_while_a_record_is_taken_over_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer was still the holder, and carries it out."""
    path = tmp_path / "record"
    first = Record(path)
    first.append([JOINED])
    genuine = os.fsync

    def meanwhile(fd: int) -> None:
        """The new record is complete, and not yet in its place."""
        genuine(fd)
        monkeypatch.undo()
        first.append([Remember(events.GenerationSeen(7), 2.0)])

    monkeypatch.setattr(os, "fsync", meanwhile)
    second = Record(path)
    assert second.memory == [JOINED, Remember(events.GenerationSeen(7), 2.0)]
    assert Record(path).memory == second.memory


def test_a_torn_line_was_never_decided(tmp_path: Path) -> None:
    path = tmp_path / "record"
    Record(path).append([JOINED, JOINED])
    path.write_bytes(path.read_bytes()[:-7])
    assert Record(path).memory == [JOINED]


NO_ROOM = """
import resource, sys
from pathlib import Path
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.outputs import Remember
from chaoskit.coordinator.log import Record

path = Path(sys.argv[1])
record = Record(path)
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, resource.RLIM_INFINITY))
record.append([Remember(events.NodeJoined("node0"), 1.0)])
"""


def test_a_record_that_has_no_room_says_so(tmp_path: Path) -> None:
    """A part of a line is written then, and the kernel calls that a success."""
    path = tmp_path / "record"
    # the limit would hold for everything that the process of the tests writes
    ended = subprocess.run(
        [sys.executable, "-c", NO_ROOM, str(path)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "File too large" in ended.stderr
    assert Record(path).memory == []


# -- what a new coordinator makes of it ---------------------------------------------------------------------------


def plane(memory: list[Remember] | None = None) -> ControlPlane:
    return ControlPlane(RunConfig(job=JobSpec("job.py"), nodes=1, spares=0), memory or [], 100.0)


def test_a_lost_record_does_not_bring_a_generation_back() -> None:
    """The nodes know which generations there were."""
    fresh = plane()
    outputs = fresh.attach(AgentHello("node0", "host", 1, generation=41), 100.0)
    remembered = [output.event for output in outputs if isinstance(output, Remember)]
    assert remembered[0] == events.GenerationSeen(41, "node0")


# -- zombies and bad nodes ----------------------------------------------------------------------------------------


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.promise("A node whose lease ran out is disconnected.")
def test_a_node_that_wakes_up_after_its_lease_is_fenced_and_taken_back(
    chaos: Chaos, tmp_path: Path
) -> None:
    """An agent that was stopped for longer than its lease has lost its rank: it is heard again, and its old worker has
    committed nothing more and is ended."""
    stopped: list[int] = []
    seen: dict[str, Any] = {"lost": None, "thawed": False, "committed": 0}

    def act(message: Any) -> bool:
        match message:
            case Plan(generation=1):
                worker = message.members[1].endpoint.pid
                stopped[:] = [_parent(_parent(worker)), worker]  # its agent, and itself
            case WorkerLost(cause="node lost"):
                seen["lost"] = message.worker
            case Heartbeat(_, beats):
                seen["committed"] = max([seen["committed"], *(beat.step for beat in beats)])
        if seen["committed"] >= 4 and len(stopped) == 2 and "frozen" not in seen:
            seen["frozen"] = seen["committed"]
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
        if seen["lost"] and seen["committed"] >= seen["frozen"] + 6 and not seen["thawed"]:
            seen["thawed"] = True
            for pid in reversed(stopped):
                os.kill(pid, signal.SIGCONT)
        is_heard = isinstance(message, Heartbeat) and message.node == "node1"
        return (
            seen["thawed"]
            and is_heard
            and seen["lost"] not in {beat.worker for beat in message.beats}
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
    zombie = seen["lost"]
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
    )  # it may write down what was decided before it was stopped
    assert [record["worker"] for record in journal(outcome, Event.WORKER_EXITED)].count(zombie) == 1


def _continue(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass  # it ended with the run


def test_a_node_that_loses_every_worker_is_set_aside(chaos: Chaos, tmp_path: Path) -> None:
    """Every worker that is started on the node dies; the others take over its share, and the run ends well."""
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
    """A replacement with another numeric setting would train on, plausibly and wrongly; its successor is let in."""
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
