"""The state that optimizers keep: tensors under paths, and everything else as plain numbers.

Tensors may lie in nested lists, tuples and dicts. The numbers then hold the nested structure, with
the path of a tensor in its place. NumPy numbers keep their type: sums of another type are rounded
differently.

-> state/registered.py: the whole list of numbers. state/naming.py: names in a store.
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


# -- nested state ----------------------------------------------------------------------------------


def tensors_in(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor in a value of an optimizer's state, with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif type(value) in _CONTAINERS:
        for key, element in _items(value):
            yield from tensors_in(element, _below(path, key))


def rehome(value: Any, path: str, replace: Callable[[str, Tensor], Tensor]) -> Any:
    """Return the value with each tensor replaced by ``replace(path, tensor)``.

    Lists and dicts are changed in place.
    """
    if isinstance(value, Tensor):
        return replace(path, value)
    if type(value) is tuple:
        elements = tuple(
            rehome(element, _below(path, key), replace) for key, element in _items(value)
        )
        return value if all(map(_is_same, elements, value)) else elements
    if type(value) in (dict, list):
        for key, element in list(_items(value)):
            value[key] = rehome(element, _below(path, key), replace)
    return value


def encode(value: Any, path: str) -> Any:
    """Return a value of the state as numbers, with references in place of tensors.

    Raises:
        ChaoskitError: if something in it is neither.
    """
    if isinstance(value, Tensor):
        return {_TENSOR: path}
    if type(value) not in _CONTAINERS:
        return encode_numbers(value, tensors=False)
    pairs = [(key, encode(element, _below(path, key))) for key, element in _items(value)]
    if isinstance(value, dict):
        if not all(isinstance(key, (str, int)) for key in value):
            raise ChaoskitError(
                "a dict whose keys are no strings or integers cannot be shared with peers"
            )
        return dict(pairs)
    encoded = [element for _, element in pairs]
    return {_TUPLE: encoded} if isinstance(value, tuple) else encoded


def encode_numbers(value: Any, *, tensors: bool = True) -> Any:
    """Return ``value`` in a form that msgpack encodes; NumPy numbers keep their type.

    Tuples become lists, and keys of dicts that are no integers become strings.

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
        return [encode_numbers(element, tensors=tensors) for element in value]
    if isinstance(value, dict):
        named = {
            key if isinstance(key, (str, int)) else str(key): element
            for key, element in value.items()
        }
        return {key: encode_numbers(element, tensors=tensors) for key, element in named.items()}
    if isinstance(value, Tensor) and not tensors:
        raise ChaoskitError("a tensor in a container of another type cannot be shared with peers")
    return plain(value)


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that :func:`encode` or :func:`encode_numbers` was given.

    Tuples that :func:`encode_numbers` was given come back as lists.

    Args:
        tensors: the tensors of the state, by path.

    Raises:
        ChaoskitError: if a tensor is not among them.
    """
    if isinstance(value, list):
        return [decode(element, tensors) for element in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TENSOR}:
        if value[_TENSOR] not in tensors:
            raise ChaoskitError(f"a peer's state lacks the optimizer's tensor {value[_TENSOR]}")
        return tensors[value[_TENSOR]]
    if value.keys() == {_TUPLE}:
        return tuple(decode(element, tensors) for element in value[_TUPLE])
    if value.keys() == {_NUMPY, "value"}:
        return np.dtype(value[_NUMPY]).type(value["value"])
    return {key: decode(element, tensors) for key, element in value.items()}


def assemble(state: dict[str, Any], key: str, encoded: Any) -> None:
    """Set ``state[key]`` to the decoded value of ``encoded``, with the tensors in ``state``.

    The tensors may lie there under their paths. The value takes the place of the first one, so that
    the order of all tensors is the same on each rank.

    Raises:
        ChaoskitError: if the value refers to a tensor that is not in ``state``.
    """
    tensors = dict(tensors_in(state, ""))
    decoded = decode(encoded, tensors)
    used = {path for path, _ in tensors_in(decoded, key)}
    entries: dict[str, Any] = {}
    for name, element in state.items():
        entries[key if name in used else name] = decoded if name in used else element
    entries[key] = decoded
    state.clear()
    state.update(entries)


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    """Return the elements of a container with their keys, or their indices."""
    return iter(value.items() if isinstance(value, dict) else enumerate(value))


def _below(path: str, key: Any) -> str:
    """Return the path of an element.

    Dots in its key are escaped, as stored names are split at dots.
    """
    name = str(key).replace("%", "%25").replace("/", "%2F").replace(".", "%2E")
    return f"{path}/{name}" if path else str(key)


def _is_same(value: Any, other: Any) -> bool:
    return value is other


# -- state on the optimizer itself -----------------------------------------------------------------


class OwnNumbers:
    """The numbers that an optimizer keeps outside of its parameters' state and changes in steps.

    They are a part of the shared state, but are not compared between ranks: a clock may be among
    them.

    Args:
        known_ids: returns the identities of objects that the optimizer may refer to.
    """

    def __init__(self, optimizer: Optimizer, known_ids: Callable[[], set[int]]) -> None:
        self._optimizer, self._known_ids = optimizer, known_ids
        self._names: set[str] = set()
        self._marks_before: dict[str, Any] = {}
        self._state_size = 0  # size of the state when it was last searched for loose entries
        self._loose_names: list[str] = []
        self._attributes: list[str] = []  # all attribute names; next, those not torch's
        self._own_attributes: list[str] = []
        self._initial = self.all_plain()

    @property
    def has_numbers(self) -> bool:
        """True if steps have changed numbers that the optimizer keeps on itself."""
        return bool(self._names)

    def begin(self) -> None:
        """Record everything before the optimizer takes a step."""
        self._marks_before = self._read_marks()

    def end(self) -> None:
        """Find the numbers that the step has changed.

        Raises:
            BadInput: if the changes include tensors or generators, which a rank that joins would
                not have.
        """
        after = self._read_marks()
        if after == self._marks_before:
            return
        values = dict(self._values())
        for name, mark in after.items():
            if name in self._names or self._marks_before.get(name) == mark:
                continue
            if not _is_plain(values[name]):
                raise self._refusal(name, values[name])
            self._names.add(name)

    def numbers(self) -> dict[str, Any]:
        """Return the numbers that steps have changed, encoded, by name.

        Names that the optimizer does not have any more are left out.

        Raises:
            ChaoskitError: if a value is no number any more, and cannot be encoded.
        """
        if not self._names:
            return {}
        values = dict(self._values())
        return {name: encode(values[name], name) for name in sorted(self._names) if name in values}

    def load(self, numbers: Mapping[str, Any]) -> None:
        """Set the numbers of another rank, as :meth:`numbers` returned them there.

        Numbers that its steps have not changed get their initial values.
        """
        self.put_back(self._initial)
        self._set(numbers)

    def _set(self, numbers: Mapping[str, Any]) -> None:
        """Set these numbers, and count them as changed by steps."""
        self._names.update(numbers)
        for name, encoded in numbers.items():
            if name.startswith(_LOOSE):
                self._state[name.removeprefix(_LOOSE)] = decode(encoded, {})
            else:
                setattr(self._optimizer, name, decode(encoded, {}))

    def all_plain(self) -> dict[str, Any]:
        """Return a copy of every number by name, encoded, for :meth:`put_back`."""
        return {name: encode(value, name) for name, value in self._values() if _is_plain(value)}

    def put_back(self, before: Mapping[str, Any]) -> None:
        """Undo the changes of the numbers since :meth:`all_plain`; remove numbers that are new."""
        for name in self._names - before.keys():
            if name.startswith(_LOOSE):
                self._state.pop(name.removeprefix(_LOOSE), None)
            elif name in vars(self._optimizer):
                delattr(self._optimizer, name)
        self._set({name: before[name] for name in self._names & before.keys()})

    @property
    def _state(self) -> dict[Any, Any]:
        """The optimizer's state. Its keys are usually, but not always, parameters."""
        state: dict[Any, Any] = self._optimizer.state
        return state

    def _values(self) -> Iterator[tuple[str, Any]]:
        """Yield the attributes and the loose state entries of the optimizer, by name."""
        attributes = vars(self._optimizer)
        if list(attributes) != self._attributes:  # checking all names takes long
            self._attributes = list(attributes)
            own = (name for name in attributes if name not in _TORCH)
            self._own_attributes = [name for name in own if not name.startswith(_TORCH_PREFIXES)]
        for name in self._own_attributes:
            yield name, attributes[name]
        if len(self._state) != self._state_size:  # checking all keys takes long
            self._state_size = len(self._state)
            self._loose_names = [key for key in self._state if isinstance(key, str)]
        for key in self._loose_names:
            if key in self._state:
                yield _LOOSE + key, self._state[key]

    def _read_marks(self) -> dict[str, Any]:
        """Return a mark of each value, which changes when the value does."""
        values = list(self._values())
        known_ids = self._known_ids() if values else set()
        return {name: self._mark(value, set(known_ids)) for name, value in values}

    def _mark(self, value: Any, marked: set[int]) -> Any:
        """Return a mark of ``value``, to be compared by ``==``, that changes when ``value`` does.

        It is None for an object in ``marked``, and for an object that cannot be inspected.

        Args:
            marked: ids of objects that are followed elsewhere or have a mark already. Ids of
                objects that get a mark here are added.
        """
        if id(value) in marked:
            return None
        if _is_plain(value):
            return msgspec.msgpack.encode(encode(value, ""))
        marked.add(id(value))
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
            return keys, [self._mark(element, marked) for element in value.values()]
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            return [self._mark(element, marked) for element in value]
        if isinstance(value, Optimizer):
            return [
                self._mark(element, marked)
                for name, element in vars(value).items()
                if name != "step"
            ]
        if type(value).__module__ == type(self._optimizer).__module__ and not isinstance(
            value, nn.Module
        ):
            tensors = [
                element
                for element in getattr(value, "__dict__", {}).values()
                if not _is_plain(element)
            ]
            return [self._mark(element, marked) for element in tensors]
        return None

    def _refusal(self, name: str, value: Any) -> BadInput:
        """Return the error for an object that a step has changed, but peers cannot get."""
        kind = type(self._optimizer).__name__
        attribute = (
            f"{kind}.state[{name.removeprefix(_LOOSE)!r}]"
            if name.startswith(_LOOSE)
            else f"{kind}.{name}"
        )
        remedy = (
            "keep objects for later steps in optimizer.state[parameter], and others in local "
            f"variables: a rank that joins gets no {type(value).__name__} of the optimizer object"
        )
        return BadInput("optimizer", attribute, remedy)


def _is_plain(value: Any) -> bool:
    """Return whether a value consists of numbers and strings only, without tensors."""
    if any(True for _ in tensors_in(value, "")):
        return False
    try:
        encode(value, "")
    except ChaoskitError:
        return False
    return True
