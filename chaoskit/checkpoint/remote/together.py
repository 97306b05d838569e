"""One read for all: each stored byte comes from the store once, and goes from there to the ranks that need it.

The ranks of a replica, or of a whole job, read together. Chunks are dealt to the ranks that need them, so that each
reads about as much; what a rank has read and verified it sends to the others. They move in rounds: before anything of a
round is sent all ranks know whether its reads succeeded, so none waits for another one that has given up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from chaoskit.checkpoint.inventory import DamagedSnapshot, NothingToRestore
from chaoskit.checkpoint.layout import Box
from chaoskit.checkpoint.manifest import FILE_CHUNK_BYTES, Damaged, FileEntry
from chaoskit.checkpoint.reading import Segment
from chaoskit.checkpoint.remote.dealing import Dealt, deal, rounds
from chaoskit.checkpoint.remote.fetch import Chunk, chunks, read_chunk
from chaoskit.checkpoint.remote.ranks import DONE, Agreed, Ranks, State
from chaoskit.checkpoint.remote.store import Store
from chaoskit.checkpoint.remote.tier import RemoteTier, Restored, checked_manifest
from chaoskit.checkpoint.snapshot import Snapshot


class _Found(msgspec.Struct):
    """What rank 0 tells of the next snapshot; no name: there is none."""

    name: str = ""
    manifest: bytes = b""


def read_into_together(
    tier: RemoteTier, targets: Mapping[str, tuple[Tensor, Box]], group: dist.ProcessGroup | None = None
) -> Restored:
    """:meth:`RemoteTier.read_into` by all ranks of a group; all of them get the same snapshot.

    Each stored byte is read by one rank, once. (Targets on devices are read in batches of 512 MiB; a chunk at the seam
    of two batches is read twice.) The rank that reads a chunk verifies it.

    Args:
        targets: of this rank.
        group: one that sends memory of the host, such as gloo's; None: the default one.

    Raises:
        NothingToRestore: on all ranks. After any error the targets hold anything.
        RemoteRefused, RemoteUnavailable: on all ranks, if any of them met it.
        ChaoskitError: on all ranks, if the targets of one of them do not fit what is stored.
    """
    ranks, candidates = Ranks(group), tier.candidates()

    def find() -> bytes:
        return msgspec.msgpack.encode(_Found(*next(candidates, ("", b""))))

    lost: list[DamagedSnapshot] = []
    while True:
        try:
            found = msgspec.msgpack.decode(ranks.from_first(find), type=_Found)
            if not found.name:
                raise NothingToRestore(tier.store.url, lost)
            reason = _read(found, tier.store, ranks, targets)
        except Agreed as agreed:
            raise agreed.error from None
        if reason is None:
            return Restored(found.name, checked_manifest(found.name, found.manifest), lost)
        if ranks.rank == 0:
            tier.set_aside(found.name, reason)
        lost.append(DamagedSnapshot(found.name, Path(found.name), reason))


def _read(found: _Found, store: Store, ranks: Ranks, targets: Mapping[str, tuple[Tensor, Box]]) -> str | None:
    """Read one snapshot. Gives what is damaged of it, if anything is. Raises Agreed."""
    try:
        manifest = checked_manifest(found.name, found.manifest)  # the same bytes on all ranks
        reading = _Together(Path(found.name), manifest, store, ranks)
        reading.read_as_one(targets)
    except Damaged as error:
        return str(error)
    except Agreed as agreed:
        if isinstance(agreed.error, Damaged):
            return str(agreed.error)
        raise
    return None


@dataclass(frozen=True)
class _Together(Snapshot):
    """A snapshot in a store, whose files all ranks read at the same time."""

    store: Store
    ranks: Ranks

    def read_as_one(self, targets: Mapping[str, tuple[Tensor, Box]]) -> None:
        """Fill the targets, and help the others until they have theirs. Raises Agreed."""
        try:
            self.read_into(targets)
        except Agreed:
            raise
        except Exception as error:
            try:
                self._exchange([], State.of(error))
            except Agreed as agreed:
                if isinstance(error, Damaged) or not isinstance(agreed.error, type(error)):
                    raise
                raise error from None  # the one that met it says all
            raise AssertionError("an error that nobody noticed") from error
        while not self._exchange([], State(DONE)):
            pass

    def fill(self, wanted: Sequence[tuple[FileEntry, Sequence[Segment]]]) -> None:
        self._exchange(list(chunks(wanted)), State())

    @cached_property
    def _places(self) -> dict[str, int]:
        """The number of each file's first chunk in the snapshot."""
        entries = self.manifest.files
        counts = accumulate((len(entry.chunks) for entry in entries), initial=0)
        return {entry.name: first for entry, first in zip(entries, counts, strict=False)}

    @cached_property
    def _all(self) -> list[Chunk]:
        """All chunks of the snapshot, of which nothing is wanted."""
        return [Chunk(entry, number, ()) for entry in self.manifest.files for number in range(len(entry.chunks))]

    def _exchange(self, wanted: list[Chunk], state: State) -> bool:
        """Read what all ranks want now, and give each its own. Gives whether all ranks are done. Raises Agreed."""
        own = {self._places[chunk.entry.name] + chunk.number: chunk for chunk in wanted}
        needs = np.zeros(len(self._all), np.bool_)
        needs[list(own)] = True
        done, all_needs = self.ranks.agree(state, needs)
        plan = rounds(deal(all_needs, [chunk.size_bytes for chunk in self._all]), self.store.traffic.parallel)
        reads = self._begin(plan[0]) if plan else {}
        content = torch.empty(FILE_CHUNK_BYTES, dtype=torch.uint8)
        for number, dealt in enumerate(plan):
            arrived = self._finish(reads)
            reads = self._begin(plan[number + 1]) if number + 1 < len(plan) else {}
            for one in dealt:
                self._spread(one, own.get(one.chunk), arrived.get(one.chunk), content)
        return done

    def _begin(self, dealt: Sequence[Dealt]) -> dict[int, Future[bytes]]:
        """Have what this rank is to read in a round read, in other threads."""
        mine = [one.chunk for one in dealt if one.reader == self.ranks.rank]
        return {number: self.store.submit(self._read_chunk, self._all[number]) for number in mine}

    def _read_chunk(self, chunk: Chunk) -> bytes:
        return read_chunk(self.store, self.name, chunk.entry, chunk.number)

    def _finish(self, reads: Mapping[int, Future[bytes]]) -> dict[int, bytes]:
        """What this rank has read in a round, when all ranks have read theirs. Raises Agreed."""
        arrived, state = {}, State()
        for number, read in reads.items():
            try:
                arrived[number] = read.result()
            except Exception as error:  # noqa: BLE001 - whatever it is, the others must hear of it
                state = max(state, State.of(error))
        self.ranks.agree(state)
        return arrived

    def _spread(self, dealt: Dealt, own: Chunk | None, arrived: bytes | None, content: Tensor) -> None:
        if own is None:
            return  # not this rank's
        here = content[: own.size_bytes]
        if arrived is not None:
            here.numpy()[:] = np.frombuffer(arrived, np.uint8)
        if dealt.others:
            self.ranks.spread(dealt, here)
        own.place(here.numpy().data)
