"""HTTP/1.1 messages in transit: heads are parsed, bodies are passed on in blocks."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import msgspec

HEAD_BYTES_MAX = 2**18
_BLOCK_BYTES = 2**16


class Head(msgspec.Struct):
    """First line and headers of a message. Names of headers are in lower case."""

    line: bytes
    headers: list[tuple[bytes, bytes]]

    def get(self, name: bytes) -> bytes:
        """Return the first value of a header, in lower case; b"" if there is none.

        Args:
            name: name of the header in lower case.
        """
        return next((text for key, text in self.headers if key == name), b"").lower()

    def encode(self) -> bytes:
        """Return the head as it is sent on, without the header ``expect``."""
        lines = [
            self.line,
            *(name + b": " + text for name, text in self.headers if name != b"expect"),
        ]
        return b"\r\n".join(lines) + b"\r\n\r\n"


async def read_head(reader: asyncio.StreamReader) -> Head:
    """Return the next head.

    Raises IncompleteReadError at the end of the stream, and LimitOverrunError if the head is too
    long.
    """
    data = await reader.readuntil(b"\r\n\r\n")
    line, *rest = data[:-4].split(b"\r\n")
    pairs = (header.partition(b":") for header in rest)
    return Head(line, [(name.strip().lower(), text.strip()) for name, _, text in pairs])


async def read_body(
    reader: asyncio.StreamReader, head: Head, *, until_eof: bool
) -> AsyncIterator[bytes]:
    """Yield the body of a message in blocks, including the framing of its chunks, if any.

    Raises ConnectionError or IncompleteReadError if the stream ends within the body. Raises
    ValueError if a length is no number, and LimitOverrunError if a line of the framing is too long.

    Args:
        until_eof: True if a body without a length lasts until the end of the stream, as that of an
            answer; False if there is none then, as with a request.
    """
    if head.get(b"transfer-encoding") == b"chunked":
        size = -1
        while size:
            line = await reader.readuntil(b"\r\n")
            size = int(line.split(b";")[0], 16)
            yield line
            remaining = size + 2 if size else 0
            while remaining:
                block = await reader.read(min(remaining, _BLOCK_BYTES))
                if not block:
                    raise ConnectionError("the connection ended within a body")
                remaining -= len(block)
                yield block
        while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
            yield line
        yield line
        return
    remaining = (
        int(head.get(b"content-length") or 0)
        if head.get(b"content-length") or not until_eof
        else sys.maxsize
    )
    while remaining:
        block = await reader.read(min(remaining, _BLOCK_BYTES))
        if not block:
            if remaining > sys.maxsize // 2:
                return
            raise ConnectionError("the connection ended within a body")
        remaining -= len(block)
        yield block
