"""Common parts of the detection tests: production limits, exclusive use of the machine, and a
stopwatch.

Each detector has one case in which it must fire within a stated time, and one or more in which it
must not.
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
    for test in items:
        if HERE not in test.path.parents:
            continue
        own = test.get_closest_marker("chaos")
        settings = {"detection": "production"} | (own.kwargs if own is not None else {})
        test.add_marker(pytest.mark.chaos(**settings), append=False)
        if hasattr(config, "workerinput"):
            test.add_marker(
                pytest.mark.skip(reason="measures times: run this folder with --numprocesses 0")
            )


@pytest.fixture
def stopwatch(record_property: Callable[[str, object], None]) -> Iterator[Stopwatch]:
    """Watch the machine for as long as the test lasts."""
    with BusyWatch() as watch:
        yield Stopwatch(watch, record_property)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the measured times, and the times that a busy machine kept from being checked."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    results = [
        (report.nodeid.rpartition("::")[2], dict(report.user_properties)) for report in reports
    ]
    measured = [(name, properties) for name, properties in results if BUSY in properties]
    if not measured:
        return
    terminalreporter.write_sep("=", "detection times")
    for name, properties in measured:
        took = (
            f"{properties[TOOK]:7.3f} s of {properties[STATED]:g} s" if TOOK in properties else ""
        )
        busy = f"  busy: {properties[BUSY]}" if properties[BUSY] != "no" else ""
        terminalreporter.write_line(f"{took:>18}  {name}{busy}")
    unchecked = sum(properties[BUSY] != "no" for _, properties in measured)
    terminalreporter.write_line(
        f"not checked because the machine was busy: {unchecked} of {len(measured)}"
    )
