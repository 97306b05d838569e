"""Plans of commands: refusals, targets and contents of files, with few processes started."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from chaoskit.errors import BadInput
from chaoskit.experiment.injection.command_follower import FaultStruck, LogRead
from chaoskit.experiment.plan.command_plan import CommandExperiment, plan_command
from chaoskit.experiment.plan.planfile import Planned, load, save
from chaoskit.experiment.shrink.search import shrink
from chaoskit.launcher.progress import Progress
from chaoskit.process.linux import is_ending
from chaoskit.pytest_plugin import Chaos
from chaoskit.stacks import LogPatterns
from chaoskit.stacks.ranks import seats, seats_by_node
from chaoskit.substrate.core.processes import HOST, Process
from faults import (
    CATALOGUE,
    Cut,
    Delay,
    Hang,
    Kill,
    KillAgent,
    KillCoordinator,
    NaN,
    Straggle,
)

WATCH = LogPatterns(step=r"step (\d+)", loss=r"loss ([\d.eE+-]+)")
WAIT_S = 60.0
COMMAND = ["sh", "-c", "RANK={node_rank} exec python train.py"]


# -- ranks -----------------------------------------------------------------------------------------


def processes(script: str, count: int) -> tuple[subprocess.Popen[bytes], list[Process]]:
    """Return a shell and its session's processes, when there are ``count`` of them."""
    shell = subprocess.Popen(["sh", "-c", script], start_new_session=True)
    deadline_s = time.monotonic() + WAIT_S
    while len(members := [HOST.find(pid) for pid in _session(shell.pid)]) < count:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return shell, members


def _session(leader: int) -> list[int]:
    listing = subprocess.run(
        ["ps", "-o", "pid=", "--sid", str(leader)], capture_output=True, text=True, check=False
    )
    return [pid for pid in map(int, listing.stdout.split()) if not is_ending(pid)]


def test_the_youngest_of_several_attempts_has_the_rank_and_none_of_its_children() -> None:
    script = "RANK=3 sleep 60 & sleep 0.05; RANK=3 sh -c 'sleep 61 & wait' & wait"
    shell, members = processes(script, 4)
    try:
        seat = seats({"node0": HOST.launched_ranks(HOST.find(shell.pid))})[3]
        # on a busy machine the first attempt may still have this name
        newest = max(
            (process for process in members if process.name == "sh" and process.pid != shell.pid),
            key=lambda process: process.pid,
        )
        assert (seat.process, seat.node, seat.variable) == (newest, "node0", "RANK")
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


def test_without_a_variable_the_first_process_of_a_node_has_its_number() -> None:
    shell, members = processes("sleep 60 & wait", 2)
    try:
        assert {
            rank: seat.process.pid for rank, seat in seats_by_node({"a": [], "b": members}).items()
        } == {1: members[0].pid}
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


# -- refused plans ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "field", "remedy"),
    [
        ({"command": "torchrun train.py"}, "command", "use a list of texts"),
        ({"command": []}, "command", "use a list of texts"),
        ({"command": ["sh", 3]}, "command", "use texts only"),
        ({"command": ["no-such-program"]}, "command", "name a program that is installed"),
        ({"watch": None}, "watch", "give the pattern of a step in its log"),
        ({"nodes": 0}, "nodes", "1 or more"),
        ({"ranks": -1}, "ranks", "0 or more"),
        ({"spares": 1}, "spares", "a command has no such setting"),
        ({"deadline_s": 0}, "deadline_s", "above 0"),
        ({"working_directory": "/no/such"}, "working_directory", "a directory that exists"),
        ({"faults": [NaN(rank=0, at_step=3, parameter="w")]}, "faults", "a command has no hooks"),
        ({"faults": [Straggle(rank=0, at_step=3)]}, "faults", "a command has no hooks"),
        ({"faults": [Hang(rank=0, at_step=3, how="gil")]}, "faults", "a command has no hooks"),
        ({"faults": [KillAgent(rank=0, at_step=3)]}, "faults", "a command has no hooks"),
        ({"faults": [KillCoordinator(at_step=3)]}, "faults", "a command has no hooks"),
        ({"faults": [Kill(rank=0, at_step=3, phase="reduce")]}, "phase", "leave it out"),
        ({"faults": [Kill(rank=0, during="regroup")]}, "during", "use at_step or after_s"),
        ({"faults": [Kill(rank="most_shards", at_step=3)]}, "rank", "a command has no shards"),
        ({"faults": [Kill(rank=2, at_step=3)], "ranks": 2}, "rank", "use a rank from 0 to 1"),
        ({"faults": [Kill(rank=-1, at_step=3)]}, "rank", "use a rank from 0"),
        (
            {"faults": [Cut(rank=0, at_step=3, apart_from="coordinator")]},
            "apart_from",
            "there is no coordinator",
        ),
    ],
)
def test_what_cannot_be_done_to_a_command_is_refused(
    wrong: dict[str, Any], field: str, remedy: str
) -> None:
    plan = {"command": COMMAND, "watch": WATCH, "nodes": 2} | wrong
    with pytest.raises(BadInput, match=re.escape(remedy)) as caught:
        plan_command(**plan)
    assert caught.value.field == field


def test_every_fault_either_can_be_done_to_a_command_or_says_why_not() -> None:
    done = set()
    for kind in CATALOGUE:
        with contextlib.suppress(BadInput):
            plan_command(COMMAND, watch=WATCH, nodes=4, faults=[kind(**kind.sample)])
            done.add(kind.__name__)
    assert done >= {"Kill", "Hang", "KillNode", "FreezeNode", "Preempt"}
    assert not done & {"NaN", "Raise", "KillAgent", "KillCoordinator", "CrashLoop", "FailLoad"}


def test_a_job_and_a_command_are_not_mixed(chaos: Chaos) -> None:
    for wrong in ({"job": "gpt", "command": COMMAND}, {}, {"job": "gpt", "watch": WATCH}):
        with pytest.raises(BadInput):
            chaos.run(**wrong)  # type: ignore[arg-type]


def test_roles_are_drawn_when_a_run_is_planned() -> None:
    plan = plan_command(
        COMMAND, watch=WATCH, ranks=5, seed=3, faults=[Kill(rank="minority", at_step=3)]
    )
    assert len({fault.rank for fault in plan.faults}) == 2
    assert (
        plan.faults
        == plan_command(
            COMMAND, watch=WATCH, ranks=5, seed=3, faults=[Kill(rank="minority", at_step=3)]
        ).faults
    )


# -- as files --------------------------------------------------------------------------------------


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    faults = [Kill(rank=1, at_step=5), Delay(rank=0, after_s=1.0)]
    if any(fault.unavailable() for fault in faults):
        faults = faults[:1]
    experiment = plan_command(
        COMMAND,
        watch=LogPatterns(step=r"(\d+)", tolerance=0.1),
        nodes=2,
        ranks=2,
        seed=5,
        faults=faults,
        max_lost_steps=3,
        working_directory=tmp_path,
    )
    assert load(save(experiment, tmp_path / "plan.json")) == experiment


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"watch": {"stp": "(1)"}}, "watch.stp"),
        ({"watch": {}}, "watch.step"),
        ({"watch": {"step": "1"}}, "step"),
        ({"settings": {"spares": 1}}, "settings.spares"),
        ({"steps": 5}, "steps"),
        ({"job": "gpt"}, "job"),
        ({"command": None}, "job"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(
    tmp_path: Path, wrong: dict[str, Any], field: str
) -> None:
    plan = {"version": 2, "command": ["sh", "-c", "true"], "watch": {"step": r"step (\d+)"}} | wrong
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(BadInput, match=r"in .*plan\.json") as caught:
        load(tmp_path / "plan.json")
    assert caught.value.field == field


def test_a_plan_finds_its_script_beside_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("print('step 1')")
    plan = {"version": 2, "command": [sys.executable, "own.py"], "watch": {"step": r"step (\d+)"}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    experiment = load(tmp_path / "plan.json")
    assert isinstance(experiment, CommandExperiment)
    assert experiment.command == (sys.executable, str(tmp_path / "own.py"))


def test_progress_follows_a_log() -> None:
    progress = Progress(0.0, faults=["Kill(rank=0, at_step=3)"])
    for now_s, shown in enumerate(
        [LogRead(None, None, 2, 2), LogRead(4, 0.5, 2, 2), LogRead(6, 0.25, 1, 2)]
    ):
        assert progress.handle(shown, float(now_s)) == []
    assert (progress.step, progress.loss, progress.running, progress.nodes) == (6, 0.25, 1, 2)
    assert progress.steps_per_s(2.0) == 2.0
    (note,) = progress.handle(FaultStruck("fault0"), 2.5)
    assert note.text == "Kill(rank=0, at_step=3) strikes"


def test_only_faults_are_left_out_of_a_command() -> None:
    """The fault that matters, one of two, is found."""
    faults = [Hang(rank=0, after_s=1.0), Kill(rank=0, at_step=3)]
    experiment = plan_command(COMMAND, watch=WATCH, faults=faults)

    def fails(candidate: Planned, deadline_s: float) -> frozenset[str]:
        return frozenset(
            {"training completed"}
            if any(fault.kind == "Kill" for fault in candidate.faults)
            else ()
        )

    shrunk = shrink(experiment, fails, budget_s=WAIT_S)
    assert shrunk.complete
    assert isinstance(shrunk.experiment, CommandExperiment)
    assert [fault.kind for fault in shrunk.experiment.faults] == ["Kill"]
