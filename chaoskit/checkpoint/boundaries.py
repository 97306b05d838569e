"""Where a kill matters while a snapshot is stored: at these points the disk holds something else than before.

Whoever wants a fault to strike exactly there passes a hook; it is called on reaching the point, before what follows. A
hook that raises OSError stands for a disk that does.
"""

from __future__ import annotations

from collections.abc import Callable

#: In the order in which a save reaches them. ``write`` is reached before each piece of a file.
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

#: Called with the name of a boundary.
Hook = Callable[[str], None]


def undisturbed(_boundary: str) -> None:
    """The hook that does nothing."""
