"""Compare two versions of a project by running them in turns."""

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
from chaoskit.history.compare import RunComparison, beyond_chance
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
    Price,
    Side,
    VersionSchedule,
    merged,
    needs_confirmation,
    of_no_run,
)
from chaoskit.versions.trees import MERGE_BASE, WORKING_TREE, Repository
from chaoskit.vocabulary import Event

#: The share of a budget that is kept for the session that confirms what is worse.
_TO_CONFIRM = 0.35
_PREPARE_S = 1800.0


class VersionProgress:
    """What is told while runs go on. Each method may be overridden; by default nothing is told."""

    def began(self, tests: int, session: int) -> None:
        """Tests are collected, of session 1 or of the one that confirms it."""

    def priced(self, price: Price) -> None:
        """All tests have warmed up."""

    def fell_short(self, budget_s: float, needed_s: float, tests: int) -> None:
        """The budget cannot do: no test can be looked at. ``needed_s``: what would, 0 where no run tells."""

    def ran(self, turn: ArmTurn, report: ArmReport) -> None:
        """A run is over."""

    def looked(self, test: str, runs: int, findings: Sequence[NumberFinding]) -> None:
        """A test was looked at, after so many runs on each side."""


@dataclass(frozen=True)
class VersionRequest:
    """What is to be compared.

    Attributes:
        before, after: versions, see :class:`chaoskit.versions.arm.Version`. arguments: of pytest.
        directory: of the user, in the repository. numbers: see :func:`chaoskit.versions.looks.decide`.
        budget_s: for all; None for no limit. prepare: a command of the shell for each directory, before its tests run.
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
    """What was found.

    Attributes:
        comparison: as of two sets of records. records: of the runs of the version after, and of their series.
        seconds: how long it took. price: what it was said to cost; None if no test has warmed up.
    """

    comparison: RunComparison
    records: list[HistoryRecord] = field(default_factory=list)
    seconds: float = 0.0
    price: Price | None = None


def compare_versions(
    request: VersionRequest, progress: VersionProgress | None = None
) -> VersionResult:
    """Run the tests of two versions in turns, until it is known which got slower.

    What looks worse is run again, in a second session: both versions are started anew, and the other one goes first.

    Raises:
        BadInput: if a version is not there, both are the same, or no test uses the fixture ``chaos``.
    """
    with closing(UndoLog()) as undo:
        scratch, _ = temporary_directory("compare", undo)
        return _Comparing(request, progress or VersionProgress(), scratch).run()


class _Comparing:
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
        self._price: Price | None = None
        self._absent: list[str] = []
        self._only_after: list[str] = []
        self._refuse_the_same()

    def _refuse_the_same(self) -> None:
        before, after = self._versions[Side.BEFORE], self._versions[Side.AFTER]
        if (
            self._commits[Side.BEFORE] == self._commits[Side.AFTER]
            and before.python == after.python
        ):
            more = (
                ": HEAD is on the branch that it would be merged into"
                if MERGE_BASE in self._request.before
                else ""
            )
            raise BadInput(
                Side.BEFORE,
                before.name,
                f"name another one: both are {self._commits[Side.AFTER][:10]}{more}",
            )

    def run(self) -> VersionResult:
        """Check out, compare, confirm."""
        for side in Side:
            self._repository.check_out(self._commits[side], self._tree(side))
        try:
            for side in Side:
                self._prepare(side)
            first = self._session()
        except HarnessError as error:  # a version does not start
            finding = of_no_run("all tests", NumberChange.INCOMPARABLE, str(error))
            return self._done(RunComparison(findings=[finding]), [])
        findings, sessions = beyond_chance(first.findings), [first]
        if worse := [one for one in findings if needs_confirmation(one)]:
            second, why_not = self._confirm(first, worse)
            sessions += [second]
            findings = merged(findings, (first, second), why_not)
        new = NumberChange.NO_REFERENCE
        findings += [
            of_no_run(test, new, "it is not in the version before") for test in self._only_after
        ]
        return self._done(RunComparison(findings=findings, absent=self._absent), sessions)

    def _prepare(self, side: Side) -> None:
        """Make what git does not have, such as a compiled extension. Raises HarnessError if that fails."""
        if not self._request.prepare:
            return
        own = {**os.environ, "CHAOSKIT_PYTHON": self._versions[side].python}
        try:
            done = subprocess.run(
                ["sh", "-c", self._request.prepare],
                cwd=self._tree(side),
                env=own,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_PREPARE_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise HarnessError(f"{side}: it cannot be prepared: {error}") from None
        if done.returncode:
            told = one_line("; ".join((done.stdout + done.stderr).strip().splitlines()[-2:]))
            raise HarnessError(
                f"{side}: it cannot be prepared: {told or f'status {done.returncode}'}"
            )

    def _tree(self, side: Side) -> Path:
        """The directory of a version: both are alike but for their contents."""
        return self._scratch / f"tree-{side}"

    def _done(
        self, comparison: RunComparison, sessions: Sequence[VersionSchedule]
    ) -> VersionResult:
        seconds = time.monotonic() - self._began
        return VersionResult(comparison, list(self._records(sessions)), seconds, self._price)

    def _confirm(
        self, first: VersionSchedule, worse: Sequence[NumberFinding]
    ) -> tuple[VersionSchedule, str]:
        """Run what is worse again; and why it did not run."""
        try:
            second = self._session(worse, first.tests_of(worse))
        except HarnessError as error:
            return VersionSchedule([]), str(error)
        return second, "the budget was spent" if second.is_spent else ""

    def _session(
        self, worse: Sequence[NumberFinding] = (), tests: Sequence[str] = ()
    ) -> VersionSchedule:
        """Start both versions and run their tests in turns: those that both have, or to confirm what is worse."""
        number = 2 if worse else 1
        with ExitStack() as ended:
            arms = {side: ended.enter_context(closing(self._start(side, number))) for side in Side}
            for arm in arms.values():
                arm.await_tests()
            schedule = VersionSchedule(
                tests or self._common(arms),
                numbers=self._request.numbers,
                tolerance=self._request.tolerance,
                budget_s=self._budget_s(is_first=not worse),
                worse=worse,
            )
            self._progress.began(len(schedule.tests), number)
            self._take_turns(schedule, arms)
            if not worse and schedule.is_too_short and self._request.budget_s is not None:
                needed_s = schedule.needed_s / (1 - _TO_CONFIRM)
                self._progress.fell_short(self._request.budget_s, needed_s, len(schedule.tests))
            return schedule

    def _budget_s(self, *, is_first: bool) -> float | None:
        """Seconds since the beginning by which a session is over: a part is kept for the one that confirms it."""
        budget_s = self._request.budget_s
        return budget_s * (1 - _TO_CONFIRM) if budget_s is not None and is_first else budget_s

    def _start(self, side: Side, number: int) -> ArmProcess:
        root = self._repository.root
        return ArmProcess(
            self._versions[side],
            self._tree(side),
            self._request.arguments,
            root=root,
            below=self._request.directory.resolve().relative_to(root),
            scratch=self._scratch / f"{side}-{number}",
        )

    def _common(self, arms: dict[Side, ArmProcess]) -> list[str]:
        before, after = arms[Side.BEFORE].tests, arms[Side.AFTER].tests
        self._absent = [test for test in before if test not in after]
        self._only_after = [test for test in after if test not in before]
        if not before and not after:
            raise BadInput(
                "tests",
                " ".join(self._request.arguments),
                "name tests that use the fixture chaos: none does",
            )
        return [test for test in after if test in before]

    def _take_turns(self, schedule: VersionSchedule, arms: dict[Side, ArmProcess]) -> None:
        while turn := schedule.next_turn(time.monotonic() - self._began):
            try:
                report = arms[turn.side].run(turn.test)
            except HarnessError as error:
                schedule.give_up(turn, str(error))
                return
            if turn.number == 0 and (
                strange := self._strange_source(report, self._tree(turn.side))
            ):
                report = ArmReport(trouble=strange)
            self._progress.ran(turn, report)
            found = schedule.take(turn, report)
            if found is not None:
                self._progress.looked(turn.test, schedule.counted(turn.test), found)
            if self._price is None and schedule.has_warmed_up():
                self._price = schedule.price()
                self._progress.priced(self._price)

    def _strange_source(self, report: ArmReport, tree: Path) -> str:
        """What shows that ranks ran code of another version, such as of a package that is installed from there."""
        for run in report.runs:
            for record in read_events(Path(run.report) / "journal", Event.FINISHED):
                for source in map(Path, record.get("sources", {})):
                    if source.is_relative_to(self._repository.root) and not source.is_relative_to(
                        tree
                    ):
                        return f"its ranks imported {source}, which is not of this version: use env:PATH for each"
        return ""

    def _records(self, sessions: Sequence[VersionSchedule]) -> Iterator[HistoryRecord]:
        """Of the version after, as a history keeps them: the commit of the files as they are is HEAD, with changes."""
        is_as_now = self._versions[Side.AFTER].revision in ("", WORKING_TREE)
        is_changed = is_as_now and self._commits[Side.AFTER] != self._repository.head
        reports = [
            report
            for schedule in sessions
            for one in schedule.tests
            for report in one.reports[Side.AFTER]
        ]
        yield from {plan.series: plan for report in reports for plan in report.plans}.values()
        for report in reports:
            for run in report.runs:
                yield self._as_of_head(run) if is_changed else run

    def _as_of_head(self, run: RunRecord) -> RunRecord:
        covariates = run.covariates | {"sources": "changed"}
        return msgspec.structs.replace(run, commit=self._repository.head, covariates=covariates)
