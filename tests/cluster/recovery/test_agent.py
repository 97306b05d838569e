"""An agent that meets an error of its own ends, and its node is lost."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from support.descriptors import many_open
from support.goals import workers_lost
from support.waiting import LIMIT_S

from chaoskit.config import RunConfig
from chaoskit.daemon.keeper_base import NodeContext
from chaoskit.daemon.replica_keeper import ReplicaKeeper
from chaoskit.job import JobSpec
from chaoskit.journal import Journal, Record, read_journals
from chaoskit.pytest_plugin import Chaos
from chaoskit.runlog.outcome import Outcome
from chaoskit.substrate.cluster.supervised import workers_started
from chaoskit.suites.goals import happened
from chaoskit.vocabulary import Event, Verdict
from chaoskit.wire.messages import Heartbeat, Message, Plan, Sealed
from faults import Kill

CONFIG = RunConfig(job=JobSpec("job.py"))
SETTINGS: dict[str, Any] = {
    "nodes": 2,
    "spares": 0,
    "steps": 20,
    "deadline_s": 300.0,
    "check": False,
}


def run(chaos: Chaos, job: str, *, failed: str = "no false alarm", **plan: Any) -> Outcome:
    """Run a job that passes every check but ``failed``: by default the check that no rank is lost
    unplanned.
    """
    outcome = chaos.run(f"../../jobs/failing/troubled.py:{job}", **SETTINGS, **plan)
    problems = [check for check in outcome.checks if check.verdict != Verdict.PASSED]
    assert [check.name for check in problems] == [failed], outcome.directory
    return outcome


def journal(outcome: Outcome, event: Event) -> list[Record]:
    """Return the records of ``event`` from all journals of a run, by time."""
    return [
        record
        for record in read_journals(Path(outcome.directory) / "journal")
        if record.event == event
    ]


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
@pytest.mark.promise(
    "What goes wrong inside an agent ends it with a traceback: its node is lost, and the run recovers."
)
def test_an_agent_that_cannot_write_its_journal_ends_and_its_node_is_lost(chaos: Chaos) -> None:
    """An agent ends if it cannot write its journal, because a verdict could not take the missing
    records into account.
    """
    worker = struck = 0
    goal = happened(chaos, Event.NODE_LOST)

    def watch(message: Any) -> None:
        nonlocal worker, struck
        goal(message)
        match message:
            case Plan(generation=1):
                worker = message.members[1].endpoint.pid
            case Heartbeat(_, beats) if (
                not struck and worker and any(beat.step >= 5 for beat in beats)
            ):
                struck = _parent(_parent(worker))
                resource.prlimit(struck, resource.RLIMIT_FSIZE, (0, 0))
                os.kill(worker, signal.SIGKILL)  # the agent tries to record how it ended

    outcome = run(chaos, "plain", options={"step_s": 0.02}, until=goal.until, watch=watch)
    assert [record["node"] for record in journal(outcome, Event.NODE_LOST)] == ["node1"], (
        outcome.directory
    )
    assert not Path(f"/proc/{struck}").exists()


def test_a_worker_that_talks_nonsense_is_lost_and_its_node_is_not(
    chaos: Chaos, tmp_path: Path
) -> None:
    """A worker that sends bytes that are no message is lost; its node stays."""
    options = {"step_s": 0.02, "marker": str(tmp_path / "babbled")}
    flag = workers_lost(tmp_path / "lost")
    # the twin would send nonsense, too
    outcome = run(chaos, "babbling", options=options, until=flag.until, watch=flag, twin=False)
    (detected,) = journal(outcome, Event.DETECTED)
    assert (detected["rank"], detected["cause"]) == (1, "raised")
    assert "no message" in detected["detail"]
    assert not journal(outcome, Event.NODE_LOST)


def test_a_worker_that_has_no_memory_to_reduce_is_replaced(chaos: Chaos) -> None:
    """A rank without memory is replaced, not regrouped: the same members would fail in the same way
    again.
    """
    outcome = run(
        chaos, "out_of_memory", failed="no exception in the job", options={"at_step": 6}, twin=False
    )
    assert [record.source for record in journal(outcome, Event.FAILED)] == ["node1.0"], (
        outcome.directory
    )
    assert {record.source for record in journal(outcome, Event.QUIESCED)} <= {"node0.0"}, (
        "the others leave once"
    )


def test_a_worker_that_cannot_be_started_is_tried_again(chaos: Chaos) -> None:
    """A worker that cannot be started, for want of its log or process, is no bug of the job."""
    before = set(chaos.harness.directory.iterdir())

    def watch(message: Any) -> None:
        if isinstance(message, Plan) and message.generation == 1:
            (directory,) = set(chaos.harness.directory.iterdir()) - before
            (directory / "log" / "node1.1.log").mkdir()

    plan: dict[str, Any] = {
        "options": {"step_s": 0.05},
        "faults": [Kill(rank=1, at_step=6)],
        "until": {"world": 2},
    }
    outcome = chaos.run(
        "../../jobs/failing/troubled.py:plain", watch=watch, twin=False, **plan, **SETTINGS
    )
    (refused,) = [
        record for record in journal(outcome, Event.DETECTED) if record["worker"] == "node1.1"
    ]
    assert refused["cause"] == "raised"
    assert refused["detail"].startswith("could not be started: IsADirectoryError")
    completed = {check.name: check.verdict for check in outcome.checks}["training completed"]
    assert completed == Verdict.PASSED, outcome.directory


def test_workers_in_fresh_interpreters_train(chaos: Chaos) -> None:
    """Workers are started by the same orders if forking is switched off."""
    outcome = chaos.run(
        "../../jobs/failing/troubled.py:plain", nodes=1, spares=0, steps=3, twin=False, fork=False
    )
    assert {record["step"] for record in journal(outcome, Event.COMMIT)} == {0, 1, 2}


def test_a_node_whose_fork_server_ends_is_lost_and_the_job_recovers(chaos: Chaos) -> None:
    """An agent ends with its fork server, because it could start no other worker."""
    agents: list[int] = []
    goal = happened(chaos, Event.NODE_LOST)

    def watch(message: Any) -> None:
        goal(message)
        if isinstance(message, Plan) and message.generation == 1:
            fork_server = _parent(message.members[1].endpoint.pid)
            agents.append(_parent(fork_server))
            os.kill(fork_server, signal.SIGKILL)

    outcome = run(chaos, "plain", options={"step_s": 0.02}, until=goal.until, watch=watch)
    assert [record["node"] for record in journal(outcome, Event.NODE_LOST)] == ["node1"], (
        outcome.directory
    )
    assert not Path(f"/proc/{agents[0]}").exists()
    assert (
        "the fork server of this node has ended"
        in (Path(outcome.directory) / "log" / "node1.log").read_text()
    )


TASK = """
import asyncio, os, select, socket, sys
from chaoskit.wire import frames as wire
from chaoskit.config import RunConfig
from chaoskit.job import JobSpec
from chaoskit.agent.agent import Agent, AgentSpec
from chaoskit.daemon.client import KeeperLine
from chaoskit.wire.coordinator_files import CoordinatorAddress
from chaoskit.wire.messages import StartWorker, Welcome, WorkerLost

async def drown(far):
    # more orders than fit into the socket of a fork server that reads none
    reader, writer = await asyncio.open_connection(sock=far)
    for number in range(500):
        writer.write(wire.encode(StartWorker(f"node0.{number}")))
    while not isinstance(said := await wire.read_message(reader), WorkerLost):
        pass
    print(said.cause, said.detail, flush=True)
    os._exit(0)

async def live(how):
    options = {"text": "x" * 300_000} if how == "long" else {}
    welcome = Welcome(RunConfig(job=JobSpec("job.py", options=options)), 1, 1)
    spec = AgentSpec("node0", "127.0.0.1", CoordinatorAddress(("127.0.0.1", 1), ("127.0.0.1", 2)), "token", sys.argv[1])
    (line, far), (mine, zygote) = socket.socketpair(), socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keeper, _kept = socket.socketpair()
    agent = Agent(spec, line, welcome, mine, 0, KeeperLine(keeper, 0), None)
    life = asyncio.ensure_future(agent.run())
    await asyncio.sleep(0)
    if how == "orders":
        done, _ = await asyncio.wait({life, asyncio.ensure_future(drown(far))}, return_when=asyncio.FIRST_COMPLETED)
        done.pop().result()
    if how == "long":
        reader, writer = await asyncio.open_connection(sock=far)
        writer.write(wire.encode(StartWorker("node0.0")))
        while not (ready := select.select([zygote], [], [], 0)[0]) and not life.done():
            await asyncio.sleep(0.001)
        life.done() and life.result()
        *_, spec = socket.recv_fds(zygote, 1000, 10)[1]
        print(os.fstat(spec).st_size, len(os.pread(spec, 10**7, 0)), flush=True)
        os._exit(0)
    if how == "end":
        zygote.close()
    if how == "report":
        zygote.send(b"nonsense")  # read in a callback
    elif how == "board":
        agent._workers["node0.0"] = None  # read in the task that beats
    await life

asyncio.run(live(sys.argv[2]))
"""


def test_a_worker_whose_order_finds_no_room_is_not_started(tmp_path: Path) -> None:
    """The agent goes on while the fork server imports torch and reads no orders."""
    command = [sys.executable, "-c", TASK, str(tmp_path), "orders"]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert process.stdout.startswith("raised could not be started: BlockingIOError"), process.stderr
    assert process.returncode == 0


def test_an_order_to_start_a_worker_may_be_longer_than_a_message(tmp_path: Path) -> None:
    """An order may be longer than a message, which takes 208 KB: it contains all settings and armed
    faults of a run.
    """
    command = [sys.executable, "-c", TASK, str(tmp_path), "long"]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert process.returncode == 0, process.stderr
    size_bytes, read_bytes = map(int, process.stdout.split())
    assert size_bytes == read_bytes > 300_000


def test_an_agent_without_workers_ends_with_its_fork_server(tmp_path: Path) -> None:
    """An agent of a spare node, or of a node that is about to leave, ends with its fork server.

    No order would show that it can start no worker.
    """
    command = [sys.executable, "-c", TASK, str(tmp_path), "end"]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert (process.returncode, process.stderr.splitlines()[-1:]) == (
        1,
        ["chaoskit.errors.ChaoskitError: the fork server of this node has ended"],
    )


@pytest.mark.parametrize(("how", "error"), [("report", "DecodeError"), ("board", "AttributeError")])
def test_an_error_in_a_callback_or_a_task_ends_the_agent_with_a_traceback(
    tmp_path: Path, how: str, error: str
) -> None:
    """An error in a callback or a task of the agent ends its process with a traceback."""
    command = [sys.executable, "-c", TASK, str(tmp_path), how]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert process.returncode == 1
    assert "Traceback" in process.stderr
    assert error in process.stderr


def test_an_error_on_the_thread_of_the_memory_tier_is_reported(tmp_path: Path) -> None:
    """An error on the keeper's thread is reported; otherwise a node asked for copies would never
    answer.
    """
    failed, errors = threading.Event(), []

    def fail(error: BaseException) -> None:
        errors.append(error)
        failed.set()

    def send(message: Message) -> None:
        raise OSError(f"no room for {type(message).__name__}")

    keeper = ReplicaKeeper(
        NodeContext("node0", "127.0.0.1", "token", CONFIG, Journal(tmp_path, "node0"), send, fail)
    )
    keeper.recall()
    assert failed.wait(LIMIT_S)
    assert [str(error) for error in errors] == ["no room for Sealed"]


def test_a_keeper_with_many_open_files_answers(tmp_path: Path) -> None:
    """A keeper answers if its descriptors are above 1,023, which ``select`` does not take."""
    answers: SimpleQueue[object] = SimpleQueue()
    with many_open():
        keeper = ReplicaKeeper(
            NodeContext(
                "node0",
                "127.0.0.1",
                "token",
                CONFIG,
                Journal(tmp_path, "node0"),
                answers.put,
                answers.put,
            )
        )
        keeper.recall(7)
        assert answers.get(timeout=LIMIT_S) == Sealed("node0", (), 7)


def test_names_of_workers_go_on_where_the_agent_before_this_one_ended(tmp_path: Path) -> None:
    """Names of workers go on after those with logs; other logs do not count."""
    (tmp_path / "log").mkdir()
    assert workers_started(tmp_path, "node1") == 0
    for name in (
        "node1.0",
        "node1.11",
        "node1.9",
        "node10.50",
        "node1",
        "node1.zygote",
        "coordinator",
    ):
        (tmp_path / "log" / f"{name}.log").touch()
    assert workers_started(tmp_path, "node1") == 12
