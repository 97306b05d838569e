"""The state that optimizers keep: tensors under paths, and everything else as plain numbers.

Tensors may lie in nested lists, tuples and dicts. The numbers then hold the nested structure, with
the path of a tensor in its place. NumPy numbers keep their type: sums of another type are rounded
differently.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from chaoskit.checkpoint.layout.arena import plain
from chaoskit.errors import BadInput, ChaoskitError

_TENSOR, _TUPLE, _NUMPY = "__tensor__", "__tuple__", "__numpy__"
_CONTAINERS = (dict, list, tuple)
_PLAIN = (float, int, bool, str, type(None))
_LOOSE = "state/"  # begins the name of an entry of the state that belongs to no parameter

#: Attributes that torch gives to each optimizer.
_TORCH = frozenset({"defaults", "state", "param_groups", "step", "_step_count", "_opt_called"})
_TORCH_PREFIXES = ("_optimizer_", "_zero_grad_", "_warned_", "_hook_for_")


# -- nested state -------------------------------------------------------------------------------------------------


def tensors_in(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor in a value of the state, with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif type(value) in _CONTAINERS:
        for key, item in _items(value):
            yield from tensors_in(item, _below(path, key))


def rehome(value: Any, path: str, home: Callable[[str, Tensor], Tensor]) -> Any:
    """Put ``home(path, tensor)`` in the place of each tensor; lists and dicts stay the same objects."""
    if isinstance(value, Tensor):
        return home(path, value)
    if type(value) is tuple:
        items = tuple(rehome(item, _below(path, key), home) for key, item in _items(value))
        return value if all(map(_is_same, items, value)) else items
    if type(value) in (dict, list):
        for key, item in list(_items(value)):
            value[key] = rehome(item, _below(path, key), home)
    return value


def encode(value: Any, path: str) -> Any:
    """Return a value of the state as numbers, with references to the tensors in it.

    Raises:
        ChaoskitError: if something in it is neither.
    """
    if isinstance(value, Tensor):
        return {_TENSOR: path}
    if type(value) not in _CONTAINERS:
        return encode_numbers(value, tensors=False)
    items = [(key, encode(item, _below(path, key))) for key, item in _items(value)]
    if isinstance(value, dict):
        if not all(isinstance(key, (str, int)) for key in value):
            raise ChaoskitError(
                "a dict whose keys are no strings or integers cannot be shared with peers"
            )
        return dict(items)
    encoded = [item for _, item in items]
    return {_TUPLE: encoded} if isinstance(value, tuple) else encoded


def encode_numbers(value: Any, *, tensors: bool = True) -> Any:
    """Return ``value`` as :func:`plain` does, NumPy numbers with their type.

    Args:
        tensors: take a tensor of one element as a number.

    Raises:
        ChaoskitError: if something in it is no number, string, list or dict.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        return {_NUMPY: value.dtype.name, "value": value.item()}
    if isinstance(value, (list, tuple)):
        return [encode_numbers(item, tensors=tensors) for item in value]
    if isinstance(value, dict):
        named = {
            key if isinstance(key, (str, int)) else str(key): item for key, item in value.items()
        }
        return {key: encode_numbers(item, tensors=tensors) for key, item in named.items()}
    if isinstance(value, Tensor) and not tensors:
        raise ChaoskitError("a tensor in a container of another type cannot be shared with peers")
    return plain(value)


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what :func:`encode` or :func:`encode_numbers` was given.

    Args:
        tensors: those of the state, by path.

    Raises:
        ChaoskitError: if a tensor is not among them.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TENSOR}:
        if value[_TENSOR] not in tensors:
            raise ChaoskitError(f"a peer's state lacks the optimizer's tensor {value[_TENSOR]}")
        return tensors[value[_TENSOR]]
    if value.keys() == {_TUPLE}:
        return tuple(decode(item, tensors) for item in value[_TUPLE])
    if value.keys() == {_NUMPY, "value"}:
        return np.dtype(value[_NUMPY]).type(value["value"])
    return {key: decode(item, tensors) for key, item in value.items()}


def assemble(state: dict[str, Any], key: str, encoded: Any) -> None:
    """Set ``state[key]`` to what ``encoded`` stands for, with the tensors that are in ``state``.

    The tensors may lie there under their paths; the value takes the place of the first one, so that
    the order of all tensors is the same on each rank.
    """
    tensors = dict(tensors_in(state, ""))
    value = decode(encoded, tensors)
    used = {path for path, _ in tensors_in(value, key)}
    entries: dict[str, Any] = {}
    for name, item in state.items():
        entries[key if name in used else name] = value if name in used else item
    entries[key] = value
    state.clear()
    state.update(entries)


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    return iter(value.items() if isinstance(value, dict) else enumerate(value))


def _below(path: str, key: Any) -> str:
    """Return the path of an item; stored names are taken apart at dots."""
    name = str(key).replace("%", "%25").replace("/", "%2F").replace(".", "%2E")
    return f"{path}/{name}" if path else str(key)


def _is_same(value: Any, other: Any) -> bool:
    return value is other


# -- state on the optimizer itself ----------------------------------------------------------------------------------


class OwnNumbers:
    """The numbers that an optimizer keeps outside of the state of its parameters, and changes in its steps.

    They travel with the state, but are not compared over the ranks: a clock may be among them.
    """

    def __init__(self, optimizer: Optimizer, known: Callable[[], set[int]]) -> None:
        self._optimizer, self._known = optimizer, known
        self._names: set[str] = set()
        self._before: dict[str, Any] = {}
        self._size = 0  # entries of the state, when it was searched for loose ones
        self._loose: list[str] = []
        self._attributes: list[str] = []  # all of the optimizer, and which of them are not torch's
        self._kept: list[str] = []
        self._initial = self.all_plain()

    @property
    def has_numbers(self) -> bool:
        """Whether steps have changed numbers that the optimizer keeps on itself."""
        return bool(self._names)

    def begin(self) -> None:
        """Remember everything: the optimizer takes a step."""
        self._before = self._look()

    def end(self) -> None:
        """Find what the step has changed.

        Raises:
            BadInput: if that includes tensors or generators, which a rank that joins would not have.
        """
        after = self._look()
        if after == self._before:
            return
        values = dict(self._values())
        for name, now in after.items():
            if name in self._names or self._before.get(name) == now:
                continue
            if not _is_plain(values[name]):
                raise self._refusal(name, values[name])
            self._names.add(name)

    def numbers(self) -> dict[str, Any]:
        """Return the numbers that steps have changed, by name."""
        if not self._names:
            return {}
        values = dict(self._values())
        return {name: encode(values[name], name) for name in sorted(self._names) if name in values}

    def load(self, numbers: Mapping[str, Any]) -> None:
        """Set the numbers of another rank. What its steps have not changed yet is as it was built."""
        self.put_back(self._initial)
        self._set(numbers)

    def _set(self, numbers: Mapping[str, Any]) -> None:
        self._names.update(numbers)
        for name, value in numbers.items():
            if name.startswith(_LOOSE):
                self._state[name.removeprefix(_LOOSE)] = decode(value, {})
            else:
                setattr(self._optimizer, name, decode(value, {}))

    def all_plain(self) -> dict[str, Any]:
        """Return a copy of every number, for :meth:`put_back`."""
        return {name: encode(value, name) for name, value in self._values() if _is_plain(value)}

    def put_back(self, before: Mapping[str, Any]) -> None:
        """Undo the changes of the numbers since :meth:`all_plain`."""
        for name in self._names - before.keys():
            if name.startswith(_LOOSE):
                self._state.pop(name.removeprefix(_LOOSE), None)
            elif name in vars(self._optimizer):
                delattr(self._optimizer, name)
        self._set({name: before[name] for name in self._names & before.keys()})

    @property
    def _state(self) -> dict[Any, Any]:
        """The state, whose keys are parameters, but need not be."""
        state: dict[Any, Any] = self._optimizer.state
        return state

    def _values(self) -> Iterator[tuple[str, Any]]:
        attributes = vars(self._optimizer)
        if list(attributes) != self._attributes:  # a look at all names takes long
            self._attributes = list(attributes)
            own = (name for name in attributes if name not in _TORCH)
            self._kept = [name for name in own if not name.startswith(_TORCH_PREFIXES)]
        for name in self._kept:
            yield name, attributes[name]
        if len(self._state) != self._size:  # a look at all keys takes long
            self._size = len(self._state)
            self._loose = [key for key in self._state if isinstance(key, str)]
        for key in self._loose:
            if key in self._state:
                yield _LOOSE + key, self._state[key]

    def _look(self) -> dict[str, Any]:
        values = list(self._values())
        known = self._known() if values else set()
        return {name: self._mark(value, set(known)) for name, value in values}

    def _mark(self, value: Any, seen: set[int]) -> Any:
        """Return what changes when ``value`` does; None for what is known or cannot be looked into."""
        if id(value) in seen:
            return None
        if _is_plain(value):
            return msgspec.msgpack.encode(encode(value, ""))
        seen.add(id(value))
        if isinstance(value, Tensor):
            return value.data_ptr(), value._version, tuple(value.shape)
        if isinstance(value, torch.Generator):
            return value.get_state().numpy().tobytes()
        if isinstance(value, random.Random):
            return value.getstate()
        if isinstance(value, np.random.Generator):
            return repr(value.bit_generator.state)
        if isinstance(value, Mapping):
            keys = [key if isinstance(key, (str, int)) else id(key) for key in value]
            return keys, [self._mark(item, seen) for item in value.values()]
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            return [self._mark(item, seen) for item in value]
        if isinstance(value, Optimizer):
            return [self._mark(item, seen) for name, item in vars(value).items() if name != "step"]
        if type(value).__module__ == type(self._optimizer).__module__ and not isinstance(
            value, nn.Module
        ):
            tensors = [
                item for item in getattr(value, "__dict__", {}).values() if not _is_plain(item)
            ]
            return [self._mark(item, seen) for item in tensors]
        return None

    def _refusal(self, name: str, value: Any) -> BadInput:
        kind = type(self._optimizer).__name__
        where = (
            f"{kind}.state[{name.removeprefix(_LOOSE)!r}]"
            if name.startswith(_LOOSE)
            else f"{kind}.{name}"
        )
        remedy = (
            "keep in optimizer.state[parameter] what later steps need, in a local variable what they do not: "
            f"a rank that joins gets no {type(value).__name__} of the optimizer object"
        )
        return BadInput("optimizer", where, remedy)


def _is_plain(value: Any) -> bool:
    if any(True for _ in tensors_in(value, "")):
        return False
    try:
        encode(value, "")
    except ChaoskitError:
        return False
    return True
