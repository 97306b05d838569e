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
    """One thing that the janitor did, or found done already."""

    act: str
    target: str
    repaired: bool


def sweep(directory: Path | None = None) -> list[Repair]:
    """Undo what launchers that are gone have left behind. Touches nothing else, and no live launcher's work."""
    repairs = []
    for path in _abandoned(directory):
        repairs += [_undo(entry) for entry in _open_entries(path)]
        path.unlink(missing_ok=True)
    return repairs


def left_behind(directory: Path | None = None) -> list[str]:
    """What :func:`sweep` would look at, in words; nothing is touched."""
    return [
        f"{entry['act']} {entry.get('path') or entry.get('name') or entry['pid']}"
        for path in _abandoned(directory)
        for entry in _open_entries(path)
    ]


def _abandoned(directory: Path | None) -> list[Path]:
    """Undo files of launchers that are gone."""
    found = []
    for path in sorted(((directory or state_directory()) / "undo").glob("*.jsonl")):
        pid, ticks, *_ = path.stem.split("-")
        if start_ticks(int(pid)) != int(ticks) or is_ending(int(pid)):  # else it lives and cleans up by itself
            found.append(path)
    return found


def _open_entries(path: Path) -> list[dict[str, Any]]:
    entries: dict[int, dict[str, Any]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []  # its launcher ended in order just now, or another janitor was faster
    for line in lines:
        try:
            fields = json.loads(line)
        except ValueError:
            continue  # the last line, torn when the machine went down: its act was never begun
        if "done" in fields:
            entries.pop(fields["done"], None)
        else:
            entries[fields["entry"]] = fields
    return list(entries.values())


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
    if entry["act"] == "kill":
        return Repair("kill", target, not is_ending(pid) and kill_if_same(pid, ticks, signal.SIGKILL))
    return Repair(entry["act"], target, False)


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
