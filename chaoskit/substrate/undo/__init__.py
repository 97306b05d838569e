"""Write-ahead undo log: each change is recorded with its undo before it is made.

* The *runner* (pytest, ``chaoskit launch``) writes an entry before each act, and marks it once the
  act is undone (:mod:`.log`).
* The *guard*, a small process beside the runner, waits for the runner's end and then undoes the
  open entries (:mod:`.guard`).
* The *janitor* does the same if both are gone. It runs at every start of a run and in ``chaoskit
  cleanup`` (:mod:`.janitor`).

Runner and guard each hold a shared lock on the file, which the kernel releases however a process
ends. The janitor touches only files that it can lock exclusively. The package needs only the
standard library: it must work when the environment is what broke.

-> :mod:`.entries`: what can be undone. :mod:`.replay`: in which order, and how often it is tried.
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
