"""The size of the world: who asks for another one, what the elastic policy answers, and what becomes of it."""

from __future__ import annotations

import math

import msgspec

from chaoskit.coordinator.decisions import Decisions
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.notes import note_of_event
from chaoskit.coordinator.outputs import Note, Output, Send, Show
from chaoskit.elastic import events as happenings
from chaoskit.elastic.events import Answer, Evict
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import (
    Answered,
    LendNodes,
    NoticeCancelled,
    ReturnNodes,
    ScaleTo,
    SpotNotice,
    WorldSize,
)


class Sizing(Decisions):
    """Decisions, and what the elastic policy makes of them."""

    def _advance(self, event: events.AnyEvent, now_s: float) -> list[Output]:
        """Take in an event, and what follows from it."""
        decided = self._decide(event, now_s)
        return decided + self._resize(event, now_s) if decided else []

    def _look_at_size(self, now_s: float) -> list[Output]:
        """What the elastic policy has waited for until now."""
        if self._elasticity is None or now_s - self._lag_s < self._elasticity.next_s():
            return []
        return self._advance(events.Elastic(happenings.Tick()), now_s)

    def _ask_for(
        self,
        message: ScaleTo | LendNodes | SpotNotice | NoticeCancelled | ReturnNodes,
        now_s: float,
    ) -> list[Output]:
        """Somebody wants another size."""
        if isinstance(message, LendNodes) and (
            message.nodes < 1 or not 0 <= message.grace_s < math.inf
        ):
            return self._answer(
                Answer(message.request, False, "ask for 1 node or more, and a grace of 0 s or more")
            )
        if isinstance(message, SpotNotice) and not math.isfinite(message.grace_s):
            return self._answer(Answer("", False, "say in how many seconds the node is taken away"))
        match message:
            case ScaleTo(request, size, asked_by):
                happening: happenings.Event = happenings.Scale(request, size, asked_by)
            case LendNodes(request, job, nodes, grace_s):
                happening = happenings.Demand(request, job, nodes, grace_s)
            case SpotNotice(node, grace_s):
                happening = happenings.Notice(node, now_s - self._lag_s + max(0.0, grace_s))
            case NoticeCancelled(node):
                happening = happenings.NoticeCancelled(node)
            case ReturnNodes(job):
                happening = happenings.Returned(job)
        if self._elasticity is None:
            request = getattr(message, "request", "")
            return self._answer(
                Answer(request, False, "the run has no elastic policy: start it with one")
            )
        told: list[Output] = (
            [Send(message.node, message)] if isinstance(message, NoticeCancelled) else []
        )
        return told + self._advance(events.Elastic(happening), now_s)

    def _answer(self, answer: Answer) -> list[Output]:
        fields = msgspec.structs.asdict(
            said := Answered(answer.request, answer.accepted, answer.reason, answer.nodes)
        )
        return [Note(Event.ASKED, fields), Show(said)]

    def _resize(self, event: events.AnyEvent, now_s: float) -> list[Output]:
        """What the elastic policy makes of an event that the membership has taken in."""
        if self._elasticity is None:
            return []
        outputs: list[Output] = []
        for decision in self._elasticity.take_in(event, self._membership, now_s - self._lag_s):
            if isinstance(decision, Answer):
                outputs += [*self._answer(decision), Show(self._world_size(""))]
            elif isinstance(decision, Evict):
                outputs += self._evict(decision, now_s)
        wish = self._elasticity.wish(self._membership)
        if wish is None or self._membership.finished:
            return outputs
        remembered, *rest = self._advance(wish, now_s)
        return [*outputs, remembered, *self._tell_size(wish.reason, now_s), *rest]

    def _tell_size(self, reason: str, now_s: float) -> list[Output]:
        said = self._world_size(reason)
        return [Note(Event.RESIZED, msgspec.structs.asdict(said), int(now_s * 1e9)), Show(said)]

    def _world_size(self, reason: str) -> WorldSize:
        assert self._elasticity is not None
        membership = self._membership
        nodes = tuple(node for node in membership.nodes if node not in membership.idle)
        return WorldSize(membership.size, self._elasticity.wanted, nodes, reason)

    def _evict(self, decision: Evict, now_s: float) -> list[Output]:
        if not (workers := self._membership.workers_on(decision.node)):
            return []
        if not self._policies.may_evict(decision.node, self._membership.keepers):
            return []
        event = events.Evicted(decision.node, decision.reason)
        told = [*note_of_event(event, now_s), *self._tell_loss(event, now_s)]
        for worker in workers:
            self._watch.forget(worker)
        return told + self._advance(event, now_s)
