"""Shrinking of a failing experiment to the few faults that matter, by running candidates within a
time budget.

Real processes do not fail every time. So the original is run first, to estimate how often it fails.
This gives the number of passing runs after which a candidate counts as passing
(:func:`repeats_for`). A candidate fails if one of its runs shows a symptom of the original; other
failures do not count.

-> experiment/shrink/minimise.py: the order of the candidates. experiment/shrink/simpler.py: how an
experiment is made simpler.
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

# symptom of a run that ended in a HarnessError, worded like a check
HARNESS_ERROR = "the harness works"

_FAILURES_NEEDED = 3  # failures of the original, to estimate how often it fails
_ATTEMPTS = 10  # after so many runs without a failure, the original counts as passing

Symptoms = frozenset[str]
Run = Callable[[Planned, float], Symptoms]
Tell = Callable[[str], None]


class BudgetSpent(Exception):
    """Error: the time budget is spent. A run that was under way has no result."""


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The result of a search.

    Attributes:
        experiment: the smallest experiment that failed; the original if none failed.
        symptoms: the symptoms of all runs of the original; see :func:`symptoms_of`.
        failures: how often the original failed before the search.
        trials: how often the original was run before the search.
        repeats: the number of passing runs after which a candidate counted as passing; 0 if the
            original never failed.
        runs: the number of runs, of all candidates and the original.
        complete: the search ended within its budget, and no simpler experiment was found to fail.
            It is False if the original never failed.
    """

    experiment: Planned
    symptoms: Symptoms
    failures: int
    trials: int
    repeats: int
    runs: int
    complete: bool


class _Trials:
    """Function that runs candidates until the budget is spent; ``runs`` counts the runs."""

    def __init__(
        self, run: Run, budget_s: float, runs_max: int, now_s: Callable[[], float]
    ) -> None:
        self._run, self._now_s = run, now_s
        self._deadline_s, self._runs_max = now_s() + budget_s, runs_max
        self.runs = 0

    def __call__(self, experiment: Planned) -> Symptoms:
        """Run a candidate and return its symptoms; raise BudgetSpent if the budget is spent."""
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
    """Search the smallest experiment that fails like this one, and return the result.

    The search ends with the best experiment so far when the budget is spent.

    Args:
        experiment: the experiment that fails.
        run: runs a candidate and returns its symptoms. Its second argument is the time of
            ``now_s`` at which the budget is spent; it may raise :class:`BudgetSpent` then.
        budget_s: the time budget in seconds.
        runs_max: the largest number of runs.
        now_s: returns the monotonic time.
        tell: receives a line of text after each run of the original, and for each smaller
            experiment that fails.
    """
    trials = _Trials(run, budget_s, runs_max, now_s)
    symptoms, failure_count, trial_count = _reproduce(experiment, trials, tell)
    if not failure_count:
        return Shrunk(experiment, symptoms, 0, trial_count, 0, trials.runs, complete=False)
    repeats = repeats_for(failure_count, trial_count)
    tell(
        f"it failed {failure_count} of {trial_count} times: a candidate that passes {repeats} times counts as passing"
    )
    search = minimise(
        experiment, lambda candidate: candidate.faults, with_faults, simpler, key=encode
    )
    best, complete = experiment, False
    try:
        candidate = next(search)
        while True:
            has_failed = any(trials(candidate) & symptoms for _ in range(repeats))
            if has_failed:
                best = candidate
                tell(f"run {trials.runs}: still fails with {describe(best)}")
            candidate = search.send(has_failed)
    except StopIteration:
        complete = True
    except BudgetSpent:
        pass
    return Shrunk(best, symptoms, failure_count, trial_count, repeats, trials.runs, complete)


def _reproduce(experiment: Planned, trials: _Trials, tell: Tell) -> tuple[Symptoms, int, int]:
    """Run the original until it has failed often enough; return symptoms, failures and runs.

    The runs end early after ``_ATTEMPTS``, or when the budget is spent.
    """
    symptoms: Symptoms = frozenset()
    failure_count = trial_count = 0
    try:
        while failure_count < _FAILURES_NEEDED and trial_count < _ATTEMPTS:
            new_symptoms = trials(experiment)
            trial_count, failure_count, symptoms = (
                trial_count + 1,
                failure_count + bool(new_symptoms),
                symptoms | new_symptoms,
            )
            tell(
                f"run {trial_count}: {'failed: ' + ', '.join(sorted(new_symptoms)) if new_symptoms else 'did not fail'}"
            )
    except BudgetSpent:
        pass
    return symptoms, failure_count, trial_count


def describe(experiment: Planned) -> str:
    """Return the size of an experiment, such as ``2 faults, 3 nodes, 1 spare, 14 steps``."""
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


# -- with real runs --------------------------------------------------------------------------------


def symptoms_of(outcome: Outcome) -> Symptoms:
    """Return the names of the checks that failed or ended in an error.

    A fault without evidence is no symptom: there may have been nothing to strike. Faults that could
    not be undone share one name.
    """
    failed_names = [
        check.name for check in outcome.checks if check.verdict in (Verdict.FAILED, Verdict.ERROR)
    ]
    return frozenset(
        "faults are undone" if name.startswith("evidence of ") else name for name in failed_names
    )


def real_run(harness: Harness, *, twin: bool = True) -> Run:
    """Return a function that runs a candidate with ``harness`` and returns its symptoms.

    A candidate that the job refuses has none. An error of the harness is the symptom
    :data:`HARNESS_ERROR`. The function raises BudgetSpent at the first message of a run after its
    time is over.
    """

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
        except BadInput:  # a job may refuse a plan, for example with too few steps
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
    """Shrink by real runs, write the smallest plan to ``path``, and return the result.

    Args:
        harness: runs the candidates.
        experiment: the experiment that fails.
        path: the plan file, which holds the original until the search is over.
        budget_s: the time budget in seconds.
        twin: compare each run with an unbroken run.
        tell: receives the progress, the result, and the command that runs it, line by line.

    Raises:
        BadInput: if the file cannot be written, or a field of a fault has no JSON form.
    """
    # refuses a bad path at once, and keeps the original if the search is interrupted
    save(experiment, path)
    shrunk = shrink(experiment, real_run(harness, twin=twin), budget_s=budget_s, tell=tell)
    save(shrunk.experiment, path)
    if not shrunk.failures:
        tell(
            f"it did not fail in {shrunk.trials} runs; the plan is kept: chaoskit replay {path} --times 20"
        )
        return shrunk
    end_in_words = "nothing simpler was found to fail" if shrunk.complete else "the budget is spent"
    tell(f"{shrunk.runs} runs, {end_in_words}: {describe(shrunk.experiment)}")
    for fault in shrunk.experiment.faults:
        tell(f"  {fault}")
    tell(f"chaoskit replay {path}{'' if twin else ' --no-twin'}")
    return shrunk
