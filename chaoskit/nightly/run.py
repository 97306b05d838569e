"""Execution of a night, from its first check to its record.

  lock ──> guard ──> doctor ──> control ──> experiments ──> comparison ──> heal ──> SLAs ──> record
           (may not begin)      (fit?)      each test with all of its      nothing
                                            repeats, once; a kill          stays
                                            costs the test it struck

A night puts its resources back even if it ends early. An error, or the abort condition, is
written into its record. An interruption leaves its log open, so that the next start resumes it.

-> nightly/outcome.py: the exit code. nightly/watch.py: the conditions that end it early.
-> nightly/log.py: what a killed night has done. nightly/repeats.py: one test with its repeats.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from chaoskit.errors import BadInput, ChaoskitError, HarnessError
from chaoskit.history.compare import (
    RunComparison,
    with_accepted_findings,
    withdraw_chance_regressions,
)
from chaoskit.history.place import sources_at
from chaoskit.history.record import NightRecord, NightUnit, new_id
from chaoskit.nightly.begin import night_lock, require_guard
from chaoskit.nightly.keeping import NightHistory
from chaoskit.nightly.log import (
    NightBegan,
    NightEnded,
    NightLog,
    NightStopped,
    UnitDone,
    folders_beyond,
)
from chaoskit.nightly.outcome import LEFT_BEHIND, NO_CONTROL, NO_GOOD_NIGHT, exit_code_of, unit_text
from chaoskit.nightly.places import NightPlace, place_of
from chaoskit.nightly.plan import NightPlan
from chaoskit.nightly.rendering import report_html, report_json, report_markdown
from chaoskit.nightly.repeats import NightTests, Part
from chaoskit.nightly.report import build_report, removed_tests
from chaoskit.nightly.watch import AbortCondition, NightAborted, abort_reason, watched
from chaoskit.nightly.webhook import post
from chaoskit.plaintext import plural
from chaoskit.process.linux import adopt_orphans, reap
from chaoskit.sla.judge import judge
from chaoskit.sla.promises import load as load_slas
from chaoskit.substrate.kubernetes.nights import NIGHT_JOB
from chaoskit.versions.budget import seconds_of
from chaoskit.versions.looks import require_numbers
from chaoskit.versions.run import VersionProgress, VersionRequest, compare_versions
from chaoskit.versions.trees import LAST_GOOD
from chaoskit.vocabulary import Verdict

_LEAVE_S = 15.0
Tell = Callable[[str], None]
Traces = tuple[set[str], set[str]]


class Night:
    """A night of a plan.

    Args:
        plan: the plan.
        directory: the user's directory, to which the names of tests are relative.
        plan_directory: the directory of the plan, to which its SLAs are relative.
        tell: receives lines of progress.

    Raises:
        BadInput: if the history or the SLAs cannot be used.
    """

    def __init__(
        self, plan: NightPlan, *, directory: Path, plan_directory: Path, tell: Tell
    ) -> None:
        self._plan, self._directory, self._tell = plan, directory, tell
        self._root = directory / plan.directory
        self._sources = sources_at(directory)
        self._planned_slas = load_slas(plan_directory / plan.sla) if plan.sla else []
        self._history = NightHistory(plan.history, directory)
        self._began = time.monotonic()
        self._seconds_before_kill = 0.0  # duration of tests that were complete before a kill
        self._missing: list[str] = []
        self._lines: list[str] = []
        self._slas: list[dict[str, object]] = []
        self._against = ""
        self._log: NightLog | None = None

    def run(self) -> NightRecord:
        """Run the night, as the only one in this directory and, on a cluster, in this namespace.

        Return its record, which is also in the log and, if it can be added, in the history. The
        reports are written into the night's folder, the webhook is called, and older folders are
        removed. An error of chaoskit in a part of the night is in the record and is not raised.

        Raises:
            BadInput: if another night runs, or the guard or the cluster forbids it. Nothing was
                started then.
            HarnessError: if the log of the night cannot be written, or the cluster fails before the
                first part.
        """
        guard = self._plan.guard
        with night_lock(self._root), closing(self._history):
            require_guard(guard)
            with (
                place_of(self._plan.substrate, self._tell) as place,
                place.held(self._tell) as conditions,
            ):
                if guard.abort_if:
                    every_s = seconds_of(guard.every, "guard.every")
                    conditions.append(AbortCondition(lambda: abort_reason(guard.abort_if), every_s))
                return self._run_in(place, conditions)

    def _run_in(self, place: NightPlace, conditions: list[AbortCondition]) -> NightRecord:
        """Run the night while the place is held, and return its record."""
        adopt_orphans()  # processes that outlive their pytest are found so
        log = self._log = self._open()
        before, environment = (place.own_traces(), place.shared_traces()), place.environment()
        try:
            if not log.state.stopped:
                with watched(conditions):
                    self._run_parts(log, place)
        except (NightAborted, ChaoskitError) as error:
            log.add(NightStopped(str(error)))
        finally:
            self._heal(place, before)
        self._judge()
        record = self._record(log, environment | _versions())
        self._history.keep([record])
        log.add(NightEnded(record))
        self._publish(record, log.folder)
        for folder in (
            folders_beyond(self._root, record.name, self._plan.keep) if self._plan.keep else ()
        ):
            shutil.rmtree(folder, ignore_errors=True)
        return record

    def preview(self) -> dict[str, list[str]]:
        """Return the tests of each part without running them; the comparison is left out.

        Raise BadInput if they cannot be collected.
        """
        tests_by_part: dict[str, list[str]] = {}
        with TemporaryDirectory() as scratch:
            for part, arguments in self._named_parts():
                try:
                    with closing(self._tests(part, arguments, Path(scratch))) as tests:
                        tests_by_part[part] = tests.names()
                except HarnessError as error:
                    raise BadInput(part, " ".join(arguments), str(error)) from None
        return tests_by_part

    def _named_parts(self) -> list[tuple[Part, list[str]]]:
        """Return the parts of the plan with their arguments of pytest."""
        control: list[tuple[Part, list[str]]] = (
            [("control", self._plan.control)] if self._plan.control else []
        )
        return [*control, ("experiments", self._plan.tests)]

    def _tests(self, part: Part, arguments: Sequence[str], folder: Path) -> NightTests:
        """Return the tests of a part, which are not started yet.

        Args:
            folder: the folder for their reports and logs.
        """
        return NightTests(
            part, arguments, self._plan, self._directory, self._sources.root.resolve(), folder
        )

    @property
    def folder(self) -> Path:
        """The folder of this night, with its log and its report.

        Raise HarnessError before the night has begun.
        """
        if self._log is None:
            raise HarnessError("the night has not begun, so it has no folder")
        return self._log.folder

    def _open(self) -> NightLog:
        """Return the log of a killed night that can go on, or the begun log of a new night.

        A killed night that cannot go on is noted in the record.
        """
        # sources without a commit can only be trusted to be equal within one Job of a cluster
        job = "" if self._sources.commit else os.environ.get(NIGHT_JOB, "")
        plan = hashlib.sha256(msgspec.json.encode([self._plan, job])).hexdigest()[:16]
        logs = [
            NightLog(folder)
            for folder in sorted(self._root.glob("*/"))
            if not folder.name.startswith(".")
        ]
        killed = [log for log in logs if log.state.is_open_night(self._plan.name)]
        last, commit = (killed[-1] if killed else None), self._sources.commit
        if last is not None:
            if (
                last.state.is_resumable(plan, commit, time.time_ns())
                and not self._sources.is_changed
            ):
                units = last.state.units
                self._seconds_before_kill = sum(unit.seconds for unit in units)
                tests = plural(len(units), "test")
                self._tell(f"resuming {last.folder.name}, which was killed: {tests} complete")
                return last
            reason = (
                "its plan or commit differs, files were changed, or it began more than a day ago"
            )
            self._lines.append(
                f"the night in {last.folder.name} was killed and is not resumed: {reason}"
            )
        night = new_id()
        log = NightLog(self._root / f"{datetime.now(UTC):%Y-%m-%d}-{self._plan.name}-{night[:13]}")
        log.add(NightBegan(night, self._plan.name, plan, commit, time.time_ns()))
        return log

    # -- its parts ---------------------------------------------------------------------------------

    def _run_parts(self, log: NightLog, place: NightPlace) -> None:
        """Check the place, and run the parts of the night in their order.

        Raise HarnessError if the place is not fit or the control tests fail.
        """
        self._lines += place.require_fit()
        self._run_control(log)
        self._run_tests(log, "experiments", self._plan.tests)
        self._run_comparison(log)

    def _run_control(self, log: NightLog) -> None:
        """Run the control tests, which have no fault.

        Raise HarnessError if one fails, as other results would mean nothing.
        """
        if not self._plan.control:
            self._missing.append(NO_CONTROL)
            return
        for unit in self._run_tests(log, "control", self._plan.control):
            bad = sum(
                count for verdict, count in unit.verdicts.items() if verdict is not Verdict.PASSED
            )
            if bad or unit.troubles or unit.why_not:
                reason = (
                    unit.why_not
                    or (unit.troubles or [f"{bad} of {unit.runs} runs did not pass"])[0]
                )
                raise HarnessError(f"the control arm failed without a fault: {unit.test}: {reason}")

    def _run_tests(self, log: NightLog, part: Part, arguments: Sequence[str]) -> list[NightUnit]:
        """Run each test of a part with all of its repeats, and return the results of the part.

        Tests that were complete before a kill are skipped. Tests beyond the budget are noted as
        missing.
        """
        with closing(self._tests(part, arguments, log.folder)) as tests:
            names = tests.names()
            self._tell(
                f"{part}: {plural(len(names), 'test')}, {plural(self._plan.repeats, 'run')} each"
            )
            for number, test in enumerate(names, 1):
                if log.state.has_done(part, test):
                    continue
                if self._is_spent():
                    self._missing.append(
                        f"{part}: {test}: the budget of {self._plan.budget} was spent"
                    )
                    continue
                unit, records = tests.run(test)
                self._history.keep(records)
                log.add(UnitDone(unit))
                self._tell(f"{part} {number} of {len(names)}: {unit_text(unit)}")
        return [unit for unit in log.state.units if unit.part == part]

    def _run_comparison(self, log: NightLog) -> None:
        """Compare with an earlier version, test by test, and add the findings to the log.

        Tests that were complete before a kill are skipped. Tests beyond the budget are noted as
        missing.
        """
        comparing = self._plan.compare
        if comparing is None or not (against := self._earlier_version(comparing.against)):
            return
        self._against = against
        substrate = (f"--chaos-substrate={self._plan.substrate}",) if self._plan.substrate else ()
        for test in comparing.tests:
            if log.state.has_done("comparison", test):
                continue
            if self._is_spent():
                self._missing.append(
                    f"comparison: {test}: the budget of {self._plan.budget} was spent"
                )
                continue
            began = time.monotonic()
            request = VersionRequest(
                against,
                ".",
                (test, *substrate),
                directory=self._directory,
                numbers=require_numbers(comparing.numbers, "compare.numbers"),
                tolerance=comparing.tolerance,
                budget_s=seconds_of(comparing.budget, "compare.budget"),
                prepare=comparing.prepare,
            )
            try:
                comparison = compare_versions(request, _Progress(self._tell)).comparison
                why_not = _why_incomparable(comparison)
            except BadInput as error:
                comparison, why_not = RunComparison(findings=[]), str(error)
            seconds = round(time.monotonic() - began, 2)
            unit = NightUnit(part="comparison", test=test, seconds=seconds, why_not=why_not)
            log.add(UnitDone(unit, comparison.findings))
            self._tell(f"comparison of {test} with {against[:10]} is over")

    def _earlier_version(self, against: str) -> str:
        """Return the version to compare with; "" if there is no good night, or nothing is new.

        The record gets a line with the reason for "".

        Args:
            against: a version, or :data:`LAST_GOOD` for the commit of the last good night.
        """
        if against != LAST_GOOD:
            return against
        commit = self._history.read().last_good(self._plan.name)
        if not commit:
            self._missing.append(NO_GOOD_NIGHT)
        elif commit == self._sources.commit and not self._sources.is_changed:
            self._lines.append(f"nothing is new since the last good night: {commit[:10]}")
            return ""
        return commit

    def _is_spent(self) -> bool:
        """Return True if the budget is spent, by this night and its part before a kill."""
        budget_s = self._plan.budget_s
        return (
            budget_s is not None
            and self._seconds_before_kill + time.monotonic() - self._began > budget_s
        )

    # -- when it is over ---------------------------------------------------------------------------

    def _heal(self, place: NightPlace, before: Traces) -> None:
        """Put back left-over resources, and note traces that were not there before.

        Traces of this process may disappear for some seconds before they are noted.

        Args:
            before: the traces of this process, and those of any run, before the night.
        """
        self._lines += place.put_back()
        deadline = time.monotonic() + _LEAVE_S
        reap()
        try:
            # an undo guard may still be at work
            while place.own_traces() - before[0] and time.monotonic() < deadline:
                time.sleep(0.1)
                reap()
            own_left, shared_new = (
                sorted(place.own_traces() - before[0]),
                sorted(place.shared_traces() - before[1]),
            )
        except ChaoskitError as error:
            self._missing.append(f"heal: left-over resources cannot be listed: {error}")
            return
        self._lines += [f"{LEFT_BEHIND}: {trace}" for trace in own_left]
        self._lines += [
            f"new since the night began, perhaps from another run: {trace}" for trace in shared_new
        ]

    def _judge(self) -> None:
        """Judge the SLAs of the plan on the history, and keep their lines for the record.

        An SLA that selects no run is noted as missing.
        """
        contents, today = self._history.read(), datetime.now(UTC).date()
        for sla in self._planned_slas:
            try:
                self._slas += msgspec.to_builtins(
                    judge(sla, contents.runs, contents.plans, today=today)
                )
            except BadInput as error:
                self._missing.append(f"SLA {sla.name}: {error.remedy}")

    def _record(self, log: NightLog, environment: dict[str, str]) -> NightRecord:
        """Return the record of the night, with its findings, missing parts and exit code."""
        began = log.began
        contents, today = self._history.read(), datetime.now(UTC).date()
        findings = with_accepted_findings(
            withdraw_chance_regressions(log.state.findings), contents.accepted, today
        )
        lost = ["history: records could not be added"] if self._history.has_lost else []
        not_run = [
            f"{unit.part}: {unit.test}: {unit.why_not}" for unit in log.state.units if unit.why_not
        ]
        record = NightRecord(
            night=began.night,
            name=self._plan.name,
            commit=began.commit,
            is_changed=self._sources.is_changed,
            started_unix_ns=began.started_unix_ns,
            seconds=round(self._seconds_before_kill + time.monotonic() - self._began, 2),
            exit_code=0,
            reason=log.state.stopped,
            units=log.state.units,
            against=self._against,
            findings=findings,
            slas=self._slas,
            missing=[
                *self._missing,
                *not_run,
                *(f"history: {line}" for line in self._history.troubles),
                *lost,
            ],
            environment=environment,
            lines=self._lines,
        )
        earlier = [night for night in contents.nights if night.name == record.name]
        record = msgspec.structs.replace(
            record, missing=[*record.missing, *removed_tests(record, earlier)]
        )
        return msgspec.structs.replace(record, exit_code=exit_code_of(record))

    def _publish(self, record: NightRecord, folder: Path) -> None:
        """Write the reports into the folder of the night, and call the webhook.

        Failures are only reported as progress.
        """
        contents = self._history.read()
        if record.night not in {
            night.night for night in contents.nights
        }:  # no history exists, or it was not written
            contents.nights.append(record)
        report = build_report(contents, self._plan.history or "STORE", record.night)
        documents = {"html": report_html(report), "md": report_markdown(report)}
        documents["json"] = msgspec.json.encode(report_json(report)).decode()
        for suffix, text in documents.items():
            try:
                (folder / f"report.{suffix}").write_text(text, encoding="utf-8")
            except OSError as error:
                self._tell(f"report.{suffix} was not written: {error.strerror}")
        if self._plan.webhook is not None and (
            trouble := post(self._plan.webhook, record, report.before)
        ):
            self._tell(trouble)


def _why_incomparable(comparison: RunComparison) -> str:
    """Return why a comparison of a test is incomplete; "" if it is complete."""
    reasons = [f"{title} has no run now" for title in comparison.absent]
    if comparison.is_nothing:
        reasons += [
            "nothing could be compared",
            *sorted({finding.reason for finding in comparison.findings}),
        ]
    return ": ".join(reasons)


class _Progress(VersionProgress):
    """Progress of a comparison, reported as lines."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def began(self, tests: int, session: int) -> None:
        self._tell(
            f"comparison: {plural(tests, 'test')} of both versions{', again' if session > 1 else ''}"
        )


def _versions() -> dict[str, str]:
    """Return the versions of the software, for comparisons of nights."""
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "chaoskit": version("chaoskit"),
    }
