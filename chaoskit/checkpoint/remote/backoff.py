"""Retries of requests to a remote store: their delays, and the errors that are worth a retry. Pure.

-> ``remote/store.py``: waits and retries. ``remote/uploader.py``: goes on after the deadline.
-> ``daemon/archive.py``: what a job does while the store does not answer.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Literal

import msgspec

from chaoskit.errors import BadInput, ChaoskitError

#: The meaning of an error. ``missing``: there is no such object; ``refused``: another attempt will
#: not help; ``passing``: another attempt may succeed.
Meaning = Literal["missing", "refused", "passing"]


class RemoteRefused(ChaoskitError):
    """The store refused a request, so it was not tried again. The message names a remedy."""


class RemoteUnavailable(ChaoskitError):
    """A request did not succeed within the deadline, however often it was tried."""


class Backoff(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Delays with full jitter between attempts of a request.

    After attempt n, from 0 on, the delay is random between 0 and min(``cap_s``, ``base_s`` * 2^n).
    Clients that failed at the same moment thus come back evenly spread, instead of causing the next
    outage.

    Args:
        base_s: bound of the first delay.
        cap_s: largest bound of a delay.
        deadline_s: time since the first attempt after which no other one is begun.

    Raises:
        BadInput: if an argument is negative or not a number.
    """

    base_s: float = 0.1
    cap_s: float = 10.0
    deadline_s: float = 120.0

    def __post_init__(self) -> None:
        for name in ("base_s", "cap_s", "deadline_s"):
            if not getattr(self, name) >= 0:
                raise BadInput(name, getattr(self, name), "use seconds, 0 or more")

    def delay_s(self, attempt: int, elapsed_s: float, random_fraction: float) -> float | None:
        """Return the delay in seconds after a failed attempt, or None to give up.

        A delay ends at the deadline at the latest, so that there is one more attempt then.

        Args:
            attempt: number of the attempt, from 0 on.
            elapsed_s: time since the first attempt.
            random_fraction: a random number from 0 to 1.
        """
        left_s = self.deadline_s - elapsed_s
        if left_s <= 0:
            return None
        return min(random_fraction * min(self.cap_s, self.base_s * 2.0 ** min(attempt, 60)), left_s)


_REFUSALS = {
    "NoSuchBucket": "create the bucket, or correct the URL",
    "ExpiredToken": "renew the credentials",
    "RequestTimeTooSkewed": "set the clock of this host",
    "NoCredentialsError": "give credentials in storage_options, the environment or the instance's role",
    "PartialCredentialsError": "give both parts of the credentials",
    "DefaultCredentialsError": "give credentials in storage_options, the environment or the instance's role",
}
_DENIED = "check the credentials, and that they may list, read, write and delete below this URL"
_TRANSIENT_CODES = frozenset(
    {
        "SlowDown",
        "RequestTimeout",
        "InternalError",
        "ServiceUnavailable",
        "Throttling",
        "ThrottlingException",
    }
    | {
        "IncompleteBody",
        "BadDigest",
        "XAmzContentSHA256Mismatch",
        "OperationAborted",
        "TooManyRequests",
    }
)
# Connection errors of the clients, by name, because the clients may not be installed. They are
# tested first, because some of them bear a status that no store has sent.
_CONNECTION_TYPES = frozenset(
    {"HTTPClientError", "ConnectionError", "IncompleteReadError", "ResponseParserError"}
    | {"ClientConnectionError", "ClientPayloadError", "FSTimeoutError", "TimeoutError", "EOFError"}
)
_MISSING_CODES = frozenset({"NoSuchKey", "NoSuchUpload", "NoSuchVersion", "404", "InvalidRange"})
# 416: the object ends before the requested range begins
_MISSING_STATUSES = frozenset({404, 416})
_PASSING_ERRNOS = frozenset(
    {errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT, errno.EAGAIN, errno.EBUSY}
)
_STATUS_TIMEOUT, _STATUS_TOO_MANY, _STATUS_SERVER = 408, 429, 500


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _code_and_status(error: BaseException) -> tuple[str, int]:
    """Return code and status of the store's answer; "" and 0 if it did not answer."""
    for cause in _chain(error):
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return str(response.get("Error", {}).get("Code", "")), int(status)
        status = getattr(cause, "status", None) or getattr(
            cause, "code", None
        )  # aiohttp's, gcsfs's
        if isinstance(status, int) and status >= 400:
            return "", status
    return "", 0


def meaning(error: BaseException) -> tuple[Meaning, str]:
    """Return the meaning of a file system's error, and a remedy; "" if it is not refused.

    An error of an unknown kind counts as refused.
    """
    code, status = _code_and_status(error)
    type_names = {kind.__name__ for cause in _chain(error) for kind in type(cause).__mro__}
    for name, remedy in _REFUSALS.items():
        if name == code or name in type_names:
            return "refused", remedy
    if type_names & _CONNECTION_TYPES:
        return "passing", ""
    if (
        code in _TRANSIENT_CODES
        or status in {_STATUS_TIMEOUT, _STATUS_TOO_MANY}
        or status >= _STATUS_SERVER
    ):
        return "passing", ""
    if (
        code in _MISSING_CODES
        or status in _MISSING_STATUSES
        or isinstance(error, FileNotFoundError)
    ):
        return "missing", ""
    if status or isinstance(error, PermissionError):
        return "refused", _DENIED if status in {0, 401, 403} else "see the store's answer"
    if isinstance(error, OSError) and error.errno in _PASSING_ERRNOS:
        return "passing", ""
    return "refused", "see the error"
