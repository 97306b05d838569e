"""Every fault of the network on real nodes: each node has a network of its own, and the evidence
comes from the kernel.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.goals import node_returns, workers_lost

from chaoskit.errors import BadInput
from chaoskit.experiment.harness import Harness
from chaoskit.experiment.plan.plan import plan_experiment
from chaoskit.experiment.plan.planfile import encode, load, save
from chaoskit.journal import read_journals
from chaoskit.pytest_plugin import Chaos
from chaoskit.runlog.outcome import Outcome
from chaoskit.substrate import registry
from chaoskit.substrate.core import commands
from chaoskit.substrate.limits import capabilities
from chaoskit.substrate.local import LocalSubstrate
from chaoskit.suites.goals import all_took_effect
from chaoskit.vocabulary import Event, Verdict
from chaoskit.wire.messages import Heartbeat
from faults import (
    CATALOGUE,
    Bandwidth,
    Cut,
    Delay,
    Fault,
    Flap,
    FreezeNode,
    Kill,
    KillCoordinator,
    KillNode,
    LinkDown,
    Loss,
    Preempt,
    Reset,
)

pytestmark = pytest.mark.chaos(substrate="netns")
TROUBLED = f"{Path(__file__).parents[2] / 'jobs' / 'failing' / 'troubled.py'}:plain"
AT = 10
HEAL_S = 3.0  # three leases: a cut-off node is given up by then, even by a late coordinator


def run(chaos: Chaos, *faults: Fault, job: str = TROUBLED, **plan: Any) -> Outcome:
    """Run a job that must pass; skip the test if this machine cannot do one of the faults."""
    for fault in faults:
        if reason := fault.unavailable():
            pytest.skip(reason)
    settings = {"nodes": 4, "steps": 40, "options": {"step_s": 0.02}, "deadline_s": 60.0} | plan
    return chaos.run(job, faults=faults, **settings)


def evidence(outcome: Outcome) -> str:
    """Return the detail of the evidence of the only fault, which must be confirmed."""
    (fault,) = outcome.faults
    assert fault.state == "confirmed"
    return next(check.detail for check in outcome.checks if check.name.startswith("evidence of "))


# -- each fault ------------------------------------------------------------------------------------

BROKEN = [
    (Cut(rank=2, at_step=AT, heal_after_s=HEAL_S), r"the kernel has counted [1-9]\d* packets"),
    (Cut(rank=1, side=(2,), at_step=AT, heal_after_s=HEAL_S), r"[1-9]\d* packets"),
    (Cut(rank=2, at_step=AT), r"[1-9]\d* packets"),
    (Reset(rank=2, at_step=AT, heal_after_s=HEAL_S), r"[1-9]\d* packets"),
    (
        LinkDown(rank=2, at_step=AT, heal_after_s=HEAL_S),
        r"an echo from the coordinator to node\d was lost",
    ),
]
WORSE = [
    (
        Flap(rank=2, at_step=AT, down_s=0.1, up_s=0.2, times=2),
        r"an echo from the coordinator to node\d was lost",
    ),
    (
        Delay(rank=2, at_step=AT, delay_ms=5.0, heal_after_s=0.5),
        r"takes \d+\.\d ms, .* [1-9]\d* packets were held up",
    ),
    (Loss(rank=2, at_step=AT, share=0.02), r"[1-9]\d* packets"),
    (Bandwidth(rank=2, at_step=AT, bits_per_s=5e6, heal_after_s=0.5), r"[1-9]\d* packets"),
    (
        Bandwidth(rank=2, at_step=AT, bits_per_s=2e6, per_peer=True, heal_after_s=0.5),
        r"[1-9]\d* packets",
    ),
]


def _id(parameter: object) -> str:
    return parameter.kind if isinstance(parameter, Fault) else ""


@pytest.mark.parametrize(("fault", "words"), BROKEN, ids=_id)
def test_an_unreachable_node_is_given_up(
    chaos: Chaos, tmp_path: Path, fault: Cut | Reset | LinkDown, words: str
) -> None:
    """An unreachable node is given up without the loss of a step, a sample or a bit; it is used
    again after the healing.
    """
    flag = (
        node_returns(tmp_path / "back")
        if fault.heal_after_s is not None
        else workers_lost(tmp_path / "lost")
    )
    outcome = run(chaos, fault, steps=20, until=flag.until, watch=flag)
    assert re.search(words, evidence(outcome))
    assert outcome.recoveries
    assert outcome.false_alarms == outcome.lost_steps == 0
    outcome.assert_same_losses_as_twin()


@pytest.mark.parametrize(("fault", "words"), WORSE, ids=_id)
def test_a_bad_network_costs_time_at_most(chaos: Chaos, fault: Fault, words: str) -> None:
    """No step, sample or bit is lost, even if a rank is given up."""
    goal = all_took_effect(chaos, 1)
    plan: dict[str, Any] = {"steps": 40, "until": goal.until, "watch": goal}
    if isinstance(fault, Bandwidth):
        plan = {"job": "gpt", "options": {"size": "tiny"}}  # this job sends more
    outcome = run(chaos, fault, **plan)
    assert re.search(words, evidence(outcome))
    assert outcome.false_alarms == outcome.lost_steps == 0
    outcome.assert_same_losses_as_twin()


def test_every_fault_of_the_network_is_put_to_the_test() -> None:
    assert {type(fault) for fault, _ in BROKEN + WORSE} == {
        kind for kind in CATALOGUE if kind.family == "network"
    }


# -- healing, and faults without effect----------------------------------------------------------------------------


@pytest.mark.promise("A worker does not commit after it, also when its agent is frozen.")
def test_a_world_without_a_coordinator_fences_itself(chaos: Chaos) -> None:
    """Ranks without a coordinator train on, but begin no step that they commit after the lease of
    their node.
    """
    outage_s = 3.0
    heard_ns: dict[str, int] = {}

    def watch(message: Any) -> None:
        if isinstance(message, Heartbeat):  # the lease runs from this heartbeat, or an earlier one
            heard_ns[message.node] = message.sent_ns

    cuts = [Cut(rank=rank, after_s=0.5, apart_from="coordinator") for rank in range(3)]
    settings: dict[str, Any] = {
        "nodes": 3,
        "spares": 0,
        "steps": 10**4,
        "coordinator_outage_s": outage_s,
    }
    outcome = run(chaos, *cuts, twin=False, check=False, watch=watch, **settings)
    records = read_journals(Path(outcome.directory) / "journal")
    cut_ns = max(record.t_ns for record in records if record.event == Event.INJECTED)
    commits = {
        (record.source, record["step"]) for record in records if record.event == Event.COMMIT
    }
    begun = [
        record
        for record in records
        if record.event == Event.REDUCE and (record.source, record["step"]) in commits
    ]
    assert max(record.t_ns for record in begun) > cut_ns, "they train on without a coordinator"
    late = [
        record
        for record in begun
        if record.t_ns > heard_ns[record.source.rpartition(".")[0]] + outage_s * 1e9
    ]
    assert not late, "committed after the end of the lease"
    stopped = [record for record in records if record.event == Event.QUIESCED]
    assert any("lease of this node has run out" in record["error"] for record in stopped)
    assert any("every replica was lost" in reason for reason in outcome.reasons), (
        "by then they were given up, too"
    )


def test_a_cut_off_node_is_heard_again_after_the_healing(chaos: Chaos, tmp_path: Path) -> None:
    """A cut-off node is told after the healing to end the worker that was given up meanwhile."""
    flag = node_returns(tmp_path / "back")
    outcome = run(
        chaos, Cut(rank=2, at_step=AT, heal_after_s=HEAL_S), steps=20, until=flag.until, watch=flag
    )
    records = list(read_journals(Path(outcome.directory) / "journal"))
    (injected,) = [record for record in records if record.event == Event.INJECTED]
    exits = [
        record
        for record in records
        if record.event == Event.WORKER_EXITED and record["worker"] == injected["worker"]
    ]
    assert flag.is_up, "the worker was there to the end"
    assert injected.t_ns + HEAL_S * 1e9 < exits[0].t_ns
    assert exits[0]["status"] == "SIGKILL"


@pytest.mark.parametrize(
    "fault",
    [
        Bandwidth(rank=1, at_step=AT, bits_per_s=8e10),
        Cut(rank=1, at_step=AT, apart_from=(), direction="in"),
    ],
)
def test_a_change_that_meets_nothing_leaves_the_run_unknown(chaos: Chaos, fault: Fault) -> None:
    """No packet ever waits at such a rate, and a cut from an empty set of nodes cuts nothing."""
    outcome = run(chaos, fault, check=False)
    assert outcome.verdict == Verdict.UNKNOWN
    assert outcome.faults[0].state != "confirmed"


# -- faults that need no network -------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        Kill(rank=2, at_step=AT),
        KillNode(rank=2, at_step=AT),
        KillCoordinator(rank=0, at_step=AT),
        FreezeNode(rank=2, at_step=AT, thaw_after_s=0.6),
        Preempt(rank=2, at_step=AT, grace_s=0.2),
    ],
    ids=_id,
)
def test_a_fault_that_needs_no_network_strikes_here_too(chaos: Chaos, fault: Fault) -> None:
    """Faults of processes take effect on nodes that have networks of their own, at no cost of a
    step.
    """
    goal = all_took_effect(chaos, 1)
    outcome = run(chaos, fault, steps=40, until=goal.until, watch=goal)
    assert evidence(outcome)
    assert outcome.substrate == "netns"
    assert outcome.false_alarms == outcome.lost_steps == 0


# -- refused faults --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "field"),
    [
        (Cut(rank=1, at_step=2, side=(4,)), "side"),
        (Cut(rank=1, at_step=2, apart_from=(4,)), "apart_from"),
        (Cut(rank=1, at_step=2, apart_from=(1, 2)), "apart_from"),
        (Cut(rank=1, at_step=2, side=(2,), apart_from=(2,)), "apart_from"),
        (Cut(rank=1, at_step=2, apart_from="nobody"), "apart_from"),
        (Reset(rank=1, at_step=2, direction="sideways"), "direction"),
        (LinkDown(rank=1, at_step=2, heal_after_s=0.0), "heal_after_s"),
        (Flap(rank=1, at_step=2, times=0), "times"),
        (Flap(rank=1, at_step=2, down_s=0.0), "down_s"),
        (Delay(rank=1, at_step=2, delay_ms=0.0), "delay_ms"),
        (Delay(rank=1, at_step=2, delay_ms=5.0, jitter_ms=6.0), "jitter_ms"),
        (Loss(rank=1, at_step=2, share=0.0), "share"),
        (Loss(rank=1, at_step=2, share=1.1), "share"),
        (Bandwidth(rank=1, at_step=2, bits_per_s=0.0), "bits_per_s"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(fault: Fault, field: str) -> None:
    with pytest.raises(BadInput) as refused:
        fault.validate(nodes=4, steps=20)
    assert refused.value.field == field


@pytest.mark.parametrize(
    "kind", [kind for kind in CATALOGUE if kind.family == "network"], ids=lambda kind: kind.__name__
)
def test_a_substrate_that_cannot_do_it_refuses_it(kind: type[Fault], tmp_path: Path) -> None:
    """A substrate that cannot do a fault refuses it on any machine, before anything is started."""
    substrate = LocalSubstrate()
    harness = Harness(substrate, tmp_path)
    try:
        experiment = plan_experiment(TROUBLED, nodes=4, steps=20, faults=[kind(rank=1, at_step=2)])
        with pytest.raises(
            BadInput, match=r"use the substrate netns or docker.*: local cannot do it"
        ):
            harness.run_planned(experiment)
        assert list(tmp_path.iterdir()) == []
    finally:
        harness.close()
        substrate.close()


def test_a_plan_is_read_where_it_cannot_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A plan is read on a machine without the tool that cuts a network, and is refused when it is
    to be run.
    """
    if reason := capabilities.namespaces():
        pytest.skip(reason)
    find = commands.find
    monkeypatch.setattr(commands, "find", lambda name: None if name == "nft" else find(name))
    capabilities.rules.cache_clear()
    request.addfinalizer(capabilities.rules.cache_clear)
    save(
        plan_experiment(TROUBLED, nodes=2, steps=20, faults=[Cut(rank=1, at_step=2)]),
        tmp_path / "plan.json",
    )
    plan = load(tmp_path / "plan.json")
    assert list(map(str, plan.faults)) == ["Cut(rank=1, at_step=2)"]
    with Harness("netns", tmp_path / "runs") as harness:
        with pytest.raises(
            BadInput, match="or use another form: nft not found: install the package nftables"
        ):
            harness.run_planned(plan)
        assert list((tmp_path / "runs").iterdir()) == []


def test_a_plan_file_holds_them(tmp_path: Path) -> None:
    faults = [
        Cut(rank=1, at_step=2, side=(2,), apart_from=(0, 3)),
        Cut(rank=1, at_step=2, apart_from="coordinator"),
    ]
    planned = plan_experiment(TROUBLED, nodes=4, steps=20, faults=faults)
    (tmp_path / "plan.json").write_bytes(encode(planned))
    read = load(tmp_path / "plan.json")
    assert read.faults == tuple(faults)
    assert registry.for_all(fault.substrates for fault in read.faults) == "netns"
    assert registry.for_all([Kill(rank=1, at_step=2).substrates]) == registry.for_all([]) == "local"
