"""Store for S3: the store verifies the parts that it receives, and uploads can be resumed.

The store itself keeps the progress: it lists unfinished uploads and their parts with their MD5. Any
process on any host can thus resume an upload, and no local record can disagree with the store.

-> ``remote/store.py``: retries and limits. ``remote/upload.py``: order of files and manifest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chaoskit.checkpoint.layout.manifest import FileEntry
from chaoskit.checkpoint.remote.parts import (
    UploadedPart,
    UploadPart,
    content_md5,
    cut,
    md5,
    whole_etag,
)
from chaoskit.checkpoint.remote.store import Read, Store, Traffic

_DIGEST = "chaoskit-xxh3-128"  # name of the digest in the metadata of an object


class S3Store(Store):
    """A store that calls S3 through s3fs's client, below its file interface."""

    def __init__(self, fs: Any, root: str, url: str, traffic: Traffic) -> None:
        super().__init__(fs, root, url, traffic)
        fs.retries = 1  # chaoskit's own back-off repeats requests
        self._bucket, _, self._prefix = self._root.partition("/")

    def digest(self, name: str) -> str:
        """Return the digest in an object's metadata; "" without one, or without an object."""
        try:
            answer = self._call(f"look at {name}", "head_object", Key=self._key(name))
        except FileNotFoundError:
            return ""
        return str(answer.get("Metadata", {}).get(_DIGEST, ""))

    # -- reading -----------------------------------------------------------------------------------

    def get(self, name: str) -> bytes:
        return self._get(name)

    def get_range(self, name: str, offset: int, size_bytes: int) -> bytes:
        return self._get(name, Range=f"bytes={offset}-{offset + size_bytes - 1}")

    def _get(self, name: str, **options: str) -> bytes:
        """Return an object, or the part that ``options`` name."""

        async def read() -> bytes:
            answer = await self._fs._call_s3(
                "get_object", Bucket=self._bucket, Key=self._key(name), **options
            )
            async with answer["Body"] as body:
                data: bytes = await body.read()
            return data

        return self._retry(f"read {name}", lambda: self._await(read()))

    # -- writing -----------------------------------------------------------------------------------

    def put(self, name: str, data: bytes) -> None:
        self._put(name, data, "")

    def _put(self, name: str, data: bytes, digest: str) -> bool:
        """Write a small object, with ``digest`` in its metadata unless it is "".

        Return True if the store confirms the bytes.
        """
        etag = md5(data)
        options: dict[str, Any] = {"Metadata": {_DIGEST: digest}} if digest else {}
        answer = self._call(
            f"write {name}",
            "put_object",
            Key=self._key(name),
            Body=data,
            ContentMD5=content_md5(etag),
            **options,
        )
        return _confirms(answer, etag)

    def send(self, name: str, entry: FileEntry, read: Read) -> bool:
        """Write a file in parts, resuming an unfinished upload.

        Parts that the store has are not sent again. Return True if the store confirms the bytes.

        Raises:
            FileNotFoundError: if another process has ended the upload meanwhile.
        """
        parts = cut(entry.size_bytes)
        if len(parts) == 1:

            def send_whole(part: UploadPart) -> bool:
                self._throttle(part.size_bytes)
                confirmed = self._put(name, read(0, part.size_bytes), entry.digest)
                self.sent_bytes += part.size_bytes
                return confirmed

            return next(self.each(send_whole, parts))
        upload_id, stored_parts = self._begin(name, entry)

        def send_part(part: UploadPart) -> tuple[str, str]:
            data = read(part.offset, part.size_bytes)
            etag = md5(data)
            if stored_parts.get(part.number) == UploadedPart(part.size_bytes, etag):
                return etag, etag
            return etag, self._send_part(name, upload_id, part.number, data, etag)

        own_etags, store_etags = zip(*self.each(send_part, parts), strict=True)
        return self._complete(name, entry, upload_id, own_etags, store_etags)

    def _begin(self, name: str, entry: FileEntry) -> tuple[str, dict[int, UploadedPart]]:
        """Return the id of the last unfinished upload of this file and its parts, or begin one."""
        upload_ids = [upload_id for key, upload_id in self._uploads(name) if key == self._key(name)]
        if upload_ids:
            return upload_ids[-1], self._stored_parts(name, upload_ids[-1])
        answer = self._call(
            f"begin {name}",
            "create_multipart_upload",
            Key=self._key(name),
            Metadata={_DIGEST: entry.digest},
        )
        return str(answer["UploadId"]), {}

    def _uploads(self, prefix: str) -> list[tuple[str, str]]:
        """Return key and id of unfinished uploads whose name has a prefix, the oldest first."""
        answer = self._call(
            f"list uploads of {prefix}", "list_multipart_uploads", Prefix=self._key(prefix)
        )
        uploads = sorted(answer.get("Uploads", []), key=lambda listed: listed["Initiated"])
        return [(listed["Key"], listed["UploadId"]) for listed in uploads]

    def _stored_parts(self, name: str, upload_id: str) -> dict[int, UploadedPart]:
        """Return the parts that the store has of an upload, by number.

        Raise FileNotFoundError if the upload is gone.
        """
        stored_parts, marker, has_more = {}, 0, True
        while has_more:
            answer = self._call(
                f"list parts of {name}",
                "list_parts",
                Key=self._key(name),
                UploadId=upload_id,
                PartNumberMarker=marker,
            )
            for part in answer.get("Parts", []):
                stored_parts[int(part["PartNumber"])] = UploadedPart(
                    int(part["Size"]), str(part["ETag"]).strip('"')
                )
            marker, has_more = (
                int(answer.get("NextPartNumberMarker") or 0),
                bool(answer.get("IsTruncated")),
            )
        return stored_parts

    def _send_part(self, name: str, upload_id: str, number: int, data: bytes, etag: str) -> str:
        """Send a part, whose MD5 is ``etag``. Return the ETag that the store has computed."""
        self._throttle(len(data))
        answer = self._call(
            f"write part {number} of {name}",
            "upload_part",
            Key=self._key(name),
            UploadId=upload_id,
            PartNumber=number,
            Body=data,
            ContentMD5=content_md5(etag),
        )
        self.sent_bytes += len(data)
        return _etag(answer)

    def _complete(
        self,
        name: str,
        entry: FileEntry,
        upload_id: str,
        own_etags: Sequence[str],
        store_etags: Sequence[str],
    ) -> bool:
        """Make one object of the parts of an upload. Return True if the store confirms its bytes.

        Raise FileNotFoundError if the upload is gone and has not made this object.

        Args:
            own_etags: MD5 of the parts that were sent.
            store_etags: ETags of the parts in the store.
        """
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(store_etags, 1)]
        try:
            answer = self._call(
                f"complete {name}",
                "complete_multipart_upload",
                Key=self._key(name),
                UploadId=upload_id,
                MultipartUpload={"Parts": parts},
            )
        except FileNotFoundError:
            # An attempt may have succeeded although its answer was lost: then only the object
            # exists.
            if self.digest(name) != entry.digest:
                raise
            return own_etags == store_etags
        return _confirms(answer, whole_etag(own_etags))

    def forget(self, directory: str) -> None:
        """Abort the unfinished uploads of objects in a directory."""
        for key, upload_id in self._uploads(
            f"{directory}/"
        ):  # parts of unfinished uploads cost money
            try:
                self._call(f"abort {key}", "abort_multipart_upload", Key=key, UploadId=upload_id)
            except FileNotFoundError:
                pass

    def _key(self, name: str) -> str:
        """Return the key of an object."""
        return f"{self._prefix}/{name}" if self._prefix else name

    def _call(self, action: str, operation: str, **options: Any) -> dict[str, Any]:
        """Call an operation of the client, with retries, and return its answer.

        Args:
            action: description of the operation for an error message, after "cannot".
        """

        def ask() -> dict[str, Any]:
            answer: dict[str, Any] = self._await(
                self._fs._call_s3(operation, Bucket=self._bucket, **options)
            )
            return answer

        return self._retry(action, ask)


def _etag(answer: dict[str, Any]) -> str:
    """Return the ETag in an answer, without quotes."""
    return str(answer.get("ETag", "")).strip('"')


def _confirms(answer: dict[str, Any], etag: str) -> bool:
    """Return True if the ETag in an answer is the MD5 of the bytes.

    With SSE-KMS and SSE-C an ETag is no MD5, so the store confirms nothing.
    """
    return _etag(answer) == etag
