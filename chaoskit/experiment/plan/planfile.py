"""Experiments as files: one small JSON object holds all that a run needs to be repeated.

    {"version": 2, "job": "gpt", "steps": 24, "options": {"size": "tiny"},
     "settings": {"nodes": 3, "seed": 7}, "faults": [{"kind": "Kill", "rank": 2, "at_step": 5}]}

A command stands in place of the job, with what finds steps and losses in its log:

    {"version": 2, "command": ["torchrun", "train.py"], "watch": {"step": "step (\\d+)"}, "settings": {"nodes": 2},
     "faults": [{"kind": "Kill", "rank": 1, "at_step": 5}]}

A saved plan spells out every setting and every field of every fault, so that it keeps its meaning when a default
changes; ``asked`` has the faults before roles such as ``any`` were drawn. What a hand-written one leaves out has its
default. Reading goes through :func:`plan_experiment` or :func:`plan_command`: a file is checked like any other input.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput, name_remedy
from chaoskit.experiment.plan.command_plan import CommandExperiment, plan_command
from chaoskit.experiment.plan.plan import Experiment, Wish, plan_experiment
from chaoskit.faults import CATALOGUE
from chaoskit.faults.base import Fault
from chaoskit.faults.kinds import find_kind, name_of
from chaoskit.job import JobSpec, recall_job, resolve_job
from chaoskit.logrule import LogRule
from chaoskit.settings_file import parse_json
from chaoskit.stacks import LogPatterns

FILE_NAME = "plan.json"
VERSION = 2

_SETTINGS = tuple(name for name in RunConfig.__struct_fields__ if name != "job")
_COMMAND_SETTINGS = ("nodes", "ranks", "seed", "working_directory", "rules", "stalled_s")
_NOT_FINITE = ("nan", "inf", "-inf")  # JSON has no words for them

#: What can be run: a job, or a command.
Planned = Experiment | CommandExperiment


class _PlanFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    job: str = ""
    command: list[str] | None = None
    watch: dict[str, Any] | None = None
    name: str = ""
    steps: int | None = None
    options: dict[str, Any] = {}
    deadline_s: float | str | None = None
    max_lost_steps: int = 0
    reference: Wish = "off"
    settings: dict[str, Any] = {}
    faults: list[dict[str, Any]] = []
    asked: list[dict[str, Any]] = []


# -- writing ------------------------------------------------------------------------------------------------------


def encode(experiment: Planned) -> bytes:
    """``experiment`` as JSON. Equal experiments give equal bytes.

    Raises:
        BadInput: if a field of a fault has no JSON form.
    """
    plan = (
        _command_plan(experiment)
        if isinstance(experiment, CommandExperiment)
        else _job_plan(experiment)
    )
    absent = (
        ("command", "watch") if plan.command is None else ("job", "steps", "options", "reference")
    )
    absent = (*absent, *(() if plan.asked else ("asked",)))
    told = {name: value for name, value in msgspec.to_builtins(plan).items() if name not in absent}
    return msgspec.json.format(msgspec.json.encode(told), indent=2) + b"\n"


def _command_plan(experiment: CommandExperiment) -> _PlanFile:
    return _PlanFile(
        version=VERSION,
        command=list(experiment.command),
        watch=asdict(experiment.watch),
        name=experiment.name,
        deadline_s=_spelled(experiment.deadline_s),
        max_lost_steps=experiment.max_lost_steps,
        settings={name: getattr(experiment, name) for name in _COMMAND_SETTINGS},
        faults=[_plain(fault) for fault in experiment.faults],
        asked=_as_asked(experiment),
    )


def _job_plan(experiment: Experiment) -> _PlanFile:
    options = dict(experiment.config.job.options)
    steps = options.pop("steps") if experiment.steps is not None else None
    return _PlanFile(
        version=VERSION,
        job=experiment.config.job.target,
        name=experiment.name,
        steps=steps,
        options=options,
        deadline_s=_spelled(experiment.deadline_s),
        max_lost_steps=experiment.max_lost_steps,
        reference=experiment.reference,
        settings={name: getattr(experiment.config, name) for name in _SETTINGS},
        faults=[_plain(fault) for fault in experiment.faults],
        asked=_as_asked(experiment),
    )


def _as_asked(experiment: Planned) -> list[dict[str, Any]]:
    """Its faults before roles were drawn, where any has one: what was asked for is the same for every seed."""
    return (
        []
        if experiment.asked == experiment.faults
        else [_plain(fault) for fault in experiment.asked]
    )


def save(experiment: Planned, path: Path) -> Path:
    """Write ``experiment`` to ``path``; a reader sees the old file or the new one, never a part.

    Raises:
        BadInput: if a field of a fault has no JSON form, or the file cannot be written.
    """
    data = encode(experiment)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(data)
        draft.replace(path)
    except OSError as error:
        raise BadInput(
            "plan", str(path), f"choose a file that can be written ({error.strerror})"
        ) from None
    return path


def _plain(fault: Fault) -> dict[str, Any]:
    values = {item.name: getattr(fault, item.name) for item in fields(fault) if item.init}
    try:
        plain = {name: _spelled(msgspec.to_builtins(value)) for name, value in values.items()}
        msgspec.json.encode(plain)
    except (TypeError, ValueError) as error:
        raise BadInput("faults", str(fault), f"use plain values in its fields: {error}") from None
    judged = {} if type(fault) in CATALOGUE else {"judged": _as_judged(fault)}
    return {"kind": name_of(type(fault)), **plain, **judged}


def _as_judged(fault: Fault) -> dict[str, Any]:
    """What a run is judged by of a fault of a user's own class, which may not be there when it is judged again."""
    return {
        "text": str(fault),
        "moment": fault.moment,
        "leads_to": sorted(fault.leads_to),
        "must_show": sorted(fault.must_show),
        "whole_node": fault.whole_node,
        "blameless": fault.blameless,
    }


def _spelled(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# -- reading ------------------------------------------------------------------------------------------------------


def load(path: Path) -> Planned:
    """The experiment in the file ``path``. Relative Python files are looked up beside it first.

    Raises:
        BadInput: naming the field and the file, if it cannot be read or holds no plan that could be run.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInput(
            "plan", str(path), f"name a plan file that can be read ({error.strerror})"
        ) from None
    try:
        return parse(data, path.parent)
    except BadInput as error:
        if error.field == "plan":
            raise BadInput("plan", str(path), error.remedy) from None
        raise BadInput(error.field, error.value, f"in {path}, {error.remedy}") from None


def recall(path: Path, *, sharded: bool) -> Planned:
    """The experiment of a run that was made, from the plan in its directory.

    Nothing is looked up or checked: the job's file may be gone, its directories may be full by now.

    Args:
        sharded: whether the job shards its state, which only its source says.

    Raises:
        BadInput: if the file cannot be read as a plan.
    """
    try:
        plan = _parse(path.read_bytes())
    except OSError as error:
        remedy = f"name the directory of a run, which holds its plan ({error.strerror})"
        raise BadInput("run directory", str(path.parent), remedy) from None
    faults = tuple(
        _recalled(entry) if "judged" in entry else _fault(number, entry)
        for number, entry in enumerate(plan.faults)
    )
    return _assembled(plan, faults, recall_job(plan.job, _options(plan), sharded=sharded))


def receive(data: bytes) -> Planned:
    """The experiment in a plan that was encoded elsewhere, and checked there. Files that it names are here.

    Raises:
        BadInput: if it needs what is not here, such as a fault of a user's own class.
    """
    plan = _parse(data)
    faults = tuple(_fault(number, entry) for number, entry in enumerate(plan.faults))
    return _assembled(
        plan, faults, None if plan.command is not None else resolve_job(plan.job, _options(plan))
    )


def _assembled(plan: _PlanFile, faults: tuple[Fault, ...], job: JobSpec | None) -> Planned:
    """The experiment of a plan that was saved: a job, or a command. Its settings were checked when it was."""
    deadline_s = _deadline(plan.deadline_s)
    assert deadline_s is not None, "a plan that was saved has a deadline"
    if plan.command is not None:
        watch = _patterns(plan.watch)
        assert watch is not None, "a plan that was saved has its patterns"
        settings = plan.settings | {
            "rules": msgspec.convert(plan.settings["rules"], tuple[LogRule, ...])
        }
        return CommandExperiment(
            name=plan.name,
            command=tuple(plan.command),
            watch=watch,
            faults=faults,
            deadline_s=deadline_s,
            max_lost_steps=plan.max_lost_steps,
            **settings,
        )
    assert job is not None
    config = msgspec.convert({"job": msgspec.to_builtins(job), **plan.settings}, RunConfig)
    return Experiment(
        plan.name,
        plan.job,
        config,
        faults,
        plan.steps,
        deadline_s,
        plan.max_lost_steps,
        plan.reference,
    )


def _options(plan: _PlanFile) -> dict[str, Any]:
    """The options of its job, in the order in which a planned one has them."""
    options = {name: value for name, value in plan.options.items() if name != "until"}
    options |= {"steps": plan.steps} if plan.steps is not None else {}
    return options | ({"until": plan.options["until"]} if "until" in plan.options else {})


def parse(data: bytes, directory: Path) -> Planned:
    """The experiment in a plan. Relative Python files are looked up in ``directory`` first. Raises BadInput."""
    plan = _parse(data)
    if (plan.command is None) == (not plan.job):
        raise BadInput("job", plan.job or None, "give a job or a command, one of them")
    settings = _SETTINGS if plan.command is None else _COMMAND_SETTINGS
    for name, value in plan.settings.items():
        if name not in settings:
            raise BadInput(f"settings.{name}", value, name_remedy(name, settings))
    if plan.command is None:
        return _with_asked(_job(plan, directory), plan)
    wish = plan.reference if plan.reference != "off" else None
    for field, given in (("steps", plan.steps), ("options", plan.options), ("reference", wish)):
        if given:
            raise BadInput(field, given, "leave it out: a command has none")
    planned = plan_command(
        [_located(argument, directory) for argument in plan.command],
        watch=_patterns(plan.watch),
        name=plan.name,
        faults=[_fault(number, entry) for number, entry in enumerate(plan.faults)],
        deadline_s=_deadline(plan.deadline_s),
        max_lost_steps=plan.max_lost_steps,
        **plan.settings,
    )
    return _with_asked(planned, plan)


def _with_asked(planned: Planned, plan: _PlanFile) -> Planned:
    """What was drawn stays; what it was drawn from is known."""
    asked = tuple(_fault(number, entry, "asked") for number, entry in enumerate(plan.asked))
    return replace(planned, asked=asked) if asked else planned


def _patterns(watch: dict[str, Any] | None) -> LogPatterns | None:
    known = [item.name for item in fields(LogPatterns)]
    for name, value in (watch or {}).items():
        if name not in known:
            raise BadInput(f"watch.{name}", value, name_remedy(name, known))
    if watch is not None and "step" not in watch:
        raise BadInput("watch.step", None, r"give the pattern of a step, such as step (\d+)")
    return LogPatterns(**watch) if watch is not None else None


def _job(plan: _PlanFile, directory: Path) -> Experiment:
    if plan.watch is not None:
        raise BadInput("watch", plan.watch, "use it with a command: a job tells its steps itself")
    return plan_experiment(
        _located(plan.job, directory),
        name=plan.name,
        steps=plan.steps,
        options=plan.options,
        faults=[_fault(number, entry) for number, entry in enumerate(plan.faults)],
        deadline_s=_deadline(plan.deadline_s),
        max_lost_steps=plan.max_lost_steps,
        reference=plan.reference,
        **plan.settings,
    )


def _parse(data: bytes) -> _PlanFile:
    try:
        found = parse_json(data)
    except ValueError as error:
        raise BadInput("plan", None, f"write one JSON object ({error})") from None
    if not isinstance(found, dict):
        raise BadInput("plan", None, "write one JSON object")
    if found.get("version") != VERSION:
        raise BadInput(
            "version",
            found.get("version"),
            f"use a plan of version {VERSION}, which this chaoskit reads",
        )
    try:
        return msgspec.convert(found, _PlanFile)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$.")
        field = place.rstrip("`") or message.rpartition("field `")[2].rstrip("`")
        raise BadInput(field, found.get(field), f"mend it: {message}") from None


def _start(data: bytes) -> str:
    text = data[:40].decode(errors="replace")
    return text if len(data) <= 40 else f"{text}..."


def _located(job: str, directory: Path) -> str:
    path, _, function = job.partition(":")
    beside = directory / path
    if path.endswith(".py") and beside.is_file():
        return f"{beside}:{function}" if function else str(beside)
    return job


def _deadline(value: float | str | None) -> float | None:
    if not isinstance(value, str):
        return value
    if value not in _NOT_FINITE:
        raise BadInput("deadline_s", value, "use a number of seconds, or inf for no deadline")
    return float(value)


def _fault(number: int, entry: Mapping[str, Any], field: str = "faults") -> Fault:
    place = f"{field}[{number}]"
    kind = find_kind(str(entry.get("kind", "")), f"{place}.kind")
    hints, known = get_type_hints(kind), {item.name: item for item in fields(kind) if item.init}
    values = {}
    for name, value in entry.items():
        if name in ("kind", "judged"):
            continue
        if name not in known:
            raise BadInput(f"{place}.{name}", value, name_remedy(name, known))
        values[name] = _typed(f"{place}.{name}", value, hints[name])
    for name, item in known.items():
        if name not in values and item.default is MISSING and item.default_factory is MISSING:
            raise BadInput(
                f"{place}.{name}", None, f"give it: {kind.__name__} has no default for it"
            )
    try:
        return kind(**values)
    except BadInput as error:
        raise BadInput(f"{place}.{error.field}", error.value, error.remedy) from None


def _recalled(entry: Mapping[str, Any]) -> Fault:
    """A fault of a class that the catalogue does not have, as far as a run is judged by it. It cannot strike."""
    told = entry["judged"]
    known = {name: frozenset(told[name]) for name in ("leads_to", "must_show")}
    known |= {name: told[name] for name in ("moment", "whole_node", "blameless")}
    kind = type(
        str(entry["kind"]).rpartition(":")[2],
        (Fault,),
        {**known, "__str__": lambda self: told["text"]},
    )
    fault: Fault = kind(**{item.name: entry[item.name] for item in fields(Fault)})
    return fault


def _typed(field: str, value: Any, hint: Any) -> Any:
    """``value`` as a field with this annotation holds it: an enum member for its value, a tuple for a list."""
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        if value in _NOT_FINITE and msgspec.convert(0.5, hint, strict=False) == 0.5:
            return float(value)
        raise BadInput(field, value, f"mend it: {str(error).partition(' - ')[0]}") from None
