"""Restore drill: a fresh process loads a snapshot with our reader and with torch, and compares.

    python -m chaoskit.checkpoint.disk.drill SNAPSHOT

prints a :class:`Drill` as JSON. Like every load with torch, it unpickles ``.metadata``, after its
digest was verified. Objects are compared as bytes and never unpickled.

-> ``inspecting.py``: downloads a remote snapshot for its drill.
"""

from __future__ import annotations

import io
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from chaoskit.checkpoint.disk.names import parse_name
from chaoskit.checkpoint.disk.snapshot import Snapshot
from chaoskit.checkpoint.layout.arena import dtype_named
from chaoskit.checkpoint.layout.boxes import whole
from chaoskit.checkpoint.layout.manifest import Damaged
from chaoskit.checkpoint.layout.raw import flat_bytes
from chaoskit.errors import HarnessError

_BATCH_BYTES = 2**29


class Drill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a restore drill.

    Attributes:
        step: step of the snapshot; -1 if its name has none.
        tensors: number of tensors.
        objects: number of objects that are not tensors.
        size_bytes: size of the snapshot.
        ours_s: time that our reader took, with whatever was in the page cache.
        torch_s: time that torch's reader took, likewise.
        differ: paths that the two readers read differently.
        problem: damage of the snapshot, which ended the drill before any load; "" for none. The
            numbers of tensors, objects and bytes are 0 then.
        download_s: time to copy the snapshot from a store before that; 0 for one in a directory.
    """

    step: int
    tensors: int = 0
    objects: int = 0
    size_bytes: int = 0
    ours_s: float = 0.0
    torch_s: float = 0.0
    differ: tuple[str, ...] = ()
    problem: str = ""
    download_s: float = 0.0

    @property
    def passed(self) -> bool:
        """True if both readers read the same, and read something."""
        return not self.differ and not self.problem and bool(self.tensors or self.objects)


def drill(snapshot: Path) -> Drill:
    """Run the drill in a process of its own, and return its result.

    A damaged snapshot is no error: the result has the damage as its ``problem``.

    Raises:
        HarnessError: if that process fails without a result, such as when torch cannot load.
    """
    command = [sys.executable, "-m", "chaoskit.checkpoint.disk.drill", str(snapshot)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return msgspec.json.decode(process.stdout, type=Drill)
    except msgspec.MsgspecError:
        raise HarnessError(
            f"the drill ended with status {process.returncode}: {process.stderr.strip()}"
        ) from None


def perform(path: Path) -> Drill:
    """Run the drill in this process, and return its result.

    A damaged snapshot raises no error: the result has the damage as its ``problem``. Data is loaded
    batch by batch, so that the memory of a large job is not needed.

    Raises:
        Exception: any error of a reader after the digests were verified, such as torch's.
    """
    age = parse_name(path.name) or (-1, 0)
    try:
        snapshot = Snapshot.open(path)
        snapshot.verify()
    except Damaged as error:
        return Drill(age[0], problem=str(error))
    tensors = sum(1 for items in snapshot.items.values() if items[0].dtype)
    differ: list[str] = []
    ours_s = torch_s = 0.0
    for paths in _batches(snapshot):
        started_s = time.perf_counter()
        own_values = _read_with_chaoskit(snapshot, paths)
        between_s = time.perf_counter()
        torch_values = _read_with_torch(snapshot, paths)
        ours_s, torch_s = ours_s + between_s - started_s, torch_s + time.perf_counter() - between_s
        differ += [
            path for path in paths if not _are_equal(own_values[path], torch_values.get(path))
        ]
    objects = len(snapshot.items) - tensors
    return Drill(
        age[0], tensors, objects, snapshot.manifest.size_bytes, ours_s, torch_s, tuple(differ)
    )


def _batches(snapshot: Snapshot) -> Iterator[list[str]]:
    """Yield lists of paths, each with the next 512 MiB of the snapshot."""
    batch, size_bytes = list[str](), 0
    for path, items in snapshot.items.items():
        batch.append(path)
        size_bytes += sum(item.size_bytes for item in items)
        if size_bytes >= _BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def _targets(snapshot: Snapshot, paths: list[str]) -> dict[str, Tensor]:
    """Return a tensor for each path of a tensor, by path, to be filled by a reader.

    All their bytes are 1, so that bytes that are not read are noticed.
    """
    targets = {}
    for path in paths:
        item = snapshot.items[path][0]
        if item.dtype:
            target = torch.empty(item.shape, dtype=dtype_named(item.dtype))
            flat_bytes(target).fill_(1)
            targets[path] = target
    return targets


def _read_with_chaoskit(snapshot: Snapshot, paths: list[str]) -> dict[str, Tensor | bytes]:
    """Return the content of each path as our reader reads it: a tensor, or an object's bytes."""
    targets = _targets(snapshot, paths)
    snapshot.read_into(
        {path: (target, whole(tuple(target.shape))) for path, target in targets.items()}
    )
    return targets | {path: snapshot.read_object(path) for path in paths if path not in targets}


def _read_with_torch(snapshot: Snapshot, paths: list[str]) -> dict[str, Tensor | bytes]:
    """Return the content of each path as torch's reader and planner read it.

    The form is that of :func:`_read_with_chaoskit`. The two are imported here, so that a process
    that starts the drill need not load them.
    """
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.planner import ReadItem
    from torch.distributed.checkpoint.state_dict_loader import load

    objects: dict[str, bytes] = {}

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
            objects[read_item.dest_index.fqn] = value.getvalue()

    state: dict[str, Any] = dict.fromkeys(paths, b"") | _targets(snapshot, paths)
    load(state, storage_reader=FileSystemReader(snapshot.path), planner=Planner(), no_dist=True)
    return state | objects


def _are_equal(first: Tensor | bytes, second: Tensor | bytes | None) -> bool:
    """Return True if both are tensors, or both are objects, and all bytes are equal."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(flat_bytes(first), flat_bytes(second))
    return type(first) is type(second) and first == second


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.stdout.write(msgspec.json.encode(perform(Path(sys.argv[1]))).decode() + "\n")
