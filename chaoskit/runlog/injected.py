"""The result of each planned fault, read from the journals: its acts, its evidence, and whether it
was undone.

-> experiment/injection/injector.py writes these records. runlog/fault_verdict.py (fault_check)
judges the evidence; experiment/judge/fault_audit.py the target.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from chaoskit.faults.base import Fault, fault_id
from chaoskit.faults.evidence import (
    ApiServer,
    CoordinatorProcess,
    NetworkPath,
    RankProcess,
    SharedStore,
    SizeRequest,
    Subject,
    WholeNode,
)
from chaoskit.journal import Record
from chaoskit.vocabulary import Event


@dataclass(frozen=True)
class Struck:
    """The first target of a fault.

    Attributes:
        worker: the name of the process.
        rank, node, pid: its rank, node and process id at that moment. The rank is -1 for a fault
            that names a node.
        step, phase: its step and phase, as far as the harness knew.
        waiting: the worker that waited at the fault's hook, or "".
        injected_ns: the time of the first act.
        done_ns: the end of that act.
        claims: worker that the fault struck -> the time of the last act on it.
        struck_nodes: the nodes that the fault struck as a whole; if there are none, the node of the
            target.
        acted_ns: the time of the last act; a lasting effect, such as a limit, acts as long as it is
            in force.
        lifted_ns: the end of the fault while the run went on; 0 if there was none.
        starved_s: the time in seconds in which the process had no CPU, according to its progress
            board.
        ticks: the start time of the process in clock ticks; None if it is not known.
        waited_for: why its node was not reached when the fault was due before; "" if it was.
    """

    worker: str
    rank: int
    node: str
    pid: int
    step: int
    phase: str
    waiting: str
    injected_ns: int
    done_ns: int
    claims: Mapping[str, int]
    struck_nodes: frozenset[str]
    acted_ns: int
    lifted_ns: int
    starved_s: float
    ticks: int | None = None
    waited_for: str = ""


@dataclass(frozen=True)
class InjectionRecord:
    """A planned fault and its result.

    Attributes:
        fault_id: the name of the fault in journals.
        fault: the fault.
        target: the first target; None if no journal records an act.
        effective_ns: the time of the first evidence of its effect; None without evidence.
        observed: the newest evidence in words; "" without evidence.
        subject: the subject of the evidence; None without evidence, or if it cannot be read.
        missed: the reason why the fault did not act, or acted too late; "" if it acted, or no
            journal has a reason.
        undone: no record shows that an effect of the fault is left. It is True, too, if there is no
            record at all, which the check of journals reports.
    """

    fault_id: str
    fault: Fault
    target: Struck | None = None
    effective_ns: int | None = None
    observed: str = ""
    subject: Subject | None = None
    missed: str = ""
    undone: bool = True

    @property
    def is_about_its_target(self) -> bool:
        """True if the evidence is about the target of the fault, or if there is no evidence.

        Evidence from the shared store or the API server always is, since all nodes share these. It
        is False if the subject of the evidence cannot be read.
        """
        target, subject = self.target, self.subject
        if target is None or not self.observed:
            return True
        match subject:
            case RankProcess(worker, rank, pid):
                return (worker, rank, pid) == (target.worker, target.rank, target.pid)
            case WholeNode(node):
                return node in target.struck_nodes or node == target.node
            case NetworkPath(nodes):
                return target.node in nodes
            case CoordinatorProcess():
                return self.fault.ends_coordinator
            case SizeRequest(fault):
                return fault == self.fault_id
            case SharedStore() | ApiServer():
                return True
        return False

    @property
    def why_missed(self) -> str:
        """The reason why the fault did not act; without a record of it, that no target was there.

        It means nothing for a fault that acted in time.
        """
        return self.missed or f"{self.fault.place} was held by no process {self.fault.moment}"


def injections(faults: Sequence[Fault], records: Iterable[Record]) -> list[InjectionRecord]:
    """Return the result of each fault, in the order of the plan.

    A fault without any record has no target and no evidence.
    """
    by_fault: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.event in _EVENTS:
            by_fault[record["fault"]].append(record)
    return [
        _injection(fault_id(number), fault, by_fault[fault_id(number)])
        for number, fault in enumerate(faults)
    ]


_EVENTS = frozenset(
    {Event.INJECTED, Event.ACTED, Event.EVIDENCE, Event.FAULT_MISSED, Event.LIFTED, Event.UNDONE}
)


def _injection(name: str, fault: Fault, records: Sequence[Record]) -> InjectionRecord:
    """Return the result of one fault from its records."""
    injected_records = [record for record in records if record.event == Event.INJECTED]
    evidence = [
        record for record in records if record.event == Event.EVIDENCE and record["observed"]
    ]
    missed_records = [record for record in records if record.event == Event.FAULT_MISSED]
    undone_records = [record for record in records if record.event == Event.UNDONE]
    # evidence without a recorded act proves nothing
    last_evidence = evidence[-1] if evidence and injected_records else None
    return InjectionRecord(
        fault_id=name,
        fault=fault,
        target=_target_of(fault, injected_records[0], records) if injected_records else None,
        effective_ns=last_evidence.t_ns if last_evidence is not None else None,
        observed=str(last_evidence["observed"]) if last_evidence is not None else "",
        subject=_subject(last_evidence) if last_evidence is not None else None,
        missed=str(missed_records[-1]["reason"]) if missed_records else "",
        undone=all(record["ok"] for record in undone_records),
    )


def _subject(evidence: Record) -> Subject | None:
    """Return the subject of a record of evidence, or None if it cannot be read."""
    try:
        subject: Subject = msgspec.convert(evidence["evidence"]["subject"], Subject)
    except (KeyError, TypeError, msgspec.ValidationError):
        return None
    return subject


def _target_of(fault: Fault, injected_record: Record, records: Sequence[Record]) -> Struck:
    """Return the target of a fault from the records of its acts."""
    acts = [injected_record, *(record for record in records if record.event == Event.ACTED)]
    lifted_ns = [record.t_ns for record in records if record.event == Event.LIFTED]
    undone_records = [record for record in records if record.event == Event.UNDONE]
    acted_ns = [act.t_ns for act in acts] + [record["acted_ns"] for record in undone_records]
    struck_nodes = {*injected_record["nodes"], *(act["node"] for act in acts if fault.whole_node)}
    target_fields = {
        name: injected_record[name]
        for name in ("worker", "rank", "node", "pid", "step", "phase", "waiting")
    }
    return Struck(
        **target_fields,
        injected_ns=injected_record.t_ns,
        done_ns=injected_record["done_ns"],
        claims={act["worker"]: act.t_ns for act in acts},
        struck_nodes=frozenset(struck_nodes or {injected_record["node"]}),
        acted_ns=max(acted_ns),
        lifted_ns=max(lifted_ns, default=0),
        starved_s=max((record["starved_s"] for record in undone_records), default=0.0),
        ticks=injected_record.get("ticks"),
        waited_for=injected_record.get("waited_for", ""),
    )
