"""Measure every claim about speed:
``python -m benchmarks.run [--only kill,overhead] [--quick] [--settle SECONDS]``.

Writes results/latest.json and, with every sample, results/samples/latest.json. Exit status 1 if a
bar is not met. Durations on a busy machine are reported as noisy, and not judged. Long benchmarks
have scripts of their own, with the same kind of result: random_kills.py, false_alarms.py, vary.py.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness.bars import QUIET_LOAD, Bar, Report, choose, look_at_machine, show
from benchmarks.harness.lab import Lab, show_progress
from benchmarks.harness.results import RESULTS, save
from benchmarks.recoveries.elastic import experiments, resize, throughput
from benchmarks.recoveries.network import network
from benchmarks.recoveries.recovery import hang, kill, nan
from benchmarks.recoveries.resizing import resizing
from benchmarks.recoveries.sharded import sharded
from benchmarks.steps.integrity import integrity
from benchmarks.steps.overhead import overhead

TOPICS: dict[str, Callable[[Lab], list[Bar]]] = {
    "kill": kill,
    "hang": hang,
    "nan": nan,
    "overhead": overhead,
    "integrity": integrity,
    "network": network,
    "sharded": sharded,
    "resize": resize,
    "resizing": resizing,
    "throughput": throughput,
    "experiments": experiments,
}


def choose_topics(text: str) -> list[str]:
    """Return the topics that ``text`` lists, in the order in which they run."""
    return choose(text, TOPICS)


def settle(limit_s: float) -> None:
    """Wait until the machine is quiet, but not longer than ``limit_s``."""
    deadline_s = time.monotonic() + limit_s
    while os.getloadavg()[0] > QUIET_LOAD and time.monotonic() < deadline_s:
        show_progress(f"load average {os.getloadavg()[0]:.2f}: waiting for {QUIET_LOAD}")
        time.sleep(min(10.0, limit_s))


def measure(topics: list[str], *, smoke: bool) -> Report:
    """Run the topics one after the other, and return the report."""
    machine = look_at_machine()
    show_progress(
        f"load average {machine.load:.2f}{': noisy' if machine.load > QUIET_LOAD else ''}"
    )
    bars: list[Bar] = []
    with Lab(smoke=smoke) as lab:
        for topic in topics:
            show_progress(topic)
            begin_s = time.monotonic()
            bars += TOPICS[topic](lab)
            show_progress(f"  {topic}: {time.monotonic() - begin_s:.0f} s")
    return Report(machine=machine, smoke=smoke, bars=bars)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", type=choose_topics, default=list(TOPICS), metavar="TOPICS", help=", ".join(TOPICS)
    )
    parser.add_argument(
        "--quick", action="store_true", help="a smoke run: the tiny job, one repeat, no claims"
    )
    parser.add_argument(
        "--settle",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="wait so long for a quiet machine",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIRECTORY")
    options = parser.parse_args()
    settle(options.settle)
    report = measure(options.only, smoke=options.quick)
    save(report, options.results, "latest")
    show(report)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
