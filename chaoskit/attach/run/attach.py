"""A run with faults on a job that runs already, from its reference to the verdict.

-> attach/run/plan.py: the plan. attach/guards/: what faults may not do. attach/run/substrate.py: the
job as nodes. experiment/harness.py makes the run and judges it. attach/twin/: a second job to
compare with.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from chaoskit.attach.fault_preview import FaultPreview, preview_faults
from chaoskit.attach.guards.abort_conditions import parse_conditions
from chaoskit.attach.guards.abort_watch import AbortWatch
from chaoskit.attach.guards.cpu_limits import require_cpu_limits
from chaoskit.attach.guards.guard_rails import GuardRails, check_guard_rails
from chaoskit.attach.guards.guarded_job import guarded_job, owner_labels
from chaoskit.attach.guards.hand_choice import actions_of
from chaoskit.attach.hands.hand_container import HandImage, HandMeans
from chaoskit.attach.hands.image_file import hand_means
from chaoskit.attach.jobs.find import FoundJob, find_job
from chaoskit.attach.pods.checks import require_action_rights, require_machines
from chaoskit.attach.pods.machine_pods import job_uids
from chaoskit.attach.required_rights import require_rights
from chaoskit.attach.run.plan import (
    attach_settings,
    needs_ranks,
    plan_attached,
    require_faults,
    require_nodes,
    without_ranks,
)
from chaoskit.attach.run.substrate import AttachedSubstrate, needs_network
from chaoskit.attach.twin.cache import JobTwins
from chaoskit.attach.twin.manifests import read_manifests
from chaoskit.attach.twin.run import SecondJob, TwinPlan
from chaoskit.errors import BadInput
from chaoskit.experiment.harness import Harness
from chaoskit.experiment.plan.command_plan import CommandExperiment
from chaoskit.faults.base import Fault
from chaoskit.runlog.outcome import Outcome
from chaoskit.settings_file import read_document
from chaoskit.stacks import LogPatterns
from chaoskit.stacks.patterns import patterns_of
from chaoskit.substrate.core.actions import Action
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi
from chaoskit.substrate.kubernetes.api.rights import EXEC_RIGHTS, HAND_RIGHTS, LOG_RIGHTS
from chaoskit.substrate.kubernetes.options import KubernetesOptions
from chaoskit.typed import typed_arguments

#: Called with the faults as they would strike, before the first one does. False ends the run.
Confirm = Callable[[Sequence[FaultPreview]], bool]


@dataclass(frozen=True, slots=True)
class AttachLimits:
    """Limits of a run: the damage that it may do to the job, and conditions that end it.

    Attributes:
        rails: limits of the nodes that faults may strike, and protected labels.
        nodes: number of nodes that the user says the job has; None to accept any.
        abort: conditions that end the run and all faults: ``file:/PATH`` appears, ``url:URL`` does
            not answer well, ``metric:URL NAME > 5`` holds.
        confirm: asks the user once; None to begin without a question.
    """

    rails: GuardRails = field(default_factory=GuardRails)
    nodes: int | None = None
    abort: Sequence[str] = ()
    confirm: Confirm | None = None


@typed_arguments
def attach(
    reference: str,
    *,
    watch: LogPatterns | Path | str,
    faults: Sequence[Fault],
    image: HandImage | str = "",
    exec_hands: bool = False,
    namespace: str = "",
    context: str = "",
    container: str = "",
    limits: AttachLimits | None = None,
    twin: Path | str = "",
    twins: JobTwins | None = None,
    directory: str | Path | None = None,
    live_view: Callable[[Any], None] | None = None,
    **plan: Any,
) -> Outcome:
    """Inject faults into a job that runs already, and return the outcome with its verdict.

    The job goes on afterwards. Its processes are reached by hands: small programs in ephemeral
    containers of its pods.

    Args:
        reference: the job, such as ``statefulset/llama``; see :mod:`chaoskit.attach.jobs.kinds`.
        watch: the patterns that find steps and losses in its logs, or a file of them.
        faults: the faults that strike the job.
        image: the image of hands, or a file of :class:`.hands.image_file.HandImageFile`;
            "" for that of ``CHAOSKIT_HAND_IMAGE``.
        exec_hands: True to start hands on processes by exec in the container that trains, instead
            of by an image. They need the right ``pods/exec``, and python3 in that container.
        namespace: the namespace of the job; "" for that of ``CHAOSKIT_KUBERNETES_NAMESPACE``, else
            that of the context.
        context: context of the kubeconfig; "" for the current one.
        container: name of the container that trains; "" for the one that the rules of the kind
            select.
        limits: the guard rails. Default: one node stays untouched, and protected pods are left
            alone.
        twin: a file with the manifests of a second job of the same training. It runs after the
            run without a fault, is deleted then, and the losses must equal its losses. "" to
            compare no losses.
        twins: results of second jobs of this session, which are used again. Default: none.
        directory: the directory for journals and logs of the run. Default: a temporary one, which
            is removed at the end.
        live_view: receives the newest step and loss, and each fault that strikes.
        plan: see :func:`chaoskit.attach.run.plan.attach_settings`.

    Raises:
        BadInput: before anything is broken. If it is about a rank, hands have read the ranks.
        ApiError: if the API server does not answer.
        HarnessError: if chaoskit itself failed.
    """
    patterns, means = _patterns(watch), hand_means(image, by_exec=exec_hands)
    typed = require_faults(faults, means)
    settings, limits = attach_settings(**plan), limits or AttachLimits()
    twin_plan = None
    if str(twin):
        _require_loss_pattern(watch, patterns)
        manifests, deadline_s = read_manifests(Path(twin)), settings.twin_deadline_s
        twin_plan = TwinPlan(manifests, patterns, container, settings.twin_steps, deadline_s)
    limits.rails.validate()
    conditions = parse_conditions(limits.abort)
    options = KubernetesOptions.from_environment(os.environ)
    client = KubernetesApi(context or options.context, namespace or options.namespace)
    aborts: list[str] = []

    def why_aborted() -> str:
        return aborts[0] if aborts else ""

    with closing(client) as api, AbortWatch(conditions, aborts.append):
        job = find_job(api, reference, container=container)
        require_nodes(job, typed)
        substrate = AttachedSubstrate(api, job, means, options, limits.rails, patterns, why_aborted)
        with closing(substrate):
            _require_cluster(api, job, typed, means, options, substrate, limits)
            later_twin = None
            if twin_plan is not None:
                second_job = SecondJob(api, job, twin_plan, twins or JobTwins())
                later_twin = partial(
                    second_job.twin_of, undo=substrate.undo, why_aborted=why_aborted
                )
            substrate.reach(_actions(typed))
            ranks = substrate.ranks()
            if not ranks and needs_ranks(typed):
                raise without_ranks(job, substrate.why_no_ranks())
            experiment = plan_attached(job, ranks, patterns, typed, settings)
            substrate.require_processes(experiment.faults, ranks)
            _ask(api, job, means, experiment, ranks, limits)
            if aborts:
                raise BadInput("abort", aborts[0], "wait until it does not hold")
            with Harness(substrate, directory) as harness:
                return harness.run_planned(
                    experiment, twin=False, watch=live_view, later_twin=later_twin
                )


def _actions(faults: Sequence[Fault]) -> frozenset[type[Action]]:
    """Return the kinds of actions that faults apply."""
    return frozenset(action for fault in faults for action in actions_of(fault))


def _require_cluster(
    api: KubernetesApi,
    job: FoundJob,
    faults: Sequence[Fault],
    means: HandMeans,
    options: KubernetesOptions,
    substrate: AttachedSubstrate,
    limits: AttachLimits,
) -> None:
    """Refuse all that can be refused before anything is created.

    These are missing rights, machines that may not be broken, a protected job or one of another
    size, a job with hands of another run, and pods that do not admit hands.

    Raises:
        BadInput: naming the right, the machine, the label or the pod.
        ApiError: if the server does not answer.
    """
    actions = _actions(faults)
    by_image = not means.by_exec or needs_network(actions)
    hand_rights = [
        *(HAND_RIGHTS if by_image else ()),
        *(EXEC_RIGHTS if means.by_exec else ()),
    ]
    require_rights(api, dict.fromkeys([*LOG_RIGHTS, *hand_rights]))
    require_action_rights(api, actions)
    machines = {place.pod.node for place in job.places.places if place.pod is not None}
    own_uids = job_uids(api, job.membership)
    require_machines(api, options, actions, machines, substrate.run_name, own_uids)
    require_cpu_limits(job, faults)
    limits.rails.check_job(guarded_job(job, {}, owner_labels(api, job)), limits.nodes)
    substrate.require_no_other_run()
    substrate.require_hands(actions)


def _ask(
    api: KubernetesApi,
    job: FoundJob,
    means: HandMeans,
    experiment: CommandExperiment,
    ranks: Mapping[int, str],
    limits: AttachLimits,
) -> None:
    """Check the guard rails for the ranks that faults name, and ask the user.

    Raises:
        BadInput: if the guard rails or an admission forbid a fault, or the user does not confirm.
        ApiError: if the server does not answer.
    """
    guarded = check_guard_rails(
        api, job, experiment.faults, limits.rails, ranks=ranks, nodes=limits.nodes
    )
    rows = preview_faults(api, job, guarded, experiment.faults, means)
    for row in rows:
        if row.refusal:
            raise BadInput("faults", row.fault, row.refusal)
    if limits.confirm is not None and not limits.confirm(rows):
        raise BadInput("yes", "no", "answer yes to inject these faults, or give --yes")


def _patterns(watch: LogPatterns | Path | str) -> LogPatterns:
    """Return the patterns for the log. Raises BadInput if a file has none."""
    if isinstance(watch, LogPatterns):
        return watch
    settings = read_document("watch", Path(watch))
    if not isinstance(settings, dict):
        example = r"step: 'step (\d+)'"
        raise BadInput("watch", str(watch), f"write the pattern of a step in it: {example}")
    return patterns_of(settings)


def _require_loss_pattern(watch: object, patterns: LogPatterns) -> None:
    """Raise BadInput if the patterns find no losses, which a twin is compared by."""
    if patterns.loss is None:
        remedy = r"add the pattern of a loss, such as loss: 'loss ([\d.]+)', or leave the twin out"
        raise BadInput("watch", str(watch), remedy)
