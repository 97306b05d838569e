"""Whether the journals of a run tell all that its verdict is computed from. What is missing cannot be judged.

The plan names the nodes, memberships name the workers, commits name the memberships: each has its file, and each file
an end, or a reason to have none. Within a file the records of a step follow from each other.
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

#: Names of checks that ask each worker for each of its contributions.
_OF_LAST_RECORDS = (
    "every sample exactly once",
    "every contribution is in",
    "the batch keeps its size",
)
_FINISHED = frozenset({Event.COMMIT, Event.SKIP})


@dataclass(frozen=True)
class Coverage:
    """What is missing, in words.

    Attributes:
        blind: files, or all records of a kind that every run has. What is computed without them says nothing, so the
            run is unknown, also where a check fails.
        gaps: records that do not follow from each other, or from what the run is compared with. A runtime that is wrong
            may have written them so: a check that fails counts for more.
        cut: nodes that went with records which had not come from them yet. What fails for want of a last record says
            nothing.
    """

    blind: tuple[str, ...]
    gaps: tuple[str, ...]
    cut: tuple[str, ...] = ()

    def check(self, records: int, files: int) -> Check:
        """Passed if nothing is missing; else unknown."""
        found = [*self.blind, *self.gaps]
        if found:
            more = f" (and {len(found) - _SHOWN} more)" if len(found) > _SHOWN else ""
            return Check(
                name=NAME, verdict=Verdict.UNKNOWN, detail="; ".join(found[:_SHOWN]) + more
            )
        fine = f"{plural(records, 'record')} in {plural(files, 'file')}"
        return Check(name=NAME, verdict=Verdict.PASSED, detail=fine)

    def spare(self, checks: Iterable[Check]) -> list[Check]:
        """The checks. Those that fail where last records of a worker are missing are unknown, if a node took some."""
        return [self._spared(check) if self._may_lack(check) else check for check in checks]

    def _may_lack(self, check: Check) -> bool:
        return (
            bool(self.cut)
            and check.verdict == Verdict.FAILED
            and check.name.endswith(_OF_LAST_RECORDS)
        )

    def _spared(self, check: Check) -> Check:
        detail = f"{check.detail}; the last records of {', '.join(self.cut)} were lost"
        return Check(name=check.name, verdict=Verdict.UNKNOWN, detail=detail)

    def verdict(self, checks: Sequence[Check]) -> Verdict:
        """The worst of all. Where journals are missing, what fails may fail for that."""
        worst = Verdict.worst([check.verdict for check in checks])
        return Verdict.UNKNOWN if self.blind and worst == Verdict.FAILED else worst


@dataclass(frozen=True)
class Compared:
    """What lies in the directory of a run to compare it with.

    Attributes:
        lacks_floor: its final state can be compared within a floor only, and there is none.
    """

    twin: Twin | None = None
    reference: Reference | None = None
    floor: Floor | None = None
    lacks_floor: bool = False


def coverage_of(run: RawRun, history: History, compared: Compared) -> Coverage:
    """What is missing in the directory of ``run``, or is of another run."""
    story = _Story(run.records, run.coverage)
    is_over, ended_well = run.end is not None, run.end is not None and run.end.ok
    blind = [
        *damage(run.coverage),
        *_compared(run, compared.twin, compared.reference),
        *(
            ["floor.json: how far right runs end apart is missing; floor.log may say why"]
            if compared.lacks_floor
            else []
        ),
        *_faults(run),
        *_coordinators(story, ended=is_over),
        *_nodes(story),
        *_writers(story),
        *_files(story),
    ]
    gaps = [
        gap for worker in story.members for gap in _worker(story, worker, ended_well=ended_well)
    ]
    gaps += _foreign(run, history, compared)
    cut = dict.fromkeys(str(one["node"]) for one in run.records if one.event == Event.RECORDS_CUT)
    return Coverage(tuple(blind), (*gaps, *_memberships(story)), tuple(cut))


def _compared(run: RawRun, twin: Twin | None, plain: Reference | None) -> Iterator[str]:
    """What the run was to be compared with, and with which it must be that."""
    wanted, is_late = run.twin_id, run.twin_id == LATER
    if twin is None and wanted and not (is_late and (run.end is None or not run.end.ok)):
        yield "twin.json: what the unbroken run did is missing"
    elif twin is not None and wanted and not is_late and twin.run_id != wanted:
        yield f"twin.json: it is of the run {twin.run_id[:8]}, not of {wanted[:8]}"
    if twin is not None:
        yield from _cut(run, twin)
    if plain is None and run.experiment.reference != "off":
        yield "reference.json: what plain PyTorch came to is missing; reference.log may say why"
    if run.plan_digest and digest_of(run.directory) not in ("", run.plan_digest):
        yield "plan.json: it is another one than the run had"


def _cut(run: RawRun, twin: Twin) -> Iterator[str]:
    steps = None if run.experiment.is_open_ended else run.experiment.steps
    if steps is not None and len(twin.losses) != steps:
        yield f"twin.json: it has the losses of {len(twin.losses)} steps, and the run was to have {steps}"
    if not any(record.event == Event.STATE for record in run.records):
        return
    if not twin.ending:
        yield "twin.json: it does not tell with which state the unbroken run ended"
    elif not twin.scalars:
        yield "twin.json: it does not tell with which rates, schedules and counts the unbroken run ended"


def _faults(run: RawRun) -> Iterator[str]:
    """Of each fault that acted the harness says whether anything of it was left."""
    undone = {record["fault"] for record in run.records if record.event == Event.UNDONE}
    for one in run.injections:
        if (
            one.target is not None
            and not one.missed
            and one.fault_id not in undone
            and not run.harness_lost
        ):
            yield f"harness: it does not tell whether {one.fault} was undone"


def _foreign(run: RawRun, history: History, compared: Compared) -> Iterator[str]:
    """What plain PyTorch has trained with other options, another seed or other samples than the journals tell."""
    if compared.floor is not None and not floor.is_of(compared.floor, run.experiment, history):
        yield "floor.json: it is of another run"
    if compared.reference is not None and not reference.is_of(
        compared.reference, run.experiment, history
    ):
        yield "reference.json: it is of another run"


class _Story:
    """Records by the process that wrote them, and what was lost."""

    def __init__(self, records: Iterable[Record], files: Mapping[str, FileCoverage]) -> None:
        self.files = files
        self._reached: dict[str, list[tuple[Record, int]]] = {}
        self.of: dict[str, list[Record]] = defaultdict(list)
        self.plans: dict[int, Record] = {}
        self.lost: dict[str, int] = {}  # worker -> when
        self.gone: dict[str, int] = {}  # node -> when it was lost or evicted last
        self.started: dict[str, str] = {}  # worker -> the node whose agent started it
        self.exited: set[str] = set()  # workers of which their node tells that they ended
        self.told: set[str] = set()
        self.pids: dict[str, list[int]] = defaultdict(
            list
        )  # worker -> processes, by the word of its node
        self.ended_well = False
        self.trained: set[int] = set()  # memberships in which steps were finished
        for record in records:
            self.of[record.source].append(record)
            self.told.add(record.event)
            match record.event:
                case Event.PLAN:
                    self.plans[record["generation"]] = record
                case (
                    Event.RECORD_LOST
                ):  # all workers of before are given up, and nothing tells of each
                    self.lost.update(dict.fromkeys(self.members, record.t_ns))
                case Event.DETECTED:
                    self.lost[record["worker"]] = record.t_ns
                case Event.WORKER_EXITED:
                    self.exited.add(record["worker"])
                case Event.NODE_LOST | Event.EVICTED:
                    self.gone[record["node"]] = record.t_ns
                case Event.JOB_ENDED:
                    self.ended_well = bool(record["ok"])
                case Event.WORKER_STARTED:
                    self.started[record["worker"]] = record.source
                    self.pids[record["worker"]].append(record["pid"])
                case Event.COMMIT | Event.SKIP:
                    self.trained.add(record["generation"])

    @property
    def members(self) -> list[str]:
        """Every worker that had a rank, in the order of the memberships."""
        named = (member["worker"] for plan in self.plans.values() for member in plan["members"])
        return list(dict.fromkeys(named))

    @property
    def unplanned(self) -> list[int]:
        """Memberships in which steps were finished, and of which no plan tells."""
        return sorted(self.trained - self.plans.keys())

    @property
    def nodes(self) -> list[str]:
        """Every node on which a rank was."""
        named = (member["node"] for plan in self.plans.values() for member in plan["members"])
        return list(dict.fromkeys(named))

    def writers(self, source: str, role: str) -> list[WriterCoverage]:
        """Processes of that role that wrote to a file."""
        file = self.files.get(source)
        return [] if file is None else [writer for writer in file.writers if writer.role == role]

    def reached(self, worker: str) -> list[tuple[Record, int]]:
        """What tells in which step a worker is, each with the steps that were committed before it."""
        if worker not in self._reached:
            self._reached[worker] = [*_reached(self.of[worker])]
        return self._reached[worker]

    def is_lost(self, worker: str) -> bool:
        """Whether a loss, of itself or its node, explains where its journal ends."""
        return worker in self.lost or any(
            one.node in self.gone for one in self.writers(worker, "worker")
        )

    def is_cut_off(self, worker: str) -> bool:
        """Whether its journal stops although it went on, while the job came to its end."""
        ends = self.has(worker, Event.FINISHED, Event.LEFT, Event.FAILED)
        is_closed = any(one.closed is not None for one in self.writers(worker, "worker"))
        return self.ended_well and not (
            ends or is_closed or self.is_lost(worker) or self._is_released(worker)
        )

    def _is_released(self, worker: str) -> bool:
        """Whether the last membership has no place for it, and its node tells that it ended."""
        last = self.plans[max(self.plans)]["members"]
        return worker in self.exited and all(member["worker"] != worker for member in last)

    def has(self, source: str, *events: Event) -> bool:
        """Whether one of these records is in that file."""
        return any(record.event in events for record in self.of[source])


def damage(files: Mapping[str, FileCoverage]) -> Iterator[str]:
    """What cannot be read of journal files, whatever they tell."""
    for source, file in files.items():
        killed = any(writer.closed is None for writer in file.writers)
        bad = file.bad_lines - (file.torn and killed)
        if bad:
            yield f"{source}: {bad} damaged lines"
        if file.missing:
            yield f"{source}: {file.missing} records are missing"
        if any(writer.opened is None for writer in file.writers):
            yield f"{source}: the begin is missing"


def _coordinators(story: _Story, *, ended: bool) -> Iterator[str]:
    writers = story.writers("coordinator", "coordinator")
    if not writers:
        yield "no coordinator has written anything"
        return
    for generation in story.unplanned:
        yield f"generation {generation}: steps were finished in it, and no plan tells of it"
    if ended and Event.JOB_ENDED not in story.told:
        yield "coordinator: the end of the job is missing"


def _nodes(story: _Story) -> Iterator[str]:
    for node in story.nodes:
        agents = story.writers(node, "agent")
        if not agents:
            yield f"{node}: its agent has written nothing"
    for worker in story.members:
        if worker not in story.started and not any(
            one.node in story.gone for one in story.writers(worker, "worker")
        ):
            yield f"{worker}: no node tells that it started it"


def _writers(story: _Story) -> Iterator[str]:
    """Each journal is of the process that its node started, and of no other one."""
    known: dict[str, str] = {}
    for source, file in story.files.items():
        for writer in file.writers:
            if (other := known.setdefault(writer.writer, source)) != source:
                yield f"{source}: it holds what the writer of {other} has written"
            told = story.pids.get(source, ())
            if told and writer.opened is not None and writer.opened["pid"] not in told:
                started = ", ".join(map(str, told))
                yield f"{source}: it is of process {writer.opened['pid']}, and its node started {started}"


def _files(story: _Story) -> Iterator[str]:
    """Each worker that had a rank has a file, and was ready first."""
    for worker in story.members:
        if not story.writers(worker, "worker"):
            yield f"{worker}: it had a rank, and has written nothing"
    if story.members and not any(story.has(worker, Event.READY) for worker in story.members):
        yield "no worker says that it was ready"
    for worker in story.members:
        yield from _leaps(worker, story.reached(worker))
        if story.writers(worker, "worker") and story.is_cut_off(worker):
            yield f"{worker}: its journal has no end, and it was not lost"


def _worker(story: _Story, worker: str, *, ended_well: bool) -> Iterator[str]:
    writers = story.writers(worker, "worker")
    if not writers:
        return
    yield from _returns(worker, story.reached(worker))
    if not story.has(worker, Event.READY):
        yield f"{worker}: it had a rank, and was not ready"
    is_lost = story.is_lost(worker)
    last = story.plans[max(story.plans)]
    in_last = any(member["worker"] == worker for member in last["members"])
    trained = story.has(worker, *_FINISHED)  # one that came just before the end did not
    if ended_well and in_last and trained and not is_lost and not story.has(worker, Event.FINISHED):
        yield f"{worker}: it was there at the end, and did not finish"
    yield from _steps(worker, story.of[worker])
    yield from _undescribed(worker, story.of[worker])


def _leaps(worker: str, told: Iterable[tuple[Record, int]]) -> Iterator[str]:
    """Within one file, steps that are told of by what comes after them only."""
    for record, reached in told:
        step = record["step"]
        match record.event:
            case Event.REDUCE if step > reached:
                yield f"{worker}: step {step} comes after {reached} steps"
            case Event.HOOK_STOPPED if (
                record["phase"] in TRIGGER_PHASES and step != reached
            ):  # else it has no step yet
                yield f"{worker}: it stood in step {step}, and tells of {reached} steps"
            case Event.FINISHED if step != reached:
                yield f"{worker}: it finished after {step} steps, and tells of {reached}"


def _returns(worker: str, told: Iterable[tuple[Record, int]]) -> Iterator[str]:
    """Within one file, steps that come again though no state was taken over."""
    for record, reached in told:
        if record.event == Event.REDUCE and record["step"] < reached:
            yield f"{worker}: step {record['step']} comes after {reached} steps"


def _reached(records: Iterable[Record]) -> Iterator[tuple[Record, int]]:
    """What tells in which step a rank is, each with the steps that were committed before it."""
    reached = 0
    for record in records:
        match record.event:
            case Event.RESTORED | Event.ADOPT:
                reached = record["step"]
            case Event.REDUCE:
                yield record, reached
                reached = record["step"]
            case Event.COMMIT | Event.SKIP:
                reached = record["step"] + 1
            case Event.HOOK_STOPPED | Event.FINISHED:
                yield record, reached


def _steps(worker: str, records: Iterable[Record]) -> Iterator[str]:
    """Within one file: a step that was finished was contributed to."""
    contributed = {(one["step"], one["generation"]) for one in records if one.event == Event.REDUCE}
    for record in records:
        if record.event in _FINISHED and (record["step"], record["generation"]) not in contributed:
            yield f"{worker}: it finished step {record['step']} without a contribution"


def _undescribed(worker: str, records: Sequence[Record]) -> Iterator[str]:
    """Within one file: a rank that finishes describes its state first."""
    described = {record["step"] for record in records if record.event == Event.STATE}
    for record in records:
        if record.event == Event.FINISHED and record["step"] not in described:
            yield f"{worker}: it finished after {record['step']} steps, and does not describe the state behind them"


def _memberships(story: _Story) -> Iterator[str]:
    """Each step of a membership is told of by all its members, but for those that were lost, and the step in flight."""
    finished: dict[int, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for source, records in story.of.items():
        for record in records:
            if record.event in _FINISHED:
                finished[record["generation"]][source].add(record["step"])
    newest = max(story.plans, default=0)
    for generation, by_worker in sorted(finished.items()):
        plan = story.plans.get(generation)
        if plan is None:
            continue
        steps = set().union(*by_worker.values())
        in_flight = {max(steps)} if generation < newest else set()
        for member in plan["members"]:
            worker = member["worker"]
            missing = steps - by_worker[worker] - in_flight
            if worker in story.lost or member["node"] in story.gone:
                own = by_worker[worker]
                missing = {step for step in missing if own and step < max(own)}
            if missing:
                yield f"{worker}: it does not tell of step {min(missing)} in generation {generation}"
