"""Times of networks, on a machine that does nothing else."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import user_mode_linux

from chaoskit.substrate.limits import capabilities
from chaoskit.substrate.netns.substrate import NamespaceNetwork
from chaoskit.substrate.netns.switch import Switch
from chaoskit.substrate.undo import UndoLog

NODES = ("node0", "node1", "node2", "node3")
#: Largest relative difference of the added delays.
AGREEMENT = 0.1


def test_four_nodes_are_made_in_a_second() -> None:
    """Networks of their own are made in a second, so that an experiment starts as fast as without
    them.
    """
    if reason := capabilities.namespaces():
        pytest.skip(reason)
    undo = UndoLog()
    switch = Switch(undo, privileged=capabilities.privileged())
    try:
        begun_s = time.monotonic()
        network = NamespaceNetwork(switch, NODES, 0)
        took_s = time.monotonic() - begun_s
        for listener in network.listeners:
            listener.close()
        network.close()
    finally:
        switch.close()
        undo.close()
    assert took_s < 1.0


@pytest.mark.slow
def test_netem_and_our_queues_add_the_same_delay(tmp_path: Path) -> None:
    """The kernel's netem, in a user-mode Linux, and chaoskit's queues on this kernel add the same
    delay.
    """
    user_mode_linux.kernel()
    if reason := capabilities.delays():
        pytest.skip(reason)
    program = user_mode_linux.HERE / "delays.py"
    with_netem, with_queues = (
        user_mode_linux.run(program, tmp_path),
        user_mode_linux.run_here(program),
    )
    if with_queues["netem"]:
        pytest.skip("this kernel has netem, too: there is nothing to compare it with")
    added_ms = [
        times["steady"]["quickest_ms"] - times["plain_ms"] for times in (with_netem, with_queues)
    ]
    assert added_ms[1] == pytest.approx(added_ms[0], rel=AGREEMENT), (with_netem, with_queues)
    assert added_ms[1] == pytest.approx(40, rel=AGREEMENT), "twenty milliseconds each way"
    for times in (with_netem, with_queues):
        assert times["jitter"]["quickest_ms"] < 39, "some come earlier"
