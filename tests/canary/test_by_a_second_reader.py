"""Mistakes that a reader of documentation and judge expected to pass: see
``docs/canary/by-a-second-reader.md``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.by_a_second_reader_faults import (
    KillAndStop,
    KillInUpdate,
    KillOtherNode,
    LazyKill,
    NaNElsewhere,
)
from support.readers import cases, check, log_of, require

from chaoskit import Chaos, LogPatterns, Outcome, Verdict, judge_directory
from chaoskit.elastic.settings import ElasticPolicy
from chaoskit.journal import read_journals
from chaoskit.process.linux import state
from chaoskit.suites.canary.journals import Journals
from chaoskit.vocabulary import Event
from faults import Hang, Kill, KillNode, NaN, Scale
from faults.base import Fault

pytestmark = pytest.mark.costly

JOBS = Path(__file__).parents[1] / "jobs"
JOB, COMMAND = (
    str(JOBS / "wrong" / "by_a_second_reader_job.py"),
    JOBS / "wrong" / "by_a_second_reader_command.py",
)
WATCH = LogPatterns(step=r"step (\d+)", loss=r"loss (\S+)")
STEPS, AT = 10, 4
COMMAND_STEPS, COMMAND_AT = 100, 25
_OTHER_RATE = 0.3

_PLAN: dict[str, Any] = {"nodes": 3, "shards": 3, "steps": STEPS}
_KILL, _LAST = Kill(rank=1, at_step=AT), Kill(rank=1, at_step=STEPS - 1)
_ELASTIC = ElasticPolicy(min_replicas=1, max_replicas=4, scaling_timeout_s=0.0)
_EVERY_RUN: dict[str, Any] = {"faults": [], "reference": "required"}
#: What would find corruption while it trains is off: what is left is what a verdict is made of.
_UNSEEN: dict[str, Any] = {"hash_every": 0, "state_hash_steps": 0}
_GROWS: dict[str, Any] = {
    "nodes": 2,
    "shards": 4,
    "spares": 0,
    "steps": 20,
    "until": {"world": 3},
    "elastic": _ELASTIC,
    "faults": [Scale(to=3, at_step=3)],
}


@dataclass(frozen=True)
class Case:
    """A mistake, and the verdict that it must get.

    Attributes:
        expected: the verdict that the documentation promises.
        options: options of the job; ``how`` is the mistake.
        plan: arguments of the run.
        function: name of the job's train function.
    """

    expected: Verdict
    options: dict[str, Any]
    plan: dict[str, Any]
    function: str = "train"


def _failed(
    how: str, plan: dict[str, Any] | None = None, function: str = "train", **options: Any
) -> Case:
    return Case(
        Verdict.FAILED, {"how": how, **options}, {"faults": [_KILL], **(plan or {})}, function
    )


def _sharded(how: str, plan: dict[str, Any], **options: Any) -> Case:
    return _failed(how, plan, "train_sharded", **options)


#: Number and name -> how the run is planned.
RUNTIME: dict[str, Case] = {
    "01_fast_schedule": _failed("schedule_when_recovered", {"reduction": "fast"}),
    "02_grown_schedule": _failed(
        "newcomer_schedule", _GROWS | _UNSEEN | {"reduction": "fast"}, period=1000
    ),
    "03_shrunk_schedule": _sharded(
        "schedule_when_recovered",
        {"faults": [_LAST], "spares": 0, "replacement_s": 0, "max_lost_steps": 2},
    ),
    "04_followed_schedule": _failed(
        "schedule_unless_twin",
        {"nodes": 2, "shards": 8, "elastic": _ELASTIC, "follow": {"rule": "none"}},
    ),
    "05_plain_schedule": _failed("schedule_always", _EVERY_RUN | {"steps": 6}),
    "06_skip_decays": _failed("skip_decays", _EVERY_RUN | {"nonfinite": "skip"}, bad=3),
    "07_skip_good": _failed("skip_good", _EVERY_RUN | {"nonfinite": "skip"}),
    "08_skip_other_shards": _failed("skip_other_shards", {"nonfinite": "skip"}, bad=6),
    "09_lost_after_telling": _failed("lost_after_telling"),
    "10_wrong_collective": _failed("wrong_collective", shards=3),
    "11_unshuffled": _failed("unshuffled", _EVERY_RUN),
    "12_silent_hook": _failed("silent_hook"),
    "13_slow_optimizer_idle": _failed("slow_optimizer_idle", {"reduction": "fast"}, rate=1e-7),
    "14_sharded_buffers": _sharded("sharded_buffers", {}, norm=True),
    "15_silent_rank": _failed("silent_rank", {"faults": [_LAST], "spares": 0}),
}

#: Changes of a run that say nothing against it -> the options of the job, and how the run is planned.
HARMLESS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "31_harmless_skip": (
        {"bad": 3},
        {"faults": [Kill(rank=1, at_step=6)], "nonfinite": "skip", "reference": "on"},
    ),
    "32_harmless_node": ({}, {"faults": [KillNode(rank=1, at_step=AT)], "spares": 2}),
}


def contributed(outcome: Outcome) -> bool:
    """Return whether the struck rank contributed to the step in which the fault was due."""
    records = journals_of(outcome)
    (struck,) = (record["worker"] for record in records if record.event == Event.INJECTED)
    return any(
        record.event == Event.REDUCE and (record.source, record["step"]) == (struck, AT)
        for record in records
    )


def lost_nodes(outcome: Outcome) -> set[str]:
    """Return the nodes that the coordinator recorded as lost."""
    return {record["node"] for record in journals_of(outcome) if record.event == Event.NODE_LOST}


#: Faults that do another thing than was asked for -> the faults, the mistake of the job, and whether it was made.
ACTS: dict[str, tuple[list[Fault], str, Callable[[Outcome], bool]]] = {
    "16_other_tensor": (
        [NaNElsewhere(rank=1, at_step=AT, parameter="0.weight")],
        "none",
        lambda outcome: "3.bias" in outcome.faults[0].evidence[1].observed,
    ),
    "17_late_nan": (
        [NaN(rank=1, at_step=AT, parameter="0.weight")],
        "late_nan",
        lambda outcome: "planted late_nan: step 6" in log_of(outcome),
    ),
    "18_other_node": (
        [KillOtherNode(rank=1, at_step=AT)],
        "none",
        lambda outcome: lost_nodes(outcome) == {"node2"},
    ),
    "19_too_late_in_step": ([KillInUpdate(rank=1, at_step=AT)], "slow_update", contributed),
    "20_left_stopped": (
        [KillAndStop(rank=1, at_step=AT)],
        "none",
        lambda outcome: [state(process.pid) for process in KillAndStop.stopped] == ["T"],
    ),
    "21_lazy_second": (
        [LazyKill(rank=1, at_step=AT), _KILL],
        "none",
        lambda outcome: [fault.state for fault in outcome.faults] == ["confirmed", "confirmed"],
    ),
}

#: What is judged otherwise today -> the verdict that it has instead, and why.
MISJUDGED: dict[str, str] = {
    "10_wrong_collective": "passed: results of a script's own collectives are not compared with the twin's",
    "12_silent_hook": "passed: nothing says which hooks a script has, and when each is to be called",
    "20_left_stopped": "passed: the undo log is not asked which of its entries are open",
    "21_lazy_second": "passed: one loss shows each fault that may have led to it",
    "29_command_decoy": "passed: which processes train is the launcher's word",
}

_runs: dict[str, Path] = {}


def journals_of(outcome: Outcome) -> list[Any]:
    return list(read_journals(Path(outcome.directory) / "journal"))


@pytest.mark.parametrize("name", cases(RUNTIME, MISJUDGED))
def test_a_mistake_of_the_runtime(chaos: Chaos, name: str) -> None:
    case = RUNTIME[name]
    plan = {**_PLAN, **case.plan}
    outcome = chaos.run(f"{JOB}:{case.function}", options=case.options, check=False, **plan)
    require("planted" in log_of(outcome), outcome.directory)
    check(outcome, case.expected)


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_change(chaos: Chaos, name: str) -> None:
    options, plan = HARMLESS[name]
    check(
        chaos.run(f"{JOB}:train", options=options, check=False, **{**_PLAN, **plan}), Verdict.PASSED
    )


@pytest.mark.parametrize("name", cases(ACTS, MISJUDGED))
def test_an_act_that_is_another_one(chaos: Chaos, name: str) -> None:
    faults, how, is_planted = ACTS[name]
    try:
        outcome = chaos.run(
            f"{JOB}:train",
            faults=faults,
            options={"how": how},
            check=False,
            **{**_PLAN, "spares": 2},
        )
        require(is_planted(outcome), (outcome.faults, outcome.reasons, outcome.directory))
    finally:
        for process in KillAndStop.stopped:
            os.kill(process.pid, signal.SIGCONT)
            process.kill()
            process.wait()
        KillAndStop.stopped.clear()
    check(outcome, Verdict.ERROR)


# -- directories and journals ----------------------------------------------------------------------


def a_run(chaos: Chaos, **plan: Any) -> Path:
    """Return the directory of a run of this session that passed."""
    key = repr(plan)
    if key not in _runs:
        _runs[key] = Path(chaos.run(f"{JOB}:train", faults=[_KILL], **{**_PLAN, **plan}).directory)
    return _runs[key]


def drop(run: Path, is_dropped: Callable[[str, dict[str, Any]], bool]) -> None:
    journals = Journals(run)
    before = sum(map(len, journals.files.values()))
    journals.drop(is_dropped)
    require(sum(map(len, journals.files.values())) == before - 1, run)
    journals.write()


def one_state_missing(run: Path, other: Path) -> None:
    drop(run, lambda source, record: source == "node2.0" and record["event"] == Event.STATE)


def undone_missing(run: Path, other: Path) -> None:
    drop(run, lambda source, record: record["event"] == Event.UNDONE)


def change(run: Path, name: str, **values: Any) -> None:
    content = json.loads((run / name).read_text())
    (run / name).write_text(json.dumps(content | values))


def reference_cut(run: Path, other: Path) -> None:
    change(
        run,
        "reference.json",
        losses=json.loads((run / "reference.json").read_text())["losses"][:1],
        state={},
    )


def floor_foreign(run: Path, other: Path) -> None:
    require((run / "floor.json").read_text() != (other / "floor.json").read_text(), run)
    shutil.copy(other / "floor.json", run / "floor.json")


def twin_no_scalars(run: Path, other: Path) -> None:
    change(run, "twin.json", scalars="")


#: Number and name -> the change, and how the run is planned. All of them are expected to be unknown.
WRITTEN: dict[str, tuple[Callable[[Path, Path], None], dict[str, Any]]] = {
    "22_one_state_missing": (one_state_missing, {}),
    "23_reference_cut": (reference_cut, {"reference": "required"}),
    "24_floor_foreign": (floor_foreign, {"reduction": "fast"}),
    "25_twin_no_scalars": (twin_no_scalars, {}),
    "26_undone_missing": (undone_missing, {}),
}


@pytest.mark.parametrize("name", cases(WRITTEN, MISJUDGED))
def test_a_mistake_in_what_is_written(chaos: Chaos, tmp_path: Path, name: str) -> None:
    damage, plan = WRITTEN[name]
    run = Path(shutil.copytree(a_run(chaos, **plan), tmp_path / "run"))
    require(judge_directory(run).verdict == Verdict.PASSED, run)
    damage(
        run, a_run(chaos, options={"rate": _OTHER_RATE}, **plan) if damage is floor_foreign else run
    )
    check(judge_directory(run), Verdict.UNKNOWN)


# -- commands --------------------------------------------------------------------------------------


def shown_by(rank: int, log: str) -> int:
    """Return the number of lines of the log that ``rank`` has written."""
    return log.count(f"[rank{rank}] step")


def struck_at_the_end(outcome: Outcome) -> bool:
    """Return whether all steps were shown when the fault struck, and none after it."""
    injected_s = outcome.faults[0].injected_s
    return injected_s is not None and all(point.at_s <= injected_s for point in outcome.steps)


#: Number and name -> what the documentation promises, the mode, the fault, and whether the mistake was made.
COMMANDS: dict[str, tuple[Verdict, str, Fault, Callable[[Outcome], bool]]] = {
    "27_command_idle_rank": (
        Verdict.UNKNOWN,
        "idle_rank",
        Kill(rank=1, at_step=COMMAND_AT),
        lambda outcome: shown_by(1, log_of(outcome)) < COMMAND_STEPS // 2,
    ),
    "28_command_hang_ignored": (
        Verdict.UNKNOWN,
        "hang_ignored",
        Hang(rank=1, at_step=COMMAND_AT),
        lambda outcome: shown_by(1, log_of(outcome)) < COMMAND_STEPS // 2,
    ),
    "29_command_decoy": (
        Verdict.UNKNOWN,
        "decoy",
        Kill(rank=1, at_step=COMMAND_AT),
        lambda outcome: (
            shown_by(0, log_of(outcome)) == COMMAND_STEPS and outcome.faults[0].state == "confirmed"
        ),
    ),
    "30_command_buffered": (
        Verdict.ERROR,
        "buffered",
        Kill(rank=1, at_step=COMMAND_AT),
        struck_at_the_end,
    ),
    "33_harmless_bursts": (
        Verdict.PASSED,
        "bursts",
        Kill(rank=1, at_step=COMMAND_AT),
        lambda outcome: shown_by(0, log_of(outcome)) >= COMMAND_STEPS,
    ),
}


@pytest.mark.parametrize("name", cases(COMMANDS, MISJUDGED))
def test_a_command(chaos: Chaos, name: str) -> None:
    expected, how, fault, is_planted = COMMANDS[name]
    outcome = chaos.run(
        command=[sys.executable, str(COMMAND), how, str(COMMAND_STEPS), "0.02"],
        watch=WATCH,
        ranks=2,
        faults=[fault],
        max_lost_steps=COMMAND_STEPS,
        check=False,
    )
    require(is_planted(outcome), (outcome.faults, outcome.reasons, outcome.directory))
    check(outcome, expected)
