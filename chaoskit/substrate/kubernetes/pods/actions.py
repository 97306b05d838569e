"""What can be done to pods, to machines below them, and to the API server, as data."""

from __future__ import annotations

from chaoskit.substrate.core.actions import Action
from chaoskit.substrate.kubernetes.pods.pod_blocker import How

#: A supervisor that has nothing else to do answers within this time; else its pod has fallen silent.
ANSWER_S = 1.0
#: An API server that says nothing for so long has stopped.
SERVER_SILENT_S = 2.0


class PodDeletion(Action, frozen=True):
    """Delete the pod; its processes have ``grace_s`` seconds to end. Shown: 1 when nothing of it is left."""

    grace_s: int


class PodEviction(Action, frozen=True):
    """Have the pod evicted, as a drain does; budgets of disruptions may forbid that. Shown: as for a deletion."""

    grace_s: int


class PodPreemption(Action, frozen=True):
    """Have the scheduler preempt the pod for one of a higher priority; lifted, that one is deleted.

    Shown: as for a deletion, where the API server says that it was the scheduler's doing.
    """

    priority_class: str


class ContainerCrash(Action, frozen=True):
    """Have all processes of the container end at once, as if it was killed. Shown: as for a deletion."""


class PodHindrance(Action, frozen=True):
    """Have no pod run that is made meanwhile: for want of ``room``, or of its ``image``. Shown: pods of which the API
    server says so.
    """

    how: How


class MachineLoss(Action, frozen=True):
    """Have a lever pulled that takes the machine of the pod away; lifted, its undo runs.

    Shown: 1 when its command has ended well, 2 when the supervisors of all pods there do not answer any more, either.
    """

    lever: str


class MachineDrain(Action, frozen=True):
    """Have the machine of the pod cordoned, and all pods of the run on it evicted; lifted, the cordon is taken off.

    Their processes have ``grace_s`` seconds to end. Shown: 1 when nothing is left of any of these pods.
    """

    grace_s: int


class MachineTaint(Action, frozen=True):
    """Have the machine tainted, so that the cluster deletes its pods; lifted, the taint is taken off.

    Shown: as for a drain.
    """


class ApiServerStop(Action, frozen=True):
    """Have a lever pulled that stops the API server, for ``lasts_s`` seconds. Shown: 1 when that answers nothing."""

    lever: str
    lasts_s: float


MACHINE_ACTIONS: frozenset[type[Action]] = frozenset(
    {MachineLoss, MachineDrain, MachineTaint, ApiServerStop}
)
POD_ACTIONS: frozenset[type[Action]] = frozenset(
    {PodDeletion, PodEviction, PodPreemption, ContainerCrash, PodHindrance}
)
