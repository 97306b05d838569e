"""Descriptions of the snapshots in a tier, complete and damaged.

-> ``disk/tier.py``: lists, verifies and quarantines them; ``remote/tier.py`` does so in a store.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from chaoskit.checkpoint.disk.names import parse_name
from chaoskit.checkpoint.disk.snapshot import Snapshot
from chaoskit.errors import ChaoskitError


class DamagedSnapshot(NamedTuple):
    """A snapshot that cannot be restored.

    Attributes:
        name: its name.
        path: its present directory; of a snapshot in a store, its name there.
        reason: description of the damage.
    """

    name: str
    path: Path
    reason: str

    @property
    def step(self) -> int:
        """The step in the name; -1 without one."""
        age = parse_name(self.name)
        return age[0] if age else -1


class Listing(NamedTuple):
    """The snapshots in a directory, the newest first.

    ``damaged`` are those whose manifest cannot be used.
    """

    snapshots: list[Snapshot]
    damaged: list[DamagedSnapshot]


class FoundSnapshot(NamedTuple):
    """The newest undamaged snapshot, and those as new or newer that were quarantined before it."""

    snapshot: Snapshot
    lost: list[DamagedSnapshot]

    @property
    def lost_steps(self) -> int:
        """The number of committed steps that are in the damaged snapshots but not in this one.

        0 if no damaged one is newer.
        """
        return (
            max((damaged.step for damaged in self.lost), default=self.snapshot.manifest.step)
            - self.snapshot.manifest.step
        )


class NothingToRestore(ChaoskitError):
    """Error of a restore that has found no undamaged snapshot below ``root``.

    ``lost`` has the damaged snapshots; the message names each with its damage.
    """

    def __init__(self, root: Path | str, lost: Sequence[DamagedSnapshot]) -> None:
        self.root, self.lost = root, list(lost)
        reasons = "".join(f"\n  {damaged.name}: {damaged.reason}" for damaged in lost)
        super().__init__(f"no snapshot below {root} can be restored{reasons}")

    def __reduce__(self) -> tuple[type[NothingToRestore], tuple[Path | str, list[DamagedSnapshot]]]:
        return type(self), (self.root, self.lost)  # torch pickles what a rank raises
