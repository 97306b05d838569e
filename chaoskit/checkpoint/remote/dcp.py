"""``dcp.load`` from a remote store: the snapshot is verified as it is read, straight into the tensors."""

from __future__ import annotations

import os

from chaoskit.checkpoint.dcp import CheckpointId, SnapshotReader
from chaoskit.checkpoint.names import parse_name
from chaoskit.checkpoint.remote.tier import RemoteTier
from chaoskit.checkpoint.snapshot import Snapshot
from chaoskit.errors import BadInput


class RemoteReader(SnapshotReader):
    """Loads a snapshot of a remote tier. Each rank reads what it needs.

    Args:
        step: which one; None for the newest, or for what ``checkpoint_id`` names.
    """

    def __init__(self, tier: RemoteTier, step: int | None = None) -> None:
        super().__init__("", step)
        self._tier = tier

    @property
    def checkpoint_id(self) -> CheckpointId:
        """For torch's log."""
        return self._tier.store.url

    def _choose(self) -> Snapshot:
        for name in self._tier.newest():
            age = parse_name(name)
            if age and self.step in (None, age[0]):
                return self._tier.open(name)
        wanted = "a snapshot" if self.step is None else f"one of step {self.step}"
        raise BadInput("url", self._tier.store.url, f"name a place that holds {wanted}")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        return any(letter.isdigit() for letter in os.fspath(checkpoint_id))
