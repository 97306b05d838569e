"""Tests of a node's links to other nodes, in threads of its keeper.

-> ``health/pair.py``: what a test measures.
-> ``coordinator/detectors/link_speed.py`` and ``coordinator/detectors/newcomers.py``: order tests
and judge the readings.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from chaoskit.health import pair
from chaoskit.process.linux import lower_priority, set_name
from chaoskit.wire.messages import LinksMeasured, MeasureLinks, PairReading

#: More than a socket buffers, and little compared to a gradient.
STREAM_BYTES = 2**18
PINGS = 3
#: Time limit of a test, which counts as the time of a link that takes longer.
LIMIT_S = 2.0
_NICENESS = 10
_AT_ONCE = 4


def answer_tests(token: str, listener: socket.socket) -> pair.PairServer:
    """Start the server that answers tests of other nodes, and return it.

    It owns the listener, and serves until it is closed.
    """
    return pair.PairServer(token, listener, niceness=_NICENESS, silent_s=LIMIT_S)


def start_tests(
    node: str, token: str, order: MeasureLinks, send: Callable[[LinksMeasured], None]
) -> None:
    """Start to test links to the ordered targets, a few at a time. Returns at once.

    A slow link takes many round trips, and little bandwidth of the others.

    Args:
        node: name of this node.
        token: secret that the servers of the targets know.
        order: the targets, and the number of the order.
        send: called once with the readings of all links, on the thread that tests.
    """
    threading.Thread(
        target=_measure, args=(node, token, order, send), name="link-tests", daemon=True
    ).start()


def _measure(
    node: str, token: str, order: MeasureLinks, send: Callable[[LinksMeasured], None]
) -> None:
    """Test all links of an order, and send the readings in one message."""
    set_name("link-tests")
    lower_priority(_NICENESS)  # of the threads that are started here, too
    with ThreadPoolExecutor(min(_AT_ONCE, len(order.targets))) as pool:
        links = tuple(pool.map(partial(_test, token), order.targets))
    send(LinksMeasured(node, order.number, links, order.joins))


def _test(token: str, target: tuple[str, str, int]) -> PairReading:
    """Test the link to a target (node, host and port) and return the reading.

    A link that fails gives a reading with an error.
    """
    node, host, port = target
    reading = pair.read(
        (host, port),
        token,
        node=node,
        pings=PINGS,
        stream_bytes=STREAM_BYTES,
        silent_s=LIMIT_S,
        limit_s=LIMIT_S,
    )
    return pair.without_overhead(reading, STREAM_BYTES)
