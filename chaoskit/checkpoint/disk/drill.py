"""The restore drill: a fresh process loads a snapshot twice, with our reader and with plain torch, and compares.

    python -m chaoskit.checkpoint.disk.drill SNAPSHOT

prints a :class:`Drill` as JSON. Like every load with torch it unpickles ``.metadata``, after its digest was verified.
Objects are compared as bytes; nothing of them is unpickled.
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
    """What a restore drill found. ``problem``: why it ended early. ``differ``: paths that two readers read differently.

    ``ours_s`` and ``torch_s``: how long each of the readers took, from whatever cache there was. ``download_s``: how
    long it took before that to copy the snapshot from a store; 0 for one in a directory.
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
        return not self.differ and not self.problem and bool(self.tensors or self.objects)


def drill(snapshot: Path) -> Drill:
    """Run the drill in a process of its own.

    Raises:
        HarnessError: if that process breaks.
    """
    command = [sys.executable, "-m", "chaoskit.checkpoint.disk.drill", str(snapshot)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return msgspec.json.decode(done.stdout, type=Drill)
    except msgspec.MsgspecError:
        raise HarnessError(
            f"the drill ended with status {done.returncode}: {done.stderr.strip()}"
        ) from None


def perform(path: Path) -> Drill:
    """The drill itself. Everything is loaded batch by batch, so that the memory of a large job is not needed."""
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
        ours = _ours(snapshot, paths)
        between_s = time.perf_counter()
        plain = _plain(snapshot, paths)
        ours_s, torch_s = ours_s + between_s - started_s, torch_s + time.perf_counter() - between_s
        differ += [path for path in paths if not _same(ours[path], plain.get(path))]
    objects = len(snapshot.items) - tensors
    return Drill(
        age[0], tensors, objects, snapshot.manifest.size_bytes, ours_s, torch_s, tuple(differ)
    )


def _batches(snapshot: Snapshot) -> Iterator[list[str]]:
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
    """Tensors filled with ones, so that what is not read is seen."""
    found = {}
    for path in paths:
        item = snapshot.items[path][0]
        if item.dtype:
            target = torch.empty(item.shape, dtype=dtype_named(item.dtype))
            flat_bytes(target).fill_(1)
            found[path] = target
    return found


def _ours(snapshot: Snapshot, paths: list[str]) -> dict[str, Tensor | bytes]:
    targets = _targets(snapshot, paths)
    snapshot.read_into(
        {path: (target, whole(tuple(target.shape))) for path, target in targets.items()}
    )
    return targets | {path: snapshot.read_object(path) for path in paths if path not in targets}


def _plain(snapshot: Snapshot, paths: list[str]) -> dict[str, Tensor | bytes]:
    """The same through torch's own reader and planner, which whoever only starts the drill need not import."""
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


def _same(one: Tensor | bytes, other: Tensor | bytes | None) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(flat_bytes(one), flat_bytes(other))
    return type(one) is type(other) and one == other


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.stdout.write(msgspec.json.encode(perform(Path(sys.argv[1]))).decode() + "\n")
