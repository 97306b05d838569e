"""Changes of a run that are no mistakes: with each of them it is *passed*, as before.

A harness that fails good runs is worth as little as one that passes bad ones.

-> suites/canary/test_harmless.py makes each and judges the run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chaoskit.suites.canary.journals import Journals, Plain

Change = Callable[[Journals], None]

_LONG_NAME = "a-machine-with-a-rather-long-name-"
_ANOTHER_CLOCK_NS = 10**15
_TEXTS = ("detail", "error", "observed", "reason")


@dataclass(frozen=True)
class Harmless:
    """Change of journals, with its name in words."""

    name: str
    change: Change


@dataclass(frozen=True)
class OtherRun:
    """Run with another plan.

    Attributes:
        name: name in words.
        plan: fields that are added to the plan; ``options`` are those of the job.
    """

    name: str
    plan: dict[str, Any]


def _of_every_record(change: Callable[[Plain], None]) -> Change:
    """Return a change of every record."""

    def change_all(journals: Journals) -> None:
        for records in journals.files.values():
            for record in records:
                change(record)

    return change_all


def _another_pid(record: Plain) -> None:
    for place in (record, record.get("evidence", {}).get("subject", {})):
        if "pid" in place:
            place["pid"] += 100_000


def _another_clock(record: Plain) -> None:
    for name in ("t_ns", "done_ns", "acted_ns"):
        if name in record:
            record[name] += _ANOTHER_CLOCK_NS


def _other_texts(record: Plain) -> None:
    """Change free texts. The reason for which a process ended is one of a few words, and stays."""
    for name in _TEXTS:
        if record.get(name) and record["event"] not in ("closed", "run_ended"):
            record[name] = "words that a later version chooses"


def _more_fields(record: Plain) -> None:
    record |= {"weather": "rain", "of_a_later_version": [1, {"two": None}]}


def more_records(journals: Journals) -> None:
    """Add a record of an unknown event after each record."""
    for source, records in journals.files.items():
        unknown = [
            {"t_ns": record["t_ns"], "event": "weather", "by": record["by"]} for record in records
        ]
        journals.files[source] = [
            record for pair in zip(records, unknown, strict=True) for record in pair
        ]


def by_writer(journals: Journals) -> None:
    """Sort the records of each file by their processes, the last process first."""
    for records in journals.files.values():
        positions = {record["by"]: place for place, record in reversed([*enumerate(records)])}
        records.sort(key=lambda record: -positions[record["by"]])


def later_evidence(journals: Journals) -> None:
    """Move the evidence of a fault some tenths of a second later."""
    for _, record in journals.of("evidence"):
        record["t_ns"] += 300_000_000


def longer_names(journals: Journals) -> None:
    """Give nodes longer names, and workers and files that are named after them."""
    journals.files = {
        _renamed(source): _renamed(records) for source, records in journals.files.items()
    }


def _renamed(content: Any) -> Any:
    if isinstance(content, str):
        return re.sub(r"\bnode(?=\d)", _LONG_NAME, content)
    if isinstance(content, list):
        return [_renamed(part) for part in content]
    if isinstance(content, dict):
        return {_renamed(name): _renamed(part) for name, part in content.items()}
    return content


IN_JOURNALS: tuple[Harmless, ...] = (
    Harmless("processes have other pids", _of_every_record(_another_pid)),
    Harmless("the clock began at another time", _of_every_record(_another_clock)),
    Harmless("explanations have other words", _of_every_record(_other_texts)),
    Harmless("records have fields that are not known", _of_every_record(_more_fields)),
    Harmless("there are records that are not known", more_records),
    Harmless("records of several processes lie in another order", by_writer),
    Harmless("evidence comes later", later_evidence),
    Harmless("nodes have longer names", longer_names),
)

IN_RUNS: tuple[OtherRun, ...] = (
    OtherRun("steps are slower", {"options": {"step_s": 0.1}}),
    OtherRun("the job prints much, and what looks like an error", {"options": {"lines": 200}}),
    OtherRun("there is a spare more", {"spares": 2}),
    OtherRun("detection is on", {"hash_every": 1, "state_hash_steps": 4}),
)
