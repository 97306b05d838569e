"""Tests of the control plane's state machines in 10,800 simulated histories with faults.

    python -m pytest tests/simulation/histories/test_simulation.py
    CHAOSKIT_SIM_SEED=4397 python -m pytest tests/simulation/histories/test_simulation.py -k
    one_seed -s  # one history CHAOSKIT_SIM_HISTORIES=200000 python -m pytest
    tests/simulation/histories/test_simulation.py -k histories CHAOSKIT_NIGHT_SEEDS=50000 python -m
    pytest tests/simulation/histories/test_simulation.py -k new_seeds

A history is drawn from its seed. The first 10,000 seeds of replicated jobs and 800 of sharded jobs
are always run, and so are those that once broke a law (``simulation/known.toml``). At night new
seeds are drawn from the date. With a planted mistake some history breaks a law: without this, a
simulation that finds nothing would prove nothing.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from simulation import known
from simulation.history import History, run
from simulation.seams import Seams
from simulation.tally import Tally
from simulation.world import Kind

from chaoskit.config import RunConfig
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.membership.limits import Limits
from chaoskit.coordinator.membership.next_world import Candidates
from chaoskit.coordinator.membership.policies import POLICIES, Policies
from chaoskit.coordinator.outputs import End, LogEntry, Output, Send, WriteRecord
from chaoskit.coordinator.plane import ControlPlane
from chaoskit.daemon.copy_budget import CopyBudget
from chaoskit.elastic.decisions import Decision
from chaoskit.elastic.policy import PolicyWorld
from chaoskit.errors import Refused
from chaoskit.journal import Record
from chaoskit.runlog.torn import TornWorld
from chaoskit.vocabulary import Event
from chaoskit.wire.announcements import Facts
from chaoskit.wire.messages import (
    AgentHello,
    Formed,
    GroupBroken,
    Healed,
    LinksTested,
    Message,
    OfferedSnapshot,
    Plan,
    Sealed,
    StopWorker,
    WorkerLost,
)

HISTORIES = int(os.environ.get("CHAOSKIT_SIM_HISTORIES", "4000"))
NIGHT_SEEDS = int(os.environ.get("CHAOSKIT_NIGHT_SEEDS", "5000"))
SEED = int(os.environ.get("CHAOSKIT_SIM_SEED", "0"))
#: Sharded histories for each replicated one: what the two kinds share is tried by the replicated ones.
SHARDED_SHARE = 0.08
#: The same for replicated jobs whose states are kept on their nodes.
KEPT_SHARE = 0.05
#: Histories of one test: 8 s of one core, so that several workers of pytest share them.
ITEM = 500
#: Seeds of one night. A night with more would run into those of the next one.
NIGHT = 1_000_000
#: A planted mistake must be noticed within so many histories.
PATIENCE = 4000
#: Seeds by kind that show a mistake which few histories show. Run early, they save a minute.
TELLING = {
    "replicated": (3173, 3017, 997, 992, 577, 281, 277, 183, 160, 81),
    "sharded": (973, 115, 112),
}
#: Beats, milliseconds or seconds: more than a history lasts.
ENDLESS = 1_000_000


def described(history: History) -> str:
    return "\n".join([f"seed {history.seed}: {history.broken}", *history.faults])


def check_noticed(mistake: Callable[[], Seams], law: str, kind: Kind = "replicated") -> None:
    """Run histories with a mistake until one breaks a law, which must be the one expected.

    Raises:
        AssertionError: if none of the first histories breaks a law, or the first that does breaks
            another one.
    """
    seeds = [*known.seeds(kind), *TELLING.get(kind, ()), *range(PATIENCE)]
    histories = (run(seed, kind, seams=mistake()) for seed in seeds)
    broken = next((history for history in histories if history.broken), None)
    assert broken is not None, f"{PATIENCE} histories went well"
    assert re.search(law, broken.broken), described(broken)


def items(replicated: int) -> list[Any]:
    """Return the histories of all kinds in parts, each as its kind and the range of its seeds."""
    counts: dict[Kind, int] = {
        "replicated": replicated,
        "sharded": round(SHARDED_SHARE * replicated),
        "kept": round(KEPT_SHARE * replicated),
    }
    return [
        pytest.param(kind, range(first, min(first + ITEM, count)), id=f"{kind}-{first}")
        for kind, count in counts.items()
        for first in range(0, count, ITEM)
    ]


def run_all(kind: Kind, seeds: Iterable[int]) -> Tally:
    """Run the histories of ``seeds``.

    Raises:
        AssertionError: if some broke a law, with an entry for ``known.toml`` for each.
    """
    tally = Tally(kind)
    for seed in seeds:
        tally.add(run(seed, kind))
    assert not tally.broken, tally.report()
    return tally


# -- the machines as they are ----------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "seeds"), items(HISTORIES))
def test_histories(kind: Kind, seeds: range) -> None:
    """No history breaks a law, and the histories are neither all alike nor all harmless."""
    tally = run_all(kind, seeds)
    if len(seeds) >= 200:
        tally.check_variety()


@pytest.mark.parametrize("entry", known.known(), ids=lambda entry: f"{entry.kind}-{entry.seed}")
def test_known_histories(entry: known.Known) -> None:
    """A history that once broke a law does not break one again."""
    history = run(entry.seed, entry.kind)
    assert not history.broken, described(history)
    assert history.settled or not entry.settled, (
        "its world has no time any more to come to its size"
    )
    assert history.followed or not entry.followed, "its batch does not follow the world any more"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seeds"), items(NIGHT_SEEDS))
def test_new_seeds(kind: Kind, seeds: range) -> None:
    """No history of seeds that are drawn from the date breaks a law."""
    first = dt.datetime.now(dt.UTC).date().toordinal() * NIGHT
    run_all(kind, range(first + seeds.start, first + seeds.stop))


@pytest.mark.parametrize("kind", ["replicated", "sharded", "kept"])
def test_one_seed(kind: Kind) -> None:
    """A seed is one history: a second run of it has the same trace."""
    history = run(SEED, kind, trace=True)
    print("\n".join(history.trace))
    assert history == run(SEED, kind, trace=True)
    assert history.trace
    assert not history.broken, described(history)


# -- the machines with a mistake -------------------------------------------------------------------


def forgets_generations() -> Seams:
    """A new coordinator starts to count anew, whatever the nodes have seen."""

    def hears(plane: ControlPlane, message: Any) -> list[Any]:
        if isinstance(message, AgentHello):
            return [msgspec.structs.replace(message, generation=0, started=0, term=0)]
        return [message]

    return Seams(hears=hears, does=without(LogEntry))


def lets_zombies_live() -> Seams:
    """A node that was given up comes back, and its workers are not fenced."""

    def fences(output: Output) -> bool:
        return (
            isinstance(output, Send)
            and isinstance(output.message, StopWorker)
            and output.message.cause == "fenced"
        )

    return Seams(does=lambda what, outputs: [output for output in outputs if not fences(output)])


def retells_nothing() -> Seams:
    """An agent does not repeat messages that the last coordinator may not have logged."""

    class Silent(Facts):
        def tell(self) -> Iterator[Message]:
            return iter(())

    return Seams(facts=Silent)


def leaves_losses_untold() -> Seams:
    """Outputs that a coordinator logged and did not live to carry out are lost."""
    return Seams(does=lambda what, outputs: [] if what == "retell" else outputs)


def without_lines(*left_out: Event) -> Seams:
    """A coordinator does not write these lines that the one before it may not have written."""

    def does(what: str, outputs: list[Output]) -> list[Output]:
        missing = [
            out
            for out in outputs
            if what == "retell" and isinstance(out, WriteRecord) and out.event in left_out
        ]
        return [output for output in outputs if output not in missing]

    return Seams(does=does)


def leaves_plans_untold() -> Seams:
    """The journal lacks a plan that the coordinator before wrote to the log, and did not live to tell."""
    return without_lines(Event.PLAN)


def leaves_settled_untold() -> Seams:
    """The journal lacks a formed generation that the coordinator before wrote to the log."""
    return without_lines(Event.SETTLED)


def settles_in_memory_only() -> Seams:
    """The log does not keep that a generation has settled."""
    return Seams(does=unremembered(events.Settled))


def believes_stale_breaks() -> Seams:
    """A group that is long gone breaks, and the present one is planned again."""

    def hears(plane: ControlPlane, message: Any) -> list[Any]:
        if isinstance(message, GroupBroken):
            return [msgspec.structs.replace(message, generation=plane.membership.generation)]
        return [message]

    return Seams(hears=hears)


def starts_the_dead_again() -> Seams:
    """A worker that ended while there was no coordinator is taken for one that never began."""
    return Seams(hears=hello_with(ended=()))


def takes_any_agent_for_the_same() -> Seams:
    """A node that was started again is taken for the one that it was, and its workers for alive or never begun."""
    return Seams(hears=hello_with(pid=0))


def never_ends_a_lease() -> Seams:
    """A frozen node is waited for without end.

    What is frozen for a while only must not matter: see the other cases.
    """
    return Seams(
        coordinator=settings(lease_beats=ENDLESS, hang_floor_ms=ENDLESS),
        node=settings(lease_beats=ENDLESS),
    )


def is_impatient() -> Seams:
    """A lease of one beat: a node that is slow is lost."""
    return Seams(coordinator=settings(lease_beats=1))


def gives_up_a_slow_agent_at_once() -> Seams:
    """A node whose agent says nothing is lost after a lease, though its kernel acknowledges and its ranks train."""
    return Seams(limits=Limits(slow_agent_s=0.0))


def trusts_a_kernel_for_ever() -> Seams:
    """A node is kept as long as its kernel acknowledges, though its agent is stopped for good."""
    return Seams(limits=Limits(slow_agent_s=math.inf))


def takes_joiners_for_holders() -> Seams:
    """A worker that is in a group counts as having the state before it has taken it over."""

    def hears(plane: ControlPlane, message: Any) -> list[Any]:
        return (
            [Healed(message.worker, message.generation), message]
            if isinstance(message, Formed)
            else [message]
        )

    return Seams(hears=hears)


def loses_a_shard() -> Seams:
    """The last shard belongs to no worker after a loss."""

    def assign(
        previous: Any, members: Any, shard_count: int, shares: Any
    ) -> dict[str, tuple[int, ...]]:
        shards = POLICIES.assign(previous, members, shard_count, shares)
        return {
            worker: held[: len(held) - bool(previous and worker == members[-1])]
            for worker, held in shards.items()
        }

    return Seams(policies=Policies(assign=assign))


def keeps_the_batch() -> Seams:
    """The batch does not follow the world, though it should."""
    return Seams(coordinator=settings(follow=None))


def compares_those_that_left() -> Seams:
    """A worker that left after the last step is to have ended with what the others have, whose batch was another."""
    return Seams(policies=Policies(compared=lambda config, members: None))


def counts_names_anew() -> Seams:
    """The names of workers begin anew with the log, whatever the nodes have started."""
    return Seams(hears=hello_with(started=0))


def forgets_losses_too_early() -> Seams:
    """An agent forgets a loss when it has said it, though it may not be written down anywhere."""

    class Forgetful(Facts):
        def note(self, message: Any) -> None:
            super().note(message)
            if isinstance(message, WorkerLost):
                super().note(StopWorker(message.worker, ""))

    return Seams(facts=Forgetful)


def stops_half_way() -> Seams:
    """A regroup that the last coordinator began is not taken up by the next."""

    def hears(plane: ControlPlane, message: Any) -> list[Any]:
        return [] if isinstance(message, GroupBroken) else [message]

    return Seams(hears=hears, limits=Limits(forming_s=math.inf))


def goes_on_after_the_end() -> Seams:
    """The log does not keep the end of the job: the next coordinator trains on."""

    def does(what: str, outputs: list[Output]) -> list[Output]:
        over = any(isinstance(output, End) for output in outputs)
        return [output for output in outputs if not (over and isinstance(output, LogEntry))]

    return Seams(does=does)


def gives_up_all_that_is_silent() -> Seams:
    """The coordinator never assumes that it may be cut off itself."""
    return Seams(policies=Policies(may_give_up=lambda has_contact, lease_end_s, now_s: True))


def has_leases_without_end() -> Seams:
    """Nodes train on, however long they have not been heard, and the coordinator believes that they have ended."""
    return Seams(node=settings(coordinator_outage_s=math.inf))


def waits_for_no_lease() -> Seams:
    """Nodes train on without a lease, and the coordinator does not even wait."""
    return Seams(
        coordinator=settings(coordinator_outage_s=0.0), node=settings(coordinator_outage_s=math.inf)
    )


def never_takes_back() -> Seams:
    """A node that was left out finds its links broken, though they are whole."""

    def hears(plane: ControlPlane, message: Any) -> list[Any]:
        if isinstance(message, LinksTested) and message.node in plane.membership.left_out:
            return [msgspec.structs.replace(message, unreachable=plane.membership.nodes)]
        return [message]

    return Seams(hears=hears)


def lets_no_node_in_twice() -> Seams:
    """A node that was cut off comes again before the end of its last connection is noticed, and is refused."""

    def hears(plane: ControlPlane, message: Any) -> list[Any]:
        if isinstance(message, AgentHello) and message.node in plane.attached:
            raise Refused(f"a node named {message.node} is connected already")
        return [message]

    return Seams(hears=hears)


def leaves_leavers_behind() -> Seams:
    """A rank is lost while others leave, and the plan leaves these out, although furthest."""

    def next_world(known: Candidates) -> list[str]:
        return POLICIES.next_world(dataclasses.replace(known, abort=False))

    return Seams(policies=Policies(next_world=next_world))


def sends_members_away_at_once() -> Seams:
    """A member on a node that is to idle is ended in the middle of a step."""

    def leaving_at_once(hosts: Any, idle: Any, crew: Any) -> list[str]:
        return POLICIES.leaving_at_once(hosts, idle, ())

    return Seams(policies=Policies(leaving_at_once=leaving_at_once))


def drains_the_last_holder() -> Seams:
    """All that have the state leave, and others are to go on without it."""

    def next_world(known: Candidates) -> list[str]:
        return POLICIES.next_world(dataclasses.replace(known, holders=frozenset()))

    return Seams(policies=Policies(next_world=next_world))


def resizes_in_memory_only() -> Seams:
    """The log does not keep the decision for another world."""
    return Seams(does=unremembered(events.Resized))


def evicts_the_last_holder() -> Seams:
    """A node that does not leave in time is given up, whatever other node has the state."""
    return Seams(policies=Policies(may_evict=lambda node, keepers: True))


def keeps_what_was_given_back() -> Seams:
    """Nodes that a job of higher priority has had are never used again."""

    class Keeps(PolicyWorld):
        def give_back(self, job: str, now_s: float) -> list[Decision]:
            return self.tick(now_s)

    return Seams(policies=Policies(elastic_world=Keeps))


def oversleeps() -> Seams:
    """The times for which the policy waits, such as the end of a snooze, never come."""
    waits = ("scaling_timeout_s", "faulty_scale_down_timeout_s", "scale_up_snooze_time_s")

    def coordinator(config: RunConfig) -> RunConfig:
        if config.elastic is None:
            return config
        endless = {name: ENDLESS for name in waits if getattr(config.elastic, name)}
        return msgspec.structs.replace(
            config, elastic=msgspec.structs.replace(config.elastic, **endless)
        )

    return Seams(coordinator=coordinator)


def counts_the_time_that_starts_are_held() -> Seams:
    """A start that was held back until others had recovered is late before it begins."""
    return Seams(
        policies=Policies(overdue=lambda started, ordered_s, limit_s, now_s: list(started))
    )


def without(kind: type) -> Callable[[str, list[Output]], list[Output]]:
    """Return the outputs of a coordinator without those of a kind."""
    return lambda what, outputs: [output for output in outputs if not isinstance(output, kind)]


def unremembered(kind: type) -> Callable[[str, list[Output]], list[Output]]:
    """Return the outputs of a coordinator without the log entries of a kind of event."""

    def does(what: str, outputs: list[Output]) -> list[Output]:
        return [
            output
            for output in outputs
            if not (isinstance(output, LogEntry) and isinstance(output.event, kind))
        ]

    return does


def hello_with(**fields: Any) -> Callable[[ControlPlane, Any], list[Any]]:
    """Return the messages with other fields in every hello of a node."""

    def hears(plane: ControlPlane, message: Any) -> list[Any]:
        return (
            [msgspec.structs.replace(message, **fields)]
            if isinstance(message, AgentHello)
            else [message]
        )

    return hears


def settings(**fields: Any) -> Callable[[RunConfig], RunConfig]:
    """The settings of a run, with other values of some."""
    return lambda config: msgspec.structs.replace(config, **fields)


MISTAKES: dict[Callable[[], Seams], str] = {
    forgets_generations: "was published after generation|was started twice|log was not lost",
    lets_zombies_live: "still runs",
    retells_nothing: "not over|is well and was given up|nobody failed to start",
    leaves_losses_untold: "no journal tells of",
    leaves_plans_untold: "no journal tells of the plans",
    leaves_settled_untold: "no journal tells of: \\['settled",
    settles_in_memory_only: "without need|published after generation|log was not lost",
    believes_stale_breaks: "without need",
    starts_the_dead_again: "was started twice",
    takes_any_agent_for_the_same: "was started twice",
    never_ends_a_lease: "not over",
    is_impatient: "is well and was given up",
    gives_up_a_slow_agent_at_once: "is well and was given up",
    trusts_a_kernel_for_ever: "not over",
    takes_joiners_for_holders: "goes back to step|every replica",
    keeps_the_batch: "generation",
    counts_names_anew: "was started twice",
    forgets_losses_too_early: "was started twice|not over|every replica",
    goes_on_after_the_end: "after the end|ended twice|not over",
    has_leases_without_end: "is well and was given up|the state is there|goes on unseen",
    waits_for_no_lease: "is well and was given up|the state is there|goes on unseen",
    never_takes_back: "is left out|not over",
    lets_no_node_in_twice: "is well and was given up|not over|given up at|the state is there",
    resizes_in_memory_only: "was published after|without need|log was not lost|was started twice",
    oversleeps: "is room for",
    stops_half_way: "not over|is well and was given up",
    loses_a_shard: "generation",
    compares_those_that_left: "silent corruption",
    gives_up_all_that_is_silent: "is well and was given up|the state is there|goes on unseen",
    leaves_leavers_behind: "goes back to step|others need it",
    sends_members_away_at_once: "was sent away",
    drains_the_last_holder: "the state is there|goes back|every replica",
    counts_the_time_that_starts_are_held: "is well and was given up",
    evicts_the_last_holder: "alone, and was evicted",
    keeps_what_was_given_back: "is room for|that gave them back",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_noticed(mistake: Callable[[], Seams]) -> None:
    """A history with a mistake in its machines breaks the law that the mistake is about."""
    check_noticed(mistake, MISTAKES[mistake])


# -- mistakes in what is special about sharded jobs ------------------------------------------------


def mixes_cuts() -> Seams:
    """Pieces of worlds of two sizes are offered together."""

    def restorable(snapshots: Sequence[OfferedSnapshot]) -> tuple[OfferedSnapshot, ...]:
        pieces: dict[Any, set[int]] = {}
        for snap in snapshots:
            pieces.setdefault((snap.age, snap.pieces), set()).add(snap.piece)
        return newest_first(
            snap for snap in snapshots if len(pieces[snap.age, snap.pieces]) == snap.pieces
        )

    return Seams(policies=Policies(restorable=restorable))


def offers_partial_sets() -> Seams:
    """A state counts as stored when one piece of it is."""
    return Seams(policies=Policies(restorable=newest_first))


def newest_first(snapshots: Iterable[OfferedSnapshot]) -> tuple[OfferedSnapshot, ...]:
    return tuple(sorted(snapshots, key=lambda snapshot: snapshot.age, reverse=True))


def restores_the_oldest() -> Seams:
    """The oldest complete state is taken."""

    def restorable(snapshots: Sequence[OfferedSnapshot]) -> tuple[OfferedSnapshot, ...]:
        complete = POLICIES.restorable(snapshots)
        return tuple(snapshot for snapshot in complete if snapshot.age == complete[-1].age)

    return Seams(policies=Policies(restorable=restorable))


def never_forgets_answers() -> Seams:
    """The snapshots that were stored at a loss are restored at the next one."""
    answers: dict[str, Sealed] = {}  # node -> its first answer

    def hears(plane: ControlPlane, message: Any) -> list[Any]:
        if not isinstance(message, Sealed):
            return [message]
        return [
            msgspec.structs.replace(
                answers.setdefault(message.node, message), number=message.number
            )
        ]

    return Seams(hears=hears)


def grows_without_copies() -> Seams:
    """A world that grows begins anew."""
    worlds: dict[int, frozenset[str]] = {}  # generation -> its members

    def begun(plan: Plan) -> Plan:
        before = [worlds[number] for number in sorted(worlds) if number < plan.generation]
        members = worlds[plan.generation] = frozenset(member.worker for member in plan.members)
        return (
            msgspec.structs.replace(plan, restore=()) if before and before[-1] < members else plan
        )

    def does(what: str, outputs: list[Output]) -> list[Output]:
        return [
            Send(output.node, begun(output.message))
            if isinstance(output, Send) and isinstance(output.message, Plan)
            else output
            for output in outputs
        ]

    return Seams(does=does)


def gives_up_what_is_out_of_reach() -> Seams:
    """A copy that could not be read twice is never tried again, though its node still tells of it."""
    return Seams(limits=Limits(retry_s=math.inf, retry_max_s=math.inf))


def puts_old_answers_beside_new_ones() -> Seams:
    """Answers from before a node came back count beside its own, however old they are."""
    return Seams(limits=Limits(apart_s=math.inf, fresh_s=math.inf))


def gives_up_too_soon() -> Seams:
    """A job is called lost while a node owes an answer: with the first one, all have answered."""

    def hears(plane: ControlPlane, message: Any) -> list[Any]:
        if not isinstance(message, Sealed):
            return [message]
        owing = [
            node
            for node in plane.membership.nodes
            if node != message.node and plane.membership.awaits_answer_of(node)
        ]
        return [*(Sealed(node, (), message.number) for node in owing), message]

    return Seams(hears=hears, limits=Limits(recall_s=0.0, healing_s=0.0))


SHARDED_MISTAKES: dict[Callable[[], Seams], str] = {
    gives_up_what_is_out_of_reach: "the state is there|is stored",
    puts_old_answers_beside_new_ones: "is stored|the state is there",
    gives_up_too_soon: "the state is there|is stored|begins anew|goes on unseen",
    mixes_cuts: "cut in two ways|do not make up",
    offers_partial_sets: "makes one state|cut in another way|not over|given up|all of|begins with|no worker took over"
    "|without need|make up",
    restores_the_oldest: "all of .* is stored",
    never_forgets_answers: "all of .* is stored|the state is there|not over|given up",
    grows_without_copies: "begins anew|is stored",
}


@pytest.mark.parametrize("mistake", SHARDED_MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_with_pieces_is_noticed(mistake: Callable[[], Seams]) -> None:
    """A history of a sharded job with a planted mistake breaks the law that it is about."""
    check_noticed(mistake, SHARDED_MISTAKES[mistake], "sharded")


# -- replicas whose states are kept, with a mistake ------------------------------------------------


def copies_too_rarely() -> Seams:
    """A keeper lets more commits go between two copies than it says."""

    class Lazy(CopyBudget):
        def copied(self, step: int, cost_s: float | None) -> None:
            super().copied(step, cost_s)
            self.skipped_until = step + 2 * self.every

    return Seams(budget=lambda: Lazy(every_step=False))


def counts_untorn_losses() -> Seams:
    """The judge excuses the steps that a torn rank has lost, whatever became of the other ranks of its world."""

    def of_any(records: Sequence[Record]) -> list[TornWorld]:
        torn = {(row["generation"], row["step"]) for row in records if row.event == Event.TORN}
        return [TornWorld(generation, step, every=1000) for generation, step in sorted(torn)]

    return Seams(torn_worlds=of_any)


def forgets_torn_ranks() -> Seams:
    """The judge knows of no rank that ended in its update: it blames the runtime for what it may do."""
    return Seams(torn_worlds=lambda records: [])


KEPT_MISTAKES: dict[Callable[[], Seams], str] = {
    copies_too_rarely: "more than k=",
    counts_untorn_losses: "the judge counts",
    forgets_torn_ranks: "the judge counts",
    gives_up_too_soon: "the state is there|goes back to step",
}


@pytest.mark.parametrize("mistake", KEPT_MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_with_copies_is_noticed(mistake: Callable[[], Seams]) -> None:
    """A history of a kept job with a planted mistake breaks the law that the mistake is about."""
    check_noticed(mistake, KEPT_MISTAKES[mistake], "kept")
