"""Placement: how many workers are started, when, and on which nodes.

-> coordinator/membership/next_world.py: which started worker gets a rank;
coordinator/schedules/start_order.py: starts that wait until a recovery is over;
coordinator/detectors/fitness.py: which nodes are unfit. Copies: checkpoint/peer/copy_placement.py.
"""

from __future__ import annotations

from chaoskit.coordinator.membership.events import Action, OrderStart
from chaoskit.coordinator.membership.membership import Membership

#: Time that nodes on probation have to prove themselves before the first start. They need some
#: tenths of a second.
PROOF_S = 2.0


def start_missing(membership: Membership, lost_on: list[str], now_s: float) -> list[Action]:
    """Return the orders to start the workers that are missing from the target.

    Each is placed on the node with the fewest workers, and counts as live from now on. There are no
    orders during the pause after failed starts, and before the first start is allowed.

    Args:
        lost_on: nodes of the workers that were just lost, in order; they are preferred where
            several nodes have the fewest workers.
    """
    if now_s < membership.failures.start_after_s:
        return []
    target, nodes, workers = membership.target, membership.known_nodes, membership.workers
    excluded_nodes = nodes.left_out | target.idle | nodes.unfit
    trusted = nodes.trusted([node for node in nodes.live if node not in excluded_nodes])
    target_count = target.size + membership.config.spares if workers.launched and trusted else 0
    # a departing worker may wait for its successor, so it does not count
    present_count = sum(node not in target.idle for node in workers.hosts.values())
    starts: list[Action] = []
    for index in range(target_count - present_count):
        hosts, lost_here = list(workers.hosts.values()), lost_on[index : index + 1]
        node = min(trusted, key=lambda node: (hosts.count(node), node not in lost_here))
        number = nodes.started.get(node, 0)
        nodes.started[node] = number + 1
        worker = f"{node}.{number}"
        workers.hosts[worker] = node
        workers.begun_s[worker] = now_s
        starts.append(OrderStart(node, worker))
    return starts


def launch_if_ready(membership: Membership, now_s: float) -> None:
    """Allow the first start of workers once all nodes have joined.

    Nodes on probation get :data:`PROOF_S` to prove themselves before. Nothing changes after a loss
    of the log: see :func:`relaunch_if_ready`.
    """
    nodes = membership.known_nodes
    if len(nodes.live) < membership.config.nodes or membership.status.log_lost:
        return
    nodes.complete_s = min(nodes.complete_s, now_s)
    has_proof = nodes.on_probation.isdisjoint(nodes.live) or now_s >= nodes.complete_s + PROOF_S
    membership.workers.launched |= has_proof


def relaunch_if_ready(membership: Membership, now_s: float) -> None:
    """Allow the first start of workers after a loss of the log, once the copies are known.

    That is when all nodes have joined, or when those that reconnected have answered. Fewer nodes
    than before are enough.
    """
    has_nodes = len(membership.nodes) >= membership.config.nodes
    has_answers = membership.search.active and not membership.search.is_asking(now_s)
    membership.workers.launched |= has_nodes or has_answers


def forget_fitness(membership: Membership, node: str) -> None:
    """Forget the health of a lost node; its replacement is checked again.

    A node that the settings exclude stays unfit. A node that they put on probation is on probation
    again.
    """
    config, nodes = membership.config, membership.known_nodes
    if node in config.quarantined:
        return
    nodes.unfit.discard(node)
    if node in config.on_probation:
        nodes.unfit.add(node)
        nodes.on_probation.add(node)
