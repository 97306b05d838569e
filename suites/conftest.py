"""Markers of the suites, for the projects that run them; the repository registers them in pyproject.toml."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    config.addinivalue_line("markers", "slow(**parameters): takes a quarter of a minute or more")
    config.addinivalue_line("markers", "costly: takes as long as a training")
    config.addinivalue_line("markers", "promise(sentence): the sentence of chaoskit's documentation that a test holds")
