"""Hands that run on this machine, and our client of them, joined by pipes.

-> ``support/hand/client.py``: a client that shows every line, for tests of the protocol.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from chaoskit.attach.hands.hand import Hand
from support.hand.client import directory, public_python
from support.hand.pipe_stream import stream_of
from support.waiting import LIMIT_S


@contextlib.contextmanager
def hand_on_processes(
    *options: str, prefix: Sequence[str] = (), events: list[Mapping[str, Any]] | None = None
) -> Iterator[tuple[Hand, subprocess.Popen[bytes]]]:
    """Start a hand on processes and yield its client, and the process that was started.

    Args:
        options: further options of the hand.
        prefix: a command that starts the hand.
        events: takes the events of the hand.
    """
    command = [*prefix, "env", "-C", str(directory()), public_python(), "-S", "-m", "hand"]
    process = subprocess.Popen(
        [*command, "--processes", *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    collected = [] if events is None else events
    client = Hand("the hand", stream_of(process), collected.append)
    try:
        client.ask("hello", limit_s=LIMIT_S)  # it may start late; later answers come soon
        yield client, process
    finally:
        client.close()
        process.kill()
        process.wait()
