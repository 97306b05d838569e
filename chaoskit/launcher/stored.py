"""Stored snapshots of a job: the newest one, from which it can go on after the loss of every node.

-> ``checkpoint/newest.py``: which snapshot a run really begins with.
``runtime/state/from_store.py``: how it is read.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from chaoskit.checkpoint.disk.names import parse_name
from chaoskit.config import CheckpointTier, RunConfig
from chaoskit.journal import Record, read_tail
from chaoskit.process.host_checks import answer_within
from chaoskit.vocabulary import Event

_DISK_ANSWER_S = 5.0


class Stored(msgspec.Struct, frozen=True):
    """The newest snapshot of a job.

    Attributes:
        tier: ``disk`` or ``remote``.
        path: a directory for ``disk``, or a URL for ``remote``.
        age_s: the seconds from its completion to now.
    """

    step: int
    tier: str
    path: str
    age_s: float


def look_at_stored(config: RunConfig, journals: Path) -> tuple[Stored | None, str]:
    """Return the newest snapshot of the job and "", or None and the reason why there is none.

    Only the names of snapshots are read, so a snapshot may be damaged. The remote tier is not
    asked, because the uploads of this run are known. A disk that does not answer within 5 s counts
    as unreadable, and nothing is raised.
    """
    if config.disk is None:
        return None, "no directory for snapshots was given (--checkpoints DIR, disk=)"
    records = [
        record for record in read_tail(journals) if record.event in (Event.SAVED, Event.SAVE_FAILED)
    ]
    snapshots = [_uploaded(records)]
    trouble = ""
    try:
        target = Path(config.disk.target)
        snapshots.insert(0, answer_within(_DISK_ANSWER_S, lambda: _on_disk(target)))
    except OSError as error:
        trouble = f"{config.disk.target} cannot be read: {error}"
    newest = max(
        (snapshot for snapshot in snapshots if snapshot is not None),
        key=lambda snapshot: snapshot.step,
        default=None,
    )
    return (
        (newest, "")
        if newest is not None
        else (None, trouble or _missing_reason(config.disk, records))
    )


def _on_disk(root: Path) -> Stored | None:
    """Return the newest snapshot on disk; None if there is none."""
    try:
        paths = {
            snapshot_id: path
            for path in root.iterdir()
            if (snapshot_id := parse_name(path.name)) is not None
        }
    except FileNotFoundError:
        return None
    for snapshot_id in sorted(paths, reverse=True):
        try:
            written_s = paths[snapshot_id].stat().st_mtime  # the manifest is written last
        except FileNotFoundError:
            continue  # deleted in the meantime
        return Stored(
            snapshot_id[0],
            "disk",
            str(paths[snapshot_id]),
            round(max(0.0, time.time() - written_s), 3),
        )
    return None


def _uploaded(records: list[Record]) -> Stored | None:
    """Return the newest snapshot that this run has uploaded; None if there is none."""
    uploads = [
        record for record in records if record.event == Event.SAVED and record["tier"] == "remote"
    ]
    newest = max(uploads, key=lambda record: int(record["step"]), default=None)
    if newest is None:
        return None
    age_s = (time.monotonic_ns() - newest.t_ns) / 1e9
    return Stored(newest["step"], "remote", newest["path"], round(age_s, 3))


def _missing_reason(tier: CheckpointTier, records: list[Record]) -> str:
    """Return why there is no snapshot."""
    failed = [record for record in records if record.event == Event.SAVE_FAILED]
    if failed:
        return f"no snapshot could be written: {failed[-1]['reason']}"
    intervals = [f"{tier.every_steps} steps"] if tier.every_steps else []
    intervals += [f"{tier.every_s:g} s"] if tier.every_s else []
    return (
        f"the first snapshot was not complete yet: one is due every {' or every '.join(intervals)}"
    )
