"""The table of contents of a stored snapshot: which bytes of which file are which part of which tensor.

A snapshot counts only with its manifest, which is written last. It is JSON, so it can be read without trust and with
any tool. The digest of a file is XXH3-128 over the digests of its chunks: a part of a file can be verified without
reading the rest, and an upload that broke off can go on where it stood. The manifest begins with a digest of itself.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

import msgspec
import xxhash

from chaoskit.checkpoint.layout.boxes import Box
from chaoskit.errors import ChaoskitError

#: Name of the manifest in the directory of its snapshot.
MANIFEST = "manifest.json"
#: Files are digested in chunks of this size; the last one may be shorter.
FILE_CHUNK_BYTES = 2**24
#: Of the format; a reader refuses newer ones.
FORMAT = 1


class Damaged(ChaoskitError):
    """What is stored is not what was written: a digest, a size or the manifest itself is wrong."""


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a snapshot. ``chunks``: XXH3-128 of each chunk, in hexadecimal."""

    name: str
    size_bytes: int
    chunks: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Of the whole file: XXH3-128 over the digests of its chunks."""
        return xxhash.xxh3_128_hexdigest(b"".join(bytes.fromhex(chunk) for chunk in self.chunks))


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One stored box of a tensor, or an object.

    Args:
        path: name in the state dict, such as ``model.head.weight``.
        file: where it lies.
        offset: of its first byte in the file.
        size_bytes: of its bytes alone.
        container: offset and length of the ``torch.save`` container around them, which torch's own reader opens.
        dtype: such as ``float32``; "" for an object, whose bytes are all of the container.
        shape: of the whole tensor.
        start, extent: the box of it that lies here.
    """

    path: str
    file: str
    offset: int
    size_bytes: int
    container: tuple[int, int]
    dtype: str = ""
    shape: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    extent: tuple[int, ...] = ()

    @property
    def box(self) -> Box:
        return Box(self.start, self.extent)


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one writer has added to a snapshot: its files, synced, and what is in them."""

    files: tuple[FileEntry, ...]
    items: tuple[Item, ...]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A complete snapshot.

    Args:
        step: committed steps.
        generation: the membership that committed the last of them; 0 outside of chaoskit's runtime.
        world: ranks that trained.
        saved_at: wall time in ISO 8601, for people; nothing is decided by it.
        keys: where an item stands in a nested state dict, by its path; items of flat ones are missing.
    """

    step: int
    generation: int = 0
    world: int = 1
    saved_at: str = ""
    files: tuple[FileEntry, ...]
    items: tuple[Item, ...]
    keys: dict[str, tuple[str | int, ...]] = {}
    format: int = FORMAT

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(entry.size_bytes for entry in self.files)

    @property
    def age(self) -> tuple[int, int]:
        """The larger, the better to restore: the furthest step, and of two that came as far the later generation."""
        return self.step, self.generation

    def file(self, name: str) -> FileEntry:
        """The entry of a file that some item names."""
        return next(entry for entry in self.files if entry.name == name)

    def encode(self) -> bytes:
        text = msgspec.json.format(msgspec.json.encode(self), indent=1)[1:] + b"\n"
        return b'{\n "digest": "%s",%s' % (xxhash.xxh3_128_hexdigest(text).encode(), text)


_decoder = msgspec.json.Decoder(Manifest)
_sealed = re.compile(rb'\{\n "digest": "([0-9a-f]{32})",')


def decode_manifest(data: bytes) -> Manifest:
    """Read a manifest.

    Raises:
        Damaged: if it is none, or names what cannot be.
    """
    seal = _sealed.match(data)
    text = data[seal.end() :] if seal else b""
    if seal is None or xxhash.xxh3_128_hexdigest(text).encode() != seal[1]:
        raise Damaged("the manifest is not what was written: its digest is wrong")
    try:
        manifest = _decoder.decode(b"{" + text)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Damaged(f"the manifest cannot be read: {error}") from None
    if manifest.format > FORMAT:
        raise Damaged(
            f"the manifest has format {manifest.format}, and this version of chaoskit reads up to {FORMAT}"
        )
    sizes = {}
    for entry in manifest.files:
        if PurePosixPath(entry.name).name != entry.name or entry.name in ("", ".", "..", MANIFEST):
            raise Damaged(f"the manifest names a file {entry.name!r} outside of its snapshot")
        if entry.size_bytes < 0 or len(entry.chunks) != -(-entry.size_bytes // FILE_CHUNK_BYTES):
            raise Damaged(
                f"the manifest has {len(entry.chunks)} digests for {entry.size_bytes} bytes of {entry.name}"
            )
        sizes[entry.name] = entry.size_bytes
    for item in manifest.items:
        first, length = item.container
        inside = 0 <= first <= item.offset and item.offset + item.size_bytes <= first + length
        if item.size_bytes < 0 or not inside or first + length > sizes.get(item.file, -1):
            raise Damaged(f"the manifest places {item.path!r} outside of its file")
        if not len(item.shape) == len(item.start) == len(item.extent):
            raise Damaged(f"the manifest gives {item.path!r} boxes of different dimensions")
    return manifest
