"""Runs one experiment: starts the job, follows it while it is broken, ends everything."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from chaoskit.errors import FaultBroken
from chaoskit.experiment.injection.channel import InjectionChannel
from chaoskit.experiment.injection.follow import JobFollower, Watch, WhenSilent
from chaoskit.experiment.plan.plan import Experiment
from chaoskit.experiment.plan.planfile import FILE_NAME
from chaoskit.experiment.plan.requests import Requests
from chaoskit.experiment.run.event_feed import showing_events
from chaoskit.experiment.run.storing import await_last, last_step
from chaoskit.journal import (
    FileCoverage,
    Journal,
    Journals,
    Record,
    load_journals,
    read_events,
    read_journals,
)
from chaoskit.process.linux import start_ticks
from chaoskit.runlog.index import Index
from chaoskit.runlog.injected import InjectionRecord, injections
from chaoskit.substrate.core.base import Substrate
from chaoskit.substrate.object_store.proxy import ObjectProxy
from chaoskit.substrate.undo import UndoLog
from chaoskit.vocabulary import Event, RunEnd
from chaoskit.wire.messages import EndJob

#: Stands for the run id of a twin that depends on how the run ends, so that it is made after it.
LATER = "later"

_HTTP_PORT = 80
_STORING_LEAST_S = 5.0  # for the last state, where the deadline of the run is near


@dataclass
class RawRun:
    """What a run left behind, before it is judged. All times are CLOCK_MONOTONIC in ns."""

    experiment: Experiment
    directory: Path
    started_ns: int
    ended_ns: int
    end: EndJob | None
    deadline_passed: bool
    harness_lost: bool = False  # it wrote no end: what the run would have shown is not known

    @cached_property
    def journals(self) -> Journals:
        """What all processes wrote down. Read on demand: a launch of many days never asks."""
        return load_journals(self.directory / "journal")

    @cached_property
    def records(self) -> list[Record]:
        """Every journal record, by time."""
        return told_once(self.journals.records)

    @cached_property
    def index(self) -> Index:
        """The records by event and time."""
        return Index(self.records)

    @cached_property
    def injections(self) -> list[InjectionRecord]:
        """What came of each planned fault."""
        return injections(self.experiment.faults, self.records)

    @property
    def coverage(self) -> Mapping[str, FileCoverage]:
        """How much of each journal could be read, by source: what is missing cannot be judged."""
        return self.journals.files

    @property
    def run_id(self) -> str:
        """Which run it is; empty if its journal does not tell."""
        return self._told_at_start("run_id")

    @property
    def twin_id(self) -> str:
        """The unbroken run with which it is to be compared, or :data:`LATER`; empty if there is to be none."""
        return self._told_at_start("twin")

    @property
    def plan_digest(self) -> str:
        """Of the plan that lay in its directory when it began; empty if there was none."""
        return self._told_at_start("plan")

    @property
    def substrate(self) -> str:
        """Where its nodes came from; empty if its journal does not tell."""
        return self._told_at_start("substrate")

    def _told_at_start(self, name: str) -> str:
        return next(
            (str(record.get(name, "")) for record in self.records if record.event == Event.STARTED),
            "",
        )


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
    directory: Path,
    *,
    watch: Watch = lambda message: None,
    port: int = 0,
    requests: Requests | None = None,
    heartbeat_s: float = 0.0,
    when_silent: WhenSilent | None = None,
    twin_id: str = "",
) -> RawRun:
    """Run ``experiment`` and leave nothing of it running, whatever happens.

    Args:
        directory: for journals and logs; created.
        watch: is shown every message of the coordinator.
        port: of the coordinator; 0 for any.
        requests: what is wanted of the run while it lasts.
        heartbeat_s: how far apart the heartbeats of a node may be that ``watch`` is shown while nothing else happens.
        when_silent: what a launch does when it hears nothing, as when all nodes are lost. Experiments do nothing: a
            node that is lost stays lost unless a fault brings it back.
        twin_id: run id of the unbroken run with which it will be compared, or :data:`LATER`; "" for none.

    Raises:
        BadInput: if the job refuses its input. HarnessError: if chaoskit itself failed.
    """
    if experiment.config.disk is not None:
        Path(experiment.config.disk.target).mkdir(parents=True, exist_ok=True)
    with (
        store_of(experiment, substrate.undo) as store,
        channel_of(experiment, directory) as channel,
    ):
        journal = Journal(directory / "journal", "harness", role="harness")
        started_ns = time.monotonic_ns()
        _write_start(journal, experiment, started_ns, substrate.name, twin_id, digest_of(directory))
        place = (journal, started_ns, directory)
        with showing_events(directory, substrate.event_sink(directory)):
            return _execute(
                experiment,
                substrate,
                place,
                watch,
                port,
                store,
                channel,
                requests,
                heartbeat_s,
                when_silent,
            )


@contextlib.contextmanager
def store_of(experiment: Experiment, undo: UndoLog) -> Iterator[ObjectProxy | None]:
    """A proxy before the store of the remote tier, while the run lasts; None if no fault strikes that.

    Raises:
        HarnessError: if it does not start.
    """
    remote = experiment.config.remote
    if remote is None or not any(fault.of_store for fault in experiment.faults):
        yield None
        return
    place = urlsplit(remote.endpoint)
    proxy = ObjectProxy(str(place.hostname), place.port or _HTTP_PORT, undo)
    try:
        yield proxy
    finally:
        proxy.close()


@contextlib.contextmanager
def channel_of(experiment: Experiment, directory: Path) -> Iterator[InjectionChannel | None]:
    """What faults are injected through, while the run lasts; None of a run without faults."""
    if not experiment.faults:
        yield None
        return
    with contextlib.closing(InjectionChannel(directory, experiment.triggers())) as channel:
        yield channel


def digest_of(directory: Path) -> str:
    """BLAKE2b of the plan in the directory of a run; empty if there is none."""
    try:
        return hashlib.blake2b((directory / FILE_NAME).read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return ""


def _write_start(
    journal: Journal,
    experiment: Experiment,
    started_ns: int,
    substrate: str,
    twin_id: str,
    plan_digest: str,
) -> None:
    """What outsiders need to follow the run: the only place where its clock is tied to the wall clock."""
    unix_ns = time.time_ns() - (time.monotonic_ns() - started_ns)
    process = {"pid": os.getpid(), "ticks": start_ticks(os.getpid())}
    size = {"nodes": experiment.config.nodes, "spares": experiment.config.spares}
    told = {
        "run_id": uuid.uuid4().hex,
        "name": experiment.name,
        "steps": experiment.steps,
        **process,
        **size,
    }
    place = {
        "substrate": substrate,
        "sharded": experiment.config.job.sharded,
        "twin": twin_id,
        "plan": plan_digest,
    }
    journal.write(Event.STARTED, t_ns=started_ns, unix_ns=unix_ns, **told, **place)


def _execute(
    experiment: Experiment,
    substrate: Substrate,
    place: tuple[Journal, int, Path],
    watch: Watch,
    port: int,
    store: ObjectProxy | None,
    channel: InjectionChannel | None,
    requests: Requests | None,
    heartbeat_s: float,
    when_silent: WhenSilent | None,
) -> RawRun:
    journal, started_ns, directory = place
    config = experiment.config
    if store is not None and config.remote is not None:
        remote = msgspec.structs.replace(config.remote, endpoint=store.url)
        config = msgspec.structs.replace(config, remote=remote)
    cluster = substrate.launch(
        config,
        directory,
        port=port,
        heartbeat_s=heartbeat_s,
        replacements=sum(fault.needs_standby for fault in experiment.faults),
        injection=channel.door if channel is not None else None,
    )
    follower = JobFollower(
        experiment, cluster, journal, substrate.undo, watch, store, channel, requests, when_silent
    )
    runner = asyncio.Runner()
    end: EndJob | None = None
    ended_ns, failure = 0, ""
    try:
        end = runner.run(follower.follow(started_ns / 1e9 + experiment.deadline_s))
        ended_ns = time.monotonic_ns()
        if end is not None and end.ok and config.disk is not None and follower.first_node:
            left_s = max(
                _STORING_LEAST_S, started_ns / 1e9 + experiment.deadline_s - time.monotonic()
            )
            if requests is not None:
                left_s = max(0.0, min(left_s, requests.stores_until_s - time.monotonic()))
            if reason := await_last(cluster, follower.first_node, config, directory, left_s, watch):
                step = last_step(directory / "journal")
                journal.write(Event.SAVE_FAILED, step=step, tier="disk", reason=reason)
    except BaseException as error:
        failure = (
            str(error) if isinstance(error, FaultBroken) else f"{type(error).__name__}: {error}"
        )
        raise
    finally:
        ended_ns = ended_ns or time.monotonic_ns()
        try:
            cluster.end()
        finally:
            try:
                with runner:
                    runner.run(follower.close(_exits(follower, directory / "journal")))
            finally:
                follower.tell_missed()
                ok, detail = (False, failure) if end is None else (end.ok, end.reason)
                journal.write(
                    Event.RUN_ENDED,
                    t_ns=ended_ns,
                    reason=follower.run_end,
                    ok=ok,
                    detail=detail,
                    exits={},
                )
                journal.close(follower.run_end)
    return RawRun(
        experiment=experiment,
        directory=directory,
        started_ns=started_ns,
        ended_ns=ended_ns,
        end=end,
        deadline_passed=end is None,
    )


def _exits(follower: JobFollower, journals: Path) -> list[Record]:
    """What the processes of a run in which a fault acted wrote down last."""
    return [] if follower.is_idle else read_events(journals, Event.JOB_ENDED, Event.WORKER_EXITED)


def load_run(directory: Path, experiment: Experiment) -> RawRun:
    """A run as its journals tell it, and nothing else."""
    journal = directory / "journal"
    told = read_events(journal, Event.STARTED, Event.RUN_ENDED)
    started = [record for record in told if record.event == Event.STARTED]
    ended = [record for record in told if record.event == Event.RUN_ENDED]
    last = ended[-1] if ended else None
    return RawRun(
        experiment=experiment,
        directory=directory,
        started_ns=started[0].t_ns if started else 0,
        ended_ns=last.t_ns
        if last is not None
        else max((one.t_ns for one in read_journals(journal)), default=0),
        end=EndJob(last["ok"], last["detail"])
        if last is not None and last["reason"] == RunEnd.ENDED
        else None,
        deadline_passed=last is not None and last["reason"] == RunEnd.DEADLINE,
        harness_lost=last is None or last["reason"] in (RunEnd.HARNESS, RunEnd.COORDINATOR_LOST),
    )
