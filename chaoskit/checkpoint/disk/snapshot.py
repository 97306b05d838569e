"""A stored snapshot: its items, its verification, and reads of its tensors into given memory.

Readers need not have the shape of the world that wrote the snapshot: any box of any tensor is put
together from the stored boxes.

-> ``disk/reading.py``: reads and digests the bytes. ``remote/tier.py``: a snapshot in a store.
-> ``runtime/state/from_store.py``: a rank of a job reads its state with this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from chaoskit.checkpoint.disk.reading import Segment, read_files, verify_file
from chaoskit.checkpoint.layout.arena import dtype_named
from chaoskit.checkpoint.layout.boxes import Box, cover, whole
from chaoskit.checkpoint.layout.manifest import (
    MANIFEST,
    Damaged,
    FileEntry,
    Item,
    Manifest,
    decode_manifest,
)
from chaoskit.checkpoint.layout.raw import flat_bytes
from chaoskit.errors import BadInput, ChaoskitError

#: Memory for tensors that cannot be read in place: those on devices, and those whose bytes lie in
#: another order.
_INDIRECT_BYTES = 2**29


class TensorRequest(NamedTuple):
    """A part of a stored item, and the tensor to fill with it. An object is a row of bytes."""

    item: Item
    part: Box
    target: Tensor


class _Read(NamedTuple):
    """A read of a file for a requested part.

    Attributes:
        request: the requested part of an item.
        offset: offset in the file of the part's first element.
        size_bytes: number of bytes from the first element to the last.
        in_place: True if the bytes can be read straight into the target.
    """

    request: TensorRequest
    offset: int
    size_bytes: int
    in_place: bool


@dataclass(frozen=True)
class Snapshot:
    """A complete snapshot in a directory. Damage to its files shows only when they are read."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: Path) -> Snapshot:
        """Return the snapshot in the directory ``path``. Only its manifest is read.

        Raises:
            Damaged: if the manifest is missing or was changed.
            OSError: if the manifest cannot be read for another reason.
        """
        try:
            return cls(path, decode_manifest((path / MANIFEST).read_bytes()))
        except FileNotFoundError:
            raise Damaged("it has no manifest") from None

    @property
    def name(self) -> str:
        """The name of the snapshot."""
        return self.path.name

    @cached_property
    def items(self) -> Mapping[str, list[Item]]:
        """All items by their path; a sharded tensor has several."""
        items: defaultdict[str, list[Item]] = defaultdict(list)
        for item in self.manifest.items:
            items[item.path].append(item)
        return dict(items)

    @cached_property
    def _entries(self) -> dict[str, FileEntry]:
        """The entries of the files in the manifest, by file name."""
        return {entry.name: entry for entry in self.manifest.files}

    def verify(self) -> None:
        """Read every file, and compare all digests.

        Raises:
            Damaged: at the first file that is missing or was changed, or that the disk cannot read.
            OSError: if a file cannot be opened or read for another reason.
        """
        for entry in self.manifest.files:
            verify_file(self.path, entry)

    def fill(self, requests: Sequence[tuple[FileEntry, Sequence[Segment]]]) -> None:
        """Fill the memory of the segments of each file with verified bytes.

        Subclasses replace this and :meth:`verify` for snapshots in other places.

        Raises:
            Damaged: if a file is missing or its data was changed.
            OSError: if a file cannot be opened or read for another reason.
        """
        read_files(self.path, requests)

    def find(self, path: str) -> list[Item]:
        """Return the items of a path.

        Raises:
            ChaoskitError: if there are none.
        """
        if path not in self.items:
            raise ChaoskitError(f"{self.name} holds no {path!r}")
        return self.items[path]

    def read_object(self, path: str) -> bytes:
        """Return the verified bytes of an object.

        Raises:
            Damaged: if they were changed.
            ChaoskitError: if there is no such object.
            OSError: as :meth:`fill` does.
        """
        item = self.find(path)[0]
        target = torch.empty(item.size_bytes, dtype=torch.uint8)
        self.read([TensorRequest(item, whole((item.size_bytes,)), target)])
        return target.numpy().tobytes()

    def read_into(self, targets: Mapping[str, tuple[Tensor, Box]]) -> None:
        """Fill tensors, each with a box of the stored tensor of its path.

        Bytes go straight into a target that is contiguous, of the stored type and in this host's
        memory. Other targets get the values converted to their type. All bytes that are read are
        verified. The targets hold garbage after an error.

        Raises:
            Damaged: if data was changed.
            OSError: as :meth:`fill` does.
            ChaoskitError: if a path is not stored, or not all of a box.
            BadInput: if a target has another shape than its box, or the box reaches beyond the
                stored tensor.
        """
        requests = []
        for path, (target, box) in targets.items():
            if tuple(target.shape) != box.extent:
                raise BadInput(path, tuple(target.shape), f"give a tensor of shape {box.extent}")
            items = self.find(path)
            if items[0].shape and any(
                last > most for last, most in zip(box.stop, items[0].shape, strict=True)
            ):
                raise BadInput(path, box, f"take a box of a tensor of shape {items[0].shape}")
            for number, part in cover(box, [item.box for item in items]):
                requests.append(
                    TensorRequest(items[number], part, target.detach()[part.within(box)])
                )
        self.read(requests)

    def read(self, requests: Sequence[TensorRequest]) -> None:
        """Fill the targets of requests for parts of items; see :meth:`read_into`.

        Empty parts are skipped.

        Raises:
            Damaged: if data was changed.
            OSError: as :meth:`fill` does.
        """
        for batch in _batches([_plan(request) for request in requests if request.part.size]):
            by_file: defaultdict[str, list[Segment]] = defaultdict(list)
            buffers = [_buffer_for(read) for read in batch]
            for read, buffer in zip(batch, buffers, strict=True):
                by_file[read.request.item.file].append(Segment(read.offset, buffer.numpy().data))
            self.fill([(self._entries[name], segments) for name, segments in by_file.items()])
            for read, buffer in zip(batch, buffers, strict=True):
                _copy_to_target(read, buffer)


def _plan(request: TensorRequest) -> _Read:
    """Return the read that serves a request.

    Raise Damaged if the item's size does not fit its shape.
    """
    item, part, target = request
    dtype, box = _stored_type_and_box(item)
    if item.size_bytes != box.size * dtype.itemsize:
        raise Damaged(f"{item.path!r} has {item.size_bytes} bytes for {box.extent} of {item.dtype}")
    strides = _strides(box.extent)
    dimensions = zip(part.start, box.start, strides, strict=True)
    first_element = sum((begin - origin) * stride for begin, origin, stride in dimensions)
    element_span = 1 + sum(
        (extent - 1) * stride for extent, stride in zip(part.extent, strides, strict=True)
    )
    is_plain = target.is_cpu and target.dtype == dtype and not (target.is_conj() or target.is_neg())
    in_place = is_plain and target.is_contiguous() and element_span == part.size
    return _Read(
        request,
        item.offset + first_element * dtype.itemsize,
        element_span * dtype.itemsize,
        in_place,
    )


def _buffer_for(read: _Read) -> Tensor:
    """Return the bytes to read into: those of the target itself, or a new buffer."""
    if read.in_place:
        return flat_bytes(read.request.target)
    return torch.empty(read.size_bytes, dtype=torch.uint8)


def _copy_to_target(read: _Read, buffer: Tensor) -> None:
    """Copy the elements from the buffer to the target if they were not read in place."""
    if not read.in_place:
        item, part, target = read.request
        dtype, box = _stored_type_and_box(item)
        target.copy_(buffer.view(dtype).as_strided(part.extent, _strides(box.extent)))


def _stored_type_and_box(item: Item) -> tuple[torch.dtype, Box]:
    """Return element type and box of an item. An object is a box of bytes."""
    return (
        (dtype_named(item.dtype), item.box)
        if item.dtype
        else (torch.uint8, whole((item.size_bytes,)))
    )


def _strides(extent: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor."""
    return tuple(prod(extent[dimension + 1 :]) for dimension in range(len(extent)))


def _batches(reads: Sequence[_Read]) -> Iterator[list[_Read]]:
    """Yield the reads in batches, ordered by their place.

    Reads of a batch do not overlap in a file, and need a limited amount of buffers.
    """
    later = sorted(reads, key=lambda read: (read.request.item.file, read.offset))
    while later:
        candidates, later, batch = later, [], list[_Read]()
        indirect_bytes, name, end = 0, "", 0
        for read in candidates:
            needed_bytes = 0 if read.in_place else read.size_bytes
            overlaps = read.request.item.file == name and read.offset < end
            if overlaps or (batch and indirect_bytes + needed_bytes > _INDIRECT_BYTES):
                later.append(read)
                continue
            batch.append(read)
            indirect_bytes += needed_bytes
            name, end = read.request.item.file, read.offset + read.size_bytes
        yield batch
