"""Lookup and calls of system commands.

The administrator's directories, which a user's PATH may lack, are searched, too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

_ADMIN_DIRECTORIES = ("/usr/local/sbin", "/usr/sbin", "/sbin")
_COMMAND_S = 10.0


def find(name: str) -> str | None:
    """Return the path of a command; None if it is not installed."""
    return shutil.which(
        name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), *_ADMIN_DIRECTORIES])
    )


def call(command: Sequence[str], script: str = "") -> subprocess.CompletedProcess[bytes]:
    """Run a command with ``script`` as its standard input, and return its status and its output.

    A status other than 0 raises nothing.

    Raises:
        FileNotFoundError: if the command is not installed.
        OSError: if it cannot be executed for another reason.
        TimeoutExpired: if the command does not end within 10 s.
    """
    path = find(command[0]) or command[0]
    return subprocess.run(
        [path, *command[1:]],
        input=script.encode(),
        capture_output=True,
        timeout=_COMMAND_S,
        check=False,
    )
