"""Whether runs can take place on a cluster: what is asked of it before, and makes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from chaoskit.errors import ChaoskitError
from chaoskit.substrate.kubernetes import rights
from chaoskit.substrate.kubernetes.api import ApiError, KubernetesApi
from chaoskit.substrate.kubernetes.options import KubernetesOptions
from chaoskit.substrate.kubernetes.session import require_allowed


@dataclass(frozen=True, slots=True)
class ClusterFinding:
    """One thing that runs need. ``is_there``: whether the cluster has it."""

    name: str
    is_there: bool
    told: str


def examine_cluster(options: KubernetesOptions) -> Iterator[ClusterFinding]:
    """What a session with a driver needs, one thing after the other, until the rest cannot be asked.

    Raises:
        BadInput: if there is no such cluster.
    """
    reason = options.unavailable()
    yield ClusterFinding("options", not reason, reason or "an image, or a template, and the client")
    api = KubernetesApi(options.context, options.namespace)
    try:
        yield from _answers(api, options)
    finally:
        api.close()


def _answers(api: KubernetesApi, options: KubernetesOptions) -> Iterator[ClusterFinding]:
    try:
        yield ClusterFinding("API server", True, f"{api.server}, {api.version()}")
    except ApiError as error:
        yield ClusterFinding("API server", False, str(error))
        return
    try:
        require_allowed(api)
        yield ClusterFinding("namespace", True, f"{api.namespace}: runs are allowed there")
    except ChaoskitError as error:
        yield ClusterFinding("namespace", False, str(error))
    more = rights.ACCOUNT_RIGHTS if options.has_driver else rights.DRIVER_RIGHTS
    wanted = rights.CLIENT_RIGHTS + (() if options.has_driver and options.service_account else more)
    yield from _rights(api, "rights", "a session", wanted)
    if options.breakable:
        yield from _rights(api, "rights over machines", "breaking machines", rights.MACHINE_RIGHTS, everywhere=True)


def _rights(
    api: KubernetesApi, name: str, purpose: str, wanted: tuple[rights.Right, ...], *, everywhere: bool = False
) -> Iterator[ClusterFinding]:
    where = " in the whole cluster" if everywhere else ""
    lacking = [
        (one, verb)
        for one in wanted
        for verb in one.verbs
        if not api.may(verb, one.group, one.resource, everywhere=everywhere)
    ]
    for one, verb in lacking:
        yield ClusterFinding(f"{verb} {one.resource}{where}", False, f"you may not, and it is needed: {one.why}")
    if not lacking:
        yield ClusterFinding(name, True, f"all {sum(len(one.verbs) for one in wanted)} that {purpose} needs")
