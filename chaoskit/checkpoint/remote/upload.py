"""A snapshot goes into a remote store: what is missing there is sent, all of it is verified, and then it is committed.

An object store cannot rename. So the manifest, which is put last, is the commit: without one a directory is no
snapshot. An upload that broke off at any instant, for any reason, is simply begun again: it sends what is not there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, wait
from typing import Literal

import msgspec

from chaoskit.checkpoint.layout.boundaries import Hook, undisturbed
from chaoskit.checkpoint.layout.manifest import MANIFEST, Damaged, FileEntry, Manifest
from chaoskit.checkpoint.remote.backoff import RemoteUnavailable
from chaoskit.checkpoint.remote.fetch import verify
from chaoskit.checkpoint.remote.source import DirectorySource, read_checked
from chaoskit.checkpoint.remote.store import Store
from chaoskit.checkpoint.remote.workers import Workers, finish

#: The object that sets a damaged snapshot aside.
QUARANTINE = "quarantine.json"
#: How a file is verified: by what the store said as it took it, else by reading it back; or always by reading it back.
Verification = Literal["store", "read"]

_TRIES = 2  # of a file that arrives damaged, or whose upload somebody ended


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """What an upload did.

    Args:
        name: of the snapshot.
        files, size_bytes: of the snapshot.
        kept_files: those that the store had already.
        read_bytes: that were read back.
    """

    name: str
    files: int
    size_bytes: int
    kept_files: int
    read_bytes: int


def lacking(
    manifest: Manifest, sizes: Mapping[str, int], digests: Mapping[str, str]
) -> list[FileEntry]:
    """The files that have to be sent, largest first. Pure.

    Args:
        sizes: of the objects that are there.
        digests: of those whose store keeps one; what has the right size and no digest is read back later.
    """
    missing = [
        entry
        for entry in manifest.files
        if sizes.get(entry.name) != entry.size_bytes
        or digests.get(entry.name) not in {None, entry.digest}
    ]
    return sorted(missing, key=lambda entry: -entry.size_bytes)


class Upload:
    """Of one snapshot into the directory ``name`` of a store. ``at``: called at the boundaries of the remote tier."""

    def __init__(
        self,
        store: Store,
        name: str,
        source: DirectorySource,
        verification: Verification = "store",
        at: Hook = undisturbed,
    ) -> None:
        self._store, self._name, self._source = store, name, source
        self._verification, self._at = verification, at
        self._confirmed: set[str] = set()
        self._read_bytes = 0

    def run(self) -> Sent:
        """Return when the snapshot is committed, verified.

        Raises:
            RemoteRefused, RemoteUnavailable: as :class:`Store`; what was sent stays, and is not sent again.
            Damaged: if the source is not what its manifest says, or the store does not keep what it is given.
            ChaoskitError: if the source cannot be read any more.
        """
        manifest = self._source.manifest
        sizes = self._store.sizes(self._name)
        if self._is_committed(manifest, sizes):
            return self._sent(len(manifest.files))
        spoilt = QUARANTINE in sizes
        if (
            MANIFEST in sizes
        ):  # of another snapshot of this name: what is about to change is none any more
            self._store.remove(f"{self._name}/{MANIFEST}")
        here = (
            []
            if spoilt
            else [entry for entry in manifest.files if sizes.get(entry.name) == entry.size_bytes]
        )
        missing = lacking(
            manifest, {entry.name: entry.size_bytes for entry in here}, self._digests(here)
        )
        self._in_parallel(missing)
        self._verify([entry for entry in manifest.files if entry.name not in self._confirmed])
        if spoilt:
            self._store.remove(f"{self._name}/{QUARANTINE}")
        self._commit(manifest)
        return self._sent(len(manifest.files) - len(missing))

    def _sent(self, kept_files: int) -> Sent:
        manifest = self._source.manifest
        return Sent(
            name=self._name,
            files=len(manifest.files),
            size_bytes=manifest.size_bytes,
            kept_files=kept_files,
            read_bytes=self._read_bytes,
        )

    def _is_committed(self, manifest: Manifest, sizes: Mapping[str, int]) -> bool:
        if MANIFEST not in sizes or QUARANTINE in sizes:
            return False
        return self._store.get(f"{self._name}/{MANIFEST}") == manifest.encode()

    def _digests(self, here: list[FileEntry]) -> dict[str, str]:
        """What the store knows of files of the right size. What it vouches for is not read back."""
        paths = [f"{self._name}/{entry.name}" for entry in here]
        known = dict(
            zip(
                (entry.name for entry in here),
                self._store.each(self._store.digest, paths),
                strict=True,
            )
        )
        self._confirmed |= {entry.name for entry in here if known[entry.name] == entry.digest}
        return {name: digest for name, digest in known.items() if digest}

    def _in_parallel(self, entries: list[FileEntry]) -> None:
        """Send files, several at a time; their parts share the requests that are allowed."""
        files = Workers(self._store.traffic.parallel, "ck-upload")
        futures = [files.submit(self._send, entry) for entry in entries]
        wait(futures, return_when=FIRST_EXCEPTION)
        finish(futures)
        files.close()
        for future in futures:
            if not future.cancelled():
                future.result()

    def _send(self, entry: FileEntry) -> None:
        self._at("upload")

        def read(offset: int, size_bytes: int) -> bytes:
            return read_checked(self._source, entry, offset, size_bytes)

        for attempt in range(1, _TRIES + 1):
            try:
                if self._store.send(f"{self._name}/{entry.name}", entry, read):
                    self._confirmed.add(entry.name)
                return
            except FileNotFoundError as error:
                if attempt == _TRIES:
                    raise RemoteUnavailable(f"{error}: does somebody else remove it?") from error

    def _verify(self, unconfirmed: list[FileEntry]) -> None:
        entries = self._source.manifest.files if self._verification == "read" else unconfirmed
        for entry in entries:
            try:
                self._read_back(entry)
            except Damaged:
                self._send(entry)
                self._read_back(entry)

    def _read_back(self, entry: FileEntry) -> None:
        """Raises Damaged if the store does not hold what the manifest says."""
        verify(self._store, self._name, [entry])
        self._read_bytes += entry.size_bytes

    def _commit(self, manifest: Manifest) -> None:
        path, data = f"{self._name}/{MANIFEST}", manifest.encode()
        self._at("uploaded")
        self._store.put(path, data)
        self._at("announced")
        if self._store.get(path) != data:
            self._store.remove(path)
            raise Damaged(f"{self._store.url} does not keep {path} as it was given")


def quarantine_note(reason: str, found_at: str) -> bytes:
    """The content of the object that sets a snapshot aside."""
    return json.dumps({"reason": reason, "found_at": found_at}, indent=1).encode() + b"\n"
