"""Reaches a server over a network that may lose everything for a while."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from chaoskit.errors import Refused
from chaoskit.wire import frames
from chaoskit.wire.coordinator_files import Address

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

#: A lost first packet is sent again after a second, and ever later: a new attempt is sooner there after the healing.
_AGAIN_S = 0.2
_AFTER_REFUSAL_S = 0.02
_ATTEMPTS_MAX = 8
_TRIES, _TRY_S = 4, 0.12
_LOOKS = 10


async def dial(where: Callable[[], Address], token: str, deadline_s: float) -> Connection | None:
    """An authenticated connection, by the first of several attempts that succeeds; None at the deadline.

    ``where``: the address, asked for each attempt.
    """
    attempts: list[asyncio.Task[Connection]] = []
    try:
        while (left_s := deadline_s - time.monotonic()) > 0:
            attempts.append(asyncio.ensure_future(frames.connect_async(where(), token)))
            if len(attempts) > _ATTEMPTS_MAX:
                _give_up(attempts.pop(0))
            await asyncio.wait(
                attempts, timeout=min(_AGAIN_S, left_s), return_when=asyncio.FIRST_COMPLETED
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
    """Whether the kernel of the other side answers, by the first of a few attempts: a packet may be lost by chance."""
    attempts: list[asyncio.Task[None]] = []
    try:
        for _ in range(tries):
            attempts.append(asyncio.ensure_future(_try(address)))
            reached, _ = await asyncio.wait(
                attempts, timeout=_TRY_S, return_when=asyncio.FIRST_COMPLETED
            )
            if reached:
                return True
        for _ in range(
            _LOOKS
        ):  # where there was no CPU, what the kernel has done meanwhile is seen only now
            await asyncio.sleep(0)
        return any(attempt.done() for attempt in attempts)
    finally:
        for attempt in attempts:
            attempt.cancel()


async def _try(address: tuple[str, int]) -> None:
    """Ends when the other side has answered."""
    try:
        _, writer = await asyncio.open_connection(*address)
        writer.close()
    except OSError:
        await (
            asyncio.get_running_loop().create_future()
        )  # refused or unreachable: another attempt comes in its time


def _give_up(attempt: asyncio.Task[Connection]) -> None:
    attempt.add_done_callback(_close)  # it may have ended already, and nobody else will look how
    attempt.cancel()


def _close(attempt: asyncio.Task[Connection]) -> None:
    """A connection that came too late to be used."""
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result()[1].close()
