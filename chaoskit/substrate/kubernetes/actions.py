"""What can be done to the pod of a node, as data."""

from __future__ import annotations

from chaoskit.substrate.actions import Action


class PodDeletion(Action, frozen=True):
    """Delete the pod; its processes have ``grace_s`` seconds to end. Shown: 1 when nothing of it is left."""

    grace_s: int


class PodEviction(Action, frozen=True):
    """Have the pod evicted, as a drain does; budgets of disruptions may forbid that. Shown: as for a deletion."""

    grace_s: int


class ContainerCrash(Action, frozen=True):
    """Have all processes of the container end at once, as if it was killed. Shown: as for a deletion."""


POD_ACTIONS: frozenset[type[Action]] = frozenset({PodDeletion, PodEviction, ContainerCrash})
