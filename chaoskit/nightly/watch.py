"""What ends a night early: a command that says so, asked beside the runs."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
            command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False, start_new_session=True
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return -1, one_line(str(error))
    lines = (done.stdout + done.stderr).strip().splitlines()
    return done.returncode, one_line(lines[-1]) if lines else ""


@contextmanager
def watched(command: Sequence[str], every_s: float) -> Iterator[None]:
    """Raise NightAborted in the main thread, wherever it is, when a command ends with 0; or when it cannot be asked."""
    if not command:
        yield
        return
    over, told = threading.Event(), [""]

    def watch() -> None:
        while not over.wait(every_s):
            status, line = ask(command)
            if status <= 0 and not over.is_set():
                why = "its condition to abort holds" if status == 0 else "its condition to abort cannot be asked"
                told[0] = f"{why}: {line or ' '.join(command)}"
                os.kill(os.getpid(), signal.SIGUSR1)
                return

    def stop(signum: int, frame: FrameType | None) -> None:
        if not over.is_set():
            raise NightAborted(told[0])

    before = signal.signal(signal.SIGUSR1, stop)
    thread = threading.Thread(target=watch, name="night-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_PATIENCE_S + 1)
        signal.signal(signal.SIGUSR1, before)
