"""The points of a step or a recovery at which a fault can strike: the rank waits there until the fault is in."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue

from chaoskit.journal import Journal
from chaoskit.messages import HookReached, Lever, LeverPulled, Member, Message, Plan, Release, Trigger
from chaoskit.runtime.board import Board
from chaoskit.runtime.levers.rig import Bench, Rig
from chaoskit.runtime.registered import Registered
from chaoskit.vocabulary import Event, Phase

_REPEAT_S = 1.0  # the report or the answer may have been lost with a coordinator


class Hooks:
    """Armed triggers of one worker. Costs one dictionary look-up a phase when none is due.

    Attributes:
        rig: what levers have left for later moments of the step; the trainer lets it act there.
    """

    def __init__(
        self, worker: str, triggers: Iterable[Trigger], send: Callable[[Message], None], board: Board, journal: Journal
    ) -> None:
        self._worker, self._send, self._board, self._journal = worker, send, board, journal
        self.rig = Rig()
        self._lock = threading.Lock()
        self._releases: dict[str, SimpleQueue[Release]] = {}  # fault -> answers for whoever waits for it
        self._due: dict[str, list[Trigger]] = {}  # by phase
        for trigger in triggers:
            self.arm(trigger)

    def arm(self, trigger: Trigger) -> None:
        """From now on, stop at ``trigger``, once."""
        with self._lock:
            due = self._due.setdefault(trigger.phase, [])
            due += [trigger] if trigger not in due else []

    def release(self, message: Release) -> None:
        """Control thread: the harness has acted, the thread that waits may go on."""
        waiting = self._releases.get(message.fault)
        if waiting is not None:  # else it was released before
            waiting.put(message)

    def reach(
        self,
        phase: str,
        step: int = -1,
        plan: Plan | None = None,
        me: Member | None = None,
        replica: Registered | None = None,
        peer: str = "",
    ) -> None:
        """Stop here if a trigger is due, until it is released.

        Args:
            step: that is being attempted; -1 before the first.
            plan: the membership of which ``me`` is a member; None before the first.
            replica: what a lever may act on; None outside the main thread.
            peer: the worker from which this one is about to pull.
        """
        self.rig.enter(phase, step)
        if not self._due.get(phase):
            return
        with self._lock:
            due = [trigger for trigger in self._due[phase] if _matches(trigger, step, plan, me)]
            for trigger in due:
                self._due[phase].remove(trigger)
        for trigger in due:
            tid, rank = threading.get_native_id(), -1 if me is None else me.rank
            hook = HookReached(self._worker, trigger.fault, rank, step, phase, os.getpid(), tid, peer)
            self._note_stop(hook, 0 if plan is None else plan.generation)
            self._pull(hook, self._wait(hook), replica)

    def _note_stop(self, hook: HookReached, generation: int) -> None:
        self._journal.write(
            Event.HOOK_STOPPED,
            fault=hook.fault,
            step=hook.step,
            generation=generation,
            rank=hook.rank,
            phase=hook.phase,
        )

    def _wait(self, hook: HookReached) -> Lever:
        """Report, and wait for the lever to pull."""
        answers = self._releases[hook.fault] = SimpleQueue()
        main = hook.tid == hook.pid  # the board shows what the main thread does
        shown = self._board.phase
        if main:
            self._board.enter(Phase.LONG)  # the harness may take its time: this wait is not a hang
        while True:
            self._send(hook)
            try:
                release = answers.get(timeout=_REPEAT_S)
                break
            except Empty:
                continue
        del self._releases[hook.fault]
        if main:
            self._board.enter(shown)
        return release.lever

    def _pull(self, hook: HookReached, lever: Lever, replica: Registered | None) -> None:
        def report(effective: bool, observed: str) -> None:
            self._journal.write(Event.LEVER, fault=hook.fault, effective=effective, observed=observed)
            self._send(LeverPulled(self._worker, hook.fault, observed, effective))

        from chaoskit.runtime.levers import acts  # a worker of a run without faults has none of them

        acts.pull(lever.act, lever.options, Bench(replica, self.rig, report, hook.phase, hook.step))


def _matches(trigger: Trigger, step: int, plan: Plan | None, me: Member | None) -> bool:
    """Whether a member that attempts ``step`` is the one that ``trigger`` is for."""
    if trigger.step not in (-1, step) or (plan.generation if plan else 0) < trigger.generation:
        return False
    if trigger.role == "most_shards":
        return plan is not None and me is not None and me.rank == plan.heaviest
    return trigger.rank == -1 or (me is not None and trigger.rank == me.rank)
