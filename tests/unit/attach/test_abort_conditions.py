"""Abort conditions are read from texts, and malformed ones are refused before anything starts."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chaoskit.attach.guards.abort_conditions import (
    CheckResult,
    FileAppears,
    MetricCrosses,
    UrlFails,
    parse_condition,
    parse_conditions,
)
from chaoskit.attach.guards.abort_watch import AbortDecision
from chaoskit.attach.guards.metric_text import MetricSample, parse_selector, read_samples
from chaoskit.errors import BadInput

PAGE = """# HELP errors_total Errors.
# TYPE errors_total counter
errors_total{code="500",path="/a b{}"} 3
errors_total{code="404",} 1e3 1395066363000

queue_length 7
queue_max +Inf
ratio NaN
text{a="say \\"x\\"\\n",b="c:\\\\d"} -0.5
"""


def test_conditions() -> None:
    file, url, metric, labelled = parse_conditions(
        [
            "file:/run/stop it",
            "url:https://shop.example:8443/health?x=1",
            "metric:http://127.0.0.1:9090/metrics queue_length >= 5.5",
            'metric:https://h/m errors_total{code="500", path=">5"}>1e2',
        ]
    )
    assert file == FileAppears("/run/stop it")
    assert url == UrlFails("https://shop.example:8443/health?x=1")
    assert isinstance(metric, MetricCrosses)
    assert (metric.url, metric.comparison, metric.limit) == (
        "http://127.0.0.1:9090/metrics",
        ">=",
        5.5,
    )
    assert metric.selector == ("queue_length", {})
    assert isinstance(labelled, MetricCrosses)
    assert labelled.selector == ("errors_total", {"code": "500", "path": ">5"})
    assert (labelled.comparison, labelled.limit) == (">", 100.0)
    assert str(file) == "file:/run/stop it"
    assert {file, url, metric, labelled}


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("", "write file:/PATH"),
        ("/run/stop", "write file:/PATH"),
        ("file", "write file:/PATH"),
        ("fiel:/run/stop", "write file:/PATH"),
        ("file:stop", "whole path"),
        ("file:", "whole path"),
        ("url:", "https://HOST:PORT/PATH"),
        ("url:ftp://h/x", "https://HOST:PORT/PATH"),
        ("url:shop.example/health", "https://HOST:PORT/PATH"),
        ("url:https://", "https://HOST:PORT/PATH"),
        ("url:https://h:http/", "https://HOST:PORT/PATH"),
        ("url:https://h:99999/", "https://HOST:PORT/PATH"),
        ("url:https://h/a b", "https://HOST:PORT/PATH"),
        ("url:https://me:secret@h/", "leave user and password out"),
        ("metric:https://h/m", "write an address, a name"),
        ("metric:https://h/m up", "write an address, a name"),
        ("metric:https://h/m up = 1", "write an address, a name"),
        ("metric:https://h/m up > many", "write a number after >"),
        ("metric:https://h/m up > nan", "write a number after >"),
        ("metric:https://h/m 5up > 1", "write the name of a metric"),
        ("metric:https://h/m up{code=500} > 1", "write the name of a metric"),
        ("metric:h/m up > 1", "https://HOST:PORT/PATH"),
    ],
)
def test_malformed_conditions(text: str, remedy: str) -> None:
    with pytest.raises(BadInput, match="abort=") as caught:
        parse_condition(text)
    assert (caught.value.field, caught.value.value) == ("abort", text)
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("value", ["file:/x", 5, [5], None])
def test_conditions_are_a_list_of_texts(value: Any) -> None:
    with pytest.raises(BadInput, match="abort"):
        parse_conditions(value)


@given(st.text(max_size=30))
def test_any_text_is_a_condition_or_refused(text: str) -> None:
    for prefix in ("", "file:", "url:", "metric:", "metric:http://h/ "):
        try:
            parse_condition(prefix + text)
        except BadInput as refusal:
            assert refusal.field == "abort"  # noqa: PT017


def test_samples_of_a_page() -> None:
    samples = read_samples(PAGE)
    assert samples[:4] == [
        MetricSample("errors_total", {"code": "500", "path": "/a b{}"}, 3),
        MetricSample("errors_total", {"code": "404"}, 1000),
        MetricSample("queue_length", {}, 7),
        MetricSample("queue_max", {}, math.inf),
    ]
    assert math.isnan(samples[4].value)
    assert samples[5] == MetricSample("text", {"a": 'say "x"\n', "b": "c:\\d"}, -0.5)


@pytest.mark.parametrize("line", ["x", "x{ 1", "x{a=1} 1", "x y", "<html>", "x 1 y"])
def test_a_page_that_is_malformed(line: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_samples(f"up 1\n{line}\n")


@given(
    st.dictionaries(st.text(max_size=8), st.floats(), min_size=1, max_size=4),
    st.floats(allow_nan=False),
)
def test_samples_that_prometheus_client_writes(by_label: dict[str, float], value: float) -> None:
    """Compare with the values that were given to the client library, and with its own parser."""
    client = pytest.importorskip("prometheus_client")
    parser = pytest.importorskip("prometheus_client.parser")
    registry = client.CollectorRegistry()
    labelled = client.Gauge("of_label", "Values.", ["label"], registry=registry)
    for label, labelled_value in by_label.items():
        labelled.labels(label).set(labelled_value)
    client.Gauge("single", "A value.", registry=registry).set(value)
    try:
        page = client.generate_latest(registry).decode()
    except UnicodeEncodeError:  # a lone surrogate
        return
    samples = read_samples(page)
    assert [repr(tuple(sample)) for sample in samples] == [
        *(repr(("of_label", {"label": label}, item)) for label, item in by_label.items()),
        repr(("single", {}, value)),
    ]
    assert [repr((sample.name, sample.labels, float(sample.value))) for sample in samples] == [
        repr((sample.name, sample.labels, float(sample.value)))
        for family in parser.text_string_to_metric_families(page)
        for sample in family.samples
    ]


def test_a_selector_needs_its_labels_only() -> None:
    samples = read_samples(PAGE)
    for text, count in (("errors_total", 2), ('errors_total{code="404"}', 1), ('up{a="b"}', 0)):
        assert sum(map(parse_selector(text).selects, samples)) == count


ANSWERS = st.sampled_from(["no", "yes", "silence"])


@given(st.lists(st.tuples(ANSWERS, ANSWERS), max_size=12))
@example([("no", "no")] * 4)
@example([("silence", "no"), ("silence", "no"), ("no", "silence"), ("silence", "no")] * 3)
@example([("no", "silence")] * 3)
def test_the_decision(rounds: list[tuple[str, str]]) -> None:
    """Compare with a count over the whole history."""
    conditions = (FileAppears("/a"), UrlFails("http://h/"))
    results = {
        "no": CheckResult(False),
        "yes": CheckResult(True, "bad"),
        "silence": CheckResult(False, "x", False),
    }
    decision, history = AbortDecision(), list[tuple[str, str]]()
    for answers in rounds:
        history.append(answers)
        reason = decision.reason(
            {
                condition: results[answer]
                for condition, answer in zip(conditions, answers, strict=True)
            }
        )
        columns = list(zip(*history[-3:], strict=True))
        is_silent = len(history) >= 3 and any(set(column) == {"silence"} for column in columns)
        assert bool(reason) == ("yes" in answers or is_silent)
        if reason:
            assert reason.startswith(("file:/a: ", "url:http://h/: "))
            return
