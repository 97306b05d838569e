"""The launcher's end of the proxy that stands before a store of objects (``object_store/process.py``)."""

from __future__ import annotations

import sys
from functools import partial

import msgspec

from chaoskit.substrate.core.actions import Applied, Counted
from chaoskit.substrate.helper_process import Servant
from chaoskit.substrate.object_store.troubles import Trouble
from chaoskit.substrate.undo import UndoLog


class ImposeTrouble(msgspec.Struct, frozen=True, tag=True):
    """Answered by the number of the trouble."""

    trouble: Trouble


class LiftTrouble(msgspec.Struct, frozen=True, tag=True):
    """Answered by how many requests have met it."""

    number: int


class CountTrouble(msgspec.Struct, frozen=True, tag=True):
    """Answered by how many requests have met it so far."""

    number: int


class ReadTraffic(msgspec.Struct, frozen=True, tag=True):
    """Answered by what has passed so far."""


class Traffic(msgspec.Struct, frozen=True):
    """What has passed since the proxy began.

    Args:
        requests: by method; those that were struck count, too.
        sent_bytes: in the bodies of requests.
        received_bytes: in the bodies of answers, as far as they were handed on.
    """

    requests: dict[str, int] = {}
    sent_bytes: int = 0
    received_bytes: int = 0


class Done(msgspec.Struct, frozen=True, tag=True):
    """What became of a request. ``error``: why it failed, or "". ``port``: where the proxy listens."""

    number: int = 0
    met: int = 0
    traffic: Traffic = Traffic()
    port: int = 0
    error: str = ""


Request = ImposeTrouble | LiftTrouble | CountTrouble | ReadTraffic

_answers = msgspec.json.Decoder(Done)


class ObjectProxy(Servant[Done]):
    """Hands on what goes to an HTTP/1.1 store, and does to it what it is told.

    Args:
        host, port: where the store listens.
        undo: gets the entry that ends the process if the launcher cannot.

    Raises:
        HarnessError: if it cannot listen.
    """

    def __init__(self, host: str, port: int, undo: UndoLog) -> None:
        command = [sys.executable, "-m", "chaoskit.substrate.object_store.process", host, str(port)]
        super().__init__(f"the proxy of {host}:{port}", command, _answers, undo)
        self.port = self.ask(ReadTraffic())[0].port

    @property
    def url(self) -> str:
        """What clients take for the store."""
        return f"http://127.0.0.1:{self.port}"

    def impose(self, trouble: Trouble) -> int:
        """Gives the number of the trouble. Raises HarnessError, like the others."""
        return self.ask(ImposeTrouble(trouble))[0].number

    def met(self, number: int) -> int:
        """How many requests were struck so far; of an outage, how many connections that were open."""
        return self.ask(CountTrouble(number))[0].met

    def lift(self, number: int) -> int:
        """Gives how many requests have met it."""
        return self.ask(LiftTrouble(number))[0].met

    def apply(self, trouble: Trouble) -> Applied:
        """Have the proxy do something to requests until that is lifted. Raises HarnessError."""
        number = self.impose(trouble)
        return Counted(partial(self.met, number), partial(self.lift, number))

    def traffic(self) -> Traffic:
        """What has passed so far."""
        return self.ask(ReadTraffic())[0].traffic
