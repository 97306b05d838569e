"""Helpers shared by the tests of both readers' mistakes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from chaoskit import Outcome, Verdict


def cases(names: Iterable[str], misjudged: Mapping[str, str]) -> list[Any]:
    """Return parameters of these cases; a misjudged case is expected to fail until it is fixed."""
    return [
        pytest.param(
            name,
            marks=pytest.mark.xfail(strict=True, raises=AssertionError, reason=misjudged[name]),
        )
        if name in misjudged
        else name
        for name in names
    ]


def check(outcome: Outcome, expected: Verdict) -> None:
    """Assert that the verdict is the one that the documentation promises."""
    assert outcome.verdict == expected, (outcome.reasons, outcome.not_applied, outcome.directory)


def require(is_planted: bool, of: object = "") -> None:
    """Assert that the mistake took effect; otherwise it is no mistake, and no expected failure
    either.
    """
    if not is_planted:
        raise RuntimeError(f"the mistake was not planted: {of}")


def log_of(outcome: Outcome) -> str:
    """Return the output of all processes of the run."""
    return "".join(
        path.read_text() for path in sorted((Path(outcome.directory) / "log").glob("*.log"))
    )
