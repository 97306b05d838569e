"""Tests of losses of whole nodes, of every worker at once, and of one coordinator after another.

-> coordinator/membership/restart_from_copies.py: from which copies the job begins again, if any.
"""

from __future__ import annotations

import pytest

from chaoskit import Chaos
from chaoskit.faults import Kill, KillCoordinator, KillNode
from chaoskit.suites.goals import happened
from chaoskit.suites.recovery.expect import AT, PHASES, is_left_alone, survives, victim


@pytest.mark.promise(
    "when every rank dies at once: at most the one in flight",
    spares=0,
    phase=["reduce", "optimizer"],
)
@pytest.mark.parametrize(
    ("world", "phase"), [(2, "forward"), (3, "backward"), (4, "reduce"), (2, "optimizer")]
)
@pytest.mark.parametrize("spares", [0, 1])
def test_every_worker_at_once(chaos: Chaos, world: int, phase: str, spares: int) -> None:
    """No live worker has the state: it comes from the agents, and one step at most is lost."""
    outcome = survives(chaos, Kill(rank="all", at_step=AT, phase=phase), nodes=world, spares=spares)
    assert any(record["source"].startswith("memory of ") for record in outcome.records("restored"))


@pytest.mark.slow
@pytest.mark.promise("fresh workers get a plan that names the copies, the newest first")
def test_every_worker_at_once_and_once_more(chaos: Chaos) -> None:
    """The second time, the copies are those of workers that were restored from copies."""
    faults = [Kill(rank="all", at_step=AT), Kill(rank="all", at_step=AT + 60)]
    survives(chaos, *faults, nodes=3, steps=80, until={"world": 3})


@pytest.mark.promise(
    "one node is gone at once: agent, workers, spares, and all that was in their memory", world=3
)
@pytest.mark.parametrize("world", [3, 4])
def test_all_workers_of_a_node(chaos: Chaos, world: int) -> None:
    """A node that has taken over a second rank is lost with both."""
    faults = [Kill(rank=world - 1, at_step=4), KillNode(rank=0, at_step=24)]
    # the spare is on the node of rank 0
    outcome = survives(chaos, *faults, nodes=world, steps=60, until={"spares": 1})
    node = victim(outcome, 1).rpartition(".")[0]
    lost = [
        record
        for record in outcome.records("detected")
        if record["worker"].rpartition(".")[0] == node
    ]
    assert len({record["rank"] for record in lost}) == 2


def test_two_nodes_at_once(chaos: Chaos) -> None:
    """Half of four nodes is lost at the same moment."""
    faults = [KillNode(rank=rank, at_step=AT, phase="reduce") for rank in (1, 2)]
    survives(chaos, *faults, nodes=4, steps=60)


@pytest.mark.promise(
    "attach to the next coordinator and say again what the last one may have taken with it",
    phase="reduce",
)
@pytest.mark.parametrize("phase", PHASES)
def test_the_coordinator_and_a_rank_in_the_same_step(chaos: Chaos, phase: str) -> None:
    """No coordinator can decide when a rank is lost: the next one learns of it from the agent."""
    faults = [
        KillCoordinator(rank=0, at_step=AT, phase=phase),
        Kill(rank=1, at_step=AT, phase=phase),
    ]
    survives(chaos, *faults, nodes=3, goal=happened(chaos, "resumed"))


@pytest.mark.promise("Ranks commit steps while there is no coordinator.")
def test_the_coordinator_again_and_again(chaos: Chaos) -> None:
    """Four coordinators are lost, and no rank regroups: training needs none while no rank is lost.

    None is lost in step 0: its shards are computed while the groups of the first world are built,
    for which ranks need a coordinator.
    """
    faults = [KillCoordinator(rank=0, at_step=step) for step in (1, 6, 14, 22)]
    outcome = is_left_alone(chaos, *faults, nodes=3, goal=happened(chaos, "resumed", len(faults)))
    assert [record["term"] for record in outcome.records("resumed")] == [2, 3, 4, 5]


@pytest.mark.promise("When the coordinator is lost, another one takes over.", after_s=0.2)
@pytest.mark.parametrize("after_s", [0.05, 0.2, 0.35])
def test_the_coordinator_at_a_time(chaos: Chaos, after_s: float) -> None:
    """The coordinator is lost at a time, wherever the ranks are in their steps."""
    is_left_alone(
        chaos, KillCoordinator(rank=1, after_s=after_s), nodes=2, goal=happened(chaos, "resumed")
    )
