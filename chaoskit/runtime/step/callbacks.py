"""Hooks of the job: functions of the user's that are called when the world changes, or when this rank must go.

All are called by the main thread, before a transaction's block, between two shards or in a collective. An exception in
one is written down and shown in the worker's log, and training goes on; BadInput ends the run, as it does everywhere in
a job.
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
from chaoskit.process.heartbeat_page import Board
from chaoskit.runtime.group.regroup import Dismissed
from chaoskit.vocabulary import Event, Phase
from chaoskit.wire.messages import Loss, Plan


@dataclass(frozen=True, slots=True)
class Resize:
    """The world has another size: of ``new_world`` ranks, from ``step`` on. ``reason``: in words, for people."""

    old_world: int
    new_world: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Preemption:
    """This rank goes, and the others train on without it. After ``seconds_left`` its process is ended.

    ``step``: committed steps when it left; on a rank of a sharded job those that its own piece has seen.
    """

    seconds_left: float
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class RankLost:
    """Somebody was lost, and this rank was not. ``step`` is attempted again, or goes on, in a world of ``world`` ranks.

    ``rank``: which it had. ``cause``: one of :data:`chaoskit.vocabulary.LOSS_CAUSES`.
    """

    rank: int
    cause: str
    detail: str
    step: int
    world: int


_Happening = TypeVar("_Happening", Resize, Preemption, RankLost)


class Callbacks:
    """The hooks of one worker process, and what they have been told. :meth:`hear` is for the control thread."""

    def __init__(self, journal: Journal, board: Board) -> None:
        self._journal, self._board = journal, board
        self.on_resize: list[Callable[[Resize], object]] = []
        self.on_preempt: list[Callable[[Preemption], object]] = []
        self.on_fault: list[Callable[[RankLost], object]] = []
        self._lock = threading.Lock()
        self._losses: dict[str, Loss] = {}  # by worker: its name is never used again
        self._told: set[str] = set()  # of the lost ones
        self._plan: Plan | None = None  # the last one that was entered

    def forget(self) -> None:
        """The train function of a sharded job is entered again, and names its hooks again."""
        for hooks in (self.on_resize, self.on_preempt, self.on_fault):
            hooks.clear()

    def hear(self, plan: Plan) -> None:
        """Every plan tells why it was made, also one that is superseded before anybody enters it."""
        with self._lock:
            self._losses |= {loss.worker: loss for loss in plan.losses}

    def enter(self, plan: Plan, step: int) -> bool:
        """Call what is due as ``plan`` is entered at ``step``; whether anything was called."""
        before, self._plan = self._plan, plan
        lost = self._news(lived=before is not None)
        world = len(plan.members)
        for loss in lost:
            self._call(
                "on_fault", self.on_fault, RankLost(loss.rank, loss.cause, loss.detail, step, world)
            )
        old_world = plan.former_world if before is None else len(before.members)
        resized = old_world not in (0, world)
        if resized:
            self._call("on_resize", self.on_resize, Resize(old_world, world, step, plan.reason))
        return resized or bool(lost)

    def _news(self, *, lived: bool) -> list[Loss]:
        """The losses that have not been told. A rank that is new has lived through none of them."""
        with self._lock:
            news = [loss for name, loss in self._losses.items() if name not in self._told]
            self._told.update(self._losses)
        return news if lived else []

    def preempt(self, order: Dismissed, step: int) -> None:
        """Call the hooks of a worker that is to leave, each once. The order to leave limits their time."""
        self._board.enter(Phase.UNTIMED)
        hooks, self.on_preempt = self.on_preempt, []
        for hook in hooks:  # each is told what the ones before it have left
            self._call("on_preempt", [hook], Preemption(order.seconds_left, step, order.reason))

    def _call(
        self, name: str, hooks: Iterable[Callable[[_Happening], object]], happening: _Happening
    ) -> None:
        for hook in hooks:
            began_s, error = time.monotonic(), ""
            try:
                hook(happening)
            except BadInput:
                if not isinstance(
                    happening, Preemption
                ):  # a rank that goes does not end the run of the others
                    raise
                error = _report(name)
            except Exception:  # noqa: BLE001 - whatever the user's code raises is told, and costs no training
                error = _report(name)
            seconds = round(time.monotonic() - began_s, 6)
            self._journal.write(
                Event.HOOK_CALLED, hook=name, seconds=seconds, error=error, **asdict(happening)
            )


def _report(name: str) -> str:
    """Show the exception that is being handled in the worker's log; its last line."""
    text = traceback.format_exc()
    sys.stderr.write(f"a hook of {name} failed:\n{text}")
    return text.strip().rpartition("\n")[2]


class HookMethods:
    """What a trainer offers for naming hooks. Each method gives its argument back, so that it serves as a decorator."""

    _callbacks: Callbacks

    def on_resize(self, callback: Callable[[Resize], object]) -> Callable[[Resize], object]:
        """Call ``callback`` on every rank when the world has another size, before a step is committed in it.

        On a rank that is new, too. ``trainer.rank`` and ``trainer.world`` are those of the new world. It must not
        change what is registered: who joins takes that over, and hooks run at their own time on each rank.
        """
        self._callbacks.on_resize.append(callback)
        return callback

    def on_preempt(
        self, callback: Callable[[Preemption], object]
    ) -> Callable[[Preemption], object]:
        """Call ``callback`` on a rank that goes because the world shrinks or its node is taken away, before it ends.

        The others do not wait, so it cannot use collectives. When its seconds are over the process is ended.
        """
        self._callbacks.on_preempt.append(callback)
        return callback

    def on_fault(self, callback: Callable[[RankLost], object]) -> Callable[[RankLost], object]:
        """Call ``callback`` on the ranks that go on after somebody was lost, once for each; before ``on_resize``."""
        self._callbacks.on_fault.append(callback)
        return callback
