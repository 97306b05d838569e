"""The norm of a gradient that is spread over ranks, from this rank's part of it.

torch's own ``clip_grad_norm_`` gives the same number up to rounding. It works on DTensors, and on entering a new mesh
spends half a second on deciding how each of its operations is to be sharded; here one sum is exchanged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

_EPSILON = 1e-6  # as torch has it


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> None:
    """Scale all gradients in place so that their common 2-norm is at most ``max_norm``. A collective of the mesh.

    Gradients that are partial sums, which are rare, are left to torch.
    """
    owned = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in owned if parameter.grad is not None]
    sharded = [one for one in gradients if isinstance(one, DTensor)]
    if any(placement.is_partial() for one in sharded for placement in one.placements):
        clip_grad_norm_(owned, max_norm)
        return
    local = [one.to_local() if isinstance(one, DTensor) else one for one in gradients]
    if not local:
        return
    norm = _norm(gradients, local)
    torch._foreach_mul_(local, float((max_norm / (norm + _EPSILON)).clamp(max=1.0)))


def _norm(gradients: list[Tensor], local: list[Tensor]) -> Tensor:
    """Of all ranks' parts, each counted once however many ranks hold it."""
    parts: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    dtype = torch.float64 if any(one.dtype == torch.float64 for one in local) else torch.float32
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
    """The groups over which a tensor is cut into parts."""
    if not isinstance(gradient, DTensor):
        return ()
    mesh = gradient.device_mesh
    return tuple(
        mesh.get_group(dim)
        for dim, place in enumerate(gradient.placements)
        if not place.is_replicate()
    )
