"""Processes that save snapshots until they are killed, and the contents of the disk after each of
them.

    python crashing_saver.py ROOT KIND SEED TIMES

``KIND`` is a boundary, ``byte`` or ``instant``. With ``byte`` the kernel kills a process at a
random byte of a file. With ``instant`` SIGKILL comes after a random number of saves and, after
that, of boundaries, wherever the process is. Each process begins where the one before was killed,
in the same directory. The script prints a line of JSON for each, with the random choices.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import chaoskit.checkpoint.disk.dcp_metadata  # noqa: F401 -- takes most of a second: once, not in each process
from chaoskit.checkpoint.disk.names import STAGING, TRASH
from chaoskit.checkpoint.disk.retention import Retention
from chaoskit.checkpoint.disk.tier import DiskTier
from chaoskit.checkpoint.layout.boxes import whole

ELEMENTS = 2**23 + 99  # elements of 4 bytes: three chunks
SMALL = 50_000
MOST_SAVES = 40
_ack = struct.Struct("q")


def save_until_killed(tier: DiskTier, elements: int, acknowledge: int) -> None:
    names = tier.snapshots().snapshots
    first = names[0].manifest.step + 1 if names else 0
    for step in range(first, first + MOST_SAVES):
        tier.save(
            step,
            {"w": torch.full((elements,), step, dtype=torch.int32), "step": torch.tensor(step)},
        )
        os.write(acknowledge, _ack.pack(step))
        tier.prune()


def kill_at(boundary: str, visit: int) -> Callable[[str], None]:
    """Return a hook that kills its process when it reaches the boundary for the ``visit``-th time."""
    visits = 0

    def hook(reached: str) -> None:
        nonlocal visits
        visits += reached == boundary
        if visits == visit:
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


def tell(progress: int) -> Callable[[str], None]:
    """Return a hook that writes a byte at each boundary, an "s" where a save is made."""

    def hook(reached: str) -> None:
        os.write(progress, b"s" if reached == "committed" else b".")

    return hook


def await_progress(progress: int, saves: int, boundaries: int) -> None:
    """Return after ``saves`` saves, and ``boundaries`` boundaries after those."""
    while saves or boundaries:
        reached = os.read(progress, 1)
        assert reached, "the process has ended by itself"
        if saves:
            saves -= reached == b"s"
        else:
            boundaries -= 1


def one_life(root: Path, kind: str, generator: random.Random) -> dict[str, int | None]:
    """Start a process and let it die; return the random choices, the last step that it knew to be
    stored, and the signal.
    """
    reader, writer = os.pipe()
    progress_r, progress_w = os.pipe()
    limit, saves, boundaries = (
        generator.randint(1, 4 * SMALL + 1000),
        generator.randint(0, 1),
        generator.randrange(25),
    )
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os.close(progress_r)
        hook = (
            tell(progress_w)
            if kind in ("byte", "instant")
            else kill_at(kind, generator.randint(1, 3))
        )
        if kind == "byte":
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        tier = DiskTier(root, retention=Retention(keep_last=2), at=hook)
        save_until_killed(tier, SMALL if kind in ("byte", "instant") else ELEMENTS, writer)
        os._exit(0)
    os.close(writer)
    os.close(progress_w)
    if kind == "instant":
        await_progress(progress_r, saves, boundaries)
        os.kill(pid, signal.SIGKILL)
    acknowledged = b"".join(iter(lambda: os.read(reader, 4096), b""))
    os.close(reader)
    os.close(progress_r)
    _, status = os.waitpid(pid, 0)
    last = _ack.unpack(acknowledged[-_ack.size :])[0] if acknowledged else None
    return {"limit": limit, "saves": saves, "acknowledged": last, "signal": os.WTERMSIG(status)}


def look(root: Path) -> dict[str, object]:
    """Return the results of a process that starts after the crash."""
    tier = DiskTier(root)
    listing = tier.snapshots()
    steps = [snapshot.manifest.step for snapshot in listing.snapshots]
    results: dict[str, object] = {
        "steps": steps,
        "damaged": [snapshot.reason for snapshot in listing.damaged],
    }
    if steps:
        search = tier.newest_verified()
        part = search.snapshot.items["w"][0]
        weights, step = torch.empty(part.shape, dtype=torch.int32), torch.tensor(-1)
        search.snapshot.read_into({"w": (weights, whole(part.shape)), "step": (step, whole(()))})
        results |= {"step": int(step), "lost": [snapshot.name for snapshot in search.lost]}
        results["mixed"] = not bool((weights == step).all())
    results["swept"] = len(tier.sweep())
    left = [*(root / STAGING).glob("*"), *(root / TRASH).glob("*")]
    return results | {"left": [path.name for path in left]}


def main() -> None:
    root, kind, seed, times = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    generator = random.Random(seed)
    for _ in range(times):
        life = one_life(root, kind, random.Random(generator.random()))
        print(json.dumps({**life, **look(root)}), flush=True)


if __name__ == "__main__":
    main()
