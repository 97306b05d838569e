"""What an event of the membership is to the elastic policy: a pure function."""

from __future__ import annotations

from collections.abc import Collection

from chaoskit.coordinator.membership import events
from chaoskit.elastic import events as happenings


def happenings_of(
    event: events.AnyEvent, nodes: Collection[str], unfit: Collection[str]
) -> list[happenings.Event]:
    """What the policy is told.

    Args:
        nodes: live ones, once the membership has taken the event in.
        unfit: nodes that get no workers.
    """
    match event:
        case events.NodeJoined(node) | events.Fit(node) if node not in unfit:
            return [happenings.Arrived(node)] if node in nodes else []
        case events.NodeLost(node) | events.Unfit(node):
            return [happenings.Lost(node)]
        case events.LeftOut(left_out):
            return [happenings.Lost(node) for node in left_out]
        case events.Returned(returned):
            return [happenings.Arrived(node) for node in returned]
        case events.Elastic(what):
            return [what]
    return []
