"""The list of nodes that are kept out, until a person releases them: one file, changed as a whole under a lock."""

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
_READ_ONLY = f"make it writable, or set {_VARIABLE} to a directory that can be written"


def state_directory() -> Path:
    """Return where the list of this user is kept: ``$XDG_STATE_HOME/chaoskit``, or ``~/.local/state/chaoskit``.

    Raises:
        BadInput: if the user has no home directory, and the variable is not set.
    """
    return user_directory(_VARIABLE, ".local/state")


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node that is kept out, or that was released and has yet to prove itself.

    ``since``, ``released``: wall-clock times, ISO 8601 in UTC; ``released`` is "" while it is kept out. ``evidence``:
    what was found, one line each.
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
        """Whether it was released, and must prove itself before it is used."""
        return bool(self.released)


class _Content(msgspec.Struct, forbid_unknown_fields=True):
    version: int = 1
    entries: dict[str, Entry] = {}


class Quarantine:
    """Several processes may use the same directory at once; a process that is killed leaves the list as it was.

    Args:
        directory: made when something is written.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self.path = directory, directory / _FILE

    def entries(self) -> list[Entry]:
        """All of it, by name.

        Raises:
            BadInput: if the file cannot be read as what it is: nobody is let in because a list was damaged.
        """
        return sorted(self._read().entries.values(), key=lambda entry: entry.node)

    def kept_out(self) -> tuple[str, ...]:
        """Nodes that may not be used."""
        return tuple(entry.node for entry in self.entries() if not entry.on_probation)

    def on_probation(self) -> tuple[str, ...]:
        """Nodes that were released, and must prove themselves before they are used."""
        return tuple(entry.node for entry in self.entries() if entry.on_probation)

    def add(self, node: str, reason: str, evidence: Sequence[str] = (), by: str = "") -> Entry:
        """Keep ``node`` out. What is known of one that is kept out already stays, and evidence is added to it.

        Raises:
            BadInput: if no node can have that name, without a reason, or if the list cannot be written.
        """
        require_node_name("node", node)
        if not reason.strip():
            raise BadInput("reason", reason, "say why: whoever releases it must know")
        with self._changing() as content:
            known = content.entries.get(node)
            told = dict.fromkeys((*(known.evidence if known is not None else ()), *evidence))
            if known is None or known.on_probation:
                known = Entry(node=node, reason=reason, since=_now(), by=by or user_at_host())
            content.entries[node] = entry = msgspec.structs.replace(known, evidence=tuple(told))
        return entry

    def release(self, node: str, reason: str, by: str = "") -> Entry:
        """A person answers for ``node``: it may come back when it has proved itself.

        Raises:
            BadInput: if it is not kept out, or without a reason.
        """
        require_node_name("node", node)
        if not reason.strip():
            raise BadInput("reason", reason, "say what was done about it")
        with self._changing() as content:
            known = content.entries.get(node)
            if known is None or known.on_probation:
                names = ", ".join(
                    sorted(one.node for one in content.entries.values() if not one.on_probation)
                )
                raise BadInput(
                    "node", node, f"name a node that is kept out: {names or 'there is none'}"
                )
            content.entries[node] = entry = msgspec.structs.replace(
                known, released=_now(), released_by=by or user_at_host(), released_because=reason
            )
        return entry

    def prove(self, node: str) -> bool:
        """``node`` has passed its health check: if it was released, it is as good as any other. Whether it was."""
        if node not in self.on_probation():
            return False  # nothing to be changed, and so nothing to be written
        with self._changing() as content:
            known = content.entries.get(node)
            proved = known is not None and known.on_probation
            if proved:
                del content.entries[node]
        return proved

    def _read(self) -> _Content:
        try:
            content = msgspec.json.decode(self.path.read_bytes(), type=_Content)
        except (FileNotFoundError, NotADirectoryError):
            return _Content()
        except (OSError, msgspec.MsgspecError) as error:
            raise BadInput(
                "quarantine", str(self.path), f"mend or remove this file: {error}"
            ) from None
        if content.version != 1:
            raise BadInput(
                "quarantine",
                str(self.path),
                f"it is of version {content.version}: use a newer chaoskit",
            )
        for name, entry in content.entries.items():
            if not is_node_name(name) or entry.node != name:
                remedy = f"mend or remove this file: {name!r} is no name of a node: {GRAMMAR}"
                raise BadInput("quarantine", str(self.path), remedy)
        return content

    @contextmanager
    def _changing(self) -> Iterator[_Content]:
        """The content, to be changed; written when the block ends without an error."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise BadInput(
                "quarantine", str(self.path), f"{_READ_ONLY} ({error.strerror})"
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the process
            content = self._read()
            yield content
            self._write(content)
        finally:
            os.close(lock)

    def _write(self, content: _Content) -> None:
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
                "quarantine", str(self.path), f"{_READ_ONLY} ({error.strerror})"
            ) from None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
