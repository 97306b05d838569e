"""Rules on a recorded log: what they would have said, when, and how well their limits fit."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from chaoskit.errors import BadInput
from chaoskit.logrule import LogRule
from chaoskit.rules.budget import Budget
from chaoskit.rules.engine import Fired, Reading, RuleVerdict, Watch
from chaoskit.rules.patterns import nests_repeats
from chaoskit.rules.rules import load_rules
from chaoskit.rules.timestamps import read_time_s
from chaoskit.typed import named_path, typed_arguments

#: A limit of twice the longest healthy wait leaves room for one that is as long again; ten times that finds hangs late.
ROOM_FACTOR = 2.0
_TIGHT_FACTOR, _LOOSE_FACTOR = 1.25, 10.0
_GAPS_MIN = 5


@dataclass(frozen=True)
class Point:
    """A line that matched.

    Args:
        number: of the line, from 1.
        value: the metric, if the rule captures one.
    """

    number: int
    time_s: float
    value: float | None


@dataclass
class Replay:
    """What one rule made of one log.

    Attributes:
        points: the lines that matched while the watch went on.
        fired: verdicts in the order of their times; ``stopped`` is one of them.
        start_s, end_s: when the watch began and when the recording ended.
        warnings: what is odd about the rule, seen on this log.
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
        return [one for one in self.fired if one.verdict != RuleVerdict.STOPPED]

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between two matches."""
        return [
            after.time_s - before.time_s
            for before, after in zip(self.points, self.points[1:], strict=False)
        ]

    @property
    def values(self) -> list[float]:
        """The metrics that are finite numbers."""
        return [
            one.value for one in self.points if one.value is not None and math.isfinite(one.value)
        ]


@typed_arguments
def check_log_rules(
    rules: str | Path | Sequence[LogRule],
    log: str | Path,
    *,
    period_s: float | None = None,
    tail_s: float = 0.0,
) -> list[Fired]:
    """The alarms that ``rules`` would have raised on a recorded ``log``, in the order of their times; [] for none.

    Args:
        rules: a file, see :func:`chaoskit.rules.read_rules`, or rules.
        log: file of lines with timestamps.
        period_s: of a log without timestamps: each line counts as so many seconds after the one before.
        tail_s: the log was watched for so long after its last line.

    Raises:
        BadInput: a file cannot be read, or a line that matters has no timestamp.
    """
    known = load_rules(rules)
    found = [
        one
        for replayed in replay_log(known, log, period_s=period_s, tail_s=tail_s)
        for one in replayed.alarms
    ]
    return sorted(found, key=lambda one: one.time_s)


def replay_log(
    rules: Sequence[LogRule], log: str | Path, *, period_s: float | None = None, tail_s: float = 0.0
) -> list[Replay]:
    """Run rules over a recorded log. Arguments and errors are those of :func:`check_log_rules`."""
    for name, value in (("period_s", period_s), ("tail_s", tail_s)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise BadInput(name, value, "use 0 or more seconds")
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
    watched: list[tuple[Watch, Replay]] = []
    end_s: float | None = None
    back_s, back_at = 0.0, 0
    early: list[tuple[int, str]] = []
    for number, (line, time_s) in enumerate(lines, start=1):
        if time_s is not None and end_s is None:
            watched = [
                (Watch(rule, time_s, budget), Replay(rule, time_s, time_s)) for rule in rules
            ]
            for place, text in early:
                _require_time(watched, log, place, text, time_s)
        if time_s is None:
            if end_s is None:
                early.append((number, line))
            else:
                _require_time(watched, log, number, line, end_s)
            continue
        if end_s is not None and end_s - time_s > back_s:
            back_s, back_at = end_s - time_s, number
        end_s = time_s if end_s is None else max(end_s, time_s)
        for watch, found in watched:
            if not watch.stopped:
                _take(watch, found, number, end_s, watch.matcher.read(line))
    if end_s is None:
        place, text = early[0] if early else (1, "")
        remedy = "record lines with ISO 8601, logging's or epoch timestamps, or give period_s: no line has one"
        raise BadInput(f"log {log}, line {place}", text[:120], remedy)
    for watch, found in watched:
        found.end_s = end_s + tail_s
        found.fired += watch.tick(found.end_s)
        found.warnings = _warnings(found)
        if back_s > 1:
            found.warnings.append(
                f"time goes back by {back_s:g} s at line {back_at}: it was held there"
            )
    return [found for _, found in watched]


def _require_time(
    watched: list[tuple[Watch, Replay]], log: str, number: int, line: str, time_s: float
) -> None:
    """Refuse a line that matters and of which nobody knows when it came. ``time_s``: of a line near it."""
    for watch, found in watched:
        if watch.stopped:
            continue
        reading = watch.matcher.read(line)
        if reading.slow:
            _take(watch, found, number, time_s, reading)
        elif reading.matched or reading.stops:
            remedy = f"record it with a timestamp, or give period_s: it matters to rule {watch.rule.name!r}"
            raise BadInput(f"log {log}, line {number}", line[:120], remedy)


def _take(watch: Watch, found: Replay, number: int, time_s: float, reading: Reading) -> None:
    if reading.matched:
        found.points.append(Point(number, time_s, reading.value))
    fired = watch.take(time_s, reading)
    if reading.slow:
        fired[-1] = replace(fired[-1], reason=f"{fired[-1].reason}: line {number}")
    found.fired += fired


def _warnings(found: Replay) -> list[str]:
    rule = found.rule
    said = []
    if not found.points:
        said.append(
            "no line matched: a pattern is matched from the start of a line, so it may have to begin with .*"
        )
        if rule.start_cutoff_s is None:
            said.append(
                "without expectedStartCutOffInSeconds it can never fire on a job that logs nothing"
            )
        elif found.end_s - found.start_s <= rule.start_cutoff_s:
            said.append(
                f"the log ends before expectedStartCutOffInSeconds={rule.start_cutoff_s:g}: nothing was tested"
            )
    elif rule.threshold is not None and not found.values:
        said.append("no finite number was captured: the threshold was not tested")
    if found.points and rule.start_cutoff_s is None and rule.frequency_s is not None:
        said.append(
            "a job that hangs before its first match is never noticed: give expectedStartCutOffInSeconds, too"
        )
    for name, pattern in (("logPattern", rule.pattern), ("stopPattern", rule.stop_pattern)):
        if nests_repeats(pattern):
            said.append(
                f"{name} has a repeat within a repeat: a line that does not match takes a time that doubles with every "
                "character; repeat once, as a+ for (a+)+"
            )
    return said


@dataclass(frozen=True)
class Suggestion:
    """A limit that would fit this log better.

    Args:
        field: HyperPod's name of it.
        setting_s: what the rule has.
        suggested_s: what would fit.
        reason: how that was computed.
    """

    field: str
    setting_s: float
    suggested_s: float
    reason: str


def suggest(found: Replay) -> list[Suggestion]:
    """Limits that are much too tight or too loose for the waits in this log, outside the hangs that were found.

    Twice the longest wait is what fits. A setting below 1.25 times it, or above 10 times it, is spoken of. Waits that
    were called hanging do not count, and there must be five others.
    """
    rule = found.rule
    said = []
    if rule.frequency_s is not None:
        healthy = [gap for gap in found.gaps_s if gap <= rule.frequency_s]
        if len(healthy) >= _GAPS_MIN and max(healthy) > 0:
            words = f"the longest of {len(healthy)} gaps that were not called hanging"
            said += _fit(
                "expectedRecurringFrequencyInSeconds", rule.frequency_s, max(healthy), words
            )
    if found.points and rule.start_cutoff_s is not None:
        wait_s = found.points[0].time_s - found.start_s
        if 0 < wait_s <= rule.start_cutoff_s:
            said += _fit(
                "expectedStartCutOffInSeconds",
                rule.start_cutoff_s,
                wait_s,
                "the wait for the first match",
            )
    return said


def _fit(name: str, setting_s: float, longest_s: float, words: str) -> list[Suggestion]:
    if _TIGHT_FACTOR * longest_s <= setting_s <= _LOOSE_FACTOR * longest_s:
        return []
    suggested_s = _round_up(ROOM_FACTOR * longest_s)
    return [
        Suggestion(name, setting_s, suggested_s, f"{ROOM_FACTOR:g} x {words}, {longest_s:.3g} s")
    ]


def _round_up(value: float) -> float:
    """To two significant digits, so that a suggestion looks like a setting."""
    digit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return round(math.ceil(value / digit - 1e-9) * digit, 6)


def spread(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Least, median and greatest; None of nothing."""
    return (min(values), statistics.median(values), max(values)) if values else None
