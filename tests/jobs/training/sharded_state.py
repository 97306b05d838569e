"""A rank of a small FSDP2 job, which saves or loads, and prints the digest of the whole state.

    python sharded_state.py RANK WORLD STORE ROOT ACT [STEP]

``ACT`` is one of these:

* save, async, process: save.
* keyed: save by a process, with the step in the state.
* differ: save with another step on each rank.
* full, dies: save, and fail on the second rank.
* load, restore, plain: load; the last with torch's own reader.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from chaoskit.checkpoint import DiskTier, SnapshotReader, SnapshotWriter, restore
from chaoskit.checkpoint.layout.boundaries import undisturbed


def build(world: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with rows that do not divide by any world, after one step of Adam."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 5), nn.LayerNorm(5))
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(4, 7)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "loader": {"epoch": 3, "seen": [1, 2, 5]}}


def digest(state: Any) -> str:
    """Return a digest that is the same on every rank and in every world."""
    hasher = xxhash.xxh3_128()

    def walk(path: str, part: Any) -> None:
        if isinstance(part, dict):
            for key in sorted(part, key=str):
                walk(f"{path}.{key}", part[key])
            return
        whole = part.full_tensor() if isinstance(part, DTensor) else part
        data = whole.numpy().tobytes() if isinstance(whole, torch.Tensor) else repr(whole).encode()
        hasher.update(path.encode() + data)

    walk("", state)
    return hasher.hexdigest()


def trouble(act: str) -> Callable[[str], None]:
    """Return a hook that finds the disk full at its first write, or ends its process there."""
    writes = iter(range(99))

    def hook(boundary: str) -> None:
        if boundary == "write" and next(writes) == 0:
            if act == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(28, "No space left on device")

    return hook


def main() -> None:
    """Run the act of this rank."""
    rank, world, store, root, act, *rest = sys.argv[1:]
    step = int(rest[0]) if rest else 1
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world)
    )
    loading = act in ("load", "plain", "restore")
    model, optimizer = build(int(world), 0 if loading else step)
    state, results = state_of(model, optimizer), {}
    writer = SnapshotWriter(root)
    if act == "save":
        dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
    elif act in ("async", "process"):
        kind = AsyncCheckpointerType.PROCESS if act == "process" else AsyncCheckpointerType.THREAD
        future = dcp.async_save(
            state, checkpoint_id=f"step-{step}", storage_writer=writer, async_checkpointer_type=kind
        )
        future.result()
    elif act == "keyed":
        writer, kind = SnapshotWriter(root, step_key="step"), AsyncCheckpointerType.PROCESS
        state["step"] = step
        dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind).result()
    elif act == "differ":
        try:
            dcp.save(state, checkpoint_id=f"step-{step + int(rank)}", storage_writer=writer)
        except CheckpointException as error:
            results["error"] = str(error)
    elif act in ("full", "dies"):
        writer = SnapshotWriter(DiskTier(root, at=trouble(act) if rank == "1" else undisturbed))
        try:
            dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
        except CheckpointException as error:
            results["error"] = str(error)
        dcp.save(state, checkpoint_id=f"step-{step + 1}", storage_writer=writer)
    elif act == "restore":
        restored = restore(state, disk=root)
        results |= {
            "step": restored and restored.step,
            "lost": [snapshot.name for snapshot in restored.lost] if restored else [],
        }
    elif act == "load":
        dcp.load(state, storage_reader=SnapshotReader(root, step))
    else:
        dcp.load(state, checkpoint_id=max(Path(root).glob("step-*")))
    if loading:
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        loader = state["loader"]
        state = {**state_of(model, optimizer), "loader": loader}
    results["digest"] = digest(state)
    if rank == "0":
        print(json.dumps(results), flush=True)
    dist.barrier()
    os._exit(0)  # gloo sometimes aborts while it is shut down


if __name__ == "__main__":
    main()
