"""Patterns that find steps and losses in the log of a command.

-> ``stacks/log.py`` reads logs with them. ``experiment/run/legibility.py``: what is reported of a
log in which they find nothing.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from chaoskit.errors import BadInput, name_remedy
from chaoskit.typed import convert_fields

_DIGITS_MAX = 18  # digits that fit into 64 bits
# colours, movements of the cursor, links and titles: ECMA-48
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-Z\\^-~])")
_SEPARATORS = ",_'\u2019\u00a0\u202f"
_GROUPED = re.compile(rf"[1-9]\d{{0,2}}([{_SEPARATORS}])\d{{3}}(?:\1\d{{3}})*", re.ASCII)
# for digits after a number that a pattern has cut; columns, such as 17,250,0.33, are several
# numbers
_MORE_GROUPS = re.compile(
    rf"([{_SEPARATORS}])\d{{3}}(?:\1\d{{3}})*(?![{_SEPARATORS}.]?\d)", re.ASCII
)
_LIKE_A_NUMBER = re.compile(rf"\d(?:[\d.{_SEPARATORS}]*\d)?\s?(?:[kKMG]|[eE][+-]?\d+)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class PatternMatch:
    """The content of one line of a log.

    Attributes:
        step: the number of the step; None if the line shows none.
        loss: the text of the loss, as printed; None if the line shows none.
        odd: a text that a pattern matched although it is no number; "" if there is none.
        is_unread: ``odd`` is the number of a step, in a form that cannot be read.
    """

    step: int | None = None
    loss: str | None = None
    odd: str = ""
    is_unread: bool = False


@dataclass(frozen=True, kw_only=True)
class LogPatterns:
    """Regular expressions, each with one group, that are searched in every line of output.

    A loss belongs to the step on its own line, or else to the last step that the same node has
    shown. Colours and other escape sequences of terminals are ignored, unless a pattern matches
    only with them.

    Args:
        step: a pattern; its group is the number of a finished step: a whole number, also with
            separators, such as 1,000.
        loss: a pattern; its group is the loss of that step. None if losses are not compared.
        tolerance: the allowed difference of a loss from the unbroken run's, relative to that one
            (absolute if that is below 1). 0: they must be equal as numbers, to the last printed
            digit.
        rank: a pattern; its group is the rank of the process that has printed the line. It serves a
            job that runs already, and whose processes show no rank. None if it is not needed.

    Raises:
        BadInput: if a pattern is no regular expression, or has not exactly one group. Also if
            ``tolerance`` is no number of 0 or more.
    """

    step: str
    loss: str | None = None
    tolerance: float = 0.0
    rank: str | None = None

    def __post_init__(self) -> None:
        _require("step", self.step, r"step (\d+)")
        if self.loss is not None:
            _require("loss", self.loss, r"loss ([\d.eE+-]+)")
        if self.rank is not None:
            _require("rank", self.rank, r"rank (\d+)")
        for name, converted in convert_fields(self).items():
            # converts to the declared type; the class is frozen
            object.__setattr__(self, name, converted)
        if self.tolerance < 0:
            raise BadInput("tolerance", self.tolerance, "use a number, 0 or more")

    def read(self, text: str) -> PatternMatch | None:
        """Return the step and the loss that a line of the log shows; None if no pattern matches."""
        step, odd_step = _step(_match(self.step, text))
        loss, odd_loss = _loss(_match(self.loss, text)) if self.loss is not None else (None, "")
        if step is None and loss is None and not odd_step and not odd_loss:
            return None
        is_unread = _LIKE_A_NUMBER.fullmatch(odd_step) is not None
        return PatternMatch(step, loss, odd_step or odd_loss, is_unread)

    def ranks(self, lines: Iterable[str]) -> set[int]:
        """Return the ranks that lines of a log show."""
        if self.rank is None:
            return set()
        matches = [_match(self.rank, line) for line in lines]
        texts = [match.group(1) or "" for match in matches if match is not None]
        return {int(text) for text in texts if text.isascii() and text.isdecimal()}


def patterns_of(settings: Mapping[str, Any], field: str = "watch") -> LogPatterns:
    """Return the patterns in the settings of a file.

    Args:
        settings: ``step`` and, if needed, ``loss``, ``tolerance`` and ``rank``.
        field: name of the part of the file that has them.

    Raises:
        BadInput: for a wrong name or value, or if ``step`` is missing.
    """
    names = [entry.name for entry in fields(LogPatterns)]
    for name, pattern in settings.items():
        if name not in names:
            raise BadInput(f"{field}.{name}", pattern, name_remedy(name, names))
    if "step" not in settings:
        raise BadInput(f"{field}.step", None, r"give the pattern of a step, such as step (\d+)")
    return LogPatterns(**settings)


def strip_escapes(text: str) -> str:
    """Return a text without colours and other escape sequences of terminals."""
    return _ESCAPES.sub("", text)


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Return the compiled pattern, from a cache."""
    return re.compile(pattern)


def _require(field: str, pattern: object, example: str) -> None:
    """Raise BadInput unless a pattern is a regular expression with one group."""
    if not isinstance(pattern, str):
        raise BadInput(field, pattern, f"use a regular expression such as {example}")
    try:
        groups = _compiled(pattern).groups
    except (re.error, OverflowError, RecursionError) as error:
        raise BadInput(field, pattern, f"correct the regular expression: {error}") from None
    if groups != 1:
        raise BadInput(
            field,
            pattern,
            f"use one group, as in {example}; this has {groups} (write (?:...) for others)",
        )


def _match(pattern: str, text: str) -> re.Match[str] | None:
    """Return the match of a pattern in a line, or None.

    The line is searched without its escape sequences first, then with them.
    """
    match = None
    if "\x1b" in text:
        match = _compiled(pattern).search(strip_escapes(text))
    return match or _compiled(pattern).search(text)


def _step(match: re.Match[str] | None) -> tuple[int | None, str]:
    """Return the number of a step and "", or None and the text that cannot be read as a number.

    Without a match it is None and "".
    """
    text = match.group(1) if match is not None else None
    if match is None or text is None:
        return None, ""
    if (
        match.end() == match.end(1)
        and (more := _MORE_GROUPS.match(match.string, match.end())) is not None
    ):
        whole_number = text + more.group()
        if (
            _GROUPED.fullmatch(whole_number) is not None
        ):  # the pattern matched only a part of the number
            return None, whole_number
    if not match.string[match.end(1) : match.end(1) + 1].isdecimal():
        text = text.strip(_SEPARATORS)  # separators may end a clause, or quote the number
    if (separated := _GROUPED.fullmatch(text)) is not None:
        text = text.replace(separated.group(1), "")
    is_number = text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX
    return (int(text), "") if is_number else (None, text)


def _loss(match: re.Match[str] | None) -> tuple[str | None, str]:
    """Return the text of a loss and "", or None and the text that is no number.

    Without a match it is None and "".
    """
    text = match.group(1) if match is not None else None
    if text is None:
        return None, ""
    try:
        float(text)
    except ValueError:
        return None, text
    return text, ""
