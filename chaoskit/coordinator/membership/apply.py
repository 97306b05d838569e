"""Changes that each event makes to the state of a membership, and the actions that follow at once.

-> coordinator/membership/decide.py: the next plan, or the end of the job;
coordinator/membership/failure_budget.py: losses that count;
coordinator/membership/worker_placement.py: the nodes of started workers. coordinator/commit.py
returns the entry for the log.
"""

from __future__ import annotations

from chaoskit.coordinator.membership.events import (
    Action,
    Behind,
    Convicted,
    Evicted,
    Fit,
    GenerationSeen,
    LeftOut,
    MembershipEvent,
    NodeJoined,
    Readmitted,
    Rebalanced,
    Resized,
    Resumes,
    RunFailed,
    Settled,
    Stalled,
    Tick,
    Unfit,
)
from chaoskit.coordinator.membership.failure_budget import (
    count_lost_nodes,
    count_lost_worker,
    strike,
)
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.coordinator.membership.regroup import may_rebalance
from chaoskit.coordinator.membership.removal import remove_nodes, remove_workers, vacate
from chaoskit.coordinator.membership.restart_from_copies import begin_with_others, is_restoring
from chaoskit.coordinator.membership.trained import assume_trained, forget_outlived, note_trained
from chaoskit.coordinator.membership.worker_placement import (
    forget_fitness,
    launch_if_ready,
    relaunch_if_ready,
    start_missing,
)
from chaoskit.vocabulary import EXITED, SLOW
from chaoskit.wire.messages import (
    Healed,
    NodeLost,
    Sealed,
    SourceFailed,
    WorkerDone,
    WorkerLost,
    WorkerReady,
)


def apply_event(membership: Membership, event: MembershipEvent, now_s: float) -> list[Action]:
    """Change the state by an event, and return the orders that follow at once.

    These start and stop workers, or set nodes aside. A report about a worker or node that is lost
    changes nothing. Nor do requests, rulings and ticks of the elastic policy: they concern other
    parts.
    """
    match event:
        case NodeJoined():
            return _node_joined(membership, event, now_s)
        case NodeLost():
            return _node_lost(membership, event, now_s)
        case LeftOut():
            return _left_out(membership, event, now_s)
        case Readmitted():
            return _readmitted(membership, event, now_s)
        case Unfit():
            return _unfit(membership, event, now_s)
        case Fit():
            return _fit(membership, event, now_s)
        case Evicted(node):
            return remove_nodes(membership, [node], "evicted", now_s)
        case WorkerReady():
            return _worker_ready(membership, event, now_s)
        case WorkerLost():
            return _worker_lost(membership, event, now_s)
        case Behind():
            return _behind(membership, event, now_s)
        case Healed():
            _healed(membership, event)
        case WorkerDone():
            _worker_done(membership, event)
        case Settled():
            return _settled(membership, event, now_s)
        case Stalled():
            _stalled(membership, event)
        case Sealed(node, snapshots, number, committed):
            membership.search.answer(node, snapshots, now_s, number=number, committed=committed)
        case SourceFailed():
            _source_failed(membership, event, now_s)
        case Convicted():
            _convicted(membership, event)
        case Resized():
            return _resized(membership, event, now_s)
        case Rebalanced(shares) if may_rebalance(membership):
            membership.target.shares = dict(shares)
        case RunFailed(reason):
            membership.status.failure = reason
        case GenerationSeen():
            _generation_seen(membership, event)
        case Resumes():
            _resumes(membership, event)
        case Tick():
            return _tick(membership, now_s)
    return []


# -- nodes -----------------------------------------------------------------------------------------


def _node_joined(membership: Membership, event: NodeJoined, now_s: float) -> list[Action]:
    """Add a node, on probation if it must prove itself, and start workers that are missing.

    A node that takes part already changes nothing.
    """
    nodes, node = membership.known_nodes, event.node
    if node in nodes.live:
        return []
    nodes.live.append(node)
    nodes.strikes.note_machine(node, event.machine)
    if event.proves:
        nodes.unfit.add(node)
        nodes.on_probation.add(node)
    nodes.silent.pop(node, None)
    nodes.started[node] = max(nodes.started.get(node, 0), event.started)
    launch_if_ready(membership, now_s)
    return start_missing(membership, [], now_s)


def _node_lost(membership: Membership, event: NodeLost, now_s: float) -> list[Action]:
    """Remove a node with its workers and copies, and count the losses.

    A silent node may come back with its copies until its own lease is over. A node that is no
    member changes nothing.
    """
    nodes, node = membership.known_nodes, event.node
    if node not in nodes.live:
        return []
    nodes.live.remove(node)
    if event.silent:  # its agent ends when its own lease is over
        nodes.silent[node] = now_s + membership.config.coordinator_outage_s
    nodes.left_out.discard(node)
    membership.target.idle.discard(node)
    forget_fitness(membership, node)
    membership.search.lose_node(node, now_s)
    count_lost_nodes(membership, [node], now_s)
    strikes = strike(membership, node, now_s)
    return [*strikes, *remove_nodes(membership, [node], "node lost", now_s, met=event.met)]


def _left_out(membership: Membership, event: LeftOut, now_s: float) -> list[Action]:
    membership.known_nodes.left_out.update(event.nodes)
    count_lost_nodes(membership, event.nodes, now_s)
    return remove_nodes(membership, event.nodes, "unreachable", now_s)


def _readmitted(membership: Membership, event: Readmitted, now_s: float) -> list[Action]:
    membership.known_nodes.left_out.difference_update(event.nodes)
    return start_missing(membership, [], now_s)


def _unfit(membership: Membership, event: Unfit, now_s: float) -> list[Action]:
    nodes = membership.known_nodes
    nodes.unfit.add(event.node)
    nodes.on_probation.discard(event.node)
    launch_if_ready(membership, now_s)
    return remove_nodes(membership, [event.node], "unfit", now_s)


def _fit(membership: Membership, event: Fit, now_s: float) -> list[Action]:
    nodes = membership.known_nodes
    if event.node in membership.config.quarantined:
        return []
    nodes.unfit.discard(event.node)
    nodes.on_probation.discard(event.node)
    launch_if_ready(membership, now_s)
    return start_missing(membership, [], now_s)


# -- workers ---------------------------------------------------------------------------------------


def _worker_ready(membership: Membership, event: WorkerReady, now_s: float) -> list[Action]:
    """Note that a worker can take a rank. Earlier failed starts count no more; their pause ends.

    A worker that is lost, or was started on another node, changes nothing.
    """
    workers, failures = membership.workers, membership.failures
    if workers.hosts.get(event.worker) != event.node:
        return []
    workers.ready.setdefault(event.worker, event.endpoint)
    workers.begun_s.pop(event.worker, None)
    workers.fingerprint = workers.fingerprint or event.fingerprint
    workers.ready_s = now_s
    failures.failed_starts = 0
    failures.start_after_s = now_s
    return start_missing(membership, [], now_s)


def _worker_lost(membership: Membership, event: WorkerLost, now_s: float) -> list[Action]:
    """Remove a worker, and count its loss against the failure budget and against its node.

    A slow worker, or one that a log rule gave up with its node, sets the node aside. A worker that
    is lost already changes nothing.
    """
    worker, cause = event.worker, event.cause
    node = membership.host_of(worker)
    if node is None:
        return []
    note_trained(membership, event.trained_in)
    membership.failures.last_loss = f"{worker}: {event.detail or cause}"
    if worker in membership.members and cause in (EXITED, "raised"):
        membership.workers.ended_ranks.add(worker)
    count_lost_worker(membership, worker, cause, now_s)
    if membership.is_sharded:
        assume_trained(membership, [worker])
    if event.aside or cause == SLOW:
        membership.known_nodes.strikes.set_aside(node)
    strikes = strike(membership, node, now_s)
    return [*strikes, *remove_workers(membership, [worker], "lost", now_s)]


def _behind(membership: Membership, event: Behind, now_s: float) -> list[Action]:
    """Remove a leaver that is behind, if a member has the state."""
    has_holder = membership.training.holders.intersection(membership.members)
    if event.worker not in membership.leavers_at_end or not has_holder:
        return []
    return remove_workers(membership, [event.worker], "left", now_s)


def _healed(membership: Membership, event: Healed) -> None:
    if event.worker in membership.members:
        _note_state(membership, event.worker, event.generation or membership.generation)


def _worker_done(membership: Membership, event: WorkerDone) -> None:
    """Note that a member or leaver committed the last step, and so has the state."""
    # a leaver reports it once, and is a member again if another rank is lost
    if event.worker in membership.crew:
        membership.training.done.add(event.worker)
    if event.worker in membership.members:
        _note_state(membership, event.worker, membership.generation)


def _note_state(membership: Membership, worker: str, generation: int) -> None:
    """Note that a member had the state of the training in ``generation``.

    It still has it, unless others are known to have trained without it since then.
    """
    training = membership.training
    if generation >= training.newest:
        (training.healed if membership.is_sharded else training.holders).add(worker)
    training.stood_in[worker] = max(generation, training.stood_in.get(worker, 0))
    if generation == membership.generation:
        membership.generations.entered.add(worker)


# -- generations -----------------------------------------------------------------------------------


def _settled(membership: Membership, event: Settled, now_s: float) -> list[Action]:
    """Note that the last generation works, and remove its leavers unless the job is at its end.

    For an earlier generation, only note that its members had the state.
    """
    generations, training = membership.generations, membership.training
    plan, members = generations.plan, membership.members
    if plan is None or event.generation != plan.generation:
        note_trained(membership, event.generation)
        return []
    if not training.begun and not plan.restore:
        training.holders.update(members)
    leavers = membership.leavers
    training.begun = generations.settled = True
    generations.base = plan
    forget_outlived(membership)
    # where all scripts return at this step, the leavers may still save what they have
    are_last = bool(event.ended) and training.holders.intersection(members).issubset(event.ended)
    generations.leavers_at_end = leavers if membership.are_done or are_last else ()
    if generations.leavers_at_end:
        return []
    return remove_workers(membership, leavers, "left", now_s)


def _stalled(membership: Membership, event: Stalled) -> None:
    """Mark a generation as over, so that another one is planned."""
    membership.generations.stalled = event.generation
    if membership.is_sharded:
        assume_trained(membership, membership.members)


def _generation_seen(membership: Membership, event: GenerationSeen) -> None:
    """Handle a log that lost entries: continue after the generation that a node has seen.

    The run fails if a plan or a worker already depends on the missing part.
    """
    status, nodes, node, started = (
        membership.status,
        membership.known_nodes,
        event.node,
        event.started,
    )
    has_workers, problem = bool(membership.workers.hosts), ""
    known_starts = nodes.started.get(node, started)
    if started > known_starts:
        if membership.plan or has_workers:  # another worker may have a known name
            problem = f"{node} has started {started} workers, and {known_starts} of them are known"
        nodes.started[node] = started
    if event.generation > membership.newest_known:
        if membership.plan or (has_workers and not status.log_lost):
            problem = (
                f"a node has seen generation {event.generation}, "
                "and workers were started without knowing of it"
            )
        _adopt_past(membership, event.generation)
    if problem:
        status.failure = f"the coordinator's log was lost: {problem}"


def _resumes(membership: Membership, event: Resumes) -> None:
    _adopt_past(membership, event.generation)
    membership.status.resumes = True


def _adopt_past(membership: Membership, generation: int) -> None:
    """Continue after ``generation``, of which no plan is known: its state must be restored."""
    membership.status.past_generation = generation
    membership.status.log_lost = True
    membership.training.begun = True


# -- copies ----------------------------------------------------------------------------------------


def _source_failed(membership: Membership, event: SourceFailed, now_s: float) -> None:
    """Drop a copy that could not be restored; the members begin anew if they depended on it."""
    was_restoring = is_restoring(membership)
    membership.search.fail(event.snapshot, event.corrupt, now_s)
    if was_restoring and not is_restoring(membership):
        # a rank without its piece keeps all from training; a newer piece may have replaced it
        begin_with_others(membership)


def _convicted(membership: Membership, event: Convicted) -> None:
    """Never take copies of these workers; the members begin anew if their plan names one."""
    sources = (
        {snapshot.worker for snapshot in membership.plan.restore} if membership.plan else set()
    )
    was_restoring = is_restoring(membership)
    membership.search.copies.convict(event.workers)
    if was_restoring and sources.intersection(event.workers):
        begin_with_others(membership)


# -- size and time ---------------------------------------------------------------------------------


def _resized(membership: Membership, event: Resized, now_s: float) -> list[Action]:
    """Set the world that is wanted, and remove workers without a rank from idle nodes."""
    target = membership.target
    target.size, target.idle, target.swap_by_s = event.size, set(event.idle), event.swap_by_s
    return vacate(membership, now_s)


def _tick(membership: Membership, now_s: float) -> list[Action]:
    """Start workers that are missing, once the first start and the pauses allow it."""
    if membership.status.log_lost:
        relaunch_if_ready(membership, now_s)
    else:
        launch_if_ready(membership, now_s)
    return start_missing(membership, [], now_s)
