"""Pages of data files stay in memory when whoever read them dies, and when somebody drops the page cache."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs.reading import mapped_bytes

from chaoskit.data.pages import MappedPages, PageKeeper
from faults import Kill

SIZE = 40 * 2**20 + 5000
LIMIT_S = 60.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file on a disk, none of it in memory."""
    path = tmp_path / "data"
    path.write_bytes(os.urandom(2**20) * (SIZE // 2**20) + bytes(SIZE % 2**20))
    drop(path)
    if MappedPages(path).resident_bytes():
        pytest.skip("temporary files lie in memory here, or the page cache cannot be dropped")
    return path


def drop(path: Path) -> None:
    """What backup programs do, and some data loaders."""
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture
def keeper() -> Iterator[PageKeeper]:
    keeper = PageKeeper()
    yield keeper
    keeper.close()


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_dropping_the_cache_takes_only_what_nobody_keeps(file: Path, keeper: PageKeeper) -> None:
    """The control: without a keeper it is gone at once."""
    pages = MappedPages(file)
    file.read_bytes()
    assert pages.resident_bytes() == SIZE
    drop(file)
    assert pages.resident_bytes() < SIZE / 10
    keeper.keep(file)
    until(lambda: pages.resident_bytes() == SIZE)
    until(lambda: mapped_bytes(os.getpid(), file) >= SIZE)
    drop(file)
    assert pages.resident_bytes() == SIZE


def test_a_budget_is_not_exceeded(file: Path, tmp_path: Path) -> None:
    """What fits is kept; files that are empty, or not there, are no trouble."""
    keeper = PageKeeper(budget_bytes=SIZE // 4)
    try:
        (tmp_path / "empty").touch()
        for path in (tmp_path / "none", tmp_path / "empty", file, tmp_path / "more"):
            keeper.keep(path)
        until(lambda: mapped_bytes(os.getpid(), file) >= SIZE // 4 - mmap.PAGESIZE)
        assert mapped_bytes(os.getpid(), file) <= SIZE // 4
    finally:
        keeper.close()
    assert not mapped_bytes(os.getpid(), file)


_READER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from jobs.reading import read_all
print(read_all(Path(sys.argv[1]))[1], flush=True)
sys.stdin.read()
"""


def read_and_die(path: Path) -> int:
    """What a process that reads all of the data, and is killed, had to wait for."""
    pipe, folder = subprocess.PIPE, str(Path(__file__).parent)
    with subprocess.Popen([sys.executable, "-c", _READER, str(path), folder], stdin=pipe, stdout=pipe) as reader:
        assert reader.stdout is not None
        faults = int(reader.stdout.readline())
        reader.send_signal(signal.SIGKILL)
    return faults


def test_who_replaces_a_killed_reader_waits_for_no_disk(file: Path, keeper: PageKeeper) -> None:
    """Also when the cache was dropped between the two; without a keeper the second one reads it all from the disk."""
    assert read_and_die(file) > 0
    assert read_and_die(file) == 0
    drop(file)
    assert read_and_die(file) > 0
    keeper.keep(file)
    until(lambda: mapped_bytes(os.getpid(), file) >= SIZE)
    drop(file)
    assert read_and_die(file) == 0


def test_the_agent_keeps_what_a_killed_worker_read(chaos: Any, file: Path, tmp_path: Path) -> None:
    """Each worker, the replacement too, drops the cache before it reads, and waits for no disk."""
    notes = tmp_path / "notes"
    options = {"path": str(file), "notes": str(notes)}
    faults = [Kill(rank=1, at_step=4)]
    outcome = chaos.run("jobs/reading.py", nodes=2, steps=12, options=options, faults=faults, twin=False)
    assert outcome.verdict == "passed"
    read = [int(line.split()[1]) for line in notes.read_text().splitlines()]
    assert len(read) >= 3
    assert not any(read)
