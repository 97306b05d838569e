"""Public names of the fault library: ``from faults import Kill, Hang, NaN, Raise`` and many more.

:data:`CATALOGUE` lists all faults. ``chaoskit.faults`` is the same package: a project that has a
package ``faults`` of its own imports it by that name.

-> base.py: the class from which a fault of your own is derived; kinds.py: how it is found by name.
"""

from chaoskit.faults.base import Fault
from chaoskit.faults.kubernetes.coordinator_pod import DeleteCoordinatorPod
from chaoskit.faults.kubernetes.machine import (
    DrainMachine,
    LoseMachine,
    StopApiServer,
    TaintMachine,
)
from chaoskit.faults.kubernetes.pending import BadImage, NoRoom
from chaoskit.faults.kubernetes.pod import DeletePod, EvictPod, KillContainer, PreemptPod
from chaoskit.faults.network.links import Flap, LinkDown
from chaoskit.faults.network.partitions import Cut, Reset
from chaoskit.faults.network.slow_network import Bandwidth, Delay, Loss
from chaoskit.faults.nodes.coordinator import KillCoordinator
from chaoskit.faults.nodes.limits import LimitCpu, LimitIo, LimitMemory, LimitPids
from chaoskit.faults.nodes.losing import LoseNode, Rack, ReplaceNode
from chaoskit.faults.nodes.node import FreezeNode, KillAgent, KillNode, Preempt
from chaoskit.faults.nodes.resize import AddNode, Demand, Scale, TakeSpot
from chaoskit.faults.numbers.bits import BitFlip
from chaoskit.faults.numbers.data import BadBatch, DataStall
from chaoskit.faults.numbers.numeric import NaN
from chaoskit.faults.processes.clock import ClockJump
from chaoskit.faults.processes.deadlock import Deadlock
from chaoskit.faults.processes.hang import Hang
from chaoskit.faults.processes.kill import Kill
from chaoskit.faults.processes.leaving import Exit
from chaoskit.faults.processes.memory import OutOfMemory
from chaoskit.faults.processes.raising import Raise
from chaoskit.faults.processes.slow import Straggle
from chaoskit.faults.processes.sticky import CrashLoop, FailLoad
from chaoskit.faults.random_moments import at_rate
from chaoskit.faults.short_name import SHORT, share_modules
from chaoskit.faults.storage.copies import CorruptReplica, LosePeerCopy
from chaoskit.faults.storage.disk import DiskError, DiskFull, ReadOnlyDisk, SlowDisk
from chaoskit.faults.storage.poison import PoisonSnapshot
from chaoskit.faults.storage.remote import RemoteOutage
from chaoskit.faults.storage.stored import CorruptFile
from chaoskit.faults.storage.torn import TornWrite
from chaoskit.faults.target import Target

#: All faults of this package, for the printed catalogue and for strategies.
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
    LoseNode,
    ReplaceNode,
    Rack,
    DeleteCoordinatorPod,
    DeletePod,
    EvictPod,
    PreemptPod,
    KillContainer,
    LoseMachine,
    DrainMachine,
    TaintMachine,
    StopApiServer,
    NoRoom,
    BadImage,
    LimitCpu,
    LimitMemory,
    LimitPids,
    LimitIo,
    CrashLoop,
    FailLoad,
    Cut,
    Reset,
    LinkDown,
    Flap,
    Delay,
    Loss,
    Bandwidth,
    DiskFull,
    SlowDisk,
    ReadOnlyDisk,
    DiskError,
    TornWrite,
    CorruptFile,
    RemoteOutage,
    CorruptReplica,
    LosePeerCopy,
    PoisonSnapshot,
    Scale,
    AddNode,
    TakeSpot,
    Demand,
)

__all__ = [
    "CATALOGUE",
    "AddNode",
    "BadBatch",
    "BadImage",
    "Bandwidth",
    "BitFlip",
    "ClockJump",
    "CorruptFile",
    "CorruptReplica",
    "CrashLoop",
    "Cut",
    "DataStall",
    "Deadlock",
    "Delay",
    "DeleteCoordinatorPod",
    "DeletePod",
    "Demand",
    "DiskError",
    "DiskFull",
    "DrainMachine",
    "EvictPod",
    "Exit",
    "FailLoad",
    "Fault",
    "Flap",
    "FreezeNode",
    "Hang",
    "Kill",
    "KillAgent",
    "KillContainer",
    "KillCoordinator",
    "KillNode",
    "LimitCpu",
    "LimitIo",
    "LimitMemory",
    "LimitPids",
    "LinkDown",
    "LoseMachine",
    "LoseNode",
    "LosePeerCopy",
    "Loss",
    "NaN",
    "NoRoom",
    "OutOfMemory",
    "PoisonSnapshot",
    "Preempt",
    "PreemptPod",
    "Rack",
    "Raise",
    "ReadOnlyDisk",
    "RemoteOutage",
    "ReplaceNode",
    "Reset",
    "Scale",
    "SlowDisk",
    "StopApiServer",
    "Straggle",
    "TaintMachine",
    "TakeSpot",
    "Target",
    "TornWrite",
    "at_rate",
]

if __name__ == SHORT:
    share_modules()
