"""Acts on numbers: one NaN, or one flipped bit.

-> faults/numbers/numeric.py, faults/numbers/bits.py and faults/storage/poison.py order them.
integrity/nonfinite_guard.py and integrity/rank_checks.py find them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from chaoskit.errors import BadInput
from chaoskit.runtime.injection.context import InjectionContext, Report
from chaoskit.runtime.state.registered import Registered
from chaoskit.runtime.state.sharding import is_sharded, local_part

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


def poison(context: InjectionContext, options: dict[str, Any]) -> None:
    """Write a NaN into a weight now, or into the next gradient or activation (:class:`Poison`).

    Raises:
        BadInput: if the model has no parameter that the options name.
    """
    Poison(context.replica.model, options, context.report).arm()


def poison_snapshot(context: InjectionContext, options: dict[str, Any]) -> None:
    """Write a NaN into the state that this step commits, before it is copied.

    The step raises BadInput if the optimizer then has no state that the options name.

    Raises:
        BadInput: if the model has no parameter that the options name.
    """
    where, key = options["where"], options["key"]
    name, parameter = _find(context.replica.model, options["parameter"])

    def act() -> None:
        context.injected.on_updated.remove(act)
        whole = (
            _optimizer_state(context.replica, parameter, key)
            if where == "optimizer"
            else parameter.data
        )
        tensor = local_part(whole)[0]
        before = _non_finite(tensor)
        with torch.no_grad():
            tensor[(0,) * tensor.dim()] = float("nan")
        after = _non_finite(tensor)
        what = f"{key} of {name}" if where == "optimizer" else f"weight {name}"
        observed = f"{what}, as committed by step {context.step}: {before} non-finite values before, {after} after"
        context.report(after > before, observed)

    context.injected.on_updated.append(act)


def _optimizer_state(replica: Registered, parameter: nn.Parameter, key: str) -> Tensor:
    """Return a tensor of the optimizer's state. Raise BadInput if none has that name."""
    states = [optimizer.state.get(parameter, {}) for optimizer in replica.optimizers]
    state: dict[str, Any] = next((state for state in states if state), {})
    tensor = state.get(key)
    if not isinstance(tensor, Tensor):
        keys = ", ".join(key for key, held in state.items() if isinstance(held, Tensor))
        raise BadInput("key", key, f"use one of {keys}" if keys else "strike after the first step")
    return tensor


def flip_bit(context: InjectionContext, options: dict[str, Any]) -> None:
    """Flip a bit of the state now, or of the next gradient or result (:class:`BitFlipper`).

    Raises:
        BadInput: as :class:`BitFlipper`.
    """
    BitFlipper(context, options).arm()


def _find(model: nn.Module, name: str) -> tuple[str, nn.Parameter]:
    """Return the parameter ``name`` with its name; for an empty name the first trained one.

    Raises:
        BadInput: if the model has no such parameter.
    """
    parameters = dict(model.named_parameters())
    name = name or next(
        (name for name, parameter in parameters.items() if parameter.requires_grad), ""
    )
    if name not in parameters:
        raise BadInput(
            "parameter",
            name,
            f"use the name of a parameter of the model, such as {', '.join([*parameters][:4])}",
        )
    return name, parameters[name]


def _local_gradient(parameter: Tensor) -> Tensor:
    """Return this rank's part of the gradient that autograd has just accumulated."""
    if parameter.grad is None:
        raise RuntimeError("autograd has accumulated no gradient")
    return local_part(parameter.grad)[0]


class Poison:
    """Writes one NaN into a weight, a gradient or an activation: once, or every time (``sticky``).

    A weight is poisoned once in any case. Its version counter does not change.

    Raises:
        BadInput: if the model has no parameter that the options name.
    """

    def __init__(self, model: nn.Module, options: dict[str, Any], report: Report) -> None:
        self._where: str = options["where"]
        self._sticky: bool = options["sticky"]
        self._report = report
        self._name, self._parameter = _find(model, options["parameter"])
        self._module = model.get_submodule(self._name.rpartition(".")[0])
        self._handle: Any = None

    def arm(self) -> None:
        """Poison the weight now, or the gradient or activation as soon as it is computed."""
        if self._where == "weight":
            with torch.no_grad():
                self._poison(local_part(self._parameter)[0].data)
        elif self._where == "gradient" and is_sharded([self._parameter]):  # has no plain hooks
            self._handle = self._parameter.register_post_accumulate_grad_hook(self._on_accumulated)
        elif self._where == "gradient":
            self._handle = self._parameter.register_hook(self._on_gradient)  # before it is read
        else:
            self._handle = self._module.register_forward_hook(self._on_activation)

    def _on_gradient(self, gradient: Tensor) -> Tensor:
        poisoned = gradient.clone()
        self._poison(poisoned)
        self._disarm()
        return poisoned

    def _on_accumulated(self, parameter: Tensor) -> None:
        self._poison(_local_gradient(parameter))
        self._disarm()

    def _on_activation(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        poisoned = output.clone()
        self._poison(poisoned.detach())
        self._disarm()
        return poisoned

    def _disarm(self) -> None:
        """Remove the hook, unless every number is to be poisoned."""
        if not self._sticky:
            self._handle.remove()

    def _poison(self, tensor: Tensor) -> None:
        """Write a NaN into the first element, and report the counts before and after."""
        before = _non_finite(tensor)
        tensor[(0,) * tensor.dim()] = float("nan")  # works with any strides
        after = _non_finite(tensor)
        self._report(
            after > before,
            f"{self._where} of {self._name}: {before} non-finite values before, {after} after",
        )


def _non_finite(tensor: Tensor) -> int:
    """Return the number of elements that are not finite."""
    return int((~torch.isfinite(tensor)).sum())


class BitFlipper:
    """Flips one bit of one element, without changing a version counter or sequence lock.

    A weight or the optimizer's state is changed at once. A gradient is changed when the next
    backward pass has computed it, before other code reads it. Received data is changed after the
    next reduction, on this rank only. With ``sticky`` every later gradient or reduction is changed.

    Raises:
        BadInput: if there is no such parameter, element, bit or state, or the parameter has no
            gradient as it is not trained.
    """

    def __init__(self, context: InjectionContext, options: dict[str, Any]) -> None:
        self._replica: Registered = context.replica
        self._injected, self._report = context.injected, context.report
        self._where: str = options["where"]
        self._key: str = options["key"]
        self._bit: int = options["bit"]
        self._element: int = options["element"]
        self._sticky: bool = options["sticky"]
        self._name, self._parameter = _find(self._replica.model, options["parameter"])
        self._handle: Any = None
        self._check(self._target_now())

    def _target_now(self) -> Tensor:
        """Return the tensor, or one of its shape and type if it does not exist yet."""
        return local_part(self._state() if self._where == "optimizer" else self._parameter)[0].data

    def _state(self) -> Tensor:
        """Return the tensor of the optimizer's state that the options name."""
        return _optimizer_state(self._replica, self._parameter, self._key)

    def _check(self, tensor: Tensor) -> None:
        """Raise BadInput if the tensor lacks the element or the bit, or is not trained."""
        if self._element >= tensor.numel():
            raise BadInput(
                "element",
                self._element,
                f"use an element from 0 to {tensor.numel() - 1} of {self._name}",
            )
        if self._bit >= 8 * tensor.element_size():
            raise BadInput(
                "bit",
                self._bit,
                f"use a bit from 0 to {8 * tensor.element_size() - 1}: {tensor.dtype}",
            )
        if not self._parameter.requires_grad and self._where in ("gradient", "received"):
            raise BadInput(
                "parameter", self._name, "use a parameter that is trained: this one has no gradient"
            )

    def arm(self) -> None:
        """Flip the bit now, or when the number exists."""
        if self._where == "gradient" and is_sharded([self._parameter]):  # has no plain hooks
            self._handle = self._parameter.register_post_accumulate_grad_hook(self._on_accumulated)
        elif self._where == "gradient":
            self._handle = self._parameter.register_hook(self._on_gradient)
        elif self._where == "received":
            self._injected.on_received.append(self._on_received)
        else:
            self._flip(self._target_now())

    def _on_gradient(self, gradient: Tensor) -> Tensor:
        flipped = gradient.clone()
        self._flip(flipped)
        if not self._sticky:
            self._handle.remove()
        return flipped

    def _on_accumulated(self, parameter: Tensor) -> None:
        self._flip(_local_gradient(parameter))
        if not self._sticky:
            self._handle.remove()

    def _on_received(self, gradients: list[Tensor]) -> None:
        if not self._sticky:
            self._injected.on_received.remove(self._on_received)
        parameter_index = next(
            index
            for index, other in enumerate(self._replica.parameters)
            if other is self._parameter
        )
        self._flip(gradients[parameter_index])

    def _flip(self, tensor: Tensor) -> None:
        """Flip the bit of a tensor, and report the element before and after."""
        before, value_before = _read(tensor, self._element)
        _write(tensor, self._element, before ^ (1 << self._bit))
        after, value_after = _read(tensor, self._element)
        name = (
            f"{self._key} of {self._name}"
            if self._where == "optimizer"
            else f"{self._where} of {self._name}"
        )
        digits = 2 * tensor.element_size()
        bits = (
            f"element {self._element}: 0x{before:0{digits}x} ({value_before:g}) before, "
            f"0x{after:0{digits}x} ({value_after:g}) after"
        )
        self._report(before ^ after == 1 << self._bit, f"{name}, {bits}")


def _cell(tensor: Tensor, element: int) -> Tensor:
    """Return the memory of one element as a view of shape (1,).

    Elements are counted in row-major order, for any strides.
    """
    offset, rest = int(tensor.storage_offset()), element
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        rest, index = divmod(rest, size)
        offset += index * stride
    return tensor.detach().as_strided((1,), (1,), offset)


def _read(tensor: Tensor, element: int) -> tuple[int, float]:
    """Return the bits of one element as an unsigned number, and its value."""
    cell = _cell(tensor, element)
    bits = 8 * tensor.element_size()
    return int(cell.view(_WORDS[tensor.element_size()])) % (1 << bits), float(cell)


def _write(tensor: Tensor, element: int, word: int) -> None:
    """Set the bits of one element, given as an unsigned number."""
    bits = 8 * tensor.element_size()
    signed = word - (1 << bits) if bits > 8 and word >> (bits - 1) else word
    _cell(tensor, element).view(_WORDS[tensor.element_size()]).fill_(signed)
