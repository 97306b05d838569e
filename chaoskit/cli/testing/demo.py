"""``chaoskit demo``: break the reference job in three ways, and compare it with the unbroken run."""

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
    machine: Json = False,
) -> int:
    """Kill, freeze and poison a training run, and compare it with the unbroken one.

    A small GPT trains on four processes of this machine, twice: unbroken, then
    with three faults. It shows each way back, phase by phase, and whether every
    loss is the same to the last bit.

    Exit code 0: passed, 1: failed, 2: bad input, 10: unknown, 11: error.

    Example: [cyan]chaoskit demo --quick[/]
    """
    shown = console(machine)
    outcome = demonstrate(shown, report, quick=quick)
    print_demo(outcome, report, shown)
    if machine:
        files = {"html": str(report / "report.html"), "outcome_json": str(report / "outcome.json")}
        claim = {"verdict": outcome.verdict, "continuity": continuity(outcome)}
        print_json({**claim, **files, "outcome": json.loads(encode_outcome(outcome))})
    return outcome.verdict.exit_code


def demo_experiment(*, quick: bool) -> Experiment:
    """Four ranks and a spare; one is killed, one frozen, one computes a NaN, a quarter of the run apart.

    Each aims at a rank that exists even if no new spare is warm by then and the world has shrunk.
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


def demonstrate(shown: Console, directory: Path, *, quick: bool) -> Outcome:
    """Run the demonstration, and write what it showed to ``directory``.

    Raises:
        BadInput: if ``directory`` cannot be written. HarnessError: chaoskit itself failed.
    """
    experiment = demo_experiment(quick=quick)
    require_writable("report", directory)
    job = f"gpt {experiment.config.job.options['size']} on 4 nodes"
    shown.print(Text("The same training runs twice: unbroken, then with three faults.", "bold"))
    with Harness(registry.LOCAL, directory / "runs") as harness:
        _run_twin(harness, experiment, job, shown)
        outcome = _run_broken(harness, experiment, job, shown)
    _write(outcome, directory)
    return outcome


def _run_twin(harness: Harness, experiment: Experiment, job: str, shown: Console) -> None:
    begun_s = time.monotonic()
    view = View(f"1 of 2  {job}, unbroken", Progress(begun_s, steps=experiment.steps), shown)
    seen: list[object] = []

    def watch(message: object) -> None:
        seen.append(type(message))
        view.watch(message)

    with view.shown():
        harness.twin(experiment, watch)
    how = f"{experiment.steps} steps" if seen else "known from an earlier run"
    shown.print(Text.assemble(("unbroken run: ", "bold"), how))


def _run_broken(harness: Harness, experiment: Experiment, job: str, shown: Console) -> Outcome:
    progress = Progress(
        time.monotonic(), steps=experiment.steps, faults=list(map(str, experiment.faults))
    )
    view = View(f"2 of 2  {job} + 1 spare, three faults", progress, shown)
    with view.shown():
        return harness.run_planned(experiment, watch=view.watch)


def _write(outcome: Outcome, directory: Path) -> None:
    write_outcome(outcome, directory)
    write_html([outcome], directory / "report.html")
    for index, recovery in enumerate(outcome.recoveries, 1):
        (directory / f"timeline-{index}.svg").write_text(
            render_timeline_svg(recovery), encoding="utf-8"
        )


def continuity(outcome: Outcome) -> str:
    """The claim of the demonstration in one sentence."""
    match = match_losses(outcome)
    if match is None:
        return "there is no unbroken run to compare with"
    weights = (
        "weights too"
        if outcome.weights_digest == outcome.twin_weights_digest
        else "but other final weights"
    )
    return f"{match.equal} of {match.compared} losses bit-equal to the unbroken run, {weights}"


def print_demo(outcome: Outcome, directory: Path, shown: Console) -> None:
    """What the demonstration showed, and where it is written."""
    shown.print()
    shown.print(render_summary([outcome]))
    match = match_losses(outcome)
    fine = (
        match is not None and match.exact and outcome.weights_digest == outcome.twin_weights_digest
    )
    shown.print()
    shown.print(Text(continuity(outcome), "bold green" if fine else "bold red"))
    shown.print(Text(f"report:    {directory / 'report.html'}"), soft_wrap=True)
    shown.print(Text(f"outcome:   {directory / 'outcome.json'}"), soft_wrap=True)
    if outcome.recoveries:
        first, last = directory / "timeline-1.svg", f"timeline-{len(outcome.recoveries)}.svg"
        shown.print(
            Text(f"timelines: {first}" + (f" to {last}" if len(outcome.recoveries) > 1 else "")),
            soft_wrap=True,
        )
