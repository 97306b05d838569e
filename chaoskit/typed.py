"""Conversion of a caller's arguments to their declared types.

Constructors of faults and settings check nothing, so every public function converts its arguments
here before it starts anything: :func:`typed_arguments` does it for a whole function,
:func:`convert` for one value. A tuple may be given as a list, a float as an int, an enumeration as
its value, a path as text, and a number as one of NumPy. A bool is no number, and a text is never
read as one.

-> ``config.py`` (``validate``): which values of the right type are refused. ``settings_file.py``:
files.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import inspect
import math
import numbers
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

import msgspec

from chaoskit.errors import BadInput

P = ParamSpec("P")
R = TypeVar("R")

_MAY_BE_INFINITE = "may be math.inf"
#: The type of a limit in seconds that may be ``math.inf``. All other floats must be finite.
LimitS = Annotated[float, _MAY_BE_INFINITE]

_INT_LEAST, _INT_MOST = -(2**63), 2**64 - 1  # what a message or a file in JSON can hold
_DEPTH_MAX = 100
_NAME_BYTES_MAX, _PATH_BYTES_MAX = 255, 4095  # NAME_MAX and PATH_MAX of Linux, without the NUL
_TEXT_REMEDY = "use a text of valid Unicode"
_PLAIN = (bool, int, float, str, bytes, type(None))
_CONTAINERS = (list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Collection)
#: Type names of msgspec -> type names of Python.
_PYTHON_NAMES = {"object": "dict", "array": "list", "null": "None"}
_EXPECTED = re.compile(r"Expected `([^`]+)`")
_FIELD_IN_QUOTES = re.compile(r"field `(\w+)`")
_PLACE = re.compile(r"`\$([^`]*)`$")
_PART = re.compile(r"\.(\w+)|\[(\d+)\]")


# -- whole calls -----------------------------------------------------------------------------------


def typed_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Convert the arguments of each call to the types of the parameters before the call.

    A call raises BadInput for a value that has no such type. An int stays one where a float is
    declared. A ``**settings`` parameter is passed on unchanged: the function knows the types of its
    settings.
    """
    signature = inspect.signature(function)
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    passed_on = {name for name, kind in kinds.items() if kind == inspect.Parameter.VAR_KEYWORD} | {
        "self"
    }
    variadic = {name for name, kind in kinds.items() if kind == inspect.Parameter.VAR_POSITIONAL}

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # raises it with the name of the function
        hints = _hints(function)
        for name, value in bound.arguments.items():
            if name in variadic:
                bound.arguments[name] = tuple(
                    convert(name, part, hints.get(name, Any)) for part in value
                )
            elif name not in passed_on:
                converted = convert(name, value, hints.get(name, Any))
                is_whole = (
                    type(value) is int and type(converted) is float
                )  # messages show it as it was given
                bound.arguments[name] = value if is_whole else converted
        return function(*bound.args, **bound.kwargs)

    return checked


def convert_fields(instance: Any) -> dict[str, Any]:
    """Return the fields of a dataclass instance that change by conversion to their declared types.

    A float field may be infinite if its default is.

    Raises:
        BadInput: naming the field.
    """
    kind: Any = type(instance)
    hints = _hints(kind)
    changed = {}
    for declared in dataclasses.fields(instance):
        if not declared.init:
            continue
        given, hint = getattr(instance, declared.name), hints.get(declared.name, Any)
        is_infinite = isinstance(declared.default, float) and not math.isfinite(declared.default)
        converted = convert(declared.name, given, hint, may_be_infinite=is_infinite)
        is_plain = type(given) in _PLAIN and type(converted) in _PLAIN
        is_same = converted is given or is_plain or isinstance(given, enum.Enum)
        if not is_same and (type(converted) is not type(given) or converted != given):
            changed[declared.name] = converted
    return changed


@functools.cache
def _hints(owner: Any) -> dict[str, Any]:
    """Return the annotations of a function or a class.

    An annotation that cannot be resolved here, such as an import for type checkers alone, is Any.
    """
    try:
        return typing.get_type_hints(owner, include_extras=True)
    except (NameError, TypeError, AttributeError):
        pass
    hints: dict[str, Any] = {}
    for part in reversed(owner.__mro__) if isinstance(owner, type) else (owner,):
        names = getattr(inspect.getmodule(part), "__dict__", {})
        for name, annotation in getattr(part, "__annotations__", {}).items():
            single = types.SimpleNamespace(__annotations__={name: annotation})
            try:
                hints |= typing.get_type_hints(single, names, include_extras=True)
            except (NameError, TypeError, AttributeError):
                hints[name] = Any
    return hints


# -- one value -------------------------------------------------------------------------------------


def convert(field: str, value: Any, hint: Any, *, may_be_infinite: bool = False) -> Any:
    """Return a value as its declared type.

    Args:
        field: name of the argument or setting.
        value: the argument as the caller gave it.
        hint: the declared type. If it cannot be checked, such as a protocol, the value is returned
            unchanged.
        may_be_infinite: True if the value may be infinite, as for a parameter of the type
            :data:`LimitS`.

    Raises:
        BadInput: naming the field, or the part of it that is wrong, the value and the remedy.
    """
    try:
        converted = _converted(field, value, hint)
        is_limit = _MAY_BE_INFINITE in _annotations(hint)
        remedy = (
            "use a number of seconds above 0, or math.inf"
            if is_limit
            else "use a number"
            if may_be_infinite
            else ""
        )
        _require_plain(field, plain_structs(value), not_a_number=remedy)
    except UnicodeEncodeError:
        raise BadInput(field, value, _TEXT_REMEDY) from None
    except RecursionError:
        raise BadInput(
            field, type(value).__name__, "use a value that does not contain itself"
        ) from None
    return converted


def _converted(field: str, value: Any, hint: Any) -> Any:
    """Return a value as one of the alternatives of ``hint``, by class first, else by msgspec.

    Raises:
        BadInput: if it fits none of them.
    """
    choices = [_without_annotations(choice) for choice in _choices(hint)]
    if Any in choices or object in choices:
        return value
    native = [choice for choice in choices if _is_native(choice)]
    if Path in choices and isinstance(value, (str, Path)) and "\0" in str(value):
        raise BadInput(field, value, "use a path without NUL")
    if Path in choices and isinstance(value, (str, Path)):
        require_short_names(field, str(value))
    if type(value) is str and str in choices:
        return value
    for choice in choices:
        if choice not in native and (wrapped := _as_instance(field, value, choice)) is not None:
            return wrapped[0]
    if not native:
        raise BadInput(field, value, _remedy(value, choices))
    joined = functools.reduce(lambda left, right: Union[left, right], native)  # noqa: UP007  # made at run time
    plain = plain_structs(value)
    if not isinstance(plain, (*_PLAIN, enum.Enum, dict, list)):
        raise BadInput(field, value, _remedy(value, choices))
    try:
        return msgspec.convert(plain, joined)
    except msgspec.ValidationError as error:
        if len(choices) > len(native) and not _PLACE.search(str(error)):
            raise BadInput(field, value, _remedy(value, choices)) from None
        raise _refusal(field, value, joined, str(error)) from None


def require_short_names(field: str, path: str) -> None:
    """Raise BadInput for a path that is too long for any file system.

    Each access would raise OSError.
    """
    names = [os.fsencode(name) for name in path.split("/")]
    if max(map(len, names)) > _NAME_BYTES_MAX or len(os.fsencode(path)) > _PATH_BYTES_MAX:
        remedy = (
            f"use a path of up to {_PATH_BYTES_MAX} bytes, with names of up to {_NAME_BYTES_MAX}"
        )
        raise BadInput(field, path, remedy)


def _without_annotations(hint: Any) -> Any:
    """Return a type without its annotations."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _annotations(hint: Any) -> list[Any]:
    """Return the annotations of the alternatives of a type."""
    return [
        extra
        for choice in _choices(hint)
        if get_origin(choice) is Annotated
        for extra in choice.__metadata__
    ]


def _choices(hint: Any) -> list[Any]:
    """Return the alternatives of a union, or a list of the type itself if it is no union."""
    if isinstance(hint, TypeVar):
        hint = hint.__bound__ or Any
    return list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else [hint]


def _is_native(hint: Any) -> bool:
    """Return whether msgspec converts to this type; other instances are passed on unchanged."""
    if hint is Any or hint in _PLAIN or get_origin(hint) is Literal:
        return True
    if isinstance(hint, type) and get_origin(hint) is None:
        return issubclass(hint, (msgspec.Struct, enum.Enum, dict, list, tuple, set, frozenset))
    if get_origin(hint) in (*_CONTAINERS, dict, collections.abc.Mapping):
        return all(
            _is_native(_without_annotations(choice))
            for part in get_args(hint)
            for choice in _choices(part)
            if part is not ...
        )
    return False


def _as_instance(field: str, value: Any, hint: Any) -> tuple[Any] | None:
    """Return (the value as an instance of a class or a list of such,), or None if it is neither."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Path and isinstance(value, (str, os.PathLike)):
        return (Path(value),) if isinstance(os.fspath(value), str) else None
    if origin is type:
        kind = get_origin(parts[0]) or parts[0]
        return (
            (value,)
            if isinstance(value, type) and (kind is Any or issubclass(value, kind))
            else None
        )
    if origin in _CONTAINERS:
        is_list = isinstance(value, collections.abc.Collection) and not isinstance(
            value, (str, bytes, Mapping)
        )
        if not is_list:
            return None
        return (_converted_items(field, value, origin, parts),)
    try:
        return (value,) if isinstance(value, origin or hint) else None
    except TypeError:  # a protocol: its methods are not checked
        return (value,)


def _converted_items(field: str, value: Any, origin: Any, parts: tuple[Any, ...]) -> Any:
    """Return a container with each item as its declared type.

    A sequence becomes a tuple unless a list or a set is declared.
    """
    kinds = list(parts[:1]) * len(value)
    if origin is tuple and ... not in parts:
        if len(value) != len(parts):
            raise BadInput(field, value, f"give {len(parts)} values")
        kinds = list(parts)
    pairs = zip(value, kinds, strict=True)
    items = [convert(f"{field}[{place}]", part, kind) for place, (part, kind) in enumerate(pairs)]
    return origin(items) if origin in (list, set, frozenset) else tuple(items)


class _NotPlain:
    """A placeholder for an object that msgspec would take for a mapping, such as an array."""


def plain_structs(value: Any, depth: int = 0) -> Any:
    """Return a value with structs as dicts, to check their fields, and Python's numbers.

    An object with items that is no container, such as an array, becomes a placeholder.

    Raises:
        RecursionError: if it is nested too deeply, as a value that contains itself.
    """
    if depth > _DEPTH_MAX:
        raise RecursionError
    if isinstance(value, msgspec.Struct):
        names = zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True)
        return {encoded: plain_structs(getattr(value, name), depth + 1) for name, encoded in names}
    if type(value) in _PLAIN or isinstance(value, enum.Enum):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {key: plain_structs(part, depth + 1) for key, part in value.items()}
    if isinstance(value, (list, tuple, set, frozenset, range)):
        return [plain_structs(part, depth + 1) for part in value]
    return _NotPlain() if hasattr(type(value), "__getitem__") else value


def _require_plain(field: str, value: Any, *, not_a_number: str, depth: int = 0) -> None:
    """Raise BadInput for numbers and texts that no message and no file can hold, at any depth.

    Args:
        not_a_number: the remedy for NaN if infinite numbers are accepted; empty if they are
            refused.
    """
    if depth > _DEPTH_MAX:
        raise RecursionError
    if isinstance(value, int) and not _INT_LEAST <= value <= _INT_MOST:
        raise BadInput(field, value, "use a number that has 64 bits at most")
    if isinstance(value, float) and (math.isnan(value) or (math.isinf(value) and not not_a_number)):
        raise BadInput(field, value, not_a_number or "use a finite number")
    if isinstance(value, (str, Path)) and not _is_unicode(str(value)):
        raise BadInput(field, value, _TEXT_REMEDY)
    for name, part in _parts(value):
        _require_plain(f"{field}{name}", part, not_a_number=not_a_number, depth=depth + 1)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a struct, mapping or list, each with the suffix of its name."""
    if isinstance(value, msgspec.Struct):
        names = zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True)
        yield from ((f".{encoded}", getattr(value, name)) for name, encoded in names)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield " key", key
            yield f".{key}", part
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{place}]", part) for place, part in enumerate(value))


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def named_path(field: str, value: object) -> Path:
    """Return a text or a path as a path.

    Raises:
        BadInput: naming the field, also for an empty text, such as that of an unset variable.
    """
    path: Path = convert(field, value, Path)
    if value == "":
        raise BadInput(
            field, value, "name a place, or leave it out; write . for the working directory"
        )
    return path


# -- what is wrong ---------------------------------------------------------------------------------


def _remedy(value: Any, choices: list[Any]) -> str:
    """Return the remedy for a value that is of none of these types."""
    for choice in choices:
        inner = (
            get_args(choice)[0] if get_origin(choice) in _CONTAINERS and get_args(choice) else None
        )
        if isinstance(inner, type) and inner not in (Any, object) and isinstance(value, inner):
            return f"write a list: [{type(value).__name__}(...)]"
        if isinstance(value, type) and isinstance(choice, type) and issubclass(value, choice):
            return f"give an instance: {value.__name__}(...)"
    return f"use a value of type {_join_with_or(map(_in_words, choices))}"


def _in_words(hint: Any) -> str:
    """Return a type as messages to users name it."""
    hint = _without_annotations(hint)
    if hint in (None, type(None)):
        return "None"
    origin, parts = get_origin(hint), [part for part in get_args(hint) if part is not ...]
    if origin is Literal:
        return _join_with_or(map(repr, parts))
    if origin in _CONTAINERS:
        return f"list of {_join_with_or(_in_words(choice) for choice in _choices(parts[0]))}"
    if origin in (dict, collections.abc.Mapping):
        return "dict"
    if origin is collections.abc.Callable:
        return "function"
    return str(getattr(origin or hint, "__name__", hint))


def _join_with_or(words: typing.Iterable[str]) -> str:
    *others, last = list(dict.fromkeys(words))
    return f"{', '.join(others)} or {last}" if others else last


def _refusal(field: str, value: Any, hint: Any, error: str) -> BadInput:
    """Return the BadInput for a value, or for a part of it such as ``disk.keep_last``.

    Args:
        error: message of msgspec, which names the part.
    """
    place = _PLACE.search(error)
    for name, index in _PART.findall(place[1]) if place else ():
        field += f".{name}" if name else f"[{index}]"
        value, hint = _value_of(value, name, index), _type_of(hint, name)
    structs = [
        choice
        for choice in _choices(hint)
        if isinstance(choice, type) and issubclass(choice, msgspec.Struct)
    ]
    if part := _FIELD_IN_QUOTES.search(error):  # the struct has no such field, or lacks it
        fields = ", ".join(structs[0].__struct_encode_fields__) if structs else ""
        remedy = f"use one of {fields}" if "unknown" in error else "it is missing"
        return BadInput(f"{field}.{part[1]}", _value_of(value, part[1], ""), remedy)
    literals = [
        literal
        for choice in _choices(hint)
        if get_origin(choice) is Literal
        for literal in get_args(choice)
    ]
    if literals:
        return BadInput(field, value, f"use one of {', '.join(map(str, literals))}")
    if hint is not Any and hint is not None:
        return BadInput(
            field, value, f"use a value of type {_join_with_or(map(_in_words, _choices(hint)))}"
        )
    expected = _EXPECTED.search(error)
    words = [_PYTHON_NAMES.get(word, word) for word in expected[1].split(" | ")] if expected else []
    return BadInput(
        field,
        value,
        f"use a value of type {_join_with_or(words)}" if words else error.partition(" - ")[0],
    )


def _value_of(value: Any, name: str, index: str) -> Any:
    """Return the part of a value with this name or index.

    Return the value itself if it has no parts, and None if a part of that name is missing.
    """
    if isinstance(value, Mapping):
        return value.get(name)
    if isinstance(value, msgspec.Struct):
        field_names = dict(
            zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
        )
        return getattr(value, field_names.get(name, name), None)
    if index and isinstance(value, (list, tuple)):
        return value[int(index)]
    return value


def _type_of(hint: Any, name: str) -> Any:
    """Return the type of a part of a value, or None if it is unknown."""
    for choice in map(_without_annotations, _choices(hint)):
        if name and isinstance(choice, type) and issubclass(choice, msgspec.Struct):
            return next(
                (
                    field.type
                    for field in msgspec.structs.fields(choice)
                    if field.encode_name == name
                ),
                None,
            )
        if not name and get_origin(choice) in _CONTAINERS and get_args(choice):
            return get_args(choice)[0]
    return None
