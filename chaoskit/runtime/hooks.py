"""The points of a step at which a fault can strike: the rank waits there until the fault is in."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from queue import SimpleQueue

from chaoskit.journal import Journal
from chaoskit.messages import HookReached, Lever, LeverPulled, Message, Release, Trigger
from chaoskit.runtime import levers
from chaoskit.runtime.board import Board
from chaoskit.runtime.replica import Replica
from chaoskit.vocabulary import Event, Phase


class Hooks:
    """Armed triggers of one worker. Costs one dictionary look-up a phase when none is due.

    Attributes:
        rig: what levers have left for later moments of the step; the trainer lets it act there.
    """

    def __init__(
        self, worker: str, triggers: Iterable[Trigger], send: Callable[[Message], None], board: Board, journal: Journal
    ) -> None:
        self._worker, self._send, self._board, self._journal = worker, send, board, journal
        self.rig = levers.Rig()
        self._releases: SimpleQueue[Release] = SimpleQueue()
        self._due: dict[tuple[int, str], list[Trigger]] = {}
        for trigger in triggers:
            self._due.setdefault((trigger.step, trigger.phase), []).append(trigger)

    def release(self, message: Release) -> None:
        """Control thread: the harness has acted, the main thread may go on."""
        self._releases.put(message)

    def reach(self, phase: Phase, step: int, rank: int, replica: Replica) -> None:
        """Main thread: stop here if a trigger is due, until it is released."""
        self.rig.enter(phase, step)
        due = self._due.get((step, phase.label))
        if not due:
            return
        for trigger in [trigger for trigger in due if trigger.rank in (-1, rank)]:
            due.remove(trigger)
            self._wait(trigger, phase, step, rank, replica)

    def _wait(self, trigger: Trigger, phase: Phase, step: int, rank: int, replica: Replica) -> None:
        shown = self._board.phase
        self._board.enter(Phase.LONG)  # the harness may take its time: this wait is not a hang
        tid = threading.get_native_id()
        self._send(HookReached(self._worker, trigger.fault, rank, step, phase.label, os.getpid(), tid))
        while (release := self._releases.get()).fault != trigger.fault:
            continue  # released late, by a former generation
        self._board.enter(shown)
        self._pull(trigger.fault, release.lever, replica, phase, step)

    def _pull(self, fault: str, lever: Lever, replica: Replica, phase: Phase, step: int) -> None:
        def report(effective: bool, observed: str) -> None:
            self._journal.write(Event.LEVER, fault=fault, effective=effective, observed=observed)
            self._send(LeverPulled(self._worker, fault, observed, effective))

        levers.pull(lever.act, lever.options, levers.Bench(replica, self.rig, report, phase, step))
