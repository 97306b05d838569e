"""Snapshots in shared memory: complete or invisible, whatever happens to their writer, and never at
training's cost.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import resource
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from queue import SimpleQueue

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ranks
from support.waiting import LIMIT_S, stays, wait_until

from chaoskit.checkpoint.layout.arena import DATA_OFFSET, ArenaView
from chaoskit.checkpoint.layout.held import HeldTensor, lay_out
from chaoskit.checkpoint.layout.manifest import Damaged
from chaoskit.checkpoint.layout.seal import Seal, Torn
from chaoskit.checkpoint.memory import snapshotter
from chaoskit.checkpoint.memory.copying import cut_into_chunks
from chaoskit.checkpoint.memory.pipeline import Pipeline
from chaoskit.checkpoint.memory.slots import Busy, Slots
from chaoskit.checkpoint.memory.snapshotter import Snapshotter
from chaoskit.checkpoint.memory.stored import StoredCopy, assemble
from chaoskit.errors import BadInput, ChaoskitError

pytestmark = pytest.mark.costly

SIZES = (300_000, 7, 0, 1_000_000)  # numbers of floats: tensors of several chunks, and gaps


def state(step: int) -> list[HeldTensor]:
    """Return tensors of which every element is derived from the step."""
    return [
        HeldTensor(f"t{number}", torch.full((size,), float(step)))
        for number, size in enumerate(SIZES)
    ]


def advance(tensors: list[HeldTensor]) -> None:
    for held in tensors:
        held.tensor.add_(1)


def check(copy: StoredCopy) -> None:
    """Assert that every byte of the copy belongs to its step."""
    targets = state(-1)
    assert copy.read_into(targets) == str(copy.seal.step).encode()
    for held in targets:
        assert torch.equal(held.tensor, torch.full_like(held.tensor, float(copy.seal.step)))


@contextmanager
def stored(
    paths: Iterable[str], damaged: Callable[[str], None] = lambda reason: None
) -> Iterator[list[StoredCopy]]:
    """Yield the copies in slots, the newest first. Slots without a complete copy are skipped."""
    with ExitStack() as stack:
        copies = []
        for path in paths:
            try:
                copies.append(stack.enter_context(StoredCopy(path)))
            except Damaged as error:
                damaged(str(error))
            except Torn:
                pass
        yield sorted(copies, key=lambda copy: copy.seal.recency, reverse=True)


@contextmanager
def kept_open(paths: Iterable[str]) -> Iterator[list[str]]:
    """Open the slots of a worker in this process, as a keeper does.

    Yield the paths at which they can be read.
    """
    with ExitStack() as stack:
        fds = [os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in paths]
        for fd in fds:
            stack.callback(os.close, fd)
        yield [f"/proc/self/fd/{fd}" for fd in fds]


class Trainer:
    """Trainer that updates a state, with a snapshot of each step."""

    def __init__(
        self, slots: Slots, probe: Callable[[str], None] = lambda moment: None, first: int = 0
    ) -> None:
        self.tensors, self.step = state(first), first
        self.settled: SimpleQueue[tuple[int, str]] = (
            SimpleQueue()
        )  # steps, and the reasons why they were dropped
        self.snapshotter = Snapshotter(
            slots,
            self.tensors,
            lambda: str(self.step).encode(),
            on_sealed=lambda seal: self.settled.put((seal.step, "")),
            on_dropped=lambda step, reason: self.settled.put((step, reason)),
            probe=probe,
        )

    def train(self) -> snapshotter.SnapshotCost:
        """Train a step."""
        taken = self.snapshotter.wait()
        advance(self.tensors)
        self.step += 1
        self.snapshotter.begin(self.step)
        return taken


# -- what is stored is what is read ----------------------------------------------------------------


def test_every_type_and_shape_comes_back() -> None:
    tensors = [
        HeldTensor("a", torch.randn(3, 5)),
        HeldTensor("half", torch.randn(700).bfloat16()),
        HeldTensor("empty", torch.empty(0, 4)),
        HeldTensor("scalar", torch.tensor(3.5, dtype=torch.float64)),
        HeldTensor("columns", torch.randn(900, 800).t()),
        HeldTensor("flags", torch.tensor([True, False, True])),
        HeldTensor("count", torch.tensor(7)),
        HeldTensor("complex", torch.randn(9, dtype=torch.complex64)),
    ]
    snapshotter = Snapshotter(Slots(), tensors, lambda: b"scalars")
    snapshotter.begin(3, 2)
    assert snapshotter.wait().dropped == ""
    snapshotter.close()
    targets = [HeldTensor(held.path, torch.zeros_like(held.tensor)) for held in tensors]
    with stored(snapshotter.slots.paths) as copies:
        (copy,) = copies
        assert (copy.seal.step, copy.seal.generation) == (3, 2)
        assert copy.read_into(targets) == b"scalars"
        assert copy.seal == snapshotter.newest
    for held, target in zip(tensors, targets, strict=True):
        assert torch.equal(held.tensor, target.tensor), held.path
        assert target.tensor.stride() == held.tensor.stride()


@pytest.mark.promise(
    "A state that was cut for one world is read into that of another one by `assemble(tensors, copies)`"
)
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 7), st.integers(1, 7), st.integers(1, 40))
def test_any_cut_is_read_through_any_other(written: int, wanted: int, rows: int) -> None:
    """FSDP cuts rows in equal blocks, the last ones smaller or empty."""
    full = torch.randn(rows, 3)

    def cut(pieces: int, source: torch.Tensor) -> list[HeldTensor]:
        block = -(-rows // pieces)
        starts = [min(number * block, rows) for number in range(pieces)]
        parts = [source[start : start + block].clone() for start in starts]
        return [
            HeldTensor("w", part, (rows, 3), (start, 0))
            for part, start in zip(parts, starts, strict=True)
        ]

    slots = []
    for held in cut(written, full):
        slots.append(Slots())
        snapshotter = Snapshotter(slots[-1], [held])
        snapshotter.begin(1)
        snapshotter.close()
    copies = [StoredCopy(path) for slots_of_piece in slots for path in slots_of_piece.paths[:1]]
    targets = cut(wanted, torch.zeros(rows, 3))
    for target in targets:
        assemble([target], copies)
    assert torch.equal(torch.cat([target.tensor for target in targets]), full)
    for copy in copies:
        copy.close()


def test_a_snapshot_holds_the_values_of_its_step() -> None:
    trainer = Trainer(Slots())
    for _ in range(10):
        trainer.train()
    trainer.snapshotter.close()
    with stored(trainer.snapshotter.slots.paths) as copies:
        assert len(copies) == 2
        for copy in copies:
            check(copy)


def test_tensors_that_cannot_be_copied_are_refused() -> None:
    with pytest.raises(BadInput, match="path of its own"):
        lay_out([HeldTensor("a", torch.zeros(1)), HeldTensor("a", torch.zeros(1))])
    with pytest.raises(BadInput, match="plain dense"):
        lay_out([HeldTensor("a", torch.zeros(2, 2).to_sparse())])
    with pytest.raises(BadInput, match="on CPU or CUDA"):
        lay_out([HeldTensor("a", torch.zeros(2, device="meta"))])
    with pytest.raises(BadInput, match="number of dimensions"):
        lay_out([HeldTensor("a", torch.zeros(2), (4, 4), (0, 0))])


def test_what_is_not_stored_cannot_be_read() -> None:
    trainer = Trainer(Slots())
    trainer.train()
    trainer.snapshotter.close()
    with stored(trainer.snapshotter.slots.paths) as copies:
        with pytest.raises(ChaoskitError, match="0 of 3 elements"):
            copies[0].read_into([HeldTensor("other", torch.zeros(3))])
        with pytest.raises(ChaoskitError, match="is stored as float32 of shape"):
            copies[0].read_into([HeldTensor("t1", torch.zeros(7, dtype=torch.float64))])


# -- which slot ------------------------------------------------------------------------------------


def steps(slots: Slots) -> set[int]:
    with stored(slots.paths) as copies:
        return {copy.seal.step for copy in copies}


def take(trainer: Trainer) -> None:
    """Train a step and wait until its snapshot is complete."""
    trainer.train()
    assert trainer.settled.get(timeout=LIMIT_S) == (trainer.step, "")


@pytest.mark.promise("The next snapshot never overwrites the slot with the **protected step**")
def test_the_protected_slot_is_never_overwritten() -> None:
    trainer = Trainer(Slots())
    slots = trainer.snapshotter.slots
    take(trainer)
    trainer.snapshotter.protect(1)
    for _ in range(3):
        take(trainer)
        assert steps(slots) == {1, trainer.step}
    trainer.snapshotter.protect(4)
    take(trainer)
    assert steps(slots) == {4, 5}


def test_without_protection_the_newest_is_kept() -> None:
    trainer = Trainer(Slots())
    for _ in range(4):
        take(trainer)
    assert steps(trainer.snapshotter.slots) == {3, 4}


@pytest.mark.promise("A slot that is read or sent is locked")
def test_a_slot_that_is_read_is_not_overwritten() -> None:
    trainer = Trainer(Slots())
    slots = trainer.snapshotter.slots
    take(trainer)
    trainer.snapshotter.protect(1)
    take(trainer)
    with stored(slots.paths) as copies:
        trainer.train()
        assert "step 2 is being read" in trainer.snapshotter.wait().dropped
        check(copies[0])
    assert trainer.settled.get(timeout=LIMIT_S)[0] == 3
    take(trainer)
    assert steps(slots) == {1, 4}


@pytest.mark.promise("Of two copies the one of the later *generation* is newer, whatever its step")
def test_what_an_older_generation_left_is_given_up() -> None:
    """Training went back from step 7 to 4: the copy of step 7 must not count as the newest."""
    slots = Slots()
    slots.reserve(1)
    for step, generation in ((6, 1), (7, 1)):
        image = slots.take()
        image.begin(step, generation, b"", b"", 0)
        image.end("00" * 16)
        slots.give_back(image)
    for step in (5, 6):
        image = slots.take()
        image.begin(step, 2, b"", b"", 0)
        image.end("00" * 16)
        slots.give_back(image)
    assert [slots.take().step] == [5]
    with pytest.raises(Busy, match="step 6 must be kept"):
        slots.take()


@pytest.mark.promise(
    "When training goes back, copies of later steps are forgotten (`forget_after`)."
)
def test_steps_that_never_happened_are_forgotten() -> None:
    trainer = Trainer(Slots())
    for _ in range(3):
        take(trainer)
    trainer.snapshotter.forget_after(2)
    assert steps(trainer.snapshotter.slots) == {2}


def test_a_snapshot_under_way_is_forgotten_too() -> None:
    """Forgetting later steps waits for a copy that is under way, and forgets it, too."""
    reached, go_on = threading.Event(), threading.Event()

    def probe(moment: str) -> None:
        if moment == snapshotter.COPIED and trainer.step == 2:
            reached.set()
            go_on.wait(LIMIT_S)

    trainer = Trainer(Slots(), probe)
    take(trainer)
    trainer.train()
    assert reached.wait(LIMIT_S)
    forgetting = threading.Thread(target=trainer.snapshotter.forget_after, args=(1,), daemon=True)
    forgetting.start()
    stays(forgetting.is_alive, "the snapshot is waited for", for_s=0.1)
    go_on.set()
    forgetting.join(LIMIT_S)
    assert not forgetting.is_alive()
    trainer.snapshotter.close()
    assert steps(trainer.snapshotter.slots) == {1}


def reserve_one_slot_of_two(line: ranks.Line) -> None:
    """Reserve slots with descriptors for a single one: one for its memory, one for the mapping."""
    slots, most = Slots(), max(map(int, os.listdir("/proc/self/fd"))) + 20
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    taken = []
    with suppress(OSError):
        while True:
            taken.append(os.dup(0))
    for fd in taken[:2]:
        os.close(fd)
    with pytest.raises(OSError, match="Too many open files"):
        slots.reserve(100)
    for fd in taken[2:]:
        os.close(fd)
    assert (len(slots.fds), slots.capacity_bytes) == (1, 0)


def test_one_slot_alone_is_no_room() -> None:
    assert ranks.results(1, reserve_one_slot_of_two) == [None]


@pytest.mark.promise("They grow in place when the layout grows (`rebind`).")
def test_a_larger_layout_grows_in_place() -> None:
    trainer = Trainer(Slots())
    take(trainer)
    slots, before = trainer.snapshotter.slots, trainer.snapshotter.slots.fds
    paths = slots.paths
    trainer.tensors.append(HeldTensor("more", torch.full((500_000,), 1.0)))
    trainer.snapshotter.rebind(trainer.tensors)
    assert steps(slots) == {1}
    trainer.train()
    trainer.snapshotter.close()
    assert slots.fds == before
    assert slots.paths == paths
    with stored(paths) as copies:
        targets = [*state(0), HeldTensor("more", torch.zeros(500_000))]
        copies[0].read_into(targets)
        assert torch.equal(targets[-1].tensor, torch.full((500_000,), 2.0))
        check_all = [
            torch.unique(held.tensor).tolist() for held in targets[:-1] if held.tensor.numel()
        ]
        assert check_all == [[2.0]] * 3


# -- copies are dropped before training is ---------------------------------------------------------


def train_without_room(line: ranks.Line) -> None:
    """Train first with a limit on files that no copy fits into, then without a limit."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (DATA_OFFSET + 1000, resource.RLIM_INFINITY))
    trainer = Trainer(Slots())
    assert not trainer.snapshotter.has_room
    for _ in range(6):
        trainer.train()
        assert "no room" in trainer.snapshotter.wait().dropped
    assert [trainer.settled.get(timeout=LIMIT_S)[0] for _ in range(6)] == [1, 2, 3, 4, 5, 6]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for _ in range(8):
        trainer.train()
    trainer.snapshotter.close()
    assert trainer.snapshotter.newest is not None


@pytest.mark.promise("Copies are dropped before training is.")
def test_without_memory_the_copy_is_dropped_and_tried_again() -> None:
    """Training goes on without copies, and has them again when there is room."""
    assert ranks.results(1, train_without_room) == [None]


def test_a_tensor_that_changed_its_size_costs_the_copy() -> None:
    trainer = Trainer(Slots())
    take(trainer)
    trainer.tensors[0].tensor.resize_(5)
    trainer.train()
    assert "when it was laid out" in trainer.snapshotter.wait().dropped
    trainer.snapshotter.close()
    assert steps(trainer.snapshotter.slots) == {1}


@pytest.mark.promise(
    "**A poisoned state is never published**, with `check_finite=True`",
    dtype=torch.float32,
    value=float("inf"),
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_poisoned_state_is_never_published(value: float, dtype: torch.dtype) -> None:
    tensors = [
        HeldTensor("a", torch.zeros(5)),
        HeldTensor("b", torch.full((300_000,), 3e4, dtype=dtype)),
    ]
    settled: SimpleQueue[Seal | str] = SimpleQueue()
    snapshotter = Snapshotter(
        Slots(),
        tensors,
        check_finite=True,
        on_sealed=settled.put,
        on_dropped=lambda _, reason: settled.put(reason),
    )
    results: list[Seal | str] = []
    for step in range(1, 5):
        tensors[1].tensor[250_000] = value if step in (2, 3) else 1.0
        snapshotter.begin(step)
        snapshotter.wait()
        results.append(settled.get(timeout=LIMIT_S))
    snapshotter.close()
    assert [result.step for result in results if isinstance(result, Seal)] == [1, 4]
    assert results[1:3] == ["poisoned snapshot: never published (b is not finite)"] * 2
    assert steps(snapshotter.slots) == {1, 4}


def test_a_helper_is_let_go_when_a_chunk_is_refused() -> None:
    """The search for NaN refuses a chunk when the helper has no chunk left to begin."""
    refused = threading.Event()

    def make(number: int) -> None:
        if number == 1:
            helper.start()  # the helper finds no work, and waits for this chunk

    def consume(number: int) -> None:
        if number == 1:
            refused.set()
            raise ValueError("refused")

    pipeline = Pipeline(2, make, consume)
    helper = threading.Thread(target=pipeline.help, daemon=True)
    with pytest.raises(ValueError, match="refused"):
        pipeline.run()
    helper.join(LIMIT_S)
    assert refused.is_set()
    assert not helper.is_alive()


# -- the writer is killed --------------------------------------------------------------------------


def kill_self_at(fatal_moment: str, occurrence: int) -> Callable[[str], None]:
    counts = itertools.count()

    def probe(moment: str) -> None:
        if moment == fatal_moment and next(counts) == occurrence:
            os.kill(os.getpid(), signal.SIGKILL)

    return probe


def train_until_killed(line: ranks.Line, moment: str, occurrence: int) -> None:
    """Train with each snapshot complete before the next step, so that a single thread copies it."""
    slots = Slots()
    trainer = Trainer(slots, kill_self_at(moment, occurrence))
    line.send(slots.paths)
    line.receive()
    for _ in range(20):
        line.send(trainer.train().step)
        trainer.settled.get(timeout=LIMIT_S)


#: Moments of a snapshot.
CHUNKS = len(cut_into_chunks(state(0), lay_out(state(0))[0]))
#: The newest complete snapshot when its process is killed at the n-th moment of a kind, counted
#: from 0.
NEWEST: dict[str, Callable[[int], int]] = {
    snapshotter.BEGUN: lambda occurrence: occurrence,
    snapshotter.CHUNK: lambda occurrence: occurrence // CHUNKS,
    snapshotter.COPIED: lambda occurrence: occurrence,
    snapshotter.SEALED: lambda occurrence: occurrence + 1,
}


@pytest.mark.promise(
    "leaves the newest or the second newest state, never a mixture",
    moment=snapshotter.CHUNK,
    occurrence=1,
)
@pytest.mark.parametrize(
    ("moment", "occurrence"),
    [
        *itertools.product(
            [snapshotter.BEGUN, snapshotter.COPIED, snapshotter.SEALED], [0, 1, 2, 7]
        ),
        *itertools.product([snapshotter.CHUNK], [0, 1, 7, CHUNKS - 1, CHUNKS, 2 * CHUNKS + 5]),
    ],
)
def test_killed_at_a_boundary(moment: str, occurrence: int) -> None:
    """Exactly the snapshots that were complete at that moment can be read, and are right."""
    newest = NEWEST[moment](occurrence)
    with (
        ranks.one(train_until_killed, moment, occurrence) as rank,
        kept_open(rank.receive()) as paths,
    ):
        rank.send("go")
        waited_for = max(rank.rest(), default=-1)
        assert rank.wait() == -signal.SIGKILL
        with stored(paths) as copies:
            for copy in copies:
                check(copy)
            assert max((copy.seal.step for copy in copies), default=0) == newest
    assert newest >= waited_for - 1


def train_for_ever(line: ranks.Line, shared: ranks.Counters) -> None:
    """Count the moments that the copying thread reaches, and show the newest sealed step."""

    def probe(moment: str) -> None:
        if moment == snapshotter.SEALED:
            assert trainer.snapshotter.newest is not None
            shared[1] = trainer.snapshotter.newest.step
        if moment != snapshotter.BEGUN:  # a moment of the other thread
            shared[0] += 1

    slots = Slots()
    trainer = Trainer(slots, probe)
    line.send(slots.paths)
    line.receive()
    while True:
        trainer.train()


@pytest.mark.promise("leaves the newest or the second newest state, never a mixture")
def test_killed_at_any_instant() -> None:
    """The newest or the second newest state can be read, and is right.

    A process is killed as soon as its copies have reached a random number of moments. Meanwhile it
    goes on.
    """
    random_ = random.Random(7)
    for _ in range(25):
        moments = random_.randrange(5 * (CHUNKS + 2))
        shared = ranks.counters(2)
        with ranks.one(train_for_ever, shared) as rank, kept_open(rank.receive()) as paths:
            rank.send("go")
            wait_until(lambda: shared[0] >= moments, f"{moments} moments of copies", poll_s=0)  # noqa: B023
            rank.kill()
            rank.wait()
            sealed = shared[1]
            assert sealed >= moments // (CHUNKS + 2) - 1, (
                "a snapshot takes no more than these moments"
            )
            with stored(paths) as copies:
                for copy in copies:
                    check(copy)
                assert max((copy.seal.step for copy in copies), default=0) >= sealed


def train_some(line: ranks.Line, first: int, count: int) -> None:
    trainer = Trainer(Slots(), first=first)
    for _ in range(count):
        take(trainer)
    line.send(trainer.snapshotter.slots.paths)
    line.receive()


def test_slots_that_are_kept_open_outlive_their_process() -> None:
    """The copies of a process are read after its end, and next to those of its replacement."""
    with ExitStack() as stack:
        kept: list[str] = []
        for first, count in ((0, 3), (3, 0), (3, 1)):
            with ranks.one(train_some, first, count) as rank:
                kept += stack.enter_context(kept_open(rank.receive()))
                rank.send("go")
                rank.wait()
            with stored(kept) as copies:
                assert max(copy.seal.step for copy in copies) == first + count
                for copy in copies:
                    check(copy)


# -- damage ----------------------------------------------------------------------------------------


def damage(slots: Slots, offset: int) -> None:
    for fd in slots.fds:
        (value,) = os.pread(fd, 1, offset)
        os.pwrite(fd, bytes([value ^ 16]), offset)


@pytest.mark.promise("Wrong bytes raise `Damaged`", where=DATA_OFFSET)
@pytest.mark.parametrize(
    "where", [DATA_OFFSET, DATA_OFFSET + 1_200_000 + 29, DATA_OFFSET + 5_000_000]
)
def test_a_wrong_bit_is_found(where: int) -> None:
    """The bit is in a tensor, in a gap, or at the end."""
    trainer = Trainer(Slots())
    take(trainer)
    damage(trainer.snapshotter.slots, where)
    with stored(trainer.snapshotter.slots.paths) as copies:
        with pytest.raises(Damaged, match="sealed as"):
            copies[0].read_into(state(0))
        with pytest.raises(Damaged, match="sealed as"):
            copies[0].read_into([HeldTensor("t1", torch.zeros(7))])


@pytest.mark.parametrize("word", range(1, 9))
def test_a_wrong_bit_in_the_header_is_found(word: int) -> None:
    trainer = Trainer(Slots())
    take(trainer)
    damage(trainer.snapshotter.slots, word * 8)
    reasons: list[str] = []
    with stored(trainer.snapshotter.slots.paths, reasons.append) as copies:
        assert copies == []
    assert len(reasons) == 1


def test_a_slot_that_was_cut_off_is_no_copy() -> None:
    trainer = Trainer(Slots())
    take(trainer)
    trainer.snapshotter.close()
    for path in trainer.snapshotter.slots.paths:
        os.truncate(path, DATA_OFFSET + 100)
        with pytest.raises((Damaged, Torn)):
            StoredCopy(path)
        os.truncate(path, 10)
        with pytest.raises(OSError, match="too short") as caught:
            StoredCopy(path)
        assert caught.value.errno == errno.EINVAL


def test_readers_of_arenas_read_slots() -> None:
    trainer = Trainer(Slots())
    take(trainer)
    view = ArenaView.open(trainer.snapshotter.slots.paths[0])
    assert (view.sequence % 2, view.step, view.scalars_bytes()) == (0, 1, b"1")
    assert view.data()[:4] == memoryview(torch.ones(1).numpy()).cast("B")
    view.close()
