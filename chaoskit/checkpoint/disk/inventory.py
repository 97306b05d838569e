"""What is found in a directory of snapshots, and what is not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from chaoskit.checkpoint.disk.names import parse_name
from chaoskit.checkpoint.disk.snapshot import Snapshot
from chaoskit.errors import ChaoskitError


class DamagedSnapshot(NamedTuple):
    """A snapshot that is there and cannot be restored. ``path``: where it is now."""

    name: str
    path: Path
    reason: str

    @property
    def step(self) -> int:
        age = parse_name(self.name)
        return age[0] if age else -1


class Listing(NamedTuple):
    """What is in a directory of snapshots, the newest first. ``damaged``: those whose manifest cannot be used."""

    snapshots: list[Snapshot]
    damaged: list[DamagedSnapshot]


class Found(NamedTuple):
    """The newest snapshot whose digests are right, and the newer ones that were set aside on the way to it."""

    snapshot: Snapshot
    lost: list[DamagedSnapshot]

    @property
    def lost_steps(self) -> int:
        """How many committed steps the damaged snapshots held that this one does not."""
        return (
            max((one.step for one in self.lost), default=self.snapshot.manifest.step)
            - self.snapshot.manifest.step
        )


class NothingToRestore(ChaoskitError):
    """No snapshot is whole. ``lost``: those that are not."""

    def __init__(self, root: Path | str, lost: Sequence[DamagedSnapshot]) -> None:
        self.root, self.lost = root, list(lost)
        reasons = "".join(f"\n  {one.name}: {one.reason}" for one in lost)
        super().__init__(f"no snapshot below {root} can be restored{reasons}")

    def __reduce__(self) -> tuple[type[NothingToRestore], tuple[Path | str, list[DamagedSnapshot]]]:
        return type(self), (self.root, self.lost)  # torch sends what a rank raises to the others
