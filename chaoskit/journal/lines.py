"""One line of a journal: a record, its number in the sequence of its writer, and a checksum.

    {"t_ns":81,"event":"commit","step":3,"by":"1f3c09aa","seq":12,"crc":"5d41402a"}

``by`` names the writer, as several processes may append to one file. ``seq`` counts the records of that writer from 0,
so a record that is missing, or comes twice, is known. ``crc`` is the CRC32 of all bytes before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple
from zlib import crc32

import msgspec

from chaoskit.vocabulary import Event

_encoder = msgspec.json.Encoder()
_SEAL = b',"crc":"%08x"}'
_SEAL_BYTES = len(_SEAL % 0)
_HEAD_BYTES = 64  # in which time and event stand


class Record(msgspec.Struct, frozen=True):
    """One journal line. ``fields`` holds what belongs to the event; see :class:`chaoskit.vocabulary.Event`."""

    t_ns: int
    source: str
    event: str
    fields: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The field ``name``, or ``default`` where the record has none."""
        return self.fields.get(name, default)


class Line(NamedTuple):
    """A line that is as it was written."""

    by: str
    seq: int
    record: Record


def encode(event: Event, t_ns: int, fields: dict[str, Any]) -> bytes:
    """Return the begin of a line: all but the writer, the number and the checksum."""
    return _encoder.encode({"t_ns": t_ns, "event": event.value, **fields})[:-1]


def seal(begin: bytes, by: bytes, seq: int) -> bytes:
    """Return the whole line for what :func:`encode` has returned."""
    body = b'%b,"by":"%b","seq":%d' % (begin, by, seq)
    return body + _SEAL % crc32(body) + b"\n"


def is_of(line: bytes, begin: bytes) -> bool:
    """Whether ``line`` holds the record of which ``begin`` is all but writer, number and checksum."""
    return line.startswith(begin + b',"by":"')


def unseal(line: bytes, source: str) -> Line | None:
    """Return what a line says; None if its bytes are not those that were written.

    Args:
        line: without its line break.
        source: the journal that it stands in.
    """
    if line[-_SEAL_BYTES:] != _SEAL % crc32(line[:-_SEAL_BYTES]):
        return None
    try:
        fields = msgspec.json.decode(line)
        del fields["crc"]
        by, seq, t_ns, event = (
            fields.pop("by"),
            fields.pop("seq"),
            fields.pop("t_ns"),
            fields.pop("event"),
        )
    except (
        msgspec.MsgspecError,
        ValueError,
        TypeError,
        KeyError,
        RecursionError,
    ):  # written by another program
        return None
    return Line(by, seq, Record(t_ns, source, event, fields))


def marks(events: Iterable[str]) -> tuple[bytes, ...]:
    """Return the texts by which lines of these events are known before they are decoded."""
    return tuple(f'"event":"{event}"'.encode() for event in events)


def has_mark(line: bytes, wanted: tuple[bytes, ...]) -> bool:
    """Whether ``line`` is of one of the events of :func:`marks`."""
    head = line[:_HEAD_BYTES]
    return any(mark in head for mark in wanted)
