"""Observers of real runs: a metrics scraper, a trace collector, and `chaoskit top` in another
terminal.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.waiting import wait_until

from chaoskit.journal import Journal, JournalTail, read_journals
from chaoskit.observe.follower import Follower
from chaoskit.observe.frame import Frame
from chaoskit.observe.histograms import Histogram
from chaoskit.observe.live import FILE_NAME, Live, LiveFile, read_live
from chaoskit.observe.metrics import RunMetrics
from chaoskit.observe.notes import Note
from chaoskit.observe.picture import draw, sparkline
from chaoskit.observe.spans import Clock, Span, all_spans
from chaoskit.report.terminal import Terminal
from chaoskit.runlog.account.time_account import Recently, TimeAccount
from chaoskit.runlog.outcome import CopyInterval
from chaoskit.vocabulary import RECOVERY_PHASES, Event, Phase
from chaoskit.wire.messages import Beat, Endpoint, Heartbeat, Member, Plan, WorkerLost, WorkerReady
from faults import Kill

LIMIT_S = 60.0

SCRIPT = """
import torch
from torch import nn

from chaoskit.fixtures.jobs.goal import Goal


def train(trainer, *, steps: int = 20, goal: str = ""):
    torch.manual_seed(trainer.seed)
    data = torch.linspace(0, 1, 64).unsqueeze(1)
    model = nn.Linear(1, 1)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    end = Goal(trainer, steps, {"file": goal} if goal else None)
    while end.is_ahead():
        with trainer.transaction() as step:
            end.pace(0.05)
            for shard in step.shards(data, batch_size=8):
                step.backward(((model(shard.batch) - 3 * shard.batch) ** 2).mean())
"""


class Collector:
    """An OTLP/HTTP receiver.

    Attributes:
        spans: all received spans, by id.
    """

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
            ExportTraceServiceResponse,
        )

        self.spans: dict[bytes, Any] = {}
        self.posts = 0
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    data = gzip.decompress(data)
                collector.posts += self.path == "/v1/traces"
                for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans |= {span.span_id: span for span in scope.spans}
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - its name in the library
                """Write no log to the output of the test."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans.values() if span.name == name]


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.sdk", reason="pip install 'chaoskit[observe]'")
    receiver = Collector()
    yield receiver
    receiver.close()


def chaoskit(directory: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "chaoskit", *arguments]


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "COLUMNS": "120"
    }  # readline of this process may have exported a width
    return subprocess.run(
        chaoskit(directory, *arguments), cwd=directory, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        env=environment,
    )  # fmt: skip


def scrape(url: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the value of each sample, by name and labels."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    assert all(family.documentation for family in families)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.mark.slow
@pytest.mark.promise("Four ways to look at a run, all fed from the same journals")
@pytest.mark.costly
def test_a_launch_that_loses_a_rank_is_seen_from_all_sides(
    tmp_path: Path, collector: Collector
) -> None:
    pytest.importorskip("prometheus_client", reason="pip install 'chaoskit[observe]'")
    (tmp_path / "train.py").write_text(SCRIPT)
    goal = tmp_path / "seen"
    arguments = [
        "launch",
        "train.py",
        "--nodes",
        "2",
        "--report",
        "run",
        "--json",
        "--set",
        f"goal={goal}",
    ]
    arguments += ["--set", "steps=60", "--checkpoint-every", "50"]
    offered = ["--metrics-port", "0", "--otlp-endpoint", collector.url]
    launcher = subprocess.Popen(
        chaoskit(tmp_path, *arguments, *offered, "--checkpoints", "kept"),
        cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert launcher.stderr is not None
        url = next(line.split()[1] for line in launcher.stderr if line.startswith("metrics: "))
        assert url.startswith("http://127.0.0.1:")
        wait_until(lambda: scrape(url).get(("chaoskit_step_total", ()), 0) > 5, "the first steps")
        early = scrape(url)
        assert early["chaoskit_node_up", (("node", "node1"),)] == 1
        assert ("chaoskit_losses_total", (("cause", "exited"),)) not in early
        journals = read_journals(tmp_path / "run" / "journal")
        plan = next(record for record in journals if record.event == Event.PLAN)
        victim = plan["members"][1]["worker"]
        os.kill(
            next(
                ready["pid"]
                for ready in journals
                if ready.event == Event.READY and ready.source == victim
            ),
            signal.SIGKILL,
        )
        counted = ("chaoskit_time_to_recover_seconds_count", ())
        later = wait_until(lambda: (sample := scrape(url)).get(counted) and sample, "the recovery")
        check_scrape(early, later)
        live = json.loads(run(tmp_path, "top", "run", "--json").stdout)
        assert live["state"] == "training"
        assert any("lost: its process ended" in note["text"] for note in live["notes"])
        ranks = [
            worker
            for node in live["nodes"]
            for worker in node["workers"]
            if worker["rank"] is not None
        ]
        assert sorted(worker["rank"] for worker in ranks) == [0, 1]
        assert all(
            worker["age_s"] is not None for worker in ranks
        )  # from heartbeats, not from journals
        goal.touch()  # the job may end
        launcher.stderr.read()
        assert launcher.stdout is not None
        result = json.loads(launcher.stdout.read())
        assert launcher.wait(LIMIT_S) == 0
    finally:
        launcher.kill()
        launcher.wait()
    account = result["account"]
    assert account["failures"] == 1
    assert account["wall_s"] == pytest.approx(
        account["productive_s"] + sum(account["lost_s"].values()), abs=1e-5
    )
    assert 0 < account["goodput"] <= account["ettr_wall"] <= account["ettr_productive"] < 1
    with pytest.raises(OSError):
        scrape(url)  # the endpoint ended with the launch
    check_trace(list(collector.spans.values()))
    assert collector.posts > 1  # the recovery was sent when it was over, the run at its end
    again = dict(collector.spans)
    assert (
        run(
            tmp_path, "trace", "run", "--otlp-endpoint", collector.url, "--file", "trace.json"
        ).returncode
        == 0
    )
    assert set(collector.spans) == set(again)  # the same spans under the same names
    check_file(tmp_path / "trace.json", collector)
    check_end(tmp_path, result["steps"])


def check_scrape(early: dict[Any, float], later: dict[Any, float]) -> None:
    assert later["chaoskit_losses_total", (("cause", "exited"),)] == 1
    assert later["chaoskit_generation", ()] == early["chaoskit_generation", ()] + 1
    assert later["chaoskit_world_size", ()] == 2
    assert later["chaoskit_step_total", ()] >= early["chaoskit_step_total", ()]
    assert later["chaoskit_lost_seconds_total", (("cause", "exited"),)] > 0
    assert 0 < later["chaoskit_goodput_ratio", ()] < 1
    for phase in RECOVERY_PHASES[:5]:
        assert later["chaoskit_recovery_seconds_count", (("phase", phase),)] == 1
    total_s = later["chaoskit_time_to_recover_seconds_sum", ()]
    parts_s = sum(
        later["chaoskit_recovery_seconds_sum", (("phase", phase),)] for phase in RECOVERY_PHASES[:5]
    )
    assert parts_s == pytest.approx(total_s, rel=1e-9)
    lost_s = sum(
        reading for (name, _), reading in later.items() if name == "chaoskit_lost_seconds_total"
    )
    together_s = (
        lost_s
        + later["chaoskit_productive_seconds_total", ()]
        + later["chaoskit_unsettled_seconds", ()]
    )
    assert together_s == pytest.approx(later["chaoskit_wall_seconds_total", ()], abs=1e-6)
    steps = later["chaoskit_step_seconds_count", ()]
    assert (
        later["chaoskit_step_seconds_bucket", (("le", "+Inf"),)]
        == steps
        > early["chaoskit_step_seconds_count", ()]
    )
    for rank in "01":
        doing = [
            reading
            for (name, labels), reading in later.items()
            if name == "chaoskit_phase" and ("rank", rank) in labels
        ]
        assert (len(doing), sum(doing)) == (len(Phase), 1)


def check_trace(spans: list[Any]) -> None:
    by_id = {span.span_id: span for span in spans}
    assert len({span.trace_id for span in spans}) == 1
    root = next(span for span in spans if not span.parent_span_id)
    for span in spans:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        if span.parent_span_id:  # inside its parent
            parent = by_id[span.parent_span_id]
            assert parent.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= parent.end_time_unix_nano
    assert abs(root.end_time_unix_nano - time.time_ns()) < LIMIT_S * 1e9
    (recovery,) = [span for span in spans if span.name == "recovery"]
    attributes = {attribute.key: attribute.value for attribute in recovery.attributes}
    assert attributes["chaoskit.cause"].string_value == "exited"
    assert attributes["chaoskit.rank"].int_value == 1
    assert attributes["chaoskit.generation"].int_value == 2
    phases = sorted(
        (span for span in spans if span.parent_span_id == recovery.span_id),
        key=lambda span: RECOVERY_PHASES.index(span.name),
    )
    assert {span.name for span in phases} >= set(RECOVERY_PHASES[:6])
    ends = [recovery.start_time_unix_nano, *(span.end_time_unix_nano for span in phases)]
    assert [span.start_time_unix_nano for span in phases] == ends[
        :-1
    ]  # one after the other, with no gap
    assert ends[-1] == recovery.end_time_unix_nano


def check_file(path: Path, collector: Collector) -> None:
    (line,) = path.read_text().splitlines()
    spans = [
        span
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
    assert {span["spanId"] for span in spans} == {name.hex() for name in collector.spans}
    assert {span["traceId"] for span in spans} == {
        span.trace_id.hex() for span in collector.spans.values()
    }


def test_a_picture_that_is_printed_once_is_wrapped_and_a_live_one_is_cut() -> None:
    """A printed picture loses no text on 60 columns; a live picture keeps its number of lines."""
    names = {name for name in TimeAccount.__struct_fields__ if name.endswith("_s")} - {
        "recovery_s",
        "lost_s",
    }
    seconds: dict[str, Any] = dict.fromkeys(names, 1.0)
    lost_s = {"start-up": 18.0, "waiting for nodes": 1.5, "checkpoint": 1.2, "last cause": 1.0}
    values: dict[str, Any] = {
        "directory": "run", "name": "train", "state": "training", "started_ns": 0, "elapsed_s": 9.0, "step": 9,
        "steps": 4000, "loss": 1.0, "losses": [1.0] * 90, "steps_per_s": 7.86, "world": 2, "full_world": 2,
        "generation": 1, "spares_ready": 1, "spares": 1, "recoveries": 3, "recovering_s": None, "suspects": 0,
        "nodes": [], "tiers": [], "notes": [Note(0, "info", "word " * 20 + "end")],
    }  # fmt: skip
    frame = Frame(
        **values,
        hang_limits_ms={"forward": 677, "backward": 577, "optimizer": 709},
        copies=CopyInterval(steps=5, seconds=0.6),
        account=TimeAccount(**seconds, recovery_s={}, lost_s=lost_s, failures=0, steps=9),
        recently=Recently(wall_s=1.0, goodput=1.0, ettr_wall=1.0, ettr_productive=1.0),
    )
    texts: dict[int | None, str] = {}
    for height in (None, 40):
        file = io.StringIO()
        Terminal(file=file, width=60).print(draw(frame, height))
        texts[height] = " ".join(file.getvalue().split())
    ends = [
        "spares 1/1 recovered 3×",
        "during one update",
        "optimizer 709 ms",
        "last cause 1 s",
        "word end",
    ]
    assert [end for end in ends if end not in texts[None]] == []
    assert [end for end in ends if end in texts[40]] == []


def check_end(directory: Path, steps: int) -> None:
    shown = run(directory, "top", "run", "--once")
    assert shown.returncode == 0, shown.stderr
    assert "completed" in shown.stdout
    assert f"step {steps}/60" in shown.stdout  # an open-ended job shows its least number of steps
    assert "ETTR" in shown.stdout
    assert "per productive hour" in shown.stdout
    frame = json.loads(run(directory, "top", "run", "--json").stdout)
    assert (frame["state"], frame["step"], frame["recoveries"]) == ("completed", steps, 1)
    saved = [
        record["step"]
        for record in read_journals(directory / "run" / "journal")
        if record.event == Event.SAVED
    ]
    assert [tier["step"] for tier in frame["tiers"] if tier["tier"] == "disk"] == [max(saved)]
    assert "hang limits  forward " in shown.stdout
    assert list(frame["hang_limits_ms"]) == ["forward", "backward", "optimizer"]
    assert frame["suspects"] == 0
    assert frame["copies"]["steps"] >= 1
    assert "computed again if all ranks end during one update" in shown.stdout
    notes = [note["text"] for note in frame["notes"]]
    end = next(place for place, text in enumerate(notes) if text.startswith("the job ended"))
    assert all(
        "stored on" in text for text in notes[end + 1 :]
    )  # the last step, and a snapshot that was on its way


@pytest.mark.slow
@pytest.mark.promise(
    "a receiver that is away, a disk that is full or a scraper that hangs changes no step"
)
@pytest.mark.costly
def test_a_receiver_that_is_away_costs_no_training(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="pip install 'chaoskit[observe]'")
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run(
        tmp_path,
        "launch",
        "train.py",
        "--nodes",
        "1",
        "--set",
        "steps=4",
        "--otlp-endpoint",
        "http://127.0.0.1:9",
    )
    assert done.returncode == 0, done.stderr
    assert "did not take all spans" in done.stdout


BAD_INPUTS = [
    (["top", "nowhere"], "RUN_DIR nowhere: "),
    (["top"], "RUN_DIR: "),
    (["trace", "nowhere", "--file", "x.json"], "RUN_DIR nowhere: "),
    (["trace", "nowhere"], "--otlp-endpoint: "),
    (["trace", "nowhere", "--otlp-endpoint", "localhost"], "--otlp-endpoint localhost: "),
    (["launch", "train.py", "--otlp-endpoint", "ftp://x"], "--otlp-endpoint ftp://x: "),
    (["launch", "train.py", "--metrics-port", "70000"], "--metrics-port 70000: "),
]


@pytest.mark.parametrize(("arguments", "complaint"), BAD_INPUTS)
def test_bad_input_is_one_line(tmp_path: Path, arguments: list[str], complaint: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.promise("under these their phases, one after the other without a gap")
def test_the_spans_of_a_run_tell_of_its_recovery(chaos: Any) -> None:
    outcome = chaos.run(
        "gpt", nodes=2, spares=1, steps=20, twin=False, faults=[Kill(rank=0, at_step=6)]
    )
    follower = Follower(Path(outcome.directory))
    follower.finish()
    assert follower.is_over
    assert follower.started is not None
    run_span = all_spans(follower, follower.started)
    (recovery,) = [span for span in run_span.children if span.name == "recovery"]
    assert recovery.attributes["chaoskit.fault"] == "Kill(rank=0, at_step=6)"
    assert dict(recovery.moments).keys() == {"injected", "noticed"}
    times = {span.name: (span.begin_ns, span.end_ns) for span in recovery.children}
    for span in outcome.recovery.spans:  # the timeline reads the same journals in its own way
        begin_ns, end_ns = times[span.name]
        near = (
            0.2 if span.name in ("restored", "first good step") else 0.001
        )  # a state is there, and is taken over
        assert (begin_ns - run_span.begin_ns) / 1e9 == pytest.approx(span.start_s, abs=near)
        assert (end_ns - run_span.begin_ns) / 1e9 == pytest.approx(span.end_s, abs=near)
    assert_nested(run_span)
    clock = Clock.of(follower.started)
    assert abs(clock.unix(time.monotonic_ns()) - time.time_ns()) < 1e9


def assert_nested(span: Span) -> None:
    for child in span.children:
        assert span.begin_ns <= child.begin_ns <= child.end_ns <= span.end_ns
        assert_nested(child)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batches=st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=8))
def test_a_tail_reads_every_record_once(
    batches: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("tail")
    tail, numbers = JournalTail(directory, without=[Event.REDUCE]), []
    journals = [Journal(directory, f"node{number}") for number in range(4)]
    written = 0
    for batch in batches:
        for source in batch:
            journals[source].write(Event.COMMIT, number=written)
            journals[source].write(Event.REDUCE, number=written)
            written += 1
        polled = tail.poll()
        assert [record.t_ns for record in polled] == sorted(record.t_ns for record in polled)
        numbers += [record["number"] for record in polled]
    for journal in journals:
        journal.close()
    assert sorted(numbers) == list(range(written))
    assert numbers == sorted(numbers)


def test_a_line_that_is_half_written_waits(tmp_path: Path) -> None:
    path, tail = tmp_path / "node0.jsonl", JournalTail(tmp_path)
    with closing(Journal(tmp_path, "node0")) as journal:
        journal.write(Event.COMMIT, t_ns=1, step=1)
        journal.write(Event.COMMIT, t_ns=2, step=2)
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    assert [record.t_ns for record in tail.poll()] == [1]
    path.write_bytes(whole)
    assert [(record.t_ns, record["step"]) for record in tail.poll()] == [(2, 2)]
    assert tail.poll() == []


def test_heartbeats_are_shown_to_other_processes(tmp_path: Path) -> None:
    live = Live()
    beat = Beat("node0.0", 1, 0, 7, 2, 12.5, 0.0, 7, float("nan"))
    live.update(Heartbeat("node0", (beat,)))
    LiveFile(tmp_path, live).refresh()
    state = read_live(tmp_path)
    pulse, now_ns = state.pulses["node0.0"], time.monotonic_ns()
    assert (pulse.step, pulse.age_ms, pulse.loss) == (7, 12.5, None)
    assert state.is_fresh(now_ns)
    assert state.is_up("node0", now_ns)
    assert not state.is_up("node1", now_ns)
    assert not state.is_fresh(now_ns + 10**10)
    live.update(WorkerLost("node0.0", "node0", "killed", "", 0))
    assert live.state().pulses == {}
    (tmp_path / FILE_NAME).write_text("{")
    assert read_live(tmp_path).pulses == {}


def test_spares_are_counted_from_the_journals(tmp_path: Path) -> None:
    """Messages of a coordinator are no count: one that takes over sends the plan and all workers
    again.
    """
    pytest.importorskip("prometheus_client", reason="pip install 'chaoskit[observe]'")
    with closing(Journal(tmp_path / "journal", "coordinator")) as journal:
        for worker in ("node0.0", "node0.1"):
            journal.write(Event.SPARE_READY, worker=worker)
        members = [{"rank": 0, "worker": "node0.0", "node": "node0"}]
        journal.write(Event.PLAN, generation=1, abort=True, members=members)
    live = Live()
    endpoint = Endpoint("", "", 0, 1, -1)
    live.update(Plan(1, (Member(0, "node0.0", "node0", endpoint, (0,)),), True))
    for worker in ("node0.0", "node0.1"):
        live.update(WorkerReady(worker, "node0", endpoint))
    metrics = RunMetrics(live, threading.RLock())
    metrics.follower = Follower(tmp_path)
    metrics.follower.finish()
    families = {family.name: family for family in metrics.collect()}
    assert [sample.value for sample in families["chaoskit_spares_ready"].samples] == [1]


def test_a_histogram_counts_up_to_its_bounds() -> None:
    histogram = Histogram((1.0, 2.0))
    for seconds in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(int(seconds * 1e9))
    assert histogram.buckets() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert histogram.sum_s == 12.0


def test_a_sparkline_goes_from_the_lowest_to_the_highest() -> None:
    assert sparkline([0.0, 7.0, None, 3.5, float("inf")]) == "▁█·▅·"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == ""
