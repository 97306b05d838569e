"""One seed, one history: run it, judge it, tell what happened."""

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

#: Every so many histories trains until its world can have settled.
LONG = 40
ENDLESS = 1_000_000


@dataclass(frozen=True)
class History:
    """How it went.

    Attributes:
        broken: the law that was broken, or "".
        lasted_s: on the fake clock.
        repeated: the most committed steps of a sharded job that one generation took again.
        resized: how often the world was to be another.
        followed: whether its batch followed the world.
        settled: whether the size to which it came was looked at.
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
    """The history of ``seed``, of a job of that kind; with a ``trace`` of all that happened, a line each.

    ``seams``: where it is made wrong.
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
        (said for said in world.coordinator.plane.picture() if isinstance(said, EndJob)), None
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
