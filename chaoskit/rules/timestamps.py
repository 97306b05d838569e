"""When a line was logged: ISO 8601, Python's logging and epochs, at or near its start."""

from __future__ import annotations

import re
from datetime import UTC, datetime

_LOOKED_AT = 80  # characters: a time further behind is part of the message
_DATE_TIME = re.compile(
    r"(?<!\d)(?P<date>\d{4}[-/]\d{2}[-/]\d{2})[T ](?P<time>\d{2}:\d{2}:\d{2})(?:[.,](?P<fraction>\d{1,9}))?"
    r"(?P<zone>Z|[+-]\d{2}:?\d{2}(?!\d))?"
)
_EPOCH = re.compile(
    r"[\[(]?(?P<whole>\d{10})(?P<milli>\d{3})?(?:\.(?P<fraction>\d{1,9}))?(?![\d-])"
)


def read_time_s(line: str) -> float | None:
    """Seconds since 1970 by a line's own timestamp; None without one. A time without a zone counts as UTC."""
    found = _DATE_TIME.search(line, 0, _LOOKED_AT)
    if found is not None:
        return _of_date(found)
    epoch = _EPOCH.match(line)
    if epoch is None:
        return None
    return float(epoch["whole"]) + float(f"0.{epoch['milli'] or epoch['fraction'] or 0}")


def _of_date(found: re.Match[str]) -> float | None:
    zone = (found["zone"] or "Z").replace("Z", "+00:00")
    try:
        moment = datetime.fromisoformat(f"{found['date'].replace('/', '-')}T{found['time']}{zone}")
    except ValueError:
        return None  # a 13th month: no time after all
    return moment.timestamp() + float(f"0.{found['fraction'] or 0}")


def show_time(time_s: float) -> str:
    """A time for people: a date in UTC, or seconds, if the clock began with the log."""
    if time_s < 1e8:
        return f"{time_s:.3f} s"
    return (
        datetime.fromtimestamp(time_s, UTC).isoformat(" ", "milliseconds")[:23].removesuffix(".000")
    )
