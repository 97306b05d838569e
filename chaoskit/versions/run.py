"""Comparison of two versions of a project by running their tests in turns.

-> versions/schedule.py: the next run, and when a test is decided. versions/looks.py: the decision.
-> versions/trees.py: the checkouts. nightly/run.py: the comparison of a night.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from chaoskit.errors import BadInput, HarnessError
from chaoskit.history.compare import RunComparison, withdraw_chance_regressions
from chaoskit.history.finding import NumberChange, NumberFinding
from chaoskit.history.record import HistoryRecord, RunRecord
from chaoskit.journal.reader import read_events
from chaoskit.plaintext import one_line
from chaoskit.substrate.undo import UndoLog, temporary_directory
from chaoskit.versions.arm import ArmProcess, Version
from chaoskit.versions.looks import NUMBERS, TOLERANCE
from chaoskit.versions.schedule import (
    ArmReport,
    ArmTurn,
    ExpectedDuration,
    Side,
    VersionSchedule,
    merge_sessions,
    needs_confirmation,
    no_run_finding,
)
from chaoskit.versions.trees import MERGE_BASE, WORKING_TREE, Repository
from chaoskit.vocabulary import Event

#: The share of a budget that is reserved for the session that confirms regressions.
_CONFIRMATION_SHARE = 0.35
_PREPARE_S = 1800.0


class VersionProgress:
    """Callbacks of a running comparison. By default they do nothing."""

    def began(self, tests: int, session: int) -> None:
        """Report that the tests of a session are collected.

        Session 2 confirms regressions of session 1.
        """

    def estimated(self, expected: ExpectedDuration) -> None:
        """Report the expected duration, once all tests have warmed up."""

    def fell_short(self, budget_s: float, needed_s: float, tests: int) -> None:
        """Report that the budget is too short for any test to be decided.

        Args:
            needed_s: a budget that would suffice; 0 if no run was made that could tell.
        """

    def ran(self, turn: ArmTurn, report: ArmReport) -> None:
        """Report the end of a run."""

    def looked(self, test: str, runs: int, findings: Sequence[NumberFinding]) -> None:
        """Report the findings about a test after so many runs on each side."""


@dataclass(frozen=True)
class VersionRequest:
    """A request to compare two versions, each named as a revision, an environment, or both.

    Attributes:
        before: the earlier version; see :class:`chaoskit.versions.arm.Version`.
        after: the later version, likewise.
        arguments: arguments of pytest.
        directory: the user's directory in the repository.
        numbers: see :func:`chaoskit.versions.looks.decide`.
        tolerance: the growth that counts as worse, as a fraction.
        budget_s: the time limit of the comparison in seconds; None for no limit.
        prepare: a shell command that is run in each checkout before its tests; "" for none.
    """

    before: str
    after: str
    arguments: tuple[str, ...] = ()
    directory: Path = field(default_factory=Path.cwd)
    numbers: tuple[str, ...] = NUMBERS
    tolerance: float = TOLERANCE
    budget_s: float | None = None
    prepare: str = ""


@dataclass
class VersionResult:
    """The result of a comparison of two versions.

    Attributes:
        comparison: the findings, as for two sets of records.
        records: the records of the later version's runs, which have no session yet, and of their
            series.
        seconds: the duration of the comparison.
        expected_duration: the expected duration of the runs; None if not all tests have warmed up.
    """

    comparison: RunComparison
    records: list[HistoryRecord] = field(default_factory=list)
    seconds: float = 0.0
    expected_duration: ExpectedDuration | None = None


def compare_versions(
    request: VersionRequest, progress: VersionProgress | None = None
) -> VersionResult:
    """Run the tests of two versions in turns until it is decided which version is slower.

    Return the findings, and the records of the later version's runs. Regressions are run again in a
    second session: both versions are restarted, and the other one goes first. A version that cannot
    be prepared or started is no error: the only finding has the reason.

    Raises:
        BadInput: if the directory is in no git repository, or a version does not exist or cannot
            be checked out. It is also raised if both versions are the same, or no test uses the
            fixture ``chaos``.
    """
    with closing(UndoLog()) as undo:
        scratch, _ = temporary_directory("compare", undo)
        return _VersionComparison(request, progress or VersionProgress(), scratch).run()


class _VersionComparison:
    """A running comparison: checkouts of both versions, and the sessions of their tests."""

    def __init__(self, request: VersionRequest, progress: VersionProgress, scratch: Path) -> None:
        self._request, self._progress, self._scratch = request, progress, scratch
        self._repository = Repository(request.directory, scratch)
        self._versions: dict[Side, Version] = {}
        self._commits: dict[Side, str] = {}
        for side, name in ((Side.BEFORE, request.before), (Side.AFTER, request.after)):
            try:
                self._versions[side] = Version.parse(name)
                self._commits[side] = self._repository.commit_of(
                    self._versions[side].revision or WORKING_TREE
                )
            except BadInput as error:
                raise BadInput(side, name, error.remedy) from None
        self._began = time.monotonic()
        self._expected_duration: ExpectedDuration | None = None
        self._absent: list[str] = []
        self._only_after: list[str] = []
        self._require_two_versions()

    def _require_two_versions(self) -> None:
        """Raise BadInput if both versions have the same commit and interpreter."""
        before, after = self._versions[Side.BEFORE], self._versions[Side.AFTER]
        if (
            self._commits[Side.BEFORE] == self._commits[Side.AFTER]
            and before.python == after.python
        ):
            explanation = (
                ": HEAD is on the branch that it would be merged into"
                if MERGE_BASE in self._request.before
                else ""
            )
            raise BadInput(
                Side.BEFORE,
                before.name,
                f"name another version: both are {self._commits[Side.AFTER][:10]}{explanation}",
            )

    def run(self) -> VersionResult:
        """Check out both versions, compare them, and return the result.

        Regressions of durations are confirmed in a second session.
        """
        for side in Side:
            self._repository.check_out(self._commits[side], self._tree(side))
        try:
            for side in Side:
                self._prepare(side)
            first = self._session()
        except HarnessError as error:  # a version cannot be started
            finding = no_run_finding("all tests", NumberChange.INCOMPARABLE, str(error))
            return self._result(RunComparison(findings=[finding]), [])
        findings, sessions = withdraw_chance_regressions(first.findings), [first]
        if worse := [finding for finding in findings if needs_confirmation(finding)]:
            second, why_not = self._confirm(first, worse)
            sessions += [second]
            findings = merge_sessions(findings, (first, second), why_not)
        new = NumberChange.NO_REFERENCE
        findings += [
            no_run_finding(test, new, "the test is not in the earlier version")
            for test in self._only_after
        ]
        return self._result(RunComparison(findings=findings, absent=self._absent), sessions)

    def _prepare(self, side: Side) -> None:
        """Run the user's command that builds files git does not have, such as a compiled extension.

        Raises:
            HarnessError: if the command fails.
        """
        if not self._request.prepare:
            return
        environment = {**os.environ, "CHAOSKIT_PYTHON": self._versions[side].python}
        try:
            completed = subprocess.run(
                ["sh", "-c", self._request.prepare],
                cwd=self._tree(side),
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_PREPARE_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise HarnessError(f"{side}: the preparation failed: {error}") from None
        if completed.returncode:
            output = one_line(
                "; ".join((completed.stdout + completed.stderr).strip().splitlines()[-2:])
            )
            raise HarnessError(
                f"{side}: the preparation failed: {output or f'status {completed.returncode}'}"
            )

    def _tree(self, side: Side) -> Path:
        """Return the directory of a version. Both directories differ in their contents only."""
        return self._scratch / f"tree-{side}"

    def _result(
        self, comparison: RunComparison, sessions: Sequence[VersionSchedule]
    ) -> VersionResult:
        """Return the result, with the records of the sessions and the time since the beginning."""
        seconds = time.monotonic() - self._began
        return VersionResult(
            comparison, list(self._records(sessions)), seconds, self._expected_duration
        )

    def _confirm(
        self, first: VersionSchedule, worse: Sequence[NumberFinding]
    ) -> tuple[VersionSchedule, str]:
        """Run the regressed tests again.

        Return the session, and why it was not run in full, or "".
        """
        try:
            second = self._session(worse, first.tests_of(worse))
        except HarnessError as error:
            return VersionSchedule([]), str(error)
        return second, "the budget was spent" if second.is_spent else ""

    def _session(
        self, worse: Sequence[NumberFinding] = (), tests: Sequence[str] = ()
    ) -> VersionSchedule:
        """Start both versions, run their tests in turns, and return the schedule with the findings.

        Raise HarnessError if a version cannot be started.

        Args:
            worse: findings to confirm; empty in the first session.
            tests: the tests to run. The default is all tests that both versions have.
        """
        number = 2 if worse else 1
        with ExitStack() as exit_stack:
            arms = {
                side: exit_stack.enter_context(closing(self._start(side, number))) for side in Side
            }
            for arm in arms.values():
                arm.await_tests()
            schedule = VersionSchedule(
                tests or self._common_tests(arms),
                numbers=self._request.numbers,
                tolerance=self._request.tolerance,
                budget_s=self._budget_s(is_first=not worse),
                worse=worse,
            )
            self._progress.began(len(schedule.tests), number)
            self._take_turns(schedule, arms)
            if not worse and schedule.is_too_short and self._request.budget_s is not None:
                needed_s = schedule.needed_s / (1 - _CONFIRMATION_SHARE)
                self._progress.fell_short(self._request.budget_s, needed_s, len(schedule.tests))
            return schedule

    def _budget_s(self, *, is_first: bool) -> float | None:
        """Return the time by which a session must end, in seconds since the beginning, or None.

        The first session leaves a share to the session that confirms its regressions.
        """
        budget_s = self._request.budget_s
        return (
            budget_s * (1 - _CONFIRMATION_SHARE) if budget_s is not None and is_first else budget_s
        )

    def _start(self, side: Side, number: int) -> ArmProcess:
        """Start pytest for a version, and return its process.

        Args:
            number: the number of the session.
        """
        root = self._repository.root
        return ArmProcess(
            self._versions[side],
            self._tree(side),
            self._request.arguments,
            root=root,
            subdirectory=self._request.directory.resolve().relative_to(root),
            scratch=self._scratch / f"{side}-{number}",
        )

    def _common_tests(self, arms: dict[Side, ArmProcess]) -> list[str]:
        """Return the tests that both versions have, and note the others for the result.

        Raise BadInput if neither version has tests.
        """
        before, after = arms[Side.BEFORE].tests, arms[Side.AFTER].tests
        self._absent = [test for test in before if test not in after]
        self._only_after = [test for test in after if test not in before]
        if not before and not after:
            raise BadInput(
                "tests",
                " ".join(self._request.arguments),
                "name tests that use the fixture chaos: no test does",
            )
        return [test for test in after if test in before]

    def _take_turns(self, schedule: VersionSchedule, arms: dict[Side, ArmProcess]) -> None:
        """Run tests in turns until the schedule has none left or a version cannot run any more.

        The schedule receives the reports, and callbacks report the progress.
        """
        while turn := schedule.next_turn(time.monotonic() - self._began):
            try:
                report = arms[turn.side].run(turn.test)
            except HarnessError as error:
                schedule.give_up(turn, str(error))
                return
            if turn.number == 0 and (
                foreign := self._foreign_source(report, self._tree(turn.side))
            ):
                report = ArmReport(trouble=foreign)
            self._progress.ran(turn, report)
            findings = schedule.take(turn, report)
            if findings is not None:
                self._progress.looked(turn.test, schedule.counted_runs(turn.test), findings)
            if self._expected_duration is None and schedule.has_warmed_up():
                self._expected_duration = schedule.expected_duration()
                self._progress.estimated(self._expected_duration)

    def _foreign_source(self, report: ArmReport, tree: Path) -> str:
        """Return an error if ranks imported code of another version; "" if they did not.

        This happens if a package was installed from another directory.
        """
        for run in report.runs:
            for record in read_events(Path(run.report) / "journal", Event.FINISHED):
                for source in map(Path, record.get("sources", {})):
                    if source.is_relative_to(self._repository.root) and not source.is_relative_to(
                        tree
                    ):
                        foreign = f"its ranks imported {source}, which is not of this version"
                        return f"{foreign}: give each version its own env:PATH"
        return ""

    def _records(self, sessions: Sequence[VersionSchedule]) -> Iterator[HistoryRecord]:
        """Yield the records of the later version's runs, as a history keeps them.

        Runs of the working tree are recorded with the commit HEAD and changed sources.
        """
        is_working_tree = self._versions[Side.AFTER].revision in ("", WORKING_TREE)
        is_changed = is_working_tree and self._commits[Side.AFTER] != self._repository.head
        reports = [
            report
            for schedule in sessions
            for test in schedule.tests
            for report in test.reports[Side.AFTER]
        ]
        yield from {plan.series: plan for report in reports for plan in report.plans}.values()
        for report in reports:
            for run in report.runs:
                yield self._with_head_commit(run) if is_changed else run

    def _with_head_commit(self, run: RunRecord) -> RunRecord:
        """Return a record with the commit HEAD, marked as having changed sources."""
        covariates = run.covariates | {"sources": "changed"}
        return msgspec.structs.replace(run, commit=self._repository.head, covariates=covariates)
