"""The preview of faults in a job that runs: what each would strike, by which hands, and refusals.

Nothing is changed: the API server is asked by dry runs.

-> ``preview.py``: the preview of the job itself. cli/machine/fault_table.py renders this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from chaoskit.attach.guards.guarded_job import GuardedJob, GuardedNode
from chaoskit.attach.guards.hand_choice import hand_of
from chaoskit.attach.guards.reach import reach_of
from chaoskit.attach.hands.hand_container import (
    EXEC,
    HAND_ROLES,
    NETWORK,
    PROCESSES,
    HandMeans,
    HandRole,
    TargetUser,
    user_of,
)
from chaoskit.attach.hands.start import HandPod, why_no_hand
from chaoskit.attach.jobs.find import FoundJob
from chaoskit.errors import BadInput
from chaoskit.experiment.plan.command_plan import moment as command_moment
from chaoskit.faults import Fault
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi

#: Pods that are asked at the same time.
_PARALLEL = 8
_BY_IMAGE = HandMeans()


@dataclass(frozen=True, slots=True)
class FaultPreview:
    """A fault with a node that it would strike, as a user sees it before the run.

    Attributes:
        fault: the fault, as it is written in a plan.
        moment: the moment at which it strikes, in words.
        node: name of the node; "" if any node may be struck.
        pod: name of its pod; "" if any pod may be struck.
        uid: identifier of the pod.
        ranks: ranks of the node, as far as they were read.
        hands: the hands that act, in alphabetical order; empty if no hand can do it.
        security: level of Pod Security that the namespace must admit; "" if any level does.
        refusal: why it is refused; "" if it is not.
    """

    fault: str
    moment: str
    node: str = ""
    pod: str = ""
    uid: str = ""
    ranks: tuple[int, ...] = ()
    hands: tuple[str, ...] = ()
    security: str = ""
    refusal: str = ""


def preview_faults(
    api: KubernetesApi,
    job: FoundJob,
    guarded: GuardedJob,
    faults: Sequence[Fault],
    means: HandMeans,
) -> tuple[FaultPreview, ...]:
    """Return the preview of faults: a row for each fault and each node that it strikes for sure.

    A fault that may strike any node has a further row without a node. Its refusal is the first one
    of all pods.

    Args:
        api: client of the namespace of the job.
        job: the job that runs.
        guarded: the same job, with its labels and ranks.
        faults: the faults, with ranks or roles.
        means: the means by which hands are started. Roles without one are not asked for.

    Raises:
        ApiError: if the server does not answer.
    """
    users = _users(job)
    rows = [row for fault in faults for row in plan_rows(guarded, fault, users, means)]
    needed = {
        (node.name, role)
        for row in rows
        for node in guarded.nodes
        for role in HAND_ROLES
        if means.source(role) is not None and role in _roles(row) and row.node in ("", node.name)
    }
    refusals = _ask(api, job, needed, means)
    return tuple(_with_refusal(row, refusals) for row in rows)


def plan_rows(
    job: GuardedJob,
    fault: Fault,
    users: Mapping[str, TargetUser | None],
    means: HandMeans = _BY_IMAGE,
) -> list[FaultPreview]:
    """Return the rows of a fault without asking a cluster.

    Args:
        job: the job, with its labels and ranks.
        fault: the fault.
        users: name of a node -> the user of its processes; None if it is not known.
        means: the means by which hands are started. Default: by an image.
    """
    moment = command_moment(fault) if fault.during is None else fault.moment
    reach = reach_of(fault, job)
    try:
        hands, refusal = hand_of(fault, means), ""
    except BadInput as error:
        hands, refusal = frozenset(), error.remedy
    rows = []
    for node in job.nodes:
        if node.name in reach.nodes:
            ranks = tuple(sorted(rank for rank, name in job.ranks.items() if name == node.name))
            level = security_level(hands, [users.get(node.name)])
            rows.append(_row(fault, moment, node, ranks, hands, level, refusal))
    if reach.others or not rows:
        level = security_level(hands, [users.get(node.name) for node in job.nodes])
        rows.append(
            FaultPreview(
                str(fault), moment, hands=tuple(sorted(hands)), security=level, refusal=refusal
            )
        )
    return rows


def security_level(hands: frozenset[str], users: Sequence[TargetUser | None]) -> str:
    """Return the level of Pod Security that hands need; "" if none of them is a container.

    Args:
        hands: the hands that act.
        users: the users of the processes that may be struck; None for one that is not known.
    """
    if NETWORK in hands:
        return "privileged"
    if PROCESSES not in hands:
        return ""
    if any(user is not None and user.uid == 0 for user in users):
        return "baseline"
    return "restricted, or baseline if the target is root" if None in users else "restricted"


def _row(
    fault: Fault,
    moment: str,
    node: GuardedNode,
    ranks: tuple[int, ...],
    hands: frozenset[str],
    level: str,
    refusal: str,
) -> FaultPreview:
    """Return the row of a fault and a node that it strikes for sure."""
    return FaultPreview(
        str(fault),
        moment,
        node.name,
        node.pod,
        node.uid,
        ranks,
        tuple(sorted(hands)),
        level,
        refusal,
    )


def _users(job: FoundJob) -> dict[str, TargetUser | None]:
    """Return the user of the container that trains on each node; None if its image decides."""
    objects = {str(pod["metadata"]["uid"]): pod for pod in job.listing.pods}
    return {
        place.key.node_name: user_of(objects[place.pod.uid], job.containers[place.key])
        for place in job.places.places
        if place.pod is not None and place.pod.uid in objects
    }


def _ask(
    api: KubernetesApi, job: FoundJob, needed: set[tuple[str, HandRole]], means: HandMeans
) -> dict[tuple[str, HandRole], str]:
    """Return why nodes do not admit hands; "" if they do."""
    pods = {
        place.key.node_name: (HandPod(place.pod.name, place.pod.uid), job.containers[place.key])
        for place in job.places.places
        if place.pod is not None
    }

    def ask(key: tuple[str, HandRole]) -> str:
        node, role = key
        pod, container = pods[node]
        source = means.source(role)
        return "" if source is None else why_no_hand(api, pod, container, role, source)

    keys = sorted(needed)
    with ThreadPoolExecutor(_PARALLEL) as pool:
        return dict(zip(keys, pool.map(ask, keys), strict=True))


def _roles(row: FaultPreview) -> frozenset[str]:
    """Return the roles of the hands of a row that are programs in a pod."""
    return frozenset(PROCESSES if hand == EXEC else hand for hand in row.hands)


def _with_refusal(row: FaultPreview, refusals: Mapping[tuple[str, HandRole], str]) -> FaultPreview:
    """Return a row with the refusals of the hands that it needs, if it has none yet."""
    if row.refusal:
        return row
    texts = [
        f"{role} on {node}: {text}"
        for (node, role), text in refusals.items()
        if text and role in _roles(row) and row.node in ("", node)
    ]
    return replace(row, refusal=texts[0] if row.node == "" and texts else "; ".join(texts))
