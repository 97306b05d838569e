"""Ranks that average a number in each step through torch.distributed:

``averaged.py STEPS STEP_S [TIMEOUT_S]``.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
from torch import distributed


def main() -> None:
    steps, step_s = int(sys.argv[1]), float(sys.argv[2])
    timeout_s = float(sys.argv[3]) if len(sys.argv) > 3 else 1800.0
    distributed.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    weight = torch.ones(1, dtype=torch.float64)
    for step in range(steps):
        time.sleep(step_s)
        weight *= 1.0 + 0.01 * distributed.get_rank()
        distributed.all_reduce(weight)
        weight /= distributed.get_world_size()
        if distributed.get_rank() == 0:
            print(f"step {step} loss {weight.item()!r}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
