"""Messages of the control protocol between coordinator, agents, workers and the harness.

-> wire/frames.py sends them; coordinator/plane.py has a table of their handlers in a coordinator,
agent/agent.py (``_carry_out``) and runtime/worker/process.py obey the orders.
"""

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
    StoreStep,
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
    Suspicion,
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
    Member,
    OfferedSnapshot,
    Plan,
    RankLoss,
    Recall,
    Sealed,
    SourceFailed,
)

#: Messages that may come over a connection.
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
    | StoreStep
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
    "MeasureLinks",
    "Member",
    "Message",
    "NodeLost",
    "NoticeCancelled",
    "ObserverHello",
    "OfferedSnapshot",
    "PairReading",
    "Plan",
    "Probe",
    "Proof",
    "Put",
    "RankLoss",
    "Recall",
    "RendezvousHello",
    "Resume",
    "ReturnNodes",
    "RuleFired",
    "ScaleTo",
    "Sealed",
    "SourceFailed",
    "SpotNotice",
    "StartWorker",
    "StopWorker",
    "StoreStep",
    "Superseded",
    "Suspicion",
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
