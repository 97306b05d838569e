"""A job in whose processes torch bears another version than where the harness runs."""

from __future__ import annotations

from typing import Any

import torch
import troubled

torch.__version__ = "0.0.1+workers"


def plain(
    trainer: Any, *, steps: int, step_s: float = 0.0, until: dict[str, Any] | None = None
) -> None:
    """The job of that name of ``troubled.py``."""
    troubled.plain(trainer, steps=steps, step_s=step_s, until=until)
