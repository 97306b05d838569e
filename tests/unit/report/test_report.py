"""The report layer: texts in the terminal, in XML, in JSON and on the page."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest
from rich.console import Console

from chaoskit.errors import BadInput
from chaoskit.report.html import write_html
from chaoskit.report.junit import junit_properties, write_junit
from chaoskit.report.store import read_outcomes, write_outcome
from chaoskit.report.summary import (
    duration,
    loss_sentence,
    match_losses,
    render_summary,
    with_reference,
)
from chaoskit.report.svg import (
    AxisScale,
    downsample,
    nice_ticks,
    recovery_scale,
    render_timeline_svg,
)
from chaoskit.runlog.outcome import (
    Check,
    CopyInterval,
    EvidenceRecord,
    FaultRecord,
    Ledger,
    Outcome,
    PhaseSpan,
    Recovery,
    StepPoint,
)
from chaoskit.vocabulary import RECOVERY_PHASES, Verdict

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
STEP_S = 0.16
#: For each phase of a recovery: its milliseconds, its reference in milliseconds, and the name of
#: the reference.
PHASES = (
    (3.1, 0.3, "one wake-up of the watcher"),
    (1.8, 1.4, "shutdown(2) of 6 sockets"),
    (11.2, 6.0, "2 round trips and 3 connections"),
    (0.0, 0.0, "nobody was behind"),
    (176.4, 160.0, "one step at 3 ranks"),
    (412.0, 244.0, "fork 44 ms, 122 MB at 1 GB/s, one step"),
    (88.0, 61.0, "122 MB at 2 GB/s"),
)


def recovery(rank: int, injected_s: float, *, slower: float = 1.0, generation: int = 2) -> Recovery:
    spans, at = [], injected_s
    for name, (took, reference, described) in zip(RECOVERY_PHASES, PHASES, strict=True):
        spans.append(
            PhaseSpan(
                name=name,
                start_s=at,
                end_s=at + took * slower / 1e3,
                reference_s=reference / 1e3,
                reference=described,
            )
        )
        at = spans[-1].end_s
    return Recovery(
        cause=f"rank {rank}: killed by SIGKILL",
        fault=f"Kill(rank={rank}, at_step=20)",
        injected_s=injected_s,
        generation=generation,
        world=3,
        spans=spans,
        seconds=spans[4].end_s - injected_s,
        full_strength_seconds=spans[5].end_s - injected_s,
        step_seconds=STEP_S,
    )


def loss_at(step: int) -> float:
    return (
        2.3 * math.exp(-step / 40)
        + 0.9
        + 0.05 * math.sin(step * 1.7)
        + 0.02 * math.sin(step * 0.31)
    )


def points(count: int, recoveries: list[Recovery]) -> list[StepPoint]:
    """Return committed steps of a run that stands still during each recovery, and then lacks a rank
    for three steps.
    """
    steps, at, generation, world, small_until = [], 1.0, 1, 4, -1
    waiting = sorted(recoveries, key=lambda pending: pending.injected_s)
    for step in range(count):
        begin, at = at, at + STEP_S
        if waiting and at > waiting[0].injected_s:
            current = waiting.pop(0)
            at, generation, world, small_until = (
                current.injected_s + current.seconds,
                generation + 1,
                3,
                step + 3,
            )
        elif step == small_until:
            generation, world = generation + 1, 4
        steps.append(
            StepPoint(
                step=step,
                loss=loss_at(step),
                at_s=at,
                seconds=at - begin,
                generation=generation,
                world=world,
            )
        )
    return steps


def kill(rank: int, step: int, injected_s: float) -> FaultRecord:
    return FaultRecord(
        fault=f"Kill(rank={rank}, at_step={step})",
        kind="Kill",
        rank=rank,
        step=step,
        phase="backward",
        injected_s=injected_s,
        state="confirmed",
        evidence=[
            EvidenceRecord(
                level="armed", at_s=injected_s + 0.0001, observed="kill(4127, SIGKILL) returned 0"
            ),
            EvidenceRecord(
                level="effective",
                at_s=injected_s + 0.0031,
                observed="pidfd of 4127 readable, exit signal 9",
            ),
            EvidenceRecord(
                level="impactful",
                at_s=injected_s + 0.0049,
                observed="3 of 4 ranks left generation 1",
            ),
        ],
    )


def outcome(
    name: str,
    *,
    verdict: Verdict = Verdict.PASSED,
    count: int = 60,
    injected: tuple[float, ...] = (),
    **changes: object,
) -> Outcome:
    recoveries = [
        recovery(index + 1, at, slower=1 + 0.3 * index) for index, at in enumerate(injected)
    ]
    steps = points(count, recoveries)
    base = Outcome(
        name=name,
        job="gpt",
        substrate="local",
        nodes=4,
        spares=1,
        seed=7,
        reduction="exact",
        started="2026-03-02T10:15:00+00:00",
        wall_s=18.2,
        verdict=verdict,
        reasons=[],
        steps=steps,
        twin_losses=[loss_at(step) for step in range(count)],
        faults=[kill(index + 1, 20, at) for index, at in enumerate(injected)],
        recoveries=recoveries,
        checks=[
            Check(name="recovery time", verdict=Verdict.PASSED, detail="0.192 s, limit 0.5 s"),
            Check(
                name="loss continuity",
                verdict=verdict,
                detail="compared with the twin, step by step",
            ),
        ],
        ledger=Ledger(steps=count, samples=count * 32),
        lost_steps=0,
        weights_digest="9f2c4e01aa73be55d0",
        twin_weights_digest="9f2c4e01aa73be55d0",
        environment={
            "python": "3.11.9",
            "torch": "2.9.1",
            "kernel": "6.8.0-45",
            "cpus": 2,
            "chaoskit": "0.1.0",
        },
        directory="/tmp/chaoskit/runs/20260302-101500",
    )
    return msgspec.structs.replace(base, **changes)


def passed() -> Outcome:
    return outcome("losing a rank costs nothing", injected=(4.3, 6.4, 8.3))


def failed() -> Outcome:
    base = outcome("resize changes the sum", verdict=Verdict.FAILED, injected=(4.3,), lost_steps=2)
    steps = [
        msgspec.structs.replace(point, loss=point.loss + 1.25e-7 * point.step)
        if point.loss is not None and point.step >= 21
        else point
        for point in base.steps
    ]
    base.steps = steps
    base.reasons = ["loss continuity: step 21 differs from the twin", "lost steps: 2, allowed 0"]
    base.twin_weights_digest = "0011223344556677"
    base.ledger = Ledger(steps=60, samples=1920, repeated=["step 20 shard 1", "step 20 shard 3"])
    return base


def unknown() -> Outcome:
    fault = FaultRecord(
        fault="Cut(node=1, at_step=30)", kind="Cut", step=30, injected_s=5.0, state="not observed"
    )
    reason = "Cut(node=1, at_step=30): no evidence that it took effect"
    return outcome(
        "a cut nobody felt",
        verdict=Verdict.UNKNOWN,
        faults=[fault],
        reasons=[reason],
        twin_losses=None,
    )


def broken() -> Outcome:
    return outcome(
        "the harness broke",
        verdict=Verdict.ERROR,
        count=0,
        reasons=["cannot create a network namespace: EPERM"],
        checks=[],
        environment={},
        weights_digest=None,
        directory="",
        faults=[FaultRecord(fault="Cut(node=1)", kind="Cut", undone=False, state="undo failed")],
    )


def odd_losses() -> Outcome:
    """Return an outcome with NaN, infinite and skipped losses, and a twin that goes on for
    longer.
    """
    base = outcome("odd losses", count=40)
    changed = {5: math.nan, 9: math.inf, 10: -math.inf, 20: None, 21: None}
    base.steps = [msgspec.structs.replace(p, loss=changed.get(p.step, p.loss)) for p in base.steps]
    base.twin_losses = [changed.get(step, loss_at(step)) for step in range(45)]
    base.ledger = Ledger(steps=38, samples=1216, skipped=["step 20", "step 21"])
    return base


def repeats() -> list[Outcome]:
    verdicts = [Verdict.PASSED, Verdict.PASSED, Verdict.FAILED, Verdict.PASSED]
    return [
        outcome(f"kill[repeat{number}]", verdict=verdict, injected=(4.3,), seed=number)
        for number, verdict in enumerate(verdicts)
    ]


@dataclass
class Page(HTMLParser):
    """A parsed page: its elements with attributes, the text of each kind of element, and the open
    tags.
    """

    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)
    stack: list[str] = field(default_factory=list)
    islands: list[str] = field(default_factory=list)

    VOID = frozenset({"meta", "br", "img", "link", "input"})

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.stack[-1] if self.stack else "", data))
        if self.stack[-1:] == ["script"] and self.elements[-1][1].get("type") == "application/json":
            self.islands.append(data)

    def text(self) -> str:
        return " ".join(
            " ".join(data for tag, data in self.texts if tag not in {"script", "style"}).split()
        )

    def with_class(self, name: str) -> list[dict[str, str | None]]:
        return [
            attributes
            for _, attributes in self.elements
            if name in (attributes.get("class") or "").split()
        ]


def page(outcomes: list[Outcome], directory: Path) -> Page:
    write_html(outcomes, directory / "report.html")
    parsed = Page()
    parsed.feed((directory / "report.html").read_text(encoding="utf-8"))
    assert parsed.stack == []
    return parsed


def terminal(outcomes: list[Outcome], *, encoding: str = "utf-8", width: int = 80) -> str:
    console = Console(width=width, force_terminal=False, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(render_summary(outcomes))
    return capture.get()


def test_what_copies_leave_at_risk_is_told(tmp_path: Path) -> None:
    """The risk is given in steps and in seconds if a replicated state was copied."""
    copied = msgspec.structs.replace(passed(), copies=CopyInterval(steps=17, seconds=2.55))
    words = "at most 17 steps (2.55 s) are computed again if all ranks end during one update"
    assert words in " ".join(terminal([copied], width=120).split())
    assert "one update" not in terminal([passed()], width=120)
    single = msgspec.structs.replace(passed(), copies=CopyInterval(steps=1, seconds=0.2))
    assert "at most 1 step (200 ms) is computed again" in " ".join(
        terminal([single], width=120).split()
    )
    write_html([copied], tmp_path / "report.html")
    assert words in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_limits_of_phases_and_the_suspects_are_told(tmp_path: Path) -> None:
    limited = msgspec.structs.replace(
        passed(), hang_limits_ms={"forward": 620, "optimizer": 1500}, suspects=1
    )
    words = "forward 620 ms, optimizer 1.5 s; 1 rank ended on suspicion"
    assert f"hang limits: {words}" in " ".join(terminal([limited], width=120).split())
    assert "hang limits" not in terminal([passed()], width=120)
    write_html([limited], tmp_path / "report.html")
    assert words in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_experiments_of_several_sessions_are_told_apart(tmp_path: Path) -> None:
    """A directory may hold the runs of several pytest sessions, and of replays."""
    first, second = "20260302-101500-17", "20260302-111500-18"
    runs = [outcome("one", session=first), outcome("two", verdict=Verdict.FAILED, session=second)]
    runs += [outcome("three", session=second), outcome("four")]
    words = terminal(runs, width=120)
    places = [
        words.index(line)
        for line in (
            f"session {first}: 1 experiment: 1 passed",
            "one",
            f"session {second}: 2 experiments: 1 passed, 1 failed",
            "three",
            "outside of pytest: 1 experiment: 1 passed",
            "four",
        )
    ]
    assert places == sorted(places)
    assert "session" not in terminal(runs[1:3]), "a single one needs no name"
    assert {first, second} <= set(page(runs, tmp_path).text().split())
    assert dict(junit_properties(runs[0]))["chaoskit.session"] == first


class TestStore:
    def test_what_was_written_is_read(self, tmp_path: Path) -> None:
        originals = [passed(), failed(), unknown(), broken()]
        for index, original in enumerate(originals):
            assert write_outcome(original, tmp_path / str(index) / "deep").name == "outcome.json"
        assert read_outcomes(tmp_path) == originals

    def test_non_finite_losses_survive_in_standard_json(self, tmp_path: Path) -> None:
        path = write_outcome(odd_losses(), tmp_path)
        json.loads(path.read_text(), parse_constant=pytest.fail)
        losses = [point.loss for point in read_outcomes(tmp_path)[0].steps]
        assert losses[5] is not None
        assert math.isnan(losses[5])
        assert losses[9:11] == [math.inf, -math.inf]
        assert losses[20] is None

    def test_runs_are_in_the_order_in_which_they_started(self, tmp_path: Path) -> None:
        write_outcome(outcome("second", started="2026-03-02T11:00:00+00:00"), tmp_path / "a")
        write_outcome(outcome("first", started="2026-03-02T10:00:00+00:00"), tmp_path / "b")
        assert [stored.name for stored in read_outcomes(tmp_path)] == ["first", "second"]

    def test_a_new_outcome_replaces_the_old_one_and_leaves_nothing_else(
        self, tmp_path: Path
    ) -> None:
        write_outcome(passed(), tmp_path)
        write_outcome(failed(), tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["outcome.json"]
        assert read_outcomes(tmp_path)[0].verdict is Verdict.FAILED

    def test_a_directory_without_outcomes_is_bad_input(self, tmp_path: Path) -> None:
        with pytest.raises(BadInput, match="name a directory") as caught:
            read_outcomes(tmp_path)
        assert (caught.value.field, caught.value.value) == ("directory", str(tmp_path))

    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"name": 3}', b"\xff\xfe"])
    def test_a_damaged_file_is_named(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "outcome.json").write_bytes(content)
        with pytest.raises(BadInput, match="run the experiment again") as caught:
            read_outcomes(tmp_path)
        assert caught.value.value == str(tmp_path / "outcome.json")


class TestWords:
    @pytest.mark.parametrize(
        ("seconds", "text"),
        [
            (0, "0 ms"),
            (0.0031, "3.1 ms"),
            (0.0612, "61.2 ms"),
            (0.9996, "1 s"),
            (47.04, "47 s"),
            (None, "–"),
        ],
    )
    def test_durations(self, seconds: float | None, text: str) -> None:
        assert duration(seconds) == text

    def test_a_phase_shows_its_reference_in_the_same_unit(self) -> None:
        span = PhaseSpan(
            name="detected", start_s=2.0, end_s=2.0031, reference_s=0.0003, reference="a wake-up"
        )
        assert with_reference(span) == "3.1 ms (reference 0.3)"
        slow = msgspec.structs.replace(span, end_s=20.8)
        assert with_reference(slow) == "18.8 s (reference 0.3 ms)"

    def test_equal_losses(self) -> None:
        assert loss_sentence(passed()) == "60 of 60 losses bit-equal to the twin"

    def test_the_first_difference_is_named(self) -> None:
        sentence = loss_sentence(failed())
        assert sentence.startswith(
            "21 of 60 losses bit-equal to the twin; first difference at step 21: "
        )
        assert sentence.endswith("= 2.63e-06")

    def test_a_nan_equals_a_nan_and_a_skip_a_skip(self) -> None:
        match = match_losses(odd_losses())
        assert match is not None
        assert match.exact

    def test_a_skip_that_the_twin_did_not_make_is_a_difference(self) -> None:
        odd = odd_losses()
        odd.twin_losses = [loss_at(step) for step in range(40)]
        assert "first difference at step 5" in loss_sentence(odd)
        odd.steps = odd.steps[20:]
        assert "first difference at step 20: skipped here" in loss_sentence(odd)

    def test_without_a_twin(self) -> None:
        assert loss_sentence(unknown()) == "no twin to compare with"


class TestSummary:
    def test_every_experiment_has_a_row_that_fits_80_columns(self) -> None:
        text = terminal([passed(), failed(), unknown(), broken()])
        assert max(map(len, text.splitlines())) <= 80
        assert re.search(
            r"^PASSED +losing a rank costs nothing +3/3 +308 ms +\S+ ms +0 +60/60",
            text,
            re.MULTILINE,
        )
        for word in ("FAILED", "UNKNOWN", "ERROR", "gpt on 4 nodes + 1", "Cut(node=1, at_step=30)"):
            assert word in text

    def test_reasons_are_given_for_what_did_not_pass(self) -> None:
        text = terminal([passed(), failed(), broken()])
        assert "- lost steps: 2, allowed 0" in text
        assert "- cannot create a network namespace: EPERM" in text

    def test_timeline_bars_carry_phase_duration_and_reference(self) -> None:
        text = terminal([passed()])
        assert re.search(r"detected +█+ +3\.1 ms \(reference 0\.3\)", text)
        assert re.search(r"full strength +[█→]+ +412 ms \(reference 244\)", text)
        assert "first good step 192 ms, full strength 604 ms" in " ".join(text.split())

    def test_the_recovery_probability_of_repeats_and_of_all(self) -> None:
        text = " ".join(terminal([*repeats(), passed(), unknown()], width=120).split())
        assert (
            "kill Kill(rank=1, at_step=20) recovered in 3 of 4 runs: 75 %, 95 % interval 30.06 % to 95.44 %"
            in text
        )
        assert "p50 192 ms, worst of 3 192 ms" in text
        assert "all experiments recovered in 4 of 5 runs: 80 %" in text
        assert text.count("recovered in") == 2  # a single run has no line of its own
        assert "1 unknown" in text

    def test_a_lone_run_has_no_probability(self) -> None:
        assert "probability" not in terminal([passed()])

    def test_no_experiment(self) -> None:
        assert "No experiment was run" in terminal([])

    def test_bars_are_ascii_where_the_log_is(self, tmp_path: Path) -> None:
        with (tmp_path / "log").open("w", encoding="ascii", errors="replace") as log:
            Console(file=log, width=80).print(render_summary([passed()]))
        text = (tmp_path / "log").read_text(encoding="ascii")
        assert re.search(r"detected +#+ +3\.1 ms", text)

    def test_markup_in_names_is_text(self) -> None:
        assert "[red]x[/nope]" in terminal([outcome("[red]x[/nope]")])


class TestJunit:
    def test_properties(self) -> None:
        properties = dict(junit_properties(passed()))
        assert properties["chaoskit.verdict"] == "passed"
        assert properties["chaoskit.recovery_s"] == "0.308000"
        assert properties["chaoskit.phase.first_good_step_s"] == "0.282240"
        assert properties["chaoskit.reference.first_good_step_s"] == "0.160000"
        assert properties["chaoskit.lost_steps"] == "0"
        assert properties["chaoskit.fault.1"] == "Kill(rank=2, at_step=20): confirmed"
        assert "effective: pidfd of 4127 readable" in properties["chaoskit.evidence.1"]

    def test_a_run_without_recovery_has_no_recovery_time(self) -> None:
        properties = dict(junit_properties(unknown()))
        assert "chaoskit.recovery_s" not in properties
        assert properties["chaoskit.evidence.0"] == "none"

    def test_file(self, tmp_path: Path) -> None:
        write_junit([passed(), failed(), unknown(), broken()], tmp_path / "junit.xml")
        suite = ET.parse(tmp_path / "junit.xml").getroot().find("testsuite")
        assert suite is not None
        assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("4", "1", "2")
        cases = suite.findall("testcase")
        assert [[child.tag for child in case if child.tag != "properties"] for case in cases] == [
            [],
            ["failure"],
            ["error"],
            ["error"],
        ]
        assert (
            cases[1].find("failure").get("message")
            == "failed: loss continuity: step 21 differs from the twin"
        )  # type: ignore[union-attr]
        assert cases[0].find("properties/property[@name='chaoskit.recovery_s']") is not None

    def test_control_characters_and_markup(self, tmp_path: Path) -> None:
        hostile = outcome(f"\x1b[31m{HOSTILE}\x00", verdict=Verdict.FAILED, reasons=["\x07bell"])
        write_junit([hostile], tmp_path / "junit.xml")
        case = ET.parse(tmp_path / "junit.xml").getroot().find("testsuite/testcase")
        assert case is not None
        assert case.get("name") == f"\ufffd[31m{HOSTILE}\ufffd"


class TestPage:
    def test_overview(self, tmp_path: Path) -> None:
        parsed = page([passed(), failed(), unknown(), broken()], tmp_path)
        text = parsed.text()
        assert ("title", "error: chaoskit report") in parsed.texts
        assert "4 experiments" in text
        assert "6.8.0-45" in text
        sections = parsed.with_class("experiment")
        assert ["open" in section for section in sections] == [False, True, True, True]
        for reason in failed().reasons + unknown().reasons + broken().reasons:
            assert reason in text

    def test_recovery_timelines(self, tmp_path: Path) -> None:
        parsed = page([passed()], tmp_path)
        assert len(parsed.with_class("recovery")) == 3
        labels = [attributes.get("aria-label") or "" for _, attributes in parsed.elements]
        assert (
            sum(
                label.startswith("Recovery timeline: detected 3.1 ms (reference 0.3)")
                for label in labels
            )
            == 1
        )
        text = parsed.text()
        assert "reference 160 ms: one step at 3 ranks" in text
        assert "1.15 × the reference of 168 ms" in text

    def test_training_curves(self, tmp_path: Path) -> None:
        parsed = page([passed()], tmp_path)
        assert "60 of 60 losses bit-equal to the twin" in parsed.text()
        assert len(parsed.with_class("generation")) == 6
        assert (
            len(parsed.with_class("window")) == 3 * 3 + 1
        )  # three recoveries in three pictures, and the legend
        labels = {attributes.get("aria-label") for _, attributes in parsed.elements}
        assert "World size by step: 4 → 3 → 4 → 3 → 4 → 3 → 4" in labels

    def test_a_difference_is_marked_and_put_in_words(self, tmp_path: Path) -> None:
        parsed = page([failed()], tmp_path)
        assert "first difference at step 21" in parsed.text()
        assert [
            tag for tag, attributes in parsed.elements if attributes.get("class") == "difference"
        ] == ["i", "line"]

    def test_many_recoveries_stay_readable(self, tmp_path: Path) -> None:
        parsed = page([outcome("many", injected=(2.1, 3.3, 5.1, 7.0, 8.8))], tmp_path)
        assert "and 2 more" in parsed.text()
        folded = [
            tag
            for tag, attributes in parsed.elements
            if tag == "details" and "class" not in attributes
        ]
        assert len(folded) == 2  # the first three show their phases, the others on demand

    def test_connections_that_were_refused_are_a_number(self, tmp_path: Path) -> None:
        flooded = outcome("flooded", refused_connections=1234)
        assert "refused connections 1234" in " ".join(page([flooded], tmp_path).text().split())
        broken = outcome("broken", injected=(4.3,), refused_connections=1234)
        assert "refused connections: 1234" in terminal([broken])
        assert "refused connections" not in terminal([outcome("quiet", injected=(4.3,))])

    def test_only_what_all_share_is_the_environment_of_the_page(self, tmp_path: Path) -> None:
        other = {**passed().environment, "torch": "2.10.0"}
        parsed = page([passed(), broken(), outcome("newer torch", environment=other)], tmp_path)
        assert "kernel 6.8.0-45" in parsed.text()
        assert parsed.text().count("6.8.0-45") == 1
        assert "torch 2.10.0" in parsed.text()

    def test_faults_checks_and_ledger(self, tmp_path: Path) -> None:
        text = page([passed(), failed(), unknown(), broken()], tmp_path).text()
        for expected in (
            "kill(4127, SIGKILL) returned 0",
            "rank 1, step 20, in backward",
            "– nothing observed",
            "? not observed",
            "✕ undo failed",
            "✕ not undone",
            "0.192 s, limit 0.5 s",
            "step 20 shard 1, step 20 shard 3",
            "No recovery was recorded.",
            "No step was committed.",
            "No check was made.",
            "9f2c4e01aa73 = twin",
            "9f2c4e01aa73 ≠ twin 001122334455",
        ):
            assert expected in text

    def test_odd_losses_are_marked_and_break_the_line(self, tmp_path: Path) -> None:
        parsed = page([odd_losses()], tmp_path)
        assert len(parsed.with_class("skipped")) == 2
        assert len(parsed.with_class("nonfinite")) == 3
        assert not any("nan" in (attributes.get("d") or "") for _, attributes in parsed.elements)

    @pytest.mark.parametrize("losses", [[None, None], [math.nan, math.inf], [1.5, 1.5], [2.0]])
    def test_curves_without_a_range(self, tmp_path: Path, losses: list[float | None]) -> None:
        flat = outcome("flat", count=len(losses))
        flat.steps = [
            msgspec.structs.replace(point, loss=loss)
            for point, loss in zip(flat.steps, losses, strict=True)
        ]
        flat.twin_losses = losses
        parsed = page([flat], tmp_path)
        assert f"{len(losses)} of {len(losses)} losses bit-equal" in parsed.text()

    def test_no_outcome(self, tmp_path: Path) -> None:
        parsed = page([], tmp_path)
        assert "No experiment was run" in parsed.text()
        assert ("title", "unknown: chaoskit report") in parsed.texts

    def test_ten_thousand_steps_stay_drawable(self, tmp_path: Path) -> None:
        parsed = page(
            [outcome("long", count=10_000, injected=tuple(100.0 * n for n in range(1, 15)))],
            tmp_path,
        )
        lines = [attributes["d"] or "" for tag, attributes in parsed.elements if tag == "path"]
        assert lines
        assert all(line.count("L") < 1_700 for line in lines)
        assert "10000 of 10000 losses bit-equal to the twin" in parsed.text()

    def test_recovery_probability(self, tmp_path: Path) -> None:
        parsed = page([*repeats(), passed(), unknown()], tmp_path)
        text = parsed.text()
        assert "all experiments 4 of 5 80 % 37.55 % to 96.38 %" in text
        assert "kill Kill(rank=1, at_step=20) 3 of 4 75 % 30.06 % to 95.44 %" in text
        assert "192 ms – 192 ms of 3 1 – " in text
        labels = [attributes.get("aria-label") for _, attributes in parsed.elements]
        assert "75 %, 95 % interval 30.06 % to 95.44 %" in labels

    def test_where_nothing_was_broken_there_is_no_probability(self, tmp_path: Path) -> None:
        assert "Recovery probability" not in page([outcome("calm")], tmp_path).text()

    def test_settings_that_were_chosen_are_facts(self, tmp_path: Path) -> None:
        assert "shards 8" in page([outcome("fine", settings={"shards": 8})], tmp_path).text()

    def test_hostile_texts_stay_texts(self, tmp_path: Path) -> None:
        hostile = msgspec.structs.replace(
            failed(),
            name=HOSTILE,
            job=HOSTILE,
            reasons=[HOSTILE],
            environment={HOSTILE: HOSTILE},
            directory=HOSTILE,
        )
        hostile.recoveries = [msgspec.structs.replace(hostile.recoveries[0], cause=HOSTILE)]
        hostile.faults[0].fault = HOSTILE
        parsed = page([hostile], tmp_path)
        assert not [tag for tag, _ in parsed.elements if tag == "img"]
        assert not [attributes for _, attributes in parsed.elements if "onerror" in attributes]
        scripts = [attributes for tag, attributes in parsed.elements if tag == "script"]
        assert [attributes.get("type") for attributes in scripts] == ["application/json", None]
        assert json.loads(parsed.islands[0])["name"] == HOSTILE
        assert HOSTILE in [data for _, data in parsed.texts]

    def test_the_island_holds_the_outcome(self, tmp_path: Path) -> None:
        parsed = page([passed(), failed()], tmp_path)
        for data, original in zip(parsed.islands, [passed(), failed()], strict=True):
            assert msgspec.convert(json.loads(data), Outcome) == original

    def test_nothing_is_loaded(self, tmp_path: Path) -> None:
        parsed = page([passed(), broken()], tmp_path)
        source = (tmp_path / "report.html").read_text(encoding="utf-8")
        assert not re.search(r"https?://", source)
        assert "@import" not in source
        assert "url(" not in source
        assert not [
            tag
            for tag, attributes in parsed.elements
            if tag in {"link", "img", "iframe"} or "src" in attributes
        ]
        assert all(
            attributes["href"] and attributes["href"].startswith("./")
            for tag, attributes in parsed.elements
            if tag == "a"
        )


class TestPictures:
    def test_a_timeline_stands_alone(self) -> None:
        picture = render_timeline_svg(recovery(2, 4.0))
        root = ET.fromstring(picture)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        words = [element.text for element in root.iter() if element.text]
        for name in RECOVERY_PHASES:
            assert name in words
        assert "reference 0.3: one wake-up of the watcher" in words
        assert "var(" not in picture

    def test_hostile_causes_are_escaped(self) -> None:
        hostile = msgspec.structs.replace(recovery(2, 4.0), cause=HOSTILE)
        root = ET.fromstring(render_timeline_svg(hostile))
        assert HOSTILE in [element.text for element in root.iter()]

    def test_a_recovery_without_phases(self) -> None:
        bare = msgspec.structs.replace(recovery(2, 4.0), spans=[])
        assert ET.fromstring(render_timeline_svg(bare)) is not None

    def test_the_axis_changes_scale_only_before_a_long_tail(self) -> None:
        short = recovery(2, 4.0)
        assert (
            len(recovery_scale([msgspec.structs.replace(short, spans=short.spans[:5])]).knots) == 2
        )
        knots = recovery_scale([short]).knots
        assert [position for _, position in knots] == [0, 60, 100]
        assert knots[1][0] == pytest.approx(short.seconds)

    def test_downsampling_keeps_ends_and_extremes(self) -> None:
        line = [(float(place), math.sin(place / 50)) for place in range(10_000)]
        line[4321], line[8765] = (4321.0, 9.0), (8765.0, -9.0)
        thin = downsample(line)
        assert len(thin) <= 1502
        assert {line[0], line[-1], line[4321], line[8765]} <= set(thin)
        assert thin == sorted(thin)

    @pytest.mark.parametrize(
        ("low", "high", "ticks"),
        [
            (0, 10, [0, 2, 4, 6, 8, 10]),
            (0.93, 3.21, [1, 1.5, 2, 2.5, 3]),
            (5, 5, [5]),
            (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        ],
    )
    def test_ticks_are_round(self, low: float, high: float, ticks: list[float]) -> None:
        assert nice_ticks(low, high) == pytest.approx(ticks)

    def test_a_scale_stays_in_its_range(self) -> None:
        scale = AxisScale.linear(2, 4)
        assert [scale(value) for value in (1, 2, 3, 4, 9)] == [0, 0, 50, 100, 100]
        assert AxisScale.linear(3, 3)(3) == 50
