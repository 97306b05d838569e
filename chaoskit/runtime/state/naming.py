"""The names of a stored state: those of ``state_dict()``, joined with dots, for all readers.

In memory, a tensor of an optimizer is named by the number of its parameter. In a store, it is named
by the parameter's name.

-> daemon/saving.py writes stored snapshots; state/from_store.py reads them.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from chaoskit.runtime.state.registered import MODEL, OPTIMIZER

#: The name of the object with all numbers: learning rates, schedulers, the step.
SCALARS = "scalars"
_STORED_MODEL, _STORED_OPTIMIZER = "model.", "optimizer.state."


def stored_name(path: str, parameters: Sequence[str]) -> str:
    """Return the name under which the tensor of a path is stored.

    Examples are ``model.head.weight`` and ``optimizer.state.head.weight.exp_avg``.

    Args:
        parameters: the names of the parameters, in the order of the optimizers; "" for a parameter
            without a name, which keeps its number.
    """
    if path.startswith(MODEL):
        return _STORED_MODEL + path.removeprefix(MODEL)
    number, _, key = path.removeprefix(OPTIMIZER).partition("/")
    name = parameters[int(number)] if int(number) < len(parameters) else ""
    return f"{_STORED_OPTIMIZER}{name or number}.{key}"


def path_of(name: str, parameters: Sequence[str]) -> str:
    """Return the path of a tensor, given its stored name.

    A tensor that is not in this state gets a path that no tensor has.
    """
    if name.startswith(_STORED_MODEL):
        return MODEL + name.removeprefix(_STORED_MODEL)
    parameter, _, key = name.removeprefix(_STORED_OPTIMIZER).rpartition(".")
    number = parameters.index(parameter) if parameter in parameters else parameter
    return f"{OPTIMIZER}{number}/{key}"


def parameter_names(scalars: bytes) -> list[str]:
    """Return the parameter names in encoded numbers, in the order of the optimizers.

    The list is empty if the numbers have no names.
    """
    names: list[str] = msgspec.msgpack.decode(scalars).get("names", [])
    return names


def encode_scalars(scalars: bytes, step: int) -> bytes:
    """Return the numbers of a state as an object that ``torch.load(weights_only=True)`` reads."""
    target = io.BytesIO()
    numbers: dict[str, Any] = msgspec.msgpack.decode(scalars, strict=False)
    torch.save({"step": step, **numbers}, target)
    return target.getvalue()


def decode_scalars(data: bytes) -> bytes:
    """Return the numbers that :func:`encode_scalars` was given."""
    numbers: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    return msgspec.msgpack.encode(numbers)
