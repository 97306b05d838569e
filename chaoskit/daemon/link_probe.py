"""A node's tests of its links to others, as they are ordered: beside its work, in threads of its keeper."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from chaoskit.health import pair
from chaoskit.process.linux import lower_priority, set_name
from chaoskit.wire.messages import LinksMeasured, MeasureLinks, PairReading

#: More than a socket holds, and little beside a gradient.
STREAM_BYTES = 2**18
PINGS = 3
#: A link that takes longer is as slow as that.
LIMIT_S = 2.0
_NICENESS = 10
_AT_ONCE = 4


def answer_tests(token: str, door: socket.socket) -> pair.PairServer:
    """Be the other side of the tests of other nodes, from now on."""
    return pair.PairServer(token, door, niceness=_NICENESS, silent_s=LIMIT_S)


def start_tests(
    node: str, token: str, order: MeasureLinks, tell: Callable[[LinksMeasured], None]
) -> None:
    """Test the links that are asked for, some at a time: a slow one takes many round trips, and little of the others.

    Args:
        tell: called with the answer, on the thread that tests.
    """
    threading.Thread(
        target=_measure, args=(node, token, order, tell), name="link-tests", daemon=True
    ).start()


def _measure(
    node: str, token: str, order: MeasureLinks, tell: Callable[[LinksMeasured], None]
) -> None:
    set_name("link-tests")
    lower_priority(_NICENESS)  # of the threads that are started here, too
    with ThreadPoolExecutor(min(_AT_ONCE, len(order.targets))) as pool:
        links = tuple(pool.map(partial(_test, token), order.targets))
    tell(LinksMeasured(node, order.number, links, order.joins))


def _test(token: str, target: tuple[str, str, int]) -> PairReading:
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
    return pair.of_path(reading, STREAM_BYTES)
