"""Saver of the disk tier: every node writes its part of a due snapshot, and one node commits it.

The parts meet in a staging directory that all nodes see. Each part comes with a file that describes
it. When all parts are there, the node of rank 0 makes the snapshot visible and deletes old ones.
All of this happens on a thread of its own, from copies: training waits for no disk, and no failure
of a disk ends it. A save that fails costs only its snapshot, and the journal records it.

-> ``checkpoint/disk/due_steps.py``: which steps. ``checkpoint/disk/staging.py``: the commit.
-> ``daemon/replica_keeper.py`` and ``daemon/piece_keeper.py``: copy the state for a portion.
-> ``daemon/archive.py``: uploads, and the list of what can be restored.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from chaoskit.checkpoint.disk.due_steps import LAST_PATIENCE_S, DueSteps, Patience
from chaoskit.checkpoint.disk.files import write_file
from chaoskit.checkpoint.disk.names import parse_name, snapshot_name
from chaoskit.checkpoint.disk.portion import Portion
from chaoskit.checkpoint.disk.retention import Retention
from chaoskit.checkpoint.disk.snapshot import Snapshot
from chaoskit.checkpoint.disk.staging import Staging
from chaoskit.checkpoint.disk.tier import DATA_SUFFIX, DiskTier
from chaoskit.checkpoint.layout.boundaries import Hook
from chaoskit.checkpoint.layout.manifest import Item, Part
from chaoskit.config import CheckpointTier
from chaoskit.journal import Journal
from chaoskit.process.linux import reason_of, set_name
from chaoskit.runtime.state.naming import SCALARS, encode_scalars, parameter_names, stored_name
from chaoskit.vocabulary import Event

_LOOK_S = 0.02
# pause of a node that has written its part of the last snapshot, perhaps minutes ago
_LAST_LOOK_S = 0.1
_PATIENCE_S = 60.0  # time without a new part after which a snapshot is given up
_LAST_CHANCE_S = 1.0  # time limit for parts of a generation that is over
_BYTES_LOOK_S = 0.5
_PART, _REFUSED = ".part.json", ".refused"
_part_decoder = msgspec.json.Decoder(Part)


def retention_of(tier: CheckpointTier) -> Retention:
    """Return the retention of a tier."""
    return Retention(
        keep_last=tier.keep_last, keep_every=tier.keep_every, budget_bytes=tier.budget_bytes
    )


@dataclass(slots=True)
class _LedSnapshot:
    """A snapshot that this node has begun, and commits when all parts are written.

    Attributes:
        staging: its staging directory.
        portion: this node's portion of it, which names the number of parts.
        deadline_s: monotonic time at which it is given up, unless a part is written before.
        parts_count: number of parts that were written so far.
    """

    staging: Staging
    portion: Portion
    deadline_s: float
    parts_count: int = 0


class Saver:
    """A thread that writes offered portions, and commits the snapshots that this node leads.

    Ask :meth:`wants` before a portion is copied and offered: it refuses while another snapshot is
    under way.

    Args:
        tier: settings of the disk tier.
        run: id of the run, which tells its staging directories from those of other runs.
        journal: journal of the node.
        committed: called on the saver's thread with each snapshot that this node has committed.
        fail: called there with an unexpected error, after which the thread ends.
        at: called there at each of :data:`~chaoskit.checkpoint.layout.boundaries.BOUNDARIES`.

    Attributes:
        due: the steps whose state is stored.
    """

    def __init__(
        self,
        tier: CheckpointTier,
        run: str,
        journal: Journal,
        committed: Callable[[Snapshot], None],
        fail: Callable[[BaseException], None],
        at: Hook,
    ) -> None:
        self._disk = DiskTier(tier.target, retention=retention_of(tier), at=at)
        self._run = run
        self.due, self._journal = DueSteps(tier.every_steps, by_time=tier.every_s > 0), journal
        self._committed, self._fail = committed, fail
        self._offered: queue.SimpleQueue[Portion] = queue.SimpleQueue()
        self._offered_age = (-1, -1)  # age of the snapshot that is under way, or was the last
        self._is_writing = False
        self._portions_offered = self._portions_handled = 0  # numbers of portions
        self._pending: list[Portion] = []  # portions without a staging directory yet
        self._led: _LedSnapshot | None = None
        self._present_generation = 0
        threading.Thread(target=self._serve, name="saver", daemon=True).start()

    # -- called by a keeper's thread ---------------------------------------------------------------

    @property
    def newest(self) -> tuple[int, int]:
        """Step and generation of the state that was offered last; (-1, -1) before the first."""
        return self._offered_age

    def wants(self, age: tuple[int, int]) -> bool:
        """Return True if a portion of that age can be written now.

        Otherwise record in the journal that this step is not stored.
        """
        if age == self._offered_age or not (self._is_writing or self._led):
            return True
        self._record_failure(age[0], f"step {self._offered_age[0]} is still being written")
        return False

    def offer(self, portion: Portion) -> None:
        """Queue a portion to be written. Returns at once.

        Portions of other snapshots that still wait for a staging directory are dropped, and the
        journal records that these snapshots are not stored.
        """
        self._offered_age = portion.age
        self._portions_offered += 1
        self._offered.put(portion)

    @property
    def _is_busy(self) -> bool:
        """True while a portion is pending or written, or a snapshot of this node is open."""
        return self._portions_offered != self._portions_handled or bool(
            self._pending or self._is_writing or self._led
        )

    def finish(self, timeout_s: float) -> bool:
        """Wait until no save is under way, stored or not. Not for the saver's thread.

        Return True if that is so, and False if the time runs out before.
        """
        deadline_s = time.monotonic() + timeout_s
        while self._is_busy and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
        return not self._is_busy

    def newest_stored(self) -> Snapshot | None:
        """Return the newest complete snapshot of the tier, or None. Only manifests are read.

        It may be of another run. Raise OSError if the disk fails.
        """
        return next(iter(self._disk.snapshots().snapshots), None)

    def settle(self) -> bool:
        """Wait while any node writes to the last snapshot, without a time limit.

        Return True when it is stored or given up. Return False, and record a failure in the
        journal, if no data of it is written for 5 minutes.
        """
        patience, step, next_look_s = Patience(LAST_PATIENCE_S), self._offered_age[0], 0.0
        while self._is_busy:
            if (now_s := time.monotonic()) >= next_look_s:
                next_look_s = now_s + _BYTES_LOOK_S
                if patience.is_over(self._staged_bytes(step), now_s):
                    self._record_failure(
                        step, f"no data of it was written for {LAST_PATIENCE_S:g} s"
                    )
                    return False
            time.sleep(_LOOK_S)
        return True

    def _staged_bytes(self, step: int) -> int:
        """Return the size of the data written for a step; 0 if the disk fails."""
        try:
            return self._disk.staged_bytes(step)
        except OSError:  # the disk fails, so there is no progress
            return 0

    def follow(self, generation: int) -> None:
        """Note that ``generation`` has begun.

        A snapshot of an earlier one, except that of a job's end, is given up after 1 s, because its
        missing parts may never come. A portion of it that has no staging directory is dropped.
        """
        self._present_generation = generation

    # -- the thread --------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Write portions and commit snapshots. Returns only after ``fail`` was called."""
        # Not at a low priority: a nice thread that waits for a CPU with the interpreter's lock
        # would delay the answer to a recall. The slow operations, which are copying, digesting and
        # writing, release the lock.
        set_name("ck-saver")
        import chaoskit.checkpoint.disk.dcp_metadata  # noqa: F401 - takes most of a second, better now than in a save

        try:
            while True:
                with contextlib.suppress(queue.Empty):
                    self._add_pending(self._offered.get(timeout=self._pause_s))
                    # after it became pending, so that a snapshot under way always counts as busy
                    self._portions_handled += 1
                self._write_pending()
                if self._led is not None:
                    self._check_progress(self._led)
        except Exception as error:  # noqa: BLE001 - would be lost on a thread
            self._fail(error)

    @property
    def _pause_s(self) -> float | None:
        """The time in seconds until the next check; None to wait for an offer."""
        if self._led is None and not self._pending:
            return None
        only_last = self._led is None and all(portion.is_last for portion in self._pending)
        return _LAST_LOOK_S if only_last else _LOOK_S

    def _add_pending(self, portion: Portion) -> None:
        """Add a portion, and drop pending ones of other snapshots, which the journal records."""
        for other in [pending for pending in self._pending if pending.age != portion.age]:
            self._drop(other, "no node began to store it")
        self._pending.append(portion)

    def _write_pending(self) -> None:
        """Write the pending portions whose staging directory exists. No error is raised.

        A portion that cannot be written is dropped, and its snapshot is given up by the node that
        leads it. One whose generation has ended without a staging directory is dropped, too.
        """
        for portion in list(self._pending):
            staging = None
            if portion not in self._pending:
                continue  # the snapshot was given up meanwhile
            try:
                if portion.is_last and self._disk.holds(portion.step):
                    self._pending.remove(portion)
                elif (staging := self._find(portion)) is not None:
                    self._is_writing = True
                    self._write(staging, portion)
                    # a last portion stays: this directory may be given up, and another begun
                    if portion.leads or not portion.is_last:
                        self._pending.remove(portion)
                elif portion.generation < self._present_generation:
                    self._drop(portion, "its generation ended before a node began to store it")
            except FileExistsError:  # another rank that holds the same piece writes it
                if not portion.is_last:
                    self._pending.remove(portion)
            except Exception as error:  # noqa: BLE001 - training goes on without this snapshot
                if portion.is_last and not portion.leads and isinstance(error, FileNotFoundError):
                    continue  # the directory was given up, and another may be begun
                self._drop(portion, reason_of(error))
                if self._led is not None and staging is self._led.staging:
                    self._close(self._led)
                elif staging is not None:
                    with contextlib.suppress(OSError):  # the disk may be full
                        (staging.path / f"{portion.index}{_REFUSED}").touch()
            finally:
                self._is_writing = False

    def _find(self, portion: Portion) -> Staging | None:
        """Return the staging directory of a portion, or None if there is none yet.

        It is begun here if this node leads and no other snapshot of it is open. Raise OSError if
        the disk is full or fails.
        """
        if portion.leads:
            if self._led is None:
                begun_staging = self._disk.begin(*portion.age, run=self._run)
                self._led = _LedSnapshot(begun_staging, portion, time.monotonic() + _PATIENCE_S)
            return self._led.staging if self._led.portion.age == portion.age else None
        name, run_directories = snapshot_name(*portion.age), self._disk.begun(self._run)
        directories = [path for path in run_directories if path.name.startswith(f"{name}~")]
        if not directories:
            self._refuse_older(portion, run_directories)
        return self._disk.join(directories[-1].name) if directories else None

    def _refuse_older(self, portion: Portion, run_directories: list[Path]) -> None:
        """Mark this node's missing parts of older snapshots as refused in their directories.

        The node that leads then gives up the snapshot.
        """
        for path in run_directories:
            step, generation = parse_name(path.name.partition("~")[0]) or portion.age
            is_missed = step < portion.step and generation == portion.generation
            if is_missed and not (path / f"{portion.index}{_PART}").exists():
                with contextlib.suppress(OSError):  # the directory may be gone, or the disk full
                    (path / f"{portion.index}{_REFUSED}").touch()

    def _write(self, staging: Staging, portion: Portion) -> None:
        """Write a portion as a file of the snapshot, then its description.

        Raises:
            FileExistsError: if the part was written already.
            ValueError: if the portion is not finite.
            OSError: if the disk is full or fails.
        """
        if (staging.path / f"{portion.index}{_PART}").exists():
            raise FileExistsError
        if poisoned_path := portion.poisoned_path():
            raise ValueError(f"{poisoned_path} is not finite")
        names = parameter_names(portion.scalars)
        with staging.writer(f"__{portion.index}_0{DATA_SUFFIX}") as writer:
            for cut, data in portion.boxes:
                shape = cut.slot.whole or cut.slot.shape
                writer.add_box(
                    stored_name(cut.slot.path, names), data, cut.slot.dtype, cut.box, shape
                )
            if not portion.index:
                writer.add_object(SCALARS, encode_scalars(portion.scalars, portion.step))
            part = writer.finish()
        draft = staging.path / f"{portion.index}.draft"
        write_file(draft, msgspec.json.encode(part))
        draft.rename(draft.with_name(f"{portion.index}{_PART}"))

    def _check_progress(self, led: _LedSnapshot) -> None:
        """Commit the snapshot if all parts are there.

        Give it up if a part was refused, or no new part came for a minute. The snapshot of a job's
        end has no such limit.
        """
        staging, portion, now_s = led.staging, led.portion, time.monotonic()
        part_files = sorted(
            staging.path.glob(f"*{_PART}"), key=lambda path: int(path.name.partition(".")[0])
        )
        refused = [path.name.removesuffix(_REFUSED) for path in staging.path.glob(f"*{_REFUSED}")]
        if len(part_files) > led.parts_count:
            led.parts_count, led.deadline_s = len(part_files), now_s + _PATIENCE_S
        if portion.generation < self._present_generation:
            led.deadline_s = min(led.deadline_s, now_s + _LAST_CHANCE_S)
        if len(part_files) == portion.part_count:
            self._commit(led, part_files)
        elif refused or (now_s > led.deadline_s and not portion.is_last):
            detail = (
                f"part {', '.join(refused)} failed"
                if refused
                else f"only {len(part_files)} of {portion.part_count} parts were written in time"
            )
            self._record_failure(portion.step, detail)
        else:
            return
        self._close(led)

    def _commit(self, led: _LedSnapshot, part_files: list[Path]) -> None:
        """Commit a snapshot, record it in the journal, and delete old ones.

        Then call ``committed``. A commit that fails is recorded in the journal as a failure.
        """
        try:
            parts = _without_repeats(
                [_part_decoder.decode(path.read_bytes()) for path in part_files]
            )
            for part_file in part_files:
                part_file.unlink()
            snapshot = led.staging.commit(parts, world=led.portion.world_size)
        except Exception as error:  # noqa: BLE001 - as in _write_pending
            self._record_failure(led.staging.step, reason_of(error))
            return
        size_bytes, path = snapshot.manifest.size_bytes, str(snapshot.path)
        step, generation = snapshot.manifest.age
        self._journal.write(
            Event.SAVED,
            step=step,
            generation=generation,
            tier="disk",
            path=path,
            size_bytes=size_bytes,
        )
        with contextlib.suppress(OSError):  # the next commit prunes again
            self._disk.prune()
        self._committed(snapshot)

    def _close(self, led: _LedSnapshot) -> None:
        """Forget the snapshot that was begun here.

        If it was not committed, its files are removed. After the last snapshot of a job, all
        pending portions are forgotten, too.
        """
        led.staging.abandon()
        if led.portion.is_last:
            self._pending.clear()
        self._led = None

    def _drop(self, portion: Portion, reason: str) -> None:
        """Drop a pending portion, and record in the journal that its snapshot is not stored.

        If it is the last portion of a leading node, drop all pending portions.
        """
        self._pending.remove(portion)
        if portion.leads and portion.is_last:
            self._pending.clear()
        self._record_failure(portion.step, reason)

    def _record_failure(self, step: int, reason: str) -> None:
        """Record in the journal that a snapshot was not stored."""
        self._journal.write(Event.SAVE_FAILED, step=step, tier="disk", reason=reason)


def _without_repeats(parts: list[Part]) -> list[Part]:
    """Return the parts without items of earlier parts, such as tensors that all ranks hold."""
    boxes: set[tuple[str, tuple[int, ...], tuple[int, ...]]] = set()
    unique_parts = []
    for part in parts:
        items: list[Item] = []
        for item in part.items:
            if (box := (item.path, item.start, item.extent)) not in boxes:
                boxes.add(box)
                items.append(item)
        unique_parts.append(Part(part.files, tuple(items)))
    return unique_parts
