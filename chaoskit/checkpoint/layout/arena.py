"""Arena: the training state of a replica, in memory that a peer can copy during training.

On CPU all tensors live in one arena in shared memory: parameters, buffers and the optimizer's
tensors are views into it. A peer on the same host maps the arena and copies it; a peer elsewhere is
sent the same bytes. The arena has

    header (one page) | index (tensor paths, types, shapes, offsets) | scalars (learning rate,
    scheduler, ...) | data

The header holds a sequence number that is odd while the optimizer writes. A copy that overlapped a
commit is thus noticed and repeated (a sequence lock). The arena is an unnamed memory file: it
vanishes with the last process that maps it. The agent maps it, too, so it outlives its worker.
While the sequence number is even, it holds the last committed state.

-> ``runtime/state/replica.py``: the worker that writes. ``runtime/state/peer.py``: a peer's copy.
-> ``layout/seal.py``: seals. ``memory/slots.py``: sealed copies of a sharded state.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
import xxhash
from torch import Tensor

from chaoskit.checkpoint.layout.boxes import Box
from chaoskit.errors import ChaoskitError

HEADER_BYTES = 4096
_INDEX_BYTES = 32 * 2**20  # sparse: only what is written takes memory
_SCALARS_BYTES = 8 * 2**20
DATA_OFFSET = HEADER_BYTES + _INDEX_BYTES + _SCALARS_BYTES
_ALIGN_BYTES = 64
(
    _SEQUENCE,
    _STEP,
    _INDEX_SIZE,
    _SCALARS_SIZE,
    _DATA_SIZE,
    _GENERATION,
    _CHECKSUM,
    _CHECKSUM_END,
    _SEALED,
) = range(9)
_AT_ENTRY, _ENTERED, _IN_CALL = range(9, 12)  # behind the words of a seal: copies have none of them
SEAL_OFFSET = 8 * _CHECKSUM  # in the header
_CHECKSUM_WORDS = struct.Struct("=qq")
_WORD = struct.Struct("=q")
_TOUCH_BYTES = 2**21
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it


class Slot(msgspec.Struct, frozen=True, omit_defaults=True):
    """The place of a tensor in the data part of an arena. ``offset`` is in bytes.

    A slot of a sharded tensor holds a box of it: ``shape`` is the shape of the box, ``start`` its
    position, ``whole`` the shape of the tensor. The last two are empty for a tensor that is held
    whole.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    whole: tuple[int, ...] = ()
    start: tuple[int, ...] = ()

    @property
    def box(self) -> Box:
        """The part of the tensor that is in this slot."""
        return Box(self.start or (0,) * len(self.shape), self.shape)

    @property
    def size_bytes(self) -> int:
        """The size of the part."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count * dtype_named(self.dtype).itemsize


def dtype_named(name: str) -> torch.dtype:
    """Return the torch type with this name, such as ``float32``.

    Raise ChaoskitError if torch has no such type.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ChaoskitError(f"a peer sent a tensor of unknown type {name!r}")
    return dtype


def aligned(size_bytes: int) -> int:
    """Return ``size_bytes`` rounded up to the next position at which a tensor may begin."""
    return -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


_index_decoder = msgspec.msgpack.Decoder(list[Slot])


class ArenaView:
    """A mapped arena: the part of the interface that owner and readers share.

    Args:
        fd: descriptor of the memory file, which must stay open while the view is used.
        writable: map the memory for writing, too.
    """

    def __init__(self, fd: int, *, writable: bool) -> None:
        self.fd = fd
        self._map(writable)

    def _map(self, writable: bool) -> None:
        """Map the whole file in its present size, in place of an earlier mapping."""
        size = os.fstat(self.fd).st_size
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self.map = mmap.mmap(self.fd, size, access=access)
        self.bytes = memoryview(self.map)
        self._header = self.bytes[:HEADER_BYTES].cast("q")

    @classmethod
    def open(cls, path: str) -> ArenaView:
        """Map the arena at ``path``, such as ``/proc/PID/fd/N``, and return a view for reading.

        The memory lives as long as the view.

        Raises:
            OSError: if there is no file at the path, or it is too short for an arena.
        """
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size < DATA_OFFSET:
                raise OSError(errno.EINVAL, "too short for an arena", path)
            view = cls(fd, writable=False)
        except BaseException:
            os.close(fd)
            raise
        weakref.finalize(view, os.close, fd)
        return view

    @property
    def sequence(self) -> int:
        """The sequence number, which is odd during a write."""
        return self._header[_SEQUENCE]

    @property
    def step(self) -> int:
        """The number of committed steps; -1 once the state was given up."""
        return self._header[_STEP]

    @property
    def generation(self) -> int:
        """The last generation that trained on this state; 0 before the first."""
        return self._header[_GENERATION]

    @property
    def at_entry(self) -> bool:
        """True if the state of a step counts only once the next transaction was entered."""
        return bool(self._header[_AT_ENTRY])

    @property
    def is_complete(self) -> bool:
        """True if the writer's script has finished the state of this step.

        False once the state was given up. Always True for a copy of a state.
        """
        if self.step < 0:
            return False
        return not self.at_entry or self._header[_ENTERED] >= self._header[_STEP]

    @property
    def in_call(self) -> bool:
        """True if the writer waits in a collective between two steps and thus writes nothing."""
        return bool(self._header[_IN_CALL])

    @property
    def checksum(self) -> str:
        """The checksum in the seal; "" without a valid seal or during a write."""
        if self._header[_SEQUENCE] % 2 or self._header[_SEALED] != self._header_digest():
            return ""
        return _CHECKSUM_WORDS.pack(*self._header[_CHECKSUM:_SEALED]).hex()

    @property
    def is_damaged(self) -> bool:
        """True if a write was completed, and there is no valid seal: the seal was changed.

        Meaningless for an arena or a copy that has no seal in its header.
        """
        sequence = self._header[_SEQUENCE]
        return sequence > 0 and not sequence % 2 and not self.checksum

    def _header_digest(self) -> int:
        """Return the digest of step, sizes, generation and checksum in the header."""
        digest = xxhash.xxh3_64_digest(self._header[_STEP:_SEALED].tobytes())
        return int(_WORD.unpack(digest)[0])

    def index_bytes(self) -> bytes:
        """Return the encoded index, which :func:`decode_index` decodes."""
        return bytes(self.bytes[HEADER_BYTES : HEADER_BYTES + self._header[_INDEX_SIZE]])

    def scalars_bytes(self) -> bytes:
        """Return a copy of the encoded scalars."""
        start = HEADER_BYTES + _INDEX_BYTES
        return bytes(self.bytes[start : start + self._header[_SCALARS_SIZE]])

    @property
    def size_bytes(self) -> int:
        """The size of the used part of the data."""
        return self._header[_DATA_SIZE]

    def data(self) -> memoryview:
        """Return the used part of the data in place. Release it before :meth:`close`."""
        return self.bytes[DATA_OFFSET : DATA_OFFSET + self._header[_DATA_SIZE]]

    def read_into(self, target: memoryview, offset: int) -> int:
        """Copy data from ``offset`` on into ``target`` and return the number of bytes.

        These may be fewer than ``target`` has room for. Reading is faster than mapping, which costs
        page faults.

        Raises:
            OSError: if the arena ends before its data does.
        """
        count = os.preadv(self.fd, [target], DATA_OFFSET + offset)
        if not count:
            raise OSError("the arena is shorter than its index states")
        return count

    def tensor(self, slot: Slot) -> Tensor:
        """Return the memory of ``slot`` as a tensor. The view must be writable.

        The tensor has a storage of its own, because ``torch.save`` writes whole storages, and
        compilers distrust inputs that share one.
        """
        if not slot.size_bytes:
            return torch.empty(slot.shape, dtype=dtype_named(slot.dtype))
        offset = DATA_OFFSET + slot.offset
        piece = torch.frombuffer(self.map, dtype=torch.uint8, count=slot.size_bytes, offset=offset)
        return piece.view(dtype_named(slot.dtype)).view(slot.shape)

    def invalidate(self) -> None:
        """Mark the content as incomplete and unsealed. The view must be writable."""
        self._header[_SEQUENCE] |= 1
        self._header[_SEALED] = 0

    def close(self) -> None:
        """Unmap the memory. The descriptor stays open.

        Raise BufferError if a view of the data is still in use.
        """
        self._header.release()
        self.bytes.release()
        self.map.close()


class Arena(ArenaView):
    """The arena of this process. ``capacity_bytes`` is address space, not memory."""

    def __init__(self, capacity_bytes: int) -> None:
        fd = os.memfd_create("chaoskit-state", os.MFD_CLOEXEC)
        os.ftruncate(fd, DATA_OFFSET + capacity_bytes)
        super().__init__(fd, writable=True)
        self.capacity_bytes = capacity_bytes
        self._tensor = torch.frombuffer(self.map, dtype=torch.uint8, offset=DATA_OFFSET)
        self._slots: dict[str, Slot] = {}
        self._index_slots: list[Slot] = []  # slots in the index that was published last
        self._index = b""

    def slot(self, path: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Slot:
        """Return the place of a tensor; the same for the same path, type and shape.

        A path with another type or shape gets a new place at the end.

        Raises:
            ChaoskitError: if the arena is full.
        """
        name = str(dtype).removeprefix("torch.")
        previous = self._slots.get(path)
        if previous is not None and (previous.dtype, previous.shape) == (name, shape):
            return previous
        slot = Slot(path, name, shape, self._header[_DATA_SIZE])
        end = slot.offset + aligned(slot.size_bytes)
        if end > self.capacity_bytes:
            raise ChaoskitError(
                f"the state outgrew its arena of {self.capacity_bytes} bytes at {path}"
            )
        self._header[_DATA_SIZE] = end
        self._slots[path] = slot
        return slot

    def holds(self, tensor: Tensor) -> bool:
        """Return True if the tensor lies in the arena, where peers look for it, or is empty."""
        offset = tensor.data_ptr() - self._tensor.data_ptr()
        return 0 <= offset < self.capacity_bytes or not tensor.numel()

    def adopt_layout(self, slots: list[Slot], size_bytes: int) -> None:
        """Use exactly the layout of a peer, so that its data can be copied as one block.

        Raise ChaoskitError if the arena has too little room.
        """
        if size_bytes > self.capacity_bytes:
            raise ChaoskitError(
                f"a peer's state of {size_bytes} bytes does not fit into an arena of {self.capacity_bytes}"
            )
        self._slots = {slot.path: slot for slot in slots}
        self._header[_DATA_SIZE] = size_bytes

    def publish(self, paths: list[str], scalars: bytes, step: int) -> None:
        """Write the index of the tensors at ``paths``, the scalars and the step.

        Call this between :meth:`begin_write` and :meth:`end_write`. Each path must have a slot.

        Raises:
            ChaoskitError: if the index or the scalars are too large.
        """
        slots = [self._slots[path] for path in paths]
        if slots != self._index_slots:
            self._index_slots, self._index = slots, msgspec.msgpack.encode(slots)
        index = self._index
        if len(index) > _INDEX_BYTES or len(scalars) > _SCALARS_BYTES:
            raise ChaoskitError(
                "the index or the scalars of the training state are too large to share"
            )
        self.bytes[HEADER_BYTES : HEADER_BYTES + len(index)] = index
        start = HEADER_BYTES + _INDEX_BYTES
        self.bytes[start : start + len(scalars)] = scalars
        self._header[_INDEX_SIZE], self._header[_SCALARS_SIZE] = len(index), len(scalars)
        self._header[_STEP] = step

    def index_bytes(self) -> bytes:
        """Return the index that was published last. Only this process writes it."""
        return self._index

    def set_generation(self, generation: int) -> None:
        """Set :attr:`generation` to the generation that trains on this state."""
        self._header[_GENERATION] = generation

    def count_at_entry(self, at_entry: bool) -> None:
        """Set :attr:`at_entry`."""
        self._header[_AT_ENTRY] = at_entry

    def enter(self, step: int) -> None:
        """Note that the script has entered the transaction behind ``step`` committed steps."""
        self._header[_ENTERED] = step

    def give_up(self) -> None:
        """Set :attr:`step` to -1: there is no state any more, and readers look elsewhere."""
        self._header[_STEP] = -1

    def call(self, in_call: bool) -> None:
        """Set :attr:`in_call`."""
        self._header[_IN_CALL] = in_call

    def begin_write(self) -> None:
        """Make the sequence number odd: a write begins."""
        self._header[_SEQUENCE] += 1

    def end_write(self) -> None:
        """Make the sequence number even: the write is complete."""
        self._header[_SEQUENCE] += 1

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Mark the block as a write, so that readers that overlap it notice.

        The write counts as complete even if the block raises.
        """
        self.begin_write()
        try:
            yield
        finally:
            self.end_write()


class ArenaImage(ArenaView):
    """A copy of an arena, which is read like one.

    It is incomplete while its sequence number is odd.

    Args:
        capacity_bytes: room for data. All memory is allocated now, so that a lack of memory raises
            an error here instead of a SIGBUS later.

    Raises:
        OSError: if there is no room.
    """

    def __init__(self, capacity_bytes: int) -> None:
        fd = os.memfd_create("chaoskit-copy", os.MFD_CLOEXEC)
        try:
            self.capacity_bytes = _allocate(fd, capacity_bytes)
            super().__init__(fd, writable=True)
        except BaseException:
            os.close(fd)
            raise
        # not earlier: readers may have it open when it is replaced
        weakref.finalize(self, os.close, fd)

    def grow(self, capacity_bytes: int) -> None:
        """Enlarge the image in place, so that its path stays the same for readers.

        An image never shrinks.

        Raises:
            OSError: if there is no room.
        """
        self.capacity_bytes = _allocate(self.fd, capacity_bytes)
        self._map(writable=True)

    def touch(self) -> None:
        """Map every page now, so that the first copy is as fast as any other."""
        # older kernels cannot: there the first copy maps the pages
        with contextlib.suppress(OSError):
            # in parts, as each holds the interpreter's lock
            for start in range(0, self.capacity_bytes, _TOUCH_BYTES):
                part_bytes = min(_TOUCH_BYTES, self.capacity_bytes - start)
                self.map.madvise(_MADV_POPULATE_WRITE, DATA_OFFSET + start, part_bytes)

    @property
    def address(self) -> int:
        """The address of the first byte of the data in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.map)) + DATA_OFFSET

    def begin(
        self, step: int, generation: int, index: bytes, scalars: bytes, size_bytes: int
    ) -> None:
        """Write the header, index and scalars of a new copy.

        The image is unreadable until :meth:`end`.

        Raises:
            ChaoskitError: if the index or the scalars are too large.
            OSError: if there is no memory for them.
        """
        if len(index) > _INDEX_BYTES or len(scalars) > _SCALARS_BYTES:
            raise ChaoskitError(
                "the index or the scalars of the training state are too large to share"
            )
        self.invalidate()
        # raises without room, while a write to the mapping ends by SIGBUS
        os.pwrite(self.fd, index, HEADER_BYTES)
        os.pwrite(self.fd, scalars, HEADER_BYTES + _INDEX_BYTES)
        self._header[_INDEX_SIZE], self._header[_SCALARS_SIZE] = len(index), len(scalars)
        self._header[_STEP], self._header[_GENERATION] = step, generation
        self._header[_DATA_SIZE] = size_bytes

    def end(self, checksum: str = "") -> None:
        """Mark the copy as complete.

        Args:
            checksum: checksum in hexadecimal, with which the copy can be verified after the end of
                this process. Without one the copy has no seal, and counts as incomplete in a slot.
        """
        if checksum:
            words = _CHECKSUM_WORDS.unpack(bytes.fromhex(checksum))
            self._header[_CHECKSUM], self._header[_CHECKSUM_END] = words
            self._header[_SEALED] = self._header_digest()
        self._header[_SEQUENCE] += 1


def _allocate(fd: int, capacity_bytes: int) -> int:
    """Allocate memory for ``capacity_bytes`` of data in a file, never shrinking it.

    Return the capacity.
    """
    before = os.fstat(fd).st_size
    capacity_bytes = max(capacity_bytes, before - DATA_OFFSET, 1)
    os.ftruncate(fd, DATA_OFFSET + capacity_bytes)
    try:
        os.posix_fallocate(fd, 0, HEADER_BYTES)
        os.posix_fallocate(fd, DATA_OFFSET, capacity_bytes)
    except OSError:
        os.ftruncate(fd, before)
        raise
    return capacity_bytes


def decode_index(data: bytes, size_bytes: int) -> list[Slot]:
    """Return the slots of a peer's index, which must lie in ``size_bytes`` bytes of data.

    Raises:
        ChaoskitError: if the bytes are not such an index.
    """
    try:
        slots = _index_decoder.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ChaoskitError(f"a peer sent a damaged index: {error}") from None
    for slot in slots:
        if min(slot.shape, default=0) < 0 or slot.offset < 0 or slot.offset % _ALIGN_BYTES:
            raise ChaoskitError(f"a peer sent a damaged index: {slot}")
        if slot.offset + slot.size_bytes > size_bytes:
            raise ChaoskitError(f"a peer sent a damaged index: {slot} in {size_bytes} bytes")
    return slots


def plain(value: Any) -> Any:
    """Return ``value`` with tuples as lists and tensors of one element as numbers.

    Keys of dicts that are neither strings nor integers become strings.

    Raises:
        ChaoskitError: if it holds anything but numbers, strings, None, tensors of one element,
            lists, tuples and dicts.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(element) for element in value]
    if isinstance(value, dict):
        return {
            key if isinstance(key, (str, int)) else str(key): plain(element)
            for key, element in value.items()
        }
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    raise ChaoskitError(
        f"state of type {type(value).__name__} cannot be shared with peers; keep it in tensors or numbers"
    )
