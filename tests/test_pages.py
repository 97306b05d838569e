"""Pages of data files stay in memory when their readers die, and when the page cache is dropped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs.reading import mapped_bytes
from support.waiting import wait_until

from chaoskit.data.pages import MappedPages, PageKeeper
from faults import Kill

SIZE = 40 * 2**20 + 5000
#: The page cache belongs to the whole machine: the kernel may take back some pages at any time, and keep some that a
#: program drops, while it has work with them. So a file counts as there, or as gone, from these amounts on.
MOST, LITTLE = SIZE * 0.9, SIZE * 0.1


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file on a disk, none of it in memory."""
    path = tmp_path / "data"
    path.write_bytes(os.urandom(2**20) * (SIZE // 2**20) + bytes(SIZE % 2**20))
    if file_system_of(path) in ("tmpfs", "ramfs"):
        pytest.skip("temporary files lie in memory here")
    await_dropped(path)
    return path


def file_system_of(path: Path) -> str:
    command = ["stat", "--file-system", "--format=%T", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def await_dropped(path: Path) -> None:
    """Drop it from the cache. The kernel keeps pages that it is just writing, or has on a list of a CPU."""
    pages = MappedPages(path)

    def is_dropped() -> bool:
        drop(path)
        return pages.resident_bytes() < LITTLE

    wait_until(is_dropped, "the end of the pages of a file that nothing maps")


def drop(path: Path) -> None:
    """Tell the kernel that the file is not needed, as backup programs do, and some data loaders."""
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture
def keeper() -> Iterator[PageKeeper]:
    keeper = PageKeeper()
    yield keeper
    keeper.close()


def test_dropping_the_cache_takes_only_what_is_not_kept(file: Path, keeper: PageKeeper) -> None:
    """The control: without a keeper the pages are gone."""
    pages = MappedPages(file)
    file.read_bytes()
    assert pages.resident_bytes() > MOST
    await_dropped(file)
    keeper.keep(file)
    wait_until(lambda: mapped_bytes(os.getpid(), file) > MOST, "a keeper that maps the file")
    drop(file)
    assert pages.resident_bytes() > MOST


def test_a_budget_is_not_exceeded(file: Path, tmp_path: Path) -> None:
    """The part of a file that fits is kept; files that are empty, or not there, are no trouble."""
    keeper = PageKeeper(budget_bytes=SIZE // 4)
    try:
        (tmp_path / "empty").touch()
        for path in (tmp_path / "none", tmp_path / "empty", file, tmp_path / "more"):
            keeper.keep(path)
        wait_until(lambda: mapped_bytes(os.getpid(), file) > MOST / 4, "a keeper that maps a part of the file")
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
    """Have a process read all of the data, and kill it; returns the bytes that it read from the disk."""
    pipe, folder = subprocess.PIPE, str(Path(__file__).parent)
    with subprocess.Popen([sys.executable, "-c", _READER, str(path), folder], stdin=pipe, stdout=pipe) as reader:
        assert reader.stdout is not None
        faults = int(reader.stdout.readline())
        reader.send_signal(signal.SIGKILL)
    return faults


def test_the_successor_of_a_killed_reader_waits_for_no_disk(file: Path, keeper: PageKeeper) -> None:
    """Also when the cache was dropped between the two; without a keeper the second one reads it all from the disk."""
    assert read_and_die(file) > SIZE / 2
    assert read_and_die(file) < LITTLE
    await_dropped(file)
    assert read_and_die(file) > SIZE / 2
    keeper.keep(file)
    wait_until(lambda: mapped_bytes(os.getpid(), file) > MOST, "a keeper that maps the file")
    drop(file)
    assert read_and_die(file) < LITTLE


@pytest.mark.promise("`trainer.keep_warm(path)` has the node's keeper keep the pages")
def test_the_agent_keeps_what_a_killed_worker_read(chaos: Any, file: Path, tmp_path: Path) -> None:
    """Each worker, the replacement too, drops the cache before it reads, and waits for no disk."""
    notes = tmp_path / "notes"
    options = {"path": str(file), "notes": str(notes)}
    plan = {"nodes": 2, "steps": 20, "until": {"world": 2}, "faults": [Kill(rank=1, at_step=4)]}
    outcome = chaos.run("jobs/reading.py", options=options, twin=False, **plan)
    assert outcome.verdict == "passed"
    read = [int(line.split()[1]) for line in notes.read_text().splitlines()]
    assert len(read) >= 3
    assert max(read) < LITTLE
