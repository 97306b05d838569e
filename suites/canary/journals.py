"""Journals of a run, changed as if their writer had a mistake.

The records are numbered and sealed like others.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Plain = dict[str, Any]


class Journals:
    """Journals of a copy of a run's directory.

    Attributes:
        files: source -> its records in order, each as the plain values of its line.
    """

    def __init__(self, run: Path) -> None:
        self._directory = run / "journal"
        self.files: dict[str, list[Plain]] = {
            path.stem: [json.loads(line) for line in path.read_text().splitlines()]
            for path in sorted(self._directory.glob("*.jsonl"))
        }

    def of(self, *events: str) -> Iterator[tuple[str, Plain]]:
        """Return source and record of every record of these events."""
        return (
            (source, record)
            for source, records in self.files.items()
            for record in records
            if record["event"] in events
        )

    def first(self, event: str) -> Plain:
        """Return the first record of ``event`` by time. Raises ValueError if there is none."""
        return min(
            (record for _, record in self.of(event)), key=lambda record: float(record["t_ns"])
        )

    def drop(self, is_dropped: Callable[[str, Plain], bool]) -> None:
        """Leave out records, as if their process had never written them.

        Args:
            is_dropped: called with source and record; returns True for one to leave out.
        """
        for source, records in self.files.items():
            self.files[source] = [record for record in records if not is_dropped(source, record)]

    def write(self) -> None:
        """Write the files anew; those that are not in ``files`` any more are deleted."""
        for path in self._directory.glob("*.jsonl"):
            path.unlink()
        for source, records in self.files.items():
            numbers = Counter[str]()
            lines = []
            for record in records:
                fields = {
                    name: value
                    for name, value in record.items()
                    if name not in ("by", "seq", "crc")
                }
                body = json.dumps(
                    fields | {"by": record["by"], "seq": numbers[record["by"]]},
                    separators=(",", ":"),
                )[:-1]
                numbers[record["by"]] += 1
                lines.append(f'{body},"crc":"{zlib.crc32(body.encode()):08x}"}}\n')
            (self._directory / f"{source}.jsonl").write_text("".join(lines))
