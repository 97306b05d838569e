"""Runs one experiment: starts the job, strikes with each fault at its moment, gathers evidence, ends everything."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from chaoskit.errors import BadInput, HarnessError
from chaoskit.experiment.plan import Experiment, fault_id
from chaoskit.journal import Journal, Record, read_journals
from chaoskit.messages import (
    EndJob,
    Heartbeat,
    HookReached,
    Lever,
    LeverPulled,
    Pong,
    Release,
    WorkerFailed,
    WorkerLost,
    WorkerReady,
)
from chaoskit.osprocess import start_ticks
from chaoskit.substrate.base import Cluster, Substrate
from chaoskit.substrate.undo import UndoLog
from chaoskit.vocabulary import Event
from faults.base import Fault, Target

Watch = Callable[[Any], None]

_IDLE_S = 0.2
_OBSERVE_S = 0.004  # while a fault has no evidence yet


@dataclass
class Strike:
    """One planned fault during a run."""

    fault_id: str
    fault: Fault
    target: Target | None = None
    effective_ns: int | None = None
    observed: str = ""
    missed: str = ""  # why it could not be injected
    undone: bool = True


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
        return read_journals(self.directory / "journal")


class _Conductor:
    """The harness's side of one running cluster."""

    def __init__(self, experiment: Experiment, cluster: Cluster, journal: Journal, undo: UndoLog, watch: Watch) -> None:
        self._experiment, self._cluster, self._journal = experiment, cluster, journal
        self._undo, self._watch = undo, watch
        self.strikes = [Strike(fault_id(number), fault) for number, fault in enumerate(experiment.faults)]
        self._nodes: dict[str, str] = {}  # worker -> node

    def conduct(self, deadline_s: float) -> EndJob | None:
        """Until the job ends; None when the deadline (on the monotonic clock) passed first.

        Raises:
            HarnessError: if the coordinator died. BadInput: if the job refused its input.
        """
        while time.monotonic() < deadline_s:
            open_strikes = [strike for strike in self.strikes if strike.target and strike.effective_ns is None]
            try:
                message = self._cluster.receive(_OBSERVE_S if open_strikes else _IDLE_S)
            except ConnectionError as error:
                raise HarnessError(f"the coordinator ended early: {error}; see its log") from error
            if message is not None:
                self._watch(message)
                self._hear(message)
            for strike in open_strikes:
                self._look_for_evidence(strike)
            if isinstance(message, EndJob):
                return message
        return None

    def _hear(self, message: Any) -> None:
        match message:
            case WorkerReady(worker, node):
                self._nodes[worker] = node
            case HookReached():
                self._strike(message)
            case WorkerFailed(refused=(field, value, remedy)):
                raise BadInput(field, _Literal(value), remedy)
            case _:
                for strike in self.strikes:
                    if strike.target is not None:
                        _note(strike.target, message)

    def _strike(self, hook: HookReached) -> None:
        strike = next(strike for strike in self.strikes if strike.fault_id == hook.fault)
        if strike.target is not None:  # each fault strikes once, whatever is repeated after it
            if strike.fault.everywhere:
                strike.fault.inject(self._aim(hook))
            else:
                self._cluster.send(Release(hook.worker, hook.fault, Lever("none")))
            return
        strike.target = target = self._aim(hook)
        target.injected_ns = time.monotonic_ns()
        try:
            strike.fault.inject(target)
        except (ProcessLookupError, OSError) as error:
            strike.missed = f"the target was gone already: {error}"
            return
        self._journal.write(
            Event.INJECTED,
            t_ns=target.injected_ns,
            fault=hook.fault,
            what=str(strike.fault),
            worker=hook.worker,
            rank=hook.rank,
            step=hook.step,
            phase=hook.phase,
        )

    def _aim(self, hook: HookReached) -> Target:
        return Target(
            cluster=self._cluster,
            undo=self._undo,
            fault_id=hook.fault,
            worker=hook.worker,
            node=self._nodes.get(hook.worker, ""),
            rank=hook.rank,
            step=hook.step,
            phase=hook.phase,
            pid=hook.pid,
            tid=hook.tid,
            ticks=start_ticks(hook.pid),
        )

    def _look_for_evidence(self, strike: Strike) -> None:
        assert strike.target is not None
        observed = strike.fault.observe(strike.target)
        if observed is None:
            return
        strike.effective_ns, strike.observed = time.monotonic_ns(), observed
        self._journal.write(
            Event.EVIDENCE, t_ns=strike.effective_ns, fault=strike.fault_id, level="effective", observed=observed
        )

    def look_back(self, records: list[Record]) -> None:
        """Evidence that is known only after the run: how a target's parent saw it end."""
        exits = {record["worker"]: record for record in records if record.event == Event.WORKER_EXITED}
        for strike in self.strikes:
            if strike.target is None or strike.effective_ns is not None or strike.target.worker not in exits:
                continue
            record = exits[strike.target.worker]
            strike.target.exited = (record["how"], record["status"])
            observed = strike.fault.observe(strike.target)
            if observed is not None:
                strike.effective_ns, strike.observed = record.t_ns, observed

    def clean_up(self) -> None:
        """Put back what the run itself did not."""
        for strike in self.strikes:
            if strike.target is not None and not strike.missed:
                strike.undone = strike.fault.clean_up(strike.target)
                self._journal.write(Event.UNDONE, fault=strike.fault_id, ok=strike.undone)


class _Literal(str):
    """A value that is shown as it came, without further quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _note(target: Target, message: Any) -> None:
    """Keep what ``message`` says about the target of a fault."""
    match message:
        case WorkerLost(worker) if worker == target.worker:
            target.lost = message
        case LeverPulled(fault=fault) if fault == target.fault_id:  # of any worker, if it is everywhere
            target.reports.append(message)
        case Pong(worker, number) if worker == target.worker:
            target.pongs.add(number)
        case Heartbeat(node, beats) if node == target.node:
            now_s = time.monotonic()
            target.node_heard_s = now_s
            for beat in beats:
                if beat.worker == target.worker:
                    target.beat = (now_s, beat)


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
    conductor = _Conductor(experiment, cluster, journal, undo, watch)
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
    if any(strike.target is not None and strike.effective_ns is None for strike in run.strikes):
        conductor.look_back(run.records)
    return run
