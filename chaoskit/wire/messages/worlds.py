"""Messages about a membership: which workers train together, and from which state.

-> coordinator/membership/regroup.py makes a plan, runtime/group/generations.py follows it.
coordinator/handlers/on_generation.py and on_copies.py act on the reports.
"""

from __future__ import annotations

import msgspec

from chaoskit.wire.messages.base import Message

#: Barrier at which every member of a new generation reports how far it is.
STANDING = "standing"


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Address at which the state of a worker can be read.

    On the same ``host_id``, it is read from shared memory: descriptor ``arena_fd`` of process
    ``pid``, unless that is -1. Otherwise it is read from ``address`` and ``port``.
    """

    host_id: str
    address: str
    port: int
    pid: int
    arena_fd: int


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rank of a generation, and the worker that has it.

    ``shards`` are the slices of the global batch that it computes.
    """

    rank: int
    worker: str
    node: str
    endpoint: Endpoint
    shards: tuple[int, ...]


class OfferedSnapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Complete, sealed copy of the state of the training.

    The data of ``endpoint`` counts only with this checksum. ``tier`` names the place that keeps it;
    ``node`` and ``worker`` name the owner of the state. The state of a sharded job is in ``pieces``
    different pieces, and this is number ``piece``; all pieces of one age belong together.

    A stored snapshot has a ``path``, a directory or a URL; no process serves it, and each reader
    reads it there. ``store``: address of the store of a URL, if the URL does not have it.
    ``inode``: inode of the memory that holds it, which distinguishes it from another with the same
    seal on the same node; 0 for a stored one.
    """

    node: str
    worker: str
    step: int  # committed steps
    generation: int  # the generation that trained on it last
    size_bytes: int
    checksum: str
    endpoint: Endpoint
    tier: str = "memory"
    piece: int = 0
    pieces: int = 1
    path: str = ""
    store: str = ""
    inode: int = 0

    @property
    def age(self) -> tuple[int, int]:
        """The order of snapshots: the larger, the better to restore.

        The step counts first: an older generation may have gone further.
        :attr:`chaoskit.checkpoint.layout.seal.Seal.recency` orders by the time of writing.
        """
        return self.step, self.generation


class RankLoss(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Loss of a worker that had a rank, with the cause as in :class:`WorkerLost`."""

    worker: str
    rank: int
    cause: str
    detail: str


class Plan(Message, frozen=True):
    """Membership of a generation.

    ``abort``: leave the current collective at once, as it is broken off; else at a step boundary.
    ``restore``: copies from which the state is read if no member has it, the newest first.
    ``leavers``: workers of the generation before that leave at the step boundary. ``reason``: the
    reason for the plan, in words. ``losses``: losses since the last generation that was formed,
    which had ``former_world`` ranks; 0 if there was none. ``broken_by``: the worker that first
    reported that the generation before was broken; "" if no worker did.
    """

    generation: int
    members: tuple[Member, ...]  # by rank
    abort: bool
    restore: tuple[OfferedSnapshot, ...] = ()
    leavers: tuple[str, ...] = ()
    reason: str = ""
    losses: tuple[RankLoss, ...] = ()
    former_world: int = 0
    broken_by: str = ""

    def member(self, worker: str) -> Member | None:
        """Return the member that is ``worker``; None if it has no rank."""
        return next((member for member in self.members if member.worker == worker), None)

    @property
    def heaviest(self) -> int:
        """The rank with most shards; the lowest of them on a tie."""
        return max(self.members, key=lambda member: (len(member.shards), -member.rank)).rank


class Formed(Message, frozen=True):
    """Report that the worker's process group of this generation can be used."""

    worker: str
    generation: int


class Healed(Message, frozen=True):
    """Report that the worker holds the state on which its generation trains."""

    worker: str
    generation: int = 0


class GroupBroken(Message, frozen=True):
    """Report that a collective or the building of a group failed without a newer plan."""

    worker: str
    generation: int
    detail: str


class Recall(Message, frozen=True):
    """Question to an agent for the copies of the state on its node, when no live worker has it.

    ``number``: number of the question; a later one is asked when earlier answers may be too old.
    """

    number: int = 0


class Sealed(Message, frozen=True):
    """Answer to :class:`Recall` ``number``: the snapshots that can be read on ``node``.

    There are none if every state was torn. A later answer to the same question replaces the earlier
    one: it includes the snapshots of a slow store. ``committed``: steps that a live worker of a
    sharded job has committed there, whether they were copied or not.
    """

    node: str
    snapshots: tuple[OfferedSnapshot, ...]
    number: int = 0
    committed: int = 0


class SourceFailed(Message, frozen=True):
    """Report of ``worker`` that ``snapshot`` could not be restored.

    ``corrupt``: it was read, and differs from its checksum.
    """

    worker: str
    snapshot: OfferedSnapshot
    corrupt: bool
    detail: str = ""
