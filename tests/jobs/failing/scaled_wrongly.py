"""A job that scales its batches by its own rule in addition to that of the run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

_spec = importlib.util.spec_from_file_location("troubled", Path(__file__).with_name("troubled.py"))
assert _spec is not None
assert _spec.loader is not None
troubled = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(troubled)


def train(
    trainer: Any, *, steps: int, step_s: float = 0.0, until: dict[str, Any] | None = None
) -> None:
    register = trainer.register

    def register_and_spoil(**registered: Any) -> None:
        register(**registered)
        following = trainer.replica.following
        deal = following.deal
        following.deal = lambda step, shards: deal(step, shards + 2 * (trainer.world > 2))

    trainer.register = register_and_spoil
    troubled.plain(trainer, steps=steps, step_s=step_s, until=until)
