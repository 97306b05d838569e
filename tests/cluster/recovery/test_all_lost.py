"""A launch of which every node is lost: nodes are started again, and the job goes on from what is stored."""

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

LIMIT_S = 300.0  # of a launch
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
        """Run a command that a launch has printed, as it stands."""
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
        """Pid and start of each agent that lives."""
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
        """End all processes of these nodes at once, each by its pid."""
        below = {pid: start_ticks(pid) for agent in agents for pid in descendants(agent)}
        for pid, ticks in (agents | below).items():
            kill_if_same(pid, ticks, signal.SIGKILL)

    def await_snapshot(self, step: int) -> None:
        """Wait until two snapshots are there, one of ``step`` or later."""

        def is_there() -> bool:
            ages = [one.manifest.step for one in self.stored.snapshots().snapshots]
            return len(ages) >= 2 and max(ages) >= step

        wait_until(is_there, f"a snapshot of step {step}", limit_s=LIMIT_S)

    def records(self, report: str, event: Event) -> list[Record]:
        return [
            one for one in read_journals(self.directory / report / "journal") if one.event == event
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
    """Every process of both nodes is killed; the launch ends with the weights of an unbroken one."""
    _, unbroken = result(place.start("unbroken", job, *options, "--json"))
    launch = place.start("hit", job, *options, *place.tier)
    place.await_snapshot(10)
    place.kill_nodes(place.agents())
    status, stdout, stderr = end(launch)
    assert status == 0, stdout + stderr
    assert "training completed: 60 steps" in stdout
    told = re.search(
        r"every node was lost \(node0, node1\).* step (\d+) is stored in (\S+), .* old", stdout
    )
    assert told, stdout
    assert Path(told[2]).parent == place.stored.root
    restored = {
        one["step"]
        for one in place.records("hit", Event.RESTORED)
        if one["source"].startswith("disk")
    }
    assert restored == {int(told[1])}
    assert f"2 ranks go on from step {told[1]}: " in stdout
    weights = {one["weights_digest"] for one in place.records("hit", Event.FINISHED)}
    assert weights == {unbroken["weights_digest"]} != {""}


@pytest.mark.slow
@pytest.mark.promise("ends with the command that goes on, and the step from which it does")
def test_a_launch_whose_nodes_do_not_stay_says_how_to_go_on(place: Workplace) -> None:
    """Agents are killed as fast as they are started; the command that the launch prints is run, as it stands."""
    _, unbroken = result(place.start("unbroken", PLAIN, *SLOW_STEPS, "--json"))
    launch = place.start(
        "hit", PLAIN, *SLOW_STEPS, *place.tier, "--setting", "replacement_s=2", "--json"
    )
    place.await_snapshot(10)
    over = threading.Event()

    def hunt() -> None:
        while not over.wait(0.02):
            place.kill_nodes(place.agents())

    hunter = threading.Thread(target=hunt)
    hunter.start()
    try:
        status, stdout, stderr = end(launch)
    finally:
        over.set()
        hunter.join()
    told = json.loads(stdout)
    assert (status, told["ok"], told["nothing_stored"]) == (1, False, ""), stderr
    assert told["reason"].startswith("every node was lost, and none came back in replacement_s=2: ")
    step = told["stored"]["step"]
    assert step >= 10
    assert f"; step {step} is stored in " in stderr  # while it waited
    assert f"to go on from step {step}: {told['resume']}\n" in stderr
    status, resumed = result(place.again(told["resume"]))
    assert (status, resumed["resumed_from"], resumed["directory"]) == (0, step, "hit-2")
    assert resumed["weights_digest"] == unbroken["weights_digest"] != ""


def test_a_launch_that_stores_nothing_says_so(place: Workplace) -> None:
    """It ends at once: no node that could come back would know the state."""
    launch = place.start("hit", PLAIN, *SLOW_STEPS, "--json")
    wait_until(lambda: place.records("hit", Event.COMMIT), "a step", limit_s=LIMIT_S)
    place.kill_nodes(place.agents())
    status, stdout, stderr = end(launch)
    told = json.loads(stdout)
    assert (status, told["ok"], told["stored"], told["resume"]) == (1, False, None, ""), stderr
    assert (
        "nothing is stored: no directory for snapshots was given (--checkpoints DIR, disk=)\n"
        in stderr
    )


def test_a_launch_whose_first_snapshot_is_yet_to_come_says_so(place: Workplace) -> None:
    """Nodes are started again; nothing can be restored, and the launch says why."""
    more = ["--checkpoints", "stored", "--checkpoint-every", "1000", "--setting", "startup_s=15"]
    launch = place.start("hit", PLAIN, *SLOW_STEPS, *more, "--json")
    wait_until(lambda: place.records("hit", Event.COMMIT), "a step", limit_s=LIMIT_S)
    place.kill_nodes(place.agents())
    status, stdout, stderr = end(launch)
    told = json.loads(stdout)
    assert (status, told["ok"], told["stored"]) == (1, False, None), stderr
    assert (
        told["nothing_stored"]
        == "the first snapshot was not complete yet: one is due every 1000 steps"
    )
