"""Commands of the system, found also where a user's PATH leaves out the administrator's directories."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

_ALSO = ("/usr/local/sbin", "/usr/sbin", "/sbin")
_COMMAND_S = 10.0


def find(name: str) -> str | None:
    """Where the command lies; None where it is not installed."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), *_ALSO]))


def call(command: Sequence[str], script: str = "") -> subprocess.CompletedProcess[bytes]:
    """Run a command with ``script`` as its input.

    Raises:
        FileNotFoundError: if it is not installed. TimeoutExpired: if it does not end.
    """
    path = find(command[0]) or command[0]
    return subprocess.run(
        [path, *command[1:]],
        input=script.encode(),
        capture_output=True,
        timeout=_COMMAND_S,
        check=False,
    )
