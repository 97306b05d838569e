"""The nodes that faults may strike, before they strike: the worst case.

-> ``guard_rails.py`` compares their number with the limits of the user.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from chaoskit.attach.guards.guarded_job import GuardedJob
from chaoskit.attach.guards.hand_choice import strikes_machine
from chaoskit.faults import Fault
from chaoskit.faults.base import DRAWN_ROLES
from chaoskit.faults.network.sides import named_ranks


@dataclass(frozen=True, slots=True)
class Reach:
    """Nodes that a fault may strike.

    Attributes:
        nodes: names of nodes that it strikes.
        others: number of further nodes that it may strike; any node may be among them.
    """

    nodes: frozenset[str]
    others: int = 0


def reach_of(fault: Fault, job: GuardedJob) -> Reach:
    """Return the nodes that a fault may strike.

    A role, or a rank whose node is not known, may strike any node. A fault of a machine strikes all
    nodes on it. Of a partition between two sides that are both named, either side may be lost, so
    both count; otherwise only the side of the fault's rank or node does.
    """
    if fault.every_rank:
        return Reach(frozenset(node.name for node in job.nodes))
    ranks = set(named_ranks(fault))
    nodes = {job.ranks[rank] for rank in ranks if rank in job.ranks}
    if fault.node:
        nodes.add(fault.node)
    others = len(ranks - job.ranks.keys()) + _drawn(fault, job)
    if strikes_machine(fault):
        machines = {node.name: node.machine or node.name for node in job.nodes}
        nodes = {
            name
            for name, machine in machines.items()
            if machine in {machines.get(struck) for struck in nodes}
        }
        others *= max(Counter(machines.values()).values(), default=0)
    return Reach(frozenset(nodes), min(others, len(job.nodes) - len(nodes)))


def count_nodes(faults: Iterable[Fault], job: GuardedJob) -> int:
    """Return the largest number of different nodes that faults may strike together."""
    reaches = [reach_of(fault, job) for fault in faults]
    nodes = frozenset[str]().union(*(reach.nodes for reach in reaches))
    return min(len(job.nodes), len(nodes) + sum(reach.others for reach in reaches))


def _drawn(fault: Fault, job: GuardedJob) -> int:
    """Return the number of ranks for which the role of a fault stands; 0 without a role."""
    if fault.node or not isinstance(fault.rank, str):
        return 0
    if fault.has_one_target or fault.rank not in DRAWN_ROLES:
        return 1
    return DRAWN_ROLES[fault.rank](job.rank_count)
