"""The records of trainings on the tests' cluster, from which tests measure recoveries."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from support.jobs.training import RecordedStep, TrainingJob

MILLISECOND = 1_000_000


def job(directory: Path, **records: list[tuple[int, int]]) -> TrainingJob:
    """Return a job whose pods have recorded steps at milliseconds."""
    for rank, (pod, steps) in enumerate(sorted(records.items())):
        lines = [f"{at_ms * MILLISECOND} {step} {rank}\n" for at_ms, step in steps]
        (directory / f"record-{pod}").write_text("".join(lines))
    return TrainingJob("statefulset", "llama", "tests", directory)


def test_steps_of_all_pods_are_in_the_order_of_their_ends(tmp_path: Path) -> None:
    training = job(tmp_path, a=[(100, 1), (300, 2)], b=[(200, 1), (250, 2)])
    assert training.reference == "statefulset/llama"
    assert training.recorded_steps() == [
        RecordedStep(100 * MILLISECOND, 1, 0, "a"),
        RecordedStep(200 * MILLISECOND, 1, 1, "b"),
        RecordedStep(250 * MILLISECOND, 2, 1, "b"),
        RecordedStep(300 * MILLISECOND, 2, 0, "a"),
    ]
    assert training.newest_step() == 2


def test_a_line_that_is_not_complete_is_left_out(tmp_path: Path) -> None:
    training = job(tmp_path, a=[(100, 1)])
    with (tmp_path / "record-a").open("a") as lines:
        lines.write("200000000 2")
    assert training.newest_step() == 1


def test_neither_the_step_under_way_nor_repeated_steps_are_a_recovery(tmp_path: Path) -> None:
    before = [(100, 6), (200, 7)]
    repeated = [(5000, 6), (5100, 7), (5200, 8)]
    training = job(tmp_path, a=[*before, (310, 8), *repeated, (5300, 9), (5400, 10)], b=before)
    assert training.recovery_s(300 * MILLISECOND) == pytest.approx(5.0)


def test_a_recovery_is_awaited(tmp_path: Path) -> None:
    training = job(tmp_path, a=[(100, 6)])
    later = threading.Timer(0.1, job, (tmp_path,), {"a": [(100, 6), (400, 8)]})
    later.start()
    assert training.recovery_s(200 * MILLISECOND) == pytest.approx(0.2)
    later.join()
    with pytest.raises(AssertionError, match="step 10 of statefulset/llama"):
        training.recovery_s(400 * MILLISECOND, limit_s=0.1)
