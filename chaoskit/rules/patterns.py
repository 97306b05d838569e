"""The regular expressions of rules: which group holds the number, and the same expression for NaN and infinity."""

from __future__ import annotations

import re
from typing import NamedTuple

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
