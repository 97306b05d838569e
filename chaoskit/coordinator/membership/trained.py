"""Evidence that workers have trained, without a report: it decides which workers have the state.

-> coordinator/handlers/on_generation.py: the reports that do arrive;
coordinator/membership/restart_from_copies.py: the way on when no worker has the state.
"""

from __future__ import annotations

from collections.abc import Collection

from chaoskit.coordinator.membership.membership import Membership


def note_trained(membership: Membership, generation: int) -> None:
    """Note that a rank committed a step in ``generation``, which was not known to have settled.

    All members of that generation had the state then. Other workers lack at least that step, unless
    they took the state over in a later generation. The last generation, a settled one and those of
    a sharded job change nothing.
    """
    members = membership.generations.unsettled.get(generation)
    if members is None or membership.is_sharded or generation == membership.generation:
        return
    training = membership.training
    training.begun = True
    training.newest = max(training.newest, generation)
    later = {worker for worker, stood_in in training.stood_in.items() if stood_in > generation}
    training.holders = {worker for worker in membership.workers.hosts if worker in members} | (
        training.holders & later
    )


def forget_outlived(membership: Membership) -> None:
    """Forget unsettled generations that no longer matter, now that the last generation has worked.

    An earlier generation matters while a worker with the state may not have stood in a later one:
    it has what it had as a member of the earlier generation, until it takes over what the others
    committed without it.
    """
    generations, training = membership.generations, membership.training
    oldest = min(
        (training.stood_in.get(worker, 0) for worker in training.holders),
        default=generations.number,
    )
    unsettled = generations.unsettled.items()
    generations.unsettled = {
        number: members for number, members in unsettled if oldest < number < generations.number
    }


def assume_trained(membership: Membership, workers: Collection[str]) -> None:
    """Treat the first generation as settled if one of ``workers`` is a member, before it is lost.

    The member may have trained, and cannot report it any more. The other replicas of that
    generation then count as workers with the state.
    """
    training, base, members = membership.training, membership.generations.base, membership.members
    if training.begun or base is None or set(workers).isdisjoint(members):
        return
    training.begun = True
    if not membership.is_sharded:
        # a member that came later has taken nothing over, as far as is known
        training.holders.update([worker for worker in members if base.member(worker)] or members)
