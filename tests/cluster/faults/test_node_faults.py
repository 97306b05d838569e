"""Real nodes that are lost, come back empty, freeze, or are short of CPU, memory, processes or disk
writes.
"""

from __future__ import annotations

import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.goals import node_returns, workers_lost
from support.waiting import wait_until

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput
from chaoskit.experiment.plan.plan import plan_experiment
from chaoskit.journal import Record, read_journals
from chaoskit.pytest_plugin import Chaos
from chaoskit.runlog.outcome import Outcome
from chaoskit.substrate.limits.device import device_of
from chaoskit.substrate.undo.entries import PREFIX
from chaoskit.suites.goals import all_took_effect
from chaoskit.vocabulary import Event, Verdict
from chaoskit.wire.messages import AtHook
from faults import (
    Fault,
    FreezeNode,
    Kill,
    KillNode,
    LimitCpu,
    LimitIo,
    LimitMemory,
    LimitPids,
    LoseNode,
    Rack,
    ReplaceNode,
)

TROUBLED = f"{Path(__file__).parents[2] / 'jobs' / 'failing' / 'troubled.py'}:plain"
HELD = str(Path(__file__).parents[2] / "jobs" / "failing" / "held.py")
DOOMED = str(Path(__file__).parents[2] / "jobs" / "failing" / "doomed.py")
JOBS = Path(__file__).parents[3] / "suites" / "recovery" / "jobs.py"
AT = 8
THAW_S = 3.0  # three leases: the node is given up by then, even by a late coordinator

netns = pytest.mark.chaos(substrate="netns")


def run(chaos: Chaos, *faults: Fault, job: str = TROUBLED, **plan: Any) -> Outcome:
    """Run a job that must pass; skip the test if this machine cannot do one of the faults."""
    for fault in faults:
        try:
            fault.validate(nodes=4, steps=10**6)
        except BadInput as refused:
            pytest.skip(str(refused))
        if reason := fault.unavailable():
            pytest.skip(reason)
    settings = {"nodes": 4, "steps": 40, "options": {"step_s": 0.02}, "deadline_s": 90.0} | plan
    return chaos.run(job, faults=faults, **settings)


def evidence(outcome: Outcome, number: int = 0) -> str:
    """Return the detail of the evidence of a confirmed fault, by its number in the plan."""
    assert outcome.faults[number].state == "confirmed"
    details = [check.detail for check in outcome.checks if check.name.startswith("evidence of ")]
    return details[number]


def journal(outcome: Outcome, *events: Event) -> list[Record]:
    """Return the records of ``events`` from all journals of a run, by time."""
    return [
        record
        for record in read_journals(Path(outcome.directory) / "journal")
        if record.event in events
    ]


class Struck(NamedTuple):
    """The worker that the first fault struck, and its node."""

    worker: str
    node: str


def struck(outcome: Outcome) -> Struck:
    """Return the struck worker by the journal: the node of a rank depends on the order in which
    nodes were ready.
    """
    worker = str(journal(outcome, Event.INJECTED)[0]["worker"])
    return Struck(worker, worker.rpartition(".")[0])


def is_full_again(outcome: Outcome, nodes: int) -> bool:
    """Return True if the last membership is the full world, on any nodes."""
    return len(journal(outcome, Event.PLAN)[-1]["members"]) == nodes


def steady(nodes: int) -> dict[str, Any]:
    """Return settings of a job that trains until the world is full again."""
    return {
        "job": f"{JOBS}:steady",
        "options": {},
        "nodes": nodes,
        "steps": 20,
        "until": {"world": nodes},
    }


# -- a node that is lost ---------------------------------------------------------------------------


@netns
@pytest.mark.parametrize("phase", ["forward", "reduce"])
def test_a_node_is_lost_in_silence(chaos: Chaos, phase: str) -> None:
    """The lease of a node runs out if its packets are dropped, because its connections do not end."""
    outcome = run(chaos, LoseNode(rank=2, at_step=AT, phase=phase))
    assert re.search(
        r"its [1-9]\d* other processes are gone; [1-9]\d* packets from and to it", evidence(outcome)
    )
    (lost,) = journal(outcome, Event.NODE_LOST)
    assert (
        lost["detail"]
        == f"silent for {outcome.settings.get('lease_beats', RunConfig.lease_beats)} beats"
    )
    assert outcome.false_alarms == outcome.lost_steps == 0
    outcome.assert_same_losses_as_twin()


def test_the_silence_of_a_node_needs_a_network() -> None:
    assert set(KillNode.substrates) - set(LoseNode.substrates) == {
        "local",
        "kubernetes",
    }  # these substrates drop no packets


@pytest.mark.promise(
    "the new one is fresh capacity, and the world is whole again", substrate="local"
)
@pytest.mark.parametrize("substrate", ["local", pytest.param("netns", marks=netns)])
def test_an_empty_node_comes_in_the_place_of_one_that_was_lost(
    chaos: Chaos, tmp_path: Path, substrate: str
) -> None:
    """A node comes back under its name, as another incarnation, and the next worker starts on it.

    Its loss is made up for on the other node before it is back; so another worker is lost then.
    """
    flag = node_returns(tmp_path / "back")
    faults = [ReplaceNode(rank=1, at_step=AT, back_after_s=0.3), Kill(rank=0, at_step=AT + 12)]
    plan = {"gates": {str(AT + 4): flag.until["file"]}, "full": 2}
    outcome = run(
        chaos, *faults, job=HELD, options=plan, nodes=2, spares=0, watch=flag, until={"world": 2}
    )
    first, *_, last = journal(outcome, Event.PLAN)
    lost = next(member for member in first["members"] if member["rank"] == 1)
    agents = re.search(
        rf"agent of {lost['node']} \(pid (\d+)\) .* the agent that came in its place \(pid (\d+)\)",
        evidence(outcome),
    )
    assert agents
    assert agents[1] != agents[2]
    assert {member["node"] for member in last["members"]} == {"node0", "node1"}
    assert lost["worker"] not in {member["worker"] for member in last["members"]}
    assert outcome.false_alarms == outcome.lost_steps == 0


@pytest.mark.promise(
    "The coordinator refuses it until the lease of the one before is over, and then takes it as fresh capacity."
)
@netns
def test_a_node_that_comes_back_before_its_loss_is_known_waits(chaos: Chaos) -> None:
    """A new agent is refused until the lease of the agent before it is over."""
    goal = all_took_effect(chaos, 1)
    plan = steady(3) | {
        "until": goal.until | {"world": 3},
        "watch": goal,
        "spares": 0,
        "heartbeat_ms": 200,
    }
    outcome = run(chaos, ReplaceNode(rank=1, at_step=AT, back_after_s=0.0), **plan)
    assert evidence(outcome)
    assert is_full_again(outcome, 3)


# -- racks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("substrate", ["local", pytest.param("netns", marks=netns)])
def test_a_rack_is_lost_at_once(chaos: Chaos, substrate: str) -> None:
    outcome = run(chaos, Rack(rank=3, at_step=AT), rack_nodes=2)
    rack = ["node0", "node1"] if struck(outcome).node in ("node0", "node1") else ["node2", "node3"]
    assert re.fullmatch(
        "; ".join(f"the agent of {node} .* are gone" for node in rack), evidence(outcome)
    )
    assert {record["node"] for record in journal(outcome, Event.NODE_LOST)} == {*rack}
    assert len(outcome.recoveries) == 1
    assert outcome.false_alarms == outcome.lost_steps == 0
    outcome.assert_same_losses_as_twin()


@pytest.mark.slow
@pytest.mark.promise(
    "the first nodes of all racks keep copies of the state before the second of any does"
)
def test_a_rack_takes_only_one_of_two_copies(chaos: Chaos, tmp_path: Path) -> None:
    """The copy in the other rack brings the state back when a rack is lost.

    The workers there tear their state in the same step. A step later they would have new copies,
    wherever the older ones were.
    """
    options = {
        "fatal": {str(AT): [2, 3]},
        "copied": [2],
        "marker": str(tmp_path / "ended"),
        "step_s": 0.05,
    }
    settings: dict[str, Any] = {
        "nodes": 4,
        "spares": 0,
        "steps": 20,
        "rack_nodes": 2,
        "memory_copies": 2,
    }
    fault = Rack(rank=0, at_step=AT, phase="optimizer")

    def watch(message: Any) -> None:
        if isinstance(
            message, AtHook
        ):  # rank 0 waits at its hook, so the others reach the end of the step
            torn = [Path(f"{options['marker']}.{AT}.{rank}") for rank in (2, 3)]
            wait_until(lambda: all(file.exists() for file in torn), "ranks 2 and 3 in their update")

    settings |= {"watch": watch, "deadline_s": 90.0, "max_lost_steps": 1}
    outcome = chaos.run(
        DOOMED, faults=[fault], options=options, twin=False, check=False, **settings
    )
    problems = [check.name for check in outcome.checks if check.verdict != Verdict.PASSED]
    assert problems == ["no false alarm"], (
        outcome.directory
    )  # the job's own kills are not planned faults
    sources = {record["source"] for record in journal(outcome, Event.RESTORED)}
    assert any(source.startswith("memory") for source in sources), sources
    common = {"nodes": 4, "steps": 20}
    twin = chaos.harness.twin(plan_experiment(DOOMED, options={"step_s": 0.05}, **common))
    assert [point.loss for point in outcome.steps] == twin.losses, outcome.directory


def test_a_rack_must_be_known() -> None:
    with pytest.raises(BadInput, match="rack_nodes=0: give the number of nodes of a rack"):
        plan_experiment(TROUBLED, nodes=4, steps=20, faults=[Rack(rank=1, at_step=2)])
    planned = plan_experiment(
        TROUBLED, nodes=4, steps=20, rack_nodes=2, faults=[Rack(rank=1, at_step=2)]
    )
    assert [planned.config.rack(f"node{number}") for number in range(4)] == ["noderack0"] * 2 + [
        "noderack1"
    ] * 2
    assert planned.config.rack("left") == "left"


# -- a frozen node ---------------------------------------------------------------------------------


@pytest.mark.parametrize("substrate", ["local", pytest.param("netns", marks=netns)])
def test_the_freezer_makes_a_zombie(chaos: Chaos, tmp_path: Path, substrate: str) -> None:
    """A node in the freezer is given up when its lease ends, and is taken back after the thaw.

    No commit of its old worker counts after that.
    """
    flag = node_returns(tmp_path / "back")
    fault = FreezeNode(rank=1, at_step=AT, how="cgroup", thaw_after_s=THAW_S)
    outcome = run(chaos, fault, until=flag.until, watch=flag)
    assert flag.is_up
    worker, node = struck(outcome)
    assert re.fullmatch(
        rf"all \d+ processes of {node} are frozen: none has run for \d+ ms", evidence(outcome)
    )
    assert next(record for record in journal(outcome, Event.DETECTED))["cause"] == "node lost"
    zombie = [record for record in journal(outcome, Event.COMMIT) if record.source == worker]
    assert {record["generation"] for record in zombie} == {1}
    assert outcome.false_alarms == outcome.lost_steps == 0
    assert not list(Path("/sys/fs/cgroup").rglob(f"{PREFIX}{os.getpid()}-*"))


def test_a_node_in_the_freezer_ends_with_the_run(chaos: Chaos) -> None:
    """A node with a thaw due after the end of the run is ended with the run."""
    outcome = run(chaos, FreezeNode(rank=1, at_step=AT, how="cgroup", thaw_after_s=3600.0))
    assert outcome.faults[0].undone


# -- limits ----------------------------------------------------------------------------------------


def test_a_node_with_little_cpu_time_is_slow_and_no_rank_is_blamed(chaos: Chaos) -> None:
    """A node that waits for its share of CPU time is not given up."""
    goal = all_took_effect(chaos, 1)
    fault = LimitCpu(rank=2, at_step=AT, cores=0.1, lift_after_s=0.5)
    outcome = run(chaos, fault, steps=40, until=goal.until, watch=goal)
    assert re.fullmatch(
        rf"the kernel held {struck(outcome).node} back in [1-9]\d* periods", evidence(outcome)
    )
    assert outcome.recoveries == []
    assert journal(outcome, Event.DETECTED) == []


def test_a_node_without_memory_loses_processes(chaos: Chaos, tmp_path: Path) -> None:
    """The kernel kills processes of a node at its memory limit; the run goes on without them."""
    flag = workers_lost(tmp_path / "lost")
    outcome = run(
        chaos, LimitMemory(rank=2, at_step=AT, lift_after_s=0.5), until=flag.until, watch=flag
    )
    pattern = rf"the kernel killed [1-9]\d* processes of {struck(outcome).node} for want of memory"
    assert re.fullmatch(pattern, evidence(outcome))
    assert outcome.recoveries
    assert outcome.false_alarms == outcome.lost_steps == 0


def test_a_node_that_can_start_nothing_starts_again_later(chaos: Chaos) -> None:
    """A refused fork is a problem of one node, not of the job.

    The other ranks do not wait repeatedly for a rank that has no thread for its group.
    """
    faults = [LimitPids(rank=2, at_step=AT, lift_after_s=1.0), Kill(rank=2, at_step=AT + 2)]
    outcome = run(chaos, *faults, **steady(3), spares=0)
    assert re.fullmatch(
        rf"the kernel refused {struck(outcome).node} [1-9]\d* processes or threads",
        evidence(outcome),
    )
    worlds = [
        [member["worker"] for member in record["members"]]
        for record in journal(outcome, Event.PLAN)
    ]
    assert all(world != next_world for world, next_world in pairwise(worlds))
    assert is_full_again(outcome, 3)
    assert outcome.false_alarms == outcome.lost_steps == 0


def test_a_node_that_writes_slowly_is_waited_for(chaos: Chaos) -> None:
    if device_of(chaos.harness.directory) is None:
        pytest.skip(f"{chaos.harness.directory} lies on no disk")
    outcome = run(chaos, LimitIo(rank=2, at_step=AT), job=f"{JOBS}:writing", options={}, nodes=3)
    assert evidence(outcome).startswith(f"{struck(outcome).node} used up what it may write for ")
    assert journal(outcome, Event.DETECTED) == []


@pytest.mark.promise(
    "One that never bites leaves the run `unknown`",
    fault=LimitPids(rank=2, at_step=AT, further=10**4),
)
@pytest.mark.parametrize(
    "fault",
    [LimitCpu(rank=2, at_step=AT, cores=64.0), LimitPids(rank=2, at_step=AT, further=10**4)],
    ids=str,
)
def test_a_limit_that_never_bites_leaves_the_run_unknown(chaos: Chaos, fault: Fault) -> None:
    outcome = run(chaos, fault, check=False)
    assert outcome.verdict == Verdict.UNKNOWN
    assert outcome.faults[0].state == "not observed"


# -- refused faults --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "field"),
    [
        (ReplaceNode(rank=1, at_step=2, back_after_s=-1.0), "back_after_s"),
        (FreezeNode(rank=1, at_step=2, how="ice"), "how"),
        (Rack(rank="minority", at_step=2), "rank"),
        (LimitCpu(rank=1, at_step=2, cores=0.0), "cores"),
        (LimitCpu(rank=1, at_step=2, lift_after_s=0.0), "lift_after_s"),
        (LimitMemory(rank=1, at_step=2, headroom_mib=0.5), "headroom_mib"),
        (LimitPids(rank=1, at_step=2, further=-1), "further"),
        (LimitIo(rank=1, at_step=2, bytes_per_s=float("nan")), "bytes_per_s"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(fault: Fault, field: str) -> None:
    with pytest.raises(BadInput) as refused:
        fault.validate(nodes=4, steps=20)
    assert refused.value.field == field
