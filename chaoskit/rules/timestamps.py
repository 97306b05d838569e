"""Timestamps of log lines: ISO 8601, Python's logging and epochs, near the start of the line.

-> ``rules/replay.py``: what happens with a line that has none.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

_SEARCHED_CHARS = 80  # a later time is part of the message
_DATE_TIME = re.compile(
    r"(?<!\d)(?P<date>\d{4}[-/]\d{2}[-/]\d{2})[T ](?P<time>\d{2}:\d{2}:\d{2})(?:[.,](?P<fraction>\d{1,9}))?"
    r"(?P<zone>Z|[+-]\d{2}:?\d{2}(?!\d))?"
)
_EPOCH = re.compile(
    r"[\[(]?(?P<whole>\d{10})(?P<milli>\d{3})?(?:\.(?P<fraction>\d{1,9}))?(?![\d-])"
)


def read_time_s(line: str) -> float | None:
    """Return the timestamp of a line in seconds since 1970; None without one.

    A date is looked for in the first 80 characters, an epoch only at the start. A time without a
    zone counts as UTC.
    """
    date_time = _DATE_TIME.search(line, 0, _SEARCHED_CHARS)
    if date_time is not None:
        return _date_time_s(date_time)
    epoch = _EPOCH.match(line)
    if epoch is None:
        return None
    return float(epoch["whole"]) + float(f"0.{epoch['milli'] or epoch['fraction'] or 0}")


def _date_time_s(date_time: re.Match[str]) -> float | None:
    """Return the timestamp of a date and time; None if there is no such date."""
    zone = (date_time["zone"] or "Z").replace("Z", "+00:00")
    try:
        moment = datetime.fromisoformat(
            f"{date_time['date'].replace('/', '-')}T{date_time['time']}{zone}"
        )
    except ValueError:
        return None  # a 13th month: no time after all
    return moment.timestamp() + float(f"0.{date_time['fraction'] or 0}")


def show_time(time_s: float) -> str:
    """Return a time for people: a date in UTC, or seconds if the clock began with the log."""
    if time_s < 1e8:
        return f"{time_s:.3f} s"
    return (
        datetime.fromtimestamp(time_s, UTC).isoformat(" ", "milliseconds")[:23].removesuffix(".000")
    )
