"""What one rank updates of one parameter, and what it remembers of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from chaoskit.checkpoint.layout import whole
from chaoskit.runtime.zero.cut import Slice


class Rows:
    """Of one parameter.

    Args:
        weights, gradient: flat memory of the rows, and of their part of the summed gradient.
        numbers: what the optimizer remembers as plain numbers. Here these are tensors: they are stored with the
            parameter, whoever has it next.

    Attributes:
        number: of the parameter.
        parameter: the whole.
        memory: the rows, in the parameter's own memory. Its ``grad`` is the gradient to be used.
        box: where they are in the parameter.
        unit: see :class:`chaoskit.runtime.zero.cut.Slice`.
    """

    def __init__(
        self, parameter: nn.Parameter, place: Slice, weights: Tensor, gradient: Tensor, numbers: frozenset[str]
    ) -> None:
        self.number, self.box, self.unit = place.number, place.box, place.unit
        self.parameter = parameter
        self.memory = nn.Parameter(weights.view(place.box.extent), parameter.requires_grad)
        self._gradient = gradient.view(place.box.extent)
        self._numbers = numbers

    def take_gradient(self, present: bool) -> None:
        """Have the inner optimizer see the gradient, or that there is none."""
        self.memory.grad = self._gradient.to(self.memory.dtype) if present else None

    def lend(self, state: dict[str, Any]) -> dict[str, Any]:
        """What is remembered, as the optimizer wants it."""
        return {key: value.item() if key in self._numbers else value for key, value in state.items()}

    def take_back(self, state: dict[str, Any], lent: dict[str, Any]) -> None:
        """Update ``state`` by what the optimizer remembers now."""
        for key, value in lent.items():
            if key in self._numbers and key in state:
                state[key].fill_(value)  # the same tensor: copies are made of it
            else:
                state[key] = self._as_tensor(key, value)

    def cut_out(self, state: dict[str, Any]) -> dict[str, Any]:
        """Of what is remembered of the whole parameter, what belongs to these rows."""
        index = self.box.within(whole(tuple(self.parameter.shape)))
        found: dict[str, Any] = {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                found[key] = (value.detach()[index] if value.dim() else value.detach()).clone()
            else:
                found[key] = self._as_tensor(key, value)
        return found

    def _as_tensor(self, key: str, value: Any) -> Any:
        if key not in self._numbers or isinstance(value, Tensor):
            return value
        return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)
