"""A signal that announces the end of a launch: the step is finished and stored within a grace, then everything ends."""

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

#: Slurm, Kubernetes and clouds send these; SIGHUP comes where a terminal is closed.
USUAL = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_ALLOWED = (*USUAL, signal.SIGUSR2, signal.SIGINT, signal.SIGQUIT)
GRACE_S = 10.0
#: The grace covers the end of all processes: the last state must be stored so much earlier, and the rest ends in this.
_STORING_SHARE = 0.8
_ENDING_SHARE = 0.95

EndAtOnce = Callable[[int, FrameType | None], None]


class GraceOver(SystemExit):
    """The grace of a notice is over, and the launch has not ended by itself. A SystemExit, which asyncio passes on."""


def notice_signals(names: Sequence[str]) -> list[signal.Signals]:
    """Return the signals that announce the end: the usual ones and those named, such as ``SIGUSR2`` or ``USR2``.

    Raises:
        BadInput: if one cannot be taken as a notice.
    """
    signals = list(USUAL)
    for name in names:
        named = {one.name: one for one in _ALLOWED} | {
            one.name.removeprefix("SIG"): one for one in _ALLOWED
        }
        chosen = named.get(name.upper())
        if chosen is None:
            raise BadInput(
                "notice_signal",
                name,
                f"name one of {', '.join(sorted(one.name for one in _ALLOWED))}",
            )
        signals += [chosen] if chosen not in signals else []
    return signals


class StopNotice:
    """Turns the first signal into an order to halt, and a second one into the end.

    Args:
        signals: announce the end.
        grace_s: from the first signal to the end of the launch.
        end_at_once: the handler of a second signal, and of one that comes while no job runs.

    Attributes:
        taken: the signal that came; None before.

    Raises:
        BadInput: if the grace is not a number above 0.
    """

    def __init__(
        self, signals: Sequence[signal.Signals], grace_s: float, end_at_once: EndAtOnce
    ) -> None:
        if not (math.isfinite(grace_s) and grace_s > 0):
            raise BadInput("grace", grace_s, "use a finite number of seconds above 0")
        self._signals, self._grace_s, self._end_at_once = signals, grace_s, end_at_once
        self._requests: Requests | None = None
        self.taken: signal.Signals | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Have the signals come here while the block lasts, in the main thread.

        A usual signal that is ignored stays ignored, such as SIGHUP under ``nohup``.
        """
        ignored = {signum for signum in USUAL if signal.getsignal(signum) is signal.SIG_IGN}
        taken = [signum for signum in self._signals if signum not in ignored]
        before = {signum: signal.signal(signum, self._take) for signum in (*taken, signal.SIGALRM)}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    @contextlib.contextmanager
    def awaited(self, requests: Requests) -> Iterator[None]:
        """Have the first signal halt the job to which ``requests`` go, while the block lasts."""
        self._requests = requests
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            self._requests = None

    def _take(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGALRM:
            raise GraceOver(128 + (self.taken or signum))
        if self.taken is not None or self._requests is None:
            self._end_at_once(signum, frame)
            return
        self.taken = signal.Signals(signum)
        _leave_closed_terminal()
        self._requests.halt(self.taken.name, time.monotonic() + _STORING_SHARE * self._grace_s)
        signal.setitimer(signal.ITIMER_REAL, _ENDING_SHARE * self._grace_s)


def _leave_closed_terminal() -> None:
    """Print nowhere, if the terminal is gone: a print would raise, and the state would not be stored."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            if _is_hung_up(descriptor := stream.fileno()):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


def _is_hung_up(descriptor: int) -> bool:
    """Return whether a descriptor is of a terminal that was closed."""
    try:
        termios.tcgetattr(descriptor)
    except termios.error as error:
        return bool(error.args[0] == errno.EIO)
    return False
