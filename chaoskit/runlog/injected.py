"""What the journals tell of each planned fault: where and when it acted, what showed it, and whether it was undone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from chaoskit.experiment.plan.plan import fault_id
from chaoskit.faults.base import Fault
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
from chaoskit.faults.nodes.coordinator import CoordinatorFault
from chaoskit.journal import Record
from chaoskit.vocabulary import Event


@dataclass(frozen=True)
class Struck:
    """What a fault struck first.

    Attributes:
        worker: name of the process; with its rank, node and pid at that moment.
        step, phase: where it was, as far as the harness knew.
        waiting: the worker that stood at the fault's hook, or "".
        injected_ns: when the fault acted first; done_ns: when that act was over.
        claims: every worker that it struck -> when it last did.
        struck_nodes: that it struck as a whole.
        acted_ns: when it acted last; what lasts, such as a limit, acts as long as it is in force.
        lifted_ns: when it ended while the run went on; 0 if it did not.
        starved_s: for so long the process had no CPU, of what its board showed last.
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


@dataclass(frozen=True)
class InjectionRecord:
    """A planned fault, and what came of it.

    Attributes:
        target: what it struck; None if no journal tells of an act.
        effective_ns: since when its effect was seen; None without evidence. observed: what was seen.
        subject: what that is about; None without evidence, or where it cannot be read.
        missed: why it did not act, or too late.
        undone: whether nothing of it is left.
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
        """Whether the evidence is about what the fault struck; True without evidence."""
        struck, subject = self.target, self.subject
        if struck is None or not self.observed:
            return True
        match subject:
            case RankProcess(worker, rank, pid):
                return (worker, rank, pid) == (struck.worker, struck.rank, struck.pid)
            case WholeNode(node):
                return node in struck.struck_nodes or node == struck.node
            case NetworkPath(nodes):
                return struck.node in nodes
            case CoordinatorProcess():
                return isinstance(self.fault, CoordinatorFault)
            case SizeRequest(fault):
                return fault == self.fault_id
            case SharedStore() | ApiServer():
                return True
        return False

    @property
    def why_missed(self) -> str:
        """Why it did not act."""
        return self.missed or f"no rank {self.fault.rank} was there {self.fault.moment}"


def injections(faults: Sequence[Fault], records: Iterable[Record]) -> list[InjectionRecord]:
    """Return one for each fault, in the order of the plan."""
    told: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.event in _TELLING:
            told[record["fault"]].append(record)
    return [
        _injection(fault_id(number), fault, told[fault_id(number)])
        for number, fault in enumerate(faults)
    ]


_TELLING = frozenset(
    {Event.INJECTED, Event.ACTED, Event.EVIDENCE, Event.FAULT_MISSED, Event.LIFTED, Event.UNDONE}
)


def _injection(name: str, fault: Fault, records: Sequence[Record]) -> InjectionRecord:
    injected = [record for record in records if record.event == Event.INJECTED]
    evidence = [
        record for record in records if record.event == Event.EVIDENCE and record["observed"]
    ]
    missed = [record for record in records if record.event == Event.FAULT_MISSED]
    undone = [record for record in records if record.event == Event.UNDONE]
    last = (
        evidence[-1] if evidence and injected else None
    )  # of an act of which nothing is known it shows nothing
    return InjectionRecord(
        fault_id=name,
        fault=fault,
        target=_struck(fault, injected[0], records) if injected else None,
        effective_ns=last.t_ns if last is not None else None,
        observed=str(last["observed"]) if last is not None else "",
        subject=_subject(last) if last is not None else None,
        missed=str(missed[-1]["reason"]) if missed else "",
        undone=all(record["ok"] for record in undone),
    )


def _subject(evidence: Record) -> Subject | None:
    try:
        subject: Subject = msgspec.convert(evidence["evidence"]["subject"], Subject)
    except (KeyError, TypeError, msgspec.ValidationError):
        return None
    return subject


def _struck(fault: Fault, injected: Record, records: Sequence[Record]) -> Struck:
    acts = [injected, *(record for record in records if record.event == Event.ACTED)]
    lifted = [record.t_ns for record in records if record.event == Event.LIFTED]
    undone = [record for record in records if record.event == Event.UNDONE]
    acted_ns = [act.t_ns for act in acts] + [record["acted_ns"] for record in undone]
    nodes = {*injected["nodes"], *(act["node"] for act in acts if fault.whole_node)}
    place = {
        name: injected[name]
        for name in ("worker", "rank", "node", "pid", "step", "phase", "waiting")
    }
    return Struck(
        **place,
        injected_ns=injected.t_ns,
        done_ns=injected["done_ns"],
        claims={act["worker"]: act.t_ns for act in acts},
        struck_nodes=frozenset(nodes or {injected["node"]}),
        acted_ns=max(acted_ns),
        lifted_ns=max(lifted, default=0),
        starved_s=max((record["starved_s"] for record in undone), default=0.0),
    )
