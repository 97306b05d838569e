"""Sums of gradients in a fixed order, with a health check and a checksum, at memory speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from chaoskit.runtime.reduction.tree import Merge, Subtree

#: Elements that are added, checked and hashed while they are in a CPU's cache.
BLOCK = 1 << 16


def block_size(tensor: Tensor) -> int:
    """The stride in which ``tensor`` is best walked: an accelerator wants few large kernels."""
    return BLOCK if tensor.device.type == "cpu" else max(tensor.numel(), 1)


class OrderedSum:
    """Adds tensors in the order of ``merges``; the inputs stay as they are.

    Args:
        inputs: names of the tensors to be added.
        merges: additions, operands before their parent; the last one gives the result. None for a single input.
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
        """Write the sum to ``out``, a flat tensor as long as every input, and show each finished block to ``look``."""
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


class Probe:
    """Says of gradients seen block by block whether they are finite, and what their checksum is.

    A sum over a block is not finite if one element is not, and costs a tenth of looking at each. It may overflow
    though all are finite: so it acquits, and accuses nobody. The checksum adds the bits as 8-byte words, wrapping
    around: whatever the order of the blocks, it is the same.
    """

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._words: list[Tensor] = []

    def see(self, block: Tensor) -> None:
        self.see_values(block)
        self._words.append(block.view(torch.int64).sum())

    def see_values(self, block: Tensor) -> None:
        """Look at the health of a block only."""
        self._sums.append(block.sum())

    def surely_finite(self) -> bool:
        return not self._sums or bool(torch.stack(self._sums).isfinite().all())

    def checksum(self) -> int:
        return int(torch.stack(self._words).sum()) if self._words else 0


def all_finite(tensor: Tensor) -> bool:
    """Whether every element is finite. Looks at each: slow, and never wrong."""
    return bool(tensor.isfinite().all())
