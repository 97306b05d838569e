"""Sums of gradients in a fixed order, with a health check and a checksum, at memory speed.

-> reduction/tree.py: the order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from chaoskit.runtime.reduction.tree import Merge, Subtree

#: The number of elements that are added, checked and hashed while they are in a CPU's cache.
BLOCK = 1 << 16


def block_size(tensor: Tensor) -> int:
    """Return the number of elements to process at once: an accelerator needs few large kernels."""
    return BLOCK if tensor.device.type == "cpu" else max(tensor.numel(), 1)


class OrderedSum:
    """Adds tensors in the order of ``merges``. The inputs are not changed.

    Args:
        inputs: names of the tensors to be added.
        merges: additions, operands before their parent; the last one gives the result. Empty for a
            single input.
    """

    def __init__(self, inputs: Sequence[Subtree], merges: Sequence[Merge]) -> None:
        self._inputs = tuple(inputs)
        slots = {name: slot for slot, name in enumerate(self._inputs)}
        self._scratch_count = 0
        self._steps: list[tuple[int, int, int]] = []
        for merge in merges:
            left, right = slots[merge.left], slots[merge.right]
            if max(left, right) < len(self._inputs):
                slots[merge.parent] = len(self._inputs) + self._scratch_count
                self._scratch_count += 1
            else:
                slots[merge.parent] = left if left >= len(self._inputs) else right
            self._steps.append((left, right, slots[merge.parent]))
        if self._steps:
            self._steps[-1] = (*self._steps[-1][:2], -1)
        self._scratch: list[Tensor] = []

    def run(
        self, inputs: Mapping[Subtree, Tensor], out: Tensor, look: Callable[[Tensor], None]
    ) -> None:
        """Write the sum to ``out``, and pass each finished block to ``look``.

        Args:
            inputs: the flat tensors, by name.
            out: a flat tensor as long as every input.
        """
        size = block_size(out)
        if self._scratch_count and (not self._scratch or self._scratch[0].numel() < size):
            self._scratch = [out.new_zeros(size) for _ in range(self._scratch_count)]
        sources = [inputs[name] for name in self._inputs]
        for start in range(0, out.numel(), size):
            block = out[start : start + size]
            slots = [source[start : start + size] for source in sources]
            slots += [scratch[: block.numel()] for scratch in self._scratch]
            slots.append(block)
            for left, right, target in self._steps:
                torch.add(slots[left], slots[right], out=slots[target])
            if not self._steps:
                block.copy_(slots[0])
            look(block)


class GradientProbe:
    """The health and the checksum of gradients that are seen block by block.

    The sum over a block is not finite if one element is not, and takes a tenth of the time of
    testing each. It may overflow although all are finite, so it can only prove that elements are
    finite. The checksum adds the bits as 8-byte words, wrapping around, so the order of the blocks
    does not matter.
    """

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._words: list[Tensor] = []

    def see(self, block: Tensor) -> None:
        """Include a block in :meth:`surely_finite` and in :meth:`checksum`."""
        self.see_values(block)
        self._words.append(block.view(torch.int64).sum())

    def see_values(self, block: Tensor) -> None:
        """Include a block in :meth:`surely_finite` only."""
        self._sums.append(block.sum())

    def surely_finite(self) -> bool:
        """Return True if all elements are certainly finite. False proves nothing."""
        return not self._sums or bool(torch.stack(self._sums).isfinite().all())

    def checksum(self) -> int:
        """Return the checksum of the blocks, as an int64; 0 without blocks."""
        return int(torch.stack(self._words).sum()) if self._words else 0


def all_finite(tensor: Tensor) -> bool:
    """Return whether every element is finite, by testing each: slow, and exact."""
    return bool(tensor.isfinite().all())
