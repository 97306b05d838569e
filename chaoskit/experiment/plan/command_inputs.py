"""The variables and files on which a command may depend, as far as they can be seen from outside.

Which files a command reads is not known. Those that it may read are looked at: all below its working directory, those
that its arguments and its environment name, and what lies beside a Python file among these.
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
from chaoskit.stacks.command import inherited_variables

ENTRIES_MAX = 20_000  # a look at so many takes some tenths of a second
_CONTENT_BYTES_MAX = 1 << 20  # larger files are told apart by their size and time
_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})
_OF_PYTEST = ("PYTEST_CURRENT_TEST", "PYTEST_VERSION")
_WORDS = re.compile(r"[^\s=:;,\"']+")

Digests = Mapping[str, str]


class TooManyFiles(Exception):
    """There is more below the directories of a command than can be looked at before each run."""


def variables() -> dict[str, str]:
    """Return the environment of a command, without what differs between any two runs or tests."""
    inherited = inherited_variables(os.environ)
    return {name: value for name, value in sorted(inherited.items()) if name not in _OF_PYTEST}


def differing(before: Digests, after: Digests) -> set[str]:
    """Return the paths of the files that are new, gone or changed."""
    return {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}


class InputFiles:
    """Digests of the files that commands may read. Files that did not change are not read again.

    Args:
        without: a directory that is left out, with all below it.
    """

    def __init__(self, without: Path) -> None:
        self._without = without.resolve()
        self._known: dict[
            str, tuple[tuple[int, int, int], str]
        ] = {}  # by path: what stat shows, and the digest

    def look(self, experiment: CommandExperiment) -> Digests:
        """Return the digest of each file, by path.

        Raises:
            TooManyFiles: if there are more than :data:`ENTRIES_MAX`.
        """
        directory, seen = Path(experiment.working_directory), 0
        named = [path for text in experiment.command for path in _paths(directory, text)]
        roots = [directory, *filter(Path.is_dir, named), *_python_path()]
        roots += [path.parent for path in named if path.suffix == ".py"]
        named += [path for value in variables().values() for path in _paths(directory, value)]
        digests: dict[str, str] = {}
        for path in (path for path in named if path.is_file()):
            self._note(str(path), digests)
        for root in _outermost(roots):
            for path_text in self._below(root):
                seen += 1
                if seen > ENTRIES_MAX:
                    raise TooManyFiles
                self._note(path_text, digests)
        return digests

    def _below(self, root: Path) -> Iterator[str]:
        for folder, folders, files in os.walk(root):
            folders[:] = [name for name in folders if not self._is_skipped(folder, name)]
            yield from (
                f"{folder}/{name}"
                for name in files
                if not name.startswith(".") or name.startswith(".env")
            )

    def _is_skipped(self, folder: str, name: str) -> bool:
        path = Path(folder, name)
        is_environment = (path / "pyvenv.cfg").exists()
        return name.startswith(".") or name in _SKIPPED or is_environment or path == self._without

    def _note(self, path: str, digests: dict[str, str]) -> None:
        with suppress(OSError):  # it is gone by now, or may not be read
            state = os.stat(path)  # noqa: PTH116 - there are thousands
            if not stat.S_ISREG(state.st_mode):
                return
            stamp = (state.st_mtime_ns, state.st_size, state.st_ino)
            known = self._known.get(path)
            if known is None or known[0] != stamp:
                is_small = state.st_size <= _CONTENT_BYTES_MAX
                digest = (
                    hashlib.sha256(Path(path).read_bytes()).hexdigest() if is_small else repr(stamp)
                )
                known = self._known[path] = (stamp, digest)
            digests[path] = known[1]


def _python_path() -> list[Path]:
    """Directories from which Python imports, without those of what is installed."""
    entries = [Path(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return [
        entry.resolve()
        for entry in entries
        if entry.is_dir() and not entry.is_relative_to(sys.prefix)
    ]


def _paths(directory: Path, text: str) -> list[Path]:
    """Return the files and directories that a text names, also as ``--config=file``, and within a line of a shell."""
    paths: list[Path] = []
    for word in sorted({text, *_WORDS.findall(text)}):
        with suppress(OSError, ValueError):  # the text is too long for a name, or has a null byte
            path = (directory / word).resolve()
            if path.exists():
                paths.append(path)
    return paths


def _outermost(roots: list[Path]) -> list[Path]:
    """Return the directories that lie below no other one."""
    unique = sorted(set(roots), key=lambda root: len(root.parts))
    return [
        root
        for place, root in enumerate(unique)
        if not any(map(root.is_relative_to, unique[:place]))
    ]
