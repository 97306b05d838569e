"""Resources of the pods that train nothing: the driver's and the coordinator's. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Resources that every machine has. Others are devices, such as GPUs.
PLAIN = ("cpu", "memory", "ephemeral-storage")
#: Requests of a driver and of a coordinator; see ``docs/kubernetes.md``.
REQUESTS = {"cpu": "100m", "memory": "512Mi"}
#: Limits, for each resource that the template limits: a quota may demand that every pod has such a limit.
LIMITS = {"cpu": "2", "memory": "4Gi", "ephemeral-storage": "10Gi"}


def make_small(spec: dict[str, Any], container: str, own: Mapping[str, Any] | None) -> None:
    """Have a pod ask for no devices, and for little else, whatever the template asks for nodes.

    Args:
        spec: of the pod, with the template in it; changed.
        container: name of the container whose resources are replaced. Init containers keep their plain limits only.
        own: resources that the template sets for this pod; None for small ones.
    """
    spec.pop("resources", None)
    for init in spec.get("initContainers", ()):
        if "resources" in init:
            init["resources"] = _without_requests(init["resources"])
    (main,) = (one for one in spec["containers"] if one["name"] == container)
    main["resources"] = dict(own) if own is not None else _small(main.get("resources") or {})
    _keep_claims(spec, {claim["name"] for claim in main["resources"].get("claims", ())})


def _small(of_node: Mapping[str, Any]) -> dict[str, Any]:
    limits = {name: LIMITS[name] for name in PLAIN if name in (of_node.get("limits") or {})}
    if not limits:
        return {"requests": dict(REQUESTS)}
    requests = {
        **dict.fromkeys(limits, "0"),
        **REQUESTS,
    }  # a resource that is only limited is requested, too
    return {"requests": requests, "limits": limits}


def _without_requests(of_node: Mapping[str, Any]) -> dict[str, Any]:
    limits, requests = of_node.get("limits") or {}, of_node.get("requests") or {}
    kept = {name: limits[name] for name in PLAIN if name in limits}
    none = {name: "0" for name in PLAIN if name in limits or name in requests}
    return {"limits": kept, "requests": none}


def _keep_claims(spec: dict[str, Any], names: set[str]) -> None:
    """Drop claims of devices that no container uses any more: the pod would get their devices all the same."""
    claims = [claim for claim in spec.pop("resourceClaims", ()) if claim["name"] in names]
    if claims:
        spec["resourceClaims"] = claims
