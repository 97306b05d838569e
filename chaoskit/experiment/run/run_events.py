"""Events of a run (faults, losses, recoveries), made from its records for display by the
platform.

-> experiment/run/event_feed.py reads the records and passes the events to the platform.
"""

from __future__ import annotations

from dataclasses import replace

from chaoskit.faults.evidence import NO_RANK
from chaoskit.journal import Record
from chaoskit.plaintext import plural
from chaoskit.runlog.account import UNHEARD, Accountant
from chaoskit.runlog.account.setback import Setback
from chaoskit.runlog.account.time_account import PLANNED, UNEXPLAINED
from chaoskit.substrate.core.run_event import RunEvent
from chaoskit.vocabulary import EXITED, Event

_INJECT, _DETECT, _RECOVER = "Inject", "Detect", "Recover"
_SHOWN = frozenset(
    {
        Event.EVIDENCE,
        Event.FAULT_MISSED,
        Event.UNDONE,
        Event.NODE_LOST,
        Event.POD_TAKEN,
        Event.NODE_REPLACED,
        Event.REPLACEMENT_FAILED,
        Event.RESUMED,
    }
)
#: Records that lead to no event.
WITHOUT_EVENTS = UNHEARD - _SHOWN


def event_of(record: Record, generation: int = 0, fault_in_words: str = "") -> RunEvent | None:
    """Return the event of a single record, or None if the record makes none.

    Args:
        record: the record.
        generation: the newest generation with a known plan; 0 before the first.
        fault_in_words: the fault of the record in words, if the record only names it.
    """
    in_generation = f", generation {generation}" if generation else ""
    match record.event:
        case Event.INJECTED:
            return RunEvent(record.t_ns, "FaultInjected", _INJECT, _target(record), is_warning=True)
        case Event.EVIDENCE if record["observed"]:
            text = f"{fault_in_words or record['fault']}: {record['observed']}"
            return RunEvent(record.t_ns, "FaultLanded", _INJECT, text)
        case Event.FAULT_MISSED:
            text = f"{record['what']} did not act, or too late: {record['reason']}"
            return RunEvent(record.t_ns, "FaultMissed", _INJECT, text, is_warning=True)
        case Event.DETECTED:
            rank = f"rank {record['rank']}" if record["rank"] is not None else "a spare"
            worker = str(record["worker"])
            place_in_words = (
                f"{rank} (worker {worker}) on {worker.rpartition('.')[0]}{in_generation}"
            )
            return RunEvent(
                record.t_ns,
                "WorkerLost",
                _DETECT,
                f"{place_in_words}: {_cause(record)}",
                is_warning=True,
            )
        case Event.NODE_LOST:
            text = f"{record['node']}{in_generation}: {record['detail']}"
            return RunEvent(record.t_ns, "NodeLost", _DETECT, text, is_warning=True)
        case Event.POD_TAKEN:
            fault_in_words = f"pod {record['pod']} of {record['node']}{in_generation}"
            text = (
                f"{fault_in_words} was {record['cause']}, and not by this run: {record['detail']}"
            )
            return RunEvent(record.t_ns, "PodTaken", _DETECT, text, is_warning=True)
        case Event.NODE_REPLACED:
            return RunEvent(
                record.t_ns,
                "NodeReplaced",
                _RECOVER,
                f"{record['node']} was started again{in_generation}",
            )
        case Event.REPLACEMENT_FAILED:
            text = f"{record['node']} could not be started again, and is tried again: {record['reason']}"
            return RunEvent(record.t_ns, "ReplacementFailed", _RECOVER, text, is_warning=True)
        case Event.RESUMED:
            text = f"coordinator {record['term']} took over from the one before it, generation {record['generation']}"
            return RunEvent(record.t_ns, "CoordinatorResumed", _RECOVER, text)
    return None


def _target(record: Record) -> str:
    """Return a fault and its target in words, from the record of its act."""
    subject = "the first process" if record["rank"] == NO_RANK else f"rank {record['rank']}"
    place_in_words = [f"at {subject} (worker {record['worker']}) on {record['node']}"]
    place_in_words += [f"all of {', '.join(record['nodes'])}"] if record["nodes"] else []
    place_in_words += [f"generation {record['generation']}"] if record.get("generation") else []
    return f"{record['what']}: {', '.join(place_in_words)}, step {record['step']}"


def recovery_of(setback: Setback) -> RunEvent | None:
    """Return the event of training that goes on.

    It is None after a planned change of the world, and before the first good step.
    """
    if setback.planned or setback.cause == PLANNED or setback.seconds is None:
        return None
    world_in_words = f"{plural(setback.world, 'rank')}, generation {setback.generation}"
    text = (
        f"training goes on with {world_in_words}, {setback.seconds:.2f} s after {_origin(setback)}"
    )
    return RunEvent(setback.good_ns or setback.noticed_ns, "Recovered", _RECOVER, text)


def failure_of(setback: Setback, ended_ns: int) -> RunEvent:
    """Return the event of a run that ended before its training went on."""
    seconds = (ended_ns - setback.begun_ns) / 1e9
    text = f"the run ended {seconds:.2f} s after {_origin(setback)}, and training had not gone on"
    return RunEvent(ended_ns, "NotRecovered", _RECOVER, text, is_warning=True)


def _origin(setback: Setback) -> str:
    """Return the fault, or else the loss, that a setback began with, in words."""
    loss_in_words = f" of rank {setback.rank}" if setback.rank is not None else ""
    loss_in_words += f" on {', '.join(setback.nodes)}" if setback.nodes else ""
    if setback.fault:
        return f"the fault {setback.fault} (loss{loss_in_words}: {setback.cause})"
    return f"the loss{loss_in_words} ({setback.cause})"


def _cause(record: Record) -> str:
    """Return the cause of a loss and its detail, in words."""
    cause, detail = str(record["cause"]), str(record["detail"])
    if cause == EXITED:
        return f"its process ended, {detail}" if detail else "its process ended"
    return detail if detail.startswith(cause) else f"{cause}: {detail}" if detail else cause


class RunEvents:
    """Events of one run, folded from its records: each loss once, each fault with its effect."""

    def __init__(self) -> None:
        self._accountant = Accountant(on_setback=self._settle)
        self._generation = 0
        # name of a fault that has acted -> the fault in words
        self._faults_in_words: dict[str, str] = {}
        self._decided_faults: set[str] = (
            set()
        )  # faults with an event that says whether they had an effect
        self._act_records: list[Record] = []  # records of acts of faults
        self._reported_losses: set[object] = set()
        self._loss_causes: dict[str, str] = {}  # lost worker -> cause
        self._ended_setbacks = 0  # number of ended setbacks, of which unplanned ones have an event
        self._last_ns = 0
        self._events: list[RunEvent] = []

    def take(self, record: Record) -> list[RunEvent]:
        """Return the events that the next record leads to."""
        self._last_ns = max(self._last_ns, record.t_ns)
        if self._is_new(record):
            self._note(record)
        self._accountant.take_in(record)
        return self._drain()

    def finish(self) -> list[RunEvent]:
        """Return the events that the end of the records leads to.

        A recovery without the end of its first good step, and a failure to recover, are among them.
        """
        for setback in self._accountant.setbacks[self._ended_setbacks :]:
            self._settle(setback)
        open_setback = self._accountant.open
        if open_setback is not None and not open_setback.planned:
            self._events.append(failure_of(self._explained(open_setback), self._last_ns))
        return self._drain()

    def _drain(self) -> list[RunEvent]:
        """Return the events made since the last call, and forget them."""
        events, self._events = self._events, []
        return events

    def _is_new(self, record: Record) -> bool:
        """Return whether a record is no repeated report of a loss, as by an earlier coordinator.

        A new loss is stored.
        """
        if record.event not in (Event.DETECTED, Event.NODE_LOST):
            return True
        loss = record.get("worker") or (record.get("node"), record.t_ns)
        is_new = loss not in self._reported_losses
        self._reported_losses.add(loss)
        return is_new

    def _note(self, record: Record) -> None:
        """Update the state from a record, and queue its event, if it makes one."""
        fault_id = str(record.get("fault", ""))
        match record.event:
            case Event.PLAN:
                self._generation = record["generation"]
            case Event.INJECTED:
                self._faults_in_words[fault_id] = record["what"]
                self._act_records.append(record)
            case Event.DETECTED:
                self._loss_causes[record["worker"]] = record["cause"]
            case Event.EVIDENCE | Event.FAULT_MISSED:
                if fault_id in self._decided_faults or not record.get("observed", True):
                    return
                self._decided_faults.add(fault_id)
            case Event.UNDONE if (
                fault_id in self._faults_in_words and fault_id not in self._decided_faults
            ):
                text = f"{self._faults_in_words[fault_id]}: no evidence shows that it took effect"
                self._events.append(
                    RunEvent(record.t_ns, "FaultNotProven", _INJECT, text, is_warning=True)
                )
        if (
            event := event_of(record, self._generation, self._faults_in_words.get(fault_id, ""))
        ) is not None:
            self._events.append(event)

    def _settle(self, setback: Setback) -> None:
        """Count a setback that ends, and queue the event of its recovery, if it has one."""
        self._ended_setbacks += 1
        if (event := recovery_of(self._explained(setback))) is not None:
            self._events.append(event)

    def _explained(self, setback: Setback) -> Setback:
        """Return a setback that began with a broken group, with its loss and fault found later.

        Any other setback is returned as it is.
        """
        if setback.cause != UNEXPLAINED or not setback.workers:
            return setback
        cause = self._loss_causes.get(setback.workers[0], setback.cause)
        nodes = set(setback.nodes)
        acts = [
            act
            for act in self._act_records
            if act["worker"] in setback.workers or nodes & set(act["nodes"])
        ]
        acts = [act for act in acts if act.t_ns <= setback.noticed_ns]
        if not acts:
            return replace(setback, cause=cause)
        return replace(setback, cause=cause, fault=acts[-1]["what"], begun_ns=acts[-1].t_ns)
