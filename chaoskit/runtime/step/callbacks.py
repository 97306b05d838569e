"""User hooks that are called when the world changes, or when this rank must leave.

The main thread calls them before a transaction's block, between two shards or in a collective. An
exception in a hook is journalled and shown in the worker's log, and training goes on. BadInput ends
the run, as everywhere in a job.

-> step/trainer.py (``_settle``) calls them as a generation is entered. worker/process.py
(``_dismiss``): a worker that is ordered to leave. coordinator/effects.py gives that order.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TypeVar

from chaoskit.errors import BadInput
from chaoskit.journal import Journal
from chaoskit.process.progress_board import Board
from chaoskit.runtime.group.regroup import Dismissed
from chaoskit.vocabulary import Event, Phase
from chaoskit.wire.messages import Plan, RankLoss


@dataclass(frozen=True, slots=True)
class Resize:
    """A change of the world size to ``new_world`` ranks, from ``step`` on.

    Attributes:
        old_world: ranks of the last world that this rank was in; on a new rank, of the last world.
        reason: a description for people.
    """

    old_world: int
    new_world: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Preemption:
    """The order that this rank leaves, while the others train on without it.

    Attributes:
        seconds_left: the time until its process is ended.
        step: committed steps when it left. On a rank of a sharded job, those that its own piece
            contains.
        reason: a description for people.
    """

    seconds_left: float
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class RankLost:
    """The loss of another rank.

    Attributes:
        rank: the number that the lost rank had.
        cause: one of :data:`chaoskit.vocabulary.LOSS_CAUSES`.
        detail: a description of the loss for people; it may be empty.
        step: the step that is attempted again, or continued.
        world: the number of ranks that go on.
    """

    rank: int
    cause: str
    detail: str
    step: int
    world: int


_HookEvent = TypeVar("_HookEvent", Resize, Preemption, RankLost)


class Callbacks:
    """The hooks of one worker process, and the losses they were called for.

    :meth:`note_losses` is for the control thread.
    """

    def __init__(self, journal: Journal, board: Board) -> None:
        self._journal, self._board = journal, board
        self.on_resize: list[Callable[[Resize], object]] = []
        self.on_preempt: list[Callable[[Preemption], object]] = []
        self.on_fault: list[Callable[[RankLost], object]] = []
        self._lock = threading.Lock()
        self._losses: dict[str, RankLoss] = {}  # by worker, as its name is never used again
        self._reported_workers: set[str] = set()  # lost workers for which the hooks were called
        self._plan: Plan | None = None  # the last plan that was entered

    def forget(self) -> None:
        """Drop all hooks.

        The train function of a sharded job is about to be entered again, and registers its hooks
        again.
        """
        for hooks in (self.on_resize, self.on_preempt, self.on_fault):
            hooks.clear()

    def note_losses(self, plan: Plan) -> None:
        """Remember the losses that a plan names, for the hooks that :meth:`enter` calls later.

        Pass every plan that arrives, as a newer plan may supersede it before this rank enters it.
        """
        with self._lock:
            self._losses |= {loss.worker: loss for loss in plan.losses}

    def enter(self, plan: Plan, step: int) -> bool:
        """Call the hooks for losses and for a change of the world size, as ``plan`` is entered.

        Hooks are called for every loss of :meth:`note_losses` since the last call. The first call
        in a process calls none for losses.

        Return whether there was a loss or a change, even if no hook is registered for it.

        Raises:
            BadInput: if a hook raises it.
        """
        former_plan, self._plan = self._plan, plan
        losses = self._unreported(was_present=former_plan is not None)
        world = len(plan.members)
        for loss in losses:
            self._call(
                "on_fault", self.on_fault, RankLost(loss.rank, loss.cause, loss.detail, step, world)
            )
        old_world = plan.former_world if former_plan is None else len(former_plan.members)
        is_resized = old_world not in (0, world)
        if is_resized:
            self._call("on_resize", self.on_resize, Resize(old_world, world, step, plan.reason))
        return is_resized or bool(losses)

    def _unreported(self, *, was_present: bool) -> list[RankLoss]:
        """Return the losses for which no hook was called yet.

        A new rank was not present at any of them, and gets none.
        """
        with self._lock:
            unreported = [
                loss for name, loss in self._losses.items() if name not in self._reported_workers
            ]
            self._reported_workers.update(self._losses)
        return unreported if was_present else []

    def preempt(self, order: Dismissed, step: int) -> None:
        """Call the hooks of a worker that must leave, each once, also if this is called again.

        Exceptions of hooks are journalled, BadInput included. The order to leave limits their time.
        """
        self._board.enter(Phase.UNTIMED)
        hooks, self.on_preempt = self.on_preempt, []
        for hook in hooks:  # `seconds_left` shrinks with each hook
            self._call("on_preempt", [hook], Preemption(order.seconds_left, step, order.reason))

    def _call(
        self, name: str, hooks: Iterable[Callable[[_HookEvent], object]], event: _HookEvent
    ) -> None:
        """Call each hook with ``event``, and journal its duration and its exception.

        Raises:
            BadInput: if a hook raises it and the rank stays.
        """
        for hook in hooks:
            began_s, error = time.monotonic(), ""
            try:
                hook(event)
            except BadInput:
                if not isinstance(event, Preemption):  # a rank that leaves does not end the run
                    raise
                error = _report(name)
            except Exception:  # noqa: BLE001 - logged, and training goes on
                error = _report(name)
            seconds = round(time.monotonic() - began_s, 6)
            self._journal.write(
                Event.HOOK_CALLED, hook=name, seconds=seconds, error=error, **asdict(event)
            )


def _report(name: str) -> str:
    """Show the current exception in the worker's log, and return its last line."""
    text = traceback.format_exc()
    sys.stderr.write(f"a hook of {name} failed:\n{text}")
    return text.strip().rpartition("\n")[2]
