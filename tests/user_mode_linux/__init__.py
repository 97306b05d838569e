"""A Linux kernel that is a program: for what the kernel of this machine lacks.

Its root is this machine, read-only.
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

from chaoskit.substrate.limits import capabilities

HERE = Path(__file__).parent
MODULES = Path("/usr/lib/uml/modules")
LIMIT_S = 180


def kernel() -> str:
    """Where it lies. Skips where it is not installed; on CI it must be."""
    missing = [tool for tool in ("linux.uml", "modprobe", "busybox") if shutil.which(tool) is None]
    if missing or not MODULES.is_dir():
        reason = f"{', '.join(missing) or MODULES} not found: install user-mode-linux, kmod and busybox-static"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return str(shutil.which("linux.uml"))


def run(program: Path, directory: Path, *options: str) -> dict[str, Any]:
    """What ``program`` prints there.

    ``directory`` is for the kernel's own files; ``options`` are the kernel's.
    """
    settings = {
        "CK_PYTHON": sys.executable,
        "CK_PROGRAM": str(program),
        "CK_PATH": os.pathsep.join(path for path in sys.path if path),
        "CK_MODULES": str(MODULES),
    }
    command = [
        kernel(),
        "mem=512M",
        "root=/dev/root",
        "rootfstype=hostfs",
        "rootflags=/",
        "ro",
        "quiet",
    ]
    command += [
        f"init={HERE / 'init.sh'}",
        "con=null",
        "con0=null,fd:1",
        f"uml_dir={directory}",
        *options,
    ]
    command += [f"{name}={value}" for name, value in settings.items()]
    environment = {**os.environ, "TMPDIR": str(directory)}
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=environment,
    )
    return measured(done.stdout + done.stderr)


def run_here(program: Path) -> dict[str, Any]:
    """What ``program`` prints on the kernel of this machine."""
    isolation = ["unshare", *capabilities.isolation()] if not capabilities.privileged() else []
    command = [*isolation, sys.executable, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return measured(done.stdout)


def measured(output: str) -> dict[str, Any]:
    """The last line of JSON."""
    lines = [line for line in output.splitlines() if line.startswith("{")]
    assert lines, output
    found: dict[str, Any] = json.loads(lines[-1])
    return found
