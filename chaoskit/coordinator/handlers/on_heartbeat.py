"""A heartbeat of a node: its lease is renewed, and the progress of all ranks is judged together.

-> agent/agent.py sends it; process/progress_board.py: where a worker shows its progress.
coordinator/detectors/contact.py: nodes that send none; coordinator/handlers/on_suspicion.py and
on_workload.py: ranks that hang or are slow.
"""

from __future__ import annotations

import math

from chaoskit.coordinator.effects import start_workers
from chaoskit.coordinator.handlers.on_end import dismiss_behind
from chaoskit.coordinator.handlers.on_generation import note_trained
from chaoskit.coordinator.handlers.on_measurement import judge_clock
from chaoskit.coordinator.handlers.on_suspicion import look_for_hangs
from chaoskit.coordinator.handlers.on_workload import look_at_workload
from chaoskit.coordinator.outputs import Output, Send, Show
from chaoskit.coordinator.state import PlaneState
from chaoskit.wire.messages import Heard, Heartbeat


def heartbeat(state: PlaneState, message: Heartbeat, now_s: float) -> list[Output]:
    """Renew the lease of a node, and take in the progress of its live workers.

    The heartbeat of a node that is not admitted yet is only shown and answered. Starts that have
    waited long enough are ordered, and the wall clock is judged. :func:`judge_ranks` judges the
    progress later.
    """
    outputs = [Show(message), *_answer(state, message, now_s)]
    if message.node not in state.membership.nodes:
        return outputs  # it waits for the others
    detectors, schedules = state.detectors, state.schedules
    detectors.contact.beat(message.node, now_s)
    live = [beat for beat in message.beats if state.membership.host_of(beat.worker) is not None]
    for beat in live:
        outputs += note_trained(state, beat.trained_in, now_s)
    detectors.watch.hear(live, now_s)
    detectors.workload.hear(live)
    for beat in live:
        schedules.saves.note_step(beat.step, beat.generation, now_s)
    detectors.has_news = True
    outputs += start_workers(state, schedules.starts.observe(message.beats, now_s), now_s)
    return [*outputs, *judge_clock(state, message, now_s)]


def _answer(state: PlaneState, message: Heartbeat, now_s: float) -> list[Output]:
    """Return the answer that extends the lease which the agent itself watches.

    Some heartbeats get no answer, because each answer wakes the agent up.
    """
    schedules = state.schedules
    if now_s < schedules.answered_s.get(message.node, -math.inf) + schedules.answer_s:
        return []
    schedules.answered_s[message.node] = now_s
    return [Send(message.node, Heard(message.sent_ns))]


def judge_ranks(state: PlaneState, now_s: float) -> list[Output]:
    """Act on the progress of all ranks together, if a heartbeat came since the last call.

    Leavers are dismissed, hung ranks and stragglers are given up, and shards are moved.
    """
    if not state.detectors.has_news:
        return []
    state.detectors.has_news = False
    outputs = dismiss_behind(state, now_s)
    outputs += look_for_hangs(state, now_s)
    outputs += look_at_workload(state, now_s)
    return outputs
