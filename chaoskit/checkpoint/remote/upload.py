"""Upload of a snapshot into a remote store: send the missing files, verify all of them, and commit.

An object store cannot rename. The manifest, which is written last, is therefore the commit: a
directory without one is no snapshot. An upload that was interrupted is simply run again, and sends
the missing files.

-> ``remote/uploader.py``: when it is run, and again. ``remote/s3.py``: resumes a single file.
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

#: Name of the object that marks a snapshot as quarantined.
QUARANTINE = "quarantine.json"
#: Verification of a file: by the store's confirmation, or else by reading it back; or always by
#: reading it back.
Verification = Literal["store", "read"]

_ATTEMPTS_MAX = 2  # for a file whose upload another process aborted


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an upload.

    Args:
        name: name of the snapshot.
        files: number of its files.
        size_bytes: size of the snapshot.
        kept_files: number of files that the store had already.
        read_bytes: number of bytes that were read back.
    """

    name: str
    files: int
    size_bytes: int
    kept_files: int
    read_bytes: int


def missing_files(
    manifest: Manifest, sizes: Mapping[str, int], digests: Mapping[str, str]
) -> list[FileEntry]:
    """Return the files that have to be sent, the largest first. Pure.

    Args:
        sizes: sizes of the objects in the store.
        digests: digests that the store keeps. Objects of the right size without a digest are read
            back later.
    """
    missing = [
        entry
        for entry in manifest.files
        if sizes.get(entry.name) != entry.size_bytes
        or digests.get(entry.name) not in {None, entry.digest}
    ]
    return sorted(missing, key=lambda entry: -entry.size_bytes)


class Upload:
    """The upload of one snapshot into the directory ``name`` of a store.

    Args:
        source: the snapshot.
        verification: method of verifying each file.
        at: called at the boundaries of the remote tier.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        source: DirectorySource,
        verification: Verification = "store",
        at: Hook = undisturbed,
    ) -> None:
        self._store, self._name, self._source = store, name, source
        self._verification, self._on_boundary = verification, at
        self._confirmed_files: set[str] = set()
        self._read_bytes = 0

    def run(self) -> Sent:
        """Upload, verify and commit the snapshot, and return the result.

        If the store has this very snapshot already, nothing is sent. The manifest of an older
        snapshot of this name is removed first. A quarantined one is sent anew, and its mark is
        removed.

        Raises:
            RemoteRefused, RemoteUnavailable: see :class:`Store`. Files that were sent are not sent
                again.
            Damaged: if the source does not match its manifest, or the store changes the data.
            ChaoskitError: if the source cannot be read any more.
        """
        manifest = self._source.manifest
        sizes = self._store.sizes(self._name)
        if self._is_committed(manifest, sizes):
            return self._result(len(manifest.files))
        is_quarantined = QUARANTINE in sizes
        if MANIFEST in sizes:  # an older snapshot of this name, which becomes invalid now
            self._store.remove(f"{self._name}/{MANIFEST}")
        present = (
            []
            if is_quarantined
            else [entry for entry in manifest.files if sizes.get(entry.name) == entry.size_bytes]
        )
        missing = missing_files(
            manifest, {entry.name: entry.size_bytes for entry in present}, self._digests(present)
        )
        self._send_files(missing)
        self._verify([entry for entry in manifest.files if entry.name not in self._confirmed_files])
        if is_quarantined:
            self._store.remove(f"{self._name}/{QUARANTINE}")
        self._commit(manifest)
        return self._result(len(manifest.files) - len(missing))

    def _result(self, kept_files: int) -> Sent:
        """Return the result of the upload."""
        manifest = self._source.manifest
        return Sent(
            name=self._name,
            files=len(manifest.files),
            size_bytes=manifest.size_bytes,
            kept_files=kept_files,
            read_bytes=self._read_bytes,
        )

    def _is_committed(self, manifest: Manifest, sizes: Mapping[str, int]) -> bool:
        """Return True if the store has this very snapshot, committed and not quarantined."""
        if MANIFEST not in sizes or QUARANTINE in sizes:
            return False
        return self._store.get(f"{self._name}/{MANIFEST}") == manifest.encode()

    def _digests(self, present: list[FileEntry]) -> dict[str, str]:
        """Return the digests that the store keeps of files of the right size, by file name.

        Files with the right digest count as confirmed and are not read back.
        """
        paths = [f"{self._name}/{entry.name}" for entry in present]
        digests = dict(
            zip(
                (entry.name for entry in present),
                self._store.each(self._store.digest, paths),
                strict=True,
            )
        )
        self._confirmed_files |= {
            entry.name for entry in present if digests[entry.name] == entry.digest
        }
        return {name: digest for name, digest in digests.items() if digest}

    def _send_files(self, entries: list[FileEntry]) -> None:
        """Send files, several at a time. Their parts share the parallel requests.

        The first error is raised after all requests under way have ended.
        """
        files = Workers(self._store.traffic.parallel, "ck-upload")
        futures = [files.submit(self._send, entry) for entry in entries]
        wait(futures, return_when=FIRST_EXCEPTION)
        finish(futures)
        files.close()
        for future in futures:
            if not future.cancelled():
                future.result()

    def _send(self, entry: FileEntry) -> None:
        """Send one file, verified as it is read. Try once more if its upload was aborted.

        A file that the store confirms is not read back later.

        Raises:
            RemoteUnavailable: if the upload is aborted each time.
            Damaged: if the file in the source was changed.
        """
        self._on_boundary("upload")

        def read(offset: int, size_bytes: int) -> bytes:
            return read_checked(self._source, entry, offset, size_bytes)

        for attempt in range(1, _ATTEMPTS_MAX + 1):
            try:
                if self._store.send(f"{self._name}/{entry.name}", entry, read):
                    self._confirmed_files.add(entry.name)
                return
            except FileNotFoundError as error:
                if attempt == _ATTEMPTS_MAX:
                    raise RemoteUnavailable(
                        f"{error}: check that no other process removes it"
                    ) from error

    def _verify(self, unconfirmed: list[FileEntry]) -> None:
        """Read back the unconfirmed files, or all files. A damaged file is sent once more.

        Raise Damaged if it arrives damaged again.
        """
        entries = self._source.manifest.files if self._verification == "read" else unconfirmed
        for entry in entries:
            try:
                self._read_back(entry)
            except Damaged:
                self._send(entry)
                self._read_back(entry)

    def _read_back(self, entry: FileEntry) -> None:
        """Read back a file. Raise Damaged if it does not match the manifest."""
        verify(self._store, self._name, [entry])
        self._read_bytes += entry.size_bytes

    def _commit(self, manifest: Manifest) -> None:
        """Write the manifest, which commits the snapshot, and read it back.

        If the store returns other bytes, remove the manifest and raise Damaged.
        """
        path, data = f"{self._name}/{MANIFEST}", manifest.encode()
        self._on_boundary("uploaded")
        self._store.put(path, data)
        self._on_boundary("announced")
        if self._store.get(path) != data:
            self._store.remove(path)
            raise Damaged(f"{self._store.url} returns other bytes for {path} than were written")


def quarantine_note(reason: str, found_at: str) -> bytes:
    """Return the content of the object that marks a quarantined snapshot, as JSON.

    Args:
        found_at: wall time of the mark in ISO 8601.
    """
    return json.dumps({"reason": reason, "found_at": found_at}, indent=1).encode() + b"\n"
