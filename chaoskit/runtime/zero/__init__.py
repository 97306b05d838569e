"""ZeRO-1: every rank has all weights, and the optimizer's state for a part of them only.

    optimizer = ZeroOptimizer(model.parameters(), AdamW, mesh=mesh, lr=1e-3)

Works in a job of chaoskit's (``mesh = trainer.mesh()``) and in any other script.
"""

from __future__ import annotations

from chaoskit.runtime.zero.optimizer import ZeroOptimizer

__all__ = ["ZeroOptimizer"]
