"""Backends and substrates that other installed distributions bring, by entry point."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from chaoskit.errors import HarnessError
from chaoskit.substrate.core.actions import Action, Backend
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.undo import UndoLog

#: Entry points of this group name what makes a backend of a :class:`BackendPlace`, or None where it has none there. Its
#: attribute ``actions`` says which kinds of actions that does.
BACKENDS = "chaoskit.backends"


@dataclass(frozen=True, slots=True)
class BackendPlace:
    """The run for which a backend is made.

    Attributes:
        substrate: its name.
        undo: what must be put back is written there first.
        processes: gives the live processes of a node, the first one first.
        run_directory: of the run.
    """

    substrate: str
    undo: UndoLog
    processes: Callable[[str], list[Process]]
    run_directory: Path


def is_brought(action: type[Action]) -> bool:
    """Whether another distribution has a backend that names this kind of action."""
    return any(
        action in getattr(entry.load(), "actions", ()) for entry in entry_points(group=BACKENDS)
    )


def brought_backends(place: BackendPlace) -> Iterator[Backend]:
    """The backends of other distributions for one run.

    Raises:
        HarnessError: if one of them cannot be imported.
    """
    for entry in sorted(entry_points(group=BACKENDS)):
        try:
            make: Callable[[BackendPlace], Backend | None] = entry.load()
        except (ImportError, AttributeError) as error:
            raise HarnessError(f"the backend {entry.value} cannot be loaded: {error}") from error
        backend = make(place)
        if backend is not None:
            yield backend
