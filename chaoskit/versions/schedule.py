"""Whose turn it is: which test runs next, of which version, until all are decided or the budget is spent. Pure.

    warm up ──> look after 7 turns ──> after 14 ──> after 28 ──> decided
    (price)       tests that are decided leave; each has its first look before any has its second

Within a turn each version runs once, and another one goes first in each turn (ABBA): what drifts, such as the heat
of a machine, is the same for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import msgspec

from chaoskit.history.compare import CHANCE, by_series, compare_counts, finding_of, is_conclusive
from chaoskit.history.finding import NumberChange, NumberFinding
from chaoskit.history.record import PASSED, RECOVERED, RunRecord, SeriesRecord
from chaoskit.history.shares import more_by_chance
from chaoskit.versions.looks import (
    LOOKS,
    NUMBERS,
    TOLERANCE,
    VersionLook,
    decide,
    is_decided,
    with_phase,
)
from chaoskit.vocabulary import Verdict


class Side(StrEnum):
    """One of the two versions that are compared."""

    BEFORE = "before"
    AFTER = "after"


#: Which version runs first and second: in even turns, and in odd ones.
_ORDERS = ((Side.BEFORE, Side.AFTER), (Side.AFTER, Side.BEFORE))
#: What is counted of a test whose own assertion fails.
OWN_FAILURE = "test"
#: A run that warms up makes the unbroken twin, too: one that counts takes this share of it, or more.
_OF_WARM_UP = 0.5
#: A test that failed in each of so many first runs is broken.
_BROKEN_RUNS = 3


class ArmTurn(NamedTuple):
    """One run of a test. ``number`` 0 warms up: it makes the unbroken twin, and no duration of it counts."""

    test: str
    side: Side
    number: int


@dataclass
class ArmReport:
    """What came of a run of a test.

    Attributes:
        runs: records of the runs that it made. seconds: how long it took in all. trouble: why it failed, or was
            skipped; "" if it passed. plans: of the series of these runs.
    """

    runs: list[RunRecord] = field(default_factory=list)
    seconds: float = 0.0
    trouble: str = ""
    plans: list[SeriesRecord] = field(default_factory=list)

    def has_own_failure(self) -> bool:
        """Whether an assertion of the test itself failed: its runs have all passed."""
        is_failure = self.trouble.startswith("failed") and bool(self.runs)
        return is_failure and all(run.verdict is Verdict.PASSED for run in self.runs if run.claimed)


class Price(NamedTuple):
    """What is to come: seconds if all tests are decided at the first look, and if none is before the last."""

    least_s: float
    most_s: float
    tests: int


class ComparedTest:
    """A test, with all that is known of it."""

    def __init__(self, test: str, *, is_reversed: bool) -> None:
        self.test = test
        self.reports: dict[Side, list[ArmReport]] = {Side.BEFORE: [], Side.AFTER: []}
        self.findings: list[NumberFinding] = []
        self.is_over = False
        self._orders = _ORDERS[::-1] if is_reversed else _ORDERS

    @property
    def turns(self) -> int:
        """How many are complete."""
        return min(map(len, self.reports.values()))

    @property
    def counted(self) -> int:
        """How many turns count: all but the first."""
        return max(0, self.turns - 1)

    def next(self) -> ArmTurn:
        """The run that comes next."""
        order = self._orders[self.turns % 2]
        side = next(one for one in order if len(self.reports[one]) == self.turns)
        return ArmTurn(self.test, side, len(self.reports[side]))

    def seconds(self) -> float:
        """Of a turn, as far as it is known."""
        return sum(
            max((report.seconds for report in reports), default=0.0)
            for reports in self.reports.values()
        )

    def series(self, side: Side) -> dict[tuple[str, int], list[RunRecord]]:
        """Runs that say something, by series, without those that warmed up."""
        return by_series(
            run for report in self.reports[side][1:] for run in report.runs if is_conclusive(run)
        )

    def counts(self) -> list[NumberFinding]:
        """What is counted, of all runs: one that warms up may miss it, too."""
        before, after = (by_series(filter(is_conclusive, self.all_runs(side))) for side in Side)
        return [
            finding
            for key in after
            if key in before
            for finding in compare_counts(before[key], after[key])
        ]

    def all_runs(self, side: Side) -> list[RunRecord]:
        """Those that warmed up, too."""
        return [run for report in self.reports[side] for run in report.runs]

    def series_by_title(self, side: Side) -> dict[str, set[tuple[str, int]]]:
        """Which experiments each of its runs was, by title: one for each, unless it chooses by chance."""
        found: dict[str, set[tuple[str, int]]] = {}
        for run in self.all_runs(side):
            found.setdefault(run.title, set()).add((run.series, run.definition))
        return found

    def has_troubles(self, side: Side) -> bool:
        """Whether it has failed in one of its runs."""
        return any(report.trouble for report in self.reports[side])

    def decided(self) -> list[NumberFinding]:
        """What no further run can change."""
        return [one for one in self.findings if one.ratio and not one.change.is_open]

    def is_broken(self) -> bool:
        """Whether it fails now and never did before, so that further runs show nothing more: each may last for its
        deadline.
        """
        before, after = ([bool(report.trouble) for report in self.reports[side]] for side in Side)
        return self.turns == _BROKEN_RUNS and all(after) and not any(before)

    def is_between_turns(self) -> bool:
        """Whether both versions have run as often."""
        return len(set(map(len, self.reports.values()))) == 1


class VersionSchedule:
    """Takes turns, and looks at what they show.

    Args:
        tests: of both versions.
        numbers, tolerance: see :func:`chaoskit.versions.looks.decide`.
        budget_s: seconds within which all is over; a turn that may not end in time is not begun.
        worse: what another session has found worse, which this one shall confirm: it looks at nothing else, and the
            version after goes first.
    """

    def __init__(
        self,
        tests: Sequence[str],
        *,
        numbers: Sequence[str] = NUMBERS,
        tolerance: float = TOLERANCE,
        budget_s: float | None = None,
        worse: Sequence[NumberFinding] = (),
    ) -> None:
        self.tests = [ComparedTest(test, is_reversed=bool(worse)) for test in tests]
        self._worse = {(one.title, one.metric) for one in worse}
        self._by_name = {one.test: one for one in self.tests}
        self._numbers, self._tolerance, self._budget_s = tuple(numbers), tolerance, budget_s
        self.is_spent = False
        #: Seconds from the beginning to a first look at each test, when the budget was spent; 0 where no run tells.
        self.needed_s = 0.0

    @property
    def is_too_short(self) -> bool:
        """Whether the budget was spent before any test could be looked at."""
        return self.is_spent and all(one.metric == "all" for one in self.findings)

    def next_turn(self, spent_s: float = 0.0) -> ArmTurn | None:
        """The run that comes next; None when all is over.

        Args:
            spent_s: seconds so far, of the budget.
        """
        open_tests = [one for one in self.tests if not one.is_over]
        if not open_tests or self.is_spent:
            return None
        if (
            begun := next((one for one in open_tests if not one.is_between_turns()), None)
        ) is not None:
            return begun.next()
        # every test is at its first look before one is at its second; within a look test by test
        one = min(open_tests, key=_looks_of)
        if self._budget_s is not None:
            affordable = self._affordable(one, open_tests, self._budget_s - spent_s)
            if affordable is None:
                self._spend(spent_s)
                return None
            one = affordable
        return one.next()

    def _affordable(
        self, one: ComparedTest, open_tests: Sequence[ComparedTest], left_s: float
    ) -> ComparedTest | None:
        """Return the test whose turn it is with what is left of the budget; None if no turn may begin.

        Warming up leaves time for a first look at the cheapest test. A budget that has none ends it at once.
        """
        warmed = [test for test in open_tests if test.turns]
        if warmed:
            look_s = min(test.seconds() for test in warmed) * LOOKS[0].runs
            is_begun = any(test.counted for test in self.tests)
            if not is_begun and look_s * _OF_WARM_UP > left_s:
                return None
            if not one.turns and look_s + look_s / LOOKS[0].runs > left_s:
                one = min(warmed, key=_looks_of)
        return one if left_s > 0 and one.seconds() <= left_s else None

    def take(self, turn: ArmTurn, report: ArmReport) -> list[NumberFinding] | None:
        """Keep what came of a run, and look where a look is due: what was found then, else None."""
        one = self._by_name[turn.test]
        one.reports[turn.side].append(report)
        if not one.is_between_turns():
            return None
        if (why_not := self._why_incomparable(one)) is not None:
            one.findings, one.is_over = [*one.decided(), why_not], True
            return one.findings
        look = next((look for look in LOOKS if look.runs == one.counted), None)
        if look is None and not one.is_broken():
            return None
        one.findings = self._decide(one, look or LOOKS[0])
        one.is_over = look is None or is_decided(one.findings) or look is LOOKS[-1]
        return one.findings

    def _decide(self, one: ComparedTest, look: VersionLook) -> list[NumberFinding]:
        """What is found now; of a duration that was decided before, what was found then."""
        decided = {(old.title, old.metric): old for old in one.decided()}
        before, after = (one.series(side) for side in Side)
        found = one.counts()
        for key in dict.fromkeys([*after, *before]):
            early, late = before.get(key, []), after.get(key, [])
            found += decide(early, late, look, numbers=self._numbers, tolerance=self._tolerance)
        found = _with_own_failures(found, one)
        found = [decided.get((new.title, new.metric), new) for new in found]
        return [new for new in found if not self._worse or (new.title, new.metric) in self._worse]

    def _why_incomparable(self, one: ComparedTest) -> NumberFinding | None:
        """Why versions cannot be compared by this test: one makes no run of it, or runs something else."""
        for side in Side:
            silent = [report for report in one.reports[side] if not report.runs]
            if silent:
                told = silent[0].trouble or "it passed"
                return _incomparable(one, f"{side}: it made no run that counts: {told}")
        series = [one.series_by_title(side) for side in Side]
        if any(
            series[0][title] != series[1][title] for title in series[0].keys() & series[1].keys()
        ):
            return _incomparable(
                one, "it is another experiment now: options, faults or settings differ"
            )
        for side, mine, other in zip(Side, series, reversed(series), strict=True):
            if other.keys() - mine.keys() and not one.has_troubles(side):
                return _incomparable(one, f"{side}: it makes fewer runs, and passes")
        if one.turns >= _BROKEN_RUNS:
            for side in Side:
                if not any(map(is_conclusive, one.all_runs(side))):
                    verdicts = ", ".join(sorted({run.verdict.value for run in one.all_runs(side)}))
                    return _incomparable(one, f"{side}: no run of it says anything: {verdicts}")
        return None

    def _spend(self, spent_s: float) -> None:
        """End all tests with what was found so far."""
        self.is_spent = True
        known = [one.seconds() for one in self.tests if one.turns]
        if known:
            usual_s = sum(known) / len(known)
            self.needed_s = spent_s + sum(
                (one.seconds() or usual_s) * max(0, LOOKS[0].runs + 1 - one.turns)
                for one in self.tests
                if not one.is_over
            )
        for one in self.tests:
            if not one.is_over and not one.findings:
                reason = f"the budget is spent after {one.counted} runs a side"
                one.findings = [_finding_of_test(one, NumberChange.UNDECIDED, reason)]
            one.is_over = True

    def give_up(self, turn: ArmTurn, reason: str) -> None:
        """End all tests that are open: a version cannot run any more. Where that is the one after, in the middle of a
        test that it could run before, this test is worse.
        """
        for one in self.tests:
            if one.is_over:
                continue
            is_worse = one.test == turn.test and turn.side is Side.AFTER and turn.number > 0
            change = NumberChange.REGRESSED if is_worse else NumberChange.INCOMPARABLE
            one.findings = [
                *one.decided(),
                _finding_of_test(one, change, reason, OWN_FAILURE if is_worse else "all"),
            ]
            one.is_over = True

    def counted(self, test: str) -> int:
        """Runs of a test on each side, without the first."""
        return self._by_name[test].counted

    def has_warmed_up(self) -> bool:
        """Whether each test has run once in both versions, or is over."""
        return all(one.turns or one.is_over for one in self.tests)

    def price(self) -> Price:
        """What the tests that are open will take: known when each has warmed up."""
        least = most = 0.0
        tests = [one for one in self.tests if not one.is_over]
        for one in tests:
            turn_s = sum(one.reports[side][-1].seconds for side in Side if one.reports[side])
            least += turn_s * LOOKS[0].runs
            most += turn_s * LOOKS[-1].runs
        return Price(least, most, len(tests))

    def tests_of(self, findings: Sequence[NumberFinding]) -> list[str]:
        """The tests whose runs findings are about."""
        titles = {one.title for one in findings}
        return [
            one.test
            for one in self.tests
            if titles & {run.title for run in one.all_runs(Side.AFTER)}
        ]

    def runs_of(self, finding: NumberFinding, side: Side) -> list[RunRecord]:
        """The runs of one version that a finding is about."""
        found = (runs for one in self.tests for runs in one.series(side).values())
        return [
            run
            for runs in found
            for run in runs
            if (run.series, run.title) == (finding.series, finding.title)
        ]

    @property
    def findings(self) -> list[NumberFinding]:
        """Of all tests, as far as they were looked at."""
        return [finding for one in self.tests for finding in one.findings]


def _incomparable(one: ComparedTest, reason: str) -> NumberFinding:
    return _finding_of_test(one, NumberChange.INCOMPARABLE, reason)


def _finding_of_test(
    one: ComparedTest, change: NumberChange, reason: str, metric: str = "all"
) -> NumberFinding:
    runs = one.all_runs(Side.AFTER) or one.all_runs(Side.BEFORE)
    if runs:
        return finding_of(runs, metric, "count", change, reason=reason)
    return of_no_run(one.test, change, reason)


def of_no_run(title: str, change: NumberChange, reason: str) -> NumberFinding:
    """A finding about all numbers of a test that has no run."""
    return NumberFinding(
        series="", title=title, metric="all", unit="count", change=change, reason=reason
    )


def _failed(one: ComparedTest) -> list[NumberFinding]:
    """A test whose own assertion fails now, and did not before, or more often than by chance."""
    before, after = ([report.has_own_failure() for report in one.reports[side]] for side in Side)
    if not any(after):
        return []
    is_new = not any(before)
    if not is_new and more_by_chance(sum(before), len(before), sum(after), len(after)) > CHANCE:
        return []
    trouble = next(report.trouble for report in one.reports[Side.AFTER] if report.has_own_failure())
    shares = {"before": sum(before) / len(before), "after": sum(after) / len(after)}
    told = f"it failed in {sum(after)} of {len(after)} runs, in {sum(before)} of {len(before)} before: {trouble}"
    runs = one.all_runs(Side.AFTER)
    return [finding_of(runs, OWN_FAILURE, "count", NumberChange.REGRESSED, reason=told, **shares)]


def _with_own_failures(findings: Sequence[NumberFinding], one: ComparedTest) -> list[NumberFinding]:
    """Add that the test itself fails, in place of what its assertion alone says of its runs."""
    own = _failed(one)
    if own and not any(run.verdict is Verdict.FAILED for run in one.all_runs(Side.AFTER)):
        return [
            *(finding for finding in findings if finding.metric not in (RECOVERED, PASSED)),
            *own,
        ]
    return [*findings, *own]


def _looks_of(one: ComparedTest) -> int:
    """How many looks a test has had; -1 before it has warmed up."""
    return -1 if not one.turns else sum(one.counted >= look.runs for look in LOOKS)


def merged(
    findings: Sequence[NumberFinding],
    sessions: tuple[VersionSchedule, VersionSchedule],
    why_not: str = "",
) -> list[NumberFinding]:
    """What two sessions say together. A duration is *regressed* if it is in both: where memory came to lie may make one
    session slow.

    Args:
        findings: of the first one, without what looks worse by chance. What is counted needs no second session.
        why_not: why the second one did not come about.
    """
    again = {(one.title, one.metric): one for one in sessions[1].findings}
    return [_merged(one, again.get((one.title, one.metric)), sessions, why_not) for one in findings]


def _merged(
    one: NumberFinding,
    again: NumberFinding | None,
    sessions: Sequence[VersionSchedule],
    why_not: str,
) -> NumberFinding:
    if not needs_confirmation(one):
        return one
    if again is None or again.change is not NumberChange.REGRESSED:
        told = (
            f"was {again.change} in the next"
            if again
            else f"the next did not run{f': {why_not}' if why_not else ''}"
        )
        told = f"it regressed in one session, and {told}"
        return msgspec.structs.replace(one, change=NumberChange.UNDECIDED, reason=told, phase="")
    before, after = (
        [run for session in sessions for run in session.runs_of(one, side)] for side in Side
    )
    return with_phase(again, before, after)


def needs_confirmation(one: NumberFinding) -> bool:
    """Whether a second session has to find the same."""
    return one.change is NumberChange.REGRESSED and one.ratio is not None
