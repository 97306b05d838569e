"""Cuts of a state across nodes, and the names of its tensors where it is stored. Pure decisions."""

from __future__ import annotations

import msgspec
import torch
from hypothesis import given
from hypothesis import strategies as st

from chaoskit.checkpoint.disk.portion import Portion, PortionCut, copy_shared, cuts_of_share
from chaoskit.checkpoint.layout.arena import ArenaImage, Slot, aligned
from chaoskit.checkpoint.layout.boxes import cover, overlap
from chaoskit.runtime.state.naming import decode_scalars, encode_scalars, path_of, stored_name

SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=8)


def lay(shapes: list[tuple[int, ...]]) -> list[Slot]:
    slots, offset = [], 0
    for number, shape in enumerate(shapes):
        slots.append(Slot(f"model/{number}", "float32", shape, offset))
        offset += aligned(slots[-1].size_bytes)
    return slots


@given(SHAPES, st.integers(1, 6))
def test_the_shares_are_the_state_each_element_once(
    shapes: list[tuple[int, ...]], count: int
) -> None:
    slots = lay(shapes)
    shares = [cuts_of_share(slots, number, count) for number in range(count)]
    for slot in slots:
        boxes = [cut.box for its_share in shares for cut in its_share if cut.slot is slot]
        assert sum(box.size for box in boxes) == slot.box.size
        cover(slot.box, boxes)
        assert not any(overlap(box, other) for box in boxes for other in boxes if box is not other)


@given(SHAPES, st.integers(1, 6))
def test_shares_differ_by_less_than_a_row(shapes: list[tuple[int, ...]], count: int) -> None:
    slots = lay(shapes)
    sizes = [
        sum(cut.size_bytes for cut in cuts_of_share(slots, number, count))
        for number in range(count)
    ]
    rows = [
        slot.size_bytes // slot.shape[0] if slot.shape and slot.shape[0] else slot.size_bytes
        for slot in slots
    ]
    assert max(sizes) - min(sizes) <= 2 * max(rows) + 1


def test_a_share_is_copied_from_where_it_lies() -> None:
    slots = lay([(5, 3), (), (4,)])
    image = ArenaImage(slots[-1].offset + 64)
    image.begin(3, 1, b"", b"", slots[-1].offset + 64)
    values = [
        torch.arange(slot.box.size, dtype=torch.float32).view(slot.shape) + index
        for index, slot in enumerate(slots)
    ]
    for slot, tensor in zip(slots, values, strict=True):
        image.data()[slot.offset : slot.offset + slot.size_bytes] = tensor.numpy().tobytes()
    image.end()
    copied = [box for number in range(3) for box in copy_shared(image, slots, number, 3)]
    for slot, tensor in zip(slots, values, strict=True):
        together = torch.full(slot.shape, -1.0)
        for cut, data in copied:
            if cut.slot is slot:
                part = torch.frombuffer(data, dtype=torch.float32).view(cut.box.extent)
                together[cut.box.within(slot.box)] = part
        assert torch.equal(together, tensor)


def test_a_state_that_is_not_finite_is_found() -> None:
    slot = lay([(4,)])[0]
    for bad in (float("nan"), float("inf")):
        data = memoryview(bytearray(torch.tensor([1.0, 2.0, bad, 3.0]).numpy().tobytes()))
        portion = Portion(5, 1, 0, 1, 1, True, ((PortionCut(slot, slot.box), data),), b"")
        assert portion.poisoned_path() == "model/0"


def test_names_are_those_of_the_state_dict_and_lead_back() -> None:
    names = ["0.weight", ""]
    for path, stored in {
        "model/0.weight": "model.0.weight",
        "optimizer/0/exp_avg": "optimizer.state.0.weight.exp_avg",
        "optimizer/1/step": "optimizer.state.1.step",
        "optimizer/2/step": "optimizer.state.2.step",
    }.items():
        assert stored_name(path, names) == stored
        assert path_of(stored, names) == path


def test_numbers_keep_their_bits_and_torch_reads_them() -> None:
    numbers = {
        "groups": [{"lr": 0.1 + 0.2, "betas": [0.9, 0.999]}],
        "state": {},
        "schedulers": [{"last": 7, 3: None}],
    }
    stored = encode_scalars(msgspec.msgpack.encode(numbers), step=12)
    numbers_read = msgspec.msgpack.decode(decode_scalars(stored), strict=False)
    assert numbers_read == {"step": 12, **numbers}
