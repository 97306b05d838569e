"""The backend that limits the CPU time of a node by load in the cgroup of its container.

-> ``chaoskit/hand/processes/load.py``: the load. attach/hands/throttle.py: a limit of one process.
"""

from __future__ import annotations

from collections.abc import Callable

from chaoskit.attach.hands.counted_effect import CountedEffect
from chaoskit.attach.hands.hand import Hand
from chaoskit.hand.fields import LASTS_MAX_S
from chaoskit.substrate.core.actions import Action, Applied, CapCpu


class HandLoad:
    """Backend that leaves a node a part of its container's CPU limit. The load ends with the hand.

    An action shows the periods in which the processes of the node had less CPU time than before.

    Args:
        hand: returns the standing hand by exec of a node, or raises NodeUnreachable.
    """

    actions: frozenset[type[Action]] = frozenset({CapCpu})

    def __init__(self, hand: Callable[[str], Hand]) -> None:
        self._hand = hand

    def apply(self, node: str, action: Action) -> Applied:
        """Begin the load.

        Raises:
            HandUnable: if the container has no CPU limit above what is to be left.
            NodeUnreachable: if the hand does not answer.
        """
        assert isinstance(action, CapCpu)
        hand = self._hand(node)
        answer = hand.ask("load", cores=action.cores, lasts_s=LASTS_MAX_S)
        return CountedEffect(hand, answer["number"], "periods")

    def release(self, node: str | None = None) -> None:
        """Do nothing: a process beside the load can be killed."""

    def close(self) -> None:
        """Do nothing: the load ends with the hands."""
