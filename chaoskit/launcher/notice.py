"""Signals that announce the end of a launch, with a grace period for the current step.

The step is finished and stored within it, then all processes end.

-> ``experiment/plan/requests.py`` (``halt``) tells the job. ``coordinator/handlers/on_end.py``: how
ranks agree on the last step. ``runtime/step/halting.py``: how a rank leaves.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from chaoskit.errors import BadInput
from chaoskit.experiment.plan.requests import Requests

#: Slurm, Kubernetes and clouds send these signals. SIGHUP comes if a terminal is closed.
USUAL = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_ALLOWED = (*USUAL, signal.SIGUSR2, signal.SIGINT, signal.SIGQUIT)
GRACE_S = 10.0
#: Shares of the grace period for storing the last state, and for the end of all processes.
_STORING_SHARE = 0.8
_ENDING_SHARE = 0.95

EndAtOnce = Callable[[int, FrameType | None], None]


class GraceOver(SystemExit):
    """The grace period is over, and the launch has not ended by itself.

    The exit status is 128 plus the number of the signal. It is a SystemExit because asyncio passes
    it on.
    """


def notice_signals(names: Sequence[str]) -> list[signal.Signals]:
    """Return the signals that announce the end: the usual ones, and those that are named.

    Args:
        names: names such as ``SIGUSR2`` or ``USR2``.

    Raises:
        BadInput: if a signal cannot be used.
    """
    signals = list(USUAL)
    for name in names:
        by_name = {allowed.name: allowed for allowed in _ALLOWED} | {
            allowed.name.removeprefix("SIG"): allowed for allowed in _ALLOWED
        }
        named_signal = by_name.get(name.upper())
        if named_signal is None:
            raise BadInput(
                "notice_signal",
                name,
                f"name one of {', '.join(sorted(allowed.name for allowed in _ALLOWED))}",
            )
        signals += [named_signal] if named_signal not in signals else []
    return signals


class StopNotice:
    """A handler of signals: the first one orders the job to halt, a second one ends the launch.

    Args:
        signals: the signals that announce the end.
        grace_s: the time from the first signal to the end of the launch. 80 % of it are for storing
            the state, and the launch is left after 95 %.
        end_at_once: handles a second signal, and signals while no job runs.

    Attributes:
        received: the signal that came; None before.

    Raises:
        BadInput: if the grace period is not a finite number above 0.
    """

    def __init__(
        self, signals: Sequence[signal.Signals], grace_s: float, end_at_once: EndAtOnce
    ) -> None:
        if not (math.isfinite(grace_s) and grace_s > 0):
            raise BadInput("grace", grace_s, "use a finite number of seconds above 0")
        self._signals, self._grace_s, self._end_at_once = signals, grace_s, end_at_once
        self._requests: Requests | None = None
        self.received: signal.Signals | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals while the block lasts. It must be called in the main thread.

        A usual signal that is ignored stays ignored, such as SIGHUP under ``nohup``.
        """
        ignored = {signum for signum in USUAL if signal.getsignal(signum) is signal.SIG_IGN}
        handled = [signum for signum in self._signals if signum not in ignored]
        previous_handlers = {
            signum: signal.signal(signum, self._on_signal) for signum in (*handled, signal.SIGALRM)
        }
        try:
            yield
        finally:
            for signum, handler in previous_handlers.items():
                signal.signal(signum, handler)

    @contextlib.contextmanager
    def awaited(self, requests: Requests) -> Iterator[None]:
        """Let the first signal halt the job that receives ``requests``, while the block lasts.

        GraceOver is raised in the block when 95 % of the grace period are over.
        """
        self._requests = requests
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            self._requests = None

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Halt the job at the first signal. Call ``end_at_once`` at later ones, or if no job runs.

        Raises:
            GraceOver: when the grace period is over.
        """
        if signum == signal.SIGALRM:
            raise GraceOver(128 + (self.received or signum))
        if self.received is not None or self._requests is None:
            self._end_at_once(signum, frame)
            return
        self.received = signal.Signals(signum)
        _leave_closed_terminal()
        self._requests.halt(self.received.name, time.monotonic() + _STORING_SHARE * self._grace_s)
        signal.setitimer(signal.ITIMER_REAL, _ENDING_SHARE * self._grace_s)


def _leave_closed_terminal() -> None:
    """Redirect the output to /dev/null if the terminal is gone.

    A print would otherwise raise an exception, and the state would not be stored.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            if _is_hung_up(descriptor := stream.fileno()):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, descriptor)
                os.close(null)


def _is_hung_up(descriptor: int) -> bool:
    """Return True if a descriptor belongs to a terminal that was closed."""
    try:
        termios.tcgetattr(descriptor)
    except termios.error as error:
        return bool(error.args[0] == errno.EIO)
    return False
