"""The files of the user's code that were imported.

They belong neither to Python, nor to installed packages, nor to chaoskit.

-> worker/process.py journals the digests; experiment/twin/twin.py compares them with the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import chaoskit

_INSTALLED = {"site-packages", "dist-packages"}
_NOT_USER_FILES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")),
    str(Path(next(iter(chaoskit.__path__))).resolve()),
)

_seen_modules: set[str] = set()  # module names: thousands, most of them imported before the fork
_digests: dict[str, str] = {}


def imported_sources() -> dict[str, str]:
    """Return the digest of every user file that was imported so far, by path.

    The digest is of the content when the file was first seen here. Files that could not be read
    then are left out.
    """
    for name in sys.modules.keys() - _seen_modules:
        module = sys.modules.get(name)
        # generated modules have no spec; some modules import others when an attribute is read
        spec = getattr(module, "__dict__", {}).get("__spec__")
        origin = spec.origin if spec is not None and spec.has_location else None
        if origin and origin not in _digests and is_user_file(Path(origin)):
            with contextlib.suppress(OSError):
                _digests[origin] = source_digest(Path(origin))
        _seen_modules.add(name)
    return dict(_digests)


def source_digest(path: Path) -> str:
    """Return the first 12 hexadecimal digits of the SHA-256 of a file.

    Raise OSError if it cannot be read.
    """
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def is_user_file(path: Path) -> bool:
    """Return whether a file is the user's: not Python's, not installed, and not chaoskit's."""
    if _INSTALLED.intersection(path.parts) or _lies_in(path, _NOT_USER_FILES):
        return False  # nearly all files: resolving links first would cost too much
    resolved_path = path.resolve()
    return not _INSTALLED.intersection(resolved_path.parts) and not _lies_in(
        resolved_path, _NOT_USER_FILES
    )


def _lies_in(path: Path, directories: Iterable[str]) -> bool:
    return any(path.is_relative_to(directory) for directory in directories)
