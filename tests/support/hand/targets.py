"""Processes that hands break: each writes when it runs.

-> ``support/hand/client.py``: the client of a hand.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from chaoskit.process.linux import children, kill_if_same, start_ticks
from support.hand.client import public_python
from support.waiting import wait_until

#: Each thread writes its number and the time every 5 ms. SIGUSR1 makes it write ``signal``.
_TICKING = """
import os, signal, sys, threading, time
file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
signal.signal(signal.SIGUSR1, lambda *_: os.write(file, b"signal %f\\n" % time.monotonic()))
def tick(number):
    while True:
        os.write(file, b"%d %f\\n" % (number, time.monotonic()))
        time.sleep(0.005)
for number in range(1, int(sys.argv[2])):
    threading.Thread(target=tick, args=(number,), daemon=True).start()
tick(0)
"""
#: Each thread starts the next one, and ends.
_CHAIN = """
import os, sys, threading, time
file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
def link():
    os.write(file, b"0 %f\\n" % time.monotonic())
    threading.Thread(target=link).start()
for _ in range(int(sys.argv[2])):
    link()
"""
_SPINNING = "import os, sys, time\nfile = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)\n"
_SPINNING += "os.write(file, b'0 %f\\n' % time.monotonic())\nwhile True: pass"
#: Python writes a byte for each signal that it handles.
_COUNTING = """
import os, signal, sys, time
file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
signal.set_wakeup_fd(file, warn_on_full_buffer=False)
signal.signal(signal.SIGRTMIN, lambda *_: None)
os.write(file, b"0 %f\\n" % time.monotonic())
while True:
    pass
"""
#: The process starts a child that waits for a writer of a FIFO, and is uninterruptible meanwhile.
_UNINTERRUPTIBLE = """
import os, sys, time
file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
os.mkfifo(sys.argv[1] + ".fifo")
os.write(file, b"0 %f\\n" % time.monotonic())
opened = (os.POSIX_SPAWN_OPEN, 0, sys.argv[1] + ".fifo", os.O_RDONLY, 0)
os.posix_spawn("/bin/true", ["true"], {}, file_actions=[opened])
os.write(file, b"spawned %f\\n" % time.monotonic())
time.sleep(3600)
"""
PROGRAMS = {
    "uninterruptible": _UNINTERRUPTIBLE,
    "ticking": _TICKING,
    "chain": _CHAIN,
    "spinning": _SPINNING,
    "counting": _COUNTING,
}


class Target:
    """A process that writes when it runs.

    Attributes:
        process: the process, or the first program of the command that started it.
        pid: its pid, as this process sees it.
    """

    def __init__(self, process: subprocess.Popen[bytes], pid: int, path: Path) -> None:
        self.process, self.pid = process, pid
        self._path = path

    def interrupt(self) -> None:
        """Let an uninterruptible process go on."""
        Path(f"{self._path}.fifo").write_bytes(b"")

    def times_s(self, label: str = "0") -> list[float]:
        """Return the times of ``time.monotonic`` that a thread has written, in order."""
        lines = [line.split() for line in self._path.read_text().splitlines()]
        return sorted(float(fields[1]) for fields in lines if fields[0] == label)

    def signal_count(self) -> int:
        """Return how many signals a process that counts them has handled."""
        return self._path.read_bytes().count(bytes([signal.SIGRTMIN]))

    def longest_gap_s(self, label: str = "0") -> float:
        """Return the longest time between two lines of a thread, in seconds."""
        times_s = self.times_s(label)
        return max(after - before for before, after in itertools.pairwise(times_s))

    def wait_for_tick(self) -> float:
        """Wait for a line that the process writes after now, and return its time."""
        now_s = time.monotonic()
        return wait_until(
            lambda: next((tick_s for tick_s in self.times_s() if tick_s > now_s), 0.0), "a tick"
        )


@contextlib.contextmanager
def target(
    program: str = "ticking",
    threads: int = 1,
    *,
    prefix: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> Iterator[Target]:
    """Start a process that writes when it runs, and kill it when the context ends."""
    descriptor, name = tempfile.mkstemp(prefix="hand-target-")
    os.close(descriptor)
    path = Path(name)
    path.chmod(0o666)
    command = [*prefix, public_python(), "-S", "-c", PROGRAMS[program], name, str(threads)]
    process = subprocess.Popen(command, env=environment, cwd="/")
    started = Target(process, process.pid, path)
    try:
        wait_until(started.times_s, "the begin of the process")
        yield started
    finally:
        process.kill()
        process.wait()
        path.unlink()
        Path(f"{path}.fifo").unlink(missing_ok=True)


@contextlib.contextmanager
def pid_one(
    *user: str, program: str = "ticking", threads: int = 4
) -> Iterator[tuple[Target, tuple[str, ...]]]:
    """Start a process as pid 1 of a pid namespace.

    Args:
        user: a command that changes the user.
        program: the program of the process.
        threads: number of its threads.

    Yields:
        The process, and a command that starts another program in its namespace.
    """
    unshare = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    with target(program, threads, prefix=(*unshare, *user)) as started:
        (started.pid,) = children(started.process.pid)
        ticks = start_ticks(started.pid)
        try:
            yield started, ("nsenter", f"--target={started.pid}", "--pid", "--mount")
        finally:  # the change of the user has cancelled --kill-child
            kill_if_same(started.pid, ticks, signal.SIGKILL)
