"""What a run is compared with: the unbroken twin, and plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from chaoskit.config import RunConfig
from chaoskit.experiment.reference.ending import (
    EQUAL,
    Numbers,
    check_equal,
    check_finite,
    check_near,
    ending,
    scalars,
)
from chaoskit.experiment.reference.floor import Floor
from chaoskit.experiment.reference.reference import (
    NAME,
    STATE,
    Reference,
    check_reference,
    check_samples,
    check_state,
    is_cut,
    no_state,
)
from chaoskit.experiment.run.run import RawRun
from chaoskit.experiment.twin.twin import Twin
from chaoskit.plaintext import plural
from chaoskit.runlog.findings import compared_with_itself, conclude
from chaoskit.runlog.history import History
from chaoskit.runlog.outcome import Check
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
    states: Collection[str],
    twin: Twin | None,
    reference: Reference | None,
    floor: Floor | None,
) -> Comparison:
    """Compare a run with whatever there is.

    Args:
        weights, states: digests of the weights, and of the whole state, with which ranks ended.
        floor: how far right runs end apart, where that was measured.
    """
    _, reduction = exactness(run.experiment.config, history)
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
        differ = twin is not None and bool(twin.scalars) and scalars(run.records) != twin.scalars
        bits_differ = (
            twin is not None and bool(twin.state_digest) and set(states) != {twin.state_digest}
        )
        _compare_endings(
            found, final, twin, floor, reduction, scalars_differ=differ, bits_differ=bits_differ
        )
    if reference is not None:
        if reference.is_there:
            found.checks += [check_reference(history.losses(), reference), check_samples(reference)]
            if is_cut(run, history, reference):
                found.checks.append(
                    Check(name=STATE, verdict=Verdict.UNKNOWN, detail="reference.json: it is cut")
                )
            elif reason := no_state(run, history, reference):
                found.not_applied[STATE] = reason
            else:
                found.checks.append(check_state(run, reference))
        elif run.experiment.reference == "required":
            found.checks.append(Check(name=NAME, verdict=Verdict.UNKNOWN, detail=reference.reason))
        else:
            found.not_applied[NAME] = reference.reason
    return found


def exactness(config: RunConfig, history: History) -> tuple[str, str]:
    """How alike a step must be that is committed again, and the numbers of the twin: ``exact`` or ``fast``.

    In a sharded job ranks of a world of another size have other parts of a gradient, and the model's own collectives
    form its sums in another order. Where the batch follows the world, a step that is
    committed again may have another batch; the twin has the one that lives on.
    """
    commits = [
        record for step in history.steps.values() for one in step.commits.values() for record in one
    ]
    if len({record["world"] for record in commits}) < 2:
        return config.reduction, config.reduction
    if not config.job.sharded:
        return config.reduction if config.follow is None else "fast", config.reduction
    return "fast", "fast"


def _compare_endings(
    found: Comparison,
    final: dict[str, Numbers],
    twin: Twin | None,
    floor: Floor | None,
    reduction: str,
    *,
    scalars_differ: bool,
    bits_differ: bool,
) -> None:
    """Add what the final states of run and twin say; without one of the run another check says that it is missing."""
    if twin is None:
        return
    if reduction == "exact":
        check = check_equal(
            final, twin.ending, scalars_differ=scalars_differ, bits_differ=bits_differ
        )
        found.checks += [check] if final else []
    elif floor is None or floor.reason:
        found.not_applied[EQUAL] = (
            f"{_ANOTHER_ORDER}; no floor: {floor.reason if floor else 'none was measured'}"
        )
    else:
        differ = scalars_differ and floor.is_steady
        found.checks += (
            [check_near(final, twin.ending, floor, scalars_differ=differ)] if final else []
        )


def _compared_with_itself(
    run: RawRun, twin: Twin | None, reference: Reference | None
) -> list[Check]:
    """Return an error for each comparison that would find no difference, whatever the run did."""
    others = {
        "twin": twin.run_id if twin else "",
        "reference": reference.run_id if reference else "",
    }
    return [
        compared_with_itself(name, run_id)
        for name, run_id in others.items()
        if run_id and run_id == run.run_id
    ]


def _losses(history: History, twin: Twin, reduction: str) -> Check:
    name, losses = "losses equal the twin's", history.losses()
    if reduction == "exact":
        wrong = [
            step
            for step, pair in enumerate(zip(losses, twin.losses, strict=False))
            if repr(pair[0]) != repr(pair[1])
        ]
        if len(losses) != len(twin.losses):
            wrong.append(min(len(losses), len(twin.losses)))
        problems = [f"step {step}: first difference" for step in sorted(wrong)[:1]]
        return conclude(
            name,
            problems,
            f"{plural(len(losses), 'loss', 'losses')}, bit for bit",
            looked_at=len(losses),
        )
    fine = (
        f"{plural(len(losses), 'loss', 'losses')}, within the rounding of another summation order"
    )
    return conclude(name, drift(losses, twin.losses), fine, looked_at=len(losses))


def drift(losses: Sequence[float | None], others: Sequence[float | None]) -> list[str]:
    """Return the first loss that lies further from the other run's than float32 explains. NaN is like NaN only."""
    for step, (loss, other) in enumerate(zip(losses, others, strict=False)):
        if (loss is None) != (other is None):
            return [f"step {step}: skipped in one run only"]
        if loss is None or other is None or repr(loss) == repr(other):
            continue
        if not (
            math.isfinite(other) and abs(loss - other) <= _FLOAT32_DRIFT * max(1.0, abs(other))
        ):
            return [f"step {step}: {loss!r} instead of {other!r}"]
    return (
        []
        if len(losses) == len(others)
        else [f"{plural(len(losses), 'step')} instead of {len(others)}"]
    )


def _weights(digests: Collection[str], twin: Twin) -> Check:
    problems = [] if set(digests) == {twin.weights_digest} else ["SHA-256 of the weights differs"]
    return conclude(
        WEIGHTS, problems, f"SHA-256 {twin.weights_digest[:16]}", looked_at=len(digests)
    )
