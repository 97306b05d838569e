"""A sharded state from its pieces: each rank reads what it needs of the copies that a plan names.

All pieces are of one step, committed in one generation. As a rule a rank needs just the piece of the rank whose place
it has, which is read straight into its tensors; in a world of another size, parts of several. Whatever is read is
verified, and a copy that is not what was sealed is never trained on.
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
from chaoskit.wire.messages import Snapshot


class NoCopy(ChaoskitError):
    """No copy of some piece could be read. The coordinator was told which ones failed."""


class Restorer:
    """Reads the pieces of one plan.

    Args:
        restore: copies that the plan names, the newest first.
        node: of this worker: its own copies are nearer than others.
        rank: by which readers spread over the copies of a piece.
        transport: ``auto`` (shared memory where a copy is on this host, else TCP) or ``tcp``.
        failed: told of a copy that could not be read, whether it is corrupt, and why.

    Attributes:
        step, generation: of what is restored.
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
        self.step, self.generation = max(snapshot.age for snapshot in restore)
        self._copies: dict[int, list[Snapshot]] = {}
        self._stored = [
            one for one in restore if one.age == (self.step, self.generation) and one.path
        ]
        for snapshot in restore:
            if snapshot.age == (self.step, self.generation) and not snapshot.path:
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
        if not self._copies:
            self._read_stored(state)
            return
        alike = len(self._copies) == count and number in self._copies
        if not (alike and self._read_own(state, number)):
            self._read_all(state)

    def _read_stored(self, state: ShardedState) -> None:
        """From a tier that outlives every node: this rank's boxes, straight into place."""
        for snapshot in self._stored:
            try:
                read_sharded(snapshot, state)
            except (PeerLost, Corrupt) as error:
                self._fail(snapshot, error)
                continue
            self.read.append(snapshot)
            return
        raise NoCopy(f"nothing that is stored of step {self.step} could be read")

    def _read_own(self, state: ShardedState, number: int) -> bool:
        """From the copy of one rank, straight into place; False if that was cut in another way."""
        for snapshot in self._copies[number]:
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
                    self._fail(snapshot, error)
                    continue
                state.load_scalars(scalars, self.step)
                self.read.append(snapshot)
                return True
        raise NoCopy(f"no copy of piece {number} of step {self.step} could be read")

    def _read_all(self, state: ShardedState) -> None:
        """From the copies of all ranks, box by box."""
        with ExitStack() as stack:
            copies = [self._open_one(number, stack) for number in sorted(self._copies)]
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

    def _open_one(self, number: int, stack: ExitStack) -> StoredCopy:
        """A verified copy of a piece, wherever there is one."""
        for snapshot in self._copies[number]:
            try:
                copy = self._open(snapshot)
                stack.callback(copy.close)
                copy.verify()
            except (PeerLost, Corrupt, Damaged, Torn, OSError) as error:
                self._fail(snapshot, error)
                continue
            self.read.append(snapshot)
            return copy
        raise NoCopy(f"no copy of piece {number} of step {self.step} could be read")

    def _open(self, snapshot: Snapshot) -> StoredCopy:
        endpoint = snapshot.endpoint
        if self._transport == "auto" and endpoint.arena_fd >= 0 and endpoint.host_id == host_id():
            copy = StoredCopy(f"/proc/{endpoint.pid}/fd/{endpoint.arena_fd}")
        else:
            image = _received(*fetch(endpoint, self._token), snapshot)
            copy = StoredCopy(f"/proc/self/fd/{image.fd}")
        if copy.seal.checksum != snapshot.checksum:
            copy.close()
            raise Torn(f"step {snapshot.step} was overwritten by step {copy.seal.step}")
        return copy

    def _fail(self, snapshot: Snapshot, error: Exception) -> None:
        self._failed(snapshot, isinstance(error, (Corrupt, Damaged)), str(error))


def _received(
    step: int, index: bytes, scalars: bytes, data: bytearray, snapshot: Snapshot
) -> ArenaImage:
    """What came over the network, as a slot that can be read like any other. Its bytes are verified by the reader."""
    image = ArenaImage(len(data))
    image.begin(step, snapshot.generation, index, scalars, len(data))
    image.data()[:] = data
    image.end(snapshot.checksum)
    return image
