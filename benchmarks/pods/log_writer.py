"""A program that prints numbered lines: ``python log_writer.py DIRECTORY RATE BYTES SECONDS LIVES STREAMS``.

It prints RATE lines a second on each stream, for SECONDS seconds. Each line names its stream, its
life and its number. A file of DIRECTORY holds the number of lines that each life has written to each
stream. The first LIVES - 1 lives fail at their end, the others succeed.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
from pathlib import Path

_BATCHES_PER_S = 100


def main() -> None:
    """Print the lines of one life."""
    directory = Path(sys.argv[1])
    rate, size_bytes, seconds, lives, streams = map(float, sys.argv[2:])
    life = len(list(directory.iterdir()))
    with (directory / f"{life}").open("w+b") as file:
        file.write(bytes(16))
        file.flush()
        counts = mmap.mmap(file.fileno(), 16)
    batch = max(1, round(rate / _BATCHES_PER_S))
    padding = "x" * max(0, int(size_bytes) - 20)
    began_s, number = time.monotonic(), 0
    while (now_s := time.monotonic()) < began_s + seconds:
        due = int((now_s - began_s) * rate)
        while number < due:
            last = min(due, number + batch)
            for stream in range(int(streams)):
                text = "".join(f"{stream} {life} {n} {padding}\n" for n in range(number, last))
                data = text.encode()
                while data:
                    data = data[os.write(1 + stream, data) :]
                struct.pack_into("q", counts, 8 * stream, last)
            number = last
        time.sleep(1 / _BATCHES_PER_S)
    sys.exit(int(life < lives - 1))


main()
