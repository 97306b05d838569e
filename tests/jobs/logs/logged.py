"""A training without any part of chaoskit: its log alone shows its progress.

    python logged.py STEPS STEP_S EVERY

Every rank prints the loss of each step. Rank 0 writes a checkpoint after every EVERY steps (0:
none) into the run's directory, from which each new attempt goes on. The checkpoint is written after
the next step was printed, so that a killed training always repeats a step. The script does not
import torch, which would take most of the time.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def main() -> None:
    steps, step_s, every = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    rank, state = int(os.environ.get("RANK", "0")), Path(os.environ["CHAOSKIT_RUN_DIR"])
    checkpoint = state / "checkpoint"
    step, weight = 0, 1.0
    if checkpoint.exists():
        words = checkpoint.read_text().split()
        step, weight = int(words[0]), float(words[1])
    while step < steps:
        time.sleep(step_s)
        before = f"{step} {weight!r}"
        weight = weight * 0.9 + 0.001 * step
        # one write: print writes the line end separately, and another rank may write into the same log
        sys.stdout.write(f"[rank{rank}] step {step} loss {weight:.6f}\n")
        sys.stdout.flush()
        if every and step and step % every == 0 and rank == 0:
            draft = checkpoint.with_suffix(".draft")
            draft.write_text(before)
            draft.replace(checkpoint)
        step += 1


if __name__ == "__main__":
    main()
