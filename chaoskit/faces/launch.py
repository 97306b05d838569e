"""``chaoskit launch``: a user's training, with recovery. Nothing is broken or compared, and there is no deadline."""

from __future__ import annotations

import json
import math
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from chaoskit.config import require_free_port, require_writable
from chaoskit.elastic.settings import ElasticPolicy, read_policy, validate_policy
from chaoskit.errors import BadInput
from chaoskit.experiment.account import TimeAccount
from chaoskit.experiment.conductor import Watch
from chaoskit.experiment.plan import Experiment, plan_experiment
from chaoskit.experiment.requests import Requests
from chaoskit.experiment.run import RawRun, execute
from chaoskit.experiment.storing import why_not_stored
from chaoskit.faces.door import listening
from chaoskit.faces.keptout import KeptOut
from chaoskit.faces.progress import Progress
from chaoskit.faces.view import View, clock
from chaoskit.journal import Record, read_tail
from chaoskit.observe.metrics import LOOPBACK
from chaoskit.observe.watching import Observation, require_observable
from chaoskit.report.summary import duration, number, plural
from chaoskit.report.times import render_account
from chaoskit.substrate import choice
from chaoskit.substrate.undo import UndoLog
from chaoskit.vocabulary import Event

_LOG_LINES = 15


class LaunchResult(msgspec.Struct, kw_only=True):
    """How a launch ended; what ``--json`` prints.

    Attributes:
        steps: committed steps.
        loss: of the last step; None where it was skipped or there is none.
        recoveries: seconds from each loss to the next committed step, to a heartbeat's precision.
        seconds: of the whole run; ``training_seconds`` begin when the first ranks do.
        not_stored: of a job that has ended well, in which tier the state of its last step is missing, and why; empty
            where it is stored in each, or nothing is to be.
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
    cut_short_by: str = ""
    unfit: dict[str, str] = {}
    error: str = ""
    error_log: str = ""
    account: TimeAccount | None = None


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """``key=value`` texts as options of a train function; a value that is not JSON is a text.

    Raises:
        BadInput: if one has no ``=``.
    """
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise BadInput("set", pair, "write key=value, such as --set steps=1000")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


def parse_elastic(text: str) -> ElasticPolicy | None:
    """``2..8``, or the name of a file that :func:`chaoskit.elastic.settings.read_policy` reads.

    Raises:
        BadInput: if it is neither.
    """
    if not text:
        return None
    least, dots, most = text.partition("..")
    if dots and least.isdecimal() and most.isdecimal():
        policy = ElasticPolicy(min_replicas=int(least), max_replicas=int(most), scaling_timeout_s=0.0)
        validate_policy(policy)
        return policy
    try:
        return read_policy(Path(text).read_bytes())
    except OSError as error:
        raise BadInput("elastic", text, f"write MIN..MAX, such as 2..8, or a file's name ({error.strerror})") from None


def parse_follow(rule: str, warmup_steps: int) -> dict[str, Any] | None:
    """The setting ``follow``; None without a rule.

    Raises:
        BadInput: for a warm-up of a batch that stays.
    """
    if not rule and warmup_steps:
        raise BadInput("follow_warmup_steps", warmup_steps, "name a rule with --follow, too: else no rate ever changes")
    return {"rule": rule, "warmup_steps": warmup_steps} if rule else None


def fresh_directory(directory: Path | None, name: str) -> Path:
    """``directory``, or a new one below ``chaoskit-runs`` that says what and when.

    Raises:
        BadInput: if it cannot be written, or holds a run already.
    """
    if directory is None:
        now = datetime.now(UTC).astimezone()
        directory = Path("chaoskit-runs") / f"{name}-{now:%Y%m%d-%H%M%S}-{os.getpid()}"
    if (directory / "journal").exists():
        raise BadInput("report", str(directory), "choose another directory: this one holds a run already")
    require_writable("report", directory)
    return directory


def launch(
    job: str,
    *,
    report: str | Path | None = None,
    options: dict[str, Any] | None = None,
    substrate: str = choice.LOCAL,
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
    directory = Path(report) if report is not None else None
    quiet = Console(quiet=True)
    return launch_shown(job, quiet, directory=directory, options=options or {}, substrate=substrate, **settings)


def launch_shown(
    job: str,
    console: Console,
    *,
    directory: Path | None,
    options: dict[str, Any],
    port: int = 0,
    substrate: str = choice.LOCAL,
    control_port: int = 0,
    metrics_port: int | None = None,
    metrics_host: str = LOOPBACK,
    otlp_endpoint: str = "",
    **settings: Any,
) -> LaunchResult:
    """As :func:`launch`, with a view of the training on ``console``.

    Args:
        control_port: where the launcher takes requests, such as those of ``chaoskit scale``; 0 for any.
        metrics_port, metrics_host, otlp_endpoint: see :class:`chaoskit.observe.watching.Observation`.
        settings: fields of :class:`chaoskit.config.RunConfig`.

    Raises:
        BadInput: before anything is started, or when the job refuses its input. HarnessError: chaoskit failed.
    """
    kept_out = KeptOut(enforce=settings.get("health", "enforce") == "enforce")
    experiment = plan_experiment(job, options=options, deadline_s=math.inf, **kept_out.settings(), **settings)
    if substrate == choice.LOCAL:  # elsewhere the coordinator has an address of its own
        require_free_port("port", "127.0.0.1", port)
    choice.require(substrate)
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

        watch_all = kept_out.watching(watch)
        run = _execute(experiment, substrate, directory, view, watch_all, port, control_port, console)
    kept_out.conclude()
    if observation.exported is False:
        console.print(Text(f"{otlp_endpoint} did not take all spans: see chaoskit trace", "yellow"), soft_wrap=True)
    result = _result(experiment, progress, directory, kept_out.refused, run.ended_ns / 1e9)
    result.account = observation.account(run.ended_ns)
    return result


def _execute(
    experiment: Experiment,
    substrate: str,
    directory: Path,
    view: View,
    watch: Watch,
    port: int,
    control_port: int,
    console: Console,
) -> RawRun:
    place, undo, requests = choice.make(substrate), UndoLog(), Requests()
    try:
        with listening(requests, directory, control_port), view.shown():
            return execute(experiment, place, undo, directory, watch=watch, port=port, requests=requests)
    finally:
        place.close()
        undo.close()


def _result(
    experiment: Experiment, progress: Progress, directory: Path, unfit: dict[str, str], ended_s: float
) -> LaunchResult:
    assert progress.end is not None, "without a deadline, a run returns when the job has ended"
    last = _last_commit(directory / "journal")
    result = LaunchResult(
        ok=progress.end.ok,
        reason=progress.end.reason,
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
        cut_short_by=progress.cut_short_by,
        unfit=unfit,
    )
    if result.ok:
        result.not_stored = why_not_stored(experiment.config, directory / "journal")
    else:
        result.error = progress.error
        result.error_log = str(_log_of(progress.culprit, directory / "log"))
    return result


def _last_commit(journals: Path) -> Record | None:
    commits = [record for record in read_tail(journals) if record.event == Event.COMMIT]
    return max(commits, key=lambda record: int(record["step"]), default=None)


def _log_of(worker: str, logs: Path) -> Path:
    """Where ``worker`` wrote; what a zygote writes lies with its agent's words."""
    own = logs / f"{worker}.log"
    return own if own.exists() else logs / f"{worker.rpartition('.')[0] or 'coordinator'}.log"


def plain(result: LaunchResult) -> dict[str, Any]:
    """For JSON."""
    told = dict(msgspec.to_builtins(result))
    return told | {"account": result.account.plain() if result.account else None}


def print_result(result: LaunchResult, console: Console) -> None:
    """The end of a launch, for people."""
    seconds = result.training_seconds
    rate = f" ({number(result.steps / seconds)} steps/s)" if result.steps and seconds else ""
    steps = f"{plural(result.steps, 'step')} in {clock(seconds)}{rate}"
    loss = "" if result.loss is None else f", last loss {result.loss:.6g}"
    if result.ok:
        console.print(Text.assemble(("training completed", "bold green"), f": {steps}{loss}"), soft_wrap=True)
    else:
        console.print(Text.assemble(("training failed", "bold red"), f": {result.reason}"), soft_wrap=True)
        _print_error(result, console)
        console.print(Text(f"{steps}{loss}"), soft_wrap=True)
    if result.not_stored:
        console.print(Text.assemble(("not stored", "bold red"), f": {result.not_stored}"), soft_wrap=True)
        hint = "give the same command again: it goes on from the newest snapshot, and stores the end"
        console.print(Text(hint, "dim"), soft_wrap=True)
    if result.cut_short_by:
        told = f": {result.cut_short_by} returned from its train function; other ranks would have taken another step"
        console.print(Text.assemble((f"ended after step {result.steps}", "yellow"), told), soft_wrap=True)
        hint = "where that is not meant: decide from what all ranks have, such as trainer.step"
        console.print(Text(hint, "dim"), soft_wrap=True)
    for node, reason in result.unfit.items():
        console.print(Text.assemble((f"{node} is not fit to train", "yellow"), f": {reason}"), soft_wrap=True)
        hint = f'to keep it out of other runs: chaoskit quarantine add {node} --reason "..."'
        console.print(Text(hint, "dim"), soft_wrap=True)
    if result.recoveries:
        times = ", ".join(map(duration, result.recoveries[-5:]))
        more = "the last ones " if len(result.recoveries) > 5 else ""
        count = plural(len(result.recoveries), "time")
        console.print(Text(f"recovered {count}: {more}{times} from loss to next step"), soft_wrap=True)
    if result.account is not None:
        console.print(render_account(result.account), soft_wrap=True)
    console.print(Text(f"journals and worker output: {result.directory}", "dim"), soft_wrap=True)


def _print_error(result: LaunchResult, console: Console) -> None:
    if result.error:
        console.print(Text(f"the last error: {result.error}", "red"), soft_wrap=True)
    try:
        lines = Path(result.error_log).read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
    except OSError:
        return
    if lines:
        console.print(Text(f"end of {result.error_log}:", "dim"), soft_wrap=True)
        console.print(Text("\n".join(f"  {line}" for line in lines)), soft_wrap=True)
