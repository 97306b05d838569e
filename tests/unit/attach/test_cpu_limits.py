"""The CPU limits of containers in the specification of a pod."""

from __future__ import annotations

from typing import Any

import pytest

from chaoskit.attach.guards.cpu_limits import cpu_limit


@pytest.mark.parametrize(
    ("resources", "cores"),
    [
        ({"limits": {"cpu": "500m"}}, 0.5),
        ({"limits": {"cpu": 2}}, 2.0),
        ({"limits": {"memory": "1Gi"}}, 0.0),
        ({"requests": {"cpu": "1"}}, 0.0),
        (None, 0.0),
    ],
)
def test_the_limit_is_that_of_the_container_that_trains(resources: Any, cores: float) -> None:
    containers = [
        {"name": "logs", "resources": {"limits": {"cpu": "7"}}},
        {"name": "trainer", "resources": resources},
    ]
    assert cpu_limit({"spec": {"containers": containers}}, "trainer") == cores
