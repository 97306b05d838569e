"""A run on a job that runs already, made of records, as its verdict reads it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from chaoskit.experiment.plan.command_plan import CommandExperiment
from chaoskit.experiment.run.command_run import CommandRun, load_command_run
from chaoskit.journal import Journal
from chaoskit.vocabulary import Event, RunEnd

S = 10**9
#: Seconds, event and fields of a record.
TimedRecord = tuple[float, Event, dict[str, Any]]
NODES = ("llama-0", "llama-1")


def recorded_run(
    directory: Path,
    experiment: CommandExperiment,
    reason: RunEnd,
    ended_s: float,
    harness: Iterable[TimedRecord],
    node1: Iterable[TimedRecord] = (),
) -> CommandRun:
    """Return a run on the nodes ``llama-0`` and ``llama-1``, from records that are written first.

    Args:
        directory: an empty directory for the run.
        experiment: the plan.
        reason: the reason for its end.
        ended_s: the end, in seconds.
        harness: records of the harness between its start and its end.
        node1: records of the node ``llama-1``.
    """
    start: dict[str, Any] = {"names": list(NODES), "substrate": "attached"}
    start |= {"run_id": "a", "twin": "", "sharded": False}
    logs = {"lines": 9, "example": "", "odd": ""}
    end: dict[str, Any] = {"reason": reason, "ok": True, "detail": "disk full", "exits": {}}
    journal = Journal(directory / "journal", "harness", role="harness")
    for at_s, event, fields in [(0, Event.STARTED, start), *harness]:
        journal.write(event, t_ns=int(at_s * S), **fields)
    journal.write(Event.RUN_ENDED, t_ns=int(ended_s * S), logs=logs, **end)
    journal.close()
    place = Journal(directory / "journal", NODES[1], role="place")
    for at_s, event, fields in node1:
        place.write(event, t_ns=int(at_s * S), **fields)
    place.close()
    return load_command_run(directory, experiment)
