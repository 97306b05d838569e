"""The fold over the records of a run that spends its time.

All time lies on one line, cut at each event that concerns the training as a whole. Each piece is
spent on one part for one cause, so the parts add up to the wall time, to the nanosecond.

-> runlog/account/time_account.py: the parts, goodput and ETTR. experiment/run/recovery_timeline.py:
the recovery time that a test asserts on, which needs the whole run. runlog/account/books.py: the
values at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from chaoskit.journal import Record
from chaoskit.runlog.account import time_account as parts
from chaoskit.runlog.account.books import Books, Mode
from chaoskit.runlog.account.setback import Setback
from chaoskit.runlog.account.spending import HeldTime, Spending
from chaoskit.runlog.account.steps import AccountedStep
from chaoskit.runlog.account.time_account import TimeAccount
from chaoskit.vocabulary import Event

_STRIKE_STEPS = 2  # a fault did not stop the training if so many steps were committed after it


@dataclass(slots=True)
class _FaultActs:
    """The acts of a fault.

    Attributes:
        fault_in_words: the fault in words.
        step: the newest step when it struck.
        begun_ns: the time of its first act.
        acted_ns: worker -> time of the act on it.
        nodes: the nodes that it struck as a whole, at ``begun_ns``.
    """

    fault_in_words: str
    step: int
    begun_ns: int
    acted_ns: dict[str, int]
    nodes: frozenset[str]

    def on(self, worker: str) -> int | None:
        """Return when the fault struck ``worker``; None if it did not."""
        whole_node_ns = self.begun_ns if worker.rpartition(".")[0] in self.nodes else None
        return self.acted_ns.get(worker, whole_node_ns)


class Accountant(Books):
    """The account of one run, updated record by record.

    Args:
        started_ns: the start of the run; None for the time of its first record.
        full_world: the number of ranks of the full world; 0 for the number in the journals.
        spares: the number of spares that the run asks for, until its journal names it.
        false_alarms: workers that were given up without a reason, as far as known.
        on_step: called with the nanoseconds of every step, skipped ones too, once no further rank
            commits it.
        on_setback: called with every :class:`Setback` once it is settled, planned ones too.
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
        self._struck_faults: dict[str, _FaultActs] = {}  # fault -> its acts
        self._lost_workers: set[str] = set()
        # the setback with the current step as its first good one
        self._recovered_setback: Setback | None = None
        self._aborted_time = HeldTime()  # time of the step that the open setback interrupted
        # members of the open setback's plan that have not built their group
        self._forming_workers: set[str] = set()

    # -- records -----------------------------------------------------------------------------------

    def take_in(self, record: Record) -> None:
        """Update the account from the next record.

        A record that is late, by its time, moves no time. Records after the end of the job are
        ignored.
        """
        if self._spending is None:
            self._spending = Spending(record.t_ns)
        handler = _HANDLERS.get(record.event)
        if handler is not None and self._mode is not Mode.OVER:
            handler(self, record)
            self._healing.mark_redundancy(record.t_ns)

    @property
    def _spending_or_raise(self) -> Spending:
        """The spending of time, which begins with the first record.

        Raises:
            LookupError: if there is no record yet.
        """
        if self._spending is None:
            raise LookupError("the account has no record yet")
        return self._spending

    def _on_started(self, record: Record) -> None:
        """Store the size of the world and the number of spares."""
        self._steps.full_world = self.full_world or record["nodes"]
        self._healing.spares = record["spares"]

    def _on_resized(self, record: Record) -> None:
        """Store the new size of the full world."""
        self._steps.full_world = record["size"]

    def _on_injected(self, record: Record) -> None:
        """Store the first act of a fault."""
        acted_ns, nodes = {record["worker"]: record.t_ns}, frozenset(record["nodes"])
        self._struck_faults[record["fault"]] = _FaultActs(
            record["what"], self.step, record.t_ns, acted_ns, nodes
        )

    def _on_acted(self, record: Record) -> None:
        """Store a further act of a fault, on another worker or on the same one again.

        A fault without a record of its first act is stored, too.
        """
        fault_acts = self._struck_faults.get(record["fault"])
        if fault_acts is None:
            fault_acts = _FaultActs(record["what"], self.step, record.t_ns, {}, frozenset())
            self._struck_faults[record["fault"]] = fault_acts
        fault_acts.step, fault_acts.acted_ns[record["worker"]] = self.step, record.t_ns

    def _on_spare_ready(self, record: Record) -> None:
        """Store a spare that is ready.

        The time before it is spent on the start-up, or on waiting if the training waited for it.
        """
        if self._mode is Mode.STARTING:
            self._spending_or_raise.spend(self._current_part_and_cause(), record.t_ns)
        elif self.open is not None and not self.open.generation and not self.open.planned:
            # the training waited for this worker
            self._spending_or_raise.spend((parts.WAITING, self._cause), record.t_ns)
        self._healing.ready_spares.add(record["worker"])

    def _on_plan(self, record: Record) -> None:
        """Open a setback for a new plan, if none is open, and store its members.

        The first plan opens none. A plan that interrupts a step replaces an open planned change.
        """
        if self._mode is Mode.STARTING:
            self._spending_or_raise.spend(self._current_part_and_cause(), record.t_ns)
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
                # a sharded world that grows restores its copies
                is_growing = len(members) > len(self._healing.members)
                self._set_back(record, parts.PLANNED if is_growing else parts.UNEXPLAINED)
            self._take_plan(record, members)
        self._healing.take_plan(members)
        self._steps.full_world = self.full_world or len(members)

    def _take_plan(self, record: Record, members: frozenset[str]) -> None:
        """Store the new plan in the open setback and begin its next phase."""
        if self.open is None:
            return
        self.open.generation, self.open.world = record["generation"], len(members)
        self._forming_workers = set(members)
        if not self.open.planned:
            self._spending_or_raise.spend((self._phase, self._cause), record.t_ns)
            self.open.ends.setdefault("quiesced", record.t_ns)
            self._phase = "regrouped"

    def _on_settled(self, record: Record) -> None:
        """End the start-up when the first group of ranks can be used."""
        if self._mode is Mode.STARTING:
            self._spending_or_raise.spend((parts.START_UP, parts.START_UP), record.t_ns)
            self._mode, self.formed_ns = Mode.TRAINING, record.t_ns

    def _on_phase(self, record: Record) -> None:
        """Mark a phase of the open recovery when a rank has done its part.

        Before the first step, the time is spent on the start-up. A record of another generation is
        ignored.
        """
        phase = {Event.QUIESCED: "quiesced", Event.REGROUPED: "regrouped"}.get(
            Event(record.event), "restored"
        )
        if self._mode is Mode.STARTING or (self.step < 0 and self.open is None):
            self._spending_or_raise.spend((parts.START_UP, parts.START_UP), record.t_ns)
        elif self.open is not None:
            is_current_or_newer, is_of_open_plan = (
                self.generation <= record["generation"],
                record["generation"] == self.open.generation,
            )
            if not (
                is_current_or_newer and not is_of_open_plan
                if phase == "quiesced"
                else is_of_open_plan
            ):
                return
            self.open.mark(phase, record.t_ns)
            if phase == "regrouped":
                self._forming_workers.discard(record.source)
            # wait for the last member to form
            is_early = phase == "restored" and bool(self._forming_workers)
            if not self.open.planned and not is_early:
                self._spending_or_raise.spend((phase, self._cause), record.t_ns)
                self._phase = "regrouped" if phase == "quiesced" else self._phase

    def _on_protection(self, record: Record) -> None:
        """Store whether a piece of the state has all its copies."""
        self._healing.take_protection(record)

    def _on_ended(self, record: Record) -> None:
        """Spend the time since the last step on closing, and ignore all later records.

        A job that ends during a start or a recovery spends the time on that.
        """
        was_training = self._mode is Mode.TRAINING
        self._finish_step()
        self._spending_or_raise.spend(
            (parts.CLOSING, parts.CLOSING) if was_training else self._current_part_and_cause(),
            record.t_ns,
        )
        self._mode, self.ended_ns = Mode.OVER, record.t_ns

    # -- losses ------------------------------------------------------------------------------------

    def _on_detected(self, record: Record) -> None:
        """Count the loss of a rank and open or extend a setback.

        The loss of a worker without a rank does neither.
        """
        worker, cause = record["worker"], record["cause"]
        if worker in self._lost_workers:  # two coordinators may report the same loss
            return
        self._lost_workers.add(worker)
        self._healing.ready_spares.discard(worker)
        if record["rank"] is None:  # a spare, or a replacement that is starting
            return
        self.losses[cause] += 1
        if worker in self._false_alarms:
            cause = f"false alarm ({cause})"
        self._notice(record, cause)

    def _on_bad_numbers(self, record: Record) -> None:
        """Open a setback for numbers that do not count, unless the record is undecided."""
        if record.event == Event.NONFINITE or record["verdict"] != "undecided":
            self._notice(record, str(record.event), self.generation)

    def _notice(self, record: Record, cause: str, generation: int = 0) -> None:
        """Open a setback, or add a loss to the open one.

        Bad numbers during a setback that was not planned are ignored, and so are all notices before
        the training.

        Args:
            record: the record of the loss or of the bad numbers.
            cause: the cause of a new setback.
            generation: the generation that trains on; 0 if a new one must be planned.
        """
        if self._mode is Mode.STARTING:
            return
        setback = self.open
        if setback is None or setback.planned:
            setback = self._set_back(record, cause)
            # the same generation goes on unless there is a new plan
            setback.generation = generation
        elif record.event == Event.DETECTED:
            self._spending_or_raise.spend((self._phase, self._cause), record.t_ns)
            setback.generation, self._phase = 0, "quiesced"
        else:
            return
        if record.event == Event.DETECTED:
            setback.workers.append(record["worker"])
            setback.rank = record["rank"] if setback.rank is None else setback.rank
            setback.detail = setback.detail or record["detail"]

    def _set_back(self, record: Record, cause: str) -> Setback:
        """Open a setback and return it.

        Training makes no progress, and the current step was not committed.

        The time since the fault is spent on the detection. If no fault is known, it is the time
        that is left after a usual step. The time before it was for nothing (recomputed).
        """
        cursor_ns, usual_ns = self._spending_or_raise.cursor_ns, self._steps.usual_ns
        fault_and_time = self._take_strike(record)
        in_flight_ns = max(0, record.t_ns - cursor_ns)
        if fault_and_time is not None:
            begun_ns = fault_and_time[0]
        else:
            begun_ns = cursor_ns + (
                in_flight_ns if usual_ns is None else min(in_flight_ns, usual_ns)
            )
        self._finish_step()
        self._aborted_time = HeldTime()
        self._spending_or_raise.spend(
            (parts.RECOMPUTED, cause), min(begun_ns, record.t_ns), self._aborted_time
        )
        self._spending_or_raise.spend(("detected", cause), record.t_ns)
        self._mode, self._phase, self._cause = Mode.BROKEN, "quiesced", cause
        self._failures += cause != parts.PLANNED
        fault = fault_and_time[1] if fault_and_time is not None else ""
        setback = Setback(
            cause, begun_ns, record.t_ns, self.step, fault=fault, world_before=self.world
        )
        setback.mark("detected", record.t_ns)
        self.open = setback
        return setback

    def _take_strike(self, record: Record) -> tuple[int, str] | None:
        """Return when and by which fault ``record``'s worker was struck, and forget the fault.

        The earliest fault counts; None if there is none. Corrupt data may be noticed by the
        receiver, while the fault struck the sender.
        """
        suspects = [
            worker
            for worker in (record.get("worker"), *record.get("sources", ()))
            if worker is not None
        ]
        acts = [
            (acted_ns, fault)
            for fault, fault_acts in self._struck_faults.items()
            for worker in suspects
            if (acted_ns := fault_acts.on(worker)) is not None and acted_ns <= record.t_ns
        ]
        if not acts:
            return None
        acted_ns, fault = min(acts)
        return acted_ns, self._struck_faults.pop(fault).fault_in_words

    # -- steps -------------------------------------------------------------------------------------

    def _on_committed(self, record: Record) -> None:
        """Spend the time up to a rank's commit, or skip, on its step.

        A commit of an older generation than the one known for the step is ignored.
        """
        generation = record["generation"]
        earlier, step = self._steps.committed(record), self._steps.current
        if earlier is not None and generation < earlier.generation:
            return
        if step is None or earlier is not step or earlier.generation != generation:
            step = self._begin_step(record, earlier)
        if self.open is None or self.open.planned:
            self._steps.spend(self._spending_or_raise, step, record.t_ns)
        self._steps.stall(self._spending_or_raise, step, int(record.get("stall_ms", 0.0) * 1e6))
        self._healing.take_commit(record, is_full_world=step.world >= self.full_world)

    def _begin_step(self, record: Record, earlier: AccountedStep | None) -> AccountedStep:
        """Begin a step when its first rank commits it, and return it.

        It may end the open setback. The time of an earlier commit of the same step is lost.

        Args:
            record: the record of that rank.
            earlier: the step of that number that was committed before, or None.
        """
        self._finish_step()
        number, generation, setback = record["step"], record["generation"], self.open
        if earlier is not None:
            self._steps.throw_away(self._spending_or_raise, number, generation, self._cause)
        is_recovered = setback is not None and 0 < setback.generation <= generation
        step = self._steps.begin(record)
        if setback is not None and is_recovered:
            self._come_back(setback, step, record.t_ns)
        elif setback is not None and not setback.planned:
            # the remaining ranks committed the step that a loss seemed to interrupt
            self._spending_or_raise.spend((self._phase, self._cause), record.t_ns)
            self._steps.credit(self._spending_or_raise, step, self._aborted_time)
        elif self._mode is Mode.STARTING:
            self._mode = Mode.TRAINING
        self._struck_faults = {
            fault: fault_acts
            for fault, fault_acts in self._struck_faults.items()
            if number <= fault_acts.step + _STRIKE_STEPS
        }
        return step

    def _come_back(self, setback: Setback, step: AccountedStep, t_ns: int) -> None:
        """End a setback with its first good step.

        The step may take as long as a usual step, longer in proportion if ranks are missing. Time
        beyond that is spent on the recovery, or on the resize after a planned change.

        Args:
            setback: the open setback.
            step: its first good step.
            t_ns: the time of the first commit of that step.
        """
        setback.world = step.world
        if (usual_ns := self._steps.usual_ns) is not None:
            slowdown = max(1.0, setback.world_before / step.world) if setback.world_before else 1.0
            step.allowance_ns = int(usual_ns * slowdown)
            step.excess = (
                (parts.RESIZE, parts.PLANNED)
                if setback.planned
                else ("first good step", self._cause)
            )
        setback.mark("first good step", t_ns)
        self.open, self._mode = None, Mode.TRAINING
        self.setbacks.append(setback)
        self._healing.admit(setback)
        self._recovered_setback = setback

    def _finish_step(self) -> None:
        """End the current step; a setback that ended with it is settled and passed on."""
        self._steps.finish()
        setback, self._recovered_setback = self._recovered_setback, None
        if setback is not None:
            setback.settled = True
            self._on_setback(setback)


_HANDLERS: Mapping[str, Callable[[Accountant, Record], None]] = {
    Event.STARTED: Accountant._on_started,
    Event.RESIZED: Accountant._on_resized,
    Event.INJECTED: Accountant._on_injected,
    Event.ACTED: Accountant._on_acted,
    Event.SPARE_READY: Accountant._on_spare_ready,
    Event.PLAN: Accountant._on_plan,
    Event.SETTLED: Accountant._on_settled,
    Event.QUIESCED: Accountant._on_phase,
    Event.REGROUPED: Accountant._on_phase,
    Event.RESTORED: Accountant._on_phase,
    Event.ADOPT: Accountant._on_phase,
    Event.DETECTED: Accountant._on_detected,
    Event.NONFINITE: Accountant._on_bad_numbers,
    Event.CORRUPT: Accountant._on_bad_numbers,
    Event.COMMIT: Accountant._on_committed,
    Event.SKIP: Accountant._on_committed,
    Event.EXPOSED: Accountant._on_protection,
    Event.PROTECTED: Accountant._on_protection,
    Event.JOB_ENDED: Accountant._on_ended,
}

#: Events of records that the account ignores, which are most of a journal.
UNHEARD = frozenset(event.value for event in Event) - frozenset(str(event) for event in _HANDLERS)


def account_for(
    records: Iterable[Record], ended_ns: int | None = None, **arguments: Any
) -> TimeAccount:
    """Return the account of a run that is over.

    Args:
        records: the records of the run, by time.
        ended_ns: the end of the run; None for the last time that the records account for.
        arguments: arguments of :class:`Accountant`.
    """
    accountant = Accountant(**arguments)
    for record in records:
        accountant.take_in(record)
    return accountant.account(ended_ns)
