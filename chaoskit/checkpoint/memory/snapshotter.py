"""Take snapshots of a training state without a stall: they are copied during the next step.

    snapshotter = Snapshotter(Slots(), tensors, scalars)
    while training:
        loss.backward()
        snapshotter.wait()        # the state before this step is copied: now it may change
        optimizer.step()
        snapshotter.begin(step, generation)

An error in a copy costs that copy and never stops training; :meth:`Snapshotter.wait` reports it.

-> ``runtime/state/copies.py``: the worker calls this at each commit of a sharded job.
-> ``daemon/piece_keeper.py``: keeps the slots after the worker's end, and sends them to peers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue

import msgspec

from chaoskit.checkpoint.layout.arena import ArenaImage, Slot
from chaoskit.checkpoint.layout.finite import Poisoned
from chaoskit.checkpoint.layout.held import HeldTensor, lay_out
from chaoskit.checkpoint.layout.seal import Checksum, Seal
from chaoskit.checkpoint.memory.copying import Chunk, Copying, cut_into_chunks
from chaoskit.checkpoint.memory.device import DeviceCopies
from chaoskit.checkpoint.memory.slots import Busy, Slots
from chaoskit.process.linux import reason_of, set_name

_SKIPS_MAX = 64  # snapshots that are dropped before the next attempt to get memory

#: Moments at which ``probe`` is called: a snapshot has begun, within its copy, before and after its
#: seal.
BEGUN, CHUNK, COPIED, SEALED = "begun", "chunk", "copied", "sealed"


@dataclass(frozen=True, slots=True)
class SnapshotCost:
    """The outcome of a snapshot for the training thread.

    Args:
        step: step of the snapshot; -1 if none was begun.
        stall_s: time that training was stopped for it, in ``begin`` and ``wait`` together.
        dropped: reason why there is no snapshot; "" if the state is copied. The seal follows,
            unless the state is poisoned.
    """

    step: int
    stall_s: float
    dropped: str = ""


@dataclass(slots=True)
class _Layout:
    """The tensors of the state, and their places in a slot."""

    tensors: list[HeldTensor]
    slots: list[Slot]
    size_bytes: int
    index: bytes
    chunks: list[Chunk]


class _Task:
    """A snapshot under way: its seal without checksum, its slot and its copies."""

    def __init__(
        self, seal: Seal, image: ArenaImage, copying: Copying, device: DeviceCopies | None
    ) -> None:
        self.seal, self.image, self.copying, self.device = seal, image, copying, device
        self.settled = threading.Event()  # the snapshot is sealed or has failed


class Snapshotter:
    """Takes snapshots of one piece of the state.

    ``begin`` and ``wait`` are for the training thread.

    Args:
        slots: slots to write to; only this snapshotter may write to them.
        tensors: tensors to copy. Their values may change only between ``wait`` and ``begin``; their
            shapes only with :meth:`rebind`.
        scalars: returns the rest of the state as bytes; called by ``begin``.
        check_finite: never seal a state with NaN or infinity in it.
        on_sealed: called with each seal, on a thread of the snapshotter.
        on_dropped: called with step and reason of a failed snapshot, on either thread.
        probe: called with :data:`BEGUN`, :data:`CHUNK`, :data:`COPIED` and :data:`SEALED` at these
            moments, for tests that end the process there.

    Raises:
        BadInput: if the tensors cannot be copied.
    """

    def __init__(
        self,
        slots: Slots,
        tensors: Sequence[HeldTensor],
        scalars: Callable[[], bytes] = bytes,
        *,
        check_finite: bool = False,
        on_sealed: Callable[[Seal], None] = lambda seal: None,
        on_dropped: Callable[[int, str], None] = lambda step, reason: None,
        probe: Callable[[str], None] = lambda moment: None,
    ) -> None:
        self.slots = slots
        self._scalars, self._check_finite = scalars, check_finite
        self._report_sealed, self._report_dropped, self._probe = on_sealed, on_dropped, probe
        self._protected = -1
        self._newest: Seal | None = None
        self._current_task: _Task | None = None
        self._last_settled = threading.Event()  # set when the newest task is settled
        self._last_settled.set()
        self._begun_cost = SnapshotCost(-1, 0.0)
        self._failures = self._skips_left = (
            0  # attempts to get memory, and snapshots until the next one
        )
        self._queue: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="snapshots", daemon=True)
        self.rebind(tensors)
        self._thread.start()

    @property
    def newest(self) -> Seal | None:
        """The seal of the last snapshot that this snapshotter has completed.

        None before the first. It stays after :meth:`forget_after`.
        """
        return self._newest

    @property
    def has_room(self) -> bool:
        """True if memory for the slots is allocated.

        Otherwise each failure makes the next attempt rarer.
        """
        return self.slots.capacity_bytes >= self._layout.size_bytes

    def rebind(self, tensors: Sequence[HeldTensor]) -> None:
        """Set the tensors that later snapshots copy, and reserve memory for them.

        Each new GB of memory takes about a second. Without enough memory, later snapshots are
        dropped until there is some.

        Call this where ``begin`` may be called: when the optimizer has made its state, or when
        tensors were replaced.

        Raises:
            BadInput: if the tensors cannot be copied.
        """
        self._settle()
        slots, size_bytes = lay_out(tensors)
        index = msgspec.msgpack.encode(slots)
        self._layout = _Layout(
            list(tensors), slots, size_bytes, index, cut_into_chunks(tensors, slots)
        )
        self._failures = self._skips_left = 0
        self._reserve()

    def protect(self, step: int) -> None:
        """Note that every piece of ``step`` has its copies.

        The slot with this step is not overwritten until a newer step is protected.
        """
        self._protected = step

    def forget_after(self, step: int) -> None:
        """Discard snapshots of steps after ``step``, because training went back to it.

        The snapshot under way is completed before.
        """
        self._settle()
        self.slots.forget_after(step)

    def begin(self, step: int, generation: int = 0) -> None:
        """Start to copy the state of ``step``. Call this right after the optimizer has run.

        The call returns at once, unless steps are shorter than a copy: then it waits for the
        checksum of the previous snapshot. No error is raised: the next :meth:`wait` returns the
        reason of a failure, and ``on_dropped`` is called with it.

        Args:
            step: number of committed steps.
            generation: generation that trained on the state.
        """
        self.wait()
        started_s = time.monotonic()
        reason = ""
        try:
            self._current_task = self._start(step, generation)
        except Exception as error:  # noqa: BLE001 - training goes on without this copy
            reason = str(error) if isinstance(error, Busy) else reason_of(error)
            with suppress(Exception):  # an error of the callback must not stop training
                self._report_dropped(step, reason)
        self._begun_cost = SnapshotCost(step, time.monotonic() - started_s, reason)

    def wait(self) -> SnapshotCost:
        """Wait until the state may change. Call this right before the optimizer runs.

        The wait is for the copy only, not for its checksum and seal. Return the cost of the
        snapshot that was begun since the last call; its step is -1 if none was begun.
        """
        cost, self._begun_cost = self._begun_cost, SnapshotCost(-1, 0.0)
        task, self._current_task = self._current_task, None
        if task is None:
            return cost
        started_s = time.monotonic()
        task.copying.finish_copy()
        if task.device is not None:
            task.device.hold_back()
        stall_s = cost.stall_s + time.monotonic() - started_s
        error = task.copying.error
        return SnapshotCost(cost.step, stall_s, reason_of(error) if error else "")

    def settle(self) -> Seal | None:
        """Wait until the snapshot under way is sealed or has failed.

        Return the seal of the newest snapshot that succeeded; None if there is none.
        """
        self._settle()
        return self._newest

    def close(self) -> None:
        """Complete the snapshot under way and end the thread.

        The contents of the slots are kept.
        """
        self.wait()
        self._queue.put(None)
        self._thread.join()

    # -- the training thread -----------------------------------------------------------------------

    def _settle(self) -> None:
        """Wait until the snapshot under way is sealed or has failed."""
        if self._current_task is not None:
            self._current_task.copying.finish_copy()
        self._last_settled.wait()

    def _reserve(self) -> None:
        """Try to get memory for the slots. After a failure, skip ever more snapshots."""
        try:
            self.slots.reserve(self._layout.size_bytes)
            self._failures = 0
        except (OSError, MemoryError):
            self._failures += 1
            self._skips_left = min(_SKIPS_MAX, 2**self._failures - 2)

    def _start(self, step: int, generation: int) -> _Task:
        """Take a slot, hand a snapshot to the copying thread, and return the snapshot.

        Raises:
            MemoryError: if there is no memory for the slots.
            Busy: if no slot may be overwritten.
        """
        if not self.has_room:
            if self._skips_left:
                self._skips_left -= 1
            else:
                self._reserve()
            if not self.has_room:
                raise MemoryError(f"no room for two copies of {self._layout.size_bytes} bytes")
        layout, scalars = self._layout, self._scalars()
        image = self._take()
        try:
            image.begin(step, generation, layout.index, scalars, layout.size_bytes)
            self._probe(BEGUN)
            device = DeviceCopies.start(
                layout.tensors, layout.slots, image, check_finite=self._check_finite
            )
            copying = Copying(
                layout.tensors,
                layout.slots,
                layout.chunks,
                image,
                Checksum(step, layout.index, scalars),
                check_finite=self._check_finite,
                arrive=device.arrive if device is not None else None,
            )
        except BaseException:
            self.slots.give_back(image)
            raise
        task = _Task(Seal(step, generation, layout.size_bytes, ""), image, copying, device)
        self._last_settled = task.settled
        self._queue.put(task)
        return task

    def _take(self) -> ArenaImage:
        """Lock a slot and return it, waiting for the checksum of the last snapshot if need be.

        Raise Busy if no slot may be overwritten after that either.
        """
        try:
            return self.slots.take(self._protected)
        except Busy:
            if self._last_settled.is_set():
                raise
            # the last snapshot is copied, and only its checksum is missing
            self._last_settled.wait()
            return self.slots.take(self._protected)

    # -- the copying thread ------------------------------------------------------------------------

    def _run(self) -> None:
        """Copy and seal queued snapshots until :meth:`close`."""
        set_name("ck-snapshots")
        while (task := self._queue.get()) is not None:
            self._complete(task)
            del task  # an idle thread must not keep tensors

    def _complete(self, task: _Task) -> None:
        """Copy and seal a snapshot, and give back its slot in any case.

        Then call ``on_sealed`` with its seal, or ``on_dropped`` with the reason of a failure.
        """
        seal, reason = task.seal, ""
        try:
            checksum = task.copying.run(lambda number: self._probe(CHUNK))
            self._probe(COPIED)
            task.image.end(checksum)
            seal = msgspec.structs.replace(seal, checksum=checksum)
            self._newest = seal
        except Poisoned as error:
            reason = f"poisoned snapshot: never published ({error})"
        except Exception as error:  # noqa: BLE001 - training goes on
            reason = reason_of(error)
        finally:
            self.slots.give_back(task.image)
            task.settled.set()
        self._probe(SEALED)
        with suppress(Exception):  # an error of a callback must not end this thread
            if reason:
                self._report_dropped(seal.step, reason)
            else:
                self._report_sealed(seal)
