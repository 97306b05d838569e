"""Nodes that come, go and come back, and what each of them is to know."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from chaoskit.config import RunConfig
from chaoskit.coordinator.attention import Attention
from chaoskit.coordinator.losses import news
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.membership.limits import Limits
from chaoskit.coordinator.membership.policies import Policies
from chaoskit.coordinator.outputs import Disconnect, Note, Output, Send
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import AgentHello, Recall, StopWorker

#: A new coordinator gives the nodes that the one before it knew so long to attach to it.
REATTACH_S = 2.0
#: A node that is new forks its zygote before it reports; the end of its connection is noticed at once all the same.
ATTACH_S = 2.0


class Nodes(Attention):
    """Decisions about nodes, by how they are connected."""

    def __init__(self, config: RunConfig, now_s: float, policies: Policies, limits: Limits) -> None:
        super().__init__(config, now_s, policies, limits)
        self._joined: dict[str, events.NodeJoined] = {}  # by node: which agent it was when it came
        self._met = False  # the members of a plan have, or may have at the coordinator before: only then they can train

    @property
    def attached(self) -> frozenset[str]:
        """Nodes that are connected."""
        return self._attendance.attached

    def attach(self, hello: AgentHello, now_s: float, *, term: int = 1) -> list[Output]:
        """A node has connected.

        Args:
            term: of this coordinator, as its record has it.

        Raises:
            Refused: if another one of that name is connected already.
        """
        node = hello.node
        joined = events.NodeJoined(node, f"{hello.host_id}/{hello.pid}", hello.started)
        if node not in self._joined or self._joined[node].incarnation != joined.incarnation:
            self._attendance.connect(node)
        else:
            self._attendance.reconnect(node)
        if self._end is not None:
            return [Send(node, self._end)]
        self._links.introduce(hello)
        self._link_speeds.introduce(hello)
        self._newcomers.introduce(hello)
        if (
            hello.term >= term or hello.started
        ):  # it was here before, though nobody is known: so were others
            self._attendance.linger(now_s + REATTACH_S)
        outputs: list[Output] = []
        if detail := news(hello, self._membership, term):
            outputs += self._lose_record(hello, detail, now_s)
            if self._membership.finished:
                return outputs
        if node in self._membership.nodes:
            if self._joined[node].incarnation == joined.incarnation:
                return outputs + self._welcome_back(hello, now_s)
            outputs += self._lose_node(node, "another agent came in its place", now_s)
        self._joined[node] = joined
        self._gone.pop(node, None)
        for known in (self._fitness, self._newcomers, self._clocks):
            known.forget(node)
        outputs += [Send(node, StopWorker(worker, "fenced")) for worker in hello.workers]
        return outputs + self._admit(self._attendance.arrive(node, now_s), now_s)

    def _lose_record(self, hello: AgentHello, detail: str, now_s: float) -> list[Output]:
        """The node knows more than the record: that was lost, or its end."""
        known = self._membership.newest_known
        fields = {
            "node": hello.node,
            "generation": hello.generation,
            "known": known,
            "detail": detail,
        }
        if hello.generation > known:
            self._attendance.hurry(
                now_s + REATTACH_S
            )  # who has lived through it will come soon, or never
        seen = events.GenerationSeen(hello.generation, hello.node, hello.started)
        said = Note(Event.RECORD_LOST, fields)
        return [said, *self._advance(seen, now_s)] if hello.generation or hello.started else [said]

    def _welcome_back(self, hello: AgentHello, now_s: float) -> list[Output]:
        """A node whose loss was never decided: bring both sides to the same set of workers."""
        node, mine = hello.node, self._membership.workers_on(hello.node)
        self._contact.beat(node, now_s)
        self._ended |= mine.intersection(hello.ended)
        strangers = sorted(set(hello.workers) - mine)
        unstarted = sorted(
            mine - {*hello.workers, *hello.ended, *self._deferral.held}
        )  # those held have their time
        plan = self._reasons.plan
        missed = plan if plan is not None and hello.generation < plan.generation else None
        return [
            *(Send(node, StopWorker(worker, "fenced")) for worker in strangers),
            *self._start(unstarted, now_s),  # their time to become ready counts from here
            *([Send(node, missed)] if missed is not None else []),
            *(
                [Send(node, Recall(self._membership.question))]
                if self._membership.asks(node)
                else []
            ),
        ]

    def _admit(self, nodes: Sequence[str], now_s: float) -> list[Output]:
        outputs: list[Output] = []
        for node in nodes:
            self._contact.beat(node, now_s)
            self._contact.expect(node, now_s + ATTACH_S)
            outputs += self._advance(
                msgspec.structs.replace(self._joined[node], proves=self._may_prove(node)), now_s
            )
        return outputs

    def _may_prove(self, node: str) -> bool:
        """Whether a node that joins can be looked at before it is used: no rank is missing."""
        membership = self._membership
        spared = membership.settled and len(membership.members) >= membership.size
        return spared and self._config.health == "enforce" and self._newcomers.can_test(node)

    def detach(self, node: str, detail: str, now_s: float, *, dead: bool = False) -> list[Output]:
        """The connection of a node ended. ``dead``: its agent is known to have ended, and its workers with it."""
        self._attendance.disconnect(node)
        if self._end is not None or node not in self._membership.nodes:
            self._contact.drop(node)
            return [Disconnect(node)]
        if dead:
            self._contact.drop(node)
            return [Disconnect(node), *self._lose_node(node, detail, now_s)]
        self._contact.leave(node, detail)
        return [Disconnect(node)]

    def _give_up_silent(self, now_s: float) -> list[Output]:
        """Nodes that are not heard, if training can go on without them."""
        outputs: list[Output] = []
        while lost := self._contact.lost(self._membership.keepers, now_s):
            node, detail = lost[0]  # one by one: each may take the last one who has the state
            self._contact.drop(node)
            self._attendance.disconnect(node)
            outputs += [Disconnect(node), *self._lose_node(node, detail, now_s, silent=True)]
        return outputs

    def _lose_node(
        self, node: str, detail: str, now_s: float, *, silent: bool = False
    ) -> list[Output]:
        lost = events.NodeLost(node, detail, self._met, silent)
        told = self._tell_loss(lost, now_s)
        for worker in self._membership.workers_on(node):
            self._watch.forget(worker)
        return told + self._advance(lost, now_s)
