"""Tests of nodes that only a stream with 20 ms of delay reaches: the runner needs no other access,
so a pod can be one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.nodes.far_nodes import FarSubstrate, unavailable

from chaoskit.config import DETECTION
from chaoskit.errors import BadInput
from chaoskit.experiment.harness import Harness
from chaoskit.substrate.cluster.network import COORDINATOR
from chaoskit.substrate.limits import cgroup
from faults import (
    Cut,
    Fault,
    FreezeNode,
    Hang,
    Kill,
    KillAgent,
    KillCoordinator,
    LimitCpu,
    ReplaceNode,
    SlowDisk,
    Straggle,
)

TESTS = Path(__file__).parents[2]
JOB = f"{TESTS / 'jobs' / 'failing' / 'troubled.py'}:plain"
SUBSTRATE = "support.nodes.far_nodes:FarSubstrate"
NO_GROUPS = cgroup.unavailable("freezer") or cgroup.unavailable("cpu")

pytestmark = pytest.mark.skipif(
    bool(unavailable()), reason=f"namespaces of processes: {unavailable()}"
)
in_groups = pytest.mark.skipif(bool(NO_GROUPS), reason=f"cgroups: {NO_GROUPS}")


@pytest.fixture(scope="module")
def substrate() -> Iterator[FarSubstrate]:
    made = FarSubstrate()
    yield made
    made.close()


@pytest.fixture(scope="module")
def harness(substrate: FarSubstrate, tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(substrate, tmp_path_factory.mktemp("runs"))


def run(harness: Harness, fault: Fault) -> Any:
    options = {"step_s": 0.02}
    return harness.run(
        JOB, nodes=2, steps=40, options=options, faults=[fault], twin=False, **DETECTION["relaxed"]
    )


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        Kill(rank=1, at_step=8),
        Kill(rank="all_but_one", at_step=8),
        Hang(rank=1, at_step=8, how="stop"),
        Hang(rank=1, at_step=8, how="gil"),
        FreezeNode(rank=1, at_step=8, thaw_after_s=0.5),
        pytest.param(
            FreezeNode(rank=1, at_step=8, how="cgroup", thaw_after_s=0.5), marks=in_groups
        ),
        pytest.param(LimitCpu(rank=1, at_step=8, lift_after_s=0.5), marks=in_groups),
        pytest.param(Straggle(rank=1, at_step=8, how="quota", cpu_fraction=0.1), marks=in_groups),
        KillAgent(rank=1, at_step=8),
        KillCoordinator(at_step=8),
        ReplaceNode(rank=1, at_step=8),
    ],
    ids=str,
)
def test_a_fault_is_done_and_proven_through_the_stream(harness: Harness, fault: Fault) -> None:
    """Signals, control groups, injection lines and the kernel's reports all pass through the
    stream.
    """
    outcome = run(harness, fault)
    assert outcome.verdict.value == "passed", outcome.reasons
    (record,) = outcome.faults
    assert record.state == "confirmed"
    assert record.undone


@pytest.mark.costly
@pytest.mark.slow
def test_pids_of_a_node_are_not_those_of_the_runner(
    harness: Harness, substrate: FarSubstrate
) -> None:
    """Code that looked a node's pid up on the runner's machine would find another process."""
    run(harness, Kill(rank=1, at_step=8))
    for station in (COORDINATOR, "node0", "node1"):
        assert substrate.kernel(station).find(1).name == "ck-supervisor"


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [Cut(rank=1, at_step=8), SlowDisk(rank=1, at_step=8, delay_ms=10.0)], ids=str
)
def test_what_a_supervisor_cannot_do_is_refused_before_the_start(
    harness: Harness, fault: Fault
) -> None:
    """The substrate is asked, not the machine of the runner, which may be able to do it."""
    before = sorted(harness.directory.iterdir())
    with pytest.raises(BadInput, match=r"no supervisor supports (Block|BreakDisk)"):
        run(harness, fault)
    assert sorted(harness.directory.iterdir()) == before


@pytest.mark.costly
@pytest.mark.slow
def test_smoke_is_green_on_them() -> None:
    """The tests are those that run on every other substrate."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(TESTS.parent / "suites" / "smoke"),
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    done = subprocess.run(
        [*command, "--chaos-substrate", SUBSTRATE],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert "16 passed" in done.stdout
