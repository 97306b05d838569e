"""State from the tiers that outlive every node: read into place, and verified meanwhile.

The world that stored it may have had any size: each rank reads the boxes that it holds now. A
damaged snapshot is set aside, so that the next plan names an older one.

-> step/restore.py and state/pieces.py: when a store is read. checkpoint/disk/snapshot.py: a stored
snapshot; checkpoint/remote/tier.py: the store. daemon/archive.py offers what is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from chaoskit.checkpoint.disk.snapshot import Snapshot as StoredSnapshot
from chaoskit.checkpoint.disk.tier import DiskTier
from chaoskit.checkpoint.layout.arena import Slot, aligned, dtype_named
from chaoskit.checkpoint.layout.manifest import Damaged
from chaoskit.checkpoint.remote.tier import RemoteTier
from chaoskit.config import CheckpointTier
from chaoskit.errors import BadInput, ChaoskitError
from chaoskit.runtime.state.naming import SCALARS, decode_scalars, path_of
from chaoskit.runtime.state.peer import Corrupt, PeerLost, Pulled, publish, receive_into
from chaoskit.runtime.state.replica import Replica
from chaoskit.runtime.state.sharding import ShardedState
from chaoskit.wire.messages import OfferedSnapshot


def read_sharded(snapshot: OfferedSnapshot, state: ShardedState) -> None:
    """Read this rank's boxes of a stored snapshot into ``state``.

    After an error the state is incomplete.

    Raises:
        Corrupt: if the snapshot is damaged; it is set aside.
        PeerLost: if it cannot be read.
        BadInput: if it is the state of another model.
    """
    with _Reading(snapshot) as stored:
        names = {slot.path: name for slot, name in _slots(stored, state.parameter_names)}
        slots = [slot for slot, _ in _slots(stored, state.parameter_names)]
        held = [target for target in state.prepare(slots) if target.tensor.numel()]
        stored.read_into({names[target.path]: (target.tensor, target.box) for target in held})
        state.load_scalars(decode_scalars(stored.read_object(SCALARS)), stored.manifest.step)


def pull_stored(replica: Replica, snapshot: OfferedSnapshot) -> Pulled:
    """Replace the state of ``replica`` by a stored snapshot, and return what was read.

    After an error the replica has no state, and must pull again.

    Raises:
        Corrupt, PeerLost, BadInput: as :func:`read_sharded`.
    """
    with _Reading(snapshot) as stored:
        named = _slots(stored, replica.parameter_names)
        index = msgspec.msgpack.encode([slot for slot, _ in named])
        size_bytes = sum(aligned(slot.size_bytes) for slot, _ in named)
        scalars = decode_scalars(stored.read_object(SCALARS))
        packed = bytearray(size_bytes if replica.arena is None else 0)
        data = (
            receive_into(replica, index, size_bytes)
            if replica.arena is not None
            else memoryview(packed)
        )
        stored.read_into({name: (_tensor(data, slot), slot.box) for slot, name in named})
        if replica.arena is None:
            replica.begin_write()
            replica.unpack(index, packed)
        replica.load_scalars(scalars, stored.manifest.step)
        publish(replica, scalars)
    return Pulled(snapshot.step, size_bytes, snapshot.tier, snapshot.checksum)


class _Reading:
    """A stored snapshot that is open for reading.

    An error in the block becomes Corrupt or PeerLost; BadInput is raised as it is. A damaged
    snapshot is set aside, so that no later reader takes it.
    """

    def __init__(self, snapshot: OfferedSnapshot) -> None:
        self._snapshot = snapshot
        self._remote: RemoteTier | None = None

    def __enter__(self) -> StoredSnapshot:
        try:
            return self._open()
        except Exception as error:
            self.__exit__(type(error), error)
            raise

    def _open(self) -> StoredSnapshot:
        """Return the snapshot, opened on a disk or in an object store."""
        path = self._snapshot.path
        if "://" not in path:
            return StoredSnapshot.open(Path(path))
        root, _, name = path.rpartition("/")
        remote = CheckpointTier(target=root, endpoint=self._snapshot.store)
        self._remote = RemoteTier(root, storage_options=remote.storage_options)
        return self._remote.open(name)

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        remote, self._remote = self._remote, None
        path = self._snapshot.path
        try:
            if isinstance(error, Damaged):
                if remote is not None:
                    remote.set_aside(path.rpartition("/")[2], str(error))
                elif Path(path).exists():  # otherwise another rank was faster
                    DiskTier(Path(path).parent).quarantine(Path(path), str(error))
                raise Corrupt(str(error)) from error
        finally:
            if remote is not None:
                remote.close()
        if isinstance(error, (OSError, ChaoskitError)) and not isinstance(
            error, (BadInput, Corrupt, PeerLost)
        ):
            raise PeerLost(f"{path}: {error}") from error


def _slots(stored: StoredSnapshot, parameters: Sequence[str]) -> list[tuple[Slot, str]]:
    """Return the slot of each stored tensor with its stored name.

    Each tensor is whole, under the path that it has in memory.
    """
    slots, offset = [], 0
    for name, entries in stored.items.items():
        if entries[0].dtype:
            slot = Slot(path_of(name, parameters), entries[0].dtype, entries[0].shape, offset)
            slots.append((slot, name))
            offset += aligned(slot.size_bytes)
    return slots


def _tensor(data: memoryview, slot: Slot) -> torch.Tensor:
    """Return the memory of a slot in ``data`` as a tensor."""
    dtype = dtype_named(slot.dtype)
    if not slot.size_bytes:
        return torch.empty(slot.shape, dtype=dtype)
    count = slot.size_bytes // dtype.itemsize
    return torch.frombuffer(data, dtype=dtype, count=count, offset=slot.offset).view(slot.shape)
