"""Snapshot of a run as plain data, which ``chaoskit top`` draws and prints as JSON.

-> observe/follower.py: the state from the journals. observe/live.py: that from heartbeats.
-> observe/picture.py draws a frame. cli/training/top.py refreshes it.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from chaoskit.observe.follower import Follower, WorkerPlace
from chaoskit.observe.live import LiveState
from chaoskit.observe.notes import Note
from chaoskit.runlog.account.time_account import Recently, TimeAccount
from chaoskit.runlog.outcome import CopyInterval
from chaoskit.vocabulary import Phase

_LOSSES_SHOWN = 60
_NOTES_SHOWN = 50
#: The default window of the recent ratios, in seconds.
WINDOW_S = 600.0


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A worker in a frame.

    Attributes:
        rank: its rank; None for a spare.
        phase: its phase in the last heartbeat, else training or joining; or spare, lost or ended.
        age_s: the time in its phase; None without a fresh heartbeat, and for spares and lost
            workers.
        step: the number of steps that it has committed, or the step in its heartbeat if that is
            higher.
    """

    worker: str
    rank: int | None
    phase: str
    age_s: float | None
    step: int


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A node in a frame. ``state`` is up, silent, ended, or the reason why it takes no part."""

    node: str
    state: str
    workers: list[WorkerRow]


class TierRow(msgspec.Struct, frozen=True, kw_only=True):
    """The newest complete copy of the state in one tier, and the time since it was reported."""

    tier: str
    step: int
    age_s: float


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a run.

    Attributes:
        state: starting, training, recovering, resizing, completed, failed, or gone (the launcher
            has ended).
        started_ns: the start of the run on CLOCK_MONOTONIC, as the times of ``notes``.
        step: the number of committed steps.
        steps: the planned number of steps; None if it is unknown.
        losses: the losses of the newest 60 steps, the newest last; None for a step without one.
        steps_per_s: the usual rate; None while it is unknown.
        world: the number of ranks that train.
        full_world: the number of ranks of the full world.
        generation: the number of the membership.
        spares_ready: the number of warm workers without a rank.
        spares: the number of them that the job shall have.
        recoveries: the number of recoveries that are over; planned resizes are left out.
        recovering_s: the duration of the current recovery so far; None if there is none.
        hang_limits_ms: the longest allowed time of each phase of a step; empty while it is unknown.
        suspects: the number of ranks that were given up because a phase lasted longer.
        copies: the work between two copies of a replicated state; None before the first.
        notes: the newest 50 notes, the newest last.
        account: the time account of the whole run.
        recently: the ratios of the last minutes.
    """

    directory: str
    name: str
    state: str
    started_ns: int
    elapsed_s: float
    step: int
    steps: int | None
    loss: float | None
    losses: list[float | None]
    steps_per_s: float | None
    world: int
    full_world: int
    generation: int
    spares_ready: int
    spares: int
    recoveries: int
    recovering_s: float | None
    nodes: list[NodeRow]
    tiers: list[TierRow]
    hang_limits_ms: dict[str, int]
    suspects: int
    copies: CopyInterval | None
    notes: list[Note]
    account: TimeAccount
    recently: Recently

    def plain(self) -> dict[str, Any]:
        """Return the frame as values for a JSON encoder."""
        return dict(msgspec.to_builtins(self)) | {"account": self.account.plain()}


def frame_of(
    follower: Follower, live: LiveState, directory: str, window_s: float = WINDOW_S
) -> Frame:
    """Return a snapshot of a run: its present state, or the last one if it is over.

    Args:
        live: the last heartbeats of the run.
        directory: the name of its directory, as it is shown.
        window_s: the window of the recent ratios, in seconds.
    """
    now_ns = follower.last_ns if follower.is_over else time.monotonic_ns()
    accountant, started = follower.accountant, follower.started
    usual_s, began_ns = accountant.usual_step_s, accountant.started_ns or now_ns
    interruption = accountant.open
    return Frame(
        directory=directory,
        name=str(started["name"]) if started else directory,
        state=_state(follower),
        started_ns=began_ns,
        elapsed_s=(now_ns - began_ns) / 1e9,
        step=accountant.step + 1,
        steps=started["steps"] if started else None,
        loss=accountant.loss,
        losses=[loss for _, loss in list(follower.losses)[-_LOSSES_SHOWN:]],
        steps_per_s=1 / usual_s if usual_s else None,
        world=accountant.world,
        full_world=accountant.full_world,
        generation=accountant.generation,
        spares_ready=accountant.spares_ready,
        spares=accountant.spares,
        recoveries=sum(not setback.planned for setback in accountant.setbacks),
        recovering_s=(now_ns - interruption.begun_ns) / 1e9
        if interruption and not interruption.planned
        else None,
        nodes=_node_rows(follower, live, now_ns),
        tiers=[
            TierRow(tier=tier, step=stored.step, age_s=(now_ns - stored.t_ns) / 1e9)
            for tier, stored in sorted(follower.stored.items())
        ],
        hang_limits_ms=follower.hang_limits["limits_ms"] if follower.hang_limits else {},
        suspects=follower.hang_limits["suspects"] if follower.hang_limits else 0,
        copies=follower.copies,
        notes=list(follower.notes)[-_NOTES_SHOWN:],
        account=follower.account(),
        recently=follower.recently(window_s),
    )


def _state(follower: Follower) -> str:
    """Return the state of a run in one word."""
    accountant, end = follower.accountant, follower.end
    if end is not None:
        return "completed" if end["ok"] else "failed"
    if follower.is_over:
        return "gone"
    if accountant.open is not None:
        return "resizing" if accountant.open.planned else "recovering"
    return "training" if accountant.step >= 0 else "starting"


def _node_rows(follower: Follower, live: LiveState, now_ns: int) -> list[NodeRow]:
    """Return the rows of the nodes with their workers, sorted by rank."""
    rows = []
    is_fresh = live.is_fresh(now_ns) and not follower.is_over
    for node in sorted(follower.nodes, key=_node_key):
        state = follower.away.get(node, "up")
        if follower.is_over:
            state = "ended" if state == "up" else state
        elif is_fresh and state == "up" and not live.is_up(node, now_ns):
            state = "silent"
        placed = [(name, place) for name, place in follower.workers.items() if place.node == node]
        placed.sort(key=lambda worker: (worker[1].rank is None, worker[1].rank or 0, worker[0]))
        workers = [
            _worker_row(name, place, live if is_fresh else LiveState(), follower.is_over)
            for name, place in placed
        ]
        rows.append(NodeRow(node=node, state=state, workers=workers))
    return rows


def _node_key(node: str) -> tuple[str, int]:
    """Return a key that sorts node2 before node10."""
    stem = node.rstrip("0123456789")
    return stem, int(node[len(stem) :] or 0)


def _worker_row(name: str, place: WorkerPlace, live: LiveState, is_over: bool) -> WorkerRow:
    """Return the row of a worker."""
    pulse = live.pulses.get(name)
    if is_over or not place.alive:
        phase = "ended" if is_over else "lost"
    elif pulse is not None and place.rank is not None:
        phase = Phase(pulse.phase).label
    else:
        phase = (
            ("training" if place.step >= 0 else "joining") if place.rank is not None else "spare"
        )
    live_age_s = (
        pulse.age_ms / 1e3 if pulse is not None and place.rank is not None and place.alive else None
    )
    step = max(place.step + 1, pulse.step if pulse is not None else 0)
    return WorkerRow(worker=name, rank=place.rank, phase=phase, age_s=live_age_s, step=step)
