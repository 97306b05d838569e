"""Conditions that end a night early. They are checked beside the runs.

-> nightly/begin.py: conditions for a night to begin. nightly/places.py: the loss of a Lease.
-> nightly/run.py ends the night if a condition holds.
"""

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
    """The night must end. The text says why.

    It is no Exception, so that handlers of errors do not catch it.
    """


def run_command(command: Sequence[str]) -> tuple[int, str]:
    """Run a command, and return its exit status and its last line of output.

    The status is -1, and the line an error, if the command cannot be run or lasts longer than
    30 s. The command runs in a session of its own, so that a Ctrl-C at the terminal does not reach
    it.
    """
    try:
        completed = subprocess.run(
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
    lines = (completed.stdout + completed.stderr).strip().splitlines()
    return completed.returncode, one_line(lines[-1]) if lines else ""


@dataclass(frozen=True, slots=True)
class AbortCondition:
    """A condition that is checked every ``every_s`` seconds, on a thread of its own.

    Attributes:
        find_reason: returns why the night must end, or "".
    """

    find_reason: Callable[[], str]
    every_s: float


def abort_reason(command: Sequence[str]) -> str:
    """Return why a night must end: a command ends with 0, or cannot be run; "" if it may go on.

    A positive status returns "". The end by a signal counts like a command that cannot be run.
    """
    status, line = run_command(command)
    if status > 0:
        return ""
    problem = (
        "the abort condition holds" if status == 0 else "the abort condition cannot be checked"
    )
    return f"{problem}: {line or ' '.join(command)}"


@contextmanager
def watched(conditions: Sequence[AbortCondition]) -> Iterator[None]:
    """Raise NightAborted in the main thread as soon as a condition returns a reason.

    The exception interrupts the main thread wherever it is. The context replaces the handler of
    SIGUSR1 and runs a thread for each condition. A condition that raises an error ends the night.
    Only the main thread can enter the context.
    """
    is_over, reasons = threading.Event(), list[str]()

    def watch(condition: AbortCondition) -> None:
        while not is_over.wait(condition.every_s):
            try:
                reason = condition.find_reason()
            except Exception as error:  # noqa: BLE001 - a condition that fails silently would never end the night
                reason = f"the abort condition cannot be checked: {error!r}"
            if reason and not is_over.is_set():
                reasons.append(reason)
                os.kill(os.getpid(), signal.SIGUSR1)
                return

    def stop(signum: int, frame: FrameType | None) -> None:
        if not is_over.is_set():
            is_over.set()  # a second reason would interrupt the clean-up
            raise NightAborted(reasons[0])

    before = signal.signal(signal.SIGUSR1, stop)
    threads = [
        threading.Thread(target=watch, args=[condition], name="night-watch", daemon=True)
        for condition in conditions
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join(_PATIENCE_S + 1)
        signal.signal(signal.SIGUSR1, before)
