"""The vocabulary of breaking things: ``from faults import Kill, Hang, NaN, Raise`` and many more; see CATALOGUE."""

from faults.base import Fault, Target
from faults.bits import BitFlip
from faults.clock import ClockJump
from faults.coordinator import KillCoordinator
from faults.data import BadBatch, DataStall
from faults.deadlock import Deadlock
from faults.hang import Hang
from faults.kill import Kill
from faults.leaving import Exit
from faults.memory import OutOfMemory
from faults.moments import at_rate
from faults.node import FreezeNode, KillAgent, KillNode, Preempt
from faults.numeric import NaN
from faults.raising import Raise
from faults.slow import Straggle
from faults.sticky import CrashLoop, FailLoad

#: Every fault there is, for catalogues and strategies.
CATALOGUE: tuple[type[Fault], ...] = (
    Kill,
    Hang,
    NaN,
    Raise,
    Exit,
    Deadlock,
    BitFlip,
    Straggle,
    OutOfMemory,
    ClockJump,
    DataStall,
    BadBatch,
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
    "BadBatch",
    "BitFlip",
    "ClockJump",
    "CrashLoop",
    "DataStall",
    "Deadlock",
    "Exit",
    "FailLoad",
    "Fault",
    "FreezeNode",
    "Hang",
    "Kill",
    "KillAgent",
    "KillCoordinator",
    "KillNode",
    "NaN",
    "OutOfMemory",
    "Preempt",
    "Raise",
    "Straggle",
    "Target",
    "at_rate",
]
