"""What keeps pods from running that are made while it is in force. Pure: it asks nothing of the cluster."""

from __future__ import annotations

from typing import Any, Literal

from chaoskit.substrate.kubernetes import template
from chaoskit.substrate.kubernetes.pod_state import Pending

How = Literal["room", "image", "quota"]
#: What the cluster says of a pod that does not run for it.
_REASONS = {
    "room": frozenset({"Unschedulable"}),
    "image": frozenset({"ErrImagePull", "ErrImageNeverPull", "ImagePullBackOff"}),
    "quota": frozenset[str](),  # no such pod is made
}
_ROOM = "chaoskit.dev/room"  # a resource that no machine has, and no quota counts
#: A resource of which a quota of the session allows none: others' pods ask for none, so it refuses only these.
QUOTA = "chaoskit.dev/quota"
_QUOTA_SAYS = "exceeded quota"
_IMAGE = "127.0.0.1:1/no-such-image:1"  # no registry is there: it is refused at once


class Hindrance:
    """Asks for what no machine has, for an image that is nowhere, or for more than a quota allows: that the pod does
    not run is the cluster's doing.

    Attributes:
        is_lifted: whether pods that are made from now on run again.
    """

    def __init__(self, how: How) -> None:
        self._how, self.is_lifted = how, False
        self._places = set[str]()

    def spoil(self, pod: dict[str, Any]) -> None:
        """Change the object of a pod that is to be made."""
        container = next(one for one in pod["spec"]["containers"] if one["name"] == template.CONTAINER)
        if self._how == "image":
            container["image"] = _IMAGE
            return
        asked = _ROOM if self._how == "room" else QUOTA
        resources = container.setdefault("resources", {})
        for kind in ("limits", "requests"):
            resources[kind] = {**(resources.get(kind) or {}), asked: "1"}

    def hear(self, place: str, told: Pending) -> None:
        """Take in why a pod does not run, in the words of the cluster."""
        if told.reason in _REASONS[self._how]:
            self._places.add(place)

    def hear_refusal(self, place: str, message: str) -> None:
        """Take in why a pod was not made, in the words of the cluster."""
        if self._how == "quota" and _QUOTA_SAYS in message:
            self._places.add(place)

    def shown(self) -> int:
        """How many pods the cluster says it of."""
        return len(self._places)

    def lift(self) -> bool:
        """Let pods run that are made from now on."""
        self.is_lifted = True
        return True
