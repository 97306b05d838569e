"""The janitor: undoes the open entries of undo files whose runner and guard are both gone.

-> ``undo/replay.py``: how they are undone. ``cluster/supervised.py`` calls it at the start of a
substrate, and ``cli/machine/cleanup.py`` for ``chaoskit cleanup``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from chaoskit.substrate.undo import files
from chaoskit.substrate.undo.entries import RepairOutcome
from chaoskit.substrate.undo.replay import (
    Repair,
    describe,
    has_known_pids,
    is_over,
    read,
    replay_file,
)

_PATIENCE_S = 5.0


def sweep(directory: Path | None = None) -> list[Repair]:
    """Undo what killed runs have left behind, and return the outcomes. Live runs are not touched.

    An entry that cannot be undone is tried again for up to 5 s, stays in its file, and is tried by
    the next sweep. A file that cannot be read is kept and reported as ``damaged``. A file with pids
    of another container of this machine is kept and not reported.

    Args:
        directory: a runtime directory; None for all that runs of this user may have used.
    """
    repairs, deadline_s = [], time.monotonic() + _PATIENCE_S  # for all files together
    for path in _paths(directory):
        try:
            with files.locked_if_abandoned(path) as descriptor:
                if descriptor is not None:
                    repairs += _sweep_file(
                        path, descriptor, max(0.0, deadline_s - time.monotonic())
                    )
        except OSError as error:
            repairs.append(_unreadable(path, error))
    return repairs


def any_left(repairs: Iterable[Repair]) -> bool:
    """Return whether an undo failed.

    A file that cannot be read does not count, as it may have held nothing.
    """
    return any(
        repair.outcome == RepairOutcome.FAILED and repair.act != "damaged" for repair in repairs
    )


def left_behind(directory: Path | None = None) -> list[str]:
    """Return descriptions of what :func:`sweep` would handle, one for each open entry or bad file.

    Nothing is changed.
    """
    descriptions = []
    for path in _paths(directory):
        try:
            with files.locked_if_abandoned(path) as descriptor:
                if descriptor is None:
                    continue
                undo_file = read(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
        except OSError as error:
            descriptions.append(describe(_unreadable(path, error)))
            continue
        descriptions += [
            f"{entry.act} {entry.target}"
            for entry in undo_file.entries.values()
            if has_known_pids(undo_file.kernel)
        ]
        descriptions += [f"{path}: {undo_file.problem}"] if undo_file.problem else []
    return descriptions


def _paths(directory: Path | None) -> list[Path]:
    """Return the undo files of a runtime directory; None for all that this user may have."""
    directories = dict.fromkeys(files.candidates() if directory is None else [directory])
    return [
        path for runtime_directory in directories for path in files.undo_files(runtime_directory)
    ]


def _sweep_file(path: Path, descriptor: int, patience_s: float) -> list[Repair]:
    """Undo the open entries of an abandoned file, and return the outcomes.

    The file is removed if nothing of it is left to do. A file with pids of another container is not
    touched, and has no outcomes.
    """
    if not has_known_pids(read(os.pread(descriptor, os.fstat(descriptor).st_size, 0)).kernel):
        return []  # written in another container of this machine, with pids of its own
    repairs, undo_file = replay_file(descriptor, patience_s)
    if is_over(repairs, undo_file):
        files.remove(path, descriptor)
    damage = (
        [Repair("damaged", str(path), RepairOutcome.FAILED, undo_file.problem)]
        if undo_file.problem
        else []
    )
    return repairs + damage


def _unreadable(path: Path, error: OSError) -> Repair:
    """Return the report about a file that cannot be read."""
    detail = (
        f"{error.strerror or error}: its entries were not undone; make it readable, or remove it"
    )
    return Repair("damaged", str(path), RepairOutcome.FAILED, detail)
