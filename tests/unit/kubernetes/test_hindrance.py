"""What keeps pods from running: pure."""

from __future__ import annotations

from typing import Any

import pytest

from chaoskit.substrate.kubernetes.pods.pod_blocker import Hindrance
from chaoskit.substrate.kubernetes.pods.state import Pending


def pod(**container: Any) -> dict[str, Any]:
    return {
        "spec": {
            "containers": [{"name": "beside"}, {"name": "node", "image": "train:1", **container}]
        }
    }


def test_a_pod_asks_for_more_than_any_machine_has() -> None:
    """And for what it asked for before."""
    made = pod(resources={"limits": {"cpu": "2", "memory": "1Gi"}, "requests": None})
    Hindrance("room").spoil(made)
    beside, node = made["spec"]["containers"]
    assert beside == {"name": "beside"}
    assert node["image"] == "train:1"
    assert node["resources"] == {
        "limits": {"cpu": "2", "memory": "1Gi", "chaoskit.dev/room": "1"},
        "requests": {"chaoskit.dev/room": "1"},
    }


def test_a_pod_names_an_image_that_is_nowhere() -> None:
    made = pod()
    Hindrance("image").spoil(made)
    _, node = made["spec"]["containers"]
    assert node == {"name": "node", "image": "127.0.0.1:1/no-such-image:1"}


@pytest.mark.parametrize(("how", "reason"), [("room", "Unschedulable"), ("image", "ErrImagePull")])
def test_only_its_own_reason_counts(how: Any, reason: str) -> None:
    """Once for each pod, however often the cluster says it."""
    hindrance = Hindrance(how)
    for told in ("Unschedulable", "ErrImagePull", "ContainerCreating"):
        hindrance.hear("one", Pending("node1", told))
    assert hindrance.shown() == 1
    hindrance.hear("two", Pending("node2", reason))
    hindrance.hear("two", Pending("node2", reason))
    hindrance.hear("three", Pending("node3", "CreateContainerError"))
    assert hindrance.shown() == 2
