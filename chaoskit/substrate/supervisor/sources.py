"""Transfer of a job's code to nodes that do not share the runner's files.

-> ``cluster/node_files.py``: which directory is sent, and when.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tarfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from chaoskit.errors import BadInput

SIZE_BYTES_MAX = 100 * 2**20
PIECE_BYTES = 2**20
#: Name of the file that lists what is not copied: one pattern of names or paths per line.
IGNORE_FILE = ".chaosignore"
#: Names of files and folders that are never copied.
NEVER_COPIED = (
    ".git",
    "__pycache__",
    ".venv",
    ".tox",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
)
_LARGEST_NAMED = 5
_PLAIN, _EXECUTABLE = 0o644, 0o755


class Source:
    """A directory packed as a tar archive. Equal files give equal archives.

    Files that match a pattern of ``.chaosignore`` are left out, as are those of version control and
    of caches.

    Args:
        field: name of the setting that names the directory, for messages.
        without: a directory below it that is left out, such as that of the runs; None for none.

    Attributes:
        digest: SHA-256 of ``data``, in hexadecimal digits.

    Raises:
        BadInput: if the files exceed 100 MiB, or cannot be read.
    """

    def __init__(self, directory: Path, field: str = "job", without: Path | None = None) -> None:
        try:
            self.data = _pack(directory, _required_files(directory, field, without))
        except OSError as error:
            remedy = f"make it readable, or name it in {directory / IGNORE_FILE}"
            raise BadInput(
                field, str(error.filename or directory), f"{remedy}: {error.strerror}"
            ) from None
        self.digest = hashlib.sha256(self.data).hexdigest()

    def pieces(self) -> Iterator[tuple[int, bytes, bool]]:
        """Yield the pieces of the archive: offset, data, and whether it is the last."""
        for offset in range(0, len(self.data), PIECE_BYTES):
            end = offset + PIECE_BYTES
            yield offset, self.data[offset:end], end >= len(self.data)


def _required_files(directory: Path, field: str, without: Path | None) -> list[Path]:
    """Return the files of a directory that are copied.

    Raises BadInput if they exceed 100 MiB or the ignore file is invalid, and OSError if one cannot
    be read.
    """
    patterns = [*NEVER_COPIED, *_ignored(directory / IGNORE_FILE, field)]
    files, size_bytes = list[Path](), 0
    for path in _walk(directory, directory, patterns, without):
        files.append(path)
        size_bytes += path.stat().st_size
    if size_bytes > SIZE_BYTES_MAX:
        largest = sorted(files, key=lambda path: path.stat().st_size, reverse=True)[:_LARGEST_NAMED]
        named = ", ".join(
            f"{path.relative_to(directory)} ({path.stat().st_size / 2**20:.0f} MiB)"
            for path in largest
        )
        remedy = (
            f"list the files that nodes do not need in {directory / IGNORE_FILE}, "
            "or move the job into a directory of its own"
        )
        size_text = (
            f"{size_bytes / 2**20:.0f} MiB, more than {SIZE_BYTES_MAX // 2**20}; largest: {named}"
        )
        raise BadInput(field, str(directory), f"{remedy}: the directory holds {size_text}")
    return files


def _ignored(path: Path, field: str) -> list[str]:
    """Return the patterns of an ignore file, relative to its directory; none if it is missing.

    Raises BadInput if it cannot be read, or has a pattern with ``!``.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            field, str(path), f"write a text file with one pattern per line: {error}"
        ) from None
    lines = [line for line in lines if line and not line.startswith("#")]
    if negated_pattern := next((line for line in lines if line.startswith("!")), ""):
        raise BadInput(
            field, str(path), f"remove {negated_pattern}: patterns with ! are not supported"
        )
    return [line.removeprefix("./").strip("/") for line in lines]


def _walk(directory: Path, top: Path, patterns: list[str], without: Path | None) -> Iterator[Path]:
    """Yield the files below a directory in a fixed order, without those that match a pattern.

    Args:
        top: directory that the patterns are relative to.
        without: a directory that is left out; None for none.
    """
    with os.scandir(directory) as entries:
        for dir_entry in sorted(entries, key=lambda dir_entry: dir_entry.name):
            path = Path(dir_entry.path)
            if path == without or any(
                fnmatch(dir_entry.name, pattern) or fnmatch(str(path.relative_to(top)), pattern)
                for pattern in patterns
            ):
                continue
            if dir_entry.is_dir():  # targets of links are copied in their place
                if path.resolve() not in (
                    top.resolve(),
                    *directory.resolve().parents,
                    directory.resolve(),
                ):
                    yield from _walk(path, top, patterns, without)
            elif dir_entry.is_file():
                yield path


def _pack(directory: Path, files: list[Path]) -> bytes:
    """Return a tar archive of files. It has no times and owners, so it depends on content alone."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path in files:
            member = tarfile.TarInfo(str(path.relative_to(directory)))
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                member.size, member.mode = (
                    status.st_size,
                    _EXECUTABLE if status.st_mode & 0o100 else _PLAIN,
                )
                archive.addfile(member, file)
    return packed.getvalue()


class SourceStore:
    """Sources on a node, each in a directory named after its digest."""

    def __init__(self) -> None:
        self._partial: dict[str, io.BytesIO] = {}

    def holds(self, directory: Path, digest: str) -> bool:
        """Return whether the source is in the directory already."""
        return (directory / _require_digest(digest)).is_dir()

    def take(
        self, directory: Path, digest: str, offset: int, data: bytes, *, is_last: bool
    ) -> None:
        """Store the piece that begins at byte ``offset``. Pieces must come in order.

        The first piece starts a new transfer; the last one is followed by unpacking.

        Raises:
            ValueError: if the data do not match the digest or are too large, or the archive holds
                anything but files below its directory.
            OSError: if the archive cannot be unpacked, or was unpacked before.
        """
        if offset == 0:
            self._partial.pop(_require_digest(digest), None)  # an interrupted transfer
        received = self._partial.setdefault(_require_digest(digest), io.BytesIO())
        received.write(data)
        if is_last or received.tell() > 2 * SIZE_BYTES_MAX:
            del self._partial[digest]
            if hashlib.sha256(received.getbuffer()).hexdigest() != digest:
                raise ValueError(f"the received source does not have the digest {digest}")
            self._unpack(directory, digest, received)

    def _unpack(self, directory: Path, digest: str, packed: io.BytesIO) -> None:
        """Unpack an archive into ``directory/digest``, which appears only once it is complete.

        Raises ValueError if a member is not a file below the directory, and OSError if it cannot be
        written or ``directory/digest`` is there already.
        """
        part = directory / f"{digest}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        packed.seek(0)
        with tarfile.open(fileobj=packed, mode="r") as archive:
            if rejected := next(
                (member.name for member in archive.getmembers() if not _is_plain_file(member)), ""
            ):
                raise ValueError(f"{rejected!r} is not a file below the directory")
            archive.extractall(part, **_FILTER)
        part.replace(directory / digest)


def _is_plain_file(member: tarfile.TarInfo) -> bool:
    path = Path(member.name)
    return member.isfile() and not path.is_absolute() and ".." not in path.parts


#: Filter of extraction; Python before 3.11.4 has none.
_FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


def _require_digest(digest: str) -> str:
    """Return a digest. Raises ValueError if it has not the form of SHA-256 in hexadecimal."""
    if len(digest) != hashlib.sha256().digest_size * 2 or not digest.isalnum():
        raise ValueError(f"{digest!r} is not a SHA-256 digest")
    return digest
