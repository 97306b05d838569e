"""Tests that delays by the kernel's netem and by chaoskit's queues are the same fault.

Many kernels have no netem, so the test runs in a user-mode Linux, a kernel that is a program. The
equality of both delays is tested in ``cluster/timing/test_machine_network.py``.
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
    """Each echo is counted on both kernels, and none is earlier than delay and jitter allow."""
    user_mode_linux.kernel()
    if reason := capabilities.delays():
        pytest.skip(reason)
    program = user_mode_linux.HERE / "delays.py"
    with_netem = user_mode_linux.run(program, tmp_path)
    assert with_netem["netem"], "the modules of user-mode Linux have netem"
    for delays in (with_netem, user_mode_linux.run_here(program)):
        assert delays["steady"]["quickest_ms"] >= 40 * LEAST, "twenty milliseconds each way"
        assert delays["jitter"]["quickest_ms"] >= 24 * LEAST, (
            "none comes earlier by more than eight each way"
        )
        for fault in ("steady", "jitter"):
            assert delays[fault]["packets"] >= 60, "each echo was counted"
