"""Conversion of what a caller gives to the types that are declared for it.

Constructors of faults and settings check nothing, so every public function converts its arguments
here before it starts anything: :func:`typed_arguments` does it for a whole function,
:func:`convert` for one value. A tuple may be given as a list, a float as an int, an enumeration as
its value, a path as text, and a number as that of NumPy. A bool is no number, and a text is never
read as one.
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

_MAY_BE_ENDLESS = "may be math.inf"
#: The type of a limit in seconds that may be ``math.inf``. Any other float is a finite number.
LimitS = Annotated[float, _MAY_BE_ENDLESS]

_INT_LEAST, _INT_MOST = -(2**63), 2**64 - 1  # what a message or a file in JSON can hold
_DEPTH_MAX = 100
_NAME_BYTES_MAX, _PATH_BYTES_MAX = 255, 4095  # NAME_MAX and PATH_MAX of Linux, without the NUL
_TEXT_REMEDY = "use a text of valid Unicode"
_PLAIN = (bool, int, float, str, bytes, type(None))
_CONTAINERS = (list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Collection)
#: msgspec's words -> Python's.
_WORDS = {"object": "dict", "array": "list", "null": "None"}
_EXPECTED = re.compile(r"Expected `([^`]+)`")
_FIELD_IN_QUOTES = re.compile(r"field `(\w+)`")
_PLACE = re.compile(r"`\$([^`]*)`$")
_PART = re.compile(r"\.(\w+)|\[(\d+)\]")


# -- whole calls --------------------------------------------------------------------------------------------------


def typed_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Convert the arguments of each call to the types of the parameters, before the function is entered.

    A ``**settings`` parameter is passed on as it is: the function knows the types of its settings.
    """
    signature = inspect.signature(function)
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    passed_on = {name for name, kind in kinds.items() if kind == inspect.Parameter.VAR_KEYWORD} | {
        "self"
    }
    several = {name for name, kind in kinds.items() if kind == inspect.Parameter.VAR_POSITIONAL}

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # raises it with the name of the function
        hints = _hints(function)
        for name, value in bound.arguments.items():
            if name in several:
                bound.arguments[name] = tuple(
                    convert(name, item, hints.get(name, Any)) for item in value
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
    """Convert the fields of a dataclass instance to their declared types; a field that needs no change is left out.

    A float field may hold an infinite number if its default is one.

    Raises:
        BadInput: naming the field.
    """
    kind: Any = type(instance)
    hints = _hints(kind)
    changed = {}
    for item in dataclasses.fields(instance):
        if not item.init:
            continue
        value, hint = getattr(instance, item.name), hints.get(item.name, Any)
        is_endless = isinstance(item.default, float) and not math.isfinite(item.default)
        converted = convert(item.name, value, hint, endless=is_endless)
        is_plain = type(value) in _PLAIN and type(converted) in _PLAIN
        is_same = converted is value or is_plain or isinstance(value, enum.Enum)
        if not is_same and (type(converted) is not type(value) or converted != value):
            changed[item.name] = converted
    return changed


@functools.cache
def _hints(owner: Any) -> dict[str, Any]:
    """The annotations of a function or a class. One that cannot be resolved here, as of type checkers alone, is Any."""
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


# -- one value ----------------------------------------------------------------------------------------------------


def convert(field: str, value: Any, hint: Any, *, endless: bool = False) -> Any:
    """Convert a value to its declared type.

    Args:
        field: name of the argument or setting.
        hint: the declared type. A value whose type cannot be checked, such as a protocol, is returned as it is.
        endless: the value may be an infinite number, as that of a parameter of the type :data:`LimitS`.

    Raises:
        BadInput: naming the field, or the part of it that is wrong, the value and the remedy.
    """
    try:
        converted = _converted(field, value, hint)
        is_limit = _MAY_BE_ENDLESS in _extras(hint)
        remedy = (
            "use a number of seconds above 0, or math.inf"
            if is_limit
            else "use a number"
            if endless
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
    choices = [_bare(choice) for choice in _choices(hint)]
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
        if choice not in native and (made := _of_class(field, value, choice)) is not None:
            return made[0]
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
    """Refuse a path that no file system takes: each look at it would raise OSError."""
    names = [os.fsencode(name) for name in path.split("/")]
    if max(map(len, names)) > _NAME_BYTES_MAX or len(os.fsencode(path)) > _PATH_BYTES_MAX:
        remedy = (
            f"use a path of up to {_PATH_BYTES_MAX} bytes, with names of up to {_NAME_BYTES_MAX}"
        )
        raise BadInput(field, path, remedy)


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _extras(hint: Any) -> list[Any]:
    """The annotations of the alternatives of a type."""
    return [
        extra
        for choice in _choices(hint)
        if get_origin(choice) is Annotated
        for extra in choice.__metadata__
    ]


def _choices(hint: Any) -> list[Any]:
    """The alternatives of a union; any other type is the only one."""
    if isinstance(hint, TypeVar):
        hint = hint.__bound__ or Any
    return list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else [hint]


def _is_native(hint: Any) -> bool:
    """Return whether msgspec converts to this type; instances of other classes are passed on as they are."""
    if hint is Any or hint in _PLAIN or get_origin(hint) is Literal:
        return True
    if isinstance(hint, type) and get_origin(hint) is None:
        return issubclass(hint, (msgspec.Struct, enum.Enum, dict, list, tuple, set, frozenset))
    if get_origin(hint) in (*_CONTAINERS, dict, collections.abc.Mapping):
        return all(
            _is_native(_bare(choice))
            for part in get_args(hint)
            for choice in _choices(part)
            if part is not ...
        )
    return False


def _of_class(field: str, value: Any, hint: Any) -> tuple[Any] | None:
    """The value as an instance of a class, or as a list of such instances; None where it is neither."""
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
    except TypeError:  # a protocol: its methods are not looked at
        return (value,)


def _converted_items(field: str, value: Any, origin: Any, parts: tuple[Any, ...]) -> Any:
    """Convert each item of a container. A sequence becomes a tuple unless a list or a set is declared."""
    kinds = list(parts[:1]) * len(value)
    if origin is tuple and ... not in parts:
        if len(value) != len(parts):
            raise BadInput(field, value, f"give {len(parts)} values")
        kinds = list(parts)
    pairs = zip(value, kinds, strict=True)
    items = [convert(f"{field}[{place}]", item, kind) for place, (item, kind) in enumerate(pairs)]
    return origin(items) if origin in (list, set, frozenset) else tuple(items)


class _NotPlain:
    """The place of an object that msgspec would take for a mapping, such as an array."""


def plain_structs(value: Any, depth: int = 0) -> Any:
    """Return structs as dicts, so that their fields can be checked, and numbers of NumPy as those of Python."""
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
        return {key: plain_structs(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset, range)):
        return [plain_structs(item, depth + 1) for item in value]
    return _NotPlain() if hasattr(type(value), "__getitem__") else value


def _require_plain(field: str, value: Any, *, not_a_number: str, depth: int = 0) -> None:
    """Refuse numbers and texts that no message and no file can hold, at any depth.

    Args:
        not_a_number: the remedy for NaN where infinite numbers are accepted; empty where they are refused.
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
    if isinstance(value, msgspec.Struct):
        names = zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True)
        yield from ((f".{encoded}", getattr(value, name)) for name, encoded in names)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield " key", key
            yield f".{key}", item
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{place}]", item) for place, item in enumerate(value))


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def named_path(field: str, value: object) -> Path:
    """Convert a text or a path to a path; an empty text, such as that of an unset variable, names no place.

    Raises:
        BadInput: naming the field.
    """
    path: Path = convert(field, value, Path)
    if value == "":
        raise BadInput(
            field, value, "name a place, or leave it out; write . for the working directory"
        )
    return path


# -- what is wrong ------------------------------------------------------------------------------------------------


def _remedy(value: Any, choices: list[Any]) -> str:
    """Return what to write instead of a value that is of none of these types."""
    for choice in choices:
        inner = (
            get_args(choice)[0] if get_origin(choice) in _CONTAINERS and get_args(choice) else None
        )
        if isinstance(inner, type) and inner not in (Any, object) and isinstance(value, inner):
            return f"write a list: [{type(value).__name__}(...)]"
        if isinstance(value, type) and isinstance(choice, type) and issubclass(value, choice):
            return f"give an instance: {value.__name__}(...)"
    return f"use a value of type {_or(map(_in_words, choices))}"


def _in_words(hint: Any) -> str:
    hint = _bare(hint)
    if hint in (None, type(None)):
        return "None"
    origin, parts = get_origin(hint), [part for part in get_args(hint) if part is not ...]
    if origin is Literal:
        return _or(map(repr, parts))
    if origin in _CONTAINERS:
        return f"list of {_or(_in_words(choice) for choice in _choices(parts[0]))}"
    if origin in (dict, collections.abc.Mapping):
        return "dict"
    if origin is collections.abc.Callable:
        return "function"
    return str(getattr(origin or hint, "__name__", hint))


def _or(words: typing.Iterable[str]) -> str:
    *others, last = list(dict.fromkeys(words))
    return f"{', '.join(others)} or {last}" if others else last


def _refusal(field: str, value: Any, hint: Any, error: str) -> BadInput:
    """Return the refusal of a value, or of a part of one such as ``disk.keep_last``, from an error of msgspec."""
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
        known = ", ".join(structs[0].__struct_encode_fields__) if structs else ""
        remedy = f"use one of {known}" if "unknown" in error else "it is missing"
        return BadInput(f"{field}.{part[1]}", _value_of(value, part[1], ""), remedy)
    literals = [
        value
        for choice in _choices(hint)
        if get_origin(choice) is Literal
        for value in get_args(choice)
    ]
    if literals:
        return BadInput(field, value, f"use one of {', '.join(map(str, literals))}")
    if hint is not Any and hint is not None:
        return BadInput(field, value, f"use a value of type {_or(map(_in_words, _choices(hint)))}")
    expected = _EXPECTED.search(error)
    words = [_WORDS.get(word, word) for word in expected[1].split(" | ")] if expected else []
    return BadInput(
        field, value, f"use a value of type {_or(words)}" if words else error.partition(" - ")[0]
    )


def _value_of(value: Any, name: str, index: str) -> Any:
    """A part of a value, where msgspec found it."""
    if isinstance(value, Mapping):
        return value.get(name)
    if isinstance(value, msgspec.Struct):
        spelled = dict(zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True))
        return getattr(value, spelled.get(name, name), None)
    if index and isinstance(value, (list, tuple)):
        return value[int(index)]
    return value


def _type_of(hint: Any, name: str) -> Any:
    """The type of a part of a value, or None where that is not known."""
    for choice in map(_bare, _choices(hint)):
        if name and isinstance(choice, type) and issubclass(choice, msgspec.Struct):
            return next(
                (one.type for one in msgspec.structs.fields(choice) if one.encode_name == name),
                None,
            )
        if not name and get_origin(choice) in _CONTAINERS and get_args(choice):
            return get_args(choice)[0]
    return None
