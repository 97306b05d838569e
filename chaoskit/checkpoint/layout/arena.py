"""The training state of a replica, laid out so that a peer can copy it while this process trains.

On CPU all tensors live in one shared-memory arena: parameters, buffers and the optimizer's tensors are views into it.
A peer on the same host maps the arena and copies it; a peer elsewhere is sent the same bytes. The arena has

    header (one page) | index (tensor paths, types, shapes, offsets) | scalars (learning rate, scheduler, ...) | data

The header holds a sequence number that is odd while the optimizer writes, so a copy that overlapped a commit is noticed
and repeated (a sequence lock). The arena is an unnamed memory file: it vanishes with the last process that maps it. The
agent maps it, too: it outlives its worker, and while the sequence number is even it holds the last committed state.
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
    """Where one tensor lies: ``offset`` in bytes from the start of the data part.

    Of a sharded tensor it is a box: ``shape`` is the box's, ``start`` where it begins in the tensor, whose shape is
    ``whole``. These two are empty for a tensor that is held whole.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    whole: tuple[int, ...] = ()
    start: tuple[int, ...] = ()

    @property
    def box(self) -> Box:
        """The part of the tensor that lies here."""
        return Box(self.start or (0,) * len(self.shape), self.shape)

    @property
    def size_bytes(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count * dtype_named(self.dtype).itemsize


def dtype_named(name: str) -> torch.dtype:
    """The torch type of that name, such as ``float32``."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ChaoskitError(f"a peer sent a tensor of unknown type {name!r}")
    return dtype


def aligned(size_bytes: int) -> int:
    """``size_bytes`` rounded up to where the next tensor may begin."""
    return -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


_index_decoder = msgspec.msgpack.Decoder(list[Slot])


class ArenaView:
    """A mapped arena: what owner and readers have in common."""

    def __init__(self, fd: int, *, writable: bool) -> None:
        self.fd = fd
        self._map(writable)

    def _map(self, writable: bool) -> None:
        size = os.fstat(self.fd).st_size
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self.map = mmap.mmap(self.fd, size, access=access)
        self.bytes = memoryview(self.map)
        self._header = self.bytes[:HEADER_BYTES].cast("q")

    @classmethod
    def open(cls, path: str) -> ArenaView:
        """Map the arena behind ``path``, such as ``/proc/PID/fd/N``. It lives as long as the view.

        Raises:
            OSError: if there is none.
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
        return self._header[_SEQUENCE]

    @property
    def step(self) -> int:
        return self._header[_STEP]

    @property
    def generation(self) -> int:
        """The last generation in which this state was trained on; 0 before the first."""
        return self._header[_GENERATION]

    @property
    def at_entry(self) -> bool:
        """The state of a step counts only once its writer has entered the next transaction."""
        return bool(self._header[_AT_ENTRY])

    @property
    def is_complete(self) -> bool:
        """The script of the writer is done with the state of this step. True for every copy."""
        if self.step < 0:
            return False
        return not self.at_entry or self._header[_ENTERED] >= self._header[_STEP]

    @property
    def in_call(self) -> bool:
        """The writer waits in a collective between two steps, so it writes nothing now."""
        return bool(self._header[_IN_CALL])

    @property
    def checksum(self) -> str:
        """What its writer has sealed it with; "" if it is not sealed, is being written, or has a damaged header."""
        if self._header[_SEQUENCE] % 2 or self._header[_SEALED] != self._header_digest():
            return ""
        return _CHECKSUM_WORDS.pack(*self._header[_CHECKSUM:_SEALED]).hex()

    @property
    def is_damaged(self) -> bool:
        """Whether it was sealed, and the seal was changed. Of a copy that is sealed elsewhere this says nothing."""
        sequence = self._header[_SEQUENCE]
        return sequence > 0 and not sequence % 2 and not self.checksum

    def _header_digest(self) -> int:
        digest = xxhash.xxh3_64_digest(self._header[_STEP:_SEALED].tobytes())
        return int(_WORD.unpack(digest)[0])

    def index_bytes(self) -> bytes:
        return bytes(self.bytes[HEADER_BYTES : HEADER_BYTES + self._header[_INDEX_SIZE]])

    def scalars_bytes(self) -> bytes:
        start = HEADER_BYTES + _INDEX_BYTES
        return bytes(self.bytes[start : start + self._header[_SCALARS_SIZE]])

    @property
    def size_bytes(self) -> int:
        """Size of the used part of the data."""
        return self._header[_DATA_SIZE]

    def data(self) -> memoryview:
        """The used part of the data."""
        return self.bytes[DATA_OFFSET : DATA_OFFSET + self._header[_DATA_SIZE]]

    def read_into(self, target: memoryview, offset: int) -> int:
        """Copy data from ``offset`` on; returns how much. Reading is faster than mapping, which costs page faults.

        Raises:
            OSError: if the arena ends before its data does.
        """
        count = os.preadv(self.fd, [target], DATA_OFFSET + offset)
        if not count:
            raise OSError("an arena that is shorter than its index says")
        return count

    def tensor(self, slot: Slot) -> Tensor:
        """The memory at ``slot`` as a tensor, where it is mapped to be written.

        It has a storage of its own: ``torch.save`` writes whole storages, and compilers distrust inputs that share one.
        """
        if not slot.size_bytes:
            return torch.empty(slot.shape, dtype=dtype_named(slot.dtype))
        offset = DATA_OFFSET + slot.offset
        piece = torch.frombuffer(self.map, dtype=torch.uint8, count=slot.size_bytes, offset=offset)
        return piece.view(dtype_named(slot.dtype)).view(slot.shape)

    def spoil(self) -> None:
        """What it holds is not to be read. Where it is mapped to be written."""
        self._header[_SEQUENCE] |= 1
        self._header[_SEALED] = 0

    def close(self) -> None:
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
        self._index_slots: list[Slot] = []  # of the index that was published last
        self._index = b""

    def slot(self, path: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Slot:
        """The place of a tensor; the same for the same path, type and shape."""
        name = str(dtype).removeprefix("torch.")
        known = self._slots.get(path)
        if known is not None and (known.dtype, known.shape) == (name, shape):
            return known
        slot = Slot(path, name, shape, self._header[_DATA_SIZE])
        end = slot.offset + aligned(slot.size_bytes)
        if end > self.capacity_bytes:
            raise ChaoskitError(f"state outgrew its arena of {self.capacity_bytes} bytes at {path}")
        self._header[_DATA_SIZE] = end
        self._slots[path] = slot
        return slot

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in the arena, where peers look for it."""
        offset = tensor.data_ptr() - self._tensor.data_ptr()
        return 0 <= offset < self.capacity_bytes or not tensor.numel()

    def adopt_layout(self, slots: list[Slot], size_bytes: int) -> None:
        """Use exactly the layout of a peer, so that its data can be copied as one block."""
        if size_bytes > self.capacity_bytes:
            raise ChaoskitError(
                f"a peer's state of {size_bytes} bytes does not fit {self.capacity_bytes}"
            )
        self._slots = {slot.path: slot for slot in slots}
        self._header[_DATA_SIZE] = size_bytes

    def publish(self, paths: list[str], scalars: bytes, step: int) -> None:
        """Write index, scalars and step. To be called between :meth:`begin_write` and :meth:`end_write`."""
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
        """The index that was published last, which only this process writes."""
        return self._index

    def stand_in(self, generation: int) -> None:
        """The state is the one that ``generation`` trains on."""
        self._header[_GENERATION] = generation

    def count_at_entry(self, at_entry: bool) -> None:
        """Set :attr:`at_entry`."""
        self._header[_AT_ENTRY] = at_entry

    def enter(self, step: int) -> None:
        """Show that the script has entered the transaction behind ``step`` committed steps."""
        self._header[_ENTERED] = step

    def give_up(self) -> None:
        """Show that there is no state any more: readers look elsewhere."""
        self._header[_STEP] = -1

    def call(self, in_call: bool) -> None:
        """Set :attr:`in_call`."""
        self._header[_IN_CALL] = in_call

    def begin_write(self) -> None:
        self._header[_SEQUENCE] += 1

    def end_write(self) -> None:
        self._header[_SEQUENCE] += 1

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Readers that overlap this block notice it."""
        self.begin_write()
        try:
            yield
        finally:
            self.end_write()


class ArenaImage(ArenaView):
    """A copy of an arena, which is read like one. Odd sequence numbers say that it is not complete.

    Args:
        capacity_bytes: room for data. All of it is taken now: that there is none is said now, not by SIGBUS later.

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
        weakref.finalize(self, os.close, fd)  # readers may still have it open when it is replaced

    def grow(self, capacity_bytes: int) -> None:
        """Make room for more, in place: readers that open it find it under the same name. Raises OSError."""
        self.capacity_bytes = _allocate(self.fd, capacity_bytes)
        self._map(writable=True)

    def touch(self) -> None:
        """Map every page now, so that the first copy is as fast as any other."""
        with contextlib.suppress(OSError):  # an older kernel: the first copy does it
            for start in range(
                0, self.capacity_bytes, _TOUCH_BYTES
            ):  # which holds the lock of the interpreter
                part_bytes = min(_TOUCH_BYTES, self.capacity_bytes - start)
                self.map.madvise(_MADV_POPULATE_WRITE, DATA_OFFSET + start, part_bytes)

    @property
    def address(self) -> int:
        """Of the first byte of the data in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.map)) + DATA_OFFSET

    def begin(
        self, step: int, generation: int, index: bytes, scalars: bytes, size_bytes: int
    ) -> None:
        """From here until :meth:`end` the image is unreadable. Raises OSError where there is no room for the index."""
        if len(index) > _INDEX_BYTES or len(scalars) > _SCALARS_BYTES:
            raise ChaoskitError(
                "the index or the scalars of the training state are too large to share"
            )
        self.spoil()
        os.pwrite(
            self.fd, index, HEADER_BYTES
        )  # which fails where there is no room, instead of by SIGBUS
        os.pwrite(self.fd, scalars, HEADER_BYTES + _INDEX_BYTES)
        self._header[_INDEX_SIZE], self._header[_SCALARS_SIZE] = len(index), len(scalars)
        self._header[_STEP], self._header[_GENERATION] = step, generation
        self._header[_DATA_SIZE] = size_bytes

    def end(self, checksum: str = "") -> None:
        """The data is complete. With its checksum, others can trust it when this process is gone."""
        if checksum:
            words = _CHECKSUM_WORDS.unpack(bytes.fromhex(checksum))
            self._header[_CHECKSUM], self._header[_CHECKSUM_END] = words
            self._header[_SEALED] = self._header_digest()
        self._header[_SEQUENCE] += 1


def _allocate(fd: int, capacity_bytes: int) -> int:
    """Give the file behind ``fd`` memory for so much data, and never less than it has; returns for how much."""
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
    """The slots of a peer's index, which lie in ``size_bytes`` bytes of data.

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
    """``value`` with tuples as lists, or an error where it is not made of numbers, strings, lists and dicts."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {
            key if isinstance(key, (str, int)) else str(key): plain(item)
            for key, item in value.items()
        }
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    raise ChaoskitError(
        f"state of type {type(value).__name__} cannot be shared with peers; keep it in tensors or numbers"
    )
