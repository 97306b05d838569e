"""One rule watching one log: a pure state machine."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from chaoskit.logrule import Action, LogRule
from chaoskit.rules.budget import LINE_CHARS_MAX, UNLIMITED, Budget, TooSlow
from chaoskit.rules.patterns import non_finite, outer_groups

_COMPARE: Final[dict[str, Callable[[float, float], bool]]] = {
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "eq": operator.eq,
}
_SIGNS: Final = {"gt": ">", "gteq": ">=", "lt": "<", "lteq": "<=", "eq": "=="}


class RuleVerdict(StrEnum):
    """What a rule says. All but ``stopped`` ask for the rule's action; ``switched-off`` is only told of."""

    SLOW = "slow"
    HANGING = "hanging"
    NOT_A_NUMBER = "not-a-number"
    FAULTED = "faulted"
    STOPPED = "stopped"
    SWITCHED_OFF = "switched-off"  # its pattern takes too long


@dataclass(frozen=True)
class Fired:
    """A verdict.

    Args:
        rule: name of the rule.
        time_s: when it became true, on the clock of the lines.
        reason: in words, with the numbers.
        value: the metric as it was printed, or the seconds without a match; "" where there is none.
        limit: what the rule allows.
    """

    rule: str
    verdict: RuleVerdict
    time_s: float
    action: Action
    reason: str
    value: str = ""
    limit: float | None = None


@dataclass(frozen=True)
class Reading:
    """What a rule sees in a line.

    Args:
        matched: the line is one of those that the rule waits for.
        value: the metric in it; None if the rule captures none, NaN if what is captured is no number.
        text: what is captured.
        stops: the line ends the watch.
        slow: nobody knows: to match the line takes too long.
    """

    matched: bool = False
    value: float | None = None
    text: str = ""
    stops: bool = False
    slow: bool = False


class Matcher:
    """Reads lines for a rule, of each its first 4096 characters.

    Args:
        budget: what a pattern may take for a line.
    """

    def __init__(self, rule: LogRule, budget: Budget = UNLIMITED) -> None:
        self._budget = budget
        self._pattern = re.compile(rule.pattern)
        self._non_finite = non_finite(rule.pattern)
        self._captures = len(outer_groups(rule.pattern)) == 1
        self._stop = re.compile(rule.stop_pattern) if rule.stop_pattern else None
        self._measures = rule.threshold is not None

    def read(self, line: str) -> Reading:
        """What the rule sees in ``line``, from its start."""
        try:
            return self._read(line[:LINE_CHARS_MAX])
        except TooSlow:
            return Reading(slow=True)

    def _read(self, line: str) -> Reading:
        match_ = self._budget.match
        stops = self._stop is not None and match_(self._stop, line) is not None
        match = match_(self._pattern, line) or (self._non_finite and match_(self._non_finite, line))
        if not match:
            return Reading(stops=stops)
        text = match[1] if self._captures else None
        return Reading(True, self._value(text), text or "", stops)

    def _value(self, text: str | None) -> float | None:
        if text is None:
            return None
        try:
            return float(text)
        except ValueError:
            return (
                math.nan if self._measures else None
            )  # without a threshold any text may be captured


class Watch:
    """Says once per episode that a rule fires: again only after what was wrong had been right in between.

    Time is whatever clock the caller uses, and never runs backwards: an earlier time counts as the latest one. With a
    line that takes longer than ``budget`` allows, the watch is over.
    """

    def __init__(self, rule: LogRule, start_s: float, budget: Budget = UNLIMITED) -> None:
        self.rule = rule
        self.matcher = Matcher(rule, budget)
        self._budget_s = budget.line_s
        self.stopped = False
        self._now_s = start_s
        self._deadline_s = (
            math.inf if rule.start_cutoff_s is None else start_s + rule.start_cutoff_s
        )
        self._waits_s = rule.start_cutoff_s
        self._bad_in_row = 0
        self._matched = self._not_a_number = self._faulted = False

    @property
    def matched(self) -> bool:
        """Whether a line has matched since the watch began."""
        return self._matched

    @property
    def ongoing(self) -> bool:
        """Whether the last metric was one of an episode that was told of: NaN, or bad often enough."""
        return self._not_a_number or self._bad_in_row >= self.rule.data_points

    @property
    def deadline_s(self) -> float:
        """After this moment the rule says ``hanging``, unless a match comes; infinity for never."""
        return self._deadline_s

    def restart(self, time_s: float) -> None:
        """What was watched was interrupted, and begins anew: the wait for the next match, and every episode."""
        self._now_s = max(self._now_s, time_s)
        if not self.stopped:
            self._deadline_s = math.inf if self._waits_s is None else self._now_s + self._waits_s
        self._bad_in_row = 0
        self._not_a_number = self._faulted = False

    def feed(self, time_s: float, line: str) -> list[Fired]:
        """A line was logged. Returns the verdicts that are new, in the order of their times."""
        return self.take(time_s, self.matcher.read(line))

    def tick(self, time_s: float) -> list[Fired]:
        """Time went on, and nothing was logged."""
        return self.take(time_s, Reading())

    def take(self, time_s: float, reading: Reading) -> list[Fired]:
        """As :meth:`feed`, of a line that was read before."""
        if self.stopped:
            return []
        self._now_s = max(self._now_s, time_s)
        fired = self._silence()
        if reading.slow:
            self.switch_off()
            reason = f"its pattern takes more than {self._budget_s:g} s of CPU time for a line"
            return [*fired, self._fire(RuleVerdict.SWITCHED_OFF, reason, limit=self._budget_s)]
        if reading.matched:
            self._rearm()
            if self.rule.fault_on_match and not self._faulted:
                self._faulted = True
                fired.append(self._fire(RuleVerdict.FAULTED, "a line matches"))
        if reading.stops:
            self.switch_off()
            fired.append(self._fire(RuleVerdict.STOPPED, "a line matches stopPattern"))
        elif reading.matched and reading.value is not None:
            fired += self._judge(reading.value, reading.text)
        return fired

    def switch_off(self) -> None:
        """The rule is watched no more."""
        self.stopped, self._deadline_s = True, math.inf
        self._bad_in_row, self._not_a_number = 0, False

    def _silence(self) -> list[Fired]:
        if not self._now_s > self._deadline_s:
            return []
        waited = f"{self._waits_s:g}"
        reason = f"no match for {waited} s"
        found = self._fire(
            RuleVerdict.HANGING, reason, waited, self._waits_s, time_s=self._deadline_s
        )
        self._deadline_s = math.inf
        return [found]

    def _rearm(self) -> None:
        self._matched = True
        self._waits_s = self.rule.frequency_s
        self._deadline_s = math.inf if self._waits_s is None else self._now_s + self._waits_s

    def _judge(self, value: float, text: str) -> list[Fired]:
        was_not_a_number, self._not_a_number = self._not_a_number, not math.isfinite(value)
        if self._not_a_number:
            self._bad_in_row = 0
            if was_not_a_number:
                return []
            return [
                self._fire(
                    RuleVerdict.NOT_A_NUMBER, f"the metric is {text!r}", text, self.rule.threshold
                )
            ]
        rule = self.rule
        if rule.threshold is None or rule.operator is None:
            return []
        self._bad_in_row = (
            self._bad_in_row + 1 if _COMPARE[rule.operator](value, rule.threshold) else 0
        )
        if self._bad_in_row != rule.data_points:
            return []
        times = f", {rule.data_points} times in a row" if rule.data_points > 1 else ""
        reason = f"{value:g} {_SIGNS[rule.operator]} {rule.threshold:g}{times}"
        return [self._fire(RuleVerdict.SLOW, reason, text, rule.threshold)]

    def _fire(
        self,
        verdict: RuleVerdict,
        reason: str,
        value: str = "",
        limit: float | None = None,
        *,
        time_s: float | None = None,
    ) -> Fired:
        at_s = self._now_s if time_s is None else time_s
        action: Action = "alert" if verdict == RuleVerdict.SWITCHED_OFF else self.rule.action
        return Fired(self.rule.name, verdict, at_s, action, reason, value, limit)
