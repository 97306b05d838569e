"""Delays by the kernel's netem and by our own queues are the same fault.

The kernels of many machines have no netem, so there it is tried in a user-mode Linux: a kernel that is a program.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chaoskit.substrate import abilities

HERE = Path(__file__).parent / "user_mode_linux"
MODULES = Path("/usr/lib/uml/modules")
#: What "the same fault" means: the added delay differs by no more than this share.
AGREEMENT = 0.1


@pytest.fixture(scope="module")
def user_mode_linux() -> str:
    missing = [tool for tool in ("linux.uml", "modprobe", "busybox") if shutil.which(tool) is None]
    if missing or not MODULES.is_dir():
        reason = f"{', '.join(missing) or MODULES} not found: install user-mode-linux, kmod and busybox-static"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return str(shutil.which("linux.uml"))


def measured(output: str) -> dict[str, Any]:
    lines = [line for line in output.splitlines() if line.startswith("{")]
    assert lines, output
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def in_user_mode_linux(kernel: str, program: Path, directory: Path) -> dict[str, Any]:
    """What ``program`` prints there."""
    settings = {
        "CK_PYTHON": sys.executable,
        "CK_PROGRAM": str(program),
        "CK_PATH": os.pathsep.join(path for path in sys.path if path),
        "CK_MODULES": str(MODULES),
    }
    command = [kernel, "mem=512M", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", "quiet"]
    command += [f"init={HERE / 'init.sh'}", "con=null", "con0=null,fd:1", f"uml_dir={directory}"]
    command += [f"{name}={value}" for name, value in settings.items()]
    environment = {**os.environ, "TMPDIR": str(directory)}
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180, check=False, env=environment
    )
    return measured(done.stdout + done.stderr)


def on_this_kernel(program: Path) -> dict[str, Any]:
    command = [
        *(["unshare", *abilities.isolation()] if not abilities.privileged() else []),
        sys.executable,
        str(program),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return measured(done.stdout)


@pytest.mark.slow
def test_netem_and_our_queues_agree(user_mode_linux: str, tmp_path: Path) -> None:
    if reason := abilities.delays():
        pytest.skip(reason)
    program = HERE / "delays.py"
    theirs = in_user_mode_linux(user_mode_linux, program, tmp_path)
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
