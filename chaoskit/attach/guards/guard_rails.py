"""Guard rails: limits of the damage that faults may do to a job, and pods that they may not strike.

The decisions make no requests. They are taken before anything starts.

-> ``reach.py``: the nodes that faults may strike. ``abort_watch.py`` ends a run that has started.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from chaoskit.attach.guards.guarded_job import (
    GuardedJob,
    GuardedNode,
    Labels,
    guarded_job,
    owner_labels,
)
from chaoskit.attach.guards.reach import count_nodes, reach_of
from chaoskit.attach.jobs.find import FoundJob
from chaoskit.errors import BadInput
from chaoskit.faults import Fault
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi
from chaoskit.substrate.kubernetes.machines.machines import PROTECTED as PROTECTED_MACHINE
from chaoskit.typed import convert_fields

#: Labels that protect pods. The second one protects machines, too.
PROTECTED = ("chaoskit.dev/protected", PROTECTED_MACHINE)
#: Tolerance of products with a share, such as 0.07 * 100.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class GuardRails:
    """Limits of the damage that the faults of a run may do to a job that already runs.

    Without ``max_nodes`` and ``max_share``, at least one node must stay untouched.

    Args:
        max_nodes: number of different nodes that the faults may strike.
        max_share: share of the job's nodes that they may strike, above 0 and up to 1.
        protected: labels, as ``KEY`` or ``KEY=VALUE``. A pod with one of them is never struck, and
            no pod is if its namespace or the job has one.
        min_nodes: number of nodes that the job must have at least.
    """

    max_nodes: int | None = None
    max_share: float | None = None
    protected: tuple[str, ...] = PROTECTED
    min_nodes: int | None = None

    def validate(self) -> None:
        """Raise BadInput for a limit that cannot be one."""
        convert_fields(self)
        for field, count in (("max_nodes", self.max_nodes), ("min_nodes", self.min_nodes)):
            if count is not None and count < 1:
                raise BadInput(field, count, "use 1 or more")
        if self.max_share is not None and not 0 < self.max_share <= 1:
            raise BadInput("max_share", self.max_share, "use a share above 0, up to 1")
        for label in self.protected:
            if not label.partition("=")[0].strip():
                raise BadInput("protected", label, "write a label as KEY or KEY=VALUE")

    def limit(self, nodes: int) -> int:
        """Return the number of nodes that may be struck in a job of ``nodes`` nodes."""
        limits = [] if self.max_nodes is None else [self.max_nodes]
        if self.max_share is not None:
            limits.append(math.floor(self.max_share * nodes + _ROUNDING))
        return min(limits, default=nodes - 1)

    def check(self, job: GuardedJob, faults: Sequence[Fault], nodes: int | None = None) -> None:
        """Refuse faults that these limits do not allow.

        Args:
            job: the job.
            faults: the faults of the run, with ranks or roles.
            nodes: number of nodes that the user says the job has; None to accept any.

        Raises:
            BadInput: naming the limit, or the label of what is protected.
        """
        self.check_job(job, nodes)
        for fault in faults:
            self._check_pods(job, fault)
        if faults:
            self._check_number(job, faults)

    def check_job(self, job: GuardedJob, nodes: int | None = None) -> None:
        """Refuse a job of another size, or one that is protected, whatever the faults are.

        Args:
            job: the job. Its ranks do not matter.
            nodes: number of nodes that the user says the job has; None to accept any.

        Raises:
            BadInput: naming the limit, or the label of what is protected.
        """
        self.validate()
        self._check_size(job, nodes)
        for owner, labels in job.owners.items():
            if label := self._protecting(labels):
                raise BadInput(
                    "protected", label, f"attach to another job, or remove it: {owner} has it"
                )

    def why_not(self, node: GuardedNode, struck: Collection[str], nodes: int) -> str:
        """Return why a node may not be struck now; "" if it may.

        The moment of a strike may differ from the check before the run: roles are drawn, a restart
        moves ranks to other nodes, and a successor may have other labels.

        Args:
            node: the node, with the labels of its present pod.
            struck: names of nodes that were struck before in this run.
            nodes: number of nodes of the job.
        """
        if label := self._protecting(node.labels):
            return f"pod {node.pod} has the label {label}"
        count, limit = len({*struck, node.name}), self.limit(nodes)
        return f"it would be node {count} of {limit} that may be struck" if count > limit else ""

    def _check_size(self, job: GuardedJob, nodes: int | None) -> None:
        """Refuse a job without nodes, or with another number of nodes than the user expects."""
        count = len(job.nodes)
        if not count:
            raise BadInput("job", job.reference, "name a job with pods that run: it has none")
        if nodes is not None and nodes != count:
            remedy = f"use {count}, or wait for its pods: {job.reference} has {count} nodes"
            raise BadInput("nodes", nodes, remedy)
        if self.min_nodes is not None and count < self.min_nodes:
            remedy = f"use {count} or less, or wait for its pods: {job.reference} has {count} nodes"
            raise BadInput("min_nodes", self.min_nodes, remedy)

    def _check_pods(self, job: GuardedJob, fault: Fault) -> None:
        """Refuse a fault that may strike a protected pod."""
        reach = reach_of(fault, job)
        for node in job.nodes:
            if (reach.others or node.name in reach.nodes) and (
                label := self._protecting(node.labels)
            ):
                strikes = "strikes" if node.name in reach.nodes else "may strike"
                remedy = (
                    f"strike other nodes, or remove it: pod {node.pod} has it, and "
                    f"{fault} {strikes} that pod"
                )
                raise BadInput("protected", label, remedy)

    def _check_number(self, job: GuardedJob, faults: Sequence[Fault]) -> None:
        """Refuse faults that may strike more nodes than these limits allow."""
        nodes, count = len(job.nodes), count_nodes(faults, job)
        limit = self.limit(nodes)
        if count <= limit:
            return
        why = f"the faults may strike {count} of {nodes} nodes"
        if self.max_nodes is not None and self.max_nodes == limit:
            remedy = f"use {count} or more, or strike fewer nodes: {why}"
            raise BadInput("max_nodes", self.max_nodes, remedy)
        if self.max_share is not None:
            share = math.ceil(100 * count / nodes) / 100
            remedy = f"use {share:g} or more, or strike fewer nodes: {why}"
            raise BadInput("max_share", self.max_share, f"{remedy}, and this share allows {limit}")
        remedy = f"set it to {count}, or strike fewer nodes: {why}, and without a limit of yours"
        raise BadInput("max_nodes", None, f"{remedy} one node must stay untouched")

    def _protecting(self, labels: Labels) -> str:
        """Return a label by which an object with these labels is protected; "" for none."""
        for label in self.protected:
            key, has_value, value = label.partition("=")
            if key in labels and (not has_value or labels[key] == value):
                return f"{key}={labels[key]}"
        return ""


def check_guard_rails(
    api: KubernetesApi,
    job: FoundJob,
    faults: Sequence[Fault],
    rails: GuardRails,
    *,
    ranks: Mapping[int, str],
    nodes: int | None = None,
) -> GuardedJob:
    """Refuse faults that guard rails do not allow in a job, and return the job with its labels.

    Args:
        api: client of the namespace of the job.
        job: the job that runs.
        faults: the faults of the run, with ranks or roles.
        rails: the guard rails.
        ranks: rank -> name of its node, as far as ranks were read.
        nodes: number of nodes that the user says the job has; None to accept any.

    Raises:
        BadInput: naming the limit, or the label of what is protected.
        ApiError: if the server refuses a request or does not answer.
    """
    guarded = guarded_job(job, ranks, owner_labels(api, job))
    rails.check(guarded, faults, nodes)
    return guarded
