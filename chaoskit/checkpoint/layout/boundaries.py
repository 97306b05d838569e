"""Where a kill matters while a snapshot is stored: at these points the disk holds something else than before.

Whoever wants a fault to strike exactly there passes a hook; it is called on reaching the point, before what follows. A
hook that raises OSError stands for a disk that does.
"""

from __future__ import annotations

from collections.abc import Callable

#: Of the disk tier, in the order in which a save reaches them. ``write`` is reached before each piece of a file.
BOUNDARIES = (
    "stage",  # nothing is there yet
    "write",  # the staging directory is there; files grow
    "sync",  # a file is whole, in the page cache
    "metadata",  # every file is on the disk; torch's table of contents is not there
    "manifest",  # it is; the manifest is not there
    "seal",  # the manifest is there, maybe not on the disk
    "commit",  # all of it is on the disk, and invisible
    "publish",  # it is visible; the disk may not know
    "committed",  # it counts
    "prune",  # an old snapshot is about to be taken away
    "delete",  # it is invisible; its files are there
    "pruned",
)

#: Of the memory tier, as a state is copied into a slot.
MEMORY = (
    "begun",  # the slot counts no more; nothing of the new state is in it
    "chunk",  # a part of it is
    "copied",  # all of it is; there is no seal
    "sealed",  # it counts
)

#: Of a copy on another node: where its owner sends it ...
OUTWARD = (
    "offering",  # the partner has not heard of it
    "sending",  # a part is on its way: only where a copy goes over TCP
    "acknowledged",  # the partner has it, and nobody has counted it
)
#: ... and where the partner receives it.
INWARD = (
    "receiving",  # a part is there
    "verified",  # all of it is, with the right checksum; there is no seal
    "answering",  # it counts; the owner does not know
)

#: Of the remote tier.
REMOTE = (
    "upload",  # of a file of the snapshot, nothing or a part of which is in the store
    "uploaded",  # every file is, verified; the manifest is not there
    "announced",  # it is: the snapshot counts
    "expire",  # an old snapshot is about to be removed
    "expired",  # its manifest is gone; its files are there
)

#: Whatever a :class:`~chaoskit.checkpoint.disk.breakpoints.Breakpoints` can wait at.
PLACES = (*MEMORY, *OUTWARD, *INWARD, *BOUNDARIES, *REMOTE)

#: Called with the name of a boundary.
Hook = Callable[[str], None]


def undisturbed(_boundary: str) -> None:
    """The hook that does nothing."""
