"""Watch of one rule over one log: a pure state machine.

-> ``logs/watcher.py`` feeds it the log of a rank. ``coordinator/handlers/on_rule_fired.py`` and
``coordinator/detectors/rulings.py``: which action is carried out. ``logrule.py``: the fields of a
rule.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from chaoskit.logrule import Action, LogRule
from chaoskit.rules.budget import LINE_CHARS_MAX, UNLIMITED, Budget, PatternTooSlow
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
    """Verdict of a rule.

    ``stopped`` asks for no action and ``switched-off`` for an alert; all others ask for the action
    of the rule.
    """

    SLOW = "slow"
    HANGING = "hanging"
    NOT_A_NUMBER = "not-a-number"
    FAULTED = "faulted"
    STOPPED = "stopped"
    SWITCHED_OFF = "switched-off"  # its pattern takes too long


@dataclass(frozen=True)
class Fired:
    """Verdict of a rule at a time.

    Args:
        rule: name of the rule.
        verdict: kind of the verdict.
        time_s: time at which it became true, on the clock of the lines.
        action: action of the rule; ``alert`` if it was switched off. For ``stopped`` it is not
            carried out.
        reason: reason in words, with the numbers.
        value: the metric as it was printed, or the seconds without a match; "" if there is neither.
        limit: limit of the rule for the value; None if it has none.
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
    """Result of matching a rule against a line.

    Args:
        matched: the line is one of those that the rule waits for.
        value: the metric in it; None if the rule captures none. A text that is no number is NaN if
            the rule has a threshold, and None otherwise.
        text: the captured text; "" if there is none.
        stops: the line ends the watch.
        slow: matching took too long, so nothing is known of the line.
    """

    matched: bool = False
    value: float | None = None
    text: str = ""
    stops: bool = False
    slow: bool = False


class Matcher:
    """Matcher of a rule against the first 4096 characters of each line.

    Args:
        budget: limit of the CPU time of a pattern for a line.
    """

    def __init__(self, rule: LogRule, budget: Budget = UNLIMITED) -> None:
        self._budget = budget
        self._pattern = re.compile(rule.pattern)
        self._non_finite = non_finite(rule.pattern)
        self._captures_metric = len(outer_groups(rule.pattern)) == 1
        self._stop = re.compile(rule.stop_pattern) if rule.stop_pattern else None
        self._has_threshold = rule.threshold is not None

    def read(self, line: str) -> Reading:
        """Return the reading of a line, which is matched from its start.

        If a pattern takes too long, the reading is ``slow`` and says nothing else.
        """
        try:
            return self._read(line[:LINE_CHARS_MAX])
        except PatternTooSlow:
            return Reading(slow=True)

    def _read(self, line: str) -> Reading:
        budget_match = self._budget.match
        stops = self._stop is not None and budget_match(self._stop, line) is not None
        match = budget_match(self._pattern, line) or (
            self._non_finite and budget_match(self._non_finite, line)
        )
        if not match:
            return Reading(stops=stops)
        text = match[1] if self._captures_metric else None
        return Reading(True, self._number(text), text or "", stops)

    def _number(self, text: str | None) -> float | None:
        """Return the metric in the captured text; see :attr:`Reading.value`."""
        if text is None:
            return None
        try:
            return float(text)
        except ValueError:
            return math.nan if self._has_threshold else None  # other rules may capture text


class RuleWatch:
    """Watch that fires once per episode: again only after the condition had ended in between.

    Time is that of the caller's clock, and never runs backwards: an earlier time counts as the
    latest one. The watch ends with a line that matches the stop pattern, or takes longer than
    ``budget`` allows.

    Args:
        start_s: time at which the wait for the first match begins.

    Attributes:
        stopped: True once the watch has ended: no verdict follows.
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
        self._wait_s = rule.start_cutoff_s
        self._bad_in_a_row = 0
        self._matched = self._not_a_number = self._faulted = False

    @property
    def matched(self) -> bool:
        """True if a line has matched since the watch began."""
        return self._matched

    @property
    def ongoing(self) -> bool:
        """True if the last metric belongs to a reported episode: NaN, or bad often enough."""
        return self._not_a_number or self._bad_in_a_row >= self.rule.data_points

    @property
    def deadline_s(self) -> float:
        """The time after which the rule fires ``hanging`` without a match; infinity for never."""
        return self._deadline_s

    def restart(self, time_s: float) -> None:
        """Begin the wait for a match and every episode anew, after an interruption of the job.

        A watch that has ended stays so.
        """
        self._now_s = max(self._now_s, time_s)
        if not self.stopped:
            self._deadline_s = math.inf if self._wait_s is None else self._now_s + self._wait_s
        self._bad_in_a_row = 0
        self._not_a_number = self._faulted = False

    def feed(self, time_s: float, line: str) -> list[Fired]:
        """Match a line, and return the verdicts that are new, in the order of their times.

        A watch that has ended returns none.
        """
        return self.take(time_s, self.matcher.read(line))

    def tick(self, time_s: float) -> list[Fired]:
        """Advance the time without a line. Return the verdicts that are new."""
        return self.take(time_s, Reading())

    def take(self, time_s: float, reading: Reading) -> list[Fired]:
        """Return the new verdicts for the reading of a line; see :meth:`feed`."""
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
        """End the watch: no verdict follows, and no wait goes on."""
        self.stopped, self._deadline_s = True, math.inf
        self._bad_in_a_row, self._not_a_number = 0, False

    def _silence(self) -> list[Fired]:
        """Return ``hanging`` if the wait for a match is over, once for each wait."""
        if not self._now_s > self._deadline_s:
            return []
        waited = f"{self._wait_s:g}"
        reason = f"no match for {waited} s"
        hanging = self._fire(
            RuleVerdict.HANGING, reason, waited, self._wait_s, time_s=self._deadline_s
        )
        self._deadline_s = math.inf
        return [hanging]

    def _rearm(self) -> None:
        """Begin the wait for the next match."""
        self._matched = True
        self._wait_s = self.rule.frequency_s
        self._deadline_s = math.inf if self._wait_s is None else self._now_s + self._wait_s

    def _judge(self, value: float, text: str) -> list[Fired]:
        """Return the verdict on a metric, at the beginning of an episode only."""
        was_not_a_number, self._not_a_number = self._not_a_number, not math.isfinite(value)
        if self._not_a_number:
            self._bad_in_a_row = 0
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
        self._bad_in_a_row = (
            self._bad_in_a_row + 1 if _COMPARE[rule.operator](value, rule.threshold) else 0
        )
        if self._bad_in_a_row != rule.data_points:
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
        """Return a verdict at a time; None for the present one."""
        at_s = self._now_s if time_s is None else time_s
        action: Action = "alert" if verdict == RuleVerdict.SWITCHED_OFF else self.rule.action
        return Fired(self.rule.name, verdict, at_s, action, reason, value, limit)
