"""Comparison of a run with its unbroken twin and with plain PyTorch.

-> experiment/twin/twin.py: which run is a twin. experiment/reference/ending.py: comparison of final
states. experiment/reference/floor.py: the distance that is allowed if sums have no fixed order.
experiment/judge/coverage.py: a twin or reference that is missing or belongs to another run.
"""

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
from chaoskit.runlog.checks import compared_with_itself, conclude
from chaoskit.runlog.history import History
from chaoskit.runlog.outcome import Check
from chaoskit.vocabulary import Event, Verdict

WEIGHTS = "final weights equal the twin's"

#: Largest relative difference that another order of float32 sums can cause over short runs.
_FLOAT32_DRIFT = 1e-5
_ANOTHER_ORDER = "sums may be formed in another order"


@dataclass
class Comparison:
    """The checks that compare a run, and the reasons why others do not apply.

    Attributes:
        checks: the checks.
        not_applied: name of a check that does not apply -> reason.
    """

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
    """Compare a run with each of twin, reference and floor that there is.

    Return the checks, and the reasons why others do not apply. The final state of a run that came
    to its end is also checked for numbers that are not finite, without any of these.

    Args:
        run: the records of the run.
        history: its committed steps.
        weights: digests of the weights with which ranks ended.
        states: digests of the whole state with which ranks ended.
        twin: the unbroken run, or None.
        reference: the result of plain PyTorch, or None.
        floor: the distance between the ends of correct runs, or None if it was not measured.
    """
    _, reduction = exactness(run.experiment.config, history)
    comparison = Comparison(_compared_with_itself(run, twin, reference))
    if twin is not None:
        comparison.checks.append(_losses(history, twin, reduction))
        if reduction == "exact":
            comparison.checks.append(_weights(weights, twin))
        else:
            comparison.not_applied[WEIGHTS] = _ANOTHER_ORDER
    if any(record.event == Event.FINISHED for record in run.records):
        final_numbers = ending(run.records)
        comparison.checks.append(check_finite(final_numbers))
        scalars_differ = (
            twin is not None and bool(twin.scalars) and scalars(run.records) != twin.scalars
        )
        bits_differ = (
            twin is not None and bool(twin.state_digest) and set(states) != {twin.state_digest}
        )
        _compare_endings(
            comparison,
            final_numbers,
            twin,
            floor,
            reduction,
            scalars_differ=scalars_differ,
            bits_differ=bits_differ,
        )
    if reference is not None:
        if reference.is_there:
            comparison.checks += [
                check_reference(history.losses(), reference),
                check_samples(reference),
            ]
            if is_cut(run, history, reference):
                comparison.checks.append(
                    Check(
                        name=STATE,
                        verdict=Verdict.UNKNOWN,
                        detail="reference.json: it is incomplete",
                    )
                )
            elif reason := no_state(run, history, reference):
                comparison.not_applied[STATE] = reason
            else:
                comparison.checks.append(check_state(run, reference))
        elif run.experiment.reference == "required":
            comparison.checks.append(
                Check(name=NAME, verdict=Verdict.UNKNOWN, detail=reference.reason)
            )
        else:
            comparison.not_applied[NAME] = reference.reason
    return comparison


def exactness(config: RunConfig, history: History) -> tuple[str, str]:
    """Return the required equality of repeated steps, and that of the twin.

    Each is ``exact`` for equal bits, or ``fast`` for equality within rounding.

    In a sharded job, ranks of a world of another size have other parts of a gradient. The model's
    own collectives also form their sums in another order. If the batch follows the world, a step
    that is committed again may have another batch; the twin has the one that was kept.
    """
    commits = [
        record
        for step in history.steps.values()
        for records in step.commits.values()
        for record in records
    ]
    if len({record["world"] for record in commits}) < 2:
        return config.reduction, config.reduction
    if not config.job.sharded:
        return config.reduction if config.follow is None else "fast", config.reduction
    return "fast", "fast"


def _compare_endings(
    comparison: Comparison,
    final_numbers: dict[str, Numbers],
    twin: Twin | None,
    floor: Floor | None,
    reduction: str,
    *,
    scalars_differ: bool,
    bits_differ: bool,
) -> None:
    """Add a check of the final states of run and twin, or the reason why there is none.

    Nothing is added without a twin, or without a final state, which another check reports.

    Args:
        comparison: receives the check or the reason.
        final_numbers: path of a tensor -> its numbers at the end of the run; empty if not described.
        twin: the unbroken run, or None.
        floor: the distance between the ends of correct runs, or None if it was not measured.
        reduction: the required equality, ``exact`` or ``fast``.
        scalars_differ: learning rates, schedules or counts differ from the twin's.
        bits_differ: the digest of all tensors differs from the twin's.
    """
    if twin is None:
        return
    if reduction == "exact":
        check = check_equal(
            final_numbers, twin.ending, scalars_differ=scalars_differ, bits_differ=bits_differ
        )
        comparison.checks += [check] if final_numbers else []
    elif floor is None or floor.reason:
        comparison.not_applied[EQUAL] = (
            f"{_ANOTHER_ORDER}; no floor: {floor.reason if floor else 'none was measured'}"
        )
    else:
        has_other_scalars = scalars_differ and floor.is_steady
        comparison.checks += (
            [check_near(final_numbers, twin.ending, floor, scalars_differ=has_other_scalars)]
            if final_numbers
            else []
        )


def _compared_with_itself(
    run: RawRun, twin: Twin | None, reference: Reference | None
) -> list[Check]:
    """Return a check with the verdict error for each comparison of the run with itself."""
    run_ids = {
        "twin": twin.run_id if twin else "",
        "reference": reference.run_id if reference else "",
    }
    return [
        compared_with_itself(name, run_id)
        for name, run_id in run_ids.items()
        if run_id and run_id == run.run_id
    ]


def _losses(history: History, twin: Twin, reduction: str) -> Check:
    """Return the check that the losses equal the twin's: exactly, or within rounding.

    A different number of steps fails it, too.

    Args:
        history: the committed steps of the run.
        twin: the unbroken run.
        reduction: the required equality, ``exact`` or ``fast``.
    """
    name, losses = "losses equal the twin's", history.losses()
    if reduction == "exact":
        different_steps = [
            step
            for step, pair in enumerate(zip(losses, twin.losses, strict=False))
            if repr(pair[0]) != repr(pair[1])
        ]
        if len(losses) != len(twin.losses):
            different_steps.append(min(len(losses), len(twin.losses)))
        problems = [f"step {step}: first difference" for step in sorted(different_steps)[:1]]
        return conclude(
            name,
            problems,
            f"{plural(len(losses), 'loss', 'losses')}, bit for bit",
            looked_at=len(losses),
        )
    passed_detail = (
        f"{plural(len(losses), 'loss', 'losses')}, within the rounding of another summation order"
    )
    return conclude(name, drift(losses, twin.losses), passed_detail, looked_at=len(losses))


def drift(losses: Sequence[float | None], other_losses: Sequence[float | None]) -> list[str]:
    """Return in words the first loss that differs by more than float32 rounding explains.

    The list is empty if there is none. NaN equals NaN only. A loss of None is a skipped step. If no
    loss differs, a different number of steps is returned.
    """
    for step, (loss, other_loss) in enumerate(zip(losses, other_losses, strict=False)):
        if (loss is None) != (other_loss is None):
            return [f"step {step}: skipped in one run only"]
        if loss is None or other_loss is None or repr(loss) == repr(other_loss):
            continue
        if not (
            math.isfinite(other_loss)
            and abs(loss - other_loss) <= _FLOAT32_DRIFT * max(1.0, abs(other_loss))
        ):
            return [f"step {step}: {loss!r} instead of {other_loss!r}"]
    return (
        []
        if len(losses) == len(other_losses)
        else [f"{plural(len(losses), 'step')} instead of {len(other_losses)}"]
    )


def _weights(digests: Collection[str], twin: Twin) -> Check:
    """Return the check that the final weights of all ranks equal the twin's."""
    problems = [] if set(digests) == {twin.weights_digest} else ["SHA-256 of the weights differs"]
    return conclude(
        WEIGHTS, problems, f"SHA-256 {twin.weights_digest[:16]}", looked_at=len(digests)
    )
