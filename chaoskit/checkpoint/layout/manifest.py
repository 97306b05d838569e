"""The manifest of a stored snapshot: the part of a tensor that each range of bytes of a file holds.

A snapshot is complete only with its manifest, which is written last. It is JSON, so it can be read
without trust and with any tool. The digest of a file is XXH3-128 over the digests of its chunks. A
part of a file can thus be verified without reading the rest, and an interrupted upload can be
resumed. The manifest begins with a digest of itself.

-> ``disk/staging.py`` and ``remote/upload.py``: write it, which completes a snapshot.
-> ``runtime/state/naming.py``: the names that a job gives to its tensors.
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
#: Version of the format; a reader refuses newer ones.
FORMAT = 1


class Damaged(ChaoskitError):
    """Stored data was changed: a file is missing, or a digest, a size or the manifest is wrong."""


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of a snapshot. ``chunks`` has the XXH3-128 digest of each chunk, in hexadecimal."""

    name: str
    size_bytes: int
    chunks: tuple[str, ...]

    @property
    def digest(self) -> str:
        """The digest of the whole file: XXH3-128 over the digests of its chunks."""
        return xxhash.xxh3_128_hexdigest(b"".join(bytes.fromhex(chunk) for chunk in self.chunks))


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A stored box of a tensor, or an object.

    Args:
        path: name in the state dict, such as ``model.head.weight``.
        file: name of the file with its bytes.
        offset: offset of the first byte in the file.
        size_bytes: number of its bytes, without the container.
        container: offset and length of the ``torch.save`` container around the bytes, which torch's
            own reader opens.
        dtype: type of the elements, such as ``float32``; "" for an object, which is all of its
            container.
        shape: shape of the whole tensor.
        start, extent: the stored box of the tensor.
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
        """The stored box of the tensor."""
        return Box(self.start, self.extent)


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of a snapshot that one writer has added: its files, synced, and their items."""

    files: tuple[FileEntry, ...]
    items: tuple[Item, ...]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The description of a complete snapshot.

    Args:
        step: number of committed steps.
        generation: generation that committed the last of them; 0 outside of chaoskit's runtime.
        world: number of ranks that trained.
        saved_at: wall time in ISO 8601, for people; nothing is decided by it.
        files: the files of the snapshot.
        items: the items in the files.
        keys: keys of an item in a nested state dict, by its path; items of flat ones are missing.
        format: version of the format.
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
        """The size of all files together."""
        return sum(entry.size_bytes for entry in self.files)

    @property
    def age(self) -> tuple[int, int]:
        """Step and generation: the larger, the better to restore.

        The furthest step is best, and of two snapshots of one step the later generation.
        """
        return self.step, self.generation

    def file(self, name: str) -> FileEntry:
        """Return the entry of the file with this name. Raise StopIteration if there is none."""
        return next(entry for entry in self.files if entry.name == name)

    def encode(self) -> bytes:
        """Return the manifest as JSON, with its digest as the first field."""
        text = msgspec.json.format(msgspec.json.encode(self), indent=1)[1:] + b"\n"
        return b'{\n "digest": "%s",%s' % (xxhash.xxh3_128_hexdigest(text).encode(), text)


_decoder = msgspec.json.Decoder(Manifest)
_digest_pattern = re.compile(rb'\{\n "digest": "([0-9a-f]{32})",')


def decode_manifest(data: bytes) -> Manifest:
    """Return the manifest that :meth:`Manifest.encode` has encoded, after checking it.

    Raises:
        Damaged: if the data is no manifest, its digest is wrong, its contents are inconsistent, or
            its format is newer than :data:`FORMAT`.
    """
    digest_match = _digest_pattern.match(data)
    text = data[digest_match.end() :] if digest_match else b""
    if digest_match is None or xxhash.xxh3_128_hexdigest(text).encode() != digest_match[1]:
        raise Damaged("the manifest was changed: its digest is wrong")
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
        is_inside = 0 <= first <= item.offset and item.offset + item.size_bytes <= first + length
        if item.size_bytes < 0 or not is_inside or first + length > sizes.get(item.file, -1):
            raise Damaged(f"the manifest places {item.path!r} outside of its file")
        if not len(item.shape) == len(item.start) == len(item.extent):
            raise Damaged(f"the manifest gives {item.path!r} boxes of different dimensions")
    return manifest
