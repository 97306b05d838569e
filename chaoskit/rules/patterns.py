"""The regular expressions of rules: which group holds the number, and the same expression for NaN and infinity."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

_NON_FINITE = r"((?<!\w)[+-]?(?i:nan|inf(?:inity)?)(?!\w))"


class Group(NamedTuple):
    """A capturing group: its place in the pattern, parentheses included."""

    start: int
    end: int


def outer_groups(pattern: str) -> list[Group]:
    """The capturing groups that lie in no other one, from left to right."""
    found: list[Group] = []
    opened: list[tuple[int, bool]] = []
    place = 0
    while place < len(pattern):
        letter = pattern[place]
        if letter == "\\":
            place += 1
        elif letter == "[":
            place = _end_of_class(pattern, place)
        elif letter == "(":
            captures = not pattern.startswith("(?", place) or pattern.startswith("(?P<", place)
            opened.append((place, captures))
        elif letter == ")" and opened:
            start, captures = opened.pop()
            if captures and not any(outer for _, outer in opened):
                found.append(Group(start, place + 1))
        place += 1
    return found


def _end_of_class(pattern: str, start: int) -> int:
    """The place of the ``]`` that ends the class; one that comes first in it stands for itself."""
    place = start + 1
    place += pattern.startswith("^", place)
    place += pattern.startswith("]", place)
    while place < len(pattern) and pattern[place] != "]":
        place += 2 if pattern[place] == "\\" else 1
    return place


def non_finite(pattern: str) -> re.Pattern[str] | None:
    """The same pattern with NaN or an infinity where its number stands; None if it captures no single number.

    ``loss: (\\d+)`` says nothing about ``loss: nan``. With this a rule knows the line all the same.
    """
    groups = outer_groups(pattern)
    if len(groups) != 1:
        return None
    before, after = pattern[: groups[0].start], pattern[groups[0].end :]
    try:
        return re.compile(before + _NON_FINITE + after)
    except re.error:
        return None  # it refers to a group that is gone


def nests_repeats(pattern: str) -> bool:
    """Whether something is repeated without a limit that is itself nothing but such a repeat, as in ``(a+)+``.

    On a line that does not match in the end, the ways to divide it between the two double with every character. Other
    patterns can be as slow, such as ``(.*,)*``: this finds the plainest kind, and nothing that is well.
    """
    parser: Any = importlib.import_module(
        "re._parser"
    )  # of the standard library, which has no public one
    return any(
        _is_nested(body, parser.MAXREPEAT)
        for body in _endless(parser.parse(pattern), parser.MAXREPEAT)
    )


def _endless(parsed: Any, most: Any) -> Iterator[Any]:
    """What is repeated without a limit, at any depth."""
    for kind, content in parsed:
        if str(kind) in ("MAX_REPEAT", "MIN_REPEAT") and content[1] == most:
            yield content[2]
        for inner in _inside(content):
            yield from _endless(inner, most)


def _is_nested(body: Any, most: Any) -> bool:
    """Whether ``body`` can be a single repeat without a limit, all else in it being empty."""
    needed = [one for one in body if _least(body, one)]
    if len(needed) > 1:
        return False
    return any(
        _repeats(kind, content, most)
        or (str(kind) == "SUBPATTERN" and _is_nested(content[-1], most))
        for kind, content in needed or body
    )


def _repeats(kind: Any, content: Any, most: Any) -> bool:
    return str(kind) in ("MAX_REPEAT", "MIN_REPEAT") and content[1] == most


def _least(body: Any, one: Any) -> bool:
    """Whether this part of ``body`` takes a character at least."""
    parts = type(body)(body.state, [one])
    return bool(parts.getwidth()[0])


def _inside(content: Any) -> Iterator[Any]:
    """Patterns within a part of a pattern."""
    for one in content if isinstance(content, (tuple, list)) else ():
        if hasattr(one, "getwidth"):
            yield one
        elif isinstance(one, (tuple, list)):
            yield from _inside(one)
