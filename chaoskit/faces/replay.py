"""``chaoskit replay``: a plan file is run again, as often as it takes to see what it shows, or shrunk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from chaoskit.config import require_writable
from chaoskit.errors import BadInput, HarnessError
from chaoskit.experiment.harness import Harness
from chaoskit.experiment.outcome import Outcome
from chaoskit.experiment.planfile import Planned, encode, load
from chaoskit.experiment.proportion import wilson_interval
from chaoskit.experiment.shrink import HARNESS_ERROR, Shrunk, describe, shrink_to_file
from chaoskit.faces.progress import Progress
from chaoskit.faces.view import View
from chaoskit.report.store import encode_outcome, write_outcome
from chaoskit.report.summary import VERDICT_STYLES, number, plural, render_summary
from chaoskit.substrate import choice
from chaoskit.vocabulary import Verdict

MINIMAL = "minimal.json"


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


def open_plan(file: Path, *, times: int, budget_s: float) -> Planned:
    """The experiment in ``file``, to be run ``times`` times or shrunk for ``budget_s``.

    Raises:
        BadInput: if any of the three makes no sense.
    """
    if times < 1:
        raise BadInput("times", times, "use 1 or more")
    if not budget_s > 0:
        raise BadInput("budget_s", budget_s, "use a number of seconds above 0")
    return load(file)


@contextmanager
def _harness(experiment: Planned, name: str, directory: Path) -> Iterator[Harness]:
    """``name``: of the substrate; "" for the cheapest one that can do the faults."""
    require_writable("report", directory)
    substrate = choice.make(name or choice.for_all(fault.substrates for fault in experiment.faults))
    try:
        harness = Harness(substrate, directory)
        try:
            yield harness
        finally:
            harness.close()
    finally:
        substrate.close()


def replay(
    experiment: Planned, console: Console, directory: Path, *, times: int, twin: bool, substrate: str = ""
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
            _run_twin(harness, experiment, console)
        for turn in range(1, times + 1):
            try:
                outcomes.append(_run(harness, experiment, console, f"run {turn} of {times}", twin=twin))
            except HarnessError as error:
                if times == 1:
                    raise
                errors.append(str(error))
                console.print(Text(f"error: {error}", VERDICT_STYLES[Verdict.ERROR]), soft_wrap=True)
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


def _run_twin(harness: Harness, experiment: Planned, console: Console) -> None:
    view = View(f"{experiment.name}, unbroken", Progress(time.monotonic(), steps=experiment.steps), console)
    with view.shown():
        harness.twin(experiment, view.watch)


def _run(harness: Harness, experiment: Planned, console: Console, turn: str, *, twin: bool) -> Outcome:
    progress = Progress(time.monotonic(), steps=experiment.steps, faults=list(map(str, experiment.faults)))
    view = View(f"{turn}  {experiment.name}: {describe(experiment)}", progress, console)
    with view.shown():
        outcome = harness.run_planned(experiment, twin=twin, watch=view.watch)
    write_outcome(outcome, Path(outcome.directory))
    return outcome


def print_replay(result: Replayed, directory: Path, console: Console) -> None:
    """The verdict; of several runs how often they failed, and one that did in detail."""
    console.print()
    if len(result.verdicts) == 1:
        console.print(render_summary(result.outcomes))
    else:
        shown = next((one for one in result.outcomes if one.verdict is result.verdict), None)
        if shown is not None and result.verdict is not Verdict.PASSED:
            console.print(render_summary([shown]))
        console.print(Text.assemble((result.verdict.upper(), VERDICT_STYLES[result.verdict]), "  ", frequency(result)))
    console.print(Text(f"plan, journals and outcomes: {directory}", "dim"), soft_wrap=True)


def frequency(result: Replayed) -> str:
    """``failed 3 of 10 runs: 30 % (95 % interval 10.8 % to 60.3 %)``."""
    runs, (low, high) = len(result.verdicts), result.interval
    share, low_share, high_share = (number(100 * value) for value in (result.failed / runs, low, high))
    unknown = result.verdicts.count(Verdict.UNKNOWN)
    besides = f"; {unknown} unknown" if unknown else ""
    interval = f"{share} % (95 % interval {low_share} % to {high_share} %)"
    return f"failed {result.failed} of {plural(runs, 'run')}: {interval}{besides}"


def shrink(
    experiment: Planned, console: Console, directory: Path, *, budget_s: float, twin: bool, substrate: str = ""
) -> Shrunk:
    """Shrink ``experiment`` and write the smallest plan that fails to ``minimal.json`` in ``directory``.

    Raises:
        BadInput: before anything is started.
    """

    def tell(text: str) -> None:
        console.print(Text(text), soft_wrap=True)

    with _harness(experiment, substrate, directory) as harness:
        tell(f"shrinking {describe(experiment)}, for at most {number(budget_s)} s")
        return shrink_to_file(harness, experiment, directory / MINIMAL, budget_s=budget_s, twin=twin, tell=tell)


def shrunk_verdict(shrunk: Shrunk) -> Verdict:
    """What the original turned out to be: a plan that failed, broke the harness, or did neither."""
    if not shrunk.failures:
        return Verdict.PASSED if shrunk.trials else Verdict.UNKNOWN
    return Verdict.ERROR if shrunk.symptoms == {HARNESS_ERROR} else Verdict.FAILED


def plain_shrunk(shrunk: Shrunk, directory: Path) -> dict[str, Any]:
    """For JSON."""
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
    """For JSON; outcomes as :func:`chaoskit.report.store.encode_outcome` writes them."""
    return {
        "verdict": result.verdict,
        "verdicts": result.verdicts,
        "runs": len(result.verdicts),
        "failed": result.failed,
        "failure_interval": result.interval,
        "errors": result.errors,
        "outcomes": [msgspec.json.decode(encode_outcome(outcome)) for outcome in result.outcomes],
    }
