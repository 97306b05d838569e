"""The backend that limits the CPU time of a node by load in the cgroup of its container.

-> ``chaoskit/hand/processes/load.py``: the load. attach/hands/throttle.py: a limit of one process.
"""

from __future__ import annotations

from collections.abc import Callable

from chaoskit.attach.hands.hand import Hand, HandRefused
from chaoskit.errors import NodeUnreachable
from chaoskit.hand.fields import LASTS_MAX_S
from chaoskit.substrate.core.actions import Action, Applied, CapCpu


class HandLoad:
    """Backend that leaves a node a part of its container's CPU limit. The load ends with the hand.

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
        return _Loaded(hand, answer["number"])

    def release(self, node: str | None = None) -> None:
        """Do nothing: a process beside the load can be killed."""

    def close(self) -> None:
        """Do nothing: the load ends with the hands."""


class _Loaded:
    """A node under load. Shown: periods in which its processes had less CPU time than before."""

    def __init__(self, hand: Hand, effect: int) -> None:
        self._hand, self._effect, self._periods = hand, effect, 0
        self._is_lifted = False

    def shown(self) -> int:
        if not self._is_lifted:
            self._ask("counters")
        return self._periods

    def lift(self) -> bool:
        if not self._is_lifted:
            self._ask("lift")
            self._is_lifted = True
        return True

    def _ask(self, operation: str) -> None:
        """Keep the count in an answer. The load has ended with a hand that is gone."""
        try:
            answer = self._hand.ask(operation, effect=self._effect)
            self._periods = int(answer.get("periods", 0))
        except HandRefused:  # the effect has ended
            self._is_lifted = True
        except NodeUnreachable:
            self._is_lifted = not self._hand.is_open
            if not self._is_lifted:
                raise
