"""Resources of the pods that train nothing: the driver's and the coordinator's.

These functions make no requests to the API server.

-> ``manifests.py`` sets them in the objects of these pods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Resources that every machine has. Others are devices, such as GPUs.
PLAIN = ("cpu", "memory", "ephemeral-storage")
#: Requests of a driver and of a coordinator; see ``docs/kubernetes.md``.
REQUESTS = {"cpu": "100m", "memory": "512Mi"}
#: Limits for resources that the template limits: a quota may demand such a limit of every pod.
LIMITS = {"cpu": "2", "memory": "4Gi", "ephemeral-storage": "10Gi"}


def make_small(spec: dict[str, Any], container: str, own: Mapping[str, Any] | None) -> None:
    """Make a pod request no devices and few other resources, whatever the template requests.

    Args:
        spec: spec of the pod, with the template in it; changed in place.
        container: name of the container whose resources are replaced. Init containers keep only
            their limits of plain resources.
        own: resources that the template sets for this pod; None for small ones.
    """
    spec.pop("resources", None)
    for init in spec.get("initContainers", ()):
        if "resources" in init:
            init["resources"] = _without_requests(init["resources"])
    (main,) = (candidate for candidate in spec["containers"] if candidate["name"] == container)
    main["resources"] = (
        dict(own) if own is not None else _small_resources(main.get("resources") or {})
    )
    _keep_claims(spec, {claim["name"] for claim in main["resources"].get("claims", ())})


def _small_resources(node_resources: Mapping[str, Any]) -> dict[str, Any]:
    """Return small resources, with limits only for those that the node's container limits."""
    limits = {name: LIMITS[name] for name in PLAIN if name in (node_resources.get("limits") or {})}
    if not limits:
        return {"requests": dict(REQUESTS)}
    requests = {**dict.fromkeys(limits, "0"), **REQUESTS}  # a limit alone is a request, too
    return {"requests": requests, "limits": limits}


def _without_requests(node_resources: Mapping[str, Any]) -> dict[str, Any]:
    """Return the limits of plain resources, and requests of 0 for them."""
    limits, requests = node_resources.get("limits") or {}, node_resources.get("requests") or {}
    kept = {name: limits[name] for name in PLAIN if name in limits}
    zero_requests = {name: "0" for name in PLAIN if name in limits or name in requests}
    return {"limits": kept, "requests": zero_requests}


def _keep_claims(spec: dict[str, Any], names: set[str]) -> None:
    """Drop claims of devices that no container uses any more.

    Otherwise the pod would get these devices.
    """
    claims = [claim for claim in spec.pop("resourceClaims", ()) if claim["name"] in names]
    if claims:
        spec["resourceClaims"] = claims
