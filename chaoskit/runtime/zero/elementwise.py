"""Whether an optimizer treats every element for itself: only then can ranks share out the rows of a parameter."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from chaoskit.errors import BadInput

_SHAPE, _CUT, _STEPS = (5, 21), 2, 3  # neither part is a multiple of what a CPU computes at once
_LR = 0.1
_REMEDY = "use one that treats each element for itself (SGD, Adam, AdamW, Lion), or train without ZeroOptimizer"


def require_elementwise(kind: type[Optimizer], options: dict[str, Any], device: torch.device) -> frozenset[str]:
    """Try it: a few steps on a small tensor must give the same bits as the same steps on two parts of it.

    Returns:
        What it remembers of a parameter as a plain number, and not in a tensor.

    Raises:
        BadInput: if they do not, or if it cannot take a step on one tensor.
    """
    name = kind.__name__
    options = {key: copy.deepcopy(value) for key, value in options.items()}
    if not options.get("lr", 1.0):  # of a schedule that begins with 0: nothing would move
        options["lr"] = _LR
    weights = torch.linspace(-1.0, 1.0, _SHAPE[0] * _SHAPE[1], device=device).view(_SHAPE)
    with torch.random.fork_rng(devices=[]):
        try:
            (whole,), numbers = _train(kind, options, [weights])
            parts, _ = _train(kind, options, [weights[:_CUT], weights[_CUT:]])
        except Exception as error:
            raise BadInput("optimizer", name, f"{_REMEDY}: it failed with {error}") from error
    if not torch.equal(whole, torch.cat(parts)):
        raise BadInput("optimizer", name, f"{_REMEDY}: this one looks at tensors as a whole")
    return numbers


def _train(
    kind: type[Optimizer], options: dict[str, Any], tensors: Sequence[Tensor]
) -> tuple[list[Tensor], frozenset[str]]:
    parameters = [nn.Parameter(tensor.clone()) for tensor in tensors]
    optimizer = kind(parameters, **copy.deepcopy(options))
    for step in range(_STEPS):
        for parameter in parameters:
            parameter.grad = torch.sin(parameter.detach() * (step + 3))
        optimizer.step()
    state = optimizer.state[parameters[0]].items()
    numbers = frozenset(key for key, value in state if isinstance(value, (int, float)) and not isinstance(value, bool))
    return [parameter.detach() for parameter in parameters], numbers
