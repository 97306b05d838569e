"""Reasons of a plan, for the ranks that follow it and for observers.

A pure state machine beside the membership.

-> coordinator/effects.py publishes the plan with its reasons; runtime/step/callbacks.py shows the
losses to the user's hooks.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from chaoskit.coordinator.losses import LostWorker
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.wire.messages import Plan, RankLoss


class Reasons:
    """Collection of the reasons of the next plan, from the events before it."""

    def __init__(self) -> None:
        self._losses: list[RankLoss] = []  # of ranks, since the last generation that was formed
        self._former_world = 0
        self._first_reporter = ""  # the worker that reported first that the last generation broke
        self._resize_reason = ""  # until the world has the size that is wanted
        self._plan: Plan | None = None

    @property
    def plan(self) -> Plan | None:
        """The last plan that :meth:`explain` returned; None before the first one."""
        return self._plan

    def note(
        self, event: events.MembershipEvent, losses: Sequence[LostWorker], membership: Membership
    ) -> None:
        """Take in an event before the membership does.

        Losses of ranks, the reporter of a stall and the reason of a resize are kept for the next
        plan. Another stall of the current generation replaces the reporter. Once the current
        generation has settled, the kept losses are dropped, and its world is the former world.
        Stalls and settlements of other generations change nothing.

        Args:
            losses: the workers that the event takes away.
        """
        self._losses += [
            RankLoss(loss.worker, rank, loss.cause, loss.detail)
            for loss, rank in losses
            if rank is not None
        ]
        match event:
            case events.Settled(generation) if generation == membership.generation:
                self._losses.clear()
                self._former_world = membership.world
            case events.Stalled(generation, by) if generation == membership.generation:
                self._first_reporter = by
            case events.Resized(reason=reason):
                self._resize_reason = reason

    def explain(self, plan: Plan, size: int) -> Plan:
        """Return ``plan`` with its reasons, and keep it as the last published one.

        The losses since the last settled generation are the reason. Without losses, it is "" for a
        plan of the former size without leavers. Any other plan has the reason of the last resize,
        until a plan has the wanted size. Without such a resize, it is "a worker is ready"; before a
        generation has settled, it is "". The reporter of the broken generation is used once.

        Args:
            size: the number of ranks that is wanted.
        """
        world = len(plan.members)
        reason = "; ".join(
            f"rank {loss.rank}: {loss.cause}: {loss.detail}" for loss in self._losses
        )
        if not reason and (world != self._former_world or plan.leavers):
            reason = self._resize_reason or ("a worker is ready" if self._former_world else "")
        if world == size:
            self._resize_reason = ""
        self._plan = msgspec.structs.replace(
            plan,
            reason=reason,
            losses=tuple(self._losses),
            former_world=self._former_world,
            broken_by=self._first_reporter,
        )
        self._first_reporter = ""
        return self._plan
