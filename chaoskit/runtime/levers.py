"""What a worker does to itself when a fault orders it: the in-process faults, and reports read back from the target."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from chaoskit.errors import ChaoskitError

Report = Callable[[bool, str], None]


class InjectedError(Exception):
    """Raised in a worker by the fault ``Raise``."""


def pull(act: str, options: dict[str, Any], model: nn.Module, report: Report) -> None:
    """Do ``act``. ``report(effective, observed)`` is called with what the target shows afterwards.

    Raises:
        InjectedError: for the act ``raise``.
    """
    if act == "none":
        return
    if act == "raise":
        report(True, f"raising InjectedError({options['message']!r})")
        raise InjectedError(options["message"])
    if act == "hold_gil":
        ctypes.PyDLL(None).pause()  # PyDLL calls native code without releasing the GIL; pause() never returns
    elif act == "spin":
        _spin()
    elif act == "nan":
        Poison(model, options, report).arm()
    else:
        raise ChaoskitError(f"unknown lever {act!r}")


def _spin() -> None:
    counter = 0
    while True:
        counter += 1


class Poison:
    """Writes one NaN into a weight, a gradient or an activation: once, or every time (``sticky``)."""

    def __init__(self, model: nn.Module, options: dict[str, Any], report: Report) -> None:
        self._where: str = options["where"]
        self._name: str = options["parameter"]
        self._sticky: bool = options["sticky"]
        self._report = report
        self._parameter = self._find(model)
        self._module = model.get_submodule(self._name.rpartition(".")[0])
        self._handle: Any = None

    def _find(self, model: nn.Module) -> nn.Parameter:
        found = dict(model.named_parameters()).get(self._name)
        if found is None:
            raise ChaoskitError(f"NaN(parameter={self._name!r}): the model has no such parameter")
        return found

    def arm(self) -> None:
        """Poison the weight now, or the gradient or activation as soon as it is computed."""
        if self._where == "weight":
            with torch.no_grad():
                self._poison(self._parameter.data)
        elif self._where == "gradient":
            self._handle = self._parameter.register_hook(self._on_gradient)  # before anybody can read it
        else:
            self._handle = self._module.register_forward_hook(self._on_activation)

    def _on_gradient(self, gradient: Tensor) -> Tensor:
        poisoned = gradient.clone()
        self._poison(poisoned)
        self._disarm()
        return poisoned

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
        tensor.view(-1)[0] = float("nan")
        after = _non_finite(tensor)
        self._report(after > before, f"{self._where} of {self._name}: {before} non-finite values before, {after} after")


def _non_finite(tensor: Tensor) -> int:
    return int((~torch.isfinite(tensor)).sum())
