"""A request for another size of the world, from a person, another job, or a node that is to go.

-> elastic/policy.py decides; coordinator/membership/elasticity.py passes the requests on.
elastic/client.py and launcher/control_api.py: the way of a request to here; agent/agent.py: the
SIGTERM of a node.
"""

from __future__ import annotations

import math

from chaoskit.coordinator.commit import commit
from chaoskit.coordinator.effects import announce_answer
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.outputs import Output, Send
from chaoskit.coordinator.state import PlaneState
from chaoskit.elastic.decisions import Answer
from chaoskit.wire.messages import LendNodes, NoticeCancelled, SpotNotice


def size_requested(state: PlaneState, message: events.SizeRequest, now_s: float) -> list[Output]:
    """Have the elastic policy take in a request, or refuse the request.

    A refusal is announced like an answer. A cancelled notice is forwarded to its node.
    """
    if problem := _problem(state, message):
        return announce_answer(Answer(getattr(message, "request", ""), False, problem))
    outputs: list[Output] = []
    if isinstance(message, NoticeCancelled):
        outputs.append(Send(message.node, message))
    return outputs + commit(state, message, now_s)


def _problem(state: PlaneState, message: events.SizeRequest) -> str:
    """Return the reason why a request is refused, or ""."""
    if isinstance(message, LendNodes) and (
        message.nodes < 1 or not 0 <= message.grace_s < math.inf
    ):
        return "ask for 1 node or more, and a grace of 0 s or more"
    if isinstance(message, SpotNotice) and not math.isfinite(message.grace_s):
        return "say in how many seconds the node is taken away"
    if state.elasticity is None:
        return "the run has no elastic policy: start it with one"
    return ""


def tick_policy(state: PlaneState, now_s: float) -> list[Output]:
    """Have the elastic policy do what is due by now; no outputs if nothing is due."""
    if state.elasticity is None or state.past.membership_s(now_s) < state.elasticity.next_s():
        return []
    return commit(state, events.PolicyTick(), now_s)
