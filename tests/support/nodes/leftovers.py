"""What a run that was killed has left on this machine, by a mark that only its processes bear."""

from __future__ import annotations

import contextlib
import json
import os
import urllib.parse
import uuid
from pathlib import Path

from chaoskit.process import linux
from chaoskit.substrate.undo.docker_janitor import LABEL, OWNER, call, endpoint
from chaoskit.substrate.undo.entries import JOURNAL, PREFIX

#: What torch leaves among the temporary files, for the next process.
TORCH = "torchinductor_"


class Leftovers:
    """A place for one run: directories of its own, and a mark in the environment of all its processes.

    Args:
        directory: an empty one.
    """

    def __init__(self, directory: Path) -> None:
        self.temporary, self.runtime = directory / "tmp", directory / "run"
        self.temporary.mkdir()
        self.runtime.mkdir(mode=0o700)
        self._name, self._value = "CHAOSKIT_TEST_MARK", str(uuid.uuid4())

    def environment(self) -> dict[str, str]:
        """What the run is started with."""
        mine = {
            self._name: self._value,
            "TMPDIR": str(self.temporary),
            "XDG_RUNTIME_DIR": str(self.runtime),
        }
        return {**os.environ, **mine}

    def of(self, pid: int) -> list[str]:
        """Return everything that is left of the run whose runner was ``pid``, in words. Its journals may stay."""
        return [
            *self.processes(),
            *self._groups(pid),
            *self._mounts(),
            *self._files(),
            *self._containers(pid),
        ]

    def processes(self) -> list[str]:
        """Living processes of the run."""
        mark, found = f"{self._name}={self._value}".encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                is_ours = mark in (entry / "environ").read_bytes()
            except OSError:
                continue
            pid = int(entry.name)
            if is_ours and not linux.is_ending(pid):
                found.append(f"process {pid} ({linux.process_name(pid)}, {linux.state(pid)})")
        return found

    def _containers(self, pid: int) -> list[str]:
        """Containers of the runner; none where there is no daemon."""
        wanted = urllib.parse.quote(json.dumps({"label": [f"{LABEL}=1"]}))
        with contextlib.suppress(OSError):
            _, found = call(endpoint(), "GET", f"/containers/json?all=1&filters={wanted}")
            return [
                f"container {one['Names'][0]}"
                for one in found
                if one["Labels"][OWNER].startswith(f"{pid}-")
            ]
        return []

    def _groups(self, pid: int) -> list[str]:
        walk = os.walk("/sys/fs/cgroup")
        names = [Path(parent, name) for parent, names, _ in walk for name in names]
        return [
            f"control group {path}" for path in names if path.name.startswith(f"{PREFIX}{pid}-")
        ]

    def _mounts(self) -> list[str]:
        """Mounts below the run's directories, in the mount namespace of any process."""
        found = set()
        for path in Path("/proc").glob("[0-9]*/mounts"):
            try:
                lines = path.read_text().splitlines()
            except OSError:
                continue
            found |= {line for line in lines if f" {self.temporary.parent}/" in line}
        return [f"mount {line}" for line in sorted(found)]

    def _files(self) -> list[str]:
        undo = [
            f"undo file {path.name}: {path.read_text()}" for path in self.runtime.rglob("*.jsonl")
        ]
        left = [
            path.name for path in self.temporary.iterdir() if not any(path.glob(f"*/{JOURNAL}"))
        ]
        return undo + [f"temporary {name}" for name in left if not name.startswith(TORCH)]
