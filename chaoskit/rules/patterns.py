"""Regular expressions of rules: the group with the number, and the pattern for NaN and infinity.

-> ``rules/engine.py`` matches them. ``rules/rules.py``: which patterns are refused.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

_NON_FINITE = r"((?<!\w)[+-]?(?i:nan|inf(?:inity)?)(?!\w))"


class PatternGroup(NamedTuple):
    """Capturing group: its place in the pattern, with the parentheses; ``end`` is behind them."""

    start: int
    end: int


def outer_groups(pattern: str) -> list[PatternGroup]:
    """Return the capturing groups that lie in no other one, from left to right."""
    groups: list[PatternGroup] = []
    open_groups: list[tuple[int, bool]] = []
    position = 0
    while position < len(pattern):
        letter = pattern[position]
        if letter == "\\":
            position += 1
        elif letter == "[":
            position = _end_of_class(pattern, position)
        elif letter == "(":
            captures = not pattern.startswith("(?", position) or pattern.startswith(
                "(?P<", position
            )
            open_groups.append((position, captures))
        elif letter == ")" and open_groups:
            start, captures = open_groups.pop()
            if captures and not any(outer for _, outer in open_groups):
                groups.append(PatternGroup(start, position + 1))
        position += 1
    return groups


def _end_of_class(pattern: str, start: int) -> int:
    """Return the position of the ``]`` that ends the class.

    A ``]`` that comes first in the class stands for itself.
    """
    position = start + 1
    position += pattern.startswith("^", position)
    position += pattern.startswith("]", position)
    while position < len(pattern) and pattern[position] != "]":
        position += 2 if pattern[position] == "\\" else 1
    return position


def non_finite(pattern: str) -> re.Pattern[str] | None:
    """Return the pattern with NaN or an infinity in place of its number.

    Return None if it captures no single number, or refers back to the group of the number.
    ``loss: (\\d+)`` does not match ``loss: nan``: with this a rule matches the line all the same.
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
    """Return True if a repeat without a limit consists of such a repeat, as in ``(a+)+``.

    For a line that does not match in the end, each character doubles the ways to divide it between
    the two. Other patterns can be as slow, such as ``(.*,)*``: this finds only the plainest kind,
    and no harmless pattern. Raises re.error if the pattern is invalid.
    """
    parser: Any = importlib.import_module("re._parser")  # the standard library has no public parser
    return any(
        _is_nested(body, parser.MAXREPEAT)
        for body in _unlimited_bodies(parser.parse(pattern), parser.MAXREPEAT)
    )


def _unlimited_bodies(parsed: Any, unlimited: Any) -> Iterator[Any]:
    """Yield the bodies that are repeated without a limit, at any depth."""
    for kind, content in parsed:
        if str(kind) in ("MAX_REPEAT", "MIN_REPEAT") and content[1] == unlimited:
            yield content[2]
        for inner in _inside(content):
            yield from _unlimited_bodies(inner, unlimited)


def _is_nested(body: Any, unlimited: Any) -> bool:
    """Return True if ``body`` can be a single unlimited repeat, all else in it being empty."""
    nonempty_parts = [part for part in body if _takes_characters(body, part)]
    if len(nonempty_parts) > 1:
        return False
    return any(
        _repeats(kind, content, unlimited)
        or (str(kind) == "SUBPATTERN" and _is_nested(content[-1], unlimited))
        for kind, content in nonempty_parts or body
    )


def _repeats(kind: Any, content: Any, unlimited: Any) -> bool:
    """Return True if a part of a pattern is a repeat without a limit."""
    return str(kind) in ("MAX_REPEAT", "MIN_REPEAT") and content[1] == unlimited


def _takes_characters(body: Any, part: Any) -> bool:
    """Return True if this part of ``body`` takes at least one character."""
    parts = type(body)(body.state, [part])
    return bool(parts.getwidth()[0])


def _inside(content: Any) -> Iterator[Any]:
    """Yield the patterns within a part of a pattern."""
    for part in content if isinstance(content, (tuple, list)) else ():
        if hasattr(part, "getwidth"):
            yield part
        elif isinstance(part, (tuple, list)):
            yield from _inside(part)
