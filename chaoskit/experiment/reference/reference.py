"""The reference: the first steps of a job in plain PyTorch, by a process that shares no code with
the runtime.

The twin is made by the runtime under test and has its errors. A gradient that is scaled wrongly in
every run is wrong in both. The reference compares the losses of the first steps and the state after
them. They must be equal bit for bit if sums have one order. Otherwise they must agree within the
largest difference of two orders over several seeds, times a margin.

-> plain.py: the training in that process. experiment/judge/comparison.py: which check applies, and
a reference that was required and is missing. experiment/reference/ending.py compares the states.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from chaoskit.errors import HarnessError
from chaoskit.experiment.plan.plan import REFERENCE_STEPS, Experiment
from chaoskit.experiment.reference.ending import Numbers, check_equal, check_near, described, rates
from chaoskit.experiment.reference.floor import Floor
from chaoskit.experiment.reference.plain_process import ask, inputs_digest, out_of_reach, samples_of
from chaoskit.experiment.run.run import RawRun
from chaoskit.plain import Request
from chaoskit.runlog.checks import conclude
from chaoskit.runlog.history import History
from chaoskit.runlog.outcome import Check
from chaoskit.substrate.undo import UndoLog
from chaoskit.vocabulary import Event, Verdict

#: Seeds over which two orders of summation are compared.
SEEDS = tuple(range(1, 11))
#: Another order may round so many times worse than the measured ones.
MARGIN = 4.0
#: Least allowed difference: losses are sums of float32 numbers and may differ in the last place.
LEAST = 2.0**-22

NAME = "losses equal the reference's"
STATE = "state equals the reference's"
SAMPLES = "samples equal the reference's"


class Reference(msgspec.Struct, frozen=True):
    """The result of plain PyTorch for the first steps of a run.

    Attributes:
        run_id: the id of the process that trained the steps; "" if none did, or it ran out of time.
        losses: the losses of the first steps, None for a step that was skipped.
        state: path of a tensor -> its numbers after these steps; empty if plain PyTorch did not
            take all of them.
        allowed: the relative difference of losses that is allowed, by step; empty if they must be
            equal bit for bit.
        floor: the allowed difference of the state.
        rates: the learning rates after these steps.
        misdealt: the first samples that differ from those of seed and dataset; empty if none do.
        trained: the digest of options, seed and samples; see
            :func:`chaoskit.experiment.reference.plain_process.inputs_digest`. Empty if nothing was
            trained.
        reason: the reason why there are no losses.
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
        """True if there are losses to compare with."""
        return bool(self.losses)


def reference_of(
    experiment: Experiment, history: History, directory: Path, undo: UndoLog
) -> Reference | None:
    """Train the first steps of a run in plain PyTorch, with the samples that its journals name.

    Args:
        experiment: the plan of the run.
        history: the committed steps of the run.
        directory: the directory of the run, which receives the request and the log of the process.
        undo: receives the entry that ends the process if this one is killed.

    Returns:
        The reference; without losses, but with a reason, if PyTorch cannot train the job. None if
        the process failed, for a reason that its log holds.
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
    digest = inputs_digest(experiment, samples)
    if answer.reason:
        return Reference(answer.run_id, trained=digest, reason=answer.reason)
    allowed = [] if is_exact else [max(LEAST, MARGIN * spread) for spread in answer.spread]
    floor = Floor(answer.floor, answer.orders)
    results = (answer.losses, answer.state, allowed, floor, answer.rates, answer.misdealt)
    return Reference(answer.run_id, *results, digest)


def _why_not(experiment: Experiment, samples: Sequence[object]) -> str:
    """Return why plain PyTorch cannot train the job; empty if it can."""
    return out_of_reach(experiment) or (
        "" if samples else "the run has not committed its first step"
    )


def belongs_to(reference: Reference, experiment: Experiment, history: History) -> bool:
    """Return whether a reference was made for a run, or is missing for the same reason."""
    samples = samples_of(history, REFERENCE_STEPS, experiment)
    if reason := _why_not(experiment, samples):
        return reference.reason == reason
    return reference.trained == inputs_digest(experiment, samples)


def check_reference(losses: list[float | None], reference: Reference) -> Check:
    """Return the check that the first losses of the run equal those of the reference.

    Steps that only one of them has are not compared.
    """
    for step, (loss, reference_loss) in enumerate(zip(losses, reference.losses, strict=False)):
        if not _is_same(
            loss, reference_loss, reference.allowed[step] if reference.allowed else 0.0
        ):
            detail = f"step {step}: {loss!r} instead of {reference_loss!r} in plain PyTorch"
            return Check(name=NAME, verdict=Verdict.FAILED, detail=detail)
    count = len(reference.losses)
    precision_in_words = (
        "within what another order of the sum explains" if reference.allowed else "bit for bit"
    )
    return Check(
        name=NAME,
        verdict=Verdict.PASSED,
        detail=f"{count} losses of plain PyTorch, {precision_in_words}",
    )


def check_samples(reference: Reference) -> Check:
    """Return the check that the run took the samples that seed and dataset give."""
    passed_detail = f"those of {len(reference.losses)} steps, as plain PyTorch deals them"
    problems = [reference.misdealt] if reference.misdealt else []
    return conclude(SAMPLES, problems, passed_detail, looked_at=len(reference.losses))


def is_cut(run: RawRun, history: History, reference: Reference) -> bool:
    """Return whether a reference lacks its state or some steps, without a reason."""
    journaled = len(samples_of(history, REFERENCE_STEPS, run.experiment))
    return not reference.reason and (len(reference.losses) != journaled or not reference.state)


def _is_same(loss: float | None, reference_loss: float | None, allowed: float) -> bool:
    """Return whether two losses are equal, or differ by at most ``allowed``, relatively.

    None is a skipped step, and equals None only.
    """
    if loss is None or reference_loss is None:
        return loss is reference_loss
    return repr(loss) == repr(reference_loss) or abs(loss - reference_loss) <= allowed * max(
        1.0, abs(reference_loss)
    )


def no_state(run: RawRun, history: History, reference: Reference) -> str:
    """Return why the state of a run cannot be compared with the reference's, or an empty text."""
    step = len(reference.losses)
    if step not in (REFERENCE_STEPS, len(history.steps)):
        return f"step {step} was skipped for a fault or is not recorded, so ranks described their state after another step"
    if step == len(history.steps) and not any(
        record.event == Event.FINISHED for record in run.records
    ):
        return "the run ended before ranks described their state"
    return ""


def check_state(run: RawRun, reference: Reference) -> Check:
    """Return the check that the state after the reference's last step equals the reference's.

    It is unknown if one of the states is missing.
    """
    step = len(reference.losses)
    state = described(run.records, step)
    if not state or not reference.state:
        missing_in_words = (
            f"no rank described its state after {step} steps"
            if not state
            else "the reference has no state"
        )
        return Check(name=STATE, verdict=Verdict.UNKNOWN, detail=missing_in_words)
    scalars_differ = rates(run.records, step) != reference.rates
    if reference.allowed:
        return check_near(
            state, reference.state, reference.floor, scalars_differ=scalars_differ, name=STATE
        )
    return check_equal(state, reference.state, scalars_differ=scalars_differ, name=STATE)
