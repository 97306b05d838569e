"""What the process around a trainer provides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from chaoskit.config import RunConfig
from chaoskit.journal import Journal
from chaoskit.messages import Endpoint, Message
from chaoskit.runtime.board import Board
from chaoskit.runtime.callbacks import Callbacks
from chaoskit.runtime.halting import HaltOrder
from chaoskit.runtime.hooks import Hooks
from chaoskit.runtime.prefetch import Prefetcher
from chaoskit.runtime.regroup import Regrouper
from chaoskit.runtime.replica import Replica


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
