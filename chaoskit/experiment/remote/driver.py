"""The driver: the harness of runs, on the machine that they take place on."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from chaoskit import wire
from chaoskit.errors import BadInput, ChaoskitError
from chaoskit.experiment.blackbox.plan import CommandExperiment
from chaoskit.experiment.host import LocalHost
from chaoskit.experiment.planfile import FILE_NAME, receive
from chaoskit.experiment.remote.messages import (
    Answer,
    AskAble,
    Done,
    DriverSpec,
    ExecutePlan,
    NotDone,
    Order,
    Told,
    Watched,
)
from chaoskit.messages import Message
from chaoskit.osprocess import die_with_parent, set_name, socket_name
from chaoskit.substrate import choice
from chaoskit.substrate.supervised import SupervisedSubstrate
from chaoskit.substrate.supervisor.door import LINE_BYTES_MAX

_decode = wire.decoder(Order)
_PIECE_BYTES = 2**15


def run_driver(arguments: bytes, sockets: Sequence[socket.socket], parent_pid: int) -> None:
    """The life of a driver, by the arguments of a :class:`DriverSpec`, as a program of a supervisor."""
    spec = msgspec.json.decode(arguments, type=DriverSpec)
    die_with_parent(parent_pid)
    set_name("ck-driver")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    substrate = choice.make(spec.substrate)
    with contextlib.closing(substrate):
        while True:  # until the supervisor ends it
            with contextlib.closing(_knock(Path(spec.door))) as line:
                if isinstance(substrate, SupervisedSubstrate):
                    substrate.tell = partial(_tell, line)
                _serve(line, LocalHost(substrate))


def _knock(door: Path) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with socket_name(door) as name:
        line.connect(name)
    return line


def _serve(line: socket.socket, host: LocalHost) -> None:
    """Take one order, carry it out, and answer it."""
    splitter = wire.Splitter(_decode)
    while data := line.recv(LINE_BYTES_MAX):
        for order in splitter.feed(data):
            say(line, _carry_out(order, host, partial(say, line)))


def _tell(line: socket.socket, text: str) -> None:
    say(line, Told(text))


def say(line: socket.socket, message: Message) -> None:
    """Send a message in pieces that a line takes. One that the other side has ended takes none."""
    data = wire.encode(message)
    with contextlib.suppress(OSError):
        for at in range(0, len(data), _PIECE_BYTES):
            line.sendall(data[at : at + _PIECE_BYTES])


def _carry_out(order: Order, host: LocalHost, tell: Callable[[Answer], None]) -> Done | NotDone:
    try:
        match order:
            case AskAble(action):
                module, _, kind = action.partition(":")
                return Done(host.why_not(getattr(import_module(module), kind)))
            case ExecutePlan():
                _execute(order, host, tell)
        return Done()
    except BadInput as error:
        return NotDone(error.remedy, error.field, str(error.value))
    except ChaoskitError as error:
        return NotDone(str(error))
    except Exception as error:  # noqa: BLE001 - it is told there
        return NotDone(f"{type(error).__name__}: {error}")


def _execute(order: ExecutePlan, host: LocalHost, tell: Callable[[Answer], None]) -> None:
    sys.path.extend(module for module in order.modules if module not in sys.path)
    directory = Path(order.run_directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / FILE_NAME).write_bytes(order.saved)
    experiment = receive(order.plan)

    def watch(message: Any) -> None:
        if order.watched and isinstance(message, Message):
            tell(Watched(wire.encode(message)))

    if isinstance(experiment, CommandExperiment):
        host.execute_command(experiment, directory, watch=watch, twin_id=order.twin_id)
    else:
        host.execute(experiment, directory, watch=watch, port=order.port, twin_id=order.twin_id)
