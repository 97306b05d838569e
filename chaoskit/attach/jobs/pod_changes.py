"""Changes between two states of a pod: its containers, its readiness, and its deletion.

-> ``tracker.py`` has the states. ``changes.py``: the changes.
"""

from __future__ import annotations

from collections.abc import Iterator

from chaoskit.attach.jobs.changes import (
    ContainerEnded,
    ContainerRestarted,
    JobChange,
    PodTerminating,
    ReadinessChanged,
)
from chaoskit.attach.jobs.membership import PlaceKey
from chaoskit.attach.jobs.pod_state import ContainerState, PodState


def pod_changes(
    place: PlaceKey, before: PodState, pod: PodState, now_s: float
) -> Iterator[JobChange]:
    """Yield the changes between two states of a pod.

    Args:
        place: the pod's place.
        before: the earlier state; for a new pod, one without containers.
        pod: the later state.
        now_s: monotonic time.
    """
    for container in pod.containers:
        earlier = before.container(container.name)
        if container.restart_count > earlier.restart_count:
            exit_code, reason = _last_end(container)
            yield ContainerRestarted(
                now_s,
                place,
                pod.uid,
                pod.name,
                container.name,
                container.restart_count,
                container.restart_count - earlier.restart_count - 1,
                exit_code,
                reason,
            )
        is_same_life = earlier.container_id == container.container_id
        was_ended = earlier.state == "terminated" and is_same_life
        if container.state == "terminated" and not was_ended:
            yield ContainerEnded(
                now_s,
                place,
                pod.uid,
                pod.name,
                container.name,
                container.container_id,
                container.exit_code,
                container.reason,
            )
    if pod.is_terminating and not before.is_terminating:
        yield PodTerminating(now_s, place, pod.uid, pod.name)
    if pod.is_ready != before.is_ready:
        yield ReadinessChanged(now_s, place, pod.uid, pod.name, pod.is_ready)


def _last_end(container: ContainerState) -> tuple[int | None, str]:
    """Return exit code and reason of the life before the present one.

    A kubelet that counts a restart before it starts the container still shows that life as present.
    """
    if container.state == "terminated" and container.last_exit_code is None:
        return container.exit_code, container.reason
    return container.last_exit_code, container.last_reason
