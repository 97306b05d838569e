"""The command ``chaoskit``. Torch and the harness are imported by the commands that need them, not for ``--help``."""

from __future__ import annotations

import io
import json
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chaoskit.errors import BadInput, HarnessError
from chaoskit.faces import checkpoints, health, observing, quarantine, resizing, rules
from chaoskit.faces.ending import USAGE_ERROR, end_in_order, misused, print_json, refuse
from chaoskit.vocabulary import Verdict

if TYPE_CHECKING:
    from rich.console import Console

_EXIT_FAILED = 1
_EXIT_INTERRUPTED = 130

app = typer.Typer(
    help="Break distributed PyTorch training for real, and judge with evidence how it comes back.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else there.")]


def _console(machine: bool) -> Console:
    """Where people read: standard output, unless a machine reads that."""
    from rich.console import Console

    return Console(stderr=machine, highlight=False)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"chaoskit {installed('chaoskit')}")
        raise typer.Exit


@app.command()
def launch(
    script: Annotated[str, typer.Argument(help="train.py, train.py:function, or a reference job such as gpt.")],
    nodes: Annotated[int, typer.Option(help="Ranks of the full world.")] = 4,
    spares: Annotated[int, typer.Option(help="Warm workers that wait to replace a lost one.")] = 1,
    min_world: Annotated[int, typer.Option(help="Fewest ranks that train; with fewer the run waits.")] = 1,
    shards: Annotated[int, typer.Option(help="Slices of the global batch, at least --nodes; 0 for --nodes.")] = 0,
    seed: Annotated[int, typer.Option(help="Of weights, data order and everything random in the job.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    reduction: Annotated[
        str, typer.Option(help="exact: same bits at every world size. fast: plain all-reduce.")
    ] = "exact",
    options: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Option of the train function; repeatable.")
    ] = None,
    checkpoints: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the state is stored: a directory that all nodes see.")
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(metavar="N", help="Steps between two snapshots there.")] = 100,
    checkpoint_every_s: Annotated[
        float, typer.Option(metavar="SECONDS", help="The same by time, whichever comes first; 0 for never.")
    ] = 0.0,
    keep: Annotated[int, typer.Option(help="How many of the newest snapshots are kept; 0 for all.")] = 2,
    remote: Annotated[
        str, typer.Option(metavar="URL", help="Where snapshots are uploaded to, such as s3://bucket/run.")
    ] = "",
    remote_every: Annotated[int, typer.Option(metavar="N", help="Steps between two uploads, at least.")] = 1000,
    remote_every_s: Annotated[
        float, typer.Option(metavar="SECONDS", help="The same by time, whichever comes first; 0 for never.")
    ] = 0.0,
    health: Annotated[
        str, typer.Option(help="enforce: nodes that are not fit get no workers. report: that is only told. off.")
    ] = "enforce",
    resume: Annotated[bool, typer.Option("--resume/--no-resume", help="Go on from the newest snapshot.")] = True,
    elastic: Annotated[
        str,
        typer.Option(metavar="MIN..MAX|FILE", help="Sizes that `chaoskit scale` may give it, or a policy file."),
    ] = "",
    follow: Annotated[
        str,
        typer.Option(metavar="RULE", help="Let the batch follow the world: linear (SGD), square-root (Adam) or none."),
    ] = "",
    follow_warmup_steps: Annotated[int, typer.Option(help="Steps in which a higher learning rate is reached.")] = 0,
    rules: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Log rules, as HyperPod has them: what each rank must print, and how often."),
    ] = None,
    port: Annotated[int, typer.Option(help="Of the coordinator; 0 for any free one.")] = 0,
    control_port: Annotated[int, typer.Option(help="Where requests are taken, on loopback; 0 for any.")] = 0,
    substrate: Annotated[
        str,
        typer.Option(help="local; netns: each node in a network of its own, with no way out; docker: in a container."),
    ] = "local",
    report: Annotated[Path | None, typer.Option(help="Directory for journals and worker output.")] = None,
    metrics_port: Annotated[
        int | None, typer.Option(metavar="PORT", help="Serve Prometheus metrics there; 0 for any free one.")
    ] = None,
    metrics_host: Annotated[str, typer.Option(metavar="HOST", help="Where they are served.")] = "127.0.0.1",
    otlp_endpoint: Annotated[
        str, typer.Option(metavar="URL", help="OTLP/HTTP receiver of a trace with every recovery.")
    ] = "",
    machine: Json = False,
) -> int:
    """Train a script, and keep training when ranks are lost.

    The script defines [bold]train(trainer, ...)[/]. Workers that die, hang, raise or
    compute NaN are replaced; the others go on without losing a step.
    With [bold]--checkpoints[/] the state is stored, too: the same command, given again
    after everything was lost, goes on from there.
    With [bold]--rules[/] (a list of them, or the YAML with logMonitoringConfiguration)
    the log of every rank is watched, and a rank of which a rule says so is replaced.
    Ctrl-C ends everything.

    Exit code 0: trained, 1: failed, or the end is not stored, 2: bad input, 11:
    chaoskit itself failed.

    Example: [cyan]chaoskit launch train.py --nodes 4 --set steps=1000[/]
    """
    from chaoskit.faces import launch as face

    settings: dict[str, Any] = {
        "nodes": nodes,
        "spares": spares,
        "min_world": min_world,
        "shards": shards,
        "seed": seed,
    }
    settings |= {"device": device, "reduction": reduction, "options": face.parse_options(options or [])}
    settings |= {"substrate": substrate, "health": health}
    settings |= {"control_port": control_port, "elastic": face.parse_elastic(elastic)}
    settings["follow"] = face.parse_follow(follow, follow_warmup_steps)
    settings |= {"metrics_port": metrics_port, "metrics_host": metrics_host, "otlp_endpoint": otlp_endpoint}
    settings["resume"] = resume and checkpoints is not None
    if checkpoints is not None:
        often = {"every_steps": checkpoint_every, "every_s": checkpoint_every_s}
        settings["disk"] = {"target": str(checkpoints.resolve()), "keep_last": keep, **often}
    if remote:
        often = {"every_steps": remote_every, "every_s": remote_every_s}
        settings["remote"] = {"target": remote, "keep_last": keep, **often}
    if rules is not None:
        settings["rules"] = rules
    console = _console(machine)
    result = face.launch_shown(script, console, directory=report, port=port, **settings)
    face.print_result(result, console)
    if machine:
        print_json(face.plain(result))
    return 0 if result.ok and not result.not_stored else _EXIT_FAILED


@app.command()
def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="A tiny model and few steps: seconds instead of a minute.")
    ] = False,
    report: Annotated[Path, typer.Option(help="Directory for the report.")] = Path("chaoskit-demo"),
    machine: Json = False,
) -> int:
    """Kill, freeze and poison a training run, and compare it with the unbroken one.

    A small GPT trains on four processes of this machine, twice: unbroken, then
    with three faults. It shows each way back, phase by phase, and whether every
    loss is the same to the last bit.

    Exit code 0: passed, 1: failed, 2: bad input, 10: unknown, 11: error.

    Example: [cyan]chaoskit demo --quick[/]
    """
    from chaoskit.faces import demo as face

    console = _console(machine)
    outcome = face.demonstrate(console, report, quick=quick)
    face.print_demo(outcome, report, console)
    if machine:
        from chaoskit.report.store import encode_outcome

        files = {"html": str(report / "report.html"), "outcome_json": str(report / "outcome.json")}
        claim = {"verdict": outcome.verdict, "continuity": face.continuity(outcome)}
        print_json({**claim, **files, "outcome": json.loads(encode_outcome(outcome))})
    return outcome.verdict.exit_code


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    suite: Annotated[str, typer.Argument(help="A suite of chaoskit, such as smoke, or a path to tests.")],
    report: Annotated[Path | None, typer.Option(help="Directory for outcomes, journals and report.html.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of every run.")] = None,
    repeats: Annotated[int | None, typer.Option(help="How often each chaos test is run.")] = None,
    machine: Json = False,
) -> int:
    """Run a suite of chaos tests with pytest; further arguments go to pytest.

    Exit code 0: passed, 1: failed, 2: bad input, 10: unknown (a fault has no
    evidence), 11: error (chaoskit itself failed).

    Example: [cyan]chaoskit run smoke -k killed -x[/]
    """
    from chaoskit.config import require_writable
    from chaoskit.faces import launch as launching
    from chaoskit.faces import suite as face
    from chaoskit.report.statistics import estimate_recovery
    from chaoskit.report.store import FILE_NAME, decode_outcome

    face.suite_arguments(suite)  # a wrong name leaves no directory behind
    directory = report or launching.fresh_directory(None, Path(suite.partition("::")[0]).stem)
    require_writable("report", directory)
    earlier = set(directory.rglob(FILE_NAME))
    arguments = [f"--chaos-report={directory}"]
    arguments += [f"--chaos-seed={seed}"] if seed is not None else []
    arguments += [f"--chaos-repeats={repeats}"] if repeats is not None else []
    code = face.run_suite(suite, [*arguments, *context.args], quiet=machine)
    if machine:
        written = [path.read_bytes() for path in sorted({*directory.rglob(FILE_NAME)} - earlier)]
        recovery = estimate_recovery(map(decode_outcome, written)).plain()
        outcomes = [json.loads(data) for data in written]
        print_json({"exit_code": code, "directory": str(directory), "recovery": recovery, "outcomes": outcomes})
    return code


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="A plan: plan.json in the directory of any run, or one you wrote.")],
    times: Annotated[int | None, typer.Option(help="How often to run it; default: once.")] = None,
    shrink: Annotated[
        bool, typer.Option("--shrink", help="Look for the smallest plan that fails in the same way.")
    ] = False,
    budget_s: Annotated[float, typer.Option("--budget-s", help="Time for --shrink, in seconds.")] = 120.0,
    twin: Annotated[bool, typer.Option("--twin/--no-twin", help="Compare with the unbroken run.")] = True,
    substrate: Annotated[
        str, typer.Option(help="local, netns or docker. Default: the first that can do the faults.")
    ] = "",
    report: Annotated[Path | None, typer.Option(help="Directory for journals, outcomes and minimal.json.")] = None,
    machine: Json = False,
) -> int:
    """Run a plan of faults again, exactly as it was.

    Every run of a test leaves its plan beside its journals, as [bold]plan.json[/]: the
    job, all settings and the seed, and each fault with its moment. A plan that
    fails only now and then: [bold]--times 20[/] says how often, with a 95 % interval.
    [bold]--shrink[/] leaves out faults, nodes and steps while it still fails.

    Exit code 0: passed, 1: failed, 2: bad input, 10: unknown, 11: error. Of
    several runs, the worst counts.

    Example: [cyan]chaoskit replay chaoskit-runs/smoke/runs/004-test-one/plan.json --times 20[/]
    """
    from chaoskit.faces import launch as launching
    from chaoskit.faces import replay as face

    if shrink and times is not None:
        raise BadInput("times", times, "leave it out: --shrink runs the plan as often as it needs")
    times = 1 if times is None else times
    experiment = face.open_plan(file, times=times, budget_s=budget_s)
    directory = report or launching.fresh_directory(None, "replay")
    console = _console(machine)
    if shrink:
        shrunk = face.shrink(experiment, console, directory, budget_s=budget_s, twin=twin, substrate=substrate)
        if machine:
            print_json(face.plain_shrunk(shrunk, directory))
        return face.shrunk_verdict(shrunk).exit_code
    result = face.replay(experiment, console, directory, times=times, twin=twin, substrate=substrate)
    face.print_replay(result, directory, console)
    if machine:
        print_json(face.plain(result))
    return result.verdict.exit_code


@app.command()
def janitor(machine: Json = False) -> None:
    """Put back what killed launchers left broken, and touch nothing else.

    It continues processes that were left stopped, ends those left running, and
    removes control groups and containers.
    Every run does it at its start, too. Where only Python's standard library
    works: [cyan]python -m chaoskit.substrate.undo[/]

    Example: [cyan]chaoskit janitor[/]
    """
    from chaoskit.substrate.undo import describe, sweep

    repairs = sweep()
    if machine:
        found = [{"act": one.act, "target": one.target, "repaired": one.repaired} for one in repairs]
        print_json({"repairs": found})
        return
    for repair in repairs:
        typer.echo(describe(repair))
    if not repairs:
        typer.echo("nothing to put back")


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(help="Holds an outcome.json at any depth.")],
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="An HTML page to write.")] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="A JUnit XML file to write.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit by the worst result.")] = False,
    machine: Json = False,
) -> int:
    """Summarize the outcomes below a directory; optionally write HTML or JUnit.

    Exit code 0: done. With [bold]--check[/] 0: all passed, 1: failed, 10: unknown, 11:
    error; the worst counts, and a test that failed after its run is failed.

    Example: [cyan]chaoskit report chaoskit-demo --html page.html --junit junit.xml[/]
    """
    from chaoskit.report.html import write_html
    from chaoskit.report.junit import write_junit
    from chaoskit.report.statistics import estimate_recovery
    from chaoskit.report.store import encode_outcome, read_outcomes
    from chaoskit.report.summary import render_summary

    outcomes = read_outcomes(directory)
    for field, file in (("html", html), ("junit", junit)):
        _require_file(field, file)
    if html is not None:
        write_html(outcomes, html)
    if junit is not None:
        write_junit(outcomes, junit)
    verdict = Verdict.worst([outcome.result for outcome in outcomes])
    if machine:
        plain = [json.loads(encode_outcome(outcome)) for outcome in outcomes]
        recovery = estimate_recovery(outcomes).plain()
        accounts = [one.account.plain() if one.account else None for one in outcomes]
        told = {"verdict": verdict, "recovery": recovery, "accounts": accounts}
        print_json(told | {"outcomes": plain})
    else:
        _console(machine).print(render_summary(outcomes))
    return verdict.exit_code if check else 0


def _require_file(field: str, path: Path | None) -> None:
    """Raises BadInput if a file that is to be written cannot be."""
    from chaoskit.config import require_writable

    if path is not None and path.is_dir():
        example = path / ("page.html" if field == "html" else "junit.xml")
        raise BadInput(field, str(path), f"name a file, such as {example}")
    if path is not None:
        require_writable(field, path.parent)


@app.command()
def faults(
    name: Annotated[str | None, typer.Argument(help="One fault, such as Kill: everything about it.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/faults.md.")] = False,
    machine: Json = False,
) -> None:
    """List what can be broken, and what of it this machine can do.

    With a name: what it does, its parameters, moments and roles, the evidence at
    each level, the real incidents that it stands for, and a line to paste.

    Example: [cyan]chaoskit faults Hang[/]
    """
    from chaoskit.faces import catalogue as face
    from chaoskit.faces.faults_page import render_page

    if markdown and (name or machine):
        raise BadInput("markdown", markdown, "use it alone: the page holds all faults")
    kind = face.find(name) if name else None
    if markdown:
        sys.stdout.write(render_page())
    elif machine:
        told = face.catalogue()
        print_json({"faults": [one for one in told if kind is None or one["name"] == kind.__name__]})
    else:
        _console(machine).print(face.render_fault(kind) if kind else face.render_catalogue())


@app.command()
def doctor(machine: Json = False) -> int:
    """Say what this machine can do and what not, why, and what would help.

    It looks, and changes nothing: one child process is started and ends at once.

    Exit code 0: training, recovery and most faults can run here, 1: they cannot.

    Example: [cyan]chaoskit doctor[/]
    """
    from chaoskit.faces import doctor as face

    findings = face.examine()
    if machine:
        print_json(face.plain(findings))
    else:
        _console(machine).print(face.render(findings))
    return 0 if face.can_run(findings) else _EXIT_FAILED


app.command()(observing.top)
app.command()(observing.trace)
app.add_typer(checkpoints.app, name="checkpoint")
app.add_typer(rules.app, name="rules")
app.add_typer(health.app, name="health")
app.add_typer(quarantine.app, name="quarantine")
app.command()(resizing.scale)
app.command()(resizing.notice)


# -- the end of every command -------------------------------------------------------------------------------------


def _run(arguments: list[str], machine: bool) -> int:
    try:
        result = typer.main.get_command(app).main(arguments, prog_name="chaoskit", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except BadInput as error:
        return refuse(error, machine)
    except HarnessError as error:
        if machine:
            print_json({"error": {"harness": str(error)}})
        sys.stderr.write(f"chaoskit: error: {error}\n")
        return Verdict.ERROR.exit_code
    except USAGE_ERROR as error:
        return misused(error, machine)
    except Exception:  # noqa: BLE001 -- a bug of ours must not look like a failed job
        traceback.print_exc()
        return Verdict.ERROR.exit_code


def main() -> None:
    """Entry point."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Unicode gets question marks, not a traceback
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, end_in_order)
    arguments = sys.argv[1:]
    code = _run(arguments, "--json" in arguments)
    if code == _EXIT_INTERRUPTED:
        sys.stderr.write("chaoskit: interrupted; everything was ended\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
