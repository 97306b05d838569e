"""A run can be judged again from its directory alone: elsewhere, without the job, with an empty
cache.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chaoskit import BadInput, Verdict
from chaoskit.experiment.directory import judge_directory
from chaoskit.journal import read_journals
from chaoskit.process.linux import descendants
from chaoskit.pytest_plugin import Chaos
from chaoskit.report.store import encode_outcome
from chaoskit.runlog.outcome import Outcome
from chaoskit.stacks import LogPatterns
from chaoskit.vocabulary import Event
from faults import BitFlip, Exit, Kill, KillNode, NaN

JOB = Path(__file__).parents[2] / "jobs" / "wrong" / "wrong_everywhere.py"
PRINTER = """
import sys, time
for step in range(40):
    print(f"step {step} loss {1 / (step + 1)}", flush=True)
    time.sleep(0.05)
"""


def judged_elsewhere(outcome: Outcome, place: Path) -> Outcome:
    """Return the outcome of the directory, judged in another place by a process with an empty
    cache.
    """
    original, elsewhere = Path(outcome.directory), place / "elsewhere"
    original.rename(elsewhere)
    environment = dict(os.environ, XDG_CACHE_HOME=str(place / "no-cache"))
    command = [sys.executable, "-m", "chaoskit", "judge", str(elsewhere), "--json"]
    ran = subprocess.run(
        command, env=environment, cwd=place, capture_output=True, text=True, check=False
    )
    shutil.copytree(elsewhere, original)  # for the report of the session
    assert ran.returncode == outcome.verdict.exit_code, ran.stderr
    return msgspec.convert(json.loads(ran.stdout), Outcome)


def same(outcome: Outcome, again: Outcome) -> None:
    """Assert that the outcomes are equal, except for paths and fields that the session fills in."""
    apart: dict[str, Any] = {
        "directory": "",
        "session": "",
        "run_id": "",
        "claimed": True,
        "test": None,
        "job": "",
    }
    plain = [
        json.loads(encode_outcome(msgspec.structs.replace(result, **apart)))
        for result in (outcome, again)
    ]
    for directory, fields in zip((outcome.directory, again.directory), plain, strict=True):
        for end in fields["log_ends"]:
            end["path"] = str(Path(end["path"]).relative_to(Path(directory).resolve()))
    assert plain[1] == plain[0]


@dataclass(frozen=True, kw_only=True)
class Stumble(Exit):
    """A fault of a user, which no other process can import."""

    reason: str = "a stone"

    @property
    def moment(self) -> str:
        return f"where {self.reason} lay"


@pytest.mark.parametrize(
    "faults",
    [
        (Stumble(rank=1, at_step=4, status=3),),
        (Kill(rank=1, at_step=4),),
        (KillNode(rank=0, at_step=3), Kill(rank=1, at_step=6)),
        (
            NaN(rank=1, at_step=4, parameter="3.weight"),
            BitFlip(rank=2, at_step=7, parameter="0.weight", bit=20),
        ),
        (Kill(rank=1, at_step=4), Kill(rank=2, during="detection", recovery=2)),
    ],
    ids=["of a user's own", "kill", "node and kill", "numbers", "never due"],
)
def test_the_outcome_of_a_copy_is_the_same(
    chaos: Chaos, faults: tuple[Any, ...], tmp_path: Path
) -> None:
    """The outcome is the same, also if a fault did not act and the run is unknown."""
    job = tmp_path / "job.py"
    job.write_text(JOB.read_text())
    plan = {"steps": 10, "nodes": 3, "shards": 3, "reference": "on", "check": False}
    outcome = chaos.run(str(job), faults=faults, **plan)
    job.unlink()
    same(outcome, judged_elsewhere(outcome, tmp_path))


def test_what_it_is_compared_with_is_missed(chaos: Chaos, tmp_path: Path) -> None:
    """The run is unknown without the files of its comparisons, or with the twin of another run."""
    outcome, other = (
        chaos.run(str(JOB), steps=10, nodes=2, shards=2, reference="on", faults=faults)
        for faults in ([Kill(rank=1, at_step=4)], [])
    )
    for name in ("twin.json", "reference.json"):
        copy = Path(shutil.copytree(outcome.directory, tmp_path / name))
        (copy / name).unlink()
        again = judge_directory(copy)
        assert again.verdict == Verdict.UNKNOWN
        assert [reason for reason in again.reasons if name in reason]
    copy = Path(shutil.copytree(outcome.directory, tmp_path / "another"))
    twin = json.loads((copy / "twin.json").read_text())
    (copy / "twin.json").write_text(json.dumps(twin | {"run_id": "0" * 32}))
    assert judge_directory(copy).verdict == Verdict.UNKNOWN
    assert judge_directory(Path(other.directory)).verdict == Verdict.PASSED


def test_without_its_floor_a_fast_run_is_unknown(chaos: Chaos, tmp_path: Path) -> None:
    plan = {"steps": 10, "nodes": 2, "shards": 3, "reduction": "fast"}
    outcome = chaos.run(str(JOB), faults=[Kill(rank=1, at_step=4)], **plan)
    copy = Path(shutil.copytree(outcome.directory, tmp_path / "copy"))
    (copy / "floor.json").unlink()
    again = judge_directory(copy)
    assert again.verdict == Verdict.UNKNOWN
    assert "floor.json" in again.reasons[0]


@pytest.mark.parametrize(
    ("shell", "verdict"),
    [
        ("exec {python} {script}", Verdict.FAILED),
        ("until RANK=0 {python} {script}; do :; done", Verdict.PASSED),
        ("RANK=0 {python} {script}; exit 0", Verdict.FAILED),
    ],
    ids=["ends", "comes back", "ends well too early"],
)
def test_a_command_is_judged_again_too(
    chaos: Chaos, shell: str, verdict: Verdict, tmp_path: Path
) -> None:
    """A command is judged without its script, and without its working directory."""
    work = tmp_path / "work"
    work.mkdir()
    script = work / "printer.py"
    script.write_text(PRINTER)
    outcome = chaos.run(
        command=["sh", "-c", shell.format(python=sys.executable, script=script)],
        watch=LogPatterns(step=r"step (\d+)", loss=r"loss (\S+)"),
        faults=[Kill(rank=0, at_step=5)],
        working_directory=work,
        max_lost_steps=40,
        check=False,
    )
    assert outcome.verdict == verdict, outcome.reasons
    shutil.rmtree(work)
    same(outcome, judged_elsewhere(outcome, tmp_path))


HARNESS = """
import sys
from chaoskit import Harness
from faults import Kill
with Harness(directory=sys.argv[2]) as harness:
    harness.run(sys.argv[1], steps=100000, nodes=2, shards=2, twin=False, faults=[Kill(rank=1, at_step=3)])
"""


def test_a_run_whose_harness_was_killed_is_an_error(tmp_path: Path) -> None:
    """The directory stays, with all records up to the kill."""
    process = subprocess.Popen([sys.executable, "-c", HARNESS, str(JOB), str(tmp_path)])
    deadline_s = time.monotonic() + 120
    run = tmp_path / "001-wrong-everywhere"
    try:
        while not any(record.event == Event.INJECTED for record in read_journals(run / "journal")):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    while descendants(process.pid):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    outcome = judge_directory(run)
    assert outcome.verdict == Verdict.ERROR
    assert outcome.reasons == ["the harness ended in order: the harness ended early"]
    assert outcome.faults[0].injected_s is not None


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="name the directory of a run"):
        judge_directory(tmp_path)
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(BadInput, match="use a plan of version 2"):
        judge_directory(tmp_path)
