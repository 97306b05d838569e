"""The promises hold on GPUs, too: tests that are skipped, visibly, on machines without one GPU or
two.
"""

from __future__ import annotations

import gc
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
import torch.distributed.checkpoint as dcp
from unit.checkpoint.test_snapshot import stored

from chaoskit.checkpoint import DiskTier, SnapshotReader, SnapshotWriter
from chaoskit.checkpoint.layout.held import HeldTensor
from chaoskit.checkpoint.memory.slots import Slots
from chaoskit.checkpoint.memory.snapshotter import Snapshotter
from chaoskit.pytest_plugin import Chaos
from faults import Hang, Kill, NaN, Raise

TOLD_S = 10.0

pytestmark = [pytest.mark.gpu, pytest.mark.chaos(device="cuda", options={"size": "tiny"})]


def require_two() -> None:
    """Skip the test unless there are two devices: NCCL gives each rank a device of its own."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")


# -- one device ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["exact", "fast"])
@pytest.mark.parametrize("job", ["gpt", "fsdp"])
def test_training_on_one_gpu(chaos: Chaos, job: str, reduction: str) -> None:
    """A world of one rank commits every step, with the losses of its twin."""
    if job == "fsdp" and reduction == "fast":
        pytest.skip("sharded jobs have one reduction")
    outcome = chaos.run(job, nodes=1, spares=0, steps=20, reduction=reduction)
    assert len(outcome.steps) == 20
    outcome.assert_same_losses_as_twin()


@pytest.mark.parametrize(
    "fault",
    [Kill(rank=0, at_step=10), Hang(rank=0, at_step=10), Raise(rank=0, at_step=10)],
    ids=["kill", "stop", "raise"],
)
def test_a_lost_rank_goes_on_from_the_copy_of_its_state(
    chaos: Chaos, fault: Kill | Hang | Raise
) -> None:
    """The device itself makes the copy, on a stream of its own."""
    outcome = chaos.run("fsdp", nodes=1, spares=1, steps=20, faults=[fault])
    assert outcome.lost_steps <= 1
    outcome.assert_same_losses_as_twin()


@pytest.mark.parametrize("job", ["gpt", "fsdp"])
def test_a_nan_on_one_gpu_is_never_committed(chaos: Chaos, job: str) -> None:
    """The NaN is found and traced on the device."""
    chaos.run(
        job, nodes=1, spares=1, steps=20, faults=[NaN(rank=0, at_step=10, parameter="head.weight")]
    )


def test_snapshots_hold_the_values_of_their_step() -> None:
    """Every element holds its step, so that a copy overtaken by the next update would show."""
    tensors = [
        HeldTensor(f"t{number}", torch.zeros(size, device="cuda"))
        for number, size in enumerate((7, 0, 30_000_000))
    ]
    step = 0
    snapshotter = Snapshotter(Slots(), tensors, lambda: str(step).encode())
    for step in range(1, 21):
        assert snapshotter.wait().dropped == ""
        for held in tensors:
            held.tensor.add_(1)
        snapshotter.begin(step)
    snapshotter.close()
    with stored(snapshotter.slots.paths) as copies:
        assert {copy.seal.step for copy in copies} == {19, 20}
        for copy in copies:
            targets = [
                HeldTensor(held.path, torch.full_like(held.tensor, -1.0)) for held in tensors
            ]
            assert copy.read_into(targets) == str(copy.seal.step).encode()
            for target in targets:
                assert bool((target.tensor == float(copy.seal.step)).all()), target.path


def snapshot_of(tensors: list[HeldTensor], slots: Slots) -> None:
    """Take a snapshot, and compare its contents."""
    snapshotter = Snapshotter(
        slots, tensors, on_dropped=lambda step, reason: dropped.append(reason)
    )
    dropped: list[str] = []
    snapshotter.begin(1)
    snapshotter.close()
    assert dropped == []
    compare(slots, tensors)


def compare(slots: Slots, tensors: list[HeldTensor]) -> None:
    """Assert that the newest copy has the values of the tensors."""
    targets = [HeldTensor(held.path, torch.zeros_like(held.tensor)) for held in tensors]
    with stored(slots.paths) as copies:
        copies[0].read_into(targets)
    for held, target in zip(tensors, targets, strict=True):
        assert torch.equal(held.tensor, target.tensor), held.path


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool]
)
def test_every_type_comes_back_from_the_device(dtype: torch.dtype) -> None:
    plain = (torch.randn(900, 800, device="cuda") * 100).to(dtype)
    tensors = [
        HeldTensor("rows", plain),
        HeldTensor("columns", plain.clone().t()),
        HeldTensor("scalar", plain[0, 0].clone()),
    ]
    snapshot_of(tensors, Slots())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_state_on_the_device_that_is_not_finite_is_not_sealed(
    dtype: torch.dtype, value: float
) -> None:
    """The reason names the tensor; large finite values and whole numbers are sealed."""
    bad = torch.full((300, 700), torch.finfo(dtype).max, dtype=dtype, device="cuda")
    others = [
        torch.randn(2**20, device="cuda"),
        torch.tensor(3, device="cuda"),
        torch.zeros(0, device="cuda"),
    ]
    tensors = [
        HeldTensor(f"t{number}", tensor)
        for number, tensor in enumerate([*others, bad.t(), bad[0, 0].clone()])
    ]
    dropped: SimpleQueue[str] = (
        SimpleQueue()
    )  # filled after the settling, by the snapshotter's own thread
    snapshotter = Snapshotter(
        Slots(), tensors, check_finite=True, on_dropped=lambda step, reason: dropped.put(reason)
    )
    snapshotter.begin(1)
    assert (seal := snapshotter.settle()) is not None
    assert seal.step == 1
    snapshotter.wait()
    bad[-1, -1] = value
    snapshotter.begin(2)
    assert snapshotter.settle() == seal
    assert "t3 is not finite" in dropped.get(timeout=TOLD_S)
    assert dropped.empty()
    snapshotter.rebind(tensors[1:3])
    snapshotter.begin(3)
    snapshotter.close()
    assert snapshotter.newest is not None
    assert snapshotter.newest.step == 3


def test_slots_at_addresses_that_others_have_had() -> None:
    """A slot at the address of an earlier one is copied to its own pages.

    The earlier memory was unmapped while CUDA had it registered.
    """
    addresses = []
    for number in range(20):
        slots = Slots()
        snapshot_of([HeldTensor("w", torch.randn(2**20 + number, device="cuda"))], slots)
        addresses.append(slots.take().address)
        del slots
        gc.collect()
    assert len(set(addresses)) < 20, "no address came twice: this test shows nothing"


def test_slots_that_grow_under_a_state_on_the_device() -> None:
    tensors = [HeldTensor("w", torch.randn(1000, device="cuda"))]
    slots = Slots()
    snapshotter = Snapshotter(slots, tensors)
    for step in range(1, 7):
        snapshotter.begin(step)
        snapshotter.settle()
        compare(slots, tensors)
        snapshotter.wait()
        tensors.append(HeldTensor(f"moment{step}", torch.randn(10**step, device="cuda")))
        snapshotter.rebind(tensors)
    snapshotter.close()


def test_memory_that_cannot_be_registered_is_copied_all_the_same() -> None:
    """The copy and the next kernel succeed although CUDA refuses to register a range twice."""
    slots = Slots()
    slots.reserve(4_000_000)
    image = slots.take()
    slots.give_back(image)
    runtime = torch.cuda.cudart()
    assert (
        runtime.cudaHostRegister(image.address, image.capacity_bytes, 0)
        == runtime.cudaError.success
    )
    tensors = [HeldTensor("w", torch.randn(1_000_000, device="cuda"))]
    snapshot_of(tensors, slots)
    assert float(torch.ones(3, device="cuda").sum()) == 3.0
    torch.cuda.synchronize()


def test_a_state_on_the_device_is_stored_and_read_into_it(tmp_path: Path) -> None:
    """Torch's own checkpoints work with the storage of chaoskit."""
    state = {
        "weight": torch.randn(1000, 300, device="cuda"),
        "moment": torch.randn(70, device="cuda").bfloat16(),
    }
    dcp.save(
        state,
        checkpoint_id="step-1",
        storage_writer=SnapshotWriter(DiskTier(tmp_path)),
        no_dist=True,
    )
    read = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(read, storage_reader=SnapshotReader(tmp_path), no_dist=True)
    assert all(torch.equal(read[name], tensor) for name, tensor in state.items())


# -- two devices or more---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("job", ["gpt", "fsdp"])
@pytest.mark.parametrize(
    "fault", [Kill(rank=1, at_step=10), Hang(rank=1, at_step=10)], ids=["kill", "stop"]
)
def test_losing_a_rank(chaos: Chaos, fault: Kill | Hang, job: str) -> None:
    """NCCL's own abort frees the survivors; the replacement pulls its state."""
    require_two()
    outcome = chaos.run(job, nodes=2, spares=2, steps=20, faults=[fault])
    assert outcome.lost_steps <= (job == "fsdp")
    outcome.assert_same_losses_as_twin()


def test_a_nan_is_never_committed(chaos: Chaos) -> None:
    """Non-finite gradients are traced on GPUs, too."""
    require_two()
    chaos.run(
        "gpt",
        nodes=2,
        spares=2,
        steps=20,
        faults=[NaN(rank=1, at_step=10, parameter="head.weight")],
    )
