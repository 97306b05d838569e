"""Snapshots of a training state without a stall: copied between two optimizer steps, while the next one is computed.

    snapshotter = Snapshotter(Slots(), tensors, scalars)
    while training:
        loss.backward()
        snapshotter.wait()        # the copy of the state before this step is complete: now it may change
        optimizer.step()
        snapshotter.begin(step, generation)

Whatever goes wrong with a copy costs that copy, never training; :meth:`Snapshotter.wait` says so.
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
from chaoskit.checkpoint.memory.copying import Chunk, Copying, cut
from chaoskit.checkpoint.memory.device import DeviceCopies
from chaoskit.checkpoint.memory.slots import Busy, Slots
from chaoskit.process.linux import reason_of, set_name

_SKIPS_MAX = 64  # snapshots without another attempt to get memory

#: Moments that ``probe`` is told of: of a snapshot that has begun, within its copy, before and after its seal.
BEGUN, CHUNK, COPIED, SEALED = "begun", "chunk", "copied", "sealed"


@dataclass(frozen=True, slots=True)
class Taken:
    """How a snapshot went, as far as training is concerned.

    Args:
        step: whose it is; -1 if none was begun.
        stall_s: how long training stood still for it, in ``begin`` and ``wait`` together.
        dropped: why there is none; "" if it is copied. Its seal follows, unless it is poisoned.
    """

    step: int
    stall_s: float
    dropped: str = ""


@dataclass(slots=True)
class _Layout:
    tensors: list[HeldTensor]
    slots: list[Slot]
    size_bytes: int
    index: bytes
    chunks: list[Chunk]


class _Task:
    """A snapshot under way."""

    def __init__(
        self, seal: Seal, image: ArenaImage, copying: Copying, device: DeviceCopies | None
    ) -> None:
        self.seal, self.image, self.copying, self.device = seal, image, copying, device
        self.settled = threading.Event()  # sealed, or never will be


class Snapshotter:
    """Takes snapshots of one piece of the state. ``begin`` and ``wait`` belong to the training thread.

    Args:
        slots: where they lie; nobody else may write there.
        tensors: what is copied. Their values may change between ``wait`` and ``begin`` only; their shapes with
            :meth:`rebind` only.
        scalars: everything else, as bytes; called by ``begin``.
        check_finite: never seal a state with NaN or infinity in it.
        sealed: told each seal, on a thread of the snapshotter.
        dropped: told step and reason of a snapshot that came to nothing, on either thread.
        probe: told the moments named above, for tests that end the process there.

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
        sealed: Callable[[Seal], None] = lambda seal: None,
        dropped: Callable[[int, str], None] = lambda step, reason: None,
        probe: Callable[[str], None] = lambda moment: None,
    ) -> None:
        self.slots = slots
        self._scalars, self._check_finite = scalars, check_finite
        self._tell_sealed, self._tell_dropped, self._probe = sealed, dropped, probe
        self._protected = -1
        self._newest: Seal | None = None
        self._current: _Task | None = None
        self._last = threading.Event()  # set when the newest task is settled
        self._last.set()
        self._begun = Taken(-1, 0.0)
        self._failures = self._skips = 0  # attempts to get memory, and snapshots until the next one
        self._queue: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="snapshots", daemon=True)
        self.rebind(tensors)
        self._thread.start()

    @property
    def newest(self) -> Seal | None:
        """Of the newest snapshot that this snapshotter has completed."""
        return self._newest

    @property
    def has_room(self) -> bool:
        """Whether memory for the slots could be had. If not, it is tried again at ever fewer snapshots."""
        return self.slots.capacity_bytes >= self._layout.size_bytes

    def rebind(self, tensors: Sequence[HeldTensor]) -> None:
        """Copy these tensors from now on, and reserve memory for them: about a second for each new GB.

        To be called where ``begin`` could be, when the optimizer has made its state or tensors were replaced.

        Raises:
            BadInput: if they cannot be copied.
        """
        self._settle()
        slots, size_bytes = lay_out(tensors)
        index = msgspec.msgpack.encode(slots)
        self._layout = _Layout(list(tensors), slots, size_bytes, index, cut(tensors, slots))
        self._failures = self._skips = 0
        self._reserve()

    def protected(self, step: int) -> None:
        """Every piece of this step has its copies: the slot with it is not overwritten until a newer one has."""
        self._protected = step

    def forget_after(self, step: int) -> None:
        """Training went back to ``step``: snapshots of later ones are of no use."""
        self._settle()
        self.slots.forget_after(step)

    def begin(self, step: int, generation: int = 0) -> None:
        """Start to copy the state of ``step``. To be called right after the optimizer has run.

        Returns at once, but where steps are shorter than a copy: then it waits for the checksum of the last one.
        """
        self.wait()
        started_s = time.monotonic()
        reason = ""
        try:
            self._current = self._start(step, generation)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong with a copy, training goes on
            reason = str(error) if isinstance(error, Busy) else reason_of(error)
            with suppress(Exception):  # of whoever is told
                self._tell_dropped(step, reason)
        self._begun = Taken(step, time.monotonic() - started_s, reason)

    def wait(self) -> Taken:
        """Return when the state may change. To be called right before the optimizer runs."""
        taken, self._begun = self._begun, Taken(-1, 0.0)
        task, self._current = self._current, None
        if task is None:
            return taken
        started_s = time.monotonic()
        task.copying.finish_copy()
        if task.device is not None:
            task.device.hold_back()
        stall_s = taken.stall_s + time.monotonic() - started_s
        error = task.copying.error
        return Taken(taken.step, stall_s, reason_of(error) if error else "")

    def settle(self) -> Seal | None:
        """Complete what is under way, its checksum, too. Returns the seal of the newest snapshot."""
        self._settle()
        return self._newest

    def close(self) -> None:
        """Complete what is under way. What the slots hold stays there."""
        self.wait()
        self._queue.put(None)
        self._thread.join()

    # -- the training thread ---------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Complete the copy that is under way, and its checksum."""
        if self._current is not None:
            self._current.copying.finish_copy()
        self._last.wait()

    def _reserve(self) -> None:
        try:
            self.slots.reserve(self._layout.size_bytes)
            self._failures = 0
        except (OSError, MemoryError):
            self._failures += 1
            self._skips = min(_SKIPS_MAX, 2**self._failures - 2)

    def _start(self, step: int, generation: int) -> _Task:
        if not self.has_room:
            if self._skips:
                self._skips -= 1
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
        self._last = task.settled
        self._queue.put(task)
        return task

    def _take(self) -> ArenaImage:
        try:
            return self.slots.take(self._protected)
        except Busy:
            if self._last.is_set():
                raise
            self._last.wait()  # only its checksum is missing, or the next step would have been slower
            return self.slots.take(self._protected)

    # -- the other thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        set_name("ck-snapshots")
        while (task := self._queue.get()) is not None:
            self._complete(task)
            del task  # an idle thread must not keep tensors

    def _complete(self, task: _Task) -> None:
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
        with suppress(Exception):  # of whoever is told
            if reason:
                self._tell_dropped(seal.step, reason)
            else:
                self._tell_sealed(seal)
