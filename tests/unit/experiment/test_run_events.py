"""Faults, losses and recoveries of a run as events: the records that make one, and the text of a
Kubernetes Event.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.nodes.api_server import ApiServer, api_server, refusal
from support.waiting import LIMIT_S, wait_until
from support.whole_run import STARTED_NS, STRUCK, plan, record, whole_records

from chaoskit.experiment.run.event_feed import showing_events
from chaoskit.experiment.run.run_events import RunEvents, event_of
from chaoskit.journal import Journal, Record
from chaoskit.substrate.core.run_event import RunEvent
from chaoskit.substrate.kubernetes.api.background import BackgroundRequests
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi
from chaoskit.substrate.kubernetes.events import EventWriter, event_manifest, note_of
from chaoskit.vocabulary import Event

JOB = {"apiVersion": "batch/v1", "kind": "Job", "name": "chaoskit-1", "uid": "1-2-3"}
EVENTS = "/api/v1/namespaces/chaos/events"


def events_of(records: Iterable[Record]) -> list[RunEvent]:
    """Return the events of a run that is over."""
    fold, events = RunEvents(), list[RunEvent]()
    for line in sorted(records, key=lambda line: line.t_ns):
        events += fold.take(line)
    return events + fold.finish()


def reasons_and_texts(events: Iterable[RunEvent]) -> list[tuple[str, str]]:
    return [(event.reason, event.text) for event in events]


LOST = {"worker": "node1.0", "rank": 1, "cause": "exited", "detail": "its latch broke"}
TAKEN = {
    "node": "node1",
    "role": "node",
    "pod": "chaoskit-1-node1-a",
    "cause": "evicted",
    "detail": "DisruptionTarget",
}


@pytest.mark.parametrize(
    ("event", "fields", "reason", "text"),
    [
        (
            Event.INJECTED,
            {**STRUCK, "generation": 3},
            "FaultInjected",
            "Kill(rank=1, at_step=2): at rank 1 (worker node1.0) on node1, generation 3, step 2",
        ),
        (
            Event.INJECTED,
            {**STRUCK, "nodes": ["node1", "node2"]},
            "FaultInjected",
            "Kill(rank=1, at_step=2): at rank 1 (worker node1.0) on node1, all of node1, node2, step 2",
        ),
        (
            Event.EVIDENCE,
            {"fault": "fault0", "observed": "pid 101 is gone"},
            "FaultLanded",
            "Kill(rank=1): pid 101 is gone",
        ),
        (Event.EVIDENCE, {"fault": "fault0", "observed": ""}, "", ""),
        (
            Event.FAULT_MISSED,
            {"fault": "fault0", "what": "Kill(rank=1)", "reason": "no rank 1 was there"},
            "FaultMissed",
            "Kill(rank=1) did not act, or too late: no rank 1 was there",
        ),
        (
            Event.DETECTED,
            LOST,
            "WorkerLost",
            "rank 1 (worker node1.0) on node1, generation 2: its process ended, its latch broke",
        ),
        (
            Event.DETECTED,
            {**LOST, "rank": None, "cause": "hung", "detail": "no step for 5 s"},
            "WorkerLost",
            "a spare (worker node1.0) on node1, generation 2: hung: no step for 5 s",
        ),
        (
            Event.NODE_LOST,
            {"node": "node1", "detail": "no lease"},
            "NodeLost",
            "node1, generation 2: no lease",
        ),
        (
            Event.POD_TAKEN,
            TAKEN,
            "PodTaken",
            "pod chaoskit-1-node1-a of node1, generation 2 was evicted, and not by this run: DisruptionTarget",
        ),
        (
            Event.NODE_REPLACED,
            {"node": "node1"},
            "NodeReplaced",
            "node1 was started again, generation 2",
        ),
        (
            Event.REPLACEMENT_FAILED,
            {"node": "node1", "reason": "exceeded quota"},
            "ReplacementFailed",
            "node1 could not be started again, and is tried again: exceeded quota",
        ),
        (
            Event.RESUMED,
            {"term": 2, "generation": 4, "events": 9},
            "CoordinatorResumed",
            "coordinator 2 took over from the one before it, generation 4",
        ),
        (Event.COMMIT, {"step": 3, "generation": 2, "rank": 0}, "", ""),
        (Event.SAVED, {"step": 3, "tier": "disk"}, "", ""),
    ],
)
def test_a_record_makes_an_event_or_none(
    event: Event, fields: dict[str, Any], reason: str, text: str
) -> None:
    run_event = event_of(record(5, "harness", event, **fields), 2, "Kill(rank=1)")
    assert (run_event is None) is (not reason)
    if run_event is not None:
        assert (run_event.reason, run_event.text, run_event.t_ns) == (
            reason,
            text,
            STARTED_NS + 5_000_000,
        )
        is_calm = reason in ("FaultLanded", "NodeReplaced", "CoordinatorResumed", "Recovered")
        assert run_event.is_warning is not is_calm


def test_a_whole_run_is_told_in_four_events() -> None:
    fault = "Kill(rank=1, at_step=2)"
    after = f"0.02 s after the fault {fault} (loss of rank 1 on node1: exited)"
    assert reasons_and_texts(events_of(whole_records())) == [
        ("FaultInjected", f"{fault}: at rank 1 (worker node1.0) on node1, step 2"),
        ("FaultLanded", f"{fault}: pid 101 was killed by SIGKILL"),
        (
            "WorkerLost",
            "rank 1 (worker node1.0) on node1, generation 1: its process ended, its latch broke",
        ),
        ("Recovered", f"training goes on with 2 ranks, generation 2, {after}"),
    ]


def test_a_loss_that_two_coordinators_tell_of_is_one_event() -> None:
    again = record(36, "coordinator", Event.DETECTED, **LOST)
    nodes = [
        record(at, "coordinator", Event.NODE_LOST, node="node1", detail="no lease")
        for at in (35, 35)
    ]
    reasons = [event.reason for event in events_of([*whole_records(), again, *nodes])]
    assert reasons.count("WorkerLost") == 1
    assert reasons.count("NodeLost") == 1


def test_a_fault_without_evidence_is_not_proven() -> None:
    records = [line for line in whole_records() if line.event != Event.EVIDENCE]
    events = {event.reason: event for event in events_of(records)}
    assert (
        events["FaultNotProven"].text
        == "Kill(rank=1, at_step=2): no evidence shows that it took effect"
    )
    assert "FaultLanded" not in events


def test_a_fault_that_is_felt_again_and_again_landed_once() -> None:
    more = [
        record(34 + at, "harness", Event.EVIDENCE, fault="fault0", observed=f"look {at}")
        for at in range(3)
    ]
    reasons = [event.reason for event in events_of([*whole_records(), *more])]
    assert reasons.count("FaultLanded") == 1


def test_a_loss_without_a_fault_is_measured_from_the_loss() -> None:
    faults = (Event.INJECTED, Event.EVIDENCE, Event.UNDONE)
    (recovered,) = [
        event
        for event in events_of(line for line in whole_records() if line.event not in faults)
        if event.reason == "Recovered"
    ]
    assert recovered.text.endswith("s after the loss of rank 1 on node1 (exited)")


def test_a_run_that_does_not_come_back_says_so() -> None:
    records = [line for line in whole_records() if line.t_ns < STARTED_NS + 40_000_000]
    records.append(
        record(90, "harness", Event.RUN_ENDED, reason="deadline", ok=False, detail="", exits={})
    )
    *_, last = events_of(records)
    assert last.reason == "NotRecovered"
    assert last.is_warning
    assert "of rank 1 on node1" in last.text


@pytest.mark.parametrize(
    ("node", "origin"),
    [
        (
            "node1",
            "0.02 s after the fault Kill(rank=1, at_step=2) (loss of rank 1 on node1: exited)",
        ),
        ("node2", "0.02 s after the loss of rank 1 on node1 (exited)"),
    ],
)
def test_a_loss_that_is_known_after_its_group_broke_explains_the_recovery(
    node: str, origin: str
) -> None:
    """The plan without a group comes before the loss of the node that broke it."""
    struck = STRUCK | {"worker": f"{node}.0", "node": node, "nodes": [node]}
    records = [record(31, "harness", Event.INJECTED, **struck), plan(34, 2, "node0.0")]
    for line in whole_records():
        if line.event == Event.INJECTED:
            continue
        if line.t_ns >= STARTED_NS + 36_000_000 and line.get("generation") == 2:
            line.fields["generation"] = 3
        records.append(line)
    (recovered,) = [event for event in events_of(records) if event.reason == "Recovered"]
    assert recovered.text.endswith(origin)
    assert "2 ranks, generation 3" in recovered.text


def test_a_planned_change_of_the_world_is_no_recovery() -> None:
    calm = [line for line in whole_records() if line.t_ns < STARTED_NS + 30_000_000]
    world = plan(31, 2, "node0.0")
    world.fields["abort"] = False
    commits = [
        record(
            at,
            "node0.0",
            Event.COMMIT,
            step=step,
            generation=2,
            rank=0,
            world=1,
            loss=1.0,
            grad_sum=1,
            stall_ms=0.0,
        )
        for at, step in ((40, 2), (50, 3))
    ]
    assert events_of([*calm, world, *commits]) == []


# -- the thread ------------------------------------------------------------------------------------


def test_events_are_shown_while_the_run_goes_on(tmp_path: Path) -> None:
    shown = list[RunEvent]()
    journal = Journal(tmp_path / "journal", "coordinator")
    with showing_events(tmp_path, shown.append):
        journal.write(Event.NODE_LOST, node="node1", detail="no lease")
        wait_until(
            lambda: reasons_and_texts(shown) == [("NodeLost", "node1: no lease")], "the event"
        )
        journal.write(Event.NODE_LOST, node="node2", detail="no lease")
    assert [event.text for event in shown] == ["node1: no lease", "node2: no lease"], (
        "none is left when the run ends"
    )


def test_what_fails_while_events_are_shown_costs_no_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def show(event: RunEvent) -> None:
        raise ValueError("no such thing")

    with showing_events(tmp_path, show):
        Journal(tmp_path / "journal", "coordinator").write(
            Event.NODE_LOST, node="node1", detail="no lease"
        )
    assert (
        f"events of {tmp_path.name} are not shown any more: ValueError('no such thing')"
        in capfd.readouterr().err
    )


def test_a_platform_that_shows_no_events_costs_no_thread(tmp_path: Path) -> None:
    with showing_events(tmp_path, None):
        assert not [thread for thread in threading.enumerate() if thread.name == "ck-events"]


# -- Kubernetes ------------------------------------------------------------------------------------


def test_an_event_is_about_the_job_of_the_session() -> None:
    event = RunEvent(5, "WorkerLost", "Detect", "rank 1", is_warning=True)
    manifest = event_manifest(
        event,
        JOB,
        "chaos",
        name="chaoskit-1.a",
        note="rank 1",
        unix_ns=1_700_000_000_123_456_789,
        instance="pod-1",
    )
    assert manifest["involvedObject"] == {**JOB, "namespace": "chaos"}
    assert (manifest["type"], manifest["reason"], manifest["action"]) == (
        "Warning",
        "WorkerLost",
        "Detect",
    )
    assert (manifest["reportingComponent"], manifest["reportingInstance"]) == ("chaoskit", "pod-1")
    assert manifest["eventTime"] == "2023-11-14T22:13:20.123456Z"
    assert manifest["firstTimestamp"] == manifest["lastTimestamp"] == "2023-11-14T22:13:20Z"


@pytest.mark.parametrize(
    ("text", "run", "test", "note"),
    [
        ("rank 1", "001-a", "tests/a.py::b", "rank 1 [run 001-a, test tests/a.py::b]"),
        ("two\nlines", "001-a", "", "two lines [run 001-a]"),
        ("x" * 2000, "001-a", "", "x" * (1024 - 12 - 3) + "... [run 001-a]"),
        ("é" * 600, "001-a", "", "é" * 504 + "... [run 001-a]"),
    ],
)
def test_a_note_names_run_and_test_and_fits(text: str, run: str, test: str, note: str) -> None:
    assert note_of(text, run, test) == note
    assert len(note_of(text, run, "t" * 3000).encode()) <= 1024


@contextlib.contextmanager
def writing(server: ApiServer, lines: list[str]) -> Iterator[EventWriter]:
    api, background = KubernetesApi(kubeconfig=server.kubeconfig), BackgroundRequests(pause_s=0.01)
    yield EventWriter(api, background, "chaoskit-1", lines.append)
    background.close(LIMIT_S)
    api.close()


def test_events_are_written_with_their_own_time(tmp_path: Path) -> None:
    lines = list[str]()
    minute_ago_ns = time.monotonic_ns() - 60 * 10**9
    times = [minute_ago_ns, minute_ago_ns, minute_ago_ns + 10**6, minute_ago_ns + 2 * 10**6]
    with (
        api_server(tmp_path, lambda *request: (201, {})) as server,
        writing(server, lines) as writer,
    ):
        for t_ns in times:
            event = RunEvent(t_ns, "NodeLost", "Detect", "node1", is_warning=True)
            writer.write(event, JOB, "001-a", "tests/a.py::b")
    names = [body["metadata"]["name"] for _, _, body in server.requests]
    assert [(method, path) for method, path, _ in server.requests] == [("POST", EVENTS)] * 4
    assert len(set(names)) == 4
    assert names[1:] == sorted(names[1:]), "kubectl shows Events of one second by name"
    assert server.requests[0][2]["message"] == "node1 [run 001-a, test tests/a.py::b]"
    written = time.strptime(server.requests[0][2]["firstTimestamp"], "%Y-%m-%dT%H:%M:%SZ")
    assert 30 < time.mktime(time.gmtime()) - time.mktime(written) < 300
    assert not lines


def test_a_right_that_is_missing_is_told_once(tmp_path: Path) -> None:
    lines, event = list[str](), RunEvent(0, "NodeLost", "Detect", "node1", is_warning=True)
    answer = refusal(403, "events is forbidden")
    with api_server(tmp_path, lambda *request: answer) as server, writing(server, lines) as writer:
        writer.write(event, JOB, "001-a", "")
        wait_until(lambda: lines, "the line")
        for _ in range(3):
            writer.write(event, JOB, "002-b", "")
    (line,) = lines
    assert "the right to create events is missing" in line
    assert "events is forbidden" in line
    assert len(server.requests) == 1


def test_an_event_that_was_written_and_not_answered_is_written_once(tmp_path: Path) -> None:
    """The second attempt has the same name; the conflict shows that the first attempt was carried
    out.
    """
    lines, event = list[str](), RunEvent(0, "NodeLost", "Detect", "node1", is_warning=True)
    answers = [(501, {}), refusal(409, "already exists"), refusal(404, "not found"), (201, {})]

    with (
        api_server(tmp_path, lambda *request: answers.pop(0)) as server,
        writing(server, lines) as writer,
    ):
        writer.write(event, JOB, "001-a", "")
        writer.write(event, JOB, "001-a", "")
        wait_until(lambda: not answers, "the second Event")
    names = [body["metadata"]["name"] for method, _, body in server.requests if method == "POST"]
    assert names[0] == names[1] != names[2]
    assert not lines


def test_an_event_that_is_refused_for_itself_ends_no_others(tmp_path: Path) -> None:
    lines, event = list[str](), RunEvent(0, "NodeLost", "Detect", "node1", is_warning=True)
    answer = refusal(422, "message: Too long")
    with api_server(tmp_path, lambda *request: answer) as server, writing(server, lines) as writer:
        writer.write(event, JOB, "001-a", "")
        wait_until(lambda: lines, "the answer")
        writer.write(event, JOB, "001-a", "")
    assert len(server.requests) == 2
    assert all(
        "Too long" in line and "the right to create events is missing" not in line for line in lines
    )
