"""Undo, written ahead: what must be put back is on disk before anything is broken.

Each launcher process has one file of its own under the state directory. A launcher that ends in order removes it; the
janitor replays the files of launchers that did not. Only standard-library imports and :mod:`chaoskit.osprocess`: it
must work when the environment is what broke.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaoskit.errors import BadInput
from chaoskit.osprocess import is_ending, kill_if_same, start_ticks, state
from chaoskit.substrate import docker_janitor

#: Every control group that chaoskit makes is named like this, and no other is ever removed.
CGROUP_PREFIX = "chaoskit-"
_CGROUP_BUSY_S = 5.0  # a process that was killed leaves its group only when the kernel has freed it
_CGROUP_LOOK_S = 0.005
_LINE_SHOWN = 60  # bytes


def state_directory() -> Path:
    """``$XDG_STATE_HOME/chaoskit``, or ``~/.local/state/chaoskit``."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "chaoskit"


_numbers = itertools.count()


class UndoLog:
    """An undo file of this process; it may have several, each with entries of its own."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = (directory or state_directory()) / "undo"
        self._path = self._directory / f"{os.getpid()}-{start_ticks(os.getpid())}-{next(_numbers)}.jsonl"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            remedy = f"choose a directory that can be written ({error.strerror})"
            raise BadInput("XDG_STATE_HOME", str(self._directory), remedy) from None
        self._number = 0

    def plan(self, act: str, **target: Any) -> int:
        """Write down how to undo what is about to be done; durable when this returns. Gives the entry's number."""
        self._number += 1
        self._write({"entry": self._number, "act": act, **target})
        return self._number

    def done(self, entry: int) -> None:
        """Nothing is left to undo for ``entry``."""
        self._write({"done": entry})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """This process has put everything back."""
        self._file.close()
        self._path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Repair:
    """One thing that the janitor did, found done already, or could not do because an undo log is damaged.

    Attributes:
        problem: of an undo log (``act`` is ``damaged``): what of it was not put back, and what helps.
    """

    act: str
    target: str
    repaired: bool
    problem: str = ""


def sweep(directory: Path | None = None) -> list[Repair]:
    """Undo what launchers that are gone have left behind. Touches nothing else, and no live launcher's work.

    What cannot be read of an undo log stays on disk, for a person.
    """
    repairs = []
    for path in _abandoned(directory):
        log = _read(path)
        repairs += [_undo(entry) for entry in log.entries]
        if log.problem:
            repairs.append(Repair("damaged", str(path), False, log.problem))
        if log.damaged:
            _keep(path, log.damaged)
        elif not log.problem:
            with contextlib.suppress(OSError):  # another janitor was faster; or the directory cannot be written
                path.unlink()
    return repairs


def left_behind(directory: Path | None = None) -> list[str]:
    """What :func:`sweep` would look at, in words; nothing is touched."""
    left = []
    for path in _abandoned(directory):
        log = _read(path)
        left += [f"{entry['act']} {entry.get('path') or entry.get('name') or entry['pid']}" for entry in log.entries]
        left += [f"{path}: {log.problem}"] if log.problem else []
    return left


def _abandoned(directory: Path | None) -> list[Path]:
    """Undo files of launchers that are gone; a file whose name is of no launcher is among them."""
    found = []
    for path in sorted(((directory or state_directory()) / "undo").glob("*.jsonl")):
        pid, ticks = _launcher(path)
        if start_ticks(pid) != ticks or is_ending(pid):  # else it lives and cleans up by itself
            found.append(path)
    return found


def _launcher(path: Path) -> tuple[int, int]:
    """Pid and start time of the process that wrote an undo file; of none, where the name does not say it."""
    named = re.fullmatch(r"([0-9]+)-([0-9]+)-[0-9]+", path.stem, re.ASCII)
    return (int(named[1]), int(named[2])) if named else (0, -1)


@dataclass(frozen=True, slots=True)
class _Log:
    """An undo file as far as it can be read. ``damaged``: lines that say nothing; ``problem``: for people."""

    entries: list[dict[str, Any]]
    damaged: list[bytes]
    problem: str = ""


def _read(path: Path) -> _Log:
    try:
        *lines, torn = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return _Log([], [])  # its launcher ended in order just now, or another janitor was faster
    except OSError as error:
        return _Log([], [], f"{error.strerror}: nothing that it lists was put back; make it readable, or remove it")
    entries: dict[int, dict[str, Any]] = {}
    damaged: dict[int, bytes] = {}
    if torn.lstrip(b"\0")[:1] not in (b"", b"{"):  # else torn when the machine went down: its act was never begun
        lines.append(torn)
    for number, line in enumerate(lines, 1):
        fields = _fields(line)
        if fields is None:
            damaged[number] = line
        elif "done" in fields:
            entries.pop(fields["done"], None)
        else:
            entries[fields["entry"]] = fields
    return _Log(list(entries.values()), list(damaged.values()), _damage(damaged))


def _damage(lines: dict[int, bytes]) -> str:
    """In words, the lines of a file that cannot be read, by their numbers."""
    if not lines:
        return ""
    number, line = next(iter(lines.items()))
    more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
    shown = repr(line[:_LINE_SHOWN])[1:]
    return f"line {number}{more} cannot be read, and was not put back: {shown}; see what is left, then remove the file"


#: Acts, and what their entries say beside their number.
_ACTS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "continue": {"pid": int, "ticks": (int, type(None))},
    "kill": {"pid": int, "ticks": (int, type(None))},
    "cgroup": {"path": str, "home": str},
    "container": {"name": str, "owner": str, "daemon": str},
}


def _fields(line: bytes) -> dict[str, Any] | None:
    """What a line says; None if it is nothing that an undo log writes."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    if set(fields) == {"done"}:
        return fields if isinstance(fields["done"], int) else None
    target = _ACTS.get(str(fields.get("act")))
    if target is None or not isinstance(fields.get("entry"), int):
        return None
    known = all(name in fields and isinstance(fields[name], kind) for name, kind in target.items())
    return fields if known else None


def _keep(path: Path, lines: list[bytes]) -> None:
    """Leave only these lines in an undo file: what they say may still have to be put back, by a person."""
    draft = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):  # the directory cannot be written: it stays as it is
        draft.write_bytes(b"".join(line + b"\n" for line in lines))
        draft.replace(path)


def _undo(entry: dict[str, Any]) -> Repair:
    if entry["act"] == "cgroup":
        path = Path(entry["path"])
        return Repair("cgroup", entry["path"], path.is_dir() and remove_cgroup(path, Path(entry["home"])))
    if entry["act"] == "container":
        return Repair("container", entry["name"], _remove_container(entry))
    pid, ticks = entry["pid"], entry["ticks"]
    target = f"pid {pid}"
    if ticks is None:  # it was gone before the act: whoever has its number now is somebody else
        return Repair(entry["act"], target, False)
    if entry["act"] == "continue":
        stopped = state(pid) == "T"
        return Repair("continue", target, stopped and kill_if_same(pid, ticks, signal.SIGCONT))
    return Repair("kill", target, not is_ending(pid) and kill_if_same(pid, ticks, signal.SIGKILL))


def _remove_container(entry: dict[str, Any]) -> bool:
    with contextlib.suppress(OSError):  # there is no daemon any more; its next launcher here removes it by its labels
        return docker_janitor.remove_container(entry["daemon"], entry["name"], entry["owner"])
    return False


def remove_cgroup(path: Path, home: Path) -> bool:
    """Move the processes of a control group of ours to ``home``, where what was frozen goes on, and remove it.

    False if it cannot be removed.
    """
    if not path.name.startswith(CGROUP_PREFIX) or not (path / "cgroup.procs").is_file():
        return not path.exists()
    deadline_s = time.monotonic() + _CGROUP_BUSY_S
    while True:
        _evacuate(path, home)
        try:
            path.rmdir()
        except FileNotFoundError:
            return True  # another janitor was faster
        except OSError:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_CGROUP_LOOK_S)
        else:
            return True


def _evacuate(path: Path, home: Path) -> None:
    with contextlib.suppress(OSError):  # the group is gone
        for pid in (path / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # the process is ending: it leaves the group by itself
                ((home if home.is_dir() else path.parent) / "cgroup.procs").write_text(pid)


def describe(repair: Repair) -> str:
    """One line for people."""
    if repair.problem:
        return f"{repair.target}: {repair.problem}"
    if not repair.repaired:
        return f"{repair.act} {repair.target}: nothing left to do"
    return {
        "continue": f"continued {repair.target}, left stopped",
        "kill": f"ended {repair.target}, left running",
        "cgroup": f"removed {repair.target}, left behind",
        "container": f"removed container {repair.target}, left behind",
    }[repair.act]


def main() -> None:
    """``python -m chaoskit.substrate.undo``: the janitor, where nothing but Python works."""
    for line in map(describe, sweep()):
        sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
