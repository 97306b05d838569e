"""Tests of runners that are killed anywhere in a run: the guard puts back everything that was in
force.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.nodes import far_nodes
from support.nodes.leftovers import Leftovers
from support.waiting import wait_until

from chaoskit.substrate.docker import daemon
from chaoskit.substrate.limits import capabilities, cgroup
from chaoskit.substrate.undo import sweep

JOBS = f"{Path(__file__).parents[2]}/jobs/failing/troubled.py"

# A runner that counts each undo entry, act, lift and completed undo, prints it, and kills itself after the n-th.
RUNNER = """
import os, signal, sys
from chaoskit.config import DETECTION
from chaoskit.experiment.harness import Harness
from chaoskit.substrate.core.actions import CountedAction
from chaoskit.substrate.limits.holds import Hold
from chaoskit.substrate.cluster.nodes import BaseCluster
from chaoskit.substrate.undo import Undo, UndoLog
from faults import *

job, substrate, fault, limit, twin, steps = sys.argv[1:]
count = 0

def counted(owner, name):
    inner = getattr(owner, name)
    def outer(*arguments, **named):
        global count
        result = inner(*arguments, **named)
        count += 1
        print(count, f"{owner.__name__}.{name}", flush=True)
        if count == int(limit):
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(owner, name, outer)

for owner, name in ((UndoLog, "plan"), (Undo, "done"), (BaseCluster, "apply"), (Hold, "lift"), (CountedAction, "lift")):
    counted(owner, name)
with Harness(substrate) as harness:
    outcome = harness.run(
        job, nodes=2, spares=0, steps=int(steps), faults=[eval(fault)],
        options={"step_s": 0.02} if job != "gpt" else {"save_every": 5},
        twin=twin == "twin", **DETECTION["relaxed"],
    )
print("end", outcome.verdict.value, outcome.reasons, flush=True)
"""

STEPS = 25
FAR = "support.nodes.far_nodes:FarSubstrate"
#: Substrate, fault and steps: one for each kind of thing that must be put back.
PLANS: dict[str, tuple[str, str]] = {
    "a process of the job": ("local", "Kill(rank=1, at_step=3)"),
    "a stopped rank": ("local", "Hang(rank=1, at_step=3, how='stop')"),
    "a stopped node": ("local", "FreezeNode(rank=1, at_step=3, thaw_after_s=0.2)"),
    "a frozen node": ("local", "FreezeNode(rank=1, at_step=3, how='cgroup', thaw_after_s=0.2)"),
    "a limit of CPU": ("local", "LimitCpu(rank=1, at_step=3, lift_after_s=0.2)"),
    "a limit of memory": ("local", "LimitMemory(rank=1, at_step=3, lift_after_s=0.2)"),
    "a slow disk": ("local", "SlowDisk(rank=1, at_step=3, delay_ms=10.0, heal_after_s=0.2)"),
    "another clock": ("local", "ClockJump(rank=1, at_step=3, seconds=3600.0)"),
    "a rule of the network": ("netns", "Cut(rank=1, at_step=3, heal_after_s=0.1)"),
    "a link that is down": ("netns", "LinkDown(rank=1, at_step=3, heal_after_s=0.1)"),
    "a limit of a far node": (
        FAR,
        "LimitCpu(rank=1, at_step=3, cores=0.05, lift_after_s=1.0)",
    ),
    "a paused container": (
        "docker",
        "FreezeNode(rank=1, at_step=3, how='cgroup', thaw_after_s=0.2)",
    ),
}
LASTS = "a limit that lasts"
#: The same, for a test that needs the fault to be in force for long.
LASTING = {LASTS: ("local", "LimitCpu(rank=1, at_step=3, lift_after_s=3600.0)")}
_NOTHING_LEFT_S = 30.0


def why_not(substrate: str, fault: str) -> str:
    """Return the reason why this machine cannot run the test, or an empty string."""
    if substrate == "docker":
        return daemon.unavailable()
    if substrate == FAR and (reason := far_nodes.unavailable()):
        return reason
    if "cgroup" in fault and (reason := cgroup.unavailable("freezer")):
        return reason
    if fault.startswith("Limit") and (
        reason := cgroup.unavailable("cpu") or cgroup.unavailable("memory")
    ):
        return reason
    if fault.startswith("SlowDisk") and (reason := capabilities.disks()):
        return reason
    return capabilities.namespaces() or capabilities.rules() if substrate == "netns" else ""


class Runner:
    """A run in a process of its own, and what it leaves behind."""

    def __init__(
        self, directory: Path, plan: str, limit: int = 0, *, twin: bool = False, steps: int = STEPS
    ) -> None:
        directory.mkdir()
        substrate, fault = (PLANS | LASTING)[plan]
        self.left = Leftovers(directory)
        job = (
            "gpt"
            if "Disk" in fault
            else f"{JOBS}:{'with_a_process' if 'process' in plan else 'plain'}"
        )
        arguments = [job, substrate, fault, str(limit), "twin" if twin else "no twin", str(steps)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUNNER, *arguments],
            env=self.left.environment() | {"PYTHONPATH": str(Path(__file__).parents[2])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def await_nothing(self) -> None:
        """Wait until nothing of the run is left, whatever was in force when it was killed."""
        deadline_s = time.monotonic() + _NOTHING_LEFT_S
        while left := self.left.of(self.process.pid):
            assert time.monotonic() < deadline_s, left
            time.sleep(0.05)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def ended() -> Iterator[list[Runner]]:
    """Provide a list of runners, which are ended when the test is over."""
    runners: list[Runner] = []
    yield runners
    for runner in runners:
        runner.end()


@pytest.mark.slow
@pytest.mark.costly
@pytest.mark.parametrize("plan", PLANS)
def test_a_runner_killed_behind_each_of_its_acts_leaves_nothing(
    tmp_path: Path, ended: list[Runner], plan: str
) -> None:
    """The runner is killed after its n-th undo entry, act, lift, or completed undo, for every n of
    the run.
    """
    if reason := why_not(*PLANS[plan]):
        pytest.skip(reason)
    whole = Runner(tmp_path / "whole", plan)
    ended.append(whole)
    output, errors = whole.process.communicate()
    assert whole.process.returncode == 0, errors
    *acts, end = output.splitlines()
    assert end.startswith("end passed"), end
    whole.await_nothing()
    assert {line.split()[1] for line in acts} >= {"UndoLog.plan", "Undo.done"}
    for number in range(1, len(acts) + 1):
        runner = Runner(tmp_path / str(number), plan, number)
        ended.append(runner)
        output, errors = runner.process.communicate()
        runner.await_nothing()
        if runner.process.returncode == 0 and number > len(acts) // 2:
            break  # fewer acts were needed: their number depends on which effect is observed first
        assert runner.process.returncode == -signal.SIGKILL, (number, output, errors)


@pytest.mark.slow
@pytest.mark.costly
@pytest.mark.promise("puts back what a killed run left behind")
@pytest.mark.parametrize(
    "both", [False, True], ids=["the guard lives", "runner and guard are killed"]
)
def test_a_limit_in_force_ends_with_its_runner(
    tmp_path: Path, ended: list[Runner], both: bool
) -> None:
    """The guard lifts the limit; if the guard was killed, too, as with a whole CI job, the next
    start does.
    """
    if reason := why_not(*LASTING[LASTS]):
        pytest.skip(reason)
    runner = Runner(tmp_path / "run", LASTS, steps=10**6)
    ended.append(runner)
    assert runner.process.stdout is not None
    for line in runner.process.stdout:
        if "BaseCluster.apply" in line:
            break
    assert any("control group" in leftover for leftover in runner.left.of(runner.process.pid))
    if both:
        for pid in guards(runner):
            os.kill(pid, signal.SIGKILL)
    runner.process.kill()
    runner.process.wait()
    if both:
        wait_until(
            lambda: not runner.left.processes(), "the end of all processes", limit_s=_NOTHING_LEFT_S
        )
        assert runner.left.of(runner.process.pid)
        sweep(runner.left.runtime / "chaoskit")
    runner.await_nothing()


def guards(runner: Runner) -> list[int]:
    return [int(process.split()[1]) for process in runner.left.processes() if "ck-guard" in process]


#: How many moments are drawn for each plan: some in each night, CHAOSKIT_MOMENTS=10 for a hundred.
MOMENTS = int(os.environ.get("CHAOSKIT_MOMENTS", "1"))


@pytest.mark.slow
@pytest.mark.costly
@pytest.mark.parametrize("moment", range(MOMENTS))
@pytest.mark.parametrize("plan", PLANS)
def test_a_runner_killed_at_any_moment_leaves_nothing(
    tmp_path: Path, ended: list[Runner], plan: str, moment: int
) -> None:
    """The moment is in the start-up, the twin, the run with its fault, the undo, or the report."""
    if reason := why_not(*PLANS[plan]):
        pytest.skip(reason)
    drawn = random.Random(f"{plan} {moment} {os.environ.get('CHAOSKIT_SEED', '')}")
    runner = Runner(tmp_path / "run", plan, twin=drawn.random() < 0.5, steps=60)
    ended.append(runner)
    assert runner.process.stdout is not None
    if drawn.random() < 0.5:  # with the fault in force
        for line in runner.process.stdout:
            if "BaseCluster.apply" in line or ("UndoLog.plan" in line and int(line.split()[0]) > 3):
                break
        time.sleep(drawn.random() * 0.5)
    else:
        time.sleep(drawn.random() * 8.0)
    runner.process.kill()
    runner.process.wait()
    runner.await_nothing()
