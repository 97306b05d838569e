"""How steps and losses are found in the log of a command."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from chaoskit.errors import BadInput

_DIGITS_MAX = 18  # what fits into 64 bits


@dataclass(frozen=True, slots=True)
class Found:
    """What one line of a log tells.

    Attributes:
        step: the number that it shows; None if it shows none.
        loss: the text of the number, as it was printed.
        odd: what a pattern matched though it is no number.
    """

    step: int | None = None
    loss: str | None = None
    odd: str = ""


@dataclass(frozen=True, kw_only=True)
class LogPatterns:
    """Regular expressions, each with one group, that are searched for in every line of a command's output.

    A loss belongs to the step on its own line, else to the last one that the same node has shown before.

    Args:
        step: its group is the number of a step that is over: a whole number.
        loss: its group is the loss of that step; None where no losses are to be compared.
        tolerance: by how much a loss may differ from the unbroken run's, relative to that (absolute where that is below
            1). 0: they are equal as numbers, to the last digit that was printed.

    Raises:
        BadInput: if a pattern is none, or has not one group.
    """

    step: str
    loss: str | None = None
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        _require("step", self.step, r"step (\d+)")
        if self.loss is not None:
            _require("loss", self.loss, r"loss ([\d.eE+-]+)")
        if isinstance(self.tolerance, bool) or not isinstance(self.tolerance, int | float):
            raise BadInput("tolerance", self.tolerance, "use a number, 0 or more")
        if not 0 <= self.tolerance < math.inf:
            raise BadInput("tolerance", self.tolerance, "use a number, 0 or more")

    def read(self, text: str) -> Found | None:
        """What a line of the log tells; None if nothing."""
        step, odd_step = _group(self.step, text, _is_step)
        loss, odd_loss = _group(self.loss, text, _is_number) if self.loss is not None else (None, "")
        if step is None and loss is None and not odd_step and not odd_loss:
            return None
        return Found(None if step is None else int(step), loss, odd_step or odd_loss)


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _require(field: str, pattern: object, example: str) -> None:
    if not isinstance(pattern, str):
        raise BadInput(field, pattern, f"use a regular expression such as {example}")
    try:
        groups = _compiled(pattern).groups
    except re.error as error:
        raise BadInput(field, pattern, f"mend the regular expression: {error}") from None
    if groups != 1:
        raise BadInput(field, pattern, f"use one group, as in {example}; this has {groups} (write (?:...) for others)")


def _group(pattern: str, text: str, is_fine: Callable[[str], bool]) -> tuple[str | None, str]:
    """What the pattern's group holds: as a number, or as something odd."""
    match = _compiled(pattern).search(text)
    found = match.group(1) if match is not None else None
    if found is None:
        return None, ""
    return (found, "") if is_fine(found) else (None, found)


def _is_step(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
