"""Completeness of the journals of a run: all records that its verdict is computed from must be
there.

The plan names the nodes, memberships name the workers, commits name the memberships. Each of these
has a file, and each file an end, or a reason to have none. Within a file the records of a step
follow from each other. Missing records cannot be judged.

-> journal/reader.py finds damaged and missing lines. experiment/judge/judge.py adds the check to
the outcome and takes the verdict from here. experiment/judge/command_coverage.py: the same for a
command. runlog/fault_verdict.py (fault_check): a fault without evidence, although no record is
missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from chaoskit.experiment.reference import floor, reference
from chaoskit.experiment.reference.floor import Floor
from chaoskit.experiment.reference.reference import Reference
from chaoskit.experiment.run.run import LATER, RawRun, digest_of
from chaoskit.experiment.twin.twin import Twin
from chaoskit.journal import FileCoverage, Record, WriterCoverage
from chaoskit.plaintext import plural
from chaoskit.runlog.history import History
from chaoskit.runlog.outcome import Check
from chaoskit.vocabulary import TRIGGER_PHASES, Event, Verdict

NAME = "journals are whole"
_SHOWN = 3

#: Names of checks that need every contribution of every worker.
_OF_LAST_RECORDS = (
    "every sample exactly once",
    "every contribution is in",
    "the batch keeps its size",
)
_FINISHED = frozenset({Event.COMMIT, Event.SKIP})


@dataclass(frozen=True)
class Coverage:
    """The parts of a run's records that are missing, in words.

    Attributes:
        blind: files, or all records of a kind that every run has. Results computed without them
            mean nothing, so the run is unknown, even if a check fails.
        gaps: records that do not follow from each other, or from the data that the run is compared
            with. A faulty runtime may have written them so, so a failed check counts for more.
        cut_nodes: nodes that were lost with records that had not been received yet. A check that
            fails for want of a last record means nothing.
    """

    blind: tuple[str, ...]
    gaps: tuple[str, ...]
    cut_nodes: tuple[str, ...] = ()

    def check(self, records: int, files: int) -> Check:
        """Return a check that passes if nothing is missing, and is unknown otherwise.

        Records that were lost with a node (``cut_nodes``) are not reported.

        Args:
            records: the number of records, for the detail.
            files: the number of journal files, for the detail.
        """
        problems = [*self.blind, *self.gaps]
        if problems:
            more = f" (and {len(problems) - _SHOWN} more)" if len(problems) > _SHOWN else ""
            return Check(
                name=NAME, verdict=Verdict.UNKNOWN, detail="; ".join(problems[:_SHOWN]) + more
            )
        passed_detail = f"{plural(records, 'record')} in {plural(files, 'file')}"
        return Check(name=NAME, verdict=Verdict.PASSED, detail=passed_detail)

    def excuse_failures(self, checks: Iterable[Check]) -> list[Check]:
        """Return the checks; failed ones that need records lost with a node become unknown."""
        return [
            self._as_unknown(check) if self._needs_lost_records(check) else check
            for check in checks
        ]

    def _needs_lost_records(self, check: Check) -> bool:
        """Return whether a failed check needs records that may have been lost with a node."""
        return (
            bool(self.cut_nodes)
            and check.verdict == Verdict.FAILED
            and check.name.endswith(_OF_LAST_RECORDS)
        )

    def _as_unknown(self, check: Check) -> Check:
        """Return the check as unknown, with the lost records in its detail."""
        detail = f"{check.detail}; the last records of {', '.join(self.cut_nodes)} were lost"
        return Check(name=check.name, verdict=Verdict.UNKNOWN, detail=detail)

    def verdict(self, checks: Sequence[Check]) -> Verdict:
        """Return the worst verdict of all checks.

        A failure counts as unknown if files or all records of a kind are missing (``blind``).
        """
        worst = Verdict.worst([check.verdict for check in checks])
        return Verdict.UNKNOWN if self.blind and worst == Verdict.FAILED else worst


@dataclass(frozen=True)
class Compared:
    """The data in the directory of a run that it is compared with.

    Attributes:
        twin: the unbroken run, or None.
        reference: the result of plain PyTorch, or None.
        floor: the distance between the ends of correct runs, or None.
        lacks_floor: the final state can be compared within a floor only, and there is none.
    """

    twin: Twin | None = None
    reference: Reference | None = None
    floor: Floor | None = None
    lacks_floor: bool = False


def coverage_of(run: RawRun, history: History, compared: Compared) -> Coverage:
    """Return, in words, the records of ``run`` that are missing or belong to another run.

    Args:
        run: the records of the run.
        history: its committed steps.
        compared: the data in its directory that it is compared with.
    """
    journals = _JournalRecords(run.records, run.coverage)
    has_end, ended_well = run.end is not None, run.end is not None and run.end.ok
    blind = [
        *damage(run.coverage),
        *_comparison_gaps(run, compared.twin, compared.reference),
        *(
            ["floor.json: the distance between the ends of correct runs is missing; see floor.log"]
            if compared.lacks_floor
            else []
        ),
        *_fault_gaps(run),
        *_coordinator_gaps(journals, has_end=has_end),
        *_node_gaps(journals),
        *_writer_gaps(journals),
        *_file_gaps(journals),
    ]
    gaps = [
        gap
        for worker in journals.members
        for gap in _worker_gaps(journals, worker, ended_well=ended_well)
    ]
    gaps += _foreign_results(run, history, compared)
    cut_nodes = dict.fromkeys(
        str(record["node"]) for record in run.records if record.event == Event.RECORDS_CUT
    )
    return Coverage(tuple(blind), (*gaps, *_membership_gaps(journals)), tuple(cut_nodes))


def _comparison_gaps(run: RawRun, twin: Twin | None, reference: Reference | None) -> Iterator[str]:
    """Yield, in words, missing and foreign parts of the plan and the data to compare with."""
    planned_id, is_late = run.twin_id, run.twin_id == LATER
    if twin is None and planned_id and not (is_late and (run.end is None or not run.end.ok)):
        yield "twin.json: the result of the unbroken run is missing"
    elif twin is not None and planned_id and not is_late and twin.run_id != planned_id:
        yield f"twin.json: it belongs to the run {twin.run_id[:8]}, not to {planned_id[:8]}"
    if twin is not None:
        yield from _twin_gaps(run, twin)
    if reference is None and run.experiment.reference != "off":
        yield "reference.json: the result of plain PyTorch is missing; see reference.log"
    if run.plan_digest and digest_of(run.directory) not in ("", run.plan_digest):
        yield "plan.json: it differs from the plan at the start of the run"


def _twin_gaps(run: RawRun, twin: Twin) -> Iterator[str]:
    """Yield, in words, what is missing in the result of the unbroken run.

    Its final state is needed only if a rank of this run has described its own.
    """
    steps = None if run.experiment.is_open_ended else run.experiment.steps
    if steps is not None and len(twin.losses) != steps:
        yield f"twin.json: it has the losses of {len(twin.losses)} steps, but the plan has {steps}"
    if not any(record.event == Event.STATE for record in run.records):
        return
    if not twin.ending:
        yield "twin.json: the final state of the unbroken run is missing"
    elif not twin.scalars:
        yield "twin.json: the final rates, schedules and counts of the unbroken run are missing"


def _fault_gaps(run: RawRun) -> Iterator[str]:
    """Yield, in words, each fault that acted without a record of whether it was undone.

    Nothing is yielded if the harness was lost, which another check reports.
    """
    undone = {record["fault"] for record in run.records if record.event == Event.UNDONE}
    for injection in run.injections:
        if (
            injection.target is not None
            and not injection.missed
            and injection.fault_id not in undone
            and not run.harness_lost
        ):
            yield f"harness: no record shows whether {injection.fault} was undone"


def _foreign_results(run: RawRun, history: History, compared: Compared) -> Iterator[str]:
    """Yield, in words, a floor and a reference of a run with other options, seed or samples."""
    if compared.floor is not None and not floor.belongs_to(compared.floor, run.experiment, history):
        yield "floor.json: it belongs to another run"
    if compared.reference is not None and not reference.belongs_to(
        compared.reference, run.experiment, history
    ):
        yield "reference.json: it belongs to another run"


class _JournalRecords:
    """The records of a run by the process that wrote them, and the losses among them.

    Attributes:
        files: source -> the readable part of its file.
        by_source: source -> its records, by time.
        plans: generation -> the record of its plan.
        lost_ns: lost worker -> the time of its loss.
        gone_ns: node -> the time of its last loss or eviction.
        started_by: worker -> the node that recorded its start.
        exited_workers: workers with an exit recorded by their node.
        recorded_events: the events that have any record.
        pids: worker -> the pids of its processes, as recorded by its node.
        ended_well: the job ended without a failure.
        trained_generations: generations in which steps were finished.
    """

    def __init__(self, records: Iterable[Record], files: Mapping[str, FileCoverage]) -> None:
        self.files = files
        self._reached: dict[str, list[tuple[Record, int]]] = {}
        self.by_source: dict[str, list[Record]] = defaultdict(list)
        self.plans: dict[int, Record] = {}
        self.lost_ns: dict[str, int] = {}
        self.gone_ns: dict[str, int] = {}
        self.started_by: dict[str, str] = {}
        self.exited_workers: set[str] = set()
        self.recorded_events: set[str] = set()
        self.pids: dict[str, list[int]] = defaultdict(list)
        self.ended_well = False
        self.trained_generations: set[int] = set()
        for record in records:
            self.by_source[record.source].append(record)
            self.recorded_events.add(record.event)
            match record.event:
                case Event.PLAN:
                    self.plans[record["generation"]] = record
                case Event.RECORD_LOST:  # all workers are given up, without a record for each
                    self.lost_ns.update(dict.fromkeys(self.members, record.t_ns))
                case Event.DETECTED:
                    self.lost_ns[record["worker"]] = record.t_ns
                case Event.WORKER_EXITED:
                    self.exited_workers.add(record["worker"])
                case Event.NODE_LOST | Event.EVICTED:
                    self.gone_ns[record["node"]] = record.t_ns
                case Event.JOB_ENDED:
                    self.ended_well = bool(record["ok"])
                case Event.WORKER_STARTED:
                    self.started_by[record["worker"]] = record.source
                    self.pids[record["worker"]].append(record["pid"])
                case Event.COMMIT | Event.SKIP:
                    self.trained_generations.add(record["generation"])

    @property
    def members(self) -> list[str]:
        """All workers that had a rank, in the order of the memberships."""
        workers = (member["worker"] for plan in self.plans.values() for member in plan["members"])
        return list(dict.fromkeys(workers))

    @property
    def unplanned(self) -> list[int]:
        """Generations in which steps were finished although no plan of them was recorded."""
        return sorted(self.trained_generations - self.plans.keys())

    @property
    def nodes(self) -> list[str]:
        """All nodes that had a rank."""
        names = (member["node"] for plan in self.plans.values() for member in plan["members"])
        return list(dict.fromkeys(names))

    def writers(self, source: str, role: str) -> list[WriterCoverage]:
        """Return the processes of a role that wrote to a file; empty if there is no such file."""
        file = self.files.get(source)
        return [] if file is None else [writer for writer in file.writers if writer.role == role]

    def reached(self, worker: str) -> list[tuple[Record, int]]:
        """Return records that show a worker's step, each with the number of steps before it."""
        if worker not in self._reached:
            self._reached[worker] = [*_reached(self.by_source[worker])]
        return self._reached[worker]

    def is_lost(self, worker: str) -> bool:
        """Return whether a loss, of the worker or its node, explains where its journal ends."""
        return worker in self.lost_ns or any(
            writer.node in self.gone_ns for writer in self.writers(worker, "worker")
        )

    def is_cut_off(self, worker: str) -> bool:
        """Return whether a worker's journal stops although the worker went on to the job's end."""
        ends = self.has(worker, Event.FINISHED, Event.LEFT, Event.FAILED)
        is_closed = any(writer.closed is not None for writer in self.writers(worker, "worker"))
        return self.ended_well and not (
            ends or is_closed or self.is_lost(worker) or self._is_released(worker)
        )

    def _is_released(self, worker: str) -> bool:
        """Return whether a worker left the membership and its node recorded its exit."""
        last_members = self.plans[max(self.plans)]["members"]
        return worker in self.exited_workers and all(
            member["worker"] != worker for member in last_members
        )

    def has(self, source: str, *events: Event) -> bool:
        """Return whether a file holds a record of one of these events."""
        return any(record.event in events for record in self.by_source[source])


def damage(files: Mapping[str, FileCoverage]) -> Iterator[str]:
    """Yield, in words, the unreadable and missing parts of each journal file.

    A torn last line is not reported if a process that wrote the file did not end in order.
    """
    for source, file in files.items():
        was_killed = any(writer.closed is None for writer in file.writers)
        bad_line_count = file.bad_lines - (file.torn and was_killed)
        if bad_line_count:
            yield f"{source}: {bad_line_count} damaged lines"
        if file.missing:
            yield f"{source}: {file.missing} records are missing"
        if any(writer.opened is None for writer in file.writers):
            yield f"{source}: the first record is missing"


def _coordinator_gaps(journals: _JournalRecords, *, has_end: bool) -> Iterator[str]:
    """Yield, in words, what is missing in the coordinator's journal.

    Args:
        journals: the records of the run.
        has_end: the harness recorded an end of the job.
    """
    writers = journals.writers("coordinator", "coordinator")
    if not writers:
        yield "coordinator: its journal is missing"
        return
    for generation in journals.unplanned:
        yield f"generation {generation}: steps were finished in it, but its plan is missing"
    if has_end and Event.JOB_ENDED not in journals.recorded_events:
        yield "coordinator: the end of the job is missing"


def _node_gaps(journals: _JournalRecords) -> Iterator[str]:
    """Yield, in words, each node without an agent's journal, and worker without a start.

    A worker needs no record of its start if its node was lost or evicted.
    """
    for node in journals.nodes:
        agents = journals.writers(node, "agent")
        if not agents:
            yield f"{node}: the journal of its agent is missing"
    for worker in journals.members:
        if worker not in journals.started_by and not any(
            writer.node in journals.gone_ns for writer in journals.writers(worker, "worker")
        ):
            yield f"{worker}: no node recorded its start"


def _writer_gaps(journals: _JournalRecords) -> Iterator[str]:
    """Yield, in words, each journal that another process wrote than the one its node started.

    Two journals that hold records of the same writer are reported, too.
    """
    sources: dict[str, str] = {}
    for source, file in journals.files.items():
        for writer in file.writers:
            if (first_source := sources.setdefault(writer.writer, source)) != source:
                yield f"{source}: it holds records of the writer of {first_source}"
            started_pids = journals.pids.get(source, ())
            if (
                started_pids
                and writer.opened is not None
                and writer.opened["pid"] not in started_pids
            ):
                started_in_words = ", ".join(map(str, started_pids))
                yield f"{source}: process {writer.opened['pid']} wrote it, but its node started {started_in_words}"


def _file_gaps(journals: _JournalRecords) -> Iterator[str]:
    """Yield, in words, each worker with a journal that is missing, cut off or out of order.

    A run in which no worker recorded that it was ready is reported, too.
    """
    for worker in journals.members:
        if not journals.writers(worker, "worker"):
            yield f"{worker}: it had a rank, but its journal is missing"
    if journals.members and not any(
        journals.has(worker, Event.READY) for worker in journals.members
    ):
        yield "no worker recorded that it was ready"
    for worker in journals.members:
        yield from _skipped_steps(worker, journals.reached(worker))
        if journals.writers(worker, "worker") and journals.is_cut_off(worker):
            yield f"{worker}: its journal has no end, although it was not lost"


def _worker_gaps(journals: _JournalRecords, worker: str, *, ended_well: bool) -> Iterator[str]:
    """Yield, in words, the gaps in the journal of a worker with a rank.

    A worker without a journal has none: :func:`_file_gaps` reports it.
    """
    writers = journals.writers(worker, "worker")
    if not writers:
        return
    yield from _returned_steps(worker, journals.reached(worker))
    if not journals.has(worker, Event.READY):
        yield f"{worker}: it had a rank, but did not record that it was ready"
    is_lost = journals.is_lost(worker)
    last_plan = journals.plans[max(journals.plans)]
    is_last_member = any(member["worker"] == worker for member in last_plan["members"])
    # a worker that joined just before the end did not train
    has_trained = journals.has(worker, *_FINISHED)
    if (
        ended_well
        and is_last_member
        and has_trained
        and not is_lost
        and not journals.has(worker, Event.FINISHED)
    ):
        yield f"{worker}: it was a member at the end, but did not finish"
    yield from _steps_without_contribution(worker, journals.by_source[worker])
    yield from _ends_without_state(worker, journals.by_source[worker])


def _skipped_steps(worker: str, reached_records: Iterable[tuple[Record, int]]) -> Iterator[str]:
    """Yield, in words, each step in a worker's journal that lacks the steps before it."""
    for record, step_count in reached_records:
        step = record["step"]
        match record.event:
            case Event.REDUCE if step > step_count:
                yield f"{worker}: step {step} comes after {step_count} steps"
            case Event.HOOK_STOPPED if (
                record["phase"] in TRIGGER_PHASES and step != step_count
            ):  # outside these phases the worker has no step yet
                yield f"{worker}: it waited in step {step}, but recorded {step_count} steps"
            case Event.FINISHED if step != step_count:
                yield f"{worker}: it finished after {step} steps, but recorded {step_count}"


def _returned_steps(worker: str, reached_records: Iterable[tuple[Record, int]]) -> Iterator[str]:
    """Yield, in words, each step of a worker that comes again although no state was restored."""
    for record, step_count in reached_records:
        if record.event == Event.REDUCE and record["step"] < step_count:
            yield f"{worker}: step {record['step']} comes after {step_count} steps"


def _reached(records: Iterable[Record]) -> Iterator[tuple[Record, int]]:
    """Yield records that show the step of a rank, each with the number of steps before it."""
    step_count = 0
    for record in records:
        match record.event:
            case Event.RESTORED | Event.ADOPT:
                step_count = record["step"]
            case Event.REDUCE:
                yield record, step_count
                step_count = record["step"]
            case Event.COMMIT | Event.SKIP:
                step_count = record["step"] + 1
            case Event.HOOK_STOPPED | Event.FINISHED:
                yield record, step_count


def _steps_without_contribution(worker: str, records: Iterable[Record]) -> Iterator[str]:
    """Yield, in words, each step that a worker finished without a contribution."""
    contributed = {
        (record["step"], record["generation"]) for record in records if record.event == Event.REDUCE
    }
    for record in records:
        if record.event in _FINISHED and (record["step"], record["generation"]) not in contributed:
            yield f"{worker}: it finished step {record['step']} without a contribution"


def _ends_without_state(worker: str, records: Sequence[Record]) -> Iterator[str]:
    """Yield, in words, each end of a worker without a description of its state."""
    described_steps = {record["step"] for record in records if record.event == Event.STATE}
    for record in records:
        if record.event == Event.FINISHED and record["step"] not in described_steps:
            yield f"{worker}: it finished after {record['step']} steps, but did not describe its state"


def _membership_gaps(journals: _JournalRecords) -> Iterator[str]:
    """Yield, in words, each member of a generation that lacks the record of a step.

    Excused are the last step before a newer generation, and all steps of a lost member after its
    own last one.
    """
    finished_steps: dict[int, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for source, records in journals.by_source.items():
        for record in records:
            if record.event in _FINISHED:
                finished_steps[record["generation"]][source].add(record["step"])
    newest = max(journals.plans, default=0)
    for generation, by_worker in sorted(finished_steps.items()):
        plan = journals.plans.get(generation)
        if plan is None:
            continue
        steps = set().union(*by_worker.values())
        in_flight = {max(steps)} if generation < newest else set()
        for member in plan["members"]:
            worker = member["worker"]
            missing = steps - by_worker[worker] - in_flight
            if worker in journals.lost_ns or member["node"] in journals.gone_ns:
                own_steps = by_worker[worker]
                missing = {step for step in missing if own_steps and step < max(own_steps)}
            if missing:
                yield f"{worker}: its record of step {min(missing)} in generation {generation} is missing"
