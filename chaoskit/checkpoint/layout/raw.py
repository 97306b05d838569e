"""The bytes of a tensor, where they are."""

from __future__ import annotations

import torch
from torch import Tensor

from chaoskit.errors import BadInput


def flat_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, as a row of bytes."""
    row = tensor.as_strided(
        (tensor.numel(),), (1,)
    )  # reshape keeps the odd stride of a single element
    return row.view(torch.uint8)


def tensor_bytes(tensor: Tensor, path: str) -> memoryview:
    """The bytes of a tensor, in order; a copy only where they lie elsewhere or in another order.

    Raises:
        BadInput: if there are none, as in a sparse tensor. ``path`` is the name it has for the user.
    """
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise BadInput(
            path, f"{tensor.dtype}, {tensor.layout}", "store dense tensors; convert this one first"
        )
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return flat_bytes(dense).numpy().data
