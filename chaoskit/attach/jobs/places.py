"""The places of a job with the pods that hold them, as plain data.

-> ``tracker.py`` keeps them up to date. ``membership.py``: the identity of a place.
"""

from __future__ import annotations

from dataclasses import dataclass

from chaoskit.attach.jobs.job_state import JobState
from chaoskit.attach.jobs.membership import PlaceKey
from chaoskit.attach.jobs.pod_state import PodState


@dataclass(frozen=True, slots=True)
class Place:
    """A place of a job.

    Attributes:
        key: identity of the place. Its index is not a rank.
        pod: the pod that holds the place: the newest one that has not ended; None if there is none.
        since_s: monotonic time since when that pod holds the place, or since when it is empty. For
            the first list, it is the time of the list.
        former_pods: pods that held the place and ended, or left it to a newer one; oldest first.
            A failed pod may stay in the cluster beside its successor.
        silent_since_s: monotonic time since when the control plane does not hear of the pod's node;
            None if it does.
    """

    key: PlaceKey
    pod: PodState | None
    since_s: float
    former_pods: tuple[PodState, ...] = ()
    silent_since_s: float | None = None

    @property
    def is_node_ready(self) -> bool:
        """False if the control plane does not hear of the pod's node."""
        return self.silent_since_s is None

    @property
    def is_ready(self) -> bool:
        """True if a ready pod holds the place."""
        return self.pod is not None and self.pod.is_ready and not self.pod.is_terminating


@dataclass(frozen=True, slots=True)
class JobPlaces:
    """All places of a job at one moment.

    Attributes:
        places: the places that a pod has held so far, in the order of their owners and indexes.
        job: state of the job's object; None if there is none (any more).
        restart_attempt: number of restarts of the whole job; 0 for kinds without such restarts.
    """

    places: tuple[Place, ...]
    job: JobState | None = None
    restart_attempt: int = 0

    def place(self, key: PlaceKey) -> Place | None:
        """Return a place, or None if no pod has held it so far."""
        return next((place for place in self.places if place.key == key), None)

    def successor(self, key: PlaceKey, uid: str) -> PodState | None:
        """Return the pod that has replaced another one in a place, or None while there is none.

        Args:
            key: the place.
            uid: identifier of the pod that was replaced.
        """
        place = self.place(key)
        if place is None or place.pod is None or place.pod.uid == uid:
            return None
        return place.pod
