"""Verdicts of commands cannot pass on missing evidence: they name missing records, and wrong
targets of faults.
"""

from __future__ import annotations

import json
import re
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
#: Events that the verdict on a command is computed from.
#: A run must not pass if such a line cannot be read.
#: Rank and end of a process that was not struck are not needed.
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


# -- missing records -------------------------------------------------------------------------------


def damage(path: Path, generator: Random) -> tuple[str, set[str]]:
    """Damage one file; return the kind of damage, and the events of the records that cannot be read
    any more.

    Lines of a log count as the event ``log``.
    """
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    place, how = (
        generator.randrange(len(lines)),
        generator.choice(["delete", "truncate", "duplicate", "flip"]),
    )
    at = generator.randrange(len(data))
    cut = len(data[: at + 1].splitlines()) - 1
    if how == "duplicate":
        lines.insert(generator.randrange(len(lines) + 1), lines[place])
        lost = []
    elif how == "delete":
        lost = [lines.pop(place)]
    elif how == "truncate":
        lost, lines = lines[cut:], [data[:at]]
    else:
        lost, lines = (
            [lines[cut]],
            [data[:at] + bytes([data[at] ^ 1 << generator.randrange(8)]) + data[at + 1 :]],
        )
    path.write_bytes(b"".join(lines))
    return how, {"log" if path.suffix == ".log" else json.loads(line)["event"] for line in lost}


@pytest.mark.costly
def test_no_damage_that_matters_passes(chaos: Chaos, tmp_path: Path) -> None:
    """Damage of any needed file is noticed, except that a flipped bit of a log may leave its
    meaning unchanged.
    """
    command = [sys.executable, str(JOB), "60", "0.02"]
    outcome = run(chaos, command, Kill(rank=1, at_step=15), ranks=2)
    assert outcome.verdict == Verdict.PASSED, outcome.reasons
    files = sorted(Path(outcome.directory).glob("journal/*.jsonl")) + sorted(
        Path(outcome.directory).glob("log/*")
    )
    for number in range(examples(200)):
        generator = Random(number)
        copy = tmp_path / "copy"
        shutil.copytree(outcome.directory, copy)
        path = copy / generator.choice(files).relative_to(outcome.directory)
        how, lost = damage(path, generator)
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
        "node1: its journal is missing",
    )


def test_a_log_may_go_on_after_the_deadline(chaos: Chaos) -> None:
    """Output between the deadline and the end of the command is not read, and does not count as
    missing.
    """
    command = ["sh", "-c", "echo step 1; yes | head -c 50000000; echo step 2; sleep 600"]
    outcome = run(chaos, command, twin=False, watch=STEPS, deadline_s=1.0)
    assert check(outcome, NAME).verdict == Verdict.PASSED, check(outcome, NAME).detail
    assert [point.step for point in outcome.steps] == [1]
    assert outcome.verdict == Verdict.FAILED


# -- checks without enough evidence ----------------------------------------------------------------


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
    """The verdict is unknown if the launcher ends well although its rank was killed, perhaps in the
    last step.
    """
    command = [
        "sh",
        "-c",
        "RANK=0 sh -c 'for n in 0 1 2 3 4 5 6 7 8 9; do echo step $n; sleep 0.3; done'; exit 0",
    ]
    outcome = run(chaos, command, Kill(rank=0, at_step=3), twin=False, watch=STEPS)
    assert outcome.verdict == Verdict.UNKNOWN, outcome.reasons
    assert "no step after step" in check(outcome, "recovered").detail


SPARSE = """
from pathlib import Path

counter = Path({counter!r})
again = counter.exists()
counter.touch()
for step in range(40):
    if not again or step % 3 == 0 or step == 39:
        print("step", step, flush=True)
"""


@pytest.mark.promise("or more than a tenth of the steps of the twin's log are missing in it")
def test_steps_that_the_unbroken_run_alone_shows_are_counted(chaos: Chaos, tmp_path: Path) -> None:
    """Missing steps are counted; no other check would show them, because losses are not compared."""
    (tmp_path / "sparse.py").write_text(SPARSE.format(counter=str(tmp_path / "ran")))
    outcome = run(chaos, [sys.executable, str(tmp_path / "sparse.py")], watch=STEPS)
    assert outcome.verdict == Verdict.UNKNOWN, outcome.reasons
    assert check(outcome, "the log shows steps").detail.startswith(
        "26 of 40 steps are in its twin's log only"
    )


TWICE = """
import subprocess, sys, time
from pathlib import Path

counter, how = Path({counter!r}), sys.argv[1]
number = int(counter.read_text()) if counter.exists() else 0
counter.write_text(str(number + 1))
train = "import time; time.sleep(2); [print('step', n, 'loss', n, flush=True) for n in range(10)]; time.sleep(1)"
for _ in range(1 + (how == "always" or number == 0)):
    subprocess.run(["env", "RANK=0", sys.executable, "-c", train], check=True)
"""


def twice(directory: Path, how: str) -> list[str]:
    """Return a launcher that starts its finished rank again: ``always``, or in its ``first`` run.

    The launcher contains the path of its counter, which all runs must share.
    """
    (directory / "twice.py").write_text(TWICE.format(counter=str(directory / "runs")))
    return [sys.executable, str(directory / "twice.py"), how]


@pytest.mark.promise("rank was started again and showed steps again, began again by itself")
def test_an_unbroken_run_whose_rank_was_started_again_is_run_once_more(
    chaos: Chaos, tmp_path: Path
) -> None:
    """The log shows every step twice, as with two ranks, but the node reports one rank that was
    started twice.
    """
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


# -- targets of faults-------------------------------------------------------------------------------------------


@pytest.mark.promise("While a launcher has no rank below it, its faults wait.")
def test_a_launcher_is_not_struck_in_place_of_its_rank(chaos: Chaos) -> None:
    """The fault waits for the next rank while the launcher is the first process of its node."""
    first, next_one = "sleep 3; echo step 0", "echo step 1; sleep 2; echo step 2"
    command = f"RANK=0 sh -c '{first}'; sleep 2; until RANK=0 sh -c '{next_one}'; do :; done"
    outcome = run(chaos, ["sh", "-c", command], Kill(rank=0, after_s=0.5), twin=False, watch=STEPS)
    (injected,), (started,) = (
        outcome.records(Event.INJECTED),
        outcome.records(Event.COMMAND_STARTED),
    )
    assert injected["pid"] != started["pid"]
    assert injected["pid"] in {record["pid"] for record in outcome.records(Event.RANK_FOUND)}
    assert outcome.verdict == Verdict.PASSED, outcome.reasons


def test_two_faults_on_one_rank_struck_what_was_planned(chaos: Chaos) -> None:
    """The second fault is due while the rank is being replaced: it is late, and that is no mistake."""
    command = [sys.executable, str(JOB), "60", "0.02"]
    outcome = run(chaos, command, Kill(rank=1, at_step=15), Kill(rank=1, at_step=16), ranks=2)
    assert outcome.verdict == Verdict.PASSED, outcome.reasons
    assert len({record["pid"] for record in outcome.records(Event.INJECTED)}) == 2


@pytest.mark.promise(
    "What differs is an *error*: something else was tried than what was asked for."
)
def test_the_first_process_of_a_node_is_its_rank_by_the_word_of_the_node(
    chaos: Chaos, tmp_path: Path
) -> None:
    """The first process of a node is its rank if no process has the variable RANK.

    A node that reports another process shows the mistake.
    """
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
    started["node1"]["pid"] += 1  # the first processes of two pods may have the same pid
    journals.write()
    again = judge_directory(copy)
    assert again.verdict == Verdict.ERROR
    assert re.search(r"rank 1 was process \d+ of node1, not \d+ of node1", again.reasons[0])
