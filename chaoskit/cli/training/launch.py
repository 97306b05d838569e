"""``chaoskit launch``: train a script with recovery."""

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

#: Options that say something about another one, which must be given, too.
_ABOUT = {
    "checkpoint_every": "checkpoints",
    "checkpoint_every_s": "checkpoints",
    "keep": "checkpoints",
    "remote_every": "remote",
    "remote_every_s": "remote",
    "follow_warmup_steps": "follow",
}

app = command_app()


def script_words() -> list[str]:
    """Return the words that a shell completes: reference jobs, and the scripts of the working directory."""
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
    nodes: Annotated[int, typer.Option(help="Ranks of the full world.")] = 4,
    spares: Annotated[int, typer.Option(help="Warm workers that wait to replace a lost one.")] = 1,
    min_world: Annotated[
        int, typer.Option(help="Fewest ranks that train; with fewer the run waits.")
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
            metavar="DIR", help="Where the state is stored: a directory that all nodes see."
        ),
    ] = None,
    checkpoint_every: Annotated[
        int, typer.Option(metavar="N", help="Steps between two snapshots there.")
    ] = 100,
    checkpoint_every_s: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="The same by time, whichever comes first; 0 for never."
        ),
    ] = 0.0,
    keep: Annotated[
        int, typer.Option(help="How many of the newest snapshots are kept; 0 for all.")
    ] = 2,
    remote: Annotated[
        str,
        typer.Option(
            metavar="URL", help="Where snapshots are uploaded to, such as s3://bucket/run."
        ),
    ] = "",
    remote_every: Annotated[
        int, typer.Option(metavar="N", help="Steps between two uploads, at least.")
    ] = 1000,
    remote_every_s: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="The same by time, whichever comes first; 0 for never."
        ),
    ] = 0.0,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on from the newest snapshot.")
    ] = True,
    health: Annotated[
        str,
        typer.Option(
            help="enforce: unfit nodes get no workers. report: only log the finding. off: do not look."
        ),
    ] = "enforce",
    elastic: Annotated[
        str,
        typer.Option(
            metavar="MIN..MAX|FILE",
            help="Sizes that `chaoskit scale` may give it, or a policy file.",
        ),
    ] = "",
    follow: Annotated[
        str,
        typer.Option(
            metavar="RULE",
            help="Let the batch follow the world: linear (SGD), square-root (Adam) or none.",
        ),
    ] = "",
    follow_warmup_steps: Annotated[
        int, typer.Option(help="Steps in which a higher learning rate is reached.")
    ] = 0,
    rules: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Log rules, as HyperPod has them: what each rank must print, and how often.",
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the coordinator; 0 chooses a free one.")] = 0,
    control_port: Annotated[
        int, typer.Option(help="Port of the control API, on loopback; 0 chooses a free one.")
    ] = 0,
    substrate: Annotated[
        str,
        typer.Option(
            help="local; netns: each node in a network of its own, with no way out; docker: in a container."
        ),
    ] = "local",
    report: Annotated[
        Path | None, typer.Option(help="Directory for journals and worker output.")
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(metavar="PORT", help="Serve Prometheus metrics there; 0 for any free one."),
    ] = None,
    metrics_host: Annotated[
        str, typer.Option(metavar="HOST", help="Address at which metrics are served.")
    ] = "127.0.0.1",
    otlp_endpoint: Annotated[
        str, typer.Option(metavar="URL", help="OTLP/HTTP receiver of a trace with every recovery.")
    ] = "",
    notice_signal: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A signal that stores the state and ends, as SIGTERM does; repeatable.",
        ),
    ] = None,
    grace: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="From such a signal to the end: no more than the scheduler gives.",
        ),
    ] = GRACE_S,
    machine: Json = False,
) -> int:
    """Train a script, and keep training when ranks are lost.

    The script defines [bold]train(trainer, ...)[/]. Workers that die, hang, raise or
    compute NaN are replaced; the others go on without losing a step.
    With [bold]--checkpoints[/] the state is stored, too: nodes that are all lost are
    started again, and the job goes on from there, as it does when the same command is
    given again. A launch that fails prints that command.
    With [bold]--rules[/] (a list of them, or the YAML with logMonitoringConfiguration)
    the log of every rank is watched, and ranks that match a rule with the action
    restart-process are replaced. SIGTERM, SIGUSR1 and SIGHUP finish the step, store it
    where there are checkpoints, end everything and print the command that goes on; a
    second signal, and Ctrl-C, end everything at once.

    Exit code 0: trained, 1: failed, or the end is not stored, 2: bad input, 11:
    chaoskit itself failed, 128 + n: ended by signal n.

    Example: [cyan]chaoskit launch train.py --nodes 4 --set steps=1000 --setting hang_steps=5[/]
    """
    given, typed = context.params, _typed(context)
    for name in _ABOUT.keys() & typed:
        if _ABOUT[name] not in typed:
            raise BadInput(name, given[name], f"give --{_ABOUT[name]}, too: else it says nothing")
    settings: dict[str, Any] = {
        name: given[name]
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
        often = {"every_steps": checkpoint_every, "every_s": checkpoint_every_s}
        settings["disk"] = {"target": str(checkpoints.resolve()), "keep_last": keep, **often}
    if remote:
        often = {"every_steps": remote_every, "every_s": remote_every_s}
        settings["remote"] = {"target": remote, "keep_last": keep, **often}
    if rules is not None:
        settings["rules"] = rules
    _merge(settings, parse_settings(setting or []), typed)
    shown = console(machine)
    notice = StopNotice(notice_signals(notice_signal or []), grace, end_in_order)
    with notice.installed():
        result = launch_shown(
            script,
            shown,
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
        print_result(result, shown)
        if machine:
            print_json(plain(result))
    if result.stopped_by:
        return 128 + signal.Signals[result.stopped_by]
    return 0 if result.ok and not result.not_stored else EXIT_FAILED


def resume_command(context: typer.Context) -> str:
    """Return the command line of a launch as it is to be given again: with another directory for the report."""
    words = ["chaoskit", "launch"]
    typed = _typed(context)
    for parameter in context.command.params:
        name, value = str(parameter.name), context.params.get(str(parameter.name))
        if name not in typed or name == "resume":
            continue
        if name == "report":
            value = _next_directory(Path(str(value)))
        option = [] if parameter.param_type_name == "argument" else [parameter.opts[0]]
        if isinstance(value, bool):
            words += option if value else parameter.secondary_opts[:1]
        else:
            for one in value if isinstance(value, list | tuple) else [value]:
                words += [*option, str(one)]
    return shlex.join(words)


def _next_directory(report: Path) -> Path:
    """``run-2`` for ``run``, or the first number that is free."""
    return next(
        path
        for n in itertools.count(2)
        if not (path := report.with_name(f"{report.name}-{n}")).exists()
    )


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """Return ``key=value`` texts as options of a train function; a value that is not JSON is a text.

    Raises:
        BadInput: if one has no ``=``, or a key is there twice.
    """
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise BadInput("options", pair, "write key=value, such as --set steps=1000")
        if key in options:
            raise BadInput("options", pair, f"leave one out: --set {key} is there twice")
        options[key] = _value(value)
    return options


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """Return ``name=value`` texts as settings; ``disk.keep_every=1000`` sets a field of a tier.

    Raises:
        BadInput: if one has no ``=``, there is no such setting, or it is there twice.
    """
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise BadInput("setting", pair, "write NAME=VALUE, such as --setting hang_steps=5")
        require_settings({name.partition(".")[0]: value})
        if name in settings:
            raise BadInput("setting", pair, f"leave one out: --setting {name} is there twice")
        settings[name] = _value(value)
    return settings


def _typed(context: typer.Context) -> set[str]:
    """The parameters that the command line gives; the others have their defaults."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {
        name
        for name, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    }


def _merge(settings: dict[str, Any], more: dict[str, Any], typed: set[str]) -> None:
    """Add ``more`` to ``settings``. Raises BadInput if the command line gives one of them by its own option, too."""
    for name, value in more.items():
        option = FIELDS.get(name) or f"--{name.replace('_', '-')}"
        if option.removeprefix("--").replace("-", "_") in typed:
            raise BadInput(
                "setting", f"{name}={value}", f"leave it out: {option} gives this setting"
            )
        owner, dot, part = name.partition(".")
        if dot:
            inner = msgspec.to_builtins(settings.get(owner))
            settings[owner] = {**inner, part: value} if isinstance(inner, dict) else {part: value}
        else:
            settings[name] = value


def _value(text: str) -> Any:
    """JSON, or else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def parse_elastic(text: str) -> ElasticPolicy | None:
    """Return the policy for ``2..8``, or for the name of a file that :func:`read_policy` reads; None for no text.

    Raises:
        BadInput: if it is neither.
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
    told = dict(msgspec.to_builtins(result))
    return told | {"account": result.account.plain() if result.account else None}


def print_result(result: LaunchResult, shown: Console) -> None:
    """Print the end of a launch."""
    seconds = result.training_seconds
    trained = result.steps - result.resumed_from
    rate = f" ({number(trained / seconds)} steps/s)" if trained and seconds else ""
    steps = f"{plural(result.steps, 'step')} in {clock(seconds)}{rate}"
    loss = "" if result.loss is None else f", last loss {result.loss:.6g}"
    if result.ok:
        shown.print(
            Text.assemble(("training completed", "bold green"), f": {steps}{loss}"), soft_wrap=True
        )
    elif result.stopped_by:
        words = f": by {result.stopped_by} after {steps}{loss}"
        shown.print(Text.assemble(("training stopped", "bold yellow"), words), soft_wrap=True)
        if result.reason:
            shown.print(Text(result.reason), soft_wrap=True)
    else:
        shown.print(
            Text.assemble(("training failed", "bold red"), f": {result.reason}"), soft_wrap=True
        )
        _print_error(result, shown)
        shown.print(Text(f"{steps}{loss}"), soft_wrap=True)
    if result.not_stored:
        shown.print(
            Text.assemble(("not stored", "bold red"), f": {result.not_stored}"), soft_wrap=True
        )
    _print_stored(result, shown)
    if result.cut_short_by:
        told = f": {result.cut_short_by} returned from its train function; other ranks would have taken another step"
        shown.print(
            Text.assemble((f"ended after step {result.steps}", "yellow"), told), soft_wrap=True
        )
        hint = (
            "if this was not intended, decide on values that all ranks share, such as trainer.step"
        )
        shown.print(Text(hint, "dim"), soft_wrap=True)
    for node, reason in result.unfit.items():
        shown.print(
            Text.assemble((f"{node} is not fit to train", "yellow"), f": {reason}"), soft_wrap=True
        )
        hint = f'to keep it out of other runs: chaoskit node cordon {node} --reason "..."'
        shown.print(Text(hint, "dim"), soft_wrap=True)
    if result.recoveries:
        times = ", ".join(map(duration, result.recoveries[-5:]))
        more = "the last ones " if len(result.recoveries) > 5 else ""
        count = plural(len(result.recoveries), "time")
        shown.print(
            Text(f"recovered {count}: {more}{times} from loss to next step"), soft_wrap=True
        )
    if result.account is not None:
        shown.print(render_account(result.account), soft_wrap=True)
    shown.print(Text(f"journals and worker output: {result.directory}", "dim"), soft_wrap=True)


def _print_stored(result: LaunchResult, shown: Console) -> None:
    """Print where a job that did not end as it should can go on."""
    if result.stored is not None:
        step, age = result.stored.step, duration(result.stored.age_s)
        shown.print(Text(f"stored: step {step} in {result.stored.path}, {age} old"), soft_wrap=True)
        shown.print(Text(f"to go on from step {step}: {result.resume}"), soft_wrap=True)
    elif result.nothing_stored and result.steps:
        shown.print(Text(f"nothing is stored: {result.nothing_stored}"), soft_wrap=True)


def _print_error(result: LaunchResult, shown: Console) -> None:
    if result.error and result.error not in result.reason:
        shown.print(Text(f"the last error: {result.error}", "red"), soft_wrap=True)
    try:
        lines = (
            Path(result.error_log)
            .read_text(encoding="utf-8", errors="replace")
            .splitlines()[-_LOG_LINES:]
        )
    except OSError:
        return
    if lines:
        shown.print(Text(f"end of {result.error_log}:", "dim"), soft_wrap=True)
        shown.print(Text("\n".join(f"  {line}" for line in lines)), soft_wrap=True)
