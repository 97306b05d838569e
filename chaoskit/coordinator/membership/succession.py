"""Who is in the next world, with which ranks and shards: from one generation to the next.

A world that is resized moves at a step boundary: who leaves it is a member until then, and is lost only once all others
have met without it.
"""

from __future__ import annotations

from chaoskit.coordinator.membership.assignment import fit, name_order
from chaoskit.coordinator.membership.events import Publish
from chaoskit.coordinator.membership.next_world import Candidates, willing
from chaoskit.coordinator.membership.staffing import Staffing
from chaoskit.wire.messages import Member, Plan, Snapshot


class Succession(Staffing):
    """Tells whether another world is wanted, and makes it."""

    # -- whether --------------------------------------------------------------------------------------------------

    @property
    def may_rebalance(self) -> bool:
        """Whether shards can be moved between the members: all train, and no other membership is to come soon."""
        if (
            not self._settled
            or self._done
            or self._revival.active
            or self._config.job.sharded
            or self._finished
        ):
            return False
        members = self.members
        if len(members) < self.world:
            return False
        entered = self.generation == 1 or self._entered.issuperset(members)  # else see _may_move
        starting = len(members) < self._size and bool(self._begun_s)
        leaving = any(self._hosts[worker] in self._idle for worker in members)
        return entered and not starting and not leaving and not self._may_move()

    def _wants_other_shares(self) -> bool:
        """Whether the members of the last plan have not as many shards as they should."""
        assert self._plan is not None
        loads = {member.worker: len(member.shards) for member in self._plan.members}
        fitted = fit(self._shares, self.members, sum(loads.values()))
        return max(loads.values()) - min(loads.values()) > 1 if fitted is None else fitted != loads

    def _may_grow(self) -> bool:
        """Whether the world is not full, though it could be, and no member is at its end."""
        return self._settled and not self._done and self._is_wanting and not self._revival.active

    @property
    def _awaits_successors(self) -> bool:
        """Whether who goes stays for now, as others are being started in its place: then the world moves once."""
        if self._swap_by_s is None or not (going := self._going):
            return False
        room = self._size - (len(self.crew) - len(going))
        coming = any(self._hosts[worker] not in self._idle for worker in self._begun_s)
        return (
            coming
            and len(willing(self._usable_spares, self._strikes.trusted(self._nodes), room)) < room
        )

    def _may_move(self) -> bool:
        """Whether another world is wanted, and all ranks will come to a step boundary where they can leave this one."""
        if not self._settled or self._done or self._revival.active or self._awaits_successors:
            return False
        going = self._going
        if (
            not going and not self._is_wanting
        ):  # as between most events: no worker need be seated to know that
            return False
        if going and self.generation > 1 and not self._entered.issuperset(self.members):
            return False  # who hangs on its way into this generation would never come to a boundary, and not be blamed
        next_world = self._next_world(abort=False)
        return set(next_world) != set(self.members) and len(next_world) >= self._config.least_world

    # -- who ------------------------------------------------------------------------------------------------------

    def _first_world(self) -> list[str]:
        """Ready workers, by rank, where no world was before: as many nodes as possible have one."""
        ready = sorted(self._ready, key=name_order)
        hosts = [self._hosts[worker] for worker in ready]
        order = {worker: self._nodes.index(host) for worker, host in zip(ready, hosts, strict=True)}
        turns = {worker: index - hosts.index(hosts[index]) for index, worker in enumerate(ready)}
        chosen = sorted(ready, key=lambda worker: (turns[worker], order[worker]))[: self._size]
        return sorted(chosen, key=lambda worker: order[worker])

    def _next_world(self, *, abort: bool) -> list[str]:
        """The workers that have a rank in the next generation, by rank."""
        known = Candidates(
            abort=abort,
            seats=[(member.worker, member.node) for member in self._base.members]
            if self._base
            else [],
            hosts=self._hosts,
            crew=self.crew,
            departing=self._going,
            holders=self._holders,
            spares=self._usable_spares,
            starting={node for worker, node in self._hosts.items() if worker not in self._ready}
            - self._idle,
            trusted=self._strikes.trusted(self._nodes),
            size=self._size,
            size_max=self._config.world_max,
            spread=self._config.elastic is not None,
        )
        return self._policies.next_world(known)

    @property
    def _usable_spares(self) -> dict[str, str]:
        """Spare -> its node, but for nodes that are to idle."""
        return {
            worker: self._hosts[worker]
            for worker in self.spares
            if self._hosts[worker] not in self._idle
        }

    # -- how ------------------------------------------------------------------------------------------------------

    def _regroup(self, *, abort: bool, restore: tuple[Snapshot, ...] = ()) -> Publish | None:
        workers = self._next_world(abort=abort) if self._base else self._first_world()
        if len(workers) < self._config.least_world:
            return None
        leavers = () if abort else tuple(worker for worker in self.crew if worker not in workers)
        return self._publish(workers, abort=abort, restore=restore, leavers=leavers)

    def _publish(
        self,
        workers: list[str],
        *,
        abort: bool,
        restore: tuple[Snapshot, ...] = (),
        leavers: tuple[str, ...] = (),
    ) -> Publish:
        previous = (
            {member.worker: member.shards for member in self._base.members} if self._base else {}
        )
        shard_count = self._config.shards_of(-1, len(workers))
        if sum(map(len, previous.values())) != shard_count:
            previous = {}  # gradients of another batch are of no use
        shares = fit(self._shares, workers, shard_count)
        shards = self._policies.assign(previous, workers, shard_count, shares)
        self._plan = Plan(
            generation=self.newest_known + 1,
            members=tuple(
                Member(rank, worker, self._hosts[worker], self._ready[worker], shards[worker])
                for rank, worker in enumerate(workers)
            ),
            abort=abort,
            restore=restore,
            leavers=leavers,
        )
        self._base = self._base or self._plan
        self._settled, self._entered = False, set()
        self._unsettled[self._plan.generation] = frozenset(workers)
        if (
            self._config.job.sharded
        ):  # whoever had a piece in the generation before takes it over anew
            self._healed, self._done = set(), set()
            self._may_train, self._growing = True, False
        return Publish(self._plan)
