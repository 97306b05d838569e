"""Experiments as files: one small JSON object holds all that a run needs to be repeated.

    {"version": 2, "job": "gpt", "steps": 24, "options": {"size": "tiny"},
     "settings": {"nodes": 3, "seed": 7}, "faults": [{"kind": "Kill", "rank": 2, "at_step": 5}]}

A command stands in place of the job, with what finds steps and losses in its log:

    {"version": 2, "command": ["torchrun", "train.py"], "watch": {"step": "step (\\d+)"},
    "settings": {"nodes": 2},
     "faults": [{"kind": "Kill", "rank": 1, "at_step": 5}]}

The plan of a run on a job that runs already has ``running_job`` and an empty command. It can be
judged again; another run needs the job as it is then (``chaoskit attach``).

A saved plan spells out every setting and every field of every fault. So it keeps its meaning when a
default changes. ``asked`` has the faults before roles such as ``any`` were drawn. Settings that a
hand-written plan leaves out have their defaults. Reading goes through :func:`plan_experiment` or
:func:`plan_command`: a file is checked like any other input.

-> experiment/plan/plan.py and command_plan.py: the meaning and the defaults of each field.
experiment/directory.py: the other files beside a saved plan.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput, name_remedy
from chaoskit.experiment.plan.command_plan import CommandExperiment, RunningJob, plan_command
from chaoskit.experiment.plan.plan import Experiment, ReferenceMode, plan_experiment
from chaoskit.faults import CATALOGUE
from chaoskit.faults.base import Fault
from chaoskit.faults.kinds import find_kind, name_of
from chaoskit.job import JobSpec, recall_job, resolve_job
from chaoskit.logrule import LogRule
from chaoskit.settings_file import parse_json
from chaoskit.stacks.patterns import patterns_of

_T = TypeVar("_T")

FILE_NAME = "plan.json"
VERSION = 2

_SETTINGS = tuple(name for name in RunConfig.__struct_fields__ if name != "job")
_COMMAND_SETTINGS = ("nodes", "ranks", "seed", "working_directory", "rules", "stalled_s")
_NOT_FINITE = ("nan", "inf", "-inf")  # JSON has no numbers for these

#: A plan: of a job, or of a command.
Planned = Experiment | CommandExperiment


class _PlanFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The JSON object of a plan file; absent fields have the defaults of the plan."""

    version: int
    job: str = ""
    command: list[str] | None = None
    watch: dict[str, Any] | None = None
    name: str = ""
    steps: int | None = None
    options: dict[str, Any] = {}
    deadline_s: float | str | None = None
    max_lost_steps: int = 0
    reference: ReferenceMode = "off"
    settings: dict[str, Any] = {}
    faults: list[dict[str, Any]] = []
    asked: list[dict[str, Any]] = []
    running_job: RunningJob | None = None


# -- writing ---------------------------------------------------------------------------------------


def encode(experiment: Planned) -> bytes:
    """Return ``experiment`` as JSON; equal experiments give equal bytes.

    Raises:
        BadInput: if a field of a fault has no JSON form.
    """
    plan = (
        _command_plan(experiment)
        if isinstance(experiment, CommandExperiment)
        else _job_plan(experiment)
    )
    absent_names = (
        ("command", "watch") if plan.command is None else ("job", "steps", "options", "reference")
    )
    absent_names = (*absent_names, *(() if plan.asked else ("asked",)))
    absent_names = (*absent_names, *(() if plan.running_job else ("running_job",)))
    present_fields = {
        name: content
        for name, content in msgspec.to_builtins(plan).items()
        if name not in absent_names
    }
    return msgspec.json.format(msgspec.json.encode(present_fields), indent=2) + b"\n"


def _command_plan(experiment: CommandExperiment) -> _PlanFile:
    """Return an experiment with a command as the struct of a plan file."""
    return _PlanFile(
        version=VERSION,
        command=list(experiment.command),
        watch=asdict(experiment.watch),
        name=experiment.name,
        deadline_s=_finite_or_text(experiment.deadline_s),
        max_lost_steps=experiment.max_lost_steps,
        settings={name: getattr(experiment, name) for name in _COMMAND_SETTINGS},
        faults=[_fault_object(fault) for fault in experiment.faults],
        asked=_as_asked(experiment),
        running_job=experiment.running_job,
    )


def _job_plan(experiment: Experiment) -> _PlanFile:
    """Return an experiment with a job as the struct of a plan file."""
    options = dict(experiment.config.job.options)
    steps = options.pop("steps") if experiment.steps is not None else None
    return _PlanFile(
        version=VERSION,
        job=experiment.config.job.target,
        name=experiment.name,
        steps=steps,
        options=options,
        deadline_s=_finite_or_text(experiment.deadline_s),
        max_lost_steps=experiment.max_lost_steps,
        reference=experiment.reference,
        settings={name: getattr(experiment.config, name) for name in _SETTINGS},
        faults=[_fault_object(fault) for fault in experiment.faults],
        asked=_as_asked(experiment),
    )


def _as_asked(experiment: Planned) -> list[dict[str, Any]]:
    """Return the faults before roles were drawn, or an empty list if none of them names a role.

    They are the same for every seed.
    """
    return (
        []
        if experiment.asked == experiment.faults
        else [_fault_object(fault) for fault in experiment.asked]
    )


def save(experiment: Planned, path: Path) -> Path:
    """Write ``experiment`` to ``path`` and return the path.

    The file is replaced as a whole: a reader never sees a part.

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


def _fault_object(fault: Fault) -> dict[str, Any]:
    """Return a fault as JSON values: its kind and every field.

    Raises:
        BadInput: if a field has no JSON form.
    """
    field_values = {field.name: getattr(fault, field.name) for field in fields(fault) if field.init}
    try:
        json_values = {
            name: _finite_or_text(msgspec.to_builtins(content))
            for name, content in field_values.items()
        }
        msgspec.json.encode(json_values)
    except (TypeError, ValueError) as error:
        raise BadInput("faults", str(fault), f"use plain values in its fields: {error}") from None
    judged_fields = {} if type(fault) in CATALOGUE else {"judged": _as_judged(fault)}
    return {"kind": name_of(type(fault)), **json_values, **judged_fields}


def _as_judged(fault: Fault) -> dict[str, Any]:
    """Return the attributes of a fault that its verdict depends on.

    They are stored for a fault class of the user, which may be missing when the run is judged
    again.
    """
    return {
        "text": str(fault),
        "moment": fault.moment,
        "leads_to": sorted(fault.leads_to),
        "must_show": sorted(fault.must_show),
        "whole_node": fault.whole_node,
        "blameless": fault.blameless,
    }


def _finite_or_text(value: Any) -> Any:
    """Return infinity and NaN, which JSON cannot hold, as text, and other values as they are."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# -- reading ---------------------------------------------------------------------------------------


def load(path: Path) -> Planned:
    """Return the experiment in the file ``path``.

    Relative Python files are looked up beside it first.

    Raises:
        BadInput: naming the field and the file, if it cannot be read or is not a plan that could be
            run.
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
    """Return the experiment of a run that was made, from the plan in its directory.

    Nothing is looked up or checked: by now the job's file may be gone, or its directories full. A
    fault of a class that is not in the catalogue is replaced by one that cannot strike. The faults
    before roles were drawn (``asked``) are left out.

    Args:
        path: the plan file.
        sharded: True if the job shards its state, which only its source says.

    Raises:
        BadInput: if the file cannot be read as a plan.
    """
    try:
        plan = _parse(path.read_bytes())
    except OSError as error:
        remedy = f"name the directory of a run, which holds its plan ({error.strerror})"
        raise BadInput("run directory", str(path.parent), remedy) from None
    faults = tuple(
        _fault_stand_in(fields) if "judged" in fields else _fault_of(number, fields)
        for number, fields in enumerate(plan.faults)
    )
    if plan.command is not None:
        return _saved_command(plan, plan.command, faults)
    return _saved_job(plan, recall_job(plan.job, _options(plan), sharded=sharded), faults)


def receive(data: bytes) -> Planned:
    """Return the experiment in a plan that was encoded and checked on another machine.

    The files that the plan names are on this machine. The faults before roles were drawn
    (``asked``) are left out.

    Raises:
        BadInput: if it needs a class or file that is missing here, such as a fault class of the
            user.
    """
    plan = _parse(data)
    faults = tuple(_fault_of(number, fields) for number, fields in enumerate(plan.faults))
    if plan.command is not None:
        return _saved_command(plan, plan.command, faults)
    return _saved_job(plan, resolve_job(plan.job, _options(plan)), faults)


def _saved_command(
    plan: _PlanFile, command: Sequence[str], faults: tuple[Fault, ...]
) -> CommandExperiment:
    """Return the experiment with a command in a saved plan.

    Its settings were checked when it was saved.

    Raises:
        BadInput: if the plan lacks a field that every saved plan has.
    """
    settings = plan.settings | {
        "rules": msgspec.convert(plan.settings["rules"], tuple[LogRule, ...])
    }
    return CommandExperiment(
        name=plan.name,
        command=tuple(command),
        watch=patterns_of(_require_saved("watch", plan.watch)),
        faults=faults,
        deadline_s=_require_saved("deadline_s", _deadline(plan.deadline_s)),
        max_lost_steps=plan.max_lost_steps,
        running_job=plan.running_job,
        **settings,
    )


def _saved_job(plan: _PlanFile, job: JobSpec, faults: tuple[Fault, ...]) -> Experiment:
    """Return the experiment with ``job`` in a saved plan.

    Its settings were checked when it was saved.

    Raises:
        BadInput: if the plan lacks a field that every saved plan has.
    """
    config = msgspec.convert({"job": msgspec.to_builtins(job), **plan.settings}, RunConfig)
    return Experiment(
        plan.name,
        plan.job,
        config,
        faults,
        plan.steps,
        _require_saved("deadline_s", _deadline(plan.deadline_s)),
        plan.max_lost_steps,
        plan.reference,
    )


def _require_saved(field: str, content: _T | None) -> _T:
    """Return the content of a field that every saved plan has; raise BadInput if it is missing."""
    if content is None:
        raise BadInput(field, None, "give it: every plan that was saved has it")
    return content


def _options(plan: _PlanFile) -> dict[str, Any]:
    """Return the options of the job, ``steps`` and ``until`` last, as in a planned experiment."""
    options = {name: option for name, option in plan.options.items() if name != "until"}
    options |= {"steps": plan.steps} if plan.steps is not None else {}
    return options | ({"until": plan.options["until"]} if "until" in plan.options else {})


def parse(data: bytes, directory: Path) -> Planned:
    """Return the experiment in a plan; relative Python files are looked up in ``directory`` first.

    Raises:
        BadInput: naming the field, if it is not a plan that could be run.
    """
    plan = _parse(data)
    if plan.running_job is not None:
        job = plan.running_job.reference
        raise BadInput("running_job", job, f"run chaoskit attach {job} instead")
    if (plan.command is None) == (not plan.job):
        raise BadInput("job", plan.job or None, "give either a job or a command")
    settings = _SETTINGS if plan.command is None else _COMMAND_SETTINGS
    for name, setting in plan.settings.items():
        if name not in settings:
            raise BadInput(f"settings.{name}", setting, name_remedy(name, settings))
    if plan.command is None:
        return _with_asked(_job(plan, directory), plan)
    reference = plan.reference if plan.reference != "off" else None
    for field, content in (
        ("steps", plan.steps),
        ("options", plan.options),
        ("reference", reference),
    ):
        if content:
            raise BadInput(field, content, "leave it out: a command has none")
    planned = plan_command(
        [_path_beside(argument, directory) for argument in plan.command],
        watch=patterns_of(plan.watch) if plan.watch is not None else None,
        name=plan.name,
        faults=[_fault_of(number, fault_fields) for number, fault_fields in enumerate(plan.faults)],
        deadline_s=_deadline(plan.deadline_s),
        max_lost_steps=plan.max_lost_steps,
        **plan.settings,
    )
    return _with_asked(planned, plan)


def _with_asked(planned: Planned, plan: _PlanFile) -> Planned:
    """Return the plan with the faults before roles were drawn, which the file also holds."""
    asked = tuple(
        _fault_of(number, fault_fields, "asked") for number, fault_fields in enumerate(plan.asked)
    )
    return replace(planned, asked=asked) if asked else planned


def _job(plan: _PlanFile, directory: Path) -> Experiment:
    """Return the experiment with a job in a plan.

    Raises:
        BadInput: if it is not a plan that could be run, or has log patterns.
    """
    if plan.watch is not None:
        raise BadInput(
            "watch", plan.watch, "use it with a command only: a job reports its steps itself"
        )
    return plan_experiment(
        _path_beside(plan.job, directory),
        name=plan.name,
        steps=plan.steps,
        options=plan.options,
        faults=[_fault_of(number, fault_fields) for number, fault_fields in enumerate(plan.faults)],
        deadline_s=_deadline(plan.deadline_s),
        max_lost_steps=plan.max_lost_steps,
        reference=plan.reference,
        **plan.settings,
    )


def _parse(data: bytes) -> _PlanFile:
    """Return the JSON of a plan file as a struct.

    Raises:
        BadInput: if it is no such object, or a plan of another version.
    """
    try:
        document = parse_json(data)
    except ValueError as error:
        raise BadInput("plan", None, f"write one JSON object ({error})") from None
    if not isinstance(document, dict):
        raise BadInput("plan", None, "write one JSON object")
    if document.get("version") != VERSION:
        raise BadInput(
            "version",
            document.get("version"),
            f"use a plan of version {VERSION}, which this chaoskit reads",
        )
    try:
        return msgspec.convert(document, _PlanFile)
    except msgspec.ValidationError as error:
        message, _, path_in_plan = str(error).partition(" - at `$.")
        field = path_in_plan.rstrip("`") or message.rpartition("field `")[2].rstrip("`")
        raise BadInput(field, document.get(field), f"correct it: {message}") from None


def _path_beside(job: str, directory: Path) -> str:
    """Return the path of a Python file beside the plan, or the argument if there is none."""
    path, _, function = job.partition(":")
    path_beside = directory / path
    if path.endswith(".py") and path_beside.is_file():
        return f"{path_beside}:{function}" if function else str(path_beside)
    return job


def _deadline(deadline: float | str | None) -> float | None:
    """Return the deadline of a plan file in seconds, or None if the file has none.

    Infinity and NaN are written as text.

    Raises:
        BadInput: for any other text.
    """
    if not isinstance(deadline, str):
        return deadline
    if deadline not in _NOT_FINITE:
        raise BadInput("deadline_s", deadline, "use a number of seconds, or inf for no deadline")
    return float(deadline)


def _fault_of(number: int, plan_fields: Mapping[str, Any], field: str = "faults") -> Fault:
    """Return a fault from its JSON object.

    Args:
        number: the position of the fault in its list.
        plan_fields: the JSON object.
        field: the name of the list, for errors.

    Raises:
        BadInput: naming the place in the plan, if a field is wrong.
    """
    path_in_plan = f"{field}[{number}]"
    kind = find_kind(str(plan_fields.get("kind", "")), f"{path_in_plan}.kind")
    field_types, init_fields = (
        get_type_hints(kind),
        {attribute.name: attribute for attribute in fields(kind) if attribute.init},
    )
    arguments = {}
    for name, content in plan_fields.items():
        if name in ("kind", "judged"):
            continue
        if name not in init_fields:
            raise BadInput(f"{path_in_plan}.{name}", content, name_remedy(name, init_fields))
        arguments[name] = _in_field_type(f"{path_in_plan}.{name}", content, field_types[name])
    for name, attribute in init_fields.items():
        if (
            name not in arguments
            and attribute.default is MISSING
            and attribute.default_factory is MISSING
        ):
            raise BadInput(
                f"{path_in_plan}.{name}", None, f"give it: {kind.__name__} has no default for it"
            )
    try:
        return kind(**arguments)
    except BadInput as error:
        raise BadInput(f"{path_in_plan}.{error.field}", error.value, error.remedy) from None


def _fault_stand_in(plan_fields: Mapping[str, Any]) -> Fault:
    """Return a stand-in for a fault of a class that is not in the catalogue.

    It has the attributes that the verdict depends on, and cannot strike.
    """
    judged = plan_fields["judged"]
    attributes = {name: frozenset(judged[name]) for name in ("leads_to", "must_show")}
    attributes |= {name: judged[name] for name in ("moment", "whole_node", "blameless")}
    kind = type(
        str(plan_fields["kind"]).rpartition(":")[2],
        (Fault,),
        {**attributes, "__str__": lambda self: judged["text"]},
    )
    names = [field.name for field in fields(Fault) if field.name in plan_fields]
    fault: Fault = kind(**{name: plan_fields[name] for name in names})
    return fault


def _in_field_type(field: str, content: Any, field_type: Any) -> Any:
    """Return ``content`` in the type of a field, such as an enum member or a tuple.

    Args:
        field: the place in the plan, for the error.
        content: the JSON value.
        field_type: the annotation of the field.

    Raises:
        BadInput: if the value has another type.
    """
    try:
        return msgspec.convert(content, field_type)
    except msgspec.ValidationError as error:
        if content in _NOT_FINITE and msgspec.convert(0.5, field_type, strict=False) == 0.5:
            return float(content)
        raise BadInput(field, content, f"correct it: {str(error).partition(' - ')[0]}") from None
