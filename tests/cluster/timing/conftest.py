"""What the tests of detection share: production limits, the machine for themselves, and a stopwatch.

Every detector has one case here in which it must fire within a stated time, and one or more in which it must not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.stopwatch import BUSY, STATED, TOOK, BusyWatch, Stopwatch

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give every item of this folder production limits, and keep it from running beside others."""
    for item in items:
        if HERE not in item.path.parents:
            continue
        own = item.get_closest_marker("chaos")
        settings = {"detection": "production"} | (own.kwargs if own is not None else {})
        item.add_marker(pytest.mark.chaos(**settings), append=False)
        if hasattr(config, "workerinput"):
            item.add_marker(
                pytest.mark.skip(reason="measures times: run this folder with --numprocesses 0")
            )


@pytest.fixture
def stopwatch(record_property: Callable[[str, object], None]) -> Iterator[Stopwatch]:
    """Watches the machine for as long as the test lasts."""
    with BusyWatch() as watch:
        yield Stopwatch(watch, record_property)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was measured, and how often a busy machine kept a time from being checked."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    told = [(report.nodeid.rpartition("::")[2], dict(report.user_properties)) for report in reports]
    measured = [(name, found) for name, found in told if BUSY in found]
    if not measured:
        return
    terminalreporter.write_sep("=", "detection times")
    for name, found in measured:
        took = f"{found[TOOK]:7.3f} s of {found[STATED]:g} s" if TOOK in found else ""
        busy = f"  busy: {found[BUSY]}" if found[BUSY] != "no" else ""
        terminalreporter.write_line(f"{took:>18}  {name}{busy}")
    unchecked = sum(found[BUSY] != "no" for _, found in measured)
    terminalreporter.write_line(
        f"not checked because the machine was busy: {unchecked} of {len(measured)}"
    )
