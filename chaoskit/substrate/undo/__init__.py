"""Undo, written ahead: what must be put back is in a file before anything is broken, and two others read that file.

* The *runner* (pytest, ``chaoskit launch``) writes an entry before each act, and marks it when it has undone that
  (:mod:`.log`).
* The *guard*, a small process beside it, waits for the runner's end, and puts back what is still open (:mod:`.guard`).
* The *janitor* does the same where both are gone: every start of a run, and ``chaoskit cleanup`` (:mod:`.janitor`).

Each of runner and guard holds a shared lock on the file, which the kernel releases however a process ends; the janitor
touches only files that it can lock alone. All of it needs nothing but the standard library: it must work when the
environment is what broke.
"""

from chaoskit.substrate.undo.entries import (
    CgroupEntry,
    CommandEntry,
    ContainerEntry,
    ContinueEntry,
    DirectoryEntry,
    EndEntry,
    KillEntry,
    RepairOutcome,
    UndoEntry,
)
from chaoskit.substrate.undo.files import runtime_directory
from chaoskit.substrate.undo.janitor import any_left, left_behind, sweep
from chaoskit.substrate.undo.log import Undo, UndoLog, temporary_directory
from chaoskit.substrate.undo.replay import Repair, describe

__all__ = [
    "CgroupEntry",
    "CommandEntry",
    "ContainerEntry",
    "ContinueEntry",
    "DirectoryEntry",
    "EndEntry",
    "KillEntry",
    "Repair",
    "RepairOutcome",
    "Undo",
    "UndoEntry",
    "UndoLog",
    "any_left",
    "describe",
    "left_behind",
    "runtime_directory",
    "sweep",
    "temporary_directory",
]
