"""The refusal of loop bodies that write into parameters: only the optimizers may, in a commit.

Ranks compute different shards, so a write in a loop body gives each rank different weights.

-> state/script_writes.py: writes between two steps. state/buffers.py: writes into buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from chaoskit.errors import BadInput
from chaoskit.runtime.reduction.checksums import bits_digest

_version = attrgetter("_version")


class ParameterWatch:
    """The parameters of a model, which are compared before and after the loop body of each shard.

    The version counter of a tensor shows each write except those through ``.data``. These show in
    its bits or in its address, which are read only in the rehearsal: reading them takes too long
    for each step.

    Args:
        memory: returns the memory of a parameter on this rank.
    """

    def __init__(
        self, model: nn.Module, memory: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> None:
        self._model = model
        self._named = list(model.named_parameters())
        self._memory = [memory(parameter) for _, parameter in self._named]
        self._movable = self._positions_of_recurrent_layers()
        self._versions: list[int] = []
        self._addresses: dict[int, int] = {}
        self._bits: list[bytes] = []

    def begin(self, *, rehearses: bool) -> None:
        """Remember the parameters before a loop body.

        Args:
            rehearses: also remember bits and addresses of all parameters, which shows writes
                through ``.data``.
        """
        self._versions = list(map(_version, self._memory))
        positions = range(len(self._memory)) if rehearses else self._movable
        self._addresses = {position: self._memory[position].data_ptr() for position in positions}
        self._bits = self._read_bits() if rehearses else []

    def end(self) -> None:
        """Compare the parameters with those at :meth:`begin`, after a loop body.

        Raises:
            BadInput: if the body wrote into a parameter. In a rehearsal also if it made, removed or
                replaced one.
        """
        if self._bits:
            self._require_same_parameters()
        versions = list(map(_version, self._memory))
        moved = {
            position
            for position, address in self._addresses.items()
            if self._memory[position].data_ptr() != address
        }
        if moved or versions != self._versions:
            for position, (before, after) in enumerate(zip(self._versions, versions, strict=True)):
                if (before != after or position in moved) and position not in moved & self._movable:
                    raise self._refusal(position)
        if not self._bits:
            return
        for position, (bits, bits_now) in enumerate(
            zip(self._bits, self._read_bits(), strict=True)
        ):
            if bits != bits_now:
                raise self._refusal(position)
        self._bits = []

    def _read_bits(self) -> list[bytes]:
        return [bits_digest(tensor) for tensor in self._memory]

    def _positions_of_recurrent_layers(self) -> set[int]:
        """Return the positions of parameters that ``flatten_parameters`` may move to other memory.

        Such a move keeps all bits.
        """
        layers = [module for module in self._model.modules() if isinstance(module, nn.RNNBase)]
        movable = {id(parameter) for layer in layers for parameter in layer.parameters()}
        return {
            position
            for position, (_, parameter) in enumerate(self._named)
            if id(parameter) in movable
        }

    def _require_same_parameters(self) -> None:
        """Raise BadInput if the model has other parameters than at registration."""
        current = dict(self._model.named_parameters())
        before = dict(self._named)
        if differing := current.keys() ^ before.keys():
            remedy = (
                "create every parameter before register: the loop body of a step made or removed it"
            )
            raise BadInput("model", min(differing), remedy)
        for (name, parameter), memory in zip(self._named, self._memory, strict=True):
            if memory is parameter and current[name] is not parameter:  # FSDP has two
                remedy = (
                    "keep the parameters that were registered: the loop body of a step replaced it"
                )
                raise BadInput("model", name, remedy)

    def _refusal(self, position: int) -> BadInput:
        """Return the error for a write into the parameter at ``position``."""
        name, parameter = self._named[position]
        return write_refusal(name, owners_of(self._model, parameter))


class GatheredWatch:
    """The whole parameters that FSDP gathers for a forward pass and then drops.

    Writes into them are lost.

    Hooks find these writes, and raise BadInput. A compiled model gets no hooks: it would be
    compiled once more without them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._versions: list[list[tuple[str, Tensor, int]]] = []
        self._model = model
        self._handles: list[RemovableHandle] = []

    def begin(self) -> None:
        """Watch forward passes until :meth:`end`. Does nothing for a compiled model."""
        modules = list(self._model.modules())
        if any(_is_compiled(module) for module in modules):
            return
        for module in modules:
            self._handles.append(module.register_forward_pre_hook(self._enter))
            self._handles.append(module.register_forward_hook(self._leave, prepend=True))

    def end(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._versions.clear()

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        named = module.named_parameters()
        self._versions.append([(name, tensor, tensor._version) for name, tensor in named])

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        for name, tensor, version in self._versions.pop():
            if tensor._version != version:
                path = next(path for path, other in self._model.named_modules() if other is module)
                full_name = f"{path}.{name}" if path else name
                raise write_refusal(full_name, owners_of(self._model, tensor))


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def owners_of(model: nn.Module, parameter: Tensor) -> list[tuple[str, nn.Module]]:
    """Return each module that holds ``parameter``, with its name. A tied parameter has several."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if any(held is parameter for held in module._parameters.values())
    ]


def write_refusal(name: str, owners: list[tuple[str, nn.Module]]) -> BadInput:
    """Return the error for a loop body that writes into the parameter ``name`` of ``owners``."""
    limited = [
        (path, owner) for path, owner in owners if getattr(owner, "max_norm", None) is not None
    ]
    modules = " and ".join(
        f"{f'module {path}' if path else 'the model'} ({type(owner).__name__})"
        for path, owner in limited or owners
    )
    why = "only the optimizers may write into parameters, else ranks get different weights"
    if limited:
        remedy = (
            f"build {modules} without max_norm, which writes into its weight in the forward pass, "
            f"and look up rows of torch.renorm(weight, 2, 0, max_norm) instead: {why}"
        )
        return BadInput("model", name, remedy)
    remedy = (
        f"compute with a changed copy, as torch.nn.utils.parametrize does: the loop body of a step "
        f"writes into this parameter of {modules or 'the model'}, but {why}"
    )
    return BadInput("model", name, remedy)
