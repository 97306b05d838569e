"""Commands in containers as black boxes: their environment, the places they may write to, and their
faults.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from chaoskit.errors import BadInput
from chaoskit.pytest_plugin import Chaos
from chaoskit.runlog.outcome import Check, Outcome
from chaoskit.stacks import LogPatterns
from chaoskit.vocabulary import Verdict
from faults import Cut, Fault, FreezeNode, LoseNode

JOBS = Path(__file__).parents[2] / "jobs"
WATCH = LogPatterns(step=r"step (\d+)", loss=r"loss ([\d.eE+-]+)")
DEADLINE_S = 240.0

pytestmark = pytest.mark.chaos(substrate="docker")


def run(chaos: Chaos, command: list[str], *faults: Fault, **plan: Any) -> Outcome:
    settings: dict[str, Any] = {
        "watch": WATCH,
        "check": False,
        "twin": False,
        "nodes": 2,
        "deadline_s": DEADLINE_S,
    }
    return chaos.run(command=command, faults=faults, **settings | plan)


def check(outcome: Outcome, name: str) -> Check:
    return next(check for check in outcome.checks if check.name.startswith(name))


@pytest.mark.slow
@pytest.mark.promise(
    "In a container of `docker` the command finds Python, the run's directories, `working_directory` (in "
    "which it may write)"
)
def test_every_node_is_a_container_that_finds_what_the_command_names(
    chaos: Chaos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "given").write_text("found it")
    monkeypatch.setenv("GIVEN", "by this test")
    inputs = "cat /proc/sys/kernel/hostname given; echo; echo $GIVEN; pwd"
    shown = f"{inputs}; echo $NODE_RANK $MASTER_ADDR {{address}}; echo step 0"
    kept = "echo kept > {run_dir}/$NODE_RANK; echo written > written-$NODE_RANK"
    outcome = run(chaos, ["sh", "-c", f"{shown}; {kept}"], working_directory=tmp_path)
    assert outcome.verdict is Verdict.PASSED, outcome.reasons
    directory = Path(outcome.directory)
    addresses = []
    for number in range(2):
        host, given, variable, where, place, _ = (
            (directory / "log" / f"node{number}.log").read_text().splitlines()
        )
        assert (host, given, variable, where) == (
            f"node{number}",
            "found it",
            "by this test",
            str(tmp_path),
        )
        rank, master, address = place.split()
        addresses.append(address)
        assert (rank, master) == (str(number), addresses[0])
        assert (directory / "state" / str(number)).read_text() == "kept\n"
        assert (tmp_path / f"written-{number}").read_text() == "written\n"
    assert len(set(addresses)) == 2


def test_the_root_of_this_host_is_no_place_for_a_command(chaos: Chaos) -> None:
    with pytest.raises(BadInput, match="working_directory"):
        run(chaos, ["sh", "-c", "echo step 0"], working_directory="/")


@pytest.mark.slow
def test_a_container_stands_still_and_another_one_is_lost_in_silence(chaos: Chaos) -> None:
    """The rank that is left waits for the lost one in vain."""
    faults = FreezeNode(rank=0, at_step=5, thaw_after_s=2.5), LoseNode(rank=1, at_step=15)
    training = f"{sys.executable} {JOBS / 'training' / 'averaged.py'} 1000 0.02 15"
    outcome = run(
        chaos, ["sh", "-c", f"RANK={{node_rank}} WORLD_SIZE={{nodes}} exec {training}"], *faults
    )
    assert check(outcome, "training completed").detail == "the command on node0 ended with status 1"
    assert [fault.state for fault in outcome.faults] == ["confirmed", "confirmed"]
    assert re.search(
        r"[1-9]\d* packets from and to it were dropped",
        check(outcome, "evidence of LoseNode").detail,
    )
    again = run(
        chaos, ["sh", "-c", "echo step {node_rank}"]
    )  # another container replaces the lost one
    assert again.verdict is Verdict.PASSED, again.reasons


@pytest.mark.slow
def test_torchrun_in_two_containers_waits_out_a_cut(chaos: Chaos) -> None:
    where = "--nnodes={nodes} --node-rank={node_rank} --master-addr={master_addr} --master-port={master_port}"
    launcher = [sys.executable, "-m", "torch.distributed.run", *where.split(), "--nproc-per-node=1"]
    fault = Cut(rank=1, at_step=5, heal_after_s=0.8)
    outcome = run(chaos, [*launcher, str(JOBS / "training" / "averaged.py"), "150", "0.02"], fault)
    assert outcome.verdict is Verdict.PASSED, outcome.reasons
    assert re.search(
        r"the kernel has counted [1-9]\d* packets", check(outcome, "evidence of Cut").detail
    )
    assert outcome.recovery.seconds >= 0.7
