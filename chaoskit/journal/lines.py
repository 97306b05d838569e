"""The format of a journal line: a record, its number in the sequence of its writer, and a checksum.

    {"t_ns":81,"event":"commit","step":3,"by":"1f3c09aa","seq":12,"crc":"5d41402a"}

``by`` names the writer, since several processes may append to one file. ``seq`` counts the records
of that writer from 0, which reveals missing and repeated records. ``crc`` is the CRC32 of all bytes
before it.

-> vocabulary.py (Event): the fields of each event. journal/reader.py: what a damaged line costs.
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
_HEAD_BYTES = 64  # bytes of a line that contain time and event


class Record(msgspec.Struct, frozen=True):
    """The content of a journal line; ``record["step"]`` reads a field of its event.

    A field that the record does not have raises KeyError; see :meth:`get`.

    Attributes:
        t_ns: the time of the event in nanoseconds, on the run's clock.
        source: the name of the journal file, without suffix.
        event: the name of the event, a value of :class:`chaoskit.vocabulary.Event`.
        fields: the fields of the event, by name; see :class:`chaoskit.vocabulary.Event`.
    """

    t_ns: int
    source: str
    event: str
    fields: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the field ``name``, or ``default`` if the record has no such field."""
        return self.fields.get(name, default)


class JournalLine(NamedTuple):
    """The content of an undamaged line.

    Attributes:
        by: the name of the writer.
        seq: the number of the record among those of its writer.
        record: the record.
    """

    by: str
    seq: int
    record: Record


def encode(event: Event, t_ns: int, fields: dict[str, Any]) -> bytes:
    """Return the first part of a line, as JSON without the closing brace.

    It lacks the writer, the number and the checksum, which :func:`seal` adds.
    """
    return _encoder.encode({"t_ns": t_ns, "event": event.value, **fields})[:-1]


def seal(first_part: bytes, writer_name: bytes, number: int) -> bytes:
    """Return the whole line, with its line break, for a first part from :func:`encode`."""
    body = b'%b,"by":"%b","seq":%d' % (first_part, writer_name, number)
    return body + _SEAL % crc32(body) + b"\n"


def holds_record(line: bytes, first_part: bytes) -> bool:
    """Return whether ``line`` holds the record with this first part, from any writer."""
    return line.startswith(first_part + b',"by":"')


def unseal(line: bytes, source: str) -> JournalLine | None:
    """Return the content of a line; None if its bytes are not the written ones, or not of a record.

    Args:
        line: the line without its line break.
        source: the name of the journal.
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
    ):  # the line was written by another program
        return None
    return JournalLine(by, seq, Record(t_ns, source, event, fields))


def marks(events: Iterable[str]) -> tuple[bytes, ...]:
    """Return for each event a text that its lines contain; :func:`has_mark` looks for them."""
    return tuple(f'"event":"{event}"'.encode() for event in events)


def has_mark(line: bytes, event_marks: tuple[bytes, ...]) -> bool:
    """Return whether ``line`` belongs to one of the events of :func:`marks`.

    The line is not decoded, and may be damaged. Without marks it is False.
    """
    head = line[:_HEAD_BYTES]
    return any(mark in head for mark in event_marks)
