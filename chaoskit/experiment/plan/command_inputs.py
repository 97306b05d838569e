"""Variables and files that a command may depend on, as far as they are visible from outside.

The files that a command reads are not known. It may read all files below its working directory, and
those that its arguments and environment variables name. Files beside a Python file among these
count, too.

-> experiment/twin/command_twin.py compares them to decide whether an unbroken run is used again.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from chaoskit.experiment.plan.command_plan import CommandExperiment
from chaoskit.substrate.core.command_environment import inherited_variables

ENTRIES_MAX = 20_000  # a scan of so many files takes some tenths of a second
_CONTENT_BYTES_MAX = 1 << 20  # larger files are compared by size and time only
_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})
_OF_PYTEST = ("PYTEST_CURRENT_TEST", "PYTEST_VERSION")
_WORDS = re.compile(r"[^\s=:;,\"']+")

Digests = Mapping[str, str]  # path -> digest of the file


class TooManyFiles(Exception):
    """Error: the directories of a command hold more files than can be scanned before each run."""


def variables() -> dict[str, str]:
    """Return the environment of a command, without variables that differ between any two tests."""
    inherited = inherited_variables(os.environ)
    return {name: text for name, text in sorted(inherited.items()) if name not in _OF_PYTEST}


def differing(before: Digests, after: Digests) -> set[str]:
    """Return the paths of files that were added, removed or changed."""
    return {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}


class InputFiles:
    """Digests of the files that commands may read; unchanged files are not read again.

    Args:
        without: a directory that is left out, with all files below it.
    """

    def __init__(self, without: Path) -> None:
        self._excluded_directory = without.resolve()
        # path -> the stat fields, and the digest
        self._digests: dict[str, tuple[tuple[int, int, int], str]] = {}

    def look(self, experiment: CommandExperiment) -> Digests:
        """Return the digest of each file that the command may read, by path.

        A file that cannot be read is left out.

        Raises:
            TooManyFiles: if there are more than :data:`ENTRIES_MAX` in directories.
        """
        directory, scanned_count = Path(experiment.working_directory), 0
        named_paths = [path for text in experiment.command for path in _paths(directory, text)]
        roots = [directory, *filter(Path.is_dir, named_paths), *_python_path()]
        roots += [path.parent for path in named_paths if path.suffix == ".py"]
        named_paths += [path for text in variables().values() for path in _paths(directory, text)]
        digests: dict[str, str] = {}
        for path in (path for path in named_paths if path.is_file()):
            self._note(str(path), digests)
        for root in _outermost(roots):
            for path_text in self._below(root):
                scanned_count += 1
                if scanned_count > ENTRIES_MAX:
                    raise TooManyFiles
                self._note(path_text, digests)
        return digests

    def _below(self, root: Path) -> Iterator[str]:
        """Yield all files below ``root``, without packages and hidden files (except ``.env*``)."""
        for folder, folders, files in os.walk(root):
            folders[:] = [name for name in folders if not self._is_skipped(folder, name)]
            yield from (
                f"{folder}/{name}"
                for name in files
                if not name.startswith(".") or name.startswith(".env")
            )

    def _is_skipped(self, folder: str, name: str) -> bool:
        """Return whether a folder is left out: hidden, installed, or a virtual environment."""
        path = Path(folder, name)
        is_environment = (path / "pyvenv.cfg").exists()
        return (
            name.startswith(".")
            or name in _SKIPPED
            or is_environment
            or path == self._excluded_directory
        )

    def _note(self, path: str, digests: dict[str, str]) -> None:
        """Add the digest of a file to ``digests``; read it only if its stat fields have changed."""
        with suppress(OSError):  # the file was removed meanwhile, or may not be read
            file_state = os.stat(path)  # noqa: PTH116 - there are thousands
            if not stat.S_ISREG(file_state.st_mode):
                return
            stamp = (file_state.st_mtime_ns, file_state.st_size, file_state.st_ino)
            cached = self._digests.get(path)
            if cached is None or cached[0] != stamp:
                # a file of the kernel has no size, and a read of it may wait for ever
                is_read = 0 < file_state.st_size <= _CONTENT_BYTES_MAX
                digest = (
                    hashlib.sha256(Path(path).read_bytes()).hexdigest() if is_read else repr(stamp)
                )
                cached = self._digests[path] = (stamp, digest)
            digests[path] = cached[1]


def _python_path() -> list[Path]:
    """Return the directories of ``PYTHONPATH`` that hold no installed packages."""
    entries = [
        Path(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder
    ]
    return [
        folder.resolve()
        for folder in entries
        if folder.is_dir() and not folder.is_relative_to(sys.prefix)
    ]


def _paths(directory: Path, text: str) -> list[Path]:
    """Return the existing files and directories that a text names, relative to ``directory``.

    The text may also be an option such as ``--config=file``, or a line of a shell.
    """
    paths: list[Path] = []
    for word in sorted({text, *_WORDS.findall(text)}):
        with suppress(OSError, ValueError):  # the text is too long for a path, or has a null byte
            path = (directory / word).resolve()
            if path.exists():
                paths.append(path)
    return paths


def _outermost(roots: list[Path]) -> list[Path]:
    """Return the directories that are not below another one."""
    sorted_roots = sorted(set(roots), key=lambda root: len(root.parts))
    return [
        root
        for position, root in enumerate(sorted_roots)
        if not any(map(root.is_relative_to, sorted_roots[:position]))
    ]
