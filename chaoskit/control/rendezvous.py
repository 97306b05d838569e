"""Server side of the rendezvous: keys and barriers of the current generation, in the coordinator's memory."""

from __future__ import annotations

import asyncio
from typing import Any

from chaoskit import messages
from chaoskit.messages import Exchange, Exchanged, Get, Put, Superseded, Value


class RendezvousBoard:
    """Holds one generation; everybody who waits for an older one is told that it is over."""

    def __init__(self) -> None:
        self._generation, self._world = 0, 0
        self._futures: dict[str, asyncio.Future[Any]] = {}
        self._arrived: dict[str, dict[int, bytes]] = {}

    def begin(self, generation: int, world: int) -> None:
        """Open a generation and close the one before."""
        for future in self._futures.values():
            if not future.done():
                future.cancel()
        self._generation, self._world = generation, world
        self._futures, self._arrived = {}, {}

    def arrived(self, name: str) -> frozenset[int]:
        """Ranks of the current generation that have come to the barrier ``name``."""
        return frozenset(self._arrived.get(name, ()))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one worker until it hangs up."""
        while True:
            request = await messages.read_message(reader)
            reply = await self._answer(request)
            if reply is not None:
                writer.write(messages.encode(reply))

    async def _answer(self, request: Any) -> messages.Message | None:
        if not isinstance(request, (Put, Get, Exchange)):
            raise messages.Refused(f"unexpected {type(request).__name__} in a rendezvous")
        if request.generation != self._generation:
            return None if isinstance(request, Put) else Superseded(request.generation)
        if isinstance(request, Put):
            self._resolve(f"key/{request.key}", request.value)
            return None
        try:
            if isinstance(request, Get):
                return Value(await asyncio.shield(self._future(f"key/{request.key}")))
            return Exchanged(await asyncio.shield(self._arrive(request)))
        except asyncio.CancelledError:
            if request.generation == self._generation:
                raise  # the server itself is being shut down
            return Superseded(request.generation)

    def _arrive(self, request: Exchange) -> asyncio.Future[Any]:
        arrived = self._arrived.setdefault(request.name, {})
        arrived[request.rank] = request.value
        if len(arrived) == self._world:
            self._resolve(f"exchange/{request.name}", tuple(arrived[rank] for rank in range(self._world)))
        return self._future(f"exchange/{request.name}")

    def _future(self, key: str) -> asyncio.Future[Any]:
        if key not in self._futures:
            self._futures[key] = asyncio.get_running_loop().create_future()
        return self._futures[key]

    def _resolve(self, key: str, value: Any) -> None:
        future = self._future(key)
        if not future.done():
            future.set_result(value)
