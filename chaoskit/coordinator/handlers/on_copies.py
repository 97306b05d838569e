"""Copies of the state: nodes offer them, and workers report those that cannot be restored.

-> coordinator/membership/restart_from_copies.py decides when to ask for copies, and what begins
with them; copy_search.py which copies count. daemon/replica_keeper.py and
daemon/piece_keeper.py offer them; runtime/step/restore.py reads them.
"""

from __future__ import annotations

from chaoskit.coordinator.commit import commit
from chaoskit.coordinator.outputs import Output, Show
from chaoskit.coordinator.state import PlaneState
from chaoskit.wire.messages import Sealed, SourceFailed


def sealed(state: PlaneState, message: Sealed, now_s: float) -> list[Output]:
    """Commit the copies that a node offers after it was asked, and show them to observers."""
    return [*commit(state, message, now_s), Show(message)]


def source_failed(state: PlaneState, message: SourceFailed, now_s: float) -> list[Output]:
    """Commit that a worker could not restore a copy, and show the report to observers."""
    return [*commit(state, message, now_s), Show(message)]
