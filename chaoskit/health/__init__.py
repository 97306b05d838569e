"""Whether a node is fit to train: probes, what follows from them, and the list of nodes that are kept out.

Each probe is a module with ``read(...)``, which looks at the machine, and ``judge(reading, limits)``, which is pure.
"""

from __future__ import annotations

from chaoskit.health.limits import Limits
from chaoskit.health.quarantine import Entry, Quarantine
from chaoskit.health.verdict import HealthVerdict, Standing, decide
from chaoskit.wire.messages import Finding

__all__ = ["Entry", "Finding", "HealthVerdict", "Limits", "Quarantine", "Standing", "decide"]
