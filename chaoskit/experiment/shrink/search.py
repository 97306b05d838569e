"""Shrinks a failing experiment to the few faults that matter, by running candidates until a budget is spent.

Real processes fail now and then, not always. So the original is run first, to see how often it fails; from this follows
how many passing runs it takes to believe that a candidate does not fail (:func:`repeats_for`). A candidate fails when
one of its runs shows a symptom that the original showed: another failure is another story.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaoskit.errors import BadInput, HarnessError
from chaoskit.experiment.harness import Harness
from chaoskit.experiment.plan.command_plan import CommandExperiment
from chaoskit.experiment.plan.planfile import Planned, encode, save
from chaoskit.experiment.shrink.minimise import minimise
from chaoskit.experiment.shrink.proportion import repeats_for
from chaoskit.experiment.shrink.simpler import simpler, with_faults
from chaoskit.runlog.outcome import Outcome
from chaoskit.vocabulary import Verdict

HARNESS_ERROR = (
    "the harness works"  # the symptom of a run that ended in a HarnessError, worded like a check
)

_FAILURES_WANTED = 3  # of the original, to know how often it fails
_ATTEMPTS = 10  # after as many runs without a failure, it does not fail

Symptoms = frozenset[str]
Run = Callable[[Planned, float], Symptoms]
Tell = Callable[[str], None]


class BudgetSpent(Exception):
    """The time is over; a run that was under way says nothing."""


@dataclass(frozen=True, slots=True)
class Shrunk:
    """What is left of an experiment.

    Attributes:
        experiment: the smallest that failed; the original where nothing failed.
        symptoms: names of the checks that failed.
        failures, trials: how often the original failed before the search.
        repeats: passing runs after which a candidate was believed not to fail.
        runs: of all candidates and the original.
        complete: whether the search came to its end within its budget; if so, nothing simpler was found to fail.
    """

    experiment: Planned
    symptoms: Symptoms
    failures: int
    trials: int
    repeats: int
    runs: int
    complete: bool


class _Trials:
    """Runs candidates as long as the budget lasts."""

    def __init__(
        self, run: Run, budget_s: float, runs_max: int, now_s: Callable[[], float]
    ) -> None:
        self._run, self._now_s = run, now_s
        self._deadline_s, self._runs_max = now_s() + budget_s, runs_max
        self.runs = 0

    def __call__(self, experiment: Planned) -> Symptoms:
        if self._now_s() >= self._deadline_s or self.runs >= self._runs_max:
            raise BudgetSpent
        self.runs += 1
        return self._run(experiment, self._deadline_s)


def shrink(
    experiment: Planned,
    run: Run,
    *,
    budget_s: float,
    runs_max: int = 500,
    now_s: Callable[[], float] = time.monotonic,
    tell: Tell = lambda text: None,
) -> Shrunk:
    """Find the smallest experiment that fails like this one.

    Args:
        run: runs a candidate, and gives its symptoms; may raise :class:`BudgetSpent` at the given time.
        tell: is given a line at every success.
    """
    trials = _Trials(run, budget_s, runs_max, now_s)
    symptoms, failures, tried = _reproduce(experiment, trials, tell)
    if not failures:
        return Shrunk(experiment, symptoms, 0, tried, 0, trials.runs, complete=False)
    repeats = repeats_for(failures, tried)
    tell(
        f"it failed {failures} of {tried} times: a candidate that passes {repeats} times counts as passing"
    )
    search = minimise(experiment, lambda one: one.faults, with_faults, simpler, key=encode)
    best, complete = experiment, False
    try:
        candidate = next(search)
        while True:
            fails = any(trials(candidate) & symptoms for _ in range(repeats))
            if fails:
                best = candidate
                tell(f"run {trials.runs}: still fails with {describe(best)}")
            candidate = search.send(fails)
    except StopIteration:
        complete = True
    except BudgetSpent:
        pass
    return Shrunk(best, symptoms, failures, tried, repeats, trials.runs, complete)


def _reproduce(experiment: Planned, trials: _Trials, tell: Tell) -> tuple[Symptoms, int, int]:
    symptoms: Symptoms = frozenset()
    failures = tried = 0
    try:
        while failures < _FAILURES_WANTED and tried < _ATTEMPTS:
            found = trials(experiment)
            tried, failures, symptoms = tried + 1, failures + bool(found), symptoms | found
            tell(
                f"run {tried}: {'failed: ' + ', '.join(sorted(found)) if found else 'did not fail'}"
            )
    except BudgetSpent:
        pass
    return symptoms, failures, tried


def describe(experiment: Planned) -> str:
    """``2 faults, 3 nodes, 1 spare, 14 steps``."""
    if isinstance(experiment, CommandExperiment):
        counts = [(len(experiment.faults), "fault"), (experiment.nodes, "node")]
    else:
        config = experiment.config
        counts = [
            (len(experiment.faults), "fault"),
            (config.nodes, "node"),
            (config.spares, "spare"),
        ]
        counts += [(experiment.steps, "step")] if experiment.steps is not None else []
    return ", ".join(f"{count} {word}{'' if count == 1 else 's'}" for count, word in counts)


# -- with real runs -----------------------------------------------------------------------------------------------


def symptoms_of(outcome: Outcome) -> Symptoms:
    """The checks that say failed or error. A fault without evidence is none: it may have found nothing to strike."""
    bad = [
        check.name for check in outcome.checks if check.verdict in (Verdict.FAILED, Verdict.ERROR)
    ]
    return frozenset(
        "faults are undone" if name.startswith("evidence of ") else name for name in bad
    )


def real_run(harness: Harness, *, twin: bool = True) -> Run:
    """Runs candidates with ``harness``, and breaks a run off when the time is over."""

    def run(experiment: Planned, deadline_s: float) -> Symptoms:
        def watch(message: Any) -> None:
            if time.monotonic() >= deadline_s:
                raise BudgetSpent

        try:
            return symptoms_of(
                harness.run_planned(experiment, twin=twin, watch=watch, watch_twin=watch)
            )
        except HarnessError:
            return frozenset([HARNESS_ERROR])
        except BadInput:  # a job may refuse what no plan can know, such as too few steps
            return frozenset()

    return run


def shrink_to_file(
    harness: Harness,
    experiment: Planned,
    path: Path,
    *,
    budget_s: float,
    twin: bool = True,
    tell: Tell = print,
) -> Shrunk:
    """Shrink by real runs, write the smallest plan to ``path``, and tell how to run it.

    Raises:
        BadInput: if the file cannot be written.
    """
    save(
        experiment, path
    )  # a bad path is refused at once, and an interrupted search leaves the original there
    shrunk = shrink(experiment, real_run(harness, twin=twin), budget_s=budget_s, tell=tell)
    save(shrunk.experiment, path)
    if not shrunk.failures:
        tell(
            f"it did not fail in {shrunk.trials} runs; the plan is kept: chaoskit replay {path} --times 20"
        )
        return shrunk
    end = "nothing simpler was found to fail" if shrunk.complete else "the budget is spent"
    tell(f"{shrunk.runs} runs, {end}: {describe(shrunk.experiment)}")
    for fault in shrunk.experiment.faults:
        tell(f"  {fault}")
    tell(f"chaoskit replay {path}{'' if twin else ' --no-twin'}")
    return shrunk
