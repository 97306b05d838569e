"""Tests of journals: every record survives any death of its writer, in one order, and a torn line
does no harm.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nodes.disks import SmallDisk, small_disk
from support.waiting import stays, wait_until

from chaoskit.errors import JournalFull
from chaoskit.journal import (
    FileCoverage,
    Journal,
    JournalTail,
    load_journals,
    read_events,
    read_journals,
    read_tail,
)
from chaoskit.vocabulary import Event

WAIT_S = 60.0

# Writes records, each numbered and padded to another length, and prints the numbers of the written ones.
WRITER = """
import os, sys
from pathlib import Path
from chaoskit.journal import Journal
from chaoskit.vocabulary import Event

journal, most, count = Journal(Path(sys.argv[1]), sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
for number in range(count):
    journal.write(Event.COMMIT, number=number, writer=os.getpid(), filling="x" * (number * 7919 % most))
    os.write(1, b"%d\\n" % number)
"""

# Writes one record for each line on its standard input.
ON_DEMAND = """
import os, sys
from pathlib import Path
from chaoskit.journal import Journal
from chaoskit.vocabulary import Event

journal = Journal(Path(sys.argv[1]), sys.argv[2])
while os.read(0, 1):
    journal.write(Event.READY)
    os.write(1, b"written\\n")
"""


def start(
    directory: Path, source: str, longest: int, count: int = 10**9
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", WRITER, str(directory), source, str(longest), str(count)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, env=dict(os.environ, PYTHONDONTWRITEBYTECODE="1")
    )


def reported(writer: subprocess.Popen[bytes], at_least: int) -> int:
    """Wait until the writer has reported ``at_least`` records; return the number of the last
    one.
    """
    assert writer.stdout is not None
    for line in writer.stdout:
        if int(line) >= at_least:
            return int(line)
    raise AssertionError("a writer ended early")


def last_reported(writer: subprocess.Popen[bytes], fallback: int) -> int:
    """Return the last record that a writer, now dead, has reported; ``fallback`` if no report is
    left to read.
    """
    assert writer.stdout is not None
    numbers = [
        int(line) for line in writer.stdout.read().splitlines(keepends=True) if line.endswith(b"\n")
    ]
    return numbers[-1] if numbers else fallback


@pytest.fixture
def writers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Provide a list of processes that are ended with the test."""
    with ExitStack() as stack:
        started: list[subprocess.Popen[bytes]] = []
        yield started
        for writer in started:
            writer.kill()
            stack.enter_context(writer)


@pytest.mark.parametrize("longest", [80, 40_000])
def test_a_kill_loses_nothing_that_was_reported(
    tmp_path: Path, writers: list[subprocess.Popen[bytes]], longest: int
) -> None:
    """Processes killed while they write leave every reported record, whole, and no hole or torn
    line between them.
    """
    writers += [start(tmp_path, f"worker{number}", longest) for number in range(4)]
    counts = [reported(writer, 40 + 15 * number) for number, writer in enumerate(writers)]
    for writer in writers:
        writer.send_signal(signal.SIGKILL)
    assert [writer.wait(WAIT_S) for writer in writers] == [-signal.SIGKILL] * 4
    records = read_journals(tmp_path)
    for number, writer in enumerate(writers):
        own_records = [record for record in records if record.source == f"worker{number}"]
        assert [record["number"] for record in own_records] == list(range(len(own_records)))
        assert len(own_records) > last_reported(writer, counts[number])
        assert {record["writer"] for record in own_records} == {writer.pid}
        *lines, rest = (tmp_path / f"worker{number}.jsonl").read_bytes().split(b"\n")
        assert [json.loads(line)["number"] for line in lines] == list(range(len(lines))), (
            "torn, and not at the end"
        )
        assert len(lines) == len(own_records)
        assert not rest or rest.startswith(b"{")


def test_records_of_all_processes_are_in_the_order_of_time(
    tmp_path: Path, writers: list[subprocess.Popen[bytes]]
) -> None:
    """Journals that grew side by side are read as one sequence, in the order of time."""
    command = [sys.executable, "-c", ON_DEMAND, str(tmp_path)]
    writers += [
        subprocess.Popen(
            [*command, source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        for source in "cab"
    ]
    order = random.Random(3).choices(range(3), k=60)
    before_ns = time.monotonic_ns()
    for number in order:
        stdin, stdout = writers[number].stdin, writers[number].stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(b"\n")
        assert stdout.readline() == b"written\n"
    records = read_journals(tmp_path)
    assert [record.source for record in records] == ["cab"[number] for number in order]
    times = [before_ns, *(record.t_ns for record in records), time.monotonic_ns()]
    assert times == sorted(times)


def test_two_processes_can_append_to_one_journal(
    tmp_path: Path, writers: list[subprocess.Popen[bytes]]
) -> None:
    """A record is one write at the end of the file: two processes do not tear each other's
    lines.
    """
    writers += [start(tmp_path, "shared", 9000, 300) for _ in range(2)]
    for writer in writers:
        assert writer.communicate(timeout=WAIT_S)[0].count(b"\n") == 300
    records = read_journals(tmp_path)
    for writer in writers:
        assert [record["number"] for record in records if record["writer"] == writer.pid] == list(
            range(300)
        )
    # a writer that begins while another one writes may see an unfinished line, and begin one of its own
    assert (
        len([line for line in (tmp_path / "shared.jsonl").read_bytes().splitlines() if line]) == 600
    )


def test_a_record_that_comes_too_late_goes_to_no_other_file(tmp_path: Path) -> None:
    """A thread may write after its journal was closed, when another file has got that
    descriptor.
    """
    journal = Journal(tmp_path, "worker")
    before = set(os.listdir("/proc/self/fd"))
    journal.close()
    with (tmp_path / "other").open("wb") as other:
        assert str(other.fileno()) in before, "the test has to get that descriptor"
        with pytest.raises(OSError, match="Bad file descriptor"):
            journal.write(Event.READY, worker="a")
        with pytest.raises(OSError, match="Bad file descriptor"):
            journal.close()
        assert os.fstat(other.fileno()).st_size == 0


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    """Wherever the last line of a file was cut off, all records before it are read, and the torn
    line is counted.
    """
    journal = Journal(tmp_path, "worker")
    journal.write(Event.READY, worker="a")
    journal.write(Event.FAILED, error="Überraschung \u2028 \U0001f525", step=3)
    journal.close()
    path = tmp_path / "worker.jsonl"
    whole = path.read_bytes()
    first_bytes = whole.index(b"\n") + 1
    assert [record.event for record in read_journals(tmp_path)] == ["ready", "failed"]
    for cut in range(first_bytes, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert [record.event for record in read_journals(tmp_path)] == ["ready"]
        assert coverage(tmp_path).bad_lines == coverage(tmp_path).torn == (cut > first_bytes)
    path.write_bytes(whole[:-1])
    assert [record.event for record in read_journals(tmp_path)] == ["ready", "failed"], (
        "only its end was lost"
    )


RESERVED = ("event", "by", "seq", "crc", "self")
names = st.text(st.characters(categories=["Ll"]), min_size=1, max_size=6).filter(
    lambda name: name not in RESERVED
)
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
)
values = st.recursive(
    leaves | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, database=None)
@given(st.dictionaries(names, values, max_size=4))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, fields: dict[str, object]
) -> None:
    """Any plain values are read back unchanged, even line breaks and odd characters, without
    closing the file.
    """
    directory = tmp_path_factory.mktemp("journal")
    journal = Journal(directory, "worker")
    journal.write(Event.LEVER, **fields)  # type: ignore[arg-type]
    journal.write(Event.READY)
    first, second = read_journals(directory)
    assert (first.event, first.source, first.fields) == ("lever", "worker", fields)
    assert all(
        first[name] == content and first.get(name) == content for name, content in fields.items()
    )
    assert first.get("not there", 5) == 5
    with pytest.raises(KeyError):
        first["not there"]
    assert (second.event, second.fields) == ("ready", {})
    journal.close()


def test_a_record_can_carry_the_time_of_what_it_reports(tmp_path: Path) -> None:
    """A given time puts the record in its place among those of other processes."""
    journal, other = Journal(tmp_path, "agent"), Journal(tmp_path, "worker")
    seen_ns = time.monotonic_ns()
    other.write(Event.COMMIT, step=0)
    journal.write(Event.DETECTED, t_ns=seen_ns, worker="worker")
    assert [(record.event, record.source) for record in read_journals(tmp_path)] == [
        ("detected", "agent"),
        ("commit", "worker"),
    ]
    assert read_journals(tmp_path)[0].t_ns == seen_ns


def test_a_journal_is_continued_not_replaced(tmp_path: Path) -> None:
    """Opening a journal again keeps its records; a missing directory is created."""
    directory = tmp_path / "deep" / "down"
    for step in range(3):
        journal = Journal(directory, "worker")
        journal.write(Event.COMMIT, step=step)
        journal.close()
    assert [record["step"] for record in read_journals(directory)] == [0, 1, 2]
    assert read_journals(tmp_path / "nothing") == []


def test_a_journal_tells_whether_it_has_a_record(tmp_path: Path) -> None:
    """A process that continues a journal writes what is missing, and nothing twice."""
    with closing(Journal(tmp_path, "coordinator")) as journal:
        journal.write(Event.PLAN, t_ns=7, generation=2, members=[{"rank": 0, "shards": (0, 1)}])
    with closing(Journal(tmp_path, "coordinator")) as journal:
        assert journal.has(
            Event.PLAN, t_ns=7, generation=2, members=[{"rank": 0, "shards": (0, 1)}]
        )
        assert not journal.has(
            Event.PLAN, t_ns=8, generation=2, members=[{"rank": 0, "shards": (0, 1)}]
        )
        assert not journal.has(
            Event.PLAN, t_ns=7, generation=3, members=[{"rank": 0, "shards": (0, 1)}]
        )
        assert not journal.has(Event.SETTLED, t_ns=7, generation=2)


def test_a_tail_holds_the_newest_records(tmp_path: Path) -> None:
    """The tail of a long journal is an unbroken run of its last records; a short journal is read
    whole.
    """
    journal, short = Journal(tmp_path, "long"), Journal(tmp_path, "short")
    for step in range(1500):
        journal.write(Event.COMMIT, step=step, filling="x" * (step % 1000))
    short.write(Event.READY)
    tail = read_tail(tmp_path)
    steps = [record["step"] for record in tail if record.source == "long"]
    assert 100 < len(steps) < 1500
    assert steps == list(range(1500 - len(steps), 1500))
    assert [record.event for record in tail if record.source == "short"] == ["ready"]


# -- what is damaged, missing, or there twice ------------------------------------------------------


def written(directory: Path, count: int) -> Path:
    """Write a journal of ``count`` commits, and return its path."""
    with closing(Journal(directory, "worker")) as journal:
        for step in range(count):
            journal.write(Event.COMMIT, step=step, worker="Wörker")
    return directory / "worker.jsonl"


def coverage(directory: Path) -> FileCoverage:
    return load_journals(directory).files["worker"]


NO_RECORDS = {
    "a number": b"1",
    "a text": b'"opened"',
    "a list": b"[{}]",
    "no time": b'{"event":"ready"}',
    "no checksum": b'{"t_ns":1,"event":"ready","by":"00000000","seq":0}',
    "a time that is none": b'{"t_ns":"x","event":"ready"}',
    "half a line": b'{"t_ns":1,"eve',
    "the end of a line": b'dy","by":"00000000","seq":0,"crc":"00000000"}',
    "the checksum of nothing": b',"crc":"00000000"}',
    "not UTF-8": b'{"t_ns":1,"event":"\xff\xfe"}',
    "zeros": bytes(4096),
    "nested too deep": b'{"t_ns":' + b"[" * 100_000,
}


@pytest.mark.parametrize("place", [0, 2, 4])
@pytest.mark.parametrize("what", NO_RECORDS)
def test_a_line_that_is_no_record_is_counted_and_stops_no_reader(
    tmp_path: Path, what: str, place: int
) -> None:
    """A bad line may be at the begin, in the middle or at the end; each reader continues with the
    next line.
    """
    path = written(tmp_path, 4)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:place], NO_RECORDS[what] + b"\n", *lines[place:]]))
    records = read_journals(tmp_path)
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert (
        read_events(tmp_path, Event.COMMIT)
        == read_tail(tmp_path)
        == JournalTail(tmp_path).poll()
        == records
    )
    covered = coverage(tmp_path)
    assert (covered.records, covered.bad_lines, covered.missing, covered.torn) == (4, 1, 0, False)


def test_no_bit_of_a_journal_changes_unnoticed(tmp_path: Path) -> None:
    """Any wrong bit makes a line count as bad, and no record is read that was not written."""
    path = written(tmp_path, 3)
    whole, records = path.read_bytes(), read_journals(tmp_path)
    for place in range(len(whole)):
        for bit in range(8):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
            journals = load_journals(tmp_path)
            assert journals.files["worker"].bad_lines >= 1, (place, bit)
            assert all(record in records for record in journals.records), (place, bit)


def test_a_line_that_comes_again_is_read_once(tmp_path: Path) -> None:
    path = written(tmp_path, 4)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines, lines[1], lines[1], lines[3]]))
    assert [record["step"] for record in read_journals(tmp_path)] == [0, 1, 2, 3]
    covered = coverage(tmp_path)
    assert (covered.records, covered.repeated, covered.missing, covered.bad_lines) == (4, 3, 0, 0)


def test_a_line_that_is_there_twice_is_in_its_place(tmp_path: Path) -> None:
    """Whichever copy comes first, records of one moment are in the order in which they were
    written.
    """
    journal = Journal(tmp_path, "one")
    for step in range(1, 5):
        journal.write(Event.COMMIT, step=step, t_ns=81)
    journal.close()
    path = tmp_path / "one.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], lines[3], *lines[2:]]))
    commits = [record["step"] for record in read_journals(tmp_path) if record.event == Event.COMMIT]
    assert commits == [1, 2, 3, 4]


@pytest.mark.parametrize("gone", [[0], [1, 2], [0, 4], [1, 3]])
def test_records_that_are_missing_are_counted(tmp_path: Path, gone: list[int]) -> None:
    """Any missing records are counted, except for the last ones, which the record ``closed`` would
    show.
    """
    path = written(tmp_path, 6)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for number, line in enumerate(lines) if number not in gone))
    covered = coverage(tmp_path)
    assert (covered.records, covered.missing, covered.bad_lines) == (6 - len(gone), len(gone), 0)


def test_each_writer_of_a_file_has_a_sequence_of_its_own(tmp_path: Path) -> None:
    """An agent and its keeper write into one file, and so do successive coordinators."""
    first, second = (
        Journal(tmp_path, "worker", role=role, node="node0") for role in ("agent", "keeper")
    )
    for step in range(3):
        first.write(Event.COMMIT, step=step)
        second.write(Event.READY)
    first.close("the job ended")
    agent, keeper = coverage(tmp_path).writers
    assert (agent.role, agent.node, agent.records, agent.missing) == ("agent", "node0", 5, 0)
    assert agent.closed is not None
    assert agent.closed["reason"] == "the job ended"
    assert (keeper.role, keeper.node, keeper.records, keeper.closed) == ("keeper", "node0", 4, None)
    assert agent.first_ns < keeper.first_ns < keeper.last_ns < agent.last_ns
    assert agent.opened is not None
    assert agent.opened["pid"] == os.getpid()
    assert abs(agent.opened["unix_ns"] - time.time_ns()) < WAIT_S * 1e9
    second.close()


# -- a disk without room ---------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", "256k") as mounted:
        yield mounted


def lines(disk: SmallDisk) -> list[bytes]:
    """Return the lines of the journal that are not empty."""
    return [line for line in (disk.root / "worker.jsonl").read_bytes().split(b"\n") if line.strip()]


def test_records_without_room_are_written_in_their_order_when_there_is_some(
    disk: SmallDisk,
) -> None:
    """Records wait in memory while the disk is full; then all of them are written, and a record
    counts the late ones.
    """
    with closing(Journal(disk.root, "worker")) as journal:
        journal.write(Event.READY)
        disk.fill()
        for step in range(200):
            journal.write(Event.COMMIT, step=step, filling="x" * 100)
        disk.free()
        wait_until(lambda: read_journals(disk.root)[-1].event == Event.RECORDS_LATE, "the records")
        journal.write(Event.FINISHED)
    records = read_journals(disk.root)
    assert [record.event for record in records] == [
        "ready",
        *["commit"] * 200,
        "records_late",
        "finished",
    ]
    assert [record["step"] for record in records[1:201]] == list(range(200))
    late = records[201]
    assert 0 < late["records"] <= 200  # the first may have found room in the last page
    assert late["full_s"] > 0
    assert len(lines(disk)) == len(records)


def test_a_record_that_was_written_in_part_is_written_whole(disk: SmallDisk) -> None:
    """A full disk may take only the begin of a record: no other record of any process is appended
    to that part.
    """
    with (
        closing(Journal(disk.root, "worker")) as journal,
        closing(Journal(disk.root, "worker")) as other,
    ):
        journal.write(Event.READY, filling="x" * 1000)
        disk.fill(room_bytes=4096)
        journal.write(Event.COMMIT, step=1, filling="y" * 9000)
        other.write(Event.COMMIT, step=2)
        journal.write(Event.COMMIT, step=3)
        disk.free()
        wait_until(lambda: len(read_journals(disk.root)) >= 5, "the records")
        other.write(Event.COMMIT, step=4)
    commits = {
        record["step"]: record
        for record in read_journals(disk.root)
        if record.event == Event.COMMIT
    }
    assert set(commits) == {1, 2, 3, 4}
    assert commits[1]["filling"] == "y" * 9000
    assert len(lines(disk)) == len(read_journals(disk.root)), "every line is a record"


def write_for_ever(journal: Journal) -> NoReturn:
    while True:
        journal.write(Event.COMMIT, step=1)
        time.sleep(0.001)


def test_a_disk_that_stays_full_is_an_error_that_names_it(disk: SmallDisk) -> None:
    """The error comes after a while, or once too much waits in memory; no record is lost
    silently.
    """
    with closing(Journal(disk.root, "slow", late_s=0.2)) as journal:
        disk.fill()
        with pytest.raises(
            JournalFull, match=f"{disk.root}.*No space left on device for 0.2 s.*free room"
        ):
            write_for_ever(journal)
        disk.free()
    with closing(Journal(disk.root, "fast", late_bytes_max=1000)) as journal:
        disk.fill()
        with pytest.raises(JournalFull, match="1000 bytes"):
            write_for_ever(journal)
        disk.free()


LIMITED_FOR_A_WHILE = """
import resource, sys
from pathlib import Path
from chaoskit.journal import Journal
from chaoskit.vocabulary import Event

journal = Journal(Path(sys.argv[1]), "worker")
journal.write(Event.COMMIT, step=0)
size_bytes = (Path(sys.argv[1]) / "worker.jsonl").stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes + 20, resource.RLIM_INFINITY))
try:
    journal.write(Event.COMMIT, step=1)
except OSError as error:
    print(error.strerror)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
journal.write(Event.COMMIT, step=2)
"""


def test_a_record_that_a_limit_cuts_short_is_an_error_and_takes_no_other_with_it(
    tmp_path: Path,
) -> None:
    """The begin of the record is removed before the next one, and its number counts as missing."""
    command = [sys.executable, "-c", LIMITED_FOR_A_WHILE, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("File too large; files may have")
    assert [record["step"] for record in read_journals(tmp_path)] == [0, 2]
    covered = coverage(tmp_path)
    assert (covered.records, covered.bad_lines, covered.missing, covered.repeated) == (2, 0, 1, 0)


def test_other_errors_are_raised_at_once(tmp_path: Path) -> None:
    """A file that may not grow is an error at once, unlike a disk that may have room again."""
    code = (
        "import resource, sys; from pathlib import Path;"
        "from chaoskit.journal import Journal; from chaoskit.vocabulary import Event;"
        "journal = Journal(Path(sys.argv[1]), 'worker'); resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0));"
        "journal.write(Event.READY)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert "File too large" in ended.stderr


def test_a_journal_that_ends_in_a_torn_line_is_continued_on_a_new_one(tmp_path: Path) -> None:
    """The unfinished line of the last writer is lost, but no record of the next one."""
    path = written(tmp_path, 2)
    path.write_bytes(path.read_bytes()[:-30])
    with closing(Journal(tmp_path, "worker")) as journal:
        journal.write(Event.READY)
    assert [record.event for record in read_journals(tmp_path)] == ["commit", "ready"]
    assert coverage(tmp_path).bad_lines == 1
    assert not coverage(tmp_path).torn


def test_closing_waits_for_room(disk: SmallDisk) -> None:
    """A process that ends normally leaves no record behind in memory."""
    journal = Journal(disk.root, "worker")
    disk.fill()
    journal.write(Event.FINISHED)
    with ThreadPoolExecutor() as pool:
        closed = pool.submit(journal.close)
        stays(lambda: not closed.done(), "the record waits for room", for_s=0.2)
        disk.free()
        closed.result(WAIT_S)
    assert [record.event for record in read_journals(disk.root)] == ["finished", "records_late"]
