"""Fault ``CorruptFile``: a stored snapshot differs from what was written.

-> faults/storage/damage.py changes the file.
-> checkpoint/disk/tier.py: what a restore does with it (``quarantine``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput
from chaoskit.faults.base import Fault
from chaoskit.faults.evidence import Evidence, ReadBack, SharedStore
from chaoskit.faults.target import Target

#: Kinds of damage to a snapshot.
HOWS = ("bit", "page", "truncate", "older", "manifest")


@dataclass(frozen=True, kw_only=True)
class CorruptFile(Fault):
    """Damage the newest complete snapshot in the run's disk tier.

    Nothing shows the damage before the snapshot is read. So the fault belongs together with one
    that takes every copy in memory, such as ``ReplaceNode`` of every rank: then the job goes on
    from the snapshot before, which costs the steps since that one (``max_lost_steps`` of the run).

    Args:
        rank: the rank that waits meanwhile; the directory is damaged from outside.
        how: ``bit``: a bit is flipped in the middle of the largest file; ``page``: 4096 bytes there
            are changed; ``truncate``: the file ends there; ``older``: a chunk is that of the
            snapshot before, as after a lost write; ``manifest``: a bit is flipped in the table of
            contents.
    """

    rank: int | str = 0
    how: str = "bit"

    family: ClassVar[str] = "checkpoint"
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = frozenset()
    effect: ClassVar[str] = "the newest snapshot on disk is not what was written"
    evidence: ClassVar[str] = (
        "bytes that are read back differ from those before, and their digest is wrong"
    )
    stands_for: ClassVar[str] = "disks and file systems that lose or change what they were given"
    unlisted: ClassVar[str] = (
        "the tables count what ends a job; a damaged checkpoint ends none before it is needed"
    )
    impact: ClassVar[str] = (
        "the restore sets the snapshot aside, writes that down, and takes the one before"
    )
    undo: ClassVar[str] = "nothing is put back: the snapshot is the run's own, and stays damaged"
    substrates: ClassVar[tuple[str, ...]] = ("local", "netns")
    of_runtime: ClassVar[bool] = True
    sample: ClassVar[Mapping[str, Any]] = {"at_step": 20}
    forms: ClassVar[tuple[Mapping[str, Any], ...]] = tuple({"how": how} for how in HOWS)
    example: ClassVar[str] = (
        'chaos.run("gpt", nodes=4, steps=60, disk={{"target": "/tmp/job", "every_steps": 5}}, faults=[{fault}])'
    )

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.how not in HOWS:
            raise BadInput("how", self.how, f"use one of {', '.join(HOWS)}")

    def require(self, config: RunConfig) -> None:
        if config.disk is None:
            raise BadInput("disk", config.disk, f"store snapshots: {self.kind} damages one")

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        assert target.config is not None
        assert target.config.disk is not None
        from chaoskit.faults.storage.damage import damage  # imports torch

        place = target.config.disk.target
        try:
            damage_in_words = damage(Path(place), self.how)
        except FileNotFoundError as error:  # no snapshot exists, or not any more
            raise ProcessLookupError(str(error)) from error
        target.release()
        if damage_in_words:
            yield ReadBack(
                subject=SharedStore(place), source="the files, read again", value=damage_in_words
            )
