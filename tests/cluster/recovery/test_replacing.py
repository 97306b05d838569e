"""Lost nodes are replaced because the run's settings say so, not by a fault."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from chaoskit.errors import BadInput, HarnessError
from chaoskit.experiment.injection.replacing import NodeReplacer
from chaoskit.journal import Journal, Record
from chaoskit.pytest_plugin import Chaos
from chaoskit.runlog.outcome import Outcome
from chaoskit.substrate.core.base import Cluster
from chaoskit.suites.goals import all_took_effect
from chaoskit.suites.recovery.expect import AT, STEADY
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import Heartbeat, NodeLost
from faults import Fault, FreezeNode, KillAgent, KillNode, LoseNode, Rack, ReplaceNode

netns = pytest.mark.chaos(substrate="netns")


def run(chaos: Chaos, *faults: Fault, replaces: int, **plan: Any) -> Outcome:
    """Run a job until ``replaces`` nodes are replaced and the world is full again, for at least 20
    steps.
    """
    goal = all_took_effect(chaos, len(faults), replaced=replaces)
    settings = {"nodes": 3, "spares": 0, "steps": 20, "deadline_s": 90.0} | plan
    until = goal.until | {"world": settings["nodes"]}
    outcome = chaos.run(STEADY, faults=faults, watch=goal, until=until, **settings)
    assert outcome.lost_steps == outcome.false_alarms == 0
    return outcome


def replaced(outcome: Outcome) -> list[str]:
    return [str(record["node"]) for record in outcome.records(Event.NODE_REPLACED)]


def lost(outcome: Outcome) -> list[Record]:
    return list(outcome.records(Event.NODE_LOST))


@pytest.mark.promise("`node_replacements=2` has two of them replaced, whatever took them")
@pytest.mark.parametrize(
    "fault", [KillNode(rank=1, at_step=AT), KillAgent(rank=1, at_step=AT)], ids=str
)
def test_a_lost_node_is_replaced(chaos: Chaos, fault: Fault) -> None:
    """A replacement, which begins with empty memory, takes part in the run."""
    outcome = run(chaos, fault, replaces=1, node_replacements=1)
    (gone,) = lost(outcome)
    assert replaced(outcome) == [gone["node"]]
    outcome.assert_same_losses_as_twin()


@netns
def test_a_silent_node_is_replaced_on_a_network_that_works(chaos: Chaos) -> None:
    outcome = run(chaos, LoseNode(rank=1, at_step=AT), replaces=1, node_replacements=1)
    (gone,) = lost(outcome)
    assert replaced(outcome) == [gone["node"]]


def test_no_more_are_replaced_than_the_run_says(chaos: Chaos) -> None:
    """Two nodes are lost and one is replaced: the other rank starts on a node that is still there."""
    outcome = run(
        chaos, Rack(rank=0, at_step=AT), replaces=1, nodes=4, rack_nodes=2, node_replacements=1
    )
    assert len(lost(outcome)) == 2
    assert len(replaced(outcome)) == 1


def test_a_node_that_stands_still_is_not_replaced_and_comes_back(chaos: Chaos) -> None:
    """A frozen node is not replaced, because two nodes would have its name; the reason is reported
    once.
    """
    outcome = run(
        chaos, FreezeNode(rank=1, at_step=AT, thaw_after_s=3.0), replaces=0, node_replacements=1
    )
    assert replaced(outcome) == []
    (failed,) = outcome.records(Event.REPLACEMENT_FAILED)
    assert "still has processes" in failed["reason"]


class Nodes:
    """A cluster that only replaces nodes, and records the replacements.

    Args:
        ending: number of attempts that find a living process of the lost node.
    """

    def __init__(self, ending: int = 0) -> None:
        self.ending = ending
        self.started: list[str] = []
        self.again = asyncio.Event()

    async def replace(self, node: str) -> None:
        if self.ending:
            self.ending -= 1
            raise HarnessError(f"{node} still has processes")
        if self.started:
            self.again.set()
        self.started.append(node)


def test_one_that_is_lost_before_it_is_heard_is_replaced_again(tmp_path: Path) -> None:
    """A replacement that is lost before it joins is replaced again, though the coordinator reports
    no loss.
    """

    async def story() -> list[str]:
        nodes, journal = Nodes(), Journal(tmp_path, "harness")
        replacer = NodeReplacer(cast("Cluster", nodes), 1, journal, join_s=0.01)
        replacer.hear(NodeLost("node1", "silent"))
        await nodes.again.wait()
        replacer.hear(Heartbeat("node1", ()))
        attempts = len(nodes.started)
        await asyncio.sleep(0.05)
        assert len(nodes.started) == attempts
        replacer.hear(NodeLost("node1", "silent"))
        assert len(nodes.started) == attempts  # one replacement a run
        await replacer.close()
        return nodes.started

    assert set(asyncio.run(story())) == {"node1"}


def test_one_whose_last_process_is_just_ending_is_replaced_at_once(tmp_path: Path) -> None:
    """A node with a last process just ending is replaced at once: a longer pause would cost
    steps.
    """

    async def story() -> None:
        replacer = NodeReplacer(
            cast("Cluster", nodes), 1, Journal(tmp_path, "harness"), join_s=0.01
        )
        replacer.hear(NodeLost("node1", "its connection closed"))
        async with asyncio.timeout(0.8):
            await nodes.again.wait()
        await replacer.close()

    nodes = Nodes(ending=1)
    asyncio.run(story())


def test_by_default_a_lost_node_stays_lost(chaos: Chaos) -> None:
    outcome = run(chaos, KillNode(rank=1, at_step=AT), replaces=0)
    assert replaced(outcome) == []
    assert {member["node"] for member in outcome.records(Event.PLAN)[-1]["members"]} == {
        "node0",
        "node2",
    }


def test_a_fault_that_brings_a_node_is_refused_beside_it(chaos: Chaos) -> None:
    with pytest.raises(BadInput, match=r"node_replacements=1: .*ReplaceNode brings"):
        chaos.run(
            STEADY, nodes=3, steps=20, faults=[ReplaceNode(rank=1, at_step=AT)], node_replacements=1
        )
