"""Records of runs that were never made, for code that only reads records."""

from __future__ import annotations

from typing import Any

from chaoskit.history.record import Metric, RunRecord, new_id
from chaoskit.vocabulary import Verdict

MACHINE = "a processor, 2 cores, local"


def run(recovery_s: float | None = 0.05, step_s: float = 0.01, **more: Any) -> RunRecord:
    """Return the record of a run that recovered, unless ``verdict`` says otherwise.

    ``more`` may also set ``lost_steps``, ``false_alarms`` and ``losses_equal``.
    """
    fields = {
        "series": "one",
        "title": "test_kill",
        "machine": MACHINE,
        "verdict": Verdict.PASSED,
    } | more
    counts = {name: fields.pop(name, default) for name, default in _COUNTS.items()}
    metrics = {name: Metric(float(value), "count", "lower") for name, value in counts.items()}
    if fields["verdict"] in (Verdict.PASSED, Verdict.FAILED):
        metrics["recovered"] = Metric(float(fields["verdict"] == Verdict.PASSED), "count", "higher")
    metrics["step"] = Metric(step_s, "s", "lower")
    if recovery_s is not None:
        metrics |= {
            "recovery": Metric(recovery_s, "s", "lower"),
            "bound": Metric(step_s / 2, "s", ""),
        }
    defaults = {
        "run_id": new_id(),
        "session": new_id(),
        "started_unix_ns": 1,
        "seed": 0,
        "stack": "chaoskit",
        "faults": ["Kill"],
    }
    return RunRecord(**{**defaults, "metrics": metrics, **fields})


_COUNTS = {"lost_steps": 0, "false_alarms": 0, "losses_equal": 1}
