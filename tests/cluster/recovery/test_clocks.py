"""Wall clocks in a run: the offset of each from the coordinator's is reported once, and decides
nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaoskit.coordinator.detectors.clocks import Clocks
from chaoskit.health.clock import OffsetWindow
from chaoskit.journal import Record, read_journals
from chaoskit.suites.goals import JournalFlag
from chaoskit.vocabulary import Event, Phase
from chaoskit.wire.messages import Beat, ClockOffset, Finding, Heartbeat
from faults import ClockJump

MS = 10**6


def heartbeat(ahead_ms: float, error_ms: float = 1.0, **workers_ms: float) -> Heartbeat:
    beats = tuple(
        Beat(f"a.{name}", 1, 0, 5, Phase.REDUCE, 1.0, 0.0, 5, 0.0, clock_ms=clock_ms)
        for name, clock_ms in workers_ms.items()
    )
    return Heartbeat("a", beats, 7, ClockOffset(ahead_ms, error_ms))


def severity(finding: Finding | None) -> str:
    return finding.severity if finding is not None else ""


@given(
    st.floats(-1e7, 1e7),
    st.lists(st.tuples(st.integers(0, 500 * MS), st.floats(0, 1)), min_size=1, max_size=20),
)
def test_the_offset_is_right_within_its_error_however_long_the_ways_take(
    ahead_ms: float, trips: list[tuple[int, float]]
) -> None:
    window = OffsetWindow()
    assert window.offset is None
    for number, (rtt_ns, share) in enumerate(trips):
        local_ns = number * 10**9
        remote_ns = local_ns + rtt_ns * share - ahead_ms * MS  # answered somewhere on the way
        window.hear(round(remote_ns), local_ns, rtt_ns)
    offset = window.offset
    assert offset is not None
    assert abs(offset.ahead_ms - ahead_ms) <= offset.error_ms + 1e-3
    assert offset.error_ms == min(rtt_ns for rtt_ns, _ in trips[-16:]) / 2e6


def test_it_is_told_when_it_is_found_right_when_it_goes_and_when_it_comes_back() -> None:
    clocks = Clocks()
    assert clocks.hear(Heartbeat("a", (), 7)) is None, "nothing was measured"
    offsets_ms = [0.3, 90.0, 150.0, 900.0, 80.0, 99.0, 40.0, -40.0, -150.0, 0.0]
    assert [severity(clocks.hear(heartbeat(ahead_ms))) for ahead_ms in offsets_ms] == [
        *("ok", "", "warn", "", "", "", "ok", "", "warn", "ok"),
    ], "one near the limit is not told of all the time"
    clocks.forget("a")
    assert severity(clocks.hear(heartbeat(0.0))) == "ok"


def test_what_is_not_certain_is_not_held_against_a_clock() -> None:
    assert severity(Clocks().hear(heartbeat(300.0, error_ms=250.0))) == "ok"


def test_a_worker_whose_own_clock_is_off_is_named() -> None:
    clocks = Clocks()
    finding = clocks.hear(heartbeat(0.0, w0=0.01, w1=-3.6e6))
    assert finding is not None
    assert (finding.what, finding.severity, finding.value) == (
        "clock.offset_ms",
        "warn",
        3.6e6 - 1.0,
    )
    assert finding.detail.startswith("a.w1 is behind the coordinator")
    assert clocks.hear(heartbeat(0.0, w0=0.01, w1=-3.6e6)) is None


def test_years_are_no_reason_to_keep_a_node_out() -> None:
    assert severity(Clocks().hear(heartbeat(1e11))) == "warn"


def warnings_of_clock(record: Record) -> list[dict[str, Any]]:
    """Return the warnings about the clock of node1 in a health record."""
    if record.event != Event.HEALTH or record["node"] != "node1":
        return []
    findings: list[dict[str, Any]] = record["findings"]
    return [
        finding
        for finding in findings
        if finding["what"] == "clock.offset_ms" and finding["severity"] == "warn"
    ]


@pytest.mark.promise(
    "A clock that is off by more than the limit for certain is a warning in the journal and in the node's report",
    seconds=3600.0,
)
@pytest.mark.parametrize("seconds", [3600.0, -3600.0])
def test_a_clock_that_jumps_is_told_and_changes_nothing(chaos: Any, seconds: float) -> None:
    """A heartbeat of the node reports the jump, however many steps there are until then."""
    flag = JournalFlag(chaos, lambda record: bool(warnings_of_clock(record)))
    fault = ClockJump(rank=1, at_step=8, seconds=seconds)
    plan: dict[str, Any] = {
        "nodes": 2,
        "steps": 20,
        "until": flag.until,
        "watch": flag,
        "deadline_s": 120.0,
    }
    outcome = chaos.run("../../jobs/failing/troubled.py:plain", faults=[fault], **plan)
    records = list(read_journals(Path(outcome.directory) / "journal"))
    reports = [
        record for record in records if record.event == Event.HEALTH and record["node"] == "node1"
    ]
    (off,) = warnings_of_clock(reports[-1])
    assert reports[-1]["standing"] == "admitted with warnings"
    assert off["value"] == pytest.approx(3.6e6, abs=1e3)
    assert off["detail"].startswith(
        f"node1.0 is {'ahead of' if seconds > 0 else 'behind'} the coordinator"
    )
    assert [record for record in records if record.event == Event.DETECTED] == []
    outcome.assert_same_losses_as_twin()
