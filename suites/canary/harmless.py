"""Changes that say nothing against a run: with each of them it is *passed*, as before.

A harness that fails what is right is worth as little as one that passes what is wrong.
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
    """A change of journals, by its name in words."""

    name: str
    change: Change


@dataclass(frozen=True)
class OtherRun:
    """A run that is planned in another way.

    Attributes:
        plan: what is added to the plan; ``options`` are of the job.
    """

    name: str
    plan: dict[str, Any]


def _each(change: Callable[[Plain], None]) -> Change:
    """Every record is changed alike."""

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
    """Free text; the reason for which a process ended is one of a few words."""
    for name in _TEXTS:
        if record.get(name) and record["event"] not in ("closed", "run_ended"):
            record[name] = "words that a later version chooses"


def _more_fields(record: Plain) -> None:
    record |= {"weather": "rain", "of_a_later_version": [1, {"two": None}]}


def more_records(journals: Journals) -> None:
    """After each record one of an event that is not known."""
    for source, records in journals.files.items():
        unknown = [
            {"t_ns": record["t_ns"], "event": "weather", "by": record["by"]} for record in records
        ]
        journals.files[source] = [
            one for pair in zip(records, unknown, strict=True) for one in pair
        ]


def by_writer(journals: Journals) -> None:
    """Where several processes write to one file, their records lie one process after the other, the last one first."""
    for records in journals.files.values():
        first = {record["by"]: place for place, record in reversed([*enumerate(records)])}
        records.sort(key=lambda record: -first[record["by"]])


def later_evidence(journals: Journals) -> None:
    """It is seen some tenths of a second later that the fault took effect."""
    for _, record in journals.of("evidence"):
        record["t_ns"] += 300_000_000


def longer_names(journals: Journals) -> None:
    """Of nodes, and of the workers and files that are called after them."""
    journals.files = {
        _renamed(source): _renamed(records) for source, records in journals.files.items()
    }


def _renamed(value: Any) -> Any:
    if isinstance(value, str):
        return re.sub(r"\bnode(?=\d)", _LONG_NAME, value)
    if isinstance(value, list):
        return [_renamed(one) for one in value]
    if isinstance(value, dict):
        return {_renamed(name): _renamed(one) for name, one in value.items()}
    return value


IN_JOURNALS: tuple[Harmless, ...] = (
    Harmless("processes have other pids", _each(_another_pid)),
    Harmless("the clock began at another time", _each(_another_clock)),
    Harmless("explanations have other words", _each(_other_texts)),
    Harmless("records have fields that are not known", _each(_more_fields)),
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
