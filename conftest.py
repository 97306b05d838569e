"""How the tests of this repository are run: what share on each commit, which skips are accepted, what is kept of a run.

The share: on each commit, of the tests that train or cost as much, one in ``--one-in``; at night all of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_SHARE = "--one-in"
_DURATIONS = "--durations-file"
_SKIPS = Path(__file__).with_name("tests") / "skips.toml"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        _SHARE,
        type=int,
        default=1,
        metavar="N",
        help="of the tests of each file that start trainings or are marked costly, run one in N, always the same ones; "
        "default: all",
    )
    parser.addoption(
        _DURATIONS,
        type=Path,
        metavar="PATH",
        help="write a JSON object: outcome and seconds of each test, set-up and tear-down included",
    )


def pytest_configure(config: pytest.Config) -> None:
    if (path := config.getoption(_DURATIONS)) is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Durations(path), "durations-file")


# -- selection ----------------------------------------------------------------------------------------------------


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share: int = config.getoption(_SHARE)
    if share < 1:
        raise pytest.UsageError(f"{_SHARE} {share}: use a whole number, 1 or more")
    training: defaultdict[Path, list[pytest.Item]] = defaultdict(list)
    for item in items:
        costly = "chaos" in getattr(item, "fixturenames", ()) or item.get_closest_marker("costly") is not None
        if costly and item.get_closest_marker("each_commit") is None:
            training[item.path].append(item)
    left_out: set[pytest.Item] = set()
    for group in training.values():
        group.sort(key=_draw)
        left_out.update(group[-(-len(group) // share) :])
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=[*left_out])


def _draw(item: pytest.Item) -> str:
    """An order that has nothing to do with where a test stands, and what its parameters are."""
    return hashlib.sha256(item.nodeid.encode()).hexdigest()


# -- skips --------------------------------------------------------------------------------------------------------


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Fail a test that CI skips for a reason that ``tests/skips.toml`` does not list: its promise is never tested."""
    yielded: Any = yield
    report: pytest.TestReport = yielded.get_result()
    if not (report.skipped and os.environ.get("CI") == "true" and isinstance(report.longrepr, tuple)):
        return
    reason = report.longrepr[2].removeprefix("Skipped: ")
    if not any(re.fullmatch(known, reason) for known in _accepted_skips()):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {reason}\nMake it run, or enter the reason in {_SKIPS} with its cause."


def _accepted_skips() -> list[str]:
    return [entry["reason"] for entry in tomllib.loads(_SKIPS.read_text())["skip"]]


# -- durations ----------------------------------------------------------------------------------------------------


class _Durations:
    """Collects what each test took, in xdist's controller, too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
        test["seconds"] = round(test["seconds"] + report.duration, 3)
        if report.outcome != "passed":
            test["outcome"] = report.outcome

    def pytest_sessionfinish(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._tests, indent=1, sort_keys=True) + "\n")
