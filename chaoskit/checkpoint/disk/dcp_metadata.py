"""torch's table of contents of a snapshot, so that plain torch can read the snapshot.

It is computed from the manifest, and chaoskit never reads it back: a pickle is code, and the
manifest has the same facts.

-> ``layout/manifest.py``: the manifest. ``dcp.py``: gives torch this description at a load.
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

#: Name of the file with torch's table of contents.
METADATA = ".metadata"


def encode_metadata(manifest: Manifest) -> bytes:
    """Return the content of the ``.metadata`` file."""
    return pickle.dumps(build_metadata(manifest))


def build_metadata(manifest: Manifest) -> Metadata:
    """Return torch's description of a checkpoint."""
    metadata_by_path: dict[str, STORAGE_TYPES] = {}
    storage_infos: dict[MetadataIndex, _StorageInfo] = {}
    for index, item in items_by_index(manifest).items():
        storage_infos[index] = _StorageInfo(item.file, *item.container)
        if not item.dtype:
            metadata_by_path[item.path] = BytesStorageMetadata()
            continue
        properties = TensorProperties(dtype=dtype_named(item.dtype))
        metadata = metadata_by_path.setdefault(
            item.path, TensorStorageMetadata(properties, torch.Size(item.shape), [])
        )
        if isinstance(metadata, TensorStorageMetadata):
            metadata.chunks.append(
                ChunkStorageMetadata(torch.Size(item.start), torch.Size(item.extent))
            )
    keys = {path: manifest.keys.get(path, (path,)) for path in metadata_by_path}
    return Metadata(metadata_by_path, keys, storage_infos, StorageMeta(), CURRENT_DCP_VERSION)


def items_by_index(manifest: Manifest) -> dict[MetadataIndex, Item]:
    """Return the items of a snapshot by torch's index. Of replicas, the first is taken.

    Empty shards of ranks with nothing to hold are left out, because they may begin where a real
    shard does.
    """
    items: dict[MetadataIndex, Item] = {}
    for item in manifest.items:
        if not item.dtype or 0 in item.shape or item.size_bytes:
            items.setdefault(index_of(item), item)
    return items


def index_of(item: Item) -> MetadataIndex:
    """Return torch's index of a stored item."""
    return (
        MetadataIndex(item.path, torch.Size(item.start)) if item.dtype else MetadataIndex(item.path)
    )
