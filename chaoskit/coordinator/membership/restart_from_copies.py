"""Restart of a job of which no worker has the state: with the newest sealed copies, or not at all.

A sealed copy is complete, and has a checksum (checkpoint/layout/seal.py). Every node is asked for
sealed copies, and fresh workers begin with the newest ones. Without any copy the job fails, except
a sharded job that has committed one step at most: it begins anew.

The state of a sharded job is in pieces, one for each rank. All members together hold it, or none
does. The state is lost with one rank, and every generation but the first begins with sealed copies
of all pieces.

-> coordinator/membership/copy_search.py picks the copies for the plan; runtime/step/restore.py
picks the source that a rank reads. daemon/replica_keeper.py and daemon/piece_keeper.py offer
the copies of a node. coordinator/effects.py sends the questions and the plan.
"""

from __future__ import annotations

from chaoskit.coordinator.membership.events import Action, AskForCopies, FinishJob, Publish
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.coordinator.membership.regroup import regroup


def update_sharded_state(membership: Membership) -> None:
    """Update which members of a sharded job hold the state: all of them together, or none.

    If a rank is missing, or the world can grow, all of them must begin with copies.
    """
    training, generations, members = (
        membership.training,
        membership.generations,
        set(membership.members),
    )
    if not training.begun or membership.plan is None:
        return
    is_over = not membership.is_complete or membership.is_over
    if training.growing and not is_over and not membership.could_grow:
        # the worker that was to join is lost, or not wanted any more: all train on
        training.growing, training.may_train, training.holders = False, True, members
    elif is_over or training.growing or _should_restart_to_grow(membership):
        training.growing = not is_over
        training.holders, training.healed = set(), set()
        if is_over:
            generations.stalled = membership.generation
        if not membership.is_complete:
            training.done = set()  # the last steps must be taken again
        if training.may_train:  # a step may be unreported: the known copies are too old
            training.may_train = False
            membership.search.end()
    elif training.healed >= members:
        training.holders = members


def _should_restart_to_grow(membership: Membership) -> bool:
    """Return whether a sharded job should begin with copies to fill its world.

    Its members must train, and none of them may have ended.
    """
    is_training = membership.settled and not membership.training.done and membership.could_grow
    return is_training and not membership.search.active


def begin_with_others(membership: Membership) -> None:
    """Mark the last generation of a sharded job as over, so that it begins with other copies.

    The answers of the nodes are forgotten, so that all are asked again. A job that is not sharded
    is unchanged.
    """
    if membership.is_sharded:
        membership.generations.stalled = membership.generation
        membership.training.may_train = False
        membership.search.forget_answers()


def search_copies(membership: Membership, now_s: float) -> list[Action]:
    """Return the questions to nodes for sealed copies, while no worker has the state.

    Each node is asked once, and again after its answer was forgotten. The search ends, without
    questions, once a worker has the state, and while no rank has trained.
    """
    search = membership.search
    has_state = not membership.training.begun or membership.training.holders
    if has_state or not (membership.plan or membership.nodes):
        search.end()
        return []
    if membership.is_sharded and _should_ask_again(membership, now_s):
        search.forget_answers()
    nodes = search.begin(membership.nodes, now_s)
    return [AskForCopies(node, search.number) for node in nodes]


def _should_ask_again(membership: Membership, now_s: float) -> bool:
    """Return whether the known copies of a sharded state are too few, or too old to go back to.

    Members of a world that grows train on while they are asked, and may have answered between
    different steps. So may members with which a lost rank is still in contact. Copies that were
    under way are complete a little later, also those of members that have ended since the nodes
    answered.
    """
    search = membership.search
    if is_restoring(membership) or not membership.nodes:  # a question to no node is not logged
        return False
    if search.outdated:
        return True
    if not _has_answers(membership, now_s):
        return False
    if search.misses_pieces:
        return True
    is_growing = membership.training.growing
    if not search.is_stale(now_s, trains_on=is_growing):
        return False
    if search.copies.awaits_retry:
        return search.copies.is_retry_due(now_s)
    if search.copies.restorable or (not is_growing and _may_begin_anew(membership)):
        return not _awaits_workers(membership, now_s)
    return is_growing or search.without_copies_s(now_s) < membership.limits.healing_s


def begin_with_copies(membership: Membership, now_s: float) -> Publish | FinishJob | None:
    """Return a plan that begins with the newest sealed copies, or the failure of the job.

    None is the decision to wait: for answers, for a retry, for workers, or for a member that takes
    the state over.
    """
    search = membership.search
    if not _has_answers(membership, now_s):
        return None
    if not search.copies.restorable and (
        membership.training.growing or not _may_begin_anew(membership)
    ):
        if _may_find_copy(membership, now_s):
            return None
        return FinishJob(False, _no_copies(membership))
    if _is_restore_overdue(membership, now_s):
        limit = f"startup_s={membership.config.startup_s:g}"
        return FinishJob(
            False, f"{_lost_state(membership)}: no worker took over a sealed copy in {limit}"
        )
    if is_restoring(membership) or search.copies.awaits_retry or _awaits_workers(membership, now_s):
        return None
    return regroup(membership, abort=True, restore=search.restore(now_s))


def _may_find_copy(membership: Membership, now_s: float) -> bool:
    """Return whether a copy, or a member with the state, may still turn up."""
    config, search = membership.config, membership.search
    is_stored = config.disk is not None and (not membership.nodes or search.has_open_questions)
    if is_stored and search.waited_s(now_s) < config.startup_s:
        return True  # a node that reconnects can read the stored snapshots
    if membership.training.growing:
        return True  # the members train on, and are asked again
    is_overdue = _is_restore_overdue(membership, now_s)
    if not search.has_answers_of(membership.nodes) and (membership.is_sharded or not is_overdue):
        return True  # to read a large state takes time; a node that is silent for too long is lost
    if search.copies.awaits_retry and not is_overdue:
        return True
    if any(now_s < until_s for until_s in membership.known_nodes.silent.values()):
        return True
    return bool(membership.members) and search.without_copies_s(now_s) < membership.limits.healing_s


def _no_copies(membership: Membership) -> str:
    """Return the reason for the end of a job without a complete copy."""
    explanation = "no live worker has the state of the training, and no node a complete copy"
    if membership.search.copies.withheld:
        explanation += "; copies of ranks whose state was found corrupt are not taken"
    return f"{_lost_state(membership)}: {explanation}"


def _lost_state(membership: Membership) -> str:
    """Return the way in which the state of the training was lost, in words."""
    if membership.plan:
        return "every replica was lost"
    if membership.status.resumes:
        return "nothing that is stored could be restored"
    return "the coordinator's log was lost, and every replica was lost"


def _has_answers(membership: Membership, now_s: float) -> bool:
    """Return whether enough nodes have answered to decide, or the time for answers is over.

    In a world that grows, the answers of the members' nodes are enough.
    """
    search = membership.search
    if not search.is_asking(now_s):
        return True
    has_copies = membership.training.growing and bool(search.copies.restorable)
    return has_copies and search.has_answers_of(_hosts_of_members(membership))


def _may_begin_anew(membership: Membership) -> bool:
    """Return whether a sharded job without a complete copy may begin from the seed again.

    It may while it is known to have committed the first step at most.
    """
    plan, search, hosts = membership.plan, membership.search, _hosts_of_members(membership)
    is_first = membership.is_sharded and plan is not None and not plan.restore
    return is_first and bool(hosts) and search.has_answers_of(hosts) and search.is_at_first_step


def _is_restore_overdue(membership: Membership, now_s: float) -> bool:
    """Return whether no worker has restored a copy in the time for that.

    A sharded job has twice the time, as a rank that hangs in its restore is replaced in between.
    """
    if membership.is_sharded:
        return membership.search.restoring_s(now_s) > 2 * membership.config.startup_s
    return membership.search.waited_s(now_s) > membership.config.startup_s


def _awaits_workers(membership: Membership, now_s: float) -> bool:
    """Return whether a world that begins with copies should wait for more workers to be ready."""
    config, workers = membership.config, membership.workers
    if len(workers.ready) < config.least_world:
        return True
    missing = min(membership.size, len(workers.hosts)) - len(workers.ready)
    patience_s = config.replacement_s if membership.is_sharded else 0.0
    if membership.status.resumes and not membership.plan:
        patience_s = config.startup_s / 2  # all workers start at this moment
    gathers = now_s < workers.ready_s + membership.limits.gather_s
    return missing > 0 and (membership.search.waited_s(now_s) < patience_s or gathers)


def is_restoring(membership: Membership) -> bool:
    """Return whether the members of the last plan can still begin with the copies of the plan.

    Without copies in the plan, they begin anew.
    """
    plan = membership.plan
    if (
        plan is None
        or membership.is_over
        or membership.training.growing
        or not membership.is_complete
    ):
        return False
    return membership.search.copies.serves(plan) if plan.restore else membership.training.may_train


def _hosts_of_members(membership: Membership) -> set[str]:
    return {membership.workers.hosts[worker] for worker in membership.members}
