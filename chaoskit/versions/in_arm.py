"""Pytest plugin that runs single tests on demand. It is loaded into both compared versions.

It depends only on the standard library and pluggy. The version that it is loaded into may have
another chaoskit, which this module does not import. Lines of JSON are exchanged over two pipes,
whose descriptors are in :data:`PIPES`:

    -> {"tests": ["test_it.py::test_kill", ...]}           once, when tests are collected
    <- {"run": "test_it.py::test_kill"}                    any number of times
    -> {"records": [...], "trouble": "", "seconds": 1.2}   records in the format of a history

The end of its input ends the session.

-> versions/arm.py: the other end, which starts this pytest and reads the answers.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from pluggy import HookimplMarker

PIPES = "CHAOSKIT_ARM_PIPES"
_LENGTH = 400  # the longest trouble, in characters
_hook = HookimplMarker("pytest")


class Arm:
    """The server of the tests for one driver, over two file descriptors."""

    def __init__(self, read: int, write: int) -> None:
        self._orders = os.fdopen(read, encoding="utf-8")
        self._answers = os.fdopen(write, "w", encoding="utf-8")
        self._records: list[str] = []
        self._sent: set[str] = set()
        self._trouble = ""

    @_hook(tryfirst=True)
    def pytest_runtestloop(self, session: Any) -> bool:
        """Run the requested tests instead of all tests, until the driver closes its pipe.

        Return True, so that pytest does not run its own loop. If tests cannot be collected, nothing
        is sent, and the driver takes the reason from the log.
        """
        if (
            session.testsfailed
        ):  # tests cannot be collected: the driver finds pytest's reason in the log
            return True
        tests = {
            test.nodeid: test
            for test in session.items
            if "chaos" in getattr(test, "fixturenames", ())
        }
        self._send({"tests": list(tests)})
        for line in self._orders:
            self._records, self._trouble = [], ""
            test, began = tests[json.loads(line)["run"]], time.monotonic()
            # the next test is unknown: all fixtures but those of the session are torn down
            test.config.hook.pytest_runtest_protocol(item=test, nextitem=session)
            took = time.monotonic() - began
            self._send(
                {"records": self._records, "trouble": self._trouble[:_LENGTH], "seconds": took}
            )
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the new records of a test, and why it failed or was skipped first.

        A test is run many times, and its report repeats earlier records.
        """
        new = [
            record for record in getattr(report, "chaoskit_records", ()) if record not in self._sent
        ]
        self._sent.update(new)
        self._records += new
        if report.outcome != "passed" and not self._trouble:
            self._trouble = f"{report.outcome}: {_reason(report.longrepr)}"

    def _send(self, answer: dict[str, Any]) -> None:
        """Send a line of JSON to the driver."""
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()


def _reason(failure: Any) -> str:
    """Return the cause of a failure or skip in one line.

    It is the message of an exception, the text that a plugin has put in its place, or the reason of
    a skip.
    """
    if hasattr(failure, "reprcrash") and failure.reprcrash is not None:
        return str(failure.reprcrash.message).strip().partition("\n")[0]
    text = str(failure[2]) if isinstance(failure, tuple) else str(failure)
    lines = [line.strip(" -") for line in text.splitlines() if line.strip()]
    return ": ".join(lines[:2])


def pytest_configure(config: Any) -> None:
    """Register the server of the process that has started this session."""
    read, write = map(int, os.environ.pop(PIPES).split(","))
    config.pluginmanager.register(Arm(read, write), "chaoskit-arm")
