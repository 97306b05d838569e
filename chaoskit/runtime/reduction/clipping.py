"""The norm of a sharded gradient, from this rank's part of it.

torch's own ``clip_grad_norm_`` gives the same number up to rounding. It works on DTensors, and on a
new mesh takes half a second to decide how each of its operations is sharded. Here one sum is
exchanged.

-> step/commit.py clips the gradients of replicated jobs, by torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

_EPSILON = 1e-6  # the value in torch


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> None:
    """Scale all gradients in place so that their common 2-norm is at most ``max_norm``.

    This is a collective of the mesh, which raises RuntimeError if a rank is lost. Gradients that
    are partial sums, which are rare, are left to torch. Parameters without a gradient are skipped.
    """
    owned = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in owned if parameter.grad is not None]
    sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    if any(placement.is_partial() for gradient in sharded for placement in gradient.placements):
        clip_grad_norm_(owned, max_norm)
        return
    local = [
        gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients
    ]
    if not local:
        return
    norm = _norm(gradients, local)
    torch._foreach_mul_(local, float((max_norm / (norm + _EPSILON)).clamp(max=1.0)))


def _norm(gradients: list[Tensor], local: list[Tensor]) -> Tensor:
    """Return the norm of all ranks' parts, each counted once even if several ranks hold it."""
    parts: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    dtype = torch.float64 if any(part.dtype == torch.float64 for part in local) else torch.float32
    for gradient, norm in zip(gradients, torch._foreach_norm(local, dtype=dtype), strict=True):
        parts[_spread_over(gradient)].append(norm)
    total = torch.zeros((), dtype=torch.float64, device=local[0].device)
    for groups, norms in parts.items():
        squares = torch.stack(norms).double().square().sum()
        for group in groups:
            dist.all_reduce(squares, group=group)
        total += squares
    return total.sqrt()


def _spread_over(gradient: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the process groups over which a tensor is sharded; none for a whole tensor."""
    if not isinstance(gradient, DTensor):
        return ()
    mesh = gradient.device_mesh
    return tuple(
        mesh.get_group(dim)
        for dim, place in enumerate(gradient.placements)
        if not place.is_replicate()
    )
