"""The points of a step or recovery at which a fault can strike.

The rank waits there until the fault is active.

-> experiment/injection/channel.py: the other end, in the harness. runtime/injection/acts.py: what a
worker can do to itself there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from queue import SimpleQueue

from chaoskit.journal import Journal
from chaoskit.process.linux import set_name
from chaoskit.process.progress_board import Board
from chaoskit.runtime.injection.context import InjectedActs, InjectionContext
from chaoskit.runtime.state.registered import Registered
from chaoskit.vocabulary import Event, Phase
from chaoskit.wire.injection_line import InjectionLine
from chaoskit.wire.messages import (
    ActReport,
    ArmTriggers,
    AskThread,
    AtHook,
    InjectionAct,
    Member,
    Plan,
    Resume,
    ThreadAnswered,
    Trigger,
)

_TRIGGERS_WAIT_S = 20.0  # the harness may be starting a container


class Hooks:
    """The armed triggers of one worker. A phase without a trigger costs one dictionary look-up.

    Making the object with a ``line`` waits until all triggers of the plan have arrived. It waits at
    most 20 s.

    Args:
        line: the connection to the harness that injects faults; None in a run without faults.

    Attributes:
        injected: the acts that are left for later moments of the step; the trainer calls them
            there.
    """

    def __init__(
        self, worker: str, line: InjectionLine | None, board: Board, journal: Journal
    ) -> None:
        self._worker, self._line, self._board, self._journal = worker, line, board, journal
        self.injected = InjectedActs()
        self._lock = threading.Lock()
        self._releases: dict[str, SimpleQueue[Resume]] = {}  # by fault: answers to threads
        self._due: dict[str, list[Trigger]] = {}  # by phase
        if line is not None:
            armed = threading.Event()
            threading.Thread(
                target=self._serve, args=(line, armed), name="ck-inject", daemon=True
            ).start()
            armed.wait(_TRIGGERS_WAIT_S)

    def _serve(self, line: InjectionLine, armed: threading.Event) -> None:
        """Carry out the orders of the harness until it is gone, then release all waiting threads.

        Args:
            armed: set once all triggers of the plan have arrived, or the harness is gone.
        """
        set_name("ck-inject")
        try:
            while (order := line.receive()) is not None:
                match order:
                    case ArmTriggers(triggers, more):
                        self._arm(triggers)
                        if not more:
                            armed.set()
                    case Resume(fault):
                        if (waiting := self._releases.get(fault)) is not None:
                            waiting.put(order)
                    case AskThread(number):
                        line.send(ThreadAnswered(self._worker, number))
        finally:
            with self._lock:
                self._line = None
                self._due.clear()
            armed.set()
            for fault, waiting in list(self._releases.items()):
                waiting.put(Resume(fault, InjectionAct("none")))

    def _arm(self, triggers: Iterable[Trigger]) -> None:
        """Add triggers to those that are due, without repetition."""
        with self._lock:
            for trigger in triggers:
                due = self._due.setdefault(trigger.phase, [])
                due += [trigger] if trigger not in due else []

    def reach(
        self,
        phase: str,
        step: int = -1,
        plan: Plan | None = None,
        me: Member | None = None,
        replica: Registered | None = None,
        peer: str = "",
    ) -> None:
        """Block here if a trigger is due, until it is released, and carry out its act.

        A trigger is due once. The journal has each stop. The acts that were left for this phase are
        called first, whether a trigger is due or not. An exception of an act is raised.

        Args:
            step: the step that is attempted; -1 before the first.
            plan: the membership of which ``me`` is a member; None before the first.
            replica: the state that an act may change; None outside the main thread.
            peer: the worker from which this one is about to pull.
        """
        self.injected.enter(phase, step)
        if not self._due.get(phase):
            return
        with self._lock:
            due = [
                trigger for trigger in self._due.get(phase, ()) if _matches(trigger, step, plan, me)
            ]
            for trigger in due:
                self._due[phase].remove(trigger)
        for trigger in due:
            tid, rank = threading.get_native_id(), -1 if me is None else me.rank
            generation = 0 if plan is None else plan.generation
            hook = AtHook(
                self._worker, trigger.fault, rank, step, phase, os.getpid(), tid, generation, peer
            )
            self._note_stop(hook)
            self._act(hook, self._wait(hook), replica)

    def _note_stop(self, hook: AtHook) -> None:
        """Journal that a thread waits for a fault."""
        self._journal.write(
            Event.HOOK_STOPPED,
            fault=hook.fault,
            step=hook.step,
            generation=hook.generation,
            rank=hook.rank,
            phase=hook.phase,
            peer=hook.peer,
        )

    def _wait(self, hook: AtHook) -> InjectionAct:
        """Report that this thread waits, and return the act of the answer.

        The act is ``none`` if the harness is gone.
        """
        answers = self._releases[hook.fault] = SimpleQueue()
        is_main_thread = hook.tid == hook.pid  # the board shows what the main thread does
        phase_before = self._board.phase
        if is_main_thread:
            self._board.enter(Phase.UNTIMED)  # the harness may take long: this wait is not a hang
        release = answers.get() if self._send(hook) else Resume(hook.fault, InjectionAct("none"))
        del self._releases[hook.fault]
        if is_main_thread:
            self._board.enter(phase_before)
        return release.act

    def _send(self, report: AtHook | ActReport) -> bool:
        """Send a report to the harness. Return False if the harness is gone."""
        with self._lock:
            line = self._line
        return line is not None and line.send(report)

    def _act(self, hook: AtHook, act: InjectionAct, replica: Registered | None) -> None:
        """Carry out an act, and report its effect to the journal and to the harness."""

        def report(effective: bool, observed: str) -> None:
            self._journal.write(
                Event.LEVER, fault=hook.fault, effective=effective, observed=observed
            )
            self._send(ActReport(self._worker, hook.fault, observed, effective))

        from chaoskit.runtime.injection import acts  # not loaded in a run without faults

        acts.carry_out(
            act.name,
            act.options,
            InjectionContext(replica, self.injected, report, hook.phase, hook.step),
        )


def _matches(trigger: Trigger, step: int, plan: Plan | None, me: Member | None) -> bool:
    """Return whether ``trigger`` is meant for a member that attempts ``step``."""
    if trigger.step not in (-1, step) or (plan.generation if plan else 0) < trigger.generation:
        return False
    if trigger.role == "most_shards":
        return plan is not None and me is not None and me.rank == plan.heaviest
    return trigger.rank == -1 or (me is not None and trigger.rank == me.rank)
