"""The janitor: puts back what is left open in undo files of which neither runner nor guard is left."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from chaoskit.substrate.undo import files
from chaoskit.substrate.undo.entries import RepairOutcome
from chaoskit.substrate.undo.replay import Repair, describe, is_of_here, is_over, read, replay_file

_PATIENCE_S = 5.0


def sweep(directory: Path | None = None) -> list[Repair]:
    """Put back what killed runs have left behind. Touches nothing else, and nothing of a run that lives.

    What fails stays in its file, and is tried again by the next sweep; what cannot be read stays there for a person.

    Args:
        directory: a runtime directory; None for all that runs of this user may have used.
    """
    repairs, deadline_s = [], time.monotonic() + _PATIENCE_S  # for all files together
    for path in _paths(directory):
        try:
            with files.abandoned(path) as descriptor:
                if descriptor is not None:
                    repairs += _sweep(path, descriptor, max(0.0, deadline_s - time.monotonic()))
        except OSError as error:
            repairs.append(_unreadable(path, error))
    return repairs


def any_left(repairs: Iterable[Repair]) -> bool:
    """Whether something was not put back. A file that cannot be read is no sign of it: it may have held nothing."""
    return any(one.outcome == RepairOutcome.FAILED and one.act != "damaged" for one in repairs)


def left_behind(directory: Path | None = None) -> list[str]:
    """Return what :func:`sweep` would look at, in words; nothing is touched."""
    left = []
    for path in _paths(directory):
        try:
            with files.abandoned(path) as descriptor:
                if descriptor is None:
                    continue
                found = read(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
        except OSError as error:
            left.append(describe(_unreadable(path, error)))
            continue
        left += [
            f"{entry.act} {entry.target}"
            for entry in found.entries.values()
            if is_of_here(found.kernel)
        ]
        left += [f"{path}: {found.problem}"] if found.problem else []
    return left


def _paths(directory: Path | None) -> list[Path]:
    directories = dict.fromkeys(files.candidates() if directory is None else [directory])
    return [path for one in directories for path in files.listed(one)]


def _sweep(path: Path, descriptor: int, patience_s: float) -> list[Repair]:
    if not is_of_here(read(os.pread(descriptor, os.fstat(descriptor).st_size, 0)).kernel):
        return []  # of another container on this machine: its pids mean nothing here
    repairs, found = replay_file(descriptor, patience_s)
    if is_over(repairs, found):
        files.remove(path, descriptor)
    damage = (
        [Repair("damaged", str(path), RepairOutcome.FAILED, found.problem)] if found.problem else []
    )
    return repairs + damage


def _unreadable(path: Path, error: OSError) -> Repair:
    detail = f"{error.strerror or error}: nothing that it lists was put back; make it readable, or remove it"
    return Repair("damaged", str(path), RepairOutcome.FAILED, detail)
