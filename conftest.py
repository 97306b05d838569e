"""Test selection, accepted skips, quarantined tests, and the record of a run.

The gate (``--gate``) runs all tests that do not train. Of the tests that train, or cost as much, it
runs each that holds a promise of the documentation, and a slice of the others that moves with the
commit. A test marked ``slow`` counts as one of these others if it trains; otherwise the gate leaves
it out. The nightly run takes all tests.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_GATE = "--gate"
_SLICE = "--gate-slice"
_PROMISE = "--promise"
_SLICES = 30  # commits after which each test was in the gate about once
_DURATIONS = "--durations-file"
_ERROR_CHARS = 240
#: Tests that run one after the other in one process, by the beginning of their ids. Each launcher
#: removes the containers of earlier launchers, a machine that is taken away has pods of other
#: tests, and the plans are drawn once for all cases that inspect them.
_GROUPS = {
    "tests/cluster/substrates/test_docker": "docker",
    "tests/cluster/kubernetes/": "kubernetes",
    "tests/cluster/faults/test_strategies.py::test_plans_cover": "plans",
    "tests/cluster/faults/test_strategies.py::test_each_kind_is_drawn": "plans",
}
_SKIPS = Path(__file__).with_name("tests") / "skips.toml"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        _GATE,
        action="store_true",
        help="of the tests that start trainings or are marked costly, run those that are marked with a promise and not "
        f"slow, and one in {_SLICES} of the others, which ones depends on the number of commits; of the tests that do "
        "not train, those that are not slow; default: all",
    )
    parser.addoption(
        _SLICE,
        type=int,
        metavar="N",
        help=f"the slice that --gate takes, 0 to {_SLICES - 1}; default: the number of commits modulo {_SLICES}, "
        "in a shallow clone the hash of the commit",
    )
    parser.addoption(
        _PROMISE,
        action="append",
        default=[],
        metavar="SENTENCE",
        help="run only cases marked with this sentence of the documentation; may be given more than once",
    )
    parser.addoption(
        _DURATIONS,
        type=Path,
        metavar="PATH",
        help="write a JSON object: outcome and seconds of each test, set-up and tear-down included, the sentences "
        "that it holds, and in short what failed",
    )


def pytest_configure(config: pytest.Config) -> None:
    if (path := config.getoption(_DURATIONS)) is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Durations(path), "durations-file")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Name the slice, so that the selection of another machine can be repeated."""
    return (
        f"gate: slice {_slice_of_gate(config)} of {_SLICES} ({_SLICE})"
        if config.getoption(_GATE)
        else None
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs a GPU if the machine has none."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device; this machine has none")


# -- selection ----------------------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)  # -m "not costly" selects by the marker that is set here
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "chaos" in getattr(item, "fixturenames", ()):
            item.add_marker("costly")
        if _is_slow(item):
            item.add_marker("slow_case")
        item.user_properties += [("promise", text) for text in sorted(_promises(item))]
    _quarantine_flakes(items)
    left_out = _deselected(config, items)
    absent = set(left_out)
    items[:] = [item for item in items if item not in absent]
    config.hook.pytest_deselected(items=left_out)


def _deselected(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests that the options leave out."""
    if sentences := set(config.getoption(_PROMISE)):
        return [item for item in items if not _promises(item) & sentences]
    if not config.getoption(_GATE):
        return []
    turn = _slice_of_gate(config)
    others = (item for item in items if not _is_in_each_gate(item))
    return [item for item in others if not (_is_costly(item) and _slice_of_test(item) == turn)]


def _is_in_each_gate(item: pytest.Item) -> bool:
    return not _is_slow(item) and (not _is_costly(item) or bool(_promises(item)))


def _is_costly(item: pytest.Item) -> bool:
    return item.get_closest_marker("costly") is not None


def _is_slow(item: pytest.Item) -> bool:
    """Return whether a ``slow`` marker applies to this case."""
    return any(_matches(item, marker) for marker in item.iter_markers("slow"))


def _promises(item: pytest.Item) -> set[str]:
    """Return the sentences of the documentation that a case holds."""
    return {marker.args[0] for marker in item.iter_markers("promise") if _matches(item, marker)}


def _matches(item: pytest.Item, marker: pytest.Mark) -> bool:
    """Return whether a marker's parameter values name this case; a list stands for any of its
    values.
    """
    params = getattr(getattr(item, "callspec", None), "params", {})
    return all(
        name in params
        and (params[name] in value if isinstance(value, list) else params[name] == value)
        for name, value in marker.kwargs.items()
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str) -> Iterator[None]:
    """Refuse a marker that names no existing case: its promise would leave the gate unnoticed."""
    yielded: Any = yield
    collected = yielded.get_result()
    cases = (
        [item for item in collected if isinstance(item, pytest.Function)]
        if isinstance(collected, list)
        else []
    )
    named = [
        marker
        for item in cases
        for kind in ("promise", "slow")
        for marker in item.iter_markers(kind)
    ]
    for marker in {id(marker): marker for marker in named}.values():
        if not any(_matches(item, marker) for item in cases):
            description = f"{marker.name}({', '.join(map(repr, marker.args))})"
            raise collector.CollectError(
                f"{name}: no case has {marker.kwargs}, which its marker {description} names"
            )


def _slice_of_test(item: pytest.Item) -> int:
    """Return the number of the slice that a test belongs to; its file does not matter."""
    return int.from_bytes(hashlib.sha256(item.nodeid.encode()).digest()[:8]) % _SLICES


def _slice_of_gate(config: pytest.Config) -> int:
    """Return the slice of this gate; it is the same in each test process."""
    chosen: int | None = config.getoption(_SLICE)
    if chosen is not None:
        return chosen
    if (
        _git(config.rootpath, "--is-shallow-repository", command="rev-parse") == "true"
    ):  # it cannot count its commits
        return int(_git(config.rootpath, "HEAD", command="rev-parse"), 16) % _SLICES
    return int(_git(config.rootpath, "--count", "HEAD", command="rev-list") or 0) % _SLICES


def _git(directory: Path, *arguments: str, command: str) -> str:
    """Return the output of a git command, or "" if there is no repository."""
    try:
        ran = subprocess.run(
            ["git", "-C", str(directory), command, *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return ""
    return ran.stdout.strip()


# -- processes ----------------------------------------------------------------------------------------------------


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the tests of a group in one process; pytest-xdist 3.8 finds no ``xdist_group`` under
    pytest 9.2.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next(
                (group for start, group in _GROUPS.items() if nodeid.startswith(start)), nodeid
            )

    return Groups(config, log)


# -- skips --------------------------------------------------------------------------------------------------------


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Fail a test that CI skips for a reason that ``tests/skips.toml`` does not list: its promise
    is never tested.
    """
    yielded: Any = yield
    _refuse_unlisted_skip(yielded.get_result())


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Fail a file that CI skips with ``pytest.importorskip`` for an unlisted reason."""
    yielded: Any = yield
    _refuse_unlisted_skip(yielded.get_result())


def _refuse_unlisted_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not (
        report.skipped and os.environ.get("CI") == "true" and isinstance(report.longrepr, tuple)
    ):
        return
    reason = report.longrepr[2].removeprefix("Skipped: ")
    if not any(re.fullmatch(accepted, reason) for accepted in _accepted_skips()):
        report.outcome = "failed"
        report.longrepr = (
            f"skipped in CI: {reason}\nMake it run, or enter the reason in {_SKIPS} with its cause."
        )


def _accepted_skips() -> list[str]:
    return [entry["reason"] for entry in tomllib.loads(_SKIPS.read_text()).get("skip", [])]


# -- flakes -------------------------------------------------------------------------------------------------------


def _quarantine_flakes(items: list[pytest.Item]) -> None:
    """Report a failure of a quarantined test as expected: it runs, and fails no gate.

    An id in ``tests/skips.toml`` without ``[...]`` stands for all cases of its test.
    """
    if not _SKIPS.exists():
        return
    flakes = {flake["test"]: flake for flake in tomllib.loads(_SKIPS.read_text()).get("flake", [])}
    for item in items:
        flake = flakes.get(item.nodeid) or flakes.get(item.nodeid.partition("[")[0])
        if flake is not None:
            reason = f"quarantined since {flake['since']}, {flake['issue']}: {flake['cause']}"
            item.add_marker(pytest.mark.xfail(reason=reason, strict=False))


# -- durations ----------------------------------------------------------------------------------------------------


class _Durations:
    """Collector of each test's duration and outcome; it also works in xdist's controller."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
        test["seconds"] = round(test["seconds"] + report.duration, 3)
        if promises := [text for name, text in report.user_properties if name == "promise"]:
            test["promises"] = promises
        if report.outcome != "passed":
            test["outcome"] = report.outcome
        if report.failed:
            test.setdefault("error", _in_short(report))

    def pytest_sessionfinish(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._tests, indent=1, sort_keys=True) + "\n")


def _in_short(report: pytest.TestReport) -> str:
    """Return the error of a report in one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return " ".join(str(report.longrepr if crash is None else crash.message).split())[:_ERROR_CHARS]
