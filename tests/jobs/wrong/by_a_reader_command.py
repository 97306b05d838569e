"""A launcher of two ranks without any part of chaoskit: ``by_a_reader_command.py HOW STEPS
STEP_S``.

It works as ``command_job.py``, except for the mistake ``HOW``: ``none``, ``nan``, ``helper``,
``one_rank`` or ``warns``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

_RANKS = 2
_STARTS = 4
_EVERY = 10
_WAITS = [
    sys.executable,
    "-S",
    "-c",
    "import sys; sys.stdin.read()",
]  # ends with the holder of its input
_LEAVES = [
    *_WAITS[:-1],
    f"import os; os.fork() and os._exit(0); {_WAITS[-1]}",
]  # a daemon: its parent is not the rank


def launch(how: str) -> int:
    """Start the ranks until all of them have ended well; return the exit status."""
    helper = subprocess.Popen(_WAITS, stdin=subprocess.PIPE) if how == "warns" else None
    for start in range(_STARTS):
        started = 1 if how == "one_rank" and start else _RANKS
        ranks = [
            subprocess.Popen(
                [sys.executable, *sys.argv],
                env={**os.environ, "RANK": str(rank), "START": str(start)},
            )
            for rank in range(started)
        ]
        if all_ended_well(ranks):
            if helper is not None:
                helper.communicate()
            return 0
        for rank in ranks:
            rank.kill()
            rank.wait()
    return 1


def all_ended_well(ranks: list[subprocess.Popen[bytes]]) -> bool:
    """Wait until a rank has ended badly, or all have ended well; return True for the latter."""
    while True:
        ended = [rank.poll() for rank in ranks]
        if any(ended):
            return False
        if all(status == 0 for status in ended):
            return True
        time.sleep(0.01)


def say(line: str) -> None:
    """Write a line at once, because the other rank writes into the same log."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def train(how: str, rank: int, steps: int, step_s: float) -> None:
    """Print each step with its loss."""
    helper = subprocess.Popen(_LEAVES, stdin=subprocess.PIPE) if how == "helper" else None
    checkpoint = Path(os.environ["CHAOSKIT_RUN_DIR"]) / "checkpoint"
    first, weight = 0, 1.0
    if checkpoint.exists():
        words = checkpoint.read_text().split()
        first, weight = int(words[0]), float(words[1])
    for step in range(first, steps):
        time.sleep(step_s)
        weight = weight * 0.9 + 0.001 * step
        is_wrong = how == "nan" and int(os.environ["START"]) > 0
        if how == "warns" and step % 7 == 0:
            say(f"[rank{rank}] UserWarning: the weight is {weight:.3f}")
        say(f"[rank{rank}] step {step} loss {'nan' if is_wrong else format(weight, '.6f')}")
        if rank == 0 and step % _EVERY == _EVERY - 1:
            draft = checkpoint.with_suffix(".draft")
            draft.write_text(f"{step + 1} {weight!r}")
            draft.replace(checkpoint)
    if helper is not None:
        helper.communicate()


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(sys.argv[1], int(os.environ["RANK"]), int(sys.argv[2]), float(sys.argv[3]))
    else:
        sys.exit(launch(sys.argv[1]))
