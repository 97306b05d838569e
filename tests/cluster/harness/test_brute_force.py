"""The judge agrees with a reader that shares no code with it on recoveries, lost steps and goodput."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import brute_force

from chaoskit.pytest_plugin import Chaos
from faults import Exit, FailLoad, Fault, Hang, Kill, KillNode, Raise, Straggle

TINY = {"size": "tiny", "batch": 12}
#: Name -> faults, and settings that differ from the usual plan.
RUNS: dict[str, tuple[list[Fault], dict[str, Any]]] = {
    "unbroken": ([], {}),
    "slow": ([Straggle(rank=1, at_step=6, delay_ms=20, steps=3)], {}),
    "forward": ([Kill(rank=1, at_step=6)], {}),
    "backward": ([Kill(rank=2, at_step=6, phase="backward")], {}),
    "reduce": ([Kill(rank=0, at_step=6, phase="reduce")], {}),
    "optimizer": ([Kill(rank=1, at_step=6, phase="optimizer")], {}),
    "at a time": ([Kill(rank=1, after_s=0.3)], {"steps": 40}),
    "without a spare": ([Kill(rank=1, at_step=6)], {"spares": 0}),
    "first step": ([Kill(rank=1, at_step=0)], {}),
    "two, one after the other": (
        [Kill(rank=1, at_step=4), Kill(rank=2, at_step=12)],
        {"spares": 2},
    ),
    "two at once": ([Kill(rank=0, at_step=6), Kill(rank=2, at_step=6)], {"spares": 2}),
    "exit": ([Exit(rank=1, at_step=6)], {}),
    "exception": ([Raise(rank=1, at_step=6)], {}),
    "stopped": ([Hang(rank=1, at_step=6)], {}),
    "fast": ([Kill(rank=1, at_step=6)], {"reduction": "fast"}),
    "sharded": ([Kill(rank=1, at_step=6)], {"job": "fsdp"}),
    "sharded, reduce": ([Kill(rank=2, at_step=6, phase="reduce")], {"job": "fsdp"}),
    "sharded, optimizer": ([Kill(rank=0, at_step=6, phase="optimizer")], {"job": "fsdp"}),
    "sharded, two": (
        [Kill(rank=1, at_step=4), Kill(rank=2, at_step=12)],
        {"job": "fsdp", "spares": 2},
    ),
    "committed steps lost": (
        [
            FailLoad(rank=1, at_step=2, times=2),
            Kill(rank=1, at_step=4),
            KillNode(rank=0, at_step=12),
        ],
        {"nodes": 2, "spares": 0, "steps": 40, "max_lost_steps": 12},
    ),
}
#: Tolerance of the comparison: the judge divides the time of parallel ranks to the nanosecond.
#: The reader divides it by whole steps.
GOODPUT = 0.06


@pytest.mark.parametrize("name", RUNS)
def test_two_readers_agree(chaos: Chaos, name: str) -> None:
    faults, changes = RUNS[name]
    plan = {
        "job": "gpt",
        "nodes": 3,
        "spares": 1,
        "steps": 20,
        "options": TINY,
        "twin": False,
    } | changes
    outcome = chaos.run(plan.pop("job"), faults=faults, **plan)
    reading = brute_force.read(Path(outcome.directory))
    judged_s = [recovery.seconds for recovery in outcome.recoveries]
    assert sorted(judged_s) == pytest.approx(sorted(reading.recoveries_s), abs=1e-6)
    assert outcome.lost_steps == reading.lost_steps
    assert outcome.account.goodput == pytest.approx(reading.goodput, abs=GOODPUT)
