"""Launch of a training with recovery: from a job and its settings to a result.

No faults are injected.

-> ``experiment/run/run.py``: the run itself. ``launcher/outage.py``: what happens if every node is
lost. ``launcher/notice.py``: SIGTERM. ``launcher/quarantined.py``: nodes that are not used.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from chaoskit.errors import BadInput
from chaoskit.experiment.plan.plan import Experiment, plan_experiment, require_settings
from chaoskit.experiment.plan.requests import Requests
from chaoskit.experiment.run.run import execute
from chaoskit.experiment.run.storing import why_not_stored
from chaoskit.journal import Record, read_tail
from chaoskit.launcher.control_api import listening
from chaoskit.launcher.notice import GraceOver, StopNotice
from chaoskit.launcher.outage import NodeStarter
from chaoskit.launcher.progress import Progress
from chaoskit.launcher.quarantined import QuarantinedNodes
from chaoskit.launcher.stored import Stored, look_at_stored
from chaoskit.launcher.view import View
from chaoskit.observe.metrics import LOOPBACK
from chaoskit.observe.watching import Observation, require_observable
from chaoskit.plaintext import plural
from chaoskit.process.host_checks import require_file_size, require_free_port, require_writable
from chaoskit.runlog.account.time_account import TimeAccount
from chaoskit.substrate import registry
from chaoskit.typed import named_path, typed_arguments
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import EndJob, Halt

#: The interval of heartbeats, which bounds the age of what the view shows.
_HEARTBEAT_S = 0.25


class LaunchResult(msgspec.Struct, kw_only=True):
    """The result of a launch, which ``--json`` prints.

    Attributes:
        steps: the number of committed steps.
        resumed_from: the step of the stored snapshot that the run began with; 0 for none.
        ok: True if the job ended without a failure, and no signal ended it before.
        reason: why the job ended, in words.
        loss: the loss of the last step; None if it was skipped or is not known.
        stopped_by: the signal that ended the job before its last step; empty if none did, or the
            job failed.
        recoveries: seconds from each loss to the next committed step, with the precision of a
            heartbeat.
        seconds: the duration of the whole run. ``training_seconds`` begin with the first ranks.
        not_stored: the tier in which the state of the last step is missing, and why. It is empty if
            the job failed, the state is stored in each tier, or no tier is configured.
        stored: the newest snapshot, if the job failed or its end is not stored.
        nothing_stored: why there is no snapshot, if the job failed or its end is not stored; empty
            if there is one.
        resume: the command that goes on from ``stored``, if a command launched the job.
        weights_digest: digest of the final weights; empty if no rank finished.
        directory: the directory of the run; ``logs`` is the one with the output of its processes.
        cut_short_by: the worker that returned from its train function while others would have gone
            on; empty for none.
        unfit: nodes that found themselves not fit to train, each with its first reason.
        account: the time account.
        error: the last output of a failing worker. ``error_log`` is the file with all of it.
    """

    ok: bool
    reason: str
    job: str
    steps: int
    loss: float | None
    nodes: int
    world: int
    generation: int
    recoveries: list[float]
    seconds: float
    training_seconds: float
    weights_digest: str
    directory: str
    logs: str
    not_stored: str = ""
    stored: Stored | None = None
    nothing_stored: str = ""
    resume: str = ""
    resumed_from: int = 0
    stopped_by: str = ""
    cut_short_by: str = ""
    unfit: dict[str, str] = {}
    error: str = ""
    error_log: str = ""
    account: TimeAccount | None = None


def fresh_directory(directory: Path | None, name: str) -> Path:
    """Return ``directory``, or a new one below ``chaoskit-runs``, named after the job and the time.

    The directory is created.

    Raises:
        BadInput: if it cannot be written or contains a run already, or the limit of file sizes is
            too low.
    """
    if directory is None:
        now = datetime.now(UTC).astimezone()
        directory = Path("chaoskit-runs") / f"{name}-{now:%Y%m%d-%H%M%S}-{os.getpid()}"
    if (directory / "journal").exists():
        raise BadInput(
            "report", str(directory), "choose another directory: this one holds a run already"
        )
    require_writable("report", directory)
    require_file_size()
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@typed_arguments
def launch(
    job: str,
    *,
    report: str | Path | None = None,
    options: dict[str, Any] | None = None,
    substrate: str = registry.LOCAL,
    **settings: Any,
) -> LaunchResult:
    """Train with recovery until the job ends. No faults are injected, and no output is printed.

    A job that fails raises nothing: ``ok`` of the result is False, and ``reason`` says why.

    Args:
        job: a reference job, a file, or ``file.py:function``.
        report: the directory for journals and worker output. The default is a new one below
            ``chaoskit-runs``.
        options: options of the train function.
        substrate: the place of the nodes: ``local``, ``netns`` or ``docker``.
        settings: fields of :class:`chaoskit.RunConfig`, such as ``nodes``; ``port`` of the
            coordinator; and ``control_port``, ``metrics_port``, ``metrics_host`` and
            ``otlp_endpoint`` of the launcher.

    Raises:
        BadInput: before anything is started, or when the job refuses its input.
        HarnessError: if chaoskit fails.
    """
    directory = named_path("report", report) if report is not None else None
    quiet = Console(quiet=True)
    return launch_shown(
        job, quiet, directory=directory, options=options or {}, substrate=substrate, **settings
    )


@typed_arguments
def launch_shown(
    job: str,
    console: Console,
    *,
    directory: Path | None,
    options: dict[str, Any],
    port: int = 0,
    substrate: str = registry.LOCAL,
    control_port: int = 0,
    metrics_port: int | None = None,
    metrics_host: str = LOOPBACK,
    otlp_endpoint: str = "",
    notice: StopNotice | None = None,
    **settings: Any,
) -> LaunchResult:
    """Train like :func:`launch`, with a view of the training on ``console``.

    Args:
        directory: the directory of the run; None for a new one.
        port: the port of the coordinator; 0 for any.
        control_port: the port of the control API, which serves ``chaoskit scale`` and others; 0 for
            any.
        metrics_port: see :class:`chaoskit.observe.watching.Observation`.
        metrics_host: see :class:`chaoskit.observe.watching.Observation`.
        otlp_endpoint: see :class:`chaoskit.observe.watching.Observation`.
        notice: handles the signals that announce the end of the launch, and must be installed
            already; None does not handle them.
        settings: fields of :class:`chaoskit.config.RunConfig`.

    Raises:
        BadInput: before anything is started, or when the job refuses its input.
        HarnessError: if chaoskit fails.
    """
    require_settings(settings)
    quarantined = QuarantinedNodes(enforce=settings.get("health", "enforce") == "enforce")
    experiment = plan_experiment(
        job, options=options, deadline_s=math.inf, **quarantined.added_to(settings)
    )
    if substrate == registry.LOCAL:  # on other substrates the coordinator has its own address
        require_free_port("port", LOOPBACK, port)
    require_free_port("control_port", LOOPBACK, control_port)
    registry.require(substrate)
    require_observable(metrics_port, metrics_host, otlp_endpoint)
    directory = fresh_directory(directory, experiment.name.replace(":", "-"))
    progress = Progress(time.monotonic(), steps=experiment.steps)
    config = experiment.config
    spares = f" + {plural(config.spares, 'spare')}" if config.spares else ""
    view = View(f"{experiment.name} on {plural(config.nodes, 'node')}{spares}", progress, console)
    console.print(Text(f"worker output: {directory / 'log'}", "dim"), soft_wrap=True)
    with Observation(
        directory, metrics_port=metrics_port, metrics_host=metrics_host, otlp_endpoint=otlp_endpoint
    ) as observation:
        if observation.metrics_url:
            console.print(Text(f"metrics: {observation.metrics_url}", "dim"), soft_wrap=True)

        def watch(message: Any) -> None:
            observation.watch(message)
            view.watch(message)

        watch_all = quarantined.watching(watch)
        requests, starter, ended_ns = Requests(), NodeStarter(config, directory, watch_all), 0
        with (
            contextlib.suppress(GraceOver),
            contextlib.closing(registry.make(substrate)) as cluster,
            listening(requests, directory, control_port),
            notice.awaited(requests) if notice is not None else contextlib.nullcontext(),
            view.shown(),
        ):
            ended_ns = execute(
                experiment,
                cluster,
                directory,
                watch=watch_all,
                port=port,
                requests=requests,
                heartbeat_s=_HEARTBEAT_S,
                when_silent=starter.look,
            ).ended_ns
    ended_ns = ended_ns or time.monotonic_ns()
    quarantined.conclude()
    if observation.exported is False:
        console.print(
            Text(f"{otlp_endpoint} did not take all spans: see chaoskit trace", "yellow"),
            soft_wrap=True,
        )
    signal_name = notice.received.name if notice is not None and notice.received is not None else ""
    result = _result(
        experiment, progress, directory, quarantined.refused, ended_ns / 1e9, signal_name
    )
    result.account = observation.account(ended_ns)
    return result


def _result(
    experiment: Experiment,
    progress: Progress,
    directory: Path,
    unfit: dict[str, str],
    ended_s: float,
    signal_name: str,
) -> LaunchResult:
    """Return the result of a launch that has ended."""
    end = progress.end or EndJob(False, f"it did not end within the grace after {signal_name}")
    last, ends = _last_commit(directory / "journal"), _finish_records(directory / "journal")
    is_halted = end.ok and any(record["halted"] for record in ends)
    is_early = end.reason == Halt(signal_name).reason_without_ranks
    stopped_by = signal_name if progress.end is None or is_halted or is_early else ""
    result = LaunchResult(
        ok=end.ok and not stopped_by,
        reason=end.reason,
        job=experiment.job,
        steps=max(progress.step, last["step"] + 1 if last else 0),
        loss=last["loss"] if last and last["step"] + 1 >= progress.step else None,
        nodes=experiment.config.nodes,
        world=progress.world,
        generation=progress.generation,
        recoveries=[round(seconds, 3) for seconds in progress.recoveries],
        seconds=round(progress.elapsed_s(time.monotonic()), 3),
        training_seconds=round(progress.training_s(ended_s), 3),
        weights_digest=progress.weights_digest,
        directory=str(directory),
        logs=str(directory / "log"),
        resumed_from=progress.resumed_from,
        stopped_by=stopped_by,
        cut_short_by=""
        if stopped_by
        else next((str(end["cut_short_by"]) for end in ends if end["cut_short_by"]), ""),
        unfit=unfit,
    )
    if end.ok:
        result.not_stored = why_not_stored(experiment.config, directory / "journal")
    else:
        result.error = progress.error
        result.error_log = str(_log_of(progress.culprit, directory / "log"))
    if not result.ok or result.not_stored:
        result.stored, result.nothing_stored = look_at_stored(
            experiment.config, directory / "journal"
        )
    return result


def _last_commit(journals: Path) -> Record | None:
    """Return the record of the newest commit in the last records of the journals; None without."""
    commits = [record for record in read_tail(journals) if record.event == Event.COMMIT]
    return max(commits, key=lambda record: int(record["step"]), default=None)


def _finish_records(journals: Path) -> list[Record]:
    """Return the records that ranks wrote after their last step; none if the job did not finish."""
    return [record for record in read_tail(journals) if record.event == Event.FINISHED]


def _log_of(worker: str, logs: Path) -> Path:
    """Return the log of ``worker``, of its agent if the worker has none, or of the coordinator.

    The coordinator's is that of an empty ``worker``. A worker that was forked before its log
    existed writes into that of its agent.
    """
    log = logs / f"{worker}.log"
    return log if log.exists() else logs / f"{worker.rpartition('.')[0] or 'coordinator'}.log"
