"""Access to the bytes of a tensor in place."""

from __future__ import annotations

import torch
from torch import Tensor

from chaoskit.errors import BadInput


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor, as a row of bytes."""
    # reshape keeps the odd stride of a single element
    row = tensor.as_strided((tensor.numel(),), (1,))
    return row.view(torch.uint8)


def tensor_bytes(tensor: Tensor, path: str) -> memoryview:
    """Return the bytes of a tensor, in order. They are copied only from a device or another order.

    Args:
        path: name of the tensor for the user.

    Raises:
        BadInput: if the tensor has no dense bytes, such as a sparse one.
    """
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise BadInput(
            path, f"{tensor.dtype}, {tensor.layout}", "store dense tensors; convert this one first"
        )
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return flat_bytes(dense).numpy().data
