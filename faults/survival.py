"""Rule for plans that a run must survive: sufficient, and a function of the faults alone.

A plan has a *survivor* if, whatever spares are warm and in whatever order losses are noticed, at
least one process that began the training lives to its end. Ranks are numbers, and a rank that was
lost is held by another process later, so a plan may hit the same rank again. Two facts hold for any
run:

* Each destructive fault costs at most one process that existed from the start: with fewer of them
  than nodes, one is left. (A node has one such process; a fault that takes a whole node takes one,
  and replacements.)
* Where the world shrinks, ranks below its new size stay with their process. So the process that
  holds rank 0 keeps it, and lives if no fault ever aims at rank 0, however many others there are;
  and so on upwards. A fault that takes a whole node can miss its rank's number and yet hit this
  process, as a replacement may live beside it. So this holds only if every fault takes a single
  process.

Copies in the memory of the agents may carry a run beyond this: that is a bonus, and no plan counts
on it.

-> faults/strategies.py draws such plans; experiment/shrink/simpler.py keeps a plan one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from chaoskit.faults.base import DRAWN_ROLES, Fault

Reach = Literal["nothing", "process", "node"]

#: Highest cost of each kind of fault; by name, so that a kind can be entered before it exists.
REACH: dict[str, Reach] = {
    "Kill": "process",
    "Raise": "process",
    "NaN": "process",
    "Hang": "process",
    "Exit": "process",
    "Deadlock": "process",
    "OutOfMemory": "process",
    "BitFlip": "process",
    "CrashLoop": "process",  # and replacements, but those were not there when the training began
    "Straggle": "nothing",
    "ClockJump": "nothing",
    "DataStall": "nothing",
    "CorruptReplica": "nothing",
    "LosePeerCopy": "nothing",
    "PoisonSnapshot": "process",
    "KillAgent": "node",
    "KillNode": "node",
    "FreezeNode": "node",
    "Preempt": "node",
    "TakeSpot": "node",
    "Scale": "nothing",
    "AddNode": "nothing",
    "Demand": "nothing",
    "KillCoordinator": "nothing",
    "LoseNode": "node",
    "ReplaceNode": "node",
    "LimitCpu": "node",
    "LimitMemory": "node",  # the kernel chooses which process it kills there
    "LimitPids": "node",
    "LimitIo": "node",
    "Cut": "node",  # no more nodes are left out than are on the smaller side
    "Reset": "node",
    "LinkDown": "node",
    "Flap": "node",
    "Delay": "node",  # if its lease ends; the same holds for all faults that let packets through
    "Loss": "node",
    "Bandwidth": "node",
}


def reach(fault: Fault) -> Reach:
    """Return the highest cost of ``fault``: ``nothing``, a ``process`` or a ``node``.

    A kind of another distribution declares its own cost, which is a node by default.
    """
    return REACH.get(fault.kind, fault.cost)


def rank_of(fault: Fault) -> int | None:
    """Return the number of the rank that ``fault`` names; None if it names a role."""
    rank: object = fault.rank
    return rank if isinstance(rank, int) else None


def step_of(fault: Fault) -> int | None:
    """Return the step in which ``fault`` strikes; None if it has another kind of moment."""
    step: object = fault.at_step
    return step if isinstance(step, int) else None


def struck_by(fault: Fault, nodes: int) -> int:
    """Return the number of ranks that ``fault`` strikes: several for a role or a side.

    A rack counts as all nodes, since it may be the whole world.
    """
    if fault.kind == "Rack":
        return nodes
    others = len(getattr(fault, "side", ()))
    return (DRAWN_ROLES[str(fault.rank)](nodes) if fault.rank in DRAWN_ROLES else 1) + others


def survivable(faults: Sequence[Fault], *, nodes: int, survivors: int = 1) -> bool:
    """Return True if the plan is known to leave ``survivors`` processes alive.

    False means that it is not known. Each part of a survivable plan is survivable. A plan that may
    look like a bug is not: the same exception more often in one step than there are ranks ends a
    job, as it should.
    """
    if any(count > nodes for count in _raised_at_once(faults, nodes)):
        return False
    destructive = [fault for fault in faults if reach(fault) != "nothing"]
    if sum(struck_by(fault, nodes) for fault in destructive) <= nodes - survivors:
        return True
    ranks = [rank_of(fault) for fault in destructive]
    low_ranks_spared = all(rank is not None and rank >= survivors for rank in ranks)
    return low_ranks_spared and all(reach(fault) == "process" for fault in destructive)


def _raised_at_once(faults: Sequence[Fault], nodes: int) -> list[int]:
    """Return the number of ranks that may raise each message in each step.

    A fault without a step counts in every step.
    """
    raised: Counter[tuple[str, int | None]] = Counter()
    for fault in faults:
        if fault.kind == "Raise":
            raised[getattr(fault, "message", ""), step_of(fault)] += struck_by(fault, nodes)
    return [
        count + (raised[message, None] if step is not None else 0)
        for (message, step), count in raised.items()
    ]
