"""torch's own table of contents of a snapshot, so that plain ``torch.distributed.checkpoint`` reads what we wrote.

It is computed from the manifest and never read: a pickle is code, and the manifest says the same.
"""

from __future__ import annotations

import pickle

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from chaoskit.checkpoint.layout.arena import dtype_named
from chaoskit.checkpoint.layout.manifest import Item, Manifest

#: Name of the file.
METADATA = ".metadata"


def encode_metadata(manifest: Manifest) -> bytes:
    """The bytes of the file."""
    return pickle.dumps(build_metadata(manifest))


def build_metadata(manifest: Manifest) -> Metadata:
    """What ``torch.distributed.checkpoint`` knows of a checkpoint."""
    described: dict[str, STORAGE_TYPES] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for index, item in indexed(manifest).items():
        places[index] = _StorageInfo(item.file, *item.container)
        if not item.dtype:
            described[item.path] = BytesStorageMetadata()
            continue
        properties = TensorProperties(dtype=dtype_named(item.dtype))
        known = described.setdefault(
            item.path, TensorStorageMetadata(properties, torch.Size(item.shape), [])
        )
        if isinstance(known, TensorStorageMetadata):
            known.chunks.append(
                ChunkStorageMetadata(torch.Size(item.start), torch.Size(item.extent))
            )
    keys = {path: manifest.keys.get(path, (path,)) for path in described}
    return Metadata(described, keys, places, StorageMeta(), CURRENT_DCP_VERSION)


def indexed(manifest: Manifest) -> dict[MetadataIndex, Item]:
    """The items by what torch calls them. Of replicas, the first.

    The shard of a rank for which nothing was left is not among them: it may begin where a real one does.
    """
    found: dict[MetadataIndex, Item] = {}
    for item in manifest.items:
        if not item.dtype or 0 in item.shape or item.size_bytes:
            found.setdefault(index_of(item), item)
    return found


def index_of(item: Item) -> MetadataIndex:
    """How torch calls a stored item."""
    return (
        MetadataIndex(item.path, torch.Size(item.start)) if item.dtype else MetadataIndex(item.path)
    )
