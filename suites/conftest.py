"""Markers of the suites, for projects that run them.

The repository registers them in pyproject.toml.
"""

from __future__ import annotations

import pytest

#: Suites in which runs are also compared with plain PyTorch, where possible.
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
    """Compare the jobs of a test with plain PyTorch, in the suites that do so."""
    if "chaos" in request.fixturenames and request.path.parent.name in _WITH_REFERENCE:
        request.getfixturevalue("chaos").limits.setdefault("reference", "on")
