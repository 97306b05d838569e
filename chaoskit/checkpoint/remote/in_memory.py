"""A snapshot that is put together in memory, for who sends it straight to a store: not a byte of a tensor is copied."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec
from torch import Tensor

from chaoskit.checkpoint.disk import DATA_SUFFIX
from chaoskit.checkpoint.manifest import FileEntry, Manifest
from chaoskit.checkpoint.parts import PartWriter
from chaoskit.checkpoint.remote.source import MemorySource, describe


class _Buffers:
    """A file that is only a list of what was appended."""

    def __init__(self, name: str) -> None:
        self.name, self.size_bytes = name, 0
        self.pieces: list[bytes | memoryview] = []

    def append(self, data: bytes | memoryview) -> None:
        self.pieces.append(data)
        self.size_bytes += len(data)

    def close(self) -> FileEntry:
        return describe(self.name, self.pieces)

    def discard(self) -> None:
        """There is nothing to remove."""


def snapshot_in_memory(
    step: int, tensors: Mapping[str, Tensor], objects: Mapping[str, bytes] | None = None, *, generation: int = 0
) -> MemorySource:
    """The state of a single process as a snapshot. The tensors must not change until it is sent.

    Args:
        tensors: by their path in the state dict; those on devices are copied to this host.
        objects: by their path, such as what ``torch.save`` has serialised.

    Raises:
        BadInput: if a tensor has no dense bytes.
    """
    from chaoskit.checkpoint.dcp_metadata import METADATA, encode_metadata

    file = _Buffers(f"__0_0{DATA_SUFFIX}")
    writer = PartWriter(file)
    for path, tensor in tensors.items():
        writer.add_tensor(path, tensor)
    for path, data in (objects or {}).items():
        writer.add_object(path, data)
    part, saved_at = writer.finish(), datetime.now(UTC).isoformat(timespec="seconds")
    manifest = Manifest(step=step, generation=generation, saved_at=saved_at, files=part.files, items=part.items)
    metadata = encode_metadata(manifest)
    manifest = msgspec.structs.replace(manifest, files=(*part.files, describe(METADATA, [metadata])))
    return MemorySource(manifest, {file.name: file.pieces, METADATA: [metadata]})
