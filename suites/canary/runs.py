"""Runs of the jobs of the canary, with or without a mistake of the runtime.

-> suites/canary/wrong_jobs.py has the jobs and the mistakes.
"""

from __future__ import annotations

from typing import Any

from chaoskit import Chaos, Outcome
from chaoskit.faults import Kill
from chaoskit.suites.canary import wrong_jobs
from chaoskit.suites.canary.mistakes import EXACT, FAST, SHARDED, Mistake
from chaoskit.suites.canary.wrong_worker import END, EVERY, LATE, order

_CELLS: dict[str, dict[str, Any]] = {
    EXACT: {"job": wrong_jobs.__file__},
    FAST: {"job": wrong_jobs.__file__, "reduction": "fast"},
    SHARDED: {"job": f"{wrong_jobs.__file__}:train_sharded"},
}
#: Detection of corruption is off during the training: only the checks of the verdict are left.
_PLAN: dict[str, Any] = {
    "nodes": 2,
    "shards": 4,
    "steps": 7,
    "hash_every": 0,
    "state_hash_steps": 0,
}
_IN_EVERY_RUN: dict[str, Any] = {"twin": False, "reference": "on", "spares": 0}
_BROKEN: dict[str, Any] = {"faults": [Kill(rank=1, at_step=4)], "spares": 1}


def run(chaos: Chaos, cell: str, mistake: Mistake | None = None, **more: Any) -> Outcome:
    """Run the job of a cell, with a mistake of the runtime in its workers, or without.

    A mistake that the unbroken run has, too, is tried without a fault, and compared with plain
    PyTorch. Otherwise a rank is killed and replaced, and the run is compared with its twin.

    The outcome is returned, and its verdict is not asserted.

    Args:
        more: further fields of the plan.
    """
    in_every_run = mistake is not None and mistake.when in (EVERY, END, LATE)
    order(chaos.harness.directory, *((mistake.function, mistake.when) if mistake else ("", "")))
    options = {"kind": mistake.kind} if mistake is not None else {}
    plan = _PLAN | ({"steps": 10} if mistake is not None and mistake.when == LATE else {})
    plan |= (
        (_IN_EVERY_RUN if in_every_run else _BROKEN) | _CELLS[cell] | {"options": options} | more
    )
    return chaos.run(plan.pop("job"), check=False, **plan)
