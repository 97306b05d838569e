"""HTTP/1.1 messages as they pass: heads are understood, bodies are handed on in blocks, with what frames them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import msgspec

HEAD_BYTES_MAX = 2**18
_BLOCK_BYTES = 2**16


class Head(msgspec.Struct):
    """The first line and the headers of a message; names of headers in lower case."""

    line: bytes
    headers: list[tuple[bytes, bytes]]

    def get(self, name: bytes) -> bytes:
        return next((value for key, value in self.headers if key == name), b"").lower()

    def encode(self) -> bytes:
        lines = [
            self.line,
            *(name + b": " + value for name, value in self.headers if name != b"expect"),
        ]
        return b"\r\n".join(lines) + b"\r\n\r\n"


async def read_head(reader: asyncio.StreamReader) -> Head:
    data = await reader.readuntil(b"\r\n\r\n")
    line, *rest = data[:-4].split(b"\r\n")
    pairs = (header.partition(b":") for header in rest)
    return Head(line, [(name.strip().lower(), value.strip()) for name, _, value in pairs])


async def read_body(
    reader: asyncio.StreamReader, head: Head, *, until_eof: bool
) -> AsyncIterator[bytes]:
    """The body of a message in blocks, with the framing of its chunks if it has any."""
    if head.get(b"transfer-encoding") == b"chunked":
        size = -1
        while size:
            line = await reader.readuntil(b"\r\n")
            size = int(line.split(b";")[0], 16)
            yield line
            left = size + 2 if size else 0
            while left:
                block = await reader.read(min(left, _BLOCK_BYTES))
                if not block:
                    raise ConnectionError("the body ended before its time")
                left -= len(block)
                yield block
        while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
            yield line
        yield line
        return
    left = (
        int(head.get(b"content-length") or 0)
        if head.get(b"content-length") or not until_eof
        else sys.maxsize
    )
    while left:
        block = await reader.read(min(left, _BLOCK_BYTES))
        if not block:
            if left > sys.maxsize // 2:
                return
            raise ConnectionError("the body ended before its time")
        left -= len(block)
        yield block
