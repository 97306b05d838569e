"""Groups of the state of a membership: plain data, without decisions.

:class:`~chaoskit.coordinator.membership.membership.Membership` has one of each. Only functions of
this package write to them.

-> coordinator/state.py: the state of the whole control plane; the membership is one part of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from chaoskit.coordinator.membership.strikes import Strikes
from chaoskit.wire.messages import Endpoint, Plan


@dataclass
class TargetWorld:
    """The world that is wanted.

    Attributes:
        size: ranks of the full world.
        idle: nodes that are to have no workers.
        swap_by_s: until then, a departing worker may stay for the worker that is started in its
            place.
        shares: worker -> number of shards, once ranks were found not to be equally fast.
    """

    size: int
    idle: set[str] = field(default_factory=set)
    swap_by_s: float | None = None
    shares: dict[str, int] = field(default_factory=dict)


@dataclass
class Nodes:
    """The nodes of a run, and the reasons not to start workers on some of them.

    Attributes:
        strikes: counts the lost workers of each node.
        unfit: nodes that get no workers because of their health.
        on_probation: unfit nodes that may still prove themselves.
        live: nodes that have joined and were not lost, in order of joining.
        started: node -> number of workers ever started there.
        silent: lost node that may reconnect with the copies that it keeps -> until when.
        left_out: nodes that cannot reach all others.
        complete_s: when as many nodes had joined as the first world needs; infinity before.
    """

    strikes: Strikes
    unfit: set[str]
    on_probation: set[str]
    live: list[str] = field(default_factory=list)
    started: dict[str, int] = field(default_factory=dict)
    silent: dict[str, float] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)
    complete_s: float = math.inf

    def trusted(self, nodes: Collection[str]) -> list[str]:
        """Return the nodes of ``nodes`` that are not set aside; all if none would be left."""
        return self.strikes.trusted([*nodes])


@dataclass
class LiveWorkers:
    """The workers that live or are being started.

    Attributes:
        hosts: live worker -> node.
        begun_s: worker that is not ready yet -> when its start was decided.
        ready: worker that can take a rank, or has one -> its endpoint.
        ready_s: when the last worker became ready; minus infinity before.
        launched: the first start of workers was decided.
        ended_ranks: members that ended by themselves; the reason may arrive after their loss.
        fingerprint: fingerprint of the first worker that was ready, or "".
    """

    hosts: dict[str, str] = field(default_factory=dict)
    begun_s: dict[str, float] = field(default_factory=dict)
    ready: dict[str, Endpoint] = field(default_factory=dict)
    ready_s: float = -math.inf
    launched: bool = False
    ended_ranks: set[str] = field(default_factory=set)
    fingerprint: str = ""

    def remove(self, worker: str) -> str:
        """Forget a live worker, and return its node."""
        self.ready.pop(worker, None)
        self.begun_s.pop(worker, None)
        return self.hosts.pop(worker)

    def on(self, nodes: Collection[str]) -> list[str]:
        """Return the live workers of ``nodes``, in order of their start."""
        return [worker for worker, host in self.hosts.items() if host in nodes]


@dataclass
class Failures:
    """Losses so far, which end a job when they are too many.

    Attributes:
        losses: lost workers that count against ``max_failures``.
        failed_starts: workers in a row that ended before they were ready.
        start_after_s: no worker is started before this time; minus infinity without a pause.
        last_loss: worker and detail of the last loss, in words; "" before one.
    """

    losses: int = 0
    failed_starts: int = 0
    start_after_s: float = -math.inf
    last_loss: str = ""


@dataclass
class Generations:
    """The last published plan, and the generations before it that still matter.

    Attributes:
        plan: the last published plan; None before the first one.
        base: plan of the last generation that worked, or of the first one; None before that. Ranks
            and shards follow from it: a survivor has gradients of those shards only.
        settled: every member of the last plan has built its group.
        stalled: number of the last generation that cannot continue; 0 for none.
        leavers_at_end: leavers of a settled generation that stay until the job ends.
        entered: members that have the state of the training in the last generation.
        unsettled: number -> members of each generation that is not known to have worked. It is
            kept while a worker with the state may lack the steps of that generation.
    """

    plan: Plan | None = None
    base: Plan | None = None
    settled: bool = False
    stalled: int = 0
    leavers_at_end: tuple[str, ...] = ()
    entered: set[str] = field(default_factory=set)
    unsettled: dict[int, frozenset[str]] = field(default_factory=dict)

    def begin(self, plan: Plan) -> None:
        """Make ``plan`` the last published one."""
        self.plan = plan
        self.base = self.base or plan
        self.settled = False
        self.entered = set()
        self.unsettled[plan.generation] = frozenset(member.worker for member in plan.members)

    @property
    def number(self) -> int:
        """The number of the last published plan; 0 before the first one."""
        return self.plan.generation if self.plan else 0


@dataclass
class Training:
    """The workers that have the state of the training.

    Attributes:
        begun: a rank may have committed a step. Before that, every worker can build the state from
            the seed.
        newest: the newest unsettled generation in which a rank is known to have committed a step.
        holders: workers that have the state of the training. Of a sharded job: all members, or
            none.
        healed: members of a sharded job that have their piece, until all members have theirs.
        growing: the members of a sharded job train on, and the next world begins with copies of
            their state.
        may_train: the members of a sharded job may train in the last generation.
        done: workers that committed the last step.
        stood_in: live worker -> the newest generation in which it is known to have had the state.
    """

    begun: bool = False
    newest: int = 0
    holders: set[str] = field(default_factory=set)
    healed: set[str] = field(default_factory=set)
    growing: bool = False
    may_train: bool = False
    done: set[str] = field(default_factory=set)
    stood_in: dict[str, int] = field(default_factory=dict)

    def remove(self, worker: str) -> None:
        """Forget a worker that is lost."""
        self.holders.discard(worker)
        self.stood_in.pop(worker, None)
        self.done.discard(worker)

    def restart_pieces(self) -> None:
        """Forget which members have their pieces, as a new generation of a sharded job begins."""
        self.healed, self.done = set(), set()
        self.may_train, self.growing = True, False


@dataclass
class RunStatus:
    """Beginning and end of a run.

    Attributes:
        deadline_s: the first generation is formed by then, or the run fails; infinity before the
            first event.
        done_s: when all members had committed the last step; infinity before.
        failure: the reason why the run has failed, or "".
        finished: the run has ended.
        log_lost: generations have trained of which no plan is known; also in a resumed job.
        past_generation: the newest of those generations; 0 for none.
        resumes: the run continues from the snapshots of an earlier one.
    """

    deadline_s: float = math.inf
    done_s: float = math.inf
    failure: str = ""
    finished: bool = False
    log_lost: bool = False
    past_generation: int = 0
    resumes: bool = False
