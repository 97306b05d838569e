"""Mistakes of the runtime, each with the check that must find it in each cell.

-> suites/canary/wrong_jobs.py makes them; suites/canary/test_runtime.py runs and judges each.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from chaoskit.suites.canary.wrong_worker import AFTER, END, EVERY, LAST, LATE, ONCE, RESTORE

#: Cells of the matrix: replicated jobs with both kinds of reduction, and one that FSDP2 spreads
#: over the ranks.
EXACT, FAST, SHARDED = CELLS = ("exact", "fast", "sharded")

REFERENCE = "losses equal the reference's"
PLAIN_STATE = "state equals the reference's"
DEALT = "property 39S: epochs are permutations"
LOSSES = "losses equal the twin's"
WEIGHTS = "final weights equal the twin's"
STATE = "final state equals the twin's"
FINITE = "final state is finite"
HISTORY = "one committed history"
SAMPLES = "every sample exactly once"
WHOLE = "property 26S: a restore is complete"

#: Reason why a mistake is not found in a cell.
TWIN_HAS_IT = "the twin ends so, too, and plain PyTorch takes 8 steps only"
#: Reason why a mistake is not tried in a cell.
NO_BUFFERS = "buffers of a sharded job are each rank's own"

WHEN = {
    EVERY: "each step of every run",
    END: "the last step of every run",
    LATE: "the tenth and last step of every run",
    AFTER: "each step after a recovery",
    ONCE: "the first step after a recovery",
    LAST: "the last step after a recovery",
    RESTORE: "the restore of a recovery",
}


@dataclass(frozen=True)
class Mistake:
    """Mistake that the runtime makes in its workers.

    Attributes:
        name: name in words.
        function: the function of :mod:`chaoskit.suites.canary.wrong_jobs` that makes it.
        when: one of the times of :mod:`chaoskit.suites.canary.wrong_worker`. The unbroken run
            makes it, too, for ``every``, ``end`` and ``late``.
        found_by: cell -> the check that fails.
        unseen: cell -> the reason why the run passes all the same.
        kind: kind of the job.
        untried: cell -> the reason why there is no such run.
    """

    name: str
    function: str
    when: str
    found_by: dict[str, str]
    unseen: dict[str, str] = field(default_factory=dict)
    kind: str = "sgd"
    untried: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The name of the mistake, with its time."""
        return f"{self.name} ({WHEN[self.when]})"


def _everywhere(check: str) -> dict[str, str]:
    return dict.fromkeys(CELLS, check)


_REFERENCE, _LOSSES, _SAMPLES = _everywhere(REFERENCE), _everywhere(LOSSES), _everywhere(SAMPLES)
#: Mistakes on one rank: replicas differ in the end; no rank holds the same piece of a sharded
#: state.
_ONE_RANK = {EXACT: HISTORY, FAST: HISTORY, SHARDED: LOSSES}
_AT_THE_END = _everywhere(STATE)

MISTAKES: tuple[Mistake, ...] = (
    # in every run: the twin has it, too
    Mistake("one shard is never in the sum", "leaves_out_a_shard", EVERY, _REFERENCE),
    Mistake("one shard is in the sum twice", "counts_a_shard_twice", EVERY, _REFERENCE),
    Mistake(
        "the sum is divided by another number of shards",
        "divides_by_another_count",
        EVERY,
        _REFERENCE,
    ),
    Mistake(
        "gradients are clipped to half of the limit", "clips_twice", EVERY, _REFERENCE, kind="clip"
    ),
    Mistake("gradients are not clipped", "never_clips", EVERY, _REFERENCE, kind="clip"),
    Mistake("one rank rounds gradients to bfloat16", "rounds_gradients", EVERY, _REFERENCE),
    Mistake("gradients are those of the step before", "uses_old_gradients", EVERY, _REFERENCE),
    Mistake("gradients of the step before are added", "adds_old_gradients", EVERY, _REFERENCE),
    Mistake("one parameter is never updated", "leaves_out_a_parameter", EVERY, _REFERENCE),
    Mistake("weight decay is applied twice", "decays_weights_twice", EVERY, _REFERENCE),
    Mistake("the learning rate is doubled", "doubles_the_learning_rate", EVERY, _REFERENCE),
    Mistake("the schedule never advances", "never_steps_the_schedule", EVERY, _REFERENCE),
    Mistake("momentum is lost after each step", "forgets_momentum", EVERY, _REFERENCE),
    Mistake(
        "Adam's count of steps stays at 0", "counts_steps_anew", EVERY, _REFERENCE, kind="adam"
    ),
    Mistake("all shards of a step draw the same dropout", "seeds_by_step_only", EVERY, _REFERENCE),
    Mistake("all steps draw the same dropout", "seeds_by_shard_only", EVERY, _REFERENCE),
    Mistake("dropout is off", "leaves_dropout_off", EVERY, _REFERENCE),
    Mistake(
        "other samples are computed than are written down",
        "computes_other_samples",
        EVERY,
        _REFERENCE,
    ),
    Mistake(
        "a sample is used twice, and another one never",
        "deals_a_sample_twice",
        EVERY,
        _everywhere(DEALT),
    ),
    Mistake(
        "the loss that is told is of the step before", "tells_the_loss_before", EVERY, _REFERENCE
    ),
    Mistake("a weight is no number", "loses_a_number", END, _everywhere(FINITE)),
    Mistake("a number of the optimizer is none", "loses_a_moment", END, _everywhere(FINITE)),
    Mistake("the update is not applied", "skips_the_update", END, _everywhere(PLAIN_STATE)),
    Mistake("the update is not applied", "skips_the_update", LATE, {}, _everywhere(TWIN_HAS_IT)),
    Mistake(
        "gradients are three times too large",
        "scales_gradients",
        EVERY,
        _everywhere(PLAIN_STATE),
        kind="adam",
    ),
    # in the broken run: sums and gradients
    Mistake("one shard is not in the sum", "leaves_out_a_shard", ONCE, _LOSSES),
    Mistake(
        "the sum is divided by another number of shards", "divides_by_another_count", ONCE, _LOSSES
    ),
    Mistake("the replacement contributes zeros", "has_a_silent_heir", AFTER, _LOSSES),
    Mistake(
        "gradients are clipped to half of the limit", "clips_twice", AFTER, _LOSSES, kind="clip"
    ),
    Mistake("gradients are not clipped", "never_clips", ONCE, _LOSSES, kind="clip"),
    Mistake(
        "one rank rounds gradients to bfloat16", "rounds_gradients", AFTER, _LOSSES | {FAST: STATE}
    ),
    Mistake("survivors use gradients of the step before", "uses_old_gradients", AFTER, _ONE_RANK),
    Mistake(
        "a bit of one rank's gradient is flipped", "flips_a_bit_of_a_gradient", ONCE, _ONE_RANK
    ),
    # in the broken run: the update
    Mistake("the update is not applied", "skips_the_update", ONCE, _LOSSES),
    Mistake("the update is not applied", "skips_the_update", LAST, _AT_THE_END),
    Mistake("one rank commits without its update", "skips_the_update_on_one_rank", ONCE, _ONE_RANK),
    Mistake(
        "one rank commits without its update",
        "skips_the_update_on_one_rank",
        LAST,
        {EXACT: HISTORY, FAST: HISTORY, SHARDED: STATE},
    ),
    Mistake("one parameter is not updated", "leaves_out_a_parameter", AFTER, _LOSSES),
    Mistake("weight decay is applied twice", "decays_weights_twice", AFTER, _LOSSES),
    Mistake("the learning rate is doubled", "doubles_the_learning_rate", ONCE, _LOSSES),
    Mistake("the learning rate is doubled", "doubles_the_learning_rate", LAST, _AT_THE_END),
    Mistake("weights are halved", "halves_weights", ONCE, _LOSSES),
    Mistake("weights are halved", "halves_weights", LAST, _AT_THE_END),
    Mistake("the schedule advances twice", "steps_the_schedule_twice", ONCE, _LOSSES),
    Mistake("the schedule does not advance", "never_steps_the_schedule", AFTER, _LOSSES),
    Mistake("the momentum of one tensor is lost", "forgets_one_momentum", ONCE, _LOSSES),
    Mistake("the momentum of one tensor is lost", "forgets_one_momentum", LAST, _AT_THE_END),
    Mistake("Adam's count of steps begins anew", "counts_steps_anew", ONCE, _LOSSES, kind="adam"),
    Mistake(
        "Adam's count of steps begins anew", "counts_steps_anew", LAST, _AT_THE_END, kind="adam"
    ),
    Mistake("a bit of one rank's weights is flipped", "flips_a_bit_of_a_weight", ONCE, _ONE_RANK),
    Mistake(
        "a bit of one rank's momentum is flipped",
        "flips_a_bit_of_a_moment",
        LAST,
        {EXACT: WHOLE, FAST: WHOLE, SHARDED: STATE},
    ),
    Mistake("a weight is no number", "loses_a_number", LAST, _everywhere(FINITE)),
    # in the broken run: what a restore gives. In a sharded job all ranks are restored.
    Mistake(
        "an older state is restored, and called the newest",
        "restores_the_first_weights",
        RESTORE,
        _ONE_RANK,
    ),
    Mistake(
        "restored weights are rounded to bfloat16", "restores_narrow_weights", RESTORE, _ONE_RANK
    ),
    Mistake("rows of a restored tensor are shifted", "restores_another_place", RESTORE, _ONE_RANK),
    Mistake("momentum is not restored", "restores_no_momentum", RESTORE, _ONE_RANK),
    Mistake(
        "Adam's count of steps is not restored",
        "restores_no_count",
        RESTORE,
        _ONE_RANK,
        kind="adam",
    ),
    Mistake("the schedule is not restored", "restores_no_schedule", RESTORE, _ONE_RANK),
    Mistake(
        "running statistics are not restored",
        "restores_no_statistics",
        RESTORE,
        {EXACT: HISTORY, FAST: HISTORY},
        kind="norm",
        untried={SHARDED: NO_BUFFERS},
    ),
    # in the broken run: data, randomness, reports
    Mistake("all shards of a step draw the same dropout", "seeds_by_step_only", AFTER, _LOSSES),
    Mistake("the replacement has another seed", "has_an_heir_with_another_seed", AFTER, _LOSSES),
    Mistake("dropout is off", "leaves_dropout_off", ONCE, _LOSSES),
    Mistake(
        "other samples are computed than are written down", "computes_other_samples", ONCE, _LOSSES
    ),
    Mistake("samples are those of the next step", "deals_the_next_step", AFTER, _SAMPLES),
    Mistake(
        "a sample is used twice, and another one never", "deals_a_sample_twice", ONCE, _SAMPLES
    ),
    Mistake("the loss that is told is of the step before", "tells_the_loss_before", AFTER, _LOSSES),
)
