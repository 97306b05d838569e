"""The switch: the process that makes and changes the networks of runs.

It is the only process with rights over them. Without root it runs in a user namespace in which it
has these rights; the supervisor joins it there. Its networks vanish with it and with the processes
of the run.

-> ``network/fabric.py``: how a network is made. ``network/wiring.py``: how it is changed.
"""

from __future__ import annotations

import contextlib
import signal
import socket

import msgspec

from chaoskit.process.linux import restore_signals, set_name
from chaoskit.substrate.core import namespaces
from chaoskit.substrate.core.echo import open_socket
from chaoskit.substrate.helper_process import BYTES_MAX, DESCRIPTORS_MAX, take_launcher_socket
from chaoskit.substrate.netns.switch import (
    Build,
    Close,
    Connect,
    Count,
    Impose,
    Lift,
    Listen,
    Move,
    OpenEcho,
    Request,
    SwitchDone,
)
from chaoskit.substrate.network.fabric import Fabric
from chaoskit.substrate.network.wiring import Wiring

_CONNECT_S = 5.0

_requests: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)


class _Server:
    """Server that carries out the requests of the launcher one after the other."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._networks: dict[int, Fabric] = {}
        self._wirings: dict[int, Wiring] = {}
        self._count = 0

    def serve(self) -> None:
        """Carry out the launcher's requests until the launcher closes the connection."""
        self._answer(SwitchDone())
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._connection, BYTES_MAX, DESCRIPTORS_MAX)
            if not data:
                return
            request = _requests.decode(data)
            try:
                self._carry_out(request, descriptors)
            except Exception as error:  # noqa: BLE001 - the launcher must get every error
                self._answer(SwitchDone(error=f"{type(request).__name__}: {error}"))

    def _carry_out(self, request: Request, descriptors: list[int]) -> None:
        """Carry out a request and send its answer. Any error that is raised means a failure."""
        match request:
            case Build(stations):
                self._count += 1
                self._networks[self._count] = fabric = Fabric(stations, descriptors)
                self._wirings[self._count] = Wiring(fabric)
                addresses = tuple(station.address for station in fabric.stations.values())
                self._answer(
                    SwitchDone(self._count, addresses=addresses),
                    *(station.namespace for station in fabric.stations.values()),
                )
            case Move(network, station):
                self._networks[network].move(station, *descriptors)
                self._wirings[network].moved(station)
                self._answer(SwitchDone())
            case Listen(network, station, port):
                origin = self._networks[network].stations[station]
                with (
                    namespaces.entered(origin.namespace),
                    socket.create_server((origin.address, port)) as listener,
                ):
                    self._answer(SwitchDone(), listener.fileno())
            case Connect(network, station, address):
                origin = self._networks[network].stations[station]
                with (
                    namespaces.entered(origin.namespace),
                    socket.create_connection(address, _CONNECT_S) as connection,
                ):
                    self._answer(SwitchDone(), connection.fileno())
            case Impose(network, change):
                self._answer(SwitchDone(number=self._wirings[network].impose(change)))
            case Lift(network, number):
                self._answer(SwitchDone(packets=self._wirings[network].lift(number)))
            case Count(network, number):
                self._answer(SwitchDone(packets=self._wirings[network].packets(number)))
            case OpenEcho(network, station):
                origin = self._networks[network].stations[station]
                with namespaces.entered(origin.namespace), open_socket() as echo_socket:
                    self._answer(SwitchDone(), echo_socket.fileno())
            case Close(network):
                self._wirings.pop(network).close()
                self._networks.pop(network).close()
                self._answer(SwitchDone())

    def _answer(self, answer: SwitchDone, *descriptors: int) -> None:
        socket.send_fds(self._connection, [msgspec.json.encode(answer)], list(descriptors))


def main() -> None:
    """Run the switch. This is its entry point; standard input is the socket to the launcher."""
    set_name("ck-switch")
    restore_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = take_launcher_socket()
    with contextlib.suppress(BrokenPipeError):
        _Server(connection).serve()


if __name__ == "__main__":
    main()
