"""Short name ``faults`` of the package ``chaoskit.faults``: both names load a module once.

chaoskit itself imports ``chaoskit.faults``, since a project may have a package ``faults`` of its
own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

SHORT = "faults"
LONG = "chaoskit.faults"


class _SharedModules:
    """Finder and loader that resolves ``faults.x`` to the module ``chaoskit.faults.x``."""

    def __init__(self) -> None:
        self._own_specs: dict[str, ModuleSpec | None] = {}  # by name of the module

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec if ``faults`` is this package and has the module; else None.

        A package ``faults`` of the project is thus left to other finders.
        """
        is_ours = fullname.startswith(f"{SHORT}.") and sys.modules.get(SHORT) is sys.modules[LONG]
        if not is_ours or find_spec(LONG + fullname.removeprefix(SHORT)) is None:
            return None
        return ModuleSpec(fullname, self)  # type: ignore[arg-type] # a loader needs no base class

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module that the long name has."""
        module = import_module(LONG + spec.name.removeprefix(SHORT))
        self._own_specs[module.__name__] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec again: the import system has replaced it."""
        module.__spec__ = self._own_specs.pop(module.__name__)


def share_modules() -> None:
    """Make ``faults``, which is being imported, another name of ``chaoskit.faults``."""
    sys.modules[SHORT] = import_module(LONG)
    sys.meta_path.insert(0, _SharedModules())
