"""Exceptions of the job's code as one line that names the exception, the file and the line."""

from __future__ import annotations

import errno
import traceback
from pathlib import Path
from typing import NamedTuple

from chaoskit.errors import BadInput, ChaoskitError
from chaoskit.process.linux import file_size_limit
from chaoskit.runtime.worker.sources import is_the_users

#: A report of a failure must fit into one message of the fork server.
_LENGTH_MAX = 2000
_TRACEBACK = "Traceback (most recent call last)"


class Failure(NamedTuple):
    """An exception as it is reported to the coordinator.

    Attributes:
        error: the exception in one line, with file and line where it came from the job's code.
        refused: field, value and remedy of a :class:`~chaoskit.errors.BadInput`; None for other exceptions.
    """

    error: str
    refused: tuple[str, str, str] | None


def failure_of(error: BaseException, job_path: str = "") -> Failure:
    """Return what is reported of an exception.

    Args:
        job_path: the job's file, which counts as the user's code wherever it lies.
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
    if not isinstance(error, ChaoskitError) and (place := _place(error, job_path)):
        line = f"{line} ({place})"
    return Failure(line, refused)


def format_failure(error: BaseException) -> str:
    """Return the traceback of an exception, as text that UTF-8 can say."""
    return _printable("".join(traceback.format_exception(error)))


def _message(error: BaseException) -> str:
    """The message in one line. A multi-line one that quotes a traceback ends with the exception that it quotes."""
    try:
        text = error.msg if isinstance(error, SyntaxError) else str(error)
    except Exception as broken:  # noqa: BLE001 - __str__ is the user's code, too
        text = f"its message cannot be read: {type(broken).__name__}"
    if getattr(error, "errno", None) == errno.EFBIG:
        text = f"{text}; {file_size_limit()}"
    lines = [line.strip() for line in _printable(text).splitlines() if line.strip()]
    if not lines:
        return ""
    message = f"{lines[0].rstrip('.:')}: {lines[-1]}" if _TRACEBACK in text else " ".join(lines)
    return message if len(message) <= _LENGTH_MAX else f"{message[:_LENGTH_MAX]}..."


def _place(error: BaseException, job_path: str) -> str:
    """File and line of the job's code in which an exception was raised; "" if it passed through none."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{error.filename}:{error.lineno}"
    places = [
        (frame.f_code.co_filename, line_number)
        for frame, line_number in traceback.walk_tb(error.__traceback__)
    ]
    for path, line_number in reversed(places):
        if path == job_path or (Path(path).is_absolute() and is_the_users(Path(path))):
            return _printable(f"{path}:{line_number}")
    return ""


def _printable(text: str) -> str:
    """Text without what UTF-8 cannot say, such as file names that are no text."""
    return text.encode("utf-8", "backslashreplace").decode()
