"""What a node has to do with the tiers that outlive every node: it stores its part, and says what is there."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from chaoskit.checkpoint.disk.inventory import DamagedSnapshot
from chaoskit.checkpoint.disk.names import parse_name
from chaoskit.checkpoint.disk.retention import Schedule
from chaoskit.checkpoint.disk.snapshot import Snapshot as StoredSnapshot
from chaoskit.checkpoint.disk.tier import DiskTier
from chaoskit.checkpoint.layout.boundaries import Hook, undisturbed
from chaoskit.checkpoint.layout.manifest import MANIFEST, Damaged
from chaoskit.checkpoint.remote.source import DirectorySource
from chaoskit.checkpoint.remote.tier import RemoteTier, checked_manifest
from chaoskit.checkpoint.remote.uploader import Uploader
from chaoskit.config import CheckpointTier, RunConfig
from chaoskit.coordinator.schedules.save_schedule import LAST_PATIENCE_S, Patience
from chaoskit.daemon.saving import Saver, retention_of
from chaoskit.errors import ChaoskitError
from chaoskit.journal import Journal
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import Endpoint, Message, Sealed, Snapshot

_OFFERED_MAX = 3  # of each tier, the newest: one that is damaged leads to the one before it
_LISTING_S = 1.5  # a node that has nothing else to offer waits so long for the first listing of the remote tier
_LISTING_ALONE_S = 30.0  # where nothing else can be there: the coordinator waits
_RELIST_S = 30.0
_FAREWELL_S = 0.1
_LOOK_S = 0.5

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Owed:
    """An answer that does not name what the remote tier has.

    Args:
        is_told: whether it was given; else it waits for the remote tier.
    """

    known: Sealed
    tell: Callable[[Message], None]
    is_told: bool


class Archive:
    """The disk and the remote tier of a job, seen from one node.

    Attributes:
        saver: takes this node's part of due snapshots; None if nothing is to be stored.

    Args:
        at: called at each boundary of the disk and the remote tier, on threads that store.
    """

    def __init__(
        self,
        node: str,
        token: str,
        config: RunConfig,
        journal: Journal,
        fail: Callable[[BaseException], None],
        at: Hook = undisturbed,
    ) -> None:
        self._node, self._config, self._journal, self._at = node, config, journal, at
        self.saver: Saver | None = None
        if config.disk is not None:
            self.saver = Saver(config.disk, _run_of(token), journal, self._committed, fail, at)
        self._uploader: Uploader | None = None
        self._uploaded, self._uploaded_s = (
            -1,
            time.monotonic(),
        )  # the newest step that was offered to it, and when
        self._remote: list[Snapshot] = []  # what was there when it was last asked
        self._telling = threading.Lock()  # a later answer takes the place of an earlier one
        self._owed: _Owed | None = None  # the newest that was given without the remote tier
        self._has_tried = self._has_listed = False
        if config.remote is not None:
            threading.Thread(target=self._keep_listing, name="ck-listing", daemon=True).start()

    def follow(self, generation: int) -> None:
        """A new membership."""
        if self.saver is not None:
            self.saver.follow(generation)

    def finish(self, timeout_s: float) -> None:
        """The job is over: let what is under way come to its end, if it does so in time."""
        deadline_s = time.monotonic() + timeout_s
        if self.saver is not None and self.saver.finish(timeout_s) and self._uploader is not None:
            self._uploader.wait(max(0.0, deadline_s - time.monotonic()))
            self._uploader.close(_FAREWELL_S)

    def finish_last(self, *, leads: bool) -> None:
        """The job has ended well: the same, for as long as something moves. The newest snapshot is uploaded, too.

        Args:
            leads: whether that is for this node to do.
        """
        assert self.saver is not None
        if not self.saver.settle() or not leads or self._config.remote is None:
            return
        assert self._config.disk is not None
        newest = next(iter(DiskTier(self._config.disk.target).snapshots().snapshots), None)
        if newest is not None and newest.manifest.step != self._uploaded:
            self._upload(self._config.remote, newest)
        if self._uploader is not None:
            self._await_upload(self._uploader)
            self._uploader.close(_FAREWELL_S)

    def _await_upload(self, uploader: Uploader) -> None:
        patience = Patience(LAST_PATIENCE_S)
        while not uploader.wait(_LOOK_S):
            status = uploader.status
            if patience.is_over(status.sent_bytes, time.monotonic()):
                error = f": {status.last_error}" if status.last_error else ""
                self._upload_failed(
                    status.under_way, f"nothing was sent for {LAST_PATIENCE_S:g} s{error}"
                )
                return

    def answer(self, answer: Sealed, tell: Callable[[Message], None]) -> None:
        """Tell what can be read here: what is in memory, and what is stored. Nothing but manifests is read for it.

        A remote store that is slow, or out, holds up no thread of a keeper: what it has is told in another answer to
        the same question. Only a node that has nothing else waits with its answer: without a copy the job would end.

        Args:
            answer: names what is in memory.
        """
        stored: list[Snapshot] = []
        if self._config.disk is not None:
            with contextlib.suppress(
                OSError
            ):  # a disk that fails has nothing to offer now; other tiers may
                stored += self._on_disk(DiskTier(self._config.disk.target))
        known = self._with(answer, stored)
        with self._telling:
            if self._config.remote is None or self._has_listed:
                tell(self._with(known, self._remote))
                return
            owed = self._owed = _Owed(known, tell, bool(known.snapshots) or self._has_tried)
            if owed.is_told:
                tell(known)
                return
        alone = threading.Timer(
            _LISTING_ALONE_S if self._config.resume else _LISTING_S, self._tell_without, (owed,)
        )
        alone.daemon = True
        alone.start()

    def _tell_without(self, owed: _Owed) -> None:
        """The remote store has not said in time what it has."""
        with self._telling:
            if owed is self._owed and not owed.is_told:
                owed.is_told = True
                owed.tell(owed.known)

    def _tell_with(self, remote: list[Snapshot]) -> None:
        """It has."""
        with self._telling:
            self._remote, self._has_listed = remote, True
            owed, self._owed = self._owed, None
            if owed is not None and (remote or not owed.is_told):
                owed.tell(self._with(owed.known, remote))

    def _with(self, answer: Sealed, more: list[Snapshot]) -> Sealed:
        for offer in more:
            self._journal.write(
                Event.SEALED,
                worker="",
                step=offer.step,
                generation=offer.generation,
                checksum=offer.checksum,
                piece=0,
                tier=offer.tier,
            )
        return msgspec.structs.replace(answer, snapshots=(*answer.snapshots, *more))

    def _on_disk(self, tier: DiskTier) -> Iterator[Snapshot]:
        listing = tier.snapshots()
        for one in listing.damaged:
            self._set_aside(tier, one)
        for snapshot in listing.snapshots[:_OFFERED_MAX]:
            try:
                stamp = xxhash.xxh3_128_hexdigest((snapshot.path / MANIFEST).read_bytes())
            except OSError:
                continue  # deleted meanwhile
            yield self._offer(snapshot, stamp, "disk", str(snapshot.path))

    def _set_aside(self, tier: DiskTier, lost: DamagedSnapshot) -> None:
        """Its table of contents is wrong, so nobody will read more of it. Every node that is asked may find it."""
        aside = tier.quarantine(lost.path, lost.reason)
        if aside.path != lost.path:  # else another node was faster
            step, generation = parse_name(lost.name) or (-1, -1)
            source, detail = f"disk of {self._node}", lost.reason
            self._journal.write(
                Event.QUARANTINED, generation=generation, step=step, source=source, detail=detail
            )

    def _offer(self, stored: StoredSnapshot, stamp: str, tier: str, path: str) -> Snapshot:
        step, generation = stored.manifest.age
        nobody = Endpoint("", "", 0, 0, -1)
        store = (
            self._config.remote.endpoint
            if self._config.remote is not None and tier == "remote"
            else ""
        )
        size_bytes = stored.manifest.size_bytes
        return Snapshot(
            self._node,
            "",
            step,
            generation,
            size_bytes,
            stamp,
            nobody,
            tier=tier,
            path=path,
            store=store,
        )

    # -- the remote tier ------------------------------------------------------------------------------------------

    def _committed(self, snapshot: StoredSnapshot) -> None:
        """This node has committed a snapshot: it uploads it, if that is due."""
        remote = self._config.remote
        if remote is None:
            return
        step = snapshot.manifest.step
        last = (
            self._uploaded
            if self._uploaded >= 0
            else max((one.step for one in self._remote), default=None)
        )
        schedule, now_s = (
            Schedule(every_steps=remote.every_steps, every_s=remote.every_s),
            time.monotonic(),
        )
        if schedule.due(step, last, now_s - self._uploaded_s):
            self._upload(remote, snapshot)

    def _upload(self, remote: CheckpointTier, snapshot: StoredSnapshot) -> None:
        step = snapshot.manifest.step
        try:
            if self._uploader is None:
                tier = _open(remote, self._at)
                self._uploader = Uploader(
                    tier, after_commit=self._after_upload, failed=self._upload_failed
                )
            self._uploader.offer(DirectorySource(snapshot.path))
            self._uploaded, self._uploaded_s = step, time.monotonic()
        except ChaoskitError as error:
            self._journal.write(Event.SAVE_FAILED, step=step, tier="remote", reason=str(error))

    def _upload_failed(self, name: str, reason: str) -> None:
        step, _ = parse_name(name) or (-1, -1)
        self._journal.write(Event.SAVE_FAILED, step=step, tier="remote", reason=reason)

    def _after_upload(self, tier: RemoteTier) -> None:
        tier.prune()
        self._remote = self._list(tier)
        if self._remote:
            newest = self._remote[0]
            self._journal.write(
                Event.SAVED,
                step=newest.step,
                generation=newest.generation,
                tier="remote",
                path=newest.path,
                size_bytes=newest.size_bytes,
            )

    def _keep_listing(self) -> None:
        remote, pause = self._config.remote, threading.Event()
        assert remote is not None
        tier: RemoteTier | None = None
        while True:
            try:
                tier = tier or _open(remote)
                self._tell_with(self._list(tier))
            except Exception as error:  # noqa: BLE001 - a tier that is out has nothing to offer now
                _log.warning("%s cannot be listed: %s", remote.target, error)
                self._has_tried = True
                if (owed := self._owed) is not None:
                    self._tell_without(owed)
            pause.wait(_RELIST_S)

    def _list(self, tier: RemoteTier) -> list[Snapshot]:
        found: list[Snapshot] = []
        for name, data in tier.candidates():
            try:
                stored = StoredSnapshot(Path(name), checked_manifest(name, data))
            except Damaged:
                continue
            stamp = xxhash.xxh3_128_hexdigest(data)
            found.append(
                self._offer(stored, stamp, "remote", f"{tier.store.url.rstrip('/')}/{name}")
            )
            if len(found) == _OFFERED_MAX:
                break
        return found


def _run_of(token: str) -> str:
    """An id that every node of the run finds by itself, and that does not give the token away."""
    return hashlib.blake2b(token.encode(), digest_size=8).hexdigest()


def _open(remote: CheckpointTier, at: Hook = undisturbed) -> RemoteTier:
    """The remote tier of a job. Raises BadInput if its URL is none."""
    return RemoteTier(
        remote.target, storage_options=remote.storage_options, retention=retention_of(remote), at=at
    )


def newest_generation(config: RunConfig) -> int:
    """The largest generation of all snapshots that are stored where ``config`` says, damaged or not; 0 without any.

    Raises:
        BadInput: if the remote tier's URL is none. RemoteRefused, RemoteUnavailable: if it cannot be asked.
    """
    names: list[str] = []
    if config.disk is not None:
        listing = DiskTier(config.disk.target).snapshots()
        names = [one.name for one in listing.snapshots] + [one.name for one in listing.damaged]
    if config.remote is not None:
        tier = _open(config.remote)
        names += tier.names()
        tier.close()
    return max((max(age[1], 1) for name in names if (age := parse_name(name))), default=0)
