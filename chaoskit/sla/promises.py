"""A file of SLAs: each names the runs that it is about, and promises something of them.

version: 1
defaults: {confidence: 95 %, window: 30 nights}
slas:
  - name: a lost rank costs a step
    where: {fault: [Kill, Exit], nodes: ">=4", stack: chaoskit}
    always: [lost_steps == 0, losses == twin, recovered]
    objectives: [recovery.p95 <= 2 s, goodput.p50 >= 97 %]
    regression: {recovery: 10 %}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from chaoskit.errors import BadInput, name_remedy
from chaoskit.faults import CATALOGUE
from chaoskit.history.record import KNOWN, RunRecord, SeriesRecord
from chaoskit.settings_file import read_document
from chaoskit.sla.exact import runs_needed
from chaoskit.sla.language import DIVISORS, Condition, parse

VERSION = 1
#: An objective over nights needs as many of them at least: runs of one night have that night in common.
NIGHTS_LEAST = 5
_WINDOW = re.compile(r"(\d{1,6}) (night|run)s?", re.ASCII)
_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,6})?) ?%", re.ASCII)
_COUNT = re.compile(r"(<=|>=|==)? ?(\d{1,6})", re.ASCII)
_TOLERANCE_MOST = 10.0
_OF_A_MARKER = ("window", "confidence", "at_least")


class SlaWindow(msgspec.Struct, frozen=True):
    """The latest nights, or the latest runs. A night is a day of UTC on which a session began."""

    count: int
    unit: Literal["night", "run"]

    def __str__(self) -> str:
        return f"{self.count} {self.unit}{'s' if self.count > 1 else ''}"


class Where(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which runs an SLA is about. What is left out may be anything.

    ``fault``: kinds, one of which the run must have; an empty list for runs without faults. ``nodes`` and ``spares``:
    such as ``>=4``. ``test``: a part of the test's name.
    """

    fault: list[str] | str | None = None
    nodes: int | str | None = None
    spares: int | str | None = None
    job: str | None = None
    stack: str | None = None
    substrate: str | None = None
    machine: str | None = None
    test: str | None = None

    def selects(self, run: RunRecord, shared: SeriesRecord | None) -> bool:
        """Whether a run is meant."""
        plan = shared.plan if shared is not None else {}
        settings = plan.get("settings", {})
        named = str(plan.get("job") or " ".join(plan.get("command") or []))
        texts = ((self.job, named), (self.machine, run.machine), (self.test, run.title))
        return (
            self._is_fault(run.faults)
            and all(
                _counts(wanted, settings.get(name))
                for name, wanted in (("nodes", self.nodes), ("spares", self.spares))
            )
            and self.stack in (None, run.stack)
            and (self.substrate is None or run.machine.endswith(f", {self.substrate}"))
            and all(wanted is None or wanted in text for wanted, text in texts)
        )

    def _is_fault(self, kinds: Sequence[str]) -> bool:
        if self.fault is None:
            return True
        wanted = [self.fault] if isinstance(self.fault, str) else self.fault
        return not kinds if not wanted else any(kind in wanted for kind in kinds)


def _counts(wanted: int | str | None, have: object) -> bool:
    if wanted is None:
        return True
    relation, number = _COUNT.fullmatch(str(wanted)).groups()  # type: ignore[union-attr]  # it was checked
    if not isinstance(have, int):
        return False
    return (
        have <= int(number)
        if relation == "<="
        else have >= int(number)
        if relation == ">="
        else have == int(number)
    )


class Sla(msgspec.Struct, frozen=True, kw_only=True):
    """One promise.

    Attributes:
        always: what each run in the window is within. objectives: what a share of them is within.
        regression: by number, how much longer it may take than before, such as 0.1.
    """

    name: str
    where: Where
    always: tuple[Condition, ...] = ()
    objectives: tuple[Condition, ...] = ()
    regression: Mapping[str, float] = {}
    confidence: float = 0.95
    window: SlaWindow = SlaWindow(30, "night")
    at_least: int = 1

    def needs(self, objective: Condition, misses: int = 0) -> int:
        """How many runs an objective takes if no more than these miss it."""
        return max(self.at_least, runs_needed(objective.share, misses, self.confidence))


class _Written(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    where: Where = Where()
    always: list[str] = []
    objectives: list[str] = []
    regression: dict[str, str] = {}
    confidence: float | str | None = None
    window: str | None = None
    at_least: int | None = None


class _Defaults(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    confidence: float | str = 0.95
    window: str = "30 nights"
    at_least: int = 1


class _File(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    version: int
    slas: list[_Written]
    defaults: _Defaults = msgspec.field(default_factory=_Defaults)


def load(path: Path) -> list[Sla]:
    """The SLAs in a file, in YAML or JSON.

    Raises:
        BadInput: naming file, place and remedy.
    """
    try:
        found = msgspec.convert(read_document("file", path), _File)
    except msgspec.ValidationError as error:
        raise BadInput("file", str(path), f"mend it: {' '.join(str(error).split())}") from None
    if found.version != VERSION:
        raise BadInput(
            "version", found.version, f"in {path}, use version {VERSION}, which this chaoskit reads"
        )
    if not found.slas:
        raise BadInput("slas", [], f"in {path}, write one at least: it promises nothing")
    names = [one.name for one in found.slas]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadInput("name", twice, f"in {path}, name each one otherwise")
    try:
        return [_checked(one, found.defaults) for one in found.slas]
    except BadInput as error:
        raise BadInput(error.field, error.value, f"in {path}, {error.remedy}") from None


def of_marker(name: str, lines: Sequence[object], options: Mapping[str, Any]) -> Sla:
    """The SLA that the marker of a test states.

    Raises:
        BadInput: if it states none.
    """
    for line in lines:
        if not isinstance(line, str):
            raise BadInput("sla", line, "write lines as text, such as 'lost_steps == 0'")
    for option, value in options.items():
        if option not in _OF_A_MARKER:
            raise BadInput(
                f"sla.{option}",
                value,
                f"use {', '.join(_OF_A_MARKER)}; for others write a file of SLAs",
            )
    return sla_of_lines(name, [str(line) for line in lines], **options)


def sla_of_lines(name: str, lines: Sequence[str], **options: Any) -> Sla:
    """The SLA that lines state. Raises BadInput if they state none."""
    try:
        written = msgspec.convert({"name": name, **options}, _Written)
    except msgspec.ValidationError as error:
        raise BadInput("sla", name, f"mend its marker: {error}") from None
    parsed = [(line, parse(line, "sla")) for line in lines]
    written.always = [line for line, condition in parsed if not condition.is_objective]
    written.objectives = [line for line, condition in parsed if condition.is_objective]
    return _checked(written, _Defaults())


def _checked(written: _Written, defaults: _Defaults) -> Sla:
    place = f"slas[{written.name}]"
    always = tuple(parse(line, f"{place}.always") for line in written.always)
    objectives = tuple(parse(line, f"{place}.objectives") for line in written.objectives)
    for one in always:
        if one.is_objective:
            raise BadInput(
                f"{place}.always", one.text, "leave its statistic out, or write it below objectives"
            )
    for one in objectives:
        if not one.is_objective:
            remedy = (
                f"write it below always, or give {one.number} a statistic such as {one.number}.p95"
            )
            raise BadInput(f"{place}.objectives", one.text, remedy)
    if not written.name.strip():
        raise BadInput("name", written.name, "give each SLA a name")
    _require_kinds(place, written.where.fault)
    if not (always or objectives or written.regression):
        raise BadInput(
            place, written.name, "give it always, objectives or regression: it promises nothing"
        )
    for name, wanted in (("nodes", written.where.nodes), ("spares", written.where.spares)):
        if wanted is not None and not _COUNT.fullmatch(str(wanted)):
            raise BadInput(
                f"{place}.where.{name}", wanted, "write a number, or one after >=, <= or =="
            )
    least = defaults.at_least if written.at_least is None else written.at_least
    if least < 1:
        raise BadInput(f"{place}.at_least", least, "use 1 or more runs")
    made = Sla(
        name=written.name,
        where=written.where,
        always=always,
        objectives=objectives,
        regression={
            name: _tolerance(place, name, text) for name, text in written.regression.items()
        },
        confidence=_confidence(
            place, defaults.confidence if written.confidence is None else written.confidence
        ),
        window=_parsed_window(place, written.window or defaults.window),
        at_least=least,
    )
    _require_decidable(place, made)
    return made


def _require_kinds(place: str, given: list[str] | str | None) -> None:
    known = [kind.__name__ for kind in CATALOGUE]
    for name in [given] if isinstance(given, str) else given or ():
        if name not in known and ":" not in name:
            remedy = "name a kind of fault, or module:Class for one of your own"
            raise BadInput(f"{place}.where.fault", name, name_remedy(name, known, remedy))


def _require_decidable(place: str, sla: Sla) -> None:
    """Refuse what its window can never decide."""
    if sla.window.unit == "run" and sla.at_least > sla.window.count:
        raise BadInput(
            f"{place}.at_least",
            sla.at_least,
            f"widen its window, which has {sla.window.count} runs",
        )
    for one in sla.objectives:
        if sla.window.unit == "run" and (needed := sla.needs(one)) > sla.window.count:
            told = f"{needed} runs without a miss show it with {sla.confidence:.0%} confidence, and the window has"
            raise BadInput(
                f"{place}.objectives", one.text, f"widen its window: {told} {sla.window.count}"
            )
        if sla.window.unit == "night" and sla.window.count < NIGHTS_LEAST:
            told = f"an objective needs {NIGHTS_LEAST} nights at least, and the window has {sla.window.count}"
            raise BadInput(f"{place}.objectives", one.text, f"widen its window: {told}")


def _confidence(place: str, given: float | str) -> float:
    found = _SHARE.fullmatch(given) if isinstance(given, str) else None
    value = float(found[1]) / 100 if found else given if isinstance(given, float | int) else 0.0
    if not 0.5 <= value < 1:
        raise BadInput(
            f"{place}.confidence", given, "use a share from 50 % to below 100 %, such as 95 %"
        )
    return value


def _parsed_window(place: str, text: str) -> SlaWindow:
    found = _WINDOW.fullmatch(text)
    if found is None or not int(found[1]):
        raise BadInput(f"{place}.window", text, "write it as 30 nights or 200 runs")
    return SlaWindow(int(found[1]), "night" if found[2] == "night" else "run")


def _tolerance(place: str, name: str, text: str) -> float:
    above, mark, below = (part.strip() for part in name.partition("/"))
    durations = [
        one for one, kind in KNOWN.items() if kind == ("s", "lower") and one not in DIVISORS
    ]
    if above not in durations or (mark and below not in DIVISORS):
        remedy = (
            f"name one of {', '.join(durations)}, or one of them divided by {' or '.join(DIVISORS)}"
        )
        raise BadInput(f"{place}.regression", name, remedy)
    found = _SHARE.fullmatch(text)
    if found is None or not 0 < float(found[1]) / 100 <= _TOLERANCE_MOST:
        raise BadInput(
            f"{place}.regression.{name}", text, "write how much longer it may take, such as 10 %"
        )
    return float(found[1]) / 100
