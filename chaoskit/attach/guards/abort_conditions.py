"""Abort conditions: a file that appears, a URL that is not well, or a metric beyond a limit.

-> ``abort_watch.py`` checks them again and again during a run.
"""

from __future__ import annotations

import http.client
import math
import operator
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from chaoskit.attach.guards.metric_text import MetricSelector, parse_selector, read_samples
from chaoskit.errors import BadInput
from chaoskit.typed import convert

_FIELD = "abort"
_FORMS = "file:/PATH, url:https://ADDRESS, or 'metric:https://ADDRESS NAME > 5'"
_METRIC = re.compile(r"(\S+)\s+(.+?)\s*(>=|<=|==|!=|>|<)\s*([^\s<>=!]+)\s*")
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}
_BYTES_MAX = 16 * 2**20


class CheckResult(NamedTuple):
    """The result of a check.

    Attributes:
        is_true: True if the condition holds, so that the run must be aborted.
        text: the reason in words, for a condition that holds or a check without an answer.
        is_answered: False if the check got no answer. The condition may hold or not.
    """

    is_true: bool
    text: str = ""
    is_answered: bool = True


@dataclass(frozen=True, slots=True)
class FileAppears:
    """The condition that a file or a directory exists."""

    path: str

    def __str__(self) -> str:
        return f"file:{self.path}"

    def check(self, limit_s: float) -> CheckResult:
        """Return whether the file exists. A file system that does not answer is no answer."""
        try:
            os.lstat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return CheckResult(False)
        except OSError as error:
            return CheckResult(False, f"{self.path}: {error.strerror}", is_answered=False)
        return CheckResult(True, f"{self.path} exists")


@dataclass(frozen=True, slots=True)
class UrlFails:
    """The condition that a URL answers with another status than 2xx."""

    url: str

    def __str__(self) -> str:
        return f"url:{self.url}"

    def check(self, limit_s: float) -> CheckResult:
        """Return whether the URL answers with another status."""
        try:
            status, _ = _get(self.url, limit_s)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return CheckResult(False, f"{self.url}: {_why(error)}", is_answered=False)
        if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
            return CheckResult(False)
        return CheckResult(True, f"{self.url} answers with status {status}")


@dataclass(frozen=True, slots=True)
class MetricCrosses:
    """The condition that a sample of a metric compares with a limit.

    It holds if one of the selected samples does. An answer without any such sample, or with NaN
    only, is no answer.
    """

    url: str
    selector: MetricSelector = field(hash=False)
    comparison: str
    limit: float
    text: str

    def __str__(self) -> str:
        return self.text

    def check(self, limit_s: float) -> CheckResult:
        """Return whether a sample compares with the limit."""
        try:
            status, body = _get(self.url, limit_s)
            if not HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
                return CheckResult(False, f"{self.url} answers with status {status}", False)
            samples = read_samples(body.decode(errors="replace"))
        except (OSError, http.client.HTTPException, ValueError) as error:
            return CheckResult(False, f"{self.url}: {_why(error)}", is_answered=False)
        values = [sample.value for sample in samples if self.selector.selects(sample)]
        values = [value for value in values if not math.isnan(value)]
        if not values:
            name = self.selector.name
            return CheckResult(False, f"{self.url} has no value of {name}", is_answered=False)
        for value in values:
            if _COMPARISONS[self.comparison](value, self.limit):
                words = f"{self.selector.name} is {value:g}, {self.comparison} {self.limit:g}"
                return CheckResult(True, f"{words} ({self.url})")
        return CheckResult(False)


AbortCondition = FileAppears | UrlFails | MetricCrosses


def parse_conditions(texts: Sequence[str]) -> tuple[AbortCondition, ...]:
    """Return the conditions that the texts of ``abort=[...]`` hold.

    Raises:
        BadInput: naming the text that is malformed.
    """
    listed: Sequence[str] = convert(_FIELD, texts, Sequence[str])
    return tuple(map(parse_condition, listed))


def parse_condition(text: str) -> AbortCondition:
    """Return the condition that a text holds.

    Raises:
        BadInput: if it is malformed.
    """
    kind, colon, rest = text.partition(":")
    if kind == "file" and colon:
        if not Path(rest).is_absolute() or "\0" in rest:
            raise BadInput(_FIELD, text, "name the file with its whole path: file:/PATH")
        return FileAppears(rest)
    if kind == "url" and colon:
        return UrlFails(_checked_url(text, rest))
    if kind == "metric" and colon:
        return _parse_metric(text, rest)
    raise BadInput(_FIELD, text, f"write {_FORMS}")


def _parse_metric(text: str, rest: str) -> MetricCrosses:
    """Return the condition on a metric. Raises BadInput."""
    match = _METRIC.fullmatch(rest)
    if match is None:
        remedy = f"write an address, a name, a comparison ({', '.join(_COMPARISONS)}) and a number"
        raise BadInput(_FIELD, text, f"{remedy}: 'metric:https://ADDRESS NAME > 5'")
    url = _checked_url(text, match[1])
    try:
        selector = parse_selector(match[2])
    except ValueError:
        remedy = "write the name of a metric, with labels if needed: 'NAME{code=\"500\"}'"
        raise BadInput(_FIELD, text, remedy) from None
    try:
        limit = float(match[4])
    except ValueError:
        limit = math.nan
    if math.isnan(limit):
        raise BadInput(_FIELD, text, f"write a number after {match[3]}")
    return MetricCrosses(url, selector, match[3], limit, text)


def _checked_url(text: str, url: str) -> str:
    """Return a URL that can be asked. Raises BadInput."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        is_url = False
    if not is_url or re.search(r"[\s\x00-\x1f\x7f]", url) or not url.isascii():
        raise BadInput(_FIELD, text, "write an address as https://HOST:PORT/PATH")
    if parts.username is not None:
        raise BadInput(_FIELD, text, "leave user and password out: reports show the address")
    return url


def _get(url: str, limit_s: float) -> tuple[int, bytes]:
    """Return status and body of an answer.

    Raises:
        OSError: if there is none.
        http.client.HTTPException: if it is malformed.
    """
    request = urllib.request.Request(url, headers={"Accept": "text/plain, */*"})
    try:
        with urllib.request.urlopen(request, timeout=limit_s) as answer:
            return answer.status, answer.read(_BYTES_MAX)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, b""


def _why(error: BaseException) -> str:
    """Return the reason for a request without an answer, in words."""
    reason = getattr(error, "reason", None) or error
    return " ".join(str(reason).split()) or type(error).__name__
