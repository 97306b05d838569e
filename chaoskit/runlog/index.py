"""Index of a run's records by event and time, so that a judge need not scan all of them for each
loss.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from chaoskit.journal import Record


def _time(record: Record) -> int:
    return record.t_ns


class Index:
    """Records by event and by time.

    Args:
        records: the records, which must be sorted by time.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        self._by_event: dict[str, list[Record]] = defaultdict(list)
        self._by_generation: dict[tuple[str, int], list[Record]] = defaultdict(list)
        for record in records:
            self._by_event[record.event].append(record)
            if (generation := record.get("generation")) is not None:
                self._by_generation[record.event, generation].append(record)

    def of(self, *events: str) -> list[Record]:
        """Return the records of these events, by time."""
        records = [record for event in events for record in self._by_event.get(event, ())]
        return records if len(events) == 1 else sorted(records, key=_time)

    def since(self, event: str, t_ns: int) -> Iterator[Record]:
        """Return an iterator over the records of ``event`` at or after ``t_ns``, by time."""
        records = self._by_event.get(event, [])
        return (
            records[position]
            for position in range(bisect_left(records, t_ns, key=_time), len(records))
        )

    def first(
        self, event: str, t_ns: int = 0, is_match: Callable[[Record], bool] = lambda record: True
    ) -> Record | None:
        """Return the first record of ``event`` at or after ``t_ns`` that is a match, or None."""
        return next((record for record in self.since(event, t_ns) if is_match(record)), None)

    def in_generation(self, event: str, generation: int) -> list[Record]:
        """Return the records of ``event`` in one membership, by time."""
        return self._by_generation.get((event, generation), [])
