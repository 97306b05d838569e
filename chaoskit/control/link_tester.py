"""A node's tests of its links to others, as they are ordered: beside its work, in threads of its keeper."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from chaoskit.health import pair
from chaoskit.messages import LinksMeasured, MeasureLinks
from chaoskit.osprocess import lower_priority, set_name

#: More than a socket holds, and little beside a gradient.
STREAM_BYTES = 2**18
PINGS = 5
#: A link that takes longer is as slow as that.
LIMIT_S = 2.0
_NICENESS = 10


def answer_tests(token: str, door: socket.socket) -> pair.PairServer:
    """Be the other side of the tests of other nodes, from now on."""
    return pair.PairServer(token, door, niceness=_NICENESS, silent_s=LIMIT_S)


def start_tests(node: str, token: str, order: MeasureLinks, tell: Callable[[LinksMeasured], None]) -> None:
    """Test the links that are asked for, one after the other.

    Args:
        tell: called with the answer, on the thread that tests.
    """
    threading.Thread(target=_measure, args=(node, token, order, tell), name="link-tests", daemon=True).start()


def _measure(node: str, token: str, order: MeasureLinks, tell: Callable[[LinksMeasured], None]) -> None:
    set_name("link-tests")
    lower_priority(_NICENESS)
    readings = (
        pair.read(
            (host, port),
            token,
            node=other,
            pings=PINGS,
            stream_bytes=STREAM_BYTES,
            silent_s=LIMIT_S,
            limit_s=LIMIT_S,
        )
        for other, host, port in order.targets
    )
    tell(LinksMeasured(node, order.number, tuple(map(pair.of_path, readings)), order.joins))
