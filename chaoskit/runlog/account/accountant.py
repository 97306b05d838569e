"""The fold itself: what each record means for the training as a whole, and so for what time is spent on.

All time lies on one line, cut where something happened to the training as a whole; each piece is spent on one part for
one cause, so the parts add up to the wall time, to the nanosecond.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from chaoskit.journal import Record
from chaoskit.runlog.account import time_account as parts
from chaoskit.runlog.account.books import Books, Mode
from chaoskit.runlog.account.setback import Setback
from chaoskit.runlog.account.spending import Holding, Spending
from chaoskit.runlog.account.steps import AccountedStep
from chaoskit.runlog.account.time_account import TimeAccount
from chaoskit.vocabulary import Event

_STRIKE_STEPS = 2  # a fault after which so many steps were committed did not stop the training


@dataclass(slots=True)
class _Struck:
    """What a fault has done.

    Attributes:
        step: that was the newest when it struck.
        acted_ns: worker -> time of the act on it.
        nodes: that it struck as a whole, at ``begun_ns``.
    """

    what: str
    step: int
    begun_ns: int
    acted_ns: dict[str, int]
    nodes: frozenset[str]

    def on(self, worker: str) -> int | None:
        """When it struck ``worker``; None if it did not."""
        whole = self.begun_ns if worker.rpartition(".")[0] in self.nodes else None
        return self.acted_ns.get(worker, whole)


class Accountant(Books):
    """Keeps the account of one run.

    Args:
        started_ns: of the run; where None, its first record.
        full_world: ranks of the full world; 0: as the journals say.
        spares: how many there shall be.
        false_alarms: workers that were given up for nothing, as far as somebody knows.
        on_step: is told the nanoseconds of every committed step.
        on_setback: is told of every :class:`Setback` once it is settled.
    """

    def __init__(
        self,
        started_ns: int | None = None,
        *,
        full_world: int = 0,
        spares: int = 0,
        false_alarms: Collection[str] = (),
        on_step: Callable[[int], None] = lambda spent_ns: None,
        on_setback: Callable[[Setback], None] = lambda setback: None,
    ) -> None:
        super().__init__(started_ns, full_world, spares, on_step)
        self._on_setback = on_setback
        self._false_alarms = frozenset(false_alarms)
        self._strikes: dict[str, _Struck] = {}  # by fault
        self._lost: set[str] = set()
        self._returned: Setback | None = None  # its first good step is the current one
        self._aborted = Holding()  # of the step that the open one interrupted
        self._forming: set[str] = (
            set()
        )  # members of the open one's plan that have yet to build their group

    # -- what is heard --------------------------------------------------------------------------------------------

    def take_in(self, record: Record) -> None:
        """The next record. One that comes late, by its time, moves no time."""
        if self._spending is None:
            self._spending = Spending(record.t_ns)
        handler = _HANDLERS.get(record.event)
        if handler is not None and self._mode is not Mode.OVER:
            handler(self, record)
            self._healing.look(record.t_ns)

    @property
    def _time(self) -> Spending:
        assert self._spending is not None, "it begins with the first record"
        return self._spending

    def _started(self, record: Record) -> None:
        self._steps.full_world = self.full_world or record["nodes"]
        self._healing.spares = record["spares"]

    def _resized(self, record: Record) -> None:
        self._steps.full_world = record["size"]

    def _injected(self, record: Record) -> None:
        acted_ns, nodes = {record["worker"]: record.t_ns}, frozenset(record["nodes"])
        self._strikes[record["fault"]] = _Struck(
            record["what"], self.step, record.t_ns, acted_ns, nodes
        )

    def _acted(self, record: Record) -> None:
        """On another worker, or on the same one again."""
        struck = self._strikes.get(record["fault"])
        if struck is None:
            struck = _Struck(record["what"], self.step, record.t_ns, {}, frozenset())
            self._strikes[record["fault"]] = struck
        struck.step, struck.acted_ns[record["worker"]] = self.step, record.t_ns

    def _ready_one(self, record: Record) -> None:
        if self._mode is Mode.STARTING:
            self._time.spend(self._standing(), record.t_ns)
        elif self.open is not None and not self.open.generation and not self.open.planned:
            self._time.spend(
                (parts.WAITING, self._cause), record.t_ns
            )  # no plan without it: it was waited for
        self._healing.ready.add(record["worker"])

    def _planned(self, record: Record) -> None:
        if self._mode is Mode.STARTING:
            self._time.spend(self._standing(), record.t_ns)
        members = frozenset(member["worker"] for member in record["members"])
        if record["generation"] > 1 and self._mode is not Mode.STARTING:
            if not record["abort"] and self.open is None:
                cause = parts.PLANNED
                self.open = Setback(
                    cause,
                    record.t_ns,
                    record.t_ns,
                    self.step,
                    planned=True,
                    world_before=self.world,
                )
            elif record["abort"] and (self.open is None or self.open.planned):
                grows = len(members) > len(
                    self._healing.members
                )  # a sharded world that grows goes back to its copies
                self._set_back(record, parts.PLANNED if grows else parts.UNEXPLAINED)
            self._replan(record, members)
        self._healing.plan(members)
        self._steps.full_world = self.full_world or len(members)

    def _replan(self, record: Record, members: frozenset[str]) -> None:
        if self.open is None:
            return
        self.open.generation, self.open.world = record["generation"], len(members)
        self._forming = set(members)
        if not self.open.planned:
            self._time.spend((self._phase, self._cause), record.t_ns)
            self.open.ends.setdefault("quiesced", record.t_ns)
            self._phase = "regrouped"

    def _settled(self, record: Record) -> None:
        if self._mode is Mode.STARTING:
            self._time.spend((parts.START_UP, parts.START_UP), record.t_ns)
            self._mode, self.formed_ns = Mode.TRAINING, record.t_ns

    def _reach(self, record: Record) -> None:
        """Some rank has done its part of a phase."""
        phase = {Event.QUIESCED: "quiesced", Event.REGROUPED: "regrouped"}.get(
            Event(record.event), "restored"
        )
        if self._mode is Mode.STARTING or (self.step < 0 and self.open is None):
            self._time.spend((parts.START_UP, parts.START_UP), record.t_ns)
        elif self.open is not None:
            left, formed = (
                self.generation <= record["generation"],
                record["generation"] == self.open.generation,
            )
            if not (left and not formed if phase == "quiesced" else formed):
                return
            self.open.mark(phase, record.t_ns)
            if phase == "regrouped":
                self._forming.discard(record.source)
            is_early = phase == "restored" and bool(
                self._forming
            )  # the last one to form is waited for
            if not self.open.planned and not is_early:
                self._time.spend((phase, self._cause), record.t_ns)
                self._phase = "regrouped" if phase == "quiesced" else self._phase

    def _protection(self, record: Record) -> None:
        self._healing.protection(record)

    def _ended(self, record: Record) -> None:
        training = self._mode is Mode.TRAINING
        self._finish_step()
        self._time.spend(
            (parts.CLOSING, parts.CLOSING) if training else self._standing(), record.t_ns
        )
        self._mode, self.ended_ns = Mode.OVER, record.t_ns

    # -- losses ---------------------------------------------------------------------------------------------------

    def _detected(self, record: Record) -> None:
        worker, cause = record["worker"], record["cause"]
        if worker in self._lost:  # two coordinators may tell of the same loss
            return
        self._lost.add(worker)
        self._healing.ready.discard(worker)
        if record["rank"] is None:  # a spare, or a replacement on its way
            return
        self.losses[cause] += 1
        if worker in self._false_alarms:
            cause = f"false alarm ({cause})"
        self._notice(record, cause)

    def _dismissed(self, record: Record) -> None:
        """Numbers that do not count."""
        if record.event == Event.NONFINITE or record["verdict"] != "undecided":
            self._notice(record, str(record.event), self.generation)

    def _notice(self, record: Record, cause: str, generation: int = 0) -> None:
        if self._mode is Mode.STARTING:
            return
        if self.open is None or self.open.planned:
            self._set_back(record, cause)
            assert self.open is not None
            self.open.generation = generation  # the same goes on, unless there is a new plan
        elif record.event == Event.DETECTED:
            self._time.spend((self._phase, self._cause), record.t_ns)
            self.open.generation, self._phase = 0, "quiesced"
        else:
            return
        if record.event == Event.DETECTED:
            self.open.workers.append(record["worker"])
            self.open.rank = record["rank"] if self.open.rank is None else self.open.rank
            self.open.detail = self.open.detail or record["detail"]

    def _set_back(self, record: Record, cause: str) -> None:
        """Training stands still: the step that was under way has not been committed."""
        cursor_ns, usual_ns = self._time.cursor_ns, self._steps.usual_ns
        struck = self._take_strike(record)
        in_flight_ns = max(0, record.t_ns - cursor_ns)
        if struck is not None:
            begun_ns = struck[0]
        else:
            begun_ns = cursor_ns + (
                in_flight_ns if usual_ns is None else min(in_flight_ns, usual_ns)
            )
        self._finish_step()
        self._aborted = Holding()
        self._time.spend((parts.RECOMPUTED, cause), min(begun_ns, record.t_ns), self._aborted)
        self._time.spend(("detected", cause), record.t_ns)
        self._mode, self._phase, self._cause = Mode.BROKEN, "quiesced", cause
        self._failures += cause != parts.PLANNED
        fault = struck[1] if struck is not None else ""
        self.open = Setback(
            cause, begun_ns, record.t_ns, self.step, fault=fault, world_before=self.world
        )
        self.open.mark("detected", record.t_ns)

    def _take_strike(self, record: Record) -> tuple[int, str] | None:
        """When and by which fault the worker was struck of which ``record`` tells; it explains nothing more.

        Corrupt data can be noticed by the receiver, and be the fault of the sender.
        """
        suspects = [
            worker
            for worker in (record.get("worker"), *record.get("sources", ()))
            if worker is not None
        ]
        acts = [
            (acted_ns, fault)
            for fault, struck in self._strikes.items()
            for worker in suspects
            if (acted_ns := struck.on(worker)) is not None and acted_ns <= record.t_ns
        ]
        if not acts:
            return None
        acted_ns, fault = min(acts)
        return acted_ns, self._strikes.pop(fault).what

    # -- steps ----------------------------------------------------------------------------------------------------

    def _committed(self, record: Record) -> None:
        generation = record["generation"]
        known, step = self._steps.known(record), self._steps.current
        if known is not None and generation < known.generation:
            return
        if step is None or known is not step or known.generation != generation:
            step = self._begin_step(record, known)
        if self.open is None or self.open.planned:
            self._steps.spend(self._time, step, record.t_ns)
        self._steps.stall(self._time, step, int(record.get("stall_ms", 0.0) * 1e6))
        self._healing.commit(record, full=step.world >= self.full_world)

    def _begin_step(self, record: Record, known: AccountedStep | None) -> AccountedStep:
        """The first rank commits it."""
        self._finish_step()
        number, generation, setback = record["step"], record["generation"], self.open
        if known is not None:
            self._steps.throw_away(self._time, number, generation, self._cause)
        back = setback is not None and 0 < setback.generation <= generation
        step = self._steps.begin(record)
        if setback is not None and back:
            self._come_back(setback, step, record.t_ns)
        elif setback is not None and not setback.planned:
            # the step that a loss seemed to interrupt was committed by whom was left
            self._time.spend((self._phase, self._cause), record.t_ns)
            self._steps.credit(self._time, step, self._aborted)
        elif self._mode is Mode.STARTING:
            self._mode = Mode.TRAINING
        self._strikes = {
            fault: one for fault, one in self._strikes.items() if number <= one.step + _STRIKE_STEPS
        }
        return step

    def _come_back(self, setback: Setback, step: AccountedStep, t_ns: int) -> None:
        """The first good step: it may take as long as a usual one, with the ranks that there are."""
        setback.world = step.world
        if (usual_ns := self._steps.usual_ns) is not None:
            fewer = max(1.0, setback.world_before / step.world) if setback.world_before else 1.0
            step.allowance_ns = int(usual_ns * fewer)
            step.excess = (
                (parts.RESIZE, parts.PLANNED)
                if setback.planned
                else ("first good step", self._cause)
            )
        setback.mark("first good step", t_ns)
        self.open, self._mode = None, Mode.TRAINING
        self.setbacks.append(setback)
        self._healing.admit(setback)
        self._returned = setback

    def _finish_step(self) -> None:
        """No rank commits the current step any more."""
        self._steps.finish()
        setback, self._returned = self._returned, None
        if setback is not None:
            setback.settled = True
            self._on_setback(setback)


_HANDLERS: Mapping[str, Callable[[Accountant, Record], None]] = {
    Event.STARTED: Accountant._started,
    Event.RESIZED: Accountant._resized,
    Event.INJECTED: Accountant._injected,
    Event.ACTED: Accountant._acted,
    Event.SPARE_READY: Accountant._ready_one,
    Event.PLAN: Accountant._planned,
    Event.SETTLED: Accountant._settled,
    Event.QUIESCED: Accountant._reach,
    Event.REGROUPED: Accountant._reach,
    Event.RESTORED: Accountant._reach,
    Event.ADOPT: Accountant._reach,
    Event.DETECTED: Accountant._detected,
    Event.NONFINITE: Accountant._dismissed,
    Event.CORRUPT: Accountant._dismissed,
    Event.COMMIT: Accountant._committed,
    Event.SKIP: Accountant._committed,
    Event.EXPOSED: Accountant._protection,
    Event.PROTECTED: Accountant._protection,
    Event.JOB_ENDED: Accountant._ended,
}

#: Records that say nothing here, and are most of what a journal holds.
UNHEARD = frozenset(event.value for event in Event) - frozenset(str(event) for event in _HANDLERS)


def account_for(
    records: Iterable[Record], ended_ns: int | None = None, **known: Any
) -> TimeAccount:
    """The account of a run that is over. ``known``: what :class:`Accountant` takes."""
    accountant = Accountant(**known)
    for record in records:
        accountant.take_in(record)
    return accountant.account(ended_ns)
