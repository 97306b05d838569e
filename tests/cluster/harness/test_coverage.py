"""The check of coverage names records that a run's journals lack, and demands none that a healthy
run lacks.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from chaoskit import Chaos, Verdict, judge_directory
from chaoskit.experiment.judge.coverage import NAME
from chaoskit.journal import Journal
from chaoskit.runlog.outcome import Outcome
from chaoskit.suites.canary.journals import Journals
from chaoskit.vocabulary import Event
from faults import FreezeNode, Hang, Kill, KillCoordinator, KillNode, Scale

TINY: dict[str, Any] = {"size": "tiny"}


def is_whole(outcome: Outcome) -> bool:
    """Return True if the check of coverage passed."""
    return next(check.verdict for check in outcome.checks if check.name == NAME) == Verdict.PASSED


def test_what_went_with_a_node_is_unknown(chaos: Chaos) -> None:
    """A check that fails is unknown if records were lost with a node, and has failed otherwise."""
    fault = KillNode(rank=1, at_step=3, phase="optimizer")
    outcome = chaos.run(
        "gpt", nodes=3, shards=4, steps=12, options=TINY, faults=[fault], twin=False
    )
    directory = Path(outcome.directory)
    path = directory / "journal" / "node1.0.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if '"reduce"' in line)
    path.write_text("".join(lines[:last]))
    assert judge_directory(directory).verdict == Verdict.FAILED
    journal = Journal(directory / "journal", "substrate", role="substrate")
    journal.write(Event.RECORDS_CUT, node="node1")
    journal.close()
    cut = judge_directory(directory)
    assert cut.verdict == Verdict.UNKNOWN
    assert any("the last records of node1 were lost" in check.detail for check in cut.checks)


@pytest.mark.parametrize(
    ("job", "faults"),
    [
        ("gpt", ()),
        ("gpt", (Kill(rank=1, at_step=3, phase="optimizer"), Kill(rank=0, at_step=6))),
        ("gpt", (KillNode(rank=1, at_step=3),)),
        ("gpt", (FreezeNode(rank=1, at_step=3),)),
        ("gpt", (KillCoordinator(rank=0, at_step=3),)),
        ("gpt", (Hang(rank=1, at_step=4),)),
        ("fsdp", (Kill(rank=1, at_step=4),)),
    ],
    ids=lambda part: (
        "+".join(fault.kind for fault in part) or "unbroken" if isinstance(part, tuple) else part
    ),
)
def test_nothing_is_missing_in_a_run_that_went_well(
    chaos: Chaos, job: str, faults: tuple[Kill, ...]
) -> None:
    shards, options = (4, TINY) if job == "gpt" else (3, TINY | {"batch": 12})
    outcome = chaos.run(
        job, nodes=3, shards=shards, steps=12, options=options, faults=faults, twin=False
    )
    assert is_whole(outcome)


def test_a_job_that_fails_before_its_first_step_lacks_nothing(chaos: Chaos, tmp_path: Path) -> None:
    job = tmp_path / "fails.py"
    job.write_text(
        "def train(trainer, steps):\n"
        "    raise RuntimeError('at once')\n"
        "    with trainer.transaction() as step:\n"
        "        step.backward(0)\n"
    )
    outcome = chaos.run(str(job), nodes=2, steps=4, twin=False, check=False)
    assert outcome.verdict == Verdict.FAILED
    assert is_whole(outcome)


def test_a_worker_that_its_node_ended_when_it_was_to_leave_lacks_nothing(
    chaos: Chaos, tmp_path: Path
) -> None:
    """A new coordinator ends workers that no membership names: they may have no time for a last
    record.
    """
    plan: dict[str, Any] = {
        "nodes": 3,
        "shards": 4,
        "spares": 0,
        "options": TINY,
        "elastic": {"minReplicas": 2, "maxReplicas": 3},
    }
    outcome = chaos.run("gpt", steps=12, faults=[Scale(at_step=4, to=2)], twin=False, **plan)
    copy = Path(shutil.copytree(outcome.directory, tmp_path / "copy"))
    journals = Journals(copy)
    ((leaver, _),) = journals.of("left")
    journals.drop(lambda source, record: source == leaver and record["event"] in ("left", "closed"))
    journals.write()
    again = judge_directory(copy)
    assert again.verdict == Verdict.PASSED, again.reasons
