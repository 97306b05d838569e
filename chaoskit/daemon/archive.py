"""A node's access to the disk and remote tiers: saves, uploads, and the list of stored snapshots.

-> ``daemon/saving.py``: stores the node's part. ``checkpoint/remote/uploader.py``: uploads.
-> ``coordinator/membership/copy_search.py``: collects the lists of all nodes after a loss.
-> ``runtime/state/from_store.py``: a rank reads the snapshot that was chosen.
"""

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

from chaoskit.checkpoint.disk.due_steps import LAST_PATIENCE_S, Patience
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
from chaoskit.daemon.saving import Saver, retention_of
from chaoskit.errors import ChaoskitError
from chaoskit.journal import Journal
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import Endpoint, Message, OfferedSnapshot, Sealed

# newest snapshots of each tier to offer, as a damaged one leads to the one before it
_OFFERED_MAX = 3
_LISTING_S = 1.5  # time that a node with nothing else to offer waits for the first remote listing
# time that a node waits for it where no other tier can have a snapshot, and the coordinator waits
_LISTING_ALONE_S = 30.0
_RELIST_S = 30.0
_FAREWELL_S = 0.1
_LOOK_S = 0.5

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _PendingAnswer:
    """An answer that does not name the snapshots of the remote tier.

    Args:
        partial: the answer so far.
        send: sends an answer to the coordinator.
        is_sent: True if ``partial`` was sent; otherwise it waits for the remote tier.
    """

    partial: Sealed
    send: Callable[[Message], None]
    is_sent: bool


class Archive:
    """The disk tier and the remote tier of a job, as used by one node.

    If there is a remote tier, a thread lists it from the start, and every 30 s.

    Args:
        node: name of the node.
        token: secret of the run.
        config: settings of the run.
        journal: journal of the node.
        fail: called with an unexpected error of the saver's thread.
        at: called at each boundary of the disk and the remote tier, on threads that store.

    Attributes:
        saver: stores this node's part of due snapshots; None if nothing is to be stored.
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
            self.saver = Saver(config.disk, _run_id(token), journal, self._committed, fail, at)
        self._uploader: Uploader | None = None
        # step and time of the last offer to the uploader
        self._uploaded_step, self._uploaded_at_s = -1, time.monotonic()
        self._remote_listing: list[OfferedSnapshot] = []  # the last listing of the remote tier
        self._answer_lock = threading.Lock()  # keeps answers in order
        self._pending: _PendingAnswer | None = None  # the newest answer without the remote tier
        self._has_tried = self._has_listed = False
        if config.remote is not None:
            threading.Thread(
                target=self._keep_listing, args=(config.remote,), name="ck-listing", daemon=True
            ).start()

    def follow(self, generation: int) -> None:
        """Note that the membership ``generation`` has begun; see :meth:`Saver.follow`."""
        if self.saver is not None:
            self.saver.follow(generation)

    def finish(self, timeout_s: float) -> None:
        """Wait for saves and uploads under way, up to ``timeout_s``, because the job is over.

        If all saves end in time, uploads that take longer are cancelled. Otherwise uploads run on.
        """
        deadline_s = time.monotonic() + timeout_s
        if self.saver is not None and self.saver.finish(timeout_s) and self._uploader is not None:
            self._uploader.wait(max(0.0, deadline_s - time.monotonic()))
            self._uploader.close(_FAREWELL_S)

    def finish_last(self, saver: Saver, *, leads: bool) -> None:
        """Wait for saves and uploads while they make progress, because the job has ended well.

        Without progress for 5 minutes, a failure is recorded in the journal and the wait ends.
        Uploads are neither begun nor waited for if that happens to a save, or ``leads`` is False.

        Args:
            saver: the saver of this archive.
            leads: True if this node is to upload the newest snapshot, unless it was uploaded.

        Raises:
            OSError: if the disk fails when the newest snapshot is looked for.
        """
        if not saver.settle() or not leads or self._config.remote is None:
            return
        newest = saver.newest_stored()
        if newest is not None and newest.manifest.step != self._uploaded_step:
            self._upload(self._config.remote, newest)
        if self._uploader is not None:
            self._await_upload(self._uploader)
            self._uploader.close(_FAREWELL_S)

    def _await_upload(self, uploader: Uploader) -> None:
        """Wait until uploads are done.

        If nothing was sent for 5 minutes, record a failure in the journal and return.
        """
        patience = Patience(LAST_PATIENCE_S)
        while not uploader.wait(_LOOK_S):
            status = uploader.status
            if patience.is_over(status.sent_bytes, time.monotonic()):
                error = f": {status.last_error}" if status.last_error else ""
                self._upload_failed(
                    status.under_way, f"no data was sent for {LAST_PATIENCE_S:g} s{error}"
                )
                return

    def answer(self, answer: Sealed, send: Callable[[Message], None]) -> None:
        """Send the list of copies that can be read here: those in memory, and the stored snapshots.

        Only manifests are read. A remote store that is slow or unavailable blocks no thread of a
        keeper: its snapshots follow in another answer to the same question. Only a node that has
        nothing else delays its answer, because the job would end without a copy: 1.5 s, or 30 s in
        a run that continues from stored snapshots.

        Args:
            answer: names the copies in memory.
            send: sends an answer.
        """
        stored: list[OfferedSnapshot] = []
        if self._config.disk is not None:
            with contextlib.suppress(OSError):  # other tiers may have snapshots if the disk fails
                stored += self._on_disk(DiskTier(self._config.disk.target))
        partial = self._add_snapshots(answer, stored)
        with self._answer_lock:
            if self._config.remote is None or self._has_listed:
                send(self._add_snapshots(partial, self._remote_listing))
                return
            pending = self._pending = _PendingAnswer(
                partial, send, bool(partial.snapshots) or self._has_tried
            )
            if pending.is_sent:
                send(partial)
                return
        timer = threading.Timer(
            _LISTING_ALONE_S if self._config.resume else _LISTING_S,
            self._answer_without_remote,
            (pending,),
        )
        timer.daemon = True
        timer.start()

    def _answer_without_remote(self, pending: _PendingAnswer) -> None:
        """Send an answer without the remote tier, which was too slow or failed.

        Does nothing if it was sent already, or there is a newer answer.
        """
        with self._answer_lock:
            if pending is self._pending and not pending.is_sent:
                pending.is_sent = True
                pending.send(pending.partial)

    def _answer_with_remote(self, remote: list[OfferedSnapshot]) -> None:
        """Remember a listing of the remote tier, and send it if the last answer lacks it."""
        with self._answer_lock:
            self._remote_listing, self._has_listed = remote, True
            pending, self._pending = self._pending, None
            if pending is not None and (remote or not pending.is_sent):
                pending.send(self._add_snapshots(pending.partial, remote))

    def _add_snapshots(self, answer: Sealed, added: list[OfferedSnapshot]) -> Sealed:
        """Return the answer with ``added`` snapshots, which are recorded in the journal."""
        for offer in added:
            self._journal.write(
                Event.SEALED,
                worker="",
                step=offer.step,
                generation=offer.generation,
                checksum=offer.checksum,
                piece=0,
                tier=offer.tier,
            )
        return msgspec.structs.replace(answer, snapshots=(*answer.snapshots, *added))

    def _on_disk(self, tier: DiskTier) -> Iterator[OfferedSnapshot]:
        """Yield descriptions of the newest snapshots on disk, 3 at most, the newest first.

        Snapshots with a damaged manifest are quarantined. Raise OSError if the disk fails.
        """
        listing = tier.snapshots()
        for damaged in listing.damaged:
            self._quarantine(tier, damaged)
        for snapshot in listing.snapshots[:_OFFERED_MAX]:
            try:
                checksum = xxhash.xxh3_128_hexdigest((snapshot.path / MANIFEST).read_bytes())
            except OSError:
                continue  # deleted meanwhile
            yield self._offer(snapshot, checksum, "disk", str(snapshot.path))

    def _quarantine(self, tier: DiskTier, damaged: DamagedSnapshot) -> None:
        """Quarantine a snapshot whose manifest is damaged, and record it in the journal.

        Every node may find the damage; only the one that moves the snapshot records it.
        """
        quarantined = tier.quarantine(damaged.path, damaged.reason)
        if quarantined.path != damaged.path:  # otherwise another node was faster
            step, generation = parse_name(damaged.name) or (-1, -1)
            source, detail = f"disk of {self._node}", damaged.reason
            self._journal.write(
                Event.QUARANTINED, generation=generation, step=step, source=source, detail=detail
            )

    def _offer(
        self, stored: StoredSnapshot, checksum: str, tier: str, path: str
    ) -> OfferedSnapshot:
        """Return the description of a stored snapshot for the coordinator."""
        step, generation = stored.manifest.age
        no_endpoint = Endpoint("", "", 0, 0, -1)
        store = (
            self._config.remote.endpoint
            if self._config.remote is not None and tier == "remote"
            else ""
        )
        size_bytes = stored.manifest.size_bytes
        return OfferedSnapshot(
            self._node,
            "",
            step,
            generation,
            size_bytes,
            checksum,
            no_endpoint,
            tier=tier,
            path=path,
            store=store,
        )

    # -- the remote tier ---------------------------------------------------------------------------

    def _committed(self, snapshot: StoredSnapshot) -> None:
        """Offer a snapshot that this node has committed to the uploader, if an upload is due."""
        remote = self._config.remote
        if remote is None:
            return
        step = snapshot.manifest.step
        last_step = (
            self._uploaded_step
            if self._uploaded_step >= 0
            else max((listed.step for listed in self._remote_listing), default=None)
        )
        schedule, now_s = (
            Schedule(every_steps=remote.every_steps, every_s=remote.every_s),
            time.monotonic(),
        )
        if schedule.due(step, last_step, now_s - self._uploaded_at_s):
            self._upload(remote, snapshot)

    def _upload(self, remote: CheckpointTier, snapshot: StoredSnapshot) -> None:
        """Offer a snapshot to the uploader, which is started with the first one.

        An error is recorded in the journal, and not raised.
        """
        step = snapshot.manifest.step
        try:
            if self._uploader is None:
                tier = _open_remote(remote, self._at)
                self._uploader = Uploader(
                    tier, after_commit=self._after_upload, on_failed=self._upload_failed
                )
            self._uploader.offer(DirectorySource(snapshot.path))
            self._uploaded_step, self._uploaded_at_s = step, time.monotonic()
        except ChaoskitError as error:
            self._journal.write(Event.SAVE_FAILED, step=step, tier="remote", reason=str(error))

    def _upload_failed(self, name: str, reason: str) -> None:
        """Record in the journal that a snapshot could not be uploaded."""
        step, _ = parse_name(name) or (-1, -1)
        self._journal.write(Event.SAVE_FAILED, step=step, tier="remote", reason=reason)

    def _after_upload(self, tier: RemoteTier) -> None:
        """Delete old snapshots of the remote tier, list it, and record the newest snapshot."""
        tier.prune()
        self._remote_listing = self._list(tier)
        if self._remote_listing:
            newest = self._remote_listing[0]
            self._journal.write(
                Event.SAVED,
                step=newest.step,
                generation=newest.generation,
                tier="remote",
                path=newest.path,
                size_bytes=newest.size_bytes,
            )

    def _keep_listing(self, remote: CheckpointTier) -> None:
        """List the remote tier again and again. Send its snapshots if the last answer lacks them.

        An error is logged, and the tier is listed again later. Does not return.
        """
        never_set = threading.Event()
        tier: RemoteTier | None = None
        while True:
            try:
                tier = tier or _open_remote(remote)
                self._answer_with_remote(self._list(tier))
            except Exception as error:  # noqa: BLE001 - the tier may be available again later
                _log.warning("%s cannot be listed: %s", remote.target, error)
                self._has_tried = True
                if (pending := self._pending) is not None:
                    self._answer_without_remote(pending)
            never_set.wait(_RELIST_S)

    def _list(self, tier: RemoteTier) -> list[OfferedSnapshot]:
        """Return descriptions of the newest snapshots of the remote tier, 3 at most.

        The newest is the first. Snapshots with a damaged manifest are left out.
        """
        snapshots: list[OfferedSnapshot] = []
        for name, data in tier.candidates():
            try:
                stored = StoredSnapshot(Path(name), checked_manifest(name, data))
            except Damaged:
                continue
            checksum = xxhash.xxh3_128_hexdigest(data)
            snapshots.append(
                self._offer(stored, checksum, "remote", f"{tier.store.url.rstrip('/')}/{name}")
            )
            if len(snapshots) == _OFFERED_MAX:
                break
        return snapshots


def _run_id(token: str) -> str:
    """Return an id of the run that every node can compute, and that does not reveal the token."""
    return hashlib.blake2b(token.encode(), digest_size=8).hexdigest()


def _open_remote(remote: CheckpointTier, at: Hook = undisturbed) -> RemoteTier:
    """Return the remote tier of a job, opened. Raise BadInput if its URL is invalid."""
    return RemoteTier(
        remote.target, storage_options=remote.storage_options, retention=retention_of(remote), at=at
    )
