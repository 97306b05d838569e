"""Delays by the kernel's netem and by our own queues are the same fault.

The kernels of many machines have no netem, so there it is tried in a user-mode Linux: a kernel that is a program. That
both delays are equally long is a matter of time: see ``cluster/timing/test_machine_network.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import user_mode_linux

from chaoskit.substrate.limits import capabilities

#: A packet is not earlier than this share of its delay: each kernel counts time in ticks of its own.
LEAST = 0.9


@pytest.mark.slow
def test_netem_and_our_queues_agree(tmp_path: Path) -> None:
    """On both kernels each echo is counted, and none is earlier than delay and jitter allow."""
    user_mode_linux.kernel()
    if reason := capabilities.delays():
        pytest.skip(reason)
    program = user_mode_linux.HERE / "delays.py"
    theirs = user_mode_linux.run(program, tmp_path)
    assert theirs["netem"], "the modules of user-mode Linux have netem"
    for found in (theirs, user_mode_linux.run_here(program)):
        assert found["steady"]["quickest_ms"] >= 40 * LEAST, "twenty milliseconds each way"
        assert found["jitter"]["quickest_ms"] >= 24 * LEAST, (
            "none comes earlier by more than eight each way"
        )
        for fault in ("steady", "jitter"):
            assert found[fault]["packets"] >= 60, "each echo was counted"
