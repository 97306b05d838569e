"""Waiting for an event, with one limit for all tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

#: Limit of a wait for something that must come, unless a test builds containers or launches a whole job. Far above
#: what it takes on a busy machine: a test that reaches it has found a hang, not a slow machine.
LIMIT_S = 60.0


def wait_until(
    condition: Callable[[], Found], what: str, *, limit_s: float = LIMIT_S, poll_s: float = 0.005
) -> Found:
    """Poll ``condition`` until it is true, and return its value.

    Args:
        what: the awaited event, in words; it stands in the error.

    Raises:
        AssertionError: if the event did not come within ``limit_s``.
    """
    deadline_s = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"not within {limit_s:g} s: {what}"
        time.sleep(poll_s)
    return found


def stays(
    condition: Callable[[], object], what: str, *, for_s: float, poll_s: float = 0.005
) -> None:
    """Poll ``condition`` for ``for_s`` seconds; it must be true each time.

    The only way to show that something does *not* happen. Make sure first, with :func:`wait_until`, that it could.

    Raises:
        AssertionError: at the first look at which it is false.
    """
    deadline_s = time.monotonic() + for_s
    while True:
        assert condition(), f"no longer true: {what}"
        if time.monotonic() >= deadline_s:
            return
        time.sleep(poll_s)
