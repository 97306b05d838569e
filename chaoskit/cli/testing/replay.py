"""``chaoskit replay``: run a plan again, as often as it takes to see what it shows, or shrink it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from chaoskit.cli.output import Json, command_app, console, print_json
from chaoskit.errors import BadInput, HarnessError
from chaoskit.experiment.harness import Harness
from chaoskit.experiment.plan.planfile import Planned, encode, load, parse
from chaoskit.experiment.shrink.proportion import wilson_interval
from chaoskit.experiment.shrink.search import HARNESS_ERROR, Shrunk, describe, shrink_to_file
from chaoskit.launcher.launch import fresh_directory
from chaoskit.launcher.progress import Progress
from chaoskit.launcher.view import View
from chaoskit.plaintext import plural
from chaoskit.process.host_checks import require_writable
from chaoskit.report.store import encode_outcome, write_outcome
from chaoskit.report.summary import VERDICT_STYLES, number, render_summary
from chaoskit.runlog.outcome import Outcome
from chaoskit.substrate import registry
from chaoskit.vocabulary import Verdict

MINIMAL = "minimal.json"

app = command_app()


@app.command()
def replay(
    plan: Annotated[
        Path,
        typer.Argument(
            help="A plan: plan.json in the directory of any run, or one you wrote; with --history, a run."
        ),
    ],
    times: Annotated[int | None, typer.Option(help="How often to run it; default: once.")] = None,
    shrink: Annotated[
        bool,
        typer.Option("--shrink", help="Look for the smallest plan that fails in the same way."),
    ] = False,
    budget_s: Annotated[
        float, typer.Option("--budget-s", help="Time for --shrink, in seconds.")
    ] = 120.0,
    twin: Annotated[
        bool, typer.Option("--twin/--no-twin", help="Compare with the unbroken run.")
    ] = True,
    substrate: Annotated[
        str, typer.Option(help="local, netns or docker. Default: the first that can do the faults.")
    ] = "",
    report: Annotated[
        Path | None, typer.Option(help="Directory for journals, outcomes and minimal.json.")
    ] = None,
    history: Annotated[
        str, typer.Option(metavar="STORE", help="Take the plan of a run from this history.")
    ] = "",
    machine: Json = False,
) -> int:
    """Run a plan of faults again, exactly as it was.

    Every run of a test leaves its plan beside its journals, as [bold]plan.json[/]: the
    job, all settings and the seed, and each fault with its moment. A plan that
    fails only now and then: [bold]--times 20[/] says how often, with a 95 % interval.
    [bold]--shrink[/] leaves out faults, nodes and steps while it still fails.

    Exit code 0: passed, 1: failed, 2: bad input, 10: unknown, 11: error. Of
    several runs, the worst counts.

    Examples: [cyan]chaoskit replay chaoskit-runs/smoke/runs/004-test-one/plan.json --times 20[/],
    [cyan]chaoskit replay --history s3://bucket/history 01a21db3-d995[/]
    """
    if shrink and times is not None:
        raise BadInput("times", times, "leave it out: --shrink runs the plan as often as it needs")
    times = 1 if times is None else times
    experiment = open_plan(plan, times=times, budget_s=budget_s, history=history)
    directory = report or fresh_directory(None, "replay")
    shown = console(machine)
    if shrink:
        shrunk = shrink_plan(
            experiment, shown, directory, budget_s=budget_s, twin=twin, substrate=substrate
        )
        if machine:
            print_json(plain_shrunk(shrunk, directory))
        return shrunk_verdict(shrunk).exit_code
    result = run_plan(experiment, shown, directory, times=times, twin=twin, substrate=substrate)
    print_replay(result, directory, shown)
    if machine:
        print_json(plain(result))
    return result.verdict.exit_code


class Replayed(msgspec.Struct, kw_only=True):
    """What some runs of one plan showed.

    Attributes:
        verdict: the worst of all runs; ``verdicts`` has one a run.
        failed: runs whose verdict is failed or error.
        interval: in which the probability to fail lies with 95 % confidence (Wilson).
        errors: what chaoskit itself said where it could not do its work.
    """

    verdict: Verdict
    verdicts: list[Verdict]
    failed: int
    interval: tuple[float, float]
    outcomes: list[Outcome]
    errors: list[str]


def open_plan(file: Path, *, times: int, budget_s: float, history: str = "") -> Planned:
    """The experiment in ``file``, to be run ``times`` times or shrunk for ``budget_s``.

    ``history``: where the plan is kept of the run that ``file`` names, by the beginning of its name.

    Raises:
        BadInput: if any of the three makes no sense.
    """
    if times < 1:
        raise BadInput("times", times, "use 1 or more")
    if not budget_s > 0:
        raise BadInput("budget_s", budget_s, "use a number of seconds above 0")
    if not history:
        return load(file)
    from chaoskit.history.place import sources_at
    from chaoskit.history.session import plan_of_run, read

    root = sources_at(Path.cwd()).root
    return parse(plan_of_run(read(history), str(file), root), root)


def _harness(experiment: Planned, name: str, directory: Path) -> Harness:
    """A harness on the substrate ``name``; "" is the cheapest one that can do the faults."""
    require_writable("report", directory)
    return Harness(
        name or registry.for_all(fault.substrates for fault in experiment.faults), directory
    )


def run_plan(
    experiment: Planned,
    shown: Console,
    directory: Path,
    *,
    times: int,
    twin: bool,
    substrate: str = "",
) -> Replayed:
    """Run ``experiment`` ``times`` times. Of several runs, one that breaks the harness does not stop the others.

    Args:
        substrate: name of the one to run it on; "" for the cheapest one that can do the faults.

    Raises:
        BadInput: before anything is started, or when the job refuses its input. HarnessError: the only run, or the
            unbroken run that all are compared with, broke.
    """
    outcomes: list[Outcome] = []
    errors: list[str] = []
    with _harness(experiment, substrate, directory) as harness:
        if twin:
            _run_twin(harness, experiment, shown)
        for turn in range(1, times + 1):
            try:
                outcomes.append(
                    _run(harness, experiment, shown, f"run {turn} of {times}", twin=twin)
                )
            except HarnessError as error:
                if times == 1:
                    raise
                errors.append(str(error))
                shown.print(Text(f"error: {error}", VERDICT_STYLES[Verdict.ERROR]), soft_wrap=True)
    verdicts = [outcome.verdict for outcome in outcomes] + [Verdict.ERROR] * len(errors)
    failed = sum(verdict in (Verdict.FAILED, Verdict.ERROR) for verdict in verdicts)
    return Replayed(
        verdict=Verdict.worst(verdicts),
        verdicts=verdicts,
        failed=failed,
        interval=wilson_interval(failed, len(verdicts)),
        outcomes=outcomes,
        errors=errors,
    )


def _run_twin(harness: Harness, experiment: Planned, shown: Console) -> None:
    view = View(
        f"{experiment.name}, unbroken", Progress(time.monotonic(), steps=experiment.steps), shown
    )
    with view.shown():
        harness.twin(experiment, view.watch)


def _run(
    harness: Harness, experiment: Planned, shown: Console, turn: str, *, twin: bool
) -> Outcome:
    progress = Progress(
        time.monotonic(), steps=experiment.steps, faults=list(map(str, experiment.faults))
    )
    view = View(f"{turn}  {experiment.name}: {describe(experiment)}", progress, shown)
    with view.shown():
        outcome = harness.run_planned(experiment, twin=twin, watch=view.watch)
    write_outcome(outcome, Path(outcome.directory))
    return outcome


def print_replay(result: Replayed, directory: Path, shown: Console) -> None:
    """The verdict; of several runs how often they failed, and one that did in detail."""
    shown.print()
    if len(result.verdicts) == 1:
        shown.print(render_summary(result.outcomes))
    else:
        worst = next((one for one in result.outcomes if one.verdict is result.verdict), None)
        if worst is not None and result.verdict is not Verdict.PASSED:
            shown.print(render_summary([worst]))
        shown.print(
            Text.assemble(
                (result.verdict.upper(), VERDICT_STYLES[result.verdict]), "  ", frequency(result)
            )
        )
    shown.print(Text(f"plan, journals and outcomes: {directory}", "dim"), soft_wrap=True)


def frequency(result: Replayed) -> str:
    """``failed 3 of 10 runs: 30 % (95 % interval 10.8 % to 60.3 %)``."""
    runs, (low, high) = len(result.verdicts), result.interval
    share, low_share, high_share = (
        number(100 * value) for value in (result.failed / runs, low, high)
    )
    unknown = result.verdicts.count(Verdict.UNKNOWN)
    besides = f"; {unknown} unknown" if unknown else ""
    interval = f"{share} % (95 % interval {low_share} % to {high_share} %)"
    return f"failed {result.failed} of {plural(runs, 'run')}: {interval}{besides}"


def shrink_plan(
    experiment: Planned,
    shown: Console,
    directory: Path,
    *,
    budget_s: float,
    twin: bool,
    substrate: str = "",
) -> Shrunk:
    """Shrink ``experiment`` and write the smallest plan that fails to ``minimal.json`` in ``directory``.

    Raises:
        BadInput: before anything is started.
    """

    def tell(text: str) -> None:
        shown.print(Text(text), soft_wrap=True)

    with _harness(experiment, substrate, directory) as harness:
        tell(f"shrinking {describe(experiment)}, for at most {number(budget_s)} s")
        return shrink_to_file(
            harness, experiment, directory / MINIMAL, budget_s=budget_s, twin=twin, tell=tell
        )


def shrunk_verdict(shrunk: Shrunk) -> Verdict:
    """What the original turned out to be: a plan that failed, broke the harness, or did neither."""
    if not shrunk.failures:
        return Verdict.PASSED if shrunk.trials else Verdict.UNKNOWN
    return Verdict.ERROR if shrunk.symptoms == {HARNESS_ERROR} else Verdict.FAILED


def plain_shrunk(shrunk: Shrunk, directory: Path) -> dict[str, Any]:
    """Return what was found as JSON values."""
    return {
        "verdict": shrunk_verdict(shrunk),
        "plan": str(directory / MINIMAL),
        "minimal": msgspec.json.decode(encode(shrunk.experiment)),
        "symptoms": sorted(shrunk.symptoms),
        "failures": shrunk.failures,
        "trials": shrunk.trials,
        "runs": shrunk.runs,
        "complete": shrunk.complete,
    }


def plain(result: Replayed) -> dict[str, Any]:
    """Return the result as JSON values; outcomes as :func:`chaoskit.report.store.encode_outcome` writes them."""
    return {
        "verdict": result.verdict,
        "verdicts": result.verdicts,
        "runs": len(result.verdicts),
        "failed": result.failed,
        "failure_interval": result.interval,
        "errors": result.errors,
        "outcomes": [msgspec.json.decode(encode_outcome(outcome)) for outcome in result.outcomes],
    }
