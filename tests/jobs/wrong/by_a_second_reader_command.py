"""A launcher of two ranks without any part of chaoskit: ``by_a_second_reader_command.py HOW STEPS
STEP_S``.

It works as ``by_a_reader_command.py``, except for the mistake ``HOW``: ``idle_rank``,
``hang_ignored``, ``decoy``, ``buffered`` or ``bursts``.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from by_a_reader_command import all_ended_well, say

_RANKS = 2
_STARTS = 4
_EVERY = 10
_BURST = 3
_LINGERS_S = 1.0
_LEFT_S = 0.5
_WAITS = [
    sys.executable,
    "-S",
    "-c",
    "import sys; sys.stdin.read()",
]  # ends with the holder of its input


def start(rank: int, number: int) -> subprocess.Popen[bytes]:
    """Start the process of a rank, for the ``number``-th time."""
    variables = {**os.environ, "RANK": str(rank), "START": str(number)}
    return subprocess.Popen([sys.executable, *sys.argv], env=variables)


def launch(how: str) -> int:
    """Start the ranks until all of them have ended well; return the exit status."""
    for number in range(_STARTS):
        ranks = [start(rank, number) for rank in range(_RANKS)]
        if how == "hang_ignored":
            status = ranks[0].wait()
            with contextlib.suppress(subprocess.TimeoutExpired):
                ranks[1].wait(_LEFT_S)
            return status
        if all_ended_well(ranks):
            return 0
        for rank in ranks:
            rank.kill()
            rank.wait()
    return 1


def launch_decoys(steps: int, step_s: float) -> int:
    """Train in this process, while processes with the ranks' numbers wait; one that ends is started
    again.
    """
    is_over = threading.Event()

    def decoy(rank: int) -> None:
        variables = {**os.environ, "RANK": str(rank)}
        while not is_over.is_set():
            process = subprocess.Popen(_WAITS, stdin=subprocess.PIPE, env=variables)
            while process.poll() is None and not is_over.wait(0.01):
                pass
            process.kill()
            process.wait()

    threads = [threading.Thread(target=decoy, args=(rank,)) for rank in range(_RANKS)]
    for thread in threads:
        thread.start()
    train("decoy", 0, steps, step_s)
    is_over.set()
    for thread in threads:
        thread.join()
    return 0


def train(how: str, rank: int, steps: int, step_s: float) -> None:
    """Print each step with its loss."""
    checkpoint = Path(os.environ["CHAOSKIT_RUN_DIR"]) / "checkpoint"
    over = checkpoint.with_name("over")
    if how == "idle_rank" and rank == 1 and os.environ["START"] != "0":
        while not over.exists():
            time.sleep(step_s)
        return
    first, weight, lines = 0, 1.0, list[str]()
    if checkpoint.exists():
        words = checkpoint.read_text().split()
        first, weight = int(words[0]), float(words[1])
    for step in range(first, steps):
        time.sleep(step_s)
        weight = weight * 0.9 + 0.001 * step
        lines.append(f"[rank{rank}] step {step} loss {weight:.6f}")
        is_last = step == steps - 1
        if rank == 0 and (is_last if how == "buffered" else step % _EVERY == _EVERY - 1):
            draft = checkpoint.with_suffix(".draft")
            draft.write_text(f"{step + 1} {weight!r}")
            draft.replace(checkpoint)
        if is_last or (how != "buffered" and (how != "bursts" or step % _BURST == _BURST - 1)):
            if how != "buffered" or rank == 0:
                say("\n".join(lines))
            lines.clear()
    if how == "buffered" and first < steps:
        time.sleep(_LINGERS_S)
    if rank == 0:
        over.touch()


if __name__ == "__main__":
    mode, count, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    if "RANK" in os.environ:
        train(mode, int(os.environ["RANK"]), count, seconds)
    else:
        sys.exit(launch_decoys(count, seconds) if mode == "decoy" else launch(mode))
