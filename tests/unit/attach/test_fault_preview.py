"""The preview of faults: a row for each fault and node, with its hands, level and refusal."""

from __future__ import annotations

import io
from collections.abc import Mapping

import pytest
from rich.console import Console

from chaoskit.attach.fault_preview import FaultPreview, plan_rows, security_level
from chaoskit.attach.guards.guarded_job import GuardedJob, GuardedNode
from chaoskit.attach.hands.hand_container import HandMeans, TargetUser
from chaoskit.cli.machine.fault_table import render_faults
from chaoskit.faults import Cut, DeletePod, Kill, KillNode, LimitCpu, NaN

ROOT, USER = TargetUser(0, 0), TargetUser(1000, 1000)
JOB = GuardedJob(
    "statefulset/llama",
    tuple(
        GuardedNode(f"llama-{index}", f"llama-{index}", f"uid{index}", f"m{index % 2}")
        for index in range(3)
    ),
    {0: "llama-1", 1: "llama-1", 2: "llama-0"},
)
USERS: Mapping[str, TargetUser | None] = {"llama-0": ROOT, "llama-1": USER, "llama-2": None}


def test_a_row_for_each_node_that_is_struck() -> None:
    (row,) = plan_rows(JOB, Kill(rank=1, at_step=20), USERS)
    assert row == FaultPreview(
        "Kill(rank=1, at_step=20)",
        "as soon as the log showed step 20",
        "llama-1",
        "llama-1",
        "uid1",
        (0, 1),
        ("processes",),
        "restricted",
    )
    rows = plan_rows(JOB, Cut(rank=1, side=(2,), after_s=3), USERS)
    assert [(row.node, row.hands, row.security) for row in rows] == [
        ("llama-0", ("network",), "privileged"),
        ("llama-1", ("network",), "privileged"),
    ]


def test_a_row_of_a_hand_by_exec_needs_no_level_of_pod_security() -> None:
    by_exec = HandMeans(by_exec=True)
    (row,) = plan_rows(JOB, Kill(rank=2, at_step=20), USERS, by_exec)
    assert (row.node, row.hands, row.security) == ("llama-0", ("exec in the container",), "")
    (row, _) = plan_rows(JOB, Cut(rank=1, side=(2,), after_s=3), USERS, by_exec)
    assert row.refusal.startswith("name an image of hands")


def test_a_row_for_a_named_node() -> None:
    """Its ranks are shown if they are known; none is needed."""
    (row,) = plan_rows(JOB, DeletePod(node="llama-1", at_step=1), USERS)
    assert (row.fault, row.node) == ("DeletePod(node='llama-1', at_step=1)", "llama-1")
    assert (row.pod, row.ranks, row.hands) == ("llama-1", (0, 1), ("API",))
    (row,) = plan_rows(JOB, KillNode(node="llama-2", at_step=1), USERS)
    assert (row.node, row.ranks, row.hands) == ("llama-2", (), ("processes",))


def test_a_row_for_any_node() -> None:
    (row,) = plan_rows(JOB, DeletePod(rank="any", at_step=1), USERS)
    assert (row.node, row.pod, row.uid, row.hands, row.security) == ("", "", "", ("API",), "")
    (row,) = plan_rows(JOB, Kill(rank=7, at_step=1), USERS)
    assert (row.node, row.security) == ("", "baseline")
    rows = plan_rows(JOB, Cut(rank=1, side=(7,), at_step=1), USERS)
    assert [row.node for row in rows] == ["llama-1", ""]


@pytest.mark.parametrize(
    "fault", [NaN(rank=1, at_step=3, parameter="w"), LimitCpu(rank=1, at_step=3)]
)
def test_a_refused_fault(fault: NaN | LimitCpu) -> None:
    (row,) = plan_rows(JOB, fault, USERS)
    assert row.refusal
    assert (row.node, row.hands, row.security) == ("llama-1", (), "")


def test_levels_of_pod_security() -> None:
    assert security_level(frozenset({"processes"}), [USER]) == "restricted"
    assert security_level(frozenset({"processes"}), [USER, ROOT, None]) == "baseline"
    assert security_level(frozenset({"processes"}), [USER, None]).startswith(
        "restricted, or baseline"
    )
    assert security_level(frozenset({"processes", "network"}), [USER]) == "privileged"
    assert security_level(frozenset({"API", "machine"}), [ROOT]) == ""


def test_the_table() -> None:
    rows = [
        *plan_rows(JOB, Kill(rank=1, at_step=20), USERS),
        *plan_rows(JOB, DeletePod(rank="any", after_s=5), USERS),
        *plan_rows(JOB, NaN(rank=1, at_step=3, parameter="w"), USERS),
    ]
    output = io.StringIO()
    Console(file=output, width=400).print(render_faults(rows))
    _, kill, delete, nan = (
        line.split("  ") for line in output.getvalue().splitlines() if line.strip()
    )
    cells = [[cell.strip() for cell in line if cell.strip()] for line in (kill, delete, nan)]
    assert cells[0][2:] == ["llama-1", "llama-1", "uid1", "0, 1", "processes", "restricted", "no"]
    assert cells[1][2:] == ["any", "any", "any", "any", "API", "any", "no"]
    assert cells[2][5:8] == ["0, 1", "none", "any"]
    assert "run the job by chaoskit" in cells[2][8]
