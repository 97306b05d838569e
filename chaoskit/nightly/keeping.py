"""History of a night: it receives the night's records and contains earlier nights.

-> history/store.py: the files of a history. nightly/log.py: the log from which a night resumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from chaoskit.errors import BadInput, ChaoskitError
from chaoskit.history.record import HistoryRecord, RunRecord, new_id
from chaoskit.history.store import RunContents, RunHistory


class NightHistory:
    """A history, or none. Records that cannot be added are kept, and added with the next ones.

    Args:
        store: the history; "" for none.
        directory: the directory that a relative store is in.

    Attributes:
        troubles: a line for each operation that failed.

    Raises:
        BadInput: if the store cannot be used.
    """

    def __init__(self, store: str, directory: Path) -> None:
        path = store if "://" in store else str(directory / store)
        self._history = RunHistory(path) if store else None
        self._unwritten: list[tuple[str, list[HistoryRecord]]] = []
        self.troubles: list[str] = []
        if self._history is not None:
            self._history.is_there()

    def read(self) -> RunContents:
        """Return all records; none if there is no history, or if it cannot be read.

        An error is added to ``troubles``. Single parts that cannot be read are left out.
        """
        if self._history is None:
            return RunContents()
        try:
            return self._history.read() if self._history.is_there() else RunContents()
        except BadInput as error:
            self._note(str(error))
            return RunContents()

    def keep(self, records: Sequence[HistoryRecord]) -> None:
        """Add records of one session or of the night itself, if there is a history.

        Records that could not be added before are added first. An error is added to ``troubles``
        and not raised.
        """
        if self._history is None or not records:
            return
        session = (
            next((record.session for record in records if isinstance(record, RunRecord)), "")
            or new_id()
        )
        self._unwritten.append((session, list(records)))
        try:
            while self._unwritten:
                self._history.add(*self._unwritten[0])
                self._unwritten.pop(0)
        except ChaoskitError as error:
            self._note(str(error))

    def _note(self, trouble: str) -> None:
        """Add a line to ``troubles``, unless it is there already."""
        if trouble not in self.troubles:
            self.troubles.append(trouble)

    @property
    def has_lost(self) -> bool:
        """True if there are records that could not be added so far."""
        return bool(self._unwritten)

    def close(self) -> None:
        """Close the connections of the history."""
        if self._history is not None:
            self._history.close()
