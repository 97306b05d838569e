"""Which files the user's code came from: those that belong neither to Python, nor to what is installed, nor to us."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import chaoskit

_INSTALLED = {"site-packages", "dist-packages"}
_NOT_THE_USERS = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")),
    str(Path(next(iter(chaoskit.__path__))).resolve()),
)

_seen: set[str] = (
    set()
)  # names of modules: there are thousands, most of them imported before this process was forked
_digests: dict[str, str] = {}


def imported_sources() -> dict[str, str]:
    """Path -> digest of every file of the user's that was imported so far, as it was when it was first seen here."""
    for name in sys.modules.keys() - _seen:
        module = sys.modules.get(name)
        # what a compiler has generated has no spec; some modules import things when they are asked for an attribute
        spec = getattr(module, "__dict__", {}).get("__spec__")
        origin = spec.origin if spec is not None and spec.has_location else None
        if origin and origin not in _digests and is_the_users(Path(origin)):
            with contextlib.suppress(OSError):
                _digests[origin] = source_digest(Path(origin))
        _seen.add(name)
    return dict(_digests)


def source_digest(path: Path) -> str:
    """SHA-256 of a file, in short."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def is_the_users(path: Path) -> bool:
    """Return whether a file belongs neither to Python, nor to what is installed, nor to chaoskit."""
    if _INSTALLED.intersection(path.parts) or _lies_in(path, _NOT_THE_USERS):
        return False  # nearly all of them, and following links would cost more than all the rest
    where = path.resolve()
    return not _INSTALLED.intersection(where.parts) and not _lies_in(where, _NOT_THE_USERS)


def _lies_in(path: Path, directories: Iterable[str]) -> bool:
    return any(path.is_relative_to(directory) for directory in directories)
