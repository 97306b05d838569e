"""The timeout of members that do not follow a plan into its generation: a pure state machine.

-> coordinator/detectors/watch.py passes the late members on as hangs. A started worker that does
not become ready: coordinator/handlers/on_worker_ready.py. runtime/group/regroup.py: how a member
follows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from chaoskit.coordinator.detectors.hang import HungRank
from chaoskit.vocabulary import Phase
from chaoskit.wire.messages import Beat, Plan

#: A worker whose main thread waits has this long to follow a plan; it needs a few milliseconds.
FOLLOW_S = 2.0
#: Time counts in pieces of at most this length: a coordinator without a CPU receives no messages.
_PIECE_S = 0.1
#: Phases spent in chaoskit's code, which never holds the interpreter lock. The others have limits
#: of their own.
_OWN_PHASES = frozenset({Phase.REDUCE, Phase.REGROUP, Phase.DONE})


class JoinTimeout:
    """Detector of members that stay behind when a plan is published.

    A worker's control thread brings it to the rendezvous of a new generation. If the worker does
    not come there, its interpreter is blocked. Once all have come, the main threads follow. A main
    thread that stays behind in a collective of an ended generation hangs in it.
    """

    def __init__(self) -> None:
        self._generation = 0
        self._observed_s = 0.0
        self._published_s = 0.0  # counted time since the plan
        self._complete_s = (
            0.0  # counted time since all have come, or the first has entered the generation
        )

    def observe(
        self,
        plan: Plan,
        beats: Sequence[Beat],
        arrived: Collection[str],
        now_s: float,
        *,
        worked: int = 0,
    ) -> list[HungRank]:
        """Return the members that stay behind, as hangs with the limit ``FOLLOW_S``.

        If the plan does not abort, members of the generation before are not judged until it works.

        Args:
            plan: the last plan.
            beats: the latest beat of every live member.
            arrived: members that have come to the rendezvous.
            worked: the last generation of which all members have built the group.
        """
        if plan.generation != self._generation:
            self._generation, self._published_s, self._complete_s = plan.generation, 0.0, 0.0
            self._observed_s = now_s
        if not plan.abort and worked < plan.generation:
            # The generation before continues until a step boundary, which only its members reach.
            # Newcomers, and members that had yet to enter that generation, must come at once.
            beats = [
                beat for beat in beats if not beat.generation or self._is_missing(beat, worked)
            ]
        piece_s = min(_PIECE_S, now_s - self._observed_s)
        self._observed_s = now_s
        self._published_s += piece_s
        behind = [beat for beat in beats if beat.generation != plan.generation]
        if len(behind) < len(beats) or len(arrived) == len(plan.members):
            self._complete_s += piece_s
        late = [(beat, self._late_s(beat, beat.worker in arrived)) for beat in behind]
        return [
            HungRank(beat.worker, Phase(beat.phase), late_s, FOLLOW_S)
            for beat, late_s in late
            if late_s > FOLLOW_S
        ]

    def _is_missing(self, beat: Beat, worked: int) -> bool:
        """Return whether a member has yet to enter generation ``worked``; no rank that is done."""
        return beat.generation < worked and beat.phase != Phase.DONE

    def _late_s(self, beat: Beat, arrived: bool) -> float:
        """Return the seconds for which a member has not followed; 0 in phases with other limits."""
        if beat.phase not in _OWN_PHASES or (arrived and beat.phase == Phase.DONE):
            return 0.0
        age_s = (beat.age_ms - beat.starved_ms) / 1000
        return min(age_s, self._complete_s if arrived else self._published_s)
