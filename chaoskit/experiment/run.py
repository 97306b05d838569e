"""Runs one experiment: starts the job, has a conductor break it, ends everything."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from chaoskit.experiment.conductor import Conductor, Watch
from chaoskit.experiment.plan import Experiment
from chaoskit.experiment.strike import Strike
from chaoskit.journal import Journal, Record, read_journals
from chaoskit.messages import EndJob
from chaoskit.substrate.base import Substrate
from chaoskit.substrate.undo import UndoLog
from chaoskit.vocabulary import Event


@dataclass
class RawRun:
    """What a run left behind, before anybody judges it. All times are CLOCK_MONOTONIC in ns."""

    experiment: Experiment
    directory: Path
    started_ns: int
    ended_ns: int
    end: EndJob | None
    deadline_passed: bool
    strikes: list[Strike]

    @cached_property
    def records(self) -> list[Record]:
        """Every journal record, by time. Read on demand: a launch of many days never asks."""
        return told_once(read_journals(self.directory / "journal"))


def told_once(records: Iterable[Record]) -> list[Record]:
    """``records``, with each loss once: two coordinators may tell of the same one. A worker is lost once at most."""
    losses: set[object] = set()
    kept = []
    for record in records:
        if record.event in (Event.DETECTED, Event.NODE_LOST):
            loss = record.get("worker") or (record.get("node"), record.t_ns)
            if loss in losses:
                continue
            losses.add(loss)
        kept.append(record)
    return kept


def execute(
    experiment: Experiment,
    substrate: Substrate,
    undo: UndoLog,
    directory: Path,
    *,
    watch: Watch = lambda message: None,
    port: int = 0,
) -> RawRun:
    """Run ``experiment`` and leave nothing of it running, whatever happens.

    Args:
        directory: for journals and logs; created.
        watch: is shown every message of the coordinator.
        port: of the coordinator; 0 for any.

    Raises:
        BadInput: if the job refuses its input. HarnessError: if chaoskit itself failed.
    """
    journal = Journal(directory / "journal", "harness")
    started_ns = time.monotonic_ns()
    cluster = substrate.launch(experiment.config, experiment.triggers(), directory, port=port)
    conductor = Conductor(experiment, cluster, journal, undo, watch)
    try:
        end = conductor.conduct(started_ns / 1e9 + experiment.deadline_s)
    finally:
        ended_ns = time.monotonic_ns()
        try:
            cluster.end()
        finally:
            conductor.clean_up()
            journal.close()
    run = RawRun(
        experiment=experiment,
        directory=directory,
        started_ns=started_ns,
        ended_ns=ended_ns,
        end=end,
        deadline_passed=end is None,
        strikes=conductor.strikes,
    )
    if any(strike.target is not None for strike in run.strikes):
        conductor.look_back(run.records)
    return run
