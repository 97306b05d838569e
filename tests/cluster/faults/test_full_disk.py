"""Training goes on while the disk of its run is full, and nothing is missing from the journals
afterwards.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.goals import Flag
from support.nodes.disks import small_disk
from support.waiting import stays, wait_until

from chaoskit.coordinator.log import CoordinatorLog
from chaoskit.coordinator.outputs import LogEntry
from chaoskit.journal import read_journals
from chaoskit.pytest_plugin import Chaos
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import Heartbeat, NodeLost

CHATTY = f"{Path(__file__).parents[2] / 'jobs' / 'failing' / 'troubled.py'}:chatty"
FULL_S = 10.0
END_S = 240.0  # limit of a launch on a full disk, which it bears for 60 s


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.promise("While the disk is full, records of the journals wait in memory")
def test_training_goes_on_while_the_disk_of_its_run_is_full(chaos: Chaos, tmp_path: Path) -> None:
    """A job trains while its disk is full for ten seconds, though each rank also prints in each
    step.
    """
    with small_disk(chaos.harness.directory, "64m") as disk:
        filled_s = freed_s = 0.0

        def fill_and_free(message: Any) -> bool:
            nonlocal filled_s, freed_s
            now_s = time.monotonic()
            if not isinstance(message, Heartbeat) or not message.beats:
                return False
            if not filled_s and min(beat.step for beat in message.beats) >= 10:
                filled_s = now_s
                disk.fill()
            elif filled_s and not freed_s and now_s > filled_s + FULL_S:
                freed_s = now_s
                disk.free()
            return bool(freed_s) and now_s > freed_s + 1.0  # some steps are taken after that

        flag = Flag(tmp_path / "freed", fill_and_free)
        outcome = chaos.run(
            CHATTY,
            nodes=2,
            spares=0,
            steps=20,
            options={"step_s": 0.05},
            watch=flag,
            until=flag.until,
            health="off",
        )
        assert outcome.recoveries == []
        outcome.assert_same_losses_as_twin()
        records = read_journals(Path(outcome.directory) / "journal")
        late = {record.source: record for record in records if record.event == Event.RECORDS_LATE}
        commits = [
            (record.source, record["step"]) for record in records if record.event == Event.COMMIT
        ]
        log = (Path(outcome.directory) / "log" / "node0.0.log").read_text()
    assert {"node0.0", "node1.0"} <= set(late)
    assert all(record["records"] > 10 and record["full_s"] > FULL_S / 2 for record in late.values())
    last = max(step for _, step in commits)
    assert sorted(commits) == sorted(
        (f"node{node}.0", step) for node in (0, 1) for step in range(last + 1)
    )
    assert "bytes were lost here, as the disk was full]" in log
    assert f"step {last} " in log


@pytest.mark.costly
@pytest.mark.slow
def test_a_disk_that_stays_full_ends_the_run_with_its_name(tmp_path: Path) -> None:
    """A run on a full disk goes on for a minute at least, and its launcher names the directory that
    needs room.
    """
    with small_disk(tmp_path / "disk", "64m") as disk:
        run = disk.root / "run"
        command = [
            sys.executable,
            "-m",
            "chaoskit",
            "launch",
            CHATTY,
            "--nodes",
            "2",
            "--spares",
            "0",
            "--shards",
            "4",
        ]
        options = [
            "--set",
            "steps=100000",
            "--set",
            "step_s=0.05",
            "--health",
            "off",
            "--json",
            "--report",
            str(run),
        ]
        with subprocess.Popen(
            [*command, *options],
            env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as launcher:
            wait_until(
                lambda: any(
                    record.event == Event.COMMIT for record in read_journals(run / "journal")
                ),
                "a step",
            )
            disk.fill()
            stays(lambda: launcher.poll() is None, "it trains on", for_s=FULL_S)
            stdout, _ = launcher.communicate(timeout=END_S)
    result = json.loads(stdout)
    assert not result["ok"]
    assert f"{run / 'journal'}: No space left on device" in result["reason"]
    assert launcher.returncode == 1


def test_a_coordinator_decides_on_a_full_disk(tmp_path: Path) -> None:
    """The log of a coordinator keeps room for the loss of a rank and the end of the job."""
    with small_disk(tmp_path / "disk", "1m") as disk:
        record = CoordinatorLog(disk.root / "coordinator.wal")
        disk.fill()
        for number in range(100):
            record.append([LogEntry(NodeLost("node0", "as a test"), float(number))])
        disk.free()
        assert [
            stored.now_s for stored in CoordinatorLog(disk.root / "coordinator.wal").entries
        ] == list(range(100))
