"""Tests of the store of records: several writers, writers that are killed, and damaged or strange
files.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.runs import run

from chaoskit.errors import BadInput, HarnessError
from chaoskit.fixtures.s3_server import S3Server
from chaoskit.history.record import AcceptedRecord, NightRecord, RunRecord, SeriesRecord, new_id
from chaoskit.history.session import plan_of_run, read
from chaoskit.history.store import RunContents, RunHistory, began, decode, encode, read_file
from chaoskit.vocabulary import Verdict

#: A line of each kind, of each version that was ever written. Each stays readable.
RECORDED = Path(__file__).parents[1] / "recorded" / "history"


def test_records_of_every_version_stay_readable() -> None:
    shared, made, accepted, night = map(
        decode, (RECORDED / "version-1.jsonl").read_bytes().splitlines()
    )
    assert isinstance(shared, SeriesRecord)
    assert shared.plan["faults"] == [{"kind": "Kill", "rank": "any", "at_step": 8}]
    assert made.series == shared.series
    assert isinstance(made, RunRecord)
    assert (made.metrics["recovery"].value, made.verdict, made.seed) == (0.044, Verdict.PASSED, 7)
    assert isinstance(accepted, AcceptedRecord)
    assert (accepted.series, str(accepted.until)) == ("0123456789abcdef", "2026-12-31")
    assert isinstance(night, NightRecord)
    assert (night.exit_code, night.units[0].runs, night.findings[0].phase) == (1, 5, "restored")


def test_what_was_added_is_read_in_order(tmp_path: Path) -> None:
    history = RunHistory(str(tmp_path))
    later, earlier = run(started_unix_ns=2), run(started_unix_ns=1)
    session = new_id()
    for record in (later, earlier):
        history.add(session, [record])
    contents = history.read()
    assert contents.runs == [earlier, later]
    assert contents.set_aside == []
    (name,) = (path.relative_to(tmp_path) for path in tmp_path.glob("*/*"))
    assert str(name) == f"{began(session):%Y-%m}/{session}.jsonl"


def test_names_that_are_made_later_sort_later() -> None:
    made = [new_id() for _ in range(200)]
    assert len(set(made)) == 200
    assert made[0][:13] <= made[-1][:13]
    assert abs(began(made[0]) - datetime.now(UTC)) < timedelta(minutes=1)


WRITER = """
import sys
from support.runs import run
from chaoskit.history.record import new_id
from chaoskit.history.store import RunHistory

history, session = RunHistory(sys.argv[1]), new_id()
for number in range(int(sys.argv[2])):
    history.add(session, [run(seed=number, report="x" * 20_000)])
    print(number, flush=True)
"""


def write(store: Path, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(store), str(count)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
    )


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    writers = [write(tmp_path, 100) for _ in range(2)]
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    contents = RunHistory(str(tmp_path)).read()
    assert len(contents.runs) == 200
    assert contents.set_aside == []


def test_a_killed_writer_leaves_what_it_had_written(tmp_path: Path) -> None:
    """An incomplete line is set aside, and a second writer is not disturbed."""
    with write(tmp_path, 100_000) as writer:
        assert writer.stdout is not None
        written = [writer.stdout.readline() for _ in range(20)]
        os.kill(writer.pid, signal.SIGKILL)
    assert written[-1] == "19\n"
    RunHistory(str(tmp_path)).add(new_id(), [run(title="another")])
    contents = RunHistory(str(tmp_path)).read()
    assert len(contents.runs) >= 21
    assert contents.runs[-1].title == "another" or contents.runs[0].title == "another"
    assert len(contents.set_aside) <= 1


GOOD = encode([run(seed=1)]).decode().strip()
DAMAGED = {
    "a torn line": GOOD[: len(GOOD) // 2],
    "an empty object": "{}",
    "no object": "[1, 2]",
    "a number": "7",
    "no JSON": "not a record",
    "bytes that are no text": "\udcff\udcfe",
    "a kind that there is not": GOOD.replace('"run"', '"dream"', 1),
    "no kind": GOOD.replace('"kind":"run",', ""),
    "no name": GOOD.replace('"run_id"', '"run-id"'),
    "a verdict that there is not": GOOD.replace('"passed"', '"splendid"'),
    "a unit that there is not": GOOD.replace('"unit":"s"', '"unit":"fathom"'),
    "a value that is no number": GOOD.replace('"value":0.05', '"value":"long"'),
    "metrics that are a list": GOOD.replace('"metrics":{', '"metrics":[{').replace(
        '},"covariates"', '}],"covariates"'
    ),
    "a later version": GOOD.replace('"version":1', '"version":2'),
    "a version that is no number": GOOD.replace('"version":1', '"version":"x"'),
    "two records on a line": GOOD + GOOD,
    "a byte order mark": "\ufeff" + GOOD,
    "null": "null",
    "bytes that are no text, in a title": GOOD.replace("test_kill", "\udcff"),
    "too deep": '{"kind":"series","version":1,"series":"x","plan":' + "[" * 100_000,
}


@pytest.mark.parametrize("line", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_line_is_set_aside_and_the_others_are_used(tmp_path: Path, line: str) -> None:
    history = RunHistory(str(tmp_path))
    session = new_id()
    history.add(session, [run(title="before", started_unix_ns=1)])
    (path,) = tmp_path.glob("*/*.jsonl")
    with path.open("ab") as file:
        file.write(line.encode(errors="surrogateescape") + b"\n")
    history.add(session, [run(title="after", started_unix_ns=2)])
    contents = history.read()
    assert [record.title for record in contents.runs] == ["before", "after"]
    (note,) = contents.set_aside
    assert note.startswith(f"{path.relative_to(tmp_path)}, line 2: set aside")
    assert "\n" not in note


FILLS_UP = """
import resource, sys
from support.runs import run
from chaoskit.errors import HarnessError
from chaoskit.history.record import new_id
from chaoskit.history.store import RunHistory

history, session = RunHistory(sys.argv[1]), new_id()
history.add(session, [run(title="before")])
(path,) = __import__("pathlib").Path(sys.argv[1]).glob("*/*.jsonl")
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, resource.RLIM_INFINITY))
__import__("signal").signal(__import__("signal").SIGXFSZ, __import__("signal").SIG_IGN)
try:
    history.add(session, [run(title="cut")])
except HarnessError:
    print("told", flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
history.add(session, [run(title="after")])
"""


def test_a_disk_that_takes_a_part_is_told_of_and_loses_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FILLS_UP, str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=True
    )
    assert done.stdout == "told\n"
    contents = RunHistory(str(tmp_path)).read()
    assert {record.title for record in contents.runs} == {"before", "after"}
    assert contents.set_aside == []


def test_a_record_begins_on_a_line_of_its_own(tmp_path: Path) -> None:
    """This holds behind the incomplete line of a killed writer, too."""
    history, session = RunHistory(str(tmp_path)), new_id()
    history.add(session, [run(title="before")])
    (path,) = tmp_path.glob("*/*.jsonl")
    with path.open("ab") as file:
        file.write(b'{"kind":"run","ver')
    history.add(session, [run(title="after")])
    contents = history.read()
    assert {record.title for record in contents.runs} == {"before", "after"}
    assert len(contents.set_aside) == 1


def test_a_folder_that_cannot_be_listed_is_told_of(tmp_path: Path) -> None:
    """The other folders are used."""
    history = RunHistory(str(tmp_path))
    history.add(new_id(), [run()])
    (tmp_path / "2026-01").symlink_to(tmp_path / "2026-01")  # a loop, which root cannot list either
    contents = history.read()
    assert len(contents.runs) == 1
    assert contents.set_aside == ["2026-01/: set aside: it cannot be listed"]


@pytest.mark.parametrize(
    "name", ["notes.txt", "2026-11/notes.jsonl", "2026-11/x/y.jsonl", "README"]
)
def test_a_strange_file_is_set_aside(tmp_path: Path, name: str) -> None:
    history = RunHistory(str(tmp_path))
    history.add(new_id(), [run()])
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("strange")
    contents = history.read()
    assert len(contents.runs) == 1
    assert [name in line for line in contents.set_aside] == ([] if name.count("/") > 1 else [True])


@pytest.mark.parametrize("text", ["", "{", '{"version": "new"}', '{"version": 9}', "[]"])
def test_a_store_of_another_format_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "format.json").write_text(text)
    with pytest.raises(BadInput, match=r"format"):
        RunHistory(str(tmp_path)).read()


def test_what_is_no_history_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"name a store that has records"):
        read(str(tmp_path / "nowhere"))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(BadInput, match=r"name a file of records"):
        read_file(tmp_path / "empty.jsonl")
    with pytest.raises(BadInput, match=r"url"):
        RunHistory("nonsense://x")


def test_a_store_that_cannot_be_written_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HarnessError, match=r"nothing was added"):
        RunHistory(str(tmp_path / "file" / "below")).add(new_id(), [run()])


def test_a_history_lies_in_an_object_store(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, setting in (
        ("ENDPOINT_URL", s3_server.url),
        ("ACCESS_KEY_ID", "any"),
        ("SECRET_ACCESS_KEY", "any"),
    ):
        monkeypatch.setenv(f"AWS_{name}", setting)
    s3_server.make_bucket("history")
    history = RunHistory("s3://history/runs")
    assert not history.is_there()
    session = new_id()
    for number in range(3):
        history.add(session, [run(seed=number)])
    contents = history.read()
    assert sorted(record.seed for record in contents.runs) == [0, 1, 2]
    assert history.prune(datetime.now(UTC).date() + timedelta(days=1), dry_run=False) != []
    assert history.read().runs == []
    history.close()


def test_old_sessions_are_deleted(tmp_path: Path) -> None:
    history = RunHistory(str(tmp_path))
    history.add(new_id(), [run()])
    today = datetime.now(UTC).date()
    assert history.prune(today, dry_run=False) == []
    tomorrow = today + timedelta(days=1)
    (name,) = history.prune(tomorrow, dry_run=True)
    assert history.read().runs
    assert history.prune(tomorrow, dry_run=False) == [name]
    assert history.read().runs == []


def test_a_run_that_is_there_twice_is_one() -> None:
    contents, record = RunContents(), run()
    contents.take(encode([record]), "a")
    contents.take(encode([record]), "b")
    assert contents.in_order().runs == [record]


def test_a_plan_is_that_of_its_series_with_its_seed(tmp_path: Path) -> None:
    contents = RunContents()
    contents.take((RECORDED / "version-1.jsonl").read_bytes(), "a")
    plan: dict[str, Any] = json.loads(plan_of_run(contents, "01a21db3-d995", tmp_path))
    assert plan["settings"] == {"nodes": 2, "seed": 7}
    contents.runs.append(msgspec.structs.replace(contents.runs[0], run_id="01a21db3-d995-aaaa"))
    for name, reason in (("01a21db3", "several"), ("02", "lists the runs")):
        with pytest.raises(BadInput, match=reason):
            plan_of_run(contents, name, tmp_path)
    contents.plans.clear()
    with pytest.raises(BadInput, match=r"was not kept"):
        plan_of_run(contents, "01a21db3-d995-aaaa", tmp_path)
