"""The process that makes the networks of runs and changes them: the only one that needs rights over them.

Without root it lives in a user namespace, in which it may do all of this; the supervisor then joins it there. All that
it makes vanishes with it and with the processes of the run.
"""

from __future__ import annotations

import contextlib
import signal
import socket

import msgspec

from chaoskit.process.linux import restore_signals, set_name
from chaoskit.substrate.core import namespaces
from chaoskit.substrate.core.echo import open_socket
from chaoskit.substrate.helper_process import BYTES_MAX, DESCRIPTORS_MAX, serve_launcher
from chaoskit.substrate.netns.switch import (
    Build,
    Close,
    Connect,
    Count,
    Done,
    Impose,
    Lift,
    Listen,
    Move,
    OpenEcho,
    Request,
)
from chaoskit.substrate.network.fabric import Fabric
from chaoskit.substrate.network.wiring import Wiring

_CONNECT_S = 5.0

_requests: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)


class _Server:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._networks: dict[int, Fabric] = {}
        self._wirings: dict[int, Wiring] = {}
        self._count = 0

    def serve(self) -> None:
        """Until the launcher goes away."""
        self._answer(Done())
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._connection, BYTES_MAX, DESCRIPTORS_MAX)
            if not data:
                return
            request = _requests.decode(data)
            try:
                self._carry_out(request, descriptors)
            except Exception as error:  # noqa: BLE001 - whatever it is, the launcher must hear of it
                self._answer(Done(error=f"{type(request).__name__}: {error}"))

    def _carry_out(self, request: Request, descriptors: list[int]) -> None:
        match request:
            case Build(stations):
                self._count += 1
                self._networks[self._count] = fabric = Fabric(stations, descriptors)
                self._wirings[self._count] = Wiring(fabric)
                addresses = tuple(station.address for station in fabric.stations.values())
                self._answer(
                    Done(self._count, addresses=addresses),
                    *(station.namespace for station in fabric.stations.values()),
                )
            case Move(network, station):
                self._networks[network].move(station, *descriptors)
                self._wirings[network].moved(station)
                self._answer(Done())
            case Listen(network, station, port):
                place = self._networks[network].stations[station]
                with (
                    namespaces.entered(place.namespace),
                    socket.create_server((place.address, port)) as listener,
                ):
                    self._answer(Done(), listener.fileno())
            case Connect(network, station, address):
                place = self._networks[network].stations[station]
                with (
                    namespaces.entered(place.namespace),
                    socket.create_connection(address, _CONNECT_S) as connection,
                ):
                    self._answer(Done(), connection.fileno())
            case Impose(network, change):
                self._answer(Done(number=self._wirings[network].impose(change)))
            case Lift(network, number):
                self._answer(Done(packets=self._wirings[network].lift(number)))
            case Count(network, number):
                self._answer(Done(packets=self._wirings[network].packets(number)))
            case OpenEcho(network, station):
                place = self._networks[network].stations[station]
                with namespaces.entered(place.namespace), open_socket() as opened:
                    self._answer(Done(), opened.fileno())
            case Close(network):
                self._wirings.pop(network).close()
                self._networks.pop(network).close()
                self._answer(Done())

    def _answer(self, answer: Done, *descriptors: int) -> None:
        socket.send_fds(self._connection, [msgspec.json.encode(answer)], list(descriptors))


def main() -> None:
    """Entry point; the launcher's socket is standard input."""
    set_name("ck-switch")
    restore_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = serve_launcher()
    with contextlib.suppress(BrokenPipeError):
        _Server(connection).serve()


if __name__ == "__main__":
    main()
