"""Where did the time go? A fold over the journals of a run, record by record, finished or not.

All time lies on one line, cut where something happened to the training as a whole; each piece is spent on one part for
one cause, so the parts add up to the wall time, to the nanosecond.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from statistics import median
from typing import Any

from chaoskit.experiment import account as parts
from chaoskit.experiment.account import TimeAccount, account_of
from chaoskit.experiment.setback import Setback
from chaoskit.journal import Record
from chaoskit.vocabulary import Event

_USUAL_STEPS = 32
_STEPS_KEPT = 100_000  # a rollback beyond these counts its steps twice
_STRIKE_STEPS = 2  # a fault after which so many steps were committed did not stop the training


class _Mode(Enum):
    STARTING = auto()
    TRAINING = auto()
    BROKEN = auto()  # until the first good step
    OVER = auto()


@dataclass(slots=True)
class _Step:
    """A committed step of one generation. ``spent_ns`` holds its stall, too."""

    number: int
    generation: int
    world: int
    skipped: bool
    allowance_ns: int | None = None  # of a first good step: what is beyond it was spent on coming back
    excess: tuple[str, str] = ("", "")
    spent_ns: int = 0
    stalled_ns: int = 0
    degraded_ns: int = 0
    missing_ns: float = 0.0


class Accountant:
    """Keeps the account of one run.

    Args:
        started_ns: of the run; where None, its first record.
        full_world: ranks of the full world; 0: as the journals say.
        spares: how many there shall be.
        false_alarms: workers that were given up for nothing, as far as somebody knows.
        on_step: is told the seconds of every committed step.
        on_setback: is told of every :class:`Setback` after its first good step.

    Attributes:
        setbacks: all that training came back from, planned ones too, by time.
        open: the one that it has not come back from.
        losses: ranks lost, by cause.
        step, generation, world, loss: of the newest commit; -1, 0, 0 and None before it.
    """

    def __init__(
        self,
        started_ns: int | None = None,
        *,
        full_world: int = 0,
        spares: int = 0,
        false_alarms: Collection[str] = (),
        on_step: Callable[[float], None] = lambda seconds: None,
        on_setback: Callable[[Setback], None] = lambda setback: None,
    ) -> None:
        self.setbacks: list[Setback] = []
        self.open: Setback | None = None
        self.losses: Counter[str] = Counter()
        self.step, self.generation, self.world = -1, 0, 0
        self.loss: float | None = None
        self.full_world, self.spares = full_world, spares
        self.formed_ns: int | None = None  # the first group of ranks can be used
        self.ended_ns: int | None = None
        self._on_step, self._on_setback = on_step, on_setback
        self._false_alarms = frozenset(false_alarms)
        self._cursor_ns = self._started_ns = started_ns
        self._mode = _Mode.STARTING
        self._phase = "quiesced"  # of the recovery that goes on
        self._spent: Counter[tuple[str, str]] = Counter()
        self._degraded_ns, self._missing_ns, self._failures = 0, 0.0, 0
        self._steps: dict[int, _Step] = {}
        self._current: _Step | None = None
        self._usual_ns: deque[int] = deque(maxlen=_USUAL_STEPS)
        self._strikes: dict[str, tuple[int, int, str]] = {}  # worker -> time, step, fault
        self._lost: set[str] = set()
        self._ready: set[str] = set()
        self._members: frozenset[str] = frozenset()
        self._lacking: set[str] = set()  # workers whose piece lacks copies
        self._healing: list[Setback] = []
        self._returned: Setback | None = None  # its first good step is the current one
        self._cause = parts.UNEXPLAINED  # of the newest setback
        self._aborted_ns = 0  # of the step that the open one interrupted

    # -- what is asked --------------------------------------------------------------------------------------------

    @property
    def started_ns(self) -> int | None:
        """Of the run; None while nothing is known."""
        return self._started_ns

    @property
    def spares_ready(self) -> int:
        """Warm workers without a rank."""
        return len(self._ready)

    @property
    def usual_step_s(self) -> float | None:
        """Median of the last steps; None before there are some."""
        return self._usual() / 1e9 if self._usual_ns else None

    def account(self, now_ns: int | None = None) -> TimeAccount:
        """Up to ``now_ns``, or up to the newest record. Can be asked again and again."""
        spent = Counter(self._spent)
        if now_ns is not None and self._cursor_ns is not None and now_ns > self._cursor_ns:
            spent[self._standing()] += now_ns - self._cursor_ns
        return account_of(
            spent,
            degraded_ns=self._degraded_ns,
            missing_ns=self._missing_ns,
            failures=self._failures,
            steps=self.step + 1,
        )

    def _standing(self) -> tuple[str, str]:
        """What time is spent on while nothing happens."""
        match self._mode:
            case _Mode.STARTING:
                waits = bool(self._ready) and not self._members
                return (parts.WAITING, parts.WAITING) if waits else (parts.START_UP, parts.START_UP)
            case _Mode.TRAINING:
                return parts.IN_FLIGHT, parts.IN_FLIGHT
            case _Mode.BROKEN:
                return self._phase, self._cause
            case _Mode.OVER:
                return parts.CLOSING, parts.CLOSING

    # -- what is heard --------------------------------------------------------------------------------------------

    def take_in(self, record: Record) -> None:
        """The next record. One that comes late, by its time, moves no time."""
        if self._cursor_ns is None:
            self._cursor_ns = self._started_ns = record.t_ns
        handler = _HANDLERS.get(record.event)
        if handler is not None and self._mode is not _Mode.OVER:
            handler(self, record)
            self._look_at_redundancy(record.t_ns)

    def _started(self, record: Record) -> None:
        self.full_world = self.full_world or record["nodes"]
        self.spares = record["spares"]

    def _resized(self, record: Record) -> None:
        self.full_world = record["size"]

    def _injected(self, record: Record) -> None:
        self._strikes[record["worker"]] = (record.t_ns, self.step, record["what"])

    def _ready_one(self, record: Record) -> None:
        if self._mode is _Mode.STARTING:
            self._spend(*self._standing(), record.t_ns)
        elif self.open is not None and not self.open.generation and not self.open.planned:
            self._spend(parts.WAITING, self._cause, record.t_ns)  # no plan without it: that is what was waited for
        self._ready.add(record["worker"])

    def _planned(self, record: Record) -> None:
        if self._mode is _Mode.STARTING:
            self._spend(*self._standing(), record.t_ns)
        members = frozenset(member["worker"] for member in record["members"])
        if record["generation"] > 1 and self._mode is not _Mode.STARTING:
            if not record["abort"] and self.open is None:
                cause = parts.PLANNED
                self.open = Setback(cause, record.t_ns, record.t_ns, self.step, planned=True, world_before=self.world)
            elif record["abort"] and (self.open is None or self.open.planned):
                grows = len(members) > len(self._members)  # a sharded world that grows goes back to its copies
                self._set_back(record, parts.PLANNED if grows else parts.UNEXPLAINED)
            self._replan(record, len(members))
        self._members, self._lacking = members, self._lacking & members
        self._ready -= members
        self.full_world = self.full_world or len(members)

    def _replan(self, record: Record, world: int) -> None:
        if self.open is None:
            return
        self.open.generation, self.open.world = record["generation"], world
        if not self.open.planned:
            self._spend(self._phase, self._cause, record.t_ns)
            self.open.ends.setdefault("quiesced", record.t_ns)
            self._phase = "regrouped"

    def _settled(self, record: Record) -> None:
        if self._mode is _Mode.STARTING:
            self._spend(parts.START_UP, parts.START_UP, record.t_ns)
            self._mode, self.formed_ns = _Mode.TRAINING, record.t_ns

    def _reach(self, record: Record) -> None:
        """Some rank has done its part of a phase."""
        phase = {Event.QUIESCED: "quiesced", Event.REGROUPED: "regrouped"}.get(Event(record.event), "restored")
        if self._mode is _Mode.STARTING or (self.step < 0 and self.open is None):
            self._spend(parts.START_UP, parts.START_UP, record.t_ns)
        elif self.open is not None:
            left, formed = self.generation <= record["generation"], record["generation"] == self.open.generation
            if not (left and not formed if phase == "quiesced" else formed):
                return
            self.open.mark(phase, record.t_ns)
            if not self.open.planned:
                self._spend(phase, self._cause, record.t_ns)
                self._phase = "regrouped" if phase == "quiesced" else self._phase

    # -- losses ---------------------------------------------------------------------------------------------------

    def _detected(self, record: Record) -> None:
        worker, cause = record["worker"], record["cause"]
        if worker in self._lost:  # two coordinators may tell of the same loss
            return
        self._lost.add(worker)
        self._ready.discard(worker)
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
        if self._mode is _Mode.STARTING:
            return
        if self.open is None or self.open.planned:
            self._set_back(record, cause)
            assert self.open is not None
            self.open.generation = generation  # the same goes on, unless there is a new plan
        elif record.event == Event.DETECTED:
            self._spend(self._phase, self._cause, record.t_ns)
            self.open.generation, self._phase = 0, "quiesced"
        else:
            return
        if record.event == Event.DETECTED:
            self.open.workers.append(record["worker"])
            self.open.rank = record["rank"] if self.open.rank is None else self.open.rank
            self.open.detail = self.open.detail or record["detail"]

    def _set_back(self, record: Record, cause: str) -> None:
        """Training stands still: the step that was under way has not been committed."""
        assert self._cursor_ns is not None
        struck = min(self._strikes.values(), default=None)
        in_flight_ns = max(0, record.t_ns - self._cursor_ns)
        if struck is not None:
            begun_ns = struck[0]
        else:
            begun_ns = self._cursor_ns + min(in_flight_ns, self._usual() if self._usual_ns else in_flight_ns)
        self._finish_step()
        self._aborted_ns = self._spend(parts.RECOMPUTED, cause, min(begun_ns, record.t_ns))
        self._spend("detected", cause, record.t_ns)
        self._mode, self._phase, self._cause = _Mode.BROKEN, "quiesced", cause
        self._failures += cause != parts.PLANNED
        fault, self._strikes = struck[2] if struck else "", {}
        self.open = Setback(cause, begun_ns, record.t_ns, self.step, fault=fault, world_before=self.world)
        self.open.mark("detected", record.t_ns)

    # -- steps ----------------------------------------------------------------------------------------------------

    def _committed(self, record: Record) -> None:
        number, generation = record["step"], record["generation"]
        known = self._steps.get(number)
        if known is not None and generation < known.generation:
            return
        same = known is not None and known is self._current and known.generation == generation
        if not same:
            self._begin_step(record, known)
        step = self._current
        assert step is not None
        self._add(step, record)
        for setback in self._healing:
            if setback.generation == generation and setback.step + 1 >= number:
                setback.mark("first good step", record.t_ns)
        if step.world >= self.full_world:
            for setback in self._healing:
                if setback.generation <= generation:
                    setback.ends.setdefault("full strength", record.t_ns)

    def _begin_step(self, record: Record, known: _Step | None) -> None:
        """The first rank commits it."""
        self._finish_step()
        number, generation, setback = record["step"], record["generation"], self.open
        late = setback is not None and not setback.planned and not 0 < setback.generation <= generation
        if known is not None:  # the training went back: what was further is gone, too
            for later in range(number, self.step + 1):
                self._throw_away(self._steps.get(later), generation)
        back = setback is not None and 0 < setback.generation <= generation
        step = _Step(number, generation, record["world"], record.event == Event.SKIP)
        if late:  # the step that a loss seemed to interrupt was committed by whom was left
            self._spend(self._phase, self._cause, record.t_ns)
            self._credit(step, (parts.RECOMPUTED, self._cause), self._aborted_ns)
            self._aborted_ns = 0
        elif setback is not None and back:
            self._come_back(setback, step, record.t_ns)
        elif self._mode is _Mode.STARTING:
            self._mode = _Mode.TRAINING
        self._steps[number] = self._current = step
        if len(self._steps) > _STEPS_KEPT:
            del self._steps[next(iter(self._steps))]
        self.step, self.generation, self.world = max(self.step, number), generation, record["world"]
        if record.event == Event.COMMIT:
            self.loss = record["loss"]
        self._strikes = {who: one for who, one in self._strikes.items() if number <= one[1] + _STRIKE_STEPS}

    def _add(self, step: _Step, record: Record) -> None:
        """The time up to this record was for ``step``."""
        if self.open is None or self.open.planned:
            assert self._cursor_ns is not None
            limit_ns = record.t_ns
            if step.allowance_ns is not None:
                limit_ns = min(limit_ns, self._cursor_ns + max(0, step.allowance_ns - step.spent_ns))
            self._book(step, self._spend(*self._purpose(step), limit_ns))
            if step.allowance_ns is not None:
                self._spend(*step.excess, record.t_ns)
        stall_ns = min(int(record.get("stall_ms", 0.0) * 1e6), step.spent_ns) - step.stalled_ns
        if stall_ns > 0 and not step.skipped:
            step.stalled_ns += stall_ns
            self._move((parts.PRODUCTIVE, parts.PRODUCTIVE), (parts.STALLED, parts.CHECKPOINT), stall_ns)

    def _purpose(self, step: _Step) -> tuple[str, str]:
        return (parts.RECOMPUTED, "nonfinite") if step.skipped else (parts.PRODUCTIVE, parts.PRODUCTIVE)

    def _credit(self, step: _Step, source: tuple[str, str], amount_ns: int) -> None:
        self._move(source, self._purpose(step), amount_ns)
        self._book(step, amount_ns)

    def _book(self, step: _Step, amount_ns: int) -> None:
        step.spent_ns += amount_ns
        if step.world < self.full_world and not step.skipped:
            missing_ns = amount_ns * (1 - step.world / self.full_world)
            step.degraded_ns, step.missing_ns = step.degraded_ns + amount_ns, step.missing_ns + missing_ns
            self._degraded_ns, self._missing_ns = self._degraded_ns + amount_ns, self._missing_ns + missing_ns

    def _throw_away(self, known: _Step | None, generation: int) -> None:
        """An older generation's result does not live on."""
        if known is None or known.generation >= generation:
            return
        del self._steps[known.number]
        if known.skipped:
            return
        self._move((parts.STALLED, parts.CHECKPOINT), (parts.PRODUCTIVE, parts.PRODUCTIVE), known.stalled_ns)
        self._move((parts.PRODUCTIVE, parts.PRODUCTIVE), (parts.RECOMPUTED, self._cause), known.spent_ns)
        self._degraded_ns -= known.degraded_ns
        self._missing_ns -= known.missing_ns

    def _come_back(self, setback: Setback, step: _Step, t_ns: int) -> None:
        """The first good step: it may take as long as a usual one, with the ranks that there are."""
        setback.world = step.world
        if self._usual_ns:
            fewer = max(1.0, setback.world_before / step.world) if setback.world_before else 1.0
            step.allowance_ns = int(self._usual() * fewer)
            step.excess = (parts.RESIZE, parts.PLANNED) if setback.planned else ("first good step", self._cause)
        setback.mark("first good step", t_ns)
        self.open, self._mode = None, _Mode.TRAINING
        self.setbacks.append(setback)
        self._healing.append(setback)
        self._returned = setback

    def _finish_step(self) -> None:
        """No rank commits the current step any more."""
        step, self._current = self._current, None
        if step is not None:
            if step.allowance_ns is None and not step.skipped:
                self._usual_ns.append(step.spent_ns)
            self._on_step(step.spent_ns / 1e9)
        setback, self._returned = self._returned, None
        if setback is not None:
            self._on_setback(setback)

    def _usual(self) -> int:
        return int(median(self._usual_ns))

    # -- after the way back ---------------------------------------------------------------------------------------

    def _protection(self, record: Record) -> None:
        if record.event == Event.EXPOSED:
            self._lacking |= {record["worker"]} & self._members
        else:
            self._lacking.discard(record["worker"])

    def _look_at_redundancy(self, t_ns: int) -> None:
        if self._healing and len(self._ready) >= self.spares and not self._lacking:
            for setback in self._healing:
                if "full strength" in setback.ends:
                    setback.ends.setdefault("redundancy restored", t_ns)
            self._healing = [one for one in self._healing if "redundancy restored" not in one.ends]

    def _ended(self, record: Record) -> None:
        training = self._mode is _Mode.TRAINING
        self._finish_step()
        self._spend(*((parts.CLOSING, parts.CLOSING) if training else self._standing()), record.t_ns)
        self._mode, self.ended_ns = _Mode.OVER, record.t_ns

    # -- money ----------------------------------------------------------------------------------------------------

    def _spend(self, part: str, cause: str, until_ns: int) -> int:
        """Up to ``until_ns``. Returns the amount."""
        assert self._cursor_ns is not None
        amount_ns = max(0, until_ns - self._cursor_ns)
        self._cursor_ns += amount_ns
        self._spent[part, cause] += amount_ns
        return amount_ns

    def _move(self, source: tuple[str, str], target: tuple[str, str], amount_ns: int) -> None:
        self._spent[source] -= amount_ns
        self._spent[target] += amount_ns


_HANDLERS: Mapping[str, Callable[[Accountant, Record], None]] = {
    Event.STARTED: Accountant._started,
    "resized": Accountant._resized,
    Event.INJECTED: Accountant._injected,
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


def account_for(records: Iterable[Record], ended_ns: int | None = None, **known: Any) -> TimeAccount:
    """The account of a run that is over. ``known``: what :class:`Accountant` takes."""
    accountant = Accountant(**known)
    for record in records:
        accountant.take_in(record)
    return accountant.account(ended_ns)
