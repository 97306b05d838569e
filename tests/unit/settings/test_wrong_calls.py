"""Calls of the public API with values of wrong types: one line of BadInput, and no process is
started.

The calls are drawn over every parameter of every public entry and every field of every fault. The
valid values of a parameter are derived from its annotation here, by rules that share no code with
:mod:`chaoskit.typed`.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import inspect
import math
import os
import signal
import sys
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.examples import examples

from chaoskit import (
    BadInput,
    BatchScaling,
    Chaos,
    CheckpointTier,
    ElasticPolicy,
    Harness,
    LogPatterns,
    LogRule,
    Outcome,
    RunClient,
    RunConfig,
    check_log_rules,
    judge_directory,
    launch,
    read_outcomes,
)
from chaoskit.checkpoint import (
    DiskTier,
    RemoteTier,
    Retention,
    SnapshotReader,
    SnapshotWriter,
    restore,
)
from chaoskit.data import Permutation, Positions
from chaoskit.elastic.client import DOOR, Door, open_door
from chaoskit.experiment.plan.command_plan import plan_command
from chaoskit.experiment.plan.plan import plan_experiment
from chaoskit.job import resolve_job
from chaoskit.typed import convert_fields
from faults import CATALOGUE, Cut, Fault, Hang, Kill, Raise, at_rate
from faults.strategies import fault_plans

# -- values ----------------------------------------------------------------------------------------


class _Silent:
    """An object that raises an error when it is shown or compared."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    __hash__ = object.__hash__


_ENDLESS: list[Any] = []
_ENDLESS.append(_ENDLESS)

_ODD: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        1.5,
        "",
        "x",
        "1",
        "1.5",
        "1M",
        "nan",
        b"x",
        bytearray(b"1"),
        1j,
    ),
    *(
        10**30,
        -(10**30),
        2**64,
        -(2**63) - 1,
        10**400,
        10**5000,
        math.nan,
        math.inf,
        -math.inf,
        "\0",
        "\ud800",
        "a\nb",
    ),
    *(
        [],
        [1],
        ["x"],
        [None],
        (),
        {},
        {"a": 1},
        {1: 2},
        {"a": math.nan},
        {"a": {"b": 10**30}},
        set(),
        _ENDLESS,
    ),
    *(
        object(),
        _Silent(),
        int,
        Kill,
        len,
        Kill(rank=1, at_step=1),
        Path("x"),
        Path("a\0b"),
        range(3),
        ...,
    ),
    *(np.arange(3), np.float32(math.nan), LogPatterns(step=r"(\d+)"), types, iter([])),
]
_plain_values = st.one_of(
    st.integers(),
    st.floats(),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.lists(st.one_of(st.integers(), st.text(max_size=2), st.none()), max_size=2),
    st.dictionaries(st.text(max_size=2), st.floats(), max_size=2),
)


def _fits(hint: Any, value: Any) -> bool:
    """Return whether a parameter with this annotation may have the value; a doubtful one may."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint in (Any, object):
        return True
    if isinstance(hint, TypeVar):
        return _fits(hint.__bound__, value)
    if origin is Annotated:
        return _fits(parts[0], value) or (type(value) is float and math.isinf(value))
    if origin in (Union, types.UnionType):
        return any(_fits(part, value) for part in parts)
    if origin is Literal:
        return type(value) is str and value in parts
    if hint in (None, type(None)):
        return value is None
    if hint is bool:
        return type(value) is bool
    if hint is int:
        return type(value) is int and -(2**63) <= value < 2**64
    if hint is float:
        is_float = isinstance(value, float | np.floating) and math.isfinite(value)
        return is_float or (type(value) is int and -(2**63) <= value < 2**64)
    if hint in (str, Path):
        is_text = isinstance(value, str) or (
            hint is Path and isinstance(value, Path) and "\0" not in str(value)
        )
        return is_text and "\ud800" not in str(value)
    if origin in (list, tuple, collections.abc.Sequence, collections.abc.Collection):
        is_list = isinstance(value, collections.abc.Collection) and not isinstance(
            value, str | bytes | bytearray | dict
        )
        return is_list and value is not _ENDLESS and all(_fits(parts[0], item) for item in value)
    if origin in (dict, collections.abc.Mapping) or (
        isinstance(hint, type) and issubclass(hint, msgspec.Struct)
    ):
        return isinstance(value, dict) and all(
            type(key) is str and _is_plain(item) for key, item in value.items()
        )
    if origin is collections.abc.Callable:
        return callable(value)
    is_checked = isinstance(hint, type) and not getattr(hint, "_is_protocol", False)
    return not is_checked or isinstance(value, hint)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return not isinstance(value, int | float) or (
        math.isfinite(value) and -(2**63) <= value < 2**64
    )


# -- entries ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A function, arguments with which it works, and parameters that it has besides those of its
    signature.
    """

    call: Callable[..., Any]
    valid: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    def parameters(self) -> dict[str, Any]:
        """Return each parameter with its annotation."""
        if isinstance(self.call, type) and issubclass(self.call, msgspec.Struct):
            hints = {item.name: item.type for item in msgspec.structs.fields(self.call)}
        else:
            function = self.call.__init__ if isinstance(self.call, type) else self.call  # type: ignore[misc]
            names = {"Fault": Fault, "Outcome": Outcome, "Harness": Harness, "pytest": pytest}
            hints = typing.get_type_hints(
                inspect.unwrap(function), localns=names, include_extras=True
            )
            kinds = {
                name: parameter.kind
                for name, parameter in inspect.signature(function).parameters.items()
            }
            hints = {
                name: hint
                for name, hint in hints.items()
                if kinds.get(name, 2) != inspect.Parameter.VAR_KEYWORD
            }
        hints.pop("return", None)
        return {
            name: hint for name, hint in (hints | self.more).items() if name not in self.without
        }


_SETTINGS = {
    item.name: item.type
    for item in msgspec.structs.fields(RunConfig)
    if item.name not in ("job", "rules")
}
_PLAN = {
    "name": str,
    "steps": int | None,
    "until": dict[str, Any] | None,
    "options": dict[str, Any] | None,
    "deadline_s": Annotated[float, ""] | None,
    "max_lost_steps": int | None,
    "reference": Literal["off", "on", "required"],
    "rules": list[Any] | str | Path | None,
}
_COMMAND = {name: _PLAN[name] for name in ("name", "deadline_s", "rules")} | {
    "nodes": int,
    "ranks": int,
    "seed": int,
    "max_lost_steps": int,
    "working_directory": str | Path,
    "watch": LogPatterns,
}
_LAUNCH = {
    "port": int,
    "control_port": int,
    "metrics_port": int | None,
    "metrics_host": str,
    "otlp_endpoint": str,
}
_WATCH = LogPatterns(step=r"step (\d+)")


def _within(chaos: Chaos, setting: str, kind: type[Any]) -> Callable[..., Any]:
    """Return a function that runs a job with a setting of this type, made of its arguments."""

    def call(**arguments: Any) -> Any:
        settings_struct = kind(**arguments)
        return chaos.run(
            "gpt", **{setting: [settings_struct] if setting == "rules" else settings_struct}
        )

    call.__name__ = f"run with {kind.__name__}"
    return call


def _struct(kind: type[Any]) -> dict[str, Any]:
    return {item.name: item.type for item in msgspec.structs.fields(kind)}


def _breaking(chaos: Chaos, kind: type[Fault]) -> Callable[..., Any]:
    """Return a function that runs a job with a fault of this kind, made of its arguments."""

    def call(**arguments: Any) -> Any:
        return chaos.run("gpt", steps=30, nodes=4, faults=[kind(**arguments)])

    call.__name__ = f"run with {kind.__name__}"
    return call


def _entries(chaos: Chaos, place: Path) -> list[Entry]:
    """Return every public function that takes values, ready to be called."""
    client = RunClient(place)
    disk = str(place / "disk")
    tier = DiskTier(place / "tier")
    job = {"job": "gpt", "steps": 5}
    entries = [
        Entry(chaos.run, job, _PLAN | _SETTINGS, without=("command", "watch")),
        Entry(chaos.run, {"command": ["true"], "watch": _WATCH}, _COMMAND, without=("job",)),
        Entry(chaos.harness.run, job, _PLAN | _SETTINGS, without=("command",)),
        Entry(
            chaos.harness.run, {"command": ["true"], "watch": _WATCH}, _COMMAND, without=("job",)
        ),
        Entry(chaos.harness.run_planned, {"experiment": plan_experiment("gpt", steps=5)}),
        Entry(chaos.harness.twin, {"experiment": plan_experiment("gpt", steps=5)}),
        Entry(Harness, {"directory": place / "runs"}),
        Entry(
            launch,
            {"job": "gpt", "report": place / "launch"},
            _SETTINGS | _LAUNCH | {"rules": _PLAN["rules"]},
        ),
        Entry(resolve_job, {"target": "gpt"}),
        Entry(RunClient, {"directory": place}),
        Entry(client.scale, {"size": 2}),
        Entry(client.drain, {"node": "node1", "grace_s": 1.0}),
        Entry(client.cancel_drain, {"node": "node1"}),
        Entry(client.lend, {"nodes": 1, "job": "other", "grace_s": 1.0}),
        Entry(client.return_nodes, {"job": "other"}),
        Entry(
            check_log_rules, {"rules": [LogRule(name="a", pattern="x")], "log": place / "log.txt"}
        ),
        Entry(judge_directory, {"directory": place}),
        Entry(read_outcomes, {"directory": place}),
        Entry(LogPatterns, {"step": r"(\d+)"}),
        Entry(at_rate, {"fault": Kill(rank="any"), "mtbf_steps": 5, "steps": 20}),
        Entry(fault_plans, {"nodes": 4, "steps": 30}),
        Entry(SnapshotWriter, {"tier": disk}),
        Entry(SnapshotReader, {"place": tier}),
        Entry(DiskTier, {"root": disk}),
        Entry(RemoteTier, {"url": f"file://{disk}"}),
        Entry(restore, {"state_dict": {}, "disk": disk}, without=("state_dict",)),
        Entry(Retention, {"keep_last": 2}),
        Entry(Positions, {"size": 9, "batch_size": 3}),
        Entry(Positions(9, 3).batch, {"step": 1}),
        Entry(Permutation, {"size": 9}, without=("key",)),
        Entry(_within(chaos, "disk", CheckpointTier), {"target": disk}, _struct(CheckpointTier)),
        Entry(_within(chaos, "follow", BatchScaling), {"rule": "linear"}, _struct(BatchScaling)),
        Entry(
            _within(chaos, "elastic", ElasticPolicy),
            {"min_replicas": 1, "max_replicas": 4},
            _struct(ElasticPolicy),
        ),
        Entry(_within(chaos, "rules", LogRule), {"name": "a", "pattern": "x"}, _struct(LogRule)),
    ]
    for kind in CATALOGUE:
        hints = typing.get_type_hints(kind)
        fields = {item.name: hints[item.name] for item in dataclasses.fields(kind) if item.init}
        entries.append(Entry(_breaking(chaos, kind), dict(kind.sample), fields))
    return entries


# -- processes -------------------------------------------------------------------------------------

_STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system")
_is_armed = False
_started: list[str] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _is_armed and event in _STARTS:
        _started.append(event)
        raise AssertionError(f"{event}: a process would have been started")


sys.addaudithook(_audit)  # the hook cannot be removed


@pytest.fixture
def no_process() -> Iterator[list[str]]:
    """Yield the names of calls that would have started a process; each of them fails."""
    global _is_armed  # noqa: PLW0603
    _started.clear()
    _is_armed = True
    yield _started
    _is_armed = False


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a directory with a log, and the address of a launcher without a server."""
    place = tmp_path_factory.mktemp("wrong")
    (place / "log.txt").write_text("2026-01-01T00:00:00 x\n")
    open_door(place, Door(url="http://127.0.0.1:1", token="t", pid=os.getpid()))
    assert (place / DOOR).is_file()
    return place


@pytest.fixture(scope="module")
def chaos_here(place: Path, request: pytest.FixtureRequest) -> Iterator[Chaos]:
    """Yield the fixture ``chaos`` on its own harness, so that these tests do not count as
    trainings.
    """
    with Harness(directory=place / "runs") as harness:
        yield Chaos(harness, request.node)


@pytest.fixture(scope="module")
def entries(chaos_here: Chaos, place: Path) -> list[tuple[Entry, str, Any]]:
    """Return every entry with each of its parameters and the annotation of the parameter."""
    all_entries = _entries(chaos_here, place)
    return [
        (entry, name, hint)
        for entry in all_entries
        for name, hint in sorted(entry.parameters().items())
    ]


# -- tests -----------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=examples(500), deadline=None, suppress_health_check=list(HealthCheck))
def test_a_wrong_call_is_bad_input_and_starts_nothing(
    entries: list[tuple[Entry, str, Any]], no_process: list[str], data: st.DataObject
) -> None:
    entry, name, hint = entries[data.draw(st.integers(0, len(entries) - 1))]
    odd = [number for number, value in enumerate(_ODD) if not _fits(hint, value)]
    number = data.draw(
        st.sampled_from([*odd, len(_ODD)])
    )  # the values themselves have no text that can be shown
    value = (
        _ODD[number]
        if number < len(_ODD)
        else data.draw(_plain_values.filter(lambda value: not _fits(hint, value)))
    )
    with pytest.raises(BadInput) as refused:
        entry.call(**entry.valid | {name: value})
    message = str(refused.value)
    assert len(message.splitlines()) == 1, message
    assert refused.value.remedy
    assert len(message) < 1000
    assert no_process == []


#: Calls of ``chaos.run("gpt", ...)``, and the expected line.
_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "text for a number": ({"steps": "x"}, "steps='x': use a value of type int or None"),
    "huge number": (
        {"steps": 10**30},
        "steps=1000000000000000000000000000000: use a number that has 64 bits",
    ),
    "huge setting": ({"nodes": 10**30}, "use a number that has 64 bits at most"),
    "huge number for a float": ({"startup_s": 10**400}, "startup_s=1000"),
    "number of 5000 digits": (
        {"steps": 10**5000},
        "steps=<int>: use a number that has 64 bits at most",
    ),
    "no options": ({"options": 5}, "options=5: use a value of type dict or None"),
    "NaN in options": ({"options": {"size": math.nan}}, "options.size=nan: use a finite number"),
    "options in themselves": (
        {"options": {"size": _ENDLESS}},
        "use a value that does not contain itself",
    ),
    "no list": ({"faults": Kill(rank=1, at_step=1)}, "write a list: [Kill(...)]"),
    "class for an instance": ({"faults": [Kill]}, "kill.Kill'>: give an instance: Kill(...)"),
    "fraction of a rank": (
        {"faults": [Kill(rank=1.5, at_step=1)]},
        "rank=1.5: use a value of type int or str",
    ),
    "bool for a rank": (
        {"faults": [Kill(rank=True, at_step=1)]},
        "rank=True: use a value of type int or str",
    ),
    "no rank": (
        {"faults": [Kill(rank=None, at_step=1)]},
        "rank=None: use a value of type int or str",
    ),
    "text for a step": (
        {"faults": [Kill(rank=1, at_step="1")]},
        "at_step='1': use a value of type int or None",
    ),
    "number for a text": (
        {"faults": [Raise(rank=1, at_step=1, message=5)]},
        "message=5: use a value of type str",
    ),
    "endless time": (
        {"faults": [Kill(rank=1, after_s=math.inf)]},
        "after_s=inf: use a finite number",
    ),
    "ranks that are none": (
        {"faults": [Cut(rank=1, at_step=1, side=["a"])]},
        "side[0]='a': use a value of type int",
    ),
    "text for a deadline": (
        {"deadline_s": "x"},
        "deadline_s='x': use a value of type float or None",
    ),
    "number for a name": ({"name": 5}, "name=5: use a value of type str"),
    "number for rules": (
        {"rules": 5},
        "rules=5: use a value of type str, Path, list of object or None",
    ),
    "text for lost steps": (
        {"max_lost_steps": "x"},
        "max_lost_steps='x': use a value of type int or None",
    ),
    "no bool": ({"twin": 1}, "twin=1: use a value of type bool"),
    "no bool for check": ({"check": "no"}, "check='no': use a value of type bool"),
    "part of a tier": (
        {"disk": CheckpointTier(target=5)},
        "disk.target=5: use a value of type str",
    ),  # type: ignore[arg-type]
    "part of a policy": (
        {"elastic": ElasticPolicy(min_replicas="1", max_replicas=4)},  # type: ignore[arg-type]
        "elastic.minReplicas='1': use a value of type int",
    ),
    "text that no file can hold": (
        {"name": "\ud800"},
        "name='\\ud800': use a text of valid Unicode",
    ),
    "path with NUL": ({"disk": CheckpointTier(target="/tmp/a\0b")}, "use a path without NUL"),
    "job with NUL": ({"job": "a\0.py"}, "job='a\\x00.py': name a Python file that exists"),
    "pattern that overflows": (
        {"rules": [LogRule(name="a", pattern="x{99999999999}")]},
        "correct the regular expression: the repetition number is too large",
    ),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_the_line_names_field_value_and_remedy(
    chaos_here: Chaos, no_process: list[str], case: str
) -> None:
    arguments, line = _REFUSED[case]
    with pytest.raises(BadInput) as refused:
        chaos_here.run(**{"job": "gpt", "steps": 5} | arguments)
    assert line in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    assert no_process == []


def test_too_many_faults_are_refused_before_they_are_made() -> None:
    with pytest.raises(BadInput, match=r"mtbf_s=1e-09: use 0\.0006 or more"):
        at_rate(Kill(rank="any"), mtbf_s=1e-9, seconds=60)
    with pytest.raises(BadInput, match="mtbf_steps=1e-300"):
        at_rate(Kill(rank="any"), mtbf_steps=1e-300, steps=60)


def test_a_path_with_nul_is_refused() -> None:
    for call in (
        lambda: launch("gpt", report="a\0b"),
        lambda: Harness(directory="a\0b"),
        lambda: read_outcomes(Path("a\0b")),
        lambda: check_log_rules("a\0b", "log.txt"),
    ):
        with pytest.raises(BadInput, match="use a path without NUL"):
            call()


def test_a_path_that_no_file_system_takes_is_refused() -> None:
    name = "x" * 5000
    for call in (
        lambda: resolve_job(name),
        lambda: resolve_job(f"{name}.py"),
        lambda: plan_command([name], watch=LogPatterns(step=r"(\d+)")),
        lambda: plan_command(["true"], watch=LogPatterns(step=r"(\d+)"), working_directory=name),
        lambda: judge_directory("a/" * 3000),
        lambda: read_outcomes(name),
    ):
        with pytest.raises(
            BadInput, match="use a path of up to 4095 bytes, with names of up to 255"
        ):
            call()


class Mode(enum.Enum):
    FAST = "fast"


@dataclasses.dataclass(frozen=True)
class Declared:
    """A class with fields of types that msgspec does not convert, as a fault of a user may have
    them.
    """

    pair: tuple[Path, int] = (Path("a"), 1)
    paths: list[Path] = dataclasses.field(default_factory=list)
    places: set[Path] = dataclasses.field(default_factory=set)
    mode: Mode = Mode.FAST


def test_fields_keep_the_kinds_of_containers_that_are_declared() -> None:
    assert convert_fields(Declared()) == {}
    declared = Declared(pair=["b", 2], paths=[Path("c")], places={Path("d")}, mode="fast")  # type: ignore[arg-type]
    assert convert_fields(declared) == {"pair": (Path("b"), 2), "mode": Mode.FAST}
    with pytest.raises(BadInput, match="give 2 values"):
        convert_fields(Declared(pair=(Path("b"),)))  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"pair\[1\]='c'"):
        convert_fields(Declared(pair=(Path("b"), "c")))  # type: ignore[arg-type]


def test_a_missing_argument_is_told_as_python_does() -> None:
    with pytest.raises(
        TypeError, match=r"plan_experiment\(\) missing 1 required positional argument: 'job'"
    ):
        plan_experiment(steps=5)  # type: ignore[call-arg]


def test_an_empty_path_names_no_place(no_process: list[str]) -> None:
    for call in (
        lambda: launch("gpt", report=""),
        lambda: Harness(directory=""),
        lambda: judge_directory(""),
        lambda: read_outcomes(""),
        lambda: RunClient(""),
        lambda: check_log_rules("", "log.txt"),
    ):
        with pytest.raises(BadInput, match="name a place, or leave it out"):
            call()
    assert no_process == []


def test_other_forms_of_right_values_stay_right(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    faults = (
        Cut(rank=np.int64(1), at_step=3, side=[1, 2], apart_from=[0], heal_after_s=1),  # type: ignore[arg-type]
        Kill(rank="any", at_step=2, signum=signal.SIGTERM),
    )
    planned = plan_experiment(
        "gpt",
        steps=np.int32(9),  # type: ignore[arg-type]
        faults=faults,
        deadline_s=math.inf,
        nodes=4,
        startup_s=60,
        hang_steps=np.float64(5.0),
        quarantined=["node9"],
        elastic={"minReplicas": 2, "maxReplicas": 4},
        disk=CheckpointTier(target=str(disk)),
        options={"size": "tiny"},
        rules=[
            LogRule(name="a", pattern="x"),
            {"name": "b", "logPattern": "y", "metricEvaluationDataPoints": "2"},
        ],
    )
    config = planned.config
    assert (planned.steps, planned.deadline_s) == (9, math.inf)
    assert (config.startup_s, config.hang_steps, config.quarantined) == (60.0, 5.0, ("node9",))
    assert type(config.startup_s) is type(config.hang_steps) is float
    assert config.elastic == ElasticPolicy(min_replicas=2, max_replicas=4)
    assert [rule.data_points for rule in config.rules] == [1, 2]
    cut, kill = planned.faults
    assert repr(cut) == repr(Cut(rank=1, at_step=3, side=(1, 2), apart_from=(0,), heal_after_s=1))
    assert isinstance(kill, Kill)
    assert kill.signum is signal.SIGTERM
    assert plan_experiment("gpt", steps=9, faults=[Hang(rank=1, at_step=3)]).faults == (
        Hang(rank=1, at_step=3),
    )


def test_a_place_may_be_a_text_or_a_path(tmp_path: Path) -> None:
    for place in (tmp_path, str(tmp_path)):
        with pytest.raises(BadInput, match=r"holds an outcome\.json"):
            read_outcomes(place)
        with Harness(directory=place) as harness:
            assert harness.directory == tmp_path
