"""Real runs with health checks of nodes: an unfit node is given no workers, and the others train
on.
"""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.goals import Flag
from support.waiting import wait_until

from chaoskit.errors import BadInput
from chaoskit.health import Quarantine
from chaoskit.health.quarantine import state_directory
from chaoskit.journal import Record, read_journals
from chaoskit.launcher.launch import LaunchResult, launch_shown
from chaoskit.pytest_plugin import Chaos
from chaoskit.vocabulary import Event, Verdict
from chaoskit.wire.messages import HealthReport, WorkerReady

PLAIN = "../../jobs/failing/troubled.py:plain"


def journal(directory: Path | str, event: Event) -> list[Record]:
    """Return the records of ``event`` from all journals in a directory, by time."""
    return [
        record for record in read_journals(Path(directory) / "journal") if record.event == event
    ]


def hosts(directory: Path | str) -> set[str]:
    """Return the nodes that ever had a rank."""
    return {member["node"] for plan in journal(directory, Event.PLAN) for member in plan["members"]}


@pytest.fixture(autouse=True)
def state(chaos_stock: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Quarantine:
    """Return a quarantine list of this test alone.

    The session's harness is made before, because its undo log must not be in the directory of the
    test.
    """
    chaos_stock.harness("local")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return Quarantine(state_directory())


def launch(
    directory: Path, until: Callable[[], object] | None = None, **settings: Any
) -> LaunchResult:
    """Launch a job of 20 steps, or of more until a condition is true.

    Nodes check their health at a low priority, so that a run may end before they report.
    """
    console = Console(file=io.StringIO())
    job = str(Path(__file__).parent / PLAIN)
    options: dict[str, Any] = {"steps": 20, "step_s": 0.03}
    if until is not None:
        reached = directory.parent / "seen"
        options |= {"until": {"file": str(reached)}}
        threading.Thread(target=_touch_when, args=(until, reached), daemon=True).start()
    settings = {"nodes": 3, "spares": 0} | settings
    return launch_shown(job, console, directory=directory, port=0, options=options, **settings)


def _touch_when(condition: Callable[[], object], file: Path) -> None:
    wait_until(condition, "what the run waits for", limit_s=240.0)  # limit of a whole launch
    file.touch()


def break_disk(directory: Path, node: str) -> None:
    """Make every write of the job on ``node`` fail, even for root."""
    (directory / "disk").mkdir(parents=True)
    (directory / "disk" / node).symlink_to("/proc/self/attr")


@pytest.mark.promise(
    "its fingerprint, which must be that of the others, contains what a fixed computation comes to"
)
def test_healthy_nodes_say_so_and_nothing_else_happens(chaos: Chaos, tmp_path: Path) -> None:
    """Each node reports its health once, with the duration of the checks; all workers have one
    fingerprint.
    """
    reported: set[str] = set()  # nodes that reported their health, and ready workers

    def all_have_reported(message: Any) -> bool:
        reported.update([message.node] if isinstance(message, HealthReport) else [])
        reported.update([message.worker] if isinstance(message, WorkerReady) else [])
        return len(reported) == 5

    flag = Flag(tmp_path / "told", all_have_reported)
    outcome = chaos.run(PLAIN, nodes=2, spares=1, steps=20, until=flag.until, watch=flag)
    reports = {record["node"]: record for record in journal(outcome.directory, Event.HEALTH)}
    assert set(reports) == {"node0", "node1"}
    for report in reports.values():
        assert report["standing"] != "refused"
        assert {"disk.intact", "memory.available_bytes", "clock.step_ms"} <= {
            finding["what"] for finding in report["findings"]
        }
        assert report["took_ms"] > 0
    ready = [record["fingerprint"] for record in journal(outcome.directory, Event.READY)]
    assert len(ready) == 3
    assert len(set(ready)) == 1
    assert "computes " in ready[0]


def test_a_node_whose_disk_takes_no_write_is_given_no_workers(tmp_path: Path) -> None:
    break_disk(tmp_path / "run", "node1")

    def trains_without() -> bool:
        refused = [
            record
            for record in journal(tmp_path / "run", Event.HEALTH)
            if record["standing"] == "refused"
        ]
        worlds = {
            (record["generation"], record["world"])
            for record in journal(tmp_path / "run", Event.COMMIT)
        }
        plans = journal(tmp_path / "run", Event.PLAN)
        without = {
            plan["generation"]
            for plan in plans
            if "node1" not in {member["node"] for member in plan["members"]}
        }
        return bool(refused) and any(
            generation in without and world == 3 for generation, world in worlds
        )

    result = launch(tmp_path / "run", trains_without)
    assert (result.ok, result.world) == (True, 3), result.reason
    assert list(result.unfit) == ["node1"]
    assert result.unfit["node1"].startswith("disk.writable=no")
    final = journal(result.directory, Event.PLAN)[-1]
    assert {member["node"] for member in final["members"]} == {"node0", "node2"}
    given_up = [
        record for record in journal(result.directory, Event.DETECTED) if record["cause"] == "unfit"
    ]
    assert all(record["worker"].startswith("node1.") for record in given_up)
    (refused,) = [
        record
        for record in journal(result.directory, Event.HEALTH)
        if record["standing"] == "refused"
    ]
    assert refused["node"] == "node1"


@pytest.mark.costly
def test_a_run_that_only_reports_uses_it_all_the_same(tmp_path: Path) -> None:
    break_disk(tmp_path / "run", "node1")
    result = launch(
        tmp_path / "run", lambda: len(journal(tmp_path / "run", Event.HEALTH)) >= 3, health="report"
    )
    assert (result.ok, list(result.unfit)) == (True, ["node1"])
    assert hosts(result.directory) == {"node0", "node1", "node2"}


@pytest.mark.costly
def test_a_run_that_does_not_look_finds_nothing(tmp_path: Path) -> None:
    break_disk(tmp_path / "run", "node1")
    result = launch(tmp_path / "run", health="off")
    assert (result.ok, result.unfit, journal(result.directory, Event.HEALTH)) == (True, {}, [])


def test_quarantined_nodes_are_left_alone_and_released_ones_prove_themselves(
    state: Quarantine, tmp_path: Path
) -> None:
    for node in ("node1", "node2"):
        state.add(node, "falls off the bus")
    state.release("node2", "GPU replaced")
    result = launch(tmp_path / "run")
    assert (result.ok, result.world) == (True, 3), result.reason
    assert hosts(result.directory) == {"node0", "node2"}, (
        "node2 was waited for: it has proved itself in time"
    )
    assert [quarantined.node for quarantined in state.entries()] == ["node1"]
    assert journal(result.directory, Event.DETECTED) == []


@pytest.mark.costly
def test_a_released_node_that_is_still_broken_stays_on_probation(
    state: Quarantine, tmp_path: Path
) -> None:
    state.add("node1", "its disk")
    state.release("node1", "somebody looked at it")
    break_disk(tmp_path / "run", "node1")
    result = launch(tmp_path / "run")
    assert (result.ok, hosts(result.directory)) == (True, {"node0", "node2"}), result.reason
    assert journal(result.directory, Event.DETECTED) == [], "it had no worker that could be lost"
    assert state.on_probation() == ("node1",)


def test_a_damaged_list_starts_nothing(state: Quarantine, tmp_path: Path) -> None:
    state.add("node1", "hot")
    state.path.write_text("{")
    with pytest.raises(BadInput) as refused:
        launch(tmp_path / "run")
    assert refused.value.field == "quarantine"
    assert not (tmp_path / "run").exists()


@pytest.mark.promise("One that is not fit gets no workers; the others train on.")
def test_training_is_the_same_without_the_node(chaos: Chaos) -> None:
    """Other nodes compute the shards of a quarantined node, with the losses of the twin on all
    nodes.
    """
    outcome = chaos.run(PLAIN, nodes=3, spares=0, steps=10, quarantined=("node1",), check=False)
    assert hosts(outcome.directory) == {"node0", "node2"}
    assert [check for check in outcome.checks if check.verdict != Verdict.PASSED] == []
    assert outcome.losses


def test_the_list_is_a_file_that_people_can_read(state: Quarantine) -> None:
    state.add("node1", "hot", ["91 C"])
    assert json.loads(state.path.read_text())["entries"]["node1"]["reason"] == "hot"
