"""What the processes of a run write down of themselves, and of the faults that strike them. Real runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from chaoskit.experiment.outcome import Outcome
from chaoskit.journal import Journals, Record, load_journals
from chaoskit.pytest_plugin import Chaos
from chaoskit.stacks import LogPatterns
from chaoskit.vocabulary import Event
from faults import Fault, Kill

PLAIN = "jobs/troubled.py:plain"
LOGGED = Path(__file__).parent / "jobs" / "logged.py"
PROCESSES = {"harness", "coordinator", "agent", "keeper", "worker"}


def run(chaos: Chaos, *faults: Fault, **plan: Any) -> Outcome:
    """A run of two nodes and a spare, which ends when its world is full again."""
    settings: dict[str, Any] = {"nodes": 2, "spares": 1, "steps": 20, "options": {"step_s": 0.02}, "deadline_s": 120.0}
    settings |= {"until": {"world": 2, "spares": 1}, "twin": False} | plan
    return chaos.run(PLAIN, faults=faults, **settings)


def run_command(chaos: Chaos, *faults: Fault, steps: int = 20, **plan: Any) -> Outcome:
    """A run of a script on one node, as rank 0."""
    command = ["sh", "-c", f"RANK=0 exec {sys.executable} {LOGGED} {steps} 0.02 0"]
    watch = LogPatterns(step=r"step (\d+)", loss=r"loss ([\d.eE+-]+)")
    return chaos.run(command=command, watch=watch, faults=faults, twin=False, check=False, deadline_s=120.0, **plan)


def journals(outcome: Outcome) -> Journals:
    return load_journals(Path(outcome.directory) / "journal")


def records(outcome: Outcome, *events: Event) -> list[Record]:
    return [record for record in journals(outcome).records if record.event in events]


# -- of themselves ------------------------------------------------------------------------------------------------


def test_every_process_says_what_it_is_and_why_it_ended(chaos: Chaos) -> None:
    """Of a run in which a rank is killed, nothing is missing but the last word of that rank."""
    outcome = run(chaos, Kill(rank=1, at_step=6))
    files = journals(outcome).files.values()
    writers = [(file.source, writer) for file in files for writer in file.writers]
    assert not any(file.bad_lines or file.missing or file.repeated for file in files), files
    assert [source for source, writer in writers if writer.opened is None] == []
    assert {writer.role for _, writer in writers} == PROCESSES
    (struck,) = records(outcome, Event.INJECTED)
    assert [source for source, writer in writers if writer.closed is None] == [struck["worker"]]
    assert {writer.closed["reason"] for _, writer in writers if writer.closed and writer.role != "harness"} == {
        "the job ended"
    }
    for source, writer in writers:
        assert writer.opened is not None
        assert writer.opened["version"] == 2
        assert writer.node == ("" if writer.role in ("harness", "coordinator") else source.partition(".")[0])
        assert writer.opened["torch"] == torch.__version__ or writer.role != "worker"


def test_the_process_that_runs_a_command_says_so_too(chaos: Chaos) -> None:
    outcome = run_command(chaos)
    found = journals(outcome).files
    assert [(writer.role, writer.node) for writer in found["node0"].writers] == [("warden", "node0")]
    assert [writer.role for writer in found["harness"].writers] == ["harness"]
    closed = [writer.closed for file in found.values() for writer in file.writers]
    assert None not in closed
