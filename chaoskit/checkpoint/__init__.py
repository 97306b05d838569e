"""State that outlives a process: its layout, its seals, its copies, and the tiers that keep them.

The names here are those that a training script needs. Each is imported when it is first used,
because ``torch.distributed.checkpoint`` takes most of a second to import and agents do not need it.

-> ``daemon/saving.py`` and ``daemon/archive.py``: a node of a running job stores and uploads.
-> ``runtime/step/restore.py``: a rank that lacks the state reads it back.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chaoskit.checkpoint.dcp import (
        Restored,
        SaveFailed,
        SnapshotReader,
        SnapshotWriter,
        restore,
    )
    from chaoskit.checkpoint.disk.inventory import NothingToRestore
    from chaoskit.checkpoint.disk.retention import Retention
    from chaoskit.checkpoint.disk.snapshot import Snapshot
    from chaoskit.checkpoint.disk.tier import DiskTier
    from chaoskit.checkpoint.layout.manifest import Damaged
    from chaoskit.checkpoint.remote.tier import RemoteTier
    from chaoskit.checkpoint.remote.uploader import Uploader

_HOMES = {
    "Damaged": "layout.manifest",
    "DiskTier": "disk.tier",
    "NothingToRestore": "disk.inventory",
    "RemoteTier": "remote.tier",
    "Restored": "dcp",
    "Retention": "disk.retention",
    "SaveFailed": "dcp",
    "Snapshot": "disk.snapshot",
    "SnapshotReader": "dcp",
    "SnapshotWriter": "dcp",
    "Uploader": "remote.uploader",
    "restore": "dcp",
}

__all__ = [
    "Damaged",
    "DiskTier",
    "NothingToRestore",
    "RemoteTier",
    "Restored",
    "Retention",
    "SaveFailed",
    "Snapshot",
    "SnapshotReader",
    "SnapshotWriter",
    "Uploader",
    "restore",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
