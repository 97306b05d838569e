"""``chaoskit demo``: the reference job is broken in three ways, and comes back."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from chaoskit.config import require_writable
from chaoskit.experiment.harness import Harness
from chaoskit.experiment.outcome import Outcome
from chaoskit.experiment.plan import Experiment, plan_experiment
from chaoskit.faces.progress import Progress
from chaoskit.faces.view import View
from chaoskit.report.html import write_html
from chaoskit.report.store import write_outcome
from chaoskit.report.summary import match_losses, render_summary
from chaoskit.report.svg import render_timeline_svg
from chaoskit.substrate.local import LocalSubstrate
from faults import Hang, Kill, NaN

_FULL = ("10m", 60)
_QUICK = ("tiny", 24)


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


def demonstrate(console: Console, directory: Path, *, quick: bool) -> Outcome:
    """Run the demonstration, and write what it showed to ``directory``.

    Raises:
        BadInput: if ``directory`` cannot be written. HarnessError: chaoskit itself failed.
    """
    experiment = demo_experiment(quick=quick)
    require_writable("report", directory)
    job = f"gpt {experiment.config.job.options['size']} on 4 nodes"
    console.print(Text("The same training runs twice: unbroken, then with three faults.", "bold"))
    substrate = LocalSubstrate()
    try:
        harness = Harness(substrate, directory / "runs")
        try:
            _run_twin(harness, experiment, job, console)
            outcome = _run_broken(harness, experiment, job, console)
        finally:
            harness.close()
    finally:
        substrate.close()
    _write(outcome, directory)
    return outcome


def _run_twin(harness: Harness, experiment: Experiment, job: str, console: Console) -> None:
    begun_s = time.monotonic()
    view = View(f"1 of 2  {job}, unbroken", Progress(begun_s, steps=experiment.steps), console)
    seen: list[object] = []

    def watch(message: object) -> None:
        seen.append(type(message))
        view.watch(message)

    with view.shown():
        harness.twin(experiment, watch)
    how = f"{experiment.steps} steps" if seen else "known from an earlier run"
    console.print(Text.assemble(("unbroken run: ", "bold"), how))


def _run_broken(harness: Harness, experiment: Experiment, job: str, console: Console) -> Outcome:
    progress = Progress(time.monotonic(), steps=experiment.steps, faults=list(map(str, experiment.faults)))
    view = View(f"2 of 2  {job} + 1 spare, three faults", progress, console)
    with view.shown():
        return harness.run_planned(experiment, watch=view.watch)


def _write(outcome: Outcome, directory: Path) -> None:
    write_outcome(outcome, directory)
    write_html([outcome], directory / "report.html")
    for index, recovery in enumerate(outcome.recoveries, 1):
        (directory / f"timeline-{index}.svg").write_text(render_timeline_svg(recovery), encoding="utf-8")


def continuity(outcome: Outcome) -> str:
    """The claim of the demonstration in one sentence."""
    match = match_losses(outcome)
    if match is None:
        return "there is no unbroken run to compare with"
    weights = "weights too" if outcome.weights_digest == outcome.twin_weights_digest else "but other final weights"
    return f"{match.equal} of {match.compared} losses bit-equal to the unbroken run, {weights}"


def print_demo(outcome: Outcome, directory: Path, console: Console) -> None:
    """What the demonstration showed, and where it is written."""
    console.print()
    console.print(render_summary([outcome]))
    match = match_losses(outcome)
    fine = match is not None and match.exact and outcome.weights_digest == outcome.twin_weights_digest
    console.print()
    console.print(Text(continuity(outcome), "bold green" if fine else "bold red"))
    console.print(Text(f"report:    {directory / 'report.html'}"), soft_wrap=True)
    console.print(Text(f"outcome:   {directory / 'outcome.json'}"), soft_wrap=True)
    if outcome.recoveries:
        first, last = directory / "timeline-1.svg", f"timeline-{len(outcome.recoveries)}.svg"
        console.print(
            Text(f"timelines: {first}" + (f" to {last}" if len(outcome.recoveries) > 1 else "")), soft_wrap=True
        )
