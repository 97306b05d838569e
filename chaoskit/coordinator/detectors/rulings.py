"""What comes of a log rule that fires: a pure state machine.

A rule knows nothing but a log, and all ranks may print the same: of one rule there is at most one restart in a
generation. What still holds is said again in the next one, which repeats the step. If that step makes another rank
print the same, the step is bad and not the rank. If restarts of the same rule, for the same reason, do not help time
and again, the job ends.

What was decided is an event of the run's record: the next coordinator takes it in again, and judges as this one would.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from chaoskit.coordinator.membership.events import Ruled
from chaoskit.wire.messages import RuleFired


@dataclass(frozen=True, slots=True)
class Excused:
    """Nothing is done. ``why``: "" where nothing was asked for."""

    why: str = ""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The worker is to be given up; ``whole_node``: all of its node, which gets no more workers."""

    whole_node: bool = False


@dataclass(frozen=True, slots=True)
class Hopeless:
    """The job is to end."""

    reason: str


class Rulings:
    """Judges what rules say.

    Args:
        limit: as many restarts in a row by one rule for one reason are tried.
        window_s: they are in a row if each comes within this time after the one before.
    """

    def __init__(self, limit: int, window_s: float) -> None:
        self._limit, self._window_s = limit, window_s
        self._matched: dict[
            str, frozenset[str]
        ] = {}  # worker -> rules of which it has printed a line
        self._acted: dict[str, int] = {}  # rule -> generation in which it had somebody given up
        self._blamed: dict[
            tuple[str, str], RuleFired
        ] = {}  # rule, verdict -> for which somebody was given up last
        self._row: dict[
            tuple[str, str], tuple[int, float]
        ] = {}  # rule, verdict -> restarts in a row, the last one

    def note_matches(self, worker: str, rules: Collection[str]) -> None:
        """``worker`` prints lines that these rules wait for."""
        self._matched[worker] = frozenset(rules)

    def judge(
        self, fired: RuleFired, generation: int, members: Collection[str], now_s: float
    ) -> Excused | GiveUp | Hopeless:
        """What comes of ``fired`` in ``generation``, whose live members are ``members``. Decides nothing by itself."""
        if fired.action not in ("restart-process", "replace-node"):
            return Excused()
        if fired.worker not in members or fired.generation != generation:
            return Excused(
                f"it was said in generation {fired.generation}, by one who has no rank in {generation}"
            )
        printers = [one for one in members if fired.rule in self._matched.get(one, ())]
        if fired.verdict == "hanging" and not fired.matched and printers:
            return Excused(
                f"{printers[0]} prints what the rule waits for, and this worker never did"
            )
        if self._acted.get(fired.rule) == generation:
            return Excused("one restart for each rule in a generation: there was one")
        kind = (fired.rule, fired.verdict)
        blamed = self._blamed.get(kind)
        if fired.verdict != "hanging" and blamed is not None and _overlap(fired, blamed):
            return Excused(
                f"{blamed.worker} was given up for this in step {blamed.step}, and the step brings it back"
            )
        count = self._in_row(kind, now_s) + 1
        if count > self._limit:
            return Hopeless(
                f"log rule {fired.rule}: {fired.reason}, again after {count - 1} restarts in a row"
            )
        return GiveUp(whole_node=fired.action == "replace-node")

    def take_in(self, ruled: Ruled, now_s: float) -> None:
        """It was decided so, by this coordinator or by one before it."""
        fired = ruled.fired
        kind = (fired.rule, fired.verdict)
        self._row[kind] = (self._in_row(kind, now_s) + 1, now_s)
        self._acted[fired.rule], self._blamed[kind] = ruled.generation, fired

    def _in_row(self, kind: tuple[str, str], now_s: float) -> int:
        """Restarts up to now, each soon after the one before."""
        count, last_s = self._row.get(kind, (0, now_s))
        return 0 if now_s - last_s > self._window_s else count


def _overlap(one: RuleFired, other: RuleFired) -> bool:
    """Whether both may have been seen in the same step."""
    return one.since_step <= other.step and other.since_step <= one.step


def reason_of(fired: RuleFired) -> str:
    """Why somebody is given up, in words."""
    return f"{fired.rule}: {fired.verdict}, {fired.reason}"
