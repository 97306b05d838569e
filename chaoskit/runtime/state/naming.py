"""The names of a stored state, for whoever reads it without chaoskit: those of ``state_dict()``, joined with dots.

In memory a tensor of an optimizer is known by the number of its parameter, in a store by the parameter's name.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from chaoskit.runtime.state.registered import MODEL, OPTIMIZER

#: Of the object with all numbers beside the tensors: learning rates, schedulers, the step.
SCALARS = "scalars"
_STORED_MODEL, _STORED_OPTIMIZER = "model.", "optimizer.state."


def stored_name(path: str, parameters: Sequence[str]) -> str:
    """The name under which ``path`` is stored: ``model.head.weight``, ``optimizer.state.head.weight.exp_avg``.

    Args:
        parameters: their names, in the order of the optimizers; "" for one that has none, which keeps its number.
    """
    if path.startswith(MODEL):
        return _STORED_MODEL + path.removeprefix(MODEL)
    number, _, key = path.removeprefix(OPTIMIZER).partition("/")
    name = parameters[int(number)] if int(number) < len(parameters) else ""
    return f"{_STORED_OPTIMIZER}{name or number}.{key}"


def path_of(name: str, parameters: Sequence[str]) -> str:
    """The path of a tensor by its stored name; one that is not of this state gets a path that nothing has."""
    if name.startswith(_STORED_MODEL):
        return MODEL + name.removeprefix(_STORED_MODEL)
    parameter, _, key = name.removeprefix(_STORED_OPTIMIZER).rpartition(".")
    number = parameters.index(parameter) if parameter in parameters else parameter
    return f"{OPTIMIZER}{number}/{key}"


def parameter_names(scalars: bytes) -> list[str]:
    """The names that a state's numbers tell."""
    found: list[str] = msgspec.msgpack.decode(scalars).get("names", [])
    return found


def encode_scalars(scalars: bytes, step: int) -> bytes:
    """The numbers of a state as an object that ``torch.load(weights_only=True)`` reads."""
    target = io.BytesIO()
    numbers: dict[str, Any] = msgspec.msgpack.decode(scalars, strict=False)
    torch.save({"step": step, **numbers}, target)
    return target.getvalue()


def decode_scalars(data: bytes) -> bytes:
    """The reverse of :func:`encode_scalars`."""
    numbers: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    return msgspec.msgpack.encode(numbers)
