"""Reports of exceptions of the job's code in one line, with exception, file and line.

-> worker/process.py (``_report_failure``): which exceptions end the job.
coordinator/handlers/on_end.py acts on the report.
"""

from __future__ import annotations

import errno
import traceback
from pathlib import Path
from typing import NamedTuple

from chaoskit.errors import BadInput, ChaoskitError
from chaoskit.process.linux import file_size_limit
from chaoskit.runtime.worker.sources import is_user_file

#: A report of a failure must fit into one message of the fork server.
_LENGTH_MAX = 2000
_TRACEBACK = "Traceback (most recent call last)"


class Failure(NamedTuple):
    """An exception as it is reported to the coordinator.

    Attributes:
        error: the exception in one line, with file and line where it came from the job's code.
        refused: field, value and remedy of a :class:`~chaoskit.errors.BadInput`; None for other
            exceptions.
    """

    error: str
    refused: tuple[str, str, str] | None


def failure_of(error: BaseException, job_path: str = "") -> Failure:
    """Return the report of an exception.

    Args:
        job_path: the job's file, which counts as the user's code at any path.
    """
    refused = (
        (error.field, _printable(repr(error.value)), error.remedy)
        if isinstance(error, BadInput)
        else None
    )
    line = (
        f"{type(error).__name__}: {message}"
        if (message := _message(error))
        else type(error).__name__
    )
    if not isinstance(error, ChaoskitError) and (location := _location(error, job_path)):
        line = f"{line} ({location})"
    return Failure(line, refused)


def format_failure(error: BaseException) -> str:
    """Return the traceback of an exception, as text that can be encoded in UTF-8."""
    return _printable("".join(traceback.format_exception(error)))


def _message(error: BaseException) -> str:
    """Return the message of an exception in one line.

    A message of several lines that quotes a traceback is cut down to its first line and the quoted
    exception.
    """
    try:
        text = error.msg if isinstance(error, SyntaxError) else str(error)
    except Exception as str_error:  # noqa: BLE001 - __str__ may be the user's code
        text = f"its message cannot be read: {type(str_error).__name__}"
    if getattr(error, "errno", None) == errno.EFBIG:
        text = f"{text}; {file_size_limit()}"
    lines = [line.strip() for line in _printable(text).splitlines() if line.strip()]
    if not lines:
        return ""
    message = f"{lines[0].rstrip('.:')}: {lines[-1]}" if _TRACEBACK in text else " ".join(lines)
    return message if len(message) <= _LENGTH_MAX else f"{message[:_LENGTH_MAX]}..."


def _location(error: BaseException, job_path: str) -> str:
    """Return the file and line of the job's code in which an exception was raised.

    The result is "" if the exception passed through none of it.
    """
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{error.filename}:{error.lineno}"
    frames = [
        (frame.f_code.co_filename, line_number)
        for frame, line_number in traceback.walk_tb(error.__traceback__)
    ]
    for path, line_number in reversed(frames):
        if path == job_path or (Path(path).is_absolute() and is_user_file(Path(path))):
            return _printable(f"{path}:{line_number}")
    return ""


def _printable(text: str) -> str:
    """Return ``text`` with characters escaped that UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode()
