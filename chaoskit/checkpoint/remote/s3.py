"""S3: parts that the store verifies as it takes them, and uploads that go on where they stood.

The store itself keeps the progress: it lists uploads that were begun and the parts that it has, with their MD5. So any
process, on any host, goes on with one, and nothing has to be written down here that could disagree with the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chaoskit.checkpoint.layout.manifest import FileEntry
from chaoskit.checkpoint.remote.parts import Part, Taken, content_md5, cut, md5, whole_etag
from chaoskit.checkpoint.remote.store import Read, Store, Traffic

_DIGEST = "chaoskit-xxh3-128"  # the name of our metadata of an object


class S3Store(Store):
    """Talks to S3 through s3fs's client, below its file interface."""

    def __init__(self, fs: Any, root: str, url: str, traffic: Traffic) -> None:
        super().__init__(fs, root, url, traffic)
        fs.retries = 1  # the back-off is ours
        self._bucket, _, self._prefix = self._root.partition("/")

    def digest(self, name: str) -> str:
        try:
            answer = self._call(f"look at {name}", "head_object", Key=self._key(name))
        except FileNotFoundError:
            return ""
        return str(answer.get("Metadata", {}).get(_DIGEST, ""))

    # -- reading ------------------------------------------------------------------------------------------------

    def get(self, name: str) -> bytes:
        return self._get(name)

    def get_range(self, name: str, offset: int, size_bytes: int) -> bytes:
        return self._get(name, Range=f"bytes={offset}-{offset + size_bytes - 1}")

    def _get(self, name: str, **options: str) -> bytes:
        async def read() -> bytes:
            answer = await self._fs._call_s3(
                "get_object", Bucket=self._bucket, Key=self._key(name), **options
            )
            async with answer["Body"] as body:
                data: bytes = await body.read()
            return data

        return self._attempts(f"read {name}", lambda: self._await(read()))

    # -- writing ------------------------------------------------------------------------------------------------

    def put(self, name: str, data: bytes) -> None:
        self._put(name, data, "")

    def _put(self, name: str, data: bytes, digest: str) -> bool:
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
        parts = cut(entry.size_bytes)
        if len(parts) == 1:

            def send_whole(part: Part) -> bool:
                self._throttle(part.size_bytes)
                confirmed = self._put(name, read(0, part.size_bytes), entry.digest)
                self.sent_bytes += part.size_bytes
                return confirmed

            return next(self.each(send_whole, parts))
        upload, taken = self._begin(name, entry)

        def send_part(part: Part) -> tuple[str, str]:
            data = read(part.offset, part.size_bytes)
            etag = md5(data)
            if taken.get(part.number) == Taken(part.size_bytes, etag):
                return etag, etag
            return etag, self._send_part(name, upload, part.number, data, etag)

        own, theirs = zip(*self.each(send_part, parts), strict=True)
        return self._complete(name, entry, upload, own, theirs)

    def _begin(self, name: str, entry: FileEntry) -> tuple[str, dict[int, Taken]]:
        """The upload of this file that was begun last, with the parts that it has; a new one if none was."""
        begun = [upload for key, upload in self._uploads(name) if key == self._key(name)]
        if begun:
            return begun[-1], self._taken(name, begun[-1])
        answer = self._call(
            f"begin {name}",
            "create_multipart_upload",
            Key=self._key(name),
            Metadata={_DIGEST: entry.digest},
        )
        return str(answer["UploadId"]), {}

    def _uploads(self, prefix: str) -> list[tuple[str, str]]:
        """Key and number of the uploads that were begun and not completed, the oldest first."""
        answer = self._call(
            f"list uploads of {prefix}", "list_multipart_uploads", Prefix=self._key(prefix)
        )
        uploads = sorted(answer.get("Uploads", []), key=lambda upload: upload["Initiated"])
        return [(upload["Key"], upload["UploadId"]) for upload in uploads]

    def _taken(self, name: str, upload: str) -> dict[int, Taken]:
        taken, marker, more = {}, 0, True
        while more:
            answer = self._call(
                f"list parts of {name}",
                "list_parts",
                Key=self._key(name),
                UploadId=upload,
                PartNumberMarker=marker,
            )
            for part in answer.get("Parts", []):
                taken[int(part["PartNumber"])] = Taken(
                    int(part["Size"]), str(part["ETag"]).strip('"')
                )
            marker, more = (
                int(answer.get("NextPartNumberMarker") or 0),
                bool(answer.get("IsTruncated")),
            )
        return taken

    def _send_part(self, name: str, upload: str, number: int, data: bytes, etag: str) -> str:
        """Gives what the store says of its MD5, which is ``etag`` here."""
        self._throttle(len(data))
        answer = self._call(
            f"write part {number} of {name}",
            "upload_part",
            Key=self._key(name),
            UploadId=upload,
            PartNumber=number,
            Body=data,
            ContentMD5=content_md5(etag),
        )
        self.sent_bytes += len(data)
        return _etag(answer)

    def _complete(
        self, name: str, entry: FileEntry, upload: str, own: Sequence[str], theirs: Sequence[str]
    ) -> bool:
        """Make one object of parts, whose MD5 is ``own`` here and ``theirs`` there. Gives whether that is confirmed."""
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(theirs, 1)]
        try:
            answer = self._call(
                f"complete {name}",
                "complete_multipart_upload",
                Key=self._key(name),
                UploadId=upload,
                MultipartUpload={"Parts": parts},
            )
        except FileNotFoundError:
            # An attempt may have succeeded, and its answer been lost: then there is an object, and no upload any more.
            if self.digest(name) != entry.digest:
                raise
            return own == theirs
        return _confirms(answer, whole_etag(own))

    def forget(self, directory: str) -> None:
        for key, upload in self._uploads(
            f"{directory}/"
        ):  # parts of uploads that broke off cost money
            try:
                self._call(f"abort {key}", "abort_multipart_upload", Key=key, UploadId=upload)
            except FileNotFoundError:
                pass

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _call(self, what: str, operation: str, **options: Any) -> dict[str, Any]:
        def ask() -> dict[str, Any]:
            answer: dict[str, Any] = self._await(
                self._fs._call_s3(operation, Bucket=self._bucket, **options)
            )
            return answer

        return self._attempts(what, ask)


def _etag(answer: dict[str, Any]) -> str:
    return str(answer.get("ETag", "")).strip('"')


def _confirms(answer: dict[str, Any], etag: str) -> bool:
    """Whether the store says that it has these bytes. With SSE-KMS and SSE-C ETags are no MD5, and it says nothing."""
    return _etag(answer) == etag
