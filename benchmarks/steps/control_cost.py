"""Measure the CPU time of the control processes of a running job:
``python -m benchmarks.steps.control_cost [--beside CHECKOUT]``.

The control processes are the coordinator, the agents and ``chaoskit launch`` itself. No fault
strikes while they are measured, so this is the cost of protection per second, independent of the
length of a step. With ``--beside``, jobs of this checkout of chaoskit and of another one take
turns, and their ratio is reported. Writes results/control_cost.json. Exit status 1 if the bar is
not met.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil

from benchmarks.harness.bars import Bar, Report, look_at_machine, show
from benchmarks.harness.lab import show_progress
from benchmarks.harness.results import RESULTS, save

HERE = Path(__file__).parents[2]
#: What the control processes may spend, of what those of the other checkout spend.
RATIO_MAX = 0.6
_START_S, _SETTLE_S = (
    180.0,
    4.0,
)  # until all processes run; then until spares and health checks are done
_COORDINATOR = "ck-coordinator"


class Spent(NamedTuple):
    """CPU time and voluntary context switches of a process since its start."""

    cpu_ns: int
    wakeups: int


class Role(NamedTuple):
    """The cost of one role's processes: milliseconds of CPU a second, and wake-ups a second."""

    cpu_ms: float
    wakeups: float


def spent(pid: int) -> Spent:
    """Return the sum over the threads of a process."""
    cpu_ns = wakeups = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        cpu_ns += int((task / "schedstat").read_text().split()[0])
        status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
        wakeups += int(status["voluntary_ctxt_switches"])
    return Spent(cpu_ns, wakeups)


def control_processes(launcher: int, nodes: int) -> dict[str, list[int]]:
    """Return the pids of the processes that exist now, by role."""
    named = {child.pid: child.name() for child in psutil.Process(launcher).children(recursive=True)}
    agents = {f"ck-node{number}" for number in range(nodes)}
    return {
        "coordinator": [pid for pid, name in named.items() if name == _COORDINATOR],
        "agents": [pid for pid, name in named.items() if name in agents],
        "launcher": [launcher],
    }


class Job:
    """A job of one checkout, launched as a user would launch it."""

    def __init__(self, checkout: Path, nodes: int, size: str, directory: Path) -> None:
        self._nodes = nodes
        options = [
            "--nodes",
            str(nodes),
            "--set",
            f"size={size}",
            "--set",
            "steps=1000000",
            "--report",
            str(directory),
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "chaoskit", "launch", "gpt", *options],
            env=os.environ | {"PYTHONPATH": str(checkout)},
            stdout=subprocess.DEVNULL,
            cwd=directory.parent,
        )
        self._directory = directory

    def await_training(self) -> None:
        """Wait until the ranks train and the spare is ready.

        Raises:
            TimeoutError: if that takes too long.
        """
        journal, deadline_s = (
            self._directory / "journal" / "coordinator.jsonl",
            time.monotonic() + _START_S,
        )
        while not (journal.exists() and '"spare_ready"' in journal.read_text()):
            if time.monotonic() > deadline_s or self._process.poll() is not None:
                raise TimeoutError(f"no training within {_START_S:g} s")
            time.sleep(0.1)

    def read(self) -> dict[str, Spent]:
        """Return the time that the processes of each role have spent."""
        roles = control_processes(self._process.pid, self._nodes)
        spent_by_role = {role: [spent(pid) for pid in pids] for role, pids in roles.items()}
        return {
            role: Spent(*map(sum, zip(*processes, strict=True)))
            for role, processes in spent_by_role.items()
        }

    def end(self) -> None:
        """End the launcher, and with it the job."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def measure(checkout: Path, nodes: int, size: str, seconds: float) -> dict[str, Role]:
    """Return the cost of each role of a job that trains."""
    with tempfile.TemporaryDirectory(prefix="chaoskit-bench-") as folder:
        job = Job(checkout, nodes, size, Path(folder) / "run")
        try:
            job.await_training()
            time.sleep(_SETTLE_S)
            begun_s, before = time.monotonic(), job.read()
            time.sleep(seconds)
            lasted_s, after = time.monotonic() - begun_s, job.read()
        finally:
            job.end()
    costs = {}
    for role, then in before.items():
        cpu_ns, wakeups = (now - was for now, was in zip(after[role], then, strict=True))
        costs[role] = Role(cpu_ns / 1e6 / lasted_s, wakeups / lasted_s)
    return costs


def middle(rounds: list[dict[str, Role]]) -> dict[str, Role]:
    """Return the median of each number over the rounds."""
    return {
        role: Role(
            median(costs[role].cpu_ms for costs in rounds),
            median(costs[role].wakeups for costs in rounds),
        )
        for role in rounds[0]
    }


def describe(roles: dict[str, Role]) -> str:
    """Return a description of the costs of ``roles``."""
    parts = [f"{role} {cost.cpu_ms:.1f} ({cost.wakeups:.0f}/s)" for role, cost in roles.items()]
    return f"{total_ms(roles):.1f} ms/s: {', '.join(parts)}"


def total_ms(roles: dict[str, Role]) -> float:
    return sum(role.cpu_ms for role in roles.values())


def bar(nodes: int, own: list[dict[str, Role]], others: list[dict[str, Role]]) -> Bar:
    """Return the bar for this checkout; its rounds are judged by those of the other checkout, if
    there are any.
    """
    name = f"CPU of the control processes, {nodes} ranks"
    samples = {
        side: [{role: cost._asdict() for role, cost in roles.items()} for roles in rounds]
        for side, rounds in (("mine", own), ("others", others))
    }
    if not others:
        return Bar(topic="control", name=name, measured=describe(middle(own)), samples=samples)
    ratio = median(total_ms(roles) for roles in own) / median(total_ms(roles) for roles in others)
    measured = f"{ratio:.2f} x; {describe(middle(own))}; the other {describe(middle(others))}"
    limit, met = f"at most {RATIO_MAX:g} x", ratio <= RATIO_MAX
    return Bar(topic="control", name=name, measured=measured, limit=limit, met=met, samples=samples)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4], help="worlds to measure")
    parser.add_argument("--seconds", type=float, default=15.0, help="how long each job is watched")
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each checkout and world")
    parser.add_argument("--size", default="10m", help="of the reference job's model")
    parser.add_argument(
        "--beside", type=Path, metavar="CHECKOUT", help="another checkout, for the ratio"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIRECTORY")
    options = parser.parse_args()
    machine = look_at_machine()
    bars = []
    for nodes in options.nodes:
        rounds_by_checkout: dict[Path, list[dict[str, Role]]] = {HERE: []}
        if options.beside:
            rounds_by_checkout[options.beside.resolve()] = []
        for number in range(options.rounds):
            for checkout, rounds in rounds_by_checkout.items():
                rounds.append(measure(checkout, nodes, options.size, options.seconds))
                show_progress(
                    f"  {nodes} ranks, round {number + 1}, {checkout}: {describe(rounds[-1])}"
                )
        bars.append(
            bar(
                nodes,
                rounds_by_checkout[HERE],
                [
                    costs
                    for checkout in list(rounds_by_checkout)[1:]
                    for costs in rounds_by_checkout[checkout]
                ],
            )
        )
    report = Report(machine=machine, smoke=False, bars=bars)
    save(report, options.results, "control_cost")
    show(report)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
