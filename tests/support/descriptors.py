"""Open files of the test process; servers of large jobs have thousands."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

_SELECT_MAX = 1024  # select(2) takes no descriptor of this number or above


@contextmanager
def many_open() -> Iterator[None]:
    """Give every descriptor opened in the block a number that ``select`` does not take."""
    limits_before = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * _SELECT_MAX
    if limits_before[1] < needed:
        pytest.skip(f"this process may not open {needed} files")
    with ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits_before)
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (max(limits_before[0], needed), limits_before[1])
        )
        while True:
            descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, descriptor)
            if descriptor >= _SELECT_MAX:
                break
        yield
