"""Uploads beside the training: one thread, the newest snapshot first, and no error that could end anything."""

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
    """How uploads go.

    Args:
        under_way, waiting: names of snapshots; "" for none.
        last: what was committed last.
        last_error: of the upload under way or, if that has none yet, of the one before; "" after a success.
        committed, superseded, failed: how many snapshots ended so.
        sent_bytes: of files, in all.
    """

    under_way: str = ""
    waiting: str = ""
    last: Sent | None = None
    last_error: str = ""
    committed: int = 0
    superseded: int = 0
    failed: int = 0
    sent_bytes: int = 0


class _Offer(NamedTuple):
    source: DirectorySource
    release: Callable[[], None]

    @property
    def name(self) -> str:
        return snapshot_name(*self.source.manifest.age)


def _keep() -> None:
    """Nothing is to be released."""


class Uploader:
    """Sends what it is offered, one after the other; of what has not begun only the newest.

    An upload whose store is out is tried again until it succeeds, or a newer snapshot waits. The tier is its own from
    now on, and closed with it. To be made in the process that uses it: it does not survive a fork.

    Args:
        after_commit: called in the thread of the uploader, to prune.
        failed: told the name of a snapshot that is given up, and why; in the thread of the uploader, or of an offer.
    """

    def __init__(
        self,
        tier: RemoteTier,
        after_commit: Callable[[RemoteTier], None] | None = None,
        failed: Callable[[str, str], None] = lambda name, reason: None,
    ) -> None:
        self._tier, self._after_commit, self._tell_failed = tier, after_commit, failed
        self._changed = threading.Condition()
        self._waiting: _Offer | None = None
        self._closing = False
        self._status = UploadStatus()
        self._thread = threading.Thread(target=self._serve, name="ck-uploader", daemon=True)
        self._thread.start()

    @property
    def status(self) -> UploadStatus:
        """At this moment."""
        with self._changed:
            waiting = self._waiting.name if self._waiting else ""
            return msgspec.structs.replace(
                self._status, waiting=waiting, sent_bytes=self._tier.store.sent_bytes
            )

    def offer(self, snapshot: DirectorySource | Path, release: Callable[[], None] = _keep) -> None:
        """Have a snapshot sent, in place of one that waits. Returns at once, and never raises.

        Args:
            snapshot: a source, or the directory of a committed snapshot.
            release: called once, in any thread, when it is not needed any more: sent, superseded or given up.
        """
        try:
            source = DirectorySource(snapshot) if isinstance(snapshot, Path) else snapshot
        except ChaoskitError as error:
            self._fail(str(snapshot), error)
            self._release(str(snapshot), release)
            return
        offer = _Offer(source, release)
        with self._changed:
            if self._closing:
                passed_over: _Offer | None = offer
            else:
                passed_over, self._waiting = self._waiting, offer
                self._changed.notify_all()
            if passed_over is not None:
                self._count(superseded=self._status.superseded + 1)
        if passed_over is not None:
            self._release(passed_over.name, passed_over.release)

    def wait(self, timeout_s: float) -> bool:
        """Until nothing is left to do. Gives whether that was so in time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting and not self._status.under_way, timeout_s
            )

    def close(self, timeout_s: float = 5.0) -> bool:
        """End the thread, also in the middle of an upload. Gives whether it ended in time; it holds up no exit."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._tier.close()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- the thread -----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (offer := self._next()) is not None:
            try:
                self._send(offer)
            except Exception as error:  # noqa: BLE001 - training goes on, whatever becomes of its copies
                self._fail(offer.name, error)
            self._release(offer.name, offer.release)

    def _next(self) -> _Offer | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._closing)
            offer, self._waiting = self._waiting, None
            if offer is not None and not self._closing:
                self._count(under_way=offer.name)
                return offer
        if offer is not None:
            self._release(offer.name, offer.release)
        return None

    def _send(self, offer: _Offer) -> None:
        while True:
            try:
                sent = self._tier.upload(offer.source)
                break
            except RemoteUnavailable as error:
                self._count(last_error=str(error))
                _log.warning("%s is not uploaded yet: %s", offer.name, error)
                pause_s = self._tier.store.traffic.backoff.cap_s
                with self._changed:
                    if self._changed.wait_for(
                        lambda: self._waiting is not None or self._closing, pause_s
                    ):
                        raise
        self._count(last=sent, last_error="", committed=self._status.committed + 1)
        try:
            if self._after_commit is not None:
                self._after_commit(self._tier)
        except Exception as error:  # noqa: BLE001 - the snapshot is there; the next one will prune again
            _log.warning("after the upload of %s: %s", offer.name, error)
            self._count(last_error=str(error))
        self._count(under_way="")

    def _count(self, **changes: object) -> None:
        with self._changed:
            self._status = msgspec.structs.replace(self._status, **changes)
            self._changed.notify_all()

    def _fail(self, name: str, error: Exception) -> None:
        expected = isinstance(error, ChaoskitError)
        _log.warning("%s was not uploaded: %s", name, error, exc_info=None if expected else error)
        with self._changed:
            under_way = "" if self._status.under_way == name else self._status.under_way
            text = str(error) if expected else f"{type(error).__name__}: {error}"
            self._count(under_way=under_way, last_error=text, failed=self._status.failed + 1)
        with suppress(Exception):  # of whoever is told
            self._tell_failed(name, text)

    def _release(self, name: str, release: Callable[[], None]) -> None:
        try:
            release()
        except Exception:  # noqa: BLE001 - as above
            _log.exception("release of %s", name)
