"""Faults, losses and recoveries of a run, from its records: for people that look at the platform on which it runs."""

from __future__ import annotations

from dataclasses import replace

from chaoskit.journal import Record
from chaoskit.plaintext import plural
from chaoskit.runlog.account import UNHEARD, Accountant
from chaoskit.runlog.account.setback import Setback
from chaoskit.runlog.account.time_account import PLANNED, UNEXPLAINED
from chaoskit.substrate.core.run_event import RunEvent
from chaoskit.vocabulary import EXITED, Event

_INJECT, _DETECT, _RECOVER = "Inject", "Detect", "Recover"
_TELLING = frozenset(
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
#: Records of which no event is made, and from which none is computed.
WITHOUT_EVENTS = UNHEARD - _TELLING


def event_of(record: Record, generation: int = 0, what: str = "") -> RunEvent | None:
    """Return the event of a record by itself; None if the record makes none.

    Args:
        generation: the newest one whose plan is known; 0 before the first.
        what: the fault of the record, in words, where the record only names it.
    """
    within = f", generation {generation}" if generation else ""
    match record.event:
        case Event.INJECTED:
            return RunEvent(record.t_ns, "FaultInjected", _INJECT, _target(record), is_warning=True)
        case Event.EVIDENCE if record["observed"]:
            text = f"{what or record['fault']}: {record['observed']}"
            return RunEvent(record.t_ns, "FaultLanded", _INJECT, text)
        case Event.FAULT_MISSED:
            text = f"{record['what']} did not act, or too late: {record['reason']}"
            return RunEvent(record.t_ns, "FaultMissed", _INJECT, text, is_warning=True)
        case Event.DETECTED:
            rank = f"rank {record['rank']}" if record["rank"] is not None else "a spare"
            worker = str(record["worker"])
            place = f"{rank} (worker {worker}) on {worker.rpartition('.')[0]}{within}"
            return RunEvent(
                record.t_ns, "WorkerLost", _DETECT, f"{place}: {_cause(record)}", is_warning=True
            )
        case Event.NODE_LOST:
            text = f"{record['node']}{within}: {record['detail']}"
            return RunEvent(record.t_ns, "NodeLost", _DETECT, text, is_warning=True)
        case Event.POD_TAKEN:
            what = f"pod {record['pod']} of {record['node']}{within}"
            text = f"{what} was {record['cause']}, and not by this run: {record['detail']}"
            return RunEvent(record.t_ns, "PodTaken", _DETECT, text, is_warning=True)
        case Event.NODE_REPLACED:
            return RunEvent(
                record.t_ns, "NodeReplaced", _RECOVER, f"{record['node']} was started again{within}"
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
    place = [f"at rank {record['rank']} (worker {record['worker']}) on {record['node']}"]
    place += [f"all of {', '.join(record['nodes'])}"] if record["nodes"] else []
    place += [f"generation {record['generation']}"] if record.get("generation") else []
    return f"{record['what']}: {', '.join(place)}, step {record['step']}"


def recovery_of(setback: Setback) -> RunEvent | None:
    """Return the event of training that goes on; None if it was a change of the world that was planned."""
    if setback.planned or setback.cause == PLANNED or setback.seconds is None:
        return None
    place = f"{plural(setback.world, 'rank')}, generation {setback.generation}"
    text = f"training goes on with {place}, {setback.seconds:.2f} s after {_origin(setback)}"
    return RunEvent(setback.good_ns or setback.noticed_ns, "Recovered", _RECOVER, text)


def failure_of(setback: Setback, ended_ns: int) -> RunEvent:
    """Return the event of a run that has ended before its training went on."""
    seconds = (ended_ns - setback.begun_ns) / 1e9
    text = f"the run ended {seconds:.2f} s after {_origin(setback)}, and training had not gone on"
    return RunEvent(ended_ns, "NotRecovered", _RECOVER, text, is_warning=True)


def _origin(setback: Setback) -> str:
    """Return the fault, or what was lost, in words."""
    lost = f" of rank {setback.rank}" if setback.rank is not None else ""
    lost += f" on {', '.join(setback.nodes)}" if setback.nodes else ""
    if setback.fault:
        return f"the fault {setback.fault} (loss{lost}: {setback.cause})"
    return f"the loss{lost} ({setback.cause})"


def _cause(record: Record) -> str:
    cause, detail = str(record["cause"]), str(record["detail"])
    if cause == EXITED:
        return f"its process ended, {detail}" if detail else "its process ended"
    return detail if detail.startswith(cause) else f"{cause}: {detail}" if detail else cause


class RunEvents:
    """Folds the records of one run into events: each loss once, each fault with whether it landed."""

    def __init__(self) -> None:
        self._accountant = Accountant(on_setback=self._settle)
        self._generation = 0
        self._faults: dict[str, str] = {}  # that have acted: name -> in words
        self._decided: set[str] = set()  # faults of which it was told whether they landed
        self._acts: list[Record] = []  # of faults
        self._losses: set[object] = set()
        self._causes: dict[str, str] = {}  # of lost workers
        self._recovered = 0  # setbacks that were told
        self._last_ns = 0
        self._events: list[RunEvent] = []

    def take(self, record: Record) -> list[RunEvent]:
        """Return the events that the next record leads to."""
        self._last_ns = max(self._last_ns, record.t_ns)
        if self._is_new(record):
            self._note(record)
        self._accountant.take_in(record)
        return self._taken()

    def finish(self) -> list[RunEvent]:
        """Return the events that the end of the records leads to."""
        for setback in self._accountant.setbacks[self._recovered :]:
            self._settle(setback)
        pending = self._accountant.open
        if pending is not None and not pending.planned:
            self._events.append(failure_of(self._explained(pending), self._last_ns))
        return self._taken()

    def _taken(self) -> list[RunEvent]:
        events, self._events = self._events, []
        return events

    def _is_new(self, record: Record) -> bool:
        """Return False for a loss that was told before, as by the coordinator before this one."""
        if record.event not in (Event.DETECTED, Event.NODE_LOST):
            return True
        loss = record.get("worker") or (record.get("node"), record.t_ns)
        is_new = loss not in self._losses
        self._losses.add(loss)
        return is_new

    def _note(self, record: Record) -> None:
        name = str(record.get("fault", ""))
        match record.event:
            case Event.PLAN:
                self._generation = record["generation"]
            case Event.INJECTED:
                self._faults[name] = record["what"]
                self._acts.append(record)
            case Event.DETECTED:
                self._causes[record["worker"]] = record["cause"]
            case Event.EVIDENCE | Event.FAULT_MISSED:
                if name in self._decided or not record.get("observed", True):
                    return
                self._decided.add(name)
            case Event.UNDONE if name in self._faults and name not in self._decided:
                text = f"{self._faults[name]}: nothing shows that it landed"
                self._events.append(
                    RunEvent(record.t_ns, "FaultNotProven", _INJECT, text, is_warning=True)
                )
        if (event := event_of(record, self._generation, self._faults.get(name, ""))) is not None:
            self._events.append(event)

    def _settle(self, setback: Setback) -> None:
        self._recovered += 1
        if (event := recovery_of(self._explained(setback))) is not None:
            self._events.append(event)

    def _explained(self, setback: Setback) -> Setback:
        """Return a setback that began with a broken group, with the loss and the fault that became known afterwards."""
        if setback.cause != UNEXPLAINED or not setback.workers:
            return setback
        cause = self._causes.get(setback.workers[0], setback.cause)
        nodes = set(setback.nodes)
        acts = [
            act
            for act in self._acts
            if act["worker"] in setback.workers or nodes & set(act["nodes"])
        ]
        acts = [act for act in acts if act.t_ns <= setback.noticed_ns]
        if not acts:
            return replace(setback, cause=cause)
        return replace(setback, cause=cause, fault=acts[-1]["what"], begun_ns=acts[-1].t_ns)
