"""The status of a container in its pod: which of its lives have a log that can be read.

The kubelet serves two logs of a container: the log of its newest life, and the log of the life
before (``previous=true``).

-> attach/logs/container_log.py decides by this status which log is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from chaoskit.attach.logs.records import ContainerLife

_LISTS = ("containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses")
_FINAL_PHASES = ("Failed", "Succeeded")


@dataclass(frozen=True, slots=True)
class ContainerStatus:
    """The lives of a container whose logs can be read, as the API server shows them.

    Attributes:
        current: the life that runs, or that has ended and has no successor; None before the first
            life, and while the container waits for its restart.
        ended: the ended life that ``previous=true`` reads; None for none.
        is_running: True if ``current`` runs.
        is_final: True if the pod has ended, so that no further life follows.
        may_restart: True if another life can follow, as far as this status shows.
    """

    current: ContainerLife | None = None
    ended: ContainerLife | None = None
    is_running: bool = False
    is_final: bool = False
    may_restart: bool = True

    @property
    def newest(self) -> ContainerLife | None:
        """The newest life."""
        return self.current or self.ended

    @classmethod
    def of(cls, pod: Mapping[str, Any], container: str) -> ContainerStatus:
        """Return the status of a container in the object of its pod."""
        status = pod.get("status", {})
        is_final = status.get("phase") in _FINAL_PHASES
        is_deleted = "deletionTimestamp" in pod.get("metadata", {})
        may_restart = not is_final and not is_deleted
        entries = (entry for name in _LISTS for entry in status.get(name) or ())
        entry = next((entry for entry in entries if entry.get("name") == container), None)
        if entry is None:
            return cls(is_final=is_final, may_restart=may_restart)
        last = (entry.get("lastState") or {}).get("terminated") or {}
        state, restarts = entry.get("state") or {}, int(entry.get("restartCount") or 0)
        running, terminated = state.get("running"), state.get("terminated") or {}
        current_id = entry.get("containerID") if running is not None else None
        current_id = current_id or terminated.get("containerID")
        last_id = last.get("containerID")
        started_s = _seconds((running or terminated).get("startedAt"))
        current = ContainerLife(restarts, current_id, started_s) if current_id else None
        # while a container waits, its restart count is that of its last life
        ended_number = restarts - 1 if current is not None else restarts
        started_s = _seconds(last.get("startedAt"))
        ended = ContainerLife(max(0, ended_number), last_id, started_s) if last_id else None
        policy = pod.get("spec", {}).get("restartPolicy", "Always")
        if terminated and (
            policy == "Never" or (policy == "OnFailure" and terminated.get("exitCode") == 0)
        ):
            may_restart = False
        is_running = running is not None and current is not None
        return cls(current, ended, is_running, is_final, may_restart)


def _seconds(moment: str | None) -> int:
    """Return a time of the API server in seconds since the epoch, or 0 for none."""
    return int(datetime.fromisoformat(moment).timestamp()) if moment else 0
