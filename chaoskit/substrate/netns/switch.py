"""The launcher's end of the switch: the process that makes the networks of runs (``switch_process.py``)."""

from __future__ import annotations

import sys

import msgspec

from chaoskit.substrate.core.traffic import Change
from chaoskit.substrate.helper_process import Servant
from chaoskit.substrate.undo import UndoLog


class Build(msgspec.Struct, frozen=True, tag=True):
    """Make a network with these stations. May carry a descriptor of a namespace for each, which stays when the network
    goes; else new ones are made. Answered by the stations' addresses, and a descriptor of each one's namespace."""

    stations: tuple[str, ...]


class Move(msgspec.Struct, frozen=True, tag=True):
    """Give a station another namespace: its descriptor comes with this."""

    network: int
    station: str


class Listen(msgspec.Struct, frozen=True, tag=True):
    """A listening socket at a station. Answered by one descriptor."""

    network: int
    station: str
    port: int


class Connect(msgspec.Struct, frozen=True, tag=True):
    """A connection from a station to an address. Answered by one descriptor."""

    network: int
    station: str
    address: tuple[str, int]


class Impose(msgspec.Struct, frozen=True, tag=True):
    """Change the traffic of a network. Answered by the number of the change."""

    network: int
    change: Change


class Lift(msgspec.Struct, frozen=True, tag=True):
    """Undo a change. Answered by how many packets it has met."""

    network: int
    number: int


class Count(msgspec.Struct, frozen=True, tag=True):
    """Answered by how many packets a change has met so far."""

    network: int
    number: int


class OpenEcho(msgspec.Struct, frozen=True, tag=True):
    """A socket for echoes from a station. Answered by one descriptor."""

    network: int
    station: str


class Close(msgspec.Struct, frozen=True, tag=True):
    """Let go of a network."""

    network: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """What became of a request. ``error``: why it failed, or ""."""

    network: int = 0
    number: int = 0
    packets: int = 0
    addresses: tuple[str, ...] = ()
    error: str = ""


Request = Build | Move | Listen | Connect | Impose | Lift | Count | OpenEcho | Close

_answers = msgspec.json.Decoder(Done)


class Switch(Servant[Done]):
    """Starts the process, and asks it.

    Args:
        undo: gets the entry that ends the process if the launcher cannot.
        privileged: whether this user may make namespaces; else the process makes a user namespace first.
    """

    def __init__(self, undo: UndoLog, *, privileged: bool) -> None:
        command = [sys.executable, "-m", "chaoskit.substrate.netns.switch_process"]
        if not privileged:
            # with a network of its own: into the one that it came from, nothing lets it back
            command = ["unshare", "--user", "--map-root-user", "--net", *command]
        super().__init__("the switch process", command, _answers, undo)
