"""Backends of actions that other installed distributions provide by entry point.

-> ``cluster/nodes.py``: two backends for one action are refused. ``registry.py``: whole substrates
of other distributions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from chaoskit.errors import HarnessError
from chaoskit.substrate.core.actions import Action, Backend
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.undo import UndoLog

#: Group of entry points. Each names a factory that makes a backend for a :class:`BackendPlace`, or
#: returns None where it has none. The factory's attribute ``actions`` lists its kinds of actions.
BACKENDS = "chaoskit.backends"


@dataclass(frozen=True, slots=True)
class BackendPlace:
    """The run that a backend is made for.

    Attributes:
        substrate: name of the substrate.
        undo: log that undo entries are written to first.
        processes: returns the live processes of a node; the root of the others comes first.
        run_directory: directory of the run.
    """

    substrate: str
    undo: UndoLog
    processes: Callable[[str], list[Process]]
    run_directory: Path


def has_external_backend(action: type[Action]) -> bool:
    """Return whether another installed distribution has a backend for this kind of action.

    Raises ImportError or AttributeError if the factory of one of them cannot be loaded.
    """
    return any(
        action in getattr(entry_point.load(), "actions", ())
        for entry_point in entry_points(group=BACKENDS)
    )


def external_backends(place: BackendPlace) -> Iterator[Backend]:
    """Yield the backends of other installed distributions for one run, sorted by entry point.

    A distribution whose factory returns None adds no backend.

    Raises:
        HarnessError: if one of them cannot be imported.
    """
    for entry_point in sorted(entry_points(group=BACKENDS)):
        try:
            make_backend: Callable[[BackendPlace], Backend | None] = entry_point.load()
        except (ImportError, AttributeError) as error:
            raise HarnessError(
                f"the backend {entry_point.value} cannot be loaded: {error}"
            ) from error
        backend = make_backend(place)
        if backend is not None:
            yield backend
