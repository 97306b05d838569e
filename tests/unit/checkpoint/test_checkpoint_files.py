"""The format of stored snapshots: containers that torch opens, reading in place, and detection of
every kind of damage.
"""

from __future__ import annotations

import io
import itertools
import mmap
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chaoskit.checkpoint import DiskTier, NothingToRestore
from chaoskit.checkpoint.disk.container import ALIGN_BYTES, wrap
from chaoskit.checkpoint.disk.retention import Retention
from chaoskit.checkpoint.disk.snapshot import Snapshot, TensorRequest
from chaoskit.checkpoint.layout.boxes import Box, whole
from chaoskit.checkpoint.layout.manifest import FILE_CHUNK_BYTES, Damaged, decode_manifest
from chaoskit.checkpoint.layout.raw import tensor_bytes
from chaoskit.errors import BadInput, ChaoskitError

DTYPES = (
    *(
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ),
    *(
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ),
    *(torch.bool, torch.complex64, torch.complex128),
)
SHAPES = ((), (1,), (7,), (3, 5), (2, 3, 4), (0,), (4, 0, 2), (300, 17))
DATA_FILE = "__0_0.distcp"


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def same_bits(first: torch.Tensor, other: torch.Tensor) -> bool:
    same = first.dtype == other.dtype and first.shape == other.shape
    return same and tensor_bytes(first, "one").tobytes() == tensor_bytes(other, "other").tobytes()


# -- the container ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_opens_the_container(dtype: torch.dtype) -> None:
    for number, shape in enumerate(SHAPES):
        tensor = random_tensor(dtype, shape)
        data = tensor_bytes(tensor, "x")
        first = 1000 + 37 * number
        head, tail = wrap(str(dtype).removeprefix("torch."), shape, len(data), first)
        assert (first + len(head)) % ALIGN_BYTES == 0
        opened = torch.load(io.BytesIO(head + data + tail), weights_only=True)
        assert same_bits(opened, tensor)
        assert opened.stride() == tensor.stride()


def test_a_container_of_more_than_four_gibibytes(tmp_path: Path) -> None:
    count, path = 2**32 + 4096, tmp_path / "large.pt"
    head, tail = wrap("uint8", (count,), count, 0)
    with path.open("wb") as file:  # sparse: the file takes no room on the disk
        file.write(head)
        file.seek(len(head) + count - 1)
        file.write(b"\x07" + tail)
    opened = torch.load(path, mmap=True, weights_only=True)
    assert opened.shape == (count,)
    assert [int(opened[place]) for place in (0, 2**32, -1)] == [0, 0, 7]
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("archive/data/0").file_size == count
        assert archive.read("archive/version") == b"3\n"


# -- what is written is what is read ---------------------------------------------------------------


def test_every_type_and_shape_comes_back(tmp_path: Path) -> None:
    tensors = {
        f"{dtype}{shape}": random_tensor(dtype, shape) for dtype in DTYPES for shape in SHAPES
    }
    tensors |= {
        "transposed": torch.arange(12.0).view(3, 4).T,
        "one of a column": torch.arange(6.0).view(2, 3).T[:1, :1],
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    }
    snapshot = DiskTier(tmp_path).save(3, tensors, {"note": b"text", "void": b""})
    targets = {name: torch.empty_like(tensor).resolve_conj() for name, tensor in tensors.items()}
    snapshot.read_into(
        {name: (target, whole(tuple(target.shape))) for name, target in targets.items()}
    )
    assert [name for name in tensors if not same_bits(targets[name], tensors[name])] == []
    assert (snapshot.read_object("note"), snapshot.read_object("void")) == (b"text", b"")
    assert all(item.offset % ALIGN_BYTES == 0 for item in snapshot.manifest.items if item.dtype)
    assert Snapshot.open(snapshot.path) == snapshot


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 12), max_size=3),
    st.lists(st.integers(0, 12), max_size=3),
    st.booleans(),
    st.data(),
)
def test_any_box_of_what_several_ranks_wrote(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[int],
    columns: list[int],
    transposed: bool,
    data: st.DataObject,
) -> None:
    full = torch.randn(12, 12)
    row_cuts, column_cuts = sorted({0, *rows, 12}), sorted({0, *columns, 12})
    tier, parts = DiskTier(tmp_path_factory.mktemp("root")), []
    with tier.begin(1) as staging:
        for rank, (top, bottom) in enumerate(itertools.pairwise(row_cuts)):
            with staging.writer(f"rank{rank}") as writer:
                for left, right in itertools.pairwise(column_cuts):
                    writer.add_tensor(
                        "w", full[top:bottom, left:right], shape=(12, 12), start=(top, left)
                    )
                parts.append(writer.finish())
        snapshot = staging.commit(parts, world=len(parts))
    start = data.draw(st.tuples(st.integers(0, 11), st.integers(0, 11)))
    box = Box(
        start, (data.draw(st.integers(1, 12 - start[0])), data.draw(st.integers(1, 12 - start[1])))
    )
    target = torch.empty(box.extent).T.contiguous().T if transposed else torch.empty(box.extent)
    double = torch.empty(box.extent, dtype=torch.float64)
    snapshot.read_into({"w": (target, box)})
    snapshot.read_into({"w": (double, box)})
    assert torch.equal(target, full[box.within(whole((12, 12)))])
    assert torch.equal(double, target.double())


def test_large_tensors_cross_chunks_and_one_place_is_read_twice(tmp_path: Path) -> None:
    full = torch.arange(FILE_CHUNK_BYTES // 2, dtype=torch.int32).view(
        -1, 1024
    )  # two chunks, and the container
    snapshot = DiskTier(tmp_path).save(1, {"w": full, "v": full[:5]})
    assert len(snapshot.manifest.files[0].chunks) == 3
    stored, tail = snapshot.items["w"][0], torch.empty(100, 1024, dtype=torch.int32)
    first_copy, second_copy = torch.empty_like(full), torch.empty_like(full)
    snapshot.read_into({"w": (tail, Box((full.shape[0] - 100, 0), (100, 1024)))})
    snapshot.read(
        [
            TensorRequest(stored, stored.box, first_copy),
            TensorRequest(stored, stored.box, second_copy),
        ]
    )
    assert torch.equal(first_copy, full)
    assert torch.equal(second_copy, full)
    assert torch.equal(tail, full[-100:])


def test_memory_that_is_no_tensor_is_stored_too(tmp_path: Path) -> None:
    data = memoryview(bytes(range(24)))
    with DiskTier(tmp_path).begin(1) as staging, staging.writer("agent") as writer:
        writer.add_box("w", data, "int16", Box((1, 0), (4, 3)), (5, 3))
        writer.add_box("w", memoryview(bytes(6)), "int16", Box((0, 0), (1, 3)), (5, 3))
        with pytest.raises(BadInput, match="whole tensor"):
            writer.add_box("w", data, "int16", Box((2, 0), (4, 3)), (5, 3))
        snapshot = staging.commit([writer.finish()])
    target = torch.empty(5, 3, dtype=torch.int16)
    snapshot.read_into({"w": (target, whole((5, 3)))})
    assert tensor_bytes(target, "w").tobytes() == bytes(6) + data.tobytes()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_on_a_device_come_back(tmp_path: Path) -> None:
    full = torch.randn(2 * FILE_CHUNK_BYTES // 4, device="cuda").view(-1, 64)
    snapshot = DiskTier(tmp_path).save(1, {"w": full, "t": full.T})
    whole_target, part = torch.empty_like(full), torch.empty(64, 100, device="cuda")
    snapshot.read_into(
        {"w": (whole_target, whole(tuple(full.shape))), "t": (part, Box((0, 50), (64, 100)))}
    )
    assert torch.equal(whole_target, full)
    assert torch.equal(part, full[50:150].T)


def test_wrong_requests_are_refused(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    snapshot = tier.save(1, {"w": torch.ones(3, 4)})
    with pytest.raises(ChaoskitError, match="holds no 'v'"):
        snapshot.read_into({"v": (torch.ones(3), whole((3,)))})
    with pytest.raises(BadInput, match="shape"):
        snapshot.read_into({"w": (torch.ones(3), whole((3, 4)))})
    with pytest.raises(BadInput, match="box of a tensor"):
        snapshot.read_into({"w": (torch.ones(4, 4), whole((4, 4)))})
    with pytest.raises(BadInput, match="exists"):
        tier.begin(1, 0)
    with pytest.raises(BadInput, match="0 or more"):
        tier.begin(-1)
    with pytest.raises(BadInput, match="dense"):
        tier.save(2, {"w": torch.eye(3).to_sparse()})
    assert list((tmp_path / ".staging").iterdir()) == []


# -- damage ----------------------------------------------------------------------------------------


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 16
    path.write_bytes(data)


def zero_page(path: Path) -> None:
    with path.open("r+b") as file:
        size = path.stat().st_size
        file.seek(min(mmap.PAGESIZE * 3, size // 2))
        file.write(bytes(min(mmap.PAGESIZE, size // 4)))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 3 // 4)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "bit": flip_bit,
    "zeros": zero_page,
    "truncate": truncate,
    "empty": lambda path: os.truncate(path, 0),
    "longer": lengthen,
    "missing": Path.unlink,
    "older": lambda path: (
        shutil.copyfile(path.parents[1] / "step-000000001.g0" / path.name, path) and None
    ),
    "swapped": lambda path: _swap(path, path.parents[1] / "step-000000001.g0" / path.name),
}


def _swap(first: Path, other: Path) -> None:
    kept = first.with_name("kept")
    first.rename(kept)
    other.rename(first)
    kept.rename(other)


def full_state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(300, 500, generator=generator),
        "b": torch.randn(7, generator=generator),
    }


@pytest.mark.parametrize("name", [DATA_FILE, "manifest.json", ".metadata"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_the_snapshot_before_is_taken(
    tmp_path: Path, damage: str, name: str
) -> None:
    tier = DiskTier(tmp_path, retention=Retention(keep_last=0))
    for step in (0, 1, 2):
        tier.save(step, full_state(step), {"step": b"*" * step})
    DAMAGES[damage](tmp_path / "step-000000002.g0" / name)
    scan = DiskTier(tmp_path).newest_verified()
    survivor = 0 if damage == "swapped" else 1
    assert scan.snapshot.manifest.step == survivor
    assert scan.lost_steps == 2 - survivor
    assert [loss.step for loss in scan.lost] == list(range(2, survivor, -1))
    for loss in scan.lost:
        assert loss.reason in (loss.path / "REASON.txt").read_text()
        assert not (tmp_path / loss.name).exists()
    target = torch.empty(300, 500)
    scan.snapshot.read_into({"w": (target, whole((300, 500)))})
    assert torch.equal(target, full_state(survivor)["w"])


@pytest.mark.parametrize("damage", ["bit", "zeros", "truncate", "empty", "missing", "older"])
def test_nothing_damaged_is_ever_read(tmp_path: Path, damage: str) -> None:
    tier = DiskTier(tmp_path, retention=Retention(keep_last=0))
    tier.save(1, full_state(1))
    snapshot = tier.save(2, full_state(2))
    DAMAGES[damage](snapshot.path / DATA_FILE)
    with pytest.raises(Damaged, match=DATA_FILE):
        snapshot.read_into({"w": (torch.empty(300, 500), whole((300, 500)))})


def test_an_older_chunk_in_place_is_found(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    old, new = torch.zeros(FILE_CHUNK_BYTES), torch.ones(FILE_CHUNK_BYTES)  # four chunks each
    before, after = tier.save(1, {"w": old}), tier.save(2, {"w": new})
    with (
        (before.path / DATA_FILE).open("rb") as source,
        (after.path / DATA_FILE).open("r+b") as target,
    ):
        for file in (source, target):
            file.seek(2 * FILE_CHUNK_BYTES)
        target.write(source.read(FILE_CHUNK_BYTES))
    with pytest.raises(Damaged, match=f"bytes {2 * FILE_CHUNK_BYTES} to"):
        after.verify()
    rows = FILE_CHUNK_BYTES // 8  # inside of the first chunk: the requested part is whole
    target = torch.empty(rows)
    after.read_into({"w": (target, whole((rows,)))})
    assert bool((target == 1).all())


def test_every_bit_of_a_manifest_counts(tmp_path: Path) -> None:
    data = (DiskTier(tmp_path).save(1, {"w": torch.ones(3)}).path / "manifest.json").read_bytes()
    decode_manifest(data)
    for place in range(len(data)):
        with pytest.raises(Damaged):
            decode_manifest(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])


def test_when_all_are_damaged_it_says_so(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    with pytest.raises(NothingToRestore):
        tier.newest_verified()
    truncate(tier.save(1, full_state(1)).path / DATA_FILE)
    with pytest.raises(NothingToRestore, match=r"step-000000001\.g0: __0_0\.distcp has"):
        tier.newest_verified()
    assert tier.snapshots() == ([], [])
    assert (next((tmp_path / "quarantine").iterdir()) / DATA_FILE).exists()


def test_a_directory_under_another_name_is_damage(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    tier.save(1, full_state(1)).path.rename(tmp_path / "step-000000009.g0")
    (damaged,) = tier.snapshots().damaged
    assert "its manifest names step-000000001.g0" in damaged.reason
