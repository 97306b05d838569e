"""The watch of a job: threads that watch its pods, its object and its nodes, and feed the tracker.

-> ``object_watch.py``: a thread. ``tracker.py``: the decisions. ``find.py``: the watched job.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from chaoskit.attach.jobs.changes import JobChange
from chaoskit.attach.jobs.find import FoundJob
from chaoskit.attach.jobs.membership import PlaceKey
from chaoskit.attach.jobs.object_watch import SILENCE_S, ObjectWatch
from chaoskit.attach.jobs.places import JobPlaces
from chaoskit.attach.jobs.pod_state import PodState
from chaoskit.attach.jobs.tracker import JobTracker
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi

Result = TypeVar("Result")


class JobWatch:
    """The places of a job, kept up to date by threads from ``start`` to ``close``.

    It begins with the places of the found job, and reports the changes since then.

    Args:
        api: client of the job's namespace.
        job: the job.
        on_changes: called with the changes of each event, in their order, on a thread of the watch.
            The places do not change before it returns.
        silence_s: seconds without an event after which a watch is opened anew.
    """

    def __init__(
        self,
        api: KubernetesApi,
        job: FoundJob,
        on_changes: Callable[[list[JobChange]], None] = lambda changes: None,
        *,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._tracker = JobTracker(job.membership)
        job.listing.give_to(self._tracker)
        self._changed = threading.Condition(threading.RLock())
        self._on_changes = on_changes
        tracker, members = self._tracker, job.membership
        self._watches = [
            ObjectWatch(
                api,
                "Pod",
                lambda pods, version: self._take(tracker.list_pods, pods, version),
                lambda event, pod: self._take(tracker.pod_event, event, pod),
                selector=members.selector,
                silence_s=silence_s,
            )
        ]
        if kind := job.reference.kind.watched:
            self._watches.append(
                ObjectWatch(
                    api,
                    kind,
                    lambda jobs, version: self._take(
                        tracker.list_job, jobs[0] if jobs else None, version
                    ),
                    lambda event, entry: self._take(tracker.job_event, event, entry),
                    name=job.reference.name,
                    silence_s=silence_s,
                )
            )
        if job.sees_nodes:
            self._watches.append(
                ObjectWatch(
                    api,
                    "Node",
                    lambda nodes, version: self._take(tracker.list_nodes, nodes),
                    lambda event, node: self._take(tracker.node_event, event, node),
                    silence_s=silence_s,
                )
            )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def heard_s(self) -> float:
        """Monotonic time since when nothing is missing: the oldest last answer of all watches."""
        return min(watch.heard_s for watch in self._watches)

    @property
    def trouble(self) -> str:
        """The error because of which the places may be out of date; "" for none."""
        return next((watch.trouble for watch in self._watches if watch.trouble), "")

    @property
    def error(self) -> Exception | None:
        """The first unexpected exception of a watch, also of ``on_changes``; None for none.

        The watch lists anew after it, but changes may be lost.
        """
        return next((watch.error for watch in self._watches if watch.error is not None), None)

    def start(self) -> None:
        """Start the threads."""
        for watch in self._watches:
            watch.start()

    def close(self) -> None:
        """End the threads."""
        for watch in self._watches:
            watch.close()

    def places(self) -> JobPlaces:
        """Return all places at present."""
        with self._changed:
            return self._tracker.places()

    def wait_for(self, condition: Callable[[JobPlaces], Result], limit_s: float) -> Result:
        """Wait until a condition on the places is true, and return its value.

        Its value is returned, too, if it is not true within the limit.

        Args:
            condition: called after each change, with the places.
            limit_s: seconds after which the wait ends.
        """
        until_s = time.monotonic() + limit_s
        with self._changed:
            while not (result := condition(self._tracker.places())):
                remaining_s = until_s - time.monotonic()
                if remaining_s <= 0:
                    break
                self._changed.wait(remaining_s)
            return result

    def wait_for_successor(self, place: PlaceKey, uid: str, limit_s: float) -> PodState | None:
        """Wait until another pod holds a place and is ready, and return it.

        Return None if there is none within the limit.

        Args:
            place: the place.
            uid: identifier of the pod that is replaced.
            limit_s: seconds after which the wait ends.
        """

        def ready_successor(places: JobPlaces) -> PodState | None:
            pod = places.successor(place, uid)
            return pod if pod is not None and pod.is_ready else None

        return self.wait_for(ready_successor, limit_s)

    def _take(self, take: Callable[..., list[JobChange]], *arguments: Any) -> None:
        """Pass a list or an event to the tracker, and its changes on."""
        with self._changed:
            changes = take(*arguments, time.monotonic())
            if changes:
                self._on_changes(changes)
            self._changed.notify_all()
