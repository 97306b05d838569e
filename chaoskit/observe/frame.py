"""One look at a run as plain data: what ``chaoskit top`` draws, and prints as JSON."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from chaoskit.observe.follow import Follower, Place
from chaoskit.observe.live import LiveState
from chaoskit.observe.notes import Note
from chaoskit.runlog.account.time_account import Recently, TimeAccount
from chaoskit.runlog.outcome import CopyInterval
from chaoskit.vocabulary import Phase

_LOSSES_SHOWN = 60
_NOTES_SHOWN = 50
#: Over which ``recently`` tells the ratios, unless somebody wants another.
WINDOW_S = 600.0


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """``rank`` is None of a spare. ``age_s``: how long it has been in its phase; None where nobody tells."""

    worker: str
    rank: int | None
    phase: str
    age_s: float | None
    step: int


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """``state``: up, silent, or why it takes no part."""

    node: str
    state: str
    workers: list[WorkerRow]


class TierRow(msgspec.Struct, frozen=True, kw_only=True):
    """The newest complete copy of the state in one tier, and how long ago that was told."""

    tier: str
    step: int
    age_s: float


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """``state``: starting, training, recovering, resizing, completed, failed, or gone (its launcher is no more).

    ``hang_limits_ms``: how long a phase of a step may last, by its name; empty while it is not known. ``suspects``:
    ranks that were given up because one lasted longer.
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
        """For JSON."""
        return dict(msgspec.to_builtins(self)) | {"account": self.account.plain()}


def frame_of(
    follower: Follower, live: LiveState, directory: str, window_s: float = WINDOW_S
) -> Frame:
    """How the run stands now; how it ended, if it has. ``window_s``: of the ratios that are told of lately."""
    now_ns = follower.last_ns if follower.is_over else time.monotonic_ns()
    accountant, started = follower.accountant, follower.started
    usual_s, began_ns = accountant.usual_step_s, accountant.started_ns or now_ns
    standing = accountant.open
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
        recoveries=sum(not one.planned for one in accountant.setbacks),
        recovering_s=(now_ns - standing.begun_ns) / 1e9
        if standing and not standing.planned
        else None,
        nodes=_nodes(follower, live, now_ns),
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
    accountant, end = follower.accountant, follower.end
    if end is not None:
        return "completed" if end["ok"] else "failed"
    if follower.is_over:
        return "gone"
    if accountant.open is not None:
        return "resizing" if accountant.open.planned else "recovering"
    return "training" if accountant.step >= 0 else "starting"


def _nodes(follower: Follower, live: LiveState, now_ns: int) -> list[NodeRow]:
    rows = []
    fresh = live.is_fresh(now_ns) and not follower.is_over
    for node in sorted(follower.nodes, key=_in_order):
        state = follower.away.get(node, "up")
        if follower.is_over:
            state = "ended" if state == "up" else state
        elif fresh and state == "up" and not live.is_up(node, now_ns):
            state = "silent"
        mine = [(name, place) for name, place in follower.workers.items() if place.node == node]
        mine.sort(key=lambda one: (one[1].rank is None, one[1].rank or 0, one[0]))
        workers = [
            _worker(name, place, live if fresh else LiveState(), follower.is_over)
            for name, place in mine
        ]
        rows.append(NodeRow(node=node, state=state, workers=workers))
    return rows


def _in_order(node: str) -> tuple[str, int]:
    stem = node.rstrip("0123456789")
    return stem, int(node[len(stem) :] or 0)


def _worker(name: str, place: Place, live: LiveState, over: bool) -> WorkerRow:
    pulse = live.pulses.get(name)
    if over or not place.alive:
        phase = "ended" if over else "lost"
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
