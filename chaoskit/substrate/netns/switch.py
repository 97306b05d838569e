"""The launcher's side of the switch (``switch_process.py``), which makes networks of runs.

A station is a node or the coordinator, as the network of a run sees it.

-> ``netns/substrate.py`` sends the requests. ``network/wiring.py``: how the traffic is changed.
"""

from __future__ import annotations

import sys

import msgspec

from chaoskit.substrate.core.traffic import Change
from chaoskit.substrate.helper_process import HelperProcess
from chaoskit.substrate.undo import UndoLog


class Build(msgspec.Struct, frozen=True, tag=True):
    """Request to make a network with these stations.

    It may carry a descriptor of a namespace for each station, which stays when the network goes;
    else new namespaces are made. The answer has the addresses of the stations and a descriptor of
    each namespace.
    """

    stations: tuple[str, ...]


class Move(msgspec.Struct, frozen=True, tag=True):
    """Request to move a station to another namespace. Its descriptor comes with the request."""

    network: int
    station: str


class Listen(msgspec.Struct, frozen=True, tag=True):
    """Request for a listening socket at a station. The answer carries its descriptor.

    Attributes:
        port: 0 for a free one.
    """

    network: int
    station: str
    port: int


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Request for a connection from a station to an address. The answer carries its descriptor."""

    network: int
    station: str
    address: tuple[str, int]


class Impose(msgspec.Struct, frozen=True, tag=True):
    """Request to change the traffic of a network. The answer has the number of the change."""

    network: int
    change: Change


class Lift(msgspec.Struct, frozen=True, tag=True):
    """Request to undo a change. The answer has the number of packets that it has affected."""

    network: int
    number: int


class Count(msgspec.Struct, frozen=True, tag=True):
    """Request for the number of packets that a change has affected so far."""

    network: int
    number: int


class OpenEcho(msgspec.Struct, frozen=True, tag=True):
    """Request for a socket for echoes from a station. The answer carries its descriptor."""

    network: int
    station: str


class Close(msgspec.Struct, frozen=True, tag=True):
    """Request to remove a network, with all changes to its traffic."""

    network: int


class SwitchDone(msgspec.Struct, frozen=True, tag=True):
    """Answer to a request. Fields that the request does not ask for have their defaults.

    Attributes:
        network: number of a new network.
        number: number of a new change.
        packets: number of packets that a change has affected.
        addresses: IPv4 addresses of the stations of a new network, in their order.
        error: why the request failed; "" if it did not.
    """

    network: int = 0
    number: int = 0
    packets: int = 0
    addresses: tuple[str, ...] = ()
    error: str = ""


Request = Build | Move | Listen | Connect | Impose | Lift | Count | OpenEcho | Close

_answers = msgspec.json.Decoder(SwitchDone)


class Switch(HelperProcess[SwitchDone]):
    """The launcher's end of the switch process. The constructor starts the process.

    Args:
        undo: log for the entry that ends the process if the launcher cannot.
        privileged: True if this user may make namespaces; else the process makes a user namespace
            first.
    """

    def __init__(self, undo: UndoLog, *, privileged: bool) -> None:
        command = [sys.executable, "-m", "chaoskit.substrate.netns.switch_process"]
        if not privileged:
            # --net as well: a process cannot return to the network namespace that it came from
            command = ["unshare", "--user", "--map-root-user", "--net", *command]
        super().__init__("the switch process", command, _answers, undo)
