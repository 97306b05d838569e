"""Measurements of nodes: their links, their clocks and their health; unfit nodes are kept out.

-> coordinator/detectors/ judges: links.py (broken), link_speed.py (slow), newcomers.py, clocks.py,
fitness.py. agent/agent.py and daemon/link_probe.py measure links, daemon/node_check.py the health.
health/verdict.py: which findings make a node unfit.
"""

from __future__ import annotations

import msgspec

from chaoskit.coordinator.commit import commit_loss
from chaoskit.coordinator.detectors.fitness import ITSELF
from chaoskit.coordinator.detectors.links import SUSPECT_S
from chaoskit.coordinator.detectors.workload import tell_links
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.outputs import Output, Show, WriteRecord
from chaoskit.coordinator.state import PlaneState
from chaoskit.health.finding import of_node
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import HealthReport, Heartbeat, LinksMeasured, LinksTested

_LINKS, _CLOCK = "links", "clock"  # kinds of measurements of a node

# -- links -----------------------------------------------------------------------------------------


def links_tested(state: PlaneState, message: LinksTested, now_s: float) -> list[Output]:
    """Take in which nodes a node could not reach, and act on the test once it is over."""
    state.detectors.links.answer(message.node, message.number, message.unreachable)
    return judge_links(state, now_s)


def judge_links(state: PlaneState, now_s: float) -> list[Output]:
    """Leave out nodes that cannot reach others, and readmit those that can again.

    Tests of the links are ordered as long as ranks are stuck or a node is left out. There are no
    outputs after the end of the job.
    """
    membership, detectors, attached = (
        state.membership,
        state.detectors,
        state.nodes.attendance.attached,
    )
    if membership.finished:  # a node may still answer the coordinator before this one
        return []
    is_stuck = (
        now_s < state.forming.suspicious_until_s
        or detectors.watch.waiting_s(membership.members) > SUSPECT_S
    )
    outputs: list[Output] = []
    for event in detectors.links.judge(membership, attached, now_s, stuck=is_stuck):
        outputs += commit_loss(state, event, now_s)
    if is_stuck or membership.left_out:
        outputs += detectors.links.test(membership, attached, now_s)
    return outputs


def links_measured(state: PlaneState, message: LinksMeasured, now_s: float) -> list[Output]:
    """Judge a node that joins by its links, or write the result of another test to the journal.

    Such a result is written once the last node has answered, also if no link is slow.
    """
    detectors = state.detectors
    if not message.joins:
        links = detectors.link_speeds.answer(message)
        return [] if links is None else [tell_links(links)]
    detectors.newcomers.answer(
        message, lambda node: detectors.contact.is_steady(node, now_s), now_s
    )
    outputs: list[Output] = []
    for node, findings in detectors.newcomers.news(state.membership):
        if node not in state.membership.unfit - state.membership.on_probation:
            report = HealthReport(node, tuple(of_node(node, findings)), 0.0)
            outputs += _judge_health(state, report, now_s, kind=_LINKS)
    return outputs


def measure_newcomers(state: PlaneState, now_s: float) -> list[Output]:
    """Return the orders to measure the links of nodes that join, as far as they are due.

    There are none if the health of nodes is not checked, and after the end of the job.
    """
    if state.config.health == "off" or state.membership.finished:
        return []
    return [
        *state.detectors.newcomers.order(state.membership, state.nodes.attendance.attached, now_s)
    ]


# -- clocks and health -----------------------------------------------------------------------------


def judge_clock(state: PlaneState, heartbeat: Heartbeat, now_s: float) -> list[Output]:
    """Judge the wall clock of a node by a heartbeat; no outputs if its state has not changed.

    There are none if the health of nodes is not checked, and for a first reading without fault.
    """
    detectors, node = state.detectors, heartbeat.node
    finding = detectors.clocks.hear(heartbeat) if state.config.health != "off" else None
    if finding is None:
        return []
    report = HealthReport(node, tuple(of_node(node, [finding])), 0.0)
    if finding.severity == "ok" and not detectors.fitness.knows(node, _CLOCK):
        detectors.fitness.hear(report, _CLOCK)  # reported with the next findings
        return []
    return _judge_health(state, report, now_s, kind=_CLOCK)


def health_reported(state: PlaneState, message: HealthReport, now_s: float) -> list[Output]:
    """Judge a node by the report of its own health probes."""
    return _judge_health(state, message, now_s, kind=ITSELF)


def _judge_health(
    state: PlaneState, report: HealthReport, now_s: float, *, kind: str
) -> list[Output]:
    """Judge a node by a report of one kind, together with its reports of other kinds.

    Return the line of the journal, the message to observers, and the consequences; nothing if the
    findings have not changed.
    """
    fitness = state.detectors.fitness
    verdict = fitness.hear(report, kind)
    whole_report = fitness.report(report.node)
    state.facts.note(whole_report)
    if verdict is None:
        return []
    findings = {"findings": whole_report.findings, "took_ms": whole_report.took_ms}
    note = WriteRecord(Event.HEALTH, msgspec.structs.asdict(verdict) | findings)
    return [note, Show(whole_report), *keep_unfit_out(state, now_s)]


def keep_unfit_out(state: PlaneState, now_s: float) -> list[Output]:
    """Give up unfit nodes that can be spared, and admit nodes that have proved themselves."""
    outputs: list[Output] = []
    while not state.membership.finished and (event := _next_verdict(state)) is not None:
        outputs += commit_loss(state, event, now_s)
    return outputs


def _next_verdict(state: PlaneState) -> events.Unfit | events.Fit | None:
    """Return the next verdict on a node that the membership has yet to take in, or None.

    A world that is not full needs nodes on probation at once, except those that the settings name.
    """
    membership, detectors = state.membership, state.detectors
    on_probation, untested = membership.on_probation, frozenset[str]()
    if on_probation:
        untested = detectors.newcomers.untested(membership, state.nodes.attendance.attached)
    has_open_ranks = len(membership.members) < membership.size
    needed = on_probation.difference(state.config.on_probation) if has_open_ranks else ()
    return detectors.fitness.judge(membership, untested, needed)
