"""The runs of one session: kept in a history as they are made, saved to a file, compared with earlier ones."""

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
    """What a history keeps of a run whose directory is here: the run, and what its series has in common.

    Args:
        title: the test that made it; that of the outcome if it is left out.

    Raises:
        BadInput: if its plan is not there.
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
    """The test, and which of its runs it is."""
    name = test or (outcome.test.nodeid if outcome.test is not None else outcome.name)
    _, mark, number = outcome.name.rpartition(" #")
    is_numbered = bool(mark) and number.isdigit() and name != outcome.name
    return without_repeat(name) + (f" #{number}" if is_numbered else "")


def _unix_ns(started: str) -> int:
    try:
        return int(datetime.fromisoformat(started).timestamp() * 1e9)
    except ValueError:  # its harness has not told
        return 0


class SessionRecords:
    """Takes the records of a session. Nothing that it cannot do ends a test.

    Args:
        store: of the history to which they are added as they come; "" for none.
        save: a file for all of them; None for none.
        against: a file or a history with which they are compared; "" for none. A file that is not there yet is made of
            this session.
        tolerance: see :func:`chaoskit.history.compare.compare`.

    Attributes:
        is_first: whether there is nothing yet to compare with. is_compared_next: whether later sessions are compared
            with this one, as its baseline was made.
        troubles: a line for each thing that could not be done. has_failed: whether anything that was asked for was not.

    Raises:
        BadInput: if one of them cannot be used.
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
        self.is_first = bool(against) and not (is_there if against == store else _is_there(against))
        self._baseline = (
            Path(against) if self.is_first and against != store and "://" not in against else None
        )
        self._is_against_itself = bool(store) and against == store
        self._before = read(against) if against and not self.is_first else None
        self.troubles += self._before.set_aside if self._before is not None else []

    def take(self, lines: Iterable[str]) -> None:
        """Add records of a test, as :func:`lines_of` gives them. What was taken before is not taken again."""
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
        """Add to the history what is not there yet: again what could not be added before."""
        if self._history is None or not self._unwritten:
            return
        try:
            self._history.add(self._session, self._unwritten)
            self._unwritten = []
        except (HarnessError, BadInput) as error:
            if (text := str(error)) not in self.troubles:
                self.troubles.append(text)

    def everything(self) -> RunContents:
        """The records of the history, with those of this session; of this session alone where there is none."""
        found = RunContents()
        if self._history is not None:
            try:
                found = self._history.read()
                self.troubles += [line for line in found.set_aside if line not in self.troubles]
            except BadInput as error:
                self.troubles.append(str(error))
        return RunContents(
            [*found.runs, *self._runs.values()], found.plans | self._plans, found.accepted
        ).in_order()

    def finish(self, *, is_well: bool) -> RunComparison | None:
        """Save what was asked for, and compare; None where nothing is to be compared with.

        Args:
            is_well: whether the session ended well: else it is no baseline.
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
        found = compare(self._before.runs, list(self._runs.values()), self._tolerance)
        return with_accepted(found, self._before.accepted, datetime.now(UTC).date())

    def _save_to(self, path: Path, why_not: str) -> bool:
        """Write all records to a file, unless there is a reason not to. Return whether it was made."""
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
        """How many runs were taken."""
        return len(self._runs)


def _is_there(place: str) -> bool:
    """Whether there is a file or a history. A folder that is none is no place for a baseline. Raises BadInput."""
    if "://" not in place:
        return Path(place).exists()
    history = RunHistory(place)
    try:
        return history.is_there()
    finally:
        history.close()


def read(place: str) -> RunContents:
    """The records in a file, or in a history. Raises BadInput if there are none."""
    if "://" not in place and Path(place).is_file():
        return read_file(Path(place))
    history = RunHistory(place)
    try:
        return history.read()
    finally:
        history.close()


def lines_of(
    outcomes: Iterable[Outcome], sources: Sources, title: str, definition: int = 1
) -> list[str]:
    """Records of runs as lines of JSON, such as xdist carries to its controller. A run without a plan has none."""
    found: list[str] = []
    for outcome in outcomes:
        try:
            records = records_of(outcome, sources, title, definition)
        except BadInput:
            continue
        found += encode(records).decode().strip("\n").split("\n")
    return found


def plan_of_run(contents: RunContents, run_id: str, root: Path) -> bytes:
    """The plan of a run, by its name or the beginning of it: that of its series, with its seed, in a repository.

    Raises:
        BadInput: if no run, or more than one, has this name.
    """
    found = [run for run in contents.runs if run.run_id == run_id]
    found = found or [run for run in contents.runs if run.run_id.startswith(run_id)]
    if len(found) != 1:
        remedy = (
            "give more of its name: several begin so"
            if found
            else "chaoskit history show STORE lists the runs"
        )
        raise BadInput("run", run_id, remedy)
    (run,) = found
    shared = contents.plans.get(run.series)
    if shared is None:
        raise BadInput("run", run_id, "replay another run: the plan of its series was not kept")
    settings = shared.plan.get("settings", {}) | {"seed": run.seed}
    if "working_directory" in settings:
        settings["working_directory"] = str(root / settings["working_directory"])
    plan = shared.plan | {"name": run.title, "settings": settings}
    return msgspec.json.encode(plan)
