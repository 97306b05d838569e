"""Runs the faults of a plan, of a job or of a command: has them act, takes their evidence, has them put back."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
import traceback
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from chaoskit.errors import BadInput, FaultBroken, HarnessError
from chaoskit.experiment.injection.injection import Injection, InjectionState
from chaoskit.experiment.plan.plan import fault_id
from chaoskit.faults.base import Fault
from chaoskit.faults.evidence import Evidence
from chaoskit.faults.target import Exit, Target
from chaoskit.journal import Journal
from chaoskit.process.linux import undisturbed
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.supervisor.client import SupervisorGone
from chaoskit.vocabulary import Event

#: How a process has ended of which nothing tells.
GONE = Exit("gone", "")
_FRESH_S = 0.5  # within which the loss of a rank that was struck becomes known
_TURNS = 4  # of the event loop, in which what was woken has looked


class Injector:
    """The faults of one run, each a task, and the journal in which they are written down.

    Args:
        place_of: rank, node, pid and generation of a worker that is struck, as far as they are known.
        on_failure: called when a fault could not act; :meth:`check` raises why.

    Attributes:
        injections: one for each fault, in the order of the plan.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        journal: Journal,
        place_of: Callable[[str], dict[str, Any]],
        on_failure: Callable[[], None],
    ) -> None:
        self._journal, self._place_of, self._on_failure = journal, place_of, on_failure
        self.injections = [
            Injection(fault_id(number), fault) for number, fault in enumerate(faults)
        ]
        self._failure: Exception | None = None
        self._tasks: dict[Injection, asyncio.Task[None]] = {}
        self._is_closing = False

    @property
    def in_force(self) -> list[tuple[Injection, Target]]:
        """Those that have acted, and what they struck."""
        return [(one, one.struck) for one in self.injections if one.struck is not None]

    @property
    def awaits_end(self) -> bool:
        """Return whether every fault has acted, or missed its moment, and only the end of the run can tell more."""
        acted = all(injection.state is not InjectionState.PLANNED for injection in self.injections)
        return acted and all(
            task.done() or _awaits_end(injection) for injection, task in self._tasks.items()
        )

    def check(self) -> None:
        """Raise what made a fault fail, if one did."""
        if self._failure is not None:
            raise self._failure

    # -- the act --------------------------------------------------------------------------------------------------

    def strike(self, due: Iterable[tuple[Injection, Target]]) -> None:
        """Have faults act together, in the next turn of the event loop: each does what stands before its first wait.

        So no rank that is struck has time to see that another one is gone.
        """
        loop, still, due = asyncio.get_running_loop(), contextlib.ExitStack(), [*due]
        loop.call_soon(still.enter_context, undisturbed())
        for injection, target in due:
            injection.strike(target)
            target.claims[target.worker] = (
                time.monotonic_ns()
            )  # what is struck now is struck by no other one
            target.on_note = partial(self._note_soon, injection, target)
            self._tasks[injection] = loop.create_task(
                self._run(injection, target), name=injection.fault_id
            )
        loop.call_soon(still.close)
        loop.call_soon(self._write_down_all, due)

    async def _run(self, injection: Injection, target: Target) -> None:
        try:
            self._note_gone(target)
            target.claim()
            target.injected_ns = target.acted_ns
            async with contextlib.aclosing(_story(injection.fault, target)) as story:
                async for evidence in story:
                    if not isinstance(evidence, Evidence):
                        raise TypeError(
                            f"inject yields {evidence!r}, which is no faults.evidence.Evidence"
                        )
                    if not injection.is_written:
                        await asyncio.sleep(0)  # first what is due together acts
                    self._confirm(injection, evidence)
        except ProcessLookupError as error:
            if self._is_closing:
                self._fail(injection, target, error)
            elif not injection.evidence:
                injection.miss("the target was gone already" + (f": {error}" if str(error) else ""))
        except Exception as error:  # noqa: BLE001 - of whatever a fault does; it ends the run
            self._fail(injection, target, error)
        if target.waiting not in target.released:
            target.release()

    def _fail(self, injection: Injection, target: Target, error: Exception) -> None:
        if self._is_closing:
            target.left_behind.append(str(error))
            return
        text = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        if not injection.evidence:
            injection.miss(f"it could not act: {text}")
        failure = error
        if not isinstance(error, BadInput | HarnessError):
            failure = FaultBroken(
                f"{injection.fault} could not act: {text} ({_place(injection.fault, error)})"
            )
            failure.__cause__ = error
        self._failure = self._failure or failure
        self._on_failure()

    def _note_gone(self, newest: Target) -> None:
        """A process that is gone before a fault strikes is not gone by it, even if that ends all that could tell."""
        for _, target in self.in_force:
            if target is newest or target.gone_ns or not target.injected_ns:
                continue
            with contextlib.suppress(SupervisorGone):  # then nothing is known of it
                if target.process.is_gone():
                    target.gone_ns = time.monotonic_ns()

    def is_doomed(self, worker: str, process: Process) -> bool:
        """Whether a process ends, or was struck a moment ago: the same death must not be evidence of two faults."""
        since_ns = time.monotonic_ns() - int(_FRESH_S * 1e9)
        claims = [
            one.target.claims.get(worker, 0) for one in self.injections if one.target is not None
        ]
        return process.is_gone() or any(struck_ns > since_ns for struck_ns in claims)

    # -- what is written down -------------------------------------------------------------------------------------

    def _write_down_all(self, struck: Iterable[tuple[Injection, Target]]) -> None:
        for injection, target in struck:
            if not injection.missed:
                self._write_down(injection, target)

    def _write_down(self, injection: Injection, target: Target) -> None:
        """The act, once."""
        if injection.is_written:
            return
        injection.is_written = True
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
            done_ns=time.monotonic_ns(),
        )
        injection.acts = {
            worker: t_ns for worker, t_ns in target.claims.items() if worker == target.worker
        }

    def _note_soon(self, injection: Injection, target: Target) -> None:
        """Write an act down when the fault waits: until then it may be taken back."""
        asyncio.get_running_loop().call_soon(self._note_acts, injection, target)

    def _note_acts(self, injection: Injection, target: Target) -> None:
        """What it did since: a fault that strikes several workers, or one again, claims each; one that ends says so."""
        if injection.missed:
            return
        self._write_down(injection, target)
        what = {"fault": injection.fault_id, "what": str(injection.fault)}
        for worker, t_ns in target.claims.items():
            if injection.acts.get(worker) != t_ns:
                injection.acts[worker] = t_ns
                self._journal.write(
                    Event.ACTED, t_ns=t_ns, **what, worker=worker, **self._place_of(worker)
                )
        if target.lifted_ns > injection.lifted_ns:
            injection.lifted_ns = target.lifted_ns
            self._journal.write(Event.LIFTED, t_ns=target.lifted_ns, **what)

    def _confirm(self, injection: Injection, evidence: Evidence) -> None:
        injection.confirm(evidence)
        told = {"fault": injection.fault_id, "level": "effective", "observed": str(evidence)}
        since_ns = injection.evidence[0].observed_ns
        self._journal.write(
            Event.EVIDENCE, t_ns=since_ns, **told, evidence=msgspec.to_builtins(evidence)
        )

    def tell_missed(self) -> None:
        """Write down which faults did not act. To be called when all is known that ever will be."""
        for injection in self.injections:
            if injection.struck is None:
                what, reason = str(injection.fault), injection.why_missed
                self._journal.write(
                    Event.FAULT_MISSED, fault=injection.fault_id, what=what, reason=reason
                )

    # -- what follows ---------------------------------------------------------------------------------------------

    def deliver(self, message: Any) -> None:
        """Give a message of the run to the faults that are in force."""
        for _, target in self.in_force:
            target.deliver(message)

    async def settle(self) -> None:
        """Have every fault that waits look once more."""
        for _, target in self.in_force:
            target.wake()
        for _ in range(_TURNS):
            await asyncio.sleep(0)

    async def end(self) -> None:
        """The run is over: the last look, and the last word of faults that were felt again and again."""
        await self.settle()
        for injection, target in self.in_force:
            newer = (
                target.last_word() if injection.evidence and target.last_word is not None else None
            )
            if newer is not None and str(newer) != injection.observed:
                self._confirm(injection, newer)
            target.end()

    async def close(self) -> None:
        """End every fault where it waits: it puts back what the run itself did not."""
        self._is_closing = True
        for _, target in self.in_force:
            target.end()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for injection in self.injections:
            if (struck := injection.target) is None or not (
                injection.is_written or struck.left_behind
            ):
                continue
            starved_s = struck.beat.starved_ms / 1000 if struck.beat is not None else 0.0
            told: dict[str, Any] = {"ok": not struck.left_behind, "acted_ns": struck.acts_until_ns}
            self._journal.write(Event.UNDONE, fault=injection.fault_id, **told, starved_s=starved_s)


def _awaits_end(injection: Injection) -> bool:
    return injection.target is not None and injection.target.awaits_end


def _story(fault: Fault, target: Target) -> AsyncGenerator[Evidence]:
    """Begin a fault. It is code of a user's own, too, which may not be a generator."""
    story: Any = fault.inject(target)
    if not hasattr(story, "asend"):
        close = getattr(story, "close", None)
        if close is not None:
            close()  # a coroutine that is never awaited
        raise TypeError("inject is no async generator: let it yield faults.evidence.Evidence")
    return cast("AsyncGenerator[Evidence]", story)


def _place(fault: Fault, error: Exception) -> str:
    """Return file and line of the fault's own code at which an exception was raised, or at which its story begins."""
    code = inspect.unwrap(type(fault).inject).__code__
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == code.co_filename]
    return f"{code.co_filename}:{lines[-1] if lines else code.co_firstlineno}"
