"""A launch that loses every node starts nodes again, and the job goes on from the newest snapshot."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
from support.waiting import wait_until

from chaoskit.checkpoint.disk.tier import DiskTier
from chaoskit.journal import Record, read_journals
from chaoskit.process.linux import descendants, kill_if_same, process_name, start_ticks
from chaoskit.substrate.limits import capabilities
from chaoskit.vocabulary import Event

pytestmark = pytest.mark.costly

LIMIT_S = 300.0  # limit of a launch
STEPS = 60
PLAIN = f"{Path(__file__).parents[2] / 'jobs' / 'failing' / 'troubled.py'}:plain"
FSDP_TINY = ["--set", "size=tiny"]
SLOW_STEPS = ["--set", "step_s=0.04"]
needs_networks = pytest.mark.skipif(
    bool(capabilities.namespaces()), reason=capabilities.namespaces() or "never"
)


class Workplace:
    """Launches of one job on two nodes, in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.stored = directory, DiskTier(directory / "stored")
        self._mark = str(uuid.uuid4())

    @property
    def tier(self) -> list[str]:
        return ["--checkpoints", "stored", "--checkpoint-every", "5"]

    def start(self, report: str, job: str, *more: str) -> subprocess.Popen[str]:
        words = [
            "launch",
            job,
            "--nodes",
            "2",
            "--spares",
            "0",
            "--shards",
            "4",
            "--set",
            f"steps={STEPS}",
        ]
        return self._run([*words, "--report", report, *more])

    def again(self, command: str) -> subprocess.Popen[str]:
        """Run a command that a launch has printed, unchanged."""
        program, *words = shlex.split(command)
        assert program == "chaoskit"
        return self._run(words)

    def _run(self, words: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "chaoskit", *words],
            cwd=self.directory,
            env={**os.environ, "XDG_STATE_HOME": str(self.directory / "state"), "MARK": self._mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def agents(self) -> dict[int, int | None]:
        """Return pid and start time of each living agent."""
        marked = [
            int(path.name)
            for path in Path("/proc").glob("[0-9]*")
            if self._mark.encode() in _environment(path)
        ]
        return {
            pid: start_ticks(pid)
            for pid in marked
            if re.fullmatch(r"ck-node\d+", process_name(pid))
        }

    def kill_nodes(self, agents: dict[int, int | None]) -> None:
        """Kill the agents and all their descendants, each by its pid."""
        below = {pid: start_ticks(pid) for agent in agents for pid in descendants(agent)}
        for pid, ticks in (agents | below).items():
            kill_if_same(pid, ticks, signal.SIGKILL)

    def await_snapshot(self, step: int) -> None:
        """Wait until two snapshots are there, one of ``step`` or later."""

        def is_there() -> bool:
            ages = [snapshot.manifest.step for snapshot in self.stored.snapshots().snapshots]
            return len(ages) >= 2 and max(ages) >= step

        wait_until(is_there, f"a snapshot of step {step}", limit_s=LIMIT_S)

    def records(self, report: str, event: Event) -> list[Record]:
        return [
            record
            for record in read_journals(self.directory / report / "journal")
            if record.event == event
        ]


def _environment(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)


def end(launch: subprocess.Popen[str]) -> tuple[int, str, str]:
    stdout, stderr = launch.communicate(timeout=LIMIT_S)
    return launch.returncode, stdout, stderr


def result(launch: subprocess.Popen[str]) -> tuple[int, dict[str, Any]]:
    status, stdout, stderr = end(launch)
    assert stdout, stderr
    return status, json.loads(stdout)


@pytest.mark.promise(
    "If all nodes are lost, the launch starts them again, and the job goes on from the newest snapshot",
    job=PLAIN,
)
@pytest.mark.parametrize(
    ("job", "options"),
    [
        (PLAIN, SLOW_STEPS),
        pytest.param("fsdp", FSDP_TINY, marks=pytest.mark.slow),
        pytest.param(
            PLAIN, [*SLOW_STEPS, "--substrate", "netns"], marks=[pytest.mark.slow, needs_networks]
        ),
    ],
)
def test_nodes_that_are_all_lost_are_started_again(
    place: Workplace, job: str, options: list[str]
) -> None:
    """A launch that loses all nodes ends with the weights of an unbroken one."""
    _, unbroken = result(place.start("unbroken", job, *options, "--json"))
    launch = place.start("hit", job, *options, *place.tier)
    place.await_snapshot(10)
    place.kill_nodes(place.agents())
    status, stdout, stderr = end(launch)
    assert status == 0, stdout + stderr
    assert "training completed: 60 steps" in stdout
    message = re.search(
        r"every node was lost \(node0, node1\).* step (\d+) is stored in (\S+), .* old", stdout
    )
    assert message, stdout
    assert Path(message[2]).parent == place.stored.root
    restored = {
        record["step"]
        for record in place.records("hit", Event.RESTORED)
        if record["source"].startswith("disk")
    }
    assert restored == {int(message[1])}
    assert f"2 ranks go on from step {message[1]}: " in stdout
    weights = {record["weights_digest"] for record in place.records("hit", Event.FINISHED)}
    assert weights == {unbroken["weights_digest"]} != {""}


@pytest.mark.slow
@pytest.mark.promise("ends with the command that goes on, and the step from which it does")
def test_a_launch_whose_nodes_do_not_stay_says_how_to_go_on(place: Workplace) -> None:
    """A launch prints a command that resumes it if agents are killed as fast as they start."""
    _, unbroken = result(place.start("unbroken", PLAIN, *SLOW_STEPS, "--json"))
    launch = place.start(
        "hit", PLAIN, *SLOW_STEPS, *place.tier, "--setting", "replacement_s=2", "--json"
    )
    place.await_snapshot(10)
    over = threading.Event()

    def kill_agents() -> None:
        while not over.wait(0.02):
            place.kill_nodes(place.agents())

    killer = threading.Thread(target=kill_agents)
    killer.start()
    try:
        status, stdout, stderr = end(launch)
    finally:
        over.set()
        killer.join()
    printed = json.loads(stdout)
    assert (status, printed["ok"], printed["nothing_stored"]) == (1, False, ""), stderr
    assert printed["reason"].startswith(
        "every node was lost, and none came back in replacement_s=2: "
    )
    step = printed["stored"]["step"]
    assert step >= 10
    assert f"; step {step} is stored in " in stderr  # printed while it waited
    assert f"to resume from step {step}: {printed['resume']}\n" in stderr
    status, resumed = result(place.again(printed["resume"]))
    assert (status, resumed["resumed_from"], resumed["directory"]) == (0, step, "hit-2")
    assert resumed["weights_digest"] == unbroken["weights_digest"] != ""


def test_a_launch_that_stores_nothing_says_so(place: Workplace) -> None:
    """A launch without snapshots ends at once, because no new node would have the state."""
    launch = place.start("hit", PLAIN, *SLOW_STEPS, "--json")
    wait_until(lambda: place.records("hit", Event.COMMIT), "a step", limit_s=LIMIT_S)
    place.kill_nodes(place.agents())
    status, stdout, stderr = end(launch)
    printed = json.loads(stdout)
    assert (status, printed["ok"], printed["stored"], printed["resume"]) == (1, False, None, ""), (
        stderr
    )
    assert (
        "nothing is stored: no directory for snapshots was given (--checkpoints DIR, disk=)\n"
        in stderr
    )


def test_a_launch_whose_first_snapshot_is_yet_to_come_says_so(place: Workplace) -> None:
    """A launch without a complete snapshot starts nodes again, and reports why nothing is restored."""
    more = ["--checkpoints", "stored", "--checkpoint-every", "1000", "--setting", "startup_s=15"]
    launch = place.start("hit", PLAIN, *SLOW_STEPS, *more, "--json")
    wait_until(lambda: place.records("hit", Event.COMMIT), "a step", limit_s=LIMIT_S)
    place.kill_nodes(place.agents())
    status, stdout, stderr = end(launch)
    printed = json.loads(stdout)
    assert (status, printed["ok"], printed["stored"]) == (1, False, None), stderr
    assert (
        printed["nothing_stored"]
        == "the first snapshot was not complete yet: one is due every 1000 steps"
    )
