"""What the process around a trainer provides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from chaoskit.config import RunConfig
from chaoskit.journal import Journal
from chaoskit.process.heartbeat_page import Board
from chaoskit.runtime.group.regroup import Regrouper
from chaoskit.runtime.state.prefetch import Prefetcher
from chaoskit.runtime.state.replica import Replica
from chaoskit.runtime.step.callbacks import Callbacks
from chaoskit.runtime.step.halting import HaltOrder
from chaoskit.runtime.step.hooks import Hooks
from chaoskit.wire.messages import Endpoint, Message


@dataclass(slots=True)
class WorkerContext:
    """The connections of a worker to its agent, its peers and its journal."""

    name: str
    config: RunConfig
    journal: Journal
    board: Board
    hooks: Hooks
    regrouper: Regrouper
    callbacks: Callbacks
    send: Callable[[Message], None]
    share: Callable[[Replica], Endpoint]  # start to serve the state to peers
    ready: Callable[[Endpoint], None]  # tell the coordinator that a rank can be taken
    token: str
    host: str  # address under which peers reach this node
    disk: Path
    prefetcher: Prefetcher = field(default_factory=Prefetcher)
    halt: HaltOrder = field(default_factory=HaltOrder)
