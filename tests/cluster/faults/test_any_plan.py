"""The promise, for random plans: any plan with a survivor ends with the twin's bits, and every sample is used once.

Real processes, broken in ways that Hypothesis draws. Each item draws three plans, the same ones
every time. A longer campaign, of so many plans an item:

    CHAOSKIT_CAMPAIGN=60 pytest tests/cluster/faults/test_any_plan.py
    CHAOSKIT_CAMPAIGN=60 CHAOSKIT_CAMPAIGN_SEED=7 pytest tests/cluster/faults/test_any_plan.py
    --chaos-report campaign CHAOSKIT_CAMPAIGN=60 pytest tests/cluster/faults/test_any_plan.py -k
    parted  # networks that are cut, on netns

A plan that fails is shrunk by our own delta debugging: Hypothesis' own takes every passing run for
a proof, and a real failure does not come back every time.
"""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from chaoskit.config import DETECTION
from chaoskit.experiment.plan.plan import Experiment, plan_experiment
from chaoskit.experiment.plan.planfile import load
from chaoskit.experiment.shrink.search import shrink_to_file, symptoms_of
from chaoskit.journal import Record, read_journals
from chaoskit.pytest_plugin import Chaos
from chaoskit.runlog.outcome import Outcome
from chaoskit.vocabulary import Event, Verdict
from faults import (
    CrashLoop,
    Cut,
    Fault,
    Flap,
    Kill,
    KillAgent,
    KillCoordinator,
    KillNode,
    LinkDown,
    LoseNode,
    NaN,
    Raise,
    ReplaceNode,
    Reset,
)
from faults.strategies import fault_plans

JOBS = Path(__file__).parents[2] / "jobs"
CAMPAIGN = int(os.environ.get("CHAOSKIT_CAMPAIGN", "0"))
SEED = int(
    os.environ.get("CHAOSKIT_CAMPAIGN_SEED")
    or (random.SystemRandom().randrange(2**32) if CAMPAIGN else 0)
)
SHRINK_S = float(os.environ.get("CHAOSKIT_SHRINK_S", "120"))
PLANS = 3  # per item
STEPS = 24
HIDDEN_S = 1.0  # faults on one worker within this time may hide each other
HEARD_S = 1.0  # an agent is heard within this time after its start
END_STEPS = 5  # a job that ends within so many steps after a fault may leave no process to observe
PARAMETERS = ("3.weight", "0.bias")  # of the job's model
PARTING = (Cut, Reset, LinkDown, Flap, LoseNode, ReplaceNode, Kill, KillCoordinator)


@st.composite
def experiments(
    draw: st.DrawFn, kinds: Sequence[type[Fault]] | None = None, most: int = 5
) -> Experiment:
    """Draw a run of 2 to 4 nodes with a plan that it must survive, in any configuration that the
    promise covers.
    """
    nodes = draw(st.integers(2, 4))
    faults = draw(
        fault_plans(
            nodes=nodes,
            steps=STEPS,
            kinds=kinds,
            least=1,
            most=most,
            parameters=PARAMETERS,
            heartbeat_ms=DETECTION["relaxed"]["heartbeat_ms"],
            sure=False,
        )
    )
    config: dict[str, Any] = {
        "spares": draw(st.integers(0, 2)),
        "shards": draw(st.sampled_from((0, 6, 8))),
        "buckets": draw(st.sampled_from((1, 2))),
        "transport": draw(st.sampled_from(("auto", "tcp"))),
        "reduction": draw(st.sampled_from(("exact", "exact", "exact", "fast"))),
    }
    return plan(faults, nodes=nodes, **config)


def plan(faults: tuple[Fault, ...], **settings: Any) -> Experiment:
    return plan_experiment(
        f"{JOBS / 'failing' / 'troubled.py'}:plain",
        name="any plan",
        steps=STEPS,
        options={"step_s": 0.02},
        faults=faults,
        deadline_s=120.0,
        **DETECTION["relaxed"],
        **settings,
    )


def broken_promises(experiment: Experiment, outcome: Outcome) -> list[str]:
    """Return the checks that break the promise.

    A fault without evidence does not break it if its rank was gone, or the job was over or about to
    be. The same holds if another fault struck the same process at about the same time: a second NaN
    changes nothing, and a killed process is not late any more.
    """
    evidence = [
        check for check in outcome.checks if check.name.startswith("evidence of ")
    ]  # in the order of the faults
    excused = {
        id(check)  # two faults of a plan may have one name
        for number, (check, record) in enumerate(zip(evidence, outcome.faults, strict=True))
        if record.state in ("not fired", "missed")
        or (record.state == "not observed" and _is_excused(number, experiment, outcome))
    }
    unmet = [
        check for check in outcome.checks if check.verdict not in (Verdict.PASSED, Verdict.UNKNOWN)
    ]
    unmet += [
        check
        for check in outcome.checks
        if check.verdict == Verdict.UNKNOWN and id(check) not in excused
    ]
    return [f"{check.name}: {check.detail}" for check in unmet]


def _is_excused(number: int, experiment: Experiment, outcome: Outcome) -> bool:
    """Return True if a fault could not show, because of another fault or the end of the job.

    The other fault struck the same worker, or its whole node, before the effect could be seen. The
    job was over, or over before a replaced node could be heard.
    """
    records = read_journals(Path(outcome.directory) / "journal")
    strikes = {
        int(record["fault"].removeprefix("fault")): record
        for record in records
        if record.event == Event.INJECTED
    }
    return number in strikes and (
        _is_late(strikes[number], records)
        or (
            isinstance(experiment.faults[number], ReplaceNode)
            and not _is_back(strikes[number], records)
        )
        or any(
            _hides(experiment.faults[place], other, experiment.faults[number], strikes[number])
            for place, other in strikes.items()
            if place != number
        )
    )


def _is_late(victim: Record, records: Sequence[Record]) -> bool:
    """Return True if the job ended as the fault struck: hardly any step was begun after it."""
    later = [record for record in records if record.t_ns > victim.t_ns]
    begun = {record["step"] for record in later if record.event == Event.REDUCE}
    return len(begun) <= END_STEPS and any(record.event == Event.JOB_ENDED for record in records)


def _is_back(victim: Record, records: Sequence[Record]) -> bool:
    """Return True if the struck node had started a worker again, long enough before the end to be
    heard.

    A node takes seconds to come back, and the number of steps of a plan is fixed.
    """
    node = victim["worker"].rpartition(".")[0]
    ended_ns = max(
        (record.t_ns for record in records if record.event == Event.JOB_ENDED), default=math.inf
    )
    return any(
        record.event == Event.WORKER_STARTED
        and record.source == node
        and victim.t_ns < record.t_ns < ended_ns - HEARD_S * 1e9
        for record in records
    )


def _hides(fault: Fault, record: Record, hidden: Fault, victim: Record) -> bool:
    """Return True if ``fault``, injected at ``record``, can keep ``hidden`` from showing on its
    ``victim``.
    """
    if abs(record.t_ns - victim.t_ns) > HIDDEN_S * 1e9:
        return False
    if isinstance(hidden, KillCoordinator):
        return isinstance(fault, KillCoordinator)  # it dies once, and no fault of a rank hides that
    if isinstance(fault, KillCoordinator):
        return False  # it harms no worker
    if record["worker"] == victim["worker"]:
        return True
    same_node = record["worker"].rpartition(".")[0] == victim["worker"].rpartition(".")[0]
    return same_node and (fault.whole_node or isinstance(fault, CrashLoop))


def holds(chaos: Chaos, experiment: Experiment, *, shrink_s: float = SHRINK_S) -> Outcome:
    """Run a plan; fail with the shortest plan that breaks the promise."""
    outcome = chaos.harness.run_planned(experiment)
    broken = broken_promises(experiment, outcome)
    if not broken:
        return outcome
    directory = Path(outcome.directory)
    lines: list[str] = []
    if symptoms_of(outcome):
        shrink_to_file(
            chaos.harness,
            experiment,
            directory / "minimal.json",
            budget_s=shrink_s,
            tell=lines.append,
        )
    raise AssertionError("\n".join([*broken, f"chaoskit replay {directory / 'plan.json'}", *lines]))


@pytest.mark.slow(item=1)
@pytest.mark.promise("draws plans that a run must survive", item=[0, 1])
@pytest.mark.parametrize("item", range(10))
def test_any_plan_with_a_survivor_ends_with_the_twins_bits(chaos: Chaos, item: int) -> None:
    """Ranks die, hang, raise or compute NaN in any order and number."""
    _campaign(chaos, experiments(), item)


@pytest.mark.promise(
    "a new generation that begins with one survivor can only commit when that one has come to it, and "
    "then the old one cannot",
    item=0,
)
@pytest.mark.parametrize("item", range(2))
@pytest.mark.chaos(substrate="netns")
def test_any_plan_in_which_the_network_is_parted(chaos: Chaos, item: int) -> None:
    """A single history is committed if nodes cannot be reached, from any side and for any time,
    with deaths in between.
    """
    _campaign(chaos, experiments(kinds=PARTING, most=3), item)


@pytest.mark.promise(
    "a new generation that begins with one survivor can only commit when that one has come to it, and "
    "then the old one cannot"
)
@pytest.mark.chaos(substrate="netns")
def test_a_plan_that_certainly_parts_the_network(chaos: Chaos) -> None:
    """Two of four ranks are cut off and reach each other, and one of the other two dies in the same
    step: one survives.

    Drawn plans need not part the network.
    """
    faults = (Cut(rank=0, side=(1,), at_step=8), Kill(rank=3, at_step=8))
    outcome = holds(chaos, plan(faults, nodes=4, spares=0, shards=8))
    assert [record.state for record in outcome.faults] == ["confirmed", "confirmed"]
    records = read_journals(Path(outcome.directory) / "journal")
    first = next(record["members"] for record in records if record.event == Event.PLAN)
    parted = {member["node"] for member in first if member["rank"] < 2}
    assert len(parted) == 2
    before: list[Record] = []
    after: list[Record] = []
    for record in records:
        if record.event == Event.COMMIT:
            (before if record["generation"] == 1 else after).append(record)
    assert parted.isdisjoint(record.source.rpartition(".")[0] for record in after)
    assert max(record["step"] for record in before) < min(record["step"] for record in after)


def _campaign(chaos: Chaos, drawn: st.SearchStrategy[Experiment], item: int) -> None:
    states: Counter[str] = Counter()

    @seed(SEED + item)
    @settings(
        max_examples=CAMPAIGN or PLANS,
        database=None,
        deadline=None,
        phases=[Phase.generate],  # no shrinking, see above
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(experiment=drawn)
    def campaign(experiment: Experiment) -> None:
        outcome = holds(chaos, experiment)
        states.update(record.state for record in outcome.faults)

    campaign()
    assert states["confirmed"], "no fault took effect: the promise was not put to the test"


@pytest.mark.parametrize(
    ("fault", "where", "near", "excused"),
    [
        (Kill(rank=1, at_step=4), "node1.0", True, True),
        (Kill(rank=1, at_step=4), "node1.1", True, False),  # an earlier or later worker of the rank
        (Kill(rank=1, at_step=4), "node1.0", False, False),  # too long ago
        (KillNode(rank=1, at_step=4), "node1.1", True, True),
        (KillNode(rank=2, at_step=4), "node2.0", True, False),
        (KillAgent(rank=2, at_step=4), "node2.0", True, False),
        (CrashLoop(rank=1, at_step=4), "node1.1", True, True),
        (KillCoordinator(rank=1, at_step=4), "node1.0", True, False),
    ],
)
def test_a_fault_is_hidden_by_what_befell_the_same_worker(
    fault: Fault, where: str, near: bool, excused: bool
) -> None:
    """The loss of another node is no excuse for a fault without an effect."""
    hidden = NaN(rank=1, at_step=4, parameter=PARAMETERS[0])
    victim = Record(2 * 10**9, "harness", Event.INJECTED, {"worker": "node1.0"})
    other = Record(
        victim.t_ns - (10**8 if near else 10**10), "harness", Event.INJECTED, {"worker": where}
    )
    assert _hides(fault, other, hidden, victim) == excused


@pytest.mark.parametrize(
    ("steps", "ended", "excused"),
    [(0, True, True), (5, True, True), (6, True, False), (0, False, False)],
)
def test_a_fault_is_hidden_by_the_end_of_the_job(steps: int, ended: bool, excused: bool) -> None:
    """A fault is excused if hardly any step was begun after it, and the job has ended."""
    victim = Record(10, "harness", Event.INJECTED, {"worker": "node1.0"})
    before = [Record(number, "node0.0", Event.REDUCE, {"step": number}) for number in range(10)]
    after = [
        Record(11 + number, "node0.0", Event.REDUCE, {"step": 10 + number})
        for number in range(steps)
    ]
    end = [Record(30, "coordinator", Event.JOB_ENDED, {"ok": True})] if ended else []
    assert _is_late(victim, [*before, victim, *after, *end]) == excused


def test_a_coordinator_dies_once() -> None:
    """The kill of a coordinator is hidden by another such kill, and not by a fault of a rank or
    node.
    """
    hidden, other = KillCoordinator(rank=0, at_step=4), KillCoordinator(rank=1, at_step=4)
    records = [Record(t_ns, "harness", Event.INJECTED, {"worker": "node0.0"}) for t_ns in (0, 1)]
    assert _hides(other, records[0], hidden, records[1])
    assert not _hides(KillNode(rank=0, at_step=4), records[0], hidden, records[1])


def test_a_broken_promise_comes_with_a_plan_to_replay(chaos: Chaos) -> None:
    """A job that goes wrong when two ranks are lost in one step fails the property, with a plan to
    replay.
    """
    pair = (Kill(rank=1, at_step=6), Raise(rank=2, at_step=6))
    broken = plan_experiment(
        f"{JOBS / 'wrong' / 'unfaithful.py'}:loses_two",
        nodes=3,
        spares=0,
        shards=8,
        steps=10,
        faults=pair,
    )
    with pytest.raises(AssertionError, match="losses equal the twin's") as failed:
        holds(chaos, broken, shrink_s=15.0)
    *_, line = str(failed.value).splitlines()
    command, path = line.rsplit(maxsplit=1)
    assert command == "chaoskit replay"
    assert len(load(Path(path)).faults) == 2  # neither fault is enough alone
    assert "losses equal the twin's" in symptoms_of(chaos.harness.run_planned(load(Path(path))))
