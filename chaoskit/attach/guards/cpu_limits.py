"""The CPU limits of the containers that train, which load in them would use up.

-> ``chaoskit/hand/processes/load.py``: the load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from chaoskit.attach.jobs.find import FoundJob
from chaoskit.errors import BadInput
from chaoskit.faults import Fault, LimitCpu
from chaoskit.substrate.kubernetes.pods.quotas import amount

_ON_FREE_CPUS = "without a limit, load takes nothing from a job on a machine with free CPUs"


def require_cpu_limits(job: FoundJob, faults: Sequence[Fault]) -> None:
    """Refuse a fault that leaves a container as much CPU time as its limit, or that has no limit.

    Any node may be struck: ranks are not known yet.

    Raises:
        BadInput: naming the fault and the pod.
    """
    limited = [fault for fault in faults if isinstance(fault, LimitCpu)]
    if not limited:
        return
    objects = {str(pod["metadata"]["uid"]): pod for pod in job.listing.pods}
    for place in job.places.places:
        if place.pod is None or place.pod.uid not in objects:
            continue
        container = job.containers[place.key]
        limit = cpu_limit(objects[place.pod.uid], container)
        for fault in limited:
            if remedy := _remedy(fault, f"{container} of {place.pod.name}", limit):
                raise BadInput("faults", str(fault), remedy)


def cpu_limit(pod: Mapping[str, Any], container: str) -> float:
    """Return the CPU limit of a container, as a number of CPUs; 0 for none."""
    for entry in pod["spec"]["containers"]:
        if entry["name"] == container:
            limits = (entry.get("resources") or {}).get("limits") or {}
            return float(amount(limits["cpu"])) if "cpu" in limits else 0.0
    return 0.0


def _remedy(fault: LimitCpu, where: str, limit: float) -> str:
    """Return what would make a fault possible; "" if it is."""
    if not limit:
        return f"set a CPU limit of {where}, or use Straggle(how='quota'): {_ON_FREE_CPUS}"
    return (
        f"use cores below {limit:g}, which is the CPU limit of {where}"
        if fault.cores >= limit
        else ""
    )
