"""An effect of a hand that counts how often it had an effect on its target.

-> ``load.py`` and ``throttle.py`` begin such effects. ``traffic.py`` has its own, in several pods.
"""

from __future__ import annotations

from chaoskit.attach.hands.hand import ACT_S, Hand, HandRefused
from chaoskit.errors import NodeUnreachable


class CountedEffect:
    """An effect that ends with its hand, as the handle of an applied action.

    Args:
        hand: the hand.
        effect: number of the effect.
        count_key: name of the count in the answers of the hand.
    """

    def __init__(self, hand: Hand, effect: int, count_key: str) -> None:
        self._hand, self._effect, self._count_key = hand, effect, count_key
        self._count, self._is_lifted = 0, False

    def shown(self) -> int:
        if not self._is_lifted:
            self._ask("counters")
        return self._count

    def lift(self) -> bool:
        if not self._is_lifted:
            self._ask("lift")
            self._is_lifted = True
        return True

    def _ask(self, operation: str) -> None:
        """Keep the count in an answer. The effect has ended with a hand that is gone."""
        try:
            answer = self._hand.ask(operation, effect=self._effect, limit_s=ACT_S)
            self._count = int(answer.get(self._count_key, 0))
        except HandRefused:  # the effect has ended with its target
            self._is_lifted = True
        except NodeUnreachable:
            self._is_lifted = not self._hand.is_open
            if not self._is_lifted:
                raise
