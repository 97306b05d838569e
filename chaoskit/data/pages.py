"""Pages of data files that stay in memory while the processes that read them come and go.

A page that some process has mapped is not dropped with the page cache, neither by ``drop_caches`` nor by somebody's
``posix_fadvise``. So a process that outlives the readers maps the files, and looks after them from time to time. The
pages are not locked: where memory gets scarce the kernel takes them back, and training goes on.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from pathlib import Path

import numpy as np

from chaoskit.osprocess import lower_priority, set_name

_MADV_WILLNEED = 3
_MADV_POPULATE_READ = 22  # maps what it reads; Linux 5.14
_CHUNK_BYTES = 2**23  # between two looks at whether to stop
_INTERVAL_S = 5.0
_NICENESS = 19
_BUDGET_SHARE = 0.5  # of the memory that is available
_SCARCE_SHARE = 0.1  # with less of it available the kernel is left alone

_libc = ctypes.CDLL(None, use_errno=True)  # lets other threads run meanwhile, as Python's own madvise does not
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class MappedPages:
    """The pages of a file, as far as ``limit_bytes``.

    Raises:
        OSError: if it cannot be read. ValueError: if it is empty.
    """

    def __init__(self, path: str | Path, limit_bytes: int | None = None) -> None:
        with Path(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            self.size_bytes = size if limit_bytes is None else min(size, limit_bytes)
            self._mapping = mmap.mmap(file.fileno(), self.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        self._address = np.frombuffer(self._mapping, np.uint8).ctypes.data

    def load(self, first: int) -> int:
        """Read and map a chunk that begins at a multiple of the page size; returns where the next one begins."""
        size = min(_CHUNK_BYTES, self.size_bytes - first)
        if _libc.madvise(self._address + first, size, _MADV_POPULATE_READ):
            _libc.madvise(self._address + first, size, _MADV_WILLNEED)
        return first + size

    def resident_bytes(self) -> int:
        """How much of it is in memory, whoever has read it."""
        pages = -(-self.size_bytes // mmap.PAGESIZE)
        there = np.zeros(pages, np.uint8)
        if _libc.mincore(self._address, self.size_bytes, there.ctypes.data):
            raise OSError(ctypes.get_errno(), "mincore")
        return min(self.size_bytes, int(np.count_nonzero(there & 1)) * mmap.PAGESIZE)


class PageKeeper:
    """Keeps files in memory, from a thread that gives way to everybody else.

    Args:
        budget_bytes: of all files together; what does not fit stays as it is. None for half of the memory that is
            available when the first file is named.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        self._budget_bytes = budget_bytes
        self._files: dict[str, MappedPages | None] = {}
        self._wanted = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None

    def keep(self, path: str | Path) -> None:
        """Keep this file in memory from now on. Returns at once; a file that cannot be read is no concern of this."""
        if str(path) in self._files or self._stopped:
            return
        self._files[str(path)] = None
        self._wanted.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pages", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Let go of all files."""
        self._stopped = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join()
        self._files.clear()

    def _run(self) -> None:
        set_name("ck-pages")
        lower_priority(_NICENESS)
        room = int(available()[0] * _BUDGET_SHARE) if self._budget_bytes is None else self._budget_bytes
        while not self._stopped:
            self._wanted.clear()
            for path, pages in list(self._files.items()):
                if pages is None:
                    room -= self._map(path, room)
            self._load_all()
            self._wanted.wait(_INTERVAL_S)

    def _map(self, path: str, room: int) -> int:
        room -= room % mmap.PAGESIZE
        if room <= 0:
            return 0
        try:
            pages = self._files[path] = MappedPages(path, room)
        except (OSError, ValueError):
            return 0
        return pages.size_bytes

    def _load_all(self) -> None:
        for pages in list(self._files.values()):
            first = 0
            while pages is not None and first < pages.size_bytes and not self._stopped and not _scarce():
                first = pages.load(first)


def available() -> tuple[int, int]:
    """Bytes of memory that could be had, and of all memory."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free, total = (int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    return free, total


def _scarce() -> bool:
    free, total = available()
    return free < total * _SCARCE_SHARE
