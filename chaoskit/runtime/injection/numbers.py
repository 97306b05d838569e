"""Acts on numbers: one NaN, or one flipped bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from chaoskit.errors import BadInput
from chaoskit.runtime.injection.context import InjectionContext, Report
from chaoskit.runtime.state.registered import Registered
from chaoskit.runtime.state.sharding import is_sharded, local_part

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def poison(context: InjectionContext, options: dict[str, Any]) -> None:
    """Write a NaN; see :class:`Poison`."""
    Poison(context.replica.model, options, context.report).arm()


def poison_snapshot(context: InjectionContext, options: dict[str, Any]) -> None:
    """Write a NaN into the state that this step commits, before it is copied anywhere."""
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
        told = f"{what}, as committed by step {context.step}: {before} non-finite values before, {after} after"
        context.report(after > before, told)

    context.injected.on_updated.append(act)


def _optimizer_state(replica: Registered, parameter: nn.Parameter, key: str) -> Tensor:
    """A tensor of the optimizer's state. Raises BadInput if there is none of that name."""
    states = [optimizer.state.get(parameter, {}) for optimizer in replica.optimizers]
    state: dict[str, Any] = next((state for state in states if state), {})
    found = state.get(key)
    if not isinstance(found, Tensor):
        there = ", ".join(key for key, value in state.items() if isinstance(value, Tensor))
        raise BadInput(
            "key", key, f"use one of {there}" if there else "strike after the first step"
        )
    return found


def flip_bit(context: InjectionContext, options: dict[str, Any]) -> None:
    """Flip a bit; see :class:`BitFlipper`."""
    BitFlipper(context, options).arm()


def _find(model: nn.Module, name: str) -> tuple[str, nn.Parameter]:
    """Return the parameter of that name; for an empty name the first one that is trained."""
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


class Poison:
    """Writes one NaN into a weight, a gradient or an activation: once, or every time (``sticky``).

    No version counter of a weight notices it.
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
        elif self._where == "gradient" and is_sharded(
            [self._parameter]
        ):  # whose own hooks are not asked
            self._handle = self._parameter.register_post_accumulate_grad_hook(self._on_accumulated)
        elif self._where == "gradient":
            self._handle = self._parameter.register_hook(
                self._on_gradient
            )  # before anybody can read it
        else:
            self._handle = self._module.register_forward_hook(self._on_activation)

    def _on_gradient(self, gradient: Tensor) -> Tensor:
        poisoned = gradient.clone()
        self._poison(poisoned)
        self._disarm()
        return poisoned

    def _on_accumulated(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._poison(local_part(parameter.grad)[0])
        self._disarm()

    def _on_activation(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        poisoned = output.clone()
        self._poison(poisoned.detach())
        self._disarm()
        return poisoned

    def _disarm(self) -> None:
        if not self._sticky:
            self._handle.remove()

    def _poison(self, tensor: Tensor) -> None:
        before = _non_finite(tensor)
        tensor[(0,) * tensor.dim()] = float("nan")  # whatever the strides
        after = _non_finite(tensor)
        self._report(
            after > before,
            f"{self._where} of {self._name}: {before} non-finite values before, {after} after",
        )


def _non_finite(tensor: Tensor) -> int:
    return int((~torch.isfinite(tensor)).sum())


class BitFlipper:
    """Flips one bit of one element, and nothing else: no version counter, no sequence lock notices it.

    In a weight or in the optimizer's state at once; in a gradient when the next backward pass has computed it, before
    anybody can read it; in what was received when the next reduction is over, on this rank only. ``sticky``: every time
    that a gradient is computed or received from then on.

    Raises:
        BadInput: if there is no such parameter, element, bit or state.
    """

    def __init__(self, context: InjectionContext, options: dict[str, Any]) -> None:
        self._replica: Registered = context.replica
        self._rig, self._report = context.injected, context.report
        self._where: str = options["where"]
        self._key: str = options["key"]
        self._bit: int = options["bit"]
        self._element: int = options["element"]
        self._sticky: bool = options["sticky"]
        self._name, self._parameter = _find(self._replica.model, options["parameter"])
        self._handle: Any = None
        self._check(self._target_now())

    def _target_now(self) -> Tensor:
        """The tensor, or one of its shape and type where it does not exist yet."""
        return local_part(self._state() if self._where == "optimizer" else self._parameter)[0].data

    def _state(self) -> Tensor:
        return _optimizer_state(self._replica, self._parameter, self._key)

    def _check(self, tensor: Tensor) -> None:
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
        """Flip now, or leave it to the moment when the value is there."""
        if self._where == "gradient" and is_sharded(
            [self._parameter]
        ):  # whose own hooks are not asked
            self._handle = self._parameter.register_post_accumulate_grad_hook(self._on_accumulated)
        elif self._where == "gradient":
            self._handle = self._parameter.register_hook(self._on_gradient)
        elif self._where == "received":
            self._rig.on_received.append(self._on_received)
        else:
            self._flip(self._target_now())

    def _on_gradient(self, gradient: Tensor) -> Tensor:
        flipped = gradient.clone()
        self._flip(flipped)
        if not self._sticky:
            self._handle.remove()
        return flipped

    def _on_accumulated(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._flip(local_part(parameter.grad)[0])
        if not self._sticky:
            self._handle.remove()

    def _on_received(self, gradients: list[Tensor]) -> None:
        if not self._sticky:
            self._rig.on_received.remove(self._on_received)
        number = next(
            n for n, other in enumerate(self._replica.parameters) if other is self._parameter
        )
        self._flip(gradients[number])

    def _flip(self, tensor: Tensor) -> None:
        before, was = _read(tensor, self._element)
        _write(tensor, self._element, before ^ (1 << self._bit))
        after, now = _read(tensor, self._element)
        name = (
            f"{self._key} of {self._name}"
            if self._where == "optimizer"
            else f"{self._where} of {self._name}"
        )
        digits = 2 * tensor.element_size()
        seen = f"element {self._element}: 0x{before:0{digits}x} ({was:g}) before, 0x{after:0{digits}x} ({now:g}) after"
        self._report(before ^ after == 1 << self._bit, f"{name}, {seen}")


def _cell(tensor: Tensor, element: int) -> Tensor:
    """The memory of one element, counted in row-major order whatever the strides: a view of shape (1,)."""
    offset, rest = int(tensor.storage_offset()), element
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        rest, index = divmod(rest, size)
        offset += index * stride
    return tensor.detach().as_strided((1,), (1,), offset)


def _read(tensor: Tensor, element: int) -> tuple[int, float]:
    """The bits of one element as an unsigned number, and its value."""
    cell = _cell(tensor, element)
    bits = 8 * tensor.element_size()
    return int(cell.view(_WORDS[tensor.element_size()])) % (1 << bits), float(cell)


def _write(tensor: Tensor, element: int, word: int) -> None:
    bits = 8 * tensor.element_size()
    signed = word - (1 << bits) if bits > 8 and word >> (bits - 1) else word
    _cell(tensor, element).view(_WORDS[tensor.element_size()]).fill_(signed)
