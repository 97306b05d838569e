"""The vocabulary of breaking things: ``from faults import Kill, Hang, NaN, Raise``."""

from faults.base import Fault, Target
from faults.coordinator import KillCoordinator
from faults.hang import Hang
from faults.kill import Kill
from faults.moments import at_rate
from faults.node import FreezeNode, KillAgent, KillNode, Preempt
from faults.numeric import NaN
from faults.raising import Raise
from faults.sticky import CrashLoop, FailLoad

#: Every fault there is, for catalogues and strategies.
CATALOGUE: tuple[type[Fault], ...] = (
    Kill,
    Hang,
    NaN,
    Raise,
    KillAgent,
    KillNode,
    KillCoordinator,
    Preempt,
    FreezeNode,
    CrashLoop,
    FailLoad,
)

__all__ = [
    "CATALOGUE",
    "CrashLoop",
    "FailLoad",
    "Fault",
    "FreezeNode",
    "Hang",
    "Kill",
    "KillAgent",
    "KillCoordinator",
    "KillNode",
    "NaN",
    "Preempt",
    "Raise",
    "Target",
    "at_rate",
]
