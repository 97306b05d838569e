"""Limits by control groups of version 2 do what those of version 1 do; see test_cgroup.py.

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
    found = user_mode_linux.run(program, tmp_path, f"ubd0={disk}", f"CK_DISK={DEVICE}")
    assert set(found) == set(CONTROLLERS)
    for controller in CONTROLLERS:
        told = found[controller]
        assert (told.pop("version"), told.pop("possible"), told.pop("removed")) == (
            2,
            True,
            True,
        ), controller
    assert found["cpu"] == {"throttled": True, "lives": True}
    assert found["memory"] == {"status": -signal.SIGKILL, "kills": 1}
    assert found["pids"]["status"] == 7
    assert found["pids"]["refused"] >= 1
    assert found["freezer"] == {"frozen": True, "thawed": True, "lives": True}
    written = found["io"]
    assert (written["status"], written["written"]) == (0, WRITTEN_MIB * MIB)
    assert written["seconds"] > 0.6 * WRITTEN_MIB, "one MiB a second"
