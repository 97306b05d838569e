"""List of nodes that are kept out until a person releases them.

It is one file, changed as a whole under a lock.

-> ``launcher/quarantined.py``: keeps these nodes out of a run, and strikes out those that passed.
-> ``cli/machine/node.py``: adds and releases. ``coordinator/detectors/fitness.py``: unfit nodes of
one run, which are on no list.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from chaoskit.errors import BadInput
from chaoskit.nodename import GRAMMAR, is_node_name, require_node_name
from chaoskit.process.host_checks import user_directory
from chaoskit.process.linux import user_at_host

_FILE, _LOCK = "quarantine.json", "quarantine.lock"
_VARIABLE = "XDG_STATE_HOME"
_READ_ONLY_REMEDY = f"make it writable, or set {_VARIABLE} to a directory that can be written"


def state_directory() -> Path:
    """Return the directory of this user's list.

    It is ``$XDG_STATE_HOME/chaoskit``, or ``~/.local/state/chaoskit``.

    Raises:
        BadInput: if the user has no home directory, and the variable is not set.
    """
    return user_directory(_VARIABLE, ".local/state")


class QuarantineEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Node that is kept out, or that was released and has yet to pass its health check.

    Attributes:
        node: name of the node.
        reason: reason for which the node is kept out. Adding it again before its release does not
            change reason, time and user.
        since: wall-clock time since which it is kept out, ISO 8601 in UTC.
        by: user that kept the node out, such as ``user@host``.
        evidence: findings, one line each.
        released: wall-clock time of the release; "" while the node is kept out.
        released_by: user that released it.
        released_because: reason of the release.
    """

    node: str
    reason: str
    since: str
    by: str
    evidence: tuple[str, ...] = ()
    released: str = ""
    released_by: str = ""
    released_because: str = ""

    @property
    def on_probation(self) -> bool:
        """True if the node was released, and must pass its health check before it is used."""
        return bool(self.released)


class _Content(msgspec.Struct, forbid_unknown_fields=True):
    """The content of the file: its version, and the entries by node."""

    version: int = 1
    entries: dict[str, QuarantineEntry] = {}


class Quarantine:
    """List of nodes that are kept out.

    Several processes may use the same directory at once; a process that is killed leaves the list
    as it was.

    Args:
        directory: directory of the list, made when an entry is written.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self.path = directory, directory / _FILE

    def entries(self) -> list[QuarantineEntry]:
        """Return all entries, sorted by node; [] without a file.

        Raises:
            BadInput: if the file cannot be read, is damaged or is of another version. It does not
                count as an empty list, which would admit every node.
        """
        return sorted(self._read().entries.values(), key=lambda entry: entry.node)

    def kept_out(self) -> tuple[str, ...]:
        """Return the names of the nodes that may not be used, without the released ones.

        Raise BadInput as :meth:`entries` does.
        """
        return tuple(entry.node for entry in self.entries() if not entry.on_probation)

    def on_probation(self) -> tuple[str, ...]:
        """Return the names of released nodes, which must pass a health check before they are used.

        Raise BadInput as :meth:`entries` does.
        """
        return tuple(entry.node for entry in self.entries() if entry.on_probation)

    def add(
        self, node: str, reason: str, evidence: Sequence[str] = (), by: str = ""
    ) -> QuarantineEntry:
        """Write an entry that keeps ``node`` out, and return it.

        The entry of a node that is kept out already stays, and evidence is added to it. That of a
        released node is replaced, but its evidence is kept.

        Args:
            evidence: findings, one line each.
            by: user that keeps the node out; "" for the user of this process.

        Raises:
            BadInput: if the name is invalid, the reason is empty, or the list is damaged or cannot
                be written.
        """
        require_node_name("node", node)
        if not reason.strip():
            raise BadInput(
                "reason", reason, "give the cause, which must be known to release the node"
            )
        with self._changing() as content:
            present = content.entries.get(node)
            lines = dict.fromkeys((*(present.evidence if present is not None else ()), *evidence))
            if present is None or present.on_probation:
                present = QuarantineEntry(
                    node=node, reason=reason, since=_now(), by=by or user_at_host()
                )
            content.entries[node] = entry = msgspec.structs.replace(present, evidence=tuple(lines))
        return entry

    def release(self, node: str, reason: str, by: str = "") -> QuarantineEntry:
        """Release ``node`` on a person's word, and return its changed entry.

        The node may come back once it passes its health check.

        Args:
            by: user that releases the node; "" for the user of this process.

        Raises:
            BadInput: if the name is invalid, the node is not kept out, the reason is empty, or the
                list is damaged or cannot be written.
        """
        require_node_name("node", node)
        if not reason.strip():
            raise BadInput("reason", reason, "describe the repair of the node")
        with self._changing() as content:
            present = content.entries.get(node)
            if present is None or present.on_probation:
                names = ", ".join(
                    sorted(
                        other.node for other in content.entries.values() if not other.on_probation
                    )
                )
                raise BadInput(
                    "node", node, f"name a node that is kept out: {names or 'no node is'}"
                )
            content.entries[node] = entry = msgspec.structs.replace(
                present, released=_now(), released_by=by or user_at_host(), released_because=reason
            )
        return entry

    def prove(self, node: str) -> bool:
        """Remove the entry of a released node that has passed its health check.

        Return True if there was such an entry; otherwise the list is unchanged. Raise BadInput if
        the list is damaged or cannot be written.
        """
        if node not in self.on_probation():
            return False  # no change, so the file is not written
        with self._changing() as content:
            present = content.entries.get(node)
            is_removed = present is not None and present.on_probation
            if is_removed:
                del content.entries[node]
        return is_removed

    def _read(self) -> _Content:
        """Return the content of the file, or an empty one if there is no file.

        Raise BadInput if the file cannot be read, is damaged, or is of another version.
        """
        try:
            content = msgspec.json.decode(self.path.read_bytes(), type=_Content)
        except (FileNotFoundError, NotADirectoryError):
            return _Content()
        except (OSError, msgspec.MsgspecError) as error:
            raise BadInput(
                "quarantine", str(self.path), f"repair or remove this file: {error}"
            ) from None
        if content.version != 1:
            raise BadInput(
                "quarantine",
                str(self.path),
                f"use a newer chaoskit: the file has version {content.version}",
            )
        for name, entry in content.entries.items():
            if not is_node_name(name) or entry.node != name:
                remedy = f"repair or remove this file: {name!r} is not a node name: {GRAMMAR}"
                raise BadInput("quarantine", str(self.path), remedy)
        return content

    @contextmanager
    def _changing(self) -> Iterator[_Content]:
        """Yield the content to change, and write it when the block ends without an error.

        Other processes are locked out meanwhile. Raise BadInput if the list cannot be written.
        """
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise BadInput(
                "quarantine", str(self.path), f"{_READ_ONLY_REMEDY} ({error.strerror})"
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the process
            content = self._read()
            yield content
            self._write(content)
        finally:
            os.close(lock)

    def _write(self, content: _Content) -> None:
        """Replace the file, durably. Raise BadInput if that fails."""
        draft = self.path.with_suffix(".new")
        try:
            with draft.open("wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self.path)
            directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise BadInput(
                "quarantine", str(self.path), f"{_READ_ONLY_REMEDY} ({error.strerror})"
            ) from None


def _now() -> str:
    """Return the wall-clock time in ISO 8601, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")
