"""Checks for actions on the pods of a job that already runs, before anything happens to it.

-> ``substrate/kubernetes/api/rights.py``: the rights. ``machines/machines.py``: the rules for
machines.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from chaoskit.attach.required_rights import require_rights
from chaoskit.errors import BadInput
from chaoskit.substrate.core.actions import Action
from chaoskit.substrate.kubernetes.api import rights
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi
from chaoskit.substrate.kubernetes.machines.machines import why_not_breakable_now
from chaoskit.substrate.kubernetes.machines.marks import MARK_OF
from chaoskit.substrate.kubernetes.options import VARIABLE, KubernetesOptions, in_a_pod
from chaoskit.substrate.kubernetes.pods.actions import (
    ApiServerStop,
    ContainerCrash,
    MachineDrain,
    MachineLoss,
    PodDeletion,
    PodEviction,
    PodPreemption,
)

#: Rights in the namespace of the job that each kind of action needs.
RIGHTS_OF_ACTIONS: Mapping[type[Action], tuple[rights.Right, ...]] = {
    PodDeletion: rights.DELETE_RIGHTS,
    PodEviction: rights.EVICT_RIGHTS,
    PodPreemption: rights.PREEMPT_RIGHTS,
    ContainerCrash: rights.CRASH_RIGHTS,
    MachineDrain: rights.EVICT_RIGHTS,
    MachineLoss: rights.SILENCE_RIGHTS,
}
_BY_LEVER = (MachineLoss, ApiServerStop)


def require_action_rights(api: KubernetesApi, actions: Collection[type[Action]]) -> None:
    """Refuse to begin without a right that these kinds of actions need.

    Raises:
        BadInput: if the user lacks one; it names all of them.
        ApiError: if the server does not answer.
    """
    needed = [right for action in actions for right in RIGHTS_OF_ACTIONS.get(action, ())]
    require_rights(api, dict.fromkeys(needed))
    if MARK_OF.keys() & set(actions):
        require_rights(api, rights.MACHINE_RIGHTS, everywhere=True)


def require_machines(
    api: KubernetesApi,
    options: KubernetesOptions,
    actions: Collection[type[Action]],
    machines: Collection[str],
    run_name: str,
    own_uids: Callable[[], Collection[str]],
) -> None:
    """Refuse to begin if faults may strike a machine that may not be broken.

    Nothing is refused if none of the actions is one on machines or on the API server.

    Args:
        actions: kinds of the actions of the run.
        machines: machines that they may strike.
        run_name: name of the run.
        own_uids: returns the identifiers of the pods of the job.

    Raises:
        BadInput: if an option is missing, or the rules for machines forbid one of them.
        ApiError: if the server does not answer.
    """
    if set(actions) & set(_BY_LEVER) and not Path(options.levers or "-").is_file():
        raise BadInput(
            "levers",
            options.levers,
            f"name a file with the commands that break machines, and their undo: {VARIABLE}LEVERS=FILE",
        )
    marks_or_levers = {mark for action, mark in MARK_OF.items() if action in actions}
    if not marks_or_levers:
        return
    if in_a_pod() and not options.own_machine:
        raise BadInput(
            "own_machine",
            "",
            f"name the machine on which this process runs, so that it is not broken: {VARIABLE}OWN_MACHINE=NAME",
        )
    if unnamed := sorted(set(machines) - set(options.breakable)):
        raise BadInput(
            "machines",
            options.machines,
            f"name the machines of the job that may be broken: {VARIABLE}MACHINES={','.join(unnamed)}",
        )
    for machine in sorted(machines):
        if reason := _why_not_breakable(api, options, machine, marks_or_levers, run_name, own_uids):
            raise BadInput(
                "machines", options.machines, f"name machines that can be broken: {reason}"
            )


def _why_not_breakable(
    api: KubernetesApi,
    options: KubernetesOptions,
    machine: str,
    marks_or_levers: Collection[str],
    run_name: str,
    own_uids: Callable[[], Collection[str]],
) -> str:
    """Return the reason for which a machine may not be broken, or "" if it may.

    Raises ApiError if the server does not answer.
    """
    if machine == options.own_machine:
        return f"{machine} must not be broken: this process runs on it"
    try:
        return why_not_breakable_now(api, options, machine, marks_or_levers, run_name, own_uids)
    except ApiError as error:
        if not error.is_refusal:
            raise
        return f"{machine} cannot be read: {error}"
