"""Why the world changes: what a plan tells those who live through it. A pure state machine beside the membership."""

from __future__ import annotations

import msgspec

from chaoskit.coordinator.losses import lost_workers
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.wire.messages import Loss, Plan


class Reasons:
    """Sees every event before the membership takes it in, and every plan that comes of it."""

    def __init__(self) -> None:
        self._losses: list[Loss] = []  # of ranks, since the last generation that was formed
        self._former_world = 0
        self._broken_by = ""  # the worker that reported first that the last generation broke
        self._wish = ""  # why the world shall be of another size, until it is
        self._plan: Plan | None = None

    @property
    def plan(self) -> Plan | None:
        """The last published plan, with its reasons."""
        return self._plan

    def note(self, event: events.AnyEvent, membership: Membership, now_s: float) -> None:
        """``membership`` is about to take in ``event``."""
        lost = [
            (one, rank) for one, rank in lost_workers(event, membership, now_s) if rank is not None
        ]
        self._losses += [Loss(one.worker, rank, one.cause, one.detail) for one, rank in lost]
        match event:
            case events.Settled(generation) if generation == membership.generation:
                self._losses.clear()
                self._former_world = membership.world
            case events.Stalled(generation, by) if generation == membership.generation:
                self._broken_by = by
            case events.Resized(reason=reason):
                self._wish = reason

    def tell(self, plan: Plan, size: int) -> Plan:
        """``plan`` with its reasons. ``size``: ranks that the world shall have."""
        world = len(plan.members)
        reason = "; ".join(
            f"rank {loss.rank}: {loss.cause}: {loss.detail}" for loss in self._losses
        )
        if not reason and (world != self._former_world or plan.leavers):
            reason = self._wish or ("a worker is ready" if self._former_world else "")
        if world == size:
            self._wish = ""
        self._plan = msgspec.structs.replace(
            plan,
            reason=reason,
            losses=tuple(self._losses),
            former_world=self._former_world,
            broken_by=self._broken_by,
        )
        self._broken_by = ""
        return self._plan
