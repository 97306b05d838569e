"""Tests of guard rails at a strike, for the nodes of an attached run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chaoskit.attach.guards.guard_rails import PROTECTED, GuardRails
from chaoskit.attach.jobs.pod_state import PodState
from chaoskit.attach.run.cluster import AttachedCluster, RunGuards
from chaoskit.faults import Cut, DrainMachine

#: The pods of four nodes; the last two are on one machine.
PODS = {
    "llama-0": PodState("a", "llama-0", node="machine-0"),
    "llama-1": PodState("b", "llama-1", node="machine-1"),
    "llama-2": PodState("c", "llama-2", node="machine-2"),
    "llama-3": PodState("d", "llama-3", node="machine-2", labels={PROTECTED[0]: "yes"}),
}


def cluster_of(rails: GuardRails) -> AttachedCluster:
    nodes: Any = {name: SimpleNamespace(pod=pod) for name, pod in PODS.items()}
    nothing: Any = None
    guards = RunGuards(rails, lambda: "")
    return AttachedCluster(nodes, nothing, nothing, (), nothing, Path(), guards)


@pytest.mark.parametrize(
    ("nodes", "actions", "reason"),
    [
        (["llama-0", "llama-1"], Cut.needs, ""),
        (["llama-0", "llama-3"], Cut.needs, "llama-3: pod llama-3 has the label"),
        (["llama-0", "llama-1", "llama-2"], Cut.needs, "llama-2: it would be node 3 of 2"),
        (["llama-2"], DrainMachine.needs, "llama-3: pod llama-3 has the label"),
    ],
)
def test_each_node_that_a_fault_strikes_is_guarded(
    nodes: list[str], actions: Any, reason: str
) -> None:
    spared = cluster_of(GuardRails(max_nodes=2)).why_spared(nodes, actions)
    assert spared[: len(reason) or None] == reason


def test_nodes_of_a_fault_that_is_refused_are_not_struck() -> None:
    cluster = cluster_of(GuardRails(max_nodes=2))
    assert cluster.why_spared(["llama-0", "llama-3"], Cut.needs)
    assert not cluster.why_spared(["llama-1", "llama-2"], Cut.needs)
    assert cluster.why_spared(["llama-0"], Cut.needs)
