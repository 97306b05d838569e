"""The backend that limits the CPU time of a process by a hand: it is stopped again and again.

-> ``chaoskit/hand/processes/held.py``: the stops. attach/hands/traffic.py: the same for packets.
"""

from __future__ import annotations

from collections.abc import Callable

from chaoskit.attach.hands.counted_effect import CountedEffect
from chaoskit.attach.hands.hand import ACT_S, Hand, HandRefused
from chaoskit.hand.fields import LASTS_MAX_S
from chaoskit.substrate.core.actions import Action, Applied, CapProcessCpu

_SHARE_MAX = 0.99  # of a hand


class HandThrottle:
    """Backend that leaves a process a share of the time. The stops end with the hand.

    An action shows the number of stops.

    Args:
        hand: returns the standing hand on the processes of a node, or raises NodeUnreachable.
    """

    actions: frozenset[type[Action]] = frozenset({CapProcessCpu})

    def __init__(self, hand: Callable[[str], Hand]) -> None:
        self._hand = hand

    def apply(self, node: str, action: Action) -> Applied:
        """Begin to stop a process again and again.

        Raises:
            ProcessLookupError: if the process is gone.
            HandUnable: if the kernel refuses.
            NodeUnreachable: if the hand does not answer.
        """
        assert isinstance(action, CapProcessCpu)
        if action.ticks is None:
            raise ProcessLookupError(f"pid {action.pid} of {node} is gone")
        hand = self._hand(node)
        try:
            answer = hand.ask(
                "throttle",
                pid=action.pid,
                ticks=action.ticks,
                share=min(action.share, _SHARE_MAX),
                lasts_s=LASTS_MAX_S,
                limit_s=ACT_S,
            )
        except HandRefused as refused:
            if refused.field != "ticks":
                raise
            raise ProcessLookupError(f"pid {action.pid} of {node} is gone") from None
        return CountedEffect(hand, answer["number"], "stops")

    def release(self, node: str | None = None) -> None:
        """Do nothing: a process that is stopped by a hand can be killed."""

    def close(self) -> None:
        """Do nothing: the stops end with the hands."""
