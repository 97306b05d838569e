"""Actions on pods, on machines below them, and on the API server, as data.

-> kubernetes/backends.py carries out the actions on pods of a session; attach/pods/pod_backend.py
those on pods of an attached job; kubernetes/machine_faults.py the others.
"""

from __future__ import annotations

from chaoskit.substrate.core.actions import Action
from chaoskit.substrate.kubernetes.pods.pod_blocker import How

#: An idle supervisor answers within this time; else its pod is silent.
ANSWER_S = 1.0
#: An API server that answers nothing for this long has stopped.
SERVER_SILENT_S = 2.0


class PodDeletion(Action, frozen=True):
    """Delete the pod. Its processes have ``grace_s`` seconds to end.

    Shown: 1 when the pod is gone.
    """

    grace_s: int


class PodEviction(Action, frozen=True):
    """Evict the pod, as a drain does.

    A PodDisruptionBudget may forbid that. Shown: 1 when the pod is gone.
    """

    grace_s: int


class PodPreemption(Action, frozen=True):
    """Make the scheduler preempt the pod for one of a higher priority.

    Lifted, that one is deleted. Shown: 1 when the pod is gone and the API server says that the
    scheduler preempted it.
    """

    priority_class: str


class ContainerCrash(Action, frozen=True):
    """End all processes of the container at once, as a kill does.

    Shown: 1 when the pod is gone. In an attached job the pod lives on, and it is 1 when that life
    of the container is over.
    """


class PodHindrance(Action, frozen=True):
    """Keep pods from running that are created meanwhile: for want of ``room`` or their ``image``.

    Shown: the number of pods that the API server reports as blocked for this reason.
    """

    how: How


class MachineLoss(Action, frozen=True):
    """Run the lever, a command of the user, that takes the machine of the pod away.

    Lifted, its undo command runs. Shown: 1 when the lever's command has succeeded, 2 when also no
    supervisor of a pod there answers any more. Below an attached job it is 2 when the machine's
    kubelet answers the API server no more.
    """

    lever: str


class MachineDrain(Action, frozen=True):
    """Cordon the machine of the pod and evict all pods of the run on it.

    Their processes have ``grace_s`` seconds to end. Lifted, the machine is uncordoned. Shown: 1
    when all of these pods are gone.
    """

    grace_s: int


class MachineTaint(Action, frozen=True):
    """Taint the machine of the pod, so that the cluster deletes its pods.

    Lifted, the taint is removed. Shown: 1 when all of these pods are gone.
    """


class ApiServerStop(Action, frozen=True):
    """Run the lever that stops the API server for ``lasts_s`` seconds.

    Shown: 1 when it answers nothing.
    """

    lever: str
    lasts_s: float


MACHINE_ACTIONS: frozenset[type[Action]] = frozenset(
    {MachineLoss, MachineDrain, MachineTaint, ApiServerStop}
)
POD_ACTIONS: frozenset[type[Action]] = frozenset(
    {PodDeletion, PodEviction, PodPreemption, ContainerCrash, PodHindrance}
)
