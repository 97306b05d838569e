"""The watch on abort conditions during a run.

-> ``abort_conditions.py``: the conditions and their checks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from chaoskit.attach.guards.abort_conditions import AbortCondition, CheckResult
from chaoskit.errors import BadInput

#: Seconds between the begins of two rounds of checks.
INTERVAL_S = 1.0
#: Seconds in which a check must have an answer.
CHECK_LIMIT_S = 2.0
#: A condition whose checks get no answer so many times in a row aborts the run.
FAILURES_MAX = 3
#: The result of a check that raises an exception.
_BROKEN = CheckResult(False, "its check failed", is_answered=False)


class AbortDecision:
    """The decision to abort a run, from rounds of results of checks."""

    def __init__(self) -> None:
        self._failures = dict[AbortCondition, int]()

    def reason(self, results: Mapping[AbortCondition, CheckResult]) -> str:
        """Return why the run must be aborted after a round of checks; "" if it may go on."""
        for condition, result in results.items():
            if result.is_true:
                return f"{condition}: {result.text}"
            failures = 0 if result.is_answered else self._failures.get(condition, 0) + 1
            self._failures[condition] = failures
            if failures >= FAILURES_MAX:
                return f"{condition}: no answer {failures} times in a row: {result.text}"
        return ""


class _Checker:
    """The check of a condition, in a thread of its own: a lookup of a name has no time limit."""

    def __init__(self, condition: AbortCondition, limit_s: float) -> None:
        self._condition, self._limit_s = condition, limit_s
        self._thread: threading.Thread | None = None
        self._result = _BROKEN

    def begin(self) -> None:
        """Begin a check, unless the one before still waits for its answer."""
        if self._thread is None or not self._thread.is_alive():
            self._result = _BROKEN
            self._thread = threading.Thread(target=self._check, name="ck-abort-check", daemon=True)
            self._thread.start()

    def result(self, until_s: float) -> CheckResult:
        """Return the result of the check, or a missing answer if there is none at ``until_s``."""
        assert self._thread is not None
        self._thread.join(max(0.0, until_s - time.monotonic()))
        if self._thread.is_alive():
            return CheckResult(False, f"it takes more than {self._limit_s:g} s", is_answered=False)
        return self._result

    def _check(self) -> None:
        self._result = self._condition.check(self._limit_s)


class AbortWatch:
    """Thread that checks abort conditions until one holds, and then calls ``on_abort`` once.

    A condition whose check gets no answer three times in a row counts as one that holds. The first
    checks take place before the watch begins: it is refused if they show a reason for an abort.

    Args:
        conditions: the conditions.
        on_abort: called with the reason, by the thread of the watch.
        interval_s: seconds between the begins of two rounds of checks.
        limit_s: seconds in which a check must have an answer.

    Raises:
        BadInput: if a condition holds already, or its check gets no answer.
    """

    def __init__(
        self,
        conditions: Sequence[AbortCondition],
        on_abort: Callable[[str], None],
        *,
        interval_s: float = INTERVAL_S,
        limit_s: float = CHECK_LIMIT_S,
    ) -> None:
        self._checkers = {condition: _Checker(condition, limit_s) for condition in conditions}
        self._on_abort, self._interval_s, self._limit_s = on_abort, interval_s, limit_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ck-abort", daemon=True)
        for condition, result in self._check_all().items():
            if result.is_true:
                remedy = f"wait until it does not hold, or leave it out: {result.text}"
                raise BadInput("abort", str(condition), remedy)
            if not result.is_answered:
                remedy = f"make it answer within {limit_s:g} s, or leave it out: {result.text}"
                raise BadInput("abort", str(condition), remedy)
        if self._checkers:
            self._thread.start()

    def close(self) -> None:
        """End the watch: ``on_abort`` is not called any more when this returns.

        It may be called by ``on_abort`` itself.
        """
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _watch(self) -> None:
        decision, next_s = AbortDecision(), time.monotonic() + self._interval_s
        while not self._stopped.wait(max(0.0, next_s - time.monotonic())):
            next_s = time.monotonic() + self._interval_s
            reason = decision.reason(self._check_all())
            if reason and not self._stopped.is_set():
                self._on_abort(reason)
                return

    def _check_all(self) -> dict[AbortCondition, CheckResult]:
        """Return the results of a round of checks, which run at the same time."""
        until_s = time.monotonic() + self._limit_s
        for checker in self._checkers.values():
            checker.begin()
        return {condition: checker.result(until_s) for condition, checker in self._checkers.items()}
