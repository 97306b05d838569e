"""Records of a session's runs: they are added to a history, saved to a file, and compared.

-> history/store.py: the files of a history. history/compare.py: the comparison.
-> pytest_plugin.py takes the records of each test, and exits by the comparison.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from chaoskit.errors import BadInput, HarnessError
from chaoskit.history.compare import TOLERANCE, RunComparison, compare, with_accepted
from chaoskit.history.place import Sources, covariates_of, machine_of
from chaoskit.history.record import HistoryRecord, RunRecord, SeriesRecord, metrics_of, new_id
from chaoskit.history.series import plan_of, series_of, series_plan
from chaoskit.history.store import RunContents, RunHistory, decode, encode, read_file
from chaoskit.report.statistics import without_repeat
from chaoskit.report.store import write_whole
from chaoskit.runlog.outcome import Outcome


def records_of(
    outcome: Outcome, sources: Sources, title: str = "", definition: int = 1
) -> tuple[RunRecord, SeriesRecord]:
    """Return the records of a run whose directory exists: the run, and the plan of its series.

    The run has no session yet.

    Args:
        title: the test that made the run. The default is the test or the name in the outcome.
        definition: see :class:`chaoskit.history.record.RunRecord`.

    Raises:
        BadInput: if the directory contains no plan.
    """
    plan = plan_of(Path(outcome.directory))
    shared = series_plan(plan, sources.root)
    series = series_of(outcome, plan, sources.root)
    run = RunRecord(
        run_id=outcome.run_id or new_id(),
        session="",
        started_unix_ns=_unix_ns(outcome.started),
        series=series,
        definition=definition,
        title=_title(outcome, title),
        machine=machine_of(outcome),
        commit=sources.commit,
        seed=outcome.seed,
        verdict=outcome.verdict,
        claimed=outcome.claimed,
        test_failed=outcome.test is not None and outcome.test.failed,
        came_back=outcome.came_back,
        stack=outcome.stack,
        faults=[str(fault.get("kind", "")) for fault in shared["faults"]],
        metrics=metrics_of(outcome),
        covariates=covariates_of(outcome, sources),
        report=outcome.directory,
    )
    return run, SeriesRecord(series=series, plan=shared)


def _title(outcome: Outcome, test: str) -> str:
    """Return the name of the test, with the number of the run if the test has several."""
    name = test or (outcome.test.nodeid if outcome.test is not None else outcome.name)
    _, mark, number = outcome.name.rpartition(" #")
    is_numbered = bool(mark) and number.isdigit() and name != outcome.name
    return without_repeat(name) + (f" #{number}" if is_numbered else "")


def _unix_ns(started: str) -> int:
    """Return an ISO time in nanoseconds since the epoch; 0 if it is missing."""
    try:
        return int(datetime.fromisoformat(started).timestamp() * 1e9)
    except ValueError:  # the harness has not recorded it
        return 0


class SessionRecords:
    """The records of a session. Failures to write them are collected and never end a test.

    Args:
        store: the history to which records are added as they come; "" for none.
        save: a file for all records; None for none.
        against: a file or a history to compare with; "" for none. A missing file is made from this
            session.
        tolerance: see :func:`chaoskit.history.compare.compare`.

    Attributes:
        is_first: True if ``against`` names no baseline yet; False without ``against``.
        is_compared_next: True if this session was made the baseline of later ones; False before
            :meth:`finish`.
        troubles: a line for each operation that failed and for each record that cannot be read.
        has_failed: True if ``store``, ``save`` or a new baseline was not written, even for lack of
            records or because the session did not end well. False before :meth:`finish`.

    Raises:
        BadInput: if an argument cannot be used.
    """

    def __init__(
        self, store: str, save: Path | None, against: str, tolerance: float = TOLERANCE
    ) -> None:
        self._session = new_id()
        self._tolerance = tolerance
        self._save = save
        self._history = RunHistory(store) if store else None
        self._runs: dict[str, RunRecord] = {}
        self._plans: dict[str, SeriesRecord] = {}
        self._unwritten: list[HistoryRecord] = []
        self.troubles: list[str] = []
        self.has_failed = False
        self.is_compared_next = False
        is_there = self._history is not None and self._history.is_there()
        self.is_first = bool(against) and not (is_there if against == store else _exists(against))
        self._baseline = (
            Path(against) if self.is_first and against != store and "://" not in against else None
        )
        self._is_against_itself = bool(store) and against == store
        self._before = read(against) if against and not self.is_first else None
        self.troubles += self._before.set_aside if self._before is not None else []

    def take(self, lines: Iterable[str]) -> None:
        """Take records of a test, which :func:`lines_of` has encoded, and add them to the history.

        Records that were taken before are ignored, and so are all but runs and plans of series. An
        error is added to ``troubles``.
        """
        for line in lines:
            try:
                record = decode(line.encode())
            except msgspec.MsgspecError as error:
                self.troubles.append(f"a record was lost: {error}")
                continue
            if isinstance(record, RunRecord):
                if record.run_id not in self._runs:
                    self._runs[record.run_id] = msgspec.structs.replace(
                        record, session=self._session
                    )
                    self._unwritten.append(self._runs[record.run_id])
            elif isinstance(record, SeriesRecord) and record.series not in self._plans:
                self._plans[record.series] = record
                self._unwritten.append(record)
        self._write()

    def _write(self) -> None:
        """Add the unwritten records to the history.

        Records that could not be added stay for the next call. The error is added to ``troubles``.
        """
        if self._history is None or not self._unwritten:
            return
        try:
            self._history.add(self._session, self._unwritten)
            self._unwritten = []
        except (HarnessError, BadInput) as error:
            if (text := str(error)) not in self.troubles:
                self.troubles.append(text)

    def everything(self) -> RunContents:
        """Return the records of the history, if there is one, and of this session.

        Nights are left out.

        Parts of the history that cannot be read are added to ``troubles``.
        """
        contents = RunContents()
        if self._history is not None:
            try:
                contents = self._history.read()
                self.troubles += [line for line in contents.set_aside if line not in self.troubles]
            except BadInput as error:
                self.troubles.append(str(error))
        return RunContents(
            [*contents.runs, *self._runs.values()], contents.plans | self._plans, contents.accepted
        ).in_order()

    def finish(self, *, is_well: bool) -> RunComparison | None:
        """Save the records, and return the comparison; None if there was no baseline to begin with.

        Accepted regressions are marked in the comparison. The history is closed. ``has_failed``,
        ``is_compared_next`` and ``troubles`` have the result of saving.

        Args:
            is_well: True if the session ended well. No baseline file is made of one that did not;
                its records in ``store`` stay.
        """
        self._write()
        self.has_failed = self._history is not None and bool(self._unwritten)
        if self._save is not None:
            self._save_to(self._save, "" if self._runs else "no run was recorded")
        if self._baseline is not None:
            not_well = "" if is_well else "the session did not end well"
            why_not = "no run was recorded" if not self._runs else not_well
            self.is_compared_next = self._save_to(self._baseline, why_not)
        elif self.is_first and self._is_against_itself:
            self.is_compared_next = bool(self._runs) and not self._unwritten
        if self._history is not None:
            self._history.close()
        if self._before is None:
            return None
        comparison = compare(self._before.runs, list(self._runs.values()), self._tolerance)
        return with_accepted(comparison, self._before.accepted, datetime.now(UTC).date())

    def _save_to(self, path: Path, why_not: str) -> bool:
        """Write all records to a file, and return True if it was written.

        Otherwise a line is added to ``troubles``, and ``has_failed`` is set.

        Args:
            why_not: why the file shall not be written; "" if it shall.
        """
        try:
            if not why_not:
                write_whole(path, encode([*self._plans.values(), *self._runs.values()]))
        except OSError as error:
            why_not = f"it cannot be written ({error.strerror})"
        if why_not:
            self.troubles.append(f"{path} was not made: {why_not}")
            self.has_failed = True
        return not why_not

    @property
    def runs(self) -> int:
        """The number of runs that were taken."""
        return len(self._runs)


def _exists(file_or_store: str) -> bool:
    """Return True if a file or a history exists.

    Raise BadInput if the store cannot be read.
    """
    if "://" not in file_or_store:
        return Path(file_or_store).exists()
    history = RunHistory(file_or_store)
    try:
        return history.is_there()
    finally:
        history.close()


def read(file_or_store: str) -> RunContents:
    """Return the records of a file or a history.

    Raise BadInput if a file has no run, there is no history, or either cannot be read.
    """
    if "://" not in file_or_store and Path(file_or_store).is_file():
        return read_file(Path(file_or_store))
    history = RunHistory(file_or_store)
    try:
        return history.read()
    finally:
        history.close()


def lines_of(
    outcomes: Iterable[Outcome], sources: Sources, title: str, definition: int = 1
) -> list[str]:
    """Return the records of runs as lines of JSON, for transport from xdist workers.

    Runs without a plan are skipped. The arguments are those of :func:`records_of`.
    """
    lines: list[str] = []
    for outcome in outcomes:
        try:
            records = records_of(outcome, sources, title, definition)
        except BadInput:
            continue
        lines += encode(records).decode().strip("\n").split("\n")
    return lines


def plan_of_run(contents: RunContents, run_id: str, root: Path) -> bytes:
    """Return the plan of a run as JSON: the plan of its series, with the seed of the run.

    Args:
        run_id: the UUID of the run or its beginning.
        root: the repository, to which the working directory is relative.

    Raises:
        BadInput: if no run or several runs match, or the plan was not kept.
    """
    matching = [run for run in contents.runs if run.run_id == run_id]
    matching = matching or [run for run in contents.runs if run.run_id.startswith(run_id)]
    if len(matching) != 1:
        remedy = (
            "give more of its UUID: several runs match"
            if matching
            else "chaoskit history show STORE lists the runs"
        )
        raise BadInput("run", run_id, remedy)
    (run,) = matching
    shared = contents.plans.get(run.series)
    if shared is None:
        raise BadInput("run", run_id, "replay another run: the plan of its series was not kept")
    settings = shared.plan.get("settings", {}) | {"seed": run.seed}
    if "working_directory" in settings:
        settings["working_directory"] = str(root / settings["working_directory"])
    plan = shared.plan | {"name": run.title, "settings": settings}
    return msgspec.json.encode(plan)
