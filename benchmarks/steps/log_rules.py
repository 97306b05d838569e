"""Measure the cost of following chatty logs on a node: CPU time of its agent and of the process
that matches log rules.

``python -m benchmarks.steps.log_rules [--lines-per-s 100] [--workers 4] [--seconds 20]``

The agent's own code follows the logs of ``--workers`` workers, each with ``--lines-per-s`` new
lines a second, while it sends heartbeats. CPU time is that of the two processes, as a share of one
core.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

from chaoskit.logs.process import LogLine, start_log_process
from chaoskit.process.progress_board import Board
from chaoskit.rules import LogRule, parse_rules
from chaoskit.vocabulary import Phase

RULES = [
    {"name": "start", "logPattern": ".*step.*", "expectedStartCutOffInSeconds": 300},
    {
        "name": "hang",
        "logPattern": r".*\[Epoch \d+ Batch \d+.*'loss': (\d+(\.\d+)?).*",
        "expectedRecurringFrequencyInSeconds": 60,
    },
    {"name": "slow", "logPattern": r".* (.+) TFLOPs.*", "metricThreshold": 10, "operator": "lt"},
]
LINE = "2026-03-01 12:00:49,123 [Epoch 0 Batch {n}] step {n} {{'loss': 2.53, 'lr': 0.0003}} 123.4 TFLOPs of them"
_BEAT_S = 0.04


def write(paths: list[Path], lines_per_s: float, ended: threading.Event) -> None:
    """Write lines to all files until ``ended`` is set; runs in another process, so that its CPU
    time is not counted.
    """
    files = [path.open("a", buffering=1) for path in paths]
    number = 0
    while not ended.wait(1 / lines_per_s):
        for file in files:
            file.write(LINE.format(n=number) + "\n")
        number += 1


async def _measure(
    rules: list[LogRule], line: socket.socket | None, workers: list[str], seconds: float
) -> tuple[float, float]:
    boards = [(worker, Board.create()) for worker in workers]
    for rank, (_, board) in enumerate(boards):
        board.place(1, rank)
        board.enter(Phase.FORWARD)
    watching = None
    if line is not None:
        watching = asyncio.ensure_future(
            LogLine("a", rules, line, lambda: boards, lambda message: None).run()
        )
    latest_s, begun, until_s = 0.0, time.process_time(), time.monotonic() + seconds
    while time.monotonic() < until_s:
        due_s = time.monotonic() + _BEAT_S
        await asyncio.sleep(_BEAT_S)
        latest_s = max(latest_s, time.monotonic() - due_s)
    if watching is not None:
        watching.cancel()
        await asyncio.wait([watching])
    return (time.process_time() - begun) / seconds, latest_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines-per-s", type=float, default=100.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    workers = [f"a.{number}" for number in range(given.workers)]
    for name, rules in (("without rules", []), (f"with {len(RULES)} rules", parse_rules(RULES))):
        for lines_per_s in (0.0, given.lines_per_s):
            with tempfile.TemporaryDirectory() as directory:
                paths = [Path(directory) / f"{worker}.log" for worker in workers]
                for path in paths:
                    path.touch()
                child = os.fork() if lines_per_s else 0
                if lines_per_s and child == 0:
                    write(paths, lines_per_s, threading.Event())
                matching = 0.0
                try:
                    line, pid = (
                        start_log_process("a", rules, Path(directory), ()) if rules else (None, 0)
                    )
                    cpu, latest_s = asyncio.run(_measure(rules, line, workers, given.seconds))
                    if pid:  # the process ended when its connection was closed
                        used = os.wait4(pid, 0)[2]
                        matching = (used.ru_utime + used.ru_stime) / given.seconds
                finally:
                    if child:
                        os.kill(child, 9)
                        os.waitpid(child, 0)
            text = f"{name:>15}, {lines_per_s:g} lines/s each: {cpu * 100:.2f} % of a core"
            text += f" and {matching * 100:.2f} % beside it" if rules else ""
            sys.stdout.write(f"{text}, a beat at most {latest_s * 1000:.1f} ms late\n")


if __name__ == "__main__":
    main()
