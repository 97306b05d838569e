"""Faults of copies: those refused before the start, and the evidence that a node reads back after
the act.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from chaoskit.checkpoint.layout.arena import Slot
from chaoskit.checkpoint.layout.finite import NanWatch, Poisoned, is_finite
from chaoskit.checkpoint.layout.held import HeldTensor
from chaoskit.checkpoint.layout.manifest import Damaged
from chaoskit.checkpoint.memory.slots import Slots
from chaoskit.checkpoint.memory.snapshotter import Snapshotter
from chaoskit.checkpoint.memory.stored import StoredCopy
from chaoskit.config import RunConfig
from chaoskit.daemon.copy_faults import KeptCopy, damage, newest, unseal
from chaoskit.daemon.injection import DaemonActs
from chaoskit.errors import BadInput
from chaoskit.job import JobSpec
from chaoskit.journal import Record
from chaoskit.runlog.redundancy import Window, restored_ns, windows
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import ActReport, InjectionAct, Message
from faults import CorruptReplica, Fault, LosePeerCopy, PoisonSnapshot
from faults.storage.copies import WAYS

REPLICATED, SHARDED = JobSpec("job.py"), JobSpec("job.py", sharded=True)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "field"),
    [
        (CorruptReplica(rank=1, at_step=3, tier="disk"), "tier"),
        (CorruptReplica(rank=1, at_step=3, how="truncate"), "how"),
        (CorruptReplica(rank=1, at_step=0), "at_step"),
        (CorruptReplica(rank=1, during="restore"), "during"),
        (LosePeerCopy(rank=1, during="regroup"), "during"),
        (PoisonSnapshot(rank=1, at_step=3, parameter="weight", where="gradient"), "where"),
        (PoisonSnapshot(rank=1, at_step=3, parameter=""), "parameter"),
        (PoisonSnapshot(rank=1, during="restore", parameter="weight"), "during"),
    ],
    ids=str,
)
def test_what_can_never_strike_is_refused(fault: Fault, field: str) -> None:
    with pytest.raises(BadInput, match=f"^{field}="):
        fault.validate(nodes=4, steps=10)


@pytest.mark.parametrize(
    ("fault", "config", "field"),
    [
        (CorruptReplica(rank=1, at_step=3, tier="peer"), {"job": REPLICATED, "nodes": 4}, "tier"),
        (CorruptReplica(rank=1, at_step=3, how="seal"), {"job": REPLICATED, "nodes": 4}, "how"),
        (
            CorruptReplica(rank=1, at_step=3),
            {"job": REPLICATED, "nodes": 4, "memory_copies": 0},
            "memory_copies",
        ),
        (CorruptReplica(rank=1, at_step=3, tier="both"), {"job": SHARDED, "nodes": 1}, "tier"),
        (LosePeerCopy(rank=1, at_step=3), {"job": REPLICATED, "nodes": 4}, "rank"),
        (
            LosePeerCopy(rank=1, at_step=3),
            {"job": SHARDED, "nodes": 4, "memory_copies": 0},
            "memory_copies",
        ),
    ],
    ids=str,
)
def test_copies_that_the_run_does_not_make_cannot_be_struck(
    fault: Any, config: dict[str, Any], field: str
) -> None:
    with pytest.raises(BadInput, match=f"^{field}="):
        fault.require(RunConfig(**config))


# -- the act ---------------------------------------------------------------------------------------


@pytest.fixture
def slots() -> Slots:
    """Return slots with two sealed steps."""
    slots, weight = Slots(), torch.arange(10_000.0)
    snapshotter = Snapshotter(slots, [HeldTensor("w", weight)])
    for step in (1, 2):
        snapshotter.begin(step)
        snapshotter.wait()
        weight += 1
    snapshotter.close()
    return slots


def copies(slots: Slots) -> list[KeptCopy]:
    return [KeptCopy("node0.0", "memory", seal, path) for path, seal in slots.complete()]


@pytest.mark.parametrize("how", WAYS)
def test_damage_is_read_back_and_found_by_a_reader_of_the_copy(slots: Slots, how: str) -> None:
    (copy,), other = newest(copies(slots)), copies(slots)[1]
    observed, effective = damage(copy, how)
    assert effective
    assert f"({how})" in observed
    with pytest.raises(Damaged), StoredCopy(copy.path) as stored:
        stored.verify()
    with StoredCopy(other.path) as stored:
        stored.verify()


def test_damage_that_takes_back_another_one_is_no_evidence(slots: Slots) -> None:
    (copy,) = newest(copies(slots))
    assert damage(copy, "bit")[1]
    assert not damage(copy, "bit")[1]


def test_a_spoilt_copy_is_none_and_its_slot_is_written_again(slots: Slots) -> None:
    for copy in copies(slots):
        unseal(copy)
    assert copies(slots) == []
    snapshotter = Snapshotter(slots, [HeldTensor("w", torch.zeros(10_000))])
    snapshotter.begin(3)
    snapshotter.close()
    assert [copy.seal.step for copy in copies(slots)] == [3]


class Node:
    """A keeper of these slots, which may still expect another copy."""

    def __init__(self, slots: Slots, owing: bool) -> None:
        self.slots, self.owing = slots, owing

    def kept_copies(self, worker: str) -> list[KeptCopy]:
        return copies(self.slots) if worker == "node0.0" else []

    def lacks_copy(self, worker: str, step: int) -> bool:
        return self.owing

    def drop_copies(self, kept_copies: list[KeptCopy]) -> None:
        for copy in kept_copies:
            unseal(copy)


def pull(
    node: Node, act: str, worker: str = "node0.0", **options: Any
) -> Callable[[], list[ActReport]]:
    sent_messages: list[Message] = []
    acts = DaemonActs("node0", sent_messages.append)
    ordered = InjectionAct(act, {"worker": worker, "step": 2, "tiers": ("memory",), **options})

    def order() -> list[ActReport]:
        acts.carry_out(node, "fault0", ordered)
        return [message for message in sent_messages if isinstance(message, ActReport)]

    return order


def test_an_act_waits_for_copies_that_are_on_their_way_and_is_done_once(slots: Slots) -> None:
    node = Node(slots, owing=True)
    order = pull(node, "corrupt_copies", how="bit", older=True)
    assert order() == []
    node.owing = False
    (first,) = order()
    assert first.effective
    assert first.node == "node0"
    assert order() == [first, first]  # else the second order would repair the damage of the first


def test_copies_that_are_dropped_are_not_there_any_more(slots: Slots) -> None:
    (report,) = pull(Node(slots, owing=False), "lose_copies")()
    assert report.effective
    assert copies(slots) == []


def test_a_node_without_copies_shows_nothing(slots: Slots) -> None:
    (report,) = pull(Node(slots, owing=False), "lose_copies", worker="node1.0")()
    assert not report.effective
    assert len(copies(slots)) == 2


# -- poison ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("place", [0, 32_767, 99_999])
def test_one_bad_number_is_found_wherever_it_is(dtype: torch.dtype, place: int) -> None:
    values = torch.full(
        (100_000,), torch.finfo(dtype).max, dtype=dtype
    )  # the sum of these values overflows
    assert is_finite(values)
    values[place] = float("inf")
    assert not is_finite(values)
    assert is_finite(values, allow_infinite=True)
    values[place] = float("nan")
    assert not is_finite(values, allow_infinite=True)


def test_integers_are_never_poison() -> None:
    assert is_finite(torch.full((10,), -1, dtype=torch.int32))


@pytest.mark.parametrize("piece_bytes", [64, 4096, 2**20])
def test_nan_is_found_in_the_tensor_that_has_it(piece_bytes: int) -> None:
    """The cut of the bytes does not matter; those of an integer tensor may look like NaN."""
    first, second, third = (
        torch.zeros(1000),
        torch.full((500,), -1, dtype=torch.int64),
        torch.zeros(300),
    )
    third[299] = float("nan")
    slots, data = [], bytearray()
    for name, tensor in (("a", first), ("b", second), ("c", third)):
        slots.append(
            Slot(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), len(data))
        )
        data += tensor.numpy().tobytes()
        data += bytes(-len(data) % 64)
    watch, whole = NanWatch(slots), memoryview(data)
    bad = (
        (slots[2].offset + 4 * 299) // piece_bytes * piece_bytes
    )  # the begin of the piece that has it
    for place in range(0, bad, piece_bytes):
        watch.look(place, whole[place : place + piece_bytes])
    with pytest.raises(Poisoned, match=r"^c "):
        watch.look(bad, whole[bad : bad + piece_bytes])


def test_a_read_only_buffer_is_watched_without_a_warning() -> None:
    """Torch warns when it makes a tensor of read-only memory."""
    imports = "from chaoskit.checkpoint.layout import arena, finite"
    code = f"{imports}; finite.NanWatch([arena.Slot('a', 'float32', (16,), 0)]).look(0, memoryview(bytes(64)))"
    warning = "error:The given buffer is not writable:UserWarning"
    ran = subprocess.run(
        [sys.executable, "-W", warning, "-c", code], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


# -- exposure --------------------------------------------------------------------------------------


def test_windows_without_copies() -> None:
    """A window begins with a plan, or the loss of a copy, and ends when each worker of the
    membership has reported its copies.
    """

    def plan(t_ns: int, *workers: str) -> Record:
        return Record(
            t_ns, "coordinator", Event.PLAN, {"members": [{"worker": worker} for worker in workers]}
        )

    def report_of(t_ns: int, event: Event, worker: str, *nodes: str) -> Record:
        return Record(
            t_ns, "agent", event, {"worker": worker, "piece": int(worker[1]), "nodes": list(nodes)}
        )

    records = [
        plan(1, "w0", "w1"),
        report_of(2, Event.PROTECTED, "w0", "n1"),
        report_of(3, Event.PROTECTED, "w1", "n0"),  # the first copies: no window
        report_of(5, Event.EXPOSED, "w1", "n0"),
        report_of(7, Event.PROTECTED, "w1", "n0"),
        plan(10, "w0", "w2"),
        report_of(11, Event.PROTECTED, "w2"),  # no partner keeps the copy
        report_of(12, Event.PROTECTED, "w0", "n2"),
        report_of(15, Event.PROTECTED, "w2", "n0"),
        report_of(20, Event.EXPOSED, "w0", "n2"),
    ]
    exposed = windows(records, copies=1)
    assert [(window.begun_ns, window.ended_ns) for window in exposed] == [
        (5, 7),
        (10, 15),
        (20, None),
    ]
    assert exposed[0].pieces == (1,)
    assert restored_ns(exposed[:2], 10) == 15
    assert restored_ns(exposed, 16) is None
    assert restored_ns(exposed[:2], 16) == 16
    assert restored_ns([Window(1, 4, ())], 2) == 4
