"""Training without chaoskit: ``command_job.py STEPS STEP_S``. Its launcher starts two ranks.

When a rank ends badly the launcher ends the other one, too, and starts both again from the newest
checkpoint, which rank 0 writes after every tenth step. It does not use torch: imports would take
most of the time.
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


def launch() -> int:
    """Start the ranks, up to four times, until all of them have ended well.

    Return the exit status: 0, or 1 if no attempt has ended well.
    """
    for _ in range(_STARTS):
        ranks = [
            subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "RANK": str(rank)})
            for rank in range(_RANKS)
        ]
        if all_ended_well(ranks):
            return 0
        for rank in ranks:
            rank.kill()
            rank.wait()
    return 1


def all_ended_well(ranks: list[subprocess.Popen[bytes]]) -> bool:
    """Wait until one rank has ended badly, or all have ended well; return False in the first case."""
    while True:
        ended = [rank.poll() for rank in ranks]
        if any(ended):
            return False
        if all(status == 0 for status in ended):
            return True
        time.sleep(0.01)


def train(rank: int, steps: int, step_s: float) -> None:
    """Print each step with its loss, from the step of the checkpoint on if there is one."""
    checkpoint = Path(os.environ["CHAOSKIT_RUN_DIR"]) / "checkpoint"
    first, weight = 0, 1.0
    if checkpoint.exists():
        words = checkpoint.read_text().split()
        first, weight = int(words[0]), float(words[1])
    for step in range(first, steps):
        time.sleep(step_s)
        weight = weight * 0.9 + 0.001 * step
        # in one write: the other rank writes into the same log
        sys.stdout.write(f"[rank{rank}] step {step} loss {weight:.6f}\n")
        sys.stdout.flush()
        if rank == 0 and step % _EVERY == _EVERY - 1:
            draft = checkpoint.with_suffix(".draft")
            draft.write_text(f"{step + 1} {weight!r}")
            draft.replace(checkpoint)


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(int(os.environ["RANK"]), int(sys.argv[1]), float(sys.argv[2]))
    else:
        sys.exit(launch())
