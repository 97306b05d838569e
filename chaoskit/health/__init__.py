"""Fitness of a node for training: probes, verdicts, and the list of nodes that are kept out.

Each probe is a module with two functions. ``read(...)`` examines the machine and returns a reading.
``judge(reading, limits)`` returns the findings on a reading; it is pure.

-> ``health/verdict.py``: refuses a node. ``daemon/node_check.py``: runs the probes during a run.
-> ``coordinator/detectors/fitness.py`` and ``coordinator/handlers/on_measurement.py``: keep workers
away from an unfit node. ``cli/machine/node.py``: checks by hand.
"""

from __future__ import annotations

from chaoskit.health.limits import HealthLimits
from chaoskit.health.quarantine import Quarantine, QuarantineEntry
from chaoskit.health.verdict import HealthVerdict, NodeStanding, decide
from chaoskit.wire.messages import Finding

__all__ = [
    "Finding",
    "HealthLimits",
    "HealthVerdict",
    "NodeStanding",
    "Quarantine",
    "QuarantineEntry",
    "decide",
]
