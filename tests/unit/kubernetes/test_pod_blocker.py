"""Blockers that keep pods from running. Pure."""

from __future__ import annotations

from typing import Any

import pytest

from chaoskit.substrate.kubernetes.pods.pod_blocker import Blocker
from chaoskit.substrate.kubernetes.pods.state import Pending


def pod(**container: Any) -> dict[str, Any]:
    return {
        "spec": {
            "containers": [{"name": "beside"}, {"name": "node", "image": "train:1", **container}]
        }
    }


def test_a_pod_asks_for_more_than_any_machine_has() -> None:
    """The pod keeps its former requests, too."""
    manifest = pod(resources={"limits": {"cpu": "2", "memory": "1Gi"}, "requests": None})
    Blocker("room").block(manifest)
    beside, node = manifest["spec"]["containers"]
    assert beside == {"name": "beside"}
    assert node["image"] == "train:1"
    assert node["resources"] == {
        "limits": {"cpu": "2", "memory": "1Gi", "chaoskit.dev/room": "1"},
        "requests": {"chaoskit.dev/room": "1"},
    }


def test_a_pod_names_an_image_that_is_nowhere() -> None:
    manifest = pod()
    Blocker("image").block(manifest)
    _, node = manifest["spec"]["containers"]
    assert node == {"name": "node", "image": "127.0.0.1:1/no-such-image:1"}


@pytest.mark.parametrize(("how", "reason"), [("room", "Unschedulable"), ("image", "ErrImagePull")])
def test_only_its_own_reason_counts(how: Any, reason: str) -> None:
    """The reason counts once for each pod, however often the cluster reports it."""
    blocker = Blocker(how)
    for other_reason in ("Unschedulable", "ErrImagePull", "ContainerCreating"):
        blocker.note_reason("one", Pending("node1", other_reason))
    assert blocker.shown() == 1
    blocker.note_reason("two", Pending("node2", reason))
    blocker.note_reason("two", Pending("node2", reason))
    blocker.note_reason("three", Pending("node3", "CreateContainerError"))
    assert blocker.shown() == 2
