"""The places where the tensors of a state were last found.

Comparing identities shows cheaply that none has moved.

-> state/replica.py moves tensors into shared memory that are in no such place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from chaoskit.runtime.state.held_objects import HeldObjects, are_identical


class Homes:
    """The tensors of a model and its optimizers, by identity and address, in their places.

    Args:
        committed: tensors that replace buffers of the model in the state.

    Attributes:
        tensors: all tensors, and the buffers that have replacements.
        addresses: their addresses.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], committed: Mapping[str, Tensor]
    ) -> None:
        self._containers: list[Collection[Any]] = []
        self._optimizers = [
            (optim, optim.state, optim.param_groups, _parameters(optim)) for optim in optimizers
        ]
        for module in model.modules():
            for container in (module._parameters, module._buffers, module._modules):
                self._hold(container)
        self._hold(committed)
        for optimizer in optimizers:
            self._hold(optimizer.state)
            for state in optimizer.state.values():
                self._hold_nested(state)
        self._objects = HeldObjects(self._containers)
        self.tensors = [tensor for tensor in self._objects.objects if isinstance(tensor, Tensor)]
        self.addresses = _addresses(self.tensors)

    def _hold(self, container: Mapping[Any, Any] | Sequence[Any]) -> None:
        self._containers.append(_values(container))  # the view of a mapping shows later changes

    def _hold_nested(self, container: Any) -> None:
        """Remember a value of an optimizer's state, and the containers in it."""
        if isinstance(container, (dict, list, tuple)):
            self._hold(container)
            for nested in _values(container):
                self._hold_nested(nested)

    def are_unchanged(self) -> bool:
        """Return whether all objects are the same, at the same addresses.

        False does not mean that a tensor has moved.
        """
        return (
            all(
                optim.state is state
                and optim.param_groups is groups
                and are_identical(_parameters(optim), owned)
                for optim, state, groups, owned in self._optimizers
            )
            and self._objects.are_same()
            and _addresses(self.tensors) == self.addresses
        )


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _values(container: Mapping[Any, Any] | Sequence[Any]) -> Collection[Any]:
    return container.values() if isinstance(container, Mapping) else container


def _addresses(tensors: Iterable[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))
