"""Rulings on log rules that fire: a pure state machine.

A rule sees nothing but a log, and all ranks may print the same line. So each rule causes at most
one restart in a generation. A condition that still holds fires again in the next generation, which
repeats the step. If another rank prints the same line in that step, the step is bad and not the
rank. The job ends if restarts by the same rule, for the same reason, do not help several times in a
row.

Each ruling is an event in the coordinator's log. The next coordinator takes it in again, and judges
as this one would.

-> rules/engine.py and logs/watcher.py: when a rule fires. coordinator/handlers/on_rule_fired.py
carries the ruling out.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from chaoskit.coordinator.membership.events import Ruled
from chaoskit.wire.messages import RuleFired


@dataclass(frozen=True, slots=True)
class Excused:
    """The ruling that nothing is done.

    ``reason`` is the reason, or "" if the rule asks for no restart.
    """

    reason: str = ""


@dataclass(frozen=True, slots=True)
class GiveUpByRule:
    """The ruling that a worker is given up; ``whole_node``: its node, too, for good."""

    whole_node: bool = False


@dataclass(frozen=True, slots=True)
class Hopeless:
    """The ruling that the job ends, since restarts do not help."""

    reason: str


class Rulings:
    """Judge of the rules that fire.

    Args:
        limit: number of restarts in a row, by one rule for one reason, before the job ends.
        window_s: restarts are in a row if each comes within this time after the one before, in
            seconds.
    """

    def __init__(self, limit: int, window_s: float) -> None:
        self._limit, self._window_s = limit, window_s
        # worker -> rules that have matched a line of its log
        self._matched: dict[str, frozenset[str]] = {}
        self._restarted_in: dict[
            str, int
        ] = {}  # rule -> generation of the last restart by this rule
        # rule, verdict -> firing of the last restart
        self._last_firings: dict[tuple[str, str], RuleFired] = {}
        # rule, verdict -> restarts in a row, time of the last
        self._restarts_in_row: dict[tuple[str, str], tuple[int, float]] = {}

    def note_matches(self, worker: str, rules: Collection[str]) -> None:
        """Note the rules that lines of ``worker`` match. The last call counts."""
        self._matched[worker] = frozenset(rules)

    def judge(
        self, fired: RuleFired, generation: int, members: Collection[str], now_s: float
    ) -> Excused | GiveUpByRule | Hopeless:
        """Return the ruling on ``fired`` in ``generation``, which has the live members ``members``.

        The state does not change until the ruling is taken in by :meth:`take_in`.
        """
        if fired.action not in ("restart-process", "replace-node"):
            return Excused()
        if fired.worker not in members or fired.generation != generation:
            return Excused(
                f"the rule fired for {fired.worker} in generation {fired.generation}, "
                f"and not for a live rank of generation {generation}"
            )
        printers = [member for member in members if fired.rule in self._matched.get(member, ())]
        if fired.verdict == "hanging" and not fired.matched and printers:
            return Excused(
                f"{printers[0]} has printed a line that the rule waits for, "
                f"and {fired.worker} never has"
            )
        if self._restarted_in.get(fired.rule) == generation:
            return Excused("the rule has already caused its one restart in this generation")
        kind = (fired.rule, fired.verdict)
        blamed = self._last_firings.get(kind)
        if fired.verdict != "hanging" and blamed is not None and _overlap(fired, blamed):
            return Excused(
                f"{blamed.worker} was given up for the same reason in step {blamed.step}, "
                "so the step causes it, not the rank"
            )
        count = self._in_row(kind, now_s) + 1
        if count > self._limit:
            return Hopeless(
                f"log rule {fired.rule}: {fired.reason}, again after {count - 1} restarts in a row"
            )
        return GiveUpByRule(whole_node=fired.action == "replace-node")

    def take_in(self, ruled: Ruled, now_s: float) -> None:
        """Note a restart that this coordinator, or an earlier one, has decided."""
        fired = ruled.fired
        kind = (fired.rule, fired.verdict)
        self._restarts_in_row[kind] = (self._in_row(kind, now_s) + 1, now_s)
        self._restarted_in[fired.rule], self._last_firings[kind] = ruled.generation, fired

    def _in_row(self, kind: tuple[str, str], now_s: float) -> int:
        """Return the number of restarts up to now, each soon after the one before."""
        count, last_s = self._restarts_in_row.get(kind, (0, now_s))
        return 0 if now_s - last_s > self._window_s else count


def _overlap(fired: RuleFired, other: RuleFired) -> bool:
    """Return whether the conditions of both firings may have held in the same step."""
    return fired.since_step <= other.step and other.since_step <= fired.step


def reason_of(fired: RuleFired) -> str:
    """Return the reason for which a worker is given up by ``fired``, in words."""
    return f"{fired.rule}: {fired.verdict}, {fired.reason}"
