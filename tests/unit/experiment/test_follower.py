"""Selection of the processes that the harness strikes.

Its messages are written by hand, its targets are real.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.waiting import LIMIT_S

from chaoskit.errors import HarnessError
from chaoskit.experiment.injection.job_follower import JobFollower
from chaoskit.experiment.judge.judge import judge
from chaoskit.experiment.plan.plan import plan_experiment
from chaoskit.experiment.properties import RunTrace
from chaoskit.experiment.run.run import RawRun
from chaoskit.journal import Journal, Record, read_events, read_journals
from chaoskit.runlog.history import History
from chaoskit.substrate.core.processes import HOST, HostKernel, Process
from chaoskit.substrate.undo import UndoLog
from chaoskit.vocabulary import Event, Phase, RunEnd, Verdict
from chaoskit.wire.messages import (
    ArmTriggers,
    AtHook,
    Beat,
    EndJob,
    Endpoint,
    Heartbeat,
    Member,
    Message,
    Plan,
    Resume,
    Trigger,
    WorkerLost,
)
from faults import Fault, Flap, Kill, NaN
from faults.evidence import Evidence, ReadBack
from faults.target import Target

END = EndJob(ok=True, reason="")


class KillingKernel(HostKernel):
    """The kernel, except that a process has ended once a signal was sent to it."""

    def signal(self, process: Process, signum: int) -> None:
        super().signal(process, signum)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


KILLING = KillingKernel()


class Script:
    """A cluster and its workers' connections, with a given list of messages.

    They close after the last message.
    """

    nodes = ("node0", "node1", "node2")

    def __init__(self, messages: list[Message | AtHook]) -> None:
        self._messages = messages
        self._readable = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.released: list[str] = []
        self.armed: list[tuple[str, Trigger]] = []
        self.paces_s: list[float] = []
        self._hear: Callable[[AtHook], None] = lambda hook: None

    def fileno(self) -> int:
        """Return a descriptor that stays readable: first messages, and then the end of the
        coordinator.
        """
        return self._readable

    def receive(self, timeout_s: float) -> Message | None:
        if not self._messages:
            raise ConnectionError("the coordinator is gone")
        message = self._messages.pop(0)
        if isinstance(message, AtHook):
            self._hear(message)
            return None
        return message

    def open(self, hear: Callable[[AtHook], None]) -> None:
        self._hear = hear

    def tell(self, node: str, order: ArmTriggers | Resume, worker: str) -> bool:
        if isinstance(order, Resume):
            self.released.append(worker)
        else:
            self.armed += [(worker, trigger) for trigger in order.triggers]
        return True

    def pace(self, heartbeat_s: float) -> None:
        self.paces_s.append(heartbeat_s)

    def worker(self, node: str, pid: int) -> Process:
        return KILLING.find(pid)

    def heard(self) -> nullcontext[None]:
        return nullcontext()

    def close(self) -> None:
        os.close(self._readable)


class QuietScript(Script):
    """A cluster that is silent for a while before its last message.

    It records the times of polls meanwhile.
    """

    quiet_s = 1.5

    def __init__(self, messages: list[Message | AtHook]) -> None:
        super().__init__(messages)
        self.asked_s: list[float] = []
        self._over: threading.Timer | None = None

    def receive(self, timeout_s: float) -> Message | None:
        if len(self._messages) > 1:
            return super().receive(timeout_s)
        if self._over is None:
            os.eventfd_read(self._readable)
            self._over = threading.Timer(self.quiet_s, os.eventfd_write, (self._readable, 1))
            self._over.start()
        if select.select([self._readable], [], [], 0.0)[0]:
            return super().receive(timeout_s)
        self.asked_s.append(time.monotonic())
        return None

    def close(self) -> None:
        if self._over is not None:
            self._over.join()
        super().close()


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Yield one process a rank; they live until a test ends them."""
    children = [subprocess.Popen(["sleep", "infinity"]) for _ in range(3)]
    yield children
    for process in children:
        process.kill()
        process.wait()


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process, and leave it a zombie."""
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def plan(generation: int, *pids: int) -> Plan:
    """Return a plan in which worker ``node1.2`` has rank 1 in generation 2."""
    names = [f"node{rank}.{generation}" for rank in range(len(pids))]
    endpoints = [Endpoint("", "", 0, pid, -1) for pid in pids]
    members = [
        Member(rank, name, f"node{rank}", endpoint, (rank,))
        for rank, (name, endpoint) in enumerate(zip(names, endpoints, strict=True))
    ]
    return Plan(generation, tuple(members), abort=generation > 1)


def hook(worker: str, fault: str, pid: int, **more: Any) -> AtHook:
    return AtHook(
        worker, fault, rank=1, step=3, phase="forward", pid=pid, tid=pid, generation=0, **more
    )


def followed(
    tmp_path: Path,
    faults: list[Fault],
    messages: list[Message | AtHook],
    kind: type[Script] = Script,
    records: Callable[[JobFollower], list[Record]] = lambda follower: [],
) -> tuple[JobFollower, Any]:
    """Follow a run to its end, and close it with the records that journals are to have by then."""
    cluster: Any = kind([*messages, END])
    experiment = plan_experiment("gpt", nodes=len(Script.nodes), steps=9, faults=faults)
    with (
        closing(cluster),
        closing(Journal(tmp_path, "harness")) as journal,
        closing(UndoLog(tmp_path)) as undo,
        asyncio.Runner() as runner,
    ):
        follower = JobFollower(
            experiment, cluster, journal, undo, lambda message: None, channel=cluster
        )
        try:
            assert runner.run(follower.follow(time.monotonic() + LIMIT_S)) == END
        finally:
            runner.run(follower.close(records(follower)))
            follower.record_missed()
    return follower, cluster


@pytest.mark.parametrize("heard", [True, False])
def test_a_worker_that_is_lost_already_is_not_struck_at_its_hook(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]], heard: bool
) -> None:
    """The harness skips a lost worker, as its death would be attributed to the fault.

    It strikes the rank's next worker.
    """
    _, old, new = processes
    pids = [process.pid for process in processes]
    lost = WorkerLost("node1.1", "node1", "hung", "", 1)
    if not heard:
        end(old)
    stands = [
        hook("node1.1", "fault0", old.pid),
        plan(2, pids[0], new.pid),
        hook("node1.2", "fault0", new.pid),
    ]
    messages = [plan(1, pids[0], old.pid), *([lost] if heard else []), *stands]
    follower, cluster = followed(tmp_path, [Kill(rank=1, at_step=3)], messages)
    (injection,) = follower.injections
    assert injection.target is not None
    assert (injection.target.worker, injection.missed) == ("node1.2", "")
    assert new.wait() == -signal.SIGKILL
    assert heard == (old.poll() is None)
    assert cluster.released == ["node1.1", "node1.2"]


def test_what_is_known_after_the_run_only_wakes_nothing_before(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    """The kind of a rank's end is known afterwards: until then the harness must not wake up beside
    the measured job.
    """
    pids = [process.pid for process in processes[:2]]
    messages = [plan(1, *pids), hook("node1.1", "fault0", pids[1])]
    _, cluster = followed(tmp_path, [Kill(rank=1, at_step=3)], messages, QuietScript)
    assert 1 <= len(cluster.asked_s) <= 5, "every 4 ms it would be 375 times"


@pytest.mark.parametrize(
    ("faults", "paces_s"),
    [
        ([Kill(rank=1, at_step=3)], [0.375]),
        ([Kill(rank=1, at_step=3), Kill(rank=0, at_step=5)], []),
        ([Kill(rank=1, at_step=3), Kill(rank=0, after_s=60.0)], []),
        ([], []),
    ],
    ids=["the only one", "another one by step", "another one by time", "none"],
)
def test_few_heartbeats_are_asked_for_once_no_fault_needs_them(
    faults: list[Fault],
    paces_s: list[float],
    tmp_path: Path,
    processes: list[subprocess.Popen[bytes]],
) -> None:
    """Heartbeats of all nodes together come eight times a second, and each wakes the harness beside
    the measured job.
    """
    pids = [process.pid for process in processes[:2]]
    messages = [plan(1, *pids), *([hook("node1.1", "fault0", pids[1])] if faults else [])]
    _, cluster = followed(tmp_path, faults, messages, QuietScript)
    assert cluster.paces_s == paces_s


@dataclass(frozen=True, kw_only=True)
class PollingKill(Kill):
    """A fault that does nothing, and records when it looks for evidence."""

    looks_s: list[float]

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.release()
        await target.seen(lambda: self.looks_s.append(time.monotonic()))
        yield ReadBack(subject=target.rank_process, source="nothing", value="nothing")


def test_the_longer_evidence_takes_the_less_often_it_is_looked_for(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    """Evidence may take until the end of the run, and the harness must not disturb the measured
    job.
    """
    pids, looks_s = [process.pid for process in processes[:2]], list[float]()
    messages = [plan(1, *pids), hook("node1.1", "fault0", pids[1])]
    _, cluster = followed(
        tmp_path, [PollingKill(rank=1, at_step=3, looks_s=looks_s)], messages, QuietScript
    )
    assert not cluster.paces_s
    waits_s = [after_s - before_s for before_s, after_s in pairwise(looks_s)]
    assert min(waits_s[:10]) < 0.02
    assert max(waits_s) > 0.02
    assert len(waits_s) < 200, "at 250 a second it would be 375"


def test_a_fault_that_was_missed_keeps_the_harness_awake_no_longer(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    pids = [process.pid for process in processes[:2]]
    messages = [plan(1, *pids), hook("node1.1", "fault0", pids[1])]
    follower, cluster = followed(tmp_path, [LateKill(rank=1, at_step=3)], messages, QuietScript)
    assert follower.injections[0].missed
    assert 1 <= len(cluster.asked_s) <= 5


class RecordingScript(Script):
    """A cluster that records the messages received so far."""

    def __init__(self, messages: list[Message | AtHook]) -> None:
        super().__init__(messages)
        self.known: list[type] = []

    def receive(self, timeout_s: float) -> Message | None:
        self.known += [type(message) for message in self._messages[:1]]
        return super().receive(timeout_s)


@dataclass(frozen=True, kw_only=True)
class RecordingKill(Kill):
    """A fault that records the messages received before it acts."""

    received: list[type]

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        cluster: Any = target.cluster
        self.received.extend(cluster.known)
        target.release()
        yield ReadBack(subject=target.rank_process, source="nothing", value="nothing")


def test_what_is_due_acts_before_anything_more_is_heard(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    """The rank waits for the act.

    Messages received later, such as the end of the job, are later than the act.
    """
    pids, received = [process.pid for process in processes[:2]], list[type]()
    messages = [plan(1, *pids), hook("node1.1", "fault0", pids[1])]
    followed(
        tmp_path, [RecordingKill(rank=1, at_step=3, received=received)], messages, RecordingScript
    )
    assert received == [Plan, AtHook]


class LinkScript(QuietScript):
    """A cluster that records when a link is taken down, and when it is up again."""

    store_port = 0

    def __init__(self, messages: list[Message | AtHook]) -> None:
        super().__init__(messages)
        self.changes_s: list[float] = []

    def root(self, node: str) -> Process:
        return HOST.find(os.getpid())

    def probe(self, source: str, target: str, timeout_s: float) -> Echoes:
        return Echoes(self)

    def round_trips_ms(
        self, source: str, target: str, count: int, timeout_s: float
    ) -> tuple[float, ...]:
        return (0.1,) * count

    def apply(self, node: str, action: object) -> LinkScript:
        self.changes_s.append(time.monotonic())
        return self

    def lift(self) -> bool:
        self.changes_s.append(time.monotonic())
        return True

    def shown(self) -> int:
        return 0


class Echoes:
    """Echoes of which one is lost, right after the first change of a link."""

    def __init__(self, links: LinkScript) -> None:
        self._links = links

    def results_ms(self) -> list[float | None]:
        changes_s = self._links.changes_s
        return [None] if changes_s and time.monotonic() > changes_s[0] + 0.01 else []

    def close(self) -> None:
        """Do nothing: no thread sends echoes."""


def test_a_link_that_comes_and_goes_does_so_when_it_should(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    """The link needs no message of the run, and none comes. Its evidence is there already."""
    pids = [process.pid for process in processes[:2]]
    messages = [plan(1, *pids), hook("node1.1", "fault0", pids[1])]
    fault = Flap(rank=1, at_step=3, down_s=0.1, up_s=0.2, times=3)
    _, cluster = followed(tmp_path, [fault], messages, LinkScript)
    begun_s = cluster.changes_s[0]
    assert [at_s - begun_s for at_s in cluster.changes_s] == pytest.approx(
        [0, 0.1, 0.3, 0.4, 0.6, 0.7], abs=0.04
    )


@dataclass(frozen=True, kw_only=True)
class LateKill(Kill):
    """A fault with a target that is gone when it acts."""

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        raise ProcessLookupError(target.pid)
        yield


@dataclass(frozen=True, kw_only=True)
class ForbiddenKill(Kill):
    """A fault that the kernel does not allow."""

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        yield


def test_what_is_not_allowed_is_an_error_and_no_target_that_was_gone(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    """A kill of another user's process, or a refused control group, says nothing about the job."""
    pids = [process.pid for process in processes[:2]]
    messages = [plan(1, *pids), hook("node1.1", "fault0", pids[1])]
    with pytest.raises(HarnessError, match=r"ForbiddenKill\(.*\) could not act: .*not permitted"):
        followed(tmp_path, [ForbiddenKill(rank=1, at_step=3)], messages)
    assert processes[1].poll() is None


def test_a_rank_that_is_gone_before_another_fault_strikes_is_gone_by_the_first(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    """The first target counts as gone even if the second fault ends every process that could report
    its end.
    """
    pids = [process.pid for process in processes[:2]]
    stands = [hook("node1.1", "fault0", pids[1]), hook("node0.1", "fault1", pids[0])]
    faults: list[Fault] = [Kill(rank=1, at_step=3), Kill(rank=0, at_step=4)]
    follower, _ = followed(tmp_path, faults, [plan(1, *pids), *stands])
    first, second = follower.injections
    assert first.observed == f"pid {pids[1]} is gone"
    assert first.target is not None
    assert first.evidence[-1].observed_ns == first.target.gone_ns > 0
    assert second.evidence == [], "it was not looked at afterwards"
    (evidence,) = read_events(tmp_path, Event.EVIDENCE)
    assert (evidence.t_ns, evidence["fault"], evidence["observed"]) == (
        first.target.gone_ns,
        "fault0",
        first.observed,
    )


def test_a_healer_that_ends_already_is_not_struck(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    """A single death is no evidence of two faults."""
    healer, joiner, _ = processes
    end(healer)
    faults: list[Fault] = [Kill(rank=0, at_step=8), Kill(rank="healer", during="restore")]
    stands = hook("node1.1", "fault1", joiner.pid, peer="node0.1")
    follower, cluster = followed(tmp_path, faults, [plan(1, healer.pid, joiner.pid), stands])
    assert follower.injections[1].missed == "the healer node0.1 was lost before it could be struck"
    assert cluster.released == ["node1.1"]


def test_a_process_that_has_ended_takes_no_signal(processes: list[subprocess.Popen[bytes]]) -> None:
    """The kernel accepts a signal for a zombie: a death without a cause would be attributed to a
    fault.
    """
    pids = [process.pid for process in processes[:2]]
    workers = [HOST.find(pid) for pid in pids]
    end(processes[0])
    with pytest.raises(ProcessLookupError, match="is gone"):
        workers[0].signal(signal.SIGKILL)
    workers[1].signal(signal.SIGKILL)
    assert processes[1].wait() == -signal.SIGKILL


@pytest.mark.parametrize("late", [False, True])
def test_a_rank_that_is_struck_after_the_end_of_the_job_proves_nothing(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]], late: bool
) -> None:
    """The process was killed, but the job had ended before and could not feel it."""
    pids = [process.pid for process in processes[:2]]
    messages = [plan(1, *pids), hook("node1.1", "fault0", pids[1])]

    def records_after(follower: JobFollower) -> list[Record]:
        (injection,) = follower.injections
        assert injection.target is not None
        over_ns = injection.target.injected_ns + (-1 if late else 1)
        died = {"worker": "node1.1", "pid": pids[1], "how": "killed", "status": "SIGKILL"}
        lost = {"worker": "node1.1", "rank": 1, "cause": "exited", "detail": ""}
        return [
            # the job feels it, as it must
            *([] if late else [Record(over_ns, "coordinator", Event.DETECTED, lost)]),
            Record(over_ns, "coordinator", Event.JOB_ENDED, {"ok": True}),
            Record(over_ns + 2, "node1", Event.WORKER_EXITED, died),
        ]

    fault = Kill(rank=1, at_step=3)
    follower, _ = followed(tmp_path, [fault], messages, records=records_after)
    records = records_after(follower)
    experiment = plan_experiment("gpt", nodes=2, steps=9, faults=[fault])
    run = RawRun(experiment, tmp_path, 0, records[-1].t_ns, END, deadline_passed=False)
    run.__dict__["records"] = [*read_journals(tmp_path), *records]
    check = next(
        check for check in judge(run, None, "local").checks if check.name.startswith("evidence of")
    )
    assert check.verdict == (Verdict.UNKNOWN if late else Verdict.PASSED)
    missed = [
        (record["fault"], record["reason"]) for record in read_events(tmp_path, Event.FAULT_MISSED)
    ]
    assert missed == ([("fault0", "the job had ended")] if late else [])
    confirmed = RunTrace(run, History(records), []).confirmed("Kill")
    assert [injection.fault_id for injection, _ in confirmed] == ([] if late else ["fault0"])


def test_a_worker_is_armed_for_its_rank(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    """The worker may have another rank in a smaller world: then it must not stop for the fault of
    this rank.
    """
    pids = [process.pid for process in processes]
    first = Heartbeat("node0", (Beat("node0.1", 1, 0, 1, Phase.FORWARD, 0.0, 0.0, 1, 0.0),))
    fault = NaN(rank=2, after_s=0.0, parameter="w")
    _, cluster = followed(tmp_path, [fault], [plan(1, *pids), first], QuietScript)
    assert cluster.armed == [("node2.1", Trigger("fault0", 2, -1, "forward"))]


@pytest.mark.parametrize(
    ("messages", "deadline_s", "end"),
    [
        ([END], LIMIT_S, RunEnd.ENDED),
        ([], LIMIT_S, RunEnd.COORDINATOR_LOST),
        ([END], -1.0, RunEnd.DEADLINE),
    ],
)
def test_a_follower_knows_why_its_run_was_over(
    tmp_path: Path, messages: list[Message], deadline_s: float, end: RunEnd
) -> None:
    cluster: Any = Script(messages)
    with (
        closing(cluster),
        closing(Journal(tmp_path, "harness")) as journal,
        closing(UndoLog(tmp_path)) as undo,
        asyncio.Runner() as runner,
    ):
        experiment = plan_experiment("gpt", nodes=2, steps=9)
        follower = JobFollower(experiment, cluster, journal, undo, lambda message: None)
        with suppress(HarnessError):
            runner.run(follower.follow(time.monotonic() + deadline_s))
        runner.run(follower.close([]))
    assert follower.run_end is end
