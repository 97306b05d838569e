"""Open files of the test process, of which servers of large jobs have thousands."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

_SELECT_MAX = 1024  # select(2) takes no descriptor from here on


@contextmanager
def many_open() -> Iterator[None]:
    """Every descriptor that is opened in the block has a number that ``select`` does not take."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * _SELECT_MAX
    if before[1] < wanted:
        pytest.skip(f"this process may not open {wanted} files")
    with ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], wanted), before[1]))
        while True:
            descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, descriptor)
            if descriptor >= _SELECT_MAX:
                break
        yield
