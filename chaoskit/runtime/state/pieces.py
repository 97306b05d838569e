"""Restores of a sharded state: each rank reads its part of the pieces that a plan names.

All pieces are of one step, committed in one generation. A rank usually needs just the piece of the
rank that had its place, which is read straight into its tensors. In a world of another size it
needs parts of several pieces. All data is verified, and a copy that differs from its seal is never
trained on.

-> coordinator/membership/restart_from_copies.py: which copies a plan names.
checkpoint/memory/stored.py: one copy. state/from_store.py: copies on a disk or in a store.
step/restore.py: replicated jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from chaoskit.checkpoint.layout.arena import ArenaImage
from chaoskit.checkpoint.layout.manifest import Damaged
from chaoskit.checkpoint.layout.seal import Torn
from chaoskit.checkpoint.memory.stored import StoredCopy, assemble
from chaoskit.errors import BadInput, ChaoskitError
from chaoskit.process.linux import host_id
from chaoskit.runtime.state.from_store import read_sharded
from chaoskit.runtime.state.peer import Corrupt, PeerLost, fetch
from chaoskit.runtime.state.sharding import ShardedState
from chaoskit.wire.messages import OfferedSnapshot


class NoCopy(ChaoskitError):
    """No copy of some piece could be read. The failed copies were reported to the coordinator."""


class Restorer:
    """Reads the pieces of one plan. A copy that cannot be read is reported, and the next is tried.

    Args:
        restore: copies that the plan names, at least one. Only those of the newest age are read:
            the largest pair of step and generation.
        node: the node of this worker, whose copies are preferred.
        rank: spreads the readers over the copies of a piece.
        token: the secret that the nodes with the copies ask for; used for TCP only.
        transport: ``auto`` (shared memory if a copy is on this host, else TCP) or ``tcp``.
        report_failure: called with a copy that could not be read, whether it is corrupt, and the
            reason.

    Attributes:
        step: the step that is restored.
        generation: the generation in which it was committed.
        copies_read: the copies that were read and verified.
    """

    def __init__(
        self,
        restore: Sequence[OfferedSnapshot],
        *,
        node: str,
        rank: int,
        token: str,
        transport: str,
        report_failure: Callable[[OfferedSnapshot, bool, str], None],
    ) -> None:
        self.step, self.generation = max(snapshot.age for snapshot in restore)
        self._copies: dict[int, list[OfferedSnapshot]] = {}
        self._stored_snapshots = [
            stored
            for stored in restore
            if stored.age == (self.step, self.generation) and stored.path
        ]
        for snapshot in restore:
            if snapshot.age == (self.step, self.generation) and not snapshot.path:
                self._copies.setdefault(snapshot.piece, []).append(snapshot)
        for copies in self._copies.values():
            offset = rank % len(copies)
            copies[:] = sorted(
                copies[offset:] + copies[:offset], key=lambda copy: copy.node != node
            )
        self._token, self._transport, self._report_failure = token, transport, report_failure
        self.copies_read: list[OfferedSnapshot] = []

    def restore(self, state: ShardedState, piece_number: int, piece_count: int) -> None:
        """Restore the newest step into ``state``: from memory if any copy is there, else a store.

        After an error the state is incomplete.

        Args:
            piece_number: the piece whose boxes this rank holds.
            piece_count: the number of different pieces.

        Raises:
            NoCopy: if a piece cannot be read from any copy, or the copies do not make up a state.
            BadInput: if the stored state is that of another model or other optimizers.
        """
        if not self._copies:
            self._read_stored(state)
            return
        has_same_pieces = len(self._copies) == piece_count and piece_number in self._copies
        if not (has_same_pieces and self._read_own(state, piece_number)):
            self._read_all(state)

    def _read_stored(self, state: ShardedState) -> None:
        """Read this rank's boxes from a tier that outlives every node, straight into place.

        Raises:
            NoCopy: if no stored snapshot can be read.
        """
        for snapshot in self._stored_snapshots:
            try:
                read_sharded(snapshot, state)
            except (PeerLost, Corrupt) as error:
                self._report(snapshot, error)
                continue
            self.copies_read.append(snapshot)
            return
        raise NoCopy(f"no stored snapshot of step {self.step} could be read")

    def _read_own(self, state: ShardedState, piece_number: int) -> bool:
        """Read a copy of this rank's piece straight into its tensors.

        Return False if the boxes of the piece are not those of this rank; nothing is read then.

        Raises:
            NoCopy: if no copy can be read.
        """
        for snapshot in self._copies[piece_number]:
            with ExitStack() as stack:
                try:
                    copy = stack.enter_context(self._open(snapshot))
                    tensors = state.prepare(copy.slots)
                    if {(slot.path, slot.box) for slot in copy.slots} != {
                        (held.path, held.box) for held in tensors
                    }:
                        return False
                    scalars = copy.read_into(tensors)
                except (PeerLost, Corrupt, Damaged, Torn, OSError) as error:
                    self._report(snapshot, error)
                    continue
                state.load_scalars(scalars, self.step)
                self.copies_read.append(snapshot)
                return True
        raise NoCopy(f"no copy of piece {piece_number} of step {self.step} could be read")

    def _read_all(self, state: ShardedState) -> None:
        """Read this rank's boxes from copies of all pieces.

        Raises:
            NoCopy: if a piece cannot be read from any copy, or the copies do not make up a state.
        """
        with ExitStack() as stack:
            copies = [
                self._open_verified(piece_number, stack) for piece_number in sorted(self._copies)
            ]
            tensors = state.prepare([slot for copy in copies for slot in copy.slots])
            try:
                assemble(tensors, copies)
            except BadInput:
                raise
            except ChaoskitError as error:
                raise NoCopy(
                    f"the copies of step {self.step} do not make up a state: {error}"
                ) from error
            state.load_scalars(copies[0].scalars, self.step)

    def _open_verified(self, piece_number: int, stack: ExitStack) -> StoredCopy:
        """Return a verified copy of a piece, which ``stack`` closes.

        Raises:
            NoCopy: if no copy can be read.
        """
        for snapshot in self._copies[piece_number]:
            try:
                copy = self._open(snapshot)
                stack.callback(copy.close)
                copy.verify()
            except (PeerLost, Corrupt, Damaged, Torn, OSError) as error:
                self._report(snapshot, error)
                continue
            self.copies_read.append(snapshot)
            return copy
        raise NoCopy(f"no copy of piece {piece_number} of step {self.step} could be read")

    def _open(self, snapshot: OfferedSnapshot) -> StoredCopy:
        """Return a copy, mapped on this host or fetched from its node. Its data is not verified.

        Raises:
            Torn: if the memory holds another copy by now.
            PeerLost: if it cannot be fetched.
        """
        endpoint = snapshot.endpoint
        if self._transport == "auto" and endpoint.arena_fd >= 0 and endpoint.host_id == host_id():
            copy = StoredCopy(f"/proc/{endpoint.pid}/fd/{endpoint.arena_fd}")
        else:
            image = _slot_image(*fetch(endpoint, self._token), snapshot)
            copy = StoredCopy(f"/proc/self/fd/{image.fd}")
        if copy.seal.checksum != snapshot.checksum:
            copy.close()
            raise Torn(f"step {snapshot.step} was overwritten by step {copy.seal.step}")
        return copy

    def _report(self, snapshot: OfferedSnapshot, error: Exception) -> None:
        """Report a copy that could not be read, and whether it is corrupt."""
        self._report_failure(snapshot, isinstance(error, (Corrupt, Damaged)), str(error))


def _slot_image(
    step: int, index: bytes, scalars: bytes, data: bytearray, snapshot: OfferedSnapshot
) -> ArenaImage:
    """Return data that came over the network in the form of a slot.

    The reader verifies it like that of any other slot.
    """
    image = ArenaImage(len(data))
    image.begin(step, snapshot.generation, index, scalars, len(data))
    image.data()[:] = data
    image.end(snapshot.checksum)
    return image
