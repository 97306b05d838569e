"""Acts on the data path: late and bad batches.

-> faults/numbers/data.py orders them.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from chaoskit.runtime.injection.context import Fetch, InjectionContext
from chaoskit.runtime.state.sampling import map_tensors


def stall(context: InjectionContext, options: dict[str, Any]) -> None:
    """Delay the next fetch of a batch by ``stall_ms``, and report its duration."""
    stall_s = options["stall_ms"] / 1000

    def wrap(fetch: Fetch, step: int, shard: int) -> Fetch:
        context.injected.around_fetch.remove(wrap)

        def stalled() -> Any:
            begun_s = time.monotonic()
            time.sleep(stall_s)
            batch = fetch()
            took_s = time.monotonic() - begun_s
            context.report(
                took_s >= stall_s,
                f"the batch of shard {shard} of step {step} took {took_s * 1000:.1f} ms",
            )
            return batch

        return stalled

    context.injected.around_fetch.append(wrap)


def spoil(context: InjectionContext, options: dict[str, Any]) -> None:
    """Replace the floating-point data of ``shard`` of this step by ``value`` in each fetch here.

    If the batch has no floating-point values, the loss is multiplied by ``value``.
    """
    substitute = float(options["value"])

    def wrap(fetch: Fetch, step: int, shard: int) -> Fetch:
        if (step, shard) != (context.step, options["shard"]):
            return fetch

        def spoiled() -> Any:
            batch = fetch()
            before, values = _non_finite(batch)
            if not values:
                _spoil_loss(context, substitute, f"shard {shard} of step {step}")
                return batch
            bad_batch = map_tensors(
                batch,
                lambda tensor: torch.full_like(tensor, substitute) if _is_real(tensor) else tensor,
            )
            after, _ = _non_finite(bad_batch)
            observed = f"shard {shard} of step {step}: {before} of {values} input values not finite before, {after} after"
            context.report(after > before, observed)
            return bad_batch

        return spoiled

    context.injected.around_fetch.append(wrap)


def _spoil_loss(context: InjectionContext, substitute: float, where: str) -> None:
    """Multiply the loss of the next backward pass by ``substitute``, and report both values."""

    def act(loss: Tensor) -> Tensor:
        context.injected.on_loss.remove(act)
        bad_loss = loss * substitute
        observed = f"{where} has no floating-point inputs; its loss was {float(loss)} before, {float(bad_loss)} after"
        context.report(not bool(torch.isfinite(bad_loss)), observed)
        return bad_loss

    context.injected.on_loss.append(act)


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point()


def _non_finite(batch: Any) -> tuple[int, int]:
    """Return the number of floating-point values of a batch that are not finite, and of all."""
    bad: list[int] = []
    values: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        if _is_real(tensor):
            bad.append(int((~torch.isfinite(tensor)).sum()))
            values.append(tensor.numel())
        return tensor

    map_tensors(batch, count)
    return sum(bad), sum(values)
