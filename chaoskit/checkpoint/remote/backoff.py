"""When a request to a remote store is tried again, and which errors are worth it. Pure."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Literal

import msgspec

from chaoskit.errors import BadInput, ChaoskitError

#: What an error says of the store. ``missing``: there is no such object; ``refused``: asking again will not help.
Meaning = Literal["missing", "refused", "passing"]


class RemoteRefused(ChaoskitError):
    """The store answers that this may or can not be done, so it was not tried again. Says what to do about it."""


class RemoteUnavailable(ChaoskitError):
    """The store did not do what it was asked within the deadline, however often it was asked."""


class Backoff(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Full jitter: attempt n waits for a random time between 0 and min(``cap_s``, ``base_s`` * 2^n).

    Many clients that failed at the same moment so come back evenly spread, and do not make the next outage.

    Args:
        deadline_s: after this time since the first attempt, none is begun any more.
    """

    base_s: float = 0.1
    cap_s: float = 10.0
    deadline_s: float = 120.0

    def __post_init__(self) -> None:
        for name in ("base_s", "cap_s", "deadline_s"):
            if not getattr(self, name) >= 0:
                raise BadInput(name, getattr(self, name), "use seconds, 0 or more")

    def delay_s(self, attempt: int, elapsed_s: float, chance: float) -> float | None:
        """How long to wait after ``attempt`` (0 is the first) failed; None: give up. ``chance``: from 0 to 1."""
        left_s = self.deadline_s - elapsed_s
        if left_s <= 0:
            return None
        return min(chance * min(self.cap_s, self.base_s * 2.0 ** min(attempt, 60)), left_s)


_REFUSALS = {
    "NoSuchBucket": "create the bucket, or correct the URL",
    "ExpiredToken": "renew the credentials",
    "RequestTimeTooSkewed": "set the clock of this host",
    "NoCredentialsError": "give credentials in storage_options, the environment or the instance's role",
    "PartialCredentialsError": "give both parts of the credentials",
    "DefaultCredentialsError": "give credentials in storage_options, the environment or the instance's role",
}
_DENIED = "check the credentials, and that they may list, read, write and delete below this URL"
_PASSING_CODES = frozenset(
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
# Of connections, as the clients call them: by name, because nothing is imported that may not be installed. First of all
# looked for: some of them bear a status that no store has sent.
_CONNECTION_TYPES = frozenset(
    {"HTTPClientError", "ConnectionError", "IncompleteReadError", "ResponseParserError"}
    | {"ClientConnectionError", "ClientPayloadError", "FSTimeoutError", "TimeoutError", "EOFError"}
)
_MISSING_CODES = frozenset({"NoSuchKey", "NoSuchUpload", "NoSuchVersion", "404", "InvalidRange"})
_MISSING_STATUSES = frozenset(
    {404, 416}
)  # the second: the object ends before what is asked for begins
_PASSING_ERRNOS = frozenset(
    {errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT, errno.EAGAIN, errno.EBUSY}
)
_STATUS_TIMEOUT, _STATUS_TOO_MANY, _STATUS_SERVER = 408, 429, 500


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__


def _answer(error: BaseException) -> tuple[str, int]:
    """Code and status of the store's answer behind an error; "" and 0 if it did not answer."""
    for link in _chain(error):
        response = getattr(link, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return str(response.get("Error", {}).get("Code", "")), int(status)
        status = getattr(link, "status", None) or getattr(link, "code", None)  # aiohttp's, gcsfs's
        if isinstance(status, int) and status >= 400:
            return "", status
    return "", 0


def meaning(error: BaseException) -> tuple[Meaning, str]:
    """What an error of a file system says, and what to do about it, if it is to be done by somebody."""
    code, status = _answer(error)
    names = {kind.__name__ for link in _chain(error) for kind in type(link).__mro__}
    for name, remedy in _REFUSALS.items():
        if name == code or name in names:
            return "refused", remedy
    if names & _CONNECTION_TYPES:
        return "passing", ""
    if (
        code in _PASSING_CODES
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
