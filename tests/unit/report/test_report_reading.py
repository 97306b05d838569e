"""The report page for its readers: on a narrow page, on paper, and without knowledge of its
words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from random import Random

import msgspec
import pytest
from unit.report.test_report import (
    broken,
    failed,
    odd_losses,
    outcome,
    passed,
    recovery,
    repeats,
    unknown,
)

import chaoskit.report
from chaoskit.plaintext import shorten_command
from chaoskit.report import words
from chaoskit.report.html import EVIDENCE_LEVELS, write_html
from chaoskit.report.svg import (
    NARROW,
    WIDE,
    AxisScale,
    Caption,
    recovery_scale,
    render_timeline_svg,
    step_axis,
    time_axis,
)
from chaoskit.runlog.account.time_account import TimeAccount
from chaoskit.runlog.outcome import Outcome, PhaseSpan
from chaoskit.vocabulary import LOSS_CAUSES, RECOVERY_PHASES

CHARACTER = 6.4  # pixels: the mean of digits and letters of DejaVu Sans, the widest font of the page, at 11 pixels
SEEDS = range(40)


@dataclass(frozen=True)
class Text:
    """A text of a picture.

    Attributes:
        group: the class of the group around it.
        picture: the number of its picture, which counts the outer pictures.
    """

    picture: int
    group: str
    x: float
    y: float
    anchor: str
    text: str

    def extent(self, width: float) -> tuple[float, float]:
        length, at = len(self.text) * CHARACTER, self.x / 100 * width
        start = at - {"start": 0.0, "middle": length / 2, "end": length}[self.anchor]
        return start, start + length


@dataclass
class Pictures(HTMLParser):
    """The texts with percentages as places, in the pictures of a page."""

    stack: list[tuple[str, str]] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)
    number: int = 0
    place: dict[str, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in {"meta", "br"}:
            return
        attributes = dict(attrs)
        self.number += tag == "svg" and not any(name == "svg" for name, _ in self.stack)
        self.stack.append((tag, attributes.get("class") or ""))
        self.place = attributes

    def handle_endtag(self, tag: str) -> None:
        self.stack.pop()

    def handle_data(self, data: str) -> None:
        place_x = self.place.get("x") or ""
        if self.stack and self.stack[-1][0] == "text" and place_x.endswith("%"):
            group = next(
                (name for _, name in reversed(self.stack) if name in {"wide", "narrow"}), ""
            )
            anchor, place_y = (
                self.place.get("text-anchor") or "start",
                float(self.place.get("y") or 0),
            )
            if (
                place_x != "0%" or anchor != "end"
            ):  # the values of an axis stand to the left of the plot
                self.texts.append(
                    Text(self.number, group, float(place_x[:-1]), place_y, anchor, data)
                )


def pictures(source: str) -> list[Text]:
    parser = Pictures()
    parser.feed(source)
    return parser.texts


def collisions(texts: list[Text], group: str, width: float) -> list[tuple[str, str]]:
    """Return the pairs of texts that overlap on a page that shows ``group``."""
    shown = [text for text in texts if text.group in {"", group}]
    pairs = []
    for first, second in combinations(shown, 2):
        (start, stop), (other_start, other_stop) = first.extent(width), second.extent(width)
        if (
            first.picture == second.picture
            and abs(first.y - second.y) < 11
            and start < other_stop
            and other_start < stop
        ):
            pairs.append((first.text, second.text))
    return pairs


def written(outcomes: list[Outcome], directory: Path) -> str:
    write_html(outcomes, directory / "report.html")
    return (directory / "report.html").read_text(encoding="utf-8")


def account() -> TimeAccount:
    return TimeAccount(
        wall_s=20.0,
        productive_s=9.0,
        stalled_s=0.5,
        recomputed_s=0.5,
        recovery_s=dict.fromkeys(RECOVERY_PHASES[:5], 0.5),
        resize_s=0.5,
        waiting_s=1.0,
        startup_s=4.0,
        closing_s=1.0,
        in_flight_s=1.0,
        degraded_s=2.0,
        missing_s=0.5,
        lost_s={"exited": 3.0, "false alarm (hung)": 0.5, "start-up": 4.0},
        failures=2,
        steps=60,
    )


def many_recoveries() -> Outcome:
    return outcome("many", count=400, injected=tuple(2.0 + 1.5 * number for number in range(30)))


def long_tail() -> Outcome:
    """Return a recovery with redundancy that comes back after two minutes, so that the time axis
    changes its scale.
    """
    base = outcome("long tail", injected=(4.3,))
    way_back = base.recoveries[0]
    last = way_back.spans[-1]
    spans = [*way_back.spans[:-1], msgspec.structs.replace(last, end_s=last.start_s + 120.0)]
    base.recoveries = [msgspec.structs.replace(way_back, spans=spans)]
    return base


class TestLabels:
    @pytest.mark.parametrize(
        "make",
        [passed, failed, unknown, odd_losses, many_recoveries, long_tail],
        ids=lambda make: make.__name__,
    )
    @pytest.mark.parametrize(("group", "width"), [("wide", WIDE), ("narrow", NARROW)])
    def test_no_label_of_a_picture_lies_over_another(
        self, tmp_path: Path, make: object, group: str, width: int
    ) -> None:
        assert callable(make)
        texts = [text for text in pictures(written([make()], tmp_path)) if text.text not in "◆▲"]
        assert len(texts) > 5
        assert collisions(texts, group, width) == []

    @pytest.mark.parametrize("seed", SEEDS)
    def test_no_label_of_any_time_axis_lies_over_another(self, seed: int) -> None:
        random = Random(seed)
        at, spans = 0.0, []
        for name in RECOVERY_PHASES:
            took = 10 ** random.uniform(-4, 2)
            spans.append(
                PhaseSpan(name=name, start_s=at, end_s=at + took, reference_s=0.0, reference="")
            )
            at += took
        way_back = msgspec.structs.replace(recovery(1, 0.0), spans=spans, seconds=spans[4].end_s)
        scale = recovery_scale([way_back])
        for width in (NARROW, 410, WIDE, 1200):
            texts = pictures(f"<svg>{time_axis(scale, 0, 30, width)}</svg>")
            assert texts
            assert collisions(texts, "", width) == []

    @pytest.mark.parametrize("last", [0, 1, 7, 59, 160, 9_999, 123_456, 3_000_000])
    def test_no_label_of_any_step_axis_lies_over_another(self, last: int) -> None:
        for first in (0, last // 2):
            for width in (NARROW, WIDE):
                axis = step_axis(first, last, AxisScale.linear(first, last), 200, width)
                texts = pictures(f"<svg>{axis}</svg>")
                assert collisions(texts, "", width) == []
                assert all(re.fullmatch(r"[\d,]+", text.text) for text in texts), "no exponents"

    def test_a_narrow_plot_has_fewer_labels_and_still_some(self) -> None:
        scale = AxisScale.linear(0, 0.3)
        wide, narrow = (
            pictures(f"<svg>{time_axis(scale, 0, 30, width)}</svg>") for width in (WIDE, NARROW)
        )
        assert len(wide) > len(narrow) >= 2

    def test_values_beside_the_curves_have_the_room_that_they_need(self, tmp_path: Path) -> None:
        base = outcome("huge", count=30)
        base.steps = [
            msgspec.structs.replace(point, loss=1e5 + 10.0 * point.step) for point in base.steps
        ]
        base.twin_losses = None
        room = re.search(r"--axis: (\d+)px", written([base], tmp_path))
        assert room is not None
        assert int(room[1]) >= len("100050") * CHARACTER + 8
        small = re.search(r"--axis: (\d+)px", written([passed()], tmp_path))
        assert small is not None
        assert int(small[1]) < int(room[1])

    def test_captions_keep_a_gap(self) -> None:
        left, right = Caption("10 ms", 10), Caption("20 ms", 20)
        assert left.is_clear_of(right, 800)
        assert not left.is_clear_of(right, 400)


def css() -> str:
    return (Path(chaoskit.report.__file__).parent / "page.css").read_text(encoding="utf-8")


def media(condition: str) -> dict[str, str]:
    """Return the rules of a media block: selector -> declarations."""
    block = css().split(f"@media {condition} {{\n", 1)[1].split("\n}", 1)[0]
    block = re.sub(r"/\*.*?\*/", "", block, flags=re.DOTALL)
    rules = {}
    for selectors, declarations in re.findall(r"([^{}]+)\{([^{}]*)\}", block):
        for selector in selectors.split(","):
            rules[selector.strip()] = rules.get(selector.strip(), "") + declarations
    return rules


@dataclass
class Tables(HTMLParser):
    """The tables of a page: class, names of columns, and each row as (data-name, class) of its
    cells.
    """

    tables: list[tuple[str, list[str], list[list[tuple[str, str]]]]] = field(default_factory=list)
    in_head: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        match tag:
            case "table":
                self.tables.append((attributes.get("class") or "", [], []))
            case "th":
                self.tables[-1][1].append("")
                self.in_head = True
            case "tr" if not self.in_head:
                self.tables[-1][2].append([])
            case "td":
                cell = (attributes.get("data-name") or "", attributes.get("class") or "")
                self.tables[-1][2][-1].append(cell)

    def handle_endtag(self, tag: str) -> None:
        self.in_head = self.in_head and tag != "tr"

    def handle_data(self, data: str) -> None:
        if self.in_head:
            self.tables[-1][1][-1] += data.strip()


class TestNarrowPages:
    def test_a_table_of_many_columns_becomes_a_list_with_the_names_of_its_columns(
        self, tmp_path: Path
    ) -> None:
        parser = Tables()
        parser.feed(written([*repeats(), passed(), failed()], tmp_path))
        folding = [table for table in parser.tables if "folding" in table[0]]
        assert len(folding) >= 3
        for _, columns, rows in folding:
            for row in filter(None, rows):
                names = [name for name, kind in row[1:] if kind != "interval"]
                assert names == [column for column in columns[1:] if column != "01"]
        for classes, columns, _ in parser.tables:
            assert "folding" in classes or len(columns) <= 3
        rules = media("(max-width: 980px)")
        assert "display: block" in rules[".folding td"]
        assert "attr(data-name)" in rules[".folding td[data-name]::before"]

    def test_a_page_shows_the_labels_of_one_width(self) -> None:
        rules = media("(max-width: 640px)")
        assert "display: none" in rules["svg .wide"]
        assert "display: inline" in rules["svg .narrow"]
        assert re.search(r"^svg \.narrow \{ display: none; \}", css(), re.MULTILINE)

    def test_a_shortened_command_keeps_its_script(self) -> None:
        command = "env TORCH_X=1 OMP=2 /opt/bin/torchrun --standalone --nproc-per-node=2 /home/me/job/train.py --lr=1"
        assert (
            shorten_command(command, 90)
            == "torchrun --standalone --nproc-per-node=2 train.py --lr=1"
        )
        assert shorten_command(command, 50) == "torchrun --standalone … train.py --lr=1"
        assert shorten_command("env A=1 /bin/train.py", 90) == "env A=1 /bin/train.py"
        assert len(shorten_command(f"{command} {'--option=value ' * 9}", 60)) <= 60

    def test_a_long_command_is_shortened_in_its_row_and_whole_in_the_facts(
        self, tmp_path: Path
    ) -> None:
        command = (
            "/opt/venv/bin/torchrun --standalone --nproc-per-node=2 "
            + "train.py --option=value " * 10
            + "--end"
        )
        source = written([outcome("long", job=command)], tmp_path)
        row = source.split('<summary class="row">', 1)[1].split("</summary>", 1)[0]
        assert "torchrun --standalone --nproc-per-node=2 train.py" in row
        assert "value --end on" in row
        assert command not in row
        assert f"<dd>{command}" in source


class TestPaper:
    def test_an_open_experiment_may_take_several_pages_and_its_parts_one(self) -> None:
        rules = media("print")
        kept = {
            selector
            for selector, declarations in rules.items()
            if "break-inside: avoid" in declarations
        }
        assert ".experiment" not in kept, (
            "a run that is longer than a page would begin with an empty one"
        )
        assert {
            ".experiment:not([open])",
            ".recovery",
            ".curves figure",
            ".reasons",
            "tr",
            "h3",
        } <= kept

    def test_a_heading_stays_with_what_follows(self) -> None:
        rules = media("print")
        follow = {
            selector
            for selector, declarations in rules.items()
            if "break-after: avoid" in declarations
        }
        assert {"h3", ".experiment > summary", "thead"} <= follow


def sentences() -> Iterator[tuple[str, str]]:
    for name in (
        "OVERVIEW",
        "PROBABILITY",
        "FACTS",
        "PHASES",
        "PARTS",
        "RATIOS",
        "CAUSES",
        "LEVELS",
        "STATES",
        "CHECKS",
    ):
        yield from getattr(words, name).items()


class TestWords:
    def test_every_word_of_the_code_has_a_sentence(self) -> None:
        assert set(RECOVERY_PHASES) == set(words.PHASES)
        assert {name for name, _ in account().parts()} <= set(words.PARTS)
        assert set(words.CAUSES) >= LOSS_CAUSES
        assert set(EVIDENCE_LEVELS) == set(words.LEVELS)
        assert (
            words.cause("false alarm (hung)")
            == f"a rank was replaced without a fault: {words.CAUSES['hung']}"
        )

    def test_a_sentence_is_short_and_explains(self) -> None:
        for word, sentence in sentences():
            assert 3 <= len(sentence.split()) <= 20, word
            assert sentence[0].islower() or sentence.startswith("SHA"), word
            assert not sentence.endswith("."), word

    def test_each_word_stands_beside_its_sentence(self, tmp_path: Path) -> None:
        shown = msgspec.structs.replace(passed(), account=account())
        source = written([shown, *repeats(), unknown(), broken()], tmp_path)
        visible = re.sub(r"<(script|style)\b.*?</\1>", "", source, flags=re.DOTALL)
        visible = " ".join(re.sub(r"<[^>]*>", " ", visible).split())
        explained = [words.OVERVIEW, words.PROBABILITY, words.PHASES, words.LEVELS]
        for word, sentence in (item for mapping in explained for item in mapping.items()):
            assert re.search(rf"{re.escape(word)}[\d. ms]* {re.escape(sentence)}", visible), word
        for word in ("goodput", "ETTR"):
            assert re.search(rf"{word} [\d.]+ % {re.escape(words.RATIOS[word])}", visible), word
        for word in ("substrate", "reduction", "seed", "weights"):
            assert re.search(rf"{word} .{{1,40}} {re.escape(words.FACTS[word])}", visible), word
        assert f"exited 3 s {words.CAUSES['exited']}" in visible
        assert f"start-up 4 s 20 % {words.PARTS['start-up']}" in visible
        assert f"undo failed {words.STATES['undo failed']}" in visible
        assert "the reference is the time of the plain operation alone" in visible
        assert "twin: the same training without a fault" in visible


def test_the_title_of_a_picture_does_not_run_into_its_figures() -> None:
    """A picture that stands alone has a frame of 960 pixels."""
    long = msgspec.structs.replace(
        recovery(2, 4.0), cause="rank 2 was given up: raised (" + "a long reason " * 12 + ")"
    )
    title = re.search(
        r'<text x="20"[^>]*>([^<]*)</text><text x="940"[^>]*>([^<]*)</text>',
        render_timeline_svg(long),
    )
    assert title is not None
    assert 20 + len(title[1]) * 8.7 < 940 - len(title[2]) * 7.2
