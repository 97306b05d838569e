"""A sharded state from its pieces: each rank reads what it needs of the copies that a plan names.

All pieces are of one step, committed in one generation. As a rule a rank needs just the piece of the rank whose place
it has; in a world of another size, parts of several. Every piece that is read is verified before anything of it is
used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from chaoskit.checkpoint.arena import Slot, decode_index, dtype_named
from chaoskit.checkpoint.layout import Box, cover
from chaoskit.errors import ChaoskitError
from chaoskit.messages import Snapshot
from chaoskit.runtime.peer import Corrupt, PeerLost, fetch
from chaoskit.runtime.sharding import ShardedState


@dataclass(frozen=True, slots=True)
class Piece:
    """A verified copy in this process's memory."""

    snapshot: Snapshot
    slots: list[Slot]
    scalars: bytes
    data: Tensor  # bytes

    def tensor(self, slot: Slot) -> Tensor:
        part = self.data[slot.offset : slot.offset + slot.size_bytes]
        return part.view(dtype_named(slot.dtype)).view(slot.shape)


class NoCopy(ChaoskitError):
    """No copy of some piece could be read. The coordinator was told which ones failed."""


class Restorer:
    """Reads the pieces of one plan.

    Args:
        restore: copies that the plan names, the newest first.
        node: of this worker: its own copies are nearer than others.
        rank: by which readers spread over the copies of a piece.
        failed: told of a copy that could not be read, and whether it is corrupt.

    Attributes:
        read: the copies that were read and verified.
    """

    def __init__(
        self,
        restore: Sequence[Snapshot],
        *,
        node: str,
        rank: int,
        token: str,
        transport: str,
        failed: Callable[[Snapshot, bool, str], None],
    ) -> None:
        newest = max(snapshot.age for snapshot in restore)
        self.step, self.generation = newest
        self._copies: dict[int, list[Snapshot]] = {}
        for snapshot in restore:
            if snapshot.age == newest:
                self._copies.setdefault(snapshot.piece, []).append(snapshot)
        for copies in self._copies.values():
            turn = rank % len(copies)
            copies[:] = sorted(copies[turn:] + copies[:turn], key=lambda copy: copy.node != node)
        self._token, self._transport, self._failed = token, transport, failed
        self.read: list[Snapshot] = []

    def restore(self, state: ShardedState, number: int, count: int) -> None:
        """Give ``state`` the numbers of the newest step.

        Args:
            number, count: the piece of which this rank holds the boxes, of so many different ones.

        Raises:
            NoCopy: if a piece cannot be read from anywhere.
            BadInput: if the stored state is that of another model.
        """
        if len(self._copies) == count and number in self._copies:
            order = [number, *(other for other in self._copies if other != number)]
        else:
            order = list(self._copies)
        pieces: list[Piece] = []
        for other in order:
            pieces.append(self._piece(other))
            targets = state.prepare(slot for piece in pieces for slot in piece.slots)
            if (parts := _parts(targets, pieces)) is not None:
                break
        else:
            raise NoCopy("the copies do not make up the whole state")
        for target, source in parts:
            target.copy_(source)
        state.load_scalars(pieces[0].scalars, self.step)

    def _piece(self, number: int) -> Piece:
        for snapshot in self._copies[number]:
            try:
                index, scalars, data = fetch(snapshot.endpoint, self._token, self._transport, snapshot.checksum)
                piece = Piece(
                    snapshot, decode_index(index, len(data)), scalars, torch.frombuffer(data, dtype=torch.uint8)
                )
            except (PeerLost, Corrupt) as error:
                self._failed(snapshot, isinstance(error, Corrupt), str(error))
                continue
            self.read.append(snapshot)
            return piece
        raise NoCopy(f"no copy of piece {number} of step {self.step} could be read")


def _parts(targets: dict[str, tuple[Tensor, Box]], pieces: Sequence[Piece]) -> list[tuple[Tensor, Tensor]] | None:
    """What is to be copied where; None if the pieces leave holes."""
    stored: dict[str, list[tuple[Piece, Slot]]] = {}
    for piece in pieces:
        for slot in piece.slots:
            stored.setdefault(slot.path, []).append((piece, slot))
    found: list[tuple[Tensor, Tensor]] = []
    try:
        for path, (memory, box) in targets.items():
            found += _cut(memory, box, stored.get(path, []))
    except ChaoskitError:
        return None
    return found


def _cut(memory: Tensor, box: Box, offers: Sequence[tuple[Piece, Slot]]) -> Iterator[tuple[Tensor, Tensor]]:
    if not box.size:
        return
    for number, part in cover(box, [slot.box for _, slot in offers]):
        piece, slot = offers[number]
        yield memory[part.within(box)], piece.tensor(slot)[part.within(slot.box)]
