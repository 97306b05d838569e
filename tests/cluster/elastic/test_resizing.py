"""Worlds that are resized while they train: no rank is lost, no step is repeated, and all numbers
stay the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from chaoskit.config import RunConfig
from chaoskit.elastic.settings import ElasticPolicy
from chaoskit.errors import BadInput
from chaoskit.experiment.plan.plan import plan_experiment
from chaoskit.journal import Record, read_journals
from chaoskit.runlog.outcome import Outcome
from chaoskit.suites.goals import JournalFlag, all_took_effect, happened, worlds_seen
from chaoskit.suites.recovery.expect import STEADY
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import Answered, ScaleTo
from faults import AddNode, Demand, Fault, Kill, KillCoordinator, Scale, TakeSpot, Target
from faults.evidence import Evidence, ReadBack, SizeRequest

AT = 8


def policy(least: int = 1, most: int = 4, **changes: Any) -> ElasticPolicy:
    return ElasticPolicy(
        min_replicas=least, max_replicas=most, **{"scaling_timeout_s": 0.0} | changes
    )


def run(chaos: Any, *faults: Fault, goal: JournalFlag | None = None, **plan: Any) -> Outcome:
    """Run a job that loses no step, no sample and no bit, until ``goal`` is reached if there is
    one.
    """
    settings: dict[str, Any] = {"nodes": 4, "spares": 0, "steps": 40, "elastic": policy()} | plan
    settings["options"] = {"step_s": 0.03, "full": settings["nodes"]} | settings.get("options", {})
    if goal is not None:
        settings |= {"until": goal.until, "watch": plan.get("watch", goal), "deadline_s": 180.0}
    outcome: Outcome = chaos.run(settings.pop("job", STEADY), faults=faults, **settings)
    outcome.assert_same_losses_as_twin()
    assert outcome.lost_steps == 0
    assert outcome.ledger is not None
    assert not outcome.ledger.missing
    assert not outcome.ledger.repeated
    return outcome


def journal(outcome: Outcome, *events: Event) -> list[Record]:
    records = [
        record
        for record in read_journals(Path(outcome.directory) / "journal")
        if record.event in events
    ]
    return sorted(records, key=lambda record: record.t_ns)


def sizes(outcome: Outcome) -> list[int]:
    """Return the sizes of the worlds that committed steps, in order."""
    first = outcome.steps[0].world
    return [
        first,
        *(after.world for before, after in pairwise(outcome.steps) if before.world != after.world),
    ]


def planned(outcome: Outcome) -> list[Record]:
    """Return the plans of a run that gave up no rank: each but the first waits for a step boundary."""
    plans = journal(outcome, Event.PLAN)
    assert journal(outcome, Event.DETECTED) == []
    assert outcome.recoveries == []
    assert not any(plan["abort"] for plan in plans[1:])
    return plans


def fault_seen(chaos: Any, number: int) -> JournalFlag:
    """Return a flag that is up when the fault with this number has taken effect."""
    return JournalFlag(
        chaos, lambda record: record.event == Event.EVIDENCE and record["fault"] == f"fault{number}"
    )


def left(outcome: Outcome) -> set[str]:
    """Return the workers that left, by their own journals."""
    return {record.source for record in journal(outcome, Event.LEFT)}


# -- on request ------------------------------------------------------------------------------------


@pytest.mark.promise(
    "When every rank of the old world knows it, all of them leave that world after the same step."
)
def test_a_world_shrinks_and_grows_again(chaos: Any) -> None:
    """A rank leaves between two steps and its node stays; a rank that joins takes the state from
    the others.
    """
    outcome = run(
        chaos, Scale(to=3, at_step=AT), Scale(to=4, at_step=2 * AT), goal=worlds_seen(chaos, 3, 4)
    )
    assert sizes(outcome) == [4, 3, 4]
    plans = planned(outcome)
    last = plans[0]["members"][3]["worker"]
    assert [tuple(plan["leavers"]) for plan in plans] == [(), (last,), ()]
    assert left(outcome) == {last}
    assert [record["size"] for record in journal(outcome, Event.RESIZED)] == [3, 4]
    assert {record["accepted"] for record in journal(outcome, Event.ASKED)} == {True}
    (gone,) = journal(outcome, Event.LEFT)
    assert gone["step"] == next(point.step for point in outcome.steps if point.world == 3)


def test_a_rank_that_is_ended_in_its_own_code_has_left_all_the_same(chaos: Any) -> None:
    """The journal of a rank that is ended late has the boundary at which it left, as that of any
    rank.

    The others meet before it comes to its next step.
    """
    goal, job = worlds_seen(chaos, 2), "../../jobs/failing/troubled.py:slow_to_leave"
    plan = {
        "nodes": 3,
        "spares": 0,
        "steps": 20,
        "elastic": policy(),
        "until": goal.until,
        "deadline_s": 120.0,
    }
    outcome = chaos.run(job, faults=[Scale(to=2, at_step=AT)], watch=goal, **plan)
    (gone,) = journal(outcome, Event.LEFT)
    assert gone.source == planned(outcome)[-1]["leavers"][0]
    assert gone["step"] == next(point.step for point in outcome.steps if point.world == 2)


@pytest.mark.slow
@pytest.mark.promise("Where nodes are missing a launcher on this machine starts them")
def test_a_world_grows_beyond_its_first_nodes(chaos: Any) -> None:
    """New nodes are started if the world is to be larger than they allow."""
    goal = worlds_seen(chaos, 2, 4)
    outcome = run(chaos, Scale(to=4, at_step=AT), nodes=2, shards=8, options={"full": 4}, goal=goal)
    assert sizes(outcome)[0] == 2
    assert sizes(outcome)[-1] == 4
    assert {member["node"] for member in planned(outcome)[-1]["members"]} == {
        f"node{n}" for n in range(4)
    }


def test_a_newcomer_takes_the_state_over_while_the_others_compute(chaos: Any) -> None:
    """The others compute the first step of the larger world, and reduce it when the newcomer has
    the state.
    """
    restored_flag = happened(chaos, Event.RESTORED)
    options = {"step_s": 0.03, "full": 4, "world": 4, "file": restored_flag.until["file"]}
    plan = {"nodes": 3, "shards": 4, "steps": 20, "options": options}
    outcome = run(
        chaos, Scale(to=4, at_step=4), job="../../jobs/failing/held.py", goal=restored_flag, **plan
    )
    grown = next(point.step for point in outcome.steps if point.world == 4)
    (restored,) = journal(outcome, Event.RESTORED)
    reduced = [
        record
        for record in journal(outcome, Event.REDUCE)
        if record["generation"] == restored["generation"]
    ]
    firsts = [
        record.t_ns
        for record in reduced
        if record["step"] == grown and record.source != restored.source
    ]
    assert len(firsts) == 3
    assert restored.t_ns < min(firsts)


def test_a_world_of_one_grows_and_shrinks_to_one(chaos: Any) -> None:
    """The last rank keeps the state."""
    faults = [Scale(to=3, at_step=AT), Scale(to=1, at_step=80)]
    outcome = run(
        chaos, *faults, nodes=1, options={"full": 3}, steps=100, goal=worlds_seen(chaos, 1, 3, 1)
    )
    assert (sizes(outcome)[0], max(sizes(outcome)), sizes(outcome)[-1]) == (1, 3, 1)
    planned(outcome)


@dataclass(frozen=True, kw_only=True)
class Ask(Scale):
    """A request that is refused, which the harness would not make."""

    def require(self, config: RunConfig) -> None:
        """Allow any request."""

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        answers = target.listen(Answered)
        target.cluster.send(ScaleTo(target.fault_id, self.to, "somebody"))
        target.release()
        async for answer in answers:
            if answer.request == target.fault_id and not answer.accepted:
                subject = SizeRequest(target.fault_id)
                yield ReadBack(subject=subject, source="the coordinator", value=answer.reason)


@pytest.mark.promise("Each request is answered, also when it is refused", elastic=None)
@pytest.mark.parametrize(
    ("elastic", "reason"),
    [
        (policy(2, 4, replica_discrete_values=(2, 4)), "3 is no allowed size: use 2, 4"),
        (None, "no elastic policy"),
    ],
)
def test_a_request_that_is_refused_is_answered(
    chaos: Any, elastic: ElasticPolicy | None, reason: str
) -> None:
    """The answer names the reason, and the world stays as it is."""
    outcome = run(chaos, Ask(to=3, at_step=AT), elastic=elastic, steps=20)
    assert sizes(outcome) == [4]
    (asked,) = journal(outcome, Event.ASKED)
    assert not asked["accepted"]
    assert reason in asked["reason"]
    assert len(planned(outcome)) == 1


@pytest.mark.parametrize(
    "fault", [Scale(to=3, at_step=2), TakeSpot(rank=1, at_step=2), Demand(at_step=2)], ids=str
)
def test_without_a_policy_nothing_is_started(fault: Fault) -> None:
    with pytest.raises(BadInput, match="elastic"):
        plan_experiment("gpt", steps=9, faults=[fault])


def test_a_size_that_the_policy_forbids_is_refused_before_the_start() -> None:
    with pytest.raises(BadInput, match=r"to.*2, 4"):
        plan_experiment(
            "gpt",
            steps=9,
            elastic=policy(2, 4, replica_discrete_values=(2, 4)),
            faults=[Scale(to=3, at_step=2)],
        )


# -- nodes that go and come ------------------------------------------------------------------------


@pytest.mark.promise(
    "the node's ranks leave at a step boundary, before it is gone; no step is lost"
)
def test_a_node_that_was_announced_to_go_is_out_in_time(chaos: Any) -> None:
    """No rank is lost with a node that was announced to go.

    Its worker has left and ended within the grace period, and its agent ends after it.
    """
    grace_s = 5.0
    outcome = run(
        chaos, TakeSpot(rank=2, grace_s=grace_s, at_step=AT), goal=happened(chaos, Event.NODE_LOST)
    )
    assert sizes(outcome) == [4, 3]
    planned(outcome)
    (notice,) = journal(outcome, Event.INJECTED)
    worker = notice["worker"]
    assert left(outcome) == {worker}
    (evidence,) = [shown for shown in outcome.faults[0].evidence if shown.level == "effective"]
    assert evidence.observed.endswith(", out of the world by then")
    (gone,) = journal(outcome, Event.NODE_LOST)
    assert gone["node"] == worker.rpartition(".")[0]
    (ended,) = [
        record for record in journal(outcome, Event.WORKER_EXITED) if record["worker"] == worker
    ]
    assert ended.t_ns < notice.t_ns + grace_s * 1e9 <= gone.t_ns


def test_a_node_that_goes_at_once_is_a_loss(chaos: Any) -> None:
    """A node without time to leave is a loss like any other, and costs the step in flight."""
    outcome = run(chaos, TakeSpot(rank=2, grace_s=0.0, at_step=AT), goal=worlds_seen(chaos, 4, 3))
    assert sizes(outcome) == [4, 3]
    assert {record["cause"] for record in journal(outcome, Event.DETECTED)} <= {
        "node lost",
        "evicted",
    }
    assert len(outcome.recoveries) == 1


@pytest.mark.slow
def test_a_node_that_goes_is_replaced_in_one_move(chaos: Any) -> None:
    """The node stays until the idle node's worker is warm, so that the world is never smaller."""
    faults = [AddNode(at_step=AT), TakeSpot(rank=1, grace_s=10.0, at_step=2 * AT)]
    plan = {"nodes": 3, "elastic": policy(2, 3), "options": {"step_s": 0.1, "full": 0}}
    outcome = run(chaos, *faults, goal=happened(chaos, Event.NODE_LOST), **plan)
    assert sizes(outcome) == [3]
    plans = planned(outcome)
    taken = plans[0]["members"][1]
    assert [tuple(plan["leavers"]) for plan in plans] == [(), (taken["worker"],)]
    assert (
        f"{taken['node']} will be taken away, and the world stays at 3 nodes" in plans[-1]["reason"]
    )
    assert {member["node"] for member in plans[-1]["members"]} == {f"node{n}" for n in range(4)} - {
        taken["node"]
    }
    assert left(outcome) == {taken["worker"]}


@pytest.mark.slow
def test_every_node_is_swapped_while_the_others_train(chaos: Any) -> None:
    """No first rank is left at the end: the state has gone from rank to rank, and no step was lost."""
    goal, flags = (
        happened(chaos, Event.NODE_LOST, 3),
        [fault_seen(chaos, 2 * turn) for turn in range(3)],
    )
    faults: list[Fault] = []
    gates: dict[str, str] = {}
    for turn in range(3):  # a rank that replaces another one takes its number
        step = AT + 60 * turn  # after the turn before
        faults += [AddNode(at_step=step), TakeSpot(rank=turn, grace_s=8.0, at_step=step + 4)]
        gates[str(step + 2)] = flags[turn].until["file"]  # the added node has joined by then

    def watch(message: Any) -> None:
        for flag in (goal, *flags):
            flag(message)

    plan = {"nodes": 3, "elastic": policy(2, 3), "steps": 140}
    plan["options"] = {"step_s": 0.15, "full": 0, "gates": gates}
    outcome = run(chaos, *faults, job="../../jobs/failing/held.py", goal=goal, watch=watch, **plan)
    planned(outcome)
    first, last = journal(outcome, Event.PLAN)[0], journal(outcome, Event.PLAN)[-1]
    assert {member["worker"] for member in first["members"]}.isdisjoint(
        member["worker"] for member in last["members"]
    )
    assert len(last["members"]) == 3


def test_nodes_go_to_a_job_of_higher_priority_and_come_back(chaos: Any) -> None:
    """The ranks leave in time, and join again when the nodes are given back."""
    demand = Demand(nodes=2, grace_s=5.0, return_after_s=0.2, at_step=AT)
    outcome = run(chaos, demand, goal=worlds_seen(chaos, 4, 2, 4))
    assert sizes(outcome)[:2] == [4, 2]
    assert sizes(outcome)[-1] == 4
    plans = planned(outcome)
    lent = plans[0]["members"][2:]
    assert left(outcome) == {member["worker"] for member in lent} == set(plans[1]["leavers"])
    (asked,) = journal(outcome, Event.ASKED)
    assert set(asked["nodes"]) == {member["node"] for member in lent}


@pytest.mark.promise("new capacity is used after so long", setting="scaling_timeout_s")
@pytest.mark.parametrize("setting", ["scaling_timeout_s", "scale_up_snooze_time_s"])
def test_growth_waits_as_the_policy_says(chaos: Any, setting: str) -> None:
    """New capacity is used after the scaling timeout; after a growth, the first one included, none
    is used for the snooze time.
    """
    plan = {
        "nodes": 1,
        "shards": 4,
        "elastic": policy(1, 4, **{setting: 1.5}),
        "options": {"full": 2},
    }
    outcome = run(chaos, AddNode(at_step=2), goal=worlds_seen(chaos, 1, 2), **plan)
    grown = next(record.t_ns for record in journal(outcome, Event.RESIZED) if record["size"] == 2)
    began = Event.INJECTED if setting == "scaling_timeout_s" else Event.PLAN
    assert grown - journal(outcome, began)[0].t_ns > 1.4e9
    assert sizes(outcome) == [1, 2]
    planned(outcome)


# -- with faults in between ------------------------------------------------------------------------


@pytest.mark.promise(
    "A request is in the coordinator's record, so a coordinator that ends takes none with it."
)
def test_a_coordinator_that_ends_after_a_request_leaves_it_to_the_next(chaos: Any) -> None:
    """The request is in the log, or is made again."""
    faults = [Scale(to=2, at_step=AT), KillCoordinator(rank=1, at_step=AT)]
    outcome = run(chaos, *faults, goal=all_took_effect(chaos, 2, 4, 2))
    assert sizes(outcome)[-1] == 2
    assert journal(outcome, Event.RESUMED)
    assert journal(outcome, Event.DETECTED) == []
    generations = [record["generation"] for record in journal(outcome, Event.PLAN)]
    assert generations == sorted(set(generations))


@pytest.mark.parametrize("rank", [0, 3], ids=["stays", "leaves"])
def test_a_rank_is_killed_in_the_step_in_which_another_size_is_asked_for(
    chaos: Any, rank: int
) -> None:
    """Ranks that are to leave train until all others can go on without them, whichever rank is
    lost.
    """
    faults = [Scale(to=3, rank=1, at_step=AT), Kill(rank=rank, at_step=AT)]
    outcome = run(chaos, *faults, steps=60, goal=worlds_seen(chaos, 3))
    assert sizes(outcome)[-1] == 3
    assert {record["cause"] for record in journal(outcome, Event.DETECTED)} == {"exited"}


@pytest.mark.promise("If anything goes wrong before that, it is a member again.", rank=1)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_killed_while_the_smaller_world_is_formed(chaos: Any, rank: int) -> None:
    """The unfinished move is taken back, as the leaving rank may be the only one that has gone so
    far.
    """
    faults = [Scale(to=3, at_step=AT), Kill(rank=rank, during="regroup")]
    outcome = run(chaos, *faults, steps=60, goal=worlds_seen(chaos, 3))
    plans = journal(outcome, Event.PLAN)
    move = next(number for number, plan in enumerate(plans) if plan["leavers"])
    (leaver,) = plans[move]["leavers"]
    after = plans[move + 1]
    assert after["abort"], "the kill struck after the move"
    assert leaver in {member["worker"] for member in after["members"]}
    assert sizes(outcome)[-1] == 3
    assert len({record["worker"] for record in journal(outcome, Event.DETECTED)}) == 1
    assert len(outcome.recoveries) == 1


# -- sharded jobs ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sharded_job_goes_back_a_step_at_most_for_each_change(chaos: Any) -> None:
    """All ranks begin the new world with copies of their pieces, one a rank."""
    faults = [Scale(to=3, at_step=AT), Scale(to=4, at_step=40)]
    goal = worlds_seen(chaos, 4, 3, 4)
    outcome = chaos.run(
        "fsdp",
        faults=faults,
        nodes=4,
        spares=0,
        steps=60,
        until=goal.until,
        watch=goal,
        options={"size": "tiny", "schedule_steps": 120},
        elastic=policy(2, 4),
        twin=False,
    )
    assert sizes(outcome)[:2] == [4, 3]
    assert sizes(outcome)[-1] == 4
    assert outcome.lost_steps <= len(faults)
    assert journal(outcome, Event.DETECTED) == []
