"""Train with recovery: from a job and its settings to a result. Nothing is broken or compared."""

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

#: What is shown of a run that goes on is as old as this at most.
_HEARTBEAT_S = 0.25


class LaunchResult(msgspec.Struct, kw_only=True):
    """How a launch ended; what ``--json`` prints.

    Attributes:
        steps: committed steps.
        resumed_from: step of the stored snapshot that the run began with; 0 for none.
        loss: of the last step; None where it was skipped or there is none.
        stopped_by: the signal that ended the job before its last step; empty for none, and where the job failed.
        recoveries: seconds from each loss to the next committed step, to a heartbeat's precision.
        seconds: of the whole run; ``training_seconds`` begin when the first ranks do.
        not_stored: of a job that has ended well, in which tier the state of its last step is missing, and why; empty
            where it is stored in each, or nothing is to be.
        stored: of a job that failed, or whose end is not stored, the newest snapshot.
        nothing_stored: of a job that failed, why there is none.
        resume: the command that goes on from ``stored``, where a command launched the job.
        cut_short_by: the worker that returned from its train function while others would have gone on; empty for none.
        unfit: nodes that found on themselves that they are not fit to train, and why.
        account: where the time went.
        error: what a failing worker said last, and the file that holds all it said.
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
    """``directory``, or a new one below ``chaoskit-runs`` that says what and when.

    Raises:
        BadInput: if it cannot be written, or holds a run already.
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
    """Train with recovery until the job ends; nothing is broken, and nothing is printed.

    Args:
        job: a reference job, a file, or ``file.py:function``.
        report: directory for journals and worker output; a fresh one below ``chaoskit-runs`` where none is given.
        options: of the train function.
        substrate: where nodes come from: ``local``, ``netns`` or ``docker``.
        settings: fields of :class:`chaoskit.RunConfig`, such as ``nodes``; ``port`` of the coordinator, and
            ``control_port``, ``metrics_port``, ``metrics_host`` and ``otlp_endpoint`` of the launcher.

    Raises:
        BadInput: before anything is started, or when the job refuses its input. HarnessError: chaoskit failed.
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
    """As :func:`launch`, with a view of the training on ``console``.

    Args:
        control_port: where the launcher takes requests, such as those of ``chaoskit scale``; 0 for any.
        metrics_port, metrics_host, otlp_endpoint: see :class:`chaoskit.observe.watching.Observation`.
        notice: takes the signals that announce the end of the launch; None leaves them alone.
        settings: fields of :class:`chaoskit.config.RunConfig`.

    Raises:
        BadInput: before anything is started, or when the job refuses its input. HarnessError: chaoskit failed.
    """
    require_settings(settings)
    quarantined = QuarantinedNodes(enforce=settings.get("health", "enforce") == "enforce")
    experiment = plan_experiment(
        job, options=options, deadline_s=math.inf, **quarantined.added_to(settings)
    )
    if substrate == registry.LOCAL:  # elsewhere the coordinator has an address of its own
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
            contextlib.closing(registry.make(substrate)) as place,
            listening(requests, directory, control_port),
            notice.awaited(requests) if notice is not None else contextlib.nullcontext(),
            view.shown(),
        ):
            ended_ns = execute(
                experiment,
                place,
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
    signal_name = notice.taken.name if notice is not None and notice.taken is not None else ""
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
    end = progress.end or EndJob(False, f"it did not end within the grace after {signal_name}")
    last, ends = _last_commit(directory / "journal"), _ends(directory / "journal")
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
    commits = [record for record in read_tail(journals) if record.event == Event.COMMIT]
    return max(commits, key=lambda record: int(record["step"]), default=None)


def _ends(journals: Path) -> list[Record]:
    """Return what each rank wrote down after its last step."""
    return [record for record in read_tail(journals) if record.event == Event.FINISHED]


def _log_of(worker: str, logs: Path) -> Path:
    """The log of ``worker``; a worker that was forked before it had one of its own writes into that of its agent."""
    own = logs / f"{worker}.log"
    return own if own.exists() else logs / f"{worker.rpartition('.')[0] or 'coordinator'}.log"
