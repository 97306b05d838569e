"""How a job goes on that nobody has the state of: with the newest sealed copies, or not at all.

When no holder is left, every node is asked for sealed copies, and fresh workers begin with the newest ones; without any
the job is lost.

The state of a sharded job is in pieces, one a rank. Then all members together hold it, or nobody does: with one rank
the state is lost, and every generation but the first begins with sealed copies of all pieces.
"""

from __future__ import annotations

from chaoskit.coordinator.membership.events import Action, Finish, Publish, Recall
from chaoskit.coordinator.membership.succession import Succession


class Renewal(Succession):
    """Asks for copies, waits for those that count, and lets a world begin with them."""

    def _look_at_pieces(self) -> None:
        """Of a sharded state, whether all members hold it together. If not, all of them must begin anew."""
        members = set(self.members)
        if not self._trained or self._plan is None:
            return
        over = not self._is_complete or self._stalled_generation == self.generation
        if (
            self._growing and not over and not self._is_wanting
        ):  # who was to come is lost, or not wanted: all train on
            self._growing, self._may_train, self._holders = False, True, members
        elif over or self._growing or self._may_grow():
            self._growing = not over
            self._holders, self._healed = set(), set()
            if over:
                self._stalled_generation = self.generation
            if not self._is_complete:
                self._done = set()  # the last steps must be taken again
            if (
                self._may_train
            ):  # though nobody has said so yet: what was known to be stored is too old
                self._may_train = False
                self._revival.end()
        elif self._healed >= members:
            self._holders = members

    def _recall(self, now_s: float) -> list[Action]:
        """Ask every node for sealed copies, once the last holder of the state is lost."""
        if self._trained and not self._holders and (self._plan or self._nodes):
            if self._config.job.sharded and self._should_ask_again(now_s):
                self._revival.ask_again()
            nodes = self._revival.begin(self._nodes, now_s)
            return [Recall(node, self._revival.number) for node in nodes]
        self._revival.end()
        return []

    def _should_ask_again(self, now_s: float) -> bool:
        """Whether what is known of a sharded state is too little, or too old to go back to.

        Members of a world that grows train on while they are asked, and may have answered between different steps; so
        may members with which a lost rank is still in contact. Copies that were under way are complete a little later,
        also those of members that have ended since the nodes answered.
        """
        revival = self._revival
        if (
            self._is_restoring() or not self._nodes
        ):  # asking nobody would leave no trace in the record
            return False
        if revival.outdated:
            return True
        if not self._has_answers(now_s):
            return False
        if revival.misses_pieces:
            return True
        if not revival.is_stale(now_s, trains_on=self._growing):
            return False
        if revival.awaits_reach:
            return revival.is_due(now_s)
        if revival.snapshots or (not self._growing and self._may_begin_anew()):
            return not self._awaits_workers(now_s)
        return self._growing or revival.bare_s(now_s) < self._limits.healing_s

    def _has_answers(self, now_s: float) -> bool:
        """Whether enough is known to decide. Members of a world that grows train on: what they have is what counts."""
        if not self._revival.is_asking(now_s):
            return True
        hosts = {self._hosts[worker] for worker in self.members}
        return self._growing and bool(self._revival.snapshots) and self._revival.has_heard(hosts)

    def _revive(self, now_s: float) -> Publish | Finish | None:
        """Begin again with the newest sealed copies; without any, a member may still be taking the state over."""
        revival, startup_s, lost = self._revival, self._config.startup_s, "every replica was lost"
        if self._resumes and not self._plan:
            lost = "nothing that is stored could be restored"
        elif not self._plan:
            lost = f"the coordinator's record was lost, and {lost}"
        if not self._has_answers(now_s):
            return None
        if not revival.snapshots and (self._growing or not self._may_begin_anew()):
            stored = self._config.disk is not None and (not self._nodes or revival.owed)
            if stored and revival.waited_s(now_s) < startup_s:
                return None  # a node that comes back sees what is stored
            if self._growing:
                return None  # they train on, and are asked again
            if not revival.has_heard(self._nodes) and (
                self._config.job.sharded or not self._is_fruitless(now_s)
            ):
                return None  # to read a large state takes time; a node that is silent for too long is lost
            if revival.awaits_reach and not self._is_fruitless(now_s):
                return None
            if any(now_s < until_s for until_s in self._silent.values()):
                return None
            if self.members and revival.bare_s(now_s) < self._limits.healing_s:
                return None
            why = "no live worker has the state of the training, and no node a complete copy"
            withheld = (
                "; copies of ranks whose state was found corrupt are not taken"
                if revival.withheld
                else ""
            )
            return Finish(False, f"{lost}: {why}{withheld}")
        if self._is_fruitless(now_s):
            return Finish(
                False, f"{lost}: no worker took over a sealed copy in startup_s={startup_s:g}"
            )
        if self._is_restoring() or revival.awaits_reach or self._awaits_workers(now_s):
            return None
        return self._regroup(abort=True, restore=revival.restore(now_s))

    def _may_begin_anew(self) -> bool:
        """Whether a sharded job of which nothing complete is stored has not come further than its first step.

        Then who is left of its first generation has little to lose, and everybody builds the same weights.
        """
        plan, revival = self._plan, self._revival
        hosts = {self._hosts[worker] for worker in self.members}
        first = self._config.job.sharded and plan is not None and not plan.restore
        return first and bool(hosts) and revival.has_heard(hosts) and revival.is_virgin

    def _is_fruitless(self, now_s: float) -> bool:
        """Whether nobody takes a copy over. Of pieces all must be: one that hangs at it is replaced in between."""
        if self._config.job.sharded:
            return self._revival.fruitless_s(now_s) > 2 * self._config.startup_s
        return self._revival.waited_s(now_s) > self._config.startup_s

    def _awaits_workers(self, now_s: float) -> bool:
        """Whether a world that begins with copies should be larger than the workers that are ready allow."""
        if len(self._ready) < self._config.least_world:
            return True
        missing = min(self._size, len(self._hosts)) - len(self._ready)
        patience_s = self._config.replacement_s if self._config.job.sharded else 0.0
        if self._resumes and not self._plan:
            patience_s = self._config.startup_s / 2  # all of them start just now
        gathers = now_s < self._ready_s + self._limits.gather_s
        return missing > 0 and (self._revival.waited_s(now_s) < patience_s or gathers)

    def _is_restoring(self) -> bool:
        """Whether the members of the last plan can still begin with the copies that it names, or anew."""
        plan = self._plan
        if (
            plan is None
            or self._stalled_generation == plan.generation
            or self._growing
            or not self._is_complete
        ):
            return False
        return self._revival.serves(plan) if plan.restore else self._may_train
