"""The code of a job, on its way to nodes that do not see the runner's files."""

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
#: A file of this name says what does not travel: a pattern of names or paths a line.
IGNORE_FILE = ".chaosignore"
_NEVER = (".git", "__pycache__", ".venv", ".tox", ".mypy_cache", ".pytest_cache", ".ruff_cache")
_NAMED = 5
_PLAIN, _EXECUTABLE = 0o644, 0o755


class Source:
    """A directory as an archive: the same files always give the same one.

    Attributes:
        digest: SHA-256 of ``data``, in hexadecimal digits.

    Raises:
        BadInput: if the files are more than 100 MiB.
    """

    def __init__(self, directory: Path) -> None:
        try:
            self.data = _pack(directory, _required_files(directory))
        except OSError as error:
            remedy = f"make it readable, or name it in {directory / IGNORE_FILE}"
            raise BadInput(
                "job", str(error.filename or directory), f"{remedy}: {error.strerror}"
            ) from None
        self.digest = hashlib.sha256(self.data).hexdigest()

    def pieces(self) -> Iterator[tuple[int, bytes, bool]]:
        """What is sent at a time: where it begins, the data, and whether it is the last."""
        for at in range(0, len(self.data), PIECE_BYTES):
            yield at, self.data[at : at + PIECE_BYTES], at + PIECE_BYTES >= len(self.data)


def _required_files(directory: Path) -> list[Path]:
    patterns = [*_NEVER, *_ignored(directory / IGNORE_FILE)]
    found, size_bytes = list[Path](), 0
    for path in _walk(directory, directory, patterns):
        found.append(path)
        size_bytes += path.stat().st_size
    if size_bytes > SIZE_BYTES_MAX:
        largest = sorted(found, key=lambda path: path.stat().st_size, reverse=True)[:_NAMED]
        named = ", ".join(
            f"{path.relative_to(directory)} ({path.stat().st_size / 2**20:.0f} MiB)"
            for path in largest
        )
        remedy = f"name what need not travel in {directory / IGNORE_FILE}, or move the job into a directory of its own"
        told = (
            f"{size_bytes / 2**20:.0f} MiB, more than {SIZE_BYTES_MAX // 2**20}; largest: {named}"
        )
        raise BadInput("job", str(directory), f"{remedy}: the directory holds {told}")
    return found


def _ignored(path: Path) -> list[str]:
    """The patterns of a file, relative to its directory. Raises BadInput."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            "job", str(path), f"make it a text file with a pattern a line: {error}"
        ) from None
    lines = [line for line in lines if line and not line.startswith("#")]
    if taken_back := next((line for line in lines if line.startswith("!")), ""):
        raise BadInput("job", str(path), f"leave {taken_back} out: a pattern cannot be taken back")
    return [line.removeprefix("./").strip("/") for line in lines]


def _walk(directory: Path, top: Path, patterns: list[str]) -> Iterator[Path]:
    with os.scandir(directory) as entries:
        for entry in sorted(entries, key=lambda one: one.name):
            path = Path(entry.path)
            if any(
                fnmatch(entry.name, one) or fnmatch(str(path.relative_to(top)), one)
                for one in patterns
            ):
                continue
            if entry.is_dir():  # what a link leads to travels in its place
                if path.resolve() not in (
                    top.resolve(),
                    *directory.resolve().parents,
                    directory.resolve(),
                ):
                    yield from _walk(path, top, patterns)
            elif entry.is_file():
                yield path


def _pack(directory: Path, files: list[Path]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path in files:
            member = tarfile.TarInfo(str(path.relative_to(directory)))
            with path.open("rb") as file:
                found = os.fstat(file.fileno())
                member.size, member.mode = (
                    found.st_size,
                    _EXECUTABLE if found.st_mode & 0o100 else _PLAIN,
                )
                archive.addfile(member, file)
    return packed.getvalue()


class SourceStore:
    """Sources on a node, each in a directory that bears its digest."""

    def __init__(self) -> None:
        self._coming: dict[str, io.BytesIO] = {}

    def holds(self, directory: Path, digest: str) -> bool:
        """Whether it is there already."""
        return (directory / _plain(digest)).is_dir()

    def take(self, directory: Path, digest: str, at: int, data: bytes, *, is_last: bool) -> None:
        """Take one piece, which begins ``at`` this byte; unpack behind the last one. The first one begins anew.

        Raises:
            ValueError: if what has come is not what the digest says, or too much. OSError: if it cannot be unpacked.
        """
        if at == 0:
            self._coming.pop(_plain(digest), None)  # of a sender that was broken off
        coming = self._coming.setdefault(_plain(digest), io.BytesIO())
        coming.write(data)
        if is_last or coming.tell() > 2 * SIZE_BYTES_MAX:
            del self._coming[digest]
            if hashlib.sha256(coming.getbuffer()).hexdigest() != digest:
                raise ValueError(f"a source came that is not {digest}")
            self._unpack(directory, digest, coming)

    def _unpack(self, directory: Path, digest: str, packed: io.BytesIO) -> None:
        part = directory / f"{digest}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        packed.seek(0)
        with tarfile.open(fileobj=packed, mode="r") as archive:
            if strange := next(
                (one.name for one in archive.getmembers() if not _is_plain_file(one)), ""
            ):
                raise ValueError(f"{strange!r} is no file below the directory")
            archive.extractall(part, **_FILTER)
        part.replace(directory / digest)


def _is_plain_file(member: tarfile.TarInfo) -> bool:
    path = Path(member.name)
    return member.isfile() and not path.is_absolute() and ".." not in path.parts


#: Python before 3.11.4 has none.
_FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


def _plain(digest: str) -> str:
    if len(digest) != hashlib.sha256().digest_size * 2 or not digest.isalnum():
        raise ValueError(f"{digest!r} is no SHA-256")
    return digest
