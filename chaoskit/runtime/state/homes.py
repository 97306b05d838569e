"""Where the tensors of a state were found last: a look at the same objects tells, cheaply, that none has moved."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from chaoskit.runtime.state.held_objects import HeldObjects, are_identical


class Homes:
    """The tensors of a model and its optimizers, by identity and address, when they all were in their places.

    Args:
        committed: tensors that stand for buffers of the model.

    Attributes:
        tensors, addresses: all of them, and the buffers for which others stand.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], committed: Mapping[str, Tensor]
    ) -> None:
        self._held: list[Collection[Any]] = []
        self._optimizers = [
            (one, one.state, one.param_groups, _parameters(one)) for one in optimizers
        ]
        for module in model.modules():
            for held in (module._parameters, module._buffers, module._modules):
                self._hold(held)
        self._hold(committed)
        for optimizer in optimizers:
            self._hold(optimizer.state)
            for state in optimizer.state.values():
                self._hold_nested(state)
        self._objects = HeldObjects(self._held)
        self.tensors = [value for value in self._objects.objects if isinstance(value, Tensor)]
        self.addresses = _addresses(self.tensors)

    def _hold(self, held: Mapping[Any, Any] | Sequence[Any]) -> None:
        self._held.append(_values(held))  # of a mapping a view, which follows it

    def _hold_nested(self, held: Any) -> None:
        """Hold a value of an optimizer's state, and the containers in it."""
        if isinstance(held, (dict, list, tuple)):
            self._hold(held)
            for value in _values(held):
                self._hold_nested(value)

    def are_unchanged(self) -> bool:
        """Whether all objects are still the same, at the same addresses. False does not mean that one has moved."""
        return (
            all(
                one.state is state
                and one.param_groups is groups
                and are_identical(_parameters(one), parameters)
                for one, state, groups, parameters in self._optimizers
            )
            and self._objects.are_same()
            and _addresses(self.tensors) == self.addresses
        )


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _values(held: Mapping[Any, Any] | Sequence[Any]) -> Collection[Any]:
    return held.values() if isinstance(held, Mapping) else held


def _addresses(tensors: Iterable[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))
