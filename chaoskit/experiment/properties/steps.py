"""Properties of what is committed: contributions, generations, samples, numbers, copies of the state."""

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
    """Each commit had every shard, once, from members of its generation."""
    found = []
    for (step, generation), commits in trace.commits.items():
        given = trace.history.steps[step].contributions[generation].values()
        shards = Counter(shard for record in given for shard in record["shards"])
        wrong = [
            shard
            for shard in range(trace.config.shards_of(step, commits[0]["world"]))
            if shards[shard] != 1
        ]
        if wrong:
            found.append(
                f"step {step} was committed in generation {generation} without exactly one of shards {wrong}"
            )
    return found


def fencing(trace: RunTrace) -> Finding:
    """No worker contributes to a generation that it is no member of; none is committed in after a newer one settled.

    A commit that had all contributions before is the end of an old decision, whichever rank carries it out.
    """
    found = [
        f"{record.source} contributed to generation {record['generation']}, and is no member of it"
        for record in trace.of(Event.REDUCE)
        if record["generation"]
        in trace.members  # else its coordinator ended before it could write it down
        and record.source not in trace.members[record["generation"]]
    ]
    if len(trace.members) < 2:
        return found or None
    newer_ns = _newer_settled(trace)
    for record in trace.of(Event.COMMIT, Event.SKIP):
        settled_ns = newer_ns.get(record["generation"], math.inf)
        if record.t_ns > settled_ns and not _was_decided(trace, record, settled_ns):
            found.append(
                f"{record.source} committed step {record['step']} in generation {record['generation']}, late"
            )
    return found


def _newer_settled(trace: RunTrace) -> dict[int, float]:
    """Generation -> when the first newer one had settled."""
    generations = sorted(
        {*trace.settled_ns, *(generation for _, generation in trace.commits), *_skipping(trace)}
    )
    found, first_ns = {}, math.inf
    for generation in reversed(generations):
        found[generation] = first_ns
        first_ns = min(first_ns, trace.settled_ns.get(generation, math.inf))
    return found


def _skipping(trace: RunTrace) -> set[int]:
    return {record["generation"] for record in trace.of(Event.SKIP)}


def _was_decided(trace: RunTrace, commit: Record, before_ns: float) -> bool:
    """Whether all members had contributed to the step of ``commit`` before that time."""
    step, generation = commit["step"], commit["generation"]
    given = {
        record.source
        for record in trace.history.steps[step].contributions[generation].values()
        if record.t_ns < before_ns
    }
    return given.issuperset(trace.members.get(generation, {}))


def one_copy(trace: RunTrace) -> Finding:
    """All members of a generation that begin with copies begin with the same step."""
    steps: dict[int, set[int]] = {}
    for record in _from_copies(trace):
        steps.setdefault(record["generation"], set()).add(record["step"])
    mixed = [
        f"generation {generation} began with copies of steps {sorted(found)}"
        for generation, found in steps.items()
        if len(found) > 1
    ]
    return mixed if steps else None


def _from_copies(trace: RunTrace) -> list[Record]:
    return [record for record in trace.of(Event.RESTORED) if " of " in record["source"]]


def sealed_copies(trace: RunTrace) -> Finding:
    """What is loaded from a copy has the checksum with which that step was sealed; never one that was found corrupt."""
    if not _from_copies(trace) and not trace.of(Event.QUARANTINED):
        return None
    seals = {(record["step"], record["checksum"]) for record in trace.of(Event.SEALED)}
    return [
        f"{record.source} loaded {record['source']}, step {record['step']}, which no process has sealed like this"
        for record in _from_copies(trace)
        if (record["step"], record.get("checksum")) not in seals
    ]


def suspects(trace: RunTrace) -> Finding:
    """A step in which a rank was convicted by all others is not committed in that generation."""
    convicted = [record for record in trace.of(Event.CORRUPT) if record["verdict"] == "rank"]
    if not convicted:
        return None
    found = []
    for record in convicted:
        commits = trace.commits.get((record["step"], record["generation"]), [])
        if any(commit.source == record["worker"] for commit in commits):
            found.append(
                f"{record['worker']} was convicted in step {record['step']}, and committed it"
            )
    return found


def unexplained_losses(losses: Sequence[float | None], *, is_end_finite: bool) -> list[int]:
    """Return the steps whose loss is not finite, where nothing shows that their gradients were.

    Weights that took a NaN keep it, and so do all losses after it. So a later loss that is a number shows that the
    gradient was finite, and so does a final state that is. Pure.

    Args:
        losses: by step; None of one that was skipped.
        is_end_finite: whether the state behind the last step is known to be finite.
    """
    last = max((step for step, loss in enumerate(losses) if _is_number(loss)), default=-1)
    odd = [step for step, loss in enumerate(losses) if loss is not None and not _is_number(loss)]
    return [] if is_end_finite else [step for step in odd if step > last]


def _is_number(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)


def _ends_finite(trace: RunTrace, steps: int) -> bool:
    """Return whether ranks have described the state behind the last of so many steps, and all of it is finite."""
    state = described(trace.of(Event.STATE), steps)
    return check_finite(state).verdict == Verdict.PASSED


def finite(trace: RunTrace) -> Finding:
    """No step is committed whose gradient may not have been finite, and a bad batch is written down as skipped.

    The loss may be NaN over a gradient that is finite, as of a shard whose labels are all ignored. See
    :func:`unexplained_losses` for the evidence.
    """
    found = []
    losses = trace.history.losses()
    unexplained = set(unexplained_losses(losses, is_end_finite=_ends_finite(trace, len(losses))))
    for (step, _), commits in trace.commits.items():
        if all(_is_number(record["loss"]) for record in commits):
            continue
        if _is_number(losses[step]) or losses[step] is None:
            found.append(
                f"step {step} was committed with a loss that is not finite, and then with one that is"
            )
        elif step in unexplained:
            found.append(
                f"step {step} was committed with a loss that is not finite, as are all losses after it"
            )
    skipped = {record["step"] for record in trace.of(Event.SKIP)}
    suspects = defaultdict(set)
    for record in trace.of(Event.NONFINITE):
        suspects[record["step"]].update(record["shards"])
    found += [
        f"step {record['step']} was skipped for shards {odd}, which no rank has found bad"
        for record in trace.of(Event.SKIP)
        if (odd := sorted(set(record["shards"]) - suspects[record["step"]]))
    ]
    attributed = trace.of(Event.ATTRIBUTED) if trace.config.nonfinite == "skip" else []
    for record in attributed:
        step = record["step"]
        if record["verdict"] == "batch" and step in trace.history.steps and step not in skipped:
            found.append(
                f"the batch of step {step} was found bad, and is not written down as skipped"
            )
    return found


def inventory(trace: RunTrace) -> Finding:
    """A rank that took over a state has all of it: in the end all ranks have the same, also of the optimizer."""
    ends = trace.history.ends(trace.config)
    if len(ends) < 2 or not trace.of(Event.RESTORED):
        return None
    digests = {record["state_digest"] for record in ends}
    return [f"ranks ended with {len(digests)} different states"] if len(digests) > 1 else []


def batch_size(trace: RunTrace) -> Finding:
    """Every step has as many samples as the first one, at every world size; or a shard has, if batches follow it."""
    sizes = {}
    for number, step in trace.history.steps.items():
        samples = sum(
            len(record["samples"]) for record in step.contributions[step.generation].values()
        )
        shards = trace.config.shards_of(number, step.finishers[0]["world"])
        sizes[number] = (
            samples * trace.config.named_shards / shards
        )  # of the batch that the script names
    if not sizes:
        return None
    first = sizes[min(sizes)]
    return [
        f"step {number} has {size:g} samples instead of {first:g}"
        for number, size in sizes.items()
        if size != first
    ]


def epochs(trace: RunTrace) -> Finding:
    """Within an epoch of a dataset no sample is dealt twice, and none that it does not have."""
    follows, steps = trace.config.follow is not None, trace.history.steps
    if follows and min(steps, default=0):
        return None  # how many samples came before is not known
    dealt: dict[tuple[int, int], set[int]] = defaultdict(
        set
    )  # size of the dataset, epoch -> samples
    found, before = [], 0
    for number, step in steps.items():
        by_shard = _samples_by_shard(step)
        first = (
            before
            if follows
            else number * trace.config.shards_of(number, step.finishers[0]["world"])
        )
        before += len(by_shard)
        for shard, (size, samples) in by_shard.items():
            for epoch, part in _by_epoch((first + shard) * len(samples), samples, size):
                known, count = dealt[size, epoch], len(dealt[size, epoch])
                known.update(part)
                if len(known) < count + len(part):
                    found.append(f"step {number} has samples that epoch {epoch} has dealt before")
                if part and not 0 <= min(part) <= max(part) < size:
                    found.append(
                        f"step {number} has samples that a dataset of {size} does not have"
                    )
    return found if dealt else None


def _by_epoch(place: int, samples: list[int], size: int) -> list[tuple[int, list[int]]]:
    """The samples of one stretch by epoch; ``place``: of the first one, among all that are ever dealt."""
    epoch, within = divmod(place, size)
    here = size - within
    return (
        [(epoch, samples[:here]), (epoch + 1, samples[here:])]
        if here < len(samples)
        else [(epoch, samples)]
    )


def _samples_by_shard(step: Step) -> dict[int, tuple[int, list[int]]]:
    """Shard -> the size of its dataset, and the samples that were trained of it."""
    told = ((shard, record.get("dataset", 0), samples) for shard, samples, record in step.trained())
    return {shard: (size, samples) for shard, size, samples in told if size}


def boundaries(trace: RunTrace) -> Finding:
    """A generation that only adds ranks begins after the last step of those before it: no step belongs to both."""
    grown = [plan for plan in trace.of(Event.PLAN) if plan["generation"] > 1 and not plan["abort"]]
    copies, found, seen = (
        _from_copies(trace),
        [],
        False,
    )  # a world that begins with a copy may have gone back
    for plan in grown:
        generation = plan["generation"]
        settled_ns = trace.settled_ns.get(generation)
        if settled_ns is None or any(
            plan.t_ns < t_ns < settled_ns for t_ns in trace.lost_ns.values()
        ):
            continue  # a loss came first: there was no boundary to wait for
        seen = True
        mine = {step for step, one in trace.commits if one == generation}
        began = max(
            (record["generation"] for record in copies if record["generation"] <= generation),
            default=0,
        )
        before = {step for step, one in trace.commits if began <= one < generation}
        if mine and before and min(mine) <= max(before):
            found.append(
                f"step {min(mine)} was committed by a grown world, and step {max(before)} by the one before"
            )
    return found if seen else None


def committed_work(trace: RunTrace) -> Finding:
    """As long as a rank that has committed a step goes on, the step is never computed again."""
    if not trace.of(Event.DETECTED) or trace.of(
        Event.ENTERED
    ):  # of a sharded state no rank that goes on has all
        return None
    repeated = trace.history.repeated_beside_survivors()
    return [f"step {step} was committed, and computed again" for step in repeated]
