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
#: What "the same fault" means: the added delay differs by no more than this share.
AGREEMENT = 0.1


def test_four_nodes_are_made_in_a_second() -> None:
    """Networks of their own are quick to make: an experiment on them starts as fast as without."""
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
    """The kernel's netem, in a user-mode Linux, and our own queues on this kernel add the delay that was asked for."""
    user_mode_linux.kernel()
    if reason := capabilities.delays():
        pytest.skip(reason)
    program = user_mode_linux.HERE / "delays.py"
    theirs, ours = user_mode_linux.run(program, tmp_path), user_mode_linux.run_here(program)
    if ours["netem"]:
        pytest.skip("this kernel has netem, too: there is nothing to compare it with")
    added_ms = [found["steady"]["quickest_ms"] - found["plain_ms"] for found in (theirs, ours)]
    assert added_ms[1] == pytest.approx(added_ms[0], rel=AGREEMENT), (theirs, ours)
    assert added_ms[1] == pytest.approx(40, rel=AGREEMENT), "twenty milliseconds each way"
    for found in (theirs, ours):
        assert found["jitter"]["quickest_ms"] < 39, "some come earlier"
