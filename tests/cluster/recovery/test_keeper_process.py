"""The keeper process of a node: orders to it wait for nothing, and it lives exactly as long as its
agent.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from support.goals import Flag
from support.waiting import wait_until

from chaoskit.daemon import protocol
from chaoskit.daemon.process import NAME
from chaoskit.journal import Record, read_journals
from chaoskit.process.linux import children, descendants, is_ending, parent, process_name
from chaoskit.pytest_plugin import Chaos
from chaoskit.runlog.outcome import Outcome
from chaoskit.suites.recovery.expect import STEADY
from chaoskit.vocabulary import Event, Verdict
from chaoskit.wire.messages import EndJob, Heartbeat, Message, Plan, WorkerReady

TROUBLED = f"{Path(__file__).parents[2] / 'jobs' / 'failing' / 'troubled.py'}:plain"
NODE = "node1"
BEATS = 10  # heartbeats of a node while its keeper is stopped


# -- the orders to it ------------------------------------------------------------------------------

ORDERS = """
import asyncio, json, os, signal, socket, sys
import torch
from chaoskit.checkpoint.layout.arena import Arena
from chaoskit.config import RunConfig
from chaoskit.job import JobSpec
from chaoskit.daemon.client import KeeperLine
from chaoskit.daemon.process import KeeperSpec, start_keeper
from chaoskit.wire.messages import Endpoint, Member, Plan, Sealed
from chaoskit.process.linux import children, die_of, host_id
from chaoskit.process.progress_board import Board

COUNT = 300
quarters = KeeperSpec("node0", "127.0.0.1", "token", sys.argv[1], RunConfig(job=JobSpec("job.py")))
connection, port = start_keeper(quarters, socket.create_server(("127.0.0.1", 0)), ())
(keeper,) = children(os.getpid())
arena, board = Arena(4 * 1024), Board.create()
slot = arena.slot("model/weight", torch.float32, (1024,))
with arena.writing():
    arena.tensor(slot).fill_(7.0)
    arena.publish(["model/weight"], b"", 7)
arena.set_generation(1)
endpoint = Endpoint(host_id(), "127.0.0.1", 1, os.getpid(), arena.fd)
members = tuple(Member(rank, f"node{rank}.0", f"node{rank}", endpoint, (rank,)) for rank in range(100))

async def main():
    answers, line = [], KeeperLine(connection, port)
    def tell(said):
        if isinstance(said, Sealed):  # it tells of its node's health, too
            answers.append(said)

    line.open(tell, die_of)
    os.kill(keeper, signal.SIGSTOP)
    for number in range(COUNT):
        line.follow(Plan(number + 1, members, True))
        if number == COUNT // 2:
            assert line.adopt("node0.0", endpoint, board) == endpoint
            os.close(board.fd)  # as when the worker is released
            os.close(board.bell)
        line.recall(number)
    line.ended("node0.0")
    line.recall(COUNT)
    os.kill(keeper, signal.SIGCONT)
    while len(answers) <= COUNT:
        await asyncio.sleep(0.001)
    (left,) = [one for one in answers[-1].snapshots if one.endpoint.pid == keeper]
    print(json.dumps({"numbers": [one.number for one in answers], "left": [left.worker, left.step, left.size_bytes]}))
    line.close()
    os.waitpid(keeper, 0)

asyncio.run(main())
"""


def test_orders_return_at_once_and_none_is_lost_while_it_is_busy(tmp_path: Path) -> None:
    """Orders to a stopped keeper return at once, some megabytes of them.

    Each arrives later, in order, with its descriptors.
    """
    command = [sys.executable, "-c", ORDERS, str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60.0)
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    assert result["numbers"] == list(range(301))
    assert result["left"] == ["node0.0", 7, 4096]


CUT_OFF = """
import asyncio, os, resource, socket, sys
from chaoskit.checkpoint.layout.arena import Arena
from chaoskit.config import RunConfig
from chaoskit.job import JobSpec
from chaoskit.daemon.client import KeeperLine
from chaoskit.daemon.process import KeeperSpec, start_keeper
from chaoskit.wire.messages import Endpoint, Sealed
from chaoskit.process.linux import children, host_id
from chaoskit.process.progress_board import Board

quarters = KeeperSpec("node0", "127.0.0.1", "token", sys.argv[1], RunConfig(job=JobSpec("job.py"), health="off"))
connection, port = start_keeper(quarters, socket.create_server(("127.0.0.1", 0)), ())
(keeper,) = children(os.getpid())
arena, board, ended = Arena(4096), Board.create(), asyncio.Event()
endpoint = Endpoint(host_id(), "127.0.0.1", 1, os.getpid(), arena.fd)

async def main():
    line, answered = KeeperLine(connection, port), asyncio.Event()
    line.open(lambda said: isinstance(said, Sealed) and answered.set(), lambda error: ended.set())
    line.recall(0)
    await answered.wait()  # it has opened by now what it opens for itself
    taken = {int(name) for name in os.listdir(f"/proc/{keeper}/fd")}
    limit = next(number for number in range(len(taken) + 1) if number not in taken) + 1
    resource.prlimit(keeper, resource.RLIMIT_NOFILE, (limit, limit))
    line.adopt("node0.0", endpoint, board)
    await ended.wait()

asyncio.run(main())
print(os.waitstatus_to_exitcode(os.waitpid(keeper, 0)[1]))
"""


def test_descriptors_that_were_cut_off_end_the_keeper_with_the_limit_that_was_met(
    tmp_path: Path,
) -> None:
    """A keeper ends if it cannot open all descriptors of an order: a later order must not get the
    rest.

    It may open one more file, and an order comes with three.
    """
    command = [sys.executable, "-c", CUT_OFF, str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60.0)
    assert process.stdout == "1\n", process.stderr
    assert "ulimit -n" in process.stderr


def test_every_message_of_the_line_can_be_received() -> None:
    kinds = {*get_args(protocol.Order), *get_args(protocol.Answer)}
    own = {kind for kind in Message.__subclasses__() if kind.__module__ == protocol.__name__}
    assert own <= kinds
    assert len({kind.__struct_config__.tag for kind in kinds}) == len(kinds)


# -- beside a job ----------------------------------------------------------------------------------


class Watch:
    """A watcher that acts on agent and keeper of a node at each of its heartbeats, after some
    committed steps.

    Args:
        act: called with the pids of agent and keeper; returns True when it is done.

    Attributes:
        plans: number of plans that were published after that.
    """

    def __init__(self, act: Callable[[int, int], bool]) -> None:
        self._act, self._worker, self._processes = act, 0, (0, 0)
        self.over = False
        self.plans = 0

    def __call__(self, message: Any) -> None:
        match message:
            case WorkerReady(_, node, endpoint) if node == NODE:
                self._worker = endpoint.pid
            case EndJob():
                self.over = True
            case Plan() if self.over:
                self.plans += 1
            case Heartbeat(node, beats) if (
                node == NODE and any(beat.step >= 5 for beat in beats) and not self.over
            ):
                if not any(self._processes):
                    self._processes = processes_of(self._worker)
                self.over = self._act(*self._processes)


def processes_of(worker: int) -> tuple[int, int]:
    """Return the pids of agent and keeper of a worker's node."""
    fork_server = parent(worker)
    agent = fork_server and parent(fork_server)
    assert agent
    (keeper,) = [pid for pid in children(agent) if process_name(pid) == NAME]
    return agent, keeper


def await_end(*pids: int) -> None:
    wait_until(lambda: all(map(is_ending, pids)), f"{pids} end")


def journal(outcome: Outcome, *events: Event) -> list[Record]:
    """Return the records of ``events`` from all journals of a run, by time."""
    return [
        record
        for record in read_journals(Path(outcome.directory) / "journal")
        if record.event in events
    ]


def run(
    chaos: Chaos, watch: Watch, goal: Callable[[], bool], job: str, tmp_path: Path, **plan: Any
) -> Outcome:
    """Run a job until ``goal`` holds; every check must pass, except that ranks may be lost
    unplanned.
    """

    def is_reached(message: Any) -> bool:
        watch(message)
        return goal()

    flag = Flag(tmp_path / "reached", is_reached)
    settings = {"nodes": 3, "spares": 1, "check": False, "deadline_s": 120.0} | plan
    outcome = chaos.run(job, watch=flag, until=flag.until, **settings)
    problems = [check.name for check in outcome.checks if check.verdict != Verdict.PASSED]
    assert set(problems) <= {"no false alarm"}, outcome.directory
    return outcome


JOBS = [
    pytest.param(STEADY, {"steps": 20}, id="replicas"),
    pytest.param(
        "fsdp",
        {"nodes": 4, "steps": 20, "options": {"size": "tiny", "schedule_steps": 40}},
        id="pieces",
    ),
]


@pytest.mark.promise("a node without its copies must not count as safe", job=STEADY)
@pytest.mark.parametrize(("job", "plan"), JOBS)
def test_a_node_whose_keeper_ends_is_lost_and_the_job_recovers(
    chaos: Chaos, tmp_path: Path, job: str, plan: dict[str, Any]
) -> None:
    """An agent ends all processes of its node with its keeper; the other nodes train on."""
    killed: list[int] = []

    def kill(agent: int, keeper: int) -> bool:
        killed.extend((agent, *descendants(agent)))
        os.kill(keeper, signal.SIGKILL)
        await_end(*killed)
        return True

    watch = Watch(kill)
    # on a busy machine steps are committed, and not copied, before the loss of the node is noticed
    outcome = run(chaos, watch, lambda: watch.plans > 0, job, tmp_path, max_lost_steps=6, **plan)
    assert [record["node"] for record in journal(outcome, Event.NODE_LOST)] == [NODE], (
        outcome.directory
    )
    assert len(killed) >= 4  # agent, fork server, keeper, worker
    log = (Path(outcome.directory) / "log" / f"{NODE}.log").read_text()
    assert "the process that keeps the copies of this node has ended" in log


def test_a_keeper_ends_with_its_agent(chaos: Chaos, tmp_path: Path) -> None:
    """The kernel ends a keeper with its agent, without any order."""
    killed: list[int] = []

    def kill(agent: int, keeper: int) -> bool:
        killed.append(keeper)
        os.kill(agent, signal.SIGKILL)
        await_end(keeper)
        return True

    watch = Watch(kill)
    run(chaos, watch, lambda: watch.plans > 0, STEADY, tmp_path, steps=20)
    assert killed


@pytest.mark.promise(
    "where there is no room in it the agent keeps them and goes on (`daemon/client.py`), also when the "
    "keeper stands still",
    job=STEADY,
)
@pytest.mark.parametrize(("job", "plan"), JOBS)
def test_a_keeper_that_stands_still_costs_no_heartbeat(
    chaos: Chaos, tmp_path: Path, job: str, plan: dict[str, Any]
) -> None:
    """No rank is lost while a keeper is stopped in the middle of a copy.

    The stop lasts for more than two leases of four heartbeats.
    """
    beats = 0

    def hold(agent: int, keeper: int) -> bool:
        nonlocal beats
        if not beats:
            os.kill(keeper, signal.SIGSTOP)
        beats += 1
        if beats == BEATS:
            os.kill(keeper, signal.SIGCONT)
        return beats == BEATS

    outcome = run(chaos, Watch(hold), lambda: beats == BEATS, job, tmp_path, **plan)
    assert beats == BEATS
    assert not journal(outcome, Event.NODE_LOST, Event.DETECTED), outcome.directory


# -- the end of all processes-------------------------------------------------------------------------------------

LAUNCHER = """
import sys
from pathlib import Path
from chaoskit.config import RunConfig
from chaoskit.job import JobSpec
from chaoskit.wire.messages import Plan
from chaoskit.substrate.local import LocalSubstrate

path, function, directory = sys.argv[1:]
substrate = LocalSubstrate()
job = JobSpec(path, function=function, options={"steps": 10**6, "step_s": 0.01})
cluster = substrate.launch(RunConfig(job=job, nodes=2, spares=0), Path(directory))
while not isinstance(cluster.receive(60.0), Plan):
    pass
print("training", flush=True)
if sys.stdin.readline():
    cluster.end()
    print("ended", flush=True)
    sys.stdin.readline()
    substrate.close()
"""


@pytest.mark.parametrize("how", [pytest.param("end", marks=pytest.mark.slow), "kill"])
def test_nothing_is_left_when_the_launcher_ends_a_run_or_is_killed(
    tmp_path: Path, how: str
) -> None:
    path, _, function = TROUBLED.partition(":")
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, path, function, str(tmp_path / "run")],
        env=dict(os.environ, XDG_STATE_HOME=str(tmp_path)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        try:
            assert launcher.stdout.readline() == "training\n"
            below = descendants(launcher.pid)
            keepers = [pid for pid in below if process_name(pid) == NAME]
            assert len(keepers) == 2
            if how == "end":
                launcher.stdin.write("\n")
                launcher.stdin.flush()
                assert launcher.stdout.readline() == "ended\n"
                assert all(map(is_ending, keepers)), (
                    "a cluster that has ended has no process any more"
                )
        finally:
            launcher.kill()
        await_end(*below)
