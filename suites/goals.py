"""Goals of open-ended jobs that are reached when the journals of the run hold certain records.

-> fixtures/jobs/goal.py: how the ranks of the job agree on the step after which they end.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaoskit import Chaos, Harness, Record
from chaoskit.journal import JournalTail


class JournalFlag:
    """Goal of an open-ended job: a file that appears when a record of a journal meets a condition.

        goal = JournalFlag(chaos, lambda record: record.event == "node_lost")
        chaos.run(STEADY, steps=20, until=goal.until, watch=goal)

    The journals are read whenever the coordinator shows a message, so at each heartbeat. A job whose
    goal is never reached ends by its deadline.

    Args:
        chaos: the fixture, for which the next run has the goal; or its harness.
        condition: called with every record, in order, until it returns true.
    """

    def __init__(self, chaos: Chaos | Harness, condition: Callable[[Record], bool]) -> None:
        harness = chaos.harness if isinstance(chaos, Chaos) else chaos
        self._runs, self._condition = harness.directory, condition
        self._path = Path(tempfile.mkdtemp(prefix="goal-", dir=self._runs)) / "seen"
        self._tail: JournalTail | None = None

    @property
    def until(self) -> dict[str, Any]:
        """The argument for ``chaos.run(until=...)``."""
        return {"file": str(self._path)}

    def __call__(self, message: Any) -> None:
        """Read the new records, and create the file once the condition holds for one of them."""
        if self._tail is None:
            self._tail = JournalTail(max(self._runs.glob("[0-9]*-*")) / "journal")
        if not self._path.exists() and any(self._condition(record) for record in self._tail.poll()):
            self._path.touch()


def worlds_seen(chaos: Chaos, *sizes: int) -> JournalFlag:
    """Return the goal of a run with worlds of these sizes, in this order.

    Other sizes may have come between.
    """
    return all_took_effect(chaos, 0, *sizes)


def happened(chaos: Chaos, event: str, count: int = 1, source: str = "") -> JournalFlag:
    """Return the goal of a run with so many records of ``event``.

    ``source`` names the journal to count in; "" counts in all.
    """
    matches = 0

    def is_last(record: Record) -> bool:
        nonlocal matches
        matches += record.event == event and source in ("", record.source)
        return matches >= count

    return JournalFlag(chaos, is_last)


def all_took_effect(chaos: Chaos, faults: int, *sizes: int, replaced: int = 0) -> JournalFlag:
    """Return the goal of a run in which so many faults took effect.

    Its world must also have had these sizes, in this order, and so many of its nodes must be
    replaced.

    The exit status that is the evidence of a kill is read only after the run: such a fault counts
    as effective once the coordinator gives up the worker that it struck.
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
