"""Points at which a kill matters while a snapshot is stored: the stored data has just changed.

A hook makes a fault strike exactly there. It is called when the point is reached, before the next
operation. A hook that raises OSError imitates a disk that does.

-> ``disk/breakpoints.py``: stops a thread at such a point, so that its process can be killed there.
"""

from __future__ import annotations

from collections.abc import Callable

#: Points of the disk tier, in the order of a save. ``write`` is reached before each piece of a
#: file.
BOUNDARIES = (
    "stage",  # there is no staging directory yet
    "write",  # the staging directory exists; files grow
    "sync",  # a file is whole, in the page cache
    "metadata",  # every file is on the disk; torch's table of contents is missing
    "manifest",  # torch's table of contents exists; the manifest is missing
    "seal",  # the manifest exists, maybe not on the disk yet
    "commit",  # the snapshot is on the disk, and invisible
    "publish",  # the snapshot is visible; its name may not be on the disk yet
    "committed",  # the snapshot is complete
    "prune",  # an old snapshot is about to be deleted
    "delete",  # the old snapshot is invisible; its files still exist
    "pruned",
)

#: Points of the memory tier, in the order in which a state is copied into a slot.
MEMORY = (
    "begun",  # the slot is invalid; it holds nothing of the new state
    "chunk",  # a part of the state is copied
    "copied",  # all of the state is copied; there is no seal
    "sealed",  # the copy is complete
)

#: Points of a copy to another node, on the node of the owner that sends it ...
OUTWARD = (
    "offering",  # the partner has not received the offer
    "sending",  # a part is on its way; only with copies over TCP
    "acknowledged",  # the partner has the copy; the owner has not counted it
)
#: ... and on the partner that receives it.
INWARD = (
    "receiving",  # a part has arrived
    "verified",  # everything has arrived, with the right checksum; there is no seal
    "answering",  # the copy is complete; the owner has no answer yet
)

#: Points of the remote tier.
REMOTE = (
    "upload",  # nothing or a part of a file is in the store
    "uploaded",  # every file is in the store, verified; the manifest is missing
    "announced",  # the manifest is in the store: the snapshot is complete
    "expire",  # an old snapshot is about to be removed
    "expired",  # its manifest is gone; its files still exist
)

#: All points at which a :class:`~chaoskit.checkpoint.disk.breakpoints.Breakpoints` can stop a
#: thread.
PLACES = (*MEMORY, *OUTWARD, *INWARD, *BOUNDARIES, *REMOTE)

#: Called with the name of a boundary.
Hook = Callable[[str], None]


def undisturbed(_boundary: str) -> None:
    """Do nothing: the default hook."""
