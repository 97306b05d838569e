"""Observations that must not count as evidence, nor excuse a failure.

Pure: targets and journals are written by hand.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.injecting import EndedCluster, injecting, target_of
from support.waiting import LIMIT_S

from chaoskit.config import RunConfig
from chaoskit.experiment.injection.injection import Injection
from chaoskit.experiment.injection.job_follower import explains
from chaoskit.experiment.judge.judge import judge
from chaoskit.experiment.plan.plan import plan_experiment
from chaoskit.experiment.properties import RunTrace
from chaoskit.experiment.properties.membership import second_replacement, strikes, terms
from chaoskit.experiment.properties.progress import corruption, lease, slow_ranks
from chaoskit.experiment.properties.steps import fencing
from chaoskit.experiment.run.recovery_timeline import Timeline
from chaoskit.experiment.run.run import RawRun, load_run
from chaoskit.experiment.twin.twin import interruptions
from chaoskit.job import JobSpec
from chaoskit.journal import Journal, Record
from chaoskit.process.linux import start_ticks
from chaoskit.runlog.fault_verdict import fault_check
from chaoskit.runlog.history import History
from chaoskit.runlog.injected import InjectionRecord, Struck
from chaoskit.runtime.injection.numbers import Poison
from chaoskit.substrate.core.processes import HOST, HostKernel, Process
from chaoskit.substrate.undo import UndoLog
from chaoskit.vocabulary import LOAD, LOSS_CAUSES, Event, RunEnd, Verdict
from chaoskit.wire.messages import (
    ActReport,
    Answered,
    AskThread,
    AtHook,
    EndJob,
    Endpoint,
    Formed,
    InjectionOrder,
    Member,
    Message,
    Plan,
    ScaleTo,
    Trigger,
    WorkerLost,
    WorkerReady,
)
from faults import (
    CATALOGUE,
    AddNode,
    BadBatch,
    BadImage,
    BitFlip,
    ClockJump,
    CorruptFile,
    CorruptReplica,
    CrashLoop,
    Cut,
    DataStall,
    Deadlock,
    DeleteCoordinatorPod,
    DeletePod,
    Demand,
    DiskError,
    DiskFull,
    DrainMachine,
    EvictPod,
    Exit,
    FailLoad,
    Flap,
    FreezeNode,
    Hang,
    Kill,
    KillAgent,
    KillContainer,
    KillCoordinator,
    KillNode,
    LimitCpu,
    LimitIo,
    LimitMemory,
    LimitPids,
    LoseMachine,
    LoseNode,
    LosePeerCopy,
    NaN,
    NoRoom,
    OutOfMemory,
    PoisonSnapshot,
    Preempt,
    PreemptPod,
    Rack,
    Raise,
    ReadOnlyDisk,
    RemoteOutage,
    ReplaceNode,
    Scale,
    SlowDisk,
    StopApiServer,
    Straggle,
    TaintMachine,
    TakeSpot,
    TornWrite,
)
from faults.base import Fault
from faults.target import ProcessExit as HowEnded
from faults.target import Target


@pytest.mark.parametrize("is_missed", [False, True])
def test_the_end_of_the_job_is_no_early_exit(undo: UndoLog, is_missed: bool) -> None:
    """Every worker exits with status 0 in the end, including a rank that ignored the fault."""
    struck = target_of(undo)
    with injecting(Exit(rank=1, at_step=8), struck) as run:
        if is_missed:
            run.deliver(WorkerLost("node1.w0", "node1", "exited", "exited with status 0", 1))
        struck.end()
        struck.tell_exit(HowEnded("exited", "status 0"), 1)
        run.poll()
        assert bool(run.evidence) == is_missed


@pytest.mark.parametrize("where", ["weight", "gradient"])
def test_a_nan_is_written_whatever_the_strides(where: str) -> None:
    """A transposed tensor cannot be viewed as one row: the fault would raise an exception."""
    model = torch.nn.Linear(3, 2)
    model.weight = torch.nn.Parameter(torch.ones(3, 2).t())
    reports: list[bool] = []
    options = {"where": where, "parameter": "weight", "sticky": False}
    Poison(model, options, lambda effective, observed: reports.append(effective)).arm()
    (model.weight * torch.ones(3, 2).t()).sum().backward()
    poisoned = model.weight if where == "weight" else model.weight.grad
    assert poisoned is not None
    assert int(poisoned.isnan().sum()) == 1
    assert reports == [True]


def test_a_question_that_nothing_carries_is_not_left_unanswered(undo: UndoLog) -> None:
    """The silence of the worker means nothing without a connection, as after the run, and is no
    error either.
    """
    with Worker("sleep") as worker:
        worker.is_there = False
        with injecting(HOLDS_GIL, worker.struck(undo)) as run:
            assert not run.is_seen(limit_s=SHORT_S)
        assert worker.asked[:2] == [AskThread(1)] * 2, "it is the first question still"


WORKER = """
import ctypes, os, sys, threading, time
from chaoskit.process.linux import set_name

listens = threading.Event()

def listen():
    set_name("ck-inject")
    print("ready", flush=True)
    listens.set()
    while os.read(0, 1):
        pass  # to get here it needs the interpreter lock

threading.Thread(target=listen, daemon=True).start()
listens.wait()
if sys.argv[1] == "hang":
    ctypes.PyDLL(None).pause()
while sys.argv[1] == "work":
    pass
time.sleep(60)
"""
HOLDS_GIL = Hang(rank=1, at_step=8, how="gil")
SHORT_S, WAIT_S = 0.4, 20.0


class Worker:
    """A process with a listening thread that receives every question and answers none.

    It is also the connection to that thread.
    """

    def __init__(self, does: str) -> None:
        self.asked: list[InjectionOrder] = []
        self.is_there = True
        command = [sys.executable, "-c", WORKER, does]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> Worker:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def tell(self, node: str, order: InjectionOrder, worker: str = "") -> bool:
        self.asked.append(order)
        if self.is_there:
            assert self._process.stdin is not None
            self._process.stdin.write(b"?")
            self._process.stdin.flush()
        return self.is_there

    def arm_node(self, node: str, trigger: Trigger) -> None:
        raise AssertionError("nothing arms it")

    def struck(self, undo: UndoLog) -> Target:
        """Return the process as the target of a fault that has acted in it."""
        pid = self._process.pid
        reports = [ActReport("node1.w0", "fault0", "about to call pause()", False)]
        return target_of(undo, channel=self, process=HOST.find(pid), tid=pid, reports=reports)


def test_a_thread_that_keeps_the_interpreter_lock_is_seen(undo: UndoLog) -> None:
    with Worker("hang") as worker:
        with injecting(HOLDS_GIL, worker.struck(undo)) as run:
            assert run.is_seen(limit_s=WAIT_S)
        unreported = worker.struck(undo)
        unreported.reports.clear()  # the fault was not ordered, whatever the process does
        with injecting(HOLDS_GIL, unreported) as run:
            assert not run.is_seen(limit_s=SHORT_S)


@pytest.mark.parametrize("does", ["sleep", "work"])
def test_silence_is_no_evidence_of_a_hang(undo: UndoLog, does: str) -> None:
    """A rank that waits for others, or computes, may have a listening thread that does not
    answer.
    """
    with Worker(does) as worker, injecting(HOLDS_GIL, worker.struck(undo)) as run:
        assert not run.is_seen(limit_s=SHORT_S)
        assert worker.asked or does == "work"


class OneNode(EndedCluster):
    """A node with these processes; signals to them have no effect."""

    nodes = ("node1",)

    def __init__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        super().__init__()
        self._processes = [unmoved(process) for process in processes]

    def node(self, node: str) -> list[Process]:
        return self._processes

    def root(self, node: str) -> Process:
        return self._processes[0]

    def coordinator(self) -> Process:
        return self._processes[0]

    def worker(self, node: str, pid: int) -> Process:
        return next(process for process in self._processes if process.pid == pid)


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


@pytest.mark.parametrize("is_over", [False, True])
@pytest.mark.parametrize("kind", [KillAgent, KillNode, Preempt])
def test_the_end_of_the_run_is_not_the_end_of_a_node(
    undo: UndoLog, children: list[subprocess.Popen[bytes]], kind: type[Fault], is_over: bool
) -> None:
    """Missing processes at the end of the run are no evidence.

    An agent that saw its worker end was not ended first.
    """
    struck = target_of(undo, OneNode(children))
    with injecting(kind(rank=1, at_step=8), struck) as run:
        if is_over:
            struck.end()
        for child in children:
            end(child)
        if is_over:
            struck.tell_exit(HowEnded("exited", "status 0"), 1)
        run.poll()
        assert bool(run.evidence) != is_over


def test_what_is_below_an_agent_that_ends_is_not_killed_for_it(
    undo: UndoLog, children: list[subprocess.Popen[bytes]]
) -> None:
    """A process of the node that ends is not listed; the first listed process is then a child of
    the agent.
    """
    agent, child = map(process_of, children)
    children[0].kill()
    cluster: Any = EndingCluster([child])
    cluster.node = lambda node: [child]
    cluster.root = lambda node: agent
    with (
        pytest.raises(ProcessLookupError, match="the agent of node1 is gone"),
        injecting(KillAgent(rank=1, at_step=8), target_of(undo, cluster)),
    ):
        pass
    assert children[1].poll() is None


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Yield two processes that live until they are ended."""
    processes = [
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)
    ]
    yield processes
    for child in processes:
        child.kill()
        child.wait()


def process_of(child: subprocess.Popen[bytes]) -> Process:
    ticks = start_ticks(child.pid)
    assert ticks is not None
    return Process(child.pid, ticks, "ck-node1")


class DeafKernel(HostKernel):
    """The kernel, except for signals: those that end or stop a process do nothing."""

    def signal(self, process: Process, signum: int) -> None:
        if signum == signal.SIGCONT:
            super().signal(process, signum)


DEAF = DeafKernel()


def unmoved(child: subprocess.Popen[bytes]) -> Process:
    return dataclasses.replace(process_of(child), kernel=DEAF)


@pytest.mark.parametrize(
    "fault", [KillAgent(rank=1, at_step=8), KillNode(rank=1, at_step=8), Preempt(rank=1, at_step=8)]
)
def test_a_node_is_gone_when_all_of_it_is(
    undo: UndoLog, children: list[subprocess.Popen[bytes]], fault: Fault
) -> None:
    """The fault is not evident while a signal was sent but some process of the node lives on."""
    with injecting(fault, target_of(undo, OneNode(children))) as run:
        for child in children:
            run.poll()
            assert not run.evidence
            end(child)
        run.poll()
        assert run.evidence


def test_a_node_is_frozen_when_all_of_it_stands(
    undo: UndoLog, children: list[subprocess.Popen[bytes]]
) -> None:
    with injecting(FreezeNode(rank=1, at_step=8), target_of(undo, OneNode(children))) as run:
        for child in children:
            run.poll()
            assert not run.evidence
            stop(child)
        run.poll()
        assert run.evidence


def test_a_node_is_thawed_when_it_was_seen_to_stand(
    undo: UndoLog, children: list[subprocess.Popen[bytes]]
) -> None:
    """A harness that was busy for longer than the node was to stand still finds the evidence."""
    fault, struck = (
        FreezeNode(rank=1, at_step=8, thaw_after_s=0.05),
        target_of(undo, OneNode(children)),
    )
    with injecting(fault, struck) as run:
        for child in children:
            stop(child)
        time.sleep(2 * fault.thaw_after_s)
        assert struck.seconds_since > fault.thaw_after_s
        run.poll()
        assert len(run.evidence) == 1
        for child in children:
            os.waitid(os.P_PID, child.pid, os.WCONTINUED)
        assert run.is_over
        assert struck.lifted_ns
    assert struck.left_behind == []


def test_a_coordinator_that_lives_was_not_killed(
    undo: UndoLog, children: list[subprocess.Popen[bytes]]
) -> None:
    with injecting(KillCoordinator(at_step=8), target_of(undo, OneNode(children))) as run:
        run.poll()
        assert not run.evidence
        end(children[0])
        run.poll()
        assert run.evidence


@pytest.mark.parametrize("ok", [True, False])
def test_a_node_that_is_gone_after_the_job_was_not_killed(
    undo: UndoLog, children: list[subprocess.Popen[bytes]], ok: bool
) -> None:
    """The signal did nothing, and the job ended well.

    A job that failed may have failed because of the node.
    """
    struck = target_of(undo, OneNode(children))
    with injecting(KillNode(rank=1, at_step=8), struck) as run:
        run.deliver(EndJob(ok=ok, reason=""))
        for child in children:
            child.kill()
            child.wait()
        assert run.is_seen(limit_s=SHORT_S if ok else LIMIT_S) != ok


def test_the_tree_of_a_process_that_is_another_by_now_is_empty(
    children: list[subprocess.Popen[bytes]],
) -> None:
    """A process that has the pid of an ended agent is neither inspected nor killed."""
    now = process_of(children[0])
    assert HOST.tree(now) == [now]
    reused = [Process(now.pid, ticks, now.name) for ticks in ((now.ticks or 0) + 1, None)]
    assert [HOST.tree(other) for other in reused] == [[], []]


class EndingCluster:
    """A cluster with the first of these processes as coordinator, and the last once the first has
    ended.
    """

    def __init__(self, coordinators: list[Process]) -> None:
        self.coordinators = coordinators

    def coordinator(self) -> Process:
        return self.coordinators[0]


@pytest.mark.parametrize("is_over", [False, True])
def test_a_coordinator_that_ended_by_itself_was_not_killed(
    undo: UndoLog, children: list[subprocess.Popen[bytes]], is_over: bool
) -> None:
    """The job is over, or there was a single death of two that were planned.

    The next coordinator is accepted.
    """
    coordinators = [process_of(child) for child in children]
    struck = target_of(undo, EndingCluster(coordinators))
    children[0].kill()
    os.waitid(os.P_PID, children[0].pid, os.WEXITED | os.WNOWAIT)
    with injecting(KillCoordinator(at_step=8), struck) as run:
        run.poll()
        assert not run.evidence
        assert struck.claims == {}, "the rank comes to no harm"
        if is_over:
            run.deliver(EndJob(ok=True, reason=""))
        del coordinators[0]
        assert run.is_seen(limit_s=SHORT_S if is_over else LIMIT_S) != is_over
    if is_over:
        assert children[1].poll() is None
    else:
        assert children[1].wait() == -signal.SIGKILL


class RecordingCluster:
    """A cluster that records the messages sent to it."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, message: Message) -> None:
        self.messages.append(message)


def world(generation: int, size: int) -> list[Message]:
    """Return the messages about a world that is planned and formed."""
    place = Endpoint("host", "", 0, 1, -1)
    members = tuple(
        Member(rank, f"node{rank}.0", f"node{rank}", place, (rank,)) for rank in range(size)
    )
    return [
        Plan(generation, members, True),
        *(Formed(member.worker, generation) for member in members),
    ]


def test_a_request_is_made_again_until_it_is_answered(undo: UndoLog) -> None:
    """A request may be lost with a coordinator; a world formed because of a loss is no answer."""
    cluster = RecordingCluster()
    with injecting(Scale(to=3, at_step=8), target_of(undo, cluster)) as run:
        run.deliver(*world(2, 3))
        assert not run.evidence
        assert len(cluster.messages) == 1
        assert run.wait_for(lambda: len(cluster.messages) > 1)
        assert cluster.messages == [ScaleTo("fault0", 3, "the harness")] * 2
        assert not run.evidence
        run.deliver(Answered("fault0", True, ""))
        assert run.evidence


def test_a_world_that_has_the_size_already_is_evidence_of_an_accepted_request(
    undo: UndoLog,
) -> None:
    places = {0: "node0", 1: "node1", 2: "node2"}
    for size, answer in ((3, True), (3, False), (2, True)):
        with injecting(
            Scale(to=size, at_step=8), target_of(undo, RecordingCluster(), places=places)
        ) as run:
            assert not run.evidence
            run.deliver(Answered("fault0", answer, ""))
            assert bool(run.evidence) == (size == 3 and answer)


class LinkedCluster:
    """A cluster of four nodes with a network that can be changed."""

    nodes = ("node0", "node1", "node2", "node3")

    def apply(self, node: str, action: object) -> Any:
        """Break nothing, and return an action without effect."""

        class Nothing:
            def shown(self) -> int:
                return 0

            def lift(self) -> bool:
                return True

        return Nothing()

    def root(self, node: str) -> Process:
        return HOST.find(os.getpid())

    def coordinator(self) -> Process:
        return HOST.find(os.getpid())

    def round_trips_ms(
        self, source: str, target: str, count: int, timeout_s: float
    ) -> tuple[float, ...]:
        return (0.1,) * count

    def probe(self, source: str, target: str, timeout_s: float) -> Any:
        """Return a probe that sends no echo."""

        class Silent:
            def results_ms(self) -> list[float | None]:
                return []

            def close(self) -> None:
                """Do nothing: no thread sends echoes."""

        return Silent()

    def send(self, message: Message) -> None:
        """Send nothing to any worker."""


@pytest.mark.parametrize(
    ("fault", "either_end"),
    [
        (Cut(rank=1, at_step=8), False),
        (Cut(rank=1, at_step=8, heal_after_s=3.0), False),
        (Cut(rank=1, at_step=8, heal_after_s=0.1), True),
        (Cut(rank=1, at_step=8, apart_from="ranks"), True),
        (Flap(rank=1, at_step=8), True),
    ],
    ids=str,
)
def test_either_end_of_a_broken_link_may_be_left_out(
    undo: UndoLog, fault: Fault, either_end: bool
) -> None:
    """Each end may be left out, unless the node is silent for longer than its lease: then it is
    lost itself.
    """
    config = RunConfig(job=JobSpec("job.py"), heartbeat_ms=250, lease_beats=4)
    struck = target_of(undo, LinkedCluster(), config=config)
    with injecting(fault, struck):
        assert struck.struck_nodes == ({*LinkedCluster.nodes} if either_end else {"node1"})


def test_a_run_of_which_no_rank_tells_is_not_complete() -> None:
    """The run is incomplete even if its coordinator reports a good end."""
    checks = judge(run_of([], []), None, "local").checks
    assert (
        next(check.verdict for check in checks if check.name == "training completed")
        == Verdict.FAILED
    )


def test_a_crash_loop_is_seen_when_the_worker_it_killed_is_gone(
    undo: UndoLog, children: list[subprocess.Popen[bytes]]
) -> None:
    """The rank must go first, and then each worker that its node starts instead."""
    struck = target_of(undo, OneNode(children), process=unmoved(children[0]))
    with injecting(CrashLoop(rank=1, at_step=8, times=2), struck) as run:
        for number, child in enumerate(children):
            assert [evidence.count for evidence in run.evidence] == [*range(1, number + 1)]
            if number:
                run.deliver(
                    WorkerReady(f"node1.w{number}", "node1", Endpoint("", "", 0, child.pid, -1))
                )
            run.poll()
            assert len(run.evidence) == number
            end(child)
            run.poll()
        assert [evidence.count for evidence in run.evidence] == [1, 2]


@pytest.mark.parametrize(
    ("worker", "cause", "detail", "expected"),
    [
        (
            "node1.w1",
            "raised",
            "InjectedError: injected by chaoskit: the job cannot be loaded here",
            True,
        ),
        ("node1.w1", "raised", "ImportError: no such module", False),
        ("node1.w1", "exited", "injected by chaoskit: the job cannot be loaded here", False),
        (
            "node1.w2",
            "raised",
            "InjectedError: injected by chaoskit: the job cannot be loaded here",
            False,
        ),
    ],
)
def test_a_load_fails_by_the_fault_or_by_itself(
    undo: UndoLog, worker: str, cause: str, detail: str, expected: bool
) -> None:
    """Workers that the fault stopped count only if they ended with its exception."""
    struck = target_of(undo)
    with injecting(FailLoad(rank=1, at_step=8), struck) as run:
        run.deliver(
            AtHook("node1.w1", "fault0", rank=-1, step=-1, phase=LOAD, pid=1, tid=1, generation=0)
        )
        assert {*struck.claims} == {"node1.w1"}
        run.deliver(WorkerLost(worker, "node1", cause, detail, 1))
        assert bool(run.evidence) == expected


# -- excuses ---------------------------------------------------------------------------------------

STRUCK_NS, LOST_NS, ENDED_NS = 1_000, 5_000, 9_000


def strike(
    fault: Fault, *, at_ns: int = STRUCK_NS, starved_s: float = 0.0, missed: str = ""
) -> InjectionRecord:
    """Return the journals' account of ``fault`` on the worker ``node1.w0``."""
    struck = Struck(
        worker="node1.w0",
        rank=1,
        node="node1",
        pid=2**22 + 1,
        step=8,
        phase="forward",
        waiting="",
        injected_ns=at_ns,
        done_ns=at_ns,
        claims={"node1.w0": at_ns},
        struck_nodes=frozenset(),
        acted_ns=at_ns,
        lifted_ns=0,
        starved_s=starved_s,
    )
    return InjectionRecord("fault0", fault, struck, None if missed else at_ns, missed=missed)


def run_of(
    strikes: list[InjectionRecord],
    records: list[Record],
    job: str = "gpt",
    ended: EndJob | None = None,
    **plan: Any,
) -> RawRun:
    experiment = plan_experiment(job, nodes=3, **plan)
    run = RawRun(experiment, Path(), 0, ENDED_NS, ended, deadline_passed=False)
    run.__dict__["injections"] = strikes
    run.__dict__["records"] = [
        *records,
        Record(ENDED_NS, "coordinator", Event.JOB_ENDED, {"ok": True}),
    ]
    return run


def trace_of(run: RawRun) -> RunTrace:
    return RunTrace(run, History(run.records), [])


def lost(worker: str, cause: str, t_ns: int = LOST_NS) -> Record:
    fields = {"worker": worker, "rank": 1, "cause": cause, "detail": ""}
    return Record(t_ns, "coordinator", Event.DETECTED, fields)


def committed(steps: int, until_ns: int) -> list[Record]:
    """Return the commits of rank 0, 10 ms apart."""
    fields = {"generation": 1, "rank": 0, "world": 3, "loss": 1.0, "grad_sum": 0}
    began_ns = until_ns - steps * 10**7
    return [
        Record(began_ns + step * 10**7, "node0.w0", Event.COMMIT, {"step": step, **fields})
        for step in range(steps)
    ]


@pytest.mark.parametrize(("steps", "late"), [(2, False), (20, True)])
def test_a_hang_before_the_phases_are_known_may_be_found_later(steps: int, late: bool) -> None:
    """The coordinator learns the length of phases from steps, and allows for a start until then."""
    struck_ns, hang = 100 * 10**9, Hang(rank=1, at_step=steps, how="spin")
    records = [*committed(steps, struck_ns), lost("node1.w0", "hung", struck_ns + 20 * 10**9)]
    strikes = [strike(hang, at_ns=struck_ns)]
    assert bool(lease(trace_of(run_of(strikes, records)))) == late


def test_each_suspect_before_it_doubles_the_time_in_which_a_hang_must_be_found() -> None:
    struck_ns, hang = 100 * 10**9, Hang(rank=1, at_step=20, how="spin")
    strikes = [strike(hang, at_ns=struck_ns)]
    in_time = []
    for suspects in range(4):
        before = [lost(f"node2.w{number}", "hung", struck_ns - 10**9) for number in range(suspects)]
        records = [
            *committed(20, struck_ns),
            *before,
            lost("node1.w0", "hung", struck_ns + 18 * 10**9),
        ]
        in_time.append(bool(lease(trace_of(run_of(strikes, records)))))
    assert in_time == [True, True, False, False], "2, 4, 8 and 16 s, beside 12 s of slack"


@pytest.mark.parametrize(("starved_ms", "late"), [(0.0, True), (4_000.0, True), (9_000.0, False)])
def test_time_without_a_cpu_is_no_time_of_a_hang(starved_ms: float, late: bool) -> None:
    """A rank of a crowded machine is given up later by the time that it waited for a CPU in its
    phase.
    """
    struck_ns, hang = 100 * 10**9, Hang(rank=1, at_step=8, how="spin")
    records = [*committed(8, struck_ns), lost("node1.w0", "hung", struck_ns + 20 * 10**9)]
    strikes = [strike(hang, at_ns=struck_ns, starved_s=starved_ms / 1000)]
    assert bool(lease(trace_of(run_of(strikes, records)))) == late


def test_a_fault_that_came_too_late_excuses_no_loss() -> None:
    """A slow rank was called hung and ended; the kill that was due later had no target."""
    slow, late = Straggle(rank=1, at_step=8, delay_ms=10), Kill(rank=1, at_step=9)
    alarm = [lost("node1.w0", "hung")]
    assert slow_ranks(trace_of(run_of([strike(slow), strike(late)], alarm))) == []
    for missed in (late, KillNode(rank=1, at_step=9)):
        run = run_of([strike(slow), strike(missed, missed="the target was gone already")], alarm)
        assert slow_ranks(trace_of(run)) == [
            f"node1.w0 was struck by {slow} only, but given up: hung"
        ]


def test_a_later_loss_is_no_detection_of_corrupt_memory() -> None:
    """A flipped bit was not found within the promised steps, and its rank was lost much later."""
    flip = BitFlip(rank=1, at_step=8, parameter="w", bit=3)
    fields = {"generation": 1, "rank": 0, "world": 3, "loss": 1.0, "grad_sum": 1}
    commits = [
        Record(STRUCK_NS + step, "node0.w0", Event.COMMIT, {"step": step, **fields})
        for step in range(20)
    ]

    def detect(*more: Record) -> object:
        return corruption(trace_of(run_of([strike(flip)], [*commits, *more], state_hash_steps=4)))

    missed = [f"{flip} was not found by step 12"]
    assert detect() == missed
    assert detect(lost("node1.w0", "exited", STRUCK_NS + 15)) == missed
    assert detect(lost("node1.w0", "exited", STRUCK_NS + 11)) == []
    named = {"worker": "node1.w0", "sources": [], "step": 10, "verdict": "rank", "generation": 1}
    assert detect(Record(STRUCK_NS + 10, "node0.w0", Event.CORRUPT, named)) == []


@pytest.mark.parametrize(
    ("pieces", "replicas"), [((0, 0, 0), True), ((0, 1, 0), False), ((0, 1, 1), True)]
)
def test_of_a_sharded_job_only_what_two_ranks_hold_must_be_found(
    pieces: tuple[int, ...], replicas: bool
) -> None:
    """The rank that takes its piece from a copy before the flip was found may have lost the flip
    with it.
    """
    flip = BitFlip(rank=1, at_step=8, parameter="w", bit=3)
    fields = {"generation": 1, "world": 3, "loss": 1.0, "grad_sum": 1}
    commits = [
        Record(
            STRUCK_NS + step - 8,
            f"node{rank}.w0",
            Event.COMMIT,
            {"step": step, "rank": rank, "piece": piece} | fields,
        )
        for step in range(20)
        for rank, piece in enumerate(pieces)
    ]

    def detect(*more: Record) -> object:
        return corruption(
            trace_of(run_of([strike(flip)], [*commits, *more], "fsdp", state_hash_steps=4))
        )

    assert detect() == ([f"{flip} was not found by step 12"] if replicas else None)
    entered = {"generation": 2, "rank": 1, "cause": ""}
    assert detect(Record(STRUCK_NS + 3, "node1.w0", Event.ENTERED, entered)) == (
        [] if replicas else None
    )


@pytest.mark.parametrize("fault", [BadBatch(at_step=8), ClockJump(rank=1, at_step=8, seconds=60.0)])
def test_a_rank_that_reads_a_bad_batch_or_a_wrong_clock_is_not_to_blame(fault: Fault) -> None:
    """The rank that stood at the fault's hook, though struck, is given up: that is a false
    alarm.
    """
    run = run_of([strike(fault)], [lost("node1.w0", "nonfinite")])
    incidents, alarms = Timeline(run, History(run.records)).incidents()
    assert (incidents, [alarm["worker"] for alarm in alarms]) == ([], ["node1.w0"])
    run = run_of([strike(fault), strike(Kill(rank=1, at_step=8))], [lost("node1.w0", "exited")])
    assert Timeline(run, History(run.records)).incidents()[1] == []


@pytest.mark.parametrize(("last", "verdict"), [(8, Verdict.PASSED), (9, Verdict.FAILED)])
def test_a_loss_without_a_new_membership_is_borne_in_the_last_step_only(
    last: int, verdict: Verdict
) -> None:
    """The job ended well nevertheless: steps without a contribution of the lost rank were
    committed.
    """
    fields = {"generation": 1, "rank": 1, "shards": [1], "samples": []}
    contribution = Record(STRUCK_NS - 1, "node1.w0", Event.REDUCE, {"step": 8, **fields})
    commits = committed(last + 1, LOST_NS + 1 + 10**7)
    strikes = [strike(Kill(rank=1, at_step=8))]
    run = run_of(
        strikes,
        [contribution, lost("node1.w0", "exited"), *commits],
        ended=EndJob(ok=True, reason=""),
    )
    checks = {check.name: check.verdict for check in judge(run, None, "local").checks}
    assert checks["recovered from every incident"] == verdict


RECORD_GONE = Record(
    LOST_NS, "coordinator", Event.RECORD_LOST, {"node": "node1", "detail": "it has seen more"}
)


def test_a_lost_record_is_a_false_alarm_and_no_twin_has_one() -> None:
    """A lost record is no consequence of any fault, not even of the end of a coordinator."""
    run = run_of([strike(KillCoordinator(rank=1, at_step=8))], [RECORD_GONE])
    incidents, alarms = Timeline(run, History(run.records)).incidents()
    assert (incidents, alarms) == ([], [RECORD_GONE])
    detail = "node1: the coordinator's log was lost (it has seen more)"
    assert (
        next(
            check for check in judge(run, None, "local").checks if check.name == "no false alarm"
        ).detail
        == detail
    )
    assert terms(trace_of(run)) == ["the coordinator's log was lost: it has seen more"]
    assert interruptions(run, History(run.records))[0].startswith("record_lost coordinator:")


def test_a_loss_of_which_two_coordinators_tell_is_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "coordinator")
    for cause in ("exited", "exited"):
        journal.write(
            Event.DETECTED, t_ns=LOST_NS, worker="node1.w0", rank=1, cause=cause, detail=""
        )
        journal.write(Event.NODE_LOST, t_ns=LOST_NS, node="node1", detail="")
    journal.write(
        Event.NODE_LOST, t_ns=LOST_NS + 1, node="node1", detail=""
    )  # the node had come back
    run = RawRun(plan_experiment("gpt", nodes=3, strikes_max=2), tmp_path, 0, ENDED_NS, None, False)
    incidents, alarms = Timeline(run, History(run.records)).incidents()
    assert (incidents, len(alarms)) == ([], 1)
    assert strikes(trace_of(run)) is None, "it counted twice against its node"
    assert [record.event for record in run.records] == [
        Event.DETECTED,
        Event.NODE_LOST,
        Event.NODE_LOST,
    ]


@pytest.mark.parametrize("replaced", [True, False])
def test_a_machine_that_replaces_a_bad_one_may_have_workers(tmp_path: Path, replaced: bool) -> None:
    """A node that is set aside starts no worker until it is lost.

    A node of the same name may be another machine.
    """
    coordinator, agent, other = (
        Journal(tmp_path / "journal", name) for name in ("coordinator", "node1", "node2")
    )
    for number in range(2):
        lost = {"worker": f"node1.{number}", "rank": 1, "cause": "exited", "detail": ""}
        coordinator.write(Event.DETECTED, t_ns=LOST_NS + number, **lost)
    coordinator.write(Event.SET_ASIDE, t_ns=LOST_NS + 2, node="node1", strikes=2)
    if replaced:
        coordinator.write(Event.NODE_LOST, t_ns=LOST_NS + 3, node="node1", detail="")
    other.write(Event.WORKER_STARTED, t_ns=LOST_NS + 4, worker="node2.1", pid=2)
    agent.write(Event.WORKER_STARTED, t_ns=LOST_NS + int(100e9), worker="node1.2", pid=1)
    run = RawRun(
        plan_experiment("gpt", nodes=3, strikes_max=2),
        tmp_path,
        0,
        LOST_NS + int(200e9),
        None,
        False,
    )
    violations = strikes(trace_of(run))
    assert violations == ([] if replaced else ["node1.2 was started on node1, which is set aside"])


@pytest.mark.parametrize("replaced", [True, False])
def test_strikes_of_two_machines_are_not_added(tmp_path: Path, replaced: bool) -> None:
    journal = Journal(tmp_path / "journal", "coordinator")
    lost = {"rank": 1, "cause": "exited", "detail": ""}
    journal.write(Event.DETECTED, t_ns=LOST_NS, worker="node1.0", **lost)
    if replaced:
        journal.write(Event.NODE_LOST, t_ns=LOST_NS + 1, node="node1", detail="")
    journal.write(Event.DETECTED, t_ns=LOST_NS + 2, worker="node1.1", **lost)
    run = RawRun(plan_experiment("gpt", nodes=3, strikes_max=2), tmp_path, 0, ENDED_NS, None, False)
    assert strikes(trace_of(run)) == (
        None if replaced else ["node1 has 2 strikes, and is not set aside"]
    )


def test_strikes_within_any_minute_set_a_node_aside(tmp_path: Path) -> None:
    """Strikes count within any minute, not only those of the first one."""
    journal = Journal(tmp_path / "journal", "coordinator")
    for number, after_s in enumerate((0, 100, 110, 120)):
        fields = {"worker": f"node1.{number}", "rank": 1, "cause": "exited", "detail": ""}
        journal.write(Event.DETECTED, t_ns=LOST_NS + after_s * 10**9, **fields)
    plan = plan_experiment("gpt", nodes=3, strikes_max=3)
    run = RawRun(plan, tmp_path, 0, LOST_NS + 200 * 10**9, None, False)
    assert strikes(trace_of(run)) == ["node1 has 3 strikes, and is not set aside"]


@pytest.mark.parametrize("between", [True, False])
def test_failures_of_replacements_in_a_row_are_counted_anew_after_one_that_was_ready(
    between: bool,
) -> None:
    """Eight failures allow a pause of half a minute; the first failure after a ready worker allows
    a quarter of a second.
    """
    second_ns, records = 10**9, [world_of(1, 3, abort=True, t_ns=0)]
    for number in range(8):
        at_ns = (number + 1) * 100 * second_ns
        records += [
            lost(f"node1.{number}", "exited", at_ns),
            Record(
                at_ns + (20 if number == 7 else 1) * second_ns,
                "node1",
                Event.WORKER_STARTED,
                {"worker": "x"},
            ),
        ]
        records += [Record(at_ns + 50 * second_ns, "node1.x", Event.READY, {})] if between else []
    run = run_of([], records)
    run.__dict__["records"][-1] = Record(
        2000 * second_ns, "coordinator", Event.JOB_ENDED, {"ok": True}
    )
    late = ["no worker was started within 10.25 s after node1.7 had failed"]
    assert second_replacement(trace_of(run)) == (late if between else [])


def test_what_is_no_member_of_the_only_membership_may_not_contribute() -> None:
    fields = {"generation": 1, "step": 0, "rank": 1, "shards": [1], "samples": []}
    contribution = Record(STRUCK_NS, "node9.w0", Event.REDUCE, fields)
    run = run_of([], [world_of(1, 3, abort=True, t_ns=0), contribution])
    assert fencing(trace_of(run)) == [
        "node9.w0 contributed to generation 1, and is no member of it"
    ]


@pytest.mark.parametrize("skipped", [True, False])
def test_a_loss_after_a_skipped_batch_is_not_the_way_back_from_the_batch(skipped: bool) -> None:
    """A skipped batch needs no new membership: the membership that a later kill needs is not its
    own.
    """
    bad = {"step": 8, "generation": 1, "owner": 1, "worker": "node1.w0", "shards": [1]}
    over = {"step": 8, "generation": 1, "rank": 0, "world": 3, "shards": [1], "samples": []}
    fields = {"generation": 2, "rank": 0, "world": 3, "loss": 1.0, "grad_sum": 0, "step": 9}
    records = [
        world_of(1, 3, abort=True, t_ns=0),
        Record(STRUCK_NS + 1, "node0.w0", Event.NONFINITE, bad),
        *([Record(STRUCK_NS + 2, "node0.w0", Event.SKIP, over)] if skipped else []),
        world_of(2, 3, abort=True, t_ns=STRUCK_NS + 10**9),
        Record(STRUCK_NS + 2 * 10**9, "node0.w0", Event.COMMIT, fields),
    ]
    run = run_of([strike(POISON)], records)
    run.__dict__["records"][-1] = Record(
        STRUCK_NS + 3 * 10**9, "coordinator", Event.JOB_ENDED, {"ok": True}
    )
    timeline = Timeline(run, History(run.records))
    (incident,), _ = timeline.incidents()
    assert (timeline.recovery(incident) is None) == skipped


@pytest.mark.parametrize("reason", list(RunEnd))
def test_a_harness_that_failed_leaves_no_run_that_passes(tmp_path: Path, reason: RunEnd) -> None:
    journal = Journal(tmp_path / "journal", "harness", role="harness")
    journal.write(Event.STARTED, t_ns=0, run_id="r", twin="", plan="", substrate="local")
    journal.write(Event.RUN_ENDED, t_ns=ENDED_NS, reason=reason, ok=False, detail="", exits={})
    run = load_run(tmp_path, plan_experiment("gpt", nodes=3))
    assert run.harness_lost == (reason in (RunEnd.HARNESS, RunEnd.COORDINATOR_LOST))


STALL, POISON = DataStall(rank=1, at_step=8, stall_ms=5.0), NaN(rank=1, at_step=8, parameter="w")


@pytest.mark.parametrize(
    ("fault", "explained", "not_explained"),
    [
        (Straggle(rank=1, at_step=8), "hung", "exited"),
        (Straggle(rank=1, at_step=8), "log rule", "nonfinite"),
        (BadBatch(at_step=8), "log rule", "hung"),
        (Exit(rank=1, at_step=8), "exited", "log rule"),
        (STALL, "hung", "node lost"),
        (Hang(rank=1, at_step=8), "stopped", "exited"),
        (HOLDS_GIL, "hung", "stopped"),
        (Deadlock(rank=1, at_step=8), "hung", "raised"),
        (Kill(rank=1, at_step=8), "exited", "hung"),
        (Kill(rank=1, at_step=8, signum=signal.SIGSTOP), "stopped", "exited"),
        (Exit(rank=1, at_step=8), "exited", "corrupt"),
        (Raise(rank=1, at_step=8), "raised", "node lost"),
        (OutOfMemory(rank=1, at_step=8, how="error"), "raised", "stopped"),
        (POISON, "nonfinite", "stopped"),
        (BitFlip(rank=1, at_step=8, parameter="w", bit=3), "corrupt", "node lost"),
        (CrashLoop(rank=1, at_step=8), "exited", "raised"),
        (KillNode(rank=1, at_step=8), "node lost", "nonfinite"),
        (FreezeNode(rank=1, at_step=8), "node lost", "raised"),
        (KillCoordinator(at_step=8), None, "exited"),
    ],
)
def test_a_fault_explains_only_what_it_leads_to(
    undo: UndoLog, fault: Fault, explained: str | None, not_explained: str
) -> None:
    """Another loss of the same worker, though it was struck, has another origin: a false alarm."""
    in_force = Injection("fault0", fault)
    in_force.strike(target_of(undo, claims={"node1.w0": STRUCK_NS}))
    for cause, expected in ((explained, 0), (not_explained, 1)):
        records = [
            Record(0, "node1", Event.WORKER_STARTED, {"worker": "node1.w0"}),
            lost("node1.w0", str(cause)),
        ]
        run = run_of([strike(fault)], records if cause else [])
        assert len(Timeline(run, History(run.records)).incidents()[1]) == expected, cause
        message = WorkerLost("node1.w0", "node1", str(cause), "", LOST_NS)
        assert explains(in_force, message) == (cause == explained is not None)


EXITED = {"exited"}
HUNG = {"hung", "log rule"}
FAILED = EXITED | HUNG | {"raised"}
MAY_LEAD_TO: list[tuple[type[Fault], dict[str, Any], set[str]]] = [
    (Kill, {}, EXITED),
    (Kill, {"signum": signal.SIGTERM}, FAILED),  # the job may have a handler
    (Kill, {"signum": signal.SIGUSR1}, FAILED),
    (Kill, {"signum": signal.SIGSTOP}, HUNG | {"stopped"}),
    (Kill, {"signum": signal.SIGTSTP}, FAILED | {"stopped"}),
    (Raise, {}, FAILED),  # the job may catch it, and wait
    (Exit, {}, EXITED),
    (OutOfMemory, {"how": "error"}, FAILED),
    (OutOfMemory, {"how": "cgroup"}, FAILED),
    (Hang, {"how": "stop"}, HUNG | {"stopped"}),
    (Hang, {"how": "gil"}, HUNG),
    (Hang, {"how": "spin"}, HUNG),
    (Deadlock, {"how": "lock"}, HUNG),
    (Deadlock, {"how": "skip"}, HUNG),
    (Straggle, {}, HUNG | {"slow"}),
    (DataStall, {}, HUNG),
    (ClockJump, {}, set()),
    (NaN, {}, FAILED | {"nonfinite", "corrupt"}),  # the job may not tolerate it
    (BitFlip, {}, FAILED | {"nonfinite", "corrupt"}),
    (BadBatch, {}, {"nonfinite", "log rule"}),
    (KillAgent, {}, EXITED | {"node lost"}),
    (KillNode, {}, EXITED | {"node lost"}),
    (
        Preempt,
        {},
        EXITED | {"node lost"},
    ),  # its agent ends first: no process is left to report more
    (FreezeNode, {}, EXITED | HUNG | {"node lost", "stopped"}),
    *(
        (kind, {}, set())
        for kind in (KillCoordinator, DeleteCoordinatorPod, StopApiServer, NoRoom, BadImage)
    ),
    *((kind, {}, EXITED | {"node lost", "unreachable"}) for kind in (LoseNode, ReplaceNode, Rack)),
    *(
        (kind, {}, EXITED | {"node lost", "unreachable"})
        for kind in (
            DeletePod,
            EvictPod,
            PreemptPod,
            KillContainer,
            LoseMachine,
            DrainMachine,
            TaintMachine,
        )
    ),
    *((kind, {}, HUNG | {"node lost", "slow", "unreachable"}) for kind in (LimitCpu, LimitIo)),
    *(
        (kind, {}, FAILED | {"node lost", "slow", "unreachable"})
        for kind in (LimitMemory, LimitPids)
    ),
    (CrashLoop, {}, EXITED),
    (FailLoad, {}, EXITED | {"raised"}),  # outside of the job's code
    *(
        (kind, {}, HUNG | {"node lost", "unreachable"})
        for kind in CATALOGUE
        if kind.family == "network"
    ),
    *((kind, {}, FAILED) for kind in (DiskFull, ReadOnlyDisk, DiskError)),
    (SlowDisk, {}, HUNG | {"slow"}),
    (TornWrite, {}, EXITED | {"node lost"}),
    *((kind, {}, set()) for kind in (CorruptFile, RemoteOutage)),
    (CorruptReplica, {}, set()),
    (LosePeerCopy, {}, set()),
    (PoisonSnapshot, {}, FAILED | {"nonfinite", "corrupt"}),  # the job may not tolerate it
    *((kind, {}, set()) for kind in (Scale, AddNode, Demand)),
    (TakeSpot, {}, EXITED | {"node lost", "evicted"}),
]


@pytest.mark.parametrize(("kind", "form", "causes"), MAY_LEAD_TO)
def test_what_each_fault_leads_to(
    kind: type[Fault], form: dict[str, Any], causes: set[str]
) -> None:
    """The set holds all possible consequences, and no others: no fault explains everything."""
    assert kind(**{"rank": 1, **kind.sample, **form}).leads_to == causes < LOSS_CAUSES


def test_every_fault_of_the_catalogue_says_what_it_leads_to() -> None:
    assert {kind for kind, _, _ in MAY_LEAD_TO} == {*CATALOGUE}


def world_of(generation: int, size: int, *, abort: bool, t_ns: int) -> Record:
    members = [
        {"rank": rank, "worker": f"node{rank}.w0", "node": f"node{rank}"} for rank in range(size)
    ]
    return Record(
        t_ns,
        "coordinator",
        Event.PLAN,
        {"generation": generation, "abort": abort, "members": members},
    )


@pytest.mark.parametrize(("resized", "seconds"), [(True, 2.0), (False, None)])
def test_a_world_that_was_resized_is_whole_at_its_new_size(
    resized: bool, seconds: float | None
) -> None:
    """Three ranks lose one as planned; then another is killed, and replaced at once."""

    def commit(step: int, generation: int, world: int, t_ns: int) -> list[Record]:
        fields = {
            "step": step,
            "generation": generation,
            "world": world,
            "loss": 1.0,
            "grad_sum": 0,
        }
        return [
            Record(t_ns, f"node{rank}.w0", Event.COMMIT, fields | {"rank": rank})
            for rank in range(world)
        ]

    second_ns = 10**9
    size = {"size": 2, "wanted": 2, "nodes": ["node0", "node1"], "reason": "as a test"}
    records = [
        world_of(1, 3, abort=True, t_ns=0),
        *commit(0, 1, 3, 1 * second_ns),
        *([Record(second_ns + 1, "coordinator", Event.RESIZED, size)] if resized else []),
        world_of(2, 2, abort=False, t_ns=second_ns + 2),
        *commit(1, 2, 2, 2 * second_ns),
        lost("node1.w0", "exited", 3 * second_ns + 1),
        world_of(3, 2, abort=True, t_ns=3 * second_ns + 2),
        *commit(2, 3, 2, 5 * second_ns),
    ]
    kill = Kill(rank=1, at_step=2)
    run = run_of([strike(kill, at_ns=3 * second_ns)], records)
    run.__dict__["records"][-1] = Record(
        9 * second_ns, "coordinator", Event.JOB_ENDED, {"ok": True}
    )
    timeline = Timeline(run, History(run.records))
    (incident,), alarms = timeline.incidents()
    recovery = timeline.recovery(incident)
    assert alarms == []
    assert recovery is not None
    assert (recovery.seconds, recovery.full_strength_seconds) == (2.0, seconds)
    assert ("full strength" in [span.name for span in recovery.spans]) == resized


@pytest.mark.parametrize(
    ("fault", "after_s", "told"),
    [
        (
            StopApiServer(at_step=8),
            1.6,
            "the run ended 1.6 s after it, and its evidence needs 2 s: use more steps",
        ),
        (StopApiServer(at_step=8), 3.0, "yielded no Evidence"),
        (
            LoseMachine(rank=1, at_step=8),
            0.2,
            "ended 0.2 s after it, and its evidence needs 1 s: use more steps",
        ),
        (
            DeletePod(rank=1, at_step=8, grace_s=20),
            4.0,
            "ended 4.0 s after it, and its evidence needs 20 s",
        ),
        (
            DrainMachine(rank=1, at_step=8, grace_s=7),
            4.0,
            "ended 4.0 s after it, and its evidence needs 7 s",
        ),
        (DeletePod(rank=1, at_step=8), 0.0, "yielded no Evidence"),
        (Kill(rank=1, at_step=8), 0.0, "yielded no Evidence"),
    ],
    ids=str,
)
def test_a_run_that_ends_before_the_evidence_of_a_fault_can_come_says_so(
    fault: Fault, after_s: float, told: str
) -> None:
    unseen = dataclasses.replace(strike(fault), effective_ns=None)
    check = fault_check(unseen, STRUCK_NS + int(after_s * 1e9))
    assert check.verdict == Verdict.UNKNOWN
    assert told in check.detail


def test_evidence_that_came_is_evidence_however_soon_the_run_ended() -> None:
    with_evidence = dataclasses.replace(
        strike(StopApiServer(at_step=8)), observed="nothing was answered"
    )
    assert fault_check(with_evidence, STRUCK_NS + 1).verdict == Verdict.PASSED
