"""``chaoskit launch``: train a script with recovery.

-> launcher/launch.py: the training and its result. config.py: the settings.
-> launcher/notice.py: signals that end it. runtime/step/restore.py: the copy that a rank reads.
"""

from __future__ import annotations

import itertools
import json
import shlex
import signal
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from chaoskit.cli.output import EXIT_FAILED, Json, command_app, console, end_in_order, print_json
from chaoskit.elastic.settings import ElasticPolicy, read_policy, validate_policy
from chaoskit.errors import BadInput
from chaoskit.experiment.plan.plan import require_settings
from chaoskit.job import reference_jobs
from chaoskit.launcher.launch import LaunchResult, launch_shown
from chaoskit.launcher.notice import GRACE_S, StopNotice, notice_signals
from chaoskit.launcher.view import clock
from chaoskit.plaintext import plural
from chaoskit.report.summary import duration, number
from chaoskit.report.times import render_account

_LOG_LINES = 15

#: Settings whose option has another name.
FIELDS = {
    "job": "SCRIPT",
    "options": "--set",
    "disk": "--checkpoints",
    "disk.every_steps": "--checkpoint-every",
    "disk.every_s": "--checkpoint-every-s",
    "disk.keep_last": "--keep",
    "remote.every_steps": "--remote-every",
    "remote.every_s": "--remote-every-s",
    "remote.keep_last": "--keep",
    "follow.rule": "--follow",
    "follow.warmup_steps": "--follow-warmup-steps",
}

#: Options that require another one.
_REQUIRED_OPTIONS = {
    "checkpoint_every": "checkpoints",
    "checkpoint_every_s": "checkpoints",
    "keep": "checkpoints",
    "remote_every": "remote",
    "remote_every_s": "remote",
    "follow_warmup_steps": "follow",
}

app = command_app()


def script_words() -> list[str]:
    """Return words for completion in a shell: reference jobs and scripts in this directory."""
    return [*reference_jobs(), *sorted(path.name for path in Path().glob("*.py"))]


@app.command()
def launch(
    context: typer.Context,
    script: Annotated[
        str,
        typer.Argument(
            help="train.py, train.py:function, or a reference job such as gpt.",
            autocompletion=script_words,
        ),
    ],
    nodes: Annotated[int, typer.Option(help="Nodes of the full world, with one rank each.")] = 4,
    spares: Annotated[
        int, typer.Option(help="Warm workers that wait to replace lost workers.")
    ] = 1,
    min_world: Annotated[
        int, typer.Option(help="Smallest world that trains; a smaller one waits for spares.")
    ] = 1,
    shards: Annotated[
        int, typer.Option(help="Slices of the global batch, at least --nodes; 0 for --nodes.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Random seed for weights, data order and dropout.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    reduction: Annotated[
        str, typer.Option(help="exact: same bits at every world size. fast: plain all-reduce.")
    ] = "exact",
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Option of the train function; repeatable."
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Any field of chaoskit.RunConfig, such as hang_steps=5; repeatable.",
        ),
    ] = None,
    checkpoints: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Store the state in this directory, which all nodes must share."
        ),
    ] = None,
    checkpoint_every: Annotated[
        int, typer.Option(metavar="N", help="Steps between two snapshots on disk.")
    ] = 100,
    checkpoint_every_s: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Seconds between two snapshots on disk, if they pass first; 0 for no limit.",
        ),
    ] = 0.0,
    keep: Annotated[int, typer.Option(help="Number of newest snapshots to keep; 0 keeps all.")] = 2,
    remote: Annotated[
        str,
        typer.Option(
            metavar="URL", help="Upload snapshots to this store, such as s3://bucket/run."
        ),
    ] = "",
    remote_every: Annotated[
        int, typer.Option(metavar="N", help="Steps between two uploads, at least.")
    ] = 1000,
    remote_every_s: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Seconds between two uploads, if they pass first; 0 for no limit.",
        ),
    ] = 0.0,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on from the newest snapshot.")
    ] = True,
    health: Annotated[
        str,
        typer.Option(
            help="enforce: unfit nodes get no workers. report: log the findings. off: no checks."
        ),
    ] = "enforce",
    elastic: Annotated[
        str,
        typer.Option(
            metavar="MIN..MAX|FILE",
            help="Range of sizes that `chaoskit scale` may set, or a policy file.",
        ),
    ] = "",
    follow: Annotated[
        str,
        typer.Option(
            metavar="RULE",
            help="Scale the batch with the world, and hyperparameters by this rule: linear (SGD), "
            "square-root (Adam) or none.",
        ),
    ] = "",
    follow_warmup_steps: Annotated[
        int, typer.Option(help="Number of steps in which a higher learning rate is reached.")
    ] = 0,
    rules: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Log rules in HyperPod's format: the lines that ranks must print, and how often.",
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the coordinator; 0 chooses a free one.")] = 0,
    control_port: Annotated[
        int, typer.Option(help="Port of the control API, on loopback; 0 chooses a free one.")
    ] = 0,
    substrate: Annotated[
        str,
        typer.Option(
            help="local: nodes are processes. netns: in networks of their own, with no route out. "
            "docker: in containers."
        ),
    ] = "local",
    report: Annotated[
        Path | None, typer.Option(help="Directory for journals and worker output.")
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT", help="Serve Prometheus metrics on this port; 0 chooses a free one."
        ),
    ] = None,
    metrics_host: Annotated[
        str, typer.Option(metavar="HOST", help="Address at which metrics are served.")
    ] = "127.0.0.1",
    otlp_endpoint: Annotated[
        str,
        typer.Option(
            metavar="URL", help="Send a trace with every recovery to this OTLP/HTTP receiver."
        ),
    ] = "",
    notice_signal: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Signal that stores the state and ends the job, as SIGTERM does; repeatable.",
        ),
    ] = None,
    grace: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Time from such a signal to the end; at most what the scheduler allows.",
        ),
    ] = GRACE_S,
    is_json: Json = False,
) -> int:
    """Train a script, and keep training when ranks are lost.

    The script defines [bold]train(trainer, ...)[/]. Workers that die, hang, raise or compute NaN
    are replaced; the others go on without losing a step.

    With [bold]--checkpoints[/] the state is also stored on disk. If all nodes are lost, they are
    started again, and the job resumes from the stored state. The same command, given again, also
    resumes it. A launch that fails prints that command.

    With [bold]--rules[/] (a list of rules, or YAML with logMonitoringConfiguration) the log of
    every rank is watched. Ranks that match a rule with the action restart-process are replaced.

    SIGTERM, SIGUSR1 and SIGHUP finish the step, store it if there are checkpoints, end everything
    and print the command that resumes the job. A second signal, and Ctrl-C, end everything at once.

    Exit code 0: trained, 1: failed, or the end is not stored, 2: bad input, 11: chaoskit itself
    failed, 128 + n: ended by signal n.

    Example: [cyan]chaoskit launch train.py --nodes 4 --set steps=1000 --setting hang_steps=5[/]
    """
    values, given_names = context.params, _given_parameters(context)
    for name in _REQUIRED_OPTIONS.keys() & given_names:
        if _REQUIRED_OPTIONS[name] not in given_names:
            raise BadInput(
                name,
                values[name],
                f"give --{_REQUIRED_OPTIONS[name]}, too: without it, this option has no effect",
            )
    settings: dict[str, Any] = {
        name: values[name]
        for name in (
            "nodes",
            "spares",
            "min_world",
            "shards",
            "seed",
            "device",
            "reduction",
            "health",
        )
    }
    settings["elastic"] = parse_elastic(elastic)
    settings["follow"] = {"rule": follow, "warmup_steps": follow_warmup_steps} if follow else None
    settings["resume"] = resume and checkpoints is not None
    if checkpoints is not None:
        intervals = {"every_steps": checkpoint_every, "every_s": checkpoint_every_s}
        settings["disk"] = {"target": str(checkpoints.resolve()), "keep_last": keep, **intervals}
    if remote:
        intervals = {"every_steps": remote_every, "every_s": remote_every_s}
        settings["remote"] = {"target": remote, "keep_last": keep, **intervals}
    if rules is not None:
        settings["rules"] = rules
    _merge(settings, parse_settings(setting or []), given_names)
    terminal = console(is_json)
    notice = StopNotice(notice_signals(notice_signal or []), grace, end_in_order)
    with notice.installed():
        result = launch_shown(
            script,
            terminal,
            directory=report,
            options=parse_options(options or []),
            port=port,
            substrate=substrate,
            control_port=control_port,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
            otlp_endpoint=otlp_endpoint,
            notice=notice,
            **settings,
        )
        if result.stored is not None:
            result.resume = resume_command(context)
        print_result(result, terminal)
        if is_json:
            print_json(plain(result))
    if result.stopped_by:
        return 128 + signal.Signals[result.stopped_by]
    return 0 if result.ok and not result.not_stored else EXIT_FAILED


def resume_command(context: typer.Context) -> str:
    """Return the command line that resumes a launch.

    It is the command line of the launch without ``--no-resume``, and with a new directory for
    ``--report``, if that was given.
    """
    words = ["chaoskit", "launch"]
    given_names = _given_parameters(context)
    for parameter in context.command.params:
        name, setting = str(parameter.name), context.params.get(str(parameter.name))
        if name not in given_names or name == "resume":
            continue
        if name == "report":
            setting = _next_directory(Path(str(setting)))
        option = [] if parameter.param_type_name == "argument" else [parameter.opts[0]]
        if isinstance(setting, bool):
            words += option if setting else parameter.secondary_opts[:1]
        else:
            for part in setting if isinstance(setting, list | tuple) else [setting]:
                words += [*option, str(part)]
    return shlex.join(words)


def _next_directory(report: Path) -> Path:
    """Return ``run-2`` for ``run``, or the next name that is free."""
    return next(
        path
        for n in itertools.count(2)
        if not (path := report.with_name(f"{report.name}-{n}")).exists()
    )


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """Return the options of a train function, given as ``key=value``, by key.

    A value that is not JSON is a text.

    Raises:
        BadInput: if a pair has no ``=``, or a key is no identifier or occurs twice.
    """
    options = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.isidentifier():
            raise BadInput("options", pair, "write key=value, such as --set steps=1000")
        if key in options:
            raise BadInput("options", pair, f"leave one out: --set {key} is given twice")
        options[key] = _parse_value(text)
    return options


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """Return the settings, given as ``name=value``, by name.

    The name ``disk.keep_every`` stands for a field of a tier. A value that is not JSON is a text.

    Raises:
        BadInput: if a pair has no ``=``, a setting does not exist, or it occurs twice.
    """
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise BadInput("setting", pair, "write NAME=VALUE, such as --setting hang_steps=5")
        require_settings({name.partition(".")[0]: text})
        if name in settings:
            raise BadInput("setting", pair, f"leave one out: --setting {name} is given twice")
        settings[name] = _parse_value(text)
    return settings


def _given_parameters(context: typer.Context) -> set[str]:
    """Return the names of the parameters that the command line gives; the others have defaults."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {
        name
        for name, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    }


def _merge(
    settings: dict[str, Any], written_settings: dict[str, Any], given_names: set[str]
) -> None:
    """Add written settings to ``settings``. A name such as ``disk.keep_every`` sets a field of one.

    Args:
        written_settings: the settings that :func:`parse_settings` returns.
        given_names: the names of the options that the command line gives.

    Raises:
        BadInput: if a setting is also given by its own option.
    """
    for name, setting in written_settings.items():
        option = FIELDS.get(name) or f"--{name.replace('_', '-')}"
        if option.removeprefix("--").replace("-", "_") in given_names:
            raise BadInput(
                "setting", f"{name}={setting}", f"leave it out: {option} gives this setting"
            )
        owner, dot, part = name.partition(".")
        if dot:
            fields = msgspec.to_builtins(settings.get(owner))
            settings[owner] = (
                {**fields, part: setting} if isinstance(fields, dict) else {part: setting}
            )
        else:
            settings[name] = setting


def _parse_value(text: str) -> Any:
    """Return the value of a JSON text, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def parse_elastic(text: str) -> ElasticPolicy | None:
    """Return an elastic policy; None if the text is empty.

    Args:
        text: a range such as ``2..8``, or the name of a file that :func:`read_policy` reads.

    Raises:
        BadInput: if it is neither, or the policy is invalid.
    """
    if not text:
        return None
    least, dots, most = text.partition("..")
    try:
        if dots and least.isdecimal() and most.isdecimal():
            policy = ElasticPolicy(
                min_replicas=int(least), max_replicas=int(most), scaling_timeout_s=0.0
            )
            validate_policy(policy)
            return policy
        return read_policy(Path(text).read_bytes())
    except BadInput as error:
        raise BadInput("elastic", text, str(error)) from None
    except OSError as error:
        raise BadInput(
            "elastic", text, f"write MIN..MAX, such as 2..8, or a file's name ({error.strerror})"
        ) from None


def plain(result: LaunchResult) -> dict[str, Any]:
    """Return the result as JSON values."""
    fields = dict(msgspec.to_builtins(result))
    return fields | {"account": result.account.plain() if result.account else None}


def print_result(result: LaunchResult, terminal: Console) -> None:
    """Print the result of a launch: its end, what is stored, unfit nodes, recoveries and time."""
    seconds = result.training_seconds
    trained = result.steps - result.resumed_from
    rate = f" ({number(trained / seconds)} steps/s)" if trained and seconds else ""
    steps = f"{plural(result.steps, 'step')} in {clock(seconds)}{rate}"
    loss = "" if result.loss is None else f", last loss {result.loss:.6g}"
    if result.ok:
        terminal.print(
            Text.assemble(("training completed", "bold green"), f": {steps}{loss}"), soft_wrap=True
        )
    elif result.stopped_by:
        words = f": by {result.stopped_by} after {steps}{loss}"
        terminal.print(Text.assemble(("training stopped", "bold yellow"), words), soft_wrap=True)
        if result.reason:
            terminal.print(Text(result.reason), soft_wrap=True)
    else:
        terminal.print(
            Text.assemble(("training failed", "bold red"), f": {result.reason}"), soft_wrap=True
        )
        _print_error(result, terminal)
        terminal.print(Text(f"{steps}{loss}"), soft_wrap=True)
    if result.not_stored:
        terminal.print(
            Text.assemble(("not stored", "bold red"), f": {result.not_stored}"), soft_wrap=True
        )
    _print_stored(result, terminal)
    if result.cut_short_by:
        explanation = f": {result.cut_short_by} returned from its train function; other ranks would have taken another step"
        terminal.print(
            Text.assemble((f"ended after step {result.steps}", "yellow"), explanation),
            soft_wrap=True,
        )
        hint = (
            "if this was not intended, decide on values that all ranks share, such as trainer.step"
        )
        terminal.print(Text(hint, "dim"), soft_wrap=True)
    for node, reason in result.unfit.items():
        terminal.print(
            Text.assemble((f"{node} is not fit to train", "yellow"), f": {reason}"), soft_wrap=True
        )
        hint = f'to keep it out of other runs: chaoskit node cordon {node} --reason "..."'
        terminal.print(Text(hint, "dim"), soft_wrap=True)
    if result.recoveries:
        times = ", ".join(map(duration, result.recoveries[-5:]))
        selection = "the last ones " if len(result.recoveries) > 5 else ""
        count = plural(len(result.recoveries), "time")
        terminal.print(
            Text(f"recovered {count}: {selection}{times} from loss to next step"), soft_wrap=True
        )
    if result.account is not None:
        terminal.print(render_account(result.account), soft_wrap=True)
    terminal.print(Text(f"journals and worker output: {result.directory}", "dim"), soft_wrap=True)


def _print_stored(result: LaunchResult, terminal: Console) -> None:
    """Print the stored step and the command that resumes from it, or why nothing is stored."""
    if result.stored is not None:
        step, age = result.stored.step, duration(result.stored.age_s)
        terminal.print(
            Text(f"stored: step {step} in {result.stored.path}, {age} old"), soft_wrap=True
        )
        terminal.print(Text(f"to resume from step {step}: {result.resume}"), soft_wrap=True)
    elif result.nothing_stored and result.steps:
        terminal.print(Text(f"nothing is stored: {result.nothing_stored}"), soft_wrap=True)


def _print_error(result: LaunchResult, terminal: Console) -> None:
    """Print the last error of a worker and the end of its log, as far as they are known."""
    if result.error and result.error not in result.reason:
        terminal.print(Text(f"the last error: {result.error}", "red"), soft_wrap=True)
    try:
        lines = (
            Path(result.error_log)
            .read_text(encoding="utf-8", errors="replace")
            .splitlines()[-_LOG_LINES:]
        )
    except OSError:
        return
    if lines:
        terminal.print(Text(f"end of {result.error_log}:", "dim"), soft_wrap=True)
        terminal.print(Text("\n".join(f"  {line}" for line in lines)), soft_wrap=True)
