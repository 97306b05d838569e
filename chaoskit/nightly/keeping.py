"""The history of a night: where its records go, and what it knows of nights before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from chaoskit.errors import BadInput, ChaoskitError
from chaoskit.history.record import HistoryRecord, RunRecord, new_id
from chaoskit.history.store import RunContents, RunHistory


class NightHistory:
    """A history, or none. What cannot be added is kept, and added with what comes next.

    Args:
        store: of the history; "" for none. directory: in which a folder is named.

    Attributes:
        troubles: a line for each thing that could not be done.

    Raises:
        BadInput: if the store cannot be used.
    """

    def __init__(self, store: str, directory: Path) -> None:
        place = store if "://" in store else str(directory / store)
        self._history = RunHistory(place) if store else None
        self._unwritten: list[tuple[str, list[HistoryRecord]]] = []
        self.troubles: list[str] = []
        if self._history is not None:
            self._history.is_there()

    def read(self) -> RunContents:
        """All records; none where there is no history yet. What cannot be read is a trouble."""
        if self._history is None:
            return RunContents()
        try:
            return self._history.read() if self._history.is_there() else RunContents()
        except BadInput as error:
            self._note(str(error))
            return RunContents()

    def keep(self, records: Sequence[HistoryRecord]) -> None:
        """Add records: those of one session, or of the night itself."""
        if self._history is None or not records:
            return
        session = (
            next((one.session for one in records if isinstance(one, RunRecord)), "") or new_id()
        )
        self._unwritten.append((session, list(records)))
        try:
            while self._unwritten:
                self._history.add(*self._unwritten[0])
                self._unwritten.pop(0)
        except ChaoskitError as error:
            self._note(str(error))

    def _note(self, trouble: str) -> None:
        if trouble not in self.troubles:
            self.troubles.append(trouble)

    @property
    def has_lost(self) -> bool:
        """Whether records could not be added until now."""
        return bool(self._unwritten)

    def close(self) -> None:
        """Let go of connections."""
        if self._history is not None:
            self._history.close()
