"""What a run is compared with: the unbroken twin, and plain PyTorch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from chaoskit.experiment.ending import EQUAL, check_equal, check_finite, ending
from chaoskit.experiment.findings import conclude
from chaoskit.experiment.history import History
from chaoskit.experiment.outcome import Check
from chaoskit.experiment.reference import NAME, Reference, check_dealt, check_reference
from chaoskit.experiment.run import RawRun
from chaoskit.experiment.twin import Twin
from chaoskit.vocabulary import Event, Verdict

WEIGHTS = "final weights equal the twin's"

#: Largest relative difference that another order of float32 sums explains over short runs.
_FLOAT32_DRIFT = 1e-5
_ANOTHER_ORDER = "sums may be formed in another order"


@dataclass
class Comparison:
    """Checks, and why others say nothing about the run. ``not_applied``: check -> reason."""

    checks: list[Check] = field(default_factory=list)
    not_applied: dict[str, str] = field(default_factory=dict)


def compare(
    run: RawRun,
    history: History,
    weights: Collection[str],
    twin: Twin | None,
    reference: Reference | None,
    reduction: str,
) -> Comparison:
    """Compare a run with whatever there is.

    Args:
        weights: digests of the weights with which ranks ended.
        reduction: how alike the losses of run and twin must be: ``exact`` or ``fast``.
    """
    found = Comparison(_compared_with_itself(run, twin, reference))
    if twin is not None:
        found.checks.append(_losses(history, twin, reduction))
        if reduction == "exact":
            found.checks.append(_weights(weights, twin))
        else:
            found.not_applied[WEIGHTS] = _ANOTHER_ORDER
    if any(record.event == Event.FINISHED for record in run.records):
        final = ending(run.records)
        found.checks.append(check_finite(final))
        if twin is not None and reduction == "exact":
            found.checks += [check_equal(final, twin.ending)] if final else []
        elif twin is not None:
            found.not_applied[EQUAL] = _ANOTHER_ORDER
    if reference is not None:
        if reference.is_there:
            found.checks += [check_reference(history.losses(), reference), check_dealt(reference)]
        elif run.experiment.reference == "required":
            found.checks.append(Check(name=NAME, verdict=Verdict.UNKNOWN, detail=reference.reason))
        else:
            found.not_applied[NAME] = reference.reason
    return found


def _compared_with_itself(run: RawRun, twin: Twin | None, reference: Reference | None) -> list[Check]:
    """Return an error for each comparison that would find no difference, whatever the run did."""
    others = {"twin": twin.run_id if twin else "", "reference": reference.run_id if reference else ""}
    return [
        Check(name=f"the {name} is another run", verdict=Verdict.ERROR, detail=f"both have the run id {run_id}")
        for name, run_id in others.items()
        if run_id and run_id == run.run_id
    ]


def _losses(history: History, twin: Twin, reduction: str) -> Check:
    name, losses = "losses equal the twin's", history.losses()
    if reduction == "exact":
        wrong = [
            step for step, pair in enumerate(zip(losses, twin.losses, strict=False)) if repr(pair[0]) != repr(pair[1])
        ]
        if len(losses) != len(twin.losses):
            wrong.append(min(len(losses), len(twin.losses)))
        problems = [f"step {step}: first difference" for step in sorted(wrong)[:1]]
        return conclude(name, problems, f"{len(losses)} losses, bit for bit", looked_at=len(losses))
    fine = f"{len(losses)} losses, within the rounding of another summation order"
    return conclude(name, _drift(losses, twin), fine, looked_at=len(losses))


def _drift(losses: list[float | None], twin: Twin) -> list[str]:
    for step, (mine, theirs) in enumerate(zip(losses, twin.losses, strict=False)):
        if (mine is None) != (theirs is None):
            return [f"step {step}: skipped in one run only"]
        if mine is not None and theirs is not None and not abs(mine - theirs) <= _FLOAT32_DRIFT * max(1.0, abs(theirs)):
            return [f"step {step}: {mine!r} instead of {theirs!r}"]
    return [] if len(losses) == len(twin.losses) else [f"{len(losses)} steps instead of {len(twin.losses)}"]


def _weights(digests: Collection[str], twin: Twin) -> Check:
    problems = [] if set(digests) == {twin.weights_digest} else ["SHA-256 of the weights differs"]
    return conclude(WEIGHTS, problems, f"SHA-256 {twin.weights_digest[:16]}", looked_at=len(digests))
