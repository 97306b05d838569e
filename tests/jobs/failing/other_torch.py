"""A job with another version of torch in its processes than in the harness."""

from __future__ import annotations

from typing import Any

import torch
import troubled

torch.__version__ = "0.0.1+workers"


def plain(
    trainer: Any, *, steps: int, step_s: float = 0.0, until: dict[str, Any] | None = None
) -> None:
    """Train the job ``plain`` of ``troubled.py``."""
    troubled.plain(trainer, steps=steps, step_s=step_s, until=until)
