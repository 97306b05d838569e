"""A log rule fires: its action is carried out, unless that cannot help.

-> logs/watcher.py and rules/engine.py: when a rule fires; coordinator/detectors/rulings.py: when
its action cannot help. coordinator/handlers/on_worker_lost.py gives the workers up.
"""

from __future__ import annotations

from chaoskit.coordinator.commit import commit
from chaoskit.coordinator.detectors.rulings import Excused, Hopeless, reason_of
from chaoskit.coordinator.handlers.on_worker_lost import give_up
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.notes import note_of_event
from chaoskit.coordinator.outputs import Output, Show, WriteRecord
from chaoskit.coordinator.state import PlaneState
from chaoskit.vocabulary import LOG_RULE, Event
from chaoskit.wire.messages import LinesMatched, RuleFired


def lines_matched(state: PlaneState, message: LinesMatched, now_s: float) -> list[Output]:
    """Note which rules the lines of a worker have matched. There are no outputs."""
    state.detectors.rulings.note_matches(message.worker, message.rules)
    return []


def rule_fired(state: PlaneState, message: RuleFired, now_s: float) -> list[Output]:
    """Fail the job, give workers up, or write to the journal why nothing is done.

    A rule that asks for no restart is only shown to observers. A ruling that gives workers up is
    committed before their losses.
    """
    shown, membership, rulings = [Show(message)], state.membership, state.detectors.rulings
    rule_s = state.past.membership_s(now_s)
    ruling = rulings.judge(message, membership.generation, membership.members, rule_s)
    if isinstance(ruling, Hopeless):
        return [*shown, *commit(state, events.RunFailed(ruling.reason), now_s)]
    if isinstance(ruling, Excused):
        fields = {
            "rule": message.rule,
            "worker": message.worker,
            "verdict": message.verdict,
            "detail": ruling.reason,
        }
        return [*shown, WriteRecord(Event.RULE_EXCUSED, fields)] if ruling.reason else [*shown]
    aside = ruling.whole_node and len(membership.nodes) > 1
    # spares of the node first, as none of them must take the rank
    workers_of_node = sorted(
        membership.workers_on(message.node), key=lambda worker: worker == message.worker
    )
    workers = tuple(workers_of_node) if aside else (message.worker,)
    ruled = events.Ruled(message, membership.generation, workers, aside)
    rulings.take_in(ruled, rule_s)
    decided = [*note_of_event(ruled, now_s), *commit(state, ruled, now_s)]
    return [*shown, *decided, *give_up_ruled(state, ruled, now_s)]


def give_up_ruled(state: PlaneState, ruled: events.Ruled, now_s: float) -> list[Output]:
    """Give up the workers of a ruling that are still alive."""
    outputs: list[Output] = []
    for worker in ruled.workers:
        if state.membership.host_of(worker) is not None:
            outputs += give_up(
                state, worker, LOG_RULE, reason_of(ruled.fired), now_s, aside=ruled.aside
            )
    return outputs
