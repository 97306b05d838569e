"""What keeps pods from running that are made while it is in force. Pure: it asks nothing of the cluster."""

from __future__ import annotations

from typing import Any, Literal

from chaoskit.substrate.kubernetes import template
from chaoskit.substrate.kubernetes.pods.state import Pending

How = Literal["room", "image"]
#: What the cluster says of a pod that does not run for it.
_REASONS = {
    "room": frozenset({"Unschedulable"}),
    "image": frozenset({"ErrImagePull", "ErrImageNeverPull", "ImagePullBackOff"}),
}
_ROOM = "chaoskit.dev/room"  # a resource that no machine has, and no quota counts
_IMAGE = "127.0.0.1:1/no-such-image:1"  # no registry is there: it is refused at once


class Hindrance:
    """Asks for what no machine has, or for an image that is nowhere: that the pod does not run is the cluster's doing.

    Attributes:
        is_lifted: whether pods that are made from now on run again.
    """

    def __init__(self, how: How) -> None:
        self._how, self.is_lifted = how, False
        self._places = set[str]()

    def spoil(self, pod: dict[str, Any]) -> None:
        """Change the object of a pod that is to be made."""
        container = next(
            one for one in pod["spec"]["containers"] if one["name"] == template.CONTAINER
        )
        if self._how == "image":
            container["image"] = _IMAGE
            return
        resources = container.setdefault("resources", {})
        for kind in ("limits", "requests"):
            resources[kind] = {**(resources.get(kind) or {}), _ROOM: "1"}

    def hear(self, place: str, told: Pending) -> None:
        """Take in why a pod does not run, in the words of the cluster."""
        if told.reason in _REASONS[self._how]:
            self._places.add(place)

    def shown(self) -> int:
        """How many pods the cluster says it of."""
        return len(self._places)

    def lift(self) -> bool:
        """Let pods run that are made from now on."""
        self.is_lifted = True
        return True
