"""The runs of one session: kept in a history as they are made, saved to a file, compared with earlier ones."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

import msgspec

from chaoskit.errors import BadInput, HarnessError
from chaoskit.experiment.outcome import Outcome
from chaoskit.history.compare import TOLERANCE, Comparison, compare
from chaoskit.history.place import Sources, covariates_of, machine_of
from chaoskit.history.record import HistoryRecord, RunRecord, SeriesRecord, metrics_of, new_id
from chaoskit.history.series import plan_of, series_of, series_plan
from chaoskit.history.store import Contents, History, decode, encode, read_file, write_whole
from chaoskit.report.statistics import without_repeat


def records_of(outcome: Outcome, sources: Sources, definition: int = 1) -> tuple[RunRecord, SeriesRecord]:
    """What a history keeps of a run whose directory is here: the run, and what its series has in common.

    Raises:
        BadInput: if its plan is not there.
    """
    plan = plan_of(Path(outcome.directory))
    shared = series_plan(plan, sources.root)
    series = series_of(outcome, plan, sources.root)
    run = RunRecord(
        run_id=new_id(),
        session="",
        started_unix_ns=_unix_ns(outcome.started),
        series=series,
        definition=definition,
        title=_title(outcome),
        machine=machine_of(outcome),
        commit=sources.commit,
        seed=outcome.seed,
        verdict=outcome.verdict,
        claimed=outcome.claimed,
        stack=outcome.stack,
        faults=[str(fault.get("kind", "")) for fault in shared["faults"]],
        metrics=metrics_of(outcome),
        covariates=covariates_of(outcome, sources),
        report=outcome.directory,
    )
    return run, SeriesRecord(series=series, plan=shared)


def _title(outcome: Outcome) -> str:
    """The test, and which of its runs it is."""
    name = outcome.test.nodeid if outcome.test is not None else outcome.name
    _, mark, number = outcome.name.rpartition(" #")
    return without_repeat(name) + (f" #{number}" if outcome.test is not None and mark and number.isdigit() else "")


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
        troubles: a line for each thing that could not be done.

    Raises:
        BadInput: if one of them cannot be used.
    """

    def __init__(self, store: str, save: Path | None, against: str, tolerance: float = TOLERANCE) -> None:
        self._session = new_id()
        self._tolerance = tolerance
        self._save = save
        self._history: History | None = None
        self._before: Contents | None = None
        self._runs: list[RunRecord] = []
        self._plans: dict[str, SeriesRecord] = {}
        self.troubles: list[str] = []
        self.is_first = bool(against) and "://" not in against and not Path(against).exists()
        if self.is_first:
            self._first = Path(against)
        elif against:
            self._before = read(against)
            self.troubles += self._before.set_aside
        if store:
            self._history = History(store)
            self._history.is_there()

    def take(self, lines: Iterable[str]) -> None:
        """Add records of a test, as :func:`lines_of` gives them."""
        new: list[HistoryRecord] = []
        for record in map(decode, (line.encode() for line in lines)):
            if isinstance(record, RunRecord):
                self._runs.append(msgspec.structs.replace(record, session=self._session))
                new.append(self._runs[-1])
            elif record.series not in self._plans:
                self._plans[record.series] = record
                new.append(record)
        if self._history is not None and new:
            try:
                self._history.add(self._session, new)
            except HarnessError as error:
                self.troubles.append(str(error))

    def everything(self) -> Contents:
        """The records of the history, with those of this session; of this session alone where there is none."""
        if self._history is not None:
            try:
                return self._history.read()
            except BadInput as error:
                self.troubles.append(str(error))
        return Contents(list(self._runs), dict(self._plans))

    def finish(self) -> Comparison | None:
        """Save what was asked for, and compare; None where nothing is to be compared with."""
        everything = encode([*self._plans.values(), *self._runs])
        for path in [*([self._save] if self._save else []), *([self._first] if self.is_first else [])]:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, everything)
            except OSError as error:
                self.troubles.append(f"{path} was not written: {error.strerror}")
        if self._history is not None:
            self._history.close()
        return None if self._before is None else compare(self._before.runs, self._runs, self._tolerance)

    @property
    def runs(self) -> int:
        """How many runs were taken."""
        return len(self._runs)


def read(place: str) -> Contents:
    """The records in a file, or in a history. Raises BadInput if there are none."""
    if "://" not in place and Path(place).is_file():
        return read_file(Path(place))
    history = History(place)
    try:
        return history.read()
    finally:
        history.close()


def lines_of(outcomes: Iterable[Outcome], sources: Sources, definition: int = 1) -> list[str]:
    """Records of runs as lines of JSON, such as xdist carries to its controller. A run without a plan has none."""
    found: list[str] = []
    for outcome in outcomes:
        try:
            records = records_of(outcome, sources, definition)
        except BadInput:
            continue
        found += encode(records).decode().splitlines()
    return found


def plan_of_run(contents: Contents, run_id: str) -> bytes:
    """The plan of a run, by the beginning of its name: that of its series, with its seed.

    Raises:
        BadInput: if no run, or more than one, has this name.
    """
    found = [run for run in contents.runs if run.run_id.startswith(run_id)]
    if len(found) != 1:
        remedy = "give more of its name: several begin so" if found else "chaoskit history show STORE lists the runs"
        raise BadInput("run", run_id, remedy)
    (run,) = found
    shared = contents.plans.get(run.series)
    if shared is None:
        raise BadInput("run", run_id, "replay another run: the plan of its series was not kept")
    plan = shared.plan | {"name": run.title, "settings": shared.plan.get("settings", {}) | {"seed": run.seed}}
    return msgspec.json.encode(plan)
