"""Nodes tell a coordinator without a log enough to begin again, or to end the run with a reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaoskit.config import RunConfig
from chaoskit.coordinator.handlers.on_node import REATTACH_S
from chaoskit.coordinator.log import CoordinatorLog, Fenced, Gone
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.outputs import LogEntry, Send, WriteRecord
from chaoskit.coordinator.plane import ControlPlane
from chaoskit.job import JobSpec
from chaoskit.journal import read_journals
from chaoskit.process.linux import is_ending
from chaoskit.pytest_plugin import Chaos
from chaoskit.suites.goals import happened
from chaoskit.vocabulary import Event, Verdict
from chaoskit.wire.messages import (
    AgentHello,
    EndJob,
    Endpoint,
    Formed,
    Healed,
    Heartbeat,
    OfferedSnapshot,
    Plan,
    Recall,
    Sealed,
    StartWorker,
    StopWorker,
    Welcome,
    WorkerLost,
    WorkerReady,
)

PLAIN = "../../jobs/failing/troubled.py:plain"

# -- the control plane -----------------------------------------------------------------------------


class Bench:
    """A control plane without a past, with a clock of its own."""

    def __init__(self, entries: list[LogEntry] | None = None, **changes: Any) -> None:
        self.config = RunConfig(job=JobSpec("job.py"), **({"nodes": 2, "spares": 0} | changes))
        self.plane = ControlPlane(self.config, entries or [], 100.0)
        self.now_s = 100.0
        self.outputs: list[Any] = []

    def do(self, outputs: list[Any]) -> list[Any]:
        """Keep the outputs, and return node and message of those that are sent."""
        self.outputs += outputs
        return [(output.node, output.message) for output in outputs if isinstance(output, Send)]

    def attach(self, node: str, generation: int = 41, started: int = 7, **more: Any) -> list[Any]:
        hello = AgentHello(node, "host", 1, generation=generation, started=started, **more)
        return self.do(self.plane.attach(hello, self.now_s))

    def hear(self, message: Any) -> list[Any]:
        return self.do(self.plane.hear(message, self.now_s))

    def wait(self, seconds: float) -> list[Any]:
        """Let time pass, with a heartbeat of each attached node every 50 ms, and return the
        messages sent.
        """
        sent = []
        for _ in range(round(seconds / 0.05)):
            self.now_s += 0.05
            for node in sorted(self.plane.attached):
                sent += self.hear(Heartbeat(node, ()))
            sent += self.do(self.plane.tick(self.now_s, {}))
        return sent

    @property
    def remembered(self) -> list[LogEntry]:
        return [output for output in self.outputs if isinstance(output, LogEntry)]

    @property
    def noted(self) -> list[WriteRecord]:
        return [
            output
            for output in self.outputs
            if isinstance(output, WriteRecord) and output.event == Event.RECORD_LOST
        ]


def ready(worker: str) -> WorkerReady:
    return WorkerReady(worker, worker[0], Endpoint("host", worker, 1, 2, 3))


def snapshot(node: str, step: int) -> OfferedSnapshot:
    return OfferedSnapshot(
        node, f"{node}.0", step, 41, 100, f"{step}", Endpoint("host", node, 1, 2, 3)
    )


def starts(sent: list[Any]) -> list[str]:
    """Return the workers that the messages start."""
    return [message.worker for _, message in sent if isinstance(message, StartWorker)]


def ends(sent: list[Any]) -> set[EndJob]:
    """Return the messages that end the job."""
    return {message for _, message in sent if isinstance(message, EndJob)}


def test_workers_of_before_are_given_up_and_fresh_ones_begin_with_the_newest_copies() -> None:
    bench = Bench()
    sent = bench.attach("a", workers=("a.3",)) + bench.attach("b", started=5, workers=("b.4",))
    assert [order for order in sent if isinstance(order[1], StopWorker)] == [
        ("a", StopWorker("a.3", "fenced")),
        ("b", StopWorker("b.4", "fenced")),
    ]
    assert not starts(sent), "others may come"
    sent = bench.wait(REATTACH_S + 0.1)
    assert [node for node, message in sent if isinstance(message, Recall)] == ["a", "b"]
    assert starts(sent) == ["a.7", "b.5"], "a name came twice"
    detail = "it has seen generation 41, the log has 0"
    assert [output.fields for output in bench.noted] == [
        {"node": "a", "generation": 41, "known": 0, "detail": detail}
    ]
    bench.hear(Sealed("a", (snapshot("a", 9),)))
    bench.hear(Sealed("b", (snapshot("b", 10),)))
    sent = bench.hear(ready("a.7")) + bench.hear(ready("b.5"))
    plans = {message for _, message in sent if isinstance(message, Plan)}
    assert [(plan.generation, [copy.step for copy in plan.restore]) for plan in plans] == [
        (42, [10, 9])
    ]
    assert [member.worker for member in plans.pop().members] == ["a.7", "b.5"]
    successor = ControlPlane(bench.config, bench.remembered, 0.0)
    assert successor.membership.plan == bench.plane.membership.plan, (
        "another coordinator would decide otherwise"
    )


def test_without_a_copy_the_job_ends_for_a_reason() -> None:
    bench = Bench()
    bench.attach("a")
    bench.attach("b")
    bench.wait(REATTACH_S + 0.1)
    sent = bench.hear(Sealed("a", ())) + bench.hear(Sealed("b", ()))
    (end,) = ends(sent)
    assert not end.ok
    assert end.reason.startswith("the coordinator's log was lost, and every replica was lost")


def test_nodes_that_were_lost_with_the_record_are_not_waited_for() -> None:
    """Two of three nodes come back: they share the three workers, and both have ranks."""
    bench = Bench(nodes=3, spares=0)
    assert not starts(bench.attach("b") + bench.attach("c"))
    sent = bench.wait(REATTACH_S + 0.1)
    assert [node for node, message in sent if isinstance(message, Recall)] == ["b", "c"]
    sent = (
        bench.hear(Sealed("b", (snapshot("b", 9),))) + bench.hear(Sealed("c", ())) + bench.wait(0.1)
    )
    assert starts(sent) == ["b.7", "c.7", "b.8"]
    sent = bench.hear(ready("b.7")) + bench.hear(ready("b.8")) + bench.hear(ready("c.7"))
    assert [node for node, message in sent if isinstance(message, Plan)] == ["b", "c"]


def test_a_coordinator_that_ends_meanwhile_waits_no_longer_for_nodes() -> None:
    bench = Bench(nodes=3, spares=0)
    bench.attach("b")
    successor = Bench(bench.remembered, nodes=3, spares=0)
    successor.attach("b")
    sent = successor.wait(REATTACH_S + 0.1)
    assert [node for node, message in sent if isinstance(message, Recall)] == ["b"]


def test_when_no_node_stays_the_job_ends() -> None:
    bench = Bench()
    bench.attach("a")
    bench.do(bench.plane.detach("a", "gone", bench.now_s))
    bench.wait(bench.config.startup_s + 1)
    assert bench.plane.ended
    assert any("log was lost" in str(output) for output in bench.outputs)


def test_before_the_first_generation_only_names_are_known() -> None:
    """A run that has not trained begins again, with new names of workers."""
    bench = Bench()
    sent = bench.attach("a", generation=0, workers=("a.6",)) + bench.attach(
        "b", generation=0, started=0
    )
    assert ("a", StopWorker("a.6", "fenced")) in sent
    sent = bench.wait(REATTACH_S + 0.1)
    assert starts(sent) == ["a.7", "b.0"]
    sent = bench.hear(ready("a.7")) + bench.hear(ready("b.0"))
    assert [message.generation for _, message in sent if isinstance(message, Plan)] == [1, 1]


@pytest.mark.parametrize("trains", [False, True])
def test_a_node_that_tells_of_the_past_too_late_ends_the_job(trains: bool) -> None:
    """The run ends if a node reports an earlier generation after it has begun again.

    It would begin at step 0, as another run under the same name.
    """
    bench = Bench()
    bench.attach("a", generation=0, started=0)
    bench.attach("b", generation=0, started=0)
    if trains:
        bench.hear(ready("a.0"))
        bench.hear(ready("b.0"))
    sent = bench.attach("c")
    (end,) = ends(sent)
    assert {node for node, message in sent if isinstance(message, EndJob)} == {"a", "b", "c"}
    assert "the coordinator's log was lost: a node has seen generation 41" in end.reason


def test_a_node_that_comes_late_and_has_seen_no_more_is_taken_in() -> None:
    bench = Bench(nodes=1)
    bench.attach("a")
    bench.wait(REATTACH_S + 0.1)
    assert not ends(bench.attach("b", generation=41))
    assert bench.plane.membership.nodes == ("a", "b")


@pytest.mark.parametrize("term", [0, 3])
def test_nodes_that_know_less_come_first_and_the_others_are_waited_for(term: int) -> None:
    """Nodes without a rank, which have never seen a plan, may attach first; the others are waited
    for.
    """
    bench = Bench(spares=1)
    bench.do(
        bench.plane.attach(
            AgentHello("c", "host", 1, term=3, started=1), bench.now_s, term=term + 1
        )
    )
    bench.do(bench.plane.attach(AgentHello("d", "host", 1, term=3), bench.now_s, term=4))
    assert bool(bench.noted) == (term < 3), (
        "this coordinator is the next after the one that they know, or it is not"
    )
    assert not starts(bench.wait(REATTACH_S - 0.5))
    assert not ends(bench.attach("a", workers=("a.6",)) + bench.attach("b", workers=("b.6",)))
    sent = bench.wait(0.7)
    assert [node for node, message in sent if isinstance(message, Recall)] == ["a", "b", "c", "d"]
    assert starts(sent) == ["a.7", "b.7", "c.1"], "not all nodes have a part"
    assert not ends(sent)


def test_whoever_was_with_no_coordinator_before_waits_for_nobody_else() -> None:
    bench = Bench()
    sent = bench.attach("a", generation=0, started=0) + bench.attach("b", generation=0, started=0)
    assert starts(sent) == ["a.0", "b.0"]
    successor = Bench()  # the coordinator before it ended without an entry in its log
    for node in ("a", "b"):
        sent = successor.do(
            successor.plane.attach(AgentHello(node, "host", 1, term=1), successor.now_s, term=2)
        )
    assert starts(sent) == ["a.0", "b.0"]
    assert not successor.noted


# -- a log that has lost its end -------------------------------------------------------------------


def a_run_that_went_through_much() -> tuple[Bench, set[str]]:
    """Return a bench with lost and replaced ranks and spare, and the names of all workers it
    started.
    """
    bench = Bench(spares=1)
    sent = bench.attach("a", generation=0, started=0) + bench.attach("b", generation=0, started=0)
    done: list[str] = []
    for _ in range(8):
        if bench.plane.membership.generation == 2:
            sent += bench.hear(WorkerLost("b.0", "b", "killed", "", 1))
        for worker in [worker for worker in starts(sent) if worker not in done]:
            done.append(worker)
            sent += bench.hear(ready(worker))
        generation = bench.plane.membership.generation
        for member in bench.plane.membership.members:
            sent += bench.hear(Formed(member, generation)) + bench.hear(Healed(member, generation))
        if generation == 1:
            sent += bench.hear(WorkerLost("a.0", "a", "killed", "", 1))
        sent += bench.wait(0.3)
    return bench, set(starts(sent))


LONG, NAMES = a_run_that_went_through_much()


@pytest.mark.parametrize("kept", range(len(LONG.remembered) + 1))
def test_whatever_end_is_lost_no_name_comes_twice(kept: int) -> None:
    """No name is given twice, whatever part of the log is lost.

    The nodes report how many workers they have started, and their last plan.
    """
    assert len(NAMES) >= 5
    membership = LONG.plane.membership
    successor = Bench(LONG.remembered[:kept], spares=1)
    sent = []
    for node in ("a", "b"):
        count = sum(name.startswith(node) for name in NAMES)
        workers = tuple(membership.workers_on(node))
        hello = AgentHello(
            node,
            "host",
            1,
            generation=membership.generation,
            workers=workers,
            term=1,
            started=count,
        )
        sent += successor.do(successor.plane.attach(hello, successor.now_s, term=2))
    sent += successor.wait(REATTACH_S + 1.0)
    assert not NAMES & set(starts(sent)), "a name came twice"
    if successor.plane.membership.plan is None or successor.plane.ended:
        assert successor.noted, "the loss of the log is not noted"
    if kept == len(LONG.remembered):
        assert not successor.noted


def test_a_record_that_lost_its_end_in_one_generation_ends_the_job() -> None:
    """The job ends if the log lacks the start of a spare, although its plan is current."""
    bench = Bench(spares=1)
    for node in ("a", "b"):
        bench.attach(node, generation=0, started=0)
    for worker in ("a.0", "b.0", "a.1"):
        bench.hear(ready(worker))
    for worker in ("a.0", "b.0"):
        bench.hear(Formed(worker, 1))
    before = bench.remembered
    assert starts(bench.hear(WorkerLost("a.1", "a", "killed", "", 1)) + bench.wait(3.0)) == ["a.2"]
    successor = Bench(before, spares=1)
    sent = successor.attach("a", generation=1, started=3, workers=("a.0", "a.2"), term=1)
    (end,) = ends(sent)
    assert (
        end.reason
        == "the coordinator's log was lost: a has started 3 workers, and 2 of them are known"
    )
    assert [note.fields["detail"] for note in successor.noted] == [
        "it has started 3 workers, the log has 2"
    ]
    assert not starts(sent)


# -- the log ---------------------------------------------------------------------------------------

JOINED = LogEntry(events.NodeJoined("node0"), 1.0)


def test_a_record_takes_over_the_higher_term(tmp_path: Path) -> None:
    path = tmp_path / "record"
    record = CoordinatorLog(path)
    record.append([JOINED])
    record.outbid(41)
    assert record.term == 42
    record.append([JOINED])
    record.outbid(41)
    assert record.term == 42, "it is the one that the node knows"
    successor = CoordinatorLog(path)
    assert (successor.term, successor.entries) == (43, [JOINED, JOINED])
    with pytest.raises(Fenced):
        record.outbid(50)


HEADER = b'{"term":3,"format":2}\n'
WHOLE = b'{"now_s":1.0,"event":{"type":"NodeJoined","node":"node0"}}\n'
DAMAGED = {
    "empty": b"",
    "zeros": b"\0\0\0\0",
    "nonsense": b"nonsense\n",
    "no number": b'{"term":"x"}\n',
    "a wrong number": b'{"term":-4}\n',
    "too large a number": b'{"term":1%s}\n' % (b"0" * 30),
    "half a header": HEADER[:5],
    "endless nesting": b'{"x":' + b"[" * 100_000,
    "not UTF-8 in an entry": HEADER + WHOLE.replace(b"node0", b"\xff\xfe") + WHOLE,
    "a hole": HEADER + WHOLE + b"\0" * len(WHOLE) + b"\n" + WHOLE,
    "an unknown event": HEADER + WHOLE.replace(b"NodeJoined", b"NodeEaten") + WHOLE,
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_record_that_cannot_be_read_is_lost_and_stops_nobody(tmp_path: Path, what: str) -> None:
    path = tmp_path / "record"
    path.write_bytes(DAMAGED[what])
    record = CoordinatorLog(path)
    assert (record.term, record.entries) == (1, [])
    assert record.damage.startswith("record cannot be read: ")
    record.append([JOINED])
    successor = CoordinatorLog(path)
    assert (successor.term, successor.entries, successor.damage) == (2, [JOINED], "")


def test_a_log_of_another_format_is_lost_and_its_format_is_named(tmp_path: Path) -> None:
    path = tmp_path / "record"
    path.write_bytes(b'{"term":3}\n' + WHOLE)
    assert CoordinatorLog(path).damage.endswith(
        "it is of format 1, and this version of chaoskit reads format 2"
    )
    assert not CoordinatorLog(path).damage, "it was replaced"


@settings(deadline=None)  # files and directories are synced
@given(st.binary(max_size=200), st.booleans())
def test_no_content_at_all_stops_a_coordinator(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, tail: bool
) -> None:
    path = tmp_path_factory.mktemp("run") / "record"
    path.write_bytes(HEADER + WHOLE + noise if tail else noise)
    record = CoordinatorLog(path)
    assert record.damage or (record.term, record.entries) == (4, [JOINED])
    assert not CoordinatorLog(path).damage


@pytest.mark.parametrize("kept", range(len(HEADER), len(HEADER + WHOLE * 2)))
def test_a_last_line_that_is_torn_is_no_damage(tmp_path: Path, kept: int) -> None:
    """A torn last line is dropped: its coordinator ended while it wrote, and carried out nothing of
    it.
    """
    path = tmp_path / "record"
    path.write_bytes((HEADER + WHOLE * 2)[:kept])
    record = CoordinatorLog(path)
    assert (record.term, record.damage) == (4, "")
    assert record.entries == [JOINED] * ((kept - len(HEADER) + 1) // len(WHOLE))


@pytest.mark.parametrize("what", ["directory", "loop"])
def test_whatever_lies_in_the_place_of_the_record(tmp_path: Path, what: str) -> None:
    path = tmp_path / "record"
    if what == "directory":
        (path / "inside").mkdir(parents=True)
    else:
        path.symlink_to(path)
    record = CoordinatorLog(path)
    assert (record.term, record.entries) == (1, [])
    assert record.damage
    record.append([JOINED])
    assert CoordinatorLog(path).entries == [JOINED]


FULL_FOR_A_WHILE = """
import resource, sys
from pathlib import Path
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.outputs import LogEntry
from chaoskit.coordinator.log import CoordinatorLog

path, joined = Path(sys.argv[1]), [LogEntry(events.NodeJoined("node0"), 1.0)]
record = CoordinatorLog(path)
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, resource.RLIM_INFINITY))
try:
    record.append(joined)
except OSError:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    record.append(joined)
"""


def test_what_is_written_after_a_write_that_failed_begins_a_line(tmp_path: Path) -> None:
    """The first write after a failed one begins a line: half a line in the middle would be damage."""
    path = tmp_path / "record"
    subprocess.run([sys.executable, "-c", FULL_FOR_A_WHILE, str(path)], check=True)
    record = CoordinatorLog(path)
    assert (record.entries, record.damage) == ([JOINED], "")


def test_a_coordinator_whose_record_is_deleted_decides_nothing_more(tmp_path: Path) -> None:
    record = CoordinatorLog(tmp_path / "record")
    (tmp_path / "record").unlink()
    for act in (record.check, lambda: record.append([JOINED]), lambda: record.outbid(9)):
        with pytest.raises(Gone):
            act()


# -- reports of a coordinator about its log --------------------------------------------------------

COORDINATOR = """
import asyncio, socket, sys
from pathlib import Path
from chaoskit.wire import frames as wire
from chaoskit.config import RunConfig
from chaoskit.job import JobSpec
from chaoskit.coordinator.server import Coordinator, CoordinatorSpec
from chaoskit.coordinator.log import CoordinatorLog
from chaoskit.wire.messages import AgentHello

run, how = Path(sys.argv[1]), sys.argv[2]
path = run / "coordinator.wal"
CoordinatorLog(path)
if how == "damaged":
    path.write_bytes(b"nonsense")
coordinator = Coordinator(CoordinatorSpec(RunConfig(job=JobSpec("job.py")), "token", str(run)))
if how == "taken over":
    CoordinatorLog(path)
listener = socket.create_server(("127.0.0.1", 0))

def attach():
    connection = wire.connect(listener.getsockname(), "token")
    wire.send(connection, AgentHello("node0", "host", 1, term=7 if how == "outbid" else 1))
    print(wire.receive(connection).term, flush=True)

async def live():
    serving = asyncio.ensure_future(coordinator.serve([listener]))
    await (serving if how == "alone" else asyncio.to_thread(attach))

if how == "alone":
    coordinator._reattach_until_s = 0.0
    coordinator._report_takeover, say = lambda: (say(), coordinator._ended.set()), coordinator._report_takeover
asyncio.run(live())
"""


@pytest.mark.parametrize(
    ("how", "term", "resumed", "lost"),
    [
        ("intact", "2", [2], []),
        ("alone", "", [2], []),
        ("taken over", "", [], []),
        ("outbid", "8", [], ["it has seen term 7, the log has 1"]),
        ("damaged", "1", [], ["coordinator.wal cannot be read: it has no header"]),
    ],
)
def test_who_goes_on_says_so_and_who_cannot_does_not(
    tmp_path: Path, how: str, term: str, resumed: list[int], lost: list[str]
) -> None:
    """A coordinator reports that it resumed the run only if its log is current and was read."""
    command = [sys.executable, "-c", COORDINATOR, str(tmp_path), how]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)
    assert process.stdout.strip() == term, process.stderr
    records = read_journals(tmp_path / "journal")
    assert [record["term"] for record in records if record.event == Event.RESUMED] == resumed
    assert [record["detail"] for record in records if record.event == Event.RECORD_LOST] == lost
    assert ("term 2 is over" in process.stderr) == (how == "taken over")
    assert ("starting with an empty log" in process.stderr) == (how == "damaged")
    lines = [
        line.partition(", generation")[0]
        for line in process.stderr.splitlines()
        if "took over" in line
    ]
    takeover = "this coordinator took over from the previous one: term 2"
    assert lines == [takeover] * len(resumed), "the log of its pod says the same as the journal"


# -- a real run ------------------------------------------------------------------------------------


class LogDeleter:
    """A watcher that deletes the log of the coordinator, once, after ``steps`` steps."""

    def __init__(self, steps: int) -> None:
        self._steps, self._pid = steps, 0
        self.has_deleted = False

    def __call__(self, message: Any) -> None:
        match message:
            case Welcome(pid=pid):
                self._pid = pid
            case Heartbeat(_, beats) if not self.has_deleted and any(
                beat.step >= self._steps for beat in beats
            ):
                self.has_deleted = True
                open_files = [
                    Path(os.readlink(fd))
                    for fd in Path(f"/proc/{self._pid}/fd").iterdir()
                    if fd.is_symlink()
                ]
                (log,) = [path for path in open_files if path.name == "coordinator.wal"]
                log.unlink()


@pytest.mark.promise(
    "When a node has seen a generation, the run begins again from the newest sealed copies"
)
def test_a_run_whose_record_is_deleted_begins_again_from_its_copies(chaos: Chaos) -> None:
    """All workers are given up, and new ones go on from the newest copies, under new names."""
    deleter, goal = LogDeleter(steps=8), happened(chaos, Event.RESTORED, 2)

    def watch(message: Any) -> None:
        deleter(message)
        goal(message)

    settings: dict[str, Any] = {
        "nodes": 2,
        "spares": 1,
        "steps": 20,
        "options": {"step_s": 0.02},
        "deadline_s": 120.0,
    }
    outcome = chaos.run(PLAIN, watch=watch, until=goal.until, check=False, **settings)
    assert deleter.has_deleted
    problems = [
        check.name
        for check in outcome.checks
        if check.verdict not in (Verdict.PASSED, Verdict.UNKNOWN)
    ]
    assert problems == ["no false alarm", "property 11S: terms increase"], outcome.directory
    journals = read_journals(Path(outcome.directory) / "journal")
    assert [record["known"] for record in journals if record.event == Event.RECORD_LOST] == [0]
    generations = [record["generation"] for record in journals if record.event == Event.PLAN]
    assert generations == [1, 2]
    names = [record["worker"] for record in journals if record.event == Event.WORKER_STARTED]
    assert len(set(names)) == len(names) >= 6, names
    assert min(record["step"] for record in journals if record.event == Event.RESTORED) > 6, (
        "it began anew"
    )
    assert outcome.lost_steps == 0, outcome.directory
    pids = [record["pid"] for record in journals if record.event == Event.WORKER_STARTED]
    assert all(is_ending(pid) for pid in pids)
