"""The plan of a night, ``nightly.yaml``, and what is refused in it."""

from __future__ import annotations

import re
from datetime import datetime, time
from pathlib import Path
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from chaoskit.errors import BadInput
from chaoskit.settings_file import read_document
from chaoskit.sla.promises import load as load_slas
from chaoskit.versions.budget import seconds_of
from chaoskit.versions.looks import require_numbers
from chaoskit.versions.trees import LAST_GOOD

VERSION = 1
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)")


class NightWindow(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"begin": "from", "end": "to"}
):
    """When a night may begin: hours in a time zone, on some days. It may pass midnight."""

    begin: str
    end: str
    zone: str = "UTC"
    days: tuple[str, ...] = _DAYS

    def is_open(self, now: datetime) -> bool:
        """Whether it is open at a moment, which has a time zone."""
        local = now.astimezone(ZoneInfo(self.zone))
        begin, end, at = _clock(self.begin), _clock(self.end), local.time()
        inside = begin <= at < end if begin < end else at >= begin or at < end
        day = local.weekday() - (
            1 if begin >= end and at < end else 0
        )  # of the evening on which it began
        return inside and _DAYS[day] in [one.lower()[:3] for one in self.days]

    def __str__(self) -> str:
        return f"{self.begin} to {self.end} {self.zone}, {', '.join(self.days)}"


class Guard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What must hold before a night begins, and while it goes on.

    Attributes:
        window: when it may begin; at any time without one. require: a command that must end with 0, before anything is
            started. abort_if: one that is asked every ``every``: when it ends with 0, the night is over.
    """

    window: NightWindow | None = None
    require: list[str] = []
    abort_if: list[str] = []
    every: str = "10s"


class Comparing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is compared with an earlier version, in turns. See :mod:`chaoskit.versions`."""

    tests: list[str]
    against: str = LAST_GOOD
    numbers: list[str] = []
    tolerance: float = 0.1
    budget: str = "30m"
    prepare: str = ""


class Webhook(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the result is posted. ``url_from``: ``env:NAME`` or ``file:PATH``, as it may be a secret."""

    url_from: str
    when: str = "always"


class NightPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A night as it is written.

    Attributes:
        directory: for what it leaves, below which each night has a folder. history: a store for its records.
        tests: arguments of pytest. repeats: of each test. control: tests without a fault, which are run first.
        budget: after which no test is begun. keep: folders of so many nights; 0 keeps all.
    """

    version: int
    name: str
    tests: list[str]
    directory: str = "chaoskit-nights"
    history: str = ""
    repeats: int = 5
    substrate: str = ""
    control: list[str] = []
    compare: Comparing | None = None
    sla: str = ""
    budget: str = ""
    keep: int = 0
    guard: Guard = Guard()
    webhook: Webhook | None = None

    @property
    def budget_s(self) -> float | None:
        """Seconds; None for no limit."""
        return seconds_of(self.budget, "budget") if self.budget else None


def load(path: Path) -> NightPlan:
    """Read a plan.

    Raises:
        BadInput: which names the field, if anything in it cannot be carried out.
    """
    try:
        plan = msgspec.convert(read_document("plan", path), NightPlan)
    except msgspec.ValidationError as error:
        raise BadInput("plan", str(path), f"mend it: {' '.join(str(error).split())}") from None
    try:
        _check(plan, path.resolve().parent)
    except BadInput as error:
        raise BadInput(error.field, error.value, f"in {path}, {error.remedy}") from None
    return plan


def _check(plan: NightPlan, beside: Path) -> None:
    if plan.version != VERSION:
        raise BadInput("version", plan.version, f"use version {VERSION}, which this chaoskit reads")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", plan.name):
        raise BadInput("name", plan.name, "use letters, digits, dots and dashes")
    if not plan.tests:
        raise BadInput("tests", [], "name tests, as for pytest: a night of nothing shows nothing")
    if not 1 <= plan.repeats <= 1000:
        raise BadInput("repeats", plan.repeats, "use 1 to 1000")
    if plan.keep < 0:
        raise BadInput(
            "keep", plan.keep, "use the number of nights whose folders stay, or 0 for all"
        )
    if plan.budget:
        seconds_of(plan.budget, "budget")
    if plan.sla:
        load_slas(beside / plan.sla)
    if plan.compare is not None:
        _check_comparing(plan, plan.compare)
    _check_guard(plan.guard)
    if plan.webhook is not None:
        _check_webhook(plan.webhook)


def _check_comparing(plan: NightPlan, compare: Comparing) -> None:
    if not compare.tests:
        raise BadInput("compare.tests", [], "name tests, or leave compare out")
    if not 0 < compare.tolerance < 10:
        raise BadInput("compare.tolerance", compare.tolerance, "use a share above 0, such as 0.1")
    if compare.against == LAST_GOOD and not plan.history:
        raise BadInput(
            "compare.against",
            compare.against,
            "give a history, in which the last good night is found",
        )
    seconds_of(compare.budget, "compare.budget")
    require_numbers(compare.numbers, "compare.numbers")


def _check_guard(guard: Guard) -> None:
    seconds_of(guard.every, "guard.every")
    if guard.window is None:
        return
    for name, text in (("from", guard.window.begin), ("to", guard.window.end)):
        if not _CLOCK.fullmatch(text):
            raise BadInput(f"guard.window.{name}", text, 'write it as "01:30", with quotes')
    try:
        ZoneInfo(guard.window.zone)
    except (ZoneInfoNotFoundError, ValueError):
        raise BadInput(
            "guard.window.zone", guard.window.zone, "name a time zone, such as Europe/Berlin"
        ) from None
    for day in guard.window.days:
        if day.lower()[:3] not in _DAYS:
            raise BadInput("guard.window.days", day, f"use {', '.join(_DAYS)}")


def _check_webhook(webhook: Webhook) -> None:
    kind, mark, name = webhook.url_from.partition(":")
    if kind not in ("env", "file") or not mark or not name:
        raise BadInput(
            "webhook.url_from",
            webhook.url_from,
            "write env:NAME or file:PATH: its URL may be a secret",
        )
    if webhook.when not in ("always", "change", "bad"):
        raise BadInput("webhook.when", webhook.when, "use always, change or bad")


def _clock(text: str) -> time:
    hour, _, minute = text.partition(":")
    return time(int(hour), int(minute))
