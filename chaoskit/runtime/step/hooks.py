"""The points of a step or a recovery at which a fault can strike: the rank waits there until the fault is in."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from queue import SimpleQueue

from chaoskit.journal import Journal
from chaoskit.process.heartbeat_page import Board
from chaoskit.process.linux import set_name
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

_GREETING_S = 20.0  # for the triggers of the plan: the harness may be about to start a container


class Hooks:
    """Armed triggers of one worker. Costs one dictionary look-up a phase when none is due.

    Args:
        line: to the harness that injects faults; None in a run without.

    Attributes:
        injected: what acts have left for later moments of the step; the trainer calls it there.
    """

    def __init__(
        self, worker: str, line: InjectionLine | None, board: Board, journal: Journal
    ) -> None:
        self._worker, self._line, self._board, self._journal = worker, line, board, journal
        self.injected = InjectedActs()
        self._lock = threading.Lock()
        self._releases: dict[
            str, SimpleQueue[Resume]
        ] = {}  # fault -> the answer for the thread that waits for it
        self._due: dict[str, list[Trigger]] = {}  # by phase
        if line is not None:
            armed = threading.Event()
            threading.Thread(
                target=self._obey, args=(line, armed), name="ck-inject", daemon=True
            ).start()
            armed.wait(_GREETING_S)

    def _obey(self, line: InjectionLine, armed: threading.Event) -> None:
        """Do what the harness orders, until it is gone: then nothing waits for it any more."""
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
        """Stop here if a trigger is due, until it is released.

        Args:
            step: that is being attempted; -1 before the first.
            plan: the membership of which ``me`` is a member; None before the first.
            replica: what an act may change; None outside the main thread.
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
        """Report, and wait for what to do: nothing, if the harness is gone."""
        answers = self._releases[hook.fault] = SimpleQueue()
        main = hook.tid == hook.pid  # the board shows what the main thread does
        shown = self._board.phase
        if main:
            self._board.enter(
                Phase.UNTIMED
            )  # the harness may take its time: this wait is not a hang
        release = answers.get() if self._say(hook) else Resume(hook.fault, InjectionAct("none"))
        del self._releases[hook.fault]
        if main:
            self._board.enter(shown)
        return release.act

    def _say(self, report: AtHook | ActReport) -> bool:
        """Whether the harness is there to hear it."""
        with self._lock:
            line = self._line
        return line is not None and line.send(report)

    def _act(self, hook: AtHook, act: InjectionAct, replica: Registered | None) -> None:
        def report(effective: bool, observed: str) -> None:
            self._journal.write(
                Event.LEVER, fault=hook.fault, effective=effective, observed=observed
            )
            self._say(ActReport(self._worker, hook.fault, observed, effective))

        from chaoskit.runtime.injection import (
            acts,
        )  # a worker of a run without faults has none of them

        acts.carry_out(
            act.name,
            act.options,
            InjectionContext(replica, self.injected, report, hook.phase, hook.step),
        )


def _matches(trigger: Trigger, step: int, plan: Plan | None, me: Member | None) -> bool:
    """Whether a member that attempts ``step`` is the one that ``trigger`` is for."""
    if trigger.step not in (-1, step) or (plan.generation if plan else 0) < trigger.generation:
        return False
    if trigger.role == "most_shards":
        return plan is not None and me is not None and me.rank == plan.heaviest
    return trigger.rank == -1 or (me is not None and trigger.rank == me.rank)
