"""Scripts in front of ``nft`` and ``tc``, by which a test lets their calls fail, hang or wait.

-> ``support/hand/client.py`` starts the hand that finds them first.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


class ToolTrouble:
    """Trouble of a tool, which lasts while a file exists. It begins with the trouble.

    Args:
        folder: an empty folder for the scripts.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._switch = folder / "trouble"
        self._switch.touch()
        self.calls = folder / "calls"
        self.prefix = ("env", f"PATH={folder}:{os.environ['PATH']}")

    def add(self, tool: str, part: str, act: str) -> None:
        """Have a shell carry out ``act`` before the tool, in each call whose arguments have a part.

        Args:
            tool: name of the tool.
            part: the part; "" for all calls.
            act: commands of the shell. ``$real`` is the path of the tool.
        """
        script = self._folder / tool
        script.write_text(
            "#!/bin/sh\n"
            f"real={shutil.which(tool)}\n"
            f'case "$*" in *"{part}"*)\n'
            f'  if [ -e "{self._switch}" ]; then echo "$*" >>"{self.calls}"; {act}; fi;;\n'
            "esac\n"
            'exec "$real" "$@"\n'
        )
        script.chmod(0o755)

    def count(self) -> int:
        """Return the number of calls that had the trouble so far."""
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0

    def end(self) -> None:
        """Let all further calls pass."""
        self._switch.unlink()
