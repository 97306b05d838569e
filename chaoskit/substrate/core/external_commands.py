"""What is done outside the nodes of a run, where its user is: such as a command that cuts the power of a machine."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from typing import Protocol

from chaoskit.errors import HarnessError

#: Does what has this name to a machine, and gives what puts it back. Both raise HarnessError.
Doer = Callable[[str, str], Callable[[], None]]


class NotPutBack(HarnessError):
    """Something was begun and failed, and what undoes it has failed, too."""


class Errands(Protocol):
    """Has things done, without waiting for them."""

    def begin(self, name: str, machine: str, lasts_s: float = math.inf) -> int:
        """Have the errand of this name done to a machine. Gives the number of it.

        ``lasts_s``: it is put back after this time, even if no word comes from here any more.
        """

    def is_done(self, number: int) -> bool:
        """Whether it was done. Raises HarnessError if that failed."""

    def end(self, number: int) -> None:
        """Have it put back. An undo that fails is an error of the run; the process that tried it says why."""

    def settle(self) -> None:
        """The run is over: have everything put back. Raises HarnessError with what could not be."""


class Errand:
    """One that is being done, or was: in a thread of its own, as commands take seconds.

    Attributes:
        failure: why it was not done, once ``is_done`` is set. why_not_ended: why it could not be put back.
    """

    def __init__(self, do: Doer, name: str, machine: str, lasts_s: float) -> None:
        self._putting_back: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._is_over = False
        self._timer = threading.Timer(lasts_s, self.end) if lasts_s < math.inf else None
        self.is_done = threading.Event()
        self.failure = self.why_not_ended = ""
        self._thread = threading.Thread(
            target=self._do, args=[do, name, machine], name=f"ck-{name}", daemon=True
        )
        self._thread.start()

    def _do(self, do: Doer, name: str, machine: str) -> None:
        try:
            self._putting_back = do(name, machine)
        except Exception as error:  # noqa: BLE001 - the run that waits for it is told
            self.failure = str(error) or type(error).__name__
        finally:
            self.is_done.set()
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()

    def end(self) -> None:
        """Put it back, once, if it was done."""
        self._thread.join()
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            if self._is_over or self._putting_back is None:
                return
            self._is_over = True
            try:
                self._putting_back()
            except Exception as error:  # noqa: BLE001 - what was done before it is put back, too
                self.why_not_ended = str(error) or type(error).__name__


class ErrandsHere:
    """They are done by this process."""

    def __init__(self, do: Doer) -> None:
        self._do = do
        self._numbers = itertools.count(1)
        self._begun: dict[int, Errand] = {}

    def begin(self, name: str, machine: str, lasts_s: float = math.inf) -> int:
        number = next(self._numbers)
        self._begun[number] = Errand(self._do, name, machine, lasts_s)
        return number

    def do(self, number: int, name: str, machine: str, lasts_s: float) -> str:
        """Do it under a number that was given, and wait until it is done. Gives why it failed; "" if it did not."""
        errand = self._begun[number] = Errand(self._do, name, machine, lasts_s)
        errand.is_done.wait()
        return errand.failure

    def is_done(self, number: int) -> bool:
        errand = self._begun[number]
        if errand.is_done.is_set() and errand.failure:
            raise HarnessError(errand.failure)
        return errand.is_done.is_set()

    def end(self, number: int) -> None:
        threading.Thread(target=self._begun[number].end, name="ck-errand-ends").start()

    def settle(self) -> None:
        """Put everything back, the last one first, and wait for it. Raises HarnessError with what could not be."""
        begun, self._begun = self._begun, {}
        for errand in reversed(begun.values()):
            errand.end()
        if failures := [errand.why_not_ended for errand in begun.values() if errand.why_not_ended]:
            raise HarnessError(
                f"what was done to machines could not be put back: {'; '.join(failures)}"
            )
