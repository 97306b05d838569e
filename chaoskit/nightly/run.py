"""A night, from its first check to its record.

    lock ──> guard ──> doctor ──> control ──> experiments ──> comparison ──> heal ──> SLAs ──> record
             (may not begin)      (fit?)      each test with all of its      nothing
                                              repeats, once; a kill          stays
                                              costs the test it struck

Whatever ends it early, it heals. What ends it by an error, or by its condition to abort, is in its record; what
interrupts it leaves its log open, so that the next start goes on.
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
from chaoskit.history.compare import RunComparison, beyond_chance, with_accepted_findings
from chaoskit.history.place import sources_at
from chaoskit.history.record import NightRecord, NightUnit, new_id
from chaoskit.nightly.begin import alone, require_guard
from chaoskit.nightly.faces import report_html, report_json, report_markdown
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
from chaoskit.nightly.repeats import NightTests, Part
from chaoskit.nightly.report import build_report, gone
from chaoskit.nightly.watch import AbortCondition, NightAborted, command_holds, watched
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
    """One night of a plan.

    Args:
        plan: what is to be done. directory: of the user, from which tests are named. beside: the plan's, for its SLAs.
        tell: takes lines of progress.

    Raises:
        BadInput: if its history or its SLAs cannot be used.
    """

    def __init__(self, plan: NightPlan, *, directory: Path, beside: Path, tell: Tell) -> None:
        self._plan, self._directory, self._tell = plan, directory, tell
        self._root = directory / plan.directory
        self._sources = sources_at(directory)
        self._promised = load_slas(beside / plan.sla) if plan.sla else []
        self._history = NightHistory(plan.history, directory)
        self._began = time.monotonic()
        self._before_s = 0.0  # of tests that were over before a kill
        self._missing: list[str] = []
        self._lines: list[str] = []
        self._slas: list[dict[str, object]] = []
        self._against = ""
        self._log: NightLog | None = None

    def run(self) -> NightRecord:
        """Carry it out; one at a time in this directory, and in a namespace of a cluster.

        Raises:
            BadInput: if another night runs, or the guard or the cluster does not let it begin: nothing was started.
        """
        guard = self._plan.guard
        with alone(self._root), closing(self._history):
            require_guard(guard)
            with (
                place_of(self._plan.substrate, self._tell) as place,
                place.held(self._tell) as conditions,
            ):
                if guard.abort_if:
                    every_s = seconds_of(guard.every, "guard.every")
                    conditions.append(
                        AbortCondition(lambda: command_holds(guard.abort_if), every_s)
                    )
                return self._run_in(place, conditions)

    def _run_in(self, place: NightPlace, conditions: list[AbortCondition]) -> NightRecord:
        """Carry it out, as no other night may begin now."""
        adopt_orphans()  # so that what outlives its pytest is seen
        log = self._log = self._open()
        before, environment = (place.own_traces(), place.shared_traces()), place.environment()
        try:
            if not log.so_far.stopped:
                with watched(conditions):
                    self._parts(log, place)
        except (NightAborted, ChaoskitError) as error:
            log.add(NightStopped(str(error)))
        finally:
            self._heal(place, before)
        self._judge()
        record = self._record(log, environment | _versions())
        self._history.keep([record])
        log.add(NightEnded(record))
        self._publish(record)
        for folder in (
            folders_beyond(self._root, record.name, self._plan.keep) if self._plan.keep else ()
        ):
            shutil.rmtree(folder, ignore_errors=True)
        return record

    def preview(self) -> dict[str, list[str]]:
        """Which tests would run, part by part; none is run. Raises BadInput if they cannot be collected."""
        found: dict[str, list[str]] = {}
        with TemporaryDirectory() as scratch:
            for part, arguments in self._named_parts():
                try:
                    with closing(self._tests(part, arguments, Path(scratch))) as tests:
                        found[part] = tests.names()
                except HarnessError as error:
                    raise BadInput(part, " ".join(arguments), str(error)) from None
        return found

    def _named_parts(self) -> list[tuple[Part, list[str]]]:
        control: list[tuple[Part, list[str]]] = (
            [("control", self._plan.control)] if self._plan.control else []
        )
        return [*control, ("experiments", self._plan.tests)]

    def _tests(self, part: Part, arguments: Sequence[str], folder: Path) -> NightTests:
        return NightTests(
            part, arguments, self._plan, self._directory, self._sources.root.resolve(), folder
        )

    @property
    def folder(self) -> Path:
        """What this night leaves."""
        assert self._log is not None
        return self._log.folder

    def _open(self) -> NightLog:
        """The log of a night that was killed while it did the same, or of a new one."""
        # sources without a commit are known to be the same within one Job of a cluster only
        job = "" if self._sources.commit else os.environ.get(NIGHT_JOB, "")
        plan = hashlib.sha256(msgspec.json.encode([self._plan, job])).hexdigest()[:16]
        logs = [
            NightLog(folder)
            for folder in sorted(self._root.glob("*/"))
            if not folder.name.startswith(".")
        ]
        killed = [log for log in logs if log.so_far.is_open_night(self._plan.name)]
        last, commit = (killed[-1] if killed else None), self._sources.commit
        if last is not None:
            if (
                last.so_far.is_resumable(plan, commit, time.time_ns())
                and not self._sources.is_changed
            ):
                units = last.so_far.units
                self._before_s = sum(unit.seconds for unit in units)
                self._tell(
                    f"going on with {last.folder.name}, which was killed: {plural(len(units), 'test')} over"
                )
                return last
            told = "its plan or commit was another, files were changed, or it began more than a day ago"
            self._lines.append(f"the night in {last.folder.name} was killed, and stays so: {told}")
        night = new_id()
        log = NightLog(self._root / f"{datetime.now(UTC):%Y-%m-%d}-{self._plan.name}-{night[:13]}")
        log.add(NightBegan(night, self._plan.name, plan, commit, time.time_ns()))
        return log

    # -- its parts ----------------------------------------------------------------------------------------------------

    def _parts(self, log: NightLog, place: NightPlace) -> None:
        self._lines += place.require_fit()
        self._control(log)
        self._run_tests(log, "experiments", self._plan.tests)
        self._comparison(log)

    def _control(self, log: NightLog) -> None:
        """Tests without a fault, first: where one fails, the others would show nothing of a fault."""
        if not self._plan.control:
            self._missing.append(NO_CONTROL)
            return
        for unit in self._run_tests(log, "control", self._plan.control):
            bad = sum(
                count for verdict, count in unit.verdicts.items() if verdict is not Verdict.PASSED
            )
            if bad or unit.troubles or unit.why_not:
                told = (
                    unit.why_not
                    or (unit.troubles or [f"{bad} of {unit.runs} runs did not pass"])[0]
                )
                raise HarnessError(
                    f"the control arm failed, with no fault in it: {unit.test}: {told}"
                )

    def _run_tests(self, log: NightLog, part: Part, arguments: Sequence[str]) -> list[NightUnit]:
        """Run each test with all of its repeats, but for those that are over since before a kill."""
        with closing(self._tests(part, arguments, log.folder)) as tests:
            names = tests.names()
            self._tell(
                f"{part}: {plural(len(names), 'test')}, {plural(self._plan.repeats, 'run')} each"
            )
            for number, test in enumerate(names, 1):
                if log.so_far.has_done(part, test):
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
        return [unit for unit in log.so_far.units if unit.part == part]

    def _comparison(self, log: NightLog) -> None:
        """Compare with an earlier version, a test at a time: what is over stays over after a kill."""
        asked = self._plan.compare
        if asked is None or not (against := self._version_before()):
            return
        self._against = against
        substrate = (f"--chaos-substrate={self._plan.substrate}",) if self._plan.substrate else ()
        for test in asked.tests:
            if log.so_far.has_done("comparison", test):
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
                numbers=require_numbers(asked.numbers, "compare.numbers"),
                tolerance=asked.tolerance,
                budget_s=seconds_of(asked.budget, "compare.budget"),
                prepare=asked.prepare,
            )
            try:
                found = compare_versions(request, _Progress(self._tell)).comparison
                why_not = _why_incomparable(found)
            except BadInput as error:
                found, why_not = RunComparison(findings=[]), str(error)
            took = round(time.monotonic() - began, 2)
            unit = NightUnit(part="comparison", test=test, seconds=took, why_not=why_not)
            log.add(UnitDone(unit, found.findings))
            self._tell(f"comparison of {test} with {against[:10]} is over")

    def _version_before(self) -> str:
        """The version to compare with; "" where there is none, or it is this one."""
        assert self._plan.compare is not None
        if self._plan.compare.against != LAST_GOOD:
            return self._plan.compare.against
        commit = self._history.read().last_good(self._plan.name)
        if not commit:
            self._missing.append(NO_GOOD_NIGHT)
        elif commit == self._sources.commit and not self._sources.is_changed:
            self._lines.append(f"nothing is new since the last good night: {commit[:10]}")
            return ""
        return commit

    def _is_spent(self) -> bool:
        budget_s = self._plan.budget_s
        return budget_s is not None and self._before_s + time.monotonic() - self._began > budget_s

    # -- when it is over ----------------------------------------------------------------------------------------------

    def _heal(self, place: NightPlace, before: Traces) -> None:
        """Put back what is left, and look whether anything is there that was not before."""
        self._lines += place.put_back()
        deadline = time.monotonic() + _LEAVE_S
        reap()
        try:
            # a guard may still put something back
            while place.own_traces() - before[0] and time.monotonic() < deadline:
                time.sleep(0.1)
                reap()
            left, new = (
                sorted(place.own_traces() - before[0]),
                sorted(place.shared_traces() - before[1]),
            )
        except ChaoskitError as error:
            self._missing.append(f"heal: what is left cannot be told: {error}")
            return
        self._lines += [f"{LEFT_BEHIND}: {trace}" for trace in left]
        self._lines += [
            f"new since the night began, perhaps of another run: {trace}" for trace in new
        ]

    def _judge(self) -> None:
        contents, today = self._history.read(), datetime.now(UTC).date()
        for sla in self._promised:
            try:
                self._slas += msgspec.to_builtins(
                    judge(sla, contents.runs, contents.plans, today=today)
                )
            except BadInput as error:
                self._missing.append(f"SLA {sla.name}: {error.remedy}")

    def _record(self, log: NightLog, environment: dict[str, str]) -> NightRecord:
        began = log.so_far.began
        assert began is not None
        contents, today = self._history.read(), datetime.now(UTC).date()
        findings = with_accepted_findings(
            beyond_chance(log.so_far.findings), contents.accepted, today
        )
        lost = ["history: records could not be added"] if self._history.has_lost else []
        not_run = [
            f"{unit.part}: {unit.test}: {unit.why_not}" for unit in log.so_far.units if unit.why_not
        ]
        record = NightRecord(
            night=began.night,
            name=self._plan.name,
            commit=began.commit,
            is_changed=self._sources.is_changed,
            started_unix_ns=began.started_unix_ns,
            seconds=round(self._before_s + time.monotonic() - self._began, 2),
            exit_code=0,
            reason=log.so_far.stopped,
            units=log.so_far.units,
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
        record = msgspec.structs.replace(record, missing=[*record.missing, *gone(record, earlier)])
        return msgspec.structs.replace(record, exit_code=exit_code_of(record))

    def _publish(self, record: NightRecord) -> None:
        """Write the report into the folder of the night, and tell the chat. What fails here changes nothing."""
        contents = self._history.read()
        if record.night not in {
            night.night for night in contents.nights
        }:  # there is no history, or it was not written
            contents.nights.append(record)
        report = build_report(contents, self._plan.history or "STORE", record.night)
        faces = {"html": report_html(report), "md": report_markdown(report)}
        faces["json"] = msgspec.json.encode(report_json(report)).decode()
        for suffix, text in faces.items():
            try:
                (self.folder / f"report.{suffix}").write_text(text, encoding="utf-8")
            except OSError as error:
                self._tell(f"report.{suffix} was not written: {error.strerror}")
        if self._plan.webhook is not None and (
            trouble := post(self._plan.webhook, record, report.before)
        ):
            self._tell(trouble)


def _why_incomparable(found: RunComparison) -> str:
    """Why a comparison of a test, or a part of it, says nothing; "" if it says something of all of it."""
    told = [f"{title} has no run now" for title in found.absent]
    if found.is_nothing:
        told += ["nothing could be compared", *sorted({one.reason for one in found.findings})]
    return ": ".join(told)


class _Progress(VersionProgress):
    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def began(self, tests: int, session: int) -> None:
        self._tell(
            f"comparison: {plural(tests, 'test')} of both versions{', again' if session > 1 else ''}"
        )


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "chaoskit": version("chaoskit"),
    }
