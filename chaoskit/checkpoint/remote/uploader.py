"""Uploads during training: one thread, the newest snapshot first, no error stops training.

-> ``daemon/archive.py``: which snapshots of a job are offered, and the wait at its end.
-> ``remote/upload.py``: how one snapshot is sent and committed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from chaoskit.checkpoint.disk.names import snapshot_name
from chaoskit.checkpoint.remote.backoff import RemoteUnavailable
from chaoskit.checkpoint.remote.source import DirectorySource
from chaoskit.checkpoint.remote.tier import RemoteTier
from chaoskit.checkpoint.remote.upload import Sent
from chaoskit.errors import ChaoskitError

_log = logging.getLogger(__name__)


class UploadStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of uploads.

    Args:
        under_way, waiting: names of snapshots; "" for none.
        last: the upload that was committed last.
        last_error: error of the upload under way or, if that has none yet, of the one before; ""
            after a success. An error of ``after_commit`` counts, too.
        committed, superseded, failed: number of snapshots with this outcome.
        sent_bytes: number of bytes of files that were sent.
    """

    under_way: str = ""
    waiting: str = ""
    last: Sent | None = None
    last_error: str = ""
    committed: int = 0
    superseded: int = 0
    failed: int = 0
    sent_bytes: int = 0


class _UploadOffer(NamedTuple):
    """A snapshot to upload, and the function that releases it."""

    source: DirectorySource
    release: Callable[[], None]

    @property
    def name(self) -> str:
        """The name of the snapshot."""
        return snapshot_name(*self.source.manifest.age)


def _no_release() -> None:
    """Do nothing: the snapshot needs no release."""


class Uploader:
    """A thread that uploads snapshots, one after the other.

    A waiting snapshot is replaced by a newer one. An upload whose store is unavailable is tried
    again until it succeeds, is refused, or a newer snapshot waits. The uploader owns the tier and
    closes it.
    Make an uploader in the process that uses it, because it does not survive a fork.

    Args:
        tier: the tier to upload to.
        after_commit: called with the tier in the thread of the uploader after each commit, to
            prune.
        on_failed: called with the name of a snapshot that is given up and the reason, in the thread
            of the uploader or of an offer.
    """

    def __init__(
        self,
        tier: RemoteTier,
        after_commit: Callable[[RemoteTier], None] | None = None,
        on_failed: Callable[[str, str], None] = lambda name, reason: None,
    ) -> None:
        self._tier, self._after_commit, self._report_failed = tier, after_commit, on_failed
        self._changed = threading.Condition()
        self._waiting: _UploadOffer | None = None
        self._closing = False
        self._status = UploadStatus()
        self._thread = threading.Thread(target=self._serve, name="ck-uploader", daemon=True)
        self._thread.start()

    @property
    def status(self) -> UploadStatus:
        """The present status."""
        with self._changed:
            waiting = self._waiting.name if self._waiting else ""
            return msgspec.structs.replace(
                self._status, waiting=waiting, sent_bytes=self._tier.store.sent_bytes
            )

    def offer(
        self, snapshot: DirectorySource | Path, release: Callable[[], None] = _no_release
    ) -> None:
        """Queue a snapshot, in place of one that waits. Returns at once, and never raises.

        A snapshot that cannot be read counts as failed; after :meth:`close`, as superseded.

        Args:
            snapshot: a source, or the directory of a committed snapshot.
            release: called once, in any thread, when the snapshot was sent, superseded or given up.
        """
        try:
            source = DirectorySource(snapshot) if isinstance(snapshot, Path) else snapshot
        except ChaoskitError as error:
            self._record_failure(str(snapshot), error)
            self._release(str(snapshot), release)
            return
        offer = _UploadOffer(source, release)
        with self._changed:
            if self._closing:
                superseded: _UploadOffer | None = offer
            else:
                superseded, self._waiting = self._waiting, offer
                self._changed.notify_all()
            if superseded is not None:
                self._update(superseded=self._status.superseded + 1)
        if superseded is not None:
            self._release(superseded.name, superseded.release)

    def wait(self, timeout_s: float) -> bool:
        """Wait until no upload waits or is under way, whether or not they succeeded.

        Return True if that is so, and False if the time runs out before.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting and not self._status.under_way, timeout_s
            )

    def close(self, timeout_s: float = 5.0) -> bool:
        """End the thread, also in the middle of an upload, and close the tier.

        Return True if the thread has ended, and False if it runs on after ``timeout_s``. A thread
        that runs on does not delay the exit of the process.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._tier.close()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- the thread --------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Upload snapshots until the end. A failed snapshot is given up."""
        while (offer := self._next()) is not None:
            try:
                self._send(offer)
            except Exception as error:  # noqa: BLE001 - training goes on without this upload
                self._record_failure(offer.name, error)
            self._release(offer.name, offer.release)

    def _next(self) -> _UploadOffer | None:
        """Wait for the next snapshot to upload, and return it; None at the end.

        A snapshot that waits at the end is released.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._closing)
            offer, self._waiting = self._waiting, None
            if offer is not None and not self._closing:
                self._update(under_way=offer.name)
                return offer
        if offer is not None:
            self._release(offer.name, offer.release)
        return None

    def _send(self, offer: _UploadOffer) -> None:
        """Upload a snapshot. Try again while the store is unavailable and no newer one waits.

        Then call ``after_commit``, whose errors are only logged. Other errors of the upload are
        raised, and that of the store if a newer snapshot waits or the uploader is closed.
        """
        while True:
            try:
                sent = self._tier.upload(offer.source)
                break
            except RemoteUnavailable as error:
                self._update(last_error=str(error))
                _log.warning("%s is not uploaded yet: %s", offer.name, error)
                pause_s = self._tier.store.traffic.backoff.cap_s
                with self._changed:
                    if self._changed.wait_for(
                        lambda: self._waiting is not None or self._closing, pause_s
                    ):
                        raise
        self._update(last=sent, last_error="", committed=self._status.committed + 1)
        try:
            if self._after_commit is not None:
                self._after_commit(self._tier)
        except Exception as error:  # noqa: BLE001 - the next commit prunes again
            _log.warning("pruning after the upload of %s failed: %s", offer.name, error)
            self._update(last_error=str(error))
        self._update(under_way="")

    def _update(self, **changes: object) -> None:
        """Change fields of the status."""
        with self._changed:
            self._status = msgspec.structs.replace(self._status, **changes)
            self._changed.notify_all()

    def _record_failure(self, name: str, error: Exception) -> None:
        """Log and report the failure of an upload, and count it in the status."""
        is_expected = isinstance(error, ChaoskitError)
        _log.warning(
            "%s was not uploaded: %s", name, error, exc_info=None if is_expected else error
        )
        with self._changed:
            under_way = "" if self._status.under_way == name else self._status.under_way
            text = str(error) if is_expected else f"{type(error).__name__}: {error}"
            self._update(under_way=under_way, last_error=text, failed=self._status.failed + 1)
        with suppress(Exception):  # an error of the callback must not end the thread
            self._report_failed(name, text)

    def _release(self, name: str, release: Callable[[], None]) -> None:
        """Release a snapshot. Errors are logged."""
        try:
            release()
        except Exception:  # noqa: BLE001 - as above
            _log.exception("%s could not be released", name)
