"""Run of one experiment with a job: start the job, follow it while faults strike it, end all of its
processes.

-> experiment/injection/job_follower.py: what happens between start and end.
substrate/cluster/supervised.py: how the processes are started and ended.
experiment/run/storing.py: the wait for the last state. experiment/judge/judge.py: the verdict.
"""

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
from chaoskit.experiment.injection.job_follower import JobFollower, Watch, WhenSilent
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

#: Placeholder for the run id of a twin that depends on the end of the run, and so runs after it.
LATER = "later"

_HTTP_PORT = 80
_STORING_LEAST_S = 5.0  # least time to store the last state, when the deadline of the run is near


@dataclass
class RawRun:
    """The records of a run, before it is judged. All times are CLOCK_MONOTONIC in ns.

    Attributes:
        experiment: the plan of the run.
        directory: the directory with the journals and logs.
        started_ns: the start of the run; 0 if its record is missing.
        ended_ns: the end of the run, before the wait for its last state; of a run that wrote none,
            the time of its last record; 0 if there is no record at all.
        end: the end of the job, or None if the coordinator reported none.
        deadline_passed: the run was ended at its deadline.
        harness_lost: the harness wrote no end, failed, or lost the coordinator, so what the run
            would have shown is not known.
    """

    experiment: Experiment
    directory: Path
    started_ns: int
    ended_ns: int
    end: EndJob | None
    deadline_passed: bool
    harness_lost: bool = False

    @cached_property
    def journals(self) -> Journals:
        """The journals of all processes.

        They are read on demand: a launch of many days never needs them.
        """
        return load_journals(self.directory / "journal")

    @cached_property
    def records(self) -> list[Record]:
        """All journal records by time, each loss once."""
        return without_repeated_losses(self.journals.records)

    @cached_property
    def index(self) -> Index:
        """The records by event and time."""
        return Index(self.records)

    @cached_property
    def injections(self) -> list[InjectionRecord]:
        """The result of each planned fault."""
        return injections(self.experiment.faults, self.records)

    @property
    def coverage(self) -> Mapping[str, FileCoverage]:
        """The readable part of each journal, by source. Missing records cannot be judged."""
        return self.journals.files

    @property
    def run_id(self) -> str:
        """The id of the run; empty if its journal does not hold it."""
        return self._start_field("run_id")

    @property
    def twin_id(self) -> str:
        """The run id of the unbroken run to compare with, or :data:`LATER`, or ""."""
        return self._start_field("twin")

    @property
    def plan_digest(self) -> str:
        """The digest of the plan at the start of the run; empty if there was no plan."""
        return self._start_field("plan")

    @property
    def substrate(self) -> str:
        """The name of the substrate of the nodes; empty if the journal does not hold it."""
        return self._start_field("substrate")

    def _start_field(self, name: str) -> str:
        """Return a field of the record of the start of the run; empty if it is missing."""
        return next(
            (str(record.get(name, "")) for record in self.records if record.event == Event.STARTED),
            "",
        )


def without_repeated_losses(records: Iterable[Record]) -> list[Record]:
    """Return ``records`` with each loss once, since two coordinators may report the same one.

    A worker is lost at most once.
    """
    losses: set[object] = set()
    kept_records = []
    for record in records:
        if record.event in (Event.DETECTED, Event.NODE_LOST):
            loss = record.get("worker") or (record.get("node"), record.t_ns)
            if loss in losses:
                continue
            losses.add(loss)
        kept_records.append(record)
    return kept_records


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
    """Run ``experiment`` and return its records; all processes are ended, also after an error.

    A last state that is not stored in time gets a record ``save_failed``, and is no error.

    Args:
        experiment: the plan of the run.
        substrate: provides the nodes.
        directory: the directory for journals and logs, which is created.
        watch: receives every message of the coordinator, every report of a worker or checkpoint
            daemon on its faults, and each :class:`~chaoskit.experiment.run.storing.Storing`.
        port: the port of the coordinator; 0 for a free one.
        requests: requests of users and schedulers while the run lasts.
        heartbeat_s: the least time in seconds between two heartbeats of a node that ``watch``
            receives while nothing else happens; 0 for all heartbeats.
        when_silent: called when no message comes, for example if all nodes are lost. A launch
            starts them again. With None a lost node stays lost, unless a fault or the plan starts
            it again.
        twin_id: the run id of the unbroken run to compare with, or :data:`LATER`; "" for none.

    Raises:
        BadInput: if the job, or a fault, refuses its input.
        HarnessError: if chaoskit itself failed, or the code of a fault (:class:`FaultBroken`).
        JournalFull: if ``directory`` has no room for the harness's journal.
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
        run_context = (journal, started_ns, directory)
        with showing_events(directory, substrate.event_sink(directory)):
            return _execute(
                experiment,
                substrate,
                run_context,
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
    """Yield a proxy in front of the remote tier's store, or None if no fault strikes the store.

    Raises:
        HarnessError: if the proxy does not start.
    """
    remote = experiment.config.remote
    if remote is None or not any(fault.of_store for fault in experiment.faults):
        yield None
        return
    address = urlsplit(remote.endpoint)
    proxy = ObjectProxy(str(address.hostname), address.port or _HTTP_PORT, undo)
    try:
        yield proxy
    finally:
        proxy.close()


@contextlib.contextmanager
def channel_of(experiment: Experiment, directory: Path) -> Iterator[InjectionChannel | None]:
    """Yield the channel for injecting faults into workers, or None for a run without faults."""
    if not experiment.faults:
        yield None
        return
    with contextlib.closing(InjectionChannel(directory, experiment.triggers())) as channel:
        yield channel


def digest_of(directory: Path) -> str:
    """Return the BLAKE2b digest of the plan in the directory of a run.

    It is empty if there is no plan, or it cannot be read.
    """
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
    """Write the record of the start of the run, with all data that a live view needs.

    It also ties the monotonic clock of the run to the wall clock.
    """
    unix_ns = time.time_ns() - (time.monotonic_ns() - started_ns)
    process_fields = {"pid": os.getpid(), "ticks": start_ticks(os.getpid())}
    size_fields = {"nodes": experiment.config.nodes, "spares": experiment.config.spares}
    identity_fields = {
        "run_id": uuid.uuid4().hex,
        "name": experiment.name,
        "steps": experiment.steps,
        **process_fields,
        **size_fields,
    }
    setup_fields = {
        "substrate": substrate,
        "sharded": experiment.config.job.sharded,
        "twin": twin_id,
        "plan": plan_digest,
    }
    journal.write(
        Event.STARTED, t_ns=started_ns, unix_ns=unix_ns, **identity_fields, **setup_fields
    )


def _execute(
    experiment: Experiment,
    substrate: Substrate,
    run_context: tuple[Journal, int, Path],
    watch: Watch,
    port: int,
    store: ObjectProxy | None,
    channel: InjectionChannel | None,
    requests: Requests | None,
    heartbeat_s: float,
    when_silent: WhenSilent | None,
) -> RawRun:
    """Launch the cluster, follow the job, wait for its last state, and end all processes.

    Args:
        experiment, substrate, watch, port: as for :func:`execute`.
        run_context: the harness's journal, the start of the run in ns, and the directory of the
            run.
        store: the proxy in front of the object store, or None.
        channel: the sockets to workers and checkpoint daemons, or None.
        requests, heartbeat_s, when_silent: as for :func:`execute`.

    Returns:
        The records of the run. The journal gets the record of its end, also after an error.
    """
    journal, started_ns, directory = run_context
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
            node, disk, remote_tier = follower.first_node, config.disk, config.remote
            if reason := await_last(cluster, node, disk, remote_tier, directory, left_s, watch):
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
                follower.record_missed()
                is_ok, detail = (False, failure) if end is None else (end.ok, end.reason)
                journal.write(
                    Event.RUN_ENDED,
                    t_ns=ended_ns,
                    reason=follower.run_end,
                    ok=is_ok,
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
    """Return the end of the job and the exits of workers; an empty list if no fault has acted."""
    return [] if follower.is_idle else read_events(journals, Event.JOB_ENDED, Event.WORKER_EXITED)


def load_run(directory: Path, experiment: Experiment) -> RawRun:
    """Return a run from its journals alone; missing records give defaults."""
    journal = directory / "journal"
    records = read_events(journal, Event.STARTED, Event.RUN_ENDED)
    start_records = [record for record in records if record.event == Event.STARTED]
    end_records = [record for record in records if record.event == Event.RUN_ENDED]
    end_record = end_records[-1] if end_records else None
    return RawRun(
        experiment=experiment,
        directory=directory,
        started_ns=start_records[0].t_ns if start_records else 0,
        ended_ns=end_record.t_ns
        if end_record is not None
        else max((record.t_ns for record in read_journals(journal)), default=0),
        end=EndJob(end_record["ok"], end_record["detail"])
        if end_record is not None and end_record["reason"] == RunEnd.ENDED
        else None,
        deadline_passed=end_record is not None and end_record["reason"] == RunEnd.DEADLINE,
        harness_lost=end_record is None
        or end_record["reason"] in (RunEnd.HARNESS, RunEnd.COORDINATOR_LOST),
    )
