"""What is stored of a job: from which step it can go on when every node of it is lost."""

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
        path: a directory, or a URL.
        age_s: since it was complete.
    """

    step: int
    tier: str
    path: str
    age_s: float


def look_at_stored(config: RunConfig, journals: Path) -> tuple[Stored | None, str]:
    """Return the newest snapshot of the job, or None and the reason why there is none.

    The names of snapshots are read, and not their files. The remote tier is not asked: what this run uploaded is known.
    """
    if config.disk is None:
        return None, "no directory for snapshots was given (--checkpoints DIR, disk=)"
    records = [
        record for record in read_tail(journals) if record.event in (Event.SAVED, Event.SAVE_FAILED)
    ]
    found = [_uploaded(records)]
    trouble = ""
    try:
        target = Path(config.disk.target)
        found.insert(0, answer_within(_DISK_ANSWER_S, lambda: _on_disk(target)))
    except OSError as error:
        trouble = f"{config.disk.target} cannot be read: {error}"
    newest = max((one for one in found if one is not None), key=lambda one: one.step, default=None)
    return (
        (newest, "")
        if newest is not None
        else (None, trouble or _why_nothing(config.disk, records))
    )


def _on_disk(root: Path) -> Stored | None:
    try:
        there = {age: path for path in root.iterdir() if (age := parse_name(path.name)) is not None}
    except FileNotFoundError:
        return None
    for age in sorted(there, reverse=True):
        try:
            written_s = there[age].stat().st_mtime  # its manifest came last
        except FileNotFoundError:
            continue  # deleted meanwhile
        return Stored(age[0], "disk", str(there[age]), round(max(0.0, time.time() - written_s), 3))
    return None


def _uploaded(records: list[Record]) -> Stored | None:
    uploads = [
        record for record in records if record.event == Event.SAVED and record["tier"] == "remote"
    ]
    newest = max(uploads, key=lambda record: int(record["step"]), default=None)
    if newest is None:
        return None
    age_s = (time.monotonic_ns() - newest.t_ns) / 1e9
    return Stored(newest["step"], "remote", newest["path"], round(age_s, 3))


def _why_nothing(tier: CheckpointTier, records: list[Record]) -> str:
    failed = [record for record in records if record.event == Event.SAVE_FAILED]
    if failed:
        return f"no snapshot could be written: {failed[-1]['reason']}"
    often = [f"{tier.every_steps} steps"] if tier.every_steps else []
    often += [f"{tier.every_s:g} s"] if tier.every_s else []
    return f"the first snapshot was not complete yet: one is due every {' or every '.join(often)}"
