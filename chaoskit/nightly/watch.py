"""What ends a night early: conditions that are asked beside the runs."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from chaoskit.plaintext import one_line

_PATIENCE_S = 30.0


class NightAborted(BaseException):
    """The night must not go on. Its text says why. No handler of errors on the way takes it for one."""


def ask(command: Sequence[str]) -> tuple[int, str]:
    """Run a command: its exit status, and its last line. One that cannot be run, or hangs, ends with -1.

    It has a session of its own: a Ctrl-C at the terminal is meant for the night.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE_S,
            check=False,
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return -1, one_line(str(error))
    lines = (done.stdout + done.stderr).strip().splitlines()
    return done.returncode, one_line(lines[-1]) if lines else ""


@dataclass(frozen=True, slots=True)
class AbortCondition:
    """``reason`` says why the night must end, or "": beside the runs, every so many seconds, on a thread of its own."""

    reason: Callable[[], str]
    every_s: float


def command_holds(command: Sequence[str]) -> str:
    """Why a night must end: a command ends with 0, or cannot be asked. "" if it ends with another status."""
    status, line = ask(command)
    if status > 0:
        return ""
    why = (
        "its condition to abort holds" if status == 0 else "its condition to abort cannot be asked"
    )
    return f"{why}: {line or ' '.join(command)}"


@contextmanager
def watched(conditions: Sequence[AbortCondition]) -> Iterator[None]:
    """Raise NightAborted in the main thread, wherever it is, when one of these says why."""
    over, told = threading.Event(), list[str]()

    def watch(condition: AbortCondition) -> None:
        while not over.wait(condition.every_s):
            try:
                reason = condition.reason()
            except Exception as error:  # noqa: BLE001 - a condition that ends unnoticed would never hold
                reason = f"its condition to abort cannot be asked: {error!r}"
            if reason and not over.is_set():
                told.append(reason)
                os.kill(os.getpid(), signal.SIGUSR1)
                return

    def stop(signum: int, frame: FrameType | None) -> None:
        if not over.is_set():
            over.set()  # a second reason would interrupt what is put back
            raise NightAborted(told[0])

    before = signal.signal(signal.SIGUSR1, stop)
    threads = [
        threading.Thread(target=watch, args=[one], name="night-watch", daemon=True)
        for one in conditions
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(_PATIENCE_S + 1)
        signal.signal(signal.SIGUSR1, before)
