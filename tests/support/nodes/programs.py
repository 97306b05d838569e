"""Programs that a supervisor starts in tests. Their arguments are text."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from chaoskit.process.linux import die_with_parent, socket_name

_LONG_S = 600.0
_SHORT_S = 60.0


def leave(arguments: bytes, sockets: Sequence[socket.socket], parent_pid: int) -> None:
    """End with this exit code."""
    os._exit(int(arguments))


def stay(arguments: bytes, sockets: Sequence[socket.socket], parent_pid: int) -> None:
    """Be there."""
    die_with_parent(parent_pid)
    time.sleep(_LONG_S)


def outlive(arguments: bytes, sockets: Sequence[socket.socket], parent_pid: int) -> None:
    """Be there, also without the supervisor; not for long, should a test not come to end it."""
    time.sleep(_SHORT_S)


def burn(arguments: bytes, sockets: Sequence[socket.socket], parent_pid: int) -> None:
    """Want a CPU all the time."""
    die_with_parent(parent_pid)
    while True:
        pass


def orphan(arguments: bytes, sockets: Sequence[socket.socket], parent_pid: int) -> None:
    """Start a process whose parent ends, write its pid to this file, and be there."""
    script = f"sleep {_LONG_S:g} & echo $! > {arguments.decode()}.part; mv {arguments.decode()}.part {arguments.decode()}"
    subprocess.run(["sh", "-c", script], check=True)
    time.sleep(_LONG_S)


def answer(arguments: bytes, sockets: Sequence[socket.socket], parent_pid: int) -> None:
    """Say one's pid to whatever connects to one's socket, and end with this exit code after the first one."""
    connection, _ = sockets[0].accept()
    connection.sendall(str(os.getpid()).encode())
    connection.close()
    os._exit(int(arguments))


def talk(arguments: bytes, sockets: Sequence[socket.socket], parent_pid: int) -> None:
    """Come to the door at this path, say hello, give back what is said, and end when the line does."""
    die_with_parent(parent_pid)
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with socket_name(Path(arguments.decode())) as name:
        line.connect(name)
    with contextlib.suppress(OSError):  # it was hung up on
        line.send(b"hello")
        while data := line.recv(4096):
            line.send(data.upper())
    os._exit(0)


def write(arguments: bytes, sockets: Sequence[socket.socket], parent_pid: int) -> None:
    """Append numbered lines to this file, as fast as a disk takes them."""
    die_with_parent(parent_pid)
    path = Path(arguments.decode())
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in itertools.count():
        os.write(file, b"%d\n" % number)
        if number % 100 == 0:
            time.sleep(0.001)


def wind_up(arguments: bytes, sockets: Sequence[socket.socket], parent_pid: int) -> None:
    """Write to this file until SIGTERM comes, then say so in it, and end."""
    die_with_parent(parent_pid)
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    with Path(arguments.decode()).open("a", buffering=1) as file:
        while not told:
            file.write("work\n")
            time.sleep(0.001)
        file.write("the end\n")
    os._exit(0)


def defy(arguments: bytes, sockets: Sequence[socket.socket], parent_pid: int) -> None:
    """Write numbered lines to this file, whatever SIGTERM says."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    write(arguments, sockets, parent_pid)


def complain(arguments: bytes, sockets: Sequence[socket.socket], parent_pid: int) -> None:
    """Write this to standard error, and go by a signal."""
    sys.stderr.write(arguments.decode())
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
