"""Files of SLAs: each SLA selects runs and promises something about them.

version: 1
defaults: {confidence: 95 %, window: 30 nights}
slas:
  - name: a lost rank costs a step
    where: {fault: [Kill, Exit], nodes: ">=4", stack: chaoskit}
    always: [lost_steps == 0, losses == twin, recovered]
    objectives: [recovery.p95 <= 2 s, goodput.p50 >= 97 %]
    regression: {recovery: 10 %}

-> sla/language.py: the syntax of a line. sla/judge.py: broken, met or not shown.
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
#: The nights that an objective over nights needs. Runs of one night have that night in common.
NIGHTS_LEAST = 5
_WINDOW = re.compile(r"(\d{1,6}) (night|run)s?", re.ASCII)
_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,6})?) ?%", re.ASCII)
_COUNT = re.compile(r"(<=|>=|==)? ?(\d{1,6})", re.ASCII)
_TOLERANCE_MOST = 10.0
_MARKER_OPTIONS = ("window", "confidence", "at_least")


class SlaWindow(msgspec.Struct, frozen=True):
    """The latest nights or the latest runs. A night is a UTC day on which a session began."""

    count: int
    unit: Literal["night", "run"]

    def __str__(self) -> str:
        return f"{self.count} {self.unit}{'s' if self.count > 1 else ''}"


class Where(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The selection of runs of an SLA. Fields that are left out match any run.

    Attributes:
        fault: kinds, one of which the run must have; an empty list selects runs without faults.
        nodes: a number, or a limit such as ``>=4``.
        spares: a number or limit, likewise.
        job: a part of the job's name or of the command.
        stack: the name of the stack.
        substrate: the name of the substrate.
        machine: a part of the machine's description.
        test: a part of the test's name.
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
        """Return True if the SLA applies to a run.

        Args:
            shared: the plan of the run's series. Without it, no run matches a job or a number of
                nodes or spares.
        """
        plan = shared.plan if shared is not None else {}
        settings = plan.get("settings", {})
        job = str(plan.get("job") or " ".join(plan.get("command") or []))
        texts = ((self.job, job), (self.machine, run.machine), (self.test, run.title))
        return (
            self._has_fault(run.faults)
            and all(
                _is_within(limit, settings.get(name))
                for name, limit in (("nodes", self.nodes), ("spares", self.spares))
            )
            and self.stack in (None, run.stack)
            and (self.substrate is None or run.machine.endswith(f", {self.substrate}"))
            and all(part is None or part in text for part, text in texts)
        )

    def _has_fault(self, kinds: Sequence[str]) -> bool:
        """Return True if the kinds of a run's faults match, or faults are not selected."""
        if self.fault is None:
            return True
        selected = [self.fault] if isinstance(self.fault, str) else self.fault
        return not kinds if not selected else any(kind in selected for kind in kinds)


def _is_within(limit: int | str | None, count: object) -> bool:
    """Return True if a count is within a limit such as ``>=4``, or there is no limit.

    A count that is no integer is within no limit.
    """
    if limit is None:
        return True
    match = _COUNT.fullmatch(str(limit))  # load and parse_marker have checked the syntax
    if match is None or not isinstance(count, int):
        return False
    relation, number = match[1], int(match[2])
    return (
        count <= number
        if relation == "<="
        else count >= number
        if relation == ">="
        else count == number
    )


class Sla(msgspec.Struct, frozen=True, kw_only=True):
    """An SLA: a selection of runs, and promises about them.

    Attributes:
        always: limits that each run in the window must meet.
        objectives: limits that a share of the runs must meet.
        regression: for each number the tolerated growth compared with earlier runs, as a fraction.
        confidence: the confidence with which objectives are proven, from 0.5 to below 1.
        window: the runs that count.
        at_least: the number of runs below which no line is met, and no objective is broken.
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
        """Return the number of runs that an objective takes if ``misses`` of them miss it."""
        return max(self.at_least, runs_needed(objective.share, misses, self.confidence))


class _WrittenSla(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An SLA as it is written in a file."""

    name: str
    where: Where = Where()
    always: list[str] = []
    objectives: list[str] = []
    regression: dict[str, str] = {}
    confidence: float | str | None = None
    window: str | None = None
    at_least: int | None = None


class _Defaults(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The settings of SLAs that do not give them."""

    confidence: float | str = 0.95
    window: str = "30 nights"
    at_least: int = 1


class _File(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A file of SLAs as it is written."""

    version: int
    slas: list[_WrittenSla]
    defaults: _Defaults = msgspec.field(default_factory=_Defaults)


def load(path: Path) -> list[Sla]:
    """Return the SLAs of a file in YAML or JSON.

    Raises:
        BadInput: if the file cannot be read or is invalid, or contains no SLA. The error names
            file, field and remedy.
    """
    try:
        document = msgspec.convert(read_document("file", path), _File)
    except msgspec.ValidationError as error:
        problem = " ".join(str(error).split())
        raise BadInput("file", str(path), f"correct the file: {problem}") from None
    if document.version != VERSION:
        raise BadInput(
            "version",
            document.version,
            f"in {path}, use version {VERSION}, which this chaoskit reads",
        )
    if not document.slas:
        raise BadInput("slas", [], f"in {path}, write at least one SLA")
    names = [sla.name for sla in document.slas]
    if duplicate := next((name for name in names if names.count(name) > 1), None):
        raise BadInput("name", duplicate, f"in {path}, give each SLA a different name")
    try:
        return [_build_sla(sla, document.defaults) for sla in document.slas]
    except BadInput as error:
        raise BadInput(error.field, error.value, f"in {path}, {error.remedy}") from None


def parse_marker(name: str, lines: Sequence[object], options: Mapping[str, Any]) -> Sla:
    """Return the SLA that the marker of a test states.

    Args:
        name: the name of the SLA.
        lines: the positional arguments of the marker.
        options: its keyword arguments: ``window``, ``confidence`` and ``at_least``.

    Raises:
        BadInput: if there is no line, a line is no text or invalid, or an option is unknown or
            invalid. It is also raised for a window that is too small to decide a line.
    """
    for line in lines:
        if not isinstance(line, str):
            raise BadInput("sla", line, "write lines as text, such as 'lost_steps == 0'")
    for option, setting in options.items():
        if option not in _MARKER_OPTIONS:
            raise BadInput(
                f"sla.{option}",
                setting,
                f"use {', '.join(_MARKER_OPTIONS)}; other options need a file of SLAs",
            )
    return sla_of_lines(name, [str(line) for line in lines], **options)


def sla_of_lines(name: str, lines: Sequence[str], **options: Any) -> Sla:
    """Return the SLA that lines state. It selects all runs, unless ``where`` is given.

    Args:
        lines: lines that hold always, and objectives, in any order.
        options: other fields of an SLA, with the values that a file has: ``where``,
            ``regression``, ``confidence``, ``window`` and ``at_least``.

    Raises:
        BadInput: if a line or an option is invalid, or nothing is promised.
    """
    try:
        written = msgspec.convert({"name": name, **options}, _WrittenSla)
    except msgspec.ValidationError as error:
        raise BadInput("sla", name, f"correct its marker: {error}") from None
    parsed = [(line, parse(line, "sla")) for line in lines]
    written.always = [line for line, condition in parsed if not condition.is_objective]
    written.objectives = [line for line, condition in parsed if condition.is_objective]
    return _build_sla(written, _Defaults())


def _build_sla(written: _WrittenSla, defaults: _Defaults) -> Sla:
    """Return the SLA that a file states, with its lines parsed.

    Raise BadInput if a field is invalid, or if the SLA can never be decided.
    """
    field_path = f"slas[{written.name}]"
    always = tuple(parse(line, f"{field_path}.always") for line in written.always)
    objectives = tuple(parse(line, f"{field_path}.objectives") for line in written.objectives)
    for condition in always:
        if condition.is_objective:
            raise BadInput(
                f"{field_path}.always",
                condition.text,
                "leave its statistic out, or write it below objectives",
            )
    for condition in objectives:
        if not condition.is_objective:
            remedy = f"write it below always, or give {condition.number} a statistic such as {condition.number}.p95"
            raise BadInput(f"{field_path}.objectives", condition.text, remedy)
    if not written.name.strip():
        raise BadInput("name", written.name, "give each SLA a name")
    _require_kinds(field_path, written.where.fault)
    if not (always or objectives or written.regression):
        raise BadInput(
            field_path,
            written.name,
            "give it always, objectives or regression: it promises nothing",
        )
    for name, limit in (("nodes", written.where.nodes), ("spares", written.where.spares)):
        if limit is not None and not _COUNT.fullmatch(str(limit)):
            raise BadInput(
                f"{field_path}.where.{name}", limit, "write a number, or one after >=, <= or =="
            )
    least = defaults.at_least if written.at_least is None else written.at_least
    if least < 1:
        raise BadInput(f"{field_path}.at_least", least, "use 1 or more runs")
    sla = Sla(
        name=written.name,
        where=written.where,
        always=always,
        objectives=objectives,
        regression={
            name: _parse_tolerance(field_path, name, text)
            for name, text in written.regression.items()
        },
        confidence=_parse_confidence(
            field_path, defaults.confidence if written.confidence is None else written.confidence
        ),
        window=_parse_window(field_path, written.window or defaults.window),
        at_least=least,
    )
    _require_decidable(field_path, sla)
    return sla


def _require_kinds(field_path: str, faults: list[str] | str | None) -> None:
    """Raise BadInput if a kind of fault is unknown."""
    kinds = [kind.__name__ for kind in CATALOGUE]
    for name in [faults] if isinstance(faults, str) else faults or ():
        if name not in kinds and ":" not in name:
            remedy = "name a kind of fault, or module:Class for one of your own"
            raise BadInput(f"{field_path}.where.fault", name, name_remedy(name, kinds, remedy))


def _require_decidable(field_path: str, sla: Sla) -> None:
    """Raise BadInput if the window is too small for a promise to be ever decided."""
    if sla.window.unit == "run" and sla.at_least > sla.window.count:
        raise BadInput(
            f"{field_path}.at_least",
            sla.at_least,
            f"widen its window, which has {sla.window.count} runs",
        )
    for objective in sla.objectives:
        if sla.window.unit == "run" and (needed := sla.needs(objective)) > sla.window.count:
            explanation = f"{needed} runs without a miss show it with {sla.confidence:.0%} confidence, and the window has"
            raise BadInput(
                f"{field_path}.objectives",
                objective.text,
                f"widen its window: {explanation} {sla.window.count}",
            )
        if sla.window.unit == "night" and sla.window.count < NIGHTS_LEAST:
            explanation = f"an objective needs {NIGHTS_LEAST} nights at least, and the window has {sla.window.count}"
            raise BadInput(
                f"{field_path}.objectives", objective.text, f"widen its window: {explanation}"
            )


def _parse_confidence(field_path: str, given: float | str) -> float:
    """Return a confidence as a share. Raise BadInput if it is out of range."""
    match = _SHARE.fullmatch(given) if isinstance(given, str) else None
    share = float(match[1]) / 100 if match else given if isinstance(given, float | int) else 0.0
    if not 0.5 <= share < 1:
        raise BadInput(
            f"{field_path}.confidence", given, "use a share from 50 % to below 100 %, such as 95 %"
        )
    return share


def _parse_window(field_path: str, text: str) -> SlaWindow:
    """Return the window of a text such as ``30 nights``. Raise BadInput for other texts."""
    match = _WINDOW.fullmatch(text)
    if match is None or not int(match[1]):
        raise BadInput(f"{field_path}.window", text, "write it as 30 nights or 200 runs")
    return SlaWindow(int(match[1]), "night" if match[2] == "night" else "run")


def _parse_tolerance(field_path: str, name: str, text: str) -> float:
    """Return the tolerance of a regression as a fraction, above 0 and at most 10.

    Raise BadInput if the number is no duration, or the tolerance is invalid.
    """
    numerator, mark, divisor = (part.strip() for part in name.partition("/"))
    durations = [
        number
        for number, kind in KNOWN.items()
        if kind == ("s", "lower") and number not in DIVISORS
    ]
    if numerator not in durations or (mark and divisor not in DIVISORS):
        remedy = (
            f"name one of {', '.join(durations)}, or one of them divided by {' or '.join(DIVISORS)}"
        )
        raise BadInput(f"{field_path}.regression", name, remedy)
    match = _SHARE.fullmatch(text)
    if match is None or not 0 < float(match[1]) / 100 <= _TOLERANCE_MOST:
        raise BadInput(
            f"{field_path}.regression.{name}",
            text,
            "write how much longer it may take, such as 10 %",
        )
    return float(match[1]) / 100
