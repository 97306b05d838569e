"""Tests of a launch without a live node: it starts nodes again, or gives up."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import typer

from chaoskit.cli.training.launch import app, resume_command
from chaoskit.config import CheckpointTier, JobSpec, RunConfig
from chaoskit.journal import Journal
from chaoskit.launcher.outage import Act, NodesLost, Outage
from chaoskit.launcher.stored import Stored, look_at_stored
from chaoskit.process.host_checks import answer_within
from chaoskit.vocabulary import Event

LIMIT_S = 60.0


def test_nodes_are_started_at_once_and_then_ever_more_seldom() -> None:
    outage = Outage(patience_s=30.0)
    started = [
        now_s
        for now_s in (0.0, 0.2, 0.5, 0.9, 1.5, 2.0, 3.5, 5.0)
        if outage.observe(now_s) is Act.START
    ]
    assert started == [0.0, 0.5, 1.5, 3.5]


def test_the_launch_gives_up_when_its_patience_is_over() -> None:
    outage = Outage(patience_s=3.0)
    acts = [outage.observe(now_s) for now_s in (0.0, 1.0, 2.9, 3.0, 3.2)]
    assert acts == [Act.START, Act.START, Act.START, Act.GIVE_UP, Act.GIVE_UP]


def test_without_patience_there_is_one_attempt() -> None:
    outage = Outage(patience_s=0.0)
    assert [outage.observe(now_s) for now_s in (7.0, 7.2)] == [Act.START, Act.GIVE_UP]


def test_nodes_that_lived_for_long_begin_another_outage() -> None:
    outage = Outage(patience_s=3.0)
    assert [outage.observe(now_s) for now_s in (0.0, 1.0, 100.0, 101.0)] == [Act.START] * 4
    assert outage.left_s(101.0) == 2.0


def test_what_is_told_names_step_place_and_age() -> None:
    stored = Stored(120, "disk", "/kept/step-000000120.g1", 34.0)
    lost = NodesLost(("node0", "node1"), stored, "", "", 30.0)
    where = "step 120 is stored in /kept/step-000000120.g1, 34 s old"
    assert lost.text == f"every node was lost (node0, node1): they are started again; {where}"
    lost = NodesLost(("node0",), stored, "", "no room", 7.0)
    assert lost.text == f"no node can be started (no room): waiting 7 s at most; {where}"
    lost = NodesLost(("node0",), None, "no directory", "", 7.0)
    assert lost.text.endswith("; nothing is stored: no directory")


# -- what is stored --------------------------------------------------------------------------------


def config_of(directory: Path | None, every_steps: int = 10, every_s: float = 0.0) -> RunConfig:
    tier = (
        CheckpointTier(target=str(directory), every_steps=every_steps, every_s=every_s)
        if directory
        else None
    )
    return RunConfig(job=JobSpec("job.py"), disk=tier)


def test_the_newest_snapshot_is_the_one_of_the_latest_step(tmp_path: Path) -> None:
    for name in (
        "step-000000010.g3",
        "step-000000020.g1",
        "step-000000020.g2",
        ".staging",
        "quarantine",
    ):
        (tmp_path / name).mkdir()
    hour_ago_s = time.time() - 3600.0
    os.utime(tmp_path / "step-000000020.g2", (hour_ago_s, hour_ago_s))
    stored, why = look_at_stored(config_of(tmp_path), tmp_path / "journal")
    assert stored is not None
    assert (stored.step, stored.tier, stored.path, why) == (
        20,
        "disk",
        str(tmp_path / "step-000000020.g2"),
        "",
    )
    assert 3600.0 <= stored.age_s < 3600.0 + LIMIT_S


def test_what_was_uploaded_counts_where_the_disk_has_less(tmp_path: Path) -> None:
    """The remote tier is used as after the loss of the directory; the disk's snapshot of a step
    comes first.
    """
    saved = {
        "generation": 1,
        "tier": "remote",
        "path": "s3://kept/step-000000020.g1",
        "size_bytes": 1,
    }
    Journal(tmp_path / "journal", "node0").write(Event.SAVED, step=20, **saved)
    stored, _ = look_at_stored(config_of(tmp_path / "lost"), tmp_path / "journal")
    assert stored is not None
    assert (stored.step, stored.tier, stored.path) == (20, "remote", "s3://kept/step-000000020.g1")
    (tmp_path / "step-000000020.g1").mkdir()
    stored, _ = look_at_stored(config_of(tmp_path), tmp_path / "journal")
    assert stored is not None
    assert stored.tier == "disk"


def test_why_nothing_is_stored(tmp_path: Path) -> None:
    journals = tmp_path / "journal"
    assert look_at_stored(config_of(None), journals)[1].startswith(
        "no directory for snapshots was given"
    )
    due = look_at_stored(config_of(tmp_path, 10, 60.0), journals)
    assert due == (
        None,
        "the first snapshot was not complete yet: one is due every 10 steps or every 60 s",
    )
    (tmp_path / "file").touch()
    assert look_at_stored(config_of(tmp_path / "file"), journals)[1].startswith(
        f"{tmp_path / 'file'} cannot be read"
    )
    Journal(journals, "node0").write(
        Event.SAVE_FAILED, step=10, tier="disk", reason="No space left on device"
    )
    assert look_at_stored(config_of(tmp_path), journals)[1].endswith(
        "could be written: No space left on device"
    )


def test_a_disk_that_does_not_answer_is_not_waited_for() -> None:
    """The call returns, and its thread does not hold up the end of the process."""
    hung = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        answer_within(0.05, hung.wait)
    hung.set()


def test_an_answer_is_handed_on_and_so_is_an_error() -> None:
    assert answer_within(LIMIT_S, lambda: 7) == 7
    with pytest.raises(FileNotFoundError):
        answer_within(LIMIT_S, lambda: Path("/nowhere").stat())
    with pytest.raises(TimeoutError, match="the job's own"):
        answer_within(LIMIT_S, _raise_timeout)


def _raise_timeout() -> None:
    raise TimeoutError("the job's own")


# -- the command that goes on ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "again"),
    [
        (["train.py", "--nodes", "4"], "chaoskit launch train.py --nodes 4"),
        (
            ["--json", "gpt", "--report=run", "--no-resume"],
            "chaoskit launch gpt --report run-3 --json",
        ),
        (
            ["a b.py", "--set", "x='1'", "--set", "y=2"],
            """chaoskit launch 'a b.py' --set 'x='"'"'1'"'"'' --set y=2""",
        ),
        (["gpt", "--checkpoints", "kept", "--checkpoint-every-s", "2.5"], None),
    ],
)
def test_the_command_is_the_one_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: list[str], again: str | None
) -> None:
    """Another directory for the report holds a run already; the launch goes on from a snapshot."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run-2").mkdir()
    command = typer.main.get_command(app)
    context = command.make_context("launch", list(typed))
    assert resume_command(context) == (
        again or "chaoskit launch gpt --checkpoints kept --checkpoint-every-s 2.5"
    )
