"""A night, from its first check to its record.

    lock ──> guard ──> doctor ──> control ──> experiments ──> comparison ──> heal ──> SLAs ──> record
             (may not begin)      (fit?)      each test with all of its      nothing
                                              repeats, once; a kill          stays
                                              costs the test it struck

Whatever ends it early, it heals, keeps what it has found, and says that it did not run to its end.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from chaoskit.errors import BadInput, ChaoskitError, HarnessError
from chaoskit.history.compare import beyond_chance
from chaoskit.history.place import sources_at
from chaoskit.history.record import HistoryRecord, NightRecord, NightUnit, RunRecord, new_id
from chaoskit.history.store import Contents, History
from chaoskit.nightly.faces import report_html, report_json, report_markdown
from chaoskit.nightly.log import Began, Ended, NightLog, UnitDone
from chaoskit.nightly.outcome import LEFT_BEHIND, NO_CONTROL, NO_GOOD_NIGHT, exit_code_of, unit_text
from chaoskit.nightly.plan import NightPlan
from chaoskit.nightly.repeats import NightTests, Part
from chaoskit.nightly.report import build_report
from chaoskit.nightly.traces import own_traces, shared_traces
from chaoskit.nightly.watch import NightAborted, ask, watched
from chaoskit.nightly.webhook import post
from chaoskit.report.summary import plural
from chaoskit.sla.judge import judge
from chaoskit.sla.promises import load as load_slas
from chaoskit.substrate.undo import any_left, describe, sweep
from chaoskit.versions.budget import seconds_of
from chaoskit.versions.run import VersionProgress, VersionRequest, compare_versions
from chaoskit.versions.trees import LAST_GOOD
from chaoskit.vocabulary import Verdict

_DOCTOR_S = 120.0
Tell = Callable[[str], None]


class Night:
    """One night of a plan.

    Args:
        plan: what is to be done. directory: of the user, from which tests are named. beside: the plan's, for its SLAs.
        tell: takes lines of progress.

    Raises:
        BadInput: if its history cannot be used.
    """

    def __init__(self, plan: NightPlan, *, directory: Path, beside: Path, tell: Tell) -> None:
        self._plan, self._directory, self._beside, self._tell = plan, directory, beside, tell
        self._root = directory / plan.directory
        self._sources = sources_at(directory)
        self._history = History(_place(plan.history, directory)) if plan.history else None
        self._began = time.monotonic()
        self._missing: list[str] = []
        self._lines: list[str] = []
        self._slas: list[dict[str, object]] = []
        self._against = ""
        self._log: NightLog | None = None

    def run(self) -> NightRecord:
        """Carry it out; one at a time in this directory.

        Raises:
            BadInput: if another night runs, or the guard does not let it begin: nothing was started then.
        """
        with self._alone():
            self._require_guard()
            log, before = self._open(), (own_traces(), shared_traces())
            self._log = log
            reason = ""
            try:
                with watched(self._plan.guard.abort_if, seconds_of(self._plan.guard.every, "guard.every")):
                    self._parts(log)
            except (NightAborted, ChaoskitError) as error:
                reason = str(error)
            except (KeyboardInterrupt, SystemExit):
                self._heal(before)
                raise  # the log stays open: the next start goes on
            self._heal(before)
            self._judge()
            record = self._record(log, reason)
            self._keep([record])
            log.add(Ended(record))
            self._publish(record)
            if self._history is not None:
                self._history.close()
            return record

    def preview(self) -> dict[str, list[str]]:
        """Which tests would run, part by part; none is run. Raises BadInput if they cannot be collected."""
        found: dict[str, list[str]] = {}
        with TemporaryDirectory() as scratch:
            for part, arguments in self._named_parts():
                runner = NightTests(
                    part, arguments, self._plan, self._directory, self._root_of_sources(), Path(scratch)
                )
                try:
                    with closing(runner):
                        found[part] = runner.tests()
                except HarnessError as error:
                    raise BadInput(part, " ".join(arguments), str(error)) from None
        return found

    def _named_parts(self) -> list[tuple[Part, list[str]]]:
        control: list[tuple[Part, list[str]]] = [("control", self._plan.control)] if self._plan.control else []
        return [*control, ("experiments", self._plan.tests)]

    def _root_of_sources(self) -> Path:
        return self._sources.root.resolve()

    @property
    def folder(self) -> Path:
        """What this night leaves."""
        assert self._log is not None
        return self._log.folder

    # -- before it begins ---------------------------------------------------------------------------------------------

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock of the directory, which the kernel releases however this process ends."""
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise BadInput("directory", str(self._root), f"name one that can be written ({error.strerror})") from None
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                other = os.pread(descriptor, 64, 0).decode(errors="replace").strip()
                raise BadInput("directory", str(self._root), f"wait: another night runs there ({other})") from None
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"pid {os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(descriptor)

    def _require_guard(self) -> None:
        guard = self._plan.guard
        now = datetime.now(UTC)
        if guard.window is not None and not guard.window.is_open(now):
            raise BadInput("guard.window", f"{now:%a %H:%M} UTC", f"begin it from {guard.window}")
        if guard.require:
            status, line = ask(guard.require)
            if status:
                raise BadInput("guard.require", " ".join(guard.require), f"wait until it ends with 0: {line or status}")

    def _open(self) -> NightLog:
        """The log of a night that was killed while it did the same, or of a new one."""
        plan = hashlib.sha256(msgspec.json.encode(self._plan)).hexdigest()[:16]
        for folder in sorted(self._root.glob(f"*-{self._plan.name}-*"), reverse=True)[:1]:
            log = NightLog(folder)
            if log.so_far.is_resumable(plan, self._sources.commit):
                self._tell(f"going on with {folder.name}, which was killed: {len(log.so_far.units)} tests are over")
                return log
        night = new_id()
        log = NightLog(self._root / f"{datetime.now(UTC):%Y-%m-%d}-{self._plan.name}-{night[:13]}")
        commit, started = self._sources.commit, time.time_ns()
        log.add(Began(night, self._plan.name, plan, commit, started))
        return log

    # -- its parts ----------------------------------------------------------------------------------------------------

    def _parts(self, log: NightLog) -> None:
        self._require_fit()
        self._control(log)
        self._run_tests(log, "experiments", self._plan.tests)
        self._comparison(log)

    def _require_fit(self) -> None:
        """Ask the doctor, as a user would."""
        try:
            done = subprocess.run(
                [sys.executable, "-m", "chaoskit", "doctor", "--json"],
                capture_output=True,
                text=True,
                timeout=_DOCTOR_S,
                check=False,
            )
            found = json.loads(done.stdout)
        except (OSError, subprocess.TimeoutExpired, ValueError) as error:
            raise HarnessError(f"the doctor does not answer: {error}") from None
        missing = [f"{one['name']}: {one['found']}" for one in found["findings"] if one["state"] == "missing"]
        if not found["ok"]:
            raise HarnessError(f"this machine is not fit: {'; '.join(missing)}")
        self._lines += [f"not on this machine: {line}" for line in missing]

    def _control(self, log: NightLog) -> None:
        """Tests without a fault, first: where one fails, the others would show nothing of a fault."""
        if not self._plan.control:
            self._missing.append(NO_CONTROL)
            return
        for unit in self._run_tests(log, "control", self._plan.control):
            bad = sum(count for verdict, count in unit.verdicts.items() if verdict is not Verdict.PASSED)
            if bad or unit.troubles or unit.why_not:
                told = unit.why_not or (unit.troubles or [f"{bad} of {unit.runs} runs did not pass"])[0]
                raise HarnessError(f"the control arm failed, with no fault in it: {unit.test}: {told}")

    def _run_tests(self, log: NightLog, part: Part, arguments: Sequence[str]) -> list[NightUnit]:
        """Run each test with all of its repeats, but for those that are over since before a kill."""
        runner = NightTests(part, arguments, self._plan, self._directory, self._root_of_sources(), log.folder)
        with closing(runner):
            tests = runner.tests()
            self._tell(f"{part}: {plural(len(tests), 'test')}, {plural(self._plan.repeats, 'run')} each")
            for number, test in enumerate(tests, 1):
                if log.so_far.has_done(part, test):
                    continue
                if self._is_spent():
                    self._missing.append(f"{part}: {test}: the budget of {self._plan.budget} was spent")
                    continue
                unit, records = runner.run(test)
                self._keep(records)
                log.add(UnitDone(unit))
                self._tell(f"{part} {number} of {len(tests)}: {unit_text(unit)}")
        return [unit for unit in log.so_far.units if unit.part == part]

    def _comparison(self, log: NightLog) -> None:
        """Compare with an earlier version, a test at a time: what is over stays over after a kill."""
        asked = self._plan.compare
        if asked is None:
            return
        if not (against := self._version_before()):
            self._missing.append(NO_GOOD_NIGHT)
            return
        self._against = against
        for test in asked.tests:
            if log.so_far.has_done("comparison", test):
                continue
            if self._is_spent():
                self._missing.append(f"comparison: {test}: the budget of {self._plan.budget} was spent")
                continue
            began = time.monotonic()
            request = VersionRequest(
                against,
                ".",
                (test,),
                directory=self._directory,
                tolerance=asked.tolerance,
                budget_s=seconds_of(asked.budget, "compare.budget"),
                **({"numbers": tuple(asked.numbers)} if asked.numbers else {}),
            )
            try:
                found = compare_versions(request, _Progress(self._tell))
            except BadInput as error:
                self._missing.append(f"comparison: {test}: {error}")
                continue
            self._missing += [f"comparison: {title}: it has no run now" for title in found.comparison.absent]
            if found.comparison.is_nothing:
                reasons = sorted({one.reason for one in found.comparison.findings})
                self._missing.append(f"comparison: {test}: nothing could be compared: {'; '.join(reasons)}")
            unit = NightUnit(part="comparison", test=test, seconds=round(time.monotonic() - began, 2))
            log.add(UnitDone(unit, found.comparison.findings))
            self._tell(f"comparison of {test} with {against[:10]} is over")

    def _version_before(self) -> str:
        assert self._plan.compare is not None
        if self._plan.compare.against != LAST_GOOD:
            return self._plan.compare.against
        commit = self._contents().last_good(self._plan.name)
        if commit == self._sources.commit:
            self._lines.append(f"nothing is new since the last good night: {commit[:10]}")
        return commit

    def _is_spent(self) -> bool:
        budget_s = self._plan.budget_s
        return budget_s is not None and time.monotonic() - self._began > budget_s

    # -- when it is over ----------------------------------------------------------------------------------------------

    def _heal(self, before: tuple[set[str], set[str]]) -> None:
        """Put back what is left, and look whether anything is there that was not before."""
        repairs = sweep()
        self._lines += [describe(one) for one in repairs]
        if any_left(repairs):
            self._lines.append(f"{LEFT_BEHIND}: something could not be put back, see above")
        self._lines += [f"{LEFT_BEHIND}: {trace}" for trace in sorted(own_traces() - before[0])]
        new = sorted(shared_traces() - before[1])
        self._lines += [f"new since the night began, perhaps of another run: {trace}" for trace in new]

    def _judge(self) -> None:
        if not self._plan.sla:
            return
        contents = self._contents()
        for sla in load_slas(self._beside / self._plan.sla):
            try:
                judged = judge(sla, contents.runs, contents.plans, today=datetime.now(UTC).date())
            except BadInput as error:
                self._missing.append(f"SLA {sla.name}: {error.remedy}")
                continue
            self._slas += msgspec.to_builtins(judged)

    def _contents(self) -> Contents:
        if self._history is None:
            return Contents()
        try:
            return self._history.read() if self._history.is_there() else Contents()
        except BadInput as error:
            self._lines.append(str(error))
            return Contents()

    def _keep(self, records: Sequence[HistoryRecord]) -> None:
        """Add to the history. What cannot be added is said, and kept in the folder of the night."""
        if self._history is None or not records:
            return
        session = next((one.session for one in records if isinstance(one, RunRecord)), "") or new_id()
        try:
            self._history.add(session, records)
        except ChaoskitError as error:
            self._lines.append(str(error))

    def _publish(self, record: NightRecord) -> None:
        """Write the report into the folder of the night, and tell the chat. What fails here changes nothing."""
        contents = self._contents()
        if record.night not in {night.night for night in contents.nights}:  # there is no history, or it was not written
            contents.nights.append(record)
        report = build_report(contents, self._plan.history or "STORE", record.night)
        faces = {"html": report_html(report), "md": report_markdown(report)}
        faces["json"] = msgspec.json.encode(report_json(report)).decode()
        for suffix, text in faces.items():
            try:
                (self.folder / f"report.{suffix}").write_text(text, encoding="utf-8")
            except OSError as error:
                self._tell(f"report.{suffix} was not written: {error.strerror}")
        if self._plan.webhook is not None and (trouble := post(self._plan.webhook, record, report.before)):
            self._tell(trouble)

    def _record(self, log: NightLog, reason: str) -> NightRecord:
        so_far = log.so_far
        assert so_far.began is not None
        record = NightRecord(
            night=so_far.began.night,
            name=self._plan.name,
            commit=so_far.began.commit,
            started_unix_ns=so_far.began.started_unix_ns,
            seconds=round(time.monotonic() - self._began, 2),
            exit_code=0,
            reason=reason,
            units=so_far.units,
            against=self._against,
            findings=beyond_chance(so_far.findings),
            slas=self._slas,
            missing=[
                *self._missing,
                *(f"{unit.part}: {unit.test}: {unit.why_not}" for unit in so_far.units if unit.why_not),
            ],
            environment=_environment(),
            lines=self._lines,
        )
        return msgspec.structs.replace(record, exit_code=exit_code_of(record))


class _Progress(VersionProgress):
    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def began(self, tests: int, session: int) -> None:
        self._tell(f"comparison: {tests} tests of both versions{', again' if session > 1 else ''}")


def _place(history: str, directory: Path) -> str:
    return history if "://" in history else str(directory / history)


def _environment() -> dict[str, str]:
    import platform
    from importlib.metadata import version

    return {
        "machine": platform.node(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "chaoskit": version("chaoskit"),
    }
