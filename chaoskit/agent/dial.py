"""Connections to a server over a network that may lose everything for a while.

-> agent/coordinator_link.py: when an agent looks for the next coordinator. agent/agent.py tests
links for coordinator/detectors/links.py. wire/frames.py: a single attempt, and the proof of the
token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from chaoskit.errors import Refused
from chaoskit.wire import frames
from chaoskit.wire.coordinator_files import Address

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

#: TCP resends a lost first packet after a second, then ever later. A new attempt connects sooner
#: once the network works again.
_NEXT_ATTEMPT_S = 0.2
_AFTER_REFUSAL_S = 0.02
_ATTEMPTS_MAX = 8
_TRIES, _TRY_S = 4, 0.12
_LOOP_TURNS = 10


async def dial(
    find_address: Callable[[], Address], token: str, deadline_s: float
) -> Connection | None:
    """Return an authenticated connection, by the first of several attempts that succeeds.

    Attempts that fail, also by a refusal, are followed by others. None is returned at the deadline.
    The other attempts are cancelled, and late connections closed.

    Args:
        find_address: returns the address; called for each attempt. An error that it raises ends all
            attempts, and is raised.
        token: the run's token.
        deadline_s: on the monotonic clock.
    """
    attempts: list[asyncio.Task[Connection]] = []
    try:
        while (left_s := deadline_s - time.monotonic()) > 0:
            attempts.append(asyncio.ensure_future(frames.connect_async(find_address(), token)))
            if len(attempts) > _ATTEMPTS_MAX:
                _give_up(attempts.pop(0))
            await asyncio.wait(
                attempts, timeout=min(_NEXT_ATTEMPT_S, left_s), return_when=asyncio.FIRST_COMPLETED
            )
            ended = [attempt for attempt in attempts if attempt.done()]
            for attempt in ended:
                attempts.remove(attempt)
                try:
                    return attempt.result()
                except (OSError, Refused):
                    await asyncio.sleep(_AFTER_REFUSAL_S)
        return None
    finally:
        for attempt in attempts:
            _give_up(attempt)


async def can_connect(address: tuple[str, int], tries: int = _TRIES) -> bool:
    """Return whether a connection to an address can be made, by any of ``tries`` attempts.

    A new attempt begins every 0.12 s, and the earlier ones continue: a single packet may be lost by
    chance. False after the last attempt, also if each of them was refused.
    """
    attempts: list[asyncio.Task[None]] = []
    try:
        for _ in range(tries):
            attempts.append(asyncio.ensure_future(_probe(address)))
            reached, _ = await asyncio.wait(
                attempts, timeout=_TRY_S, return_when=asyncio.FIRST_COMPLETED
            )
            if reached:
                return True
        for _ in range(_LOOP_TURNS):  # without a CPU meanwhile, answers are noticed only now
            await asyncio.sleep(0)
        return any(attempt.done() for attempt in attempts)
    finally:
        for attempt in attempts:
            attempt.cancel()


async def _probe(address: tuple[str, int]) -> None:
    """Return once the other side has accepted a connection, which is then closed.

    Never return if the connection is refused or lost.
    """
    try:
        _, writer = await asyncio.open_connection(*address)
        writer.close()
    except OSError:
        # refused or unreachable: the caller makes the next attempt
        await asyncio.get_running_loop().create_future()


def _give_up(attempt: asyncio.Task[Connection]) -> None:
    """Cancel an attempt, and close its connection if it has succeeded already."""
    attempt.add_done_callback(_close_late)
    attempt.cancel()


def _close_late(attempt: asyncio.Task[Connection]) -> None:
    """Close a connection that came too late to be used."""
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result()[1].close()
