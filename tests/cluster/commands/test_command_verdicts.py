"""Verdicts of commands cannot pass on nothing: what is missing is named, and so is what was not struck as planned."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.examples import examples

from chaoskit import Chaos, Outcome, Verdict, judge_directory
from chaoskit.experiment.judge.coverage import NAME
from chaoskit.experiment.twin.twin import Interrupted
from chaoskit.runlog.outcome import Check
from chaoskit.stacks import LogPatterns
from chaoskit.suites.canary.journals import Journals
from chaoskit.vocabulary import Event
from faults import Kill

WATCH = LogPatterns(step=r"step (\d+)", loss=r"loss (\S+)")
STEPS = LogPatterns(step=r"step (\d+)")
JOB = Path(__file__).parents[3] / "suites" / "canary" / "command_job.py"
#: What a verdict on a command is computed from. A line of these that cannot be read must not end as passed. (That a
#: process which was not struck had a rank, or ended, is not among them.)
NEEDED = {
    "command_exited",
    "command_started",
    "evidence",
    "injected",
    "logged",
    "run_ended",
    "started",
    "undone",
}


def run(chaos: Chaos, command: list[str], *faults: Kill, **plan: Any) -> Outcome:
    settings: dict[str, Any] = {
        "watch": WATCH,
        "check": False,
        "deadline_s": 60.0,
        "max_lost_steps": 100,
    }
    return chaos.run(command=command, faults=faults, **settings | plan)


def check(outcome: Outcome, name: str) -> Check:
    return next(check for check in outcome.checks if check.name.startswith(name))


# -- what is missing ----------------------------------------------------------------------------------------------


def damage(path: Path, chance: Random) -> tuple[str, set[str]]:
    """Damage one file. Returns how, and the events of the records that cannot be read any more; of a log: logged."""
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    place, how = (
        chance.randrange(len(lines)),
        chance.choice(["delete", "truncate", "duplicate", "flip"]),
    )
    at = chance.randrange(len(data))
    cut = len(data[: at + 1].splitlines()) - 1
    if how == "duplicate":
        lines.insert(chance.randrange(len(lines) + 1), lines[place])
        lost = []
    elif how == "delete":
        lost = [lines.pop(place)]
    elif how == "truncate":
        lost, lines = lines[cut:], [data[:at]]
    else:
        lost, lines = (
            [lines[cut]],
            [data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]],
        )
    path.write_bytes(b"".join(lines))
    return how, {"log" if path.suffix == ".log" else json.loads(line)["event"] for line in lost}


@pytest.mark.costly
def test_no_damage_that_matters_passes(chaos: Chaos, tmp_path: Path) -> None:
    """Of any file. A flipped bit of a log may leave what it shows as it was."""
    command = [sys.executable, str(JOB), "60", "0.02"]
    outcome = run(chaos, command, Kill(rank=1, at_step=15), ranks=2)
    assert outcome.verdict == Verdict.PASSED, outcome.reasons
    files = sorted(Path(outcome.directory).glob("journal/*.jsonl")) + sorted(
        Path(outcome.directory).glob("log/*")
    )
    for number in range(examples(200)):
        chance = Random(number)
        copy = tmp_path / "copy"
        shutil.copytree(outcome.directory, copy)
        path = copy / chance.choice(files).relative_to(outcome.directory)
        how, lost = damage(path, chance)
        verdict = judge_directory(copy).verdict
        if lost & NEEDED or (path.suffix == ".log" and how != "flip"):
            assert verdict != Verdict.PASSED, (number, path, how, lost)
        elif how == "duplicate":
            assert verdict == Verdict.PASSED, (number, path, how)
        shutil.rmtree(copy)


@pytest.mark.promise("each node and the harness tell what the verdict needs, once and alike")
def test_a_node_of_several_that_is_silent_is_named(chaos: Chaos, tmp_path: Path) -> None:
    outcome = run(chaos, ["sh", "-c", "echo step 0 loss 1; echo step 1 loss 2"], nodes=2)
    assert check(outcome, NAME).verdict == Verdict.PASSED
    copy = Path(shutil.copytree(outcome.directory, tmp_path / "copy"))
    (copy / "journal" / "node1.jsonl").unlink()
    again = judge_directory(copy)
    assert (again.verdict, check(again, NAME).detail) == (
        Verdict.UNKNOWN,
        "node1: it has written nothing",
    )


def test_a_log_may_go_on_after_the_deadline(chaos: Chaos) -> None:
    """Until the command is ended: what was not read any more is not missing."""
    command = ["sh", "-c", "echo step 1; yes | head -c 50000000; echo step 2; sleep 600"]
    outcome = run(chaos, command, twin=False, watch=STEPS, deadline_s=1.0)
    assert check(outcome, NAME).verdict == Verdict.PASSED, check(outcome, NAME).detail
    assert [point.step for point in outcome.steps] == [1]
    assert outcome.verdict == Verdict.FAILED


# -- checks that looked at too little -----------------------------------------------------------------------------


def test_what_does_not_apply_is_no_check(chaos: Chaos) -> None:
    outcome = run(chaos, ["sh", "-c", "echo step 0"], twin=False, watch=STEPS)
    assert outcome.verdict == Verdict.PASSED, outcome.reasons
    assert outcome.not_applied == {
        "recovered from every incident": "no fault struck",
        "losses equal the twin's": "there is no pattern for losses",
    }
    assert not outcome.not_applied.keys() & {check.name for check in outcome.checks}


@pytest.mark.promise("no later step in a run that ended well, without a twin")
def test_an_incident_without_a_later_step_is_not_excused_without_a_twin(chaos: Chaos) -> None:
    """The launcher ends well although its rank was killed, and whether that was in the last step is not known."""
    command = [
        "sh",
        "-c",
        "RANK=0 sh -c 'for n in 0 1 2 3 4 5 6 7 8 9; do echo step $n; sleep 0.3; done'; exit 0",
    ]
    outcome = run(chaos, command, Kill(rank=0, at_step=3), twin=False, watch=STEPS)
    assert outcome.verdict == Verdict.UNKNOWN, outcome.reasons
    assert "no step after step" in check(outcome, "recovered").detail


SPARSE = """
import sys
from pathlib import Path

counter = Path(sys.argv[1])
again = counter.exists()
counter.touch()
for step in range(40):
    if not again or step % 3 == 0 or step == 39:
        print(f"step {step}", flush=True)
"""


@pytest.mark.promise("or more than a tenth of the steps of the twin's log are missing in it")
def test_steps_that_the_unbroken_run_alone_shows_are_counted(chaos: Chaos, tmp_path: Path) -> None:
    """Losses are not asked for: nothing else would tell."""
    (tmp_path / "sparse.py").write_text(SPARSE)
    outcome = run(
        chaos, [sys.executable, str(tmp_path / "sparse.py"), str(tmp_path / "ran")], watch=STEPS
    )
    assert outcome.verdict == Verdict.UNKNOWN, outcome.reasons
    assert check(outcome, "the log shows steps").detail.startswith(
        "26 of 40 steps are in its twin's log only"
    )


TWICE = """
import subprocess, sys, time
from pathlib import Path

counter, how = Path(sys.argv[1]), sys.argv[2]
number = int(counter.read_text()) if counter.exists() else 0
counter.write_text(str(number + 1))
train = "import time; time.sleep(2); [print(f'step {n} loss {n}', flush=True) for n in range(10)]; time.sleep(1)"
for _ in range(1 + (how == "always" or number == 0)):
    subprocess.run(["env", "RANK=0", sys.executable, "-c", train], check=True)
"""


def twice(directory: Path, how: str) -> list[str]:
    """A launcher that starts its rank again when that has shown all its steps: ``always``, or in its ``first`` run."""
    (directory / "twice.py").write_text(TWICE)
    return [sys.executable, str(directory / "twice.py"), str(directory / "runs"), how]


@pytest.mark.promise("rank was started again and showed steps again, began again by itself")
def test_an_unbroken_run_whose_rank_was_started_again_is_run_once_more(
    chaos: Chaos, tmp_path: Path
) -> None:
    """Its log shows every step twice, as one of two ranks would; the node tells of one rank that was started twice."""
    outcome = run(chaos, twice(tmp_path, "first"))
    assert outcome.verdict == Verdict.PASSED, outcome.reasons
    assert (tmp_path / "runs").read_text() == "3"


def test_a_rank_that_is_always_started_again_leaves_no_unbroken_run(
    chaos: Chaos, tmp_path: Path
) -> None:
    with pytest.raises(
        Interrupted, match="rank 0 on node0 was started again, and its log goes back from step 9 to"
    ):
        run(chaos, twice(tmp_path, "always"))


# -- what was struck ----------------------------------------------------------------------------------------------


@pytest.mark.promise("While a launcher has no rank below it, its faults wait.")
def test_a_launcher_is_not_struck_in_place_of_its_rank(chaos: Chaos) -> None:
    """While the rank is gone its launcher is the first process of the node. The fault waits for the next rank."""
    first, next_one = "sleep 3; echo step 0", "echo step 1; sleep 0.5; echo step 2"
    command = f"RANK=0 sh -c '{first}'; sleep 2; until RANK=0 sh -c '{next_one}'; do :; done"
    outcome = run(chaos, ["sh", "-c", command], Kill(rank=0, after_s=0.5), twin=False, watch=STEPS)
    (struck,), (started,) = outcome.records(Event.INJECTED), outcome.records(Event.COMMAND_STARTED)
    assert struck["pid"] != started["pid"]
    assert struck["pid"] in {one["pid"] for one in outcome.records(Event.RANK_FOUND)}
    assert outcome.verdict == Verdict.PASSED, outcome.reasons


def test_two_faults_on_one_rank_struck_what_was_planned(chaos: Chaos) -> None:
    """The second one is due while the rank is still to be replaced: it is late, and that is no mistake."""
    command = [sys.executable, str(JOB), "60", "0.02"]
    outcome = run(chaos, command, Kill(rank=1, at_step=15), Kill(rank=1, at_step=16), ranks=2)
    assert outcome.verdict == Verdict.PASSED, outcome.reasons
    assert len({one["pid"] for one in outcome.records(Event.INJECTED)}) == 2


@pytest.mark.promise(
    "What differs is an *error*: something else was tried than what was asked for."
)
def test_the_first_process_of_a_node_is_its_rank_by_the_word_of_the_node(
    chaos: Chaos, tmp_path: Path
) -> None:
    """Where no process has the variable RANK. The node that tells of another one shows the mistake."""
    command = [
        "sh",
        "-c",
        "n=0; while [ $n -lt 60 ]; do echo step $n; n=$((n+1)); sleep 0.05; done",
    ]
    outcome = run(chaos, command, Kill(rank=1, at_step=5), nodes=2, twin=False, watch=STEPS)
    assert not outcome.records(Event.RANK_FOUND)
    assert outcome.verdict == Verdict.FAILED
    assert "training completed: the command on node1 was killed by SIGKILL" in outcome.reasons
    assert not any("struck what was planned" in check.name for check in outcome.checks)
    copy = Path(shutil.copytree(outcome.directory, tmp_path / "copy"))
    journals = Journals(copy)
    started = dict(journals.of("command_started"))
    started["node0"]["pid"], started["node1"]["pid"] = (
        started["node1"]["pid"],
        started["node0"]["pid"],
    )
    journals.write()
    again = judge_directory(copy)
    assert again.verdict == Verdict.ERROR
    assert "had rank 0, not rank 1 of node1" in again.reasons[0]
