"""The vocabulary of breaking things: ``from faults import Kill, Hang, NaN, Raise`` and many more; see CATALOGUE."""

from faults.base import Fault
from faults.bits import BitFlip
from faults.clock import ClockJump
from faults.coordinator import KillCoordinator
from faults.copies import CorruptReplica, LosePeerCopy
from faults.data import BadBatch, DataStall
from faults.deadlock import Deadlock
from faults.disk import DiskError, DiskFull, ReadOnlyDisk, SlowDisk
from faults.hang import Hang
from faults.kill import Kill
from faults.kubernetes.coordinator_pod import DeleteCoordinatorPod
from faults.kubernetes.machine import DrainMachine, LoseMachine, StopApiServer, TaintMachine
from faults.kubernetes.pending import BadImage, NoRoom
from faults.kubernetes.pod import DeletePod, EvictPod, KillContainer, PreemptPod
from faults.leaving import Exit
from faults.limits import LimitCpu, LimitIo, LimitMemory, LimitPids
from faults.links import Flap, LinkDown
from faults.losing import LoseNode, Rack, ReplaceNode
from faults.memory import OutOfMemory
from faults.moments import at_rate
from faults.network import Cut, Reset
from faults.node import FreezeNode, KillAgent, KillNode, Preempt
from faults.numeric import NaN
from faults.poison import PoisonSnapshot
from faults.raising import Raise
from faults.remote import RemoteOutage
from faults.resize import AddNode, Demand, Scale, TakeSpot
from faults.slow import Straggle
from faults.slow_network import Bandwidth, Delay, Loss
from faults.sticky import CrashLoop, FailLoad
from faults.stored import CorruptFile
from faults.target import Target
from faults.torn import TornWrite

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
