"""The disk tier of a job: every node writes its part of a due snapshot, one of them commits it.

The parts meet in a staging directory that all nodes see. Each part comes with a file that says what is in it: when
there is one of every part, the node of rank 0 makes the snapshot visible and deletes old ones. All of it happens on a
thread of its own, from copies of our own: training waits for no disk, and no failure of one ends it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

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
from chaoskit.coordinator.schedules.save_schedule import LAST_PATIENCE_S, Due, Patience
from chaoskit.journal import Journal
from chaoskit.process.linux import reason_of, set_name
from chaoskit.runtime.state.naming import SCALARS, encode_scalars, parameter_names, stored_name
from chaoskit.vocabulary import Event

_LOOK_S = 0.02
_LAST_LOOK_S = 0.1  # of a node that has written its part of the last snapshot, perhaps minutes ago
_PATIENCE_S = 60.0  # without a new part a snapshot is given up
_LAST_CHANCE_S = 1.0  # for parts of a membership that is over
_LOOK_AT_BYTES_S = 0.5
_PART, _REFUSED = ".part.json", ".refused"
_parts = msgspec.json.Decoder(Part)


def retention_of(tier: CheckpointTier) -> Retention:
    """What is kept in a tier."""
    return Retention(
        keep_last=tier.keep_last, keep_every=tier.keep_every, budget_bytes=tier.budget_bytes
    )


class Saver:
    """Writes what it is offered. One snapshot at a time: while one is under way, others are let go.

    Args:
        run: id of the run: what another one left in the directory is not its own.
        committed: called on the saver's thread with each snapshot that this node has committed.
        fail: called there with an error of ours.
        at: called there at each of :data:`~chaoskit.checkpoint.layout.boundaries.BOUNDARIES`.
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
        self.due, self._journal = Due(tier.every_steps, by_time=tier.every_s > 0), journal
        self._committed, self._fail = committed, fail
        self._offered: queue.SimpleQueue[Portion] = queue.SimpleQueue()
        self._age = (-1, -1)  # of the snapshot that is under way, or was the last
        self._writes = False
        self._given = self._taken = 0  # portions
        self._parked: list[Portion] = []  # the staging directory is not there yet
        self._staging: Staging | None = None  # begun here
        self._lead: Portion | None = None  # by which the end of it is known
        self._seen = 0  # parts of it
        self._deadline_s = 0.0
        self._generation = 0
        threading.Thread(target=self._serve, name="saver", daemon=True).start()

    # -- called by a keeper's thread --------------------------------------------------------------------------------

    @property
    def newest(self) -> tuple[int, int]:
        """The age of the state that was offered last."""
        return self._age

    def wants(self, age: tuple[int, int]) -> bool:
        """Whether a portion of that age can be taken now. If not, the journal says so."""
        if age == self._age or not (self._writes or self._staging):
            return True
        self._refuse(age[0], f"step {self._age[0]} is still being written")
        return False

    def offer(self, portion: Portion) -> None:
        """Have a portion written, in place of those of older snapshots that nobody has begun."""
        self._age = portion.age
        self._given += 1
        self._offered.put(portion)

    @property
    def _is_busy(self) -> bool:
        return self._given != self._taken or bool(self._parked or self._writes or self._staging)

    def finish(self, timeout_s: float) -> bool:
        """Wait until nothing is under way; whether that was so in time. To be called on any other thread."""
        deadline_s = time.monotonic() + timeout_s
        while self._is_busy and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
        return not self._is_busy

    def settle(self) -> bool:
        """The same, for as long as any node writes something of the snapshot that was offered last."""
        patience, step, look_s = Patience(LAST_PATIENCE_S), self._age[0], 0.0
        while self._is_busy:
            if (now_s := time.monotonic()) >= look_s:
                look_s = now_s + _LOOK_AT_BYTES_S
                if patience.is_over(self._staged_bytes(step), now_s):
                    self._refuse(step, f"nothing of it was written for {LAST_PATIENCE_S:g} s")
                    return False
            time.sleep(_LOOK_S)
        return True

    def _staged_bytes(self, step: int) -> int:
        try:
            return self._disk.staged_bytes(step)
        except OSError:  # the disk fails
            return 0

    def follow(self, generation: int) -> None:
        """A new membership: what nodes of the one before have not written may never be."""
        self._generation = generation

    # -- the thread -------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        # Not at a low priority: a nice thread that waits for a CPU while it has the interpreter's lock holds up what
        # answers a recall. What takes long, which is to copy, to digest and to write, happens without the lock.
        set_name("ck-saver")
        import chaoskit.checkpoint.disk.dcp_metadata  # noqa: F401 - most of a second, now and not in the first save

        try:
            while True:
                with contextlib.suppress(queue.Empty):
                    self._park(self._offered.get(timeout=self._pause_s))
                    self._taken += (
                        1  # after it was parked: a snapshot that is under way is always seen to be
                    )
                self._write_parked()
                if self._staging is not None:
                    self._look(self._staging)
        except Exception as error:  # noqa: BLE001 - nobody would see it on a thread
            self._fail(error)

    @property
    def _pause_s(self) -> float | None:
        if self._staging is None and not self._parked:
            return None
        only_last = self._staging is None and all(portion.last for portion in self._parked)
        return _LAST_LOOK_S if only_last else _LOOK_S

    def _park(self, portion: Portion) -> None:
        for old in [one for one in self._parked if one.age != portion.age]:
            self._drop(old, "nobody began to store it")
        self._parked.append(portion)

    def _write_parked(self) -> None:
        for portion in list(self._parked):
            staging = None
            if portion not in self._parked:
                continue  # the snapshot was given up meanwhile
            try:
                if portion.last and self._disk.holds(portion.step):
                    self._parked.remove(portion)
                elif (staging := self._find(portion)) is not None:
                    self._writes = True
                    self._write(staging, portion)
                    if (
                        portion.leads or not portion.last
                    ):  # else this directory may be given up, and another begun
                        self._parked.remove(portion)
                elif portion.generation < self._generation:
                    self._drop(portion, "its membership was over before anybody began to store it")
            except FileExistsError:  # another rank that holds the same piece writes it
                if not portion.last:
                    self._parked.remove(portion)
            except Exception as error:  # noqa: BLE001 - whatever goes wrong with a save, training goes on
                if portion.last and not portion.leads and isinstance(error, FileNotFoundError):
                    continue  # the directory was given up, and another may be begun
                self._drop(portion, reason_of(error))
                if staging is not None and portion.leads:
                    self._forget(staging)
                elif staging is not None:
                    with contextlib.suppress(OSError):  # the disk may be full
                        (staging.path / f"{portion.number}{_REFUSED}").touch()
            finally:
                self._writes = False

    def _find(self, portion: Portion) -> Staging | None:
        """The staging directory of a snapshot; begun here, if that is this node's part."""
        if portion.leads:
            if self._staging is None:
                self._staging = self._disk.begin(*portion.age, run=self._run)
                self._lead, self._seen, self._deadline_s = (
                    portion,
                    0,
                    time.monotonic() + _PATIENCE_S,
                )
            return (
                self._staging
                if (self._staging.step, self._staging.generation) == portion.age
                else None
            )
        name, begun = snapshot_name(*portion.age), self._disk.begun(self._run)
        found = [path for path in begun if path.name.startswith(f"{name}~")]
        if not found:
            self._refuse_older(portion, begun)
        return self._disk.join(found[-1].name) if found else None

    def _refuse_older(self, portion: Portion, begun: list[Path]) -> None:
        """Nobody shall wait for this part of a snapshot that is older: if it was not copied, it never will be."""
        for path in begun:
            step, generation = parse_name(path.name.partition("~")[0]) or portion.age
            missed = step < portion.step and generation == portion.generation
            if missed and not (path / f"{portion.number}{_PART}").exists():
                with contextlib.suppress(OSError):  # it is gone by now, or the disk is full
                    (path / f"{portion.number}{_REFUSED}").touch()

    def _write(self, staging: Staging, portion: Portion) -> None:
        if (staging.path / f"{portion.number}{_PART}").exists():
            raise FileExistsError
        if poisoned := portion.poisoned():
            raise ValueError(f"{poisoned} is not finite")
        names = parameter_names(portion.scalars)
        with staging.writer(f"__{portion.number}_0{DATA_SUFFIX}") as writer:
            for cut, data in portion.boxes:
                shape = cut.slot.whole or cut.slot.shape
                writer.add_box(
                    stored_name(cut.slot.path, names), data, cut.slot.dtype, cut.box, shape
                )
            if not portion.number:
                writer.add_object(SCALARS, encode_scalars(portion.scalars, portion.step))
            part = writer.finish()
        draft = staging.path / f"{portion.number}.draft"
        write_file(draft, msgspec.json.encode(part))
        draft.rename(draft.with_name(f"{portion.number}{_PART}"))

    def _look(self, staging: Staging) -> None:
        """Commit the snapshot if all of it is there; give it up if it will never be."""
        portion, now_s = self._lead, time.monotonic()
        assert portion is not None
        found = sorted(
            staging.path.glob(f"*{_PART}"), key=lambda path: int(path.name.partition(".")[0])
        )
        refused = [path.name.removesuffix(_REFUSED) for path in staging.path.glob(f"*{_REFUSED}")]
        if len(found) > self._seen:
            self._seen, self._deadline_s = len(found), now_s + _PATIENCE_S
        if portion.generation < self._generation:
            self._deadline_s = min(self._deadline_s, now_s + _LAST_CHANCE_S)
        if len(found) == portion.count:
            self._commit(staging, found)
        elif refused or (now_s > self._deadline_s and not portion.last):
            detail = (
                f"part {', '.join(refused)} failed"
                if refused
                else f"{len(found)} of {portion.count} parts came"
            )
            self._refuse(portion.step, detail)
        else:
            return
        self._forget(staging)

    def _commit(self, staging: Staging, found: list[Path]) -> None:
        assert self._lead is not None
        try:
            parts = _without_repeats([_parts.decode(path.read_bytes()) for path in found])
            for told in found:
                told.unlink()
            snapshot = staging.commit(parts, world=self._lead.world)
        except Exception as error:  # noqa: BLE001 - as in _write_parked
            self._refuse(staging.step, reason_of(error))
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
        with contextlib.suppress(OSError):  # the next one will prune again
            self._disk.prune()
        self._committed(snapshot)

    def _forget(self, staging: Staging) -> None:
        """Nothing of it is left, unless it was committed."""
        staging.abandon()
        if self._lead is not None and self._lead.last:
            self._parked.clear()
        self._staging = self._lead = None

    def _drop(self, portion: Portion, reason: str) -> None:
        self._parked.remove(portion)
        if portion.leads and portion.last:
            self._parked.clear()
        self._refuse(portion.step, reason)

    def _refuse(self, step: int, reason: str) -> None:
        self._journal.write(Event.SAVE_FAILED, step=step, tier="disk", reason=reason)


def _without_repeats(parts: list[Part]) -> list[Part]:
    """The parts without what an earlier one has, too: tensors that every rank holds whole."""
    known: set[tuple[str, tuple[int, ...], tuple[int, ...]]] = set()
    found = []
    for part in parts:
        items: list[Item] = []
        for item in part.items:
            if (box := (item.path, item.start, item.extent)) not in known:
                known.add(box)
                items.append(item)
        found.append(Part(part.files, tuple(items)))
    return found
