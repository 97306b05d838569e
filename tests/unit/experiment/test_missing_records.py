"""The records and files that a run lacks, each named in words.

Pure: journals are written by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.whole_run import (
    STEPS,
    by_time,
    changed,
    experiment_of,
    fields,
    files_of,
    record,
    run_of,
    step_of,
    whole_records,
    without,
)

from chaoskit.experiment.judge.coverage import Compared, Coverage, coverage_of, damage
from chaoskit.experiment.plan.plan import REFERENCE_STEPS
from chaoskit.experiment.plan.planfile import FILE_NAME
from chaoskit.experiment.reference.floor import Floor
from chaoskit.experiment.reference.plain_process import inputs_digest, samples_of
from chaoskit.experiment.reference.reference import Reference
from chaoskit.experiment.run.run import LATER, RawRun, digest_of
from chaoskit.experiment.twin.twin import Twin
from chaoskit.journal import FileCoverage, Record, WriterCoverage
from chaoskit.runlog.history import History
from chaoskit.runlog.outcome import Check
from chaoskit.vocabulary import Event, Verdict
from chaoskit.wire.messages import EndJob

Lines = list[Record]
WHOLE = whole_records()
FAILED = EndJob(False, "it failed")


def of(run: RawRun, **compared: Any) -> Coverage:
    return coverage_of(run, History(run.records), Compared(**compared))


def missing(lines: Lines, **run: Any) -> tuple[list[str], list[str]]:
    """Return the reasons for which a run is blind, and its gaps."""
    coverage = of(run_of(lines, **run))
    return [*coverage.blind], [*coverage.gaps]


def test_a_whole_run_lacks_nothing() -> None:
    run = run_of(WHOLE)
    coverage = of(run)
    assert coverage == Coverage((), ())
    check = coverage.check(len(run.records), len(run.coverage))
    assert (check.verdict, check.detail) == (Verdict.PASSED, "61 records in 7 files")


# -- records ---------------------------------------------------------------------------------------


def unfinished(lines: Lines, *events: Event) -> Lines:
    """Return the records without the end of the worker that took over."""
    for event in (Event.FINISHED, Event.CLOSED, *events):
        lines = without(lines, event, "node0.1")
    return lines


def unexplained(*more: Record) -> Lines:
    """Return the records of a worker that vanished, with ``more`` instead of its loss and
    its exit.
    """
    return by_time([*without(without(WHOLE, Event.DETECTED), Event.WORKER_EXITED, "node1"), *more])


def unstarted(event: Event) -> Lines:
    """Return the records of a run that lost a node, with the record of a start, too."""
    lines = without(WHOLE, Event.WORKER_STARTED, "", worker="node1.0")
    return by_time([*lines, record(35, "coordinator", event, node="node1", detail="")])


def without_step(worker: str, step: int) -> Lines:
    return without(without(WHOLE, Event.REDUCE, worker, step=step), Event.COMMIT, worker, step=step)


def skipped(line: Record) -> Record:
    return msgspec.structs.replace(line, event=Event.SKIP)


NO_START = "{0}: no node recorded its start"
NO_END = "{0}: its journal has no end, although it was not lost"
NO_FINISH = "{0}: it was a member at the end, but did not finish"
NO_STATE = "{0}: it finished after {1} steps, but did not describe its state"
NOT_READY = "{0}: it had a rank, but did not record that it was ready"
LEAP = "{0}: step {1} comes after {2} steps"
STOOD = "{0}: it waited in step {1}, but recorded {2} steps"
TOLD = "{0}: it finished after {1} steps, but recorded {2}"
ALONE = "{0}: it finished step {1} without a contribution"
SILENT = "{0}: its record of step {1} in generation {2} is missing"

#: Case -> (the records, the reasons for blindness, gaps).
CASES: dict[str, tuple[Lines, list[str], list[str]]] = {
    "no membership": (
        without(WHOLE, Event.PLAN, "", generation=2),
        ["generation 2: steps were finished in it, but its plan is missing"],
        [],
    ),
    "a skipped step of no membership": (
        by_time([*WHOLE, record(68, "node0.0", Event.SKIP, step=3, generation=7)]),
        ["generation 7: steps were finished in it, but its plan is missing"],
        [ALONE.format("node0.0", 3)],
    ),
    "no end of the job": (
        without(WHOLE, Event.JOB_ENDED),
        ["coordinator: the end of the job is missing"],
        [],
    ),
    "no start": (
        without(WHOLE, Event.WORKER_STARTED, "", worker="node0.1"),
        [NO_START.format("node0.1")],
        [],
    ),
    "no start on a node that was lost": (unstarted(Event.NODE_LOST), [], []),
    "no start on a node that was evicted": (unstarted(Event.EVICTED), [], []),
    "another process": (
        changed(WHOLE, Event.OPENED, "node0.1", fields(pid=7)),
        ["node0.1: process 7 wrote it, but its node started 102"],
        [],
    ),
    "another process of a worker that was started twice": (
        changed(
            [*WHOLE, record(5, "node0", Event.WORKER_STARTED, worker="node0.1", pid=9)],
            Event.OPENED,
            "node0.1",
            fields(pid=7),
        ),
        ["node0.1: process 7 wrote it, but its node started 102, 9"],
        [],
    ),
    "another agent": (changed(WHOLE, Event.OPENED, "node0", fields(pid=7)), [], []),
    "no rank is ready": (
        without(WHOLE, Event.READY),
        ["no worker recorded that it was ready"],
        [NOT_READY.format(worker) for worker in ("node0.0", "node1.0", "node0.1")],
    ),
    "one rank is not ready": (
        without(WHOLE, Event.READY, "node0.1"),
        [],
        [NOT_READY.format("node0.1")],
    ),
    "no finish": (unfinished(WHOLE), [NO_END.format("node0.1")], [NO_FINISH.format("node0.1")]),
    "no finish of a process that ended in order": (
        without(WHOLE, Event.FINISHED, "node0.1"),
        [],
        [NO_FINISH.format("node0.1")],
    ),
    "no finish of a rank that was lost": (
        [
            *unfinished(WHOLE),
            record(75, "coordinator", Event.DETECTED, worker="node0.1", rank=1, cause="exited"),
        ],
        [],
        [],
    ),
    "no finish of a rank that skipped its steps": (
        changed(without(WHOLE, Event.FINISHED, "node0.1"), Event.COMMIT, "node0.1", skipped),
        [],
        [NO_FINISH.format("node0.1")],
    ),
    "no loss, and the last membership is without the rank": (
        without(WHOLE, Event.DETECTED),
        [],
        [],
    ),
    "no loss and no exit": (unexplained(), [NO_END.format("node1.0")], []),
    "the exit of another rank": (
        unexplained(record(34, "node1", Event.WORKER_EXITED, worker="node1.5", pid=5)),
        [NO_END.format("node1.0")],
        [],
    ),
    "it closed": (unexplained(record(80, "node1.0", Event.CLOSED, reason="")), [], []),
    "it left": (
        unexplained(record(34, "node1.0", Event.LEFT, step=2, generation=1, rank=1)),
        [],
        [],
    ),
    "it failed": (unexplained(record(34, "node1.0", Event.FAILED, error="")), [], []),
    "its node was lost": (
        unexplained(record(34, "coordinator", Event.NODE_LOST, node="node1", detail="")),
        [],
        [],
    ),
    "another node was lost": (
        unexplained(record(34, "coordinator", Event.NODE_LOST, node="node7", detail="")),
        [NO_END.format("node1.0")],
        [],
    ),
    "all were given up": (
        unexplained(record(34, "coordinator", Event.RECORD_LOST, node="", detail="")),
        [],
        [],
    ),
    "all were given up before it had a rank": (
        unexplained(record(3.5, "coordinator", Event.RECORD_LOST, node="", detail="")),
        [NO_END.format("node1.0")],
        [],
    ),
    "no contribution": (
        without(WHOLE, Event.REDUCE, "node0.1", step=3),
        [],
        [ALONE.format("node0.1", 3)],
    ),
    "no contribution to skipped steps": (
        changed(without(WHOLE, Event.REDUCE, "node0.1", step=3), Event.COMMIT, "node0.1", skipped),
        [],
        [ALONE.format("node0.1", 3)],
    ),
    "skipped steps": (changed(WHOLE, Event.COMMIT, "node0.0", skipped), [], []),
    "no commit": (
        without(WHOLE, Event.COMMIT, "node0.1", step=2),
        [LEAP.format("node0.1", 3, 2)],
        [SILENT.format("node0.1", 2, 2)],
    ),
    "no last commit": (
        without(WHOLE, Event.COMMIT, "node0.1", step=3),
        [TOLD.format("node0.1", 4, 3)],
        [SILENT.format("node0.1", 3, 2)],
    ),
    "no commit of a step in flight": (
        without(WHOLE, Event.COMMIT, "node0.0", step=1),
        [LEAP.format("node0.0", 2, 1)],
        [],
    ),
    "no step": (
        without_step("node0.0", 0),
        [LEAP.format("node0.0", 1, 0)],
        [SILENT.format("node0.0", 0, 1)],
    ),
    "no step of a rank that was lost": (
        without_step("node1.0", 0),
        [LEAP.format("node1.0", 1, 0)],
        [SILENT.format("node1.0", 0, 1)],
    ),
    "no steps of a rank that was lost": (
        without(without(WHOLE, Event.REDUCE, "node1.0"), Event.COMMIT, "node1.0"),
        [STOOD.format("node1.0", 2, 0)],
        [],
    ),
    "no steps of a rank whose node was lost": (
        without(
            without(
                unexplained(record(34, "coordinator", Event.NODE_LOST, node="node1", detail="")),
                Event.REDUCE,
                "node1.0",
            ),
            Event.COMMIT,
            "node1.0",
        ),
        [STOOD.format("node1.0", 2, 0)],
        [],
    ),
    "no last step of a rank that was lost at the end": (
        [
            *unfinished(without_step("node0.1", 3)),
            record(75, "coordinator", Event.DETECTED, worker="node0.1", rank=1, cause="exited"),
        ],
        [],
        [],
    ),
    "a state that was taken over": (
        without(WHOLE, Event.RESTORED),
        [LEAP.format("node0.1", 2, 0)],
        [],
    ),
    "a step that was taken over": (
        by_time(
            [
                *without(WHOLE, Event.RESTORED),
                record(38, "node0.1", Event.ADOPT, step=2, generation=2, source="node0.0"),
            ]
        ),
        [],
        [],
    ),
    "a newer state was taken over": (
        changed(WHOLE, Event.RESTORED, "node0.1", fields(step=3)),
        [],
        [LEAP.format("node0.1", 2, 3)],
    ),
    "a step comes again": (
        by_time([*WHOLE, *step_of(65, 2, 2, "node0.0")]),
        [TOLD.format("node0.0", 4, 3)],
        [LEAP.format("node0.0", 2, 4)],
    ),
    "a hook in another step": (
        changed(WHOLE, Event.HOOK_STOPPED, "node1.0", fields(step=3)),
        [STOOD.format("node1.0", 3, 2)],
        [],
    ),
    "a hook in a recovery": (
        changed(WHOLE, Event.HOOK_STOPPED, "node1.0", fields(step=3, phase="restore")),
        [],
        [],
    ),
    "a hook in a recovery that goes back": (
        changed(WHOLE, Event.HOOK_STOPPED, "node1.0", fields(step=1, phase="restore")),
        [],
        [],
    ),
    "an end after another step": (
        changed(WHOLE, Event.FINISHED, "node0.1", fields(step=5)),
        [TOLD.format("node0.1", 5, 4)],
        [NO_STATE.format("node0.1", 5)],
    ),
    "no state": (without(WHOLE, Event.STATE, "node0.1"), [], [NO_STATE.format("node0.1", 4)]),
    "the state of another step": (
        changed(WHOLE, Event.STATE, "node0.1", fields(step=3)),
        [],
        [NO_STATE.format("node0.1", 4)],
    ),
    "the fault was not undone": (
        without(WHOLE, Event.UNDONE),
        ["harness: no record shows whether Kill(rank=1, at_step=2) was undone"],
        [],
    ),
    "the fault was missed": (
        [
            *without(WHOLE, Event.UNDONE),
            record(79, "harness", Event.FAULT_MISSED, fault="fault0", reason="late"),
        ],
        [],
        [],
    ),
    "the fault did not act": (without(without(WHOLE, Event.UNDONE), Event.INJECTED), [], []),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_missing_is_named(name: str) -> None:
    lines, blind, gaps = CASES[name]
    assert missing(lines) == (blind, gaps)


def test_a_run_that_did_not_end_well_lacks_no_end() -> None:
    """A deadline ends workers and the coordinator in the middle; a failed job has no last records
    of its ranks.
    """
    assert missing(without(WHOLE, Event.JOB_ENDED), end=None) == ([], [])
    failed = changed(unfinished(WHOLE), Event.JOB_ENDED, "coordinator", fields(ok=False))
    assert missing(failed, end=FAILED) == ([], [])
    assert missing(without(WHOLE, Event.FINISHED, "node0.1"), end=FAILED) == ([], [])


def test_a_job_that_fails_before_its_first_membership_lacks_nothing() -> None:
    lines = [line for line in WHOLE if line.event in (Event.STARTED, Event.OPENED, Event.JOB_ENDED)]
    assert missing(lines, end=FAILED) == ([], [])


def test_a_rank_that_came_just_before_the_end_need_not_finish() -> None:
    lines = without(without(WHOLE, Event.FINISHED, "node0.1"), Event.COMMIT, "node0.1")
    blind, gaps = missing(lines)
    assert NO_FINISH.format("node0.1") not in [*blind, *gaps]


def test_a_harness_that_was_lost_has_undone_nothing() -> None:
    assert missing(without(WHOLE, Event.UNDONE), harness_lost=True) == ([], [])


def test_nodes_that_went_with_records_are_named_once() -> None:
    cut = [
        record(90, "substrate", Event.RECORDS_CUT, node=node)
        for node in ("node1", "node0", "node1")
    ]
    assert of(run_of([*WHOLE, *cut], files=files_of(WHOLE))) == Coverage((), (), ("node1", "node0"))


# -- files -----------------------------------------------------------------------------------------


def files_without(*sources: str) -> dict[str, FileCoverage]:
    return {source: file for source, file in files_of(WHOLE).items() if source not in sources}


def test_files_that_are_missing_are_named() -> None:
    """Records that only a missing file of the coordinator could hold are not demanded."""
    no_coordinator = missing(without(WHOLE, Event.JOB_ENDED), files=files_without("coordinator"))
    assert no_coordinator == (["coordinator: its journal is missing"], [])
    assert missing(WHOLE, files=files_without("node1")) == (
        ["node1: the journal of its agent is missing"],
        [],
    )
    no_worker: tuple[list[str], list[str]] = (
        ["node0.1: it had a rank, but its journal is missing"],
        [],
    )
    assert missing(WHOLE, files=files_without("node0.1")) == no_worker
    assert (
        missing(without(WHOLE, Event.READY, "node0.1"), files=files_without("node0.1")) == no_worker
    )
    vanished: tuple[list[str], list[str]] = (
        ["node1.0: it had a rank, but its journal is missing"],
        [],
    )
    assert missing(unexplained(), files=files_without("node1.0")) == vanished


def test_a_file_of_another_role_is_no_file() -> None:
    other_agent = changed(WHOLE, Event.OPENED, "node1", fields(role="keeper"))
    assert missing(other_agent) == (["node1: the journal of its agent is missing"], [])


def test_a_file_with_lines_of_another_process_is_named() -> None:
    files = files_of(WHOLE)
    both = msgspec.structs.replace(
        files["node0.1"], writers=(*files["node0.1"].writers, *files["node0.0"].writers)
    )
    blind, gaps = missing(WHOLE, files=files | {"node0.1": both})
    assert blind[0] == "node0.1: it holds records of the writer of node0.0"
    assert gaps == []


def test_a_file_without_its_begin_is_of_an_unknown_process() -> None:
    files = files_of(WHOLE)
    files["node0.1"] = msgspec.structs.replace(files["node0.1"], writers=(writer(opened=None),))
    blind, _ = missing(WHOLE, files=files)
    assert "node0.1: the first record is missing" in blind
    assert not [problem for problem in blind if "but its node started" in problem]


def writer(**changes: Any) -> WriterCoverage:
    return msgspec.structs.replace(files_of(WHOLE)["node0.1"].writers[0], **changes)


@pytest.mark.parametrize(
    ("file", "problems"),
    [
        ({}, []),
        ({"bad_lines": 2}, ["node0.1: 2 damaged lines"]),
        ({"bad_lines": 1, "torn": True}, ["node0.1: 1 damaged lines"]),
        ({"bad_lines": 1, "torn": True, "writers": (writer(closed=None),)}, []),
        ({"bad_lines": 1, "writers": (writer(closed=None),)}, ["node0.1: 1 damaged lines"]),
        (
            {"bad_lines": 2, "torn": True, "writers": (writer(closed=None),)},
            ["node0.1: 1 damaged lines"],
        ),
        ({"writers": (writer(missing=3), writer(missing=1))}, ["node0.1: 4 records are missing"]),
        ({"writers": (writer(), writer(opened=None))}, ["node0.1: the first record is missing"]),
    ],
)
def test_damage_is_counted_but_for_the_line_that_a_kill_has_torn(
    file: dict[str, Any], problems: list[str]
) -> None:
    files = {"node0.1": msgspec.structs.replace(files_of(WHOLE)["node0.1"], **file)}
    assert [*damage(files)] == problems


def test_damage_makes_a_run_blind() -> None:
    files = files_of(WHOLE)
    files["node0.1"] = msgspec.structs.replace(files["node0.1"], bad_lines=1)
    assert missing(WHOLE, files=files) == (["node0.1: 1 damaged lines"], [])


# -- what the run is compared with -----------------------------------------------------------------

TWIN = Twin(
    [5.0, 4.0, 3.0, 2.0],
    "",
    "",
    run_id="the twin's",
    ending={"model/weight": [0.0]},
    scalars="the scalars",
)


def started(twin: str = "", plan: str = "") -> Lines:
    """Return the records of a run that was to be compared with this twin, and has this plan."""
    return changed(WHOLE, Event.STARTED, "harness", fields(twin=twin, plan=plan))


@pytest.mark.parametrize(
    ("asked", "end", "problems"),
    [
        ("", EndJob(True, ""), []),
        ("the twin's", None, ["twin.json: the result of the unbroken run is missing"]),
        ("the twin's", FAILED, ["twin.json: the result of the unbroken run is missing"]),
        (LATER, EndJob(True, ""), ["twin.json: the result of the unbroken run is missing"]),
        (LATER, FAILED, []),
        (LATER, None, []),
    ],
)
def test_a_twin_that_was_asked_for_is_missing(
    asked: str, end: EndJob | None, problems: list[str]
) -> None:
    """A twin that depends on the end of the run is made only if the run ends well."""
    assert [*of(run_of(started(asked), end=end)).blind] == problems


@pytest.mark.parametrize("asked", ["", "the twin's", LATER])
def test_a_twin_is_the_one_that_was_asked_for(asked: str) -> None:
    assert of(run_of(started(asked)), twin=TWIN) == Coverage((), ())
    other = of(run_of(started(asked)), twin=msgspec.structs.replace(TWIN, run_id="of another run"))
    problem = "twin.json: it belongs to the run of anoth, not to the twin"
    assert other.blind == ((problem,) if asked == "the twin's" else ())


def test_a_twin_that_is_cut_is_named() -> None:
    short = msgspec.structs.replace(TWIN, losses=[5.0, 4.0])
    problem = "twin.json: it has the losses of 2 steps, but the plan has 4"
    assert of(run_of(WHOLE), twin=short).blind == (problem,)
    no_ending = of(run_of(WHOLE), twin=msgspec.structs.replace(TWIN, ending={}, scalars=""))
    assert no_ending.blind == ("twin.json: the final state of the unbroken run is missing",)
    no_scalars = of(run_of(WHOLE), twin=msgspec.structs.replace(TWIN, scalars=""))
    problem = "twin.json: the final rates, schedules and counts of the unbroken run are missing"
    assert no_scalars.blind == (problem,)
    stateless = without(WHOLE, Event.STATE)
    assert of(run_of(stateless), twin=msgspec.structs.replace(TWIN, ending={})).blind == ()


def test_a_twin_of_a_run_without_a_number_of_steps_may_have_any() -> None:
    short = msgspec.structs.replace(TWIN, losses=[5.0])
    open_ended = experiment_of(until={"world": 2})
    assert of(run_of(WHOLE, experiment=open_ended), twin=short).blind == ()
    assert of(run_of(WHOLE, experiment=experiment_of(steps=None)), twin=short).blind == ()


def test_a_reference_that_was_asked_for_is_missing() -> None:
    run = run_of(WHOLE, experiment=experiment_of(reference="on"))
    problem = "reference.json: the result of plain PyTorch is missing; see reference.log"
    assert of(run).blind == (problem,)
    samples = samples_of(History(run.records), REFERENCE_STEPS, run.experiment)
    assert of(run, reference=Reference(trained=inputs_digest(run.experiment, samples))) == Coverage(
        (), ()
    )
    assert of(run, reference=Reference(trained="another")) == Coverage(
        (), ("reference.json: it belongs to another run",)
    )


def test_a_floor_is_of_the_run() -> None:
    run = run_of(WHOLE)
    samples = samples_of(History(run.records), STEPS, run.experiment)
    assert of(run, floor=Floor(trained=inputs_digest(run.experiment, samples))) == Coverage((), ())
    assert of(run, floor=Floor(trained="another")) == Coverage(
        (), ("floor.json: it belongs to another run",)
    )
    problem = "floor.json: the distance between the ends of correct runs is missing; see floor.log"
    assert of(run, lacks_floor=True) == Coverage((problem,), ())


def test_a_plan_is_the_one_that_the_run_had(tmp_path: Path) -> None:
    problem = "plan.json: it differs from the plan at the start of the run"
    assert of(run_of(started(plan="a digest"), directory=tmp_path)).blind == (), "there is no plan"
    (tmp_path / FILE_NAME).write_text("{}")
    assert of(run_of(started(plan="a digest"), directory=tmp_path)).blind == (problem,)
    assert of(run_of(started(plan=digest_of(tmp_path)), directory=tmp_path)).blind == ()
    assert of(run_of(started(), directory=tmp_path)).blind == ()


# -- the verdict -----------------------------------------------------------------------------------

SAMPLES = Check(
    name="every sample exactly once", verdict=Verdict.FAILED, detail="missing: step 1 shard 0"
)
LOSSES = Check(
    name="losses equal the twin's", verdict=Verdict.FAILED, detail="step 1: first difference"
)
BATCH = Check(
    name="property 27S: the batch keeps its size", verdict=Verdict.FAILED, detail="step 1"
)
FINE = Check(name="every sample exactly once", verdict=Verdict.PASSED, detail="16 samples")


def test_three_problems_are_shown_and_others_counted() -> None:
    check = Coverage(("a", "b"), ("c",)).check(1, 1)
    assert (check.name, check.verdict, check.detail) == (
        "journals are whole",
        Verdict.UNKNOWN,
        "a; b; c",
    )
    assert Coverage(("a", "b"), ("c", "d", "e")).check(1, 1).detail == "a; b; c (and 2 more)"
    assert Coverage((), ("d",)).check(1, 1).verdict == Verdict.UNKNOWN


def test_a_check_that_lacks_the_last_records_of_a_node_is_unknown() -> None:
    cut = Coverage((), (), ("node1", "node2"))
    spared = cut.excuse_failures([SAMPLES, LOSSES, BATCH, FINE])
    assert [check.verdict for check in spared] == [
        Verdict.UNKNOWN,
        Verdict.FAILED,
        Verdict.UNKNOWN,
        Verdict.PASSED,
    ]
    assert spared[0].detail == "missing: step 1 shard 0; the last records of node1, node2 were lost"
    assert spared[0].name == SAMPLES.name
    assert Coverage((), ()).excuse_failures([SAMPLES, FINE]) == [SAMPLES, FINE]


@pytest.mark.parametrize(
    ("coverage", "checks", "verdict"),
    [
        (Coverage((), ()), [FINE], Verdict.PASSED),
        (Coverage((), ()), [FINE, LOSSES], Verdict.FAILED),
        (Coverage((), ("a gap",)), [FINE, LOSSES], Verdict.FAILED),
        (Coverage(("a file",), ()), [FINE, LOSSES], Verdict.UNKNOWN),
        (
            Coverage(("a file",), ()),
            [FINE, Check(name="n", verdict=Verdict.ERROR, detail="")],
            Verdict.ERROR,
        ),
    ],
)
def test_without_journals_no_check_fails_a_run(
    coverage: Coverage, checks: list[Check], verdict: Verdict
) -> None:
    assert coverage.verdict(checks) == verdict
