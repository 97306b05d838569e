"""State of a control plane: the membership, and plain data in groups beside it.

-> coordinator/membership/state.py: the data of the membership itself, such as nodes and ranks.
coordinator/handlers/on_restart.py: how a new coordinator makes this state from the log.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from chaoskit.checkpoint.disk.due_steps import Patience
from chaoskit.config import RunConfig
from chaoskit.coordinator.detectors.clocks import Clocks
from chaoskit.coordinator.detectors.contact import Contact
from chaoskit.coordinator.detectors.fitness import Fitness
from chaoskit.coordinator.detectors.link_speed import LinkSpeeds
from chaoskit.coordinator.detectors.links import Links
from chaoskit.coordinator.detectors.newcomers import Newcomers
from chaoskit.coordinator.detectors.rulings import Rulings
from chaoskit.coordinator.detectors.watch import RankWatch
from chaoskit.coordinator.detectors.workload import Workload
from chaoskit.coordinator.membership.elasticity import Elasticity
from chaoskit.coordinator.membership.events import NodeJoined, Ruled
from chaoskit.coordinator.membership.limits import Limits
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.coordinator.membership.policies import Policies
from chaoskit.coordinator.membership.strikes import STRIKE_WINDOW_S, Repeats
from chaoskit.coordinator.outputs import Output
from chaoskit.coordinator.reasons import Reasons
from chaoskit.coordinator.rendezvous import RendezvousBoard
from chaoskit.coordinator.results import Results
from chaoskit.coordinator.schedules.attendance import Attendance
from chaoskit.coordinator.schedules.save_schedule import NOTICE_S, Timetable
from chaoskit.coordinator.schedules.start_order import Deferral
from chaoskit.wire.announcements import Facts
from chaoskit.wire.lease import REPORT_SHARE
from chaoskit.wire.messages import EndJob, Halt

#: New starts of generations without a committed step that a job tolerates.
STALLS_MAX = 20
#: Ranks that may hang one after the other in the same step of a small world before the job fails.
_SUSPECTS_LEAST = 3
#: A heartbeat is answered if this many intervals have passed since an answered one.
_UNANSWERED_BEATS = 1.2
#: A lease of more intervals is hardly shortened by an answer that is left out.
_LONG_LEASE_BEATS = 25


@dataclass
class WorkerOrders:
    """The orders that nodes got for workers, and the ends of workers that nodes have reported.

    Attributes:
        node_of: each worker that was ever started -> its node.
        ordered_s: worker -> when its node was ordered to start it, which may be long after the
            decision to start it.
        farewells: healthy worker that is given up -> until when it may run on, and the reason.
        ended: workers that a node has reported as ended, until their loss is committed.
    """

    node_of: dict[str, str] = field(default_factory=dict)
    ordered_s: dict[str, float] = field(default_factory=dict)
    farewells: dict[str, tuple[float, str]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)


@dataclass
class NodeArrivals:
    """The nodes that have joined and that were lost.

    Attributes:
        attendance: the nodes that are connected, and those that wait for others before the run
            begins.
        joined: node -> its last registration, which names the agent.
        lost_nodes: lost node that has not reconnected -> the reason of the loss.
        have_met: the members of a plan have met, or may have met under the coordinator before: they
            can train.
    """

    attendance: Attendance
    joined: dict[str, NodeJoined] = field(default_factory=dict)
    lost_nodes: dict[str, str] = field(default_factory=dict)
    have_met: bool = False


class BrokenReport(NamedTuple):
    """The first report that a generation is broken."""

    renew_s: float  #: when to plan the generation again, if no loss has explained it by then
    worker: str
    detail: str


@dataclass
class Forming:
    """Progress of the last plan towards a generation that trains.

    Attributes:
        formed: members that have built their group.
        settled: number of the newest generation that has settled; 0 for none.
        broken: the first report that the last generation is broken; None for none.
        stalls: counts new starts of generations without a committed step.
        suspicious_until_s: links are tested until then, because a generation broke and no loss
            explains it.
        inherited: number of a generation that the coordinator before this one left unsettled; 0
            for none.
        inherited_until_s: when that generation is planned again, if it has not settled; None while
            the nodes are awaited, and afterwards.
    """

    formed: set[str] = field(default_factory=set)
    settled: int = 0
    broken: BrokenReport | None = None
    stalls: Repeats = field(default_factory=lambda: Repeats(tolerated=STALLS_MAX))
    suspicious_until_s: float = -math.inf
    inherited: int = 0
    inherited_until_s: float | None = None

    def begin(self) -> None:
        """Forget the reports about the generation before."""
        self.formed.clear()
        self.broken = None


@dataclass
class Detectors:
    """The parts that judge workers and nodes by their messages.

    Attributes:
        watch: progress boards of the ranks: hangs and late starts.
        workload: speed of the ranks: shards and stragglers.
        contact: leases of the nodes.
        links: which nodes reach each other.
        link_speeds: which link slows a rank.
        newcomers: links of nodes that join.
        clocks: wall clocks of the nodes.
        fitness: verdicts on the health of nodes.
        rulings: consequences of log rules.
        suspects: counts hangs of rank after rank in the same step.
        errors: counts the same exception on rank after rank.
        has_news: a heartbeat came since the ranks were last judged.
    """

    watch: RankWatch
    workload: Workload
    contact: Contact
    links: Links
    link_speeds: LinkSpeeds
    newcomers: Newcomers
    clocks: Clocks
    fitness: Fitness
    rulings: Rulings
    suspects: Repeats
    errors: Repeats
    has_news: bool = False


@dataclass
class Schedules:
    """Times at which something is due.

    Attributes:
        starts: starts of workers that wait until a recovery is over.
        saves: steps that are stored by time.
        answer_s: a heartbeat that follows an answered one sooner than this is not answered.
        answered_s: node -> when its heartbeat was last answered.
    """

    starts: Deferral[str]
    saves: Timetable
    answer_s: float
    answered_s: dict[str, float] = field(default_factory=dict)


@dataclass
class Ending:
    """The end of the job.

    Attributes:
        end: the end, once it is decided; None before.
        halt: the order to end after a step; None without one.
        results: weights with which the workers ended.
        patience: how long the step before the end may last before the newest state is stored.
        stored_step: the newest step that was ordered to be stored while the next one lasts.
    """

    patience: Patience
    end: EndJob | None = None
    halt: Halt | None = None
    results: Results = field(default_factory=Results)
    stored_step: int = 0


@dataclass
class Past:
    """The log of events, and the coordinators before this one that wrote it.

    Attributes:
        started_s: when this coordinator started.
        begun: there is an event in the log.
        lag_s: how far the clock is ahead of the time of the membership, for which no time passes
            between coordinators.
        resuming: nodes of the previous coordinator may still reconnect.
        ruled: the last ruling that gave workers up, or None. The log may lack some of these losses.
        unconfirmed: outputs that the previous coordinator may not have carried out.
    """

    started_s: float
    begun: bool = False
    lag_s: float = 0.0
    resuming: bool = False
    ruled: Ruled | None = None
    unconfirmed: list[Output] = field(default_factory=list)

    def membership_s(self, now_s: float) -> float:
        """Return ``now_s`` as time of the membership, without the times without a coordinator."""
        return now_s - self.lag_s


@dataclass
class PlaneState:
    """Everything that the decisions of a control plane depend on.

    Attributes:
        elasticity: the elastic policy; None for a run without one.
        board: rendezvous of the workers of a generation.
        facts: messages that a later observer must receive.
        reasons: reasons of the next plan.
    """

    config: RunConfig
    policies: Policies
    limits: Limits
    membership: Membership
    elasticity: Elasticity | None
    workers: WorkerOrders
    nodes: NodeArrivals
    forming: Forming
    detectors: Detectors
    schedules: Schedules
    ending: Ending
    past: Past
    board: RendezvousBoard
    facts: Facts
    reasons: Reasons


def new_state(config: RunConfig, now_s: float, policies: Policies, limits: Limits) -> PlaneState:
    """Return the state of a control plane before its first message."""
    elastic = config.elastic
    elasticity = Elasticity(elastic, policies.elastic_world) if elastic is not None else None
    return PlaneState(
        config=config,
        policies=policies,
        limits=limits,
        membership=Membership(config, policies=policies, limits=limits),
        elasticity=elasticity,
        workers=WorkerOrders(),
        nodes=NodeArrivals(Attendance(config.nodes, now_s + config.startup_s)),
        forming=Forming(),
        detectors=_detectors(config, now_s, policies, limits),
        schedules=_schedules(config),
        ending=Ending(Patience(NOTICE_S + config.heartbeat_ms / 1000)),
        past=Past(now_s),
        board=RendezvousBoard(),
        facts=Facts(),
        reasons=Reasons(),
    )


def _detectors(config: RunConfig, now_s: float, policies: Policies, limits: Limits) -> Detectors:
    # numbers start at the microsecond of the start, above those of the previous coordinator
    first_question = int(now_s * 1e6)
    contact = Contact(
        config.heartbeat_ms / 1000,
        config.lease_beats,
        config.coordinator_outage_s,
        limits.slow_agent_s,
        policies.may_give_up,
    )
    contact.listen((), now_s)  # from now on, times in which this process did not run count
    return Detectors(
        watch=RankWatch(config),
        workload=Workload(config),
        contact=contact,
        links=Links(first_question),
        link_speeds=LinkSpeeds(first_question),
        newcomers=Newcomers(first_question),
        clocks=Clocks(),
        fitness=Fitness(enforce=config.health == "enforce"),
        rulings=Rulings(config.nodes, STRIKE_WINDOW_S),
        suspects=Repeats(tolerated=max(config.nodes, _SUSPECTS_LEAST)),
        errors=Repeats(tolerated=config.nodes),
    )


def _schedules(config: RunConfig) -> Schedules:
    beat_s = config.heartbeat_ms / 1000 * REPORT_SHARE
    # a short lease is extended as often as possible
    is_long = config.coordinator_outage_s > _LONG_LEASE_BEATS * beat_s
    return Schedules(
        starts=Deferral(),
        saves=Timetable(config.disk.every_s if config.disk is not None else 0.0),
        answer_s=_UNANSWERED_BEATS * beat_s if is_long else 0.0,
    )
