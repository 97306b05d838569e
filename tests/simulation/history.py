"""The run of a history from its seed, its judgement, and its summary."""

from __future__ import annotations

from dataclasses import dataclass

from chaoskit.wire.messages import EndJob
from simulation.engine import Endless
from simulation.laws.history_laws import Violation
from simulation.laws.size_law import SETTLING_S
from simulation.seams import SOUND, Seams
from simulation.troubles.faults import Faults
from simulation.troubles.resizes import Resizes
from simulation.troubles.stalls import Stalls
from simulation.world import Kind, World

#: One of so many histories trains until its world has had time to settle.
LONG = 40
ENDLESS = 1_000_000


@dataclass(frozen=True)
class History:
    """The summary of a history.

    Attributes:
        faults: the faults that struck, a line each.
        broken: the law that was broken, or "".
        ok: the job ended well.
        reason: the reason of the end.
        lasted_s: duration on the fake clock.
        generations: number of the last generation.
        terms: number of coordinators.
        repeated: the most committed steps of a sharded job that one generation took again.
        resized: number of decisions for a world of other nodes.
        followed: the batch followed the world.
        settled: the size that the world came to was checked.
        trace: the events, a line each, if a trace was kept.
    """

    seed: int
    faults: tuple[str, ...]
    broken: str
    ok: bool
    reason: str
    lasted_s: float
    generations: int
    terms: int
    repeated: int
    resized: int = 0
    followed: bool = False
    settled: bool = False
    trace: tuple[str, ...] = ()


def run(
    seed: int, kind: Kind = "replicated", *, trace: bool = False, seams: Seams = SOUND
) -> History:
    """Run the history of ``seed`` for a job of this kind, and judge it.

    Args:
        trace: keep a trace of all events.
        seams: the parts in which mistakes may be planted.
    """
    world = World(seed, kind, seams=seams)
    if trace:
        world.engine.trace = []
    faults = Faults(world)
    faults.schedule()
    Resizes(world, seed, faults).schedule()
    Stalls(world, seed, faults).schedule()
    if world.config.elastic is not None and seed % LONG == 1:
        world.steps, world.patience_s = ENDLESS, world.patience_s + SETTLING_S
        world.laws.size.watch(faults)
    broken = ""
    try:
        finished = world.engine.run(world.over, faults.last_s + world.patience_s)
        world.laws.judge(finished)
    except (Violation, Endless) as violation:
        broken = str(violation)
    end = world.laws.end or next(
        (
            fact
            for fact in world.coordinator.plane.messages_for_observer()
            if isinstance(fact, EndJob)
        ),
        None,
    )
    return History(
        seed,
        tuple(faults.done),
        broken,
        end is not None and end.ok,
        end.reason if end is not None else "",
        world.engine.now_s,
        max(world.laws.plans, default=0),
        world.coordinators,
        world.laws.repeated,
        world.laws.resized,
        world.config.follow is not None,
        world.laws.size.checked,
        tuple(world.engine.trace or ()),
    )
