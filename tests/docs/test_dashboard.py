"""The dashboard and the alerts use metrics that exist; the page describes all metrics and no
others.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chaoskit.journal import Journal
from chaoskit.observe.follower import Follower
from chaoskit.observe.live import Live
from chaoskit.observe.metrics import LOOPBACK, MetricsServer, RunMetrics
from chaoskit.runlog.account.time_account import STANDING_PHASES
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import Beat, Heartbeat

pytest.importorskip("prometheus_client", reason="pip install 'chaoskit[observe]'")

DOCS = Path(__file__).parents[2] / "docs"
GRAFANA = DOCS / "grafana"
SUFFIXES = re.compile(r"_(bucket|sum|count|created)$")


def write_run(directory: Path) -> None:
    """Write the journals of a run with a loss and with every event that has metrics of its own."""
    journals = {
        source: Journal(directory / "journal", source) for source in ("coordinator", "node0")
    }
    now = iter(range(1, 10**9, 10**6))

    def write(event: Event, source: str = "coordinator", **fields: Any) -> None:
        journals[source].write(event, t_ns=next(now), **fields)

    def members(*workers: str) -> list[dict[str, Any]]:
        return [
            {"worker": worker, "rank": rank, "node": "node0"} for rank, worker in enumerate(workers)
        ]

    def commit(step: int, generation: int) -> None:
        write(Event.COMMIT, step=step, generation=generation, rank=0, world=1, loss=1.0)

    write(Event.STARTED, name="train", nodes=1, spares=0, steps=9, unix_ns=0, pid=1, ticks=0)
    for worker in ("node0.0", "node0.1"):
        write(Event.WORKER_STARTED, "node0", worker=worker, pid=1)
    write(Event.PLAN, generation=1, abort=True, members=members("node0.0"))
    write(Event.SETTLED, generation=1)
    commit(0, 1)
    write(Event.SAVED, step=0, generation=1, tier="disk", path="", size_bytes=1)
    write(Event.DETECTED, worker="node0.0", rank=0, cause="exited", detail="")
    write(Event.PLAN, generation=2, abort=True, members=members("node0.1"))
    write(Event.QUIESCED, generation=1, rank=0)
    write(Event.REGROUPED, generation=2, rank=0)
    write(Event.ADOPT, generation=2, rank=0)
    commit(1, 2)
    commit(2, 2)
    for journal in journals.values():
        journal.close()


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, dict[str, str]]]:
    """Return the names and labels that the endpoint exports."""
    from urllib.request import urlopen

    from prometheus_client.parser import text_string_to_metric_families

    directory = tmp_path_factory.mktemp("run")
    write_run(directory)
    live = Live()
    live.update(Heartbeat("node0", (Beat("node0.1", 2, 0, 3, 2, 1.0, 0.0, 3, 1.0),)))
    metrics = RunMetrics(live, threading.RLock())
    metrics.follower = Follower(
        directory, on_step=metrics.observe_step, on_setback=metrics.observe_setback
    )
    metrics.follower.poll()
    server = MetricsServer(metrics, LOOPBACK, 0)
    try:
        with urlopen(server.url, timeout=60) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    finally:
        server.close()
    return [(sample.name, sample.labels) for family in families for sample in family.samples]


def asked_for(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Yield the metrics in an expression with the labels that select them, except for the scraper's
    own labels.
    """
    for name, selector in re.findall(r"(chaoskit_\w+)(?:\{([^}]*)\})?", expression):
        yield name, set(re.findall(r"(\w+)\s*(?:=~?|!=)", selector)) - {"job", "instance"}


def expressions() -> list[str]:
    dashboard = json.loads((GRAFANA / "chaoskit.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [note["expr"] for note in dashboard["annotations"]["list"]]
    expressions += [
        variable["query"]
        for variable in dashboard["templating"]["list"]
        if variable["type"] == "query"
    ]
    alerts = msgspec.yaml.decode((GRAFANA / "chaoskit-alerts.yml").read_text())
    return expressions + [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]


def test_what_the_dashboard_asks_for_is_exported(samples: list[tuple[str, dict[str, str]]]) -> None:
    assert len(expressions()) > 20
    for expression in expressions():
        asked = list(asked_for(expression))
        assert asked, expression
        for name, labels in asked:
            assert any(name == exported and labels <= set(had) for exported, had in samples), (
                f"{name} in {expression}"
            )


def test_what_the_legends_name_is_a_label(samples: list[tuple[str, dict[str, str]]]) -> None:
    for panel in json.loads((GRAFANA / "chaoskit.json").read_text())["panels"]:
        for target in panel["targets"]:
            (name, _), *_ = asked_for(target["expr"])
            labels = set().union(*(had for exported, had in samples if exported == name))
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels, panel[
                "title"
            ]


def test_the_page_tells_of_every_metric(samples: list[tuple[str, dict[str, str]]]) -> None:
    page = (DOCS / "observability.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `chaoskit_")]
    described = {name for row in rows for name in re.findall(r"`(chaoskit_\w+)", row)}
    assert {SUFFIXES.sub("", name) for name, _ in samples} == described


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads((GRAFANA / "chaoskit.json").read_text())["panels"]:
        at = panel["gridPos"]
        cells = {
            (at["x"] + column, at["y"] + row) for column in range(at["w"]) for row in range(at["h"])
        }
        assert not cells & taken
        assert max(column for column, _ in cells) < 24
        taken |= cells


def test_prometheus_finds_the_endpoint_and_the_alerts() -> None:
    """Prometheus' configuration has the port of the page and names the file of alerts."""
    configuration = msgspec.yaml.decode((GRAFANA / "prometheus.yml").read_text())
    (job,) = configuration["scrape_configs"]
    (port,) = {
        target.rpartition(":")[2]
        for target_group in job["static_configs"]
        for target in target_group["targets"]
    }
    assert f"--metrics-port {port}" in (DOCS / "observability.md").read_text()
    assert [(GRAFANA / name).exists() for name in configuration["rule_files"]] == [True]


def test_a_rank_does_one_thing(samples: list[tuple[str, dict[str, str]]]) -> None:
    assert {labels["rank"] for name, labels in samples if name == "chaoskit_phase"} == {"0"}


def test_every_phase_of_a_recovery_is_there(samples: list[tuple[str, dict[str, str]]]) -> None:
    phases = {
        labels["phase"] for name, labels in samples if name == "chaoskit_recovery_seconds_count"
    }
    assert phases >= set(STANDING_PHASES)
