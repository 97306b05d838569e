"""Properties of commits: contributions, generations, samples, numbers and copies of the state.

-> experiment/properties/__init__.py turns the violations into checks. runlog/history.py: the steps.
experiment/judge/judge.py: lost steps, the ledger of samples, and equal results of all ranks.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from chaoskit.experiment.properties.base import Finding, RunTrace
from chaoskit.experiment.reference.ending import check_finite, described
from chaoskit.journal import Record
from chaoskit.runlog.history import Step
from chaoskit.vocabulary import Event, Verdict


def contributions(trace: RunTrace) -> Finding:
    """Return each commit that lacked a shard, or had one more than once.

    The property applies to every run.
    """
    problems = []
    for (step, generation), commits in trace.commits.items():
        contribution_records = trace.history.steps[step].contributions[generation].values()
        shards = Counter(shard for record in contribution_records for shard in record["shards"])
        wrong_shards = [
            shard
            for shard in range(trace.config.shards_of(step, commits[0]["world"]))
            if shards[shard] != 1
        ]
        if wrong_shards:
            problems.append(
                f"step {step} was committed in generation {generation} without exactly one of shards {wrong_shards}"
            )
    return problems


def fencing(trace: RunTrace) -> Finding:
    """Return each contribution to a foreign generation, and each commit that came too late.

    A commit is late if a newer generation has settled. A commit that had all contributions before
    carries out an old decision, on any rank, and is allowed. The result is None if there was one
    generation and no violation.
    """
    problems = [
        f"{record.source} contributed to generation {record['generation']}, and is no member of it"
        for record in trace.of(Event.REDUCE)
        if record["generation"] in trace.members  # else its coordinator wrote no plan
        and record.source not in trace.members[record["generation"]]
    ]
    if len(trace.members) < 2:
        return problems or None
    newer_ns = _newer_settled(trace)
    for record in trace.of(Event.COMMIT, Event.SKIP):
        settled_ns = newer_ns.get(record["generation"], math.inf)
        if record.t_ns > settled_ns and not _was_decided(trace, record, settled_ns):
            problems.append(
                f"{record.source} committed step {record['step']} in generation {record['generation']}, late"
            )
    return problems


def _newer_settled(trace: RunTrace) -> dict[int, float]:
    """Return generation -> the time in ns at which the first newer one had settled.

    The time is infinite if none did.
    """
    generations = sorted(
        {*trace.settled_ns, *(generation for _, generation in trace.commits), *_skipping(trace)}
    )
    settled_ns, first_ns = {}, math.inf
    for generation in reversed(generations):
        settled_ns[generation] = first_ns
        first_ns = min(first_ns, trace.settled_ns.get(generation, math.inf))
    return settled_ns


def _skipping(trace: RunTrace) -> set[int]:
    """Return the generations that skipped a batch."""
    return {record["generation"] for record in trace.of(Event.SKIP)}


def _was_decided(trace: RunTrace, commit: Record, before_ns: float) -> bool:
    """Return whether all members had contributed to the step of ``commit`` before a time."""
    step, generation = commit["step"], commit["generation"]
    contributors = {
        record.source
        for record in trace.history.steps[step].contributions[generation].values()
        if record.t_ns < before_ns
    }
    return contributors.issuperset(trace.members.get(generation, {}))


def one_copy(trace: RunTrace) -> Finding:
    """Return each generation that began with copies of different steps.

    The result is None if no generation began with copies.
    """
    steps: dict[int, set[int]] = {}
    for record in _from_copies(trace):
        steps.setdefault(record["generation"], set()).add(record["step"])
    problems = [
        f"generation {generation} began with copies of steps {sorted(copied)}"
        for generation, copied in steps.items()
        if len(copied) > 1
    ]
    return problems if steps else None


def _from_copies(trace: RunTrace) -> list[Record]:
    """Return the records of states that were restored from copies."""
    return [record for record in trace.of(Event.RESTORED) if " of " in record["source"]]


def sealed_copies(trace: RunTrace) -> Finding:
    """Return each restored copy with another checksum than those sealed for its step.

    A seal is the record of a copy's checksum when the copy was complete. The result is None if no
    copy was restored or set aside as damaged.
    """
    if not _from_copies(trace) and not trace.of(Event.QUARANTINED):
        return None
    seals = {(record["step"], record["checksum"]) for record in trace.of(Event.SEALED)}
    return [
        f"{record.source} loaded {record['source']}, step {record['step']}, which no process has sealed like this"
        for record in _from_copies(trace)
        if (record["step"], record.get("checksum")) not in seals
    ]


def suspects(trace: RunTrace) -> Finding:
    """Return each convicted rank that committed the step in which it was convicted.

    The result is None if no rank was convicted.
    """
    convicted = [record for record in trace.of(Event.CORRUPT) if record["verdict"] == "rank"]
    if not convicted:
        return None
    problems = []
    for record in convicted:
        commits = trace.commits.get((record["step"], record["generation"]), [])
        if any(commit.source == record["worker"] for commit in commits):
            problems.append(
                f"{record['worker']} was convicted in step {record['step']}, and committed it"
            )
    return problems


def unexplained_losses(losses: Sequence[float | None], *, is_end_finite: bool) -> list[int]:
    """Return the steps with a non-finite loss that may have had a non-finite gradient.

    Weights that took a NaN keep it, and so do all losses after it. So a later finite loss, or a
    finite final state, shows that the gradient was finite.

    Args:
        losses: the loss of each step; None for a skipped one.
        is_end_finite: the state after the last step is known to be finite.
    """
    last_finite = max((step for step, loss in enumerate(losses) if _is_number(loss)), default=-1)
    nonfinite_steps = [
        step for step, loss in enumerate(losses) if loss is not None and not _is_number(loss)
    ]
    return [] if is_end_finite else [step for step in nonfinite_steps if step > last_finite]


def _is_number(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)


def _ends_finite(trace: RunTrace, steps: int) -> bool:
    """Return True if the state after the last step was described, finite and equal on all ranks."""
    state = described(trace.of(Event.STATE), steps)
    return check_finite(state).verdict == Verdict.PASSED


def finite(trace: RunTrace) -> Finding:
    """Return each commit that may have a non-finite gradient, and each wrongly treated batch.

    A bad batch must be recorded as skipped, and no other one.

    A loss may be NaN although the gradient is finite, for example if all labels of a shard are
    ignored. See :func:`unexplained_losses` for the evidence.
    """
    problems = []
    losses = trace.history.losses()
    unexplained = set(unexplained_losses(losses, is_end_finite=_ends_finite(trace, len(losses))))
    for (step, _), commits in trace.commits.items():
        if all(_is_number(record["loss"]) for record in commits):
            continue
        if _is_number(losses[step]) or losses[step] is None:
            problems.append(
                f"step {step} was committed with a loss that is not finite, and then with one that is"
            )
        elif step in unexplained:
            problems.append(
                f"step {step} was committed with a loss that is not finite, as are all losses after it"
            )
    skipped_steps = {record["step"] for record in trace.of(Event.SKIP)}
    suspected_shards = defaultdict(set)
    for record in trace.of(Event.NONFINITE):
        suspected_shards[record["step"]].update(record["shards"])
    problems += [
        f"step {record['step']} was skipped for shards {unfounded_shards}, which no rank has found bad"
        for record in trace.of(Event.SKIP)
        if (unfounded_shards := sorted(set(record["shards"]) - suspected_shards[record["step"]]))
    ]
    attributed = trace.of(Event.ATTRIBUTED) if trace.config.nonfinite == "skip" else []
    for record in attributed:
        step = record["step"]
        if (
            record["verdict"] == "batch"
            and step in trace.history.steps
            and step not in skipped_steps
        ):
            problems.append(
                f"the batch of step {step} was found bad, but is not recorded as skipped"
            )
    return problems


def inventory(trace: RunTrace) -> Finding:
    """Return a violation if ranks ended with different states after a restore.

    The result is None if no state was restored, or fewer than two ranks finished.
    """
    ends = trace.history.ends(trace.config)
    if len(ends) < 2 or not trace.of(Event.RESTORED):
        return None
    digests = {record["state_digest"] for record in ends}
    return [f"ranks ended with {len(digests)} different states"] if len(digests) > 1 else []


def batch_size(trace: RunTrace) -> Finding:
    """Return each step with another number of samples than the first one.

    If batches follow the world, the samples of a shard are compared. The result is None if no step
    was finished.
    """
    sizes = {}
    for step_number, step in trace.history.steps.items():
        samples = sum(
            len(record["samples"]) for record in step.contributions[step.generation].values()
        )
        shards = trace.config.shards_of(step_number, step.finishers[0]["world"])
        # scaled to the batch that the script names
        sizes[step_number] = samples * trace.config.named_shards / shards
    if not sizes:
        return None
    first_size = sizes[min(sizes)]
    return [
        f"step {step_number} has {size:g} samples instead of {first_size:g}"
        for step_number, size in sizes.items()
        if size != first_size
    ]


def epochs(trace: RunTrace) -> Finding:
    """Return each step with samples dealt twice in an epoch, or beyond the size of the dataset.

    The result is None if the size of no dataset is known. It is None, too, if the batch follows the
    world and the run does not begin with step 0.
    """
    follows, steps = trace.config.follow is not None, trace.history.steps
    if follows and min(steps, default=0):
        return None  # the number of samples before is not known
    # size of the dataset, epoch -> samples
    dealt: dict[tuple[int, int], set[int]] = defaultdict(set)
    problems, shards_before = [], 0
    for step_number, step in steps.items():
        by_shard = _samples_by_shard(step)
        first_shard = (
            shards_before
            if follows
            else step_number * trace.config.shards_of(step_number, step.finishers[0]["world"])
        )
        shards_before += len(by_shard)
        for shard, (dataset_size, samples) in by_shard.items():
            for epoch, epoch_part in _by_epoch(
                (first_shard + shard) * len(samples), samples, dataset_size
            ):
                epoch_samples, count_before = (
                    dealt[dataset_size, epoch],
                    len(dealt[dataset_size, epoch]),
                )
                epoch_samples.update(epoch_part)
                if len(epoch_samples) < count_before + len(epoch_part):
                    problems.append(
                        f"step {step_number} has samples that epoch {epoch} has dealt before"
                    )
                if epoch_part and not 0 <= min(epoch_part) <= max(epoch_part) < dataset_size:
                    problems.append(
                        f"step {step_number} has samples that a dataset of {dataset_size} does not have"
                    )
    return problems if dealt else None


def _by_epoch(position: int, samples: list[int], dataset_size: int) -> list[tuple[int, list[int]]]:
    """Return (epoch, samples) for the one or two epochs that consecutive samples belong to.

    Args:
        position: the position of the first sample among all that are ever dealt.
        samples: the samples.
        dataset_size: the size of the dataset.
    """
    epoch, offset = divmod(position, dataset_size)
    left_in_epoch = dataset_size - offset
    return (
        [(epoch, samples[:left_in_epoch]), (epoch + 1, samples[left_in_epoch:])]
        if left_in_epoch < len(samples)
        else [(epoch, samples)]
    )


def _samples_by_shard(step: Step) -> dict[int, tuple[int, list[int]]]:
    """Return shard -> the size of its dataset and the samples that were trained.

    Shards without a known dataset are left out.
    """
    trained = (
        (shard, record.get("dataset", 0), samples) for shard, samples, record in step.trained()
    )
    return {
        shard: (dataset_size, samples) for shard, dataset_size, samples in trained if dataset_size
    }


def boundaries(trace: RunTrace) -> Finding:
    """Return each generation that only adds ranks and begins before the last step was over.

    The result is None if no membership grew without a loss.
    """
    growing_plans = [
        plan for plan in trace.of(Event.PLAN) if plan["generation"] > 1 and not plan["abort"]
    ]
    # a world that begins with a copy may repeat steps
    copies, problems, applies = _from_copies(trace), [], False
    for plan in growing_plans:
        generation = plan["generation"]
        settled_ns = trace.settled_ns.get(generation)
        if settled_ns is None or any(
            plan.t_ns < t_ns < settled_ns for t_ns in trace.lost_ns.values()
        ):
            continue  # a loss came first, so there was no boundary to wait for
        applies = True
        own_steps = {step for step, committed_in in trace.commits if committed_in == generation}
        first_generation = max(
            (record["generation"] for record in copies if record["generation"] <= generation),
            default=0,
        )
        earlier_steps = {
            step
            for step, committed_in in trace.commits
            if first_generation <= committed_in < generation
        }
        if own_steps and earlier_steps and min(own_steps) <= max(earlier_steps):
            problems.append(
                f"step {min(own_steps)} was committed by a grown world, and step {max(earlier_steps)} by the one before"
            )
    return problems if applies else None


def committed_work(trace: RunTrace) -> Finding:
    """Return each step that was computed again beside a rank that had committed it.

    The result is None if no rank was lost, or ranks restored pieces of a sharded state.
    """
    # no rank that goes on has all of a sharded state
    if not trace.of(Event.DETECTED) or trace.of(Event.ENTERED):
        return None
    repeated = trace.history.repeated_beside_survivors()
    return [f"step {step} was committed, and computed again" for step in repeated]
