"""Plan of a night, ``nightly.yaml``, and its validation.

-> nightly/run.py executes it. nightly/begin.py and nightly/watch.py act on the guard.
-> sla/promises.py: the file of SLAs that it names.
"""

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
    """The hours in a time zone, on some days, at which a night may begin.

    They may pass midnight; the day on which they began counts then.

    Attributes:
        begin: the time of day at which the window opens, as ``HH:MM``.
        end: the time of day at which it closes.
        zone: the time zone, as ``Europe/Berlin``.
        days: the days on which it opens, as ``mon`` or ``Monday``.
    """

    begin: str
    end: str
    zone: str = "UTC"
    days: tuple[str, ...] = _DAYS

    def is_open(self, now: datetime) -> bool:
        """Return True if the window is open at a moment, which must have a time zone."""
        local = now.astimezone(ZoneInfo(self.zone))
        begin, end, at = _clock(self.begin), _clock(self.end), local.time()
        inside = begin <= at < end if begin < end else at >= begin or at < end
        day = local.weekday() - (
            1 if begin >= end and at < end else 0
        )  # the evening on which the window began counts
        return inside and _DAYS[day] in [allowed.lower()[:3] for allowed in self.days]

    def __str__(self) -> str:
        return f"{self.begin} to {self.end} {self.zone}, {', '.join(self.days)}"


class Guard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The conditions for a night to begin and to go on.

    Attributes:
        window: when it may begin; None for any time.
        require: a command that must end with 0 before the night begins; empty for none.
        abort_if: a command that is run every ``every``; the night ends if its status is 0 or it
            cannot be run. Empty for none.
    """

    window: NightWindow | None = None
    require: list[str] = []
    abort_if: list[str] = []
    every: str = "10s"


class ComparisonPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tests that are compared with an earlier version in turns.

    See :mod:`chaoskit.versions`.

    Attributes:
        tests: arguments of pytest, each compared by itself.
        against: the earlier version; the default is the commit of the last good night.
        numbers: the compared numbers; empty for those of ``chaoskit compare``.
        tolerance: the growth that counts as worse, as a fraction above 0 and below 10.
        budget: the time limit for each of ``tests``, such as ``30m``.
        prepare: a shell command that is run in each checkout first; "" for none.
    """

    tests: list[str]
    against: str = LAST_GOOD
    numbers: list[str] = []
    tolerance: float = 0.1
    budget: str = "30m"
    prepare: str = ""


class Webhook(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The address for the result.

    Attributes:
        url_from: ``env:NAME`` or ``file:PATH``, as a URL may be a secret.
        when: ``always``; ``change``, if the exit code differs from that of the night before; or
            ``bad``, if the exit code is not 0.
    """

    url_from: str
    when: str = "always"


class NightPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan as it is written in its file.

    Attributes:
        directory: the directory in which each night gets a folder.
        history: the store for its records; "" for none.
        tests: arguments of pytest.
        repeats: the number of runs of each test, from 1 to 1000.
        substrate: the substrate of all runs; "" for that of the tests.
        control: tests without a fault, which are run first.
        compare: the tests that are compared with an earlier version; None for none.
        sla: the file of SLAs, relative to the plan; "" for none.
        budget: the time after which no further test is begun, such as ``8h``; "" for no limit.
        keep: the number of nights that keep their folders; 0 keeps all.
        webhook: the address for the result; None for none.
    """

    version: int
    name: str
    tests: list[str]
    directory: str = "chaoskit-nights"
    history: str = ""
    repeats: int = 5
    substrate: str = ""
    control: list[str] = []
    compare: ComparisonPlan | None = None
    sla: str = ""
    budget: str = ""
    keep: int = 0
    guard: Guard = Guard()
    webhook: Webhook | None = None

    @property
    def budget_s(self) -> float | None:
        """The budget in seconds; None for no limit."""
        return seconds_of(self.budget, "budget") if self.budget else None


def load(path: Path) -> NightPlan:
    """Return the plan in a file.

    Raises:
        BadInput: if the file or its SLAs cannot be read, or a field is invalid. The error names the
            field.
    """
    try:
        plan = msgspec.convert(read_document("plan", path), NightPlan)
    except msgspec.ValidationError as error:
        problem = " ".join(str(error).split())
        raise BadInput("plan", str(path), f"correct the file: {problem}") from None
    try:
        _check(plan, path.resolve().parent)
    except BadInput as error:
        raise BadInput(error.field, error.value, f"in {path}, {error.remedy}") from None
    return plan


def _check(plan: NightPlan, plan_directory: Path) -> None:
    """Raise BadInput if a field is invalid. Relative paths are relative to ``plan_directory``."""
    if plan.version != VERSION:
        raise BadInput("version", plan.version, f"use version {VERSION}, which this chaoskit reads")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", plan.name):
        raise BadInput("name", plan.name, "use letters, digits, dots and dashes")
    if not plan.tests:
        raise BadInput(
            "tests", [], "name tests, as for pytest: a night without tests has no result"
        )
    if not 1 <= plan.repeats <= 1000:
        raise BadInput("repeats", plan.repeats, "use 1 to 1000")
    if plan.keep < 0:
        raise BadInput(
            "keep", plan.keep, "use the number of nights whose folders stay, or 0 for all"
        )
    if plan.budget:
        seconds_of(plan.budget, "budget")
    if plan.sla:
        load_slas(plan_directory / plan.sla)
    if plan.compare is not None:
        _check_comparing(plan, plan.compare)
    _check_guard(plan.guard)
    if plan.webhook is not None:
        _check_webhook(plan.webhook)


def _check_comparing(plan: NightPlan, compare: ComparisonPlan) -> None:
    """Raise BadInput if the comparison is invalid."""
    if not compare.tests:
        raise BadInput("compare.tests", [], "name tests, or leave compare out")
    if not 0 < compare.tolerance < 10:
        raise BadInput("compare.tolerance", compare.tolerance, "use a share above 0, such as 0.1")
    if compare.against == LAST_GOOD and not plan.history:
        raise BadInput(
            "compare.against",
            compare.against,
            "set history: the last good night is taken from it",
        )
    seconds_of(compare.budget, "compare.budget")
    require_numbers(compare.numbers, "compare.numbers")


def _check_guard(guard: Guard) -> None:
    """Raise BadInput if the guard is invalid."""
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
    """Raise BadInput if the webhook is invalid."""
    kind, mark, name = webhook.url_from.partition(":")
    if kind not in ("env", "file") or not mark or not name:
        raise BadInput(
            "webhook.url_from",
            webhook.url_from,
            "write env:NAME or file:PATH instead of the URL, which may be a secret",
        )
    if webhook.when not in ("always", "change", "bad"):
        raise BadInput("webhook.when", webhook.when, "use always, change or bad")


def _clock(text: str) -> time:
    """Return the time of day that a text such as ``01:30`` states."""
    hour, _, minute = text.partition(":")
    return time(int(hour), int(minute))
