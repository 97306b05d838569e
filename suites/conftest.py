"""Markers of the suites, for the projects that run them; the repository registers them in pyproject.toml."""

from __future__ import annotations

import pytest

#: In these suites each run is compared with plain PyTorch, too, where that can be had.
_WITH_REFERENCE = ("smoke", "recovery")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    config.addinivalue_line("markers", "slow(**parameters): takes a quarter of a minute or more")
    config.addinivalue_line("markers", "costly: takes as long as a training")
    config.addinivalue_line(
        "markers", "promise(sentence): the sentence of chaoskit's documentation that a test holds"
    )


@pytest.fixture(autouse=True)
def _reference(request: pytest.FixtureRequest) -> None:
    """Have the jobs of a test compared with plain PyTorch."""
    if "chaos" in request.fixturenames and request.path.parent.name in _WITH_REFERENCE:
        request.getfixturevalue("chaos").limits.setdefault("reference", "on")
