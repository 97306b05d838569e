"""Decisions of a membership: to publish a plan, to finish the job, or to wait.

:data:`RULES` are tried in order. The first rule that applies decides, also when it decides to wait.
A loss was found before: by the agent of a node, or by a part in ``coordinator/detectors/``.

-> coordinator/membership/regroup.py makes the plan; coordinator/membership/restart_from_copies.py:
the way on while no worker has the state. coordinator/handlers/on_node.py and on_worker_lost.py: how
a loss arrives here. coordinator/effects.py publishes the plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from chaoskit.coordinator.membership.assignment import name_order
from chaoskit.coordinator.membership.events import FinishJob, Publish
from chaoskit.coordinator.membership.failure_budget import STARTS_MAX
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.coordinator.membership.regroup import (
    first_workers,
    may_move,
    may_rebalance,
    publish,
    regroup,
    wants_other_shares,
)
from chaoskit.coordinator.membership.restart_from_copies import begin_with_copies
from chaoskit.plaintext import plural

Decision = Publish | FinishJob | None


class Rule(NamedTuple):
    """A condition, and the decision if it holds. Both get the membership and the time.

    None is the decision to wait.
    """

    applies: Callable[[Membership, float], bool]
    decide: Callable[[Membership, float], Decision]


def decide(membership: Membership, now_s: float) -> Decision:
    """Return the plan to publish, or the end of the job; None to wait.

    A plan is noted in the membership as the last published one. The caller marks the job as
    finished.
    """
    if not membership.are_done:
        membership.status.done_s = math.inf
    for rule in RULES:
        if rule.applies(membership, now_s):
            return rule.decide(membership, now_s)
    return None


# -- end of the job --------------------------------------------------------------------------------


def _has_failed(membership: Membership, now_s: float) -> bool:
    return bool(membership.status.failure)


def _fail(membership: Membership, now_s: float) -> Decision:
    return FinishJob(False, membership.status.failure)


def _are_done(membership: Membership, now_s: float) -> bool:
    return membership.are_done


def _end(membership: Membership, now_s: float) -> Decision:
    """Return the successful end once the leavers are done as well, or their time is over."""
    status = membership.status
    status.done_s = min(status.done_s, now_s)
    is_late = now_s >= status.done_s + membership.limits.farewell_of(membership.config)
    if is_late or membership.training.done.issuperset(membership.leavers):
        return FinishJob(True, "every rank committed the last step")
    return None


def _has_spent_budget(membership: Membership, now_s: float) -> bool:
    return membership.failures.losses > membership.config.max_failures


def _fail_for_losses(membership: Membership, now_s: float) -> Decision:
    losses, budget = membership.failures.losses, f"max_failures={membership.config.max_failures}"
    reason = f"the failure budget is spent: {losses} workers were lost, {budget}"
    return FinishJob(False, reason + _last_loss(membership))


def _has_lost_all_untrained(membership: Membership, now_s: float) -> bool:
    """Return whether no node is left, no rank has trained, and the time of the start is over."""
    return (
        not membership.training.begun
        and not membership.nodes
        and now_s >= membership.status.deadline_s
    )


def _fail_for_time(membership: Membership, now_s: float) -> Decision:
    return FinishJob(False, _startup_timeout(membership))


def _has_failed_starts(membership: Membership, now_s: float) -> bool:
    """Return whether too many workers in a row failed to start while too few ranks are left."""
    is_too_small = len(membership.members) < membership.config.least_world
    return membership.failures.failed_starts >= STARTS_MAX and is_too_small


def _fail_for_starts(membership: Membership, now_s: float) -> Decision:
    ranks = plural(len(membership.members), "rank is", "ranks are")
    left = f"{ranks} left, min_world={membership.config.least_world}"
    ended = (
        f"{membership.failures.failed_starts} workers in a row ended before they were ready: {left}"
    )
    return FinishJob(False, ended + _last_loss(membership))


# -- first generation ------------------------------------------------------------------------------


def _has_no_past(membership: Membership, now_s: float) -> bool:
    """Return whether no generation was ever planned, and the log was not lost."""
    return not membership.plan and not membership.status.log_lost


def _begin(membership: Membership, now_s: float) -> Decision:
    """Publish the first plan once the world is full, or the time of the start is over.

    The world is full if ``size`` workers are ready, on as many nodes as possible. The job fails if
    fewer than ``min_world`` workers are ready when the time is over.
    """
    config, size, hosts = membership.config, membership.size, membership.workers.hosts
    ready = sorted(membership.workers.ready, key=name_order)
    ready_hosts = {hosts[worker] for worker in ready}
    is_full = len(ready) >= size and len(ready_hosts) >= min(size, len(set(hosts.values())))
    if not is_full and now_s < membership.status.deadline_s:
        return None
    if len(ready) < config.least_world:
        return FinishJob(False, _startup_timeout(membership))
    return publish(membership, first_workers(membership), abort=True)


# -- next generations ------------------------------------------------------------------------------


def _has_no_state(membership: Membership, now_s: float) -> bool:
    """Return whether a search for copies is under way, because no live worker has the state."""
    return membership.search.active


def _has_no_plan(membership: Membership, now_s: float) -> bool:
    return not membership.plan


def _wait_for_nodes(membership: Membership, now_s: float) -> Decision:
    """Wait for a node that can be asked for copies. The job fails when the start takes too long."""
    if now_s < membership.status.deadline_s:
        return None
    return FinishJob(False, f"the coordinator's log was lost: {_startup_timeout(membership)}")


def _is_broken(membership: Membership, now_s: float) -> bool:
    """Return whether the last plan must be replaced at once."""
    return membership.lacks_workers or membership.is_over


def _replace(membership: Membership, now_s: float) -> Decision:
    """Break the last generation off, and plan the next world with the workers that are left."""
    return regroup(membership, abort=True)


def _is_to_move(membership: Membership, now_s: float) -> bool:
    # the ranks of a sharded job all begin anew, once it is known with which copies
    return may_move(membership) and not membership.is_sharded


def _is_to_rebalance(membership: Membership, now_s: float) -> bool:
    return may_rebalance(membership) and wants_other_shares(membership)


def _move(membership: Membership, now_s: float) -> Decision:
    """Plan the next world, which begins at a step boundary."""
    return regroup(membership, abort=False)


RULES = (
    Rule(_has_failed, _fail),
    # before the budget: a job whose ranks are all done has succeeded, whatever was lost
    Rule(_are_done, _end),
    Rule(_has_spent_budget, _fail_for_losses),
    # before the first plan, no rank is missing and none has the state
    Rule(_has_no_past, _begin),
    Rule(_has_lost_all_untrained, _fail_for_time),
    Rule(_has_failed_starts, _fail_for_starts),
    # before a rank is replaced: without the state, a generation begins with copies or not at all
    Rule(_has_no_state, begin_with_copies),
    # the log was lost, and no node is there that could be asked for copies
    Rule(_has_no_plan, _wait_for_nodes),
    # before growth and shrinking, which need all ranks at a step boundary
    Rule(_is_broken, _replace),
    Rule(_is_to_move, _move),
    Rule(_is_to_rebalance, _move),
)


# -- reasons ---------------------------------------------------------------------------------------


def _startup_timeout(membership: Membership) -> str:
    """Return the reason for the end of a job that did not start in time."""
    nodes = membership.nodes
    workers = plural(len(membership.workers.ready), "worker is", "workers are")
    state = f"{len(nodes)} of {plural(membership.config.nodes, 'node')} joined, {workers} ready"
    unfit = [node for node in nodes if node in membership.unfit]
    state += f"; not fit to train: {', '.join(unfit)}" if unfit else ""
    limit = f"startup_s={membership.config.startup_s:g}"
    return f"start-up took longer than {limit}: {state}{_last_loss(membership)}"


def _last_loss(membership: Membership) -> str:
    """Return the end of a reason that names the last lost worker; "" if none was lost."""
    loss = membership.failures.last_loss
    return f"; the last one that was lost is {loss}" if loss else ""
