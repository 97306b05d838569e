"""``chaoskit demo``: inject three faults into a job, and compare it with the unbroken run.

-> experiment/harness.py runs the experiment. report/html.py: the page.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from chaoskit.cli.output import Json, command_app, console, print_json
from chaoskit.experiment.harness import Harness
from chaoskit.experiment.plan.plan import Experiment, plan_experiment
from chaoskit.faults import Hang, Kill, NaN
from chaoskit.launcher.progress import Progress
from chaoskit.launcher.view import View
from chaoskit.process.host_checks import require_writable
from chaoskit.report.html import write_html
from chaoskit.report.store import encode_outcome, write_outcome
from chaoskit.report.summary import match_losses, render_summary
from chaoskit.report.svg import render_timeline_svg
from chaoskit.runlog.outcome import Outcome
from chaoskit.substrate import registry

_FULL = ("10m", 60)
_QUICK = ("tiny", 24)

app = command_app()


@app.command()
def demo(
    quick: Annotated[
        bool,
        typer.Option("--quick", help="A tiny model and few steps: seconds instead of a minute."),
    ] = False,
    report: Annotated[Path, typer.Option(help="Directory for the report.")] = Path("chaoskit-demo"),
    is_json: Json = False,
) -> int:
    """Kill, freeze and poison a training run, and compare it with the unbroken one.

    A small GPT trains on four processes of this machine, twice: unbroken, then with three faults.
    The demo shows each recovery, phase by phase, and whether every loss is the same to the last
    bit.

    Exit code 0: passed, 1: failed, 2: bad input, 10: unknown, 11: error.

    Example: [cyan]chaoskit demo --quick[/]
    """
    terminal = console(is_json)
    outcome = demonstrate(terminal, report, quick=quick)
    print_demo(outcome, report, terminal)
    if is_json:
        files = {"html": str(report / "report.html"), "outcome_json": str(report / "outcome.json")}
        claim = {"verdict": outcome.verdict, "continuity": continuity(outcome)}
        print_json({**claim, **files, "outcome": json.loads(encode_outcome(outcome))})
    return outcome.verdict.exit_code


def demo_experiment(*, quick: bool) -> Experiment:
    """Return the experiment: four ranks and a spare, with a fault after each quarter of the run.

    The faults are a kill, a hang and a NaN. Each targets a rank that exists even if no new spare is
    warm by then and the world has shrunk.
    """
    size, steps = _QUICK if quick else _FULL
    faults = (
        Kill(rank=2, at_step=steps // 4),
        Hang(rank=1, at_step=steps // 2),
        NaN(rank=0, at_step=3 * steps // 4, parameter="head.weight"),
    )
    return plan_experiment(
        "gpt",
        name="demo",
        steps=steps,
        options={"size": size},
        faults=faults,
        nodes=4,
        spares=1,
    )


def demonstrate(terminal: Console, directory: Path, *, quick: bool) -> Outcome:
    """Run the demonstration, and return the outcome of the run with faults.

    The outcome, its page and its pictures are written to ``directory``.

    Raises:
        BadInput: if ``directory`` cannot be written.
        HarnessError: if chaoskit itself failed.
    """
    experiment = demo_experiment(quick=quick)
    require_writable("report", directory)
    job = f"gpt {experiment.config.job.options['size']} on 4 nodes"
    terminal.print(Text("The same training runs twice: unbroken, then with three faults.", "bold"))
    with Harness(registry.LOCAL, directory / "runs") as harness:
        _run_twin(harness, experiment, job, terminal)
        outcome = _run_broken(harness, experiment, job, terminal)
    _write(outcome, directory)
    return outcome


def _run_twin(harness: Harness, experiment: Experiment, job: str, terminal: Console) -> None:
    """Run the unbroken twin, or use its stored result, and print which of both was done."""
    begun_s = time.monotonic()
    view = View(f"1 of 2  {job}, unbroken", Progress(begun_s, steps=experiment.steps), terminal)
    messages: list[object] = []

    def watch(message: object) -> None:
        messages.append(type(message))
        view.watch(message)

    with view.shown():
        harness.twin(experiment, watch)
    progress = f"{experiment.steps} steps" if messages else "known from an earlier run"
    terminal.print(Text.assemble(("unbroken run: ", "bold"), progress))


def _run_broken(harness: Harness, experiment: Experiment, job: str, terminal: Console) -> Outcome:
    """Run the experiment with faults under a live view, and return its outcome."""
    progress = Progress(
        time.monotonic(), steps=experiment.steps, faults=list(map(str, experiment.faults))
    )
    view = View(f"2 of 2  {job} + 1 spare, three faults", progress, terminal)
    with view.shown():
        return harness.run_planned(experiment, watch=view.watch)


def _write(outcome: Outcome, directory: Path) -> None:
    """Write ``outcome.json``, ``report.html`` and an SVG picture of each recovery."""
    write_outcome(outcome, directory)
    write_html([outcome], directory / "report.html")
    for index, recovery in enumerate(outcome.recoveries, 1):
        (directory / f"timeline-{index}.svg").write_text(
            render_timeline_svg(recovery), encoding="utf-8"
        )


def continuity(outcome: Outcome) -> str:
    """Return a sentence about the comparison of losses and weights with the unbroken run."""
    match = match_losses(outcome)
    if match is None:
        return "there is no unbroken run to compare with"
    weights = (
        "weights too"
        if outcome.weights_digest == outcome.twin_weights_digest
        else "but other final weights"
    )
    return f"{match.equal} of {match.compared} losses bit-equal to the unbroken run, {weights}"


def print_demo(outcome: Outcome, directory: Path, terminal: Console) -> None:
    """Print the outcome of the demonstration, and the names of its files."""
    terminal.print()
    terminal.print(render_summary([outcome]))
    match = match_losses(outcome)
    is_equal = (
        match is not None and match.exact and outcome.weights_digest == outcome.twin_weights_digest
    )
    terminal.print()
    terminal.print(Text(continuity(outcome), "bold green" if is_equal else "bold red"))
    terminal.print(Text(f"report:    {directory / 'report.html'}"), soft_wrap=True)
    terminal.print(Text(f"outcome:   {directory / 'outcome.json'}"), soft_wrap=True)
    if outcome.recoveries:
        first, last = directory / "timeline-1.svg", f"timeline-{len(outcome.recoveries)}.svg"
        terminal.print(
            Text(f"timelines: {first}" + (f" to {last}" if len(outcome.recoveries) > 1 else "")),
            soft_wrap=True,
        )
