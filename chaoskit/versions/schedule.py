"""Schedule of a comparison: which test of which version runs next.

    warm up ──> look after 7 turns ──> after 14 ──> after 28 ──> decided
    (estimate)    tests that are decided leave; each has its first look before any has its second

The schedule ends when all tests are decided or the budget is spent. Each version runs once in a
turn, and the order alternates (ABBA). Drifts, such as the heat of a machine, are therefore the same
for both. This module is pure.

-> versions/looks.py: the decision about a test. history/compare.py: the counted numbers.
-> versions/run.py runs the tests.
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
    """The earlier or the later of two compared versions."""

    BEFORE = "before"
    AFTER = "after"


#: The order of the versions within a turn: in even turns, and in odd ones.
_ORDERS = ((Side.BEFORE, Side.AFTER), (Side.AFTER, Side.BEFORE))
#: The name of the number that counts failures of a test's own assertions.
OWN_FAILURE = "test"
#: The least share of a warm-up that a later run takes. A warm-up also makes the unbroken twin.
_WARM_UP_SHARE = 0.5
#: A test that failed in each of this many first runs is broken.
_BROKEN_RUNS = 3


class ArmTurn(NamedTuple):
    """A run of a test.

    Number 0 is the warm-up, which makes the unbroken twin; its durations do not count.
    """

    test: str
    side: Side
    number: int


@dataclass
class ArmReport:
    """The result of one run of a test.

    Attributes:
        runs: records of the training runs that it made.
        seconds: its duration.
        trouble: why it failed or was skipped; "" if it passed.
        plans: records of the series of these runs.
    """

    runs: list[RunRecord] = field(default_factory=list)
    seconds: float = 0.0
    trouble: str = ""
    plans: list[SeriesRecord] = field(default_factory=list)

    def has_own_failure(self) -> bool:
        """Return True if an assertion of the test itself failed although all of its runs passed."""
        is_failure = self.trouble.startswith("failed") and bool(self.runs)
        return is_failure and all(run.verdict is Verdict.PASSED for run in self.runs if run.claimed)


class ExpectedDuration(NamedTuple):
    """The expected duration of the remaining runs.

    Attributes:
        least_s: seconds if all tests are decided at the first look.
        most_s: seconds if no test is decided before the last look.
        tests: the number of tests that are not decided.
    """

    least_s: float
    most_s: float
    tests: int


class ComparedTest:
    """A test under comparison, with its reports and findings so far.

    Attributes:
        test: the name of the test.
        reports: the reports of each version, the warm-up first.
        findings: the findings of the latest look; empty before the first.
        is_over: True if the test is not run any more.

    Args:
        is_reversed: True if the later version goes first.
    """

    def __init__(self, test: str, *, is_reversed: bool) -> None:
        self.test = test
        self.reports: dict[Side, list[ArmReport]] = {Side.BEFORE: [], Side.AFTER: []}
        self.findings: list[NumberFinding] = []
        self.is_over = False
        self._orders = _ORDERS[::-1] if is_reversed else _ORDERS

    @property
    def turns(self) -> int:
        """The number of complete turns, including the warm-up."""
        return min(map(len, self.reports.values()))

    @property
    def counted_turns(self) -> int:
        """The number of complete turns that count: all but the warm-up."""
        return max(0, self.turns - 1)

    def next_turn(self) -> ArmTurn:
        """Return the next run: the version that has run less often, in the order of the turn."""
        order = self._orders[self.turns % 2]
        side = next(candidate for candidate in order if len(self.reports[candidate]) == self.turns)
        return ArmTurn(self.test, side, len(self.reports[side]))

    def turn_s(self) -> float:
        """Return the duration of a turn in seconds: the sum of the longest run of each version.

        It is 0 before the first run.
        """
        return sum(
            max((report.seconds for report in reports), default=0.0)
            for reports in self.reports.values()
        )

    def runs_by_series(self, side: Side) -> dict[tuple[str, int], list[RunRecord]]:
        """Return the conclusive runs by series, without those of the warm-up."""
        return by_series(
            run for report in self.reports[side][1:] for run in report.runs if is_conclusive(run)
        )

    def count_findings(self) -> list[NumberFinding]:
        """Return the findings about the counted numbers of all runs, including the warm-up."""
        before, after = (by_series(filter(is_conclusive, self.all_runs(side))) for side in Side)
        return [
            finding
            for key in after
            if key in before
            for finding in compare_counts(before[key], after[key])
        ]

    def all_runs(self, side: Side) -> list[RunRecord]:
        """Return all runs, including those of the warm-up."""
        return [run for report in self.reports[side] for run in report.runs]

    def series_by_title(self, side: Side) -> dict[str, set[tuple[str, int]]]:
        """Return the series of the runs by title.

        A title has one series, unless the test chooses its experiment by chance.
        """
        series: dict[str, set[tuple[str, int]]] = {}
        for run in self.all_runs(side):
            series.setdefault(run.title, set()).add((run.series, run.definition))
        return series

    def has_troubles(self, side: Side) -> bool:
        """Return True if the test failed or was skipped in one of its runs."""
        return any(report.trouble for report in self.reports[side])

    def decided_findings(self) -> list[NumberFinding]:
        """Return the findings about durations that no further run can change."""
        return [
            finding for finding in self.findings if finding.ratio and not finding.change.is_open
        ]

    def is_broken(self) -> bool:
        """Return True after three turns if the test always fails now and never did before.

        Further runs would show no more, and each may last until its deadline.
        """
        before, after = ([bool(report.trouble) for report in self.reports[side]] for side in Side)
        return self.turns == _BROKEN_RUNS and all(after) and not any(before)

    def is_between_turns(self) -> bool:
        """Return True if both versions have run equally often."""
        return len(set(map(len, self.reports.values()))) == 1


class VersionSchedule:
    """The schedule of tests, which also evaluates their reports.

    Args:
        tests: the tests that both versions have.
        numbers: see :func:`chaoskit.versions.looks.decide`.
        tolerance: see :func:`chaoskit.versions.looks.decide`.
        budget_s: the time limit in seconds. A turn that may not end in time is not begun.
        worse: regressions of another session to confirm. All other findings are ignored, and the
            later version goes first.

    Attributes:
        tests: the tests with their reports and findings.
        is_spent: True once the budget has ended the schedule.
        needed_s: the budget in seconds that a first look at each open test takes, once this one is
            spent; 0 if unknown.
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
        self._worse = {(finding.title, finding.metric) for finding in worse}
        self._by_name = {test.test: test for test in self.tests}
        self._numbers, self._tolerance, self._budget_s = tuple(numbers), tolerance, budget_s
        self.is_spent = False
        self.needed_s = 0.0

    @property
    def is_too_short(self) -> bool:
        """True if the budget was spent before any test could be looked at."""
        return self.is_spent and all(finding.metric == "all" for finding in self.findings)

    def next_turn(self, spent_s: float = 0.0) -> ArmTurn | None:
        """Return the next run, or None at the end.

        If no further turn may begin within the budget, all tests end with their findings so far.

        Args:
            spent_s: the part of the budget that is spent, in seconds.
        """
        open_tests = [test for test in self.tests if not test.is_over]
        if not open_tests or self.is_spent:
            return None
        if (
            begun_test := next((test for test in open_tests if not test.is_between_turns()), None)
        ) is not None:
            return begun_test.next_turn()
        # each test has its first look before any has its second; within a look, test by test
        due_test = min(open_tests, key=_look_count)
        if self._budget_s is not None:
            affordable_test = self._affordable_test(due_test, open_tests, self._budget_s - spent_s)
            if affordable_test is None:
                self._end_by_budget(spent_s)
                return None
            due_test = affordable_test
        return due_test.next_turn()

    def _affordable_test(
        self, test: ComparedTest, open_tests: Sequence[ComparedTest], left_s: float
    ) -> ComparedTest | None:
        """Return the test that the rest of the budget allows to run; None if no turn may begin.

        The warm-up leaves time for a first look at the cheapest test. A budget without that time
        ends the warm-up.
        """
        warmed = [candidate for candidate in open_tests if candidate.turns]
        if warmed:
            look_s = min(candidate.turn_s() for candidate in warmed) * LOOKS[0].runs
            is_begun = any(candidate.counted_turns for candidate in self.tests)
            if not is_begun and look_s * _WARM_UP_SHARE > left_s:
                return None
            if not test.turns and look_s + look_s / LOOKS[0].runs > left_s:
                test = min(warmed, key=_look_count)
        return test if left_s > 0 and test.turn_s() <= left_s else None

    def take(self, turn: ArmTurn, report: ArmReport) -> list[NumberFinding] | None:
        """Keep the report of a run, and return the new findings of its test, if there are any.

        There are some at a look, and when the test turns out to be incomparable or broken. A test
        that is decided or cannot be compared is over afterwards.
        """
        test = self._by_name[turn.test]
        test.reports[turn.side].append(report)
        if not test.is_between_turns():
            return None
        if (why_not := self._incomparable_finding(test)) is not None:
            test.findings, test.is_over = [*test.decided_findings(), why_not], True
            return test.findings
        look = next((look for look in LOOKS if look.runs == test.counted_turns), None)
        if look is None and not test.is_broken():
            return None
        test.findings = self._decide(test, look or LOOKS[0])
        test.is_over = look is None or is_decided(test.findings) or look is LOOKS[-1]
        return test.findings

    def _decide(self, test: ComparedTest, look: VersionLook) -> list[NumberFinding]:
        """Return the findings of a look. Durations that were decided before keep their finding.

        A session that confirms regressions keeps only the findings about them.
        """
        decided = {(old.title, old.metric): old for old in test.decided_findings()}
        before, after = (test.runs_by_series(side) for side in Side)
        findings = test.count_findings()
        for key in dict.fromkeys([*after, *before]):
            runs_before, runs_after = before.get(key, []), after.get(key, [])
            findings += decide(
                runs_before, runs_after, look, numbers=self._numbers, tolerance=self._tolerance
            )
        findings = _with_own_failures(findings, test)
        findings = [decided.get((new.title, new.metric), new) for new in findings]
        return [
            new for new in findings if not self._worse or (new.title, new.metric) in self._worse
        ]

    def _incomparable_finding(self, test: ComparedTest) -> NumberFinding | None:
        """Return the finding that versions cannot be compared by this test; None if they can.

        They cannot if one version makes no run, or only inconclusive ones in three turns. They
        cannot either if it runs another experiment, or passes with fewer runs.
        """
        for side in Side:
            without_runs = [report for report in test.reports[side] if not report.runs]
            if without_runs:
                trouble = without_runs[0].trouble or "it passed"
                return _incomparable(test, f"{side}: the test made no conclusive run: {trouble}")
        series = [test.series_by_title(side) for side in Side]
        if any(
            series[0][title] != series[1][title] for title in series[0].keys() & series[1].keys()
        ):
            return _incomparable(
                test, "the test runs another experiment now: options, faults or settings differ"
            )
        for side, titles, others in zip(Side, series, reversed(series), strict=True):
            if others.keys() - titles.keys() and not test.has_troubles(side):
                return _incomparable(test, f"{side}: the test makes fewer runs, and passes")
        if test.turns >= _BROKEN_RUNS:
            for side in Side:
                if not any(map(is_conclusive, test.all_runs(side))):
                    verdicts = ", ".join(sorted({run.verdict.value for run in test.all_runs(side)}))
                    return _incomparable(test, f"{side}: all runs are inconclusive: {verdicts}")
        return None

    def _end_by_budget(self, spent_s: float) -> None:
        """End all tests with their findings so far; tests without a look become *undecided*.

        ``is_spent`` and ``needed_s`` are set.
        """
        self.is_spent = True
        durations = [test.turn_s() for test in self.tests if test.turns]
        if durations:
            usual_s = sum(durations) / len(durations)
            self.needed_s = spent_s + sum(
                (test.turn_s() or usual_s) * max(0, LOOKS[0].runs + 1 - test.turns)
                for test in self.tests
                if not test.is_over
            )
        for test in self.tests:
            if not test.is_over and not test.findings:
                reason = f"the budget is spent after {test.counted_turns} runs a side"
                test.findings = [_finding_of_test(test, NumberChange.UNDECIDED, reason)]
            test.is_over = True

    def give_up(self, turn: ArmTurn, reason: str) -> None:
        """End all open tests as *incomparable*, because a version cannot run any more.

        Durations that are decided keep their findings. If this is the later version in a test that
        has warmed up, that test is *regressed*.
        """
        for test in self.tests:
            if test.is_over:
                continue
            is_worse = test.test == turn.test and turn.side is Side.AFTER and turn.number > 0
            change = NumberChange.REGRESSED if is_worse else NumberChange.INCOMPARABLE
            test.findings = [
                *test.decided_findings(),
                _finding_of_test(test, change, reason, OWN_FAILURE if is_worse else "all"),
            ]
            test.is_over = True

    def counted_runs(self, test: str) -> int:
        """Return the number of counted runs of a test on each side."""
        return self._by_name[test].counted_turns

    def has_warmed_up(self) -> bool:
        """Return True if each test has run once in both versions, or is decided."""
        return all(test.turns or test.is_over for test in self.tests)

    def expected_duration(self) -> ExpectedDuration:
        """Return the expected duration of the open tests, from the latest run of each version.

        It is too short before each test has warmed up.
        """
        least = most = 0.0
        tests = [test for test in self.tests if not test.is_over]
        for test in tests:
            turn_s = sum(test.reports[side][-1].seconds for side in Side if test.reports[side])
            least += turn_s * LOOKS[0].runs
            most += turn_s * LOOKS[-1].runs
        return ExpectedDuration(least, most, len(tests))

    def tests_of(self, findings: Sequence[NumberFinding]) -> list[str]:
        """Return the names of the tests that findings are about."""
        titles = {finding.title for finding in findings}
        return [
            test.test
            for test in self.tests
            if titles & {run.title for run in test.all_runs(Side.AFTER)}
        ]

    def runs_of(self, finding: NumberFinding, side: Side) -> list[RunRecord]:
        """Return the runs of one version that a finding is about, without the warm-up."""
        groups = (runs for test in self.tests for runs in test.runs_by_series(side).values())
        return [
            run
            for runs in groups
            for run in runs
            if (run.series, run.title) == (finding.series, finding.title)
        ]

    @property
    def findings(self) -> list[NumberFinding]:
        """The findings about all tests, as far as they were looked at."""
        return [finding for test in self.tests for finding in test.findings]


def _incomparable(test: ComparedTest, reason: str) -> NumberFinding:
    """Return the finding that a test cannot be compared."""
    return _finding_of_test(test, NumberChange.INCOMPARABLE, reason)


def _finding_of_test(
    test: ComparedTest, change: NumberChange, reason: str, metric: str = "all"
) -> NumberFinding:
    """Return a finding about all numbers of a test, or about one."""
    runs = test.all_runs(Side.AFTER) or test.all_runs(Side.BEFORE)
    if runs:
        return finding_of(runs, metric, "count", change, reason=reason)
    return no_run_finding(test.test, change, reason)


def no_run_finding(title: str, change: NumberChange, reason: str) -> NumberFinding:
    """Return a finding about all numbers of a test that has no run."""
    return NumberFinding(
        series="", title=title, metric="all", unit="count", change=change, reason=reason
    )


def _own_failure_findings(test: ComparedTest) -> list[NumberFinding]:
    """Return a finding if the test's own assertion fails now, and did not before.

    If it failed before, it is only reported if chance hardly explains that it fails more often.
    """
    before, after = ([report.has_own_failure() for report in test.reports[side]] for side in Side)
    if not any(after):
        return []
    is_new = not any(before)
    if not is_new and more_by_chance(sum(before), len(before), sum(after), len(after)) > CHANCE:
        return []
    trouble = next(
        report.trouble for report in test.reports[Side.AFTER] if report.has_own_failure()
    )
    shares = {"before": sum(before) / len(before), "after": sum(after) / len(after)}
    counts = f"{sum(after)} of {len(after)} runs, in {sum(before)} of {len(before)} before"
    reason = f"the test failed in {counts}: {trouble}"
    runs = test.all_runs(Side.AFTER)
    return [finding_of(runs, OWN_FAILURE, "count", NumberChange.REGRESSED, reason=reason, **shares)]


def _with_own_failures(
    findings: Sequence[NumberFinding], test: ComparedTest
) -> list[NumberFinding]:
    """Return the findings, with one more if the test's own assertion fails.

    It replaces findings that result from this assertion alone.
    """
    own_findings = _own_failure_findings(test)
    if own_findings and not any(run.verdict is Verdict.FAILED for run in test.all_runs(Side.AFTER)):
        return [
            *(finding for finding in findings if finding.metric not in (RECOVERED, PASSED)),
            *own_findings,
        ]
    return [*findings, *own_findings]


def _look_count(test: ComparedTest) -> int:
    """Return the number of looks whose runs a test has made; -1 before it has warmed up."""
    return -1 if not test.turns else sum(test.counted_turns >= look.runs for look in LOOKS)


def merge_sessions(
    findings: Sequence[NumberFinding],
    sessions: tuple[VersionSchedule, VersionSchedule],
    why_not: str = "",
) -> list[NumberFinding]:
    """Return the findings of a first session, confirmed or withdrawn by a second one.

    A duration is *regressed* if it is in both sessions, as the memory layout may make one session
    slow.

    Args:
        findings: findings of the first session that chance does not explain. Counted numbers need
            no second session.
        why_not: why the second session was not run; "" if it was.
    """
    second_findings = {(finding.title, finding.metric): finding for finding in sessions[1].findings}
    return [
        _confirm_or_withdraw(
            finding, second_findings.get((finding.title, finding.metric)), sessions, why_not
        )
        for finding in findings
    ]


def _confirm_or_withdraw(
    finding: NumberFinding,
    second_finding: NumberFinding | None,
    sessions: Sequence[VersionSchedule],
    why_not: str,
) -> NumberFinding:
    """Return a finding of the first session, or a duration's regression as the second showed it.

    A regression that the second session did not confirm becomes *undecided*.

    Args:
        second_finding: the finding of the second session; None if there is none.
    """
    if not needs_confirmation(finding):
        return finding
    if second_finding is None or second_finding.change is not NumberChange.REGRESSED:
        outcome = (
            f"was {second_finding.change} in the next"
            if second_finding
            else f"the next did not run{f': {why_not}' if why_not else ''}"
        )
        outcome = f"it regressed in one session, and {outcome}"
        return msgspec.structs.replace(
            finding, change=NumberChange.UNDECIDED, reason=outcome, phase=""
        )
    before, after = (
        [run for session in sessions for run in session.runs_of(finding, side)] for side in Side
    )
    return with_phase(second_finding, before, after)


def needs_confirmation(finding: NumberFinding) -> bool:
    """Return True if a finding must be confirmed by a second session: a regressed duration."""
    return finding.change is NumberChange.REGRESSED and finding.ratio is not None
