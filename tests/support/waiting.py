"""Waiting for an event, with one limit for all tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

#: Limit of a wait for an event that must come, unless a test builds containers or launches a whole
#: job. It is far above the usual time on a busy machine: a test that reaches it has found a hang,
#: not a slow machine.
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
    while not (result := condition()):
        assert time.monotonic() < deadline_s, f"not within {limit_s:g} s: {what}"
        time.sleep(poll_s)
    return result


def stays(
    condition: Callable[[], object], what: str, *, for_s: float, poll_s: float = 0.005
) -> None:
    """Poll ``condition`` for ``for_s`` seconds; it must be true each time.

    This is the only way to show that an event does *not* happen. Make sure first, with
    :func:`wait_until`, that it could.

    Raises:
        AssertionError: at the first poll that finds it false.
    """
    deadline_s = time.monotonic() + for_s
    while True:
        assert condition(), f"no longer true: {what}"
        if time.monotonic() >= deadline_s:
            return
        time.sleep(poll_s)
