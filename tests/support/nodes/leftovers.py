"""Remains of a killed run on this machine, found by a mark that only its processes bear."""

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

#: Temporary files that torch leaves for the next process.
TORCH = "torchinductor_"


class Leftovers:
    """A place for one run: its own directories, and a mark in the environment of all its processes.

    Args:
        directory: an empty directory.
    """

    def __init__(self, directory: Path) -> None:
        self.temporary, self.runtime = directory / "tmp", directory / "run"
        self.temporary.mkdir()
        self.runtime.mkdir(mode=0o700)
        self._name, self._value = "CHAOSKIT_TEST_MARK", str(uuid.uuid4())

    def environment(self) -> dict[str, str]:
        """Return the environment with which the run is started."""
        additions = {
            self._name: self._value,
            "TMPDIR": str(self.temporary),
            "XDG_RUNTIME_DIR": str(self.runtime),
        }
        return {**os.environ, **additions}

    def of(self, pid: int) -> list[str]:
        """Return a description of everything left of the run of the runner ``pid``.

        Its journals may stay.
        """
        return [
            *self.processes(),
            *self._groups(pid),
            *self._mounts(),
            *self._files(),
            *self._containers(pid),
        ]

    def processes(self) -> list[str]:
        """Return descriptions of the living processes of the run."""
        mark, descriptions = f"{self._name}={self._value}".encode(), []
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                is_ours = mark in (directory / "environ").read_bytes()
            except OSError:
                continue
            pid = int(directory.name)
            if is_ours and not linux.is_ending(pid):
                descriptions.append(
                    f"process {pid} ({linux.process_name(pid)}, {linux.state(pid)})"
                )
        return descriptions

    def _containers(self, pid: int) -> list[str]:
        """Return the containers of the runner; none if there is no daemon."""
        label_filter = urllib.parse.quote(json.dumps({"label": [f"{LABEL}=1"]}))
        with contextlib.suppress(OSError):
            _, containers = call(
                endpoint(), "GET", f"/containers/json?all=1&filters={label_filter}"
            )
            return [
                f"container {container['Names'][0]}"
                for container in containers
                if container["Labels"][OWNER].startswith(f"{pid}-")
            ]
        return []

    def _groups(self, pid: int) -> list[str]:
        walk = os.walk("/sys/fs/cgroup")
        names = [Path(parent, name) for parent, names, _ in walk for name in names]
        return [
            f"control group {path}" for path in names if path.name.startswith(f"{PREFIX}{pid}-")
        ]

    def _mounts(self) -> list[str]:
        """Return mounts below the run's directories, in the mount namespace of any process."""
        mounts = set()
        for path in Path("/proc").glob("[0-9]*/mounts"):
            try:
                lines = path.read_text().splitlines()
            except OSError:
                continue
            mounts |= {line for line in lines if f" {self.temporary.parent}/" in line}
        return [f"mount {line}" for line in sorted(mounts)]

    def _files(self) -> list[str]:
        undo = [
            f"undo file {path.name}: {path.read_text()}" for path in self.runtime.rglob("*.jsonl")
        ]
        remaining = [
            path.name for path in self.temporary.iterdir() if not any(path.glob(f"*/{JOURNAL}"))
        ]
        return undo + [f"temporary {name}" for name in remaining if not name.startswith(TORCH)]
