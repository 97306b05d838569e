"""A client of a hand, which runs from a copy of its directory, without chaoskit.

-> ``support/hand/targets.py``: what it breaks.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from support.waiting import wait_until

ROOT = Path(__file__).parents[3]
#: A user without a name, and without any right.
UID = 1000
AS_USER = (
    *("setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--no-new-privs"),
    *("--bounding-set=-all", "--inh-caps=-all"),
)


class HandClient:
    """The client of one hand.

    Attributes:
        process: the process that was started: the hand, or the first program of ``prefix``.
        lines: all answers and events so far.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self._numbers = itertools.count(1)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, line: bytes) -> None:
        """Send bytes as they are."""
        assert self.process.stdin is not None
        self.process.stdin.write(line)
        self.process.stdin.flush()

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """Send a request, and return the line that answers it."""
        number = next(self._numbers)
        self.send(json.dumps({"number": number, "do": do, **fields}).encode() + b"\n")
        return self.line(lambda line: line.get("number") == number, f"an answer to {do}")

    def do(self, operation: str, **fields: Any) -> dict[str, Any]:
        """Return the answer to a request that must not fail; ``effect`` is its number."""
        line = self.ask(operation, **fields)
        assert "answer" in line, line
        return {"effect": line["number"], **line["answer"]}

    def event(self, name: str, effect: int | None = None) -> dict[str, Any]:
        """Wait for an event, and return it."""
        return self.line(
            lambda line: (
                line.get("event") == name and (effect is None or line.get("effect") == effect)
            ),
            f"the event {name}",
        )

    def line(self, accept: Any, what: str) -> dict[str, Any]:
        """Wait for a line, and return it."""
        return wait_until(lambda: next((line for line in self.lines if accept(line)), None), what)

    def identity(self, pid: int) -> dict[str, int]:
        """Return the pid and the start time of a process, as the hand sees it."""
        records = {record["pid"]: record for record in self.do("list")["processes"]}
        return {"pid": pid, "ticks": records[pid]["ticks"]}

    def close_input(self) -> None:
        """Close the hand's input, as the kubelet does when the client is gone."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def wait(self) -> int:
        """Wait for the end of the hand, and return its exit status. All lines are read then."""
        status = self.process.wait(60)
        self._reader.join(60)
        return status

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))


@contextlib.contextmanager
def hand(
    role: str, *options: str, prefix: Sequence[str] = (), python: str = ""
) -> Iterator[HandClient]:
    """Start a hand, and end it when the context ends.

    Args:
        role: ``processes`` or ``network``.
        options: further options of the hand.
        prefix: a command that starts the hand.
        python: the interpreter; "" for one that every user may run.
    """
    command = [
        *prefix,
        *("env", "-C", str(directory()), python or public_python()),
        *("-S", "-s", "-E", "-m", "hand", f"--{role}", *options),
    ]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    client = HandClient(process)
    try:
        yield client
    finally:
        client.close_input()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


@functools.cache
def directory() -> Path:
    """Return a directory with a copy of the hand, which every user may read."""
    folder = Path(tempfile.mkdtemp(prefix="hand-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(
        ROOT / "chaoskit" / "hand", folder / "hand", ignore=shutil.ignore_patterns("__pycache__")
    )
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    return folder


@functools.cache
def public_python() -> str:
    """Return an interpreter that every user may run: the system's."""
    return shutil.which("python3", path="/usr/local/bin:/usr/bin") or "python3"


def no_namespaces() -> str:
    """Return why this process cannot start targets in a pid namespace under another user."""
    if os.geteuid() != 0:
        return "pid namespaces under another user need root"
    tools = ("unshare", "nsenter", "setpriv")
    missing = [tool for tool in tools if shutil.which(tool) is None]
    return f"{' and '.join(missing)} not found: install util-linux" if missing else ""
