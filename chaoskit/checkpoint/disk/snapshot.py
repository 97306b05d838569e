"""A stored snapshot: what is in it, whether it is what was written, and its tensors in the caller's memory.

Readers need not have the shape of the world that wrote: any box of any tensor is put together from the stored ones.
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

#: Memory for tensors that cannot be read in place: those on devices, and those whose bytes lie in another order.
_INDIRECT_BYTES = 2**29


class Wanted(NamedTuple):
    """A part of a stored item, and the tensor of the part's shape that it belongs in. An object is a row of bytes."""

    item: Item
    part: Box
    target: Tensor


class _Read(NamedTuple):
    """A wanted part, the bytes of the file from its first element to its last, and whether they go straight there."""

    wanted: Wanted
    offset: int
    size_bytes: int
    in_place: bool


@dataclass(frozen=True)
class Snapshot:
    """A complete snapshot in a directory. Its files may be damaged: whatever reads them finds out."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: Path) -> Snapshot:
        """Read the manifest.

        Raises:
            Damaged: if there is none, or it is not what was written.
        """
        try:
            return cls(path, decode_manifest((path / MANIFEST).read_bytes()))
        except FileNotFoundError:
            raise Damaged("it has no manifest") from None

    @property
    def name(self) -> str:
        return self.path.name

    @cached_property
    def items(self) -> Mapping[str, list[Item]]:
        """All items by their path; a sharded tensor has several."""
        found: defaultdict[str, list[Item]] = defaultdict(list)
        for item in self.manifest.items:
            found[item.path].append(item)
        return dict(found)

    @cached_property
    def _entries(self) -> dict[str, FileEntry]:
        return {entry.name: entry for entry in self.manifest.files}

    def verify(self) -> None:
        """Read every file, and compare all digests.

        Raises:
            Damaged: at the first file that is missing or not what was written.
        """
        for entry in self.manifest.files:
            verify_file(self.path, entry)

    def fill(self, wanted: Sequence[tuple[FileEntry, Sequence[Segment]]]) -> None:
        """Read parts of files into memory. All else is the same wherever a snapshot lies.

        Raises:
            Damaged: if what is read is not what was written.
        """
        read_files(self.path, wanted)

    def find(self, path: str) -> list[Item]:
        """The items of a path.

        Raises:
            ChaoskitError: if there are none.
        """
        if path not in self.items:
            raise ChaoskitError(f"{self.name} holds no {path!r}")
        return self.items[path]

    def read_object(self, path: str) -> bytes:
        """The bytes of an object, verified.

        Raises:
            Damaged: if they are not what was written.
        """
        item = self.find(path)[0]
        target = torch.empty(item.size_bytes, dtype=torch.uint8)
        self.read([Wanted(item, whole((item.size_bytes,)), target)])
        return target.numpy().tobytes()

    def read_into(self, targets: Mapping[str, tuple[Tensor, Box]]) -> None:
        """Fill tensors: by path, each with the box of the stored tensor that it shall hold.

        Bytes go straight into a target that is contiguous, of the stored type and in this host's memory. All that is
        read is verified. After an error the targets hold anything.

        Raises:
            Damaged: if what would be read is not what was written.
            ChaoskitError: if a path is not there, or not all of a box.
            BadInput: if a target has another shape than its box.
        """
        wanted = []
        for path, (target, box) in targets.items():
            if tuple(target.shape) != box.extent:
                raise BadInput(path, tuple(target.shape), f"give a tensor of shape {box.extent}")
            items = self.find(path)
            if items[0].shape and any(
                last > most for last, most in zip(box.stop, items[0].shape, strict=True)
            ):
                raise BadInput(path, box, f"take a box of a tensor of shape {items[0].shape}")
            for number, part in cover(box, [item.box for item in items]):
                wanted.append(Wanted(items[number], part, target.detach()[part.within(box)]))
        self.read(wanted)

    def read(self, wanted: Sequence[Wanted]) -> None:
        """The same as :meth:`read_into`, for parts of known items.

        Raises:
            Damaged: if what would be read is not what was written.
        """
        for batch in _batches([_plan(one) for one in wanted if one.part.size]):
            by_file: defaultdict[str, list[Segment]] = defaultdict(list)
            buffers = [_buffer(read) for read in batch]
            for read, buffer in zip(batch, buffers, strict=True):
                by_file[read.wanted.item.file].append(Segment(read.offset, buffer.numpy().data))
            self.fill([(self._entries[name], segments) for name, segments in by_file.items()])
            for read, buffer in zip(batch, buffers, strict=True):
                _spread(read, buffer)


def _plan(wanted: Wanted) -> _Read:
    """Where the wanted bytes lie in the file, and whether they can go straight to their place."""
    item, part, target = wanted
    dtype, box = _stored(item)
    if item.size_bytes != box.size * dtype.itemsize:
        raise Damaged(f"{item.path!r} has {item.size_bytes} bytes for {box.extent} of {item.dtype}")
    strides = _strides(box.extent)
    steps = zip(part.start, box.start, strides, strict=True)
    first = sum((begin - origin) * stride for begin, origin, stride in steps)
    span = 1 + sum(
        (extent - 1) * stride for extent, stride in zip(part.extent, strides, strict=True)
    )
    plain = target.is_cpu and target.dtype == dtype and not (target.is_conj() or target.is_neg())
    in_place = plain and target.is_contiguous() and span == part.size
    return _Read(wanted, item.offset + first * dtype.itemsize, span * dtype.itemsize, in_place)


def _buffer(read: _Read) -> Tensor:
    """Bytes to read into: those of the target itself, or others."""
    if read.in_place:
        return flat_bytes(read.wanted.target)
    return torch.empty(read.size_bytes, dtype=torch.uint8)


def _spread(read: _Read, buffer: Tensor) -> None:
    """Place what could not be read in place."""
    if not read.in_place:
        item, part, target = read.wanted
        dtype, box = _stored(item)
        target.copy_(buffer.view(dtype).as_strided(part.extent, _strides(box.extent)))


def _stored(item: Item) -> tuple[torch.dtype, Box]:
    """An item as a box of elements."""
    return (
        (dtype_named(item.dtype), item.box)
        if item.dtype
        else (torch.uint8, whole((item.size_bytes,)))
    )


def _strides(extent: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(extent[dimension + 1 :]) for dimension in range(len(extent)))


def _batches(reads: Sequence[_Read]) -> Iterator[list[_Read]]:
    """The reads in the order of their bytes, in batches that may not overlap in a file and need little memory each."""
    later = sorted(reads, key=lambda read: (read.wanted.item.file, read.offset))
    while later:
        todo, later, batch = later, [], list[_Read]()
        indirect_bytes, name, end = 0, "", 0
        for read in todo:
            need = 0 if read.in_place else read.size_bytes
            overlaps = read.wanted.item.file == name and read.offset < end
            if overlaps or (batch and indirect_bytes + need > _INDIRECT_BYTES):
                later.append(read)
                continue
            batch.append(read)
            indirect_bytes += need
            name, end = read.wanted.item.file, read.offset + read.size_bytes
        yield batch
