"""``chaoskit replay``: run a plan again, once or several times, or shrink it.

-> experiment/plan/planfile.py: the plan. experiment/shrink/search.py: the search for a smaller one.
-> experiment/judge/judge.py: the verdict.
"""

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
            help="File of a plan, such as plan.json of a run; with --history, the UUID of a run."
        ),
    ],
    times: Annotated[int | None, typer.Option(help="Number of runs. Default: 1.")] = None,
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
        str,
        typer.Option(
            help="local, netns, docker or kubernetes. Default: the first that supports the faults."
        ),
    ] = "",
    report: Annotated[
        Path | None, typer.Option(help="Directory for journals, outcomes and minimal.json.")
    ] = None,
    history: Annotated[
        str, typer.Option(metavar="STORE", help="Take the plan of a run from this history.")
    ] = "",
    is_json: Json = False,
) -> int:
    """Run a plan of faults again, exactly as it was.

    Every run of a test leaves its plan beside its journals, as [bold]plan.json[/]: the job, all
    settings and the seed, and each fault with its moment. For a plan that fails only now and then,
    [bold]--times 20[/] estimates how often, with a 95 % interval. [bold]--shrink[/] leaves out
    faults, nodes and steps while it still fails.

    Exit code 0: passed, 1: failed, 2: bad input, 10: unknown, 11: error. The worst of several runs
    counts.

    Examples: [cyan]chaoskit replay chaoskit-runs/smoke/runs/004-test-one/plan.json --times 20[/],
    [cyan]chaoskit replay --history s3://bucket/history 01a21db3-d995[/]
    """
    if shrink and times is not None:
        raise BadInput("times", times, "leave it out: --shrink runs the plan as often as it needs")
    times = 1 if times is None else times
    experiment = open_plan(plan, times=times, budget_s=budget_s, history=history)
    directory = report or fresh_directory(None, "replay")
    terminal = console(is_json)
    if shrink:
        shrunk = shrink_plan(
            experiment, terminal, directory, budget_s=budget_s, twin=twin, substrate=substrate
        )
        if is_json:
            print_json(plain_shrunk(shrunk, directory))
        return shrunk_verdict(shrunk).exit_code
    result = run_plan(experiment, terminal, directory, times=times, twin=twin, substrate=substrate)
    print_replay(result, directory, terminal)
    if is_json:
        print_json(plain(result))
    return result.verdict.exit_code


class ReplayResult(msgspec.Struct, kw_only=True):
    """The result of the runs of one plan.

    Attributes:
        verdict: the worst verdict of all runs.
        verdicts: the verdict of each run.
        failed: the number of runs whose verdict is failed or error.
        interval: the 95 % interval of the probability to fail (Wilson).
        errors: the error of each run in which chaoskit itself failed.
    """

    verdict: Verdict
    verdicts: list[Verdict]
    failed: int
    interval: tuple[float, float]
    outcomes: list[Outcome]
    errors: list[str]


def open_plan(file: Path, *, times: int, budget_s: float, history: str = "") -> Planned:
    """Return the experiment of a plan.

    Args:
        file: the plan or, with ``history``, the UUID of a run or its beginning.
        times: the number of runs.
        budget_s: the time for shrinking, in seconds.
        history: the history that contains the plan of the run; "" if ``file`` is a plan.

    Raises:
        BadInput: if an argument is invalid, the plan cannot be read, or not exactly one run has
            this UUID.
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
    """Return a harness on the substrate ``name``; "" is the cheapest that supports the faults."""
    require_writable("report", directory)
    return Harness(
        name or registry.for_all(fault.substrates for fault in experiment.faults), directory
    )


def run_plan(
    experiment: Planned,
    terminal: Console,
    directory: Path,
    *,
    times: int,
    twin: bool,
    substrate: str = "",
) -> ReplayResult:
    """Run ``experiment`` ``times`` times, and return the verdicts and outcomes of the runs.

    Outcomes and journals are written below ``directory``. If there are several runs, one that
    breaks the harness does not stop the others.

    Args:
        twin: compare with the unbroken run, which is run first.
        substrate: the name of the substrate; "" for the cheapest one that supports the faults.

    Raises:
        BadInput: before anything is started, or when the job refuses its input.
        HarnessError: if the only run, or the unbroken run that all are compared with, broke the
            harness.
    """
    outcomes: list[Outcome] = []
    errors: list[str] = []
    with _harness(experiment, substrate, directory) as harness:
        if twin:
            _run_twin(harness, experiment, terminal)
        for turn in range(1, times + 1):
            try:
                outcomes.append(
                    _run(harness, experiment, terminal, f"run {turn} of {times}", twin=twin)
                )
            except HarnessError as error:
                if times == 1:
                    raise
                errors.append(str(error))
                terminal.print(
                    Text(f"error: {error}", VERDICT_STYLES[Verdict.ERROR]), soft_wrap=True
                )
    verdicts = [outcome.verdict for outcome in outcomes] + [Verdict.ERROR] * len(errors)
    failed = sum(verdict in (Verdict.FAILED, Verdict.ERROR) for verdict in verdicts)
    return ReplayResult(
        verdict=Verdict.worst(verdicts),
        verdicts=verdicts,
        failed=failed,
        interval=wilson_interval(failed, len(verdicts)),
        outcomes=outcomes,
        errors=errors,
    )


def _run_twin(harness: Harness, experiment: Planned, terminal: Console) -> None:
    """Run the unbroken twin under a live view; the harness keeps its result."""
    view = View(
        f"{experiment.name}, unbroken", Progress(time.monotonic(), steps=experiment.steps), terminal
    )
    with view.shown():
        harness.twin(experiment, view.watch)


def _run(
    harness: Harness, experiment: Planned, terminal: Console, turn: str, *, twin: bool
) -> Outcome:
    """Run the plan once under a live view. Write its outcome into its directory, and return it."""
    progress = Progress(
        time.monotonic(), steps=experiment.steps, faults=list(map(str, experiment.faults))
    )
    view = View(f"{turn}  {experiment.name}: {describe(experiment)}", progress, terminal)
    with view.shown():
        outcome = harness.run_planned(experiment, twin=twin, watch=view.watch)
    write_outcome(outcome, Path(outcome.directory))
    return outcome


def print_replay(result: ReplayResult, directory: Path, terminal: Console) -> None:
    """Print the verdict. Several runs are counted, and one of the worst is shown in detail."""
    terminal.print()
    if len(result.verdicts) == 1:
        terminal.print(render_summary(result.outcomes))
    else:
        worst = next(
            (outcome for outcome in result.outcomes if outcome.verdict is result.verdict), None
        )
        if worst is not None and result.verdict is not Verdict.PASSED:
            terminal.print(render_summary([worst]))
        terminal.print(
            Text.assemble(
                (result.verdict.upper(), VERDICT_STYLES[result.verdict]),
                "  ",
                frequency_sentence(result),
            )
        )
    terminal.print(Text(f"plan, journals and outcomes: {directory}", "dim"), soft_wrap=True)


def frequency_sentence(result: ReplayResult) -> str:
    """Return a text such as ``failed 3 of 10 runs: 30 % (95 % interval 10.8 % to 60.3 %)``."""
    runs, (low, high) = len(result.verdicts), result.interval
    share, low_share, high_share = (
        number(100 * ratio) for ratio in (result.failed / runs, low, high)
    )
    unknown = result.verdicts.count(Verdict.UNKNOWN)
    besides = f"; {unknown} unknown" if unknown else ""
    interval = f"{share} % (95 % interval {low_share} % to {high_share} %)"
    return f"failed {result.failed} of {plural(runs, 'run')}: {interval}{besides}"


def shrink_plan(
    experiment: Planned,
    terminal: Console,
    directory: Path,
    *,
    budget_s: float,
    twin: bool,
    substrate: str = "",
) -> Shrunk:
    """Search for the smallest plan that fails like ``experiment``, and return the result.

    The plan is written to ``minimal.json`` in ``directory``. Progress is printed.

    Args:
        budget_s: the time limit of the search, in seconds.
        twin: compare each run with the unbroken run.
        substrate: the name of the substrate; "" for the cheapest one that supports the faults.

    Raises:
        BadInput: before anything is started, if the directory or the substrate cannot be used.
    """

    def tell(text: str) -> None:
        terminal.print(Text(text), soft_wrap=True)

    with _harness(experiment, substrate, directory) as harness:
        tell(f"shrinking {describe(experiment)}, for at most {number(budget_s)} s")
        return shrink_to_file(
            harness, experiment, directory / MINIMAL, budget_s=budget_s, twin=twin, tell=tell
        )


def shrunk_verdict(shrunk: Shrunk) -> Verdict:
    """Return the verdict of the original plan.

    It is failed if a trial failed, and error if only the harness broke. It is passed if no trial
    failed, and unknown without a trial.
    """
    if not shrunk.failures:
        return Verdict.PASSED if shrunk.trials else Verdict.UNKNOWN
    return Verdict.ERROR if shrunk.symptoms == {HARNESS_ERROR} else Verdict.FAILED


def plain_shrunk(shrunk: Shrunk, directory: Path) -> dict[str, Any]:
    """Return the result of shrinking as JSON values."""
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


def plain(result: ReplayResult) -> dict[str, Any]:
    """Return the result as JSON values.

    Outcomes are encoded like by :func:`chaoskit.report.store.encode_outcome`.
    """
    return {
        "verdict": result.verdict,
        "verdicts": result.verdicts,
        "runs": len(result.verdicts),
        "failed": result.failed,
        "failure_interval": result.interval,
        "errors": result.errors,
        "outcomes": [msgspec.json.decode(encode_outcome(outcome)) for outcome in result.outcomes],
    }
