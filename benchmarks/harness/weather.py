"""Seeded bursts of load by other programs, under which healthy training must not be reported as
failed.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NamedTuple

from chaoskit.errors import BadInput

LOADS = ("stress-ng", "own")

#: Runs a command that ends with us, even if we are killed. In a session of its own, so that all of it can be ended.
_LAUNCH = """
import os, sys
from chaoskit.process.linux import die_with_parent
die_with_parent(int(sys.argv[1]))
os.execvp(sys.argv[2], sys.argv[2:])
"""
_SPIN = "while True: pass"
_TOUCH = "data = bytearray({0})\nwhile True:\n    for page in range(0, {0}, 4096): data[page] = 1"
_MEMORY_BYTES = 128 * 2**20
_END_S = 5.0


class Burst(NamedTuple):
    """A burst of load: for ``seconds``, ``cpus`` processes compute and ``vms`` processes write
    memory.

    A burst without any process is a pause.
    """

    seconds: float
    cpus: int
    vms: int

    def __str__(self) -> str:
        return (
            f"{self.cpus} cpu + {self.vms} vm for {self.seconds:.1f} s"
            if self.cpus or self.vms
            else "a pause"
        )


def bursts(seed: int, cores: int) -> Iterator[Burst]:
    """Yield bursts without end.

    A burst takes between half of the machine's cores and three times as many, for a short or a long
    time. Some bursts are pauses.
    """
    chance = random.Random(seed)
    while True:
        seconds = chance.choice([chance.uniform(0.3, 1.5), chance.uniform(2.0, 12.0)])
        if chance.random() < 0.15:
            yield Burst(seconds, 0, 0)
        else:
            yield Burst(
                seconds, chance.randint(max(1, cores // 2), 3 * cores), chance.randint(0, 1)
            )


def require_load(load: str) -> None:
    """Refuse a load that this machine cannot make.

    Raises:
        BadInput: before anything is started.
    """
    if load not in LOADS:
        raise BadInput("load", load, f"use one of {', '.join(LOADS)}")
    if load == "stress-ng" and shutil.which("stress-ng") is None:
        raise BadInput(
            "load", load, "install stress-ng (apt-get install stress-ng), or use --load own"
        )


class Weather:
    """Bursts of load in the background, from entering to leaving the context.

    Every process that it started is ended.

    Args:
        load: ``stress-ng``, or ``own`` for busy processes of Python.
        schedule: the bursts.

    Raises:
        BadInput: if the load cannot be made.
    """

    def __init__(self, load: str, schedule: Iterator[Burst]) -> None:
        require_load(load)
        self._load, self._schedule = load, schedule
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._blow, name="weather", daemon=True)
        self.now = Burst(0.0, 0, 0)
        self.bursts = 0
        self.loaded_s = 0.0
        self.problem = ""  # why the load ended early

    def __enter__(self) -> Weather:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _blow(self) -> None:
        while not self._stop.is_set() and not self.problem:
            self.now = next(self._schedule)
            begin_s = time.monotonic()
            processes: list[subprocess.Popen[bytes]] = []
            try:
                processes += [_start(command) for command in commands(self._load, self.now)]
                self._stop.wait(self.now.seconds)
                self.problem = next(
                    (_early_end(process) for process in processes if process.poll() is not None), ""
                )
            finally:
                for process in processes:
                    _end(process)
            if processes:
                self.bursts += 1
                self.loaded_s += time.monotonic() - begin_s


def commands(load: str, burst: Burst) -> list[list[str]]:
    """Return the command lines that make ``burst``; each gets a session of its own.

    Linux shares CPUs among sessions first (autogroups), and each rank has a session. A load with a
    single session would count as one program among five, whatever its number of processes.
    """
    if not burst.cpus and not burst.vms:
        return []
    if load == "own":
        spin, touch = (
            [sys.executable, "-c", _SPIN],
            [sys.executable, "-c", _TOUCH.format(_MEMORY_BYTES)],
        )
        return [spin] * burst.cpus + [touch] * burst.vms
    limit = [
        "--timeout",
        f"{burst.seconds + 10:.0f}s",
    ]  # a last resort: the load is normally ended earlier by this process
    spin, touch = ["--cpu", "1"], ["--vm", "1", "--vm-bytes", str(_MEMORY_BYTES)]
    return [
        ["stress-ng", "--quiet", *kind, *limit]
        for kind in [spin] * burst.cpus + [touch] * burst.vms
    ]


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    launch = [sys.executable, "-c", _LAUNCH, str(os.getpid()), *command]
    quiet: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.PIPE,
    }
    return subprocess.Popen(launch, start_new_session=True, **quiet)


def _early_end(process: subprocess.Popen[bytes]) -> str:
    assert process.stderr is not None
    message = os.read(process.stderr.fileno(), 4096).decode(errors="replace").strip()
    return f"the load ended by itself with status {process.returncode}: {message or 'it did not say why'}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill all processes of the session that ``process`` leads."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    if process.stderr is not None:
        process.stderr.close()
