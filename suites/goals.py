"""Goals of open-ended jobs that are reached when the journals of the run hold certain records."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaoskit import Chaos, Harness, Record
from chaoskit.journal import JournalTail


class JournalFlag:
    """The goal of an open-ended job: a file that appears when a record of the run's journals meets a condition.

        goal = JournalFlag(chaos, lambda record: record.event == "node_lost")
        chaos.run(STEADY, steps=20, until=goal.until, watch=goal)

    The journals are looked at whenever the coordinator shows a message, so at each heartbeat.

    Args:
        chaos: makes the run, as its next one; or its harness.
        condition: is shown every record, in order, until it is true.
    """

    def __init__(self, chaos: Chaos | Harness, condition: Callable[[Record], bool]) -> None:
        harness = chaos.harness if isinstance(chaos, Chaos) else chaos
        self._runs, self._condition = harness.directory, condition
        self._path = Path(tempfile.mkdtemp(prefix="goal-", dir=self._runs)) / "seen"
        self._tail: JournalTail | None = None

    @property
    def until(self) -> dict[str, Any]:
        """For ``chaos.run(until=...)``."""
        return {"file": str(self._path)}

    def __call__(self, message: Any) -> None:
        if self._tail is None:
            self._tail = JournalTail(max(self._runs.glob("[0-9]*-*")) / "journal")
        if not self._path.exists() and any(self._condition(record) for record in self._tail.poll()):
            self._path.touch()


def worlds_seen(chaos: Chaos, *sizes: int) -> JournalFlag:
    """The goal of a run whose world has had these sizes, in this order; others may have come between."""
    return all_took_effect(chaos, 0, *sizes)


def happened(chaos: Chaos, event: str, count: int = 1, source: str = "") -> JournalFlag:
    """The goal of a run with so many records of ``event``: of the journal ``source``, if one is named."""
    seen = 0

    def is_last(record: Record) -> bool:
        nonlocal seen
        seen += record.event == event and source in ("", record.source)
        return seen >= count

    return JournalFlag(chaos, is_last)


def all_took_effect(chaos: Chaos, faults: int, *sizes: int, replaced: int = 0) -> JournalFlag:
    """The goal of a run in which so many faults took effect, whose world has had these sizes, in this order, and that
    has replaced so many nodes.

    The exit status that is the evidence of a kill is read after the run only: such a fault has taken effect as soon as
    the coordinator gives up the worker that it struck.
    """
    struck: dict[str, str] = {}  # worker -> fault
    effective: set[str] = set()
    left = list(sizes)
    nodes: list[str] = []

    def is_last(record: Record) -> bool:
        match record.event:
            case "injected":
                struck[record["worker"]] = record["fault"]
            case "detected" if record["worker"] in struck:
                effective.add(struck[record["worker"]])
            case "evidence":
                effective.add(record["fault"])
            case "node_replaced":
                nodes.append(record["node"])
            case "commit" if left and record["world"] == left[0]:
                left.pop(0)
        return len(effective) >= faults and len(nodes) >= replaced and not left

    return JournalFlag(chaos, is_last)
