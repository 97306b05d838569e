"""The launcher's end of the proxy in front of an object store (``object_store/process.py``).

-> ``object_store/troubles.py``: the troubles. ``faults/storage/remote.py``: the faults.
"""

from __future__ import annotations

import sys
from functools import partial

import msgspec

from chaoskit.substrate.core.actions import Applied, CountedAction
from chaoskit.substrate.helper_process import HelperProcess
from chaoskit.substrate.object_store.troubles import Trouble
from chaoskit.substrate.undo import UndoLog


class ImposeStoreTrouble(msgspec.Struct, frozen=True, tag=True):
    """Start a trouble. Answered by its identifier, ``number``."""

    trouble: Trouble


class LiftStoreTrouble(msgspec.Struct, frozen=True, tag=True):
    """End a trouble. Answered by the number of requests that it affected, as ``met``."""

    number: int


class CountStoreTrouble(msgspec.Struct, frozen=True, tag=True):
    """Request the number of requests that a trouble has affected so far, answered as ``met``."""

    number: int


class ReadTraffic(msgspec.Struct, frozen=True, tag=True):
    """Request the traffic so far, and the port that the proxy listens on."""


class ProxyTraffic(msgspec.Struct, frozen=True):
    """Traffic through the proxy since it was started.

    Attributes:
        requests: number of requests by method, including those that a trouble affected.
        sent_bytes: bytes in the bodies of requests that were not refused or stalled.
        received_bytes: bytes in the bodies of answers that were passed on.
    """

    requests: dict[str, int] = {}
    sent_bytes: int = 0
    received_bytes: int = 0


class StoreTroubleDone(msgspec.Struct, frozen=True, tag=True):
    """Answer to a request.

    Attributes:
        number: identifier of the trouble.
        met: number of affected requests; of an outage, of connections.
        traffic: traffic so far, in the answer to :class:`ReadTraffic`.
        port: port that the proxy listens on, in that answer and when the proxy is ready; else 0.
        error: why the request failed; "" if it did not.
    """

    number: int = 0
    met: int = 0
    traffic: ProxyTraffic = ProxyTraffic()
    port: int = 0
    error: str = ""


Request = ImposeStoreTrouble | LiftStoreTrouble | CountStoreTrouble | ReadTraffic

_answers = msgspec.json.Decoder(StoreTroubleDone)


class ObjectProxy(HelperProcess[StoreTroubleDone]):
    """Proxy in front of an HTTP/1.1 store that applies troubles to requests.

    Methods, and those of handles of :meth:`apply`, raise HarnessError if its process is gone or
    does not answer.

    Args:
        host: host of the store.
        port: port of the store.
        undo: log for the entry that ends the process if the launcher cannot.

    Attributes:
        port: port on the loopback that the proxy listens on.

    Raises:
        HarnessError: if the proxy cannot listen.
    """

    def __init__(self, host: str, port: int, undo: UndoLog) -> None:
        command = [sys.executable, "-m", "chaoskit.substrate.object_store.process", host, str(port)]
        super().__init__(f"the proxy of {host}:{port}", command, _answers, undo)
        self.port = self.ask(ReadTraffic())[0].port

    @property
    def url(self) -> str:
        """The URL that clients use for the store."""
        return f"http://127.0.0.1:{self.port}"

    def impose(self, trouble: Trouble) -> int:
        """Start a trouble and return its identifier."""
        return self.ask(ImposeStoreTrouble(trouble))[0].number

    def affected_count(self, trouble_id: int) -> int:
        """Return how many requests a trouble has affected so far; of an outage, the connections."""
        return self.ask(CountStoreTrouble(trouble_id))[0].met

    def lift(self, trouble_id: int) -> int:
        """End a trouble and return how many requests it affected; of an outage, the connections."""
        return self.ask(LiftStoreTrouble(trouble_id))[0].met

    def apply(self, trouble: Trouble) -> Applied:
        """Start a trouble, and return the handle that counts its effects and lifts it."""
        trouble_id = self.impose(trouble)
        return CountedAction(
            partial(self.affected_count, trouble_id), partial(self.lift, trouble_id)
        )

    def traffic(self) -> ProxyTraffic:
        """Return the traffic so far."""
        return self.ask(ReadTraffic())[0].traffic
