"""Rules on a recorded log: their verdicts and times, and how well their limits fit.

-> ``rules/engine.py``: how a verdict is reached. ``rules/timestamps.py``: the time of a line.
``cli/training/rules.py``: the command.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from chaoskit.errors import BadInput
from chaoskit.logrule import LogRule
from chaoskit.rules.budget import Budget
from chaoskit.rules.engine import Fired, Reading, RuleVerdict, RuleWatch
from chaoskit.rules.patterns import nests_repeats
from chaoskit.rules.rules import load_rules
from chaoskit.rules.timestamps import read_time_s
from chaoskit.typed import named_path, typed_arguments

#: Ratio of a limit to the longest healthy wait: it leaves room for a wait that is as long again.
ROOM_FACTOR = 2.0
_TIGHT_FACTOR, _LOOSE_FACTOR = 1.25, 10.0
_GAPS_MIN = 5


@dataclass(frozen=True)
class Point:
    """A line that matched.

    Args:
        number: number of the line, from 1.
        time_s: timestamp of the line.
        value: the metric, as in :class:`chaoskit.rules.engine.Reading`.
    """

    number: int
    time_s: float
    value: float | None


@dataclass
class Replay:
    """Result of one rule on one log.

    Attributes:
        points: the lines that matched while the watch went on.
        fired: verdicts in the order of their times; ``stopped`` is one of them.
        start_s, end_s: begin of the watch, and end of the recording, on the clock of the lines.
        warnings: oddities of the rule on this log.
    """

    rule: LogRule
    start_s: float
    end_s: float
    points: list[Point] = field(default_factory=list)
    fired: list[Fired] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def alarms(self) -> list[Fired]:
        """The verdicts that ask for an action."""
        return [verdict for verdict in self.fired if verdict.verdict != RuleVerdict.STOPPED]

    @property
    def gaps_s(self) -> list[float]:
        """The seconds between consecutive matches."""
        return [
            after.time_s - before.time_s
            for before, after in zip(self.points, self.points[1:], strict=False)
        ]

    @property
    def values(self) -> list[float]:
        """The metrics that are finite numbers."""
        return [
            point.value
            for point in self.points
            if point.value is not None and math.isfinite(point.value)
        ]


@typed_arguments
def check_log_rules(
    rules: str | Path | Sequence[LogRule],
    log: str | Path,
    *,
    period_s: float | None = None,
    tail_s: float = 0.0,
) -> list[Fired]:
    """Return the alarms that ``rules`` would have raised on a recorded ``log``, in order of time.

    Args:
        rules: a file, see :func:`chaoskit.rules.read_rules`, or rules.
        log: file of lines with timestamps.
        period_s: for a log without timestamps, the seconds between two lines. Timestamps are not
            read then.
        tail_s: seconds for which the log was watched after its last line.

    Raises:
        BadInput: if a file cannot be read, or a rule or a number is invalid. Also if no line has a
            timestamp, or a line that matters has none.
    """
    loaded = load_rules(rules)
    alarms = [
        alarm
        for result in replay_log(loaded, log, period_s=period_s, tail_s=tail_s)
        for alarm in result.alarms
    ]
    return sorted(alarms, key=lambda alarm: alarm.time_s)


def replay_log(
    rules: Sequence[LogRule], log: str | Path, *, period_s: float | None = None, tail_s: float = 0.0
) -> list[Replay]:
    """Return the result of each rule on a recorded log, in the order of ``rules``.

    Arguments and errors are those of :func:`check_log_rules`.
    """
    for name, seconds in (("period_s", period_s), ("tail_s", tail_s)):
        if seconds is not None and not (math.isfinite(seconds) and seconds >= 0):
            raise BadInput(name, seconds, "use 0 or more seconds")
    try:
        with (
            named_path("log", log).open(encoding="utf-8", errors="replace") as lines,
            Budget() as budget,
        ):
            return _replay(rules, str(log), _timed(lines, period_s), tail_s, budget)
    except OSError as error:
        raise BadInput(
            "log", str(log), f"name a file that can be read ({error.strerror})"
        ) from None


def _timed(lines: Iterable[str], period_s: float | None) -> Iterator[tuple[str, float | None]]:
    """Yield each line with its timestamp, or with its number times the period if there is one."""
    for number, line in enumerate(lines):
        text = line.rstrip("\r\n")
        yield text, read_time_s(text) if period_s is None else number * period_s


def _replay(
    rules: Sequence[LogRule],
    log: str,
    lines: Iterator[tuple[str, float | None]],
    tail_s: float,
    budget: Budget,
) -> list[Replay]:
    """Return the result of each rule on lines with times.

    The watches begin at the first timestamp, and time never runs backwards.

    Raises:
        BadInput: if no line has a timestamp, or a line that matters has none.
    """
    watched: list[tuple[RuleWatch, Replay]] = []
    end_s: float | None = None
    setback_s, setback_line = 0.0, 0
    untimed_lines: list[tuple[int, str]] = []
    for number, (line, time_s) in enumerate(lines, start=1):
        if time_s is not None and end_s is None:
            watched = [
                (RuleWatch(rule, time_s, budget), Replay(rule, time_s, time_s)) for rule in rules
            ]
            for line_number, text in untimed_lines:
                _require_time(watched, log, line_number, text, time_s)
        if time_s is None:
            if end_s is None:
                untimed_lines.append((number, line))
            else:
                _require_time(watched, log, number, line, end_s)
            continue
        if end_s is not None and end_s - time_s > setback_s:
            setback_s, setback_line = end_s - time_s, number
        end_s = time_s if end_s is None else max(end_s, time_s)
        for watch, result in watched:
            if not watch.stopped:
                _take(watch, result, number, end_s, watch.matcher.read(line))
    if end_s is None:
        line_number, text = untimed_lines[0] if untimed_lines else (1, "")
        remedy = "record lines with ISO 8601, logging's or epoch timestamps, or give period_s: no line has one"
        raise BadInput(f"log {log}, line {line_number}", text[:120], remedy)
    for watch, result in watched:
        result.end_s = end_s + tail_s
        result.fired += watch.tick(result.end_s)
        result.warnings = _warnings(result)
        if setback_s > 1:
            result.warnings.append(
                f"time goes back by {setback_s:g} s at line {setback_line}: it was held there"
            )
    return [result for _, result in watched]


def _require_time(
    watched: list[tuple[RuleWatch, Replay]], log: str, number: int, line: str, time_s: float
) -> None:
    """Raise BadInput for a line without a timestamp that matters to a rule.

    A rule of which the pattern takes too long is switched off at ``time_s``, the time of a line
    near it.
    """
    for watch, result in watched:
        if watch.stopped:
            continue
        reading = watch.matcher.read(line)
        if reading.slow:
            _take(watch, result, number, time_s, reading)
        elif reading.matched or reading.stops:
            remedy = f"record it with a timestamp, or give period_s: it matters to rule {watch.rule.name!r}"
            raise BadInput(f"log {log}, line {number}", line[:120], remedy)


def _take(watch: RuleWatch, result: Replay, number: int, time_s: float, reading: Reading) -> None:
    """Add the match and the verdicts of a line to the result of a rule."""
    if reading.matched:
        result.points.append(Point(number, time_s, reading.value))
    fired = watch.take(time_s, reading)
    if reading.slow:
        fired[-1] = replace(fired[-1], reason=f"{fired[-1].reason}: line {number}")
    result.fired += fired


def _warnings(result: Replay) -> list[str]:
    """Return the oddities of a rule on its log, as sentences."""
    rule = result.rule
    warnings = []
    if not result.points:
        warnings.append(
            "no line matched: a pattern is matched from the start of a line, so it may have to begin with .*"
        )
        if rule.start_cutoff_s is None:
            warnings.append(
                "without expectedStartCutOffInSeconds it can never fire on a job that logs nothing"
            )
        elif result.end_s - result.start_s <= rule.start_cutoff_s:
            warnings.append(
                f"the log ends before expectedStartCutOffInSeconds={rule.start_cutoff_s:g}: nothing was tested"
            )
    elif rule.threshold is not None and not result.values:
        warnings.append("no finite number was captured: the threshold was not tested")
    if result.points and rule.start_cutoff_s is None and rule.frequency_s is not None:
        warnings.append(
            "a job that hangs before its first match is never noticed: give expectedStartCutOffInSeconds, too"
        )
    for name, pattern in (("logPattern", rule.pattern), ("stopPattern", rule.stop_pattern)):
        if nests_repeats(pattern):
            warnings.append(
                f"{name} has a repeat within a repeat: a line that does not match takes a time that doubles with every "
                "character; repeat once, as a+ for (a+)+"
            )
    return warnings


@dataclass(frozen=True)
class Suggestion:
    """Limit that would fit this log better.

    Args:
        field: HyperPod's name of the limit.
        setting_s: limit of the rule.
        suggested_s: limit that would fit.
        reason: computation of the suggestion.
    """

    field: str
    setting_s: float
    suggested_s: float
    reason: str


def suggest(result: Replay) -> list[Suggestion]:
    """Return better limits for settings that are much too tight or too loose for this log.

    A limit of twice the longest wait fits. A limit below 1.25 times or above 10 times the longest
    wait gets a suggestion. Waits that were called hanging do not count. A limit for gaps between
    matches gets a suggestion only after five other gaps.
    """
    rule = result.rule
    suggestions = []
    if rule.frequency_s is not None:
        healthy = [gap for gap in result.gaps_s if gap <= rule.frequency_s]
        if len(healthy) >= _GAPS_MIN and max(healthy) > 0:
            wait_text = f"the longest of {len(healthy)} gaps that were not called hanging"
            suggestions += _fit(
                "expectedRecurringFrequencyInSeconds", rule.frequency_s, max(healthy), wait_text
            )
    if result.points and rule.start_cutoff_s is not None:
        wait_s = result.points[0].time_s - result.start_s
        if 0 < wait_s <= rule.start_cutoff_s:
            suggestions += _fit(
                "expectedStartCutOffInSeconds",
                rule.start_cutoff_s,
                wait_s,
                "the wait for the first match",
            )
    return suggestions


def _fit(name: str, setting_s: float, longest_s: float, wait_text: str) -> list[Suggestion]:
    """Return a suggestion if a limit is much too tight or too loose for the longest wait.

    ``wait_text`` describes that wait.
    """
    if _TIGHT_FACTOR * longest_s <= setting_s <= _LOOSE_FACTOR * longest_s:
        return []
    suggested_s = _round_up(ROOM_FACTOR * longest_s)
    return [
        Suggestion(
            name, setting_s, suggested_s, f"{ROOM_FACTOR:g} x {wait_text}, {longest_s:.3g} s"
        )
    ]


def _round_up(seconds: float) -> float:
    """Return a duration rounded up to two significant digits, as settings are written."""
    digit = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    return round(math.ceil(seconds / digit - 1e-9) * digit, 6)


def spread(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Return least, median and greatest value; None without values."""
    return (min(values), statistics.median(values), max(values)) if values else None
