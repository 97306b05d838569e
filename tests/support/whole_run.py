"""Records of a run of two ranks, written by hand: rank 1 is killed and replaced, and the judge
passes the run.

A test drops, changes or adds records, and makes a :class:`RawRun` of what is left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from chaoskit.experiment.plan.plan import Experiment, plan_experiment
from chaoskit.experiment.run.run import RawRun
from chaoskit.journal import FileCoverage, Journals, Record, WriterCoverage
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import EndJob
from faults import Kill
from faults.base import Fault

STEPS = 4
FAULT = Kill(rank=1, at_step=2)
STARTED_NS = 10**9
ENDED = EndJob(True, "every rank committed the last step")
#: The processes: file -> role, node, pid.
PROCESSES = {
    "harness": ("harness", "", 1),
    "coordinator": ("coordinator", "", 2),
    "node0": ("agent", "node0", 10),
    "node1": ("agent", "node1", 11),
    "node0.0": ("worker", "node0", 100),
    "node1.0": ("worker", "node1", 101),
    "node0.1": ("worker", "node0", 102),
}


def record(at_ms: float, source: str, event: Event, /, **fields: Any) -> Record:
    """Return a record, ``at_ms`` milliseconds after the start of the run."""
    return Record(STARTED_NS + int(at_ms * 1e6), source, event, fields)


def whole_records() -> list[Record]:
    """Return all records of the run, by time."""
    requested = {
        "twin": "",
        "plan": "",
        "substrate": "local",
        "nodes": 2,
        "spares": 1,
        "steps": STEPS,
    }
    lines = [record(0, "harness", Event.STARTED, run_id="this run", unix_ns=0, **requested)]
    for source, (role, node, pid) in PROCESSES.items():
        versions = {
            "chaoskit": "1.0",
            "torch": "2.0",
            "python": "3.11",
            "kernel": "6",
            "machine": "a processor",
        }
        place = {"role": role, "node": node, "pid": pid, "unix_ns": 1_700_000_000 * 10**9}
        lines.append(record(1, source, Event.OPENED, **place, **versions))
        if role == "worker":
            lines.append(record(2, node, Event.WORKER_STARTED, worker=source, pid=pid))
            lines.append(record(3, source, Event.READY, worker=source, pid=pid))
    lines += [plan(4, 1, "node0.0", "node1.0"), *grouped(5, 1, "node0.0", "node1.0")]
    for step in (0, 1):
        lines += step_of(10 + 10 * step, step, 1, "node0.0", "node1.0")
    lines += [
        hook(30, "node1.0", generation=1),
        record(31, "harness", Event.INJECTED, **STRUCK),
        record(
            33,
            "harness",
            Event.EVIDENCE,
            fault="fault0",
            observed="pid 101 was killed by SIGKILL",
            evidence=SHOWN,
        ),
        record(
            33,
            "node1",
            Event.WORKER_EXITED,
            worker="node1.0",
            pid=101,
            how="killed",
            status="SIGKILL",
        ),
        record(
            35,
            "coordinator",
            Event.DETECTED,
            worker="node1.0",
            rank=1,
            cause="exited",
            detail="its latch broke",
        ),
        plan(36, 2, "node0.0", "node0.1"),
        record(37, "node0.0", Event.QUIESCED, generation=1, rank=0, error=""),
        restored(38, "node0.1", 2),
        *grouped(40, 2, "node0.0", "node0.1"),
    ]
    for step in (2, 3):
        lines += step_of(30 + 10 * step, step, 2, "node0.0", "node0.1")
    lines.append(
        record(
            65,
            "coordinator",
            Event.HANG_LIMITS,
            limits_ms={"forward": 500},
            longest_ms={},
            suspects=3,
        )
    )
    for worker in ("node0.0", "node0.1"):
        lines += ending(70, worker)
    lines.append(record(75, "coordinator", Event.JOB_ENDED, ok=True, reason=ENDED.reason))
    lines.append(
        record(
            76, "harness", Event.UNDONE, fault="fault0", ok=True, acted_ns=STRUCK_NS, starved_s=0.0
        )
    )
    for worker in ("node0.0", "node0.1"):
        lines.append(
            record(
                77,
                "node0",
                Event.WORKER_EXITED,
                worker=worker,
                pid=PROCESSES[worker][2],
                how="exited",
            )
        )
    lines.append(
        record(
            78, "harness", Event.RUN_ENDED, reason="ended", ok=True, detail=ENDED.reason, exits={}
        )
    )
    lines += [
        record(80, source, Event.CLOSED, reason="") for source in PROCESSES if source != "node1.0"
    ]
    return by_time(lines)


STRUCK_NS = STARTED_NS + 31_000_000
STRUCK = {
    "fault": "fault0",
    "what": str(FAULT),
    "worker": "node1.0",
    "rank": 1,
    "node": "node1",
    "pid": 101,
    "step": 2,
    "phase": "forward",
    "waiting": "node1.0",
    "nodes": [],
    "done_ns": STRUCK_NS + 1_000_000,
}
SHOWN = {"subject": {"type": "rank", "worker": "node1.0", "rank": 1, "pid": 101}}


def plan(at_ms: float, generation: int, *workers: str) -> Record:
    """Return the membership of these workers, each with one shard."""
    members = [
        {"rank": rank, "worker": worker, "node": worker.partition(".")[0], "shards": [rank]}
        for rank, worker in enumerate(workers)
    ]
    return record(
        at_ms,
        "coordinator",
        Event.PLAN,
        generation=generation,
        abort=True,
        members=members,
        reason="",
    )


def grouped(at_ms: float, generation: int, *workers: str) -> list[Record]:
    """Return the records of ranks and the coordinator about a usable group."""
    place = {"generation": generation, "world": len(workers)}
    ready = [
        record(at_ms, worker, Event.REGROUPED, rank=rank, **place)
        for rank, worker in enumerate(workers)
    ]
    return [*ready, record(at_ms + 0.5, "coordinator", Event.SETTLED, generation=generation)]


def step_of(at_ms: float, step: int, generation: int, *workers: str) -> list[Record]:
    """Return the ranks' records of a step: each contributes its shard, and commits."""
    lines = []
    for rank, worker in enumerate(workers):
        place = {"step": step, "generation": generation, "rank": rank}
        samples = [10 * step + 2 * rank, 10 * step + 2 * rank + 1]
        lines.append(
            record(
                at_ms + 1,
                worker,
                Event.REDUCE,
                **place,
                shards=[rank],
                samples=samples,
                dataset=100,
            )
        )
        numbers = {"loss": 5.0 - step, "grad_sum": step, "stall_ms": 0.0}
        lines.append(
            record(at_ms + 2, worker, Event.COMMIT, **place, world=len(workers), **numbers)
        )
    return lines


def hook(at_ms: float, worker: str, **fields: Any) -> Record:
    """Return the record of a worker that waits at the hook of the fault."""
    place = {"fault": "fault0", "step": 2, "rank": 1, "phase": "forward", "peer": ""}
    return record(at_ms, worker, Event.HOOK_STOPPED, **place | fields)


def restored(at_ms: float, worker: str, step: int) -> Record:
    """Return the record of a worker that has taken over the state of rank 0."""
    place = {"generation": 2, "rank": 1, "step": step, "size_bytes": 1000}
    return record(
        at_ms,
        worker,
        Event.RESTORED,
        **place,
        transport="shared memory",
        source="node0.0",
        checksum="",
    )


def ending(at_ms: float, worker: str, step: int = STEPS) -> list[Record]:
    """Return the records of a worker that describes its state and finishes."""
    digests = {"weights_digest": "the weights", "state_digest": "the state"}
    numbers = [0.0, *[1.0] * 9]
    tensors = {"model/weight": [[0.0], [4.0], numbers]}
    place = {"step": step, "generation": 2}
    return [
        record(
            at_ms, worker, Event.STATE, **place, scalars="the scalars", rates=[0.1], tensors=tensors
        ),
        record(
            at_ms + 1,
            worker,
            Event.FINISHED,
            step=step,
            **digests,
            cut_short_by="",
            halted=False,
            sources={},
        ),
    ]


def by_time(lines: Iterable[Record]) -> list[Record]:
    """Return records in the order of their times; records of the same time keep their order."""
    return sorted(lines, key=lambda line: line.t_ns)


def without(
    lines: Iterable[Record], event: Event, source: str = "", /, **fields: Any
) -> list[Record]:
    """Return the records except those with this event, source and fields."""
    return [line for line in lines if not _is(line, event, source, fields)]


def changed(
    lines: Iterable[Record], event: Event, source: str, by: Callable[[Record], Record]
) -> list[Record]:
    """Return the records, with ``by`` applied to those with this event and source."""
    return by_time(by(line) if _is(line, event, source, {}) else line for line in lines)


def fields(**values: Any) -> Callable[[Record], Record]:
    """Return a function that changes these fields of a record."""
    return lambda line: msgspec.structs.replace(line, fields=line.fields | values)


def moved(by_ms: float) -> Callable[[Record], Record]:
    """Return a function that moves the time of a record."""
    return lambda line: msgspec.structs.replace(line, t_ns=line.t_ns + int(by_ms * 1e6))


def _is(line: Record, event: Event, source: str, values: dict[str, Any]) -> bool:
    same = all(line.get(name) == value for name, value in values.items())
    return line.event == event and source in ("", line.source) and same


def files_of(lines: Iterable[Record]) -> dict[str, FileCoverage]:
    """Return the coverage of whole files that hold these records, one file a process."""
    by_source: dict[str, list[Record]] = defaultdict(list)
    for line in lines:
        by_source[line.source].append(line)
    files = {}
    for source, records_of_source in by_source.items():
        opened = next((line for line in records_of_source if line.event == Event.OPENED), None)
        closed = next((line for line in records_of_source if line.event == Event.CLOSED), None)
        writer = WriterCoverage(
            writer=f"writer of {source}",
            records=len(records_of_source),
            missing=0,
            repeated=0,
            first_ns=records_of_source[0].t_ns,
            last_ns=records_of_source[-1].t_ns,
            opened=opened,
            closed=closed,
        )
        files[source] = FileCoverage(source=source, bad_lines=0, torn=False, writers=(writer,))
    return files


def experiment_of(faults: Sequence[Fault] = (FAULT,), **settings: Any) -> Experiment:
    """Return the plan of the run."""
    size: dict[str, Any] = {"nodes": 2, "shards": 2, "spares": 1, "steps": STEPS}
    return plan_experiment("gpt", faults=faults, **size | settings)


PLAN = experiment_of()


def run_of(
    lines: Sequence[Record],
    *,
    files: dict[str, FileCoverage] | None = None,
    experiment: Experiment | None = None,
    directory: Path = Path("/nowhere"),
    end: EndJob | None = ENDED,
    deadline_passed: bool = False,
    harness_lost: bool = False,
) -> RawRun:
    """Return the run that left these records in files that are whole, or in ``files``."""
    ended_ns = STARTED_NS + 78_000_000
    run = RawRun(
        experiment or PLAN, directory, STARTED_NS, ended_ns, end, deadline_passed, harness_lost
    )
    run.__dict__["journals"] = Journals(by_time(lines), files_of(lines) if files is None else files)
    return run
