"""Tests of the files and journal records of followed logs."""

from __future__ import annotations

from pathlib import Path

from chaoskit.attach.logs.files import LogFiles, read_holes
from chaoskit.attach.logs.records import (
    ContainerLife,
    ContainerLine,
    HoleReason,
    LogHole,
    LogPlace,
)
from chaoskit.journal import Journal, read_journals
from chaoskit.stacks.log import LogReader
from chaoskit.stacks.patterns import LogPatterns
from chaoskit.vocabulary import Event

PLACE = LogPlace("train-0", "0f1e2d3c-4b5a", "main")
SUCCESSOR = LogPlace("train-0", "99999999-4b5a", "main")
LIVES = [ContainerLife(number, f"containerd://{number}") for number in range(2)]


def line(content: bytes, life: int = 0, place: LogPlace = PLACE) -> ContainerLine:
    return ContainerLine(place, LIVES[life], "2026-11-29T12:31:22Z", 0, 0, content)


HOLE = LogHole(PLACE, 0, 0, HoleReason.ROTATED, "reset", "2026-11-29T12:31:22Z", "", 0)


def write(directory: Path) -> None:
    journal = Journal(directory / "journal", "harness")
    files = LogFiles(directory, journal)
    files.receive([line(b"step 1"), line(b"caf\xe9")])
    files.receive([HOLE, line(b"step 2", 1)])
    files.receive([line(b"of the successor", place=SUCCESSOR)])
    files.close()
    journal.close()


def test_each_place_has_a_file_of_plain_text(tmp_path: Path) -> None:
    write(tmp_path)
    texts = {path.name: path.read_bytes() for path in (tmp_path / "log").iterdir()}
    assert texts == {
        "train-0.main.0f1e2d3c.log": b"step 1\ncaf\xe9\nstep 2\n",
        "train-0.main.99999999.log": b"of the successor\n",
    }


def test_the_journal_has_places_lives_and_holes_with_their_line(tmp_path: Path) -> None:
    write(tmp_path)
    records = read_journals(tmp_path / "journal")
    lives = [record for record in records if record.event == Event.LOG_LIFE]
    assert [(record["life"], record["line"]) for record in lives] == [(0, 0), (1, 2), (0, 0)]
    (hole,) = read_holes(records)
    assert (hole.pod, hole.container, hole.file, hole.line) == ("train-0", "main", PLACE.name, 2)
    assert (hole.reason, hole.after, hole.before) == ("rotated", "2026-11-29T12:31:22Z", "")


def test_a_file_can_be_read_for_steps(tmp_path: Path) -> None:
    write(tmp_path)
    reader = LogReader(LogPatterns(step=r"step (\d+)"))
    lines = reader.feed(PLACE.name, (tmp_path / "log" / f"{PLACE.name}.log").read_bytes(), 1)
    assert [shown.step for shown in lines] == [1, 2]


def test_a_hole_names_its_place_and_cause() -> None:
    assert str(HOLE) == (
        "train-0/main: lines may be missing after 2026-11-29T12:31:22Z: "
        "the log was rotated while it was not read (reset)"
    )
