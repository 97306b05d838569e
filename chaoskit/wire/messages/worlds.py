"""Who trains together, from which state, and how the members of a generation get there."""

from __future__ import annotations

import msgspec

from chaoskit.wire.messages.base import Message

#: The barrier at which every member of a new generation reports how far it is.
STANDING = "standing"


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the state of a worker can be read. ``host_id`` tells whether shared memory will do."""

    host_id: str
    address: str
    port: int
    pid: int
    arena_fd: int


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank of a generation. ``shards`` are the slices of the global batch that it computes."""

    rank: int
    worker: str
    node: str
    endpoint: Endpoint
    shards: tuple[int, ...]


class Snapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A complete copy of the state of the training, sealed: what ``endpoint`` offers counts only with this checksum.

    ``tier`` names the place it is kept in; ``node`` and ``worker`` tell whose state it was. The state of a sharded job
    is in ``pieces`` different pieces, of which this is one; all of one age belong together. One that is stored has a
    ``path``, a directory or a URL; nobody serves it, and whoever can reach it reads it there. ``store``: where that of
    the URL listens, if this does not say it. ``inode``: of the memory that holds it, which tells it from another one
    with the same seal on the same node; 0 for one that is stored.
    """

    node: str
    worker: str
    step: int  # committed steps
    generation: int  # the one that trained on it last
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
        """The larger, the better to restore. The step counts first: an older generation may have gone further.

        What was written last is another matter: :attr:`chaoskit.checkpoint.layout.seal.Seal.recency`.
        """
        return self.step, self.generation


class Loss(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker that had a rank and is lost; why, as in :class:`WorkerLost`."""

    worker: str
    rank: int
    cause: str
    detail: str


class Plan(Message, frozen=True):
    """A membership. ``abort``: leave the current collective at once (a rank was lost); else at a step boundary.

    ``restore``: where the state can be read when no member has it, the newest first. ``leavers``: workers of the
    generation before that go at the step boundary. ``reason``: in words. ``losses``: since the last generation that was
    formed, which had ``former_world`` ranks; 0 if there was none. ``broken_by``: the worker that was the first one to
    report that the generation before was broken; empty if that was not reported.
    """

    generation: int
    members: tuple[Member, ...]  # by rank
    abort: bool
    restore: tuple[Snapshot, ...] = ()
    leavers: tuple[str, ...] = ()
    reason: str = ""
    losses: tuple[Loss, ...] = ()
    former_world: int = 0
    broken_by: str = ""

    def member(self, worker: str) -> Member | None:
        """The place of ``worker`` in this membership, if it has one."""
        return next((member for member in self.members if member.worker == worker), None)

    @property
    def heaviest(self) -> int:
        """The rank with most shards; the lowest of them on a tie."""
        return max(self.members, key=lambda member: (len(member.shards), -member.rank)).rank


class Formed(Message, frozen=True):
    """The worker's process group of this generation can be used."""

    worker: str
    generation: int


class Healed(Message, frozen=True):
    """The worker holds the state that its generation trains on."""

    worker: str
    generation: int


class GroupBroken(Message, frozen=True):
    """A collective or the building of a group failed, and no newer plan explains it yet."""

    worker: str
    generation: int
    detail: str


class Recall(Message, frozen=True):
    """No live worker has the state of the training: asks an agent for what is left of it on its node.

    ``number``: of the question; later ones are asked when what was answered before may be too old.
    """

    number: int = 0


class Sealed(Message, frozen=True):
    """Answers :class:`Recall` ``number``: what can be read on ``node``; nothing, if every state was torn.

    A later answer to the same question takes the place of the one before: it names what a slow store has, too.
    ``committed``: steps that a live worker of a sharded job has committed there, whether they were copied or not.
    """

    node: str
    snapshots: tuple[Snapshot, ...]
    number: int = 0
    committed: int = 0


class SourceFailed(Message, frozen=True):
    """``snapshot`` could not be restored. ``corrupt``: it was read, and is not what was sealed."""

    worker: str
    snapshot: Snapshot
    corrupt: bool
    detail: str
