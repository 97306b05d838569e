"""The control protocol: what coordinator, agents, workers and the harness say to each other; frames.py carries it."""

from __future__ import annotations

from chaoskit.wire.messages.authentication import (
    Accepted,
    Challenge,
    Proof,
)
from chaoskit.wire.messages.base import (
    Message,
)
from chaoskit.wire.messages.fitness import (
    Finding,
    HealthReport,
    LinksMeasured,
    LinksTested,
    MeasureLinks,
    PairReading,
    TestLinks,
)
from chaoskit.wire.messages.injection import (
    ActReport,
    ArmTriggers,
    AskThread,
    AtHook,
    DaemonAct,
    InjectionAct,
    InjectionHello,
    InjectionOrder,
    InjectionReport,
    Resume,
    ThreadAnswered,
    Trigger,
)
from chaoskit.wire.messages.nodes import (
    AgentHello,
    Beat,
    ClockOffset,
    Effort,
    EndJob,
    Heard,
    Heartbeat,
    NodeLost,
    ObserverHello,
    Probe,
    Store,
    Welcome,
)
from chaoskit.wire.messages.rendezvous import (
    Exchange,
    Exchanged,
    Get,
    Put,
    RendezvousHello,
    Superseded,
    Value,
)
from chaoskit.wire.messages.sizes import (
    Answered,
    LendNodes,
    NoticeCancelled,
    ReturnNodes,
    ScaleTo,
    SpotNotice,
    WorldSize,
)
from chaoskit.wire.messages.workers import (
    Accuse,
    Halt,
    Holding,
    LinesMatched,
    RuleFired,
    StartWorker,
    StopWorker,
    WorkerDone,
    WorkerFailed,
    WorkerLost,
    WorkerReady,
)
from chaoskit.wire.messages.worlds import (
    STANDING,
    Endpoint,
    Formed,
    GroupBroken,
    Healed,
    Loss,
    Member,
    Plan,
    Recall,
    Sealed,
    Snapshot,
    SourceFailed,
)

#: What may come over a connection.
AnyMessage = (
    Plan
    | AgentHello
    | ObserverHello
    | Welcome
    | Heartbeat
    | NodeLost
    | Heard
    | Probe
    | TestLinks
    | LinksTested
    | HealthReport
    | MeasureLinks
    | LinksMeasured
    | WorkerReady
    | Holding
    | WorkerLost
    | Store
    | Accuse
    | LinesMatched
    | RuleFired
    | WorkerDone
    | WorkerFailed
    | Formed
    | Healed
    | Recall
    | Sealed
    | SourceFailed
    | GroupBroken
    | ScaleTo
    | SpotNotice
    | NoticeCancelled
    | LendNodes
    | ReturnNodes
    | Answered
    | WorldSize
    | StartWorker
    | StopWorker
    | Halt
    | EndJob
    | RendezvousHello
    | Put
    | Get
    | Value
    | Exchange
    | Exchanged
    | Superseded
    | Challenge
    | Proof
    | Accepted
)

__all__ = [
    "STANDING",
    "Accepted",
    "Accuse",
    "ActReport",
    "AgentHello",
    "Answered",
    "AnyMessage",
    "ArmTriggers",
    "AskThread",
    "AtHook",
    "Beat",
    "Challenge",
    "ClockOffset",
    "DaemonAct",
    "Effort",
    "EndJob",
    "Endpoint",
    "Exchange",
    "Exchanged",
    "Finding",
    "Formed",
    "Get",
    "GroupBroken",
    "Halt",
    "Healed",
    "HealthReport",
    "Heard",
    "Heartbeat",
    "Holding",
    "InjectionAct",
    "InjectionHello",
    "InjectionOrder",
    "InjectionReport",
    "LendNodes",
    "LinesMatched",
    "LinksMeasured",
    "LinksTested",
    "Loss",
    "MeasureLinks",
    "Member",
    "Message",
    "NodeLost",
    "NoticeCancelled",
    "ObserverHello",
    "PairReading",
    "Plan",
    "Probe",
    "Proof",
    "Put",
    "Recall",
    "RendezvousHello",
    "Resume",
    "ReturnNodes",
    "RuleFired",
    "ScaleTo",
    "Sealed",
    "Snapshot",
    "SourceFailed",
    "SpotNotice",
    "StartWorker",
    "StopWorker",
    "Store",
    "Superseded",
    "TestLinks",
    "ThreadAnswered",
    "Trigger",
    "Value",
    "Welcome",
    "WorkerDone",
    "WorkerFailed",
    "WorkerLost",
    "WorkerReady",
    "WorldSize",
]
