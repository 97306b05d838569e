"""Mistakes that a reader of the documentation alone expected to pass: see
``docs/canary/by-a-reader.md``.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.by_a_reader_faults import KillLate, KillOther, KillTwo, Nothing
from support.readers import cases, check, log_of, require

from chaoskit import Chaos, LogPatterns, Verdict, judge_directory
from chaoskit.suites.canary.journals import Journals
from faults import Kill
from faults.base import Fault

pytestmark = pytest.mark.costly

JOB = str(Path(__file__).parents[1] / "jobs" / "wrong" / "by_a_reader_job.py")
COMMAND = Path(__file__).parents[1] / "jobs" / "wrong" / "by_a_reader_command.py"
WATCH = LogPatterns(step=r"step (\d+)", loss=r"loss (\S+)")
STEPS, AT = 10, 4
COMMAND_STEPS, COMMAND_AT = 100, 25

_PLAN: dict[str, Any] = {"nodes": 3, "shards": 3, "steps": STEPS}
_LAST = Kill(rank=1, at_step=STEPS - 1)

#: Number and name -> verdict, the fault or None, and how the run is planned.
RUNTIME: dict[str, tuple[Verdict, Fault | None, dict[str, Any]]] = {
    "01_scheduler_behind": (
        Verdict.FAILED,
        Kill(rank=1, at_step=AT),
        {"options": {"how": "scheduler_behind"}},
    ),
    "02_buffers_behind": (
        Verdict.FAILED,
        Kill(rank=1, at_step=AT),
        {"options": {"how": "buffers_behind", "norm": True}},
    ),
    "03_fast_momentum": (
        Verdict.FAILED,
        Kill(rank=1, at_step=AT),
        {"options": {"how": "ends_without_momentum"}, "reduction": "fast"},
    ),
    "04_fast_twice": (
        Verdict.FAILED,
        Kill(rank=1, at_step=AT),
        {"options": {"how": "twice"}, "reduction": "fast"},
    ),
    "05_shrunk_momentum": (
        Verdict.FAILED,
        _LAST,
        {"options": {"how": "ends_without_momentum"}, "spares": 0},
    ),
    "06_sharded_forgets": (
        Verdict.FAILED,
        _LAST,
        {
            "function": "train_sharded",
            "options": {"how": "forget_when_restored"},
            "max_lost_steps": 1,
        },
    ),
    "07_buffer_nan": (
        Verdict.FAILED,
        Kill(rank=1, at_step=AT),
        {"options": {"how": "buffer_nan", "norm": True}, "reduction": "fast"},
    ),
    "08_tells_half": (
        Verdict.UNKNOWN,
        Kill(rank=1, at_step=AT),
        {"options": {"how": "tells_half"}},
    ),
    "09_fast_scale": (
        Verdict.FAILED,
        None,
        {"options": {"how": "scale"}, "reduction": "fast", "reference": "required"},
    ),
    "10_sharded_scale": (
        Verdict.FAILED,
        None,
        {"function": "train_sharded", "options": {"how": "scale"}, "reference": "required"},
    ),
    "11_one_momentum": (
        Verdict.FAILED,
        Kill(rank=1, at_step=AT),
        {"options": {"how": "one_momentum"}},
    ),
    "26_harmless_slow": (Verdict.PASSED, Kill(rank=1, at_step=AT), {"options": {"how": "slow"}}),
}

#: Faults that do another thing than was asked for.
ACTS: dict[str, tuple[Verdict, Fault, dict[str, Any]]] = {
    "12_other_process": (Verdict.ERROR, KillOther(rank=1, at_step=AT), {}),
    "13_too_late": (Verdict.ERROR, KillLate(rank=1, at_step=AT), {"steps": 60}),
    "14_one_more": (Verdict.ERROR, KillTwo(rank=1, at_step=AT), {}),
    "15_says_nothing": (Verdict.UNKNOWN, Nothing(rank=1, at_step=AT), {}),
}

#: What is judged otherwise today -> the verdict that it has instead, and why.
MISJUDGED: dict[str, str] = {
    "08_tells_half": "passed: nothing says which tensors a final state must have",
}

_runs: dict[str, Path] = {}


@pytest.mark.parametrize("name", cases(RUNTIME, MISJUDGED))
def test_a_mistake_of_the_runtime(chaos: Chaos, name: str) -> None:
    expected, fault, given = RUNTIME[name]
    plan = {**_PLAN, **given}
    function = plan.pop("function", "train")
    faults = [fault] if fault is not None else []
    outcome = chaos.run(f"{JOB}:{function}", faults=faults, check=False, **plan)
    require("planted" in log_of(outcome))
    check(outcome, expected)


@pytest.mark.parametrize("name", cases(ACTS, MISJUDGED))
def test_an_act_that_is_another_one(chaos: Chaos, name: str) -> None:
    expected, fault, given = ACTS[name]
    outcome = chaos.run(
        f"{JOB}:train", faults=[fault], check=False, **{**_PLAN, "spares": 2, **given}
    )
    check(outcome, expected)


# -- directories and journals ----------------------------------------------------------------------


def a_run(chaos: Chaos, number: int = 0) -> Path:
    """Return the directory of a run of this session that passed; all of these runs have one
    plan.
    """
    key = f"run{number}"
    if key not in _runs:
        _runs[key] = Path(
            chaos.run(f"{JOB}:train", faults=[Kill(rank=1, at_step=AT)], **_PLAN).directory
        )
    return _runs[key]


def twin_cut(run: Path, other: Path) -> None:
    twin = json.loads((run / "twin.json").read_text())
    (run / "twin.json").write_text(json.dumps(twin | {"losses": twin["losses"][:3]}))


def twin_no_ending(run: Path, other: Path) -> None:
    twin = json.loads((run / "twin.json").read_text())
    (run / "twin.json").write_text(json.dumps(twin | {"ending": {}, "weights_digest": ""}))


def plan_other_seed(run: Path, other: Path) -> None:
    plan = json.loads((run / "plan.json").read_text())
    plan["settings"]["seed"] = 7
    (run / "plan.json").write_text(json.dumps(plan))


def foreign_journal(run: Path, other: Path) -> None:
    shutil.copy(other / "journal" / "node2.0.jsonl", run / "journal" / "node2.0.jsonl")


def journal_copied(run: Path, other: Path) -> None:
    shutil.copy(run / "journal" / "node2.0.jsonl", run / "journal" / "node2.7.jsonl")


def other_clock(run: Path, other: Path) -> None:
    journals = Journals(run)
    for source, records in journals.files.items():
        for record in records if "." in source else ():
            record["t_ns"] -= 200_000_000
    journals.write()


def harmless_directory(run: Path, other: Path) -> None:
    twin = json.loads((run / "twin.json").read_text())
    (run / "twin.json").write_text(json.dumps(dict(reversed(twin.items())), indent=4))
    (run / "outcome.json").unlink()
    (run / "journal" / "README.txt").write_text("copied from another machine\n")


#: Number and name -> what the documentation promises, and the change.
WRITTEN: dict[str, tuple[Verdict, Callable[[Path, Path], None]]] = {
    "16_twin_cut": (Verdict.UNKNOWN, twin_cut),
    "17_twin_no_ending": (Verdict.UNKNOWN, twin_no_ending),
    "18_plan_other_seed": (Verdict.UNKNOWN, plan_other_seed),
    "19_foreign_journal": (Verdict.UNKNOWN, foreign_journal),
    "20_journal_copied": (Verdict.UNKNOWN, journal_copied),
    "21_other_clock": (Verdict.ERROR, other_clock),
    "25_harmless_directory": (Verdict.PASSED, harmless_directory),
}


@pytest.mark.parametrize("name", cases(WRITTEN, MISJUDGED))
def test_a_mistake_in_what_is_written(chaos: Chaos, tmp_path: Path, name: str) -> None:
    expected, change = WRITTEN[name]
    run = Path(shutil.copytree(a_run(chaos), tmp_path / "run"))
    require(judge_directory(run).verdict == Verdict.PASSED)
    change(run, a_run(chaos, 1))
    check(judge_directory(run), expected)


# -- commands --------------------------------------------------------------------------------------


def repeats(log: str) -> int:
    """Return the number of lines of the log that show a step again."""
    lines = [line.partition(" loss")[0] for line in log.splitlines() if "] step " in line]
    return len(lines) - len(set(lines))


#: Number and name -> what the documentation promises, the mode, and what the log shows of it.
COMMANDS: dict[str, tuple[Verdict, str, Callable[[str], bool]]] = {
    "22_command_nan": (Verdict.FAILED, "nan", lambda log: log.count("loss nan") > COMMAND_STEPS),
    "23_command_helper": (Verdict.UNKNOWN, "helper", lambda log: repeats(log) == 0),
    "24_command_one_rank": (
        Verdict.UNKNOWN,
        "one_rank",
        lambda log: log.count("[rank1] step") < COMMAND_STEPS // 2,
    ),
    "27_harmless_command": (Verdict.PASSED, "warns", lambda log: "UserWarning" in log),
}


@pytest.mark.parametrize("name", cases(COMMANDS, MISJUDGED))
def test_a_command(chaos: Chaos, name: str) -> None:
    expected, how, is_planted = COMMANDS[name]
    outcome = chaos.run(
        command=[sys.executable, str(COMMAND), how, str(COMMAND_STEPS), "0.02"],
        watch=WATCH,
        ranks=2,
        faults=[Kill(rank=1, at_step=COMMAND_AT)],
        max_lost_steps=COMMAND_STEPS,
        twin=how
        != "helper",  # an unbroken run with such helpers is refused, as if its ranks had been restarted
        check=False,
    )
    require(is_planted(log_of(outcome)))
    check(outcome, expected)


@pytest.mark.parametrize(
    ("how", "told"),
    [("one_rank", "rank 1 was never started again"), ("helper", "which of them trained")],
)
def test_without_a_twin_the_node_tells_of_the_ranks(chaos: Chaos, how: str, told: str) -> None:
    """The node's messages alone show these ranks, since there is no log of an unbroken run to
    compare with.
    """
    outcome = chaos.run(
        command=[sys.executable, str(COMMAND), how, str(COMMAND_STEPS), "0.02"],
        watch=WATCH,
        ranks=2,
        faults=[Kill(rank=1, at_step=COMMAND_AT)],
        max_lost_steps=COMMAND_STEPS,
        twin=False,
        check=False,
    )
    assert outcome.verdict == Verdict.UNKNOWN
    assert [reason for reason in outcome.reasons if told in reason], outcome.reasons
