"""Run a command on a busy machine: ``python tests/support/busy.py pytest tests``.

Twice as many spinning processes as there are processors run beside the command, and a process that
writes to the disk and waits until the data is there. They end with the command, also when this
process is killed. The exit status is the command's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NoReturn

from chaoskit.process.linux import die_with_parent

SPINNERS_A_PROCESSOR = 2
_BLOCK_BYTES = 4 << 20
_FILE_BLOCKS = 16


def spin() -> NoReturn:
    """Use a processor in an endless loop."""
    while True:
        pass


def write() -> NoReturn:
    """Overwrite a file of 64 MiB again and again, each block down to the disk.

    It has no name, so no file is left.
    """
    block = os.urandom(_BLOCK_BYTES)
    with tempfile.TemporaryFile() as file:
        while True:
            file.seek(0)
            for _ in range(_FILE_BLOCKS):
                file.write(block)
                file.flush()
                os.fsync(file.fileno())


@contextmanager
def load() -> Iterator[list[int]]:
    """Run processes that keep the machine busy while the context lasts.

    Yields:
        the pids: the spinning processes, then the process that writes.
    """
    with ExitStack() as stack:
        works = ["spin"] * (SPINNERS_A_PROCESSOR * (os.cpu_count() or 1)) + ["write"]
        command = [sys.executable, __file__, "--work", str(os.getpid())]
        processes = [subprocess.Popen([*command, work]) for work in works]
        for process in processes:
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield [process.pid for process in processes]


def main(arguments: list[str]) -> int:
    """Apply a load, or run the command that the arguments give."""
    if arguments[:1] == ["--work"]:
        die_with_parent(int(arguments[1]))
        {"spin": spin, "write": write}[arguments[2]]()
    if not arguments:
        print(__doc__)
        return 2
    with load():
        return subprocess.run(arguments, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
