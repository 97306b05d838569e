"""The services that the process around a trainer provides.

-> worker/process.py makes the context, and has the control thread behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from chaoskit.config import RunConfig
from chaoskit.journal import Journal
from chaoskit.process.progress_board import Board
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
    serve_state: Callable[[Replica], Endpoint]  # starts to serve the state to peers
    report_ready: Callable[[Endpoint], None]  # reports that this worker can take a rank
    token: str
    host: str  # the address at which peers reach this node
    disk: Path
    prefetcher: Prefetcher = field(default_factory=Prefetcher)
    halt: HaltOrder = field(default_factory=HaltOrder)
