"""Finds the member that does not come along into a new generation: a pure state machine."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from chaoskit.coordinator.detectors.hang import Hang
from chaoskit.vocabulary import Phase
from chaoskit.wire.messages import Beat, Plan

#: A worker whose main thread waits has this long to follow a plan; it needs a few milliseconds.
FOLLOW_S = 2.0
#: Time counts in pieces of at most this length: a coordinator that had no CPU has heard nobody.
_PIECE_S = 0.1
#: Phases spent in our own code, which never holds the interpreter lock. The others have limits of their own.
_IN_OUR_HANDS = frozenset({Phase.REDUCE, Phase.REGROUP, Phase.DONE})


class Muster:
    """Watches who follows a plan.

    A worker's control thread alone brings it to the rendezvous of a new generation: if it does not come there, its
    interpreter is blocked. Once all have come the main threads follow; one that stays behind in a collective of a
    generation that is over hangs in it.
    """

    def __init__(self) -> None:
        self._generation = 0
        self._observed_s = 0.0
        self._published_s = 0.0  # counted time since the plan
        self._complete_s = (
            0.0  # counted time since all have come, or the first one stands in the new generation
        )

    def observe(
        self,
        plan: Plan,
        beats: Sequence[Beat],
        arrived: Collection[str],
        now_s: float,
        *,
        worked: int = 0,
    ) -> list[Hang]:
        """Return the members that stay behind.

        Args:
            plan: the last one.
            beats: the latest of every live member.
            arrived: members that have come to the rendezvous.
            worked: the last generation of which all members have built the group.
        """
        if plan.generation != self._generation:
            self._generation, self._published_s, self._complete_s = plan.generation, 0.0, 0.0
            self._observed_s = now_s
        if not plan.abort and worked < plan.generation:
            # The generation before goes on until a step boundary. A member that does not stand in it reaches none: a
            # newcomer comes at once, and one that was on its way into that generation is as late as before.
            beats = [
                beat for beat in beats if not beat.generation or self._is_missing(beat, worked)
            ]
        piece_s = min(_PIECE_S, now_s - self._observed_s)
        self._observed_s = now_s
        self._published_s += piece_s
        behind = [beat for beat in beats if beat.generation != plan.generation]
        if len(behind) < len(beats) or len(arrived) == len(plan.members):
            self._complete_s += piece_s
        found = [(beat, self._late_s(beat, beat.worker in arrived)) for beat in behind]
        return [
            Hang(beat.worker, Phase(beat.phase), late_s, FOLLOW_S)
            for beat, late_s in found
            if late_s > FOLLOW_S
        ]

    def _is_missing(self, beat: Beat, worked: int) -> bool:
        return (
            beat.generation < worked and beat.phase != Phase.DONE
        )  # a rank that is done enters no generation

    def _late_s(self, beat: Beat, arrived: bool) -> float:
        if beat.phase not in _IN_OUR_HANDS or (arrived and beat.phase == Phase.DONE):
            return 0.0
        age_s = (beat.age_ms - beat.starved_ms) / 1000
        return min(age_s, self._complete_s if arrived else self._published_s)
