"""The reference: the first steps of a job in plain PyTorch, by a process that shares no code with the runtime.

The twin is made by the runtime that is under test, and has its mistakes: a gradient scaled wrongly in every run is in
both. What is compared here are the losses of the first steps and the state behind them, bit for bit where the sum has
one order, else within what another order of the sum explains: the largest difference of two orders, over several seeds,
times a margin.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from chaoskit.errors import HarnessError
from chaoskit.experiment.plan.plan import REFERENCE_STEPS, Experiment
from chaoskit.experiment.reference.ending import Numbers, check_equal, check_near, described, rates
from chaoskit.experiment.reference.floor import Floor
from chaoskit.experiment.reference.plain_process import ask, out_of_reach, samples_of, trained
from chaoskit.experiment.run.run import RawRun
from chaoskit.plain import Request
from chaoskit.runlog.findings import conclude
from chaoskit.runlog.history import History
from chaoskit.runlog.outcome import Check
from chaoskit.substrate.undo import UndoLog
from chaoskit.vocabulary import Event, Verdict

#: Seeds over which two orders of summation are compared.
SEEDS = tuple(range(1, 11))
#: Another order may round so many times worse than the two that were measured.
MARGIN = 4.0
#: Losses are sums of float32 numbers: they may differ by one unit in the last place, whatever was measured.
LEAST = 2.0**-22

NAME = "losses equal the reference's"
STATE = "state equals the reference's"
SAMPLES = "samples equal the reference's"


class Reference(msgspec.Struct, frozen=True):
    """What plain PyTorch came to.

    Attributes:
        losses: of the first steps; None of one that was skipped.
        state: numbers of each tensor behind them; empty where plain PyTorch did not take them all.
        allowed: by step, the relative difference of losses that another order of the sum explains; empty: bit for bit.
        floor: of the state, likewise.
        rates: learning rates behind these steps.
        misdealt: the first samples that are not those which seed and dataset give; empty if all are.
        trained: options, seed and samples; see :func:`chaoskit.experiment.reference.plain_process.trained`. Empty:
            nothing was.
        reason: why there are no losses.
    """

    run_id: str = ""
    losses: list[float | None] = []
    state: dict[str, Numbers] = {}
    allowed: list[float] = []
    floor: Floor = Floor()
    rates: list[float] = []
    misdealt: str = ""
    trained: str = ""
    reason: str = ""

    @property
    def is_there(self) -> bool:
        """Whether there is anything to compare with."""
        return bool(self.losses)


def reference_of(
    experiment: Experiment, history: History, directory: Path, undo: UndoLog
) -> Reference | None:
    """Train the first steps of a run in plain PyTorch, with the samples that its journals name.

    Args:
        directory: of the run; the request and the log of the process stay there.

    Returns:
        None if the process failed: then nothing is known, and the log says why.
    """
    if reason := _why_not(experiment, samples := samples_of(history, REFERENCE_STEPS, experiment)):
        return Reference(reason=reason)
    config = experiment.unbroken(steps=experiment.steps or len(history.steps)).config
    is_exact = config.reduction == "exact" and not config.job.sharded
    skips = config.nonfinite == "skip"
    request = Request(
        config.job, config.seed, samples, [] if is_exact else list(SEEDS), skips=skips
    )
    try:
        answer = ask(request, directory, "reference", undo)
    except HarnessError:
        return None
    mark = trained(experiment, samples)
    if answer.reason:
        return Reference(answer.run_id, trained=mark, reason=answer.reason)
    allowed = [] if is_exact else [max(LEAST, MARGIN * spread) for spread in answer.spread]
    floor = Floor(answer.floor, answer.orders)
    told = (answer.losses, answer.state, allowed, floor, answer.rates, answer.misdealt)
    return Reference(answer.run_id, *told, mark)


def _why_not(experiment: Experiment, samples: Sequence[object]) -> str:
    """Return why plain PyTorch is not asked; empty if it is."""
    return out_of_reach(experiment) or (
        "" if samples else "the run has not committed its first step"
    )


def is_of(reference: Reference, experiment: Experiment, history: History) -> bool:
    """Whether a reference is that of a run."""
    samples = samples_of(history, REFERENCE_STEPS, experiment)
    if reason := _why_not(experiment, samples):
        return reference.reason == reason
    return reference.trained == trained(experiment, samples)


def check_reference(losses: list[float | None], reference: Reference) -> Check:
    """Passed if the first losses of the run are those of the reference."""
    for step, (mine, theirs) in enumerate(zip(losses, reference.losses, strict=False)):
        if not _is_same(mine, theirs, reference.allowed[step] if reference.allowed else 0.0):
            detail = f"step {step}: {mine!r} instead of {theirs!r} in plain PyTorch"
            return Check(name=NAME, verdict=Verdict.FAILED, detail=detail)
    count = len(reference.losses)
    how = "within what another order of the sum explains" if reference.allowed else "bit for bit"
    return Check(
        name=NAME, verdict=Verdict.PASSED, detail=f"{count} losses of plain PyTorch, {how}"
    )


def check_samples(reference: Reference) -> Check:
    """Passed if the first steps of the run took the samples that seed and dataset give."""
    fine = f"those of {len(reference.losses)} steps, as plain PyTorch deals them"
    problems = [reference.misdealt] if reference.misdealt else []
    return conclude(SAMPLES, problems, fine, looked_at=len(reference.losses))


def is_cut(run: RawRun, history: History, reference: Reference) -> bool:
    """Whether a reference that gives no reason has fewer steps than the journals tell of, or no state."""
    told = len(samples_of(history, REFERENCE_STEPS, run.experiment))
    return not reference.reason and (len(reference.losses) != told or not reference.state)


def _is_same(mine: float | None, theirs: float | None, allowed: float) -> bool:
    """Whether two losses are equal, within a relative difference; None is that of a step that was skipped."""
    if mine is None or theirs is None:
        return mine is theirs
    return repr(mine) == repr(theirs) or abs(mine - theirs) <= allowed * max(1.0, abs(theirs))


def no_state(run: RawRun, history: History, reference: Reference) -> str:
    """Return why the state of a run cannot be compared with the reference's; empty where it can, or must."""
    step = len(reference.losses)
    if step not in (REFERENCE_STEPS, len(history.steps)):
        return f"step {step} was skipped for a fault, or is not told of: ranks describe their state behind another one"
    if step == len(history.steps) and not any(
        record.event == Event.FINISHED for record in run.records
    ):
        return "the run ended before it was described"
    return ""


def check_state(run: RawRun, reference: Reference) -> Check:
    """Passed if the state behind the last step of the reference is the reference's."""
    step = len(reference.losses)
    found = described(run.records, step)
    if not found or not reference.state:
        missing = (
            f"no rank described its state behind {step} steps"
            if not found
            else "the reference has no state"
        )
        return Check(name=STATE, verdict=Verdict.UNKNOWN, detail=missing)
    differ = rates(run.records, step) != reference.rates
    if reference.allowed:
        return check_near(
            found, reference.state, reference.floor, scalars_differ=differ, name=STATE
        )
    return check_equal(found, reference.state, scalars_differ=differ, name=STATE)
