"""Find the newest generation among the stored snapshots of a run, before the run begins.

-> ``coordinator/server.py``: the run continues behind that generation.
-> ``coordinator/membership/restart_from_copies.py``: workers begin with the newest copy, or the job
fails.
"""

from __future__ import annotations

from chaoskit.checkpoint.disk.names import parse_name
from chaoskit.checkpoint.disk.tier import DiskTier
from chaoskit.checkpoint.remote.tier import RemoteTier
from chaoskit.config import RunConfig


def newest_generation(config: RunConfig) -> int:
    """Return the largest generation of all stored snapshots of a run, at least 1; 0 without any.

    Damaged snapshots count, too, except quarantined ones. Only names and manifests are read.

    Raises:
        BadInput: if the URL of the remote tier is invalid, or a package that it needs is missing.
        RemoteRefused, RemoteUnavailable: if the remote tier refuses or does not answer.
        OSError: if a manifest on disk cannot be read.
    """
    names: list[str] = []
    if config.disk is not None:
        listing = DiskTier(config.disk.target).snapshots()
        names += [snapshot.name for snapshot in listing.snapshots]
        names += [snapshot.name for snapshot in listing.damaged]
    if config.remote is not None:
        tier = RemoteTier(config.remote.target, storage_options=config.remote.storage_options)
        names += tier.names()
        tier.close()
    return max((max(age[1], 1) for name in names if (age := parse_name(name))), default=0)
