"""An optimizer of which every rank has a part, wrapped around one of torch's, or of anybody's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from chaoskit.errors import BadInput
from chaoskit.runtime.admission import require_dense
from chaoskit.runtime.gradients import FlatLayout, LocalGradients
from chaoskit.runtime.zero.cut import cut, slices, unit_of
from chaoskit.runtime.zero.elementwise import require_elementwise
from chaoskit.runtime.zero.exchange import Exchange
from chaoskit.runtime.zero.rows import Rows
from chaoskit.runtime.zero.whole import gather

_EPSILON = 1e-6  # as in torch's clip_grad_norm_


class ZeroOptimizer(Optimizer):
    """ZeRO-1: gradients are summed to where their rows are updated, and the new weights are spread to all ranks.

    In a job of chaoskit's the trainer calls what is to be called. In any other script every rank calls :meth:`step`
    after its backward pass, or :meth:`clip_grad_norm_` and :meth:`step`; the gradient is the mean over ranks, and no
    ``DistributedDataParallel`` is needed. Build the same model on every rank: seed it.

    ``param_groups`` name the model's whole parameters, for schedulers; ``state`` holds the rows of this rank. The
    weights move to memory of the optimizer's: make it after the model was moved, cast and initialised.

    Args:
        params: as of any optimizer, groups included; of one type, on one device.
        optimizer_class: treats each element for itself, as SGD, Adam, AdamW and Lion do. That is tried.
        mesh: of one dimension, over the ranks that train the model together.
        defaults: of ``optimizer_class``.

    Raises:
        BadInput: if the parameters, the optimizer or the mesh cannot be used so.
    """

    def __init__(
        self, params: Iterable[Any], optimizer_class: type[Optimizer], *, mesh: DeviceMesh, **defaults: Any
    ) -> None:
        if mesh.ndim != 1:
            raise BadInput("mesh", str(mesh), "use a mesh of one dimension, such as trainer.mesh()")
        self._built = False
        super().__init__(params, dict(defaults))
        self._all: list[nn.Parameter] = [one for group in self.param_groups for one in group["params"]]
        _require_uniform(self._all)
        self._numbers = require_elementwise(optimizer_class, defaults, self._all[0].device)
        self._layout = FlatLayout.of(self._all)
        self._exchange = Exchange(mesh.get_group(), cut(self._layout, mesh.size()))
        self._flat = self._take_weights()
        mine = self._exchange.mine
        self._gradient = self._flat.new_zeros(mine.stop - mine.start, dtype=self._layout.dtype)
        self.rows = [
            Rows(
                self._all[place.number],
                place,
                self._flat[place.start : place.stop],
                self._gradient[place.start - mine.start : place.stop - mine.start],
                self._numbers,
            )
            for place in slices(self._layout, mine.start, mine.stop)
        ]
        self._inner = self._wrap(optimizer_class, defaults)
        self._local: LocalGradients | None = None
        self._present = torch.zeros(len(self._all), dtype=torch.int32, device=self._flat.device)
        self._reduced = False
        self._built = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if getattr(self, "_built", False):
            raise BadInput("optimizer", "add_param_group", "name all groups when the optimizer is made")
        super().add_param_group(param_group)

    @torch.no_grad()
    def _take_weights(self) -> Tensor:
        """One block of memory with all weights; the parameters are views of it from now on."""
        flat = torch.zeros(self._layout.numel, dtype=self._all[0].dtype, device=self._all[0].device)
        for parameter, view in zip(self._all, self._layout.views(flat), strict=True):
            view.copy_(parameter)
            parameter.data = view
        return flat

    def _wrap(self, kind: type[Optimizer], defaults: dict[str, Any]) -> Optimizer:
        memory = {id(rows.parameter): rows.memory for rows in self.rows}
        groups = [
            {**group, "params": [memory[id(one)] for one in group["params"] if id(one) in memory]}
            for group in self.param_groups
        ]
        inner = kind(groups, **defaults)
        for group, theirs in zip(self.param_groups, inner.param_groups, strict=True):
            group.update(_options(theirs))  # schedulers look for the defaults, too
        self.defaults = dict(inner.defaults)
        return inner

    # -- the parts of a step --------------------------------------------------------------------------------------

    def forget(self) -> None:
        """No gradient was added."""
        self._reduced = False
        self._present.zero_()
        if self._local is not None:
            self._local.clear()

    def add(self, shard: int, shard_count: int) -> None:
        """Take over the gradients of the model as those of one of ``shard_count`` shards of the global batch."""
        if self._local is None or self._local.shard_count != shard_count:
            self._local = LocalGradients(self._layout, shard_count, buffers=1)
        gradients = [parameter.grad for parameter in self._all]
        for number, gradient in enumerate(gradients):
            require_dense(f"parameter {number}", gradient)
        self._local.add(shard, gradients)
        has = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.int32)
        self._present |= has.to(self._present.device)
        for parameter in self._all:
            parameter.grad = None

    def reduce(self, owners: Sequence[Sequence[int]]) -> None:
        """Sum the gradients of all shards; of every rank its rows.

        Args:
            owners: by rank, the shards that it has added.

        Raises:
            RuntimeError: from the backend, if a rank is lost.
        """
        assert self._local is not None
        present_is_known = self._exchange.begin_maximum(self._present)
        self._exchange.sum(self._local, owners, self._gradient)
        present_is_known()
        self._local.clear()
        present = self._present.tolist()
        for rows in self.rows:
            rows.take_gradient(bool(present[rows.number]))
        self._reduced = True

    def squared_norm(self) -> float:
        """Of the whole summed gradient: the sum over its rows, in an order that the world's size does not change."""
        firsts = list(accumulate((unit_of(shape).units for shape in self._layout.shapes), initial=0))
        squares = torch.zeros(firsts[-1], dtype=torch.float64, device=self._flat.device)
        for rows in self.rows:
            gradient = rows.memory.grad
            if gradient is not None:
                found = _unit_norms(gradient).square_()
                first = firsts[rows.number] + rows.unit
                squares[first : first + len(found)] = found
        self._exchange.add_up(squares)  # each number meets zeros only: the sum has its bits
        return float(squares.sum())

    @torch.no_grad()
    def scale_gradient(self, factor: float) -> None:
        """Multiply the summed gradient."""
        for rows in self.rows:
            if rows.memory.grad is not None:
                rows.memory.grad.mul_(factor)

    def spread(self) -> None:
        """Give all ranks the weights that each has updated.

        Raises:
            RuntimeError: from the backend, if a rank is lost.
        """
        self._exchange.spread(self._flat)

    # -- what scripts call ----------------------------------------------------------------------------------------

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Limit the 2-norm of the whole gradient, after the backward pass and before :meth:`step`. Returns the norm."""
        self._reduce_own()
        return clip([self], max_norm)

    def _reduce_own(self) -> None:
        if self._reduced:
            return
        size = self._exchange.size
        self.add(self._exchange.rank, size)
        self.reduce([[rank] for rank in range(size)])
        self.scale_gradient(1 / size)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Sum the gradients if nobody has, update this rank's rows, and give all ranks the new weights.

        Raises:
            BadInput: with a closure, or if the model was moved or cast. RuntimeError: if a rank is lost.
        """
        if closure is not None:
            raise BadInput("closure", closure, "call step() without: it would be evaluated on some ranks only")
        views = self._layout.views(self._flat)
        if any(one.data_ptr() != view.data_ptr() for one, view in zip(self._all, views, strict=True)):
            raise BadInput("model", "parameters elsewhere", "move or cast the model before ZeroOptimizer is made")
        self._reduce_own()
        self._lend()
        self._inner.step()
        self._take_back()
        self.spread()
        self.forget()

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as the plain optimizer would give it. A collective; every rank holds all of it then.

        Raises:
            RuntimeError: if a rank is lost meanwhile.
        """
        parts = {rows.number: (rows.box, self.state[rows.parameter]) for rows in self.rows}
        state = gather(parts, self._layout.shapes, self._exchange, self._flat.device)
        for key in self._numbers:
            for one in state.values():
                one[key] = one[key].item()
        places = {id(parameter): number for number, parameter in enumerate(self._all)}
        groups = [{**group, "params": [places[id(one)] for one in group["params"]]} for group in self.param_groups]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's part of a whole state, written in a world of any size or by a plain optimizer.

        Raises:
            BadInput: if it is that of other parameters.
        """
        theirs = [len(group["params"]) for group in state_dict["param_groups"]]
        mine = [len(group["params"]) for group in self.param_groups]
        if theirs != mine:
            raise BadInput("state_dict", theirs, f"load the state of an optimizer with groups of {mine} parameters")
        for group, other in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(_options(other))
        for rows in self.rows:
            self.state[rows.parameter] = rows.cut_out(state_dict["state"].get(rows.number, {}))

    def _lend(self) -> None:
        """Groups may have been changed by a scheduler, the state by a restore."""
        for group, theirs in zip(self.param_groups, self._inner.param_groups, strict=True):
            theirs.update(_options(group))
        for rows in self.rows:
            self._inner.state[rows.memory] = rows.lend(self.state[rows.parameter])

    def _take_back(self) -> None:
        for group, theirs in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update(_options(theirs))
        for rows in self.rows:
            rows.take_back(self.state[rows.parameter], self._inner.state[rows.memory])
            rows.memory.grad = None


def clip(optimizers: Sequence[ZeroOptimizer], max_norm: float) -> float:
    """Limit the 2-norm of the summed gradient over all optimizers. Returns what it was."""
    norm = math.sqrt(sum(optimizer.squared_norm() for optimizer in optimizers))
    factor = max_norm / (norm + _EPSILON)
    if factor < 1:
        for optimizer in optimizers:
            optimizer.scale_gradient(factor)
    return norm


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _unit_norms(gradient: Tensor) -> Tensor:
    """The 2-norm of every unit of a part of a gradient."""
    elements = unit_of(gradient.shape).elements
    flat = gradient.reshape(-1)
    padded = nn.functional.pad(flat, (0, -len(flat) % elements))
    norms: Tensor = torch.linalg.vector_norm(padded.view(-1, elements), dim=1, dtype=torch.float64)
    return norms


def _require_uniform(parameters: Sequence[Tensor]) -> None:
    for one in parameters:
        if isinstance(one, DTensor):
            raise BadInput("params", "DTensor", "use fully_shard or ZeroOptimizer: a sharded model has no use for both")
        if one.device != parameters[0].device:
            raise BadInput("params", str(one.device), f"move the whole model to {parameters[0].device}")
        if one.dtype != parameters[0].dtype or not one.is_floating_point():
            remedy = "make one ZeroOptimizer for the parameters of each floating-point type"
            raise BadInput("params", f"{one.dtype} beside {parameters[0].dtype}", remedy)
