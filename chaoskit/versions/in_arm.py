"""A plugin of pytest that runs single tests on demand. It is loaded into both versions that are compared.

It stands alone, with the standard library and pluggy: the version that it is loaded into may have another chaoskit,
which this module does not import. Lines of JSON go both ways, over two pipes whose descriptors are in :data:`PIPES`:

    -> {"tests": ["test_it.py::test_kill", ...]}           once, when tests are collected
    <- {"run": "test_it.py::test_kill"}                    as often as it is wanted
    -> {"records": [...], "trouble": "", "seconds": 1.2}   lines as a history keeps them

The end of its input ends the session.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from pluggy import HookimplMarker

PIPES = "CHAOSKIT_ARM_PIPES"
_LENGTH = 400  # of a trouble
_hook = HookimplMarker("pytest")


class Arm:
    """Serves one driver, over the descriptors that it has been given."""

    def __init__(self, read: int, write: int) -> None:
        self._orders = os.fdopen(read, encoding="utf-8")
        self._answers = os.fdopen(write, "w", encoding="utf-8")
        self._records: list[str] = []
        self._told: set[str] = set()
        self._trouble = ""

    @_hook(tryfirst=True)
    def pytest_runtestloop(self, session: Any) -> bool:
        """Run what is asked for, in place of all tests."""
        if (
            session.testsfailed
        ):  # they cannot be collected: pytest says why, and the driver finds that in its log
            return True
        items = {
            item.nodeid: item
            for item in session.items
            if "chaos" in getattr(item, "fixturenames", ())
        }
        self._tell({"tests": list(items)})
        for line in self._orders:
            self._records, self._trouble = [], ""
            item, began = items[json.loads(line)["run"]], time.monotonic()
            # what comes next is not known: all but what belongs to the session is torn down
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=session)
            took = time.monotonic() - began
            self._tell(
                {"records": self._records, "trouble": self._trouble[:_LENGTH], "seconds": took}
            )
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the records of a test, and why it failed. An item is run many times: what it made before is not new."""
        new = [line for line in getattr(report, "chaoskit_records", ()) if line not in self._told]
        self._told.update(new)
        self._records += new
        if report.outcome != "passed" and not self._trouble:
            self._trouble = f"{report.outcome}: {_why(report.longrepr)}"

    def _tell(self, answer: dict[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()


def _why(told: Any) -> str:
    """The message of an exception, or what a plugin has put in its place, or the reason of a skip."""
    if hasattr(told, "reprcrash") and told.reprcrash is not None:
        return str(told.reprcrash.message).strip().partition("\n")[0]
    text = str(told[2]) if isinstance(told, tuple) else str(told)
    lines = [line.strip(" -") for line in text.splitlines() if line.strip()]
    return ": ".join(lines[:2])


def pytest_configure(config: Any) -> None:
    """Serve the process that has started this session."""
    read, write = map(int, os.environ.pop(PIPES).split(","))
    config.pluginmanager.register(Arm(read, write), "chaoskit-arm")
