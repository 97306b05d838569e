"""Tests that limits by control groups of version 2 have the effects of version 1; see
test_cgroup.py.

Many machines have their controllers in version 1, so that this is tried in a user-mode Linux.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import user_mode_linux
from user_mode_linux.limits import CONTROLLERS, MIB, WRITTEN_MIB

#: Of the first disk of a user-mode Linux.
DEVICE = "98:0"


@pytest.mark.slow
def test_every_limit_bites_and_is_lifted(tmp_path: Path) -> None:
    user_mode_linux.kernel()
    disk = tmp_path / "disk"
    with disk.open("wb") as file:
        file.truncate(8 * MIB)
    program = user_mode_linux.HERE / "limits.py"
    results = user_mode_linux.run(program, tmp_path, f"ubd0={disk}", f"CK_DISK={DEVICE}")
    assert set(results) == set(CONTROLLERS)
    for controller in CONTROLLERS:
        result = results[controller]
        assert (result.pop("version"), result.pop("possible"), result.pop("removed")) == (
            2,
            True,
            True,
        ), controller
    assert results["cpu"] == {"throttled": True, "lives": True}
    assert results["memory"] == {"status": -signal.SIGKILL, "kills": 1}
    assert results["pids"]["status"] == 7
    assert results["pids"]["refused"] >= 1
    assert results["freezer"] == {"frozen": True, "thawed": True, "lives": True}
    written = results["io"]
    assert (written["status"], written["written"]) == (0, WRITTEN_MIB * MIB)
    assert written["seconds"] > 0.6 * WRITTEN_MIB, "one MiB a second"
