"""Seeded plans of many resizes: at random with faults in between, or as spot machines came and went in a trace."""

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

#: Steps between two resizes: of this suite's job more than two seconds, in which a process starts.
EVERY = 30
#: What is struck half-way between two resizes.
TROUBLES = ("kill", "node", "freeze", "coordinator", "straggle")


def storm(seed: int, policy: ElasticPolicy, *, resizes: int, start: int) -> list[Fault]:
    """A resize every :data:`EVERY` steps, each to another size, and a fault after each.

    Args:
        seed: draws sizes and ranks; the faults take turns, beginning with another one for each seed.
        start: size of the world at the beginning.
    """
    random, size, found = Random(f"storm/{seed}"), start, list[Fault]()
    for turn in range(resizes):
        step = EVERY // 2 + turn * EVERY
        size = random.choice([one for one in policy.sizes if one != size])
        found.append(Scale(to=size, at_step=step))
        found += _trouble(TROUBLES[(seed + turn) % len(TROUBLES)], random.randrange(2), step)
    return found


def _trouble(kind: str, rank: int, step: int) -> list[Fault]:
    """Every other time in the very step in which another size is asked for, else when that has been reached."""
    later = step + EVERY // 2
    match kind:
        case "kill":
            return [Kill(rank=rank, at_step=step + rank)]
        case "node":  # another one comes in its place
            return [KillNode(rank=rank, at_step=later), AddNode(at_step=later + 2)]
        case "freeze":
            return [FreezeNode(rank=rank, at_step=later, thaw_after_s=FROZEN_S)]
        case "coordinator":
            return [KillCoordinator(rank=rank, at_step=step + rank)]
        case _:
            return [Straggle(rank=rank, at_step=later, delay_ms=20, steps=5)]


class Spot(NamedTuple):
    """What a trace makes of a run: ``nodes`` that are there at the start, and who goes and comes later."""

    nodes: int
    faults: list[Fault]


def from_trace(trace: Trace, policy: ElasticPolicy, *, grace_s: float, seed: int = 0) -> Spot:
    """Each node that goes is announced ``grace_s`` before; each that comes starts anew.

    Where the trace has fewer nodes than the policy needs, or more than it allows, that many are kept: a job without
    nodes only waits. Which rank a node has by then nobody can know, so ranks are drawn by ``seed``.
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
