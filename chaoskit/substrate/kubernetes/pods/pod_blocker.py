"""A blocker, which keeps pods from running that are created while it is in force.

It makes no requests.

-> kubernetes/pods/pods.py changes new pods by it, and reports the reasons to it.
"""

from __future__ import annotations

from typing import Any, Literal

from chaoskit.substrate.kubernetes import template
from chaoskit.substrate.kubernetes.pods.state import Pending

How = Literal["room", "image"]
#: Reasons that the cluster gives for a blocked pod.
_REASONS = {
    "room": frozenset({"Unschedulable"}),
    "image": frozenset({"ErrImagePull", "ErrImageNeverPull", "ImagePullBackOff"}),
}
_ROOM = "chaoskit.dev/room"  # a resource that no machine has and no quota counts
_IMAGE = "127.0.0.1:1/no-such-image:1"  # no registry listens there: the pull is refused at once


class Blocker:
    """Blocks pods by a request for a resource that no machine has, or by a missing image.

    The cluster itself keeps the pods from running, and gives the reason.

    Args:
        how: ``room`` for the resource, ``image`` for the image.

    Attributes:
        is_lifted: True if pods that are created from now on run again.
    """

    def __init__(self, how: How) -> None:
        self._how, self.is_lifted = how, False
        self._places = set[str]()

    def block(self, pod: dict[str, Any]) -> None:
        """Change the manifest of a pod that is about to be created, in place."""
        node = next(
            node for node in pod["spec"]["containers"] if node["name"] == template.CONTAINER
        )
        if self._how == "image":
            node["image"] = _IMAGE
            return
        resources = node.setdefault("resources", {})
        for kind in ("limits", "requests"):
            resources[kind] = {**(resources.get(kind) or {}), _ROOM: "1"}

    def note_reason(self, place: str, pending: Pending) -> None:
        """Count a pod if the cluster's reason for not running it is the one of this blocker."""
        if pending.reason in _REASONS[self._how]:
            self._places.add(place)

    def shown(self) -> int:
        """Return the number of pods that the cluster reports as blocked."""
        return len(self._places)

    def lift(self) -> bool:
        """Let pods run that are created from now on, and return True. Blocked pods stay blocked."""
        self.is_lifted = True
        return True
