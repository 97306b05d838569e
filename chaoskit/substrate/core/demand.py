"""The nodes and actions that a run asks of a substrate.

The substrate is asked before anything of the run is created.

-> ``Substrate.require`` (``core/base.py``) refuses a run that cannot take place.
"""

from __future__ import annotations

from dataclasses import dataclass

from chaoskit.substrate.core.actions import Action


@dataclass(frozen=True, slots=True)
class RunDemand:
    """The part of a plan that depends on the substrate.

    Attributes:
        nodes: largest number of nodes that the run may have at once.
        standbys: number of further nodes that stand by for faults.
        actions: kinds of actions that the faults of the run apply.
        command: the command of the run; empty for a job.
        device: type of the job's device, such as ``cpu`` or ``cuda``.
    """

    nodes: int
    standbys: int = 0
    actions: frozenset[type[Action]] = frozenset()
    command: tuple[str, ...] = ()
    device: str = "cpu"
