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
    """Sleep until the process is ended."""
    die_with_parent(parent_pid)
    time.sleep(_LONG_S)


def outlive(arguments: bytes, sockets: Sequence[socket.socket], parent_pid: int) -> None:
    """Sleep, even after the end of the supervisor; not for long, in case a test fails to end the
    process.
    """
    time.sleep(_SHORT_S)


def burn(arguments: bytes, sockets: Sequence[socket.socket], parent_pid: int) -> None:
    """Use a CPU all the time."""
    die_with_parent(parent_pid)
    while True:
        pass


def orphan(arguments: bytes, sockets: Sequence[socket.socket], parent_pid: int) -> None:
    """Start a process and let its parent end, write its pid to this file, and sleep."""
    script = f"sleep {_LONG_S:g} & echo $! > {arguments.decode()}.part; mv {arguments.decode()}.part {arguments.decode()}"
    subprocess.run(["sh", "-c", script], check=True)
    time.sleep(_LONG_S)


def answer(arguments: bytes, sockets: Sequence[socket.socket], parent_pid: int) -> None:
    """Send the pid to the first client of the socket, and end with this exit code."""
    connection, _ = sockets[0].accept()
    connection.sendall(str(os.getpid()).encode())
    connection.close()
    os._exit(int(arguments))


def talk(arguments: bytes, sockets: Sequence[socket.socket], parent_pid: int) -> None:
    """Connect to the door at this path, send a greeting, echo each message, and end with the
    connection.
    """
    die_with_parent(parent_pid)
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with socket_name(Path(arguments.decode())) as name:
        line.connect(name)
    with contextlib.suppress(OSError):  # the peer closed the connection
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
    """Write to this file until SIGTERM comes, then add a last line, and end."""
    die_with_parent(parent_pid)
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
    with Path(arguments.decode()).open("a", buffering=1) as file:
        while not signals:
            file.write("work\n")
            time.sleep(0.001)
        file.write("the end\n")
    os._exit(0)


def defy(arguments: bytes, sockets: Sequence[socket.socket], parent_pid: int) -> None:
    """Write numbered lines to this file, and ignore SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    write(arguments, sockets, parent_pid)


def complain(arguments: bytes, sockets: Sequence[socket.socket], parent_pid: int) -> None:
    """Write this text to standard error, and end by a signal."""
    sys.stderr.write(arguments.decode())
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
