"""A sharded job that notes, per entry, how many DTensor operations torch had to examine in its
first step.

Weights that will be restored are filled with NaN, so that a weight which is not restored would
show.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils.data import TensorDataset


def train(trainer: Any, *, steps: int = 12) -> None:
    decisions: list[str] = []
    decide = ShardingPropagator._propagate_tensor_meta_non_cached

    def count(self: ShardingPropagator, schema: Any) -> Any:
        decisions.append(str(schema))
        return decide(self, schema)

    torch.manual_seed(trainer.seed)
    with torch.device("meta" if trainer.will_restore else "cpu"):
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8, momentum=0.0), torch.nn.Linear(8, 8)
        )
    fully_shard(model, mesh=trainer.mesh())
    if trainer.will_restore:
        model.to_empty(device="cpu")
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.fill_(float("nan"))
            for tensor in model.buffers():
                tensor.fill_(7)
    ShardingPropagator._propagate_tensor_meta_non_cached = count  # type: ignore[method-assign]
    try:
        _train(trainer, model, steps, decisions)
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = decide  # type: ignore[method-assign]


def _train(trainer: Any, model: torch.nn.Module, steps: int, decisions: list[str]) -> None:
    trainer.register(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))
    data = TensorDataset(torch.arange(512.0).reshape(64, 8).sin())
    first = trainer.step
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(data, batch_size=8):
                step.backward(model(shard.batch[0]).square().mean())
        if trainer.step == first + 1:
            (trainer.disk / f"{trainer.rank} from step {first}").write_text("\n".join(decisions))
