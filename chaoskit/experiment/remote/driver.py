"""The driver: the process that executes plans on the machine where their runs take place.

-> experiment/remote/client.py starts it, sends the orders and judges the runs.
experiment/remote/client_line.py: its connection.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from chaoskit.errors import BadInput, ChaoskitError
from chaoskit.experiment.plan.command_plan import CommandExperiment
from chaoskit.experiment.plan.planfile import FILE_NAME, receive
from chaoskit.experiment.remote.client_line import ClientLine
from chaoskit.experiment.remote.host import LocalHost
from chaoskit.experiment.remote.messages import (
    AskAble,
    DriverDone,
    DriverFailed,
    DriverSpec,
    DriverTold,
    DriverWatched,
    ExecutePlan,
    FromDriver,
    Order,
)
from chaoskit.plaintext import one_line
from chaoskit.process.linux import die_with_parent, set_name, socket_name
from chaoskit.substrate import registry
from chaoskit.substrate.cluster.supervised import SupervisedSubstrate
from chaoskit.wire import frames
from chaoskit.wire.messages import Message


def run_driver(arguments: bytes, sockets: Sequence[socket.socket], parent_pid: int) -> None:
    """Run a driver until its client disconnects, as a program of a supervisor.

    Args:
        arguments: a :class:`DriverSpec` as JSON.
        sockets: not used.
        parent_pid: the supervisor; the driver ends with it.
    """
    spec = msgspec.json.decode(arguments, type=DriverSpec)
    die_with_parent(parent_pid)
    set_name("ck-driver")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        with socket_name(Path(spec.door)) as name:
            line.connect(name)
        client = ClientLine(line)
        driver = Driver(spec.substrate, client)
        with contextlib.closing(driver):
            while (order := client.next_order()) is not None:
                client.say(driver.carry_out(order))


class Driver:
    """Carry out orders one after the other, on a substrate that is made for the first one.

    Args:
        substrate: the name of the substrate.
        client: receives the messages of the driver, and runs external commands.
    """

    def __init__(self, substrate: str, client: ClientLine) -> None:
        self._substrate_name, self._client = substrate, client
        self._host: LocalHost | None = None
        self._substrate: SupervisedSubstrate | None = None

    def _host_of_runs(self) -> LocalHost:
        """Return the host with the substrate, which is made on the first call."""
        if self._host is None:
            substrate = registry.make(self._substrate_name)
            if isinstance(substrate, SupervisedSubstrate):
                substrate.tell = lambda line: self._client.say(DriverTold(line))
                substrate.external_commands = self._client
                self._substrate = substrate
            self._host = LocalHost(substrate)
        return self._host

    def close(self) -> None:
        """Close the substrate, with the processes that its runs have kept warm."""
        if self._host is not None:
            self._host.close()

    def carry_out(self, order: Order) -> DriverDone | DriverFailed:
        """Carry out an order and return the answer; an error is returned as DriverFailed."""
        try:
            match order:
                case AskAble(action):
                    module, _, class_name = action.partition(":")
                    return DriverDone(
                        self._host_of_runs().why_not(getattr(import_module(module), class_name))
                    )
                case ExecutePlan():
                    host = self._host_of_runs()
                    if self._substrate is not None:
                        self._substrate.test, self._substrate.copies = order.test, order.copies
                    _execute(order, host, self._client.say)
            return DriverDone()
        except BadInput as error:
            return DriverFailed(error.remedy, error.field, str(error.value))
        except ChaoskitError as error:
            return DriverFailed(str(error))
        except Exception as error:  # noqa: BLE001 - the client receives the error
            last_frame = traceback.extract_tb(error.__traceback__)[-1]
            return DriverFailed(
                f"{type(error).__name__}: {error} ({last_frame.filename}:{last_frame.lineno})"
            )


def _execute(order: ExecutePlan, host: LocalHost, send: Callable[[FromDriver], None]) -> None:
    """Write the plan of an order into the run's directory and execute it.

    The messages of the run go to ``send`` if the client wants them. For a job these are messages of
    its coordinator, workers and checkpoint daemons; those made in this process are dropped.

    Raises:
        ChaoskitError: the error of the run, or of a plan that cannot be read here.
    """
    sys.path.extend(module for module in order.modules if module not in sys.path)
    directory = Path(order.run_directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / FILE_NAME).write_bytes(order.saved)
    experiment = receive(order.plan)

    def watch(message: Any) -> None:
        if order.watched and isinstance(message, Message):
            send(DriverWatched(frames.encode(message)))

    began_s = time.monotonic()
    _log(f"run {directory.name} begins")
    try:
        if isinstance(experiment, CommandExperiment):
            host.execute_command(experiment, directory, watch=watch, twin_id=order.twin_id)
        else:
            host.execute(experiment, directory, watch=watch, port=order.port, twin_id=order.twin_id)
    finally:
        _log(f"run {directory.name} ends after {time.monotonic() - began_s:.1f} s")


def _log(line: str) -> None:
    """Write a line to the log of the driver's pod or host."""
    print(f"chaoskit driver: {one_line(line)}", flush=True)
