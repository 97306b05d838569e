"""Measure training while the API server is stopped:
``python -m benchmarks.pods.api_stopped PID [--seconds S] [--json FILE]``.

Three ranks in pods train with a driver in the cluster. The process of the API server, with this PID
on this machine, is stopped (SIGSTOP) for a while, and a rank is killed meanwhile. Printed are the
times between commits before, during and after, and the recovery. Cluster, image and namespace: the
variables of ``docs/kubernetes.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

from chaoskit.experiment.harness import Harness
from chaoskit.journal import Record, read_journals
from chaoskit.vocabulary import Event, Verdict
from faults import Kill

JOB = f"{Path(__file__).parents[2] / 'tests' / 'jobs' / 'failing' / 'troubled.py'}:plain"
STEP_S, BEFORE_S = 0.03, 20.0


def stop(pid: int, seconds: float, stopped: list[int]) -> None:
    """Stop a process for ``seconds``; append the times of both ends, CLOCK_MONOTONIC in ns, to
    ``stopped``.
    """
    time.sleep(BEFORE_S)
    os.kill(pid, signal.SIGSTOP)
    stopped.append(time.monotonic_ns())
    try:
        time.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)
        stopped.append(time.monotonic_ns())


def intervals_ms(commits: list[Record], first_ns: int, last_ns: int) -> list[float]:
    """Return the milliseconds between commits of one rank from ``first_ns`` to ``last_ns``."""
    times = [record.t_ns for record in commits if first_ns <= record.t_ns < last_ns]
    return [(later - earlier) / 1e6 for earlier, later in pairwise(times)]


def main() -> None:
    """Measure once, and print a line for each part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pid", type=int, help="of kube-apiserver")
    parser.add_argument("--seconds", type=float, default=60.0, help="for which it is stopped")
    parser.add_argument("--json", type=Path, help="where all figures go")
    arguments = parser.parse_args()
    steps = int((2 * BEFORE_S + arguments.seconds) / STEP_S)
    kill = Kill(rank=1, at_step=int((BEFORE_S + arguments.seconds / 2) / STEP_S))
    with tempfile.TemporaryDirectory() as directory, Harness("kubernetes", directory) as harness:
        harness.run(JOB, nodes=3, steps=20, options={"step_s": STEP_S}, twin=False)  # pods are cold
        stopped: list[int] = []
        stopper = threading.Thread(target=stop, args=[arguments.pid, arguments.seconds, stopped])
        stopper.start()
        options, deadline_s = {"step_s": STEP_S}, 3 * arguments.seconds + 120
        outcome = harness.run(
            JOB,
            nodes=3,
            steps=steps,
            options=options,
            faults=[kill],
            twin=False,
            deadline_s=deadline_s,
        )
        stopper.join()
        if outcome.verdict is not Verdict.PASSED:
            raise SystemExit(f"the run did not pass: {'; '.join(outcome.reasons)}")
        records = read_journals(Path(outcome.directory) / "journal")
        commits = [
            record
            for record in records
            if record.event == Event.COMMIT and record.source == "node0.0"
        ]
        recovery_ms = outcome.recoveries[0].seconds * 1000
    first_ns, last_ns = stopped
    parts = {
        "before": intervals_ms(commits, commits[0].t_ns, first_ns),
        "stopped": intervals_ms(commits, first_ns, last_ns),
        "after": intervals_ms(commits, last_ns, commits[-1].t_ns),
    }
    for name, intervals in parts.items():
        ordinary = (
            sorted(intervals)[:-1] if name == "stopped" else intervals
        )  # the recovery is reported apart
        p99 = quantiles(ordinary, n=100)[-1]
        print(
            f"{name:8} median {median(ordinary):5.1f} ms, p99 {p99:5.1f}, longest {max(ordinary):5.1f}"
        )
    print(f"recovery while it was stopped: {recovery_ms:.1f} ms")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**parts, "recovery_ms": recovery_ms}))


if __name__ == "__main__":
    main()
