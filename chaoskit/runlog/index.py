"""The records of a run by event, and by time within it: what a judge asks for each loss must not read all of them."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from chaoskit.journal import Record


def _time(record: Record) -> int:
    return record.t_ns


class Index:
    """Records that are sorted by time."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._by_event: dict[str, list[Record]] = defaultdict(list)
        self._by_generation: dict[tuple[str, int], list[Record]] = defaultdict(list)
        for record in records:
            self._by_event[record.event].append(record)
            if (generation := record.get("generation")) is not None:
                self._by_generation[record.event, generation].append(record)

    def of(self, *events: str) -> list[Record]:
        """The records of these events, by time."""
        found = [record for event in events for record in self._by_event.get(event, ())]
        return found if len(events) == 1 else sorted(found, key=_time)

    def since(self, event: str, t_ns: int) -> Iterator[Record]:
        """The records of ``event`` that are not before ``t_ns``, by time."""
        found = self._by_event.get(event, [])
        return (found[place] for place in range(bisect_left(found, t_ns, key=_time), len(found)))

    def first(
        self, event: str, t_ns: int = 0, wanted: Callable[[Record], bool] = lambda record: True
    ) -> Record | None:
        """The first record of ``event`` that is not before ``t_ns``, and is ``wanted``."""
        return next((record for record in self.since(event, t_ns) if wanted(record)), None)

    def in_generation(self, event: str, generation: int) -> list[Record]:
        """The records of ``event`` of one membership, by time."""
        return self._by_generation.get((event, generation), [])
