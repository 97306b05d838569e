"""Delays by the kernel's netem and by our own queues are the same fault.

The kernels of many machines have no netem, so there it is tried in a user-mode Linux: a kernel that is a program.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import user_mode_linux

from chaoskit.substrate import abilities

#: What "the same fault" means: the added delay differs by no more than this share.
AGREEMENT = 0.1


def on_this_kernel(program: Path) -> dict[str, Any]:
    command = [
        *(["unshare", *abilities.isolation()] if not abilities.privileged() else []),
        sys.executable,
        str(program),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return user_mode_linux.measured(done.stdout)


@pytest.mark.slow
def test_netem_and_our_queues_agree(tmp_path: Path) -> None:
    user_mode_linux.kernel()
    if reason := abilities.delays():
        pytest.skip(reason)
    program = user_mode_linux.HERE / "delays.py"
    theirs = user_mode_linux.run(program, tmp_path)
    assert theirs["netem"], "the modules of user-mode Linux have netem"
    ours = on_this_kernel(program)
    if ours["netem"]:
        pytest.skip("this kernel has netem, too: there is nothing to compare it with")
    added_ms = [found["steady"]["quickest_ms"] - found["plain_ms"] for found in (theirs, ours)]
    assert added_ms[1] == pytest.approx(added_ms[0], rel=AGREEMENT), (theirs, ours)
    assert added_ms[1] == pytest.approx(40, rel=AGREEMENT), "twenty milliseconds each way"
    for found in (theirs, ours):
        assert 24 < found["jitter"]["quickest_ms"] < 39, "some come earlier, none by more than eight each way"
        for fault in ("steady", "jitter"):
            assert found[fault]["packets"] >= 60, "each echo was counted"
