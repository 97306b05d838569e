"""Plans of many resizes: drawn from a seed with faults in between, or taken from a spot trace."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from chaoskit import ElasticPolicy
from chaoskit.elastic.traces import Trace
from chaoskit.faults import (
    AddNode,
    Fault,
    FreezeNode,
    Kill,
    KillCoordinator,
    KillNode,
    Scale,
    Straggle,
    TakeSpot,
)
from chaoskit.suites.recovery.expect import FROZEN_S

#: Steps between two resizes: over two seconds of this suite's job, in which a process starts.
EVERY = 30
#: Kinds of trouble half-way between two resizes.
TROUBLES = ("kill", "node", "freeze", "coordinator", "straggle")


def storm(seed: int, policy: ElasticPolicy, *, resizes: int, start: int) -> list[Fault]:
    """Return a resize every :data:`EVERY` steps, each to another size, with a fault beside each.

    The fault strikes in the step of the request, or once the size has been reached.

    Args:
        seed: seed of sizes and ranks; the faults take turns, beginning with another one for each
            seed.
        policy: policy with the allowed sizes.
        resizes: number of resizes.
        start: size of the world at the beginning.
    """
    random, size, faults = Random(f"storm/{seed}"), start, list[Fault]()
    for turn in range(resizes):
        step = EVERY // 2 + turn * EVERY
        size = random.choice([other for other in policy.sizes if other != size])
        faults.append(Scale(to=size, at_step=step))
        faults += _trouble(TROUBLES[(seed + turn) % len(TROUBLES)], random.randrange(2), step)
    return faults


def _trouble(kind: str, rank: int, step: int) -> list[Fault]:
    """Return the faults of a kind, in the step of the request or once the size has been reached."""
    later = step + EVERY // 2
    match kind:
        case "kill":
            return [Kill(rank=rank, at_step=step + rank)]
        case "node":  # another node comes in its place
            return [KillNode(rank=rank, at_step=later), AddNode(at_step=later + 2)]
        case "freeze":
            return [FreezeNode(rank=rank, at_step=later, thaw_after_s=FROZEN_S)]
        case "coordinator":
            return [KillCoordinator(rank=rank, at_step=step + rank)]
        case _:
            return [Straggle(rank=rank, at_step=later, delay_ms=20, steps=5)]


class Spot(NamedTuple):
    """Plan from a trace: ``nodes`` at the start, and the departures and arrivals that follow."""

    nodes: int
    faults: list[Fault]


def from_trace(trace: Trace, policy: ElasticPolicy, *, grace_s: float, seed: int = 0) -> Spot:
    """Return the plan of a trace: nodes leave with a notice of ``grace_s``, and new ones start.

    If the trace has fewer nodes than the policy needs, or more than it allows, that many are kept:
    a job without nodes only waits. The rank of a node at that time is not known before, so ``seed``
    draws the ranks.
    """
    random = Random(f"spot/{seed}")
    least, most = policy.min_replicas, policy.max_replicas
    nodes = first = min(
        max(least, sum(event.joins for event in trace.events if not event.time_s)), most
    )
    faults: list[Fault] = []
    for event in trace.events:
        if event.time_s and event.joins and nodes < most:
            nodes += 1
            faults.append(AddNode(after_s=event.time_s))
        elif event.time_s and not event.joins and nodes > least:
            nodes -= 1
            faults.append(
                TakeSpot(rank=random.randrange(nodes), grace_s=grace_s, after_s=event.time_s)
            )
    return Spot(first, faults)
