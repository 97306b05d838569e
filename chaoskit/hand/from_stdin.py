"""Start of the hand without a copy of it: the source of its modules comes on the standard input.

The text of this file is a program: ``python3 -I -S -c TEXT SIZE --processes``. It reads as many
bytes, a JSON object of module -> source, imports them, and serves the rest of the input.

-> attach/hands/exec_hand.py sends it into the container of a target.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from typing import Any

_PACKAGE = "hand"
#: The program ends if its source has not arrived by then. The hand sets this alarm anew.
_ARRIVES_S = 10


class SourceFinder(MetaPathFinder, InspectLoader):
    """Finds modules by their names in a mapping of sources; an ``__init__`` is a package."""

    def __init__(self, sources: dict[str, str]) -> None:
        self._sources = sources

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the specification of a module; None for one that is not in the mapping."""
        is_package = self.is_package(fullname)
        if not is_package and fullname not in self._sources:
            return None
        return spec_from_loader(fullname, self, is_package=is_package)

    def is_package(self, fullname: str) -> bool:
        """Return whether a module is a package."""
        return f"{fullname}.__init__" in self._sources

    def get_source(self, fullname: str) -> str:
        """Return the source of a module."""
        return self._sources[f"{fullname}.__init__" if self.is_package(fullname) else fullname]


def main() -> int:
    """Read the modules, run the hand, and return its exit status."""
    signal.alarm(_ARRIVES_S)
    missing_bytes, parts = int(sys.argv.pop(1)), []
    while missing_bytes > 0:
        part = os.read(0, missing_bytes)
        if not part:
            return 1
        parts.append(part)
        missing_bytes -= len(part)
    sys.meta_path.insert(0, SourceFinder(json.loads(b"".join(parts))))
    status: int = importlib.import_module(f"{_PACKAGE}.__main__").main()
    return status


if __name__ == "__main__":
    sys.exit(main())
