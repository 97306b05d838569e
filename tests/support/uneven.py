"""Runs of four ranks that are not equally fast, with sixteen shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chaoskit.journal import Record, read_journals
from chaoskit.pytest_plugin import Chaos
from chaoskit.runlog.outcome import Outcome
from chaoskit.vocabulary import Event

SHARD_S = 0.02
AT = 6  # the step in which faults strike


def journal(outcome: Outcome, *events: Event) -> list[Record]:
    """Return the records of these events, in order of time."""
    return [
        record
        for record in read_journals(Path(outcome.directory) / "journal")
        if record.event in events
    ]


def run(chaos: Chaos, *faults: Any, job: str = "paced", **plan: Any) -> Outcome:
    """Run an experiment that must pass, with four ranks and sixteen shards."""
    settings = {"nodes": 4, "spares": 0, "shards": 16, "steps": 40, "deadline_s": 120.0}
    outcome = chaos.run(job, faults=faults, **settings | {"options": {"shard_s": SHARD_S}} | plan)
    if plan.get("reduction") != "fast":  # its bits depend on the shares
        outcome.assert_same_losses_as_twin()
    return outcome


def loads(outcome: Outcome) -> list[list[int]]:
    """Return the number of shards of each rank, by generation."""
    return [
        [len(member["shards"]) for member in plan["members"]]
        for plan in journal(outcome, Event.PLAN)
    ]
