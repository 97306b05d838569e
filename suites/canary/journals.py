"""Journals of a run, changed as if the process that wrote them had had a mistake: numbered and sealed like others."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Plain = dict[str, Any]


class Journals:
    """The journals of a copy of a run's directory.

    Attributes:
        files: by source, the records in their order; each is what its line says.
    """

    def __init__(self, run: Path) -> None:
        self._directory = run / "journal"
        self.files: dict[str, list[Plain]] = {
            path.stem: [json.loads(line) for line in path.read_text().splitlines()]
            for path in sorted(self._directory.glob("*.jsonl"))
        }

    def of(self, *events: str) -> Iterator[tuple[str, Plain]]:
        """Source and record of every record of these events."""
        return (
            (source, one)
            for source, records in self.files.items()
            for one in records
            if one["event"] in events
        )

    def first(self, event: str) -> Plain:
        """The first record of ``event`` by time."""
        return min((one for _, one in self.of(event)), key=lambda one: float(one["t_ns"]))

    def drop(self, is_dropped: Callable[[str, Plain], bool]) -> None:
        """Leave out records, as a process does that never writes them."""
        for source, records in self.files.items():
            self.files[source] = [one for one in records if not is_dropped(source, one)]

    def write(self) -> None:
        """Write the files anew; those that are not in ``files`` any more are deleted."""
        for path in self._directory.glob("*.jsonl"):
            path.unlink()
        for source, records in self.files.items():
            numbers = Counter[str]()
            lines = []
            for one in records:
                told = {
                    name: value for name, value in one.items() if name not in ("by", "seq", "crc")
                }
                body = json.dumps(
                    told | {"by": one["by"], "seq": numbers[one["by"]]}, separators=(",", ":")
                )[:-1]
                numbers[one["by"]] += 1
                lines.append(f'{body},"crc":"{zlib.crc32(body.encode()):08x}"}}\n')
            (self._directory / f"{source}.jsonl").write_text("".join(lines))
