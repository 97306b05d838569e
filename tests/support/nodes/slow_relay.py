"""A TCP relay that delays every byte: ``python slow_relay.py PORT DELAY_MS`` prints its port."""

from __future__ import annotations

import asyncio
import contextlib
import sys

HOST = "127.0.0.1"


async def pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float
) -> None:
    """Pass on all bytes in order, each piece ``delay_s`` after it came."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(2**16):
            loop.call_later(delay_s, writer.write, data)
    loop.call_later(delay_s, writer.close)


async def serve(port: int, delay_s: float) -> None:
    """Accept connections until this process is killed."""

    async def relay(near_reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        far_reader, far = await asyncio.open_connection(HOST, port)
        await asyncio.gather(pass_on(near_reader, far, delay_s), pass_on(far_reader, near, delay_s))

    server = await asyncio.start_server(relay, HOST, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2]) / 1000))
