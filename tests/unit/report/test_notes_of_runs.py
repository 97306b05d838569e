"""Journal records as sentences, and plurals of counts."""

from __future__ import annotations

from typing import Any

import pytest

from chaoskit.experiment.judge.coverage import Coverage
from chaoskit.experiment.properties import PROPERTIES, summary
from chaoskit.journal import Record
from chaoskit.observe.notes import note_of
from chaoskit.plaintext import plural
from chaoskit.report.summary import long_duration
from chaoskit.runlog.outcome import Check
from chaoskit.versions.rendering import duration_sentence
from chaoskit.versions.schedule import ExpectedDuration
from chaoskit.vocabulary import Event, Verdict


def note(event: Event, **fields: Any) -> str:
    record = Record(t_ns=1, source="coordinator", event=event, fields=fields)
    described = note_of(record)
    assert described is not None
    return described.text


SENTENCES = [
    (Event.INJECTED, {"what": "Kill(rank=1)"}, "fault injected: Kill(rank=1)"),
    (
        Event.RESTORED,
        {"rank": 3, "step": 142, "source": "node0.0"},
        "rank 3 received the state of step 142 from node0.0",
    ),
    (
        Event.SET_ASIDE,
        {"node": "node1", "strikes": 1},
        "node1 gets no more workers: it lost 1 worker",
    ),
    (
        Event.SET_ASIDE,
        {"node": "node1", "strikes": 0, "detail": "log rule xid: bad GPU"},
        "node1 gets no more workers: log rule xid: bad GPU",
    ),
    (Event.RETURNED, {"nodes": ["node1", "node2"]}, "node1, node2 can reach all other nodes again"),
    (Event.RESIZED, {"size": 1, "reason": ""}, "the world is resized to 1 node"),
    (
        Event.RESIZED,
        {"size": 2, "reason": "enough nodes are there, so training runs on 2 nodes"},
        "enough nodes are there, so training runs on 2 nodes",
    ),
    (Event.RESUMED, {"term": 2}, "coordinator 2 took over from the one before it"),
]


@pytest.mark.parametrize(("event", "fields", "sentence"), SENTENCES)
def test_a_record_is_a_plain_sentence(event: Event, fields: dict[str, Any], sentence: str) -> None:
    assert note(event, **fields) == sentence


def test_one_of_a_kind_is_singular() -> None:
    assert plural(1, "recovery", "recoveries") == "1 recovery"
    assert plural(2, "recovery", "recoveries") == "2 recoveries"
    assert plural(0, "step was", "steps were") == "0 steps were"
    assert plural(1, "step was", "steps were") == "1 step was"


def test_checks_count_one_thing_as_one() -> None:
    assert Coverage([], []).check(1, 1).detail == "1 record in 1 file"
    holds = PROPERTIES[0], Check(name=PROPERTIES[0].title, verdict=Verdict.PASSED, detail="")
    (line,) = summary([holds])
    assert line.detail == f"1 holds: {PROPERTIES[0].label}"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (1.2, "1 s"),
        (119.4, "119 s"),
        (119.6, "2 minutes"),
        (3599.0, "1 hour"),
        (3660.0, "1 hour 1 minute"),
        (7500.0, "2 hours 5 minutes"),
    ],
)
def test_a_long_duration_has_the_unit_of_its_size(seconds: float, text: str) -> None:
    assert long_duration(seconds) == text


@pytest.mark.parametrize(
    ("least_s", "most_s", "text"),
    [
        (10.0, 45.0, "10 to 45 s"),
        (40.0, 185.0, "40 s to 3 minutes"),
        (130.0, 290.0, "2 to 5 minutes"),
        (119.6, 121.0, "2 minutes"),
        (600.0, 3700.0, "10 minutes to 1 hour 2 minutes"),
    ],
)
def test_a_price_is_a_span_of_time(least_s: float, most_s: float, text: str) -> None:
    assert duration_sentence(ExpectedDuration(least_s=least_s, most_s=most_s, tests=1)).startswith(
        f"about {text}: 1 test, "
    )
