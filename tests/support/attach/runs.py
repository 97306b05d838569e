"""Runs on trainings of the tests' cluster, and checks of their outcomes by a clock of their own.

-> ``support/jobs/training.py``: the trainings. ``tests/cluster/kubernetes/test_attach.py`` uses them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chaoskit import LogPatterns
from chaoskit.attach.hands.hand_container import HandImage
from chaoskit.attach.run.attach import attach
from chaoskit.faults import Cut, DeletePod, Hang, Kill, KillContainer
from chaoskit.faults.base import Fault
from chaoskit.journal import Record, read_events
from chaoskit.report.store import write_outcome
from chaoskit.runlog.outcome import COMPLETED, Outcome
from chaoskit.vocabulary import Event, Verdict
from support.hand.client import directory
from support.hand.in_pods import PYTHON, mounts
from support.jobs.training import TrainingJob
from support.nodes import pods

WATCH = LogPatterns(step=r"step (\d+)", loss=r"loss ([\d.eE+-]+)")
#: Checkpoints are stored every fifth step, and the step under way is lost, too.
LOST_STEPS = 10
#: Difference of a recovery time in the log from that of the clock beside the cluster.
CLOCKS_S = 0.5
IMAGE = HandImage(pods.IMAGE, (PYTHON, "-S", "-m", "hand"), str(directory()), tuple(mounts()))
#: Faults that a training of torchrun survives.
FAULTS: Sequence[Fault] = [
    Kill(rank=1, after_s=1.0),
    Hang(rank=2, after_s=1.0),
    KillContainer(rank=1, after_s=1.0),
    DeletePod(rank=2, after_s=1.0),
    Cut(rank=1, after_s=1.0, heal_after_s=12.0),
]


def broken(job: TrainingJob, runs: Path, *faults: Fault, **settings: Any) -> Outcome:
    """Inject faults into a training, and return the outcome.

    Args:
        runs: the directory of the run.
        settings: settings of the run that differ from those of all tests.
    """
    settings = {"max_lost_steps": LOST_STEPS, "deadline_s": 240.0, "stalled_s": 200.0} | settings
    outcome = attach(
        job.reference,
        namespace=job.namespace,
        watch=WATCH,
        faults=list(faults),
        image=IMAGE,
        directory=runs,
        **settings,
    )
    write_outcome(outcome, Path(outcome.directory))
    return outcome


def records(outcome: Outcome, event: Event) -> list[Record]:
    """Return the records of one kind of event."""
    return read_events(Path(outcome.directory) / "journal", event)


def assert_recovered(outcome: Outcome, job: TrainingJob) -> None:
    """Check the verdict, and the recovery time by the clock beside the cluster."""
    assert outcome.verdict is Verdict.PASSED, outcome.reasons
    assert COMPLETED in outcome.not_applied
    (recovery,) = outcome.recoveries
    injected_ns = records(outcome, Event.INJECTED)[0].t_ns
    if recovery.cause != "the log shows no effect on the training":
        measured_s = recovery_by_clock_s(job, injected_ns)
        print(
            f"{outcome.faults[0].fault}: {recovery.seconds:.2f} s, by the clock {measured_s:.2f} s"
        )
        assert recovery.seconds == pytest.approx(measured_s, abs=CLOCKS_S)


def recovery_by_clock_s(job: TrainingJob, injected_ns: int) -> float:
    """Return the seconds from a fault to the end of the longest pause between new steps after it."""
    new_steps: list[tuple[int, int]] = []  # time and number of each step above all before
    for recorded in job.recorded_steps():
        if not new_steps or recorded.step > new_steps[-1][1]:
            new_steps.append((recorded.at_ns, recorded.step))
    times_ns = [at_ns for at_ns, _ in new_steps]
    pauses = [
        (end_ns - max(begin_ns, injected_ns), end_ns)
        for begin_ns, end_ns in pairwise(times_ns)
        if end_ns > injected_ns
    ]
    return (max(pauses)[1] - injected_ns) / 1e9


def user_files(folder: Path) -> tuple[Path, Path]:
    """Write the files of a user: the patterns of the log, and the image of hands. Return both."""
    watch, image = folder / "watch.yaml", folder / "hand.json"
    watch.write_text(r"step: 'step (\d+)'")
    settings = {
        "name": IMAGE.name,
        "command": IMAGE.command,
        "working_directory": IMAGE.working_directory,
        "mounts": IMAGE.mounts,
    }
    image.write_bytes(msgspec.json.encode(settings))
    return watch, image


def client_command(job: TrainingJob, fault: str, watch: Path, image: Path) -> list[str]:
    """Return the command line of a client that injects a fault, without a question."""
    command = [sys.executable, "-m", "chaoskit", "attach", job.reference, "--yes"]
    command += ["--namespace", job.namespace, "--watch", str(watch), "--fault", fault]
    return [*command, "--hand-image", str(image)]
