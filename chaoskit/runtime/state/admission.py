"""The conditions for registered objects.

Objects that cannot give the same bits at every world size are refused, with the reason.

-> state/parameter_watch.py and state/buffers.py: what a loop body must not do with them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from chaoskit.errors import BadInput


def require_model(model: nn.Module) -> None:
    """Refuse a model that cannot be trained exactly.

    Raises:
        BadInput: naming the module or parameter, and the remedy.
    """
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise BadInput(
            "model",
            type(model).__name__,
            "register the model itself (.module): the trainer reduces the gradients",
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            remedy = "use BatchNorm: statistics of a shard are the same at every world size, those of a world are not"
            raise BadInput("model", name or type(module).__name__, remedy)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise BadInput(
                "model", name, "run one batch through the model first: this tensor has no shape yet"
            )
    trained = [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    if not trained:
        raise BadInput(
            "model", type(model).__name__, "register a model with at least one trainable parameter"
        )
    for name, parameter in trained:
        if parameter.device != trained[0][1].device:
            raise BadInput(
                "model",
                name,
                f"move the whole model to {trained[0][1].device}: it is on several devices",
            )
        if not parameter.is_floating_point():
            raise BadInput("model", name, f"use a real floating-point type, not {parameter.dtype}")


def require_optimizers(optimizers: Sequence[Any], model: nn.Module) -> None:
    """Refuse an optimizer that cannot be run, or that trains parameters outside of the model.

    Raises:
        BadInput: naming the optimizer, and the remedy.
    """
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    in_model = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        name = type(optimizer).__name__
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not owned & trained:
            raise BadInput(
                "optimizer", name, "build the optimizer from the parameters of the registered model"
            )
        if owned - in_model:
            remedy = "register one module that holds all of its parameters (nn.ModuleList): some are not in the model"
            raise BadInput("optimizer", name, remedy)
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            remedy = (
                "use an optimizer that needs no closure: it would compute the loss while other "
                "ranks wait in a commit"
            )
            raise BadInput("optimizer", name, remedy)


def require_schedulers(schedulers: Sequence[Any]) -> None:
    """Refuse a scheduler that needs a metric, or that computes in tensors.

    Raises:
        BadInput: naming the scheduler, and the remedy.
    """
    for scheduler in schedulers:
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            remedy = "use a schedule over steps: a metric must be the same on every rank and for every late joiner"
            raise BadInput("scheduler", type(scheduler).__name__, remedy)
        for group in getattr(getattr(scheduler, "optimizer", None), "param_groups", ()):
            if isinstance(group["lr"], Tensor):
                remedy = (
                    f"use lr={float(group['lr']):g}, a number: schedules are restored as numbers"
                )
                raise BadInput("scheduler", type(scheduler).__name__, remedy)


def require_dense(name: str, gradient: Tensor | None) -> None:
    """Refuse a gradient that does not fit into a flat buffer.

    Raises:
        BadInput: naming the parameter, and the remedy.
    """
    if gradient is not None and gradient.layout != torch.strided:
        raise BadInput(
            "model",
            name,
            f"use a dense gradient (sparse=False), not one of layout {gradient.layout}",
        )
