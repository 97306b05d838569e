"""Run the faults of a plan once each is due: let it act, collect its evidence, undo its effect.

-> experiment/injection/job_follower.py and command_follower.py: when a fault is due.
runtime/step/hooks.py: a rank that waits for its fault. faults/processes/kill.py: an example of
``inject``. runlog/fault_verdict.py (fault_check): the verdict on a fault without evidence;
experiment/judge/fault_audit.py: on one that struck another target than planned.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
import traceback
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from chaoskit.errors import BadInput, FaultBroken, HarnessError, NodeUnreachable
from chaoskit.experiment.injection.injection import Injection, InjectionState
from chaoskit.faults.base import Fault, fault_id
from chaoskit.faults.evidence import Evidence
from chaoskit.faults.target import ProcessExit, Target
from chaoskit.journal import Journal
from chaoskit.process.linux import undisturbed
from chaoskit.substrate.core.processes import Process
from chaoskit.vocabulary import Event

#: The end of a process whose exit status is not known.
GONE = ProcessExit("gone", "")
_DOOMED_S = 0.5  # the loss of a struck rank becomes known within this time
_SETTLING_TURNS = 4  # turns of the event loop after which every woken fault has run


class Injector:
    """The faults of one run, each in a task of its own, and the journal that records them.

    Args:
        faults: the faults of the plan.
        journal: receives the injections, their evidence and their ends.
        place_of: returns rank, node, pid and generation of a worker that is struck; each is None if
            it is not known.
        on_failure: called when the code of a fault has raised an error; :meth:`check` then raises
            it.
        is_patient: True if a fault whose node is not reached becomes planned again, to be struck
            later. Else that is an error.

    Attributes:
        injections: one injection for each fault, in the order of the plan.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        journal: Journal,
        place_of: Callable[[str], dict[str, Any]],
        on_failure: Callable[[], None],
        *,
        is_patient: bool = False,
    ) -> None:
        self._journal, self._place_of, self._on_failure = journal, place_of, on_failure
        self._is_patient = is_patient
        self.injections = [
            Injection(fault_id(number), fault) for number, fault in enumerate(faults)
        ]
        self._failure: Exception | None = None
        self._tasks: dict[Injection, asyncio.Task[None]] = {}
        self._is_closing = False

    @property
    def in_force(self) -> list[tuple[Injection, Target]]:
        """The injections that have acted and were not missed, each with its target."""
        return [
            (injection, injection.struck)
            for injection in self.injections
            if injection.struck is not None
        ]

    @property
    def awaits_end(self) -> bool:
        """True if no fault is planned any more, and none that has acted waits for more than an end.

        The end is that of the run, or that of a fault's target. A fault with a rank that waits at
        its hook counts as one that is not planned any more.
        """
        all_acted = all(
            injection.state is not InjectionState.PLANNED for injection in self.injections
        )
        return all_acted and all(
            task.done() or _only_awaits_end(injection) for injection, task in self._tasks.items()
        )

    def check(self) -> None:
        """Raise the error of the first fault that failed, if any.

        Raises:
            BadInput: if the fault's input cannot be used in this run.
            HarnessError: if the fault could not act; :class:`FaultBroken` for other errors.
        """
        if self._failure is not None:
            raise self._failure

    # -- the act -----------------------------------------------------------------------------------

    def strike(self, due: Iterable[tuple[Injection, Target]]) -> None:
        """Let faults act together in the next turn of the event loop, each up to its first wait.

        So no struck rank has time to notice that another one is gone. A journal record of each
        strike follows in the same turn. A fault with a target that was gone already gets none.

        Args:
            due: the injections, each with its target.

        Raises:
            HarnessError: if one of the faults has struck or was missed before.
        """
        loop, due = asyncio.get_running_loop(), [*due]
        exclusive_cpu = contextlib.ExitStack()
        loop.call_soon(exclusive_cpu.enter_context, undisturbed())
        for injection, target in due:
            injection.strike(target)
            # no other fault may strike the same worker now
            target.claims[target.worker] = time.monotonic_ns()
            target.on_note = partial(self._record_soon, injection, target)
            self._tasks[injection] = loop.create_task(
                self._run(injection, target), name=injection.fault_id
            )
        loop.call_soon(exclusive_cpu.close)
        loop.call_soon(self._record_strikes, due)

    async def _run(self, injection: Injection, target: Target) -> None:
        """Run one fault and collect its evidence, until it ends or fails.

        A fault with a target that is gone already is marked as missed. Any other error of the
        fault's code is stored, and ends the run. Afterwards, a rank that waits at the hook goes on.
        """
        try:
            self._note_gone(target)
            target.claim()
            target.injected_ns = target.acted_ns
            async with contextlib.aclosing(_begin_inject(injection.fault, target)) as evidences:
                async for evidence in evidences:
                    if not isinstance(evidence, Evidence):
                        raise TypeError(
                            f"inject yielded {evidence!r}, which is not a faults.evidence.Evidence"
                        )
                    if not injection.is_journalled:
                        await asyncio.sleep(0)  # faults that are due together act first
                    self._record_evidence(injection, evidence)
        except ProcessLookupError as error:
            if self._is_closing:
                self._fail(injection, target, error)
            elif not injection.evidence:
                injection.miss("the target was gone already" + (f": {error}" if str(error) else ""))
        except NodeUnreachable as error:
            self._note_unreached(injection, target, error)
        except Exception as error:  # noqa: BLE001 - code of the user; its error ends the run
            self._fail(injection, target, error)
        if target.waiting not in target.released:
            target.release()

    def _fail(self, injection: Injection, target: Target, error: Exception) -> None:
        """Store the error of a fault, which ends the run; the first error counts.

        A fault without evidence is marked as missed. While closing, the run goes on: the error
        means that effects of the fault may be left behind.
        """
        if self._is_closing:
            target.left_behind.append(str(error))
            return
        error_text = (
            str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        )
        if not injection.evidence:
            injection.miss(f"it could not act: {error_text}")
        run_error = error
        if not isinstance(error, BadInput | HarnessError):
            run_error = FaultBroken(
                f"{injection.fault} could not act: {error_text} ({_source_line(injection.fault, error)})"
            )
            run_error.__cause__ = error
        self._failure = self._failure or run_error
        self._on_failure()

    def _note_unreached(self, injection: Injection, target: Target, error: NodeUnreachable) -> None:
        """Let a fault strike later if its node was not reached, unless it may have acted.

        The effect of a fault that may have acted is not known: it gets no more evidence.
        """
        if self._is_closing or not self._is_patient:
            self._fail(injection, target, error)
        elif not injection.is_journalled and not error.may_have_acted:
            injection.return_to_planned(str(error))
        elif not injection.evidence:
            self._record_strike(injection, target)
            injection.miss(f"its effect is not known: {error}")

    def _note_gone(self, new_target: Target) -> None:
        """Record which earlier targets are gone before this fault strikes.

        They are not gone by this fault, even if it ends all processes that could report it. A
        process with a supervisor that is gone is left out, since its state is not known.

        Args:
            new_target: the target of this fault.
        """
        for _, target in self.in_force:
            if target is new_target or target.gone_ns or not target.injected_ns:
                continue
            with contextlib.suppress(NodeUnreachable):  # the state of the process is not known
                if target.process.is_gone():
                    target.gone_ns = time.monotonic_ns()

    def is_doomed(self, worker: str, process: Process) -> bool:
        """Return whether a process has ended, or was struck in the last half second.

        The same death must not be evidence of two faults.
        """
        fresh_since_ns = time.monotonic_ns() - int(_DOOMED_S * 1e9)
        claim_times_ns = [
            injection.target.claims.get(worker, 0)
            for injection in self.injections
            if injection.target is not None
        ]
        return process.is_gone() or any(struck_ns > fresh_since_ns for struck_ns in claim_times_ns)

    # -- the journal -------------------------------------------------------------------------------

    def _record_strikes(self, strikes: Iterable[tuple[Injection, Target]]) -> None:
        """Write a journal record of each injection that struck."""
        for injection, target in strikes:
            if injection.struck is target:
                self._record_strike(injection, target)

    def _record_strike(self, injection: Injection, target: Target) -> None:
        """Write the journal record of an injection, once.

        The acts on further workers have records of their own, which follow.
        """
        if injection.is_journalled:
            return
        injection.is_journalled = True
        self._journal.write(
            Event.INJECTED,
            t_ns=target.injected_ns,
            fault=injection.fault_id,
            what=str(injection.fault),
            worker=target.worker,
            rank=target.rank,
            step=target.step,
            phase=target.phase,
            node=target.node,
            nodes=sorted(target.struck_nodes) if injection.fault.whole_node else [],
            pid=target.pid,
            ticks=target.process.ticks,
            generation=self._place_of(target.worker)["generation"],
            waiting=target.waiting,
            waited_for=injection.waited_for,
            done_ns=time.monotonic_ns(),
        )
        injection.recorded_acts_ns = {
            worker: t_ns for worker, t_ns in target.claims.items() if worker == target.worker
        }

    def _record_soon(self, injection: Injection, target: Target) -> None:
        """Write the record of an act when the fault waits next.

        Until then the act may be taken back.
        """
        asyncio.get_running_loop().call_soon(self._record_acts, injection, target)

    def _record_acts(self, injection: Injection, target: Target) -> None:
        """Write records of new acts: further workers, repeated strikes, and the end."""
        if injection.struck is not target:
            return
        self._record_strike(injection, target)
        fault_fields = {"fault": injection.fault_id, "what": str(injection.fault)}
        for worker, t_ns in target.claims.items():
            if injection.recorded_acts_ns.get(worker) != t_ns:
                injection.recorded_acts_ns[worker] = t_ns
                self._journal.write(
                    Event.ACTED, t_ns=t_ns, **fault_fields, worker=worker, **self._place_of(worker)
                )
        if target.lifted_ns > injection.recorded_lift_ns:
            injection.recorded_lift_ns = target.lifted_ns
            self._journal.write(Event.LIFTED, t_ns=target.lifted_ns, **fault_fields)

    def _record_evidence(self, injection: Injection, evidence: Evidence) -> None:
        """Store evidence of an injection and write it to the journal.

        The record has the time of the first evidence.
        """
        injection.confirm(evidence)
        record_fields = {
            "fault": injection.fault_id,
            "level": "effective",
            "observed": str(evidence),
        }
        since_ns = injection.evidence[0].observed_ns
        self._journal.write(
            Event.EVIDENCE, t_ns=since_ns, **record_fields, evidence=msgspec.to_builtins(evidence)
        )

    def record_missed(self) -> None:
        """Write a journal record of each fault that did not act.

        A fault that acted too late, or whose target was gone, counts as missed, too. Call it after
        the run, when all evidence is known.
        """
        for injection in self.injections:
            if injection.struck is None:
                fault_in_words, reason = str(injection.fault), injection.why_missed
                self._journal.write(
                    Event.FAULT_MISSED, fault=injection.fault_id, what=fault_in_words, reason=reason
                )

    # -- after the act -----------------------------------------------------------------------------

    def deliver(self, message: Any) -> None:
        """Pass a message of the run to the faults that are in force."""
        for _, target in self.in_force:
            target.deliver(message)

    async def settle(self) -> None:
        """Wake every fault that waits, and return when each has run up to its next wait."""
        for _, target in self.in_force:
            target.wake()
        for _ in range(_SETTLING_TURNS):
            await asyncio.sleep(0)

    async def end(self) -> None:
        """Note the end of the run in all targets, and record the last evidence of each fault.

        Only faults that have evidence already, and count on, get another one.
        """
        await self.settle()
        for injection, target in self.in_force:
            last_evidence = (
                target.last_word() if injection.evidence and target.last_word is not None else None
            )
            if last_evidence is not None and str(last_evidence) != injection.observed:
                self._record_evidence(injection, last_evidence)
            target.end()

    async def close(self) -> None:
        """Cancel every fault that still waits, so that each undoes its own effects.

        A journal record of each fault that acted then shows whether effects were left behind, and
        how long the target waited for a CPU.
        """
        self._is_closing = True
        for _, target in self.in_force:
            target.end()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for injection in self.injections:
            if (struck_target := injection.target) is None or not (
                injection.is_journalled or struck_target.left_behind
            ):
                continue
            starved_s = (
                struck_target.beat.starved_ms / 1000 if struck_target.beat is not None else 0.0
            )
            undo_fields: dict[str, Any] = {
                "ok": not struck_target.left_behind,
                "acted_ns": struck_target.acts_until_ns,
            }
            self._journal.write(
                Event.UNDONE, fault=injection.fault_id, **undo_fields, starved_s=starved_s
            )


def _only_awaits_end(injection: Injection) -> bool:
    """Return whether a fault waits for nothing but the end of its target or of the run."""
    return injection.target is not None and injection.target.awaits_end


def _begin_inject(fault: Fault, target: Target) -> AsyncGenerator[Evidence]:
    """Begin a fault and return the generator of its evidence.

    Raises:
        TypeError: if ``inject``, which may be code of the user, is no async generator.
    """
    generator: object = fault.inject(target)
    if isinstance(generator, AsyncGenerator):
        return generator
    close = getattr(generator, "close", None)
    if close is not None:
        close()  # a coroutine that is never awaited
    raise TypeError("inject is not an async generator: it must yield faults.evidence.Evidence")


def _source_line(fault: Fault, error: Exception) -> str:
    """Return ``file:line`` where the fault's own code raised, or the first line of ``inject``."""
    code = inspect.unwrap(type(fault).inject).__code__
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == code.co_filename]
    return f"{code.co_filename}:{lines[-1] if lines else code.co_firstlineno}"
