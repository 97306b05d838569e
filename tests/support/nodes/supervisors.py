"""Supervisors for tests: started as their own programs, over a Unix socket or TCP."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path

from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.supervisor.client import SupervisorLink
from chaoskit.substrate.supervisor.messages import Program
from chaoskit.substrate.supervisor.reception import Reception
from chaoskit.substrate.supervisor.remote_node import KernelAway
from support.waiting import wait_until

TESTS = Path(__file__).parents[2]
PLACE = "here"
GRACE_S = 5.0
COMMAND = [
    sys.executable,
    "-m",
    "chaoskit.substrate.supervisor",
    "--cold",
    "--grace-s",
    str(GRACE_S),
]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}


class Started:
    """A supervisor before any import of programs, and the runner's end of its stream."""

    def __init__(
        self, process: subprocess.Popen[bytes], link: SupervisorLink, directory: Path
    ) -> None:
        self.process, self.link, self._directory = process, link, directory
        assert link.await_ready()

    def program(self, name: str, arguments: object = "", **more: int) -> Program:
        return Program(
            f"support.nodes.programs:{name}",
            str(arguments).encode(),
            f"node0.{name}",
            str(self._directory),
            **more,
        )

    def start(self, name: str, arguments: object = "") -> Process:
        return self.link.start(self.program(name, arguments))

    def end(self, *processes: Process, patience_s: float = 0.0) -> None:
        self.link.finish(self.link.begin_end(processes, patience_s))

    def exit_of(self, process: Process) -> int:
        """Return the wait status of a program, once the supervisor has reported it."""
        wait_until(
            lambda: not self.link.is_open() or process.pid in self.link.exits, "the word of its end"
        )
        return self.link.exits[process.pid]

    def close(self) -> None:
        self.link.close()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()


def on_unix(directory: Path) -> Started:
    socket_of_runner, socket_of_supervisor = socket.socketpair()
    with socket_of_supervisor:
        process = subprocess.Popen(
            COMMAND, stdin=socket_of_supervisor.fileno(), env=ENVIRONMENT, start_new_session=True
        )
    return Started(process, SupervisorLink(socket_of_runner, "the supervisor"), directory)


def on_tcp(directory: Path) -> Started:
    token, kernel = secrets.token_hex(16), KernelAway()
    with contextlib.closing(Reception("127.0.0.1", token)) as reception:
        reception.expect(PLACE)
        process = dialing(reception.address, token)
        arrived = reception.await_any([PLACE], 60.0)
        assert arrived is not None
        link = SupervisorLink(arrived[1].connection, "the supervisor", kernel)
    kernel.reach_by(link)
    return Started(process, link, directory)


def dialing(address: tuple[str, int], token: str, place: str = PLACE) -> subprocess.Popen[bytes]:
    host, port = address
    command = [*COMMAND, "--dial", f"{host}:{port}", "--place", place, "--token-file", "/dev/stdin"]
    process = subprocess.Popen(
        command, env=ENVIRONMENT, start_new_session=True, stdin=subprocess.PIPE
    )
    assert process.stdin is not None
    with process.stdin as stdin:
        stdin.write(token.encode())
    return process
